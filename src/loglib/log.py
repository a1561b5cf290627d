"""Log: one partition's segments as a single range of offsets, for reading.

Invariant: readers see [log start, flushed end) and nothing else. They take no lock and write
nothing: the watermark says how far to read, the file names say where.

Retention may remove a segment between a look at the index and its opening: that is answered with
`OffsetOutOfRangeError` and the new log start, never with a missing file. A file that is missing
without the log start having moved is corruption.

The files may be replaced under a reader: by a restore, a new topic at the old path, or nothing at all. It
looks for that once a second, and goes on in the same log, or raises `LogMovedError` where there is none.

Damage is an error, or with `past_damage` a gap: offsets are places, so that reading goes on at the
next place where a batch says that it belongs there.

Threads: a `Log` may be shared; a `Cursor` belongs to one thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from .arguments import Time
from .errors import (
    CorruptLogError,
    InvalidOffsetError,
    LogClosedError,
    LogError,
    LogMovedError,
    OffsetOutOfRangeError,
)
from .format.batch import Header
from .format.watermark import NAME as WATERMARK
from .format.watermark import Mark, WatermarkReader
from .index import SegmentIndex
from .records import Batch, Damage
from .recovery import list_segments, proven_end
from .search import after_damage, around, first_reaching, refuse_damage
from .segment import (
    HEADER_BYTES,
    Identity,
    SegmentHeader,
    SegmentInfo,
    SegmentReader,
    read_segment_header,
    segment_name,
)
from .system.files import Files
from .system.heap import keep_blocks
from .unique import Unique

__all__ = ["BLOCK_BYTES", "Cursor", "Log"]

logger = logging.getLogger("loglib")

# One read of the file: a few batches, so that the cost of the call is spread, and still in the L2 cache.
BLOCK_BYTES = 1 << 20
LOOK_S = 1.0  # how often to look whether the files are still those that the path names
_GONE = "was moved or removed, or holds another log now"
_NOTHING_FOUND = ((-1, 0, 0), 0)
_SWAP_S = 0.2  # how long they may be missing while somebody puts others in their place


class Wakeable(Protocol):
    """Something that waits for publications."""

    def wake(self) -> None: ...


class LiveWriter(Protocol):
    """What a log asks of the writer in its own process."""

    def mark(self) -> Mark:
        """What the writer has published last; raises if it is closed."""

    def listen(self, waiter: Wakeable) -> None:
        """Wake the waiter, which is not kept alive, after every publication."""

    def is_moved(self) -> bool:
        """Whether its files are not where readers look."""


class Log(Unique):
    """The readable range of one partition directory."""

    def __init__(self, files: Files, directory: str, identity: Identity) -> None:
        self.files = files
        self.directory = directory
        self.identity = identity
        self.partition = identity.partition
        self.watermark_path = os.path.join(directory, WATERMARK)
        self.writer: LiveWriter | None = None  # in this process, if it writes here
        self._watermark: WatermarkReader | None = None
        self.restored = 0  # how often the log has been found to be replaced by an older or a newer state of itself
        self._look_at = time.monotonic() + LOOK_S
        self._missing = False  # at the last look
        self._warned = False
        self._closed = False
        # What `batch_base` has found last, and under which mark: one attribute, since threads may share the log.
        self._found = _NOTHING_FOUND
        self._headers: dict[int, SegmentHeader] = {}  # of the segments that `segments` listed last
        self.index = SegmentIndex(list_segments(files, directory))
        keep_blocks()

    def close(self) -> None:
        """Readers end with `LogClosedError`; the file is closed when the last thread has done with it."""
        self._closed = True
        self._watermark = None

    def rest(self) -> None:
        """Close the watermark until somebody asks again: who has thousands of logs keeps few of them open."""
        self._watermark = None

    # --- range ---------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """How far the log reaches now. Without a whole watermark, what the last segment proves."""
        if time.monotonic() >= self._look_at:
            self.look()
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

    def look(self, *, patient: bool = True) -> None:
        """Go over to the watermark that the path names now; `LogMovedError` if the log is no longer there.

        If patient, it may be missing at one look: somebody may be putting other files in place.
        """
        self._look_at = time.monotonic() + LOOK_S
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
        if found is not None and found.read() is not None:  # which no other log's would be, with its salt
            self._watermark, self._missing, self._headers = found, False, {}
            self.refresh()
            self.restored += 1
        elif not self._is_here():
            if self._missing or not patient:
                raise LogMovedError(self.directory, _GONE)
            self._missing = True
            self._look_at = time.monotonic() + _SWAP_S
        # Otherwise the watermark alone is gone, and the one that is open says more than there is to be had.

    def _is_here(self) -> bool:
        """Whether the directory has a segment of this log, or one that is too damaged to say."""
        try:
            path = self._path(max(list_segments(self.files, self.directory), default=0))
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
        bases = self.index.bases()
        if not bases:
            raise CorruptLogError(self.directory, 0, "no segment", "at least one: a partition is made with its first")
        try:
            with self._open(bases[-1]) as reader:
                end, tail = proven_end(reader)
        except FileNotFoundError as error:  # no retention drops the last one
            raise CorruptLogError(self._path(bases[-1]), 0, "no file", "the last segment") from error
        return Mark.at_rest(0, bases[0], end, tail)

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

    def resolve(self, start: str | int | Time, *, mark: Mark | None = None, past_damage: bool = False) -> int:
        """The offset of a start. A time gives the first record at or after it, or the flushed end."""
        mark = mark or self.mark()
        if start == "begin":
            return mark.log_start_offset
        if start == "end":
            return mark.flushed_end
        if isinstance(start, Time):
            while True:
                try:
                    if past_damage:
                        return self._first_whole_at_or_after(start.timestamp_us, mark)
                    return self._first_at_or_after(start.timestamp_us, mark)
                except (FileNotFoundError, OffsetOutOfRangeError) as error:
                    before, mark = mark, self.mark()
                    if mark.log_start_offset == before.log_start_offset:  # then it was not retention
                        expected = "all segments from the log start"
                        raise CorruptLogError(self.directory, 0, f"no file ({error})", expected) from error
        assert isinstance(start, int)
        self.batch_base(start, mark, past_damage=past_damage)
        return start

    def cursor(
        self, offset: int, *, mark: Mark | None = None, on_damage: Callable[[Damage], object] | None = None
    ) -> Cursor:
        """A cursor at a record's offset, or at the flushed end; with `on_damage`, one that reads past damage."""
        base = self.batch_base(offset, mark or self.mark(), past_damage=on_damage is not None)
        return Cursor(self, base, skip_before=offset, on_damage=on_damage)

    def batch_base(self, offset: int, mark: Mark, *, past_damage: bool = False) -> int:
        """The base of the batch in which the offset is a record's; the offset itself at the end.

        With `past_damage` an offset whose batch is damaged stands for the place of the damage.
        """
        if not mark.log_start_offset <= offset <= mark.flushed_end:
            raise OffsetOutOfRangeError(self.partition, offset, mark.log_start_offset, mark.flushed_end)
        if offset in (mark.log_start_offset, mark.flushed_end):  # where a segment begins, or nothing as yet
            return offset
        found = (offset, mark.sequence, mark.flushed_end)
        known, place = self._found
        if known == found:  # a start is resolved, and then gone to
            self._found = _NOTHING_FOUND
            return place
        try:
            header, place = self._around(offset, mark, past_damage=past_damage)
        except CorruptLogError:  # the segment is not there
            if not past_damage:
                raise
            return offset
        if header is not None and offset not in header.offsets:
            raise InvalidOffsetError(self.partition, offset, header.offsets, header.next_offset)
        if header is not None:
            self._found = found, place
        return place

    def header_around(self, offset: int, mark: Mark) -> Header:
        """The header of the batch that holds the offset, which must lie in [log start, flushed end)."""
        header, _ = self._around(offset, mark, past_damage=False)
        assert header is not None
        return header

    def _around(self, offset: int, mark: Mark, *, past_damage: bool) -> tuple[Header | None, int]:
        with self.open_segment(offset, past_damage=past_damage) as segment:
            last, limit = self._end_of(segment, mark)
            header, place = around(segment, offset, last, limit)
            if header is None and not past_damage:
                refuse_damage(segment, offset, place)
            return header, place

    def _end_of(self, segment: SegmentReader, mark: Mark) -> tuple[int | None, int]:
        """Base offset of the last batch of the segment, if it can be told, and where the segment's batches end."""
        following = self.index.after(segment.base_offset)
        if following is None and mark.flushed_end > segment.end_of_file():  # rolled since the index was made
            self.refresh()
            following = self.index.after(segment.base_offset)
        if following is None:
            return mark.flushed_tail, mark.flushed_end
        # If retention has dropped the segment since it was opened, it may have dropped the next one too, and then what
        # follows in the index is a later one. The log start moves before anything goes. It is compared with the end of
        # the segment: a forged watermark may have it inside, and nothing is dropped then.
        self.check_not_dropped(following - 1)
        with suppress(CorruptLogError, FileNotFoundError), self._open(following) as after:
            return after.header.previous_batch, following
        with suppress(CorruptLogError, FileNotFoundError), self._open(following, past_damage=True) as after:
            return after.header_at(following).previous_offset, following  # the batch tells, too
        return None, following

    def _first_at_or_after(self, timestamp: int, mark: Mark) -> int:
        bases = [base for base in self.index.bases() if base >= mark.log_start_offset]
        if not bases or mark.flushed_end > bases[-1]:
            self.refresh()
            bases = [base for base in self.index.bases() if base >= mark.log_start_offset]
        # The header of segment i + 1 says how late the events up to the end of segment i are. Retention may have
        # dropped the latest of them since.
        low, high = 0, len(bases) - 1
        while low < high:
            middle = (low + high) // 2
            with self._open(bases[middle + 1]) as following:
                reached = following.header.running_max_timestamp >= timestamp
            low, high = (low, middle) if reached else (middle + 1, high)
        if not bases:
            return mark.flushed_end
        for base in bases[low:]:
            if base >= mark.flushed_end:
                break
            with self._open(base) as segment:
                last, end = self._end_of(segment, mark)
                first = first_reaching(segment, timestamp, last, end)
            if first is not None:
                return self._next_at_or_after(timestamp, Cursor(self, first.base_offset), mark)
        return mark.flushed_end

    def _first_whole_at_or_after(self, timestamp: int, mark: Mark) -> int:
        """The same where there may be damage: if it is in the way of the search, by looking at every batch.

        A gap that may hold the record counts as the first, so that who reads from there on is told of it.
        """
        try:
            return self._first_at_or_after(timestamp, mark)
        except CorruptLogError:
            doubtful: list[Damage] = []
            cursor = Cursor(self, mark.log_start_offset, on_damage=doubtful.append)
            found = self._next_at_or_after(timestamp, cursor, mark, doubtful)
            return min((gap.offsets.start for gap in doubtful if gap.offsets), default=found)

    def _next_at_or_after(
        self, timestamp: int, cursor: Cursor, mark: Mark, doubtful: list[Damage] | None = None
    ) -> int:
        segment: int | None = None
        early = False  # whether all events before that segment are known to be before the time
        try:
            while batches := cursor.read(mark.flushed_end):
                for batch in batches:
                    if doubtful and batch.header.running_max_timestamp < timestamp:
                        base = self.index.find(batch.header.base_offset)
                        if base is None or base != segment:
                            segment, early = base, self._begins_before(timestamp, batch.header.base_offset)
                        if early:
                            doubtful.clear()  # whatever it was, it was earlier
                    if batch.header.max_timestamp >= timestamp:
                        stamped = zip(batch.offsets, batch.timestamps, strict=True)
                        late = next((offset for offset, each in stamped if each >= timestamp), None)
                        if late is not None:  # as it is where a forged header says more than its records
                            return late
        finally:
            cursor.close()
        return mark.flushed_end

    def _begins_before(self, timestamp: int, offset: int) -> bool:
        """Whether all events before the segment that holds the offset are known to be before the time."""
        with suppress(CorruptLogError), self.open_segment(offset) as segment:
            return segment.header.running_max_timestamp < timestamp
        return False

    # --- segments --------------------------------------------------------------------------------

    def open_segment(self, offset: int, *, past_damage: bool = False) -> SegmentReader:
        """The segment that holds the offset, open; `OffsetOutOfRangeError` if retention has dropped it.

        With `past_damage` its header is not looked at.
        """
        base = self.index.find(offset)
        if base is not None:
            with suppress(FileNotFoundError):
                segment = self._open(base, past_damage=past_damage)
                if offset < segment.end_of_file():
                    return segment
                segment.close()
        return self._look_for(offset, past_damage=past_damage)

    def _look_for(self, offset: int, *, past_damage: bool) -> SegmentReader:
        """The segment that holds the offset, which is in none that the index knows.

        While the directory is listed the writer may roll and drop: what is missing is believed to be
        so when it is missing twice, and the log start has not moved meanwhile.
        """
        log_start = -1  # when it was missing last
        while True:
            self.refresh()
            base = self.index.find(offset)
            if base is not None:
                with suppress(FileNotFoundError):
                    segment = self._open(base, past_damage=past_damage)
                    if offset < segment.end_of_file() or log_start >= 0:
                        return segment
                    segment.close()
            mark = self.check_not_dropped(offset)
            if mark.log_start_offset == log_start:
                path, found = (self.directory, "no segment file") if base is None else (self._path(base), "no file")
                raise CorruptLogError(path, 0, found, f"the segment that holds offset {offset}")
            log_start = mark.log_start_offset

    def check_not_dropped(self, offset: int) -> Mark:
        """`OffsetOutOfRangeError` if retention has dropped the offset; otherwise how far the log reaches."""
        mark = self.mark()
        if offset < mark.log_start_offset:
            raise OffsetOutOfRangeError(self.partition, offset, mark.log_start_offset, mark.flushed_end)
        return mark

    def behind_damage(self, offset: int, limit: int) -> int:
        """Where to go on after no whole batch was found at `offset`: the next place below `limit` that has one."""
        if self.writer is None:
            self.refresh()  # or the search would run into what a segment made since has taken over
        base = self.index.find(offset)
        if base is not None:
            with suppress(FileNotFoundError), self._open(base, past_damage=True) as segment:
                last, end = self._end_of(segment, self.mark())
                return after_damage(segment, offset, min(end, limit), last)
        return min(self.index.after(offset) or limit, limit)

    def _open(self, base: int, *, past_damage: bool = False) -> SegmentReader:
        return SegmentReader(self.files, self._path(base), self.identity, base_offset=base if past_damage else None)

    def _path(self, base: int) -> str:
        return os.path.join(self.directory, segment_name(base))


class Cursor(Unique):
    """A place in a log, and reading on from it, block by block."""

    def __init__(
        self,
        log: Log,
        position: int,
        *,
        skip_before: int = 0,
        on_damage: Callable[[Damage], object] | None = None,
    ) -> None:
        self.log = log
        self.position = position  # base offset of the next batch to read
        self._skip_before = skip_before  # in it, the first record wanted
        self._on_damage = on_damage  # is told of damage, past which reading goes on; None: damage is an error
        # Where the batch read last ends, and its CRC: an interrupt may have parted it from the position.
        self._last_read: tuple[int, int] | None = None
        self._segment: SegmentReader | None = None
        self._block_bytes = BLOCK_BYTES
        self._restored = log.restored  # as it was when the segment was opened

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
        retention has overtaken the cursor and `CorruptLogError` where the data is damaged. Where a restore
        has put an older state of the log in place of the one read, `OffsetOutOfRangeError` or, if it has gone
        on from there in another way, `LogMovedError`.
        """
        while True:
            if self._restored != self.log.restored:
                limit = self._check_restored(limit)
            try:
                return self._read(limit)
            except CorruptLogError as error:
                self.log.look(patient=False)  # files that were replaced look like damage
                if self._restored != self.log.restored:
                    continue
                if self._on_damage is None:
                    raise
                self._pass_over(error, limit)

    def _check_restored(self, limit: int) -> int:
        """Go on in the files that have been put in place of those that were read, at the same batch.

        The batch there must follow the one read last: a log that was restored may have gone on otherwise.
        Returns the limit, or the flushed end where no batch of the restored log ends there.
        """
        log, position, restored, mark = self.log, self.position, self.log.restored, self.log.mark()
        self.close()
        try:
            same = log.batch_base(position, mark, past_damage=self._on_damage is not None) == position
        except InvalidOffsetError:
            same = False
        if same and position < mark.flushed_end and self._last_read is not None:
            with log.open_segment(position, past_damage=True) as segment:
                link = self._link_at(position, segment, mark.flushed_end)
                same = self._last_read[0] != position or link in (None, self._last_read[1])
        if not same:
            raise LogMovedError(log.directory, f"was restored; what was read up to {position} is not in it")
        self._restored = restored
        with suppress(OffsetOutOfRangeError, InvalidOffsetError):
            if log.batch_base(limit, mark) == limit:
                return limit
        return mark.flushed_end

    def _read(self, limit: int) -> list[Batch]:
        looked_again = False
        while self.position < limit:
            segment = self._segment
            if segment is None:
                segment = self._segment = self._open()
            end = self.log.index.after(segment.base_offset)
            if end is not None and self.position >= end:
                self.close()
                continue
            stop = limit if end is None else min(limit, end)
            batches = segment.batches(self.position, stop, block_bytes=self._block_bytes)
            if batches:
                self._check_chain(batches, segment, limit)
                used = batches[-1].header.next_offset - self.position
                self.position += used
                # Batches are much of a size: as many fit the next block, and none is read in part.
                self._block_bytes = used + used // 16 if used > BLOCK_BYTES // 2 else BLOCK_BYTES
                if self._skip_before > batches[0].header.base_offset:
                    batches[0] = batches[0].between(self._skip_before, self.position)
                return batches
            self.log.check_not_dropped(self.position)  # or the index knows no more where this segment ended
            if looked_again:
                position = segment.file_position(self.position)
                raise CorruptLogError(segment.path, position, "the end of the file", f"data up to offset {stop}")
            self.log.refresh()  # the writer may have rolled since the last look
            looked_again = True
        return []

    def seek(self, offset: int) -> None:
        """Go to a record's offset or the flushed end; errors as `Log.cursor`."""
        position = self.log.batch_base(offset, self.log.mark(), past_damage=self._on_damage is not None)
        self.place = position, offset
        self._restored = self.log.restored

    @property
    def place(self) -> tuple[int, int]:
        """Where the cursor is, to go back to: the batch, and the first record wanted of it."""
        return self.position, self._skip_before

    @place.setter
    def place(self, place: tuple[int, int]) -> None:
        self.close()
        (self.position, self._skip_before), self._last_read = place, None

    def _open(self) -> SegmentReader:
        try:
            return self.log.open_segment(self.position)
        except CorruptLogError as error:
            if self._on_damage is None:
                raise
            segment = self.log.open_segment(self.position, past_damage=True)
            self._tell(error, range(0))
            return segment

    def _check_chain(self, batches: list[Batch], segment: SegmentReader, limit: int) -> None:
        """Leave away, or refuse, a batch that is whole and stems from another history.

        A write that the disk has lost uncovers what stood there before a crash: a batch that fits its
        place, but that the one behind it does not follow.
        """
        last_read = self._last_read
        before = last_read[1] if last_read is not None and last_read[0] == self.position else None
        ends = [before, *(each.header.header_crc for each in batches)]
        links = [
            *(each.header.previous_crc for each in batches),
            self._link_at(batches[-1].next_offset, segment, limit),
        ]
        wrong = [
            index
            for index, (end, link) in enumerate(zip(ends, links, strict=True))
            if None not in (end, link) and end != link
        ]
        if not wrong:
            self._last_read = batches[-1].next_offset, batches[-1].header.header_crc
            return
        index = wrong[0]
        strange = index if index + 1 in wrong else index - 1  # -1: it was handed out before the next was flushed
        if strange > 0:
            del batches[strange:]
            self._last_read = batches[-1].next_offset, batches[-1].header.header_crc
            return
        found = f"a batch that follows one with CRC {links[index]:08x}"
        position = segment.file_position(batches[0].header.base_offset)
        error = CorruptLogError(segment.path, position, found, f"{ends[index]:08x}, that of the one before")
        if strange == 0 or self._on_damage is None:
            raise error
        self._tell(error, range(0))
        self._last_read = None
        self._check_chain(batches, segment, limit)

    def _link_at(self, offset: int, segment: SegmentReader, limit: int) -> int | None:
        """Which batch the one at `offset` follows, by its CRC; None if there is none yet, or a bad one."""
        if offset >= limit:
            return None
        with suppress(LogError):  # which is met again when it is its turn
            if self.log.index.after(segment.base_offset) != offset:
                return segment.header_at(offset).previous_crc
            with self.log.open_segment(offset, past_damage=True) as following:
                return following.header_at(offset).previous_crc
        return None

    def _pass_over(self, error: CorruptLogError, limit: int) -> None:
        """Go on behind the damage."""
        start = self.position
        self.position = self.log.behind_damage(start, limit)
        self._last_read = None
        self._tell(error, range(start, self.position))

    def _tell(self, error: CorruptLogError, offsets: range) -> None:
        assert self._on_damage is not None
        self._on_damage(Damage.of(error, self.log.partition, offsets))
