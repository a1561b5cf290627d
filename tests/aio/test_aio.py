"""aio/: topics in an event loop: nothing lost, nothing twice, and one call of an object at a time."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from loops import first, run

from conftest import MANUAL
from loglib import FlushPolicy, LockedError, LogClosedError, RecordTooLargeError, StorageFullError, Topic, aio
from loglib.aio import AsyncTopic, calls
from loglib.append import tables
from loglib.append.open_batch import OpenBatch
from loglib.format.record import OffsetRange, Position

# --- append ------------------------------------------------------------------------------------------------


def test_table_is_appended_in_a_thread(path: Path) -> None:
    tables.append_table  # loaded here: what is loaded for the first time holds up the loop for a moment

    async def main() -> None:
        async with aio.open(path, create=True, partitions=2, flush=MANUAL) as topic:
            (found,) = await topic.append_arrow(pa.table({"text": ["a", "b"]}), value="text", partition=1)
            await topic.flush()
            assert found.partition == 1
            assert [record.value async for record in topic.read()] == [b"a", b"b"]

    run(main())


def test_records_come_back_as_from_a_topic(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, create=True, partitions=2, flush=MANUAL) as topic:
            at = await topic.append(b"one", b"key", timestamp=5, headers={"a": b"b"})
            await topic.append(None, partition=1)
            ranges = await topic.append_many([b"many"] * 3000, partition=0)
            await topic.flush()
            found = [record async for record in topic.read()]
            assert found == list(topic.topic.read())
            assert len(found) == 3002
            assert (at.partition, at.offset) in {(record.partition, record.offset) for record in found}
            assert sum(len(each.offsets) for each in ranges) == 3000
            assert [len(batch) async for batch in topic.batches()] == [len(each) for each in topic.topic.batches()]
            assert (await topic.stats()).appended_records == 3002
        assert topic.closed

    run(main())
    with Topic.open(path) as topic:
        assert len(list(topic.read())) == 3002


def test_appends_keep_their_order_whatever_way_they_take(path: Path) -> None:
    """Some are made at once, others wait for a thread: those behind them must not overtake."""

    async def main() -> None:
        async with aio.open(path, create=True, batch_records=7, flush=FlushPolicy(interval=0.01)) as topic:
            chance = random.Random(5)
            tasks = [
                asyncio.create_task(topic.append(b"%d" % number, sync=chance.random() < 0.05)) for number in range(600)
            ]
            await asyncio.gather(*tasks)
            await topic.flush()
            assert [int(record.value or b"") async for record in topic.read()] == list(range(600))

    run(main())


@contextmanager
def held_elsewhere(lock: Any) -> Iterator[None]:
    """Another thread holds the lock."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(60)
    try:
        yield
    finally:
        done.set()
        holder.join()


def test_append_at_once_waits_for_no_lock_and_survives_an_interrupt(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Topic.open(path, create=True, batch_records=4) as topic:

        def at_once(value: bytes) -> Position | None:
            return topic._append_at_once(value, None, timestamp=None, headers=None, partition=0)

        writer = topic._accesses[0].writer()
        with held_elsewhere(writer.lock):
            assert at_once(b"locked") is None
            assert not writer.batch.values
        assert at_once(b"0") == (0, 0)
        extend = OpenBatch.extend

        def interrupted(batch: OpenBatch, columns: Any, size_bytes: int) -> range:
            extend(batch, columns, size_bytes)
            raise KeyboardInterrupt

        monkeypatch.setattr(OpenBatch, "extend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            at_once(b"1")
        monkeypatch.undo()
        assert at_once(b"2") == (0, 2)
        assert at_once(b"fills the batch") is None
        topic.flush()
        assert [record.value for record in topic.read()] == [b"0", b"1", b"2"]


def test_tasks_that_sync_share_a_flush(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, create=True, flush=MANUAL) as topic:
            positions = await asyncio.gather(*(topic.append(b"x", sync=True) for _ in range(300)))
            assert len(set(positions)) == 300
            assert topic.topic.partition(0).high_watermark > max(each.offset for each in positions)
            assert (await topic.stats()).flushes < 30

    run(main())


def test_loop_goes_on_while_the_disk_takes_its_time(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, create=True, flush=MANUAL) as topic:
            def slowly() -> None:
                time.sleep(0.3)
                works()

            works, topic._writing._flush = topic.topic.flush, slowly
            flushing = asyncio.create_task(topic.append(b"x", sync=True))
            beats = 0
            while not flushing.done():
                await asyncio.sleep(0.01)
                beats += 1
            assert beats >= 10
            assert (await flushing).offset == 0

    run(main())


def test_loop_that_appends_lets_other_tasks_run(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, create=True) as topic:
            beats = 0

            async def beat() -> None:
                nonlocal beats
                while True:
                    await asyncio.sleep(0)
                    beats += 1

            beating = asyncio.create_task(beat())
            for _ in range(1000):
                await topic.append(b"x")
            beating.cancel()
            assert beats >= 10

    run(main())


def test_cancelled_appends_are_there_at_most_once_and_others_exactly_once(path: Path) -> None:
    chance = random.Random(11)

    async def main() -> tuple[set[bytes], set[bytes]]:
        sure, unsure = set(), set()
        async with aio.open(path, create=True, batch_records=5, flush=FlushPolicy(interval=0.005)) as topic:

            async def one(number: int) -> None:
                value = b"%d" % number
                try:
                    await topic.append(value, sync=chance.random() < 0.3)
                    sure.add(value)
                except asyncio.CancelledError:
                    unsure.add(value)
                    raise

            tasks = []
            for number in range(1000):
                tasks.append(asyncio.create_task(one(number)))
                if chance.random() < 0.2:
                    chance.choice(tasks).cancel()
                if chance.random() < 0.02:
                    await asyncio.sleep(0.001)
            await asyncio.gather(*tasks, return_exceptions=True)
        return sure, unsure

    sure, unsure = run(main())
    assert len(sure) > 300
    assert unsure
    with Topic.open(path, create=True) as topic:
        found = Counter(record.value for record in topic.read())
    assert set(found.values()) == {1}
    assert sure <= found.keys() <= sure | unsure


def test_error_names_what_was_lost_once_for_all_who_wait(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, create=True, flush=MANUAL) as topic:

            def fail() -> None:
                error = StorageFullError("segment", OSError(28, "full"))
                error.lost = (OffsetRange(0, range(3)),)
                raise error

            works, topic._writing._flush = topic._writing._flush, fail
            found = await asyncio.gather(*(topic.append(b"x", sync=True) for _ in range(3)), return_exceptions=True)
            assert [type(each) for each in found] == [StorageFullError] * 3
            assert [len(each.lost) for each in found if isinstance(each, StorageFullError)] == [1, 1, 0], (
                "the first was alone with its flush, and the others shared one"
            )
            topic._writing._flush = works
            with pytest.raises(RecordTooLargeError):
                await topic.append(bytes(65 << 20))
            with pytest.raises(ValueError, match="partitions 0 to 0"):
                await topic.append(b"x", partition=4)

    run(main())


def test_records_that_the_background_lost_are_told_to_the_next_append(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, create=True) as topic:
            await topic.append(b"x", sync=True)
            error = StorageFullError("segment", OSError(28, "full"))
            topic.topic._handles.writers[0].raise_soon(error)
            with pytest.raises(StorageFullError):
                await topic.append(b"y")
            await topic.append(b"z", sync=True)

    run(main())


# --- opening and closing -----------------------------------------------------------------------------------


def test_cancelled_opening_leaves_no_lock(path: Path) -> None:
    Topic.open(path, create=True).close()

    async def main() -> None:
        async def use() -> None:
            async with aio.open(path, create=True):
                await asyncio.sleep(60)

        for steps in range(12):
            task = asyncio.create_task(use())
            for _ in range(steps):
                await asyncio.sleep(0)
            if steps % 3 == 0:
                await asyncio.sleep(0.002 * steps)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            Topic.open(path).close()

    run(main())


def test_cancelled_closing_still_closes(path: Path) -> None:
    async def main() -> None:
        async def use() -> None:
            async with aio.open(path, create=True, flush=MANUAL) as topic:
                await topic.append(b"x")

        task = asyncio.create_task(use())
        await asyncio.sleep(0.01)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        with Topic.open(path) as topic:
            assert len(list(topic.read())) in (0, 1)

    run(main())


def test_errors_of_opening_are_those_of_a_topic(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, create=True):
            with pytest.raises(LockedError):
                await aio.open(path).__aenter__()
        with pytest.raises(FileNotFoundError):
            await aio.open(path.with_name("none"), mode="r").__aenter__()

    run(main())


def test_closing_ends_what_follows(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, create=True) as topic:
            for_ever, limited = topic.follow("begin"), topic.follow("begin", timeout=50)
            tasks = [asyncio.create_task(first(each, 1)) for each in (for_ever, limited)]
            await asyncio.sleep(0.05)
        assert await tasks[0] == []
        with pytest.raises(LogClosedError):
            await tasks[1]
        assert for_ever.closed

    began = time.monotonic()
    run(main())
    assert time.monotonic() - began < 30, "and did not wait for the timeout"


# --- calls in threads --------------------------------------------------------------------------------------


def test_calls_of_one_object_do_not_overlap_whatever_is_cancelled() -> None:
    async def main() -> None:
        one_at_a_time = calls.Calls()
        inside, most = 0, 0

        def call() -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            time.sleep(0.005)
            inside -= 1
            raise KeyError("nobody may wait for this")

        for _ in range(10):
            task = asyncio.create_task(one_at_a_time(call))
            await asyncio.sleep(0.002)
            task.cancel()
            with suppress(asyncio.CancelledError, KeyError):
                await task
        with pytest.raises(KeyError):
            await one_at_a_time(call)
        assert most == 1

    run(main())


def test_import_of_loglib_leaves_asyncio_alone() -> None:
    program = "import sys, loglib; sys.exit('asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


async def _unused(topic: AsyncTopic) -> None:
    """For the type checker: what `async for` gives."""
    async for record in topic.follow():
        record.offset.bit_length()
    async with topic.group("etl") as group:
        async for one in group.follow():
            one.offset.bit_length()
