"""Several topics: consumer groups on more than one. For one topic use the methods of `Topic`.

Invariant: a group's files are in the directory of its first topic.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..config.arguments import Start
from ..open_topic import OpenTopic
from . import GroupInfo, Move, TopicPartition, TopicsGroup, administration
from .directory import GroupDirectory
from .group import CommitPolicy, OnChange

__all__ = ["TopicWithGroups", "delete_group", "evict_member", "group", "group_info", "reset_group"]


class TopicWithGroups(OpenTopic):
    """An open topic whose groups can be joined: `Topic`."""

    @abstractmethod
    def group_info(self, name: str, *, count_records: bool = False) -> GroupInfo: ...

    @abstractmethod
    def reset_group(
        self, name: str, start: Start | Mapping[int, Start], *, dry_run: bool = False
    ) -> dict[int, Move]: ...

    @abstractmethod
    def evict_member(self, name: str, member: str) -> list[int]: ...

    @abstractmethod
    def delete_group(self, name: str) -> None: ...

    @abstractmethod
    def _place(self, name: str, topics: Sequence[OpenTopic] = ()) -> GroupDirectory:
        """The place of the files of a group with this name, on this topic or on several."""


def group(
    topics: Sequence[TopicWithGroups],
    name: str,
    *,
    start: Start = "begin",
    member: str | None = None,
    commit: CommitPolicy = "after",
    strategy: Literal["range", "sticky"] = "range",
    on_assign: OnChange | None = None,
    on_revoke: OnChange | None = None,
    on_out_of_range: Literal["raise", "start"] = "raise",
) -> TopicsGroup:
    """Join a consumer group on several topics; the options are those of `Topic.group`.

    The group's files are in the directory of the first topic, so all members must give the topics in the
    same order. The group yields (topic name, record), and its partitions are `TopicPartition`s.
    """
    names = [topic.name for topic in topics]
    if not topics or len(set(names)) < len(names):
        raise ValueError(f"a group needs topics of different names, not {names}")
    return TopicsGroup(
        _place(topics, name), start=start, member=member, commit=commit, strategy=strategy,
        on_assign=on_assign, on_revoke=on_revoke, on_out_of_range=on_out_of_range,
    )  # fmt: skip


def group_info(
    topics: TopicWithGroups | Sequence[TopicWithGroups], name: str, *, count_records: bool = False
) -> GroupInfo:
    """A group's members, owners, commits and lag, without joining it. The keys are `TopicPartition`s.

    For one topic this is the same as `Topic.group_info`.
    """
    if isinstance(topics, TopicWithGroups):
        return topics.group_info(name, count_records=count_records)
    return administration.inspect(_place(topics, name), count_records=count_records)


def reset_group(
    topics: TopicWithGroups | Sequence[TopicWithGroups],
    name: str,
    start: Start | Mapping[Any, Start],
    *,
    dry_run: bool = False,
) -> dict[Any, Move]:
    """`Topic.reset_group` for a group on several topics. Give the topics in the group's order.

    The keys are `TopicPartition`s, or partition numbers if one topic is given.
    """
    if isinstance(topics, TopicWithGroups):
        return topics.reset_group(name, start, dry_run=dry_run)
    if isinstance(start, Mapping):
        start = {TopicPartition(*key): each for key, each in start.items()}
    return {**administration.reset(_place(topics, name), start, dry_run=dry_run)}


def evict_member(topics: TopicWithGroups | Sequence[TopicWithGroups], name: str, member: str) -> list[Any]:
    """`Topic.evict_member` for a group on several topics. Returns the partitions as `TopicPartition`s."""
    if isinstance(topics, TopicWithGroups):
        return topics.evict_member(name, member)
    return [*administration.evict(_place(topics, name), member)]


def delete_group(topics: TopicWithGroups | Sequence[TopicWithGroups], name: str) -> None:
    """`Topic.delete_group` for a group on several topics. Give all its topics, in the group's order."""
    if isinstance(topics, TopicWithGroups):
        topics.delete_group(name)
    else:
        administration.delete(_place(topics, name))


def _place(topics: Sequence[TopicWithGroups], name: str) -> GroupDirectory:
    """The group's place: in the directory of its first topic."""
    return topics[0]._place(name, topics)  # noqa: SLF001
