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
    topic: Topic, name: str, start: Start | Mapping[int, Start], *, dry_run: bool = False
) -> dict[int, Move]:
    """Move a group's committed offsets to a start, while it has no members; returns where from and to.

    With `dry_run` nothing is committed. Raises `GroupBusyError` if the group has members.
    """
    if isinstance(start, Mapping):
        start_of: Any = {TopicPartition(topic.name, topic.partition(number).id): each for number, each in start.items()}
    else:
        start_of = start
    moves = administration.reset(topic.place(name), start_of, dry_run=dry_run)
    return {each.partition: move for each, move in moves.items()}


def evict_member(topic: Topic, name: str, member: str) -> list[int]:
    """Take the partitions of a member that hangs away from it; returns them. Others claim them at once.

    The member gets `StaleGenerationError` when it next asks for records or commits.
    """
    return [each.partition for each in administration.evict(topic.place(name), member)]
