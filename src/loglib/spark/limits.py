"""Limits: how much of the backlog one batch of a stream reads, and whether there is enough for a batch.

Invariant: a batch with a limit of N records has exactly N records, or all records that there are. A batch with a limit
in bytes has whole batches of the log: up to the limit, or one batch that is larger. If there is a backlog, a batch is
never empty. Every partition with a backlog gets a part of each batch, or is the first to get one in its turn, so none
waits for ever. The parts are in proportion to the bytes of the backlogs, because these are known without reading.

With a minimum (`minOffsetsPerTrigger`, `maxTriggerDelay`) a record waits for others for `maxTriggerDelay` at most,
from the moment when the stream has first seen it. Each header is read once while records wait, however often Spark
asks.

Processes: driver; one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ..groups import TopicPartition
from .backlog import LogBacklog

__all__ = ["Backlog", "Minimum", "most_bytes", "most_records", "shares"]


class Backlog(Protocol):
    """The records of one partition that were not read yet, [start, end)."""

    start: int
    end: int

    def skip(self, offset: int, count: int) -> tuple[int, int]:
        """The offset `count` records after `offset`, or the end; and the number of records between."""

    def whole_batches(self, offset: int, limit: int) -> int:
        """The last offset up to `limit` at which a batch of the log ends; `offset` if no batch ends before `limit`."""

    def next_batch(self, offset: int) -> int:
        """The end of the batch that holds `offset`."""


def most_records(backlogs: Sequence[Backlog], count: int, *, turn: int) -> list[int]:
    """Where a batch of at most `count` records ends in each partition."""
    ends = [each.start for each in backlogs]
    while count:
        remaining = [each.end - end for each, end in zip(backlogs, ends, strict=True)]
        if not any(remaining):
            break
        for index, share in enumerate(shares(remaining, count, turn=turn)):
            if share:
                ends[index], found = backlogs[index].skip(ends[index], share)
                count -= found
    return ends


def most_bytes(backlogs: Sequence[Backlog], limit: int, *, turn: int) -> list[int]:
    """Where a batch of at most `limit` bytes ends in each partition. It has at least one batch of the log."""
    ends = [each.start for each in backlogs]
    remaining = [each.end - each.start for each in backlogs]
    if sum(remaining) <= limit:
        return [each.end for each in backlogs]
    first = next(index for index in _in_turn(len(backlogs), turn) if remaining[index])
    ends[first] = backlogs[first].next_batch(ends[first])
    limit -= ends[first] - backlogs[first].start
    remaining = [each.end - end for each, end in zip(backlogs, ends, strict=True)]
    for index, share in enumerate(shares(remaining, max(0, limit), turn=turn)):
        if share:
            ends[index] = backlogs[index].whole_batches(ends[index], ends[index] + share)
    return ends


def shares(weights: Sequence[int], total: int, *, turn: int) -> list[int]:
    """`total` in whole parts, in proportion to the weights. No part is above its weight.

    Each weight above 0 gets at least 1, as far as the total goes. What is left by rounding goes by turns.
    """
    if total >= sum(weights):
        return list(weights)
    order = [index for index in _in_turn(len(weights), turn) if weights[index]]
    parts = [0] * len(weights)
    for index in order[:total]:
        parts[index] = 1
    left, room = total - sum(parts), sum(weights) - sum(parts)
    if left:  # then each part is 1
        for index in order:
            parts[index] += (weights[index] - 1) * left // room
    left = total - sum(parts)
    for index in order:
        if left and parts[index] < weights[index]:
            parts[index] += 1
            left -= 1
    return parts


def _in_turn(count: int, turn: int) -> list[int]:
    return [(turn + each) % count for each in range(count)]


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
