"""Partition: an ordered, append-only run of records; the log of one directory and its one writer.

Invariant: order holds here and only here. Offsets rise and are not consecutive from batch to batch;
`log_start_offset <= high_watermark <= log_end_offset`, and readers see what lies below the second.

Threads: safe for all; each reader it gives out belongs to one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from .arguments import HeadersLike, check_columns, gather_columns, record_columns
from .batch import Columns, Producer, encode_body
from .bulk import BULK_RECORDS, chunks, encode_all
from .check import CheckReport, check_log, verify_log
from .codec import codec_id
from .config import TopicConfig, microseconds
from .errors import LogClosedError, LogError, ReadOnlyError, StorageIOError
from .files import Files
from .handles import Handles
from .log import Log
from .reader import OnGap, Reader, StartLike
from .records import Batch, OffsetRange, Position
from .recovery import Recovery
from .retention import Decision, Space, decide
from .segment import Identity, SegmentInfo
from .transfer import read_frame, send
from .unique import Unique
from .writer import Writer

__all__ = ["Partition", "append_groups"]

# The wall clock may drift from the monotonic one by this much between two retention passes before
# the pass is left out: a clock set wrong for an hour must not cost a week of data.
_CLOCK_JUMP_US = 60 * 60 * 1_000_000


class Partition(Unique):
    """One partition of a topic; made by `Topic`, never directly."""

    def __init__(
        self,
        files: Files,
        directory: str,
        identity: Identity,
        config: TopicConfig,
        *,
        writable: bool,
        clock: Callable[[], int],
        handles: Handles,
    ) -> None:
        self.id = identity.partition
        self.path = directory
        self._files = files
        self._identity = identity
        self._config = config
        self._writable = writable
        self._clock = clock
        self._handles = handles
        self._log = Log(files, directory, identity)
        self._writer: Writer | None = None
        self._clocks_at_retention: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return f"<Partition {self.id} at {self.path!r}>"  # no offsets: a look at the disk may fail

    # --- facts -----------------------------------------------------------------------------------

    @property
    def log_start_offset(self) -> int:
        """First offset still readable."""
        return self._log.mark().log_start_offset

    @property
    def high_watermark(self) -> int:
        """Readers see offsets below this: what has been flushed."""
        return self._log.mark().flushed_end

    @property
    def log_end_offset(self) -> int:
        """The offset that the next record will get; without a writer here, the high watermark."""
        return self.high_watermark if self._writer is None else self._writer.next_offset

    @property
    def segments(self) -> list[SegmentInfo]:
        """The segment files, oldest first; the last one is open."""
        return self._log.segments()

    @property
    def recovery(self) -> Recovery | None:
        """What opening for writing found and mended; None when opened for reading."""
        return None if self._writer is None else self._writer.recovery

    @property
    def log(self) -> Log:
        """The reading side, for adapters that plan their own reads."""
        return self._log

    # --- append ----------------------------------------------------------------------------------

    def append(
        self,
        value: bytes | None,
        key: bytes | None = None,
        *,
        timestamp: int | datetime | None = None,
        headers: HeadersLike | None = None,
        sync: bool = False,
    ) -> Position:
        """Append one record; see `Topic.append`."""
        columns, size = record_columns(value, key, timestamp, headers, limit_bytes=self._config.max_record_bytes)
        return Position(self.id, self.writer().append(columns, size, sync=sync).start)

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

        `producer`, a name and a rising number, makes the call idempotent: the records go into one
        batch, and a call that the partition has seen from this producer appends nothing and returns
        what it returned then. The partition remembers the last number of 125 producers.
        """
        columns = gather_columns(values, keys, timestamps, headers)
        return append_groups({self: columns} if columns.values else {}, self._config, producer=producer)

    def append_columns(
        self, columns: Columns, size_bytes: int, *, producer: tuple[str, int] | None = None
    ) -> list[OffsetRange]:
        """Append records that are checked columns already."""
        writer = self.writer()
        if producer is not None:
            body = encode_body(columns, codec=codec_id(self._config.compression))
            return [OffsetRange(self.id, writer.append_body(body, producer=_producer(*producer)))]
        if 2 * size_bytes < self._config.batch_bytes and len(columns.values) <= self._config.batch_records:
            return [OffsetRange(self.id, writer.append(columns, size_bytes))]
        codec = codec_id(self._config.compression)
        return [
            OffsetRange(self.id, writer.append_body(encode_body(chunk, codec=codec)))
            for chunk in chunks(columns, self._config)
        ]

    def flush(self) -> None:
        """Make everything appended durable and visible to readers."""
        if self._writer is not None:
            self._writer.flush()

    def receive(self, source: Any, *, preserve_offsets: bool = False) -> range | None:
        """Append the batches of one frame that `transfer` sent; None at the end of the stream.

        Each batch is checked and gets a new place here, or with `preserve_offsets` must continue
        this log where it ends, else `InvalidOffsetError`. Returns the range of the log they fill.
        """
        writer = self.writer()
        start: int | None = None
        end = 0
        for header, body in read_frame(source):
            offsets = writer.adopt(header, body, preserve_offsets=preserve_offsets)
            start = offsets.start if start is None else start
            end = offsets.start + header.length
        return None if start is None else range(start, end)

    # --- read ------------------------------------------------------------------------------------

    def read(self, start: StartLike = "begin", end: StartLike | None = None, *, on_gap: OnGap = "raise") -> Reader:
        """A reader that ends at `end`, or at the end as of now."""
        return self._handles.track(Reader([self._log], start, end=end, on_gap=on_gap, clock=self._clock))

    def follow(self, start: StartLike = "end", timeout: float | None = None, *, on_gap: OnGap = "raise") -> Reader:
        """A reader that waits for more, for ever or until `timeout` seconds bring nothing."""
        return self._handles.track(
            Reader([self._log], start, follow=True, timeout=timeout, on_gap=on_gap, clock=self._clock)
        )

    def batches(
        self, start: StartLike = "begin", end: StartLike | None = None, *, on_gap: OnGap = "raise"
    ) -> Iterator[Batch]:
        """Whole columns from `start` to `end`, or to the end as of now."""
        return self.read(start, end, on_gap=on_gap).batches()

    def transfer(self, to: Any, start: int, max_bytes: int = 64 << 20) -> int:
        """Send flushed batches as stored to a socket, pipe or file; returns the offset to go on from.

        The bytes go from the page cache to the target by `os.sendfile`; `receive` takes them. Sends
        whole batches up to `max_bytes`, but at least one; nothing if `start` is the high watermark.
        """
        if type(start) is not int or type(max_bytes) is not int:
            raise TypeError(f"an offset and a number of bytes must be whole numbers, not {start!r} and {max_bytes!r}")
        return send(self._log, to, start, max_bytes=max_bytes)

    def check(self) -> CheckReport:
        """Verify every byte below the high watermark; raises `CorruptLogError` at the first fault."""
        return check_log(self._log)

    def verify(self) -> CheckReport:
        """The same, but go on after a fault and report all of them, in `CheckReport.damage`."""
        return verify_log(self._log)

    # --- housekeeping ----------------------------------------------------------------------------

    def roll(self) -> bool:
        """Seal the open segment and begin a new one; False if it is empty."""
        return self.writer().roll()

    def retain(self, *, dry_run: bool = False) -> list[Decision]:
        """Drop what the retention policy gives up; returns the decision for every segment.

        One pass at a time: a roll, the housekeeping thread and the application may each begin one.
        """
        if dry_run:
            return self._retain(dry_run=True)
        with self.writer().retaining:
            return self._retain(dry_run=False)

    def _retain(self, *, dry_run: bool) -> list[Decision]:
        if self._writer is not None:
            self._writer.check_place()
        now = self._clock()
        space = Space(*self._files.free_space(self.path))
        decisions = decide(self.id, self.segments, self._config.retention, now_us=now, space=space)
        if dry_run:
            return decisions
        if self._clock_jumped(now):
            return [each._replace(drop=False, reason="the clock has jumped; not now") for each in decisions]
        kept = [each.base_offset for each in decisions if not each.drop]
        if len(kept) < len(decisions):
            self.writer().drop_before(kept[0])
        return decisions

    def keep_house(self) -> None:
        """What is due by the clock: rolling an old segment, then retention."""
        if self._writer is not None:
            self._in_background(self._roll_if_old)
            self._in_background(self.retain)

    def _roll_if_old(self) -> None:
        age = self._config.segment_age
        if age is not None:
            self.writer().roll(older_than_us=microseconds(age))

    def _in_background(self, action: Callable[[], object]) -> None:
        """Do what nobody has asked for just now; what goes wrong is raised by the writer's next call."""
        try:
            action()
        except LogClosedError:
            return
        except LogError as error:
            self.writer().raise_soon(error)
        except OSError as error:
            self.writer().raise_soon(StorageIOError(self.path, error, "housekeeping"))

    def _clock_jumped(self, now: int) -> bool:
        last, self._clocks_at_retention = self._clocks_at_retention, (now, time.monotonic_ns() // 1000)
        if last is None:
            return False
        wall, monotonic = now - last[0], self._clocks_at_retention[1] - last[1]
        return abs(wall - monotonic) > _CLOCK_JUMP_US

    # --- the writer ------------------------------------------------------------------------------

    @property
    def owned(self) -> bool:
        """Whether this process writes here."""
        return self._writer is not None

    def writer(self) -> Writer:
        """The writer, whose lock is taken at the first call; `LockedError` if another process has it."""
        if self._writer is not None:
            return self._writer
        if not self._writable:
            raise ReadOnlyError(self.path)
        with self._handles.opening:
            self._handles.check_open()
            if self._writer is None:  # still, now that no other thread is opening it
                writer = Writer(
                    self._files, self.path, self._identity, self._config, index=self._log.index, clock=self._clock
                )
                writer.on_roll = lambda: self._in_background(self.retain)
                self._handles.add_writer(writer)
                self._log.writer = self._writer = writer
            return self._writer

    def close(self) -> None:
        """Flush, release the lock and close the files."""
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            self._log.close()


def append_groups(
    groups: Mapping[Partition, Columns], config: TopicConfig, *, producer: tuple[str, int] | None = None
) -> list[OffsetRange]:
    """Append gathered records to their partitions; what is refused is refused before anything is appended."""
    bulk: dict[Partition, Columns] = {}
    few: dict[Partition, tuple[Columns, int]] = {}
    for partition, columns in groups.items():
        partition.writer()
        if producer is None and len(columns.values) >= BULK_RECORDS:
            bulk[partition] = columns
        else:
            few[partition] = check_columns(columns, limit_bytes=config.max_record_bytes)
    bodies = encode_all(bulk, config, codec_id(config.compression))
    ranges = [OffsetRange(partition.id, partition.writer().append_body(body)) for partition, body in bodies]
    for partition, (columns, size) in few.items():
        ranges += partition.append_columns(columns, size, producer=producer)
    return ranges


def _producer(name: str, sequence: int) -> Producer:
    """A producer's name as the number that the batch header has room for."""
    from hashlib import blake2b  # here, since importing it takes longer than the rest of the library

    if not 0 <= sequence < 1 << 64:
        raise ValueError(f"a producer's sequence must be a number of 64 bits, not {sequence}")
    return Producer(int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") or 1, sequence)
