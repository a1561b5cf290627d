"""Flusher: the one background thread of a topic open for writing; keeps the flush interval.

Invariant: from the moment a record is appended until it is flushed, at most the interval and one
flush pass. What goes wrong here is raised by the writer's next call, never swallowed.

The same thread does the housekeeping that goes by the clock: rolling old segments and retention.
It refers to writers, never to the topic, so that a topic nobody refers to can be collected.

Threads: `touch` and `kick` may be called from any, also while a writer's lock is held.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from .errors import LogClosedError, LogError, StorageIOError
from .unique import Unique
from .writer import Writer

__all__ = ["Flusher"]


class Flusher(Unique):
    """Flushes when the interval is over or a writer asks, and calls `housekeeping` every so often."""

    def __init__(
        self,
        writers: Sequence[Writer],  # may grow
        *,
        interval: float | None,
        housekeeping: Callable[[], object],
        housekeeping_every: float,
    ) -> None:
        self._writers = writers
        self._interval = math.inf if interval is None else interval
        self._housekeeping = housekeeping
        self._every = housekeeping_every
        self._lock = threading.Lock()  # taken by name: an interrupt on entering a condition would leave it taken
        self._changed = threading.Condition(self._lock)
        self._flush_at = math.inf  # monotonic seconds
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="loglib-flusher", daemon=True)
        self._thread.start()

    def touch(self) -> None:
        """There are records to flush within the interval."""
        if self._flush_at == math.inf:
            self._advance(time.monotonic() + self._interval)

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
        """Whether the caller is the flusher's own thread."""
        return self._thread is threading.current_thread()

    def _advance(self, flush_at: float) -> None:
        with self._lock:
            if flush_at < self._flush_at:
                self._changed.notify()  # first: an interrupt in it leaves the time, and the next call tells once more
                self._flush_at = flush_at

    def _run(self) -> None:
        housekeeping_at = time.monotonic() + self._every
        while True:
            with self._lock:
                while not self._stopped and (now := time.monotonic()) < min(self._flush_at, housekeeping_at):
                    pause = min(self._flush_at, housekeeping_at) - now
                    self._changed.wait(min(pause, threading.TIMEOUT_MAX))
                if self._stopped:
                    return
                flush_due = now >= self._flush_at
                if flush_due:
                    self._flush_at = math.inf
            if flush_due:
                for writer in list(self._writers):
                    self._flush(writer)
            if now >= housekeeping_at:
                housekeeping_at = now + self._every
                self._housekeeping()

    def _flush(self, writer: Writer) -> None:
        try:
            writer.flush(background=True)
        except LogClosedError:
            return  # closed meanwhile; closing has flushed it
        except LogError as error:
            writer.raise_soon(error)
        except OSError as error:
            writer.raise_soon(StorageIOError(writer.directory, error, "flushing in the background"))
