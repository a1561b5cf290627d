"""Flushes: when one is due by the numbers of the flush policy, what a batch may take before, and how long they took.

Invariant: a limit counts the records and the bytes of log since the last flush, or since a flush was last asked for.
`FlushClock.note` raises nothing.

Threads: the limits under the writer's lock, except `flushed_records`. The thread with the writer's turn assigns it and
notes durations. Others read the durations at any time, and may see a flush that is counted in part.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..config.policies import TopicConfig
from ..log.recovery import Tail
from .open_batch import OpenBatch
from .tail import TailWriter

logger = logging.getLogger("loglib")

FLUSH_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# A writer may have this many times the policy's limit unflushed before its appending threads flush themselves.
# This is back-pressure, and it limits what a crash can lose.
_LAG_ALLOWED = 4


class FlushLimits:
    """The limits of one writer."""

    def __init__(self, config: TopicConfig, disk: TailWriter) -> None:
        self._disk = disk
        self.flushed_records = 0  # of this writer
        self._asked = (0, 0)  # records and end of the log when a flush was last asked for
        self.use(config)

    def use(self, config: TopicConfig) -> None:
        """Use these policies from now on."""
        self._policy = config.flush
        self._batch_records, self._batch_bytes = config.batch_records, config.batch_bytes
        records, size_bytes = config.flush.records, config.flush.bytes
        # What `room` returns if all before the batch is flushed.
        self.full_room = min(config.batch_records, records or config.batch_records), min(
            config.batch_bytes, size_bytes or config.batch_bytes
        )

    def room(self, tail: Tail) -> tuple[int, int]:
        """The number of records and bytes that the batch after `tail` takes until it is full or a flush is due."""
        policy, records, size = self._policy, self._batch_records, self._batch_bytes
        if policy.records is not None or policy.bytes is not None:
            unflushed_records, unflushed_bytes = self._unflushed(tail)
            if policy.records is not None:
                records = min(records, policy.records - unflushed_records)
            if policy.bytes is not None:
                size = min(size, policy.bytes - unflushed_bytes)
        return max(records, 1), max(size, 0)

    def is_reached(self, batch: OpenBatch) -> bool:
        """True if a flush is due, with the records of the open batch."""
        policy = self._policy
        records, size = self._unflushed(batch.tail)
        if policy.records is not None and records + len(batch.values) >= policy.records:
            return True
        return policy.bytes is not None and size + batch.buffered_bytes() >= policy.bytes

    def note_asked(self, tail: Tail) -> None:
        """Count from `tail` on: a flush of all before it is asked for."""
        self._asked = (tail.records, tail.end)

    def is_lagging(self, tail: Tail) -> bool:
        """True if the background lags: then the appending thread must flush."""
        policy = self._policy
        records, size = tail.records - self.flushed_records, tail.end - self._disk.mark.flushed_end
        return (policy.records is not None and records > _LAG_ALLOWED * policy.records) or (
            policy.bytes is not None and size > _LAG_ALLOWED * policy.bytes
        )

    def _unflushed(self, tail: Tail) -> tuple[int, int]:
        """The number of records and bytes that are written, not flushed, and for which no flush was asked."""
        asked_records, asked_end = self._asked
        flushed_end = self._disk.mark.flushed_end
        return tail.records - max(self.flushed_records, asked_records), tail.end - max(flushed_end, asked_end)


class FlushTimes(NamedTuple):
    """The durations of flushes: each is a sync and a write of the watermark."""

    flushes: int = 0
    seconds: float = 0.0  # sum of all flushes
    longest: float = 0.0  # seconds
    counts: tuple[int, ...] = (0,) * (len(FLUSH_BOUNDS_S) + 1)  # between the bounds of `FLUSH_BOUNDS_S`


class FlushClock:
    """The flush times of one writer."""

    def __init__(self) -> None:
        self.observers: Sequence[Callable[[float], object]] = ()  # called with the seconds of each flush
        self._seconds = self._longest = 0.0
        self._counts = [0] * (len(FLUSH_BOUNDS_S) + 1)

    def note(self, seconds: float) -> None:
        self._seconds += seconds
        self._longest = max(self._longest, seconds)
        self._counts[bisect_left(FLUSH_BOUNDS_S, seconds)] += 1
        for observer in self.observers:
            try:
                observer(seconds)
            except Exception:  # an exporter must not stop the log
                logger.warning("a function that observes flushes failed", exc_info=True)

    def times(self) -> FlushTimes:
        return FlushTimes(sum(self._counts), self._seconds, self._longest, tuple(self._counts))
