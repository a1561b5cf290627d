"""Groups in an event loop: whatever is cancelled, nothing is lost, and only what was in hand is repeated."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from loops import begun_and_cancelled, eventually, first, run

from conftest import MANUAL
from loglib import LogClosedError, Topic, aio
from loglib.system import notify


def test_members_share_a_topic(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, create=True, partitions=4) as topic:
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
    with Topic.open(path, create=True, partitions=2, batch_records=10) as topic:
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
        async with aio.open(path, create=True, flush=MANUAL) as topic:
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


def test_an_end_by_time_commits_what_is_due_also_if_a_look_takes_long(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with aio.open(path, create=True, flush=MANUAL) as topic:
            await topic.append_many([b"0", b"1", b"2"])
            await topic.flush()
            async with topic.group("etl") as group:
                look = group.joined._next

                def slow(*arguments: Any, **options: Any) -> Any:
                    found = look(*arguments, **options)
                    if found is None:
                        time.sleep(0.12)  # past the deadline, and the look came before the commit was due
                    return found

                monkeypatch.setattr(group.joined, "_next", slow)
                assert [each.value async for each in group.follow(0.1)] == [b"0", b"1", b"2"]
                assert [lag.bytes for lag in (await group.lag()).values()] == [0]

    run(main())


def test_commits_by_hand_seek_and_batches(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, create=True, flush=MANUAL, batch_records=2) as topic:
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
            aio.open(
                path, create=True
            ) as one, aio.open(path.with_name("two"), create=True) as two, aio.group([one, two], "etl") as group,
        ):  # fmt: skip
            await one.append(b"1")
            await two.append(b"2")
            found = await first(group.follow(), 2)
            assert sorted((name, record.value) for name, record in found) == [("topic", b"1"), ("two", b"2")]

    run(main())


def test_group_is_joined_with_async_with_alone(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, create=True) as topic:
            group = topic.group("etl")
            assert group.closed
            with pytest.raises(LogClosedError, match="async with"):
                await first(group.follow(0), 1)
            await group.close()

    run(main())


def test_cancelled_joining_leaves_no_member(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, create=True) as topic:

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
        monkeypatch.setattr(notify, "_inotify", lambda _: None)

    async def main() -> None:
        async with aio.open(path, create=True) as topic, topic.group("etl") as group:
            task = asyncio.create_task(first(group.follow(), 5))
            for number in range(5):
                await asyncio.sleep(0.01)
                await topic.append(b"%d" % number, sync=True)
            assert [int(each.value) for each in await task] == list(range(5))

    run(main())


def test_poll_hands_out_what_is_there_and_counts_it_as_handled_at_the_next_call(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, create=True) as topic:
            await topic.append_many([b"%d" % number for number in range(5)])
            await topic.flush()
            async with topic.group("g", commit="manual") as group:
                assert [each.value for each in await group.poll(max_records=2)] == [b"0", b"1"]
                assert [each.value for each in await group.poll(max_records=2)] == [b"2", b"3"]
                with pytest.raises(ValueError, match="max_records"):
                    await group.poll(max_records=0)
            async with topic.group("h") as group:
                assert len(await group.poll()) == 5
                assert await group.poll(timeout=0.01) == []
                assert [each.bytes for each in (await group.lag()).values()] == [0]
                waiting = asyncio.create_task(group.poll(timeout=30.0))
                await asyncio.sleep(0)
                await topic.append(b"later", sync=True)
                assert [each.value for each in await waiting] == [b"later"]
            with pytest.raises(LogClosedError):
                await group.poll()

    run(main())


def test_cancelled_poll_has_handed_out_nothing(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, create=True) as topic:
            await topic.append_many([b"%d" % number for number in range(5)])
            await topic.flush()
            async with topic.group("g") as group:
                await begun_and_cancelled(group.poll(), after=0.0)
                assert len(await group.poll()) == 5

    run(main())


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_loop_ends_when_its_topic_is_closed_and_with_a_timeout_it_raises(path: Path, timeout: float | None) -> None:
    """A loop without a timeout raised, too, unlike that of `Group.follow`."""

    async def main() -> None:
        async with aio.open(path, create=True) as topic, topic.group("etl") as group:
            reading = asyncio.create_task(first(group.follow(timeout), 1))
            await eventually(lambda: group.assignment == [0])
            await asyncio.to_thread(topic.topic.close)
            if timeout is None:
                assert await reading == []
            else:
                with pytest.raises(LogClosedError, match="open the topic again"):
                    await reading

    run(main())
