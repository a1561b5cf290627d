"""Log source: a log in a directory of this host, read by a copier: whole stored batches, checked.

Invariant: see sources.py. Nothing is written, and no lock is taken.

Threads: one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile

from ..config.policies import MAX_OFFSET
from ..errors import CorruptLogError, OffsetOutOfRangeError
from ..format.chain import End, follow
from ..format.header import BadBatch, NewerBatch
from ..format.watermark import Mark
from ..log.ages import NAME as CLOCK
from ..log.bundle_reader import Bundle
from ..log.log import Log
from ..segment import Identity, SegmentHeader, SegmentReader, producers_name, read_segment_header, segment_name
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .sources import Block, SegmentStart

__all__ = ["BLOCK_BYTES", "MOST_BESIDE_BYTES", "SMALL_BATCH_BYTES", "SourceLog", "own_mark", "whole_batches"]

BLOCK_BYTES = 1 << 20
SMALL_BATCH_BYTES = BLOCK_BYTES // 64  # a block of batches up to this size is checked as columns
MOST_BESIDE_BYTES = 16 << 20  # of a small file beside the segments


class SourceLog(NotCopyable):
    """A log in a directory; see `LogSource`."""

    credit_bytes = 1 << 62  # nobody waits for an acknowledgement

    def __init__(self, files: Files, directory: str, identity: Identity) -> None:
        self._files = files
        self.place = directory
        self.log = Log(files, directory, identity)
        self._segment: SegmentReader | None = None
        self._restored = self.log.restored  # its value when the segment was opened

    def close(self) -> None:
        self.release_files()
        self.log.close()

    def release_files(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self.log.release_files()

    @property
    def published_end(self) -> int:
        return self.log.found().flushed_end

    def acknowledge(self, end: int) -> None:
        """Do nothing: a directory keeps nothing about its copies."""

    def beside(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return self._files.read_whole(os.path.join(self.place, name), MOST_BESIDE_BYTES)
        return None

    # --- segments --------------------------------------------------------------------------------------

    def first(self) -> SegmentStart:
        while True:
            with suppress(OffsetOutOfRangeError):  # retention has dropped it meanwhile
                return self.begun(self.log.published().log_start_offset)

    def begun(self, base: int) -> SegmentStart:
        log, more = self.log, None
        path = os.path.join(log.directory, segment_name(base))
        try:
            header = read_segment_header(self._files, path, log.identity)
            if header.more_producers:
                more = self._files.read_whole(os.path.join(log.directory, producers_name(base)), MOST_BESIDE_BYTES)
        except FileNotFoundError as error:
            log.check_not_dropped(base)
            raise CorruptLogError(path, 0, "no file", "the segment of this name, with its producers") from error
        return SegmentStart(header, more, self.beside(CLOCK))

    def _check_joins(self, end: End, header: SegmentHeader) -> None:
        """`CorruptLogError` if the segment does not follow this end. After a declared gap that is not known."""
        if end.crc in (None, header.previous_crc) or any(gap.end == end.end for gap in self.log.gaps()):
            return
        path = os.path.join(self.log.directory, segment_name(header.base_offset))
        found = f"a segment that follows a batch with CRC {header.previous_crc:08x}"
        raise CorruptLogError(path, 72, found, f"{end.crc:08x}")

    def begins(self, end: int) -> bool:
        return self._files.exists(os.path.join(self.log.directory, segment_name(end)))

    def _open(self, offset: int) -> SegmentReader:
        segment, log = self._segment, self.log
        if segment is not None:
            # The next base that is known may be a later one, if retention has dropped the segments between.
            stop = min(log.index.after(segment.base_offset) or MAX_OFFSET, segment.end_of_file())
            if self._restored == log.restored and segment.base_offset <= offset < stop:
                return segment
            self._segment = None
            segment.close()
        self._restored = log.restored
        self._segment = segment = log.open_segment(offset)
        return segment

    def _end(self, segment: SegmentReader, limit: int) -> int:
        """The end of the segment's batches, at most `limit`."""
        return min(limit, self.log.index.after(segment.base_offset) or limit, segment.end_of_file())

    # --- bytes -----------------------------------------------------------------------------------------

    def piece(self, at: End, base: int, limit: int) -> SegmentStart | Block:
        segment = self._open(at.end)
        if segment.base_offset == at.end != base:
            begun = self.begun(at.end)
            self._check_joins(at, begun.header)
            return begun
        if segment.base_offset != base:
            raise CorruptLogError(
                segment.path, 0, f"a segment from offset {segment.base_offset}", f"one from {base}, as the copy has it"
            )
        try:
            return self._checked(at, limit)
        except CorruptLogError:
            gap = self.log.gap_at(at.end)
            if gap is None:
                raise
            return self._unchecked(at, min(gap.end, limit))

    def _checked(self, at: End, limit: int) -> Block:
        segment = self._open(at.end)
        stop = self._end(segment, limit)
        first = segment.header_at(at.end)
        if first.length <= SMALL_BATCH_BYTES:
            bundle = Bundle.read(segment, at.end, stop, block_bytes=BLOCK_BYTES)
            if bundle is not None and at.crc in (None, bundle.previous_crc):
                return Block(bundle.stored, End(bundle.next_offset, bundle.last_batch, bundle.last_crc))
        content = segment.read(at.end, max(min(BLOCK_BYTES, stop - at.end), first.length))
        end, fault = whole_batches(content, at, at, segment.salt)
        if fault is not None and end == at:
            segment.refuse(fault, end.end)
        return Block(content[: end.end - at.end], end)

    def _unchecked(self, at: End, limit: int) -> Block:
        """The stored bytes of a declared gap."""
        segment = self._open(at.end)
        content = segment.read(at.end, min(BLOCK_BYTES, self._end(segment, limit) - at.end))
        return Block(content, End(at.end + len(content), at.last_batch, None))

    # --- common history ----------------------------------------------------------------------------------

    def same(self, ends: Sequence[End], mark: Mark) -> int:
        self.log.refresh()
        if any(each.end > mark.flushed_end for each in ends):  # there may be more than an old watermark says
            mark = max(mark, self.log.scanned(mark), key=lambda each: each.flushed_end)
        count = len(list(takewhile(lambda each: self._has(each, mark), ends)))
        if count < len(ends):  # it may differ only because retention was faster
            self.log.check_not_dropped(ends[count].end)
        return count

    def _has(self, end: End, mark: Mark) -> bool:
        """True if this log has the same batch before this end."""
        if not mark.log_start_offset <= end.end <= mark.flushed_end:
            return False
        if self._begins_after(end):
            return True
        if end.end == mark.log_start_offset or end.last_batch < mark.log_start_offset:  # a batch lies across the start
            return False
        try:
            header = self.log.header_around(end.last_batch, mark)
        except OffsetOutOfRangeError:  # retention has dropped it since the mark was read
            self.log.refresh()
            if self._begins_after(end):
                return True
            raise
        if not header.record_count:  # a gap: the batch is lost here
            return True
        return (header.base_offset, header.next_offset, header.header_crc) == (end.last_batch, end.end, end.crc)

    def _begins_after(self, end: End) -> bool:
        """True if a segment begins there, after the same batch."""
        if end.end not in self.log.index.bases():
            return False
        return self.begun(end.end).header.chain_end == end


def whole_batches(content: bytes, at: End, end: End, salt: int) -> tuple[End, BadBatch | NewerBatch | None]:
    """Check the batches in these bytes. Return their end, and the fault of the next batch, if that is all there.

    The bytes begin at `at`; those up to `end` have been checked. Each batch must follow the one before.
    """
    try:
        for header in follow(content, end, start=at.end, salt=salt):
            end = End.after(header)
    except (BadBatch, NewerBatch) as error:
        return end, error
    return end, None


def own_mark(mark: Mark) -> Mark:
    """The mark of a copy that has all below this mark of its source, durable."""
    applied = mark.applied_txn, mark.applied_id
    if mark.held_txn and mark.flushed_end <= mark.held_from:  # the mark ends before that transaction
        applied = min(applied, (mark.held_txn - 1, 0))  # the id of that number is not known
    own = Mark.at_rest(mark.sequence, mark.log_start_offset, mark.flushed_end, mark.flushed_tail)
    return own._replace(
        writer_epoch=mark.writer_epoch, writer_nonce=mark.writer_nonce, applied_txn=applied[0], applied_id=applied[1],
        txn_store=mark.txn_store,
    )  # fmt: skip
