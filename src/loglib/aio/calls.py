"""Calls: calls that may wait for a disk, made in the threads of the event loop, one at a time for each object.

Invariant: a call that has begun ends, also if the task that awaits it is cancelled, because a thread cannot be stopped.
The next call of the same object waits for it. So an object that belongs to one thread is never used by two.

An object may live longer than its loop. So it refers weakly to calls and futures, which refer to the loop. The thread
of a call, and the task that awaits it, keep them alive.

Threads: belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import ref

from ..errors import LogError

P = ParamSpec("P")
T = TypeVar("T")


class Calls:
    """The calls of one object, one at a time, in the loop's own pool of threads."""

    def __init__(self) -> None:
        self._call: ref[asyncio.Future[Any]] | None = None

    def present(self) -> asyncio.Future[Any] | None:
        """The running call; None if its loop is closed, since a closed loop never reports the end."""
        call = None if self._call is None else self._call()
        return None if call is None or call.get_loop().is_closed() else call

    def start(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Make the call in a thread. None must run."""
        running = asyncio.get_running_loop().run_in_executor(None, call)
        self._call = ref(running)
        running.add_done_callback(self._forget)
        return running

    def _forget(self, call: asyncio.Future[Any]) -> None:
        self._call = None
        if not call.cancelled():
            call.exception()  # its task may be gone

    async def end(self) -> None:
        """Wait until no call runs."""
        while (call := self.present()) is not None:
            await asyncio.wait([call])

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in a thread and return its result. A cancelled task leaves the call running."""
        await self.end()
        return await asyncio.shield(self.start(partial(function, *args, **kwargs)))


async def settled(future: asyncio.Future[T]) -> T:
    """Wait for a future that must not be abandoned. A cancellation is raised after its end."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()
        raise cancelled
    return future.result()


async def opened(open_it: Callable[[], T], close: Callable[[T], object]) -> T:
    """Open something in a thread. If the task is cancelled meanwhile, close it before the cancellation is raised."""
    loop = asyncio.get_running_loop()
    opening = loop.run_in_executor(None, open_it)
    try:
        return await settled(opening)
    except asyncio.CancelledError:
        if opening.exception() is None:
            await settled(loop.run_in_executor(None, close, opening.result()))
        raise


# --- the calls of a topic, in order --------------------------------------------------------------------------


class _Asked(NamedTuple):
    call: Callable[[], Any]
    flush: bool
    future: ref[asyncio.Future[Any]]

    def is_awaited(self) -> bool:
        """False if its task is gone, or its loop is closed: a loop may end in the middle of a call."""
        future = self.future()
        return future is not None and not future.get_loop().is_closed()


class Writing:
    """The appends and flushes of a topic that may have to wait, or the steps of a member of a share, in their order.

    A thread takes all waiting calls, makes them, and then flushes once for all that need a flush: a thousand tasks that
    want their record on the disk share a sync. A task that is cancelled before its turn appends nothing. A task that is
    cancelled later gets `CancelledError` when its records are appended, so nothing is appended after it has ended.
    """

    def __init__(self, flush: Callable[[], object]) -> None:
        self._flush = flush
        self._asked: deque[_Asked] = deque()
        self._running = Calls()

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
        calls = [each for each in self._asked if each.is_awaited()]
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
                _deliver(loop, each, error=error)
                continue
            if each.flush:
                waiting.append((each, result))
            else:
                _deliver(loop, each, result)
        if not waiting:
            return
        try:
            self._flush()
        except BaseException as error:  # noqa: BLE001  The tasks that need the flush raise it.
            for number, (each, _) in enumerate(waiting):  # one error names the lost records
                again = error.again() if number and isinstance(error, LogError) else error
                _deliver(loop, each, error=again)
            return
        for each, result in waiting:
            _deliver(loop, each, result)


def _deliver(
    loop: asyncio.AbstractEventLoop, asked: _Asked, result: Any = None, *, error: BaseException | None = None
) -> None:
    with suppress(RuntimeError):  # the loop is closed: no task waits
        loop.call_soon_threadsafe(_settle, asked.future, result, error)


def _settle(reference: ref[asyncio.Future[Any]], result: Any, error: BaseException | None) -> None:
    future = reference()
    if future is None or future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # the task may be gone
