"""Plan: the range that a query reads of each partition, cut into splits and distributed to tasks.

Invariant: the splits of a range are consecutive half-open byte ranges that cover it, and each split is in
one task. A batch belongs to the split that contains its base offset, so each batch is read exactly once,
whatever the cuts. Offsets are places in bytes, so planning is arithmetic and touches no file.

Processes: plain facts; made on the driver, pickled to the executors.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from ..groups import TopicPartition
from ..offload.storage import LOCAL, Storage

# A smaller task costs more (10 ms or more to start) than the work that it takes from another task.
_WORTH_A_TASK = 8 << 20


class Part(NamedTuple):
    """A partition of a query."""

    topic: str
    path: str  # of the topic
    log_id: bytes
    partition: int
    storage: Storage = LOCAL

    @property
    def key(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    def __str__(self) -> str:
        return f"{self.path}, partition {self.partition}"


@dataclass(frozen=True, slots=True)
class Range:
    """The records [start_offset, end_offset) of one partition, and all facts that are needed to find them."""

    part: Part
    start_position: int  # base offset of the batch that holds start_offset
    start_offset: int
    end_offset: int
    flushed_end: int  # when the query was planned
    flushed_tail: int = 0  # base offset of the last batch then
    segments: tuple[int, ...] = ()  # base offsets of the segments, so that a task lists no directory; () if unknown
    made_on: str = ""  # the driver's host, for messages

    @property
    def size_bytes(self) -> int:
        """Bytes of log from the first batch to the end; 0 if there is no record."""
        return self.end_offset - self.start_position if self.start_offset < self.end_offset else 0


@dataclass(frozen=True, slots=True)
class Split:
    """The batches of a range whose base offsets lie in [start_position, end_position)."""

    range: Range  # with the segments of this split, and one more
    start_position: int
    end_position: int

    @property
    def size_bytes(self) -> int:
        return self.end_position - self.start_position


def plan(
    ranges: Iterable[Range], *, max_task_bytes: int, min_tasks: int | None = None, cores: int = 1
) -> list[tuple[Split, ...]]:
    """The splits of each task: at most `max_task_bytes` per task, and about `min_tasks` tasks or more.

    Without `min_tasks` there are as many tasks as `cores`, if each has enough work. Several tasks read a
    large partition; small partitions share a task.
    """
    ranges = list(ranges)
    total = sum(each.size_bytes for each in ranges)
    if min_tasks is None:
        min_tasks = max(1, min(cores, total // _WORTH_A_TASK))
    task_bytes = max(1, min(max_task_bytes, -(-total // min_tasks)))
    return list(_tasks([split for each in ranges for split in cut(each, task_bytes)], task_bytes))


def _tasks(splits: Iterable[Split], task_bytes: int) -> Iterator[tuple[Split, ...]]:
    task: list[Split] = []
    room = task_bytes
    for split in splits:
        if task and split.size_bytes > room:
            yield tuple(task)
            task, room = [], task_bytes
        task.append(split)
        room -= split.size_bytes
    if task:
        yield tuple(task)


def cut(range_: Range, max_split_bytes: int) -> list[Split]:
    """The range in equal parts of at most `max_split_bytes`; an empty list for an empty range."""
    start, size = range_.start_position, range_.size_bytes
    parts = -(-size // max_split_bytes)
    cuts = [start + size * part // parts for part in range(parts + 1)] if parts else []
    return [Split(_with_segments(range_, low, high), low, high) for low, high in pairwise(cuts)]


def _with_segments(range_: Range, low: int, high: int) -> Range:
    """The range with the segments that hold [low, high), and the next one, whose base is their end."""
    first = max(bisect_right(range_.segments, low) - 1, 0)
    return replace(range_, segments=range_.segments[first : bisect_left(range_.segments, high) + 1])
