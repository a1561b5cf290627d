"""Event loops for tests: what runs in them, and what is cancelled in them."""

from __future__ import annotations

import asyncio
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


async def begun_and_cancelled(doing: Coroutine[Any, Any, Any], *, after: float) -> None:
    task = asyncio.create_task(doing)
    await asyncio.sleep(after)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
