"""Writer: the appending side of one partition, from a record to a durable, visible batch.

Invariant: appended records gather in one open batch, and their offsets are known immediately. The batch
also holds the tail of the log that it will follow. One assignment of a new `OpenBatch` changes the state.
So an interrupt at any instruction leaves the old state or the new one, and a repeated write overwrites the
same bytes.

    append      buffered here: at most one batch per partition is in memory
    write       a full batch, or the batch that a flush closes: handed to the system (see tail.py)
    flush       fdatasync, then the watermark: synced, acknowledged, visible to readers

Failures: after a failed write (on a full disk, for example) the file is cut back and the open batch is
dropped; the error names its offsets (losses.py, batch_writer.py). After a failed fsync the writer refuses every call
(`WriterFailedError`). It also refuses every call if another program has moved, removed or changed its files
(`LogMovedError`): each write and each flush checks that.

Threads: any number may append and flush. `lock` guards the open batch and the active segment. It is
held while a batch is written, and never during the sync of a flush. `_turn` is held during the sync:
the thread that has it syncs for all waiting threads (group commit). Locks are acquired in this order: the
lock of a retention pass (retention_pass.py), _turn, lock, the lock of a publication (publication.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import TypeVar

from ..config.policies import MAX_BATCH_BYTES, TopicConfig
from ..errors import (
    ForkedHandleError,
    InvalidOffsetError,
    LogClosedError,
    LogError,
    LogMovedError,
    RecordTooLargeError,
    StorageIOError,
)
from ..format.codec import codec_id
from ..format.columns import Columns
from ..format.header import NO_PRODUCER, Body, Header, Producer
from ..format.watermark import Mark
from ..log.index import SegmentIndex
from ..log.log import Wakeable
from ..log.recovery import Tail
from ..segment import Identity
from ..system import lock
from ..system.clock import SYSTEM, clock_of
from ..system.directory import Directory
from ..system.files import Buffer, Files
from ..system.group_commit import Turn
from ..system.process import finish, in_child
from ..system.reentry import asker, enter
from .active import ActiveSegment
from .flushes import FlushClock
from .open_batch import OpenBatch
from .publication import Copies
from .tail import NewBatch, TailWriter
from .turn_writer import TurnWriter
from .turns import Turns

WRITER_DESCRIPTORS = 3  # open files of a writer: its directory, the segment and the watermark

T = TypeVar("T")

_in_child = in_child()


class Writer(TurnWriter):
    """The writer of a partition in this process. It holds the partition's lock from construction to `close`.

    Construction recovers the partition (see log/recovery.py). If it raises `LockedError` or `CorruptLogError`,
    it has changed nothing. `held`: the lock, if the caller has it already. `copies`: the partition's other directories.

    With `turns`, several processes write the partition (turn_writer.py), and each call that needs it may wait for it.
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
        turns: Turns | None = None,
    ) -> None:
        codec_id(config.compression)  # before anything is locked: it raises if the codec's package is not installed
        self._files = files
        self.directory = directory
        self.on_roll: Callable[[], object] | None = None
        self.applying = threading.RLock()  # for a section of a transaction; acquired before all other locks
        self.flush_clock = FlushClock()
        self._to_close: Iterator[tuple[Callable[[int], object], int]] | None = None  # set when closing begins
        held = held or lock.acquire(files, directory, config.permissions)
        try:
            known = clock_of(clock)
            place = held.directory
            disk = TailWriter(place, identity, config, index=index, moment=known.moment, copies=copies)
            super().__init__(disk, identity.partition, config, known, held, turns)
            self._opened_at = disk.start.end
            _in_child.add(self.abandon_in_child)
        except BaseException:
            held.release()
            raise

    # --- facts for other modules ---------------------------------------------------------------

    def flushed(self) -> tuple[int, int]:
        """The records and the bytes of log that this writer has made visible."""
        return self._limits.flushed_records, self.flushed_end - self._opened_at - self._others_bytes

    def mark(self) -> Mark:
        """The last publication; raises if the writer is closed, or if its files are not where readers look."""
        if self.closed is not None:
            raise self.closed
        if isinstance(self.disk.failure, LogMovedError):
            raise self.disk.failure.again()
        return self.disk.mark

    def is_moved(self) -> bool:
        """True if the paths lead to other files. Takes no lock: a reader may ask in a signal handler."""
        return self.disk.find_moved() is not None

    def is_in(self, directory: Directory) -> bool:
        """True if this directory contains the partition's locked directory."""
        return self.disk.place.is_at(self.directory, dir_fd=directory.fd)

    def last_sequence(self, producer_id: int) -> int | None:
        """The sequence number of the producer's last batch here; None if it is not known."""
        self.check_outside()
        with self.held(), self.lock:
            self._check_alive()
            self.disk.note_producers(self.batch.tail)
            return self.disk.producers.last_sequence(producer_id)

    def listen(self, waiter: Wakeable) -> None:
        """Wake the waiter after every publication, from the flushing thread, while the waiter exists."""
        self.publication.listen(waiter)

    def use(self, config: TopicConfig) -> None:
        """Use these policies from now on, also if it raises. The records in the open batch are written by the old ones.

        Raises the errors of `append`. A writer that has failed keeps its policies.
        """
        self.check_outside()
        with self._losses.reporting(), self.lock:
            self._check_alive()
            try:
                self._seal()
            finally:  # a full disk must not keep a writer from the policies that make room
                self._set_policies(config)
                self._limits.use(config)
                self.disk.use(config)
                self.batch = self.batch if self.batch.values else self.open_batch(self.batch.tail)
            self.check_usable()

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
            while offsets is None:
                with self.lock:
                    if not self.is_parked:  # as `entered`, in fewer steps
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
                if offsets is None:
                    self._take_back(flushes=sync)
            if sync:
                self._flush_record(offsets[-1], batch)
            elif due or self.disk.rolled:
                self._after_append(offsets[-1], due=due)
        except BaseException as error:
            self._losses.report(error, offsets, batch)
            raise
        finally:
            self._watch()
        return offsets

    def append_lone(self, value: bytes, *, sync: bool) -> int | None:
        """Append one value and flush it, as `append` does, if nothing else waits for a flush. Returns its offset.

        Returns None, and appends nothing, if `append` must do it: if other records wait, if there is an error to
        raise, or if this call does not flush. The record is in the open batch until it is written, as any other.
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
                if batch.owed is not None or self.disk.failure is not None or self.closed or self.is_parked:
                    return
                if self.timer is not None:
                    self.timer.touch()
                batch.limit, batch.capacity = self._limits.full_room
                batch.room = batch.capacity - size_bytes
                offsets = range(end, end + 1)
                batch.values.append(value)
                if self._codec or not self._write_one(value, None, self._clock.moment()):  # both check the segment
                    self._seal()
                if (moved := self.disk.find_moved()) is not None:
                    self._fail_moved(moved)
                tail, active = self.batch.tail, self.disk.active
            self._publish(tail, active)

        try:
            self._turn.take_at_once(append_and_flush)
        except BaseException as error:
            appended = bool(batch.values) and batch.values[0] is value  # else an interrupt came just before that
            self._losses.report(error, offsets if appended else None, batch)
            raise
        if offsets is None:
            return None
        if self.disk.rolled:
            self._tell_rolled()
        return offsets.start

    def append_at_once(self, columns: Columns, size_bytes: int) -> int | None:
        """Append one record to the open batch and return its offset, if that needs no I/O and no wait.

        Returns None, and appends nothing, if the record needs a write or makes a flush due, if another thread has the
        lock, or if an error is owed. `append` then does it, and may wait.
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

    def _has_room_at_once(self, batch: OpenBatch, size_bytes: int) -> bool:
        """True if one record neither fills the open batch nor makes a flush due."""
        if self.timer is None or self.is_parked or self.closed or self.disk.failure or batch.owed:
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
        with self._losses.reporting(ranges):
            with self.entered():
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
                used = self.batch.tail.end - self.disk.active.base_offset
                due = self._write_all([NewBatch(body, body.parts, producer) for body in bodies], used, ranges)
            self._after_append(ranges[-1][-1], due=due)
        return ranges

    def adopt(self, batches: Sequence[tuple[Header, Buffer]], *, preserve_offsets: bool) -> range:
        """Append batches that were encoded elsewhere and checked by the caller; returns the range that they fill.

        Batches that share a segment are written together: after an error either all or none of them are in the
        log. The error's `appended` has the ranges of the appended batches. With `preserve_offsets` the base
        offset of the first batch must be this log's end, or `InvalidOffsetError` is raised.
        """
        self.check_outside()
        ranges: list[range] = []
        with self._losses.reporting(ranges):
            with self.entered():
                self.check_usable()
                self._seal()
                start = self.batch.tail.end
                first = batches[0][0].base_offset
                if preserve_offsets and first != start:
                    raise InvalidOffsetError(self.partition, first, range(start, start + 1), start)
                # As for an empty segment: batches that fit one segment are all in the log, or none of them is.
                due = self._write_all(self._adopted(batches), 0, ranges)
                end = self.batch.tail.end
            self._after_append(ranges[-1][-1], due=due)
        return range(start, end)

    def _tell_rolled(self) -> None:
        if self.disk.rolled and self.on_roll is not None:
            self.disk.rolled = False
            self.on_roll()

    def _after_append(self, offset: int, *, due: bool) -> None:
        self._tell_rolled()
        if not due:
            return
        if self.timer is None or self._limits.is_lagging(self.batch.tail):
            self._flush_record(offset)
        else:
            self.timer.kick()

    def roll(self, *, older_than_us: int | None = None) -> bool:
        """Begin a new segment if the active one has records and is at least that old. True if it did."""
        return bool(self._take_reporting(lambda: self._roll_if_due(older_than_us)))

    # --- flush -----------------------------------------------------------------------------------

    def flush(self, *, background: bool = False) -> None:
        """Make all appended records durable and visible.

        Raises `StorageFullError` if the open batch could not be written and `WriterFailedError` if it could not
        be synced. Without `background` it then also raises an owed error.
        """
        if background:
            self._take_turn(self._flush_quietly)  # the caller handles its errors
        else:
            self._reporting(lambda: self._take_turn(self._flush_all))
        if self.disk.rolled:
            self._tell_rolled()

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
            if self.is_parked:  # others may have written meanwhile
                moved = self.disk.find_moved()
            elif self.batch.values:
                self._seal()  # which looks at the segment
                moved = self.disk.find_moved()
            else:
                moved = self.disk.active.find_gone(self.batch.tail) or self.disk.find_moved()
            if moved is not None:
                self._fail_moved(moved)
            tail, active = self.batch.tail, self.disk.active
        self._publish(tail, active)

    def _publish(self, tail: Tail, active: ActiveSegment) -> None:
        """Make everything before `tail` durable and visible. Only the thread with the turn calls it, without `lock`."""
        self._end_turn()  # the next process writes during the sync
        self._make_visible(tail, active)
        self.disk.close_retired()

    def _make_visible(self, tail: Tail, active: ActiveSegment) -> None:
        if tail.end > self.publication.look().flushed_end:
            began = perf_counter()
            durable, flushed = None, self.disk.with_others(tail, active)
            if self._config.durability == "disk":
                self.disk.sync(active, tail)
                durable = flushed
            self.publication.publish(flushed=flushed, durable=durable)
            self._flush_s = perf_counter() - began
            self.flush_clock.note(self._flush_s)
        self._limits.flushed_records = tail.records

    # --- files that were moved -------------------------------------------------------------------

    def check_place(self) -> None:
        """Raise `LogMovedError` if the paths no longer lead to the writer's files. Then every call is refused."""
        self._take_reporting(self._check_place)

    def _check_place(self) -> None:
        with self.lock:
            self._check_alive()
            self._check_moved()

    # --- retention ---------------------------------------------------------------------------------

    def drop_before(self, base_offset: int, *, background: bool = False) -> list[str]:
        """Drop the sealed segments below `base_offset`, which must be a segment's; returns their paths.

        Raises an owed error, and then drops nothing. With `background` it drops: on a full disk, this makes room.
        """
        return self._take_reporting(lambda: self._drop_before(base_offset, background=background)) or []

    def _drop_before(self, base_offset: int, *, background: bool) -> list[str]:
        self._check_place()
        if not background:
            with self.lock:
                self.check_usable()
        return self.disk.drop_before(base_offset)

    # --- end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush, sync the watermark and release the partition, even when the flush fails.

        After an interrupt the caller may call it again, and it continues. It raises its own error, or an owed
        one. The error names the appended records that could not be written.
        """
        closed = LogClosedError(f"{self.directory} is closed; open the topic again")
        self._ending = True
        with enter(self._taking, self.directory):  # a thread that waits for the partition ends its wait
            pass
        self._take_turn(lambda: self._settle(closed))
        try:
            self._take_turn(lambda: self._release(closed))
        except OSError as error:
            self._take_turn(lambda: self._release(closed))
            self.batch.owe(StorageIOError(self.directory, error, "closing"))
        self._losses.raise_owed()

    def _settle(self, closed: LogClosedError) -> None:
        """Leave the files clean: no bytes after the end, everything synced."""
        with self.lock:  # held to the end: a record appended in between would be neither written nor refused
            if self.closed is not None:
                return
            try:
                self._check_alive()
                if self.is_parked:
                    active, tail = self.disk.active, self.batch.tail
                    self._make_visible(tail, active)
                    if tail.end > self.disk.mark.durable_end:
                        self.disk.sync(active, tail)
                        self.publication.publish(durable=tail)
                    self.closed = closed
                    return
                self._seal()
                active, tail = self.disk.active, self.batch.tail
                active.cut_back(tail)
                moved = self.disk.find_moved(thorough=True)
                if tail.end > self.disk.mark.durable_end or active.in_doubt:
                    self.disk.sync(active, tail)
                    self.publication.publish(flushed=tail, durable=tail)
                self.publication.publish(flushed=tail, durable=tail)  # now both slots have the same end
                self.publication.sync()
                if moved is not None:
                    self._fail_moved(moved)
            except LogError as error:
                self._losses.mark_lost()
                self._losses.mark_in_doubt(error)
                self._losses.drop(error)  # the records that could not be written
            except OSError as error:
                self._losses.drop(StorageIOError(self.directory, error, "closing"))
            self.closed = closed

    def _release(self, why: LogClosedError) -> None:
        with self.lock:  # no thread may write to a file that is being closed
            self.closed = self.closed or why
            self.batch = OpenBatch(self.batch.tail, self.partition, owed=self.batch.owed)
            self.publication.close(self.closed)  # the thread of transactions may just be ending a hold
            if self._to_close is None:
                self._to_close = iter([(self._files.close, fd) for fd in self.disk.files_to_close()])
            try:
                finish(self._to_close)
            finally:
                self._held.release()
                if self._turns is not None:
                    self._turns.given_up(self.disk.place)
            _in_child.discard(self.abandon_in_child)

    def abandon_in_child(self, parent_pid: int) -> None:
        """After a fork: close the child's copies of the files. Only the parent writes the buffered records."""
        self.lock, self.applying, self._taking = threading.RLock(), threading.RLock(), threading.RLock()
        self.has_lock = asker(self.lock)
        self._turn = Turn()
        self.publication.abandon_in_child()
        self.batch.owed = None
        self._release(ForkedHandleError(self.directory, parent_pid))
