"""Limits: how much of the backlog one batch of a stream reads, and whether there is enough for a batch.

Invariant: a batch with a limit of N records has exactly N records, or all records that there are. A batch with a limit
in bytes has whole batches of the log: up to the limit, or one batch that is larger. What is left of the limit is less
than the next batch of any partition. If there is a backlog, a batch is never empty. Every partition with a backlog gets
a part of each batch, or is the first to get one in its turn, so none waits for ever. The parts are in proportion to the
bytes of the backlogs, because these are known without reading.

Every offset that this module returns is a record's offset or the end of a batch. After the last record of a batch it
is the end of the batch, so a stream that has read everything is at the log's end. Records are counted by headers, and
only those of the counted batches are read.

With a minimum (`minOffsetsPerTrigger`, `maxTriggerDelay`) a record waits for others for `maxTriggerDelay` at most,
from the moment when the stream first sees it. Each header is read once while records wait, however often Spark
asks.

Processes: driver; one thread. It reads files and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import CorruptLogError
from ..format.watermark import Mark
from ..groups import TopicPartition
from ..log.log import Log
from .plan import Part


@dataclass
class Backlog:
    """The records [start, end) of one partition that a stream has not read yet.

    With `skip_damage` a damaged header has no records, and a batch whose body is damaged counts with the records that
    its header states. The methods raise `OffsetOutOfRangeError` if retention drops the records meanwhile.
    """

    part: Part
    log: Log
    mark: Mark
    start: int
    end: int
    skip_damage: bool

    def skip(self, offset: int, count: int) -> tuple[int, int]:
        """The offset `count` records after `offset`, or the end; and the number of records between."""
        found = 0
        for records, next_offset in self._runs(offset):
            first, stop = max(offset, records.start), min(records.stop, self.end)
            taken = min(max(stop - first, 0), count - found)
            found += taken
            offset = first + taken if first + taken < records.stop else min(next_offset, self.end)
            if found == count or offset >= self.end:
                break
        return offset, found

    def whole_batches(self, offset: int, limit: int) -> int:
        """The last end of a batch of the log up to `limit`; `offset` if no batch ends between them."""
        if limit >= self.end:
            return self.end
        try:
            return max(offset, self.log.header_around(limit, self.mark).base_offset)
        except CorruptLogError:
            if not self.skip_damage:
                raise
            return offset

    def next_batch(self, offset: int) -> int:
        """The end of the batch that holds `offset`."""
        try:
            return min(self.end, self.log.header_around(offset, self.mark).next_offset)
        except CorruptLogError:
            if not self.skip_damage:
                raise
            return min(self.end, self.log.after_damage(offset, self.mark.flushed_end))

    def _runs(self, offset: int) -> Iterator[tuple[range, int]]:
        """The records of each batch, and the base offset of the next one, from the batch that holds `offset` on.

        Skipped damage is a run without records.
        """
        log, mark = self.log, self.mark
        position = log.batch_base(offset, mark, past_damage=self.skip_damage)
        while position < self.end:
            try:
                for header in log.headers(position, self.end, mark):
                    yield header.offsets, header.next_offset
                    position = header.next_offset
            except CorruptLogError:
                if not self.skip_damage:
                    raise
                after = log.after_damage(position, mark.flushed_end)
                yield range(position, position), after
                position = after


def most_records(backlogs: Sequence[Backlog], count: int, *, turn: int) -> list[int]:
    """The end of a batch of at most `count` records in each partition."""
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
    """The end of a batch of at most `limit` bytes in each partition. It has at least one batch of the log.

    Parts are whole batches of the log, so they are smaller than their shares. The rest is given out by turns.
    """
    ends = [each.start for each in backlogs]
    remaining = [each.end - each.start for each in backlogs]
    if sum(remaining) <= limit:
        return [each.end for each in backlogs]
    first = next(index for index in _in_turn(len(backlogs), turn) if remaining[index])
    ends[first] = backlogs[first].next_batch(ends[first])
    limit -= ends[first] - backlogs[first].start
    remaining = [each.end - end for each, end in zip(backlogs, ends, strict=True)]
    left = limit
    for index, share in enumerate(shares(remaining, max(0, limit), turn=turn)):
        if share:
            before, ends[index] = ends[index], backlogs[index].whole_batches(ends[index], ends[index] + share)
            left -= ends[index] - before
    waiting = [index for index in _in_turn(len(backlogs), turn + 1) if ends[index] < backlogs[index].end]
    while waiting and left > 0:
        following = {index: backlogs[index].next_batch(ends[index]) for index in waiting}
        waiting = []
        for index, end in following.items():
            if end - ends[index] <= left:
                left -= end - ends[index]
                ends[index] = end
                if end < backlogs[index].end:
                    waiting.append(index)
    return ends


def shares(weights: Sequence[int], total: int, *, turn: int) -> list[int]:
    """`total` in whole parts, in proportion to the weights. No part is above its weight.

    Each weight above 0 gets at least 1, until the total is used up. The rest from rounding is given out by turns.
    """
    if total >= sum(weights):
        return list(weights)
    order = [index for index in _in_turn(len(weights), turn) if weights[index]]
    parts = [0] * len(weights)
    for index in order[:total]:
        parts[index] = 1
    left, room = total - sum(parts), sum(weights) - sum(parts)
    if left:  # then each weight above 0 has its 1
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
    """The number of records in [start, end) of a partition."""

    start: int
    end: int
    records: int


class Minimum:
    """Counts the records that wait."""

    def __init__(self) -> None:
        self._counts: dict[TopicPartition, _Count] = {}
        self._waiting_since: float | None = None

    def is_reached(
        self, backlogs: Mapping[TopicPartition, Backlog], least: int, *, max_delay_s: float, now: float
    ) -> bool:
        """True if there are `least` records, or a record has waited for `max_delay_s`."""
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

    def _count(self, key: TopicPartition, backlog: Backlog, enough: int) -> int:
        """The number of the partition's records; counting may stop at `enough`."""
        known = self._counts.get(key)
        if known is None or known.start != backlog.start or known.end > backlog.end:
            known = _Count(backlog.start, backlog.start, 0)
        if known.records < enough and known.end < backlog.end:
            end, more = backlog.skip(known.end, enough - known.records)
            known = _Count(backlog.start, end, known.records + more)
        self._counts[key] = known
        return known.records
