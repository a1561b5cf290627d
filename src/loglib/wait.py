"""Wait: sleeping until a partition may have more to read, woken within microseconds.

Invariant: a change after `watch` is never missed: it is pending when `wait` is called, or wakes it.
`wait` may return without cause; callers look again and wait again.

On Linux the kernel reports writes to the watermark files (inotify). Elsewhere, or when the user's
inotify instances are used up, the wait is cut into naps that grow while nothing happens: from 0.1
to 10 ms, which costs well below 1 % of a CPU. Writers in this process call `wake` directly.

Threads: `wake` and `close` may be called from any; the rest belongs to the waiting thread.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress

__all__ = ["Waiter"]

_IN_MODIFY = 0x2
_FIRST_NAP_S = 0.0001
_LONGEST_NAP_S = 0.01
_NAP_GROWTH = 1.2  # reaches the longest nap after about 25 idle looks, 50 ms
_EVENT_BYTES = 4096  # 256 events; what is left wakes the next wait
_FD_SETSIZE = 1024
_LONGEST_WAIT_S = 86_400.0  # poll() takes 24 days at most; waking once a day for nothing costs nothing


class Waiter:
    """Waits for writes to files, or for `wake`."""

    def __init__(self, paths: Iterable[str], *, use_inotify: bool = True) -> None:
        self._wake_out = self._wake_in = self._inotify = -1
        # A wake must not write to a number that has become another file's since it was read.
        self._lock = threading.RLock()
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._poll = select.poll()
        self._poll.register(self._wake_out, select.POLLIN)
        self._nap = _FIRST_NAP_S
        paths = list(paths)
        self._must_look = bool(paths)
        if paths and use_inotify and sys.platform == "linux":
            self._inotify = _watch(paths)
            if self._inotify >= 0:
                self._poll.register(self._inotify, select.POLLIN)
                self._must_look = False

    def wait(self, timeout: float | None) -> None:
        """Return when something may have changed, on `wake`, or after `timeout` seconds."""
        timeout = None if timeout is None else min(max(timeout, 0.0), _LONGEST_WAIT_S)
        if self._must_look:
            timeout = self._nap if timeout is None else min(timeout, self._nap)
            self._nap = min(self._nap * _NAP_GROWTH, _LONGEST_NAP_S)
            if self._wake_out < _FD_SETSIZE:  # select() sleeps for microseconds, poll() for milliseconds
                select.select([self._wake_out], [], [], timeout)
                timeout = 0.0
        for fd, _ in self._poll.poll(None if timeout is None else timeout * 1000):
            with suppress(BlockingIOError):
                os.read(fd, _EVENT_BYTES)

    def progressed(self) -> None:
        """Something was there: look again soon."""
        self._nap = _FIRST_NAP_S

    def wake(self) -> None:
        """End the present wait, or the next one."""
        with self._lock:
            if self._wake_in >= 0:
                with suppress(BlockingIOError):  # full: a wake is pending already
                    os.write(self._wake_in, b"\0")

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            fds = (self._wake_out, self._wake_in, self._inotify)
            self._wake_out = self._wake_in = self._inotify = -1
            for fd in fds:
                if fd >= 0:
                    os.close(fd)


def _watch(paths: list[str]) -> int:
    """An inotify instance that reports writes to the files, or -1 if the system has none to give."""
    import ctypes  # here, since it costs 10 ms that only a follower needs

    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        return -1
    for path in paths:
        if libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY) < 0:
            os.close(fd)
            return -1
    return fd
