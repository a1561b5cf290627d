"""Several topics: joining and administering a consumer group on one topic or on several.

Invariant: a group's files are in the directory of its first topic.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from ..config.arguments import Start
from ..open_topic import OpenTopic
from . import GroupInfo, Move, TopicPartition, TopicsGroup, administration
from .directory import GroupDirectory
from .group import GroupOptions

__all__ = ["TopicWithGroups", "delete_group", "evict_member", "group", "group_info", "reset_group"]


class TopicWithGroups(OpenTopic):
    """An open topic whose groups can be joined: `Topic`."""

    @abstractmethod
    def _group_directory(self, name: str, topics: Sequence[OpenTopic] = ()) -> GroupDirectory:
        """The directory of the group with this name, on this topic or on several."""


_Topics = TopicWithGroups | Sequence[TopicWithGroups]


def group(topics: Sequence[TopicWithGroups], name: str, **options: Unpack[GroupOptions]) -> TopicsGroup:
    """Join a consumer group on several topics; the options are those of `Topic.group`.

    The group's files are in the directory of the first topic, so all members must give the topics in the
    same order. The group yields (topic name, record), and its partitions are `TopicPartition`s.
    """
    names = [topic.name for topic in topics]
    if not topics or len(set(names)) < len(names):
        raise ValueError(f"a group needs topics of different names, not {names}")
    return TopicsGroup(_directory(topics, name), **options)


def group_info(topics: _Topics, name: str, *, count_records: bool = False) -> GroupInfo:
    """A group's members, owners, commits and lag, without joining it. The keys are `TopicPartition`s.

    For one topic this is the same as `Topic.group_info`.
    """
    info = administration.inspect(_directory(topics, name), count_records=count_records)
    return info.of_topic(topics.name) if isinstance(topics, TopicWithGroups) else info


def reset_group(
    topics: _Topics, name: str, start: Start | Mapping[Any, Start], *, dry_run: bool = False
) -> dict[Any, Move]:
    """`Topic.reset_group` for a group on several topics. Give the topics in the group's order.

    The keys are `TopicPartition`s, or partition numbers if one topic is given.
    """
    directory = _directory(topics, name)
    if isinstance(topics, TopicWithGroups):
        if isinstance(start, Mapping):
            start = {TopicPartition(topics.name, topics.partition(key).id): each for key, each in start.items()}
        moves = administration.reset(directory, start, dry_run=dry_run)
        return {each.partition: move for each, move in moves.items()}
    if isinstance(start, Mapping):
        start = {TopicPartition(*key): each for key, each in start.items()}
    return {**administration.reset(directory, start, dry_run=dry_run)}


def evict_member(topics: _Topics, name: str, member: str) -> list[Any]:
    """`Topic.evict_member` for a group on several topics. Returns the partitions as `TopicPartition`s."""
    evicted = administration.evict(_directory(topics, name), member)
    if isinstance(topics, TopicWithGroups):
        return [each.partition for each in evicted if each.topic == topics.name]
    return [*evicted]


def delete_group(topics: _Topics, name: str) -> None:
    """`Topic.delete_group` for a group on several topics. Give all its topics, in the group's order."""
    administration.delete(_directory(topics, name))


def _directory(topics: _Topics, name: str) -> GroupDirectory:
    """The group's directory, in that of its first topic."""
    if isinstance(topics, TopicWithGroups):
        return topics._group_directory(name)  # noqa: SLF001
    return topics[0]._group_directory(name, topics)  # noqa: SLF001
