"""Writer: the appending side of one partition, from a record to a durable, visible batch.

Invariant: appended records gather in one open batch whose offsets are known at once; a batch is
written at a position that is tracked here (never by the file), and the state moves on by assigning
one new `OpenBatch`, so that an interrupt at any instruction leaves the old state or the new one,
and writing again overwrites the same bytes.

    append      buffered here: at most one batch a partition is in memory
    write       a full batch, or the batch that a flush closes: handed to the system
    flush       fdatasync, then the watermark: synced, acknowledged, visible to readers

Failures: a full disk cuts the file back and drops the open batch, reported with its offsets; a
failed fsync makes the writer refuse everything from then on (`WriterFailedError`), and so do files that
are moved, removed or changed by somebody else (`LogMovedError`), which each write and each flush looks for.

Threads: any number may append and flush. `lock` guards the open batch and the active segment and is
held while a batch is written, never while waiting for a flush. `_turn` is held over fdatasync:
whoever has it syncs for all that wait for it (group commit). Order: _turn, lock, _mark_lock; before all
of them, the lock of a pass of retention (keeper.py).
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import NoReturn, Protocol

from ..config import MAX_BATCH_BYTES, TopicConfig, microseconds
from ..errors import (
    ForkedHandleError,
    InvalidOffsetError,
    LogClosedError,
    LogError,
    LogMovedError,
    RecordTooLargeError,
    StorageFullError,
    StorageIOError,
    WriterFailedError,
    tell_appended,
)
from ..format.batch import NO_PRODUCER, Body, Columns, Header, Producer, encode_body, stamp
from ..format.codec import codec_id
from ..format.jumps import added
from ..format.watermark import NAME as WATERMARK
from ..format.watermark import Mark, WatermarkWriter
from ..index import SegmentIndex
from ..log import Wakeable
from ..records import OffsetRange
from ..recovery import Recovery, Tail, recover
from ..segment import (
    Identity,
    SegmentHeader,
    SegmentReader,
    create_segment,
    producers_name,
    segment_name,
    write_producers,
)
from ..system import lock as writer_lock
from ..system.clock import SYSTEM, Moment, clock_of
from ..system.directory import Directory
from ..system.files import Buffer, Files
from ..system.turn import Turn
from ..timeline import Stamp, began_boottime
from ..unique import Unique
from .active import ActiveSegment
from .open_batch import OpenBatch
from .producers import Producers

__all__ = ["WRITER_DESCRIPTORS", "Timer", "Writer"]

WRITER_DESCRIPTORS = 3  # that a writer keeps open: its directory, the segment and the watermark

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How far a background flush may fall behind the flush policy before appenders flush themselves:
# back-pressure, and the bound on what a crash can take.
_LAG_ALLOWED = 4


# A batch to be written: what is to be stamped on it, its bytes, and who wrote it.
_New = tuple[Body | Header, Sequence[Buffer], Producer]


class Timer(Protocol):
    """What a writer tells the thread that keeps the flush interval."""

    def touch(self) -> None:
        """There are records to flush within the interval."""

    def kick(self) -> None:
        """A flush is due now."""


class Writer(Unique):
    """The one writer of a partition; holds its lock file from construction to `close`.

    Construction recovers the partition (see recovery.py) and raises `LockedError` or
    `CorruptLogError` without having changed anything.
    """

    def __init__(
        self,
        files: Files,
        directory: str,
        identity: Identity,
        config: TopicConfig,
        *,
        index: SegmentIndex,
        clock: Callable[[], int] = SYSTEM,
    ) -> None:
        self._files = files
        self.directory = directory
        self._identity = identity
        self._go_by(config)
        self._index = index
        self._clock = clock_of(clock)
        self.partition = identity.partition
        self.timer: Timer | None = None
        self.on_roll: Callable[[], object] | None = None
        self.believes: Callable[[Moment], bool] = lambda _: False  # whether the wall clock is to be believed, if known
        self._listeners: tuple[weakref.ref[Wakeable], ...] = ()
        self.lock = threading.Lock()
        self._turn = Turn()
        self._mark_lock = threading.Lock()
        self._retired: list[int] = []  # files of sealed segments that a flush may still be syncing
        self._flushed_records = 0
        self._asked = (0, 0)  # records and end of the log when a flush was last asked for
        self._failure: BaseException | None = None
        self._buried = False  # whether what the failure has taken with it is owed
        self._closed: LogClosedError | None = None
        self._to_close: Iterator[int] | None = None  # set when closing has begun
        self._begun_segment = -1  # base offset of a segment that a roll has begun to make
        self._rolled = False
        self._held = writer_lock.acquire(files, os.path.join(directory, writer_lock.NAME), config.permissions)
        self._place = self._held.directory  # where all files are opened, made and removed, wherever its path leads
        try:
            self._start()
            _live.add(self)
        except BaseException:
            self._held.release()
            raise

    def _start(self) -> None:
        recovered = recover(self._place, self._identity, self._config.permissions)
        self.recovery: Recovery = recovered.report
        tail, mark = recovered.tail, recovered.mark
        self._index.replace(recovered.headers)
        self._epoch = max(mark.writer_epoch, tail.writer_epoch) + 1
        self._nonce = int.from_bytes(self._files.random_bytes(4), "little")
        header = recovered.headers[max(recovered.headers)]
        # Of the segments found and made, oldest first, for retention, which takes them out.
        self.stamps = deque(Stamp.of(each) for each in recovered.headers.values())
        self._producers = Producers(self.partition, recovered.producers, lambda: self._headers_with_producers(tail))
        self._with_file = {base for base, each in recovered.headers.items() if each.more_producers}
        path = self._path(segment_name(header.base_offset))
        began = self._began(path, header) if tail.end > header.base_offset else None
        with ExitStack() as opened:
            self._watermark = WatermarkWriter(
                self._files, self._path(WATERMARK), self._identity.salt, mark, within=self._place
            )
            opened.callback(self._watermark.close)
            fd = self._place.open_write(segment_name(header.base_offset))
            opened.callback(self._files.close, fd)
            self._active = ActiveSegment(self._files, fd, path, header.base_offset, began=began)
            self.batch = OpenBatch(tail, self.partition, any_size=self._takes_any_size)
            self._publish(flushed=tail, durable=tail)
            self._watermark.sync()
            opened.pop_all()

    def _began(self, path: str, header: SegmentHeader) -> int:
        with SegmentReader(self._files, path, self._identity, within=self._place) as reader:
            first = reader.header_at(header.base_offset)
        return began_boottime(Stamp.of(header), first.append_time, self._clock.moment())

    def _headers_with_producers(self, tail: Tail) -> Iterator[Header]:
        """The headers of the batches that were in the segment when it was opened, if any names a producer."""
        if tail.producers_in_segment:
            with SegmentReader(self._files, self._active.path, self._identity, within=self._place) as reader:
                yield from reader.headers(self._active.base_offset, tail.end)

    # --- what others may know ------------------------------------------------------------------

    @property
    def place(self) -> Directory:
        """The partition's directory, open."""
        return self._place

    @property
    def flushed_end(self) -> int:
        """Readers see offsets below this."""
        return self._watermark.mark.flushed_end

    @property
    def next_offset(self) -> int:
        """The offset that the next record will get, buffered ones counted."""
        batch = self.batch
        return batch.tail.end + len(batch.values)

    @property
    def end(self) -> Tail:
        """The tail of what has been written."""
        return self.batch.tail

    def mark(self) -> Mark:
        """What has been published last; raises if the writer is closed, or its files are not where readers look."""
        if self._closed is not None:
            raise self._closed
        if isinstance(self._failure, LogMovedError):
            raise self._failure.again()
        return self._watermark.mark

    def is_moved(self) -> bool:
        """Whether the paths lead elsewhere. Takes no lock: a reader may ask in a signal handler."""
        return self._find_moved() is not None

    def is_in(self, directory: Directory) -> bool:
        """Whether the partition's directory, which is locked, is one of those in this directory."""
        return self._place.is_at(self.directory, dir_fd=directory.fd)

    def last_sequence(self, producer_id: int) -> int | None:
        """The sequence of the last batch that a producer appended here; None if it is not known."""
        with self.lock:
            self._check_alive()
            self._note_producer()
            return self._producers.last_sequence(producer_id)

    def listen(self, waiter: Wakeable) -> None:
        """Wake the waiter after every publication, from the thread that flushed, while it lives."""
        with self._mark_lock:
            self._listeners = (*(each for each in self._listeners if each() is not None), weakref.ref(waiter))

    def use(self, config: TopicConfig) -> None:
        """Go on by these policies; what is in the open batch by those under which it was appended."""
        try:
            with self.lock:
                self.check_usable()
                self._seal()
                self._go_by(config)
                self.batch = self._open_batch(self.batch.tail)
        except LogError as error:
            self._tell(error)
            raise

    def _go_by(self, config: TopicConfig) -> None:
        codec = codec_id(config.compression)  # which may need a package that is not installed
        self._config, self._codec = config, codec
        self._segment_age_us = None if config.segment_age is None else microseconds(config.segment_age)
        self._takes_any_size = config.max_record_bytes >= config.batch_bytes

    # --- append --------------------------------------------------------------------------------

    def append(self, columns: Columns, size_bytes: int, *, sync: bool = False) -> range:
        """Add a few records to the open batch; returns their offsets. `size_bytes`: of values and keys.

        An error says in `appended` if they are in all the same: what failed then concerns others.
        """
        offsets: range | None = None
        batch = self.batch
        try:
            with self.lock:
                self.check_usable()
                batch = self.batch
                if batch.values and not batch.has_room(len(columns.values), size_bytes):
                    self._seal()
                    batch = self.batch
                if not batch.values:
                    batch.take_up_to(self._records_wanted(), self._bytes_wanted())
                    if self.timer is not None:
                        self.timer.touch()
                try:
                    offsets = batch.extend(columns, size_bytes)
                except BaseException:
                    batch.resume()
                    raise
                due = self._ask_if_due()
            self._after_append(offsets[-1], due=due and not sync)
            if sync:
                self._flush_record(offsets[-1], batch)
        except BaseException as error:
            self._tell(error, offsets, batch)
            raise
        return offsets

    def append_body(self, body: Body, *, producer: Producer = NO_PRODUCER) -> range:
        """Write encoded records as one batch of their own; returns their offsets.

        With a producer, a batch that it has appended before is not written again: the offsets of
        the first time are returned. `LogError` if the sequence is older than its last one. An error
        says in `appended` if they are in all the same.
        """
        offsets: range | None = None
        try:
            with self.lock:
                self.check_usable()
                if producer != NO_PRODUCER:
                    self._note_producer()
                    seen = self._producers.seen(producer)
                    if seen is not None:
                        return seen
                if body.length > MAX_BATCH_BYTES:
                    raise RecordTooLargeError("the batch", body.length, MAX_BATCH_BYTES)
                self._seal()
                if self.timer is not None:
                    self.timer.touch()
                offsets = self._write(body, body.parts, self._clock.moment(), producer)
                due = self._ask_if_due()
            self._after_append(offsets[-1], due=due)
        except BaseException as error:
            self._tell(error, offsets)
            raise
        return offsets

    def adopt(self, batches: Sequence[tuple[Header, Buffer]], *, preserve_offsets: bool) -> range:
        """Append batches that were encoded elsewhere and checked by the caller; returns the range that they fill.

        Those that share a segment are written together: all or none of them are in the log after an error,
        whose `appended` has the ranges of those that are. With `preserve_offsets` the first one's base
        offset must be this log's end, or `InvalidOffsetError`.
        """
        ranges: list[range] = []
        try:
            with self.lock:
                self.check_usable()
                self._seal()
                start = self.batch.tail.end
                first = batches[0][0].base_offset
                if preserve_offsets and first != start:
                    raise InvalidOffsetError(self.partition, first, range(start, start + 1), start)
                if self.timer is not None:
                    self.timer.touch()
                for part in self._parts(batches):
                    ranges += self._write_together(part, self._clock.moment())
                end = self.batch.tail.end
                due = self._ask_if_due()
            self._after_append(ranges[-1][-1], due=due)
        except BaseException as error:
            self._tell(error)
            tell_appended(error, [OffsetRange(self.partition, each) for each in ranges])
            raise
        return range(start, end)

    def _parts(self, batches: Sequence[tuple[Header, Buffer]]) -> Iterator[list[_New]]:
        """The batches as they share segments. A producer whose numbers do not rise is not believed."""
        self._note_producer()
        known: dict[int, int] = {}
        part: list[_New] = []
        size = 0
        for header, body in batches:
            producer = Producer(header.producer_id, header.producer_sequence)
            if producer.sequence <= known.get(producer.id, -1) or not self._producers.is_news(producer):
                producer = NO_PRODUCER  # of another partition, say: its batches here are no producer's
            else:
                known[producer.id] = producer.sequence
            if part and size + header.length > self._config.segment_bytes:
                yield part
                part, size = [], 0
            part.append((header, [body], producer))
            size += header.length
        yield part

    # --- what is owed ----------------------------------------------------------------------------
    #
    # Whatever is lost is owed first: in the same assignment that drops it, the open batch gets the error that
    # names it. It is paid when a call raises that error, or another one that names it too. So nothing goes
    # untold if an interrupt comes between, or if it was lost in the background; and nothing is told twice.

    def raise_soon(self, error: LogError) -> None:
        """Have the next call raise what went wrong in the background."""
        with self.lock:
            self._bury()
            self.batch.owe(error)

    def check_usable(self) -> None:
        """Raise whatever stands against writing."""
        self._check_alive()
        if self.batch.owed is not None:
            error, self.batch.owed = self.batch.owed, None
            raise error

    def _tell(self, error: BaseException, appended: range | None = None, batch: OpenBatch | None = None) -> None:
        """Have the error that a call is about to raise name what is owed, and what the call has appended to `batch`."""
        if isinstance(error, LogError):
            with self.lock:
                self._bury()
                owed, self.batch.owed = self.batch.owed, None
                if owed is not None and owed is not error:
                    error.take_over(owed)
                    if type(owed) is not type(error):
                        error.add_note(f"before that: {owed}")
        if appended is not None and (batch is None or batch.lost is None):
            tell_appended(error, [OffsetRange(self.partition, appended)])

    def _bury(self) -> None:
        """If the writer has failed: owe what that takes with it, once."""
        failure = self._failure
        if failure is None or self._buried or self._closed is not None:
            return
        batch, durable_end = self.batch, self._watermark.mark.durable_end
        end = batch.tail.end
        error: LogError = WriterFailedError(self._active.path, failure)
        if isinstance(failure, LogMovedError):
            error = failure.again()
        if batch.values:
            if self._active.ends_at(end):
                error.lost = (OffsetRange(self.partition, range(end, end + len(batch.values))),)
                batch.lost = error
            else:  # a write that failed or was interrupted has left bytes, and recovery may find them whole
                end += len(batch.values)
        if durable_end < end:
            error.in_doubt = (OffsetRange(self.partition, range(durable_end, end)),)
        dead = OpenBatch(batch.tail, self.partition, owed=batch.owed)
        dead.owe(error)
        self.batch = dead
        self._buried = True

    def _check_alive(self) -> None:
        if isinstance(self._failure, LogMovedError):
            raise self._failure.again()
        if self._failure is not None:
            raise WriterFailedError(self._active.path, self._failure) from self._failure
        if self._closed is not None:
            raise self._closed

    def _ask_if_due(self) -> bool:
        """Whether a flush is due; then what is to be flushed is written, and the count begins anew."""
        if not self._flush_due():
            return False
        self._seal()
        self._asked = (self.batch.tail.records, self.batch.tail.end)
        return True

    def _flush_due(self) -> bool:
        """Whether the flush policy's limits have been reached since the last flush, or the last asking for one."""
        policy, batch = self._config.flush, self.batch
        records, size = self._unflushed()
        if policy.records is not None and records + len(batch.values) >= policy.records:
            return True
        return policy.bytes is not None and size + batch.buffered_bytes() >= policy.bytes

    def _unflushed(self) -> tuple[int, int]:
        """Records and bytes written and neither flushed nor about to be."""
        tail = self.batch.tail
        return tail.records - max(self._flushed_records, self._asked[0]), tail.end - max(
            self.flushed_end, self._asked[1]
        )

    def _tell_rolled(self) -> None:
        if self._rolled and self.on_roll is not None:
            self._rolled = False
            self.on_roll()

    def _after_append(self, offset: int, *, due: bool) -> None:
        self._tell_rolled()
        if not due:
            return
        if self.timer is None or self._lagging():
            self._flush_record(offset)
        else:
            self.timer.kick()

    def _lagging(self) -> bool:
        policy, tail = self._config.flush, self.batch.tail
        records, size = tail.records - self._flushed_records, tail.end - self.flushed_end
        return (policy.records is not None and records > _LAG_ALLOWED * policy.records) or (
            policy.bytes is not None and size > _LAG_ALLOWED * policy.bytes
        )

    # --- write: `lock` is held -------------------------------------------------------------------

    def _open_batch(self, tail: Tail) -> OpenBatch:
        return OpenBatch(tail, self.partition, any_size=self._takes_any_size, owed=self.batch.owed)

    def _records_wanted(self) -> int:
        """How many records the next batch takes until it is full or a flush is due."""
        limit, records = self._config.batch_records, self._config.flush.records
        if records is None:
            return limit
        return min(limit, records - self._unflushed()[0] % records)

    def _bytes_wanted(self) -> int:
        """How many bytes the next batch takes until it is full or a flush is due."""
        limit, due = self._config.batch_bytes, self._config.flush.bytes
        return limit if due is None else min(limit, due - self._unflushed()[1] % due)

    def _seal(self) -> None:
        """Write the open batch, if it has records."""
        batch = self.batch
        if batch.values:
            now = self._clock.moment()
            body = encode_body(batch.columns(now.wall_us), codec=self._codec)
            self._write(body, body.parts, now, NO_PRODUCER)

    def _write(self, body: Body, parts: Sequence[Buffer], now: Moment, producer: Producer) -> range:
        """Write one batch at the tail and move the tail; returns its records' offsets."""
        return self._write_together([(body, parts, producer)], now)[0]

    def _write_together(self, batches: Sequence[_New], now: Moment) -> list[range]:
        """Write batches at the tail, all or none of them, and move the tail; returns their records' offsets.

        The append time never falls. The records' own times do with the clock: what was appended while the
        clock was wrong must not date what comes after it.
        """
        ranges: list[range] = []
        produced: list[tuple[Producer, range]] = []
        try:
            if self._must_roll(sum([body.length for body, _, _ in batches]), now):
                self._roll(now)
            active, tail = self._active, self.batch.tail
            append_time = max(now.wall_us, tail.append_time)
            for body, parts, producer in batches:
                latest = now.wall_us if body.max_timestamp is None else body.max_timestamp
                running_max = max(tail.running_max_timestamp, latest)
                first = tail.end == active.base_offset  # of its segment: what is known of the one before ends here
                segment_max = latest if first else max(tail.segment_max_timestamp, latest)
                in_segment = producer != NO_PRODUCER or (tail.producers_in_segment and not first)
                jumps = added(None if first else tail.jumps, tail.end)
                header, header_crc = stamp(
                    body,
                    base_offset=tail.end,
                    durable_up_to=self._watermark.mark.durable_end,
                    writer_epoch=self._epoch,
                    writer_nonce=self._nonce,
                    previous_crc=tail.previous_crc,
                    previous_bytes=tail.end - tail.last_batch,
                    jump_offset=jumps.jump_offset,
                    append_time=append_time,
                    event_time=now.wall_us,
                    running_max_timestamp=segment_max,
                    producer=producer,
                    producers_in_segment=in_segment,
                    salt=self._identity.salt,
                )
                active.write([header, *parts], tail.end)
                start, end, records = tail.end, tail.end + body.length, tail.records + body.record_count
                ranges.append(range(start, start + body.record_count))
                if producer != NO_PRODUCER:
                    produced.append((producer, ranges[-1]))
                tail = Tail(
                    end, start, header_crc, append_time, running_max, segment_max, self._epoch, jumps, in_segment,
                    records,
                )  # fmt: skip
        except LogMovedError as error:
            self._fail(error)
        except OSError as error:
            self._cut_back(error)
        self._note_producer()
        if active.began is None:
            active.began = now.boottime_us
        if produced:
            tail = Tail(*tail[:-1], tuple(produced))
        self.batch = self._open_batch(tail)  # the one assignment by which the writing has happened
        return ranges

    def _note_producer(self) -> None:
        """Remember who wrote the last batches; it stands in the tail, so that an interrupt cannot part the two."""
        tail = self.batch.tail
        for producer, offsets in tail.produced:
            self._producers.remember(producer, offsets, tail.append_time)

    def _cut_back(self, error: OSError) -> NoReturn:
        """Undo a write that failed: the open batch is lost, the writer stays usable.

        What is cut must not be there after a power cut either, since an error names it: a batch that lacks nothing but
        zeros at its end would be whole again once the file is longer. So the cut is synced.
        """
        active, batch = self._active, self.batch
        try:
            if active.cut_back(batch.tail.end):
                self._files.datasync(active.fd)
        except LogMovedError as moved:
            self._fail(moved)
        except OSError as second:
            self._poison(second)
        failure: LogError
        if isinstance(error, LogError):  # the roll failed, and has said why
            failure = error
        elif error.errno in _FULL:
            failure = StorageFullError(active.path, error)
        else:
            failure = StorageIOError(active.path, error, "writing a batch")
        batch.lost = failure  # for those who wait for their records to be flushed
        self._drop(failure)
        raise failure from error

    def _drop(self, failure: LogError) -> None:
        """Give up the open batch, whose records the failure is to name."""
        batch = self.batch
        if batch.values:
            end = batch.tail.end
            failure.lost = (*failure.lost, OffsetRange(self.partition, range(end, end + len(batch.values))))
        following = self._open_batch(batch.tail)
        following.owe(failure)
        self.batch = following

    def _must_roll(self, length: int, now: Moment) -> bool:
        end = self.batch.tail.end
        used = end - self._active.base_offset
        if used == 0:
            return False
        if end == self._begun_segment:  # an interrupted roll may have left its file: nothing may be written before it
            return True
        if used + length > self._config.segment_bytes:
            return True
        age, began = self._segment_age_us, self._active.began
        return age is not None and began is not None and now.boottime_us - began >= age

    def _roll(self, now: Moment) -> None:
        """Seal the active segment and begin the next. Synced: both files, the watermark, the name."""
        old, tail = self._active, self.batch.tail
        old.cut_back(tail.end)  # an interrupted write may have left something
        self._sync(old, tail.end)
        self._publish(flushed=tail, durable=tail)
        self._sync_watermark()
        self._note_producer()
        expiry = self._config.producer_expiry
        since = None if expiry is None else now.wall_us - microseconds(expiry)
        if tail.end == self._begun_segment or not self.believes(now):
            # What was begun must be written the same again. And by a clock that is ahead all would be forgotten.
            since = None
        producers = self._producers.snapshot(silent_since_us=since)
        table, more_producers, more_producers_crc = write_producers(
            self._place, tail.end, producers, self._config.permissions
        )
        if more_producers:
            self._with_file.add(tail.end)
        header = SegmentHeader(
            self._identity.log_id, self.partition, self._epoch, tail.end, max(now.wall_us, 0),
            old.base_offset, tail.end - old.base_offset, tail.previous_crc,
            tail.append_time, tail.running_max_timestamp,
            writer_nonce=self._nonce, previous_batch_bytes=tail.end - tail.last_batch,
            created_boottime=now.boottime_us, boot_id=now.boot_id,
            more_producers=more_producers, more_producers_crc=more_producers_crc, producers=table,
        )  # fmt: skip
        self._begun_segment = tail.end
        fd = create_segment(self._place, header, self._config.permissions)
        self._index.add(tail.end)
        self.stamps.append(Stamp.of(header))
        self._active = ActiveSegment(self._files, fd, self._path(segment_name(tail.end)), tail.end)
        self._retired.append(old.fd)
        self._rolled = True

    def roll(self, *, older_than_us: int | None = None) -> bool:
        """Begin a new segment if the active one has records and is at least so old; says if it did."""
        try:
            return bool(self._turn.take(lambda: self._roll_if_due(older_than_us)))
        except LogError as error:
            self._tell(error)
            raise

    def _roll_if_due(self, older_than_us: int | None) -> bool:
        with self.lock:
            self.check_usable()
            self._seal()
            now, began = self._clock.moment(), self._active.began
            if self.batch.tail.end == self._active.base_offset:
                return False
            if older_than_us is not None and (began is None or now.boottime_us - began < older_than_us):
                return False
            try:
                self._roll(now)
            except LogMovedError as error:
                self._fail(error)
            except OSError as error:
                self._cut_back(error)
            self._close_retired()
            self._rolled = False  # who rolls by hand, or by the clock, sees to retention as well
            return True

    # --- flush -----------------------------------------------------------------------------------

    def flush(self, *, background: bool = False) -> None:
        """Make all that was appended durable and visible.

        Raises `StorageFullError` if the open batch could not be written and `WriterFailedError` if
        it could not be synced; unless in the background, also what went wrong there before, when all is flushed.
        """
        if background:
            self._turn.take(self._flush_quietly)  # who calls that sees to what it raises
        else:
            try:
                self._turn.take(self._flush_all)
            except LogError as error:
                self._tell(error)
                raise
        self._tell_rolled()

    def _flush_record(self, offset: int, batch: OpenBatch | None = None) -> None:
        """Make the record at `offset`, appended to `batch`, durable; another thread's flush may do it."""

        def settled() -> bool:
            return offset < self.flushed_end or (batch is not None and batch.lost is not None)

        self._turn.take(self._flush_quietly, unless=settled)  # closing may settle it, too: it has a turn like any flush
        if batch is not None and batch.lost is not None:  # the offset may be flushed by now, but with another record
            raise batch.lost.again() from batch.lost.__cause__
        if isinstance(self._failure, LogMovedError):  # another thread's flush has found that, and said it there
            raise self._failure.again()
        self._tell_rolled()

    def _flush_all(self) -> None:
        self._flush_quietly()
        with self.lock:
            self.check_usable()

    def _flush_quietly(self) -> None:
        with self.lock:
            self._check_alive()
            if self.batch.values:
                self._seal()  # which looks at the segment
                moved = self._find_moved()
            else:
                moved = self._find_gone() or self._find_moved()
            if moved is not None:
                self._leave(moved)
            tail, active = self.batch.tail, self._active
        if tail.end > self.flushed_end:
            durable = None
            if self._config.durability == "disk":
                self._sync(active, tail.end)
                durable = tail
            self._publish(flushed=tail, durable=durable)
        self._flushed_records = tail.records
        self._close_retired()

    def _sync(self, active: ActiveSegment, end: int) -> None:
        try:
            active.sync(durable_end=self._watermark.mark.durable_end, end=end)
        except OSError as error:
            self._poison(error)

    def _sync_watermark(self) -> None:
        try:
            self._watermark.sync()
        except OSError as error:
            self._poison(error)

    def _publish(self, *, flushed: Tail | None = None, durable: Tail | None = None, log_start: int = 0) -> None:
        """Let readers see what lies before `flushed`. Never moves a published end or start back."""
        with self._mark_lock:
            last = self._watermark.mark
            flushed_end, flushed_tail = last.flushed_end, last.flushed_tail
            if flushed is not None and flushed.end >= flushed_end:
                flushed_end, flushed_tail = flushed.end, flushed.last_batch
            durable_end, durable_tail = last.durable_end, last.durable_tail
            if durable is not None and durable.end >= durable_end:
                durable_end, durable_tail = durable.end, durable.last_batch
            mark = Mark(
                last.sequence + 1, max(last.log_start_offset, log_start),
                flushed_end, durable_end, self._epoch, self._nonce, flushed_tail,
                last.applied_txn, last.held_txn, last.held_from, last.promised_epoch, durable_tail,
            )  # fmt: skip
            try:
                self._watermark.publish(mark)
            except OSError as error:
                self._poison(error)
        self._wake()

    def _wake(self) -> None:
        for listener in self._listeners:
            if (waiter := listener()) is not None:
                waiter.wake()

    # --- whether the files are where readers look ------------------------------------------------

    def check_place(self) -> None:
        """`LogMovedError` if the paths lead to the writer's files no more, after which it refuses everything."""
        try:
            self._turn.take(self._check_place)
        except LogError as error:
            self._tell(error)
            raise

    def _check_place(self) -> None:
        with self.lock:
            self._check_alive()
            moved = self._find_gone() or self._find_moved(thorough=True)
            if moved is not None:
                self._leave(moved)

    def _find_gone(self) -> LogMovedError | None:
        """What has become of the segment, if it has no name any more or was changed by somebody else. One fstat."""
        active = self._active
        try:
            active.look(active.file_position(self.batch.tail.end))
        except LogMovedError as error:
            return error
        except OSError as error:
            raise StorageIOError(active.path, error, "looking whether it is still there") from error
        return None

    def _find_moved(self, *, thorough: bool = False) -> LogMovedError | None:
        """What has become of the directory or the watermark, if they are no longer what the path names. One lstat.

        If thorough, also whether the segment alone was moved elsewhere.
        """
        active = self._active
        try:
            if thorough and not self._place.exists(segment_name(active.base_offset)):
                return LogMovedError(active.path, "was moved elsewhere", kept=True)
            if self._watermark.is_named():
                # Of a copy that was made of links the files are the same, and the directory is not.
                if active.links == 1 or self._place.is_named():
                    return None
            elif self._place.is_named():
                path = self._path(WATERMARK)
                return LogMovedError(path, "was removed, or another file put in its place", kept=True)
        except PermissionError:  # this process may have given up the right to look there, as a daemon does
            return None
        except OSError as error:
            raise StorageIOError(self.directory, error, "looking whether it is still there") from error
        return LogMovedError(self.directory, "was moved, or another directory put in its place", kept=True)

    def _leave(self, moved: LogMovedError) -> NoReturn:
        """Make what was appended durable in the files that were moved, if that can be; refuse all from now on."""
        if moved.kept:
            self._seal()
            tail = self.batch.tail
            self._sync(self._active, tail.end)
            self._publish(flushed=tail, durable=tail)
        self._fail(moved)

    def _fail(self, moved: LogMovedError) -> NoReturn:
        self._failure = moved.again()
        self._wake()
        raise moved

    def _poison(self, error: OSError) -> NoReturn:
        self._failure = error
        raise WriterFailedError(self._active.path, error) from error

    def unflushed(self) -> bool:
        """Whether there are records that a flush may still make visible."""
        return self._failure is None and self._closed is None and self.next_offset > self.flushed_end

    def _close_retired(self) -> None:
        while self._retired:
            self._files.close(self._retired.pop())

    # --- retention ---------------------------------------------------------------------------------

    def drop_before(self, base_offset: int) -> list[str]:
        """Drop the sealed segments below `base_offset`, which must be a segment's; returns their paths.

        The new log start is durable before the first file goes, so that a crash between leaves
        files that recovery removes, never a gap.
        """
        try:
            return self._turn.take(lambda: self._drop_before(base_offset)) or []
        except LogError as error:
            self._tell(error)
            raise

    def _drop_before(self, base_offset: int) -> list[str]:
        self._check_place()
        with self.lock:
            self.check_usable()
        dropped = [base for base in self._index.bases() if base < base_offset]
        log_start = self._watermark.mark.log_start_offset
        if not log_start <= base_offset <= self._active.base_offset or not dropped:
            return []  # below the log start: decided before another pass dropped more
        self._publish(log_start=base_offset)
        self._sync_watermark()
        self._publish()  # into the other slot: if either rots, the other knows
        self._sync_watermark()  # before a file goes: a torn write may leave either slot alone
        names = [segment_name(base) for base in dropped]
        for name in names + [producers_name(base) for base in dropped if base in self._with_file]:
            with suppress(FileNotFoundError):  # a pass that an interrupt or a failure ended got so far
                self._place.unlink(name)
        self._with_file.difference_update(dropped)
        self._place.sync()
        self._index.drop_before(base_offset)  # at last: what a pass has left, the next one still knows
        return list(map(self._path, names))

    # --- end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush, sync the watermark and release the partition. Released also when the flush fails.

        When an interrupt ends it, it may be called again, and goes on. The error that it raises, of itself
        or of the background, names the records that were appended and could not be written.
        """
        closed = LogClosedError(f"{self.directory} is closed; open the topic again")
        self._turn.take(lambda: self._settle(closed))
        try:
            self._turn.take(lambda: self._release(closed))
        except OSError as error:
            self._turn.take(lambda: self._release(closed))
            self.batch.owe(StorageIOError(self.directory, error, "closing"))
        owed, self.batch.owed = self.batch.owed, None
        if owed is not None:
            raise owed

    def _settle(self, closed: LogClosedError) -> None:
        """Leave the files as a clean close does: nothing behind the end, everything synced."""
        with self.lock:  # to the end: a record appended in between would be neither written nor refused
            if self._closed is not None:
                return
            try:
                self._check_alive()
                self._seal()
                active, tail = self._active, self.batch.tail
                active.cut_back(tail.end)
                moved = self._find_moved(thorough=True)
                if tail.end > self._watermark.mark.durable_end or active.in_doubt:
                    self._sync(active, tail.end)
                    self._publish(flushed=tail, durable=tail)
                self._publish(flushed=tail, durable=tail)  # both slots say the same of a log at rest
                self._sync_watermark()
                if moved is not None:
                    self._leave(moved)
            except LogError as error:
                self._bury()
                self._drop(error)  # what could not be written, for whatever reason
            except OSError as error:
                self._drop(StorageIOError(self.directory, error, "closing"))
            self._closed = closed

    def _release(self, why: LogClosedError) -> None:
        with self.lock:  # no thread may be writing to a file that is being closed
            self._closed = self._closed or why
            self.batch = OpenBatch(self.batch.tail, self.partition, owed=self.batch.owed)
            if self._to_close is None:
                self._to_close = iter([*self._retired, self._active.fd, self._watermark.fileno()])
                self._retired = []
            # One call from C, which no interrupt can split into a file taken and a file closed.
            try:
                deque(map(self._files.close, self._to_close), maxlen=0)
            finally:
                try:
                    deque(map(self._files.close, self._to_close), maxlen=0)  # those after one that failed
                finally:
                    self._held.release()
            _live.discard(self)

    def abandon_in_child(self, parent_pid: int) -> None:
        """After a fork: the child's copies of the files go, buffers are the parent's to write."""
        self.lock = threading.Lock()
        self._turn = Turn()
        self._mark_lock = threading.Lock()
        self.batch.owed = None
        self._release(ForkedHandleError(self.directory, parent_pid))

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)


_live: weakref.WeakSet[Writer] = weakref.WeakSet()
_pid = os.getpid()


def _abandon_writers() -> None:
    global _pid
    parent_pid, _pid = _pid, os.getpid()
    for writer in list(_live):
        writer.abandon_in_child(parent_pid)


os.register_at_fork(after_in_child=_abandon_writers)
