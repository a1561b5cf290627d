"""Partition: an ordered, append-only sequence of records: the log of one directory and its one writer.

Invariant: order holds only within a partition. Offsets rise, but are not consecutive from batch to batch.
`log_start_offset <= high_watermark <= log_end_offset`, and readers see records below the high watermark.

Threads: safe for all; each of its readers belongs to one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .append.access import Access
from .append.batching import Load, append_loads, append_numbered, weigh
from .append.record_arguments import HeadersLike, gather_columns, record_columns
from .config.arguments import Time, check_count, parse_start
from .config.extras import named_extras
from .config.times import to_text
from .errors import OffsetOutOfRangeError
from .format.display import Bars, Shown, sized
from .format.header import NO_PRODUCER
from .format.record import OffsetRange, Position
from .log.lookup import before_end, resolve
from .log.producers import parse_producer, producer_id
from .log.readable import Readable, Sources
from .log.recovery import Recovery
from .retention import SegmentDecision
from .segment import SegmentInfo
from .system.failures import report_not_appended
from .system.not_copyable import NotCopyable

if TYPE_CHECKING:
    from .log.lag import Lag
    from .log.verify import Progress, VerifyReport


class Partition(Shown, Readable, NotCopyable):
    """One partition of a topic; made by `Topic`, never directly."""

    def __init__(self, access: Access, read_archive: Callable[..., Any]) -> None:
        self.id = access.id
        self.path = access.directory
        self._access = access
        self._read_archive = read_archive

    def _facts(self) -> Iterator[tuple[str, object]]:
        yield "", self.id
        yield "at", self.path
        if self._access.handles.closed is None:
            segments = self.segments
            yield "offsets", f"{self.log_start_offset} to {self.high_watermark}"
            yield "holding", sized(self.high_watermark - self.log_start_offset)
            yield "segments", len(segments)
            yield "since", to_text(segments[0].created)

    def _segment_sizes(self) -> Bars:
        """The bytes in each segment that readers see, by the segment's first offset, from the files' names alone."""
        log = self._access.log
        if log.writer is None:
            log.refresh()
        start, end = self.log_start_offset, self.high_watermark
        edges = [start, *(base for base in log.index.bases() if start < base < end), end]
        return [(f"from offset {low}", high - low) for low, high in pairwise(edges)]

    # --- facts -----------------------------------------------------------------------------------

    @property
    def log_start_offset(self) -> int:
        """First offset still readable."""
        return self._access.log.mark().log_start_offset

    @property
    def high_watermark(self) -> int:
        """Readers see offsets below this: the end of the flushed records."""
        return self._access.log.mark().flushed_end

    @property
    def durable_end(self) -> int:
        """Records below this survive a power cut: the high watermark, or less with `durability="os"`."""
        return self._access.log.mark().durable_end

    @property
    def log_end_offset(self) -> int:
        """The offset that the next record will get; without a writer here, the high watermark."""
        writer = self._access.open_writer
        return self.high_watermark if writer is None or writer.is_parked else writer.next_offset

    def offset_before_end(self, records: int) -> int:
        """The offset of the first of the last `records` records: the log start if there are fewer.

        With 0 it is the high watermark. It reads the headers of the batches that have these records. If damage is in
        the way, it returns the offset after the damage.
        """
        if records:
            check_count("records", records)
        self._access.handles.check_open()
        return before_end(self._access.log, records)

    @property
    def segments(self) -> list[SegmentInfo]:
        """The segment files, oldest first; the last one is open."""
        return self._access.log.segments()

    @property
    def recovery(self) -> Recovery | None:
        """The repairs that opening for writing made; None if this process has not opened it for writing."""
        return None if (writer := self._access.open_writer) is None else writer.disk.recovery

    # --- append ----------------------------------------------------------------------------------

    def append(
        self,
        value: bytes | None,
        key: bytes | None = None,
        *,
        timestamp: int | datetime | None = None,
        headers: HeadersLike | None = None,
        sync: bool = False,
        producer: tuple[str, int] | None = None,
    ) -> Position:
        """Append one record; see `Topic.append`."""
        config = self._access.config
        columns, size = record_columns(value, key, timestamp, headers, limit_bytes=config.max_record_bytes)
        if producer is not None:
            by, writer = parse_producer(producer), self._access.writer()
            return Position(self.id, append_numbered(writer, Load(columns, size), config, by, sync=sync))
        return Position(self.id, self._access.writer().append(columns, size, sync=sync).start)

    def append_many(
        self,
        values: Iterable[bytes | None],
        *,
        keys: Iterable[bytes | None] | None = None,
        timestamps: Iterable[int | datetime] | None = None,
        headers: Iterable[HeadersLike | None] | None = None,
        producer: tuple[str, int] | None = None,
    ) -> list[OffsetRange]:
        """Append many records; returns their offsets in order, as ranges.

        `producer`, a name and a rising number, makes the call idempotent. The records go into one batch. If the
        partition has already seen the call from this producer, it appends nothing and returns the offsets of the
        first time. The partition remembers a producer's last number until `producer_expiry` after its last append;
        `last_sequence` returns the number. An error's `appended` has the ranges of the appended records, and its
        `not_appended` the indexes of the other records.
        """
        columns = gather_columns(values, keys, timestamps, headers)
        count = len(columns.values)
        try:
            by = NO_PRODUCER if producer is None else parse_producer(producer)
            if not count:
                return []
            config, writer = self._access.config, self._access.writer()
            return append_loads({writer: weigh(columns, config, by)}, config, by)
        except BaseException as error:
            report_not_appended(error, {self.id: range(count)})
            raise

    def append_arrow(
        self,
        data: Any,
        *,
        value: str | None = None,
        key: str | None = None,
        timestamp: str | None = None,
        headers: str | None = None,
        producer: tuple[str, int] | None = None,
    ) -> list[OffsetRange]:
        """Append the rows of a table in Arrow's memory, each as a record; see `Topic.append_arrow`."""
        with named_extras():
            from .append.tables import Names, Route, append_table

        by, writer = NO_PRODUCER if producer is None else parse_producer(producer), self._access.writer()
        names, route = Names(value, key, timestamp, headers), Route(lambda _: writer, self.id)
        return append_table(data, names, route, self._access.config, by, self._access.clock)

    def last_sequence(self, producer: str) -> int | None:
        """The number of the producer's last append here, to continue from; None if it is not known.

        Like an append, this needs the partition for writing. Unflushed appends count, but a crash may undo them.
        """
        return self._access.writer().last_sequence(producer_id(producer))

    def flush(self) -> None:
        """Make everything appended durable and visible to readers."""
        if (writer := self._access.open_writer) is not None:
            writer.flush()

    def receive(self, source: Any, *, preserve_offsets: bool = False) -> range | None:
        """Append the batches of one frame that `transfer` sent; None at the end of the stream.

        The whole frame is read into memory (up to the sender's `max_bytes`) and checked before any of it is
        appended. After `CorruptLogError`, `RecordTooLargeError` (a record above `max_record_bytes`) or a time-out
        nothing of it is in the log. Each batch gets new offsets. With `preserve_offsets` it must begin at the end
        of this log, else `InvalidOffsetError` is raised. Returns the range of the log that the batches fill.

        If writing fails, all batches of the frame in the same segment are undone. The error's `resume_at` is the
        sender's offset to continue from, and its `appended` has the ranges before it.
        """
        from .append.transfer import read_frame

        writer = self._access.writer()
        batches = read_frame(source, max_record_bytes=self._access.config.max_record_bytes)
        if not batches:
            return None
        try:
            return writer.adopt(batches, preserve_offsets=preserve_offsets)
        except BaseException as error:
            following = [header.base_offset for header, _ in batches] + [batches[-1][0].next_offset]
            vars(error)["resume_at"] = following[len(getattr(error, "appended", ()))]
            raise

    # --- read ------------------------------------------------------------------------------------

    def _sources(self) -> Sources:
        access = self._access
        return Sources([access.log], access.clock, access.handles.track)

    def offset_at(self, time: datetime | timedelta | str) -> int:
        """The offset of the first record at or after a time; the high watermark if there is none.

        `time` is an aware datetime, an age (a timedelta, or "-15m"), or text with its zone ("2024-05-01T12:00Z").
        Records are compared by their event times. A damaged batch that may contain the record counts as the first.
        """
        self._access.handles.check_open()
        start = parse_start(time, now_us=self._access.clock())
        if not isinstance(start, Time):
            raise ValueError(f"{time!r} is no time; give an aware datetime, an age, or text such as '-15m'")
        return resolve(self._access.log, start, past_damage=True)

    def transfer(self, to: Any, start: int, max_bytes: int = 64 << 20) -> int:
        """Send flushed batches as stored to a socket, pipe or file; returns the offset to continue from.

        `os.sendfile` sends the bytes from the page cache to the target; `receive` takes them. It sends whole
        batches up to `max_bytes`, but at least one. If `start` is the high watermark, it sends nothing.
        """
        from .append.transfer import send

        if type(start) is not int or type(max_bytes) is not int:
            raise TypeError(f"an offset and a number of bytes must be whole numbers, not {start!r} and {max_bytes!r}")
        return send(self._access.log, to, start, max_bytes=max_bytes)

    def verify(self, *, progress: Progress | None = None, tail_only: bool = False) -> VerifyReport:
        """Read and check everything below the high watermark, and report all damage in `VerifyReport.damage`.

        `progress` is called after each block of batches with two numbers of bytes: those that are checked, and all.
        With `tail_only` it checks the end of the log alone, as `Topic.verify` does.
        """
        from .log.verify import verify_logs

        return verify_logs([self._access.log], progress, tail_only=tail_only)

    def lag(self, offset: int, *, count_records: bool = False) -> Lag:
        """The lag of a reader that will read `offset` next: bytes to the high watermark, and the age of that record.

        It is for positions that are not those of a group. An offset that retention has dropped counts as the log start,
        and one at or above the high watermark is no lag. `count_records` also counts the records, by reading the
        header of each batch. Raises `CorruptLogError` if the header of the record's batch is damaged.
        """
        from .log.lag import measure_lag

        self._access.handles.check_open()
        log = self._access.log
        found = measure_lag(log, offset, now_us=self._access.clock(), count_records=count_records)
        log.release_files()  # so that few of thousands of logs have open files
        return found

    # --- housekeeping ----------------------------------------------------------------------------

    def roll(self) -> bool:
        """Seal the open segment and begin a new one; False if it is empty."""
        return self._access.writer().roll()

    def retain(self, *, dry_run: bool = False) -> list[SegmentDecision]:
        """Drop segments by the retention policy; returns the decision for every segment.

        Only one pass runs at a time: a roll, the housekeeping thread and the application may each begin one.
        """
        self._access.handles.check_open()
        if dry_run:
            return self._access.retention.explain([self.id])
        self._access.writer()  # this process must own the partition
        return self._access.retention.retain(self.id)

    def delete_before(self, offset: int) -> int:
        """Drop the segments that lie wholly before a record's offset; returns the new log start, at or below it.

        With the high watermark as `offset`, all flushed records are dropped, after a new segment is begun. Raises
        `OffsetOutOfRangeError` for an offset outside the log, and `LockedError` if another process writes here.
        """
        writer = self._access.writer()
        with writer.held():
            mark = self._access.log.mark()
            if not mark.log_start_offset <= offset <= mark.flushed_end:
                raise OffsetOutOfRangeError(self.id, offset, mark.log_start_offset, mark.flushed_end)
            if offset == mark.flushed_end and offset == writer.next_offset:
                writer.roll()
            writer.drop_before(self._access.log.index.find(offset) or 0)
        return self.log_start_offset


class Partitions(NotCopyable):
    """The partitions of one topic, by number. Their number may grow.

    Two threads that add a partition together keep the same one.
    """

    def __init__(self, make_access: Callable[[int], Access], read_archive: Callable[..., Any]) -> None:
        self._make_access = make_access
        self._read_archive = read_archive
        self._made: dict[int, tuple[Access, Partition]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, number: int) -> Partition:
        return self._made[number][1]

    def grow(self, count: int) -> None:
        """Add partitions, up to a total of `count`."""
        for number in range(len(self._made), count):
            access = self._make_access(number)
            self._made.setdefault(number, (access, Partition(access, self._read_archive)))

    def accesses(self) -> tuple[Access, ...]:
        """The access to each partition."""
        return tuple([access for access, _ in list(self._made.values())])

    def all(self) -> tuple[Partition, ...]:
        """The partitions."""
        return tuple([partition for _, partition in list(self._made.values())])


class ShownByPartition(Shown, ABC):
    """A base class of a topic: in a notebook it shows its partitions as a table, and their sizes as a chart."""

    @property
    @abstractmethod
    def partitions(self) -> tuple[Partition, ...]:
        """The partitions, by number."""

    def _rows(self) -> Iterator[Sequence[object]]:
        yield "partition", "from offset", "to offset", "holding"
        for each in self.partitions:
            start, end = each.log_start_offset, each.high_watermark
            yield each.id, start, end, sized(end - start)

    def _bars(self) -> tuple[str, Bars]:
        partitions = self.partitions
        if len(partitions) == 1:
            return "bytes by segment", partitions[0]._segment_sizes()  # noqa: SLF001  A class of this module.
        sizes = [(f"{each.id}", each.high_watermark - each.log_start_offset) for each in partitions]
        return "bytes by partition", sizes
