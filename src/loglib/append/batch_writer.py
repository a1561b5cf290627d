"""Batch writer: the open batch of a partition, the tail that it follows, and how one becomes the other.

Invariant: one assignment of a new `OpenBatch` makes a write count, and one drops the records of a failed write. Both
give the new batch the owed error (losses.py). A batch is written whole or cut back.

Threads: `lock` guards all of it. The caller of a method whose name begins with `_` has the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn, Protocol

from ..config.policies import TopicConfig
from ..errors import LogClosedError, LogError, LogMovedError
from ..format.codec import codec_id
from ..format.header import NO_PRODUCER, SECTION, Header, Producer, encode_body
from ..log.recovery import Tail
from ..system.clock import Clock, Moment
from ..system.failures import refused_write
from ..system.files import Buffer
from ..system.not_copyable import NotCopyable
from ..system.reentry import asker
from .flushes import FlushLimits
from .losses import Losses
from .open_batch import OpenBatch
from .tail import NewBatch, TailWriter


class Timer(Protocol):
    """The writer's view of the thread that keeps the flush interval."""

    def touch(self) -> None:
        """There are records to flush within the interval."""

    def kick(self) -> None:
        """A flush is due now."""


class BatchWriter(NotCopyable):
    """The part of a partition's writer that writes batches."""

    def __init__(self, disk: TailWriter, partition: int, config: TopicConfig, clock: Clock) -> None:
        self.partition = partition
        self.disk, self.publication = disk, disk.publication
        self.timer: Timer | None = None
        self.closed: LogClosedError | None = None
        self.lock = threading.RLock()  # reentrant, so that it knows its thread; no call takes it twice
        self.has_lock = asker(self.lock)  # whether the calling thread has it
        self._clock = clock
        self._losses = Losses(self)
        self._limits = FlushLimits(config, disk)
        self._set_policies(config)
        self.batch = OpenBatch(disk.start, partition, any_size=self._takes_any_size)

    @property
    def flushed_end(self) -> int:
        """Readers see offsets below this."""
        return self.disk.mark.flushed_end

    @property
    def next_offset(self) -> int:
        """The offset that the next record gets, after the buffered records."""
        batch = self.batch
        return batch.tail.end + len(batch.values)

    def unflushed(self) -> bool:
        """True if there are records that a flush can still make visible."""
        return self.disk.failure is None and self.closed is None and self.next_offset > self.flushed_end

    def _set_policies(self, config: TopicConfig) -> None:
        self._codec = codec_id(config.compression)
        self._config = config
        self._takes_any_size = config.max_record_bytes >= config.batch_bytes

    # --- errors that callers must get ------------------------------------------------------------

    def raise_soon(self, error: LogError) -> None:
        """Let the next call raise an error of the background."""
        self._losses.raise_soon(error)

    def check_usable(self) -> None:
        """Raise the error that forbids writing, or the owed error, if there is one."""
        if self.disk.failure is not None or self.closed is not None:
            self._check_alive()
        if self.batch.owed is not None:
            self._losses.raise_owed()

    def _check_alive(self) -> None:
        self.disk.check()
        if self.closed is not None:
            raise self.closed

    # --- write: `lock` is held -------------------------------------------------------------------

    def open_batch(self, tail: Tail) -> OpenBatch:
        """An empty open batch after `tail`, which owes what the present one owes."""
        return OpenBatch(tail, self.partition, any_size=self._takes_any_size, owed=self.batch.owed)

    def _begin(self, batch: OpenBatch) -> None:
        """Set the limits of a batch before its first record, and let the timer flush it."""
        batch.take_up_to(*self._limits.room(batch.tail))
        if self.timer is not None:
            self.timer.touch()

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
        except (LogMovedError, OSError) as error:
            self._undo(error)
        if tail is None:
            return False
        self.batch = self.open_batch(tail)  # this one assignment makes the write count
        return True

    def _write(self, batches: Sequence[NewBatch], now: Moment) -> list[range]:
        """Write batches at the tail, all or none of them; returns their records' offsets."""
        try:
            tail, ranges = self.disk.write(self.batch.tail, batches, now)
        except (LogMovedError, OSError) as error:
            self._undo(error)
        self.batch = self.open_batch(tail)  # this one assignment makes the write count
        return ranges

    def _undo(self, error: LogMovedError | OSError) -> NoReturn:
        """Undo a failed write: the open batch is lost, and the writer stays usable unless its files were moved."""
        if isinstance(error, LogMovedError):
            self.disk.fail(error)
        batch, path = self.batch, self.disk.active.path
        self.disk.cut_back(batch.tail)
        # An error of the log has the reason why a roll failed.
        failure = error if isinstance(error, LogError) else refused_write(path, error, "writing a batch")
        batch.lost = failure  # for threads that wait until their records are flushed
        self._losses.drop(failure)
        raise failure from error

    def _adopted(self, batches: Sequence[tuple[Header, Buffer]]) -> list[NewBatch]:
        """The batches of another log. A producer is left out if its sequence numbers do not rise here."""
        self.disk.note_producers(self.batch.tail)
        known: dict[int, int] = {}
        adopted: list[NewBatch] = []
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
            adopted.append(NewBatch(header, [body], producer))
        return adopted

    def _write_all(self, batches: Sequence[NewBatch], used: int, ranges: list[range]) -> bool:
        """Write the batches, and add their offsets to `ranges`. True if a flush is then due.

        What fits a segment is written together; the first segment counts as filled with `used` bytes.
        """
        if self.timer is not None:
            self.timer.touch()
        for part in self._by_segment(batches, used):
            ranges += self._write(part, self._clock.moment())
        return self._ask_if_due()

    def _by_segment(self, batches: Sequence[NewBatch], used: int) -> Iterator[list[NewBatch]]:
        part: list[NewBatch] = []
        size = used
        for batch in batches:
            if part and size + batch.body.length > self.disk.segment_bytes():
                yield part
                part, size = [], 0
            part.append(batch)
            size += batch.body.length
        yield part

    def _ask_if_due(self) -> bool:
        """True if a flush is due. The open batch is then written, and the limits count from its end on."""
        if not self._limits.is_reached(self.batch):
            return False
        self._seal()
        self._limits.note_asked(self.batch.tail)
        return True

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
            except (LogMovedError, OSError) as error:
                self._undo(error)
            self.disk.close_retired()
            self.publication.publish()  # wakes those that copy the log: they adopt the end of the sealed segment
            self.disk.rolled = False  # the callers of `roll` run retention themselves
            return True

    # --- files that were moved -------------------------------------------------------------------

    def _check_moved(self) -> None:
        moved = self.disk.active.find_gone(self.batch.tail) or self.disk.find_moved(thorough=True)
        if moved is not None:
            self._fail_moved(moved)

    def _fail_moved(self, moved: LogMovedError) -> NoReturn:
        """Make the appended records durable in the moved files, if these still exist; then refuse every call."""
        if moved.kept:
            self._seal()
            tail = self.batch.tail
            self.disk.sync(self.disk.active, tail)
            self.publication.publish(flushed=tail, durable=tail)
        self.disk.fail(moved)
