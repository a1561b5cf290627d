"""Line: the order of the processes that wait for the turn of a topic, by locks of single bytes of the file `turns`.

Invariant: a place in the line is a byte, and a process has the place while it has the byte's lock. It enters after the
last place that is taken, and moves up as the places before it become free. So the first one to come is the first one to
have a turn. The kernel frees the place of a process that dies.

The line only orders. If a lock is lost, or more processes wait than there are places, turns are not fair, and nothing
else happens: a process without a place asks for the turn, too. Locks of bytes belong to the process (fcntl(2)). It
loses them when it closes any open file of the same file, so a topic that is open twice in one process may lose its
place. A child does not inherit them.

Threads: guarded by the lock of `Turns`.
"""

from __future__ import annotations

from ..system.files import Files
from ..system.not_copyable import NotCopyable

_END = 65  # places are the bytes from 1 to before this one


class Line(NotCopyable):
    """The line in one open file, and the place of this process in it."""

    def __init__(self, files: Files, fd: int) -> None:
        self._files, self._fd = files, fd
        self._place = 0  # 0: none

    def place(self) -> int:
        """Enter the line, or move up. Returns the place: 1 is the first, 0 means that all places are taken."""
        if not self._place:
            self._enter()
        while self._place > 1 and self._files.try_lock_bytes(self._fd, self._place - 1, self._place):
            self._place -= 1
            self._files.unlock_bytes(self._fd, self._place + 1, _END)
        return self._place

    def _enter(self) -> None:
        """Take the first of the places that are free up to the end. A binary search takes all of these for a moment."""
        first, end = 1, _END  # this process has all places from `end` on
        middle = first  # most often nobody waits
        while first < end:
            if self._files.try_lock_bytes(self._fd, middle, end):
                end = middle
            else:
                first = middle + 1
            middle = (first + end) // 2
        self._place = end % _END
        self._files.unlock_bytes(self._fd, end + 1, _END)

    def is_empty(self) -> bool:
        """True if no process waits. The check itself takes all places for a moment."""
        is_empty = self._files.try_lock_bytes(self._fd, 1, _END)
        if is_empty:
            self._files.unlock_bytes(self._fd, 1, _END)
        return is_empty

    def leave(self) -> None:
        """Let others have the place."""
        if self._place:
            self._place = 0
            self._files.unlock_bytes(self._fd, 1, _END)
