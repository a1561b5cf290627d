"""Line: the order of the processes that wait for the turn of a topic, by locks of single bytes of the file `turns`.

Invariant: a place in the line is a byte, and a process has the place while it has the byte's lock. It enters after the
last place that is taken, and is the first when no byte before its own is locked. So the first one to come is the first
one to have a turn. The kernel frees the place of a process that dies, and says which process has a place.

Who gives the turn up rings at the first of the line (system/doorbell.py): one process wakes, and knows that it is its
turn. Places that moved up would wake all of them each time.

The line only orders. If a lock is lost, turns are not fair, and nothing else happens: a process without a place asks
for the turn, too. Locks of bytes belong to the process (fcntl(2)). It loses them when it closes any open file of the
same file, so a topic that is open twice in one process may lose its place. A child does not inherit them.

Threads: `wait` is safe for all; the rest is guarded by the lock of `Turns`.
"""

from __future__ import annotations

import time
from contextlib import suppress

from ..system.doorbell import Doorbell
from ..system.files import Files
from ..system.not_copyable import NotCopyable

_END = 1 << 62  # places are the bytes from 1 to before this one
_TRIES = 8  # to enter; each time another process has come in between


class Line(NotCopyable):
    """The line in one open file, and the place of this process in it."""

    def __init__(self, files: Files, fd: int) -> None:
        self._files, self._fd = files, fd
        self._place = 0  # 0: none
        self._passed = 0  # the last place that this process does not wait for
        self._bell: Doorbell | None = None  # once there is another process
        self.is_woken = False  # a ring has ended a wait: they arrive here

    def ahead(self) -> int:
        """Enter the line, and return the first place that is taken in it. 0 if that is this process's own.

        0 also if it has no place, because the file system has no locks of bytes.
        """
        with suppress(OSError):
            if not self._place:
                self._enter()
            if first := self._files.first_lock(self._fd, self._passed + 1, self._place):
                return first[0]
        return 0

    def _enter(self) -> None:
        if self._files.real:
            self._open_bell()
        for _ in range(_TRIES):
            self._place = self._last() + 1  # before it is taken: after an interrupt, `leave` gives it up
            if self._place <= self._passed:  # the line was empty meanwhile, and has begun again
                self._passed = 0
            if self._files.try_lock_bytes(self._fd, self._place, self._place + 1):
                return
        self._place = 0

    def _last(self) -> int:
        """The last place that another process has; 0 if there is none."""
        last = 0
        while lock := self._files.getlk(self._fd, _END - last - 1, last + 1):  # of several, it tells any
            last = lock[0]
        return last

    def pass_by(self, place: int) -> None:
        """Do not wait for the process at this place any more: it is stopped."""
        self._passed = place

    def is_empty(self) -> bool:
        """True if no other process waits."""
        with suppress(OSError):
            return self._files.getlk(self._fd, _END - 1, 1) is None
        return False

    def wait(self, timeout_s: float) -> None:
        """Return after `timeout_s` seconds, or when the turn is given up and this process is the first."""
        bell = self._bell
        if bell is None:
            time.sleep(timeout_s)
        else:
            self.is_woken |= bell.wait(timeout_s)

    def ring(self) -> None:
        """Wake the first process of the line: the turn is free."""
        with suppress(OSError):
            first = self._files.first_lock(self._fd, self._passed + 1, _END)
            if first or (first := self._files.first_lock(self._fd, 1, _END)):
                self._open_bell().ring(first[1])

    def leave(self) -> None:
        """Let others have the place."""
        if self._place:
            self._place = 0
            self._files.unlock_bytes(self._fd, 1, _END)

    def _open_bell(self) -> Doorbell:
        if self._bell is None:
            device, inode = self._files.identity(self._fd)
            self._bell = Doorbell(f"turns-{device:x}-{inode:x}")
        return self._bell

    def close(self) -> None:
        """Close the bell. The file is the caller's."""
        if self._bell is not None:
            self._bell.close()
