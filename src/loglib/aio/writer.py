"""Writer: the appends and flushes of a topic that may have to wait, in the order of the calls.

Invariant: one thread at a time works for a topic. It takes all waiting calls, makes them in order, and then flushes
once for all that need a flush: a thousand tasks that want their record on the disk share a sync. A task that is
cancelled before its turn appends nothing. A task that is cancelled later gets `CancelledError` when its records are
appended, so nothing is appended after it has ended.

A topic may live longer than its loop. So the queue refers weakly to futures, which refer to the loop. The tasks that
await the futures keep them alive.

Threads: `ask` belongs to the loop's thread. The loop delivers the results.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import ref

from ..errors import LogError
from .calls import Running, settled

__all__ = ["Writing"]

T = TypeVar("T")


class _Asked(NamedTuple):
    call: Callable[[], Any]
    flush: bool
    future: ref[asyncio.Future[Any]]


class Writing:
    """The queue of one topic."""

    def __init__(self, flush: Callable[[], object]) -> None:
        self._flush = flush
        self._asked: deque[_Asked] = deque()
        self._running = Running()

    @property
    def idle(self) -> bool:
        """True if no call waits or runs, so that a direct call overtakes none."""
        return self._running.present() is None

    async def ask(self, call: Callable[[], T], *, flush: bool) -> T:
        """Make the call in its turn, in a thread, with a flush after it if `flush`. Return its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        asked = _Asked(call, flush, ref(future))
        self._asked.append(asked)
        if self.idle:
            self._work(loop)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if asked in self._asked:
                self._asked.remove(asked)
            else:
                await settled(future)
            raise

    async def done(self) -> None:
        """Wait until no call waits or runs."""
        await self._running.end()

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take the waiting calls, and make them in a thread. Those that wait at its end follow."""
        calls = [each for each in self._asked if each.future() is not None]  # None: its loop was closed
        self._asked.clear()
        working = self._running.start(partial(self._do, loop, calls))
        working.add_done_callback(lambda _: self._work(loop) if self._asked else None)

    def _do(self, loop: asyncio.AbstractEventLoop, asked: list[_Asked]) -> None:
        """Make these calls in a thread, then one flush for all that need one."""
        waiting: list[tuple[_Asked, Any]] = []
        for each in asked:
            try:
                result = each.call()
            except BaseException as error:  # noqa: BLE001  The calling task raises it.
                _deliver(loop, _fail, each, error)
                continue
            if each.flush:
                waiting.append((each, result))
            else:
                _deliver(loop, _succeed, each, result)
        if not waiting:
            return
        try:
            self._flush()
        except BaseException as error:  # noqa: BLE001  The tasks that need the flush raise it.
            for number, (each, _) in enumerate(waiting):  # one error names the lost records
                again = error.again() if number and isinstance(error, LogError) else error
                _deliver(loop, _fail, each, again)
            return
        for each, result in waiting:
            _deliver(loop, _succeed, each, result)


def _deliver(loop: asyncio.AbstractEventLoop, how: Callable[[_Asked, Any], None], asked: _Asked, what: Any) -> None:
    with suppress(RuntimeError):  # the loop is closed: no task waits
        loop.call_soon_threadsafe(how, asked, what)


def _succeed(asked: _Asked, result: Any) -> None:
    future = asked.future()
    if future is not None and not future.done():
        future.set_result(result)


def _fail(asked: _Asked, error: BaseException) -> None:
    future = asked.future()
    if future is not None and not future.done():
        future.set_exception(error)
        future.exception()  # the task may be gone
