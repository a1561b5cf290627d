"""Flush times: the durations of the flushes of one writer, in figures that are cheap to keep.

Invariant: `note` raises nothing. The writer's turn guards it. Others read the figures at any time, and may see a flush
that is counted in part.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["FLUSH_BOUNDS_S", "FlushClock", "FlushTimes"]

logger = logging.getLogger("loglib")

FLUSH_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


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
