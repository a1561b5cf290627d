"""Publication: what the readers of a partition may see, in its watermark.

Invariant: a published end or start never goes back. `in_progress` is True while any thread publishes.

Threads: safe for all; one lock is held during a publication, and no other lock is acquired meanwhile.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

from ..errors import LogError
from ..format.record import new_tuple
from ..format.watermark import Mark, WatermarkWriter
from ..log.log import Wakeable
from ..log.recovery import Tail
from ..system.not_copyable import NotCopyable
from ..system.reentry import asker

_UNDISTURBED = nullcontext()


class Hold(NamedTuple):
    """A transaction that is not known to be done: the fields are those of the watermark (format/watermark.py)."""

    held_txn: int
    held_from: int
    held_tail: int
    held_id: int
    store: int


NO_HOLD = Hold(0, 0, 0, 0, 0)


class PendingAck(Protocol):
    """A request to the other directories of a replicated partition."""

    def settle(self) -> None:
        """Wait until enough of them have acknowledged; an error names those that have not."""


class Copies(Protocol):
    """The other directories of a replicated partition (copies/replica.py)."""

    accepted: bool  # whether enough of them take this log for the writer's; before that, readers see nothing new

    def ask(self, base_offset: int, tail: Tail) -> PendingAck:
        """Let them make durable, meanwhile, all before `tail`, which is in the segment with this base offset."""

    def publish(self, mark: Mark) -> None:
        """Let their readers see it, too. Does not wait."""


@dataclass(eq=False, repr=False)
class Publication(NotCopyable):
    """The watermark of a partition that is open for writing, and who is woken by it."""

    watermark: WatermarkWriter
    epoch: int  # of the writer, as the nonce
    nonce: int
    copies: Copies | None  # the partition's other directories
    fail: Callable[[OSError], NoReturn]  # called with the error if the watermark cannot be written

    def __post_init__(self) -> None:
        self._listeners: tuple[weakref.ref[Wakeable], ...] = ()
        self._lock = threading.RLock()  # reentrant, so that it knows its thread
        self.is_mine = asker(self._lock)  # whether the calling thread is publishing
        self._others_may_publish = False
        self._has_left = False  # whether another process may write now
        self._closed: LogError | None = None
        self.in_progress = False  # whether some thread may be: if not, `is_mine` need not be called

    def publish(
        self,
        *,
        flushed: Tail | None = None,
        durable: Tail | None = None,
        log_start: int = 0,
        applied: bool = False,
        hold: Hold | None = None,
        written: Tail | None = None,
    ) -> None:
        """Let readers see everything before `flushed`. Never moves a published end or start back.

        `durable`: all before it is on the disk. `log_start`: readers see nothing below it. `applied`: all records of
        the held transaction are in the log. `hold`: the transaction that is held from now on; `NO_HOLD` for none.
        `written`: the next writer continues there. Raises the reason that was given to `close`.
        """
        copies = self.copies
        if copies is not None and not copies.accepted:
            flushed = durable = None
        if self._has_left and written is None and not _is_news(self.look(), flushed, durable):
            return  # another process has flushed it: so it is often, if several wait for syncs at a time
        with self._lock, self._alone() if self._others_may_publish else _UNDISTURBED:
            if self._closed is not None:
                raise self._closed
            self.in_progress = True
            last = self.watermark.mark
            flushed_end, flushed_tail = last.flushed_end, last.flushed_tail
            durable_end, durable_tail = last.durable_end, last.durable_tail
            applied_txn, applied_id = last.applied_txn, last.applied_id
            held_txn, held_from, held_tail, held_id = last.held_txn, last.held_from, last.held_tail, last.held_id
            store = last.txn_store
            if flushed is not None and flushed.end >= flushed_end:
                flushed_end, flushed_tail = flushed.end, flushed.last_batch
            if durable is not None and durable.end >= durable_end:
                durable_end, durable_tail = durable.end, durable.last_batch
            if self._has_left and written is None and not _is_news(last, flushed, durable):
                self.in_progress = False
                return  # another process has just flushed it, and may write here without asking
            if applied and held_txn:
                applied_txn, applied_id = held_txn, held_id
            if hold is not None:
                held_txn, held_from, held_tail, held_id = hold[:4]
                store = hold.store or store
            written_end, written_tail = last.written_end, last.written_tail
            if written is not None and written.end > flushed_end:
                written_end, written_tail = written.end, written.last_batch
            elif written_end <= flushed_end:
                written_end = written_tail = 0
            # The fields of Mark in their order: made by position, in half the time.
            mark = new_tuple(Mark, (
                last.sequence + 1, max(last.log_start_offset, log_start), flushed_end, durable_end,
                self.epoch, self.nonce, flushed_tail, applied_txn, held_txn, held_from, last.promised_epoch,
                durable_tail, held_tail, written_end, written_tail, applied_id, held_id, store,
            ))  # fmt: skip
            try:
                self.watermark.publish(mark)
            except OSError as error:
                self.fail(error)
            if copies is not None:
                copies.publish(mark)
            self.in_progress = False
        if self._listeners:
            self.wake()

    def publish_by(self, watermark: WatermarkWriter, epoch: int, nonce: int) -> None:
        """Publish into this file from now on, as this writer, after a recovery of the log."""
        with self._lock:
            self.watermark, self.epoch, self.nonce = watermark, epoch, nonce
            self._others_may_publish = self._has_left = False

    def come_back(self, mark: Mark, epoch: int) -> None:
        """Go on after the mark, which another process has published. Others may still flush what they have written."""
        with self._lock:
            self.epoch = epoch
            self._others_may_publish, self._has_left = True, False
            self._note(mark)

    def leave(self, tail: Tail) -> None:
        """Publish where the next writer, in another process, continues. Later flushes are published beside it."""
        with self._lock:
            self._others_may_publish = self._has_left = True
            if tail.end > self.watermark.mark.flushed_end:
                self.publish(written=tail)

    def look(self) -> Mark:
        """The newest publication of any process."""
        if self._others_may_publish:
            with self._lock:
                if self._closed is None:
                    self._note(self.watermark.read())
        return self.watermark.mark

    def _note(self, mark: Mark | None) -> None:
        if mark is not None and mark.sequence > self.watermark.mark.sequence:
            self.watermark.mark = mark

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Publish after what other processes have published. They may do so while they have something to flush."""
        with self.watermark.locked():
            yield
            last = self.watermark.mark
            self._others_may_publish = self._has_left or last.written_end > last.flushed_end

    def sync(self) -> None:
        """Make the last mark durable. `WriterFailedError` if the disk refuses; this is final."""
        try:
            self.watermark.sync()
        except OSError as error:
            self.fail(error)

    def close(self, why: LogError) -> None:
        """Publish nothing from now on. The caller closes the file then, and its number may name another file."""
        with self._lock:
            self._closed = why
            self._others_may_publish = False  # else `publish` would lock and read the file before it raises

    def listen(self, waiter: Wakeable) -> None:
        """Wake the waiter after every publication, from the publishing thread, while the waiter exists."""
        with self._lock:
            self.in_progress = True
            self._listeners = (*(each for each in self._listeners if each() is not None), weakref.ref(waiter))
            self.in_progress = False

    def wake(self) -> None:
        """Wake all waiters."""
        for listener in self._listeners:
            if (waiter := listener()) is not None:
                waiter.wake()

    def abandon_in_child(self) -> None:
        """After a fork: make a new lock, because a thread of the parent may hold the old one."""
        self._lock = threading.RLock()
        self.is_mine = asker(self._lock)


def _is_news(last: Mark, flushed: Tail | None, durable: Tail | None) -> bool:
    is_flushed = flushed is not None and flushed.end > last.flushed_end
    return is_flushed or (durable is not None and durable.end > last.durable_end)
