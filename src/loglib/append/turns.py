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
    fair        Processes that wait for the turn form a line (line.py). Of those in it only the first asks for the turn.

The turn and the line only order the processes. Losing the file, or a process that is stopped while it has the turn,
costs the others 0.1 s each time: then they take partitions without it. One that is stopped in the line costs each of
the others 0.1 s once.

Nobody blocks in the system, because a wait for a process that is stopped must end. Who gives the turn up wakes the
first of the line. The others sleep, and look each 4 to 20 ms whether they are the first: a wake may not arrive. So
many processes that wait cost little more than one.

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
from .line import Line

NAME = "turns"
TURN_S = 0.005  # a turn, if no flush ends it
_FIRST_LOOK_S = 0.0005  # a look takes 20 us
_SHORTEST_NAP_S = 0.00005
_SOON_S = 0.001  # in this time a process that has nothing to do has given its partitions up, if it was just asked
_NAP_S = 0.0002
_NAP_IN_LINE_S = 0.004  # as long as no wake arrives
_WOKEN_NAP_S = 0.02  # a wake ends it
_OVERTAKE_S = 0.1  # without a move of the line: many turns
_ASK_S = 0.0004  # to ask costs 3 % of a synced append, which takes about half of this
_ALONE_S = 1.0  # after this time without another process, it is asked only once in a turn

_opening = fork_lock()  # a child has no copy of the file that it does not know
_in_child = in_child()


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
        self._line: Line | None = None  # in the file
        self._is_closed = False
        self._held: WeakSet[Directory] = WeakSet()  # the partitions that this process has
        self._is_mine = False  # whether this process has the turn
        self._began = 0.0  # when it got its first partition in this turn
        self._taken_at = 0.0  # when it got the last one
        self._asked = 0.0
        self._met = 0.0  # when another process was seen last
        _in_child.add(self._abandon)

    # --- take ------------------------------------------------------------------------------------

    def take(self, place: Directory, *, wait_s: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Take the flock of a partition's directory. False after `wait_s` seconds, or as soon as `is_over` is true."""
        if wait_s <= 0:
            return self._take_free(place)
        began = moved = monotonic()
        ahead = self._enter_line() if self._is_contended() else 0
        try:
            while not is_over():
                waited_s, is_stuck = monotonic() - began, monotonic() - moved >= min(_OVERTAKE_S, wait_s / 2)
                if not ahead and self._take_at_once(place, may_overtake=is_stuck):
                    return True
                if waited_s >= wait_s:
                    return False
                before, ahead = ahead, self._enter_line(passed=ahead if is_stuck else 0)
                if ahead != before:
                    moved = monotonic()
                if ahead or not before:
                    self._wait(ahead, waited_s)
            return False
        finally:
            with self._lock:
                if self._line is not None:
                    self._line.leave()
                if self._is_mine and not self._held:
                    self._give_turn_up()

    def _enter_line(self, *, passed: int = 0) -> int:
        """The first place of the line, which this process enters; 0 if it is its own, or if it needs none.

        `passed`: a place whose process is stopped. This process does not wait for it any more.
        """
        with self._lock:
            if self._is_mine or self._line is None:
                return 0
            if passed:
                self._line.pass_by(passed)
            ahead = self._line.ahead()
            if ahead:
                self._met = monotonic()
            return ahead

    def _wait(self, ahead: int, waited_s: float) -> None:
        """Sleep until this process is to ask again. Who gives the turn up may end it."""
        line, nap_s = self._line, _SHORTEST_NAP_S if waited_s < _SOON_S else _NAP_S
        if line is None or self._is_mine:
            time.sleep(nap_s)
        elif ahead:
            line.wait(_WOKEN_NAP_S if line.is_woken else _NAP_IN_LINE_S)
        else:  # it is the first, and the one that has the turn will wake it, unless that one dies
            line.wait(_NAP_IN_LINE_S if line.is_woken else nap_s)

    def _is_contended(self) -> bool:
        """True if another process was there a short time ago."""
        return monotonic() - self._met < _ALONE_S

    def _take_free(self, place: Directory) -> bool:
        """Take the partition if nobody has it. The others do not notice."""
        with self._lock:
            if not self._files.try_lock(place.fd, place.path):
                return False
            self._held.add(place)
            self._taken_at = monotonic()
            return True

    def _take_at_once(self, place: Directory, *, may_overtake: bool) -> bool:
        with self._lock:
            is_new = not self._is_mine and self._take_turn()
            if not (self._is_mine or may_overtake) or not self._take_free(place):
                return False
            if is_new and not self._is_contended():
                self._give_turn_up()
            elif self._is_mine and not self._began:
                self._began = monotonic()
            return True

    def _take_turn(self) -> bool:
        """Take the turn, if nobody has it. The file may be missing, and the disk full."""
        self._is_mine = not self._open(make=True) or self._files.try_lock(self._fd, self._path)
        self._began = monotonic() if self._held else 0.0
        if not self._is_mine:
            self._met = monotonic()
        elif self._line is not None:
            self._line.leave()
        return self._is_mine

    def _open(self, *, make: bool) -> bool:
        """Open the file, which somebody may have removed. False if it is missing, or if it cannot be made."""
        if self._fd >= 0 and self._files.leads_to(self._path, self._identity):
            return True
        if self._is_closed:
            return False
        with suppress(OSError), _opening:
            self._close_file()
            if make:
                self._fd = self._files.create(self._path, self._permissions, exclusive=False)
            else:
                self._fd = self._files.open_write(self._path)
            self._identity = self._files.identity(self._fd)
            self._line = Line(self._files, self._fd)
        return self._fd >= 0

    def _give_turn_up(self) -> None:
        self._is_mine = False
        if self._fd >= 0:
            self._files.unlock(self._fd)
        if self._line is not None:
            self._line.ring()

    def _close_file(self) -> None:
        fd, line, self._fd, self._line = self._fd, self._line, -1, None
        if line is not None:
            line.close()
        if fd >= 0:
            self._files.close(fd)

    def held(self) -> int:
        """The number of partitions that this process has."""
        return len(self._held)

    # --- give up ---------------------------------------------------------------------------------

    def ends_with_flush(self) -> bool:
        """True if this process gives its partitions up after a flush. It does not ask the system each time."""
        if self._is_mine:
            return True
        now = monotonic()
        if now - self._asked < (_ASK_S if self._is_contended() else TURN_S):
            return False
        self._asked = now
        return self._is_anothers()

    def first_look_s(self) -> float:
        """The time from the moment at which a partition is taken to the first look, in seconds.

        It is short if another process was there a short time ago: it should not wait for one that has nothing to do.
        """
        return _FIRST_LOOK_S if self._is_contended() else TURN_S

    def look(self, *, is_idle: bool) -> bool:
        """True if this process gives its partitions up now: its turn is over, or another one has the turn.

        The turn of a process that is idle is over as soon as another one waits. If nobody waits at the end of the turn,
        the process keeps its partitions. The turn ends here, not with the last partition that is given up: other
        threads may take the first one back meanwhile.
        """
        with self._lock:
            if not is_idle and monotonic() - self._taken_at < TURN_S:
                return False  # without a call of the system, after which a busy thread would keep this one waiting
            if not self._is_mine:
                return self._is_anothers()
            is_over = monotonic() - self._began >= TURN_S
            if not self._began or not (is_over or is_idle):
                return False
            is_awaited = self._line is None or not self._line.is_empty()
            if is_over or is_awaited:
                self._give_turn_up()
            return is_awaited

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
        """This process has given the partition up. With the last one it gives the turn up."""
        with self._lock:
            self._held.discard(place)
            if self._is_mine and self._began and not self._held:
                self._give_turn_up()

    def close(self) -> None:
        """Give the turn up, and close the file."""
        with self._lock:
            self._is_closed = True
            if self._is_mine:
                self._give_turn_up()
            self._close_file()
            _in_child.discard(self._abandon)

    def _abandon(self, parent_pid: int) -> None:
        """After a fork: close the child's copy of the file, which shares the parent's lock."""
        del parent_pid
        self._lock = threading.RLock()
        self._is_closed = True
        self._is_mine = False
        self._close_file()
