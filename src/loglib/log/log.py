"""Log: one partition's segments as a single range of offsets, for reading.

Invariant: readers see [log start, flushed end) and nothing else. They take no lock and write
nothing: the watermark has the end, the file names have the places.

Retention may remove a segment between a look at the index and the opening of the file. The caller then gets
`OffsetOutOfRangeError` with the new log start, never a missing file. If a file is missing and the log start
has not moved, that is corruption.

The files may be replaced or removed under a reader: by a restore, or by a new topic at the old path. A log
looks for that once a second. It continues in the same log, or raises `LogMovedError` if the log is gone.

Offsets that a repair has declared as lost (gaps.py) are met as damage first, and then skipped. Among the headers of
batches, a gap is a header without records.

Threads: safe for all.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Protocol

from ..config.policies import MAX_OFFSET
from ..errors import (
    CorruptLogError,
    InvalidOffsetError,
    LogClosedError,
    LogError,
    LogMovedError,
    OffsetOutOfRangeError,
)
from ..format.header import Header
from ..format.watermark import NAME as WATERMARK
from ..format.watermark import Mark, WatermarkReader
from ..segment import (
    HEADER_BYTES,
    Identity,
    SegmentHeader,
    SegmentInfo,
    SegmentReader,
    read_segment_header,
    segment_name,
)
from ..system.clock import monotonic
from ..system.files import Files, spare_files
from ..system.malloc import keep_blocks
from ..system.not_copyable import NotCopyable
from .gaps import Gap, read_gaps
from .index import SegmentIndex
from .pending_marks import is_held, read_marks, shown
from .recovery import Extent, is_part, list_segments, measure, proven_end
from .search import after_damage, around, refuse_damage
from .store_pointer import is_pending_here

logger = logging.getLogger("loglib")

LOOK_S = 1.0  # how often to check that the path still names the open files
_GONE = "was moved or removed, or holds another log now"
_NOTHING_FOUND = ((-1, 0, 0), 0)
_NO_RECORDS = Header._make((b"", *[0] * (len(Header._fields) - 1)))
_LONG_HOLD_S = 10.0  # a transaction is done within milliseconds, or 2 s if its writers are slow
_SWAP_S = 0.2  # the files may be missing for this long while they are replaced


class Wakeable(Protocol):
    """Something that waits for publications."""

    def wake(self) -> None: ...


class LiveWriter(Protocol):
    """The methods that a log needs from a writer in its process."""

    def mark(self) -> Mark:
        """The writer's last publication; raises if the writer is closed."""

    def listen(self, waiter: Wakeable) -> None:
        """Wake the waiter after every publication. The writer refers to it weakly."""

    def is_moved(self) -> bool:
        """True if the writer's files are no longer where readers look."""


class FixedMark:
    """Takes the place of the writer of a log that no longer grows: readers get this mark."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark

    def mark(self) -> Mark:
        return self._mark

    def listen(self, waiter: Wakeable) -> None:
        """Do nothing, since nothing will be published."""

    def is_moved(self) -> bool:
        return False


def log_as_found(files: Files, directory: str, identity: Identity, mark: Mark) -> Log:
    """The partition's log up to this mark, with the records that are held. The watermark is not used. Close it."""
    log = Log(files, directory, identity)
    log.writer = FixedMark(mark._replace(held_txn=0))
    return log


def promised_marks(logs: Sequence[Log]) -> dict[int, Mark | None]:
    """The marks in the file that these logs of a copy wait for, by partition. The file is read once for all of them."""
    found = read_marks(logs[0].files, os.path.dirname(logs[0].directory), logs[0].identity.log_id) if logs else {}
    return {log.partition: found.get(log.partition) for log in logs}


def unfinishable(directory: str, mark: Mark) -> CorruptLogError:
    """The error for a log with a part of a transaction that its store does not have."""
    found = f"a part of transaction {mark.held_txn} from offset {mark.held_from} on, and nobody can finish it"
    expected = (
        "a store of transactions that knows it. Put the store back as it was; or run `loglib repair` for the topic, "
        "which declares this part as lost and shows what follows it"
    )
    return CorruptLogError(directory, 0, found, expected)


# Logs that have opened their watermark. If descriptors run out, all watermarks are closed until their next use.
_with_files: set[weakref.ref[Log]] = set()


def _release_all() -> None:
    for reference in list(_with_files):  # a copy made in C: other threads may add logs
        if (log := reference()) is not None:
            log.release_files()
        _with_files.discard(reference)


spare_files.append(_release_all)


class Log(NotCopyable):
    """The readable range of one partition directory."""

    def __init__(self, files: Files, directory: str, identity: Identity) -> None:
        self.files = files
        self.directory = directory
        self.identity = identity
        self.partition = identity.partition
        self.watermark_path = os.path.join(directory, WATERMARK)
        self.writer: LiveWriter | None = None  # the partition's writer, if it is in this process
        self._watermark: WatermarkReader | None = None
        self.donors: tuple[str, ...] = ()  # directories of other copies, for readers that meet damage here
        self.restored = 0  # how often the log was found replaced by an older or newer state of itself
        self._look_at = monotonic() + LOOK_S
        self._missing = False  # True if the files were missing at the last look
        self._warned = False
        self._closed = False
        # The last result of `batch_base`, and its mark: one attribute, because threads may share the log.
        self._found = _NOTHING_FOUND
        self._headers: dict[int, SegmentHeader] = {}  # of the segments that `segments` listed last
        self._over = (0, 0)  # number and id of the last transaction that was found to be over, and here as a whole
        self._held_since = (0, 0.0)  # a transaction that is not done, and when it was first seen
        self.index = SegmentIndex(list_segments(files, directory))
        keep_blocks()

    def close(self) -> None:
        """End the readers with `LogClosedError`. The file is closed when the last thread has finished with it."""
        self._closed = True
        self._watermark = None

    def release_files(self) -> None:
        """Close the watermark until its next use, so that only a few of thousands of logs have open files."""
        self._watermark = None

    # --- range ---------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """The ends of what readers may see now. Without a whole watermark: the ends that the last segment proves."""
        mark = self.published()
        return self.visible(mark) if mark.held_txn else mark

    def visible(self, mark: Mark) -> Mark:
        """The part of a publication that readers may see: all of it, unless a transaction is held.

        A transaction that is not pending is over: it is done, or its store is gone or was set back. Then the log
        itself decides, and shows a section that has its end. `CorruptLogError` for a part that hides later records.
        """
        if is_held(mark):
            return shown(mark, promised_marks([self])[self.partition])
        if not mark.held_txn:
            return mark
        extent = Extent.WHOLE
        if mark.held != self._over:
            if is_pending_here(self.files, os.path.dirname(self.directory), *mark.held):
                self._note_hold(mark)
                return mark.committed()
            if mark.applied_txn != mark.held_txn:
                extent = self._extent(mark)
            if extent == Extent.PART:
                return mark.committed()
            if extent == Extent.WHOLE:
                self._over = mark.held
        return mark.without_hold(applied=extent == Extent.WHOLE)

    def _extent(self, mark: Mark) -> Extent:
        """The extent of the held transaction in the log; `CorruptLogError` if a part of it hides records for ever."""
        headers = self.headers_from(mark.held_from, mark)
        extent = Extent.among(headers, *mark.held)
        if extent != Extent.PART:
            return extent
        news = self.published().transactions != mark.transactions  # it was done meanwhile, and the next look shows it
        if not news and any(each.record_count and not is_part(each, *mark.held) for each in headers):
            raise unfinishable(self.directory, mark)
        return extent

    def _note_hold(self, mark: Mark) -> None:
        """Warn once if a transaction is held for a long time: its process has died, or its store is out of reach."""
        held, since = self._held_since
        now = monotonic()
        if held != mark.held_txn:
            self._held_since = mark.held_txn, now
        elif now - since > _LONG_HOLD_S:
            self._held_since = mark.held_txn, math.inf
            logger.warning(
                "%s: records from offset %d on wait for transaction %d, which is not done; "
                "loglib.transactions.recover_transactions "
                "finishes it if its process has died", self.directory, mark.held_from, mark.held_txn,
            )  # fmt: skip

    def published(self) -> Mark:
        """The ends that the writer has published, with a transaction that is not done."""
        if monotonic() >= self._look_at:
            self.check_moved()
        if self.writer is not None:
            return self.writer.mark()
        watermark = self._watermark
        if watermark is None:
            if self._closed:
                raise LogClosedError(f"{self.directory} is closed; open the topic again")
            try:
                self._watermark = watermark = WatermarkReader(self.files, self.watermark_path, self.identity.salt)
                _with_files.add(weakref.ref(self, _with_files.discard))
            except FileNotFoundError:
                return self._proven_mark()
        return watermark.read() or self._proven_mark()

    def found(self) -> Mark:
        """The published mark, for copies. If the watermark is not whole, the mark that a writer's recovery would find.

        A mark that was found has the sequence 0. It shows what is there, and not what was dropped or lost.
        """
        mark, watermark = self.published(), self._watermark
        if self.writer is not None or (watermark is not None and watermark.is_whole()):
            return mark
        return self.scanned(None if watermark is None or watermark.read() is None else mark)

    def scanned(self, known: Mark | None) -> Mark:
        """The mark that a writer's recovery would find after `known`; without `known`, in the last segment."""
        reader, first = self._last_segment()
        with reader:
            _, tail = measure(reader, known)
            last = reader.header if tail.end == reader.base_offset else reader.header_at(tail.last_batch)
        mark = Mark.at_rest(0, first if known is None else known.log_start_offset, tail.end, tail.last_batch)
        mark = mark.with_writer(last.writer_epoch, last.writer_nonce)

        def before(offset: int) -> int:
            return self.header_around(offset, mark).previous_offset

        return mark._replace(**tail.sections.within(first, tail.end, tail.last_batch, before)._asdict())

    def _last_segment(self) -> tuple[SegmentReader, int]:
        """The last segment, open, and the base offset of the first one, by a new listing."""
        missing: int | None = None
        while True:
            self.refresh()
            bases = self.index.bases()
            last = max(bases, default=0)
            try:
                return self.open_base(last), bases[0]
            except FileNotFoundError as error:  # the writer may have rolled and dropped it meanwhile
                if last == missing:
                    raise CorruptLogError(self.path_of(last), 0, "no file", "the last segment") from error
                missing = last

    def next_mark(self) -> Mark | None:
        """The ends after the next publication, for a follower at the end of the log; None if `mark` must look."""
        if monotonic() >= self._look_at:
            return None
        if self.writer is not None:
            mark = self.writer.mark()
        elif (watermark := self._watermark) is None or (found := watermark.next_mark()) is None:
            return None
        else:
            mark = found
        return None if mark.held_txn else mark

    def watermark_of_another(self) -> WatermarkReader | None:
        """The open watermark of a writer in another process; None if the writer is here, or if none is open."""
        return self._watermark if self.writer is None else None

    def check_moved(self, *, patient: bool = True) -> None:
        """Use the watermark that the path names now. `LogMovedError` if the log is no longer there.

        If `patient`, the log may be missing at one look: its files may be in the middle of a replacement.
        """
        self._look_at = monotonic() + LOOK_S
        watermark = self._watermark
        if self.writer is not None:
            if self.writer.is_moved():
                raise LogMovedError(self.directory, _GONE)
        elif watermark is not None and not watermark.is_named():
            self._go_over(patient=patient)
        else:
            self._missing = False

    def _go_over(self, *, patient: bool) -> None:
        found: WatermarkReader | None = None
        with suppress(FileNotFoundError, NotADirectoryError):
            found = WatermarkReader(self.files, self.watermark_path, self.identity.salt)
        if found is not None and found.read() is not None:  # the salt proves that it is this log's
            self._watermark, self._missing, self._headers = found, False, {}
            self.refresh()
            self.restored += 1
        elif not self._is_here():
            if self._missing or not patient:
                raise LogMovedError(self.directory, _GONE)
            self._missing = True
            self._look_at = monotonic() + _SWAP_S
        # Otherwise only the watermark is gone. The open one knows more than any other source.

    def _is_here(self) -> bool:
        """True if the directory has a segment of this log, or a segment that is too damaged to show its log."""
        try:
            path = self.path_of(max(list_segments(self.files, self.directory), default=0))
            fd = self.files.open_read(path)
        except (CorruptLogError, LogMovedError, FileNotFoundError, NotADirectoryError):
            return False
        try:
            header = SegmentHeader.decode(self.files.read_at(fd, HEADER_BYTES, 0), path)
        except CorruptLogError:
            return True
        finally:
            self.files.close(fd)
        return (header.log_id, header.partition) == self.identity[:2]

    def _proven_mark(self) -> Mark:
        if not self._warned:
            self._warned = True
            logger.warning("%s: the watermark is lost; reading only what later batches prove", self.directory)
        self.refresh()
        if not self.index.bases():
            raise CorruptLogError(self.directory, 0, "no segment", "at least one: a partition is made with one")
        reader, first = self._last_segment()
        with reader:
            return Mark.at_rest(0, first, *proven_end(reader))

    def refresh(self) -> None:
        """List the directory again."""
        self.index.refresh(lambda: list_segments(self.files, self.directory))

    def segments(self) -> list[SegmentInfo]:
        """The segments, oldest first; the last one is open."""
        if self.writer is None:
            self.refresh()
        mark = self.mark()
        bases = [base for base in self.index.bases() if base >= mark.log_start_offset]
        headers: dict[int, SegmentHeader] = {}
        infos: list[SegmentInfo] = []
        for base, end in zip(bases, [*bases[1:], max([mark.flushed_end, *bases[-1:]])], strict=False):
            path = self.path_of(base)
            try:
                header = self._headers.get(base) or read_segment_header(self.files, path, self.identity)
            except FileNotFoundError:  # retention has meanwhile dropped a segment
                continue
            headers[base] = header
            if infos:
                infos[-1] = infos[-1]._replace(last_append_time=header.last_append_time)
            infos.append(SegmentInfo(path, base, end, base != bases[-1], header.created, None))
        self._headers = headers
        return infos

    # --- places ----------------------------------------------------------------------------------

    def batch_base(self, offset: int, mark: Mark, *, past_damage: bool = False) -> int:
        """The base offset of the batch with the record at `offset`; at the end, the offset itself.

        With `past_damage`, the place of the damage for an offset in a damaged batch.
        """
        if not mark.log_start_offset <= offset <= mark.flushed_end:
            raise OffsetOutOfRangeError(self.partition, offset, mark.log_start_offset, mark.flushed_end)
        if offset in (mark.log_start_offset, mark.flushed_end):  # a segment begins there, or there is nothing yet
            return offset
        found = (offset, mark.sequence, mark.flushed_end)
        known, place = self._found
        if known == found:  # a start is first resolved and then used
            self._found = _NOTHING_FOUND
            return place
        try:
            header, place = self._around(offset, mark, past_damage=past_damage)
        except CorruptLogError:  # the segment is missing
            if not past_damage:
                raise
            return offset
        if header is not None and header.record_count and offset not in header.offsets:
            raise InvalidOffsetError(self.partition, offset, header.offsets, header.next_offset)
        if header is not None:
            self._found = found, place
        return place

    def header_around(self, offset: int, mark: Mark) -> Header:
        """The header of the batch that holds the offset, which must lie in [log start, flushed end)."""
        header, _ = self._around(offset, mark, past_damage=False)
        assert header is not None
        return header

    def headers(self, start: int, end: int, mark: Mark) -> Iterator[Header]:
        """The headers of the batches from `start`, where one begins, to `end`. A gap is a header without records."""
        gaps = iter([gap for gap in self.gaps() if start < gap.end])
        gap, end = next(gaps, None), min(end, mark.flushed_end)
        while start < end:
            if gap is not None and gap.start <= start:
                yield self._as_header(gap)
                start, gap = max(start, gap.end), next(gaps, None)
                continue
            with self.open_segment(start) as segment:
                _, stop = self.end_of(segment, mark)
                for header in segment.headers(start, min(stop, end, MAX_OFFSET if gap is None else gap.start)):
                    yield header
                    start = header.next_offset

    def headers_from(self, start: int, mark: Mark) -> list[Header]:
        """The headers of all batches from `start` to the mark's end, also of those that a hold hides."""
        with closing(log_as_found(self.files, self.directory, self.identity, mark)) as found:
            return list(found.headers(start, mark.flushed_end, mark))

    def gaps(self) -> tuple[Gap, ...]:
        """The declared gaps, in order. Reads their file."""
        try:
            return read_gaps(self.files, self.directory, self.identity)
        except CorruptLogError as error:  # then no gap is declared, and damage is damage
            logger.warning("%s", error)
            return ()

    def gap_at(self, offset: int) -> Gap | None:
        """The declared gap that holds the offset, if there is one."""
        return next((gap for gap in self.gaps() if gap.start <= offset < gap.end), None)

    def _as_header(self, gap: Gap) -> Header:
        """The gap as a header without records, as old as the batch after it."""
        append_time = gap.time
        with suppress(LogError), self.open_segment(gap.end, past_damage=True) as segment:
            append_time = segment.header_at(gap.end).append_time
        return _NO_RECORDS._replace(length=gap.end - gap.start, base_offset=gap.start, append_time=append_time)

    def _around(self, offset: int, mark: Mark, *, past_damage: bool) -> tuple[Header | None, int]:
        with self.open_segment(offset, past_damage=past_damage) as segment:
            last, limit = self.end_of(segment, mark)
            header, place = around(segment, offset, last, limit)
            if header is None and not past_damage:
                gap = self.gap_at(offset)
                if gap is None:
                    refuse_damage(segment, offset, place)
                header, place = self._as_header(gap), gap.start
            return header, place

    def end_of(self, segment: SegmentReader, mark: Mark) -> tuple[int | None, int]:
        """The base offset of the segment's last batch (None if unknown), and the end of the segment's batches."""
        following = self.index.after(segment.base_offset)
        if following is None and mark.flushed_end > segment.end_of_file():  # the writer has rolled since then
            self.refresh()
            following = self.index.after(segment.base_offset)
        if following is None:
            return mark.flushed_tail, mark.flushed_end
        # If retention has dropped the segment since it was opened, it may have dropped the next one too. Then the index
        # gives a later segment. The log start moves before a file is removed. It is compared with the segment's end,
        # because a forged watermark may have a log start inside the segment, and then nothing was dropped.
        self.check_not_dropped(following - 1)
        with suppress(CorruptLogError, FileNotFoundError), self.open_base(following) as after:
            return after.header.previous_batch, following
        with suppress(CorruptLogError, FileNotFoundError), self.open_base(following, past_damage=True) as after:
            return after.header_at(following).previous_offset, following  # the first batch names it, too
        return None, following

    # --- segments --------------------------------------------------------------------------------

    def open_segment(self, offset: int, *, past_damage: bool = False) -> SegmentReader:
        """The segment that holds the offset, open; `OffsetOutOfRangeError` if retention has dropped it.

        With `past_damage` its header is not read.

        The writer may roll and drop while the directory is listed. So a segment counts as missing only if two listings
        do not have it, and the log start has not moved between them.
        """
        was_listed, log_start = False, -1  # the log start when a listing did not have the segment
        while True:
            base = self.index.find(offset)
            if base is not None:
                with suppress(FileNotFoundError):
                    segment = self.open_base(base, past_damage=past_damage)
                    if offset < segment.end_of_file() or log_start >= 0:
                        return segment
                    segment.close()
            if was_listed:
                mark = self.check_not_dropped(offset)
                if mark.log_start_offset == log_start:
                    path, found = self.directory, "no segment file"
                    if base is not None:
                        path, found = self.path_of(base), "no file"
                    raise CorruptLogError(path, 0, found, f"the segment that holds offset {offset}")
                log_start = mark.log_start_offset
            self.refresh()
            was_listed = True

    def check_not_dropped(self, offset: int) -> Mark:
        """`OffsetOutOfRangeError` if retention has dropped the offset; otherwise the current mark."""
        mark = self.mark()
        if offset < mark.log_start_offset:
            raise OffsetOutOfRangeError(self.partition, offset, mark.log_start_offset, mark.flushed_end)
        return mark

    def after_damage(self, offset: int, limit: int) -> int:
        """The next place below `limit` with a whole batch, after none was found at `offset`."""
        if self.writer is None:
            self.refresh()  # otherwise the search could enter a newer segment
        base = self.index.find(offset)
        if base is not None:
            with suppress(FileNotFoundError), self.open_base(base, past_damage=True) as segment:
                last, end = self.end_of(segment, self.mark())
                return after_damage(segment, offset, min(end, limit), last)
        return min(self.index.after(offset) or limit, limit)

    def open_base(self, base: int, *, past_damage: bool = False) -> SegmentReader:
        """The segment with this base offset, open; `FileNotFoundError` if there is none."""
        return SegmentReader(self.files, self.path_of(base), self.identity, base_offset=base if past_damage else None)

    def path_of(self, base: int) -> str:
        """The path of the segment with this base offset."""
        return os.path.join(self.directory, segment_name(base))
