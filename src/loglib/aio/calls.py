"""Calls: calls that may wait for a disk, made in the threads of the event loop, one at a time for each object.

Invariant: a call that has begun ends, also if the task that awaits it is cancelled, because a thread cannot be stopped.
The next call of the same object waits for it. So an object that belongs to one thread is never used by two.

An object may live longer than its loop. So it refers weakly to a running call, which refers to the loop. The thread of
the call, and the task that awaits it, keep the call alive while it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import ref

__all__ = ["Calls", "Running", "opened", "settled"]

P = ParamSpec("P")
T = TypeVar("T")


class Running:
    """The running call of an object. It runs in the loop's own pool of threads."""

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


class Calls:
    """The calls of one object, one at a time."""

    def __init__(self) -> None:
        self._running = Running()

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in a thread and return its result. A cancelled task leaves the call running."""
        await self._running.end()
        return await asyncio.shield(self._running.start(partial(function, *args, **kwargs)))


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
