"""aio/waiters.py: one task hears the reports of an observer, and one event lets one task look."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
from loops import eventually, run

from loglib.aio.waiters import Waiters
from loglib.system.notify import Observer


@pytest.fixture
def observer() -> Iterator[Observer]:
    with closing(Observer()) as made:
        yield made


async def wait(waiters: Waiters, observer: Observer, until: float = 60, rest: float | None = None) -> None:
    event = asyncio.Event()
    try:
        await waiters.wait(event, observer, until, rest)
    finally:
        waiters.leave(event)


async def waiting(waiters: Waiters, observer: Observer, count: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(wait(waiters, observer)) for _ in range(count)]
    await eventually(lambda: len(waiters._waiting) == count)
    return tasks


async def ended(task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(30):
        with suppress(asyncio.CancelledError):
            await task


def test_report_wakes_the_first_which_wakes_the_next_when_it_leaves(observer: Observer) -> None:
    async def main() -> None:
        waiters = Waiters()
        tasks = await waiting(waiters, observer, 3)
        observer.wake()
        for task in tasks:  # each leaves, and nobody empties the pipe
            await ended(task)
        assert waiters._first is None and not waiters._waiting

    run(main())


def test_task_that_is_cancelled_as_it_is_woken_wakes_another(observer: Observer) -> None:
    async def main() -> None:
        waiters = Waiters()
        first, second, third = await waiting(waiters, observer, 3)
        waiters._waiting.rotate(-1)  # the second is woken, and not the one that hears reports
        waiters.wake_one()
        second.cancel()
        await ended(third)
        assert second.cancelled() and not first.done()
        waiters.wake_all()
        await ended(first)

    run(main())


def test_task_that_leaves_while_there_is_no_first_wakes_another(observer: Observer) -> None:
    """The last of three waited for ever: the first had been cancelled, and the second in the middle of its look."""

    async def main() -> None:
        waiters = Waiters()
        first, second = await waiting(waiters, observer, 2)
        looking = asyncio.Event()  # of a third task, which looks
        waiters._waiting.rotate(-1)
        held = waiters._waiting.popleft()  # the second is not there to be woken by the first
        first.cancel()
        await ended(first)
        waiters._waiting.append(held)
        waiters.leave(looking)
        await ended(second)

    run(main())


def test_first_looks_again_when_something_is_due_and_the_others_do_not(observer: Observer) -> None:
    async def main() -> None:
        waiters = Waiters()
        await wait(waiters, observer, until=0.0)
        await wait(waiters, observer, rest=0.0)
        (first,) = await waiting(waiters, observer, 1)
        other = asyncio.create_task(wait(waiters, observer, until=0.0))
        await eventually(lambda: len(waiters._waiting) == 2)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not other.done() and not first.done()
        waiters.wake_all()
        await asyncio.gather(first, other)

    run(main())


def test_closed_observer_ends_the_wait(observer: Observer) -> None:
    async def main() -> None:
        waiters = Waiters()
        observer.close()
        await wait(waiters, observer)

    run(main())


def test_tasks_of_a_loop_that_was_closed_hold_nobody_up(observer: Observer) -> None:
    waiters, loop = Waiters(), asyncio.new_event_loop()
    tasks = loop.run_until_complete(waiting(waiters, observer, 2))
    for each in tasks:
        each._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()

    async def main() -> None:
        before = len(waiters._waiting)
        task = asyncio.create_task(wait(waiters, observer))
        await eventually(lambda: len(waiters._waiting) > before)
        observer.wake()
        await ended(task)

    run(main())
    closed = weakref.ref(loop)
    del loop, tasks, each
    gc.collect()
    assert closed() is None
