"""Plan: what a query reads of each partition, cut into splits, each for one task.

Invariant: the splits of a range are half-open byte ranges of the log that follow on one another and
fill it. A batch belongs to the split in which its base offset lies, so each is read exactly once,
whatever the cuts. Offsets are places in bytes: planning is arithmetic, and touches no file.

Processes: plain facts; made on the driver, pickled to the executors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Range", "Split", "cut", "plan"]

# Below this a task costs more than the work that it takes off another one (10 ms or more to start).
_WORTH_A_TASK = 8 << 20


@dataclass(frozen=True, slots=True)
class Range:
    """The records [start_offset, end_offset) of one partition, and all that is needed to find them."""

    topic: str
    path: str  # of the topic's directory
    log_id: bytes
    partition: int
    start_position: int  # base offset of the batch that holds start_offset
    start_offset: int
    end_offset: int
    flushed_end: int  # when the query was planned

    @property
    def size_bytes(self) -> int:
        """Bytes of log from the first batch to the end; 0 if there is no record."""
        return self.end_offset - self.start_position if self.start_offset < self.end_offset else 0


@dataclass(frozen=True, slots=True)
class Split:
    """The batches of a range whose base offsets lie in [start_position, end_position)."""

    range: Range
    start_position: int
    end_position: int


def plan(
    ranges: Iterable[Range], *, max_split_bytes: int, min_splits: int | None = None, cores: int = 1
) -> list[Split]:
    """Splits of about one size: at most `max_split_bytes`, and about `min_splits` or more of them.

    Without `min_splits` there are as many as `cores`, if each has enough to do.
    """
    ranges = list(ranges)
    total = sum(each.size_bytes for each in ranges)
    if min_splits is None:
        min_splits = max(1, min(cores, total // _WORTH_A_TASK))
    size = max(1, min(max_split_bytes, -(-total // min_splits)))
    return [split for each in ranges for split in cut(each, size)]


def cut(range_: Range, max_split_bytes: int) -> list[Split]:
    """The range in equal parts of at most `max_split_bytes`; none if it is empty."""
    start, size = range_.start_position, range_.size_bytes
    parts = -(-size // max_split_bytes)
    cuts = [start + size * part // parts for part in range(parts + 1)] if parts else []
    return [Split(range_, low, high) for low, high in pairwise(cuts)]
