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
import struct
import sys
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from .unique import Unique

__all__ = ["Waiter"]

_IN_MODIFY = 0x2
_IN_REPLACED = 0x4 | 0x400 | 0x800  # attributes, as that a name has gone; the file removed; the file moved
_EVENT = struct.Struct("iIII")  # an event's watch, what has happened, cookie, and the length of a name behind it
_FIRST_NAP_S = 0.0001
_LONGEST_NAP_S = 0.01
_NAP_GROWTH = 1.2  # reaches the longest nap after about 25 idle looks, 50 ms
_EVENT_BYTES = 4096  # 256 events; what is left wakes the next wait
_FD_SETSIZE = 1024
_LONGEST_WAIT_S = 86_400.0  # poll() takes 24 days at most; waking once a day for nothing costs nothing


class _Descriptors(Unique):
    """The open files of a waiter, closed when nobody refers to them: another thread may be writing to one."""

    def __init__(self) -> None:
        self.wake_out = self.wake_in = self.inotify = -1
        self.wake_out, self.wake_in = os.pipe()
        os.set_blocking(self.wake_out, False)
        os.set_blocking(self.wake_in, False)

    def __del__(self) -> None:
        fds = [fd for fd in (self.wake_out, self.wake_in, self.inotify) if fd >= 0]
        deque(map(os.close, fds), maxlen=0)  # in C, where no interrupt comes between one and the next


class Waiter(Unique):
    """Waits for writes to files, or for `wake`."""

    def __init__(self, paths: Iterable[str], *, use_inotify: bool = True) -> None:
        self._open: _Descriptors | None = None
        descriptors = _Descriptors()
        self._poll = select.poll()
        self._poll.register(descriptors.wake_out, select.POLLIN)
        self._nap = _FIRST_NAP_S
        paths = list(paths)
        self._must_look = bool(paths)
        if paths and use_inotify and sys.platform == "linux" and _watch(paths, descriptors):
            self._poll.register(descriptors.inotify, select.POLLIN)
            self._must_look = False
        self._open = descriptors

    def wait(self, timeout: float | None) -> bool:
        """Return when something may have changed, on `wake`, or after `timeout` seconds.

        True if a file was moved, removed or replaced, as far as the system has reported that.
        """
        descriptors = self._open
        if descriptors is None:
            return False
        replaced = False
        timeout = None if timeout is None else min(max(timeout, 0.0), _LONGEST_WAIT_S)
        if self._must_look:
            timeout = self._nap if timeout is None else min(timeout, self._nap)
            self._nap = min(self._nap * _NAP_GROWTH, _LONGEST_NAP_S)
            if descriptors.wake_out < _FD_SETSIZE:  # select() sleeps for microseconds, poll() for milliseconds
                select.select([descriptors.wake_out], [], [], timeout)
                timeout = 0.0
        for fd, _ in self._poll.poll(None if timeout is None else timeout * 1000):
            with suppress(BlockingIOError):
                found = os.read(fd, _EVENT_BYTES)
                replaced |= fd == descriptors.inotify and _tells_of_more(found)
        return replaced

    def progressed(self) -> None:
        """Something was there: look again soon."""
        self._nap = _FIRST_NAP_S

    def wake(self) -> None:
        """End the present wait, or the next one."""
        descriptors = self._open  # and so kept open until it is written to
        if descriptors is not None:
            with suppress(BlockingIOError):  # full: a wake is pending already
                os.write(descriptors.wake_in, b"\0")

    def close(self) -> None:
        self._open = None


def _tells_of_more(events: bytes) -> bool:
    """Whether one of the kernel's events is more than a write."""
    at = 0
    while at < len(events):
        _, what, _, name_bytes = _EVENT.unpack_from(events, at)
        if what != _IN_MODIFY:
            return True
        at += _EVENT.size + name_bytes
    return False


def _watch(paths: list[str], descriptors: _Descriptors) -> bool:
    """Have an inotify instance report writes to the files; False if the system has none to give."""
    import ctypes  # here, since it costs 10 ms that only a follower needs

    libc = ctypes.CDLL(None, use_errno=True)
    descriptors.inotify = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    fd = descriptors.inotify
    if fd >= 0 and any(libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY | _IN_REPLACED) < 0 for path in paths):
        descriptors.inotify = -1
        os.close(fd)
    return descriptors.inotify >= 0
