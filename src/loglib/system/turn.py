"""Turn: one thread at a time does a piece of work, and those who wait may find theirs done.

Invariant: at most one `take` runs its action at any moment. It is what makes one fsync serve many
threads (group commit): whoever has the turn flushes all that was appended before, and the others,
when they wake, see that their records are durable and leave.

A plain lock would not do: the thread that just had it takes it again before the others are awake,
and syncs its own next record alone. So a turn begins by waiting until as many threads have come as
came for the last one, but for no longer than half the time that one took. A lone thread never waits.

The turn itself is one lock, taken and let go by `with`, so that an exception at any instruction leaves
it free. All else is for speed. Who waits for a turn's end does so at a gate of its own, a lock that the
one whose turn it is opens; if an interrupt keeps it from that, the waiting thread looks again by itself.
No condition: taking its lock again after a wait may be interrupted, and who then leaves lets go a lock
that is another's.

Threads: `take` may be called from any, but not from within an action.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from operator import methodcaller
from typing import TypeVar

from ..unique import Unique

__all__ = ["Turn"]

T = TypeVar("T")

_LOOK_S = 0.05  # a gate that an interrupt has left shut is not waited at for longer
_open = methodcaller("release")


class Turn(Unique):
    """See above."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        # Guards what follows; no call is made while it is held, so that no signal handler can run meanwhile.
        self._noting = threading.Lock()
        self._taken = False  # or about to be; after some interrupts it says so although `_turn` is free
        self._arrived = 0  # threads that came since the last action began
        self._expected = 0  # as many are there, as far as is known
        self._gathering: threading.Lock | None = None  # the gate of who has the turn, until all have come
        self._waiting: list[threading.Lock] = []  # the gates of who waits for the turn's end
        self._last_s = 0.0

    def take(self, action: Callable[[], T], *, unless: Callable[[], bool] | None = None) -> T | None:
        """Run the action when it is this thread's turn; or return None once `unless` is true."""
        self._arrive()
        opened = True
        while unless is not None:
            if unless():
                return None
            gate = self._gate_of_another(believed=opened)
            if gate is None:
                break
            opened = gate.acquire(timeout=_LOOK_S)
        with self._turn:
            try:
                if unless is not None:
                    if unless():
                        return None
                    self._gather()
                return self._run(action)
            finally:
                self._end()

    def _arrive(self) -> None:
        gate = None
        with self._noting:
            self._arrived += 1
            if self._arrived >= self._expected:
                gate, self._gathering = self._gathering, None
        if gate is not None:
            gate.release()

    def _gate_of_another(self, *, believed: bool) -> threading.Lock | None:
        """The gate at which to wait for the end of another's turn; None if the next turn is this thread's.

        Only one thread at a time goes on to the lock, which is not fair: of many that wait there, two may pass it to
        and fro while the others starve. That a turn is taken is believed, but for whoever has waited at a gate in vain.
        """
        gate, locked = _shut_gate(), self._turn.locked()
        with self._noting:
            if not self._taken or not (believed or locked):
                self._taken = True
                return None
            self._waiting = [*self._waiting, gate]
        return gate

    def _gather(self) -> None:
        """Wait for the others that are there, who will want the same."""
        gate = _shut_gate()
        with self._noting:
            if self._arrived >= self._expected:
                return
            self._gathering = gate
        gate.acquire(timeout=self._last_s / 2)

    def _run(self, action: Callable[[], T]) -> T:
        with self._noting:
            self._taken = True
            served, self._arrived = self._arrived, 0
        began = time.monotonic()
        try:
            return action()
        finally:
            self._last_s = time.monotonic() - began
            self._expected = served + self._arrived

    def _end(self) -> None:
        with self._noting:
            self._taken = False
            gates, self._waiting = self._waiting, []
        deque(map(_open, gates), maxlen=0)  # in C, where no interrupt comes between one and the next


def _shut_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate
