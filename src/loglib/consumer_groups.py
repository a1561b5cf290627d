"""Consumer groups: joining one on several topics, and what is done to a group from outside, by topic.

Invariant: a group's files are in the directory of its first topic, wherever its members read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .arguments import Start
from .groups import Move, TopicPartition, TopicsGroup, administration
from .topic import Topic

__all__ = ["evict_member", "group", "reset_group"]


def group(topics: Sequence[Topic], name: str, **options: Any) -> TopicsGroup:
    """Join a consumer group on several topics; options as for `Topic.group`.

    The group's files are in the directory of the first topic: all members must give the topics in
    one order. Records come as (topic name, record), and partitions are `TopicPartition`s.
    """
    names = [topic.name for topic in topics]
    if not topics or len(set(names)) < len(names):
        raise ValueError(f"a group needs topics of different names, not {names}")
    joined = TopicsGroup(topics[0].place(name, topics), **options)
    for topic in topics:
        topic.track(joined)
    return joined


def reset_group(
    topic: Topic | Sequence[Topic], name: str, start: Start | Mapping[Any, Start], *, dry_run: bool = False
) -> dict[Any, Move]:
    """Move a group's committed offsets to a start, while it has no members; returns where from and to.

    Of a group on several topics, give these in the group's order, and partitions as `TopicPartition`s; the
    first alone stands for its own partitions. With `dry_run` nothing is committed. Raises `GroupBusyError`
    if the group has members, and `GroupElsewhereError` if it is kept with another topic.
    """
    topics, several = _given(topic)
    if isinstance(start, Mapping):
        of_one = topics[0]
        start_of: Any = {
            TopicPartition(*key) if several else TopicPartition(of_one.name, of_one.partition(key).id): each
            for key, each in start.items()
        }
    else:
        start_of = start
    moves = administration.reset(topics[0].place(name, topics), start_of, dry_run=dry_run)
    return {each if several else each.partition: move for each, move in moves.items()}


def evict_member(topic: Topic | Sequence[Topic], name: str, member: str) -> list[Any]:
    """Take the partitions of a member that hangs away from it, of all topics. Others claim them at once.

    Returns the partitions: of one topic their numbers, of several given all, as `TopicPartition`s. The
    member gets `StaleGenerationError` when it next asks for records or commits.
    """
    topics, several = _given(topic)
    taken = administration.evict(topics[0].place(name, topics), member)
    return [*taken] if several else [each.partition for each in taken if each.topic == topics[0].name]


def _given(topic: Topic | Sequence[Topic]) -> tuple[Sequence[Topic], bool]:
    return ([topic], False) if isinstance(topic, Topic) else (topic, True)
