"""Writer: the appends and flushes of a topic that may have to wait, in the order in which they were asked for.

Invariant: one thread at a time works for a topic. It takes all that waits, appends it in order, and then flushes once
for all who asked for a flush: a thousand tasks that want their record on the disk share a sync. A task that is
cancelled before its turn appends nothing. One that is cancelled later goes on with the cancellation when its records
are appended, so nothing happens behind its back.

Threads: `ask` belongs to the loop's thread. The results come back by the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ..errors import LogError
from .calls import settled

__all__ = ["Writing"]

T = TypeVar("T")


class _Asked(NamedTuple):
    call: Callable[[], Any]
    flush: bool
    future: asyncio.Future[Any]


class Writing:
    """The queue of one topic."""

    def __init__(self, flush: Callable[[], object]) -> None:
        self._flush = flush
        self._asked: deque[_Asked] = deque()
        self._working: asyncio.Future[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs, so that a call may overtake nothing."""
        return self._working is None

    async def ask(self, call: Callable[[], T], *, flush: bool) -> T:
        """Make the call in its turn, in a thread, with a flush after it; returns its result."""
        loop = asyncio.get_running_loop()
        asked = _Asked(call, flush, loop.create_future())
        self._asked.append(asked)
        if self._working is None:
            self._work(loop)
        try:
            return await asyncio.shield(asked.future)
        except asyncio.CancelledError:
            if asked in self._asked:
                self._asked.remove(asked)
            else:
                await settled(asked.future)
            raise

    async def done(self) -> None:
        """Wait until nothing waits and nothing runs."""
        while self._working is not None:
            await asyncio.wait([self._working])

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        round_ = list(self._asked)
        self._asked.clear()
        self._working = loop.run_in_executor(None, self._do, loop, round_)
        self._working.add_done_callback(lambda _: self._next(loop))

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._working = None
        if self._asked:
            self._work(loop)

    def _do(self, loop: asyncio.AbstractEventLoop, asked: list[_Asked]) -> None:
        """Make these calls, then one flush for all that want one. In a thread."""
        waiting: list[tuple[_Asked, Any]] = []
        for each in asked:
            try:
                result = each.call()
            except BaseException as error:  # noqa: BLE001  The task that asked raises it.
                loop.call_soon_threadsafe(_fail, each.future, error)
                continue
            if each.flush:
                waiting.append((each, result))
            else:
                loop.call_soon_threadsafe(_succeed, each.future, result)
        if not waiting:
            return
        try:
            self._flush()
        except BaseException as error:  # noqa: BLE001  The tasks that asked for the flush raise it.
            for number, (each, _) in enumerate(waiting):  # what was lost is named once
                again = error.again() if number and isinstance(error, LogError) else error
                loop.call_soon_threadsafe(_fail, each.future, again)
            return
        for each, result in waiting:
            loop.call_soon_threadsafe(_succeed, each.future, result)


def _succeed(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # the task may be gone
