"""Limits: how much of the backlog one batch of a stream reads.

Invariant: a batch with a limit of N records has exactly N records, or all records that there are. A batch with a limit
in bytes has whole batches of the log: up to the limit, or one batch that is larger. If there is a backlog, a batch is
never empty. Every partition with a backlog gets a part of each batch, or is the first to get one in its turn, so none
waits for ever. The parts are in proportion to the bytes of the backlogs, because these are known without reading.

Processes: pure arithmetic over `Backlog`; driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Backlog", "most_bytes", "most_records", "shares"]


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
