"""Notify: sleep until a partition may have more to read. A sleeper wakes within microseconds.

Invariant: a change after the watch began is never missed: it is pending when `wait` is called, or ends the wait.
`wait` may return without a reason; callers look again and wait again.

On Linux the kernel reports writes to the watermark files (inotify). On other systems, or when the user's
inotify instances are used up, the wait is a series of naps. They grow from 0.1 to 10 ms while nothing
happens, which costs well below 1 % of a CPU. Writers in this process call `wake` directly.

A `Waiter` reports that something changed. An `Observer` reports what changed: it is for directories, and for
a thousand files of which one changes.

Threads: any thread may call `wake` and `close`; the rest belongs to the waiting thread.
"""

from __future__ import annotations

import os
import select
import struct
import sys
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .clock import monotonic
from .not_copyable import NotCopyable
from .process import finish, importing
from .system_calls import above_standard, await_readable, new_poll

REPLACED = "/"  # is among the changed names; no file has this name

_IN_MODIFY = 0x2
_IN_REPLACED = 0x4 | 0x400 | 0x800  # attributes changed (such as the number of names); file removed; file moved
_IN_CLOSE_WRITE = 0x8  # also when the kernel closes the files of a dead process
_IN_MOVED_TO = 0x80
_IN_CREATE = 0x100
_IN_DELETE = 0x200
_IN_Q_OVERFLOW = 0x4000
_IN_IGNORED = 0x8000  # the watch is gone
_DIRECTORY = _IN_MODIFY | _IN_CLOSE_WRITE | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
_EVENT = struct.Struct("iIII")  # an event's watch, its mask, cookie, and the length of the name after it
_FIRST_NAP_S = 0.0001
_LONGEST_NAP_S = 0.01
_NAP_GROWTH = 1.2  # reaches the longest nap after about 25 idle looks, 50 ms
_EVENT_BYTES = 4096  # 256 events; the rest wakes the next wait
_LONGEST_WAIT_S = 86_400.0  # poll() takes at most 24 days; one needless wake-up per day costs nothing
_EVENTS_BYTES = 1 << 16
_NAP_PER_LOOK = 20  # without inotify: a look at a thousand files takes milliseconds, so a nap is this many times longer


class _Descriptors(NotCopyable):
    """The open files of a waiter. They close with the last reference, because another thread may write to one."""

    wake_out = wake_in = inotify = -1  # the defaults, for an object whose construction was interrupted

    def __init__(self) -> None:
        self.wake_out, self.wake_in = os.pipe()
        self.wake_out = above_standard(self.wake_out)
        self.wake_in = above_standard(self.wake_in)
        os.set_blocking(self.wake_out, False)
        os.set_blocking(self.wake_in, False)

    def __del__(self) -> None:
        self.close()

    def wake(self) -> None:
        with suppress(BlockingIOError):  # full: a wake is pending already
            os.write(self.wake_in, b"\0")

    def close(self) -> None:
        """Close them now: in a forked child, where the frames of the parent's threads keep references for ever."""
        fds = [fd for fd in (self.wake_out, self.wake_in, self.inotify) if fd >= 0]
        self.wake_out = self.wake_in = self.inotify = -1
        finish(iter([(os.close, fd) for fd in fds]))


class _Sleeper(NotCopyable):
    """The base of `Waiter` and `Observer`: it is woken, and naps if the system reports nothing."""

    def __init__(self, *, use_inotify: bool) -> None:
        descriptors = _Descriptors()
        self._poll = new_poll()
        self._poll.register(descriptors.wake_out, select.POLLIN)
        self._nap = _FIRST_NAP_S
        self._open: _Descriptors | None = descriptors
        self._keys: dict[int, tuple[Hashable, str, int]] = {}  # by watch: key, path, and mask of events
        self._watches: dict[Hashable, int] = {}  # -1: the system will not report its changes
        self._libc: Any = _inotify(descriptors) if use_inotify and sys.platform == "linux" else None
        if self._libc is not None:
            self._poll.register(descriptors.inotify, select.POLLIN)

    @property
    def reports(self) -> bool:
        """True if the system reports every change."""
        return self._libc is not None

    def progressed(self) -> None:
        """Look again soon, because there was something to read."""
        self._nap = _FIRST_NAP_S

    def wake(self) -> None:
        """End the present wait, or the next one."""
        descriptors = self._open  # this reference keeps them open
        if descriptors is not None:
            descriptors.wake()

    def close(self) -> None:
        self._open = None

    def observe_file(self, key: Hashable, path: str) -> None:
        """Report writes to the file. Earlier writes are not reported: look once more after this call."""
        self._add(key, path, _IN_MODIFY | _IN_REPLACED)

    def _add(self, key: Hashable, path: str, mask: int) -> None:
        watch, descriptors = -1, self._open
        if self._libc is not None and descriptors is not None:
            watch = self._libc.inotify_add_watch(descriptors.inotify, os.fsencode(path), mask)
            if watch >= 0:
                self._keys[watch] = key, path, mask
            else:  # the user's inotify watches are used up, or the file is gone
                self._look_instead(descriptors)
        self._watches[key] = watch

    def _look_instead(self, descriptors: _Descriptors) -> None:
        """Stop relying on reports."""
        self._poll.unregister(descriptors.inotify)
        self._libc, fd, descriptors.inotify = None, descriptors.inotify, -1
        self._keys.clear()
        os.close(fd)

    def _next_nap(self, timeout: float | None, *, least: float = 0.0) -> float:
        nap = max(self._nap, least)
        self._nap = min(self._nap * _NAP_GROWTH, _LONGEST_NAP_S)
        return nap if timeout is None else min(timeout, nap)


class Waiter(_Sleeper):
    """Waits for writes to files, or for `wake`."""

    def __init__(self, paths: Iterable[str], *, use_inotify: bool = True) -> None:
        paths = list(paths)
        super().__init__(use_inotify=use_inotify and bool(paths))
        for path in paths:
            self.observe_file(path, path)
        self._must_look = bool(paths) and not self.reports

    def wait(self, timeout: float | None) -> bool:
        """Return when something may have changed, on `wake`, or after `timeout` seconds.

        True if the system reports that a file was moved, removed or replaced.
        """
        descriptors = self._open
        if descriptors is None:
            return False
        replaced = False
        timeout = _bounded(timeout)
        if self._must_look:
            timeout = self._next_nap(timeout)
            await_readable(descriptors.wake_out, timeout)
            timeout = 0.0
        for fd, _ in self._poll.poll(None if timeout is None else timeout * 1000):
            try:
                found = os.read(fd, _EVENT_BYTES)
            except BlockingIOError:
                continue
            replaced |= fd == descriptors.inotify and any(mask != _IN_MODIFY for _, mask, _ in _events(found))
        return replaced


@dataclass(eq=False, repr=False)
class _Bell(NotCopyable):
    """The object that a writer in this process wakes. It records for an observer what has changed."""

    key: Hashable
    rung: dict[Hashable, None]
    descriptors: _Descriptors  # not the observer, which refers to the bells

    def wake(self) -> None:
        self.rung[self.key] = None
        self.descriptors.wake()


class Observer(_Sleeper):
    """Waits for changes to files and directories, or for `wake`, and reports what has changed.

    Each observed file or directory has a key, which `changed` returns. If the system reports nothing (see
    `reports`), all observed files and directories always count as changed.
    """

    def __init__(self, *, use_inotify: bool = True) -> None:
        super().__init__(use_inotify=use_inotify)
        self._bells: dict[Hashable, _Bell] = {}
        self._rung: dict[Hashable, None] = {}
        self._all = False  # a change may have been missed
        self._woken_at = monotonic()

    def abandon(self) -> None:
        """Close the files in a forked child, where no thread uses them."""
        descriptors, self._open = self._open, None
        if descriptors is not None:
            descriptors.close()

    def descriptors(self) -> list[int]:
        """The descriptors that become readable when `wait` would return: for an event loop. None when closed."""
        found = self._open
        if found is None:
            return []
        return [fd for fd in (found.wake_out, found.inotify) if fd >= 0]

    def observe_directory(self, key: Hashable, path: str) -> None:
        """Report files that are made, removed, renamed, written, or closed after writing in the directory."""
        self._add(key, path, _DIRECTORY)

    def bell(self, key: Hashable) -> _Bell:
        """The object that a writer in this process wakes after each publication."""
        assert self._open is not None
        return self._bells.setdefault(key, _Bell(key, self._rung, self._open))

    def forget(self, key: Hashable) -> None:
        """Stop reporting changes of this key."""
        self._bells.pop(key, None)
        watch, descriptors = self._watches.pop(key, -1), self._open
        if self._keys.pop(watch, None) is not None and descriptors is not None:
            self._libc.inotify_rm_watch(descriptors.inotify, watch)

    def changed(self) -> dict[Hashable, set[str]]:
        """The changes since the last call, by key: a directory's changed names; an empty set: any may have changed.

        `REPLACED` is among the names of a file that was moved, removed or replaced.
        """
        found: dict[Hashable, set[str]] = {}
        while self._rung:
            found[self._rung.popitem()[0]] = set()
        descriptors = self._open
        if descriptors is not None and self._libc is not None:
            while self._libc is not None and self._has_events(descriptors):
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
        timeout = _bounded(timeout)
        if self._libc is None:
            timeout = self._next_nap(timeout, least=_NAP_PER_LOOK * (monotonic() - self._woken_at))
        for fd, _ in self._poll.poll(None if timeout is None else timeout * 1000):
            if fd == descriptors.wake_out:
                with suppress(BlockingIOError):
                    os.read(fd, _EVENT_BYTES)
        self._woken_at = monotonic()

    def close(self) -> None:
        super().close()
        self._bells.clear()

    def _has_events(self, descriptors: _Descriptors) -> bool:
        """True if a read returns immediately. Under eventlet a read without an answer would wait for ever."""
        return any(fd == descriptors.inotify for fd, _ in self._poll.poll(0))

    def _parse(self, raw: bytes, found: dict[Hashable, set[str]]) -> None:
        for watch, mask, name in _events(raw):
            self._all = self._all or bool(mask & _IN_Q_OVERFLOW)
            known = self._keys.get(watch)
            if known is None:  # `forget` was called meanwhile
                continue
            key, path, observed = known
            found.setdefault(key, set()).add(name)
            if mask & (_IN_REPLACED | _IN_IGNORED):  # observe the file that has the path now
                found[key].add(REPLACED)
                self.forget(key)
                self._add(key, path, observed)


def _bounded(timeout: float | None) -> float | None:
    return None if timeout is None else min(max(timeout, 0.0), _LONGEST_WAIT_S)


def _events(raw: bytes) -> Iterator[tuple[int, int, str]]:
    """The watch, mask and file name of each of the kernel's events."""
    at = 0
    while at < len(raw):
        watch, mask, _, name_bytes = _EVENT.unpack_from(raw, at)
        at += _EVENT.size
        yield watch, mask, os.fsdecode(raw[at : at + name_bytes].rstrip(b"\0"))
        at += name_bytes


def _inotify(descriptors: _Descriptors) -> Any:
    """The C library, with an inotify instance in `descriptors`; None if the system has no instance left."""
    try:
        with importing:
            import ctypes  # imported here: it takes 10 ms, and only a follower needs it

        libc = ctypes.CDLL(None, use_errno=True)
    except (ImportError, OSError):  # an interpreter that was built without libffi, or without a shared C library
        return None
    fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        return None
    descriptors.inotify = above_standard(fd)
    return libc
