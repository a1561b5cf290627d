"""Publication: what the readers of a partition may see, in its watermark.

Invariant: a published end or start never goes back. `in_progress` is True while any thread publishes.

Threads: safe for all; one lock is held during a publication, and no other lock is acquired meanwhile.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple, NoReturn, Protocol

from ..format.record import new_tuple
from ..format.watermark import Mark, WatermarkWriter
from ..log.log import Wakeable
from ..log.recovery import Tail
from ..system.not_copyable import NotCopyable
from ..system.reentry import asker

__all__ = ["NO_HOLD", "Copies", "Hold", "PendingAck", "Publication"]


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


class Publication(NotCopyable):
    """The watermark of a partition that is open for writing, and who is woken by it.

    `epoch` and `nonce` are the writer's. `copies`: the partition's other directories. `fail` is called with the error
    if the watermark cannot be written.
    """

    def __init__(
        self,
        watermark: WatermarkWriter,
        *,
        epoch: int,
        nonce: int,
        copies: Copies | None,
        fail: Callable[[OSError], NoReturn],
    ) -> None:
        self._watermark = watermark
        self._epoch, self._nonce = epoch, nonce
        self._copies = copies
        self._fail = fail
        self._listeners: tuple[weakref.ref[Wakeable], ...] = ()
        self._lock = threading.RLock()  # reentrant, so that it knows its thread
        self.is_mine = asker(self._lock)  # whether the calling thread is publishing
        self.in_progress = False  # whether some thread may be: if not, `is_mine` need not be called

    def publish(
        self,
        *,
        flushed: Tail | None = None,
        durable: Tail | None = None,
        log_start: int = 0,
        applied: bool = False,
        hold: Hold | None = None,
    ) -> None:
        """Let readers see everything before `flushed`. Never moves a published end or start back.

        `durable`: all before it is on the disk. `log_start`: readers see nothing below it. `applied`: all records of
        the held transaction are in the log. `hold`: the transaction that is held from now on; `NO_HOLD` for none.
        """
        copies = self._copies
        if copies is not None and not copies.accepted:
            flushed = durable = None
        with self._lock:
            self.in_progress = True
            last = self._watermark.mark
            flushed_end, flushed_tail = last.flushed_end, last.flushed_tail
            durable_end, durable_tail = last.durable_end, last.durable_tail
            applied_txn, applied_id = last.applied_txn, last.applied_id
            held_txn, held_from, held_tail, held_id = last.held_txn, last.held_from, last.held_tail, last.held_id
            store = last.txn_store
            if flushed is not None and flushed.end >= flushed_end:
                flushed_end, flushed_tail = flushed.end, flushed.last_batch
            if durable is not None and durable.end >= durable_end:
                durable_end, durable_tail = durable.end, durable.last_batch
            if applied:
                applied_txn, applied_id = held_txn, held_id
            if hold is not None:
                held_txn, held_from, held_tail, held_id = hold[:4]
                store = hold.store or store
            # The fields of Mark in their order: made by position, in half the time. The zeros are written_*.
            mark = new_tuple(Mark, (
                last.sequence + 1, max(last.log_start_offset, log_start), flushed_end, durable_end,
                self._epoch, self._nonce, flushed_tail, applied_txn, held_txn, held_from, last.promised_epoch,
                durable_tail, held_tail, 0, 0, applied_id, held_id, store,
            ))  # fmt: skip
            try:
                self._watermark.publish(mark)
            except OSError as error:
                self._fail(error)
            if copies is not None:
                copies.publish(mark)
            self.in_progress = False
        if self._listeners:
            self.wake()

    def sync(self) -> None:
        """Make the last mark durable. `WriterFailedError` if the disk refuses; this is final."""
        try:
            self._watermark.sync()
        except OSError as error:
            self._fail(error)

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
