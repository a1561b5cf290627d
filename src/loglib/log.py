"""Log: one partition's segments as a single range of offsets, for reading.

Invariant: readers see [log start, flushed end) and nothing else. They take no lock and write
nothing: the watermark says how far to read, the file names say where.

Retention may remove a segment between a look at the index and its opening: that is answered with
`OffsetOutOfRangeError` and the new log start, never with a missing file. A file that is missing
without the log start having moved is corruption.

Threads: a `Log` may be shared; a `Cursor` belongs to one thread.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Protocol

from .arguments import Time
from .errors import CorruptLogError, InvalidOffsetError, LogClosedError, OffsetOutOfRangeError
from .files import Files
from .index import SegmentIndex
from .records import Batch
from .recovery import list_segments, scan_flushed_end
from .segment import Identity, SegmentHeader, SegmentInfo, SegmentReader, read_segment_header, segment_name
from .watermark import NAME as WATERMARK
from .watermark import Mark, WatermarkReader

__all__ = ["BLOCK_BYTES", "Cursor", "Log"]

logger = logging.getLogger("loglib")

# One read of the file: a few batches, so that the cost of the call is spread, and still in the L2 cache.
BLOCK_BYTES = 1 << 20


class Wakeable(Protocol):
    """Something that waits for publications."""

    def wake(self) -> None: ...


class LiveWriter(Protocol):
    """What a log asks of the writer in its own process."""

    def mark(self) -> Mark:
        """What the writer has published last; raises if it is closed."""

    def listen(self, waiter: Wakeable) -> None:
        """Wake the waiter, which is not kept alive, after every publication."""


class Log:
    """The readable range of one partition directory."""

    def __init__(self, files: Files, directory: str, identity: Identity) -> None:
        self.files = files
        self.directory = directory
        self.identity = identity
        self.partition = identity.partition
        self.watermark_path = os.path.join(directory, WATERMARK)
        self.writer: LiveWriter | None = None  # in this process, if it writes here
        self._watermark: WatermarkReader | None = None
        self._warned = False
        self._closed = False
        self._headers: dict[int, SegmentHeader] = {}  # of the segments that `segments` listed last
        self.index = SegmentIndex(list_segments(files, directory))

    def close(self) -> None:
        """Readers end with `LogClosedError`; the file is closed when the last thread has done with it."""
        self._closed = True
        self._watermark = None

    # --- range ---------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """How far the log reaches now. Without a whole watermark, what the last segment proves."""
        if self.writer is not None:
            return self.writer.mark()
        watermark = self._watermark
        if watermark is None:
            if self._closed:
                raise LogClosedError(f"{self.directory} is closed; open the topic again")
            try:
                self._watermark = watermark = WatermarkReader(self.files, self.watermark_path, self.identity.salt)
            except FileNotFoundError:
                return self._proven_mark()
        return watermark.read() or self._proven_mark()

    def _proven_mark(self) -> Mark:
        if not self._warned:
            self._warned = True
            logger.warning("%s: the watermark is lost; reading only what later batches prove", self.directory)
        self.refresh()
        bases = self.index.bases()
        if not bases:
            raise CorruptLogError(self.directory, 0, "no segment", "at least one: a partition is made with its first")
        with self._open(bases[-1]) as reader:
            end = scan_flushed_end(reader)
        return Mark(0, bases[0], end, end, 0)

    def refresh(self) -> None:
        """List the directory again."""
        self.index.replace(list_segments(self.files, self.directory))

    def segments(self) -> list[SegmentInfo]:
        """The segments, oldest first; the last one is open."""
        if self.writer is None:
            self.refresh()
        mark = self.mark()
        bases = [base for base in self.index.bases() if base >= mark.log_start_offset]
        headers: dict[int, SegmentHeader] = {}
        infos: list[SegmentInfo] = []
        for base, end in zip(bases, [*bases[1:], max([mark.flushed_end, *bases[-1:]])], strict=False):
            path = self._path(base)
            try:
                header = self._headers.get(base) or read_segment_header(self.files, path, self.identity)
            except FileNotFoundError:  # retention has overtaken this listing
                continue
            headers[base] = header
            if infos:
                infos[-1] = infos[-1]._replace(last_append_time=header.last_append_time)
            infos.append(SegmentInfo(path, base, end, base != bases[-1], header.created, None))
        self._headers = headers
        return infos

    # --- places ----------------------------------------------------------------------------------

    def resolve(self, start: str | int | Time, *, mark: Mark | None = None) -> int:
        """The offset of a start. A time gives the first record at or after it, or the flushed end."""
        mark = mark or self.mark()
        if start == "begin":
            return mark.log_start_offset
        if start == "end":
            return mark.flushed_end
        if isinstance(start, Time):
            while True:
                try:
                    return self._first_at_or_after(start.timestamp_us, mark)
                except (FileNotFoundError, OffsetOutOfRangeError) as error:
                    before, mark = mark, self.mark()
                    if mark.log_start_offset == before.log_start_offset:  # then it was not retention
                        expected = "all segments from the log start"
                        raise CorruptLogError(self.directory, 0, f"no file ({error})", expected) from error
        assert isinstance(start, int)
        self.batch_base(start, mark)
        return start

    def cursor(self, offset: int, *, mark: Mark | None = None) -> Cursor:
        """A cursor at a record's offset, or at the flushed end."""
        return Cursor(self, self.batch_base(offset, mark or self.mark()), skip_before=offset)

    def batch_base(self, offset: int, mark: Mark) -> int:
        """The base of the batch in which the offset is a record's; the offset itself at the end."""
        if not mark.log_start_offset <= offset <= mark.flushed_end:
            raise OffsetOutOfRangeError(self.partition, offset, mark.log_start_offset, mark.flushed_end)
        if offset == mark.flushed_end:
            return offset
        with self.open_segment(offset) as segment:
            header = segment.locate(offset, mark.flushed_end)
        if offset not in header.offsets:
            raise InvalidOffsetError(self.partition, offset, header.offsets, header.next_offset)
        return header.base_offset

    def _first_at_or_after(self, timestamp: int, mark: Mark) -> int:
        bases = [base for base in self.index.bases() if base >= mark.log_start_offset]
        if not bases or mark.flushed_end > bases[-1]:
            self.refresh()
            bases = [base for base in self.index.bases() if base >= mark.log_start_offset]
        # The header of segment i + 1 says how late the events up to the end of segment i are.
        low, high = 0, len(bases) - 1
        while low < high:
            middle = (low + high) // 2
            with self._open(bases[middle + 1]) as following:
                reached = following.header.running_max_timestamp >= timestamp
            low, high = (low, middle) if reached else (middle + 1, high)
        if not bases:
            return mark.flushed_end
        limit = min(bases[low + 1] if low + 1 < len(bases) else mark.flushed_end, mark.flushed_end)
        with self._open(bases[low]) as segment:
            first = segment.first_reaching(timestamp, limit)
        if first is None:
            return limit
        # Mostly the first batch has the record. It may not when retention has dropped the event that
        # made the running maximum so late: then go on batch by batch.
        cursor = Cursor(self, first.base_offset)
        try:
            while batches := cursor.read(mark.flushed_end):
                for batch in batches:
                    if batch.header.max_timestamp >= timestamp:
                        late = next(i for i, each in enumerate(batch.timestamps) if each >= timestamp)
                        return batch.offsets[late]
        finally:
            cursor.close()
        return mark.flushed_end

    # --- segments --------------------------------------------------------------------------------

    def open_segment(self, offset: int) -> SegmentReader:
        """The segment that holds the offset, open; `OffsetOutOfRangeError` if retention has dropped it."""
        base = self.index.find(offset)
        if base is not None:
            with suppress(FileNotFoundError):
                segment = self._open(base)
                if self.index.after(base) is not None or offset < segment.end_of_file():
                    return segment
                segment.close()
            self.refresh()  # retention has dropped the segment, or the writer has rolled since the last look
            base = self.index.find(offset)
        mark = self.mark()
        if offset < mark.log_start_offset:
            raise OffsetOutOfRangeError(self.partition, offset, mark.log_start_offset, mark.flushed_end)
        if base is None:
            raise CorruptLogError(self.directory, 0, "no segment file", f"the one that holds offset {offset}")
        try:
            return self._open(base)
        except FileNotFoundError as error:
            raise CorruptLogError(self._path(base), 0, "no file", f"the segment that holds offset {offset}") from error

    def _open(self, base: int) -> SegmentReader:
        return SegmentReader(self.files, self._path(base), self.identity)

    def _path(self, base: int) -> str:
        return os.path.join(self.directory, segment_name(base))


class Cursor:
    """A place in a log, and reading on from it, block by block."""

    def __init__(self, log: Log, position: int, *, skip_before: int = 0) -> None:
        self.log = log
        self.position = position  # base offset of the next batch to read
        self._skip_before = skip_before  # in it, the first record wanted
        self._segment: SegmentReader | None = None
        self._block_bytes = BLOCK_BYTES

    @property
    def offset(self) -> int:
        """The offset of the next record."""
        return max(self.position, self._skip_before)

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def read(self, limit: int) -> list[Batch]:
        """The next batches below `limit` (the flushed end, as a rule): those in one block of the file.

        An empty list means that there are none below the limit. Raises `OffsetOutOfRangeError` when
        retention has overtaken the cursor and `CorruptLogError` where the data is damaged.
        """
        looked_again = False
        while self.position < limit:
            segment = self._segment
            if segment is None:
                segment = self._segment = self.log.open_segment(self.position)
            end = self.log.index.after(segment.base_offset)
            if end is not None and self.position >= end:
                self.close()
                continue
            stop = limit if end is None else min(limit, end)
            batches = segment.batches(self.position, stop, block_bytes=self._block_bytes)
            if batches:
                used = batches[-1].header.next_offset - self.position
                self.position += used
                # Batches are much of a size: as many fit the next block, and none is read in part.
                self._block_bytes = used + used // 16 if used > BLOCK_BYTES // 2 else BLOCK_BYTES
                if self._skip_before > batches[0].header.base_offset:
                    batches[0] = batches[0].between(self._skip_before, self.position)
                return batches
            mark = self.log.mark()
            if self.position < mark.log_start_offset:  # the index knows no more where this segment ended
                raise OffsetOutOfRangeError(
                    self.log.partition, self.position, mark.log_start_offset, mark.flushed_end
                )
            if end is not None or looked_again:
                position = segment.file_position(self.position)
                raise CorruptLogError(segment.path, position, "the end of the file", f"data up to offset {stop}")
            self.log.refresh()  # the writer has rolled since the last look
            looked_again = True
        return []

    def seek(self, offset: int) -> None:
        """Go to a record's offset or the flushed end; errors as `Log.cursor`."""
        position = self.log.batch_base(offset, self.log.mark())
        self.close()
        self.position, self._skip_before = position, offset
