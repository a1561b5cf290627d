"""Turns: several processes write one topic, and none of them has to know of the others.

Invariant: a process writes to a partition only while it has the flock of the partition's directory (system/lock.py). It
gives it up only when all that it has appended is written, and the watermark says how far. So the next one finds a log
that ends where the watermark says, or one that must be recovered, because the holder has died.

    alone       A process that finds a partition free takes it, and keeps it as long as nobody wants it and it has
                something to do. So a lone writer pays nothing.
    contended   A process that finds one taken takes the turn of the topic: the flock of the file `turns`. All others
                see that somebody has the turn, give up all their partitions, and wait for the turn. Who has the turn
                takes what it needs, and gives up all of it, and the turn, after 5 ms, or during a long sync. Without
                the turn, two processes that spread keys over partitions would each hold some of them, and wait for the
                rest after every record.

The turn only orders the processes. Losing the file, or a process that is stopped while it has the turn, costs the
others 0.1 s each time: then they take partitions without it.

Nobody blocks in the system, because a wait for a process that is stopped must end. Who waits asks again and again: for
the first millisecond every 50 us, then less often, and after a long wait more often again. So among many processes
nobody waits for ever.

Threads: safe for all.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakSet

from ..system.clock import monotonic
from ..system.directory import Directory
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from ..system.process import fork_lock, in_child

NAME = "turns"
TURN_S = 0.005  # a turn, if no flush ends it
_SHORTEST_NAP_S = 0.00005
_LONG_WAIT_NAP_S = 0.0004
_SOON_S = 0.02  # in this time a few processes that sync have had their turns
_LONGEST_NAP_S = 0.001
_OVERTAKE_S = 0.1  # the turns of a few processes
_ASK_S = 0.0004  # to ask costs 3 % of a synced append, which takes about half of this
_ALONE_S = 1.0  # after this time without another process, it is asked only once in a turn

_opening = fork_lock()  # a child has no copy of the file that it does not know
_in_child = in_child()


def _nap_s(waited_s: float, wait_s: float) -> float:
    """The time until a process that waits asks again, in seconds. It gives up after `wait_s`."""
    if waited_s < _SOON_S:
        return _SHORTEST_NAP_S if waited_s < _LONGEST_NAP_S else _LONG_WAIT_NAP_S
    return max(_LONGEST_NAP_S * (1 - 2 * waited_s / wait_s), _LONG_WAIT_NAP_S)


class Turns(NotCopyable):
    """The turns of one open topic."""

    def __init__(self, files: Files, path: str, wait_s: float, permissions: int) -> None:
        self._files = files
        self._path = os.path.join(path, NAME)
        self._permissions = permissions
        self.wait_s = wait_s  # how long to wait for a partition that another process has
        self._lock = threading.RLock()  # guards the attributes below
        self._fd = -1  # of the file, once it was needed
        self._identity = (0, 0)
        self._is_closed = False
        self._held: WeakSet[Directory] = WeakSet()  # the partitions that this process has
        self._is_mine = False  # whether this process has the turn
        self._began = 0.0  # when it got its first partition in this turn
        self._asked = 0.0
        self._met = 0.0  # when another process was seen last
        self._yields_until = 0.0  # after a turn, the others come first
        _in_child.add(self._abandon)

    # --- take ------------------------------------------------------------------------------------

    def take(self, place: Directory, *, wait_s: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Take the flock of a partition's directory. False after `wait_s` seconds, or as soon as `is_over` is true."""
        began = monotonic()
        if wait_s <= 0:
            return self._take_free(place)
        while monotonic() < min(self._yields_until, began + wait_s) and not self._is_anothers():
            time.sleep(_SHORTEST_NAP_S)
        try:
            while not is_over():
                waited = monotonic() - began
                if self._take_at_once(place, may_overtake=waited >= min(_OVERTAKE_S, wait_s / 2)):
                    return True
                if waited >= wait_s:
                    return False
                time.sleep(_nap_s(waited, wait_s))
            return False
        finally:
            with self._lock:
                if self._is_mine and not self._held:
                    self._give_turn_up()

    def _take_free(self, place: Directory) -> bool:
        """Take the partition if nobody has it. The others do not notice."""
        with self._lock:
            if not self._files.try_lock(place.fd, place.path):
                return False
            self._held.add(place)
            return True

    def _take_at_once(self, place: Directory, *, may_overtake: bool) -> bool:
        with self._lock:
            is_new = not self._is_mine and self._take_turn()
            if not (self._is_mine or may_overtake) or not self._take_free(place):
                return False
            if is_new:  # nobody has what this process wants
                self._give_turn_up()
            elif self._is_mine and not self._began:
                self._began = monotonic()
            return True

    def _take_turn(self) -> bool:
        """Take the turn, if nobody has it. The file may be missing, and the disk full."""
        self._is_mine = not self._open(make=True) or self._files.try_lock(self._fd, self._path)
        self._began = monotonic() if self._held else 0.0
        return self._is_mine

    def _open(self, *, make: bool) -> bool:
        """Open the file, which somebody may have removed. False if it is missing, or if it cannot be made."""
        if self._fd >= 0 and self._files.leads_to(self._path, self._identity):
            return True
        if self._is_closed:
            return False
        with suppress(OSError), _opening:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                self._files.close(fd)
            if make:
                self._fd = self._files.create(self._path, self._permissions, exclusive=False)
            else:
                self._fd = self._files.open_write(self._path)
            self._identity = self._files.identity(self._fd)
        return self._fd >= 0

    def _give_turn_up(self) -> None:
        self._is_mine = False
        if self._fd >= 0:
            self._files.unlock(self._fd)

    def held(self) -> int:
        """The number of partitions that this process has."""
        return len(self._held)

    # --- give up ---------------------------------------------------------------------------------

    def ends_with_flush(self) -> bool:
        """True if this process gives its partitions up after a flush. It does not ask the system each time."""
        if self._is_mine:
            return True
        now = monotonic()
        if now - self._asked < (_ASK_S if now - self._met < _ALONE_S else TURN_S):
            return False
        self._asked = now
        return self._is_anothers()

    def is_over(self) -> bool:
        """True if this process gives its partitions up now."""
        if self._is_mine:
            return bool(self._began) and monotonic() - self._began >= TURN_S
        return self._is_anothers()

    def _is_anothers(self) -> bool:
        """True if another process has the turn. Only a process that takes the turn makes the file.

        A look must leave no file in a topic that somebody is just deleting.
        """
        with self._lock:
            if self._is_mine or not self._open(make=False):
                return False
            if not self._files.try_lock(self._fd, self._path):
                self._met = monotonic()
                return True
            self._files.unlock(self._fd)
            return False

    def given_up(self, place: Directory) -> None:
        """This process has given the partition up. With the last one it gives the turn up, and others come first."""
        with self._lock:
            self._held.discard(place)
            if self._is_mine and self._began and not self._held:
                self._give_turn_up()
                self._yields_until = monotonic() + _LONGEST_NAP_S

    def close(self) -> None:
        """Give the turn up, and close the file."""
        with self._lock:
            self._is_closed = True
            fd, self._fd = self._fd, -1
            if fd >= 0:
                if self._is_mine:
                    self._files.unlock(fd)
                self._files.close(fd)
            self._is_mine = False
            _in_child.discard(self._abandon)

    def _abandon(self, parent_pid: int) -> None:
        """After a fork: close the child's copy of the file, which shares the parent's lock."""
        del parent_pid
        self._lock = threading.RLock()
        self._is_closed = True
        fd, self._fd = self._fd, -1
        self._is_mine = False
        if fd >= 0:
            self._files.close(fd)
