"""Wait: sleeping until a partition may have more to read, woken within microseconds.

Invariant: a change after `watch` is never missed: it is pending when `wait` is called, or wakes it.
`wait` may return without cause; callers look again and wait again.

On Linux the kernel reports writes to the watermark files (inotify). Elsewhere, or when the user's
inotify instances are used up, the wait is cut into naps that grow while nothing happens: from 0.1
to 10 ms, which costs well below 1 % of a CPU. Writers in this process call `wake` directly.

A `Waiter` says that something changed. An `Observer` says what did: it is for those who wait for a
thousand files, of which one changes, and for directories.

Threads: `wake` and `close` may be called from any; the rest belongs to the waiting thread.
"""

from __future__ import annotations

import os
import select
import struct
import sys
import time
from collections.abc import Hashable, Iterable
from contextlib import suppress
from typing import Any

from ..lifetime import finish
from ..unique import Unique

__all__ = ["REPLACED", "Observer", "Waiter"]

REPLACED = "/"  # among the names that have changed, which no file has

_IN_MODIFY = 0x2
_IN_REPLACED = 0x4 | 0x400 | 0x800  # attributes, as that a name has gone; the file removed; the file moved
_IN_CLOSE_WRITE = 0x8  # also when the kernel closes the files of a process that has died
_IN_MOVED_TO = 0x80
_IN_CREATE = 0x100
_IN_DELETE = 0x200
_IN_Q_OVERFLOW = 0x4000
_IN_IGNORED = 0x8000  # the watch is gone
_DIRECTORY = _IN_MODIFY | _IN_CLOSE_WRITE | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
_EVENT = struct.Struct("iIII")  # an event's watch, what has happened, cookie, and the length of a name behind it
_FIRST_NAP_S = 0.0001
_LONGEST_NAP_S = 0.01
_NAP_GROWTH = 1.2  # reaches the longest nap after about 25 idle looks, 50 ms
_EVENT_BYTES = 4096  # 256 events; what is left wakes the next wait
_FD_SETSIZE = 1024
_LONGEST_WAIT_S = 86_400.0  # poll() takes 24 days at most; waking once a day for nothing costs nothing
_EVENTS_BYTES = 1 << 16
_NAP_PER_LOOK = 20  # without inotify: to look at a thousand files takes milliseconds, so sleep as much longer


class _Descriptors(Unique):
    """The open files of a waiter, closed when nobody refers to them: another thread may be writing to one."""

    wake_out = wake_in = inotify = -1  # also of one whose making an interrupt has ended before its first line

    def __init__(self) -> None:
        self.wake_out, self.wake_in = os.pipe()
        os.set_blocking(self.wake_out, False)
        os.set_blocking(self.wake_in, False)

    def __del__(self) -> None:
        fds = [fd for fd in (self.wake_out, self.wake_in, self.inotify) if fd >= 0]
        finish(iter([(os.close, fd) for fd in fds]))


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


class _Bell(Unique):
    """What a writer in this process wakes: it says to an observer what has changed."""

    def __init__(self, key: Hashable, rung: dict[Hashable, None], descriptors: _Descriptors) -> None:
        self._key = key
        self._rung = rung
        self._descriptors = descriptors  # and not the observer, which has the bells

    def wake(self) -> None:
        self._rung[self._key] = None
        with suppress(BlockingIOError):  # full: a wake is pending already
            os.write(self._descriptors.wake_in, b"\0")


class Observer(Unique):
    """Waits for changes to files and directories, or for `wake`, and says what has changed.

    What is observed has a key, which `changed` returns. Where the system reports nothing, everything that
    is observed always counts as changed; `reports` says which it is.
    """

    def __init__(self, *, use_inotify: bool = True) -> None:
        self._open: _Descriptors | None = None
        self._libc: Any = None
        self._keys: dict[int, tuple[Hashable, str, int]] = {}  # by watch: key, path, and what is observed
        self._watches: dict[Hashable, int] = {}  # -1: nothing will be reported of it
        self._bells: dict[Hashable, _Bell] = {}
        self._rung: dict[Hashable, None] = {}
        self._all = False  # something was missed, or may have been
        self._nap = _FIRST_NAP_S
        self._woken_at = time.monotonic()
        descriptors = _Descriptors()
        self._poll = select.poll()
        self._poll.register(descriptors.wake_out, select.POLLIN)
        if use_inotify and sys.platform == "linux":
            self._libc = _inotify(descriptors)
        if self._libc is not None:
            self._poll.register(descriptors.inotify, select.POLLIN)
        self._open = descriptors

    @property
    def reports(self) -> bool:
        """Whether the system reports every change."""
        return self._libc is not None

    def observe_file(self, key: Hashable, path: str) -> None:
        """Report writes to the file. What came before is not reported: look once more."""
        self._add(key, path, _IN_MODIFY | _IN_REPLACED)

    def observe_directory(self, key: Hashable, path: str) -> None:
        """Report what is made, removed, renamed, written, or closed after writing in the directory."""
        self._add(key, path, _DIRECTORY)

    def bell(self, key: Hashable) -> _Bell:
        """What a writer in this process is to wake after each publication."""
        assert self._open is not None
        return self._bells.setdefault(key, _Bell(key, self._rung, self._open))

    def forget(self, key: Hashable) -> None:
        """Report no more of it."""
        self._bells.pop(key, None)
        watch, descriptors = self._watches.pop(key, -1), self._open
        if self._keys.pop(watch, None) is not None and descriptors is not None:
            self._libc.inotify_rm_watch(descriptors.inotify, watch)

    def changed(self) -> dict[Hashable, set[str]]:
        """What has changed since the last call, by key: of directories, the names in it; empty: any may have.

        `REPLACED` is among the names of a file that was moved, removed, or put in the place of another.
        """
        found: dict[Hashable, set[str]] = {}
        while self._rung:
            found[self._rung.popitem()[0]] = set()
        descriptors = self._open
        if descriptors is not None and self._libc is not None:
            with suppress(BlockingIOError):
                while self._libc is not None:
                    self._parse(os.read(descriptors.inotify, _EVENTS_BYTES), found)
        if self._all or self._libc is None:
            self._all = False
            found |= {key: set() for key in self._watches}
        return found

    def wait(self, timeout: float | None) -> None:
        """Return when something may have changed, on `wake`, or after `timeout` seconds."""
        descriptors = self._open
        if descriptors is None:
            return
        timeout = None if timeout is None else min(max(timeout, 0.0), _LONGEST_WAIT_S)
        if self._libc is None:
            nap = max(self._nap, _NAP_PER_LOOK * (time.monotonic() - self._woken_at))
            timeout = nap if timeout is None else min(timeout, nap)
            self._nap = min(self._nap * _NAP_GROWTH, _LONGEST_NAP_S)
        for fd, _ in self._poll.poll(None if timeout is None else timeout * 1000):
            if fd == descriptors.wake_out:
                with suppress(BlockingIOError):
                    os.read(fd, _EVENT_BYTES)
        self._woken_at = time.monotonic()

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
        self._bells.clear()

    def _add(self, key: Hashable, path: str, mask: int) -> None:
        watch, descriptors = -1, self._open
        if self._libc is not None and descriptors is not None:
            watch = self._libc.inotify_add_watch(descriptors.inotify, os.fsencode(path), mask)
            if watch >= 0:
                self._keys[watch] = key, path, mask
            else:  # the user's watches are used up, or the file is gone
                self._look_instead(descriptors)
        self._watches[key] = watch

    def _look_instead(self, descriptors: _Descriptors) -> None:
        """Rely on reports no more."""
        self._poll.unregister(descriptors.inotify)
        self._libc, fd, descriptors.inotify = None, descriptors.inotify, -1
        self._keys.clear()
        os.close(fd)

    def _parse(self, raw: bytes, found: dict[Hashable, set[str]]) -> None:
        at = 0
        while at < len(raw):
            watch, mask, _, size = _EVENT.unpack_from(raw, at)
            name = raw[at + _EVENT.size : at + _EVENT.size + size].rstrip(b"\0")
            at += _EVENT.size + size
            self._all = self._all or bool(mask & _IN_Q_OVERFLOW)
            known = self._keys.get(watch)
            if known is None:  # forgotten meanwhile
                continue
            key, path, observed = known
            found.setdefault(key, set()).add(os.fsdecode(name))
            if mask & (_IN_REPLACED | _IN_IGNORED):  # observe what has the path now
                found[key].add(REPLACED)
                self.forget(key)
                self._add(key, path, observed)


def _inotify(descriptors: _Descriptors) -> Any:
    """The C library, with an inotify instance in `descriptors`; None if the system has none to give."""
    import ctypes  # here, since it costs 10 ms that only a follower needs

    libc = ctypes.CDLL(None, use_errno=True)
    descriptors.inotify = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    return libc if descriptors.inotify >= 0 else None


def _watch(paths: list[str], descriptors: _Descriptors) -> bool:
    """Have an inotify instance report writes to the files; False if the system has none to give."""
    libc = _inotify(descriptors)
    fd = descriptors.inotify
    if fd >= 0 and any(libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY | _IN_REPLACED) < 0 for path in paths):
        descriptors.inotify = -1
        os.close(fd)
    return descriptors.inotify >= 0
