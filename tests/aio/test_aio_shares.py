"""Shares in an event loop: whatever is cancelled, nothing stays in hand and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pytest
from loops import begun_and_cancelled, eventually, first, run

from conftest import MANUAL
from loglib import LogClosedError, Reject, aio
from loglib.errors import FencedJobError, ShareFullError, StaleGenerationError, UnsettledError
from loglib.jobs import SharePartition
from loglib.system import notify

RECORDS = 10
ALL = [b"%d" % number for number in range(RECORDS)]


@asynccontextmanager
async def opened(path: Path, count: int = RECORDS, **options: Any) -> AsyncIterator[aio.AsyncTopic]:
    async with aio.open(path, create=True, flush=MANUAL, **options) as topic:
        await topic.append_many([b"%d" % number for number in range(count)])
        await topic.flush()
        yield topic


def only(topic: aio.AsyncTopic) -> SharePartition:
    return topic.topic.share_info("mail").partitions[0]


def test_each_record_goes_to_one_task_and_is_accepted_by_the_next_step(path: Path) -> None:
    async def main() -> None:
        async with opened(path, 200) as topic, topic.share("mail", member="me") as share:
            found: list[list[bytes]] = [[], [], []]

            async def take(into: list[bytes]) -> None:
                into += [job.value or b"" async for job in share.follow(0.1)]

            await asyncio.gather(*(take(each) for each in found))
            assert Counter(value for each in found for value in each) == Counter(b"%d" % n for n in range(200))
            assert (only(topic).counts.accepted, only(topic).in_hand) == (200, ())
            assert (share.name, share.member, share.closed) == ("mail", "me", False)
        assert share.closed

    run(main())


def test_waiting_tasks_get_records_that_come_later(path: Path) -> None:
    async def main() -> None:
        async with opened(path, 0) as topic, topic.share("mail") as share:
            found: Counter[bytes] = Counter()

            async def take() -> None:
                async for job in share:
                    found[job.value or b""] += 1

            tasks = [asyncio.create_task(take()) for _ in range(5)]
            await eventually(lambda: len(share._waiters._waiting) == len(tasks))
            for number in range(50):
                await topic.append(b"%d" % number, sync=number % 7 == 0)
            await topic.flush()
            await eventually(lambda: len(found) == 50)
            share.stop()
            await asyncio.gather(*tasks)
            assert set(found.values()) == {1} and only(topic).counts.accepted == 50

    run(main())


def test_job_has_the_attributes_of_its_record_and_settles_in_coroutines(path: Path) -> None:
    async def main() -> None:
        async with aio.open(path, create=True, flush=MANUAL) as topic:
            await topic.append(b"value", b"key", headers={"a": b"b"}, sync=True)
            (record,) = await first(topic.read(), 1)
            async with topic.share("mail", lease=60) as share:
                job = await share.take(5)
                assert job is not None and job.record == record and "offset" in repr(job)
                names = ("partition", "offset", "timestamp", "time", "key", "value", "headers", "next_offset")
                assert [getattr(job, name) for name in names] == [getattr(record, name) for name in names]
                assert (job.attempt, job.token, job.first_begun) == (1, job.job.token, job.job.first_begun)
                await job.renew(90)
                await job.release(count=False)
                assert job.settled
                again = await share.take(5)
                assert again is not None and (again.attempt, again.settled) == (1, False)
                async with again:
                    await again.release(count=False)
                again = await share.take(5)
                assert again is not None and again.attempt == 1
                await again.reject("no")
                assert only(topic).counts.rejected == 1
                with pytest.raises(ValueError, match="settled already"):
                    await again.accept()
                await share.flush()

    run(main())


def test_batches_are_settled_together_or_one_by_one(path: Path) -> None:
    async def main() -> None:
        async with opened(path) as topic, topic.share("mail") as share:
            sizes = []
            async for jobs in share.batches(4, timeout=0.1):
                sizes.append(len(jobs))
                assert list(jobs.batch.values) == ALL[sum(sizes) - len(jobs) : sum(sizes)]
                if len(sizes) == 1:
                    one, *others = jobs.jobs()
                    await one.reject()
                    for each in others:
                        await each.accept()
            assert sizes == [4, 4, 2]
            assert (only(topic).counts.accepted, only(topic).counts.rejected) == (RECORDS - 1, 1)
            with pytest.raises(ValueError, match="max_records"):
                share.batches(0)

    run(main())


def test_cancelled_task_releases_its_job(path: Path) -> None:
    async def main() -> None:
        async with opened(path, 1) as topic, topic.share("mail") as share:
            begun = asyncio.Event()

            async def hang(how: str) -> None:
                async with aclosing(share.follow()) as jobs:
                    async for job in jobs:
                        begun.set()
                        if how == "with":
                            async with job:
                                await asyncio.sleep(3600)
                        await asyncio.sleep(3600)

            for attempt, how in enumerate(("with", "loop"), 1):
                begun.clear()
                task = asyncio.create_task(hang(how))
                await begun.wait()
                assert [each.attempt for each in only(topic).in_hand] == [attempt]
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                assert (only(topic).in_hand, only(topic).free) == ((), 1)
            job = await share.take(5)
            assert job is not None and job.attempt == 3

    run(main())


def test_loop_that_is_left_releases_its_job_without_being_closed(path: Path) -> None:
    async def main() -> None:
        async with opened(path) as topic, topic.share("mail") as share:
            async for _ in share.follow():
                break
            await eventually(lambda: only(topic).in_hand == () and only(topic).free == 1)
            with suppress(RuntimeError):
                async for _ in share.follow():
                    raise RuntimeError
            await eventually(lambda: only(topic).in_hand == ())
            assert [job.value async for job in share.follow(0.0)][-1] == ALL[-1]
            assert only(topic).counts.accepted == RECORDS

    run(main())


def test_job_that_a_thread_took_for_a_cancelled_task_is_given_back_with_its_attempt(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened(path, 1) as topic, topic.share("mail") as share:
            taken, let_go = threading.Event(), threading.Event()
            take = share.joined._next

            def slow(*arguments: Any) -> Any:
                found = take(*arguments)
                taken.set()
                let_go.wait()
                return found

            monkeypatch.setattr(share.joined, "_next", slow)
            task = asyncio.create_task(share.take())
            await asyncio.to_thread(taken.wait)
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done(), "what the thread has taken must not be lost"
            let_go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (only(topic).in_hand, only(topic).free) == ((), 1)
            job = await share.take(5)
            assert job is not None and job.attempt == 1

    run(main())


def test_tasks_cancelled_at_random_lose_nothing(path: Path) -> None:
    chance = random.Random(7)

    async def main() -> Counter[int]:
        found: Counter[int] = Counter()
        async with opened(path, 200) as topic, topic.share("mail", max_attempts=1000) as share:

            async def take() -> None:
                async for job in share.follow():
                    async with job:
                        if chance.random() < 0.05:
                            await asyncio.sleep(0)
                        found[int(job.value or b"")] += 1

            while len(found) < 200:
                await asyncio.gather(*(begun_and_cancelled(take(), after=chance.random() * 0.02) for _ in range(3)))
            assert [job.value async for job in share.follow(0.05)] == []
            assert (only(topic).counts.accepted, only(topic).free, only(topic).in_hand) == (200, 0, ())
        return found

    assert set(run(main())) == set(range(200))


@pytest.mark.parametrize("settle", ["after", "explicit"])
def test_workers_handle_jobs_in_tasks(path: Path, settle: Literal["after", "explicit"]) -> None:
    async def main() -> None:
        async with opened(path) as topic, topic.share("mail", max_attempts=2, settle=settle) as share:
            running = 0
            most: list[int] = []
            seen: Counter[bytes] = Counter()

            async def handle(job: aio.AsyncJob) -> None:
                nonlocal running
                running += 1
                most.append(running)
                try:
                    await asyncio.sleep(0.001)
                    seen[job.value or b""] += 1
                    if job.value == b"3":
                        raise Reject("not this one")
                    if job.value == b"5":
                        raise ValueError("each time")
                    if job.value == b"7":
                        await job.accept()
                finally:
                    running -= 1

            await share.run(handle, tasks=4, timeout=0.1)
            counts = only(topic).counts
            assert (counts.accepted, counts.rejected, counts.exhausted) == (RECORDS - 2, 1, 1)
            assert seen == Counter(dict.fromkeys(ALL, 1) | {b"5": 2})
            assert 1 < max(most) <= 4
            with pytest.raises(ValueError, match="tasks"):
                await share.run(handle, tasks=0)

    run(main())


def test_cancelled_workers_leave_nothing_in_hand(path: Path) -> None:
    async def main() -> None:
        async with opened(path) as topic, topic.share("mail") as share:
            begun: list[int] = []

            async def hang(job: aio.AsyncJob) -> None:
                begun.append(job.attempt)
                await asyncio.sleep(3600)

            running = asyncio.create_task(share.run(hang, tasks=3))
            await eventually(lambda: len(begun) == 3)
            assert len(only(topic).in_hand) == 3
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert (only(topic).in_hand, only(topic).free, begun) == ((), 3, [1, 1, 1])

    run(main())


def test_worker_whose_job_was_taken_away_goes_on(path: Path) -> None:
    async def main() -> None:
        async with opened(path, 2) as topic, topic.share("mail", lease=0.2) as share:
            seen: list[bytes | None] = []

            async def late(job: aio.AsyncJob) -> None:
                seen.append(job.value)
                if len(seen) == 1:
                    async with topic.share("mail") as other:
                        taken = await other.take(5)
                        while taken is not None and taken.value != job.value:
                            await taken.accept()
                            taken = await other.take(5)
                        assert taken is not None
                        await taken.accept()

            await share.run(late, timeout=0.1)
            assert seen[0] == b"0" and only(topic).counts.accepted == 2

    run(main())


def test_error_of_the_share_ends_its_workers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with opened(path) as topic, topic.share("mail") as share:

            async def evicted(job: aio.AsyncJob) -> None:
                await asyncio.to_thread(topic.topic.evict_share_member, "mail", share.member)
                with pytest.raises(FencedJobError):
                    await job.accept()

            with pytest.raises(StaleGenerationError):
                await share.run(evicted, tasks=2)

    run(main())


def test_sigterm_lets_the_jobs_in_hand_end(path: Path) -> None:
    async def main() -> None:
        async with opened(path) as topic, topic.share("mail") as share:

            async def handle(job: aio.AsyncJob) -> None:
                if job.value == b"1":
                    os.kill(os.getpid(), signal.SIGTERM)
                    await eventually(lambda: share.joined._stopped)

            await share.run(handle, tasks=2)
            assert only(topic).in_hand == () and only(topic).free == 0
            assert 2 <= only(topic).counts.accepted < RECORDS
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    run(main())


def test_workers_leave_a_handler_of_signals_alone(path: Path) -> None:
    async def main() -> None:
        async with opened(path, 1) as topic, topic.share("mail") as share:

            async def handle(job: aio.AsyncJob) -> None:
                assert signal.getsignal(signal.SIGTERM) is ours

            await share.run(handle, timeout=0.0)
            assert only(topic).counts.accepted == 1

    def ours(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, ours)
    try:
        run(main())
    finally:
        signal.signal(signal.SIGTERM, before)


def test_plain_function_is_a_handler_too(path: Path) -> None:
    """It would run for each job, and each job would come again, if only its result could not be awaited."""

    async def main() -> None:
        async with opened(path) as topic, topic.share("mail") as share:
            seen: list[bytes | None] = []
            await share.run(lambda job: seen.append(job.value), timeout=0.0)  # type: ignore[arg-type,return-value]
            assert seen == ALL and only(topic).counts.accepted == RECORDS

    run(main())


def test_closing_the_share_or_its_topic_ends_waiting_loops(path: Path) -> None:
    async def main() -> None:
        async with opened(path, 0) as topic:
            async with topic.share("mail") as share:
                loops = [asyncio.create_task(first(share.follow(), 1)) for _ in range(3)]
                await eventually(lambda: len(share._waiters._waiting) == 3)
                await share.close()
                assert await asyncio.gather(*loops) == [[], [], []]
            other = topic.share("mail")
            with pytest.raises(LogClosedError, match="join with"):
                await other.take()
            assert other.closed
            await other.close()
            async with other:
                endless, timed = (asyncio.create_task(first(other.follow(each), 1)) for each in (None, 60))
                await eventually(lambda: len(other._waiters._waiting) == 2)
                await topic.close()
                assert await endless == []
                with pytest.raises(LogClosedError):
                    await timed

    run(main())


def test_full_window_and_unsettled_job_raise_as_in_a_program_without_a_loop(path: Path) -> None:
    async def main() -> None:
        async with opened(path) as topic, topic.share("mail", window=1, settle="explicit") as share:
            job = await share.take()
            assert job is not None
            with pytest.raises(ShareFullError):
                await share.take(0.05)
            waiting = asyncio.create_task(share.take())
            await eventually(lambda: len(share._waiters._waiting) == 1)
            await job.accept()
            later = await waiting
            assert later is not None
            await later.accept()
            with pytest.raises(UnsettledError):
                async for _ in share.follow(0.0):
                    pass

    run(main())


@pytest.mark.parametrize("reported", [True, False], ids=["reported", "not reported"])
def test_delay_ends_in_time_with_and_without_reports(
    path: Path, monkeypatch: pytest.MonkeyPatch, reported: bool
) -> None:
    if not reported:
        monkeypatch.setattr(notify, "_inotify", lambda _: None)

    async def main() -> None:
        async with opened(path, 1) as topic, topic.share("mail") as share:
            job = await share.take()
            assert job is not None
            await job.release(0.02)
            again = await share.take()
            assert again is not None and again.attempt == 2
            await again.accept()
            waiting = asyncio.create_task(share.take())
            await eventually(lambda: len(share._waiters._waiting) == 1)
            await topic.append(b"more", sync=True)
            more = await waiting
            assert more is not None and more.value == b"more"

    run(main())


def test_task_that_waits_takes_the_place_of_a_cancelled_one(path: Path) -> None:
    async def main() -> None:
        async with opened(path, 0) as topic, topic.share("mail") as share:
            tasks = []
            for number in range(3):
                tasks.append(asyncio.create_task(share.take()))
                await eventually(lambda count=number + 1: len(share._waiters._waiting) == count)  # type: ignore[misc]
            for each in tasks[:2]:
                each.cancel()
                with suppress(asyncio.CancelledError):
                    await each
            await topic.append(b"for the last", sync=True)
            job = await tasks[2]
            assert job is not None and job.value == b"for the last"

    run(main())
