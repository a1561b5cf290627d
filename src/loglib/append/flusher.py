"""Flusher: the one background thread of a topic open for writing; keeps the flush interval.

Invariant: a record is flushed at most one interval and one flush pass after it was appended. The writer's
next call raises an error from here; no error is lost. A failed flush is tried again, each time after a
longer pause. Only `stop` ends the thread.

The same thread does the housekeeping by the clock: rolling old segments and retention. It refers to
writers, never to the topic, so that garbage collection can free an unused topic.

Threads: any thread may call `touch` and `kick`, also while it holds a writer's lock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from ..errors import LogClosedError, LogError, StorageIOError
from ..system.clock import monotonic
from ..system.not_copyable import NotCopyable
from .writer import Writer

__all__ = ["Flusher", "from_background"]

_FIRST_PAUSE_S = 0.05  # after a failed flush; a disk that is full now is often full for longer
_LONGEST_PAUSE_S = 5.0  # the longest wait of a person who has made room on the disk


def from_background(error: BaseException, path: str, doing: str) -> LogError:
    """The error that the writer's next call raises for an error in the background."""
    if isinstance(error, LogError):
        return error
    if isinstance(error, OSError):
        raised: LogError = StorageIOError(path, error, f"{doing} in the background")
    else:
        raised = LogError(f"{path}: {error!r} while {doing} in the background; it is tried again")
    raised.__cause__ = error
    return raised


def _seconds(interval: float | None) -> float:
    return math.inf if interval is None else interval


class Flusher(NotCopyable):
    """Flushes when the interval is over or a writer asks, and calls `housekeeping` regularly."""

    def __init__(
        self,
        writers: Sequence[Writer],  # may grow
        *,
        interval: float | None,
        housekeeping: Callable[[], object],
        housekeeping_every: float,
    ) -> None:
        self._writers = writers
        self._interval = _seconds(interval)
        self._housekeeping = housekeeping
        self._every = housekeeping_every
        # Used directly: an interrupt while entering a condition would leave it locked. Reentrant, because a signal
        # handler or a finalizer may append in the middle of `touch` or `kick`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._flush_at = math.inf  # monotonic seconds
        self._pause = _FIRST_PAUSE_S  # the pause before a failed flush is tried again
        self._housekeeping_at = monotonic() + self._every
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="loglib-flusher", daemon=True)
        self._thread.start()

    def set_interval(self, interval: float | None) -> None:
        """Use another flush interval, in seconds. If it is not None, waiting records are flushed now."""
        self._interval = _seconds(interval)
        if interval is not None:
            self.kick()

    def touch(self) -> None:
        """There are records to flush within the interval."""
        if self._flush_at == math.inf:
            self._advance(monotonic() + self._interval)

    def kick(self) -> None:
        """A flush is due now."""
        self._advance(0.0)

    def stop(self) -> None:
        """End the thread and wait for it; the writers are not flushed."""
        with self._lock:
            self._stopped = True
            self._changed.notify()
        if not self.is_here():
            self._thread.join()

    def is_here(self) -> bool:
        """True if the caller is the flusher's own thread."""
        return self._thread is threading.current_thread()

    def _advance(self, flush_at: float) -> None:
        with self._lock:
            if flush_at < self._flush_at:
                self._changed.notify()  # first: after an interrupt here the next call notifies again
                self._flush_at = flush_at

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._work()
            except BaseException:  # noqa: BLE001  For example no memory to wait: records still need a flush.
                with self._lock:
                    self._flush_at = min(self._flush_at, monotonic() + self._pause)
                time.sleep(_FIRST_PAUSE_S)

    def _work(self) -> None:
        """Wait until something is due, and do it."""
        with self._lock:
            while not self._stopped and (now := monotonic()) < min(self._flush_at, self._housekeeping_at):
                pause = min(self._flush_at, self._housekeeping_at) - now
                self._changed.wait(min(pause, threading.TIMEOUT_MAX))
            if self._stopped:
                return
            flush_due = now >= self._flush_at
            if flush_due:
                self._flush_at = math.inf
        if flush_due:
            self._flush_all()
        if now >= self._housekeeping_at:
            self._housekeeping_at = now + self._every
            try:
                self._housekeeping()
            except BaseException as error:  # noqa: BLE001  Raised by the writer's next call.
                for writer in list(self._writers):
                    writer.raise_soon(from_background(error, writer.directory, "housekeeping"))

    def _flush_all(self) -> None:
        failed = False
        for writer in list(self._writers):
            try:
                writer.flush(background=True)
            except LogClosedError:
                continue  # the writer was closed meanwhile, which has flushed it
            except BaseException as error:  # noqa: BLE001  Raised by the writer's next call.
                failed = True
                writer.raise_soon(from_background(error, writer.directory, "flushing"))
        if failed and any(writer.unflushed() for writer in list(self._writers)):
            self._advance(monotonic() + self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
        elif not failed:
            self._pause = _FIRST_PAUSE_S
