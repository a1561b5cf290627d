"""Event loops for tests: what runs in them, and what is cancelled in them."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(60):
            return await main

    return asyncio.run(limited(), debug=True)


async def first(records: AsyncIterator[Any], count: int) -> list[Any]:
    found: list[Any] = []
    async for each in records:
        found.append(each)
        if len(found) == count:
            break
    return found


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  the condition is of another module
        await asyncio.sleep(0.002)


def wait_until_freed(*loops: weakref.ref[asyncio.AbstractEventLoop]) -> None:
    """Wait until nothing refers to these loops: a thread of theirs may be about to return from its last call."""
    deadline = time.monotonic() + 60
    gc.collect()
    while kept := [each for each in loops if each() is not None]:
        assert time.monotonic() < deadline, kept
        time.sleep(0.002)
        gc.collect()


async def begun_and_cancelled(doing: Coroutine[Any, Any, Any], *, after: float) -> None:
    task = asyncio.create_task(doing)
    await asyncio.sleep(after)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
