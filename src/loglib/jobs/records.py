"""Records: the records of one partition as a member of a share needs them: the next fresh one, or one at an offset.

Invariant: reading is no delivery. A block that was read ahead is only a cache: what may be begun, the state says.

Threads: one at a time; the share's lock is held.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from contextlib import closing

from ..errors import InvalidOffsetError, OffsetOutOfRangeError, ShareReplacedError
from ..format.batch import Batch, stored_header
from ..format.record import Record, new_tuple
from ..log.cursor import Cursor
from ..log.log import Log
from ..system.not_copyable import NotCopyable
from .delays import due_time

_KEPT = 8  # batches that were read for single records
_FAR_BYTES = 1 << 20  # a cursor that is so far before the next record is set to it


class Records(NotCopyable):
    """The reading of one partition."""

    def __init__(self, log: Log, share: str) -> None:
        self.log = log
        self._share = share
        self._cursor: Cursor | None = None
        self._asked = 0  # the last offset that was asked for; it falls only if the share is reset
        # No record between `_asked` and this offset is missing in `_ahead`. An interrupt may leave the cursor after it.
        self._read_to = 0
        self._chain = 0  # of the log at `_read_to`, as `log.history.history_at` has it; 0: not known
        self._ahead: deque[Batch] = deque()  # fresh batches that were read, and not all begun
        self._kept: OrderedDict[int, Batch] = OrderedDict()  # by base offset of what they show
        self.plain: Batch | None = None  # the batch that `fresh` gave last, if it is known to have no delays
        self.plain_offsets = range(0)  # of that batch
        self._due: tuple[range, dict[int, int]] = range(0), {}  # the offsets of a batch, and its `due_times`

    def fresh(self, offset: int) -> Batch | None:
        """The batch with the first record at or after the offset; None if there is none yet. Earlier records count not.

        `OffsetOutOfRangeError` if retention has dropped the record.
        """
        ahead = self._ahead
        if offset < self._asked:
            self.release()
        self._asked = offset
        while ahead and ahead[0].offsets.stop <= offset:
            ahead.popleft()
        if not ahead and not self._read(offset):
            return None
        return ahead[0]

    def note_plain(self, batch: Batch) -> None:
        """The batch, which `fresh` has given, has no delays."""
        self.plain, self.plain_offsets = batch, batch.offsets

    def none_before(self, offset: int) -> tuple[int, int]:
        """The offset, or a later one: as was read, there is no record between the two. And the chain there, or 0."""
        if self._ahead or offset < self._asked or offset >= self._read_to:
            return offset, 0
        return self._read_to, self._chain

    def none_before_in_batch(self, offset: int) -> tuple[int, int]:
        """The offset, or the end of its batch if that has no later record. And the chain there; 0 if it is not known.

        It is known in the batch that `fresh` gave last.
        """
        header = stored_header(self._ahead[0]) if self._ahead else None
        if header is None or not header.base_offset < offset < header.next_offset:
            return offset, 0
        return header.next_offset if offset == header.offsets.stop else offset, header.header_crc

    def _read(self, offset: int) -> bool:
        """Read the next block; False if there is none."""
        log, end = self.log, self.log.mark().flushed_end
        if offset > end:
            raise ShareReplacedError(self._share, log.partition, offset, f"the log ends at offset {end}")
        if offset == end and self._cursor is None:
            return False
        while True:
            cursor = self._cursor
            if cursor is None or cursor.position != self._read_to or offset > cursor.position + _FAR_BYTES:
                cursor = self._cursor = self._seek(offset)
            try:
                batches = cursor.read(end)
            except OffsetOutOfRangeError:  # of records that others have begun; if this one is gone, too, seeking raises
                self.release()
                continue
            self._ahead.extend(each for each in batches if each.offsets.stop > offset)
            if batches or cursor.position != self._read_to:
                self._chain = 0  # first: an interrupt may come between any two lines
                self._read_to = cursor.position
                self._chain = _chain_at(cursor.position, batches[-1]) if batches else 0
            if self._ahead or not batches:
                return bool(self._ahead)

    def _seek(self, offset: int) -> Cursor:
        self.release()
        try:
            return Cursor.at(self.log, offset)
        except InvalidOffsetError as error:  # after the last record of a batch
            return Cursor.at(self.log, error.next_offset)

    def around(self, offset: int) -> Batch:
        """The batch with the record at the offset. `OffsetOutOfRangeError` if the log no longer has it."""
        ahead = self._ahead
        if ahead and offset in ahead[0].offsets:
            return ahead[0]
        for batch in self._kept.values():
            if offset in batch.offsets:
                return batch
        with closing(Cursor.at(self.log, offset)) as cursor:
            batches = cursor.read(self.log.mark().flushed_end)
        if not batches or offset not in batches[0].offsets:
            mark = self.log.mark()
            raise OffsetOutOfRangeError(self.log.partition, offset, mark.log_start_offset, mark.flushed_end)
        self._kept[offset] = batches[0]
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return batches[0]

    def key_at(self, offset: int) -> bytes | None:
        """The key of a record. `OffsetOutOfRangeError` if the log no longer has it."""
        batch = self.around(offset)
        return batch.keys[offset - batch.offsets.start]

    def due_times(self, batch: Batch) -> Mapping[int, int]:
        """The records of a batch that are not to be handled before a time: microseconds UTC, by offset."""
        offsets, found = self._due
        if offsets != batch.offsets:
            with_headers = [each for each in zip(batch.offsets, batch.headers, strict=True) if each[1]]
            found = {offset: due for offset, headers in with_headers if (due := due_time(headers)) is not None}
            self._due = batch.offsets, found
        return found

    def log_start(self) -> int:
        """The first offset that the log still has."""
        return self.log.mark().log_start_offset

    def release(self) -> None:
        """Drop what was read ahead, and close the files; reading opens them again."""
        self._read_to = 0  # first: an interrupt may come between any two lines
        self.plain = None
        self._ahead.clear()
        self._kept.clear()
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None
        self.log.release_files()


def _chain_at(end: int, batch: Batch) -> int:
    """The chain at the end of the batch; 0 if the offset is after it, or the batch has no records: a gap is there."""
    header = stored_header(batch)
    return header.header_crc if header.record_count and header.next_offset == end else 0


def record_of(batch: Batch, offset: int) -> Record:
    """One record of a batch, whose columns are decoded once for all of them."""
    values = batch.values
    number = offset - batch.offsets.start
    next_offset = offset + 1 if number + 1 < len(values) else batch.next_offset
    return new_tuple(
        Record,
        (
            batch.partition, offset, batch.timestamps[number], batch.keys[number], values[number],
            batch.headers[number], next_offset,
        ),
    )  # fmt: skip
