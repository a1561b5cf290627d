"""Group commit: one thread at a time does a piece of work. A waiting thread may find that its work is already done.

Invariant: at most one `take` runs its action at any moment. So one fsync serves many threads (group
commit): the thread that has the turn flushes all records that were appended before. The other threads wake,
see that their records are durable, and leave.

A plain lock is not enough: the thread that has just released it would take it again before the others wake,
and would sync only its own next record. So a turn begins with a wait until as many threads have come as came
for the last turn. The wait takes at most half the time of the last turn. A lone thread never waits.

The turn itself is one lock, acquired and released by `with`, so an exception at any instruction leaves it
free. All the rest is for speed. Each waiting thread waits at its own gate, a lock that the thread with the
turn opens. If an interrupt prevents that, the waiting thread looks again by itself. A condition is not used:
an interrupt may come while it acquires its lock again after a wait, and the thread would then release a lock
that another thread holds.

Threads: any thread may call `take`, but not from within an action: `check_outside` refuses that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Set
from operator import methodcaller
from typing import TypeVar

from .clock import monotonic
from .not_copyable import NotCopyable
from .reentry import is_mine, refuse

T = TypeVar("T")

_LOOK_S = 0.05  # the longest wait at a gate, because an interrupt may have left it shut
_open = methodcaller("release")


class Turn(NotCopyable):
    """The turn to do a piece of work, which one thread at a time has."""

    def __init__(self) -> None:
        self._turn = threading.RLock()  # reentrant, so that it knows its thread; no thread takes it twice
        self._busy = threading.Lock()  # taken only together with the turn: it is locked while anybody has the turn
        # Guards the attributes below. No call is made while it is held, so no signal handler can run meanwhile. A
        # finalizer can, and is refused.
        self._noting = threading.RLock()
        # The threads that have the turn or wait for its lock. After some interrupts one of them may do neither.
        self._going: Set[int] = frozenset()
        self._arrived = 0  # threads that came since the last action began
        self._expected = 0  # threads that are expected to come for this turn
        self._gathering: threading.Lock | None = None  # the gate of the thread with the turn, until all have come
        self._waiting: list[threading.Lock] = []  # the gates of the threads that wait for the end of the turn
        self._last_s = 0.0

    def check_outside(self, what: str) -> None:
        """`LogError` in the middle of this thread's turn; `what` names its work."""
        if is_mine(self._turn) or is_mine(self._noting):
            refuse(what)

    def take(self, action: Callable[[], T], *, unless: Callable[[], bool] | None = None) -> T | None:
        """Run the action when it is this thread's turn, or return None as soon as `unless` is true."""
        me = threading.get_ident()
        self._arrive()
        if unless is None:
            self._go(me)
        elif not self._claim(me) and not self._wait(me, unless):
            return None
        with self._turn, self._busy:
            try:
                if unless is not None:
                    if unless():
                        return None
                    if self._arrived < self._expected:
                        self._gather()
                return self._run(action)
            finally:
                self._end(me)

    def take_at_once(self, action: Callable[[], object]) -> None:
        """Run the action if nobody has the turn, wants it, or is expected. Otherwise do nothing."""
        me = threading.get_ident()
        if is_mine(self._turn) or is_mine(self._noting):
            return
        with self._noting:
            if self._going - {me} or self._arrived or self._expected > 1:
                return
            self._going, self._arrived = {me}, 1
        with self._turn, self._busy:
            try:
                self._run(action)
            finally:
                self._end(me)

    def _arrive(self) -> None:
        gate = None
        with self._noting:
            self._arrived += 1
            if self._arrived >= self._expected:
                gate, self._gathering = self._gathering, None
        if gate is not None:
            gate.release()

    def _go(self, me: int) -> None:
        """Count this thread among those that wait for the lock."""
        with self._noting:
            self._going = self._going | {me}

    def _claim(self, me: int) -> bool:
        """Take the turn and return True if nobody has it. A lone caller needs no gate."""
        with self._noting:
            if self._going - {me}:
                return False
            self._going = {me}
        return True

    def _wait(self, me: int, unless: Callable[[], bool]) -> bool:
        """Wait for the turn. False as soon as `unless` is true."""
        opened = True
        while not unless():
            gate = self._gate_of_another(me, believed=opened)
            if gate is None:
                return True
            opened = gate.acquire(timeout=_LOOK_S)
        return False

    def _gate_of_another(self, me: int, *, believed: bool) -> threading.Lock | None:
        """The gate at which to wait for the end of another thread's turn; None if the next turn is this thread's.

        Only one thread at a time waits for the lock. The lock is not fair: if many threads waited there, two could
        pass it to each other while the others starve. `believed` is False for a thread whose gate was not opened in
        time: it does not trust `_going`. If it is wrong, two threads wait until one of them has had its turn.
        """
        gate, locked = _shut_gate(), self._busy.locked()
        with self._noting:
            if not self._going - {me} or not (believed or locked):
                self._going = {me}
                return None
            self._waiting = [*self._waiting, gate]
        return gate

    def _gather(self) -> None:
        """Wait for the other expected threads, which will want the same action."""
        gate = _shut_gate()
        with self._noting:
            if self._arrived >= self._expected:
                return
            self._gathering = gate
        gate.acquire(timeout=self._last_s / 2)

    def _run(self, action: Callable[[], T]) -> T:
        with self._noting:
            served, self._arrived = self._arrived, 0
        began = monotonic()
        try:
            return action()
        finally:
            self._last_s = monotonic() - began
            self._expected = served + self._arrived

    def _end(self, me: int) -> None:
        with self._noting:
            self._going = self._going - {me}  # others may wait for the lock
            gates, self._waiting = self._waiting, []
        deque(map(_open, gates), maxlen=0)  # in C, where no interrupt comes between two gates


def _shut_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate
