"""Writer: the appending side of one partition, from a record to a durable, visible batch.

Invariant: appended records gather in one open batch, and their offsets are known at once. The batch
also holds the tail of the log that it will follow. One assignment of a new `OpenBatch` changes the state.
So an interrupt at any instruction leaves the old state or the new one, and a repeated write overwrites the
same bytes.

    append      buffered here: at most one batch per partition is in memory
    write       a full batch, or the batch that a flush closes: handed to the system (see tail.py)
    flush       fdatasync, then the watermark: synced, acknowledged, visible to readers

Failures: after a failed write (on a full disk, for example) the file is cut back and the open batch is
dropped; the error names its offsets. After a failed fsync the writer refuses every call
(`WriterFailedError`). It also refuses every call if another program has moved, removed or changed its files
(`LogMovedError`): each write and each flush checks that.

Threads: any number may append and flush. `lock` guards the open batch and the active segment. It is
held while a batch is written, and never during the sync of a flush. `_turn` is held during the sync:
the thread that has it syncs for all waiting threads (group commit). Locks are acquired in this order: the
lock of a retention pass (retention_pass.py), _turn, lock, the lock of a publication (tail.py).
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import NoReturn, Protocol, TypeVar

from ..config.policies import MAX_BATCH_BYTES, TopicConfig
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
    report_appended,
)
from ..format.codec import codec_id
from ..format.columns import Columns
from ..format.header import NO_PRODUCER, SECTION, Body, Header, Producer, encode_body
from ..format.record import OffsetRange
from ..format.watermark import Mark
from ..log.index import SegmentIndex
from ..log.log import Wakeable
from ..log.recovery import Tail
from ..segment import Identity
from ..system import lock
from ..system.clock import SYSTEM, Moment, clock_of
from ..system.directory import Directory
from ..system.files import Buffer, Files
from ..system.group_commit import Turn
from ..system.not_copyable import NotCopyable
from ..system.process import finish, in_child
from ..system.reentry import asker, refuse
from .active import ActiveSegment
from .flush_times import FlushClock
from .open_batch import OpenBatch
from .tail import NO_HOLD, Copies, Hold, NewBatch, TailWriter, Txn

__all__ = ["WRITER_DESCRIPTORS", "Timer", "Writer"]

WRITER_DESCRIPTORS = 3  # open files of a writer: its directory, the segment and the watermark

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP)
# How many times the flush policy's limit may be unflushed before appending threads flush themselves.
# This is back-pressure, and it limits what a crash can lose.
_LAG_ALLOWED = 4

T = TypeVar("T")

_in_child = in_child()


class Timer(Protocol):
    """The writer's view of the thread that keeps the flush interval."""

    def touch(self) -> None:
        """There are records to flush within the interval."""

    def kick(self) -> None:
        """A flush is due now."""


class Writer(NotCopyable):
    """The one writer of a partition. It holds the partition's lock from construction to `close`.

    Construction recovers the partition (see log/recovery.py). If it raises `LockedError` or `CorruptLogError`,
    it has changed nothing. `held`: the lock, if the caller has it already. `copies`: the partition's other directories.
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
        held: lock.Lock | None = None,
        copies: Copies | None = None,
    ) -> None:
        self._files = files
        self.directory = directory
        self._go_by(config)
        self._clock = clock_of(clock)
        self.partition = identity.partition
        self.timer: Timer | None = None
        self.on_roll: Callable[[], object] | None = None
        self.lock = threading.RLock()  # reentrant, so that it knows its thread; no call takes it twice
        self.has_lock = asker(self.lock)  # whether the calling thread has it
        self.applying = threading.RLock()  # of a section: before all other locks
        self._turn = Turn()
        self.flush_clock = FlushClock()
        self._flushed_records = 0
        self._asked = (0, 0)  # records and end of the log when a flush was last asked for
        self._buried = False  # whether the records that a failure has lost are already owed
        self._closed: LogClosedError | None = None
        self._to_close: Iterator[tuple[Callable[[int], object], int]] | None = None  # set when closing begins
        path = os.path.join(directory, lock.NAME)
        self._held = held or lock.acquire(files, path, config.permissions)
        try:
            self.disk = TailWriter(
                self._held.directory, identity, config, index=index, moment=self._clock.moment, copies=copies
            )
            self.batch = OpenBatch(self.disk.start, self.partition, any_size=self._takes_any_size)
            self._opened_at = self.disk.start.end
            _in_child.add(self.abandon_in_child)
        except BaseException:
            self._held.release()
            raise

    # --- facts for other modules ---------------------------------------------------------------

    @property
    def flushed_end(self) -> int:
        """Readers see offsets below this."""
        return self.disk.mark.flushed_end

    @property
    def next_offset(self) -> int:
        """The offset that the next record will get, after the buffered records."""
        batch = self.batch
        return batch.tail.end + len(batch.values)

    def flushed(self) -> tuple[int, int]:
        """The records and the bytes of log that this writer has made visible."""
        return self._flushed_records, self.flushed_end - self._opened_at

    def mark(self) -> Mark:
        """The last publication; raises if the writer is closed, or if its files are not where readers look."""
        if self._closed is not None:
            raise self._closed
        if isinstance(self.disk.failure, LogMovedError):
            raise self.disk.failure.again()
        return self.disk.mark

    def is_moved(self) -> bool:
        """Whether the paths lead to other files. Takes no lock: a reader may ask in a signal handler."""
        return self.disk.find_moved() is not None

    def is_in(self, directory: Directory) -> bool:
        """Whether this directory contains the partition's locked directory."""
        return self.disk.place.is_at(self.directory, dir_fd=directory.fd)

    def check_outside(self) -> None:
        """`LogError` in the middle of a call of this thread that has a lock which other threads may wait for."""
        if self.has_lock() or self.disk.publishes():
            refuse(self.directory)

    def last_sequence(self, producer_id: int) -> int | None:
        """The sequence of the last batch that a producer appended here; None if it is not known."""
        self.check_outside()
        with self.lock:
            self._check_alive()
            self.disk.note_producers(self.batch.tail)
            return self.disk.producers.last_sequence(producer_id)

    def listen(self, waiter: Wakeable) -> None:
        """Wake the waiter after every publication, from the flushing thread, while the waiter exists."""
        self.disk.listen(waiter)

    def use(self, config: TopicConfig) -> None:
        """Use these policies from now on. The records in the open batch are written by the old ones."""
        self.check_outside()
        try:
            with self.lock:
                self.check_usable()
                self._seal()
                self._go_by(config)
                self.disk.go_by(config)
                self.batch = self._open_batch(self.batch.tail)
        except LogError as error:
            self._report(error)
            raise

    def _go_by(self, config: TopicConfig) -> None:
        codec = codec_id(config.compression)  # first: it raises if the codec's package is not installed
        self._config, self._codec = config, codec
        self._takes_any_size = config.max_record_bytes >= config.batch_bytes
        # The records and bytes that a batch takes until it is full or a flush is due, if all before it is flushed.
        records, size_bytes = config.flush.records, config.flush.bytes
        self._limits = (
            min(config.batch_records, records or config.batch_records),
            min(config.batch_bytes, size_bytes or config.batch_bytes),
        )

    # --- append --------------------------------------------------------------------------------

    def append(self, columns: Columns, size_bytes: int, *, sync: bool = False) -> range:
        """Add a few records to the open batch; returns their offsets. `size_bytes`: of values and keys.

        If they were appended although the call raises an error, its `appended` has their offsets.
        """
        self.check_outside()
        if sync:
            self._turn.check_outside(self.directory)
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
                    self._begin(batch)
                try:
                    offsets = batch.extend(columns, size_bytes)
                except BaseException:
                    batch.resume()
                    raise
                due = batch.is_full() and self._ask_if_due()
            if sync:
                self._flush_record(offsets[-1], batch)
            elif due or self.disk.rolled:
                self._after_append(offsets[-1], due=due)
        except BaseException as error:
            self._report(error, offsets, batch)
            raise
        return offsets

    def append_lone(self, value: bytes, *, sync: bool) -> int | None:
        """Append one value and flush it, as `append` does, if nothing else waits for a flush. Returns its offset.

        None, and nothing is appended, if `append` must do it: if other records wait, if an error is to be raised, or
        if the flush is not this call's. The record lies in the open batch until it is written, as any other.
        """
        self.check_outside()
        config = self._config
        if not sync and (self.timer is not None or config.flush.records != 1):
            return None
        offsets: range | None = None
        batch = self.batch

        def append_and_flush() -> None:
            nonlocal batch, offsets
            with self.lock:
                batch = self.batch
                end, size_bytes = batch.tail.end, len(value)
                # A batch with a limit has records, or an interrupt has left it half begun.
                if batch.limit or end != self.disk.mark.flushed_end or size_bytes > config.max_record_bytes:
                    return
                if batch.owed is not None or self.disk.failure is not None or self._closed is not None:
                    return
                if self.timer is not None:
                    self.timer.touch()
                batch.limit, batch.capacity = self._limits
                batch.room = batch.capacity - size_bytes
                offsets = range(end, end + 1)
                batch.values.append(value)
                if self._codec or not self._write_one(value, None, self._clock.moment()):  # each looks at the segment
                    self._seal()
                if (moved := self.disk.find_moved()) is not None:
                    self._leave(moved)
                tail, active = self.batch.tail, self.disk.active
            self._publish(tail, active)

        try:
            self._turn.take_at_once(append_and_flush)
        except BaseException as error:
            appended = bool(batch.values) and batch.values[0] is value  # else an interrupt came just before that
            self._report(error, offsets if appended else None, batch)
            raise
        if offsets is None:
            return None
        if self.disk.rolled:
            self._tell_rolled()
        return offsets.start

    def append_at_once(self, columns: Columns, size_bytes: int) -> int | None:
        """Append one record to the open batch and return its offset; None if that needs more than memory.

        None also if another thread has the lock, if the record makes a flush due, or if an error is owed: `append`
        then does the same and may wait. After None nothing is appended.
        """
        self.check_outside()
        if not self.lock.acquire(blocking=False):
            return None
        try:
            batch = self.batch
            try:
                return batch.extend(columns, size_bytes)[0] if self._has_room_at_once(batch, size_bytes) else None
            except BaseException:
                batch.resume()
                raise
        finally:
            self.lock.release()

    def _begin(self, batch: OpenBatch) -> None:
        """Before the first record of a batch: set its limits, and let the timer flush it."""
        batch.take_up_to(*self._wanted())
        if self.timer is not None:
            self.timer.touch()

    def _has_room_at_once(self, batch: OpenBatch, size_bytes: int) -> bool:
        """Whether one record neither fills the open batch nor makes a flush due."""
        if self.timer is None or self._closed or self.disk.failure or batch.owed:
            return False
        if not batch.values:
            self._begin(batch)
        return len(batch.values) + 1 < batch.limit and size_bytes < batch.bytes_left()

    def append_body(self, body: Body, *, producer: Producer = NO_PRODUCER) -> range:
        """Write encoded records as a separate batch, as `append_bodies` does; returns their offsets."""
        (offsets,) = self.append_bodies([body], producer=producer)
        return offsets

    def append_bodies(self, bodies: Sequence[Body], *, producer: Producer = NO_PRODUCER) -> list[range]:
        """Write encoded records as separate batches; returns the offsets of each.

        Batches that share a segment are written together: after an error either all or none of them are in the log.
        With a producer there is one batch. If the producer has appended it before, it is not written again: the call
        returns the offsets of the first time. `LogError` if the sequence is older than the producer's last one. If
        records were appended although the call raises an error, its `appended` has their offsets.
        """
        self.check_outside()
        ranges: list[range] = []
        try:
            with self.lock:
                self.check_usable()
                if producer != NO_PRODUCER:
                    self.disk.note_producers(self.batch.tail)
                    seen = self.disk.producers.seen(producer)
                    if seen is not None:
                        return [seen]
                for body in bodies:
                    if body.length > MAX_BATCH_BYTES:
                        raise RecordTooLargeError("the batch", body.length, MAX_BATCH_BYTES)
                self._seal()
                if self.timer is not None:
                    self.timer.touch()
                for part in self._by_segment([NewBatch(body, body.parts, producer) for body in bodies]):
                    ranges += self._write(part, self._clock.moment())
                due = self._ask_if_due()
            self._after_append(ranges[-1][-1], due=due)
        except BaseException as error:
            self._report(error)
            report_appended(error, [OffsetRange(self.partition, each) for each in ranges])
            raise
        return ranges

    def _by_segment(self, batches: Sequence[NewBatch]) -> Iterator[list[NewBatch]]:
        """The batches that fit the active segment together, and then those of each following segment."""
        part: list[NewBatch] = []
        size = self.batch.tail.end - self.disk.active.base_offset
        for batch in batches:
            if part and size + batch.body.length > self.disk.segment_bytes():
                yield part
                part, size = [], 0
            part.append(batch)
            size += batch.body.length
        yield part

    def adopt(self, batches: Sequence[tuple[Header, Buffer]], *, preserve_offsets: bool) -> range:
        """Append batches that were encoded elsewhere and checked by the caller; returns the range that they fill.

        Batches that share a segment are written together: after an error either all or none of them are in the
        log. The error's `appended` has the ranges of the appended batches. With `preserve_offsets` the base
        offset of the first batch must be this log's end, or `InvalidOffsetError` is raised.
        """
        self.check_outside()
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
                    ranges += self._write(part, self._clock.moment())
                end = self.batch.tail.end
                due = self._ask_if_due()
            self._after_append(ranges[-1][-1], due=due)
        except BaseException as error:
            self._report(error)
            report_appended(error, [OffsetRange(self.partition, each) for each in ranges])
            raise
        return range(start, end)

    def _parts(self, batches: Sequence[tuple[Header, Buffer]]) -> Iterator[list[NewBatch]]:
        """The batches of each segment together. A producer whose numbers do not rise is ignored."""
        self.disk.note_producers(self.batch.tail)
        known: dict[int, int] = {}
        part: list[NewBatch] = []
        size = 0
        for header, body in batches:
            producer = Producer(header.producer_id, header.producer_sequence)
            if (
                header.flags & SECTION  # then these fields name a transaction of another log
                or producer.sequence <= known.get(producer.id, -1)
                or not self.disk.producers.is_news(producer)
            ):
                producer = NO_PRODUCER  # for example the producer of another partition
            else:
                known[producer.id] = producer.sequence
            if part and size + header.length > self.disk.segment_bytes():
                yield part
                part, size = [], 0
            part.append(NewBatch(header, [body], producer))
            size += header.length
        yield part

    # --- sections of transactions (see section.py) -----------------------------------------------

    def begin_section(self, txn: Txn) -> None:
        """Hide from readers all that is appended from now on, until `release` of this transaction."""
        self.check_outside()
        try:
            with self.lock:
                self.check_usable()
                self._seal()  # the offsets of its records are promised
                tail = self.batch.tail
                self.disk.publish(hold=Hold(txn.number, tail.end, tail.last_batch, txn.id, txn.store))
        except BaseException as error:
            self._report(error)
            raise

    def append_section(self, batches: Sequence[NewBatch]) -> None:
        """Append batches of a section, all of them or none. They must fit one segment, or be one batch."""
        self.check_outside()
        try:
            with self.lock:
                self.check_usable()
                self._seal()
                self._write(batches, self._clock.moment())
            self._tell_rolled()
        except BaseException as error:
            self._report(error)
            raise

    def attach_section(self, path: str, batches: Sequence[NewBatch]) -> bool:
        """Make a file with batches of a section the next segment, instead of copying them; see `TailWriter.attach`.

        False, and nothing has changed, if they must be copied: the active segment has no batch yet, or the file is
        larger than a segment, or in another file system.
        """
        self.check_outside()
        try:
            with self.lock:
                self.check_usable()
                self._seal()
                tail, sealed = self.batch.tail, self.disk.active
                if tail.end == sealed.base_offset:  # its name would be the new segment's
                    return False
                if sum([each.body.length for each in batches]) > self.disk.segment_bytes():
                    return False
                try:
                    tail, active = self.disk.attach(tail, path, batches, self._clock.moment())
                except LogMovedError as error:
                    self.disk.fail(error)
                except OSError as error:
                    if error.errno in _NO_LINKS:
                        return False
                    self._cut_back(error)
                # Both at once, in C code, so that no interrupt comes between.
                any(map(setattr, (self.disk, self), ("active", "batch"), (active, self._open_batch(tail))))
                self.disk.retire(sealed)
            self._tell_rolled()
        except BaseException as error:
            self._report(error)
            raise
        return True

    def section_headers(self, start: int) -> Iterator[Header]:
        """The headers of all written batches from `start`, the place of a batch."""
        self.check_outside()
        with self.lock:
            self._check_alive()
            end = self.batch.tail.end
        return self.disk.headers(start, end)

    def end_section(self) -> None:
        """Make the whole section durable, with any durability, and note that it is complete."""
        try:
            self._take_turn(self._end_section)
        except LogError as error:
            self._report(error)
            raise

    def _end_section(self) -> None:
        with self.lock:
            self._check_alive()
            self._seal()
            moved = self.disk.find_gone(self.batch.tail.end) or self.disk.find_moved(thorough=True)
            if moved is not None:
                self._leave(moved)
            tail, active = self.batch.tail, self.disk.active
        self.disk.sync(active, tail)
        self.disk.publish(flushed=tail, durable=tail, applied=True)
        self.disk.sync_watermark()  # else a power cut takes the section from readers here, and not elsewhere
        self._flushed_records = tail.records
        self.disk.close_retired()

    def release(self, txn: int) -> None:
        """Show readers the section of a transaction that is done. Does nothing if it is not held."""
        if self.disk.mark.held_txn == txn and self._closed is None:
            self.disk.publish(hold=NO_HOLD)

    # --- what is owed ----------------------------------------------------------------------------
    #
    # A loss is owed before it is reported. The assignment that drops the open batch also gives the new batch the
    # error that names the lost records. A call pays the debt when it raises this error, or another error that also
    # names these records. So each loss is reported exactly once, even after an interrupt or a background failure.

    def raise_soon(self, error: LogError) -> None:
        """Let the next call raise an error of the background."""
        with self.lock:
            self._mark_lost()
            self.batch.owe(error)

    def check_usable(self) -> None:
        """Raise the error that forbids writing, or the owed error, if there is one."""
        if self.disk.failure is not None or self._closed is not None:
            self._check_alive()
        if self.batch.owed is not None:
            error, self.batch.owed = self.batch.owed, None
            raise error

    def _report(self, error: BaseException, appended: range | None = None, batch: OpenBatch | None = None) -> None:
        """Add to a call's error the owed error, and the records that the call has appended to `batch`."""
        if isinstance(error, LogError):
            with self.lock:
                self._mark_lost()
                owed, self.batch.owed = self.batch.owed, None
                if owed is not None and owed is not error:
                    error.take_over(owed)
                    if type(owed) is not type(error):
                        error.add_note(f"before that: {owed}")
        if appended is not None and (batch is None or batch.lost is None):
            report_appended(error, [OffsetRange(self.partition, appended)])

    def _mark_lost(self) -> None:
        """If the writer has failed: owe an error that names the lost records, once."""
        failure = self.disk.failure
        if failure is None or self._buried or self._closed is not None:
            return
        batch, durable_end = self.batch, self.disk.mark.durable_end
        end = batch.tail.end
        error: LogError = WriterFailedError(self.disk.active.path, failure)
        if isinstance(failure, LogMovedError):
            error = failure.again()
        if batch.values:
            if self.disk.active.ends_at(end):
                error.lost = (OffsetRange(self.partition, range(end, end + len(batch.values))),)
                batch.lost = error
            else:  # a failed or interrupted write has left bytes, which recovery may find whole
                end += len(batch.values)
        if durable_end < end:
            error.in_doubt = (OffsetRange(self.partition, range(durable_end, end)),)
        dead = OpenBatch(batch.tail, self.partition, owed=batch.owed)
        dead.owe(error)
        self.batch = dead
        self._buried = True

    def _check_alive(self) -> None:
        self.disk.check()
        if self._closed is not None:
            raise self._closed

    def _ask_if_due(self) -> bool:
        """Whether a flush is due. If so, the open batch is written and the count starts again."""
        if not self._flush_due():
            return False
        self._seal()
        self._asked = (self.batch.tail.records, self.batch.tail.end)
        return True

    def _flush_due(self) -> bool:
        """Whether a limit of the flush policy has been reached since the last flush, or the last request for one."""
        policy, batch = self._config.flush, self.batch
        records, size = self._unflushed()
        if policy.records is not None and records + len(batch.values) >= policy.records:
            return True
        return policy.bytes is not None and size + batch.buffered_bytes() >= policy.bytes

    def _unflushed(self) -> tuple[int, int]:
        """The number of records and bytes that are written, not flushed, and for which no flush was requested."""
        tail, (asked_records, asked_end) = self.batch.tail, self._asked
        flushed_end = self.disk.mark.flushed_end
        return tail.records - max(self._flushed_records, asked_records), tail.end - max(flushed_end, asked_end)

    def _tell_rolled(self) -> None:
        if self.disk.rolled and self.on_roll is not None:
            self.disk.rolled = False
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

    def _wanted(self) -> tuple[int, int]:
        """The number of records and of bytes that the next batch takes until it is full or a flush is due."""
        config, policy = self._config, self._config.flush
        records, size = config.batch_records, config.batch_bytes
        if policy.records is not None or policy.bytes is not None:
            unflushed_records, unflushed_bytes = self._unflushed()
            if policy.records is not None:
                records = min(records, policy.records - unflushed_records)
            if policy.bytes is not None:
                size = min(size, policy.bytes - unflushed_bytes)
        return max(records, 1), max(size, 0)

    def _seal(self) -> None:
        """Write the open batch, if it has records."""
        batch = self.batch
        if not batch.values:
            return
        now = self._clock.moment()
        lone = None if self._codec else batch.lone_record()
        if lone is None or not self._write_one(*lone, now):
            body = encode_body(batch.columns(now.wall_us), codec=self._codec)
            self._write([NewBatch(body, body.parts)], now)

    def _write_one(self, value: bytes, key: bytes | None, now: Moment) -> bool:
        """Write the only record of the open batch; False, and nothing is written, if `_write` must do it."""
        try:
            tail = self.disk.write_one(self.batch.tail, value, key, now)
        except LogMovedError as error:
            self.disk.fail(error)
        except OSError as error:
            self._cut_back(error)
        if tail is None:
            return False
        self.batch = self._open_batch(tail)  # this one assignment makes the write count
        return True

    def _write(self, batches: Sequence[NewBatch], now: Moment) -> list[range]:
        """Write batches at the tail, all or none of them; returns their records' offsets."""
        try:
            tail, ranges = self.disk.write(self.batch.tail, batches, now)
        except LogMovedError as error:
            self.disk.fail(error)
        except OSError as error:
            self._cut_back(error)
        self.batch = self._open_batch(tail)  # this one assignment makes the write count
        return ranges

    def _cut_back(self, error: OSError) -> NoReturn:
        """Undo a failed write: the open batch is lost, the writer stays usable."""
        batch, path = self.batch, self.disk.active.path
        self.disk.cut_back(batch.tail.end)
        failure: LogError
        if isinstance(error, LogError):  # the roll failed, and its error has the reason
            failure = error
        elif error.errno in _FULL:
            failure = StorageFullError(path, error)
        else:
            failure = StorageIOError(path, error, "writing a batch")
        batch.lost = failure  # for threads that wait until their records are flushed
        self._drop(failure)
        raise failure from error

    def _drop(self, failure: LogError) -> None:
        """Drop the open batch, and name its records in the failure."""
        batch = self.batch
        if batch.values:
            end = batch.tail.end
            failure.lost = (*failure.lost, OffsetRange(self.partition, range(end, end + len(batch.values))))
        following = self._open_batch(batch.tail)
        following.owe(failure)
        self.batch = following

    def roll(self, *, older_than_us: int | None = None) -> bool:
        """Begin a new segment if the active one has records and is at least that old. True if it did."""
        try:
            return bool(self._take_turn(lambda: self._roll_if_due(older_than_us)))
        except LogError as error:
            self._report(error)
            raise

    def _roll_if_due(self, older_than_us: int | None) -> bool:
        with self.lock:
            self.check_usable()
            self._seal()
            now, began = self._clock.moment(), self.disk.active.began
            if self.batch.tail.end == self.disk.active.base_offset:
                return False
            if older_than_us is not None and (began is None or now.boottime_us - began < older_than_us):
                return False
            try:
                self.disk.roll(self.batch.tail, now)
            except LogMovedError as error:
                self.disk.fail(error)
            except OSError as error:
                self._cut_back(error)
            self.disk.close_retired()
            self.disk.publish()  # wakes those who copy the log: they take the end of the sealed segment over
            self.disk.rolled = False  # the callers of `roll` run retention themselves
            return True

    # --- flush -----------------------------------------------------------------------------------

    def flush(self, *, background: bool = False) -> None:
        """Make all appended records durable and visible.

        Raises `StorageFullError` if the open batch could not be written and `WriterFailedError` if it could not
        be synced. Without `background` it then also raises an owed error.
        """
        if background:
            self._take_turn(self._flush_quietly)  # the caller handles its errors
        else:
            try:
                self._take_turn(self._flush_all)
            except LogError as error:
                self._report(error)
                raise
        if self.disk.rolled:
            self._tell_rolled()

    def _take_turn(self, action: Callable[[], T], *, unless: Callable[[], bool] | None = None) -> T | None:
        """Run the action in this thread's turn; `LogError` in the middle of another call of this thread."""
        self.check_outside()  # the thread that has the turn may wait for it
        self._turn.check_outside(self.directory)
        return self._turn.take(action, unless=unless)

    def _flush_record(self, offset: int, batch: OpenBatch | None = None) -> None:
        """Make the record at `offset`, appended to `batch`, durable. Another thread's flush may do it."""

        def settled() -> bool:
            return offset < self.disk.mark.flushed_end or (batch is not None and batch.lost is not None)

        self._take_turn(self._flush_quietly, unless=settled)  # `close` also takes a turn, and may settle it
        if batch is not None and batch.lost is not None:  # another record may have got the offset, and be flushed
            raise batch.lost.again() from batch.lost.__cause__
        if isinstance(self.disk.failure, LogMovedError):  # another thread's flush found it and raised it there
            raise self.disk.failure.again()
        if self.disk.rolled:
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
                moved = self.disk.find_moved()
            else:
                moved = self.disk.find_gone(self.batch.tail.end) or self.disk.find_moved()
            if moved is not None:
                self._leave(moved)
            tail, active = self.batch.tail, self.disk.active
        self._publish(tail, active)

    def _publish(self, tail: Tail, active: ActiveSegment) -> None:
        """Make everything before `tail` durable and visible. Only the thread with the turn calls it, without `lock`."""
        if tail.end > self.disk.mark.flushed_end:
            began = perf_counter()
            durable = None
            if self._config.durability == "disk":
                self.disk.sync(active, tail)
                durable = tail
            self.disk.publish(flushed=tail, durable=durable)
            self.flush_clock.note(perf_counter() - began)
        self._flushed_records = tail.records
        self.disk.close_retired()

    # --- whether the files are where readers look ------------------------------------------------

    def check_place(self) -> None:
        """`LogMovedError` if the paths no longer lead to the writer's files. Then the writer refuses every call."""
        try:
            self._take_turn(self._check_place)
        except LogError as error:
            self._report(error)
            raise

    def _check_place(self) -> None:
        with self.lock:
            self._check_alive()
            moved = self.disk.find_gone(self.batch.tail.end) or self.disk.find_moved(thorough=True)
            if moved is not None:
                self._leave(moved)

    def _leave(self, moved: LogMovedError) -> NoReturn:
        """Make the appended records durable in the moved files, if these still exist; then refuse every call."""
        if moved.kept:
            self._seal()
            tail = self.batch.tail
            self.disk.sync(self.disk.active, tail)
            self.disk.publish(flushed=tail, durable=tail)
        self.disk.fail(moved)

    def unflushed(self) -> bool:
        """Whether there are records that a flush can still make visible."""
        return self.disk.failure is None and self._closed is None and self.next_offset > self.flushed_end

    # --- retention ---------------------------------------------------------------------------------

    def drop_before(self, base_offset: int) -> list[str]:
        """Drop the sealed segments below `base_offset`, which must be a segment's; returns their paths."""
        try:
            return self._take_turn(lambda: self._drop_before(base_offset)) or []
        except LogError as error:
            self._report(error)
            raise

    def _drop_before(self, base_offset: int) -> list[str]:
        self._check_place()
        with self.lock:
            self.check_usable()
        return self.disk.drop_before(base_offset)

    # --- end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush, sync the watermark and release the partition. Released also when the flush fails.

        After an interrupt the caller may call it again, and it continues. It raises its own error, or an owed
        one. The error names the appended records that could not be written.
        """
        closed = LogClosedError(f"{self.directory} is closed; open the topic again")
        self._take_turn(lambda: self._settle(closed))
        try:
            self._take_turn(lambda: self._release(closed))
        except OSError as error:
            self._take_turn(lambda: self._release(closed))
            self.batch.owe(StorageIOError(self.directory, error, "closing"))
        owed, self.batch.owed = self.batch.owed, None
        if owed is not None:
            raise owed

    def _settle(self, closed: LogClosedError) -> None:
        """Leave the files clean: no bytes after the end, everything synced."""
        with self.lock:  # held to the end: a record appended in between would be neither written nor refused
            if self._closed is not None:
                return
            try:
                self._check_alive()
                self._seal()
                active, tail = self.disk.active, self.batch.tail
                active.cut_back(tail.end)
                moved = self.disk.find_moved(thorough=True)
                if tail.end > self.disk.mark.durable_end or active.in_doubt:
                    self.disk.sync(active, tail)
                    self.disk.publish(flushed=tail, durable=tail)
                self.disk.publish(flushed=tail, durable=tail)  # now both slots have the same end
                self.disk.sync_watermark()
                if moved is not None:
                    self._leave(moved)
            except LogError as error:
                self._mark_lost()
                self._mark_in_doubt(error)
                self._drop(error)  # the records that could not be written
            except OSError as error:
                self._drop(StorageIOError(self.directory, error, "closing"))
            self._closed = closed

    def _mark_in_doubt(self, error: LogError) -> None:
        """Name what is written here and not in enough other directories: nobody can flush it any more."""
        shown, end = self.flushed_end, self.batch.tail.end
        if self.disk.copies is not None and self.disk.failure is None and shown < end:
            error.in_doubt = (*error.in_doubt, OffsetRange(self.partition, range(shown, end)))

    def _release(self, why: LogClosedError) -> None:
        with self.lock:  # no thread may write to a file that is being closed
            self._closed = self._closed or why
            self.batch = OpenBatch(self.batch.tail, self.partition, owed=self.batch.owed)
            if self._to_close is None:
                self._to_close = iter([(self._files.close, fd) for fd in self.disk.files_to_close()])
            try:
                finish(self._to_close)
            finally:
                self._held.release()
            _in_child.discard(self.abandon_in_child)

    def abandon_in_child(self, parent_pid: int) -> None:
        """After a fork: close the child's copies of the files. Only the parent writes the buffered records."""
        self.lock, self.applying = threading.RLock(), threading.RLock()
        self.has_lock = asker(self.lock)
        self._turn = Turn()
        self.disk.abandon_in_child()
        self.batch.owed = None
        self._release(ForkedHandleError(self.directory, parent_pid))
