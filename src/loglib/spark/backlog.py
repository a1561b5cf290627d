"""Backlog: the records of one partition that a stream has not read yet, counted and cut by the headers of batches.

Invariant: every offset that this module returns is a record's offset or the end of a batch. After the last record of a
batch it is the end of the batch, so a stream that has read everything stands at the log's end. Counting reads only
headers, and only those of the batches that are counted. With `skip_damage` a damaged header has no records, and a
batch whose body is damaged counts with the records that its header states.

Processes: driver; reads files and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import CorruptLogError
from ..format.watermark import Mark
from ..log.log import Log

__all__ = ["LogBacklog"]


class LogBacklog:
    """The records [start, end) of a log. `OffsetOutOfRangeError` if retention drops them meanwhile."""

    def __init__(self, log: Log, mark: Mark, start: int, end: int, *, skip_damage: bool = False) -> None:
        self._log = log
        self._mark = mark
        self._skip_damage = skip_damage
        self.start = start
        self.end = end

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
        """The last offset up to `limit` at which a batch of the log ends; `offset` if no batch ends before `limit`."""
        if limit >= self.end:
            return self.end
        try:
            return max(offset, self._log.header_around(limit, self._mark).base_offset)
        except CorruptLogError:
            if not self._skip_damage:
                raise
            return offset

    def next_batch(self, offset: int) -> int:
        """The end of the batch that holds `offset`."""
        try:
            return min(self.end, self._log.header_around(offset, self._mark).next_offset)
        except CorruptLogError:
            if not self._skip_damage:
                raise
            return min(self.end, self._log.after_damage(offset, self._mark.flushed_end))

    def _runs(self, offset: int) -> Iterator[tuple[range, int]]:
        """The records of each batch, and where the next one begins, from the batch that holds `offset` on.

        A damaged header that is skipped counts as a run without records.
        """
        log, mark = self._log, self._mark
        position = log.batch_base(offset, mark, past_damage=self._skip_damage)
        while position < self.end:
            try:
                for header in log.headers(position, self.end, mark):
                    yield header.offsets, header.next_offset
                    position = header.next_offset
            except CorruptLogError:
                if not self._skip_damage:
                    raise
                after = log.after_damage(position, mark.flushed_end)
                yield range(position, position), after
                position = after
