"""Waiters: the tasks of one event loop that wait for the same observer.

Invariant: one of the waiting tasks, the first, is told what the system reports; the others wait until they are woken. A
task that leaves, or finds something, wakes another one. So no report is lost, and one event costs one look and not one
for each task.

The object may live longer than its loop. So it refers weakly to the tasks' events, and forgets those of a closed loop.

Threads: belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import NamedTuple
from weakref import ref

from ..system.not_copyable import NotCopyable
from ..system.notify import Observer

_NAP_S = 0.01  # between two looks, if the system reports nothing


class _Waiter(NamedTuple):
    event: ref[asyncio.Event]
    loop: ref[asyncio.AbstractEventLoop]

    def present(self) -> asyncio.Event | None:
        """The event; None if its task or its loop has ended."""
        loop = self.loop()
        return None if loop is None or loop.is_closed() else self.event()


class Waiters(NotCopyable):
    """The tasks that wait. Each has an event, which it keeps itself."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiter] = deque()
        self._first: _Waiter | None = None  # it is told of reports

    async def wait(self, event: asyncio.Event, observer: Observer, until: float, timeout: float | None) -> None:
        """Return when the event is set, or something may have changed, or after `timeout` seconds.

        The first of the waiting tasks also returns after `until` seconds: then something is due for all of them.
        """
        me = _Waiter(ref(event), ref(asyncio.get_running_loop()))
        if self._first is None or self._first.present() in (None, event):
            self._first = me
            least = until if observer.reports else min(until, _NAP_S)
            timeout = least if timeout is None else min(least, timeout)
        self._waiting.append(me)
        try:
            if self._first is me:
                await _reported(observer, event, timeout)
            else:
                await _set(event, timeout)
        except asyncio.CancelledError:
            if event.is_set():
                self.wake_one()  # this one was woken to look, and does not
            raise
        finally:
            with suppress(ValueError):  # who wakes it has removed it
                self._waiting.remove(me)
            event.clear()

    def leave(self, event: asyncio.Event) -> None:
        """A task looks no more: another one takes its place, unless there is a first one beside it."""
        if self._first is None or self._first.present() in (None, event):
            self._first = None
            self.wake_one()

    def wake_one(self) -> None:
        """Let one waiting task look."""
        while self._waiting:
            if (event := self._waiting.popleft().present()) is not None:
                event.set()
                return

    def wake_all(self) -> None:
        """Let all waiting tasks look."""
        while self._waiting:
            self.wake_one()


async def _set(event: asyncio.Event, timeout: float | None) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()


async def _reported(observer: Observer, event: asyncio.Event, timeout: float | None) -> None:
    """Also wait in the loop's selector until a descriptor of the observer is readable."""
    kept_open = observer._open  # the selector would not report the wake of a close if they were closed meanwhile
    if kept_open is None:
        return
    loop = asyncio.get_running_loop()
    watched = []
    try:
        for fd in observer.descriptors():
            loop.add_reader(fd, event.set)
            watched.append(fd)
        await _set(event, timeout)
    finally:
        for fd in [] if loop.is_closed() else watched:  # the loop may have been closed during the wait
            loop.remove_reader(fd)
