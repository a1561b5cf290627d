"""Turn: one thread at a time does a piece of work, and those who wait may find theirs done.

Invariant: at most one `take` runs its action at any moment. It is what makes one fsync serve many
threads (group commit): whoever has the turn flushes all that was appended before, and the others,
when they wake, see that their records are durable and leave.

A plain lock would not do: the thread that just had it takes it again before the others are awake,
and syncs its own next record alone. So a turn begins by waiting until as many threads have come as
came for the last one, but for no longer than half the time that one took. A lone thread never waits.

An interrupt at any instruction leaves the turn free.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from .unique import Unique

__all__ = ["Turn"]

T = TypeVar("T")


class Turn(Unique):
    """See above. `take` may be called from any thread, but not from within an action."""

    def __init__(self) -> None:
        # Taken by name: entering a condition runs Python code, where an interrupt would leave the lock taken.
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._gathered = threading.Condition(self._lock)
        self._holder: object | None = None
        self._arrived = 0  # threads that came, or stayed, since the last turn ended
        self._expected = 0  # as many as came for the turn before
        self._last_s = 0.0

    def take(self, action: Callable[[], T], *, unless: Callable[[], bool] | None = None) -> T | None:
        """Run the action when it is this thread's turn; or return None once `unless` is true."""
        ticket = object()
        try:
            if not self._stand_in_line(ticket, unless):
                return None
            began = time.monotonic()
            result = action()
            self._last_s = time.monotonic() - began
            return result
        finally:
            if self._holder is ticket:
                with self._lock:
                    self._holder = None
                    self._expected, self._arrived = self._arrived, 0
                    self._ended.notify_all()

    def _stand_in_line(self, ticket: object, unless: Callable[[], bool] | None) -> bool:
        with self._lock:
            self._arrived += 1
            if self._arrived >= self._expected:
                self._gathered.notify()
            while self._holder is not None:
                self._ended.wait()
                if unless is not None and unless():
                    return False
                self._arrived += 1
            self._holder = ticket
            if unless is not None and self._arrived < self._expected:
                self._gathered.wait(self._last_s / 2)
            return True
