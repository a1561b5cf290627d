"""Writer: the appending side of one partition, from a record to a durable, visible batch.

Invariant: appended records gather in one open batch, and their offsets are known at once. The batch
also holds the tail of the log that it will follow. The state moves on by one assignment of a new
`OpenBatch`, so an interrupt at any instruction leaves the old state or the new one, and writing again
overwrites the same bytes.

    append      buffered here: at most one batch per partition is in memory
    write       a full batch, or the batch that a flush closes: handed to the system (see tail.py)
    flush       fdatasync, then the watermark: synced, acknowledged, visible to readers

Failures: after a write that fails, as on a full disk, the file is cut back and the open batch is
dropped; the error names its offsets. After a failed fsync the writer refuses every call
(`WriterFailedError`). It does the same when its files were moved, removed or changed by another program
(`LogMovedError`): each write and each flush looks for that.

Threads: any number may append and flush. `lock` guards the open batch and the active segment. It is
held while a batch is written, and never during the sync of a flush. `_turn` is held during the sync:
the thread that has it syncs for all that wait (group commit). Order: _turn, lock, the lock of a
publication (tail.py); before all of them, the lock of a pass of retention (keeper.py).
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, Protocol

from ..config import MAX_BATCH_BYTES, TopicConfig
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
from ..format.batch import NO_PRODUCER, Body, Header, Producer, encode_body
from ..format.codec import codec_id
from ..format.columns import Columns
from ..format.watermark import Mark
from ..index import SegmentIndex
from ..lifetime import finish, in_child
from ..log import Wakeable
from ..records import OffsetRange
from ..recovery import Tail
from ..segment import Identity
from ..system import lock as writer_lock
from ..system.clock import SYSTEM, Moment, clock_of
from ..system.directory import Directory
from ..system.files import Buffer, Files
from ..system.turn import Turn
from ..unique import Unique
from .open_batch import OpenBatch
from .tail import NewBatch, TailWriter

__all__ = ["WRITER_DESCRIPTORS", "Timer", "Writer"]

WRITER_DESCRIPTORS = 3  # that a writer keeps open: its directory, the segment and the watermark

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How far a background flush may fall behind the flush policy before appenders flush themselves:
# back-pressure, and the bound on what a crash can take.
_LAG_ALLOWED = 4

_in_child = in_child()


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
        self._go_by(config)
        self._clock = clock_of(clock)
        self.partition = identity.partition
        self.timer: Timer | None = None
        self.on_roll: Callable[[], object] | None = None
        self.lock = threading.Lock()
        self._turn = Turn()
        self._flushed_records = 0
        self._asked = (0, 0)  # records and end of the log when a flush was last asked for
        self._buried = False  # whether what a failure has taken with it is owed
        self._closed: LogClosedError | None = None
        self._to_close: Iterator[tuple[Callable[[int], object], int]] | None = None  # set when closing has begun
        self._held = writer_lock.acquire(files, os.path.join(directory, writer_lock.NAME), config.permissions)
        try:
            self.disk = TailWriter(self._held.directory, identity, config, index=index, moment=self._clock.moment)
            self.batch = OpenBatch(self.disk.start, self.partition, any_size=self._takes_any_size)
            _in_child.add(self.abandon_in_child)
        except BaseException:
            self._held.release()
            raise

    # --- what others may know ------------------------------------------------------------------

    @property
    def flushed_end(self) -> int:
        """Readers see offsets below this."""
        return self.disk.mark.flushed_end

    @property
    def next_offset(self) -> int:
        """The offset that the next record will get, buffered ones counted."""
        batch = self.batch
        return batch.tail.end + len(batch.values)

    def mark(self) -> Mark:
        """What has been published last; raises if the writer is closed, or its files are not where readers look."""
        if self._closed is not None:
            raise self._closed
        if isinstance(self.disk.failure, LogMovedError):
            raise self.disk.failure.again()
        return self.disk.mark

    def is_moved(self) -> bool:
        """Whether the paths lead elsewhere. Takes no lock: a reader may ask in a signal handler."""
        return self.disk.find_moved() is not None

    def is_in(self, directory: Directory) -> bool:
        """Whether the partition's directory, which is locked, is one of those in this directory."""
        return self.disk.place.is_at(self.directory, dir_fd=directory.fd)

    def last_sequence(self, producer_id: int) -> int | None:
        """The sequence of the last batch that a producer appended here; None if it is not known."""
        with self.lock:
            self._check_alive()
            self.disk.note_producers(self.batch.tail)
            return self.disk.producers.last_sequence(producer_id)

    def listen(self, waiter: Wakeable) -> None:
        """Wake the waiter after every publication, from the thread that flushed, while it lives."""
        self.disk.listen(waiter)

    def use(self, config: TopicConfig) -> None:
        """Go on by these policies; what is in the open batch by those under which it was appended."""
        try:
            with self.lock:
                self.check_usable()
                self._seal()
                self._go_by(config)
                self.disk.go_by(config)
                self.batch = self._open_batch(self.batch.tail)
        except LogError as error:
            self._tell(error)
            raise

    def _go_by(self, config: TopicConfig) -> None:
        codec = codec_id(config.compression)  # which may need a package that is not installed
        self._config, self._codec = config, codec
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
                    self.disk.note_producers(self.batch.tail)
                    seen = self.disk.producers.seen(producer)
                    if seen is not None:
                        return seen
                if body.length > MAX_BATCH_BYTES:
                    raise RecordTooLargeError("the batch", body.length, MAX_BATCH_BYTES)
                self._seal()
                if self.timer is not None:
                    self.timer.touch()
                (offsets,) = self._write([(body, body.parts, producer)], self._clock.moment())
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
                    ranges += self._write(part, self._clock.moment())
                end = self.batch.tail.end
                due = self._ask_if_due()
            self._after_append(ranges[-1][-1], due=due)
        except BaseException as error:
            self._tell(error)
            tell_appended(error, [OffsetRange(self.partition, each) for each in ranges])
            raise
        return range(start, end)

    def _parts(self, batches: Sequence[tuple[Header, Buffer]]) -> Iterator[list[NewBatch]]:
        """The batches as they share segments. A producer whose numbers do not rise is not believed."""
        self.disk.note_producers(self.batch.tail)
        known: dict[int, int] = {}
        part: list[NewBatch] = []
        size = 0
        for header, body in batches:
            producer = Producer(header.producer_id, header.producer_sequence)
            if producer.sequence <= known.get(producer.id, -1) or not self.disk.producers.is_news(producer):
                producer = NO_PRODUCER  # of another partition, say: its batches here are no producer's
            else:
                known[producer.id] = producer.sequence
            if part and size + header.length > self.disk.segment_bytes():
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
            else:  # a write that failed or was interrupted has left bytes, and recovery may find them whole
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
            self._write([(body, body.parts, NO_PRODUCER)], now)

    def _write(self, batches: Sequence[NewBatch], now: Moment) -> list[range]:
        """Write batches at the tail, all or none of them; returns their records' offsets."""
        try:
            tail, ranges = self.disk.write(self.batch.tail, batches, now)
        except LogMovedError as error:
            self.disk.fail(error)
        except OSError as error:
            self._cut_back(error)
        self.batch = self._open_batch(tail)  # the one assignment by which the writing has happened
        return ranges

    def _cut_back(self, error: OSError) -> NoReturn:
        """Undo a write that failed: the open batch is lost, the writer stays usable."""
        batch, path = self.batch, self.disk.active.path
        self.disk.cut_back(batch.tail.end)
        failure: LogError
        if isinstance(error, LogError):  # the roll failed, and has said why
            failure = error
        elif error.errno in _FULL:
            failure = StorageFullError(path, error)
        else:
            failure = StorageIOError(path, error, "writing a batch")
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
            self.disk.rolled = False  # who rolls by hand, or by the clock, sees to retention as well
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
        if isinstance(self.disk.failure, LogMovedError):  # another thread's flush has found that, and said it there
            raise self.disk.failure.again()
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
        if tail.end > self.flushed_end:
            durable = None
            if self._config.durability == "disk":
                self.disk.sync(active, tail.end)
                durable = tail
            self.disk.publish(flushed=tail, durable=durable)
        self._flushed_records = tail.records
        self.disk.close_retired()

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
            moved = self.disk.find_gone(self.batch.tail.end) or self.disk.find_moved(thorough=True)
            if moved is not None:
                self._leave(moved)

    def _leave(self, moved: LogMovedError) -> NoReturn:
        """Make what was appended durable in the files that were moved, if that can be; refuse all from now on."""
        if moved.kept:
            self._seal()
            tail = self.batch.tail
            self.disk.sync(self.disk.active, tail.end)
            self.disk.publish(flushed=tail, durable=tail)
        self.disk.fail(moved)

    def unflushed(self) -> bool:
        """Whether there are records that a flush may still make visible."""
        return self.disk.failure is None and self._closed is None and self.next_offset > self.flushed_end

    # --- retention ---------------------------------------------------------------------------------

    def drop_before(self, base_offset: int) -> list[str]:
        """Drop the sealed segments below `base_offset`, which must be a segment's; returns their paths."""
        try:
            return self._turn.take(lambda: self._drop_before(base_offset)) or []
        except LogError as error:
            self._tell(error)
            raise

    def _drop_before(self, base_offset: int) -> list[str]:
        self._check_place()
        with self.lock:
            self.check_usable()
        return self.disk.drop_before(base_offset)

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
                active, tail = self.disk.active, self.batch.tail
                active.cut_back(tail.end)
                moved = self.disk.find_moved(thorough=True)
                if tail.end > self.disk.mark.durable_end or active.in_doubt:
                    self.disk.sync(active, tail.end)
                    self.disk.publish(flushed=tail, durable=tail)
                self.disk.publish(flushed=tail, durable=tail)  # both slots say the same of a log at rest
                self.disk.sync_watermark()
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
                self._to_close = iter([(self._files.close, fd) for fd in self.disk.files_to_close()])
            try:
                finish(self._to_close)
            finally:
                self._held.release()
            _in_child.discard(self.abandon_in_child)

    def abandon_in_child(self, parent_pid: int) -> None:
        """After a fork: the child's copies of the files go, buffers are the parent's to write."""
        self.lock = threading.Lock()
        self._turn = Turn()
        self.disk.abandon_in_child()
        self.batch.owed = None
        self._release(ForkedHandleError(self.directory, parent_pid))
