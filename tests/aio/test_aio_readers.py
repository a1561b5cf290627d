"""Readers in an event loop: nothing lost, nothing twice, no thread for a waiter."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import pytest
from loops import begun_and_cancelled, eventually, first, run

from conftest import MANUAL, open_files
from loglib import Topic, aio
from loglib.aio import watcher
from loglib.system import notify


def inotify_instances() -> int:
    return sum("inotify" in each for each in open_files())


def test_follower_sees_what_this_process_and_another_one_write(path: Path) -> None:
    program = """
import sys
from loglib import Topic
with Topic.open(sys.argv[1], create=True, shared=True) as topic:
    for number in range(50):
        topic.append(b"other", partition=1, sync=True)
"""

    async def main() -> None:
        async with aio.open(path, create=True, partitions=2, shared=True) as topic:
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
        monkeypatch.setattr(notify, "_inotify", lambda _: None)
    monkeypatch.setattr(watcher, "LOOK_S", 40.0)

    async def main() -> None:
        async with aio.open(path, create=True) as topic:
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
        async with aio.open(path, create=True, partitions=3) as topic:
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
    with Topic.open(path, create=True, partitions=2, batch_records=10) as topic:
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
        async with aio.open(path, create=True, flush=MANUAL) as topic:
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
        async with aio.open(path, create=True, flush=MANUAL) as topic:
            await topic.append(b"x", sync=True)
            assert [record.value async for record in topic.follow("begin", timeout=0.05)] == [b"x"]
            with pytest.raises(ValueError, match="timeout"):
                topic.follow(timeout="soon")

    run(main())


def test_moved_topic_is_an_error_for_its_follower(path: Path) -> None:
    Topic.open(path, create=True).close()

    async def main() -> None:
        async with aio.open(path, mode="r") as topic:
            task = asyncio.create_task(first(topic.follow(), 1))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(path.rename, path.with_name("moved"))
            with pytest.raises(Exception, match="moved"):
                await task

    run(main())
