"""Source: one log as a copy reads it: whole checked batches as they are stored.

Invariant: a block that is handed out holds whole batches that are checked and follow the batch before, or the bytes of
a declared gap. Two logs are the same up to an end if both have the batch before it: its header's CRC covers that of
the batch before, and so on to the beginning of the log.

Threads: one.
"""

from __future__ import annotations

import os
from itertools import takewhile
from typing import NamedTuple

from ..bundle import Bundle
from ..errors import CorruptLogError
from ..format.batch import HEADER_BYTES as BATCH_HEADER_BYTES
from ..format.batch import BadBatch, NewerBatch, check_body, parse_header
from ..format.watermark import Mark
from ..log import Log
from ..segment import Identity, SegmentHeader, SegmentReader, producers_name, read_segment_header, segment_name
from ..system.files import Files
from ..unique import Unique
from .copied import CopiedLog, End

__all__ = ["Begun", "SourceLog", "own_mark"]

_BLOCK_BYTES = 1 << 20
_SMALL_BATCH_BYTES = _BLOCK_BYTES // 64  # of so small ones a block is checked as columns
_MOST_PRODUCERS_BYTES = 16 << 20


class Begun(NamedTuple):
    """A segment as it begins: the header, and the content of its file of producers, if it has one."""

    header: SegmentHeader
    more_producers: bytes | None


class SourceLog(Unique):
    """A log that is copied."""

    def __init__(self, files: Files, directory: str, identity: Identity) -> None:
        self._files = files
        self.log = Log(files, directory, identity)
        self._segment: SegmentReader | None = None
        self._restored = self.log.restored  # its value when the segment was opened

    def close(self) -> None:
        self.rest()
        self.log.close()

    def rest(self) -> None:
        """Close the files until the next use."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self.log.rest()

    # --- segments --------------------------------------------------------------------------------------

    def begun(self, base: int) -> Begun:
        """The segment with this base offset, as it begins. `OffsetOutOfRangeError` if retention has dropped it."""
        log, more = self.log, None
        path = os.path.join(log.directory, segment_name(base))
        try:
            header = read_segment_header(self._files, path, log.identity)
            if header.more_producers:
                more = self._files.read_whole(os.path.join(log.directory, producers_name(base)), _MOST_PRODUCERS_BYTES)
        except FileNotFoundError as error:
            log.check_not_dropped(base)
            raise CorruptLogError(path, 0, "no file", "the segment of this name, with its producers") from error
        return Begun(header, more)

    def check_joins(self, end: End, header: SegmentHeader) -> None:
        """`CorruptLogError` if the segment does not follow this end. Behind a declared gap nobody knows."""
        if end.crc in (None, header.previous_crc) or any(gap.end == end.end for gap in self.log.gaps()):
            return
        path = os.path.join(self.log.directory, segment_name(header.base_offset))
        found = f"a segment that follows a batch with CRC {header.previous_crc:08x}"
        raise CorruptLogError(path, 72, found, f"{end.crc:08x}")

    def base_of(self, offset: int) -> int:
        """The base offset of the segment that holds the offset, which is below the flushed end."""
        return self._open(offset).base_offset

    def _open(self, offset: int) -> SegmentReader:
        segment, log = self._segment, self.log
        if segment is not None:
            stop = log.index.after(segment.base_offset) or segment.end_of_file()
            if self._restored == log.restored and segment.base_offset <= offset < stop:
                return segment
            self._segment = None
            segment.close()
        self._restored = log.restored
        self._segment = segment = log.open_segment(offset)
        return segment

    def _end(self, segment: SegmentReader, limit: int) -> int:
        """Where the batches of the segment end, if not at `limit`."""
        return min(limit, self.log.index.after(segment.base_offset) or limit, segment.end_of_file())

    # --- bytes -----------------------------------------------------------------------------------------

    def block(self, at: End, limit: int) -> tuple[bytes, End]:
        """The next whole batches of one segment behind `at` and below `limit`, about 1 MiB of them.

        `CorruptLogError` if they are damaged or do not follow the batch before, and
        `OffsetOutOfRangeError` if retention has dropped them.
        """
        try:
            return self._checked(at, limit)
        except CorruptLogError:
            gap = self.log.gap_at(at.end)
            if gap is None:
                raise
            return self._unchecked(at, min(gap.end, limit))

    def _checked(self, at: End, limit: int) -> tuple[bytes, End]:
        segment = self._open(at.end)
        stop = self._end(segment, limit)
        first = segment.header_at(at.end)
        if first.length <= _SMALL_BATCH_BYTES:
            bundle = Bundle.read(segment, at.end, stop, block_bytes=_BLOCK_BYTES)
            if bundle is not None and at.crc in (None, bundle.previous_crc):
                return bundle.stored, End(bundle.next_offset, bundle.last_batch, bundle.last_crc)
        content = segment.read(at.end, max(min(_BLOCK_BYTES, stop - at.end), first.length))
        end = at
        try:
            while len(content) - (place := end.end - at.end) >= BATCH_HEADER_BYTES:
                header = parse_header(content, place, salt=segment.salt, offset=end.end)
                if place and header.length > len(content) - place:
                    break
                if end.crc not in (None, header.previous_crc):
                    found = f"a batch that follows one with CRC {header.previous_crc:08x}"
                    raise BadBatch(60, found, f"{end.crc:08x}, the CRC of the batch before")
                check_body(header, memoryview(content)[place + BATCH_HEADER_BYTES : place + header.length])
                end = End(header.next_offset, header.base_offset, header.header_crc)
        except (BadBatch, NewerBatch) as error:
            if end == at:
                segment.refuse(error, end.end)
        return content[: end.end - at.end], end

    def _unchecked(self, at: End, limit: int) -> tuple[bytes, End]:
        """The bytes of a declared gap, as they are."""
        segment = self._open(at.end)
        content = segment.read(at.end, min(_BLOCK_BYTES, self._end(segment, limit) - at.end))
        return content, End(at.end + len(content), at.last_batch, None)

    # --- common history ----------------------------------------------------------------------------------

    def common_end(self, copied: CopiedLog, mark: Mark) -> End | None:
        """The largest end of the copy up to which this log is the same; None if they have nothing in common.

        `OffsetOutOfRangeError` if retention has dropped what follows the copy's end.
        """
        self.log.refresh()
        if self._has(copied.end, mark):
            return copied.end
        for base in reversed(copied.bases):
            header = copied.header(base)
            end = End(base, header.previous_batch, header.previous_crc)
            if base < mark.log_start_offset:  # whether they are the same there cannot be known any more
                return None
            if self._has(end, mark):
                ends = (End(each.next_offset, each.base_offset, each.header_crc) for each in copied.headers(base))
                return (end, *takewhile(lambda each: self._has(each, mark), ends))[-1]
        return None

    def _has(self, end: End, mark: Mark) -> bool:
        """Whether this log has a batch that ends there, and it is the same batch."""
        if not mark.log_start_offset <= end.end <= mark.flushed_end:
            return False
        if end.end in self.log.index.bases():
            begun = self.begun(end.end).header
            if (begun.previous_batch, begun.previous_crc) == (end.last_batch, end.crc):
                return True
        if end.end == mark.log_start_offset:
            return False
        header = self.log.header_around(end.last_batch, mark)
        if not header.record_count:  # a gap: the batch is lost here
            return True
        return (header.base_offset, header.next_offset, header.header_crc) == (end.last_batch, end.end, end.crc)


def own_mark(mark: Mark) -> Mark:
    """What a copy that ends where this mark of its source ends promises, when all of it is durable."""
    applied = mark.applied_txn
    if mark.held_txn and mark.flushed_end <= mark.held_from:  # the mark ends before that transaction
        applied = min(applied, mark.held_txn - 1)
    own = Mark.at_rest(mark.sequence, mark.log_start_offset, mark.flushed_end, mark.flushed_tail)
    return own._replace(writer_epoch=mark.writer_epoch, writer_nonce=mark.writer_nonce, applied_txn=applied)
