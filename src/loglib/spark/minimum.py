"""Minimum: whether a stream has enough records for a batch (`minOffsetsPerTrigger`, `maxTriggerDelay`).

Invariant: a record waits for others for `maxTriggerDelay` at most, from the moment when the stream has first seen it.
Each header is read once while records wait, however often Spark asks.

Processes: driver; one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..groups import TopicPartition
from .backlog import LogBacklog

__all__ = ["Minimum"]


class _Count(NamedTuple):
    """[start, end) of a partition has so many records."""

    start: int
    end: int
    records: int


class Minimum:
    """Counts the records that wait."""

    def __init__(self) -> None:
        self._counts: dict[TopicPartition, _Count] = {}
        self._waiting_since: float | None = None

    def is_reached(
        self, backlogs: Mapping[TopicPartition, LogBacklog], least: int, *, max_delay_s: float, now: float
    ) -> bool:
        """Whether there are `least` records, or a record has waited for `max_delay_s`."""
        count = 0
        for key, backlog in backlogs.items():
            count += self._count(key, backlog, least - count)
        if not count:
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = now
        if count < least and now - self._waiting_since < max_delay_s:
            return False
        self._waiting_since = None
        return True

    def _count(self, key: TopicPartition, backlog: LogBacklog, enough: int) -> int:
        """The partition's records, or at least `enough` of them."""
        known = self._counts.get(key)
        if known is None or known.start != backlog.start or known.end > backlog.end:
            known = _Count(backlog.start, backlog.start, 0)
        if known.records < enough and known.end < backlog.end:
            end, more = backlog.skip(known.end, enough - known.records)
            known = _Count(backlog.start, end, known.records + more)
        self._counts[key] = known
        return known.records
