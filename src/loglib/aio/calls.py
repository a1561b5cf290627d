"""Calls: calls that may wait for a disk, made in the threads of the event loop, one at a time for each object.

Invariant: a call that has begun ends, also if the task that awaits it is cancelled, because a thread cannot be stopped.
The next call of the same object waits for it. So an object that belongs to one thread is never used by two.

An object may live longer than its loop. So it refers weakly to a running call, which refers to the loop. The thread of
the call, and the task that awaits it, keep the call alive while it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar
from weakref import ref

__all__ = ["Calls", "settled"]

P = ParamSpec("P")
T = TypeVar("T")


class Calls:
    """The calls of one object. They run in the loop's own pool of threads."""

    def __init__(self) -> None:
        self._running: ref[asyncio.Future[Any]] | None = None

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in a thread and return its result. A cancelled task leaves the call running."""
        while (before := self._present()) is not None:
            await asyncio.wait([before])
        running = asyncio.get_running_loop().run_in_executor(None, lambda: function(*args, **kwargs))
        self._running = ref(running)
        running.add_done_callback(self._ended)
        return await asyncio.shield(running)

    def _present(self) -> asyncio.Future[Any] | None:
        """The running call; None if its loop is closed, since a closed loop never reports the end."""
        running = None if self._running is None else self._running()
        return None if running is None or running.done() or running.get_loop().is_closed() else running

    def _ended(self, call: asyncio.Future[Any]) -> None:
        if self._running is not None and self._running() is call:  # the next call may have begun
            self._running = None
        if not call.cancelled():
            call.exception()  # its task may be gone


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
