"""Common wait: several threads wait for what one observer reports.

Invariant: one thread at a time asks the system; the others wait for that thread. A thread that was told of nothing
since it looked sleeps; one that was told of something in between does not.

Threads: safe for all.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Mapping

from ..system.not_copyable import NotCopyable
from ..system.notify import Observer


class CommonWait(NotCopyable):
    """The sleep of the threads that ask one member for jobs."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        # Held by the thread that asks the system. Reentrant, because an interrupt may leave it to its thread.
        self._asking = threading.RLock()
        self._told = threading.Condition()
        self._number = 0  # grows when there may be something to do for other threads

    def number(self) -> int:
        """The number to be given to `wait`, read before the thread looks whether there is something to do."""
        return self._number

    def wait(self, seconds: float, number: int) -> None:
        """Return when something may have changed since `number` was read, or after that many seconds."""
        if not self._asking.acquire(blocking=False):
            with self._told:
                if self._number == number:
                    self._told.wait(seconds)
            return
        try:
            if self._number == number:
                self._observer.wait(seconds)
        finally:
            self._asking.release()
            self.tell()

    def changed(self) -> Mapping[Hashable, Collection[str]]:
        """The changes that the observer reports; none while another thread waits for them."""
        if not self._asking.acquire(blocking=False):
            return {}
        try:
            return self._observer.changed()
        finally:
            self._asking.release()

    def tell(self) -> None:
        """Wake the threads that wait for another one."""
        with self._told:
            self._number += 1
            self._told.notify_all()

    def wake(self) -> None:
        """Wake all threads. A signal handler may call this."""
        self.tell()
        self._observer.wake()
