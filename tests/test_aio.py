"""aio/: topics, readers and groups in an event loop: nothing lost, nothing twice, no thread for a waiter."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from conftest import MANUAL
from loglib import FlushPolicy, LockedError, LogClosedError, RecordTooLargeError, StorageFullError, Topic, aio
from loglib.aio import AsyncTopic, calls, watcher
from loglib.append import columnar
from loglib.append.open_batch import OpenBatch
from loglib.records import OffsetRange, Position
from loglib.system import wait


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


def inotify_instances() -> int:
    if sys.platform != "linux":
        return 0
    names = os.listdir("/proc/self/fd")
    links = [os.readlink(f"/proc/self/fd/{name}") for name in names if os.path.lexists(f"/proc/self/fd/{name}")]
    return sum("inotify" in each for each in links)


# --- append ------------------------------------------------------------------------------------------------


def test_table_is_appended_in_a_thread(path: Path) -> None:
    columnar.append_table  # loaded here: what is loaded for the first time holds up the loop for a moment

    async def main() -> None:
        async with aio.open(path, partitions=2, flush=MANUAL) as topic:
            (found,) = await topic.append_arrow(pa.table({"text": ["a", "b"]}), value="text", partition=1)
            await topic.flush()
            assert found.partition == 1
            assert [record.value async for record in topic.read()] == [b"a", b"b"]

    run(main())


def test_records_come_back_as_from_a_topic(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, partitions=2, flush=MANUAL) as topic:
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
        async with aio.open(path, batch_records=7, flush=FlushPolicy(interval=0.01)) as topic:
            chance = random.Random(5)
            tasks = [
                asyncio.create_task(topic.append(b"%d" % number, sync=chance.random() < 0.05)) for number in range(600)
            ]
            await asyncio.gather(*tasks)
            await topic.flush()
            assert [int(record.value or b"") async for record in topic.read()] == list(range(600))

    run(main())


def test_append_at_once_waits_for_no_lock_and_survives_an_interrupt(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Topic.open(path, batch_records=4) as topic:

        def at_once(value: bytes) -> Position | None:
            return topic._append_at_once(value, None, timestamp=None, headers=None, partition=0)

        writer = topic._accesses[0].writer()
        with writer.lock:
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
        async with aio.open(path, flush=MANUAL) as topic:
            positions = await asyncio.gather(*(topic.append(b"x", sync=True) for _ in range(300)))
            assert len(set(positions)) == 300
            assert topic.topic.partition(0).high_watermark > max(each.offset for each in positions)
            assert (await topic.stats()).flushes < 30

    run(main())


def test_loop_goes_on_while_the_disk_takes_its_time(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, flush=MANUAL) as topic:
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
        async with aio.open(path) as topic:
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
        async with aio.open(path, batch_records=5, flush=FlushPolicy(interval=0.005)) as topic:

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
    with Topic.open(path) as topic:
        found = Counter(record.value for record in topic.read())
    assert set(found.values()) == {1}
    assert sure <= found.keys() <= sure | unsure


def test_error_names_what_was_lost_once_for_all_who_wait(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, flush=MANUAL) as topic:

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
        async with aio.open(path) as topic:
            await topic.append(b"x", sync=True)
            error = StorageFullError("segment", OSError(28, "full"))
            topic.topic._handles.writers[0].raise_soon(error)
            with pytest.raises(StorageFullError):
                await topic.append(b"y")
            await topic.append(b"z", sync=True)

    run(main())


# --- opening and closing -----------------------------------------------------------------------------------


def test_cancelled_opening_leaves_no_lock(path: Path) -> None:
    Topic.open(path).close()

    async def main() -> None:
        async def use() -> None:
            async with aio.open(path):
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
            async with aio.open(path, flush=MANUAL) as topic:
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
        async with aio.open(path):
            with pytest.raises(LockedError):
                await aio.open(path).__aenter__()
        with pytest.raises(FileNotFoundError):
            await aio.open(path.with_name("none"), mode="r").__aenter__()

    run(main())


def test_closing_ends_what_follows(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path) as topic:
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


# --- readers -----------------------------------------------------------------------------------------------


def test_follower_sees_what_this_process_and_another_one_write(path: Path) -> None:
    program = """
import sys
from loglib import Topic
with Topic.open(sys.argv[1], shared=True) as topic:
    for number in range(50):
        topic.append(b"other", partition=1, sync=True)
"""

    async def main() -> None:
        async with aio.open(path, partitions=2, shared=True) as topic:
            reader = topic.follow("begin")
            for _ in range(5):
                await topic.append(b"mine", partition=0)
            command = [sys.executable, "-c", program, str(path)]
            other = await asyncio.create_subprocess_exec(*command)
            found = Counter(record.value for record in await first(reader, 55))
            assert found == {b"mine": 5, b"other": 50}
            assert await other.wait() == 0

    run(main())


@pytest.mark.parametrize("reports", [True, False], ids=["inotify", "naps"])
def test_record_wakes_the_follower(path: Path, reports: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far sooner than the next look that is due by the clock."""
    if not reports:
        monkeypatch.setattr(wait, "_inotify", lambda _: None)
    monkeypatch.setattr(watcher, "LOOK_S", 40.0)

    async def main() -> None:
        async with aio.open(path) as topic:
            with Topic.open(path, mode="r") as other:
                mine, others = topic.follow(), aio.AsyncReader(other.follow())
                tasks = [asyncio.create_task(first(each, 20)) for each in (mine, others)]
                for number in range(20):
                    await asyncio.sleep(0.005)
                    await topic.append(b"%d" % number, sync=True)
                for task in tasks:
                    assert [int(each.value) for each in await task] == list(range(20))

    began = time.monotonic()
    run(main())
    assert time.monotonic() - began < 30


def test_thousand_followers_have_no_thread_and_one_watch(path: Path) -> None:
    async def main() -> None:
        before = threading.active_count()
        async with aio.open(path, partitions=3) as topic:
            watches = inotify_instances()
            readers = [topic.follow("end") for _ in range(200)]
            tasks = [asyncio.create_task(first(each, 1)) for each in readers]
            await eventually(lambda: all(each._watch is not None for each in readers))
            await asyncio.sleep(0.2)
            pool = min(32, (os.cpu_count() or 1) + 4)
            assert threading.active_count() <= before + pool + 1
            assert inotify_instances() <= watches + 1
            await topic.append(b"x", sync=True)
            assert [len(each) for each in await asyncio.gather(*tasks)] == [1] * 200
            tasks.clear()
            readers.clear()
            loop = asyncio.get_running_loop()  # the loop of another test may be garbage that is not yet collected
            await eventually(lambda: loop not in watcher._watchers)

    run(main())


def test_cancelled_reader_loses_nothing_and_repeats_nothing(path: Path) -> None:
    with Topic.open(path, partitions=2, batch_records=10) as topic:
        for number in range(4000):
            topic.append(b"%d" % number, partition=number % 2)
    chance = random.Random(3)

    async def main() -> list[int]:
        found: list[int] = []
        async with aio.open(path, mode="r") as topic:
            reader = topic.follow("begin")

            async def take() -> None:
                async for record in reader:
                    found.append(int(record.value or b""))
                    if chance.random() < 0.02:
                        await asyncio.sleep(0)

            while len(found) < 4000:
                await begun_and_cancelled(take(), after=chance.random() * 0.002)
        return found

    found = run(main())
    assert sorted(found) == list(range(4000))
    assert [each for each in found if each % 2] == list(range(1, 4000, 2))


def test_reader_can_seek_and_tell(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, flush=MANUAL) as topic:
            await topic.append_many([b"%d" % number for number in range(100)])
            await topic.flush()
            async with topic.read() as reader:
                assert [record.value for record in await first(reader, 2)] == [b"0", b"1"]
                assert reader.tell() == {0: 2}
                assert (await reader.lag_bytes())[0] > 0
                await reader.seek({0: 98})
                assert [record.value async for record in reader] == [b"98", b"99"]
                assert reader.gaps == []
            assert reader.closed
            async with aclosing(topic.read({0: 90}).batches()) as batches:
                assert [len(each) async for each in batches] == [10]

    run(main())


def test_timeout_without_a_record_ends_a_follower(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, flush=MANUAL) as topic:
            await topic.append(b"x", sync=True)
            assert [record.value async for record in topic.follow("begin", timeout=0.05)] == [b"x"]
            with pytest.raises(TypeError, match="timeout"):
                topic.follow(timeout="soon")  # type: ignore[arg-type]

    run(main())


def test_moved_topic_is_an_error_for_its_follower(path: Path) -> None:
    Topic.open(path).close()

    async def main() -> None:
        async with aio.open(path, mode="r") as topic:
            task = asyncio.create_task(first(topic.follow(), 1))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(path.rename, path.with_name("moved"))
            with pytest.raises(Exception, match="moved"):
                await task

    run(main())


# --- groups ------------------------------------------------------------------------------------------------


def test_members_share_a_topic(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, partitions=4) as topic:
            handled: Counter[bytes] = Counter()

            async def member() -> None:
                async with topic.group("etl") as group:
                    async for record in group.follow():
                        handled[record.value or b""] += 1

            tasks = [asyncio.create_task(member()) for _ in range(3)]
            for number in range(500):
                await topic.append(b"%d" % number, partition=number % 4)
            await eventually(lambda: len(handled) == 500)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            info = topic.topic.group_info("etl")
            assert info.members == {}
            assert sum(lag.bytes for lag in info.lag.values()) == 0, "each had asked for more, so all is handled"

    run(main())


def test_cancelled_members_lose_nothing_and_repeat_only_what_was_in_hand(path: Path) -> None:
    """A record is handled when the next one is asked for. So only the last record of each task may come again."""
    with Topic.open(path, partitions=2, batch_records=10) as topic:
        for number in range(1500):
            topic.append(b"%d" % number, partition=number % 2)
    chance = random.Random(4)

    async def main() -> tuple[Counter[int], int]:
        found: Counter[int] = Counter()
        interrupted = 0
        async with aio.open(path, mode="r") as topic, topic.group("etl", commit=0.001) as group:

            async def take() -> None:
                async for record in group.follow():
                    found[int(record.value or b"")] += 1
                    if chance.random() < 0.05:
                        await asyncio.sleep(0)

            while len(found) < 1500:
                await begun_and_cancelled(take(), after=chance.random() * 0.02)
                interrupted += 1
        return found, interrupted

    found, interrupted = run(main())
    assert set(found) == set(range(1500))
    assert sum(found.values()) - 1500 <= interrupted


def test_break_and_error_leave_a_record_unhandled(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, flush=MANUAL) as topic:
            await topic.append_many([b"0", b"1", b"2", b"3"])
            await topic.flush()
            async with topic.group("etl") as group:
                assert [each.value for each in await first(group.follow(5), 2)] == [b"0", b"1"]
                assert [each.value for each in await first(group.follow(5), 1)] == [b"1"]
                assert group.assignment == [0]
                assert group.joined.handed_out == {0: 3}
            async with topic.group("etl") as group:
                assert [each.value async for each in group.follow(0.1)] == [b"1", b"2", b"3"]
                assert sum(lag.bytes for lag in (await group.lag()).values()) == 0
            assert group.closed
            with pytest.raises(LogClosedError):
                await group.commit()

    run(main())


def test_commits_by_hand_seek_and_batches(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, flush=MANUAL, batch_records=2) as topic:
            await topic.append_many([b"%d" % number for number in range(2000)])
            await topic.flush()
            async with topic.group("etl", commit="manual") as group:
                async for record in group.follow():
                    await group.commit(record, meta="note")
                    break
                assert (await group.committed())[0].meta == "note"
                assert group.tell() == {0: record.next_offset}
                group.pause(0)
                assert await first(group.follow(0.05), 1) == []
                group.resume(0)
                await group.seek("begin")
                assert sum([len(batch) async for batch in group.batches(0.1)]) == 2000

    run(main())


def test_group_on_several_topics(path: Path) -> None:
    async def main() -> None:
        async with (
            aio.open(path) as one, aio.open(path.with_name("two")) as two, aio.group([one, two], "etl") as group,
        ):  # fmt: skip
            await one.append(b"1")
            await two.append(b"2")
            found = await first(group.follow(), 2)
            assert sorted((name, record.value) for name, record in found) == [("topic", b"1"), ("two", b"2")]

    run(main())


def test_group_is_joined_with_async_with_alone(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path) as topic:
            group = topic.group("etl")
            assert group.closed
            with pytest.raises(LogClosedError, match="async with"):
                await first(group.follow(0), 1)
            await group.close()

    run(main())


def test_cancelled_joining_leaves_no_member(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path) as topic:

            async def use() -> None:
                async with topic.group("etl"):
                    await asyncio.sleep(60)

            for steps in range(10):
                task = asyncio.create_task(use())
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            assert topic.topic.group_info("etl").members == {}

    run(main())


@pytest.mark.parametrize("reports", [True, False], ids=["inotify", "naps"])
def test_record_wakes_a_member(path: Path, reports: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not reports:
        monkeypatch.setattr(wait, "_inotify", lambda _: None)

    async def main() -> None:
        async with aio.open(path) as topic, topic.group("etl") as group:
            task = asyncio.create_task(first(group.follow(), 5))
            for number in range(5):
                await asyncio.sleep(0.01)
                await topic.append(b"%d" % number, sync=True)
            assert [int(each.value) for each in await task] == list(range(5))

    run(main())


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
