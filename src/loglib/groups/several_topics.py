"""Several topics: those of a directory, and consumer groups on more than one. `Topic` has the groups of one topic.

Invariant: a group's files are in the directory of its first topic.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from ..config.arguments import Start, check_options
from ..config.uri import is_remote
from ..log import catalog
from ..system.files import REAL
from . import GroupInfo, OffsetMove, TopicPartition, TopicsGroup, administration
from .directory import GroupDirectory, group_names
from .group import OPTIONS, GroupOptions
from .grouped_topic import GroupedTopic


def topics(directory: str | os.PathLike[str]) -> list[catalog.TopicInfo]:
    """The topics in a directory, sorted by name. The list is empty if there are none.

    A damaged topic is listed with its error. Raises `FileNotFoundError` if there is no such directory, and
    `NotADirectoryError` if it is a file. `ValueError` for a URI: what is in an object store is not listed.
    """
    if is_remote(os.fsdecode(directory)):
        raise ValueError("topics are listed in directories, and this is a URI; open each topic by a URI of its own")
    return catalog.describe_all(REAL, directory, groups_of=group_names)


def group(topics: Sequence[GroupedTopic], name: str, **options: Unpack[GroupOptions]) -> TopicsGroup:
    """Join a consumer group on several topics; the options are those of `Topic.group`.

    The group's files are in the directory of the first topic, so all members must give the topics in the
    same order. The group yields (topic name, record), and its partitions are `TopicPartition`s.
    """
    check_options(group, options, OPTIONS)
    names = [topic.name for topic in topics]
    if not topics or len(set(names)) < len(names):
        raise ValueError(f"a group needs topics of different names, not {names}")
    return TopicsGroup(_directory(topics, name), **options)


def group_info(
    topics: GroupedTopic | Sequence[GroupedTopic], name: str, *, count_records: bool = False
) -> GroupInfo:
    """A group's members, owners, commits and lag, without joining it. The keys are `TopicPartition`s.

    For one topic this is the same as `Topic.group_info`.
    """
    if isinstance(topics, GroupedTopic):
        return topics.group_info(name, count_records=count_records)
    return administration.inspect(_directory(topics, name), count_records=count_records)


def reset_group(
    topics: GroupedTopic | Sequence[GroupedTopic],
    name: str,
    start: Start | Mapping[Any, Start],
    *,
    dry_run: bool = False,
) -> dict[Any, OffsetMove]:
    """`Topic.reset_group` for a group on several topics. Give the topics in the group's order.

    The keys are `TopicPartition`s, or partition numbers if one topic is given.
    """
    if isinstance(topics, GroupedTopic):
        return topics.reset_group(name, start, dry_run=dry_run)
    if isinstance(start, Mapping):
        start = {TopicPartition(*key): each for key, each in start.items()}
    return {**administration.reset(_directory(topics, name), start, dry_run=dry_run)}


def evict_member(topics: GroupedTopic | Sequence[GroupedTopic], name: str, member: str) -> list[Any]:
    """`Topic.evict_member` for a group on several topics. Returns the partitions as `TopicPartition`s."""
    if isinstance(topics, GroupedTopic):
        return topics.evict_member(name, member)
    return [*administration.evict(_directory(topics, name), member)]


def delete_group(topics: GroupedTopic | Sequence[GroupedTopic], name: str) -> None:
    """`Topic.delete_group` for a group on several topics. Give all its topics, in the group's order."""
    if isinstance(topics, GroupedTopic):
        topics.delete_group(name)
    else:
        administration.delete(_directory(topics, name))


def _directory(topics: Sequence[GroupedTopic], name: str) -> GroupDirectory:
    """The group's directory, in that of its first topic."""
    return topics[0]._group_directory(name, topics)  # noqa: SLF001
