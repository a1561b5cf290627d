"""Event loops that end, in whatever way: nothing of loglib keeps them, and they leave no open files."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from loops import eventually, first, wait_until_freed

from conftest import MANUAL
from loglib import Topic, aio
from loglib.aio.topic import AsyncTopic

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="counts the open files in /proc"),
    # A loop that is closed by hand may have tasks that have not begun. From Python 3.13 on there is a warning for its
    # generators, too; pytest keeps the warning with its traceback, and that keeps the loop.
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]

LOOPS = 5  # each left three open files
ONCE = 3  # files that the topic opens at its first wait; on a busy machine a loop may end before it


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def topic(path: Path) -> Iterator[AsyncTopic]:
    """A topic that lives longer than the loops. No thread of it begins to watch an inbox meanwhile."""
    with Topic.open(path, create=True, partitions=2, flush=MANUAL) as made, Topic.open(path, mode="r") as opened:
        made.append(b"x", sync=True)
        yield AsyncTopic(opened)


async def wait_for_more(reader: aio.AsyncReader) -> None:
    async with asyncio.timeout(0.01):
        async for _ in reader:
            pass


async def wait_for_batches(reader: aio.AsyncReader) -> None:
    async with asyncio.timeout(0.01):
        async for _ in reader.batches():
            pass


async def wait_and_fail(reader: aio.AsyncReader) -> None:
    with suppress(TimeoutError):
        await wait_for_more(reader)
    raise ValueError("an error of the application")


def run_and_close(main: Coroutine[Any, Any, None]) -> weakref.ref[asyncio.AbstractEventLoop]:
    """As `asyncio.run`, which cancels what runs before it closes the loop."""
    with asyncio.Runner() as runner:
        found = weakref.ref(runner.get_loop())
        with suppress(TimeoutError, ValueError):
            runner.run(main)
    return found


def close_at_once(main: Coroutine[Any, Any, None]) -> weakref.ref[asyncio.AbstractEventLoop]:
    """Close the loop in the middle of the wait: no task is cancelled."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(main)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.call_later(0.005, loop.stop)
    loop.run_forever()
    loop.close()
    return weakref.ref(loop)


def close_after_an_error(main: Coroutine[Any, Any, None]) -> weakref.ref[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    with suppress(TimeoutError, ValueError):
        loop.run_until_complete(main)
    loop.close()
    return weakref.ref(loop)


@pytest.mark.parametrize("end", [run_and_close, close_at_once, close_after_an_error])
@pytest.mark.parametrize("main", [wait_for_more, wait_for_batches, wait_and_fail])
@pytest.mark.parametrize("kept", [True, False], ids=["the reader lives on", "the reader is dropped"])
def test_loop_that_ends_leaves_no_open_files_and_is_freed(
    topic: AsyncTopic,
    end: Callable[[Coroutine[Any, Any, None]], weakref.ref[asyncio.AbstractEventLoop]],
    main: Callable[[aio.AsyncReader], Coroutine[Any, Any, None]],
    kept: bool,
) -> None:
    readers: list[aio.AsyncReader] = []
    loops = []

    def once() -> None:
        reader = topic.follow()
        loops.append(end(main(reader)))
        if kept:
            readers.append(reader)

    once()
    gc.collect()
    before = open_files()
    gc.disable()  # the files are closed with the loop, and not when garbage is collected by chance
    try:
        for _ in range(LOOPS):
            once()
        assert open_files() <= before + ONCE + 2 * len(readers)  # the files that a reader reads
    finally:
        gc.enable()
    wait_until_freed(*loops)


def test_documented_use_runs_in_any_number_of_loops(path: Path) -> None:
    Topic.open(path, create=True).close()

    async def main() -> None:
        async with aio.open(path, mode="r") as topic:
            await wait_for_more(topic.follow("end"))

    def once() -> None:
        with pytest.raises(TimeoutError):
            asyncio.run(main())

    once()
    gc.collect()
    before = open_files()
    gc.disable()
    try:
        for _ in range(LOOPS):
            once()
        assert open_files() <= before + ONCE
    finally:
        gc.enable()


def test_topic_outlives_a_loop_that_was_closed_amid_its_appends(path: Path) -> None:
    let_go = threading.Event()
    with Topic.open(path, create=True, flush=MANUAL) as opened:
        topic, loop = AsyncTopic(opened), asyncio.new_event_loop()
        tasks: list[asyncio.Task[Any]] = [loop.create_task(topic._writing.ask(let_go.wait, flush=True))]
        tasks += [loop.create_task(topic.append(b"never asked for in time", sync=True)) for _ in range(3)]
        for each in tasks:
            each._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.call_later(0.005, loop.stop)
        loop.run_forever()
        loop.close()
        let_go.set()

        async def more() -> int:
            return (await topic.append(b"of the next loop", sync=True)).partition

        closed = weakref.ref(loop)
        del tasks, each, loop
        gc.collect()
        assert asyncio.run(more()) == 0
        wait_until_freed(closed)
        assert [each.value for each in opened.read()] == [b"of the next loop"]


def test_append_that_a_closed_loop_asked_for_is_not_made_in_the_next_one(path: Path) -> None:
    """Its task lived on as garbage, so it was made, and its answer ended in the closed loop."""
    let_go = threading.Event()
    with Topic.open(path, create=True, flush=MANUAL) as opened:
        topic, loop = AsyncTopic(opened), asyncio.new_event_loop()
        tasks: list[asyncio.Task[Any]] = [loop.create_task(topic._writing.ask(let_go.wait, flush=False))]
        tasks.append(loop.create_task(topic.append(b"of the closed loop", sync=True)))
        loop.call_later(0.005, loop.stop)
        loop.run_forever()
        loop.close()

        async def more() -> None:
            await topic.append(b"of the next loop", sync=True)

        asyncio.run(more())
        let_go.set()
        assert [each.value for each in opened.read()] == [b"of the next loop"]
        for each in tasks:
            each._log_destroy_pending = False  # type: ignore[attr-defined]


def test_reader_of_a_loop_that_ended_reads_on_in_the_next(path: Path) -> None:
    with Topic.open(path, create=True, flush=MANUAL) as written, Topic.open(path, mode="r") as read:
        reader = AsyncTopic(read).follow("end")
        with pytest.raises(TimeoutError):
            asyncio.run(wait_for_more(reader))

        async def main() -> list[bytes | None]:
            task = asyncio.create_task(first(reader, 1))
            await eventually(lambda: reader._watch is not None and reader._watch.fits(reader._reader))
            await asyncio.to_thread(written.append, b"x", sync=True)
            async with asyncio.timeout(30):
                return [each.value for each in await task]

        assert asyncio.run(main()) == [b"x"]


async def wait_for_a_job(share: aio.AsyncShare) -> None:
    async with asyncio.timeout(0.01):
        async for _ in share:
            pass


async def keep_a_job(share: aio.AsyncShare) -> None:
    async with asyncio.timeout(0.05):
        async for _ in share:
            await asyncio.sleep(3600)


async def handle_a_job(share: aio.AsyncShare) -> None:
    async with asyncio.timeout(0.05):
        job = await share.take()
        assert job is not None
        async with job:
            await asyncio.sleep(3600)


async def run_workers(share: aio.AsyncShare) -> None:
    async with asyncio.timeout(0.05):
        await share.run(lambda job: asyncio.sleep(3600), tasks=2)


@pytest.mark.parametrize("end", [run_and_close, close_at_once, close_after_an_error])
@pytest.mark.parametrize("main", [wait_for_a_job, keep_a_job, handle_a_job, run_workers])
def test_loop_with_a_member_of_a_share_ends_and_leaves_nothing(
    path: Path,
    end: Callable[[Coroutine[Any, Any, None]], weakref.ref[asyncio.AbstractEventLoop]],
    main: Callable[[aio.AsyncShare], Coroutine[Any, Any, None]],
) -> None:
    """The member lives longer than its loops. What they had in hand comes again."""
    with Topic.open(path, create=True, flush=MANUAL) as opened:
        share = AsyncTopic(opened).share("mail", start="end", max_attempts=1000)
        with asyncio.Runner() as runner:
            runner.run(share.__aenter__())
        if main is not wait_for_a_job:
            opened.append(b"x", sync=True)
            job = share.joined.take(30)  # so that the member has the log's files open
            assert job is not None
            job.release()
        loops = [end(main(share))]
        gc.collect()
        before, threads = open_files(), threading.active_count()
        gc.disable()  # the files are closed with the loop, and not when garbage is collected by chance
        try:
            loops += [end(main(share)) for _ in range(LOOPS)]
            assert open_files() <= before + ONCE
        finally:
            gc.enable()
        wait_until_freed(*loops)
        assert threading.active_count() <= threads + 1  # the thread of a loop that was closed at once ends by itself
        if main is not wait_for_a_job:
            job = share.joined.take(30)
            assert job is not None and job.value == b"x"
            job.accept()
        share.joined.close()
