"""jobs/share.py, job.py: a member takes records one by one or in batches, and settles, releases and rejects them."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from interrupts import Interrupter, every_line
from shared_jobs import RECORDS, die, only, taken, values, with_records

from conftest import NOW, Clock
from loglib import GroupBusyError, GroupNotFoundError, Job, LogClosedError, Reject, Share, Topic
from loglib.errors import (
    FencedJobError,
    LockedError,
    LogError,
    NotLeaderError,
    ShareFullError,
    ShareMismatchError,
    StaleGenerationError,
    UnsettledError,
)
from loglib.format.batch import Batch
from loglib.jobs.share import _rest
from loglib.log import copy_role
from loglib.log.cursor import Cursor
from loglib.system.clock import monotonic

Open = Callable[..., Topic]
ALL = [b"%d" % number for number in range(RECORDS)]


@pytest.fixture
def topic(open_topic: Open) -> Topic:
    return with_records(open_topic)


def test_each_record_is_taken_once_and_accepted_by_the_next_step(topic: Topic) -> None:
    with topic.share("mail") as one, topic.share("mail") as other:
        loops = [one.follow(0.0), other.follow(0.0)]
        got = [next(loop).value or b"" for _ in range(RECORDS // 2) for loop in loops]
        assert [list(loop) for loop in loops] == [[], []]
    assert sorted(got, key=ALL.index) == ALL
    info = only(topic)
    assert (info.counts.accepted, info.in_hand, info.free, info.oldest) == (RECORDS, (), 0, None)
    assert info.settled_to == info.next_offset > 0


def test_job_has_the_attributes_of_its_record(open_topic: Open) -> None:
    topic = open_topic()
    topic.append(b"value", b"key", headers={"a": b"b"}, timestamp=NOW - 5, sync=True)
    (record,) = topic.read()
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        names = ("partition", "offset", "timestamp", "time", "key", "value", "headers", "next_offset")
        assert [getattr(job, name) for name in names] == [getattr(record, name) for name in names]
        assert (job.record, job.attempt, job.first_begun, job.settled) == (record, 1, NOW // 10**6 * 10**6, False)
        assert "offset" in repr(job) and "mail" in repr(share) and "settled" not in repr(job)
        job.accept()
        assert job.settled and "settled" in repr(job)


def test_records_that_come_later_are_taken_in_order(topic: Topic) -> None:
    with topic.share("mail", start="end") as share:
        assert values(share) == []
        topic.append_many([b"a", b"b"])
        topic.append(b"c", sync=True)
        assert values(share) == [b"a", b"b", b"c"]


def test_waiting_member_gets_a_record_when_it_is_flushed(topic: Topic) -> None:
    with topic.share("mail", start="end") as share:
        got: list[Job | None] = []
        thread = threading.Thread(target=lambda: got.append(share.take(30)))
        thread.start()
        topic.append(b"now", sync=True)
        thread.join()
        assert got[0] is not None and got[0].value == b"now"


def test_thread_that_finds_a_job_wakes_another_one_that_waits(
    topic: Topic, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both records may be begun again now, which nobody tells the other thread."""
    monkeypatch.setattr("loglib.jobs.share._LOOK_S", 1000.0)
    with topic.share("mail") as share:
        for job in taken(share, RECORDS):
            if job.value in (b"0", b"1"):
                job.release(10_000)
            else:
                job.accept()
        for _ in range(10):
            share._read_at = share._look_at = 0.0
            assert share.take(0.0) is None
        got: list[Job | None] = []
        thread = threading.Thread(target=lambda: got.append(share.take()))
        thread.start()
        while not share._waiting:
            time.sleep(0)
        clock.advance(timedelta(seconds=10_001))
        got.append(share.take(0.0))
        thread.join()
        assert sorted(job.value or b"" for job in got if job is not None) == [b"0", b"1"]


def test_thread_that_takes_a_record_wakes_those_that_wait_for_more(topic: Topic) -> None:
    with topic.share("mail") as share:
        share._waiting.append(None)  # as a thread has it that waits
        before = share._wait.number()
        jobs = taken(share, 1)
        assert share._wait.number() > before and len(jobs) == 1


def test_start_counts_only_for_a_new_share_and_for_all_its_partitions(open_topic: Open) -> None:
    topic = open_topic(partitions=2)
    topic.append(b"old", partition=0, sync=True)
    topic.append(b"old", partition=1, sync=True)
    with topic.share("late", start="end"):
        pass
    topic.append(b"new", partition=1, sync=True)
    with topic.share("late", start="begin") as share:
        assert values(share) == [b"new"]
    with topic.share("of-one", start={1: "end"}) as share:
        assert values(share) == [b"old"]


@pytest.mark.parametrize("arguments", [
    {"settle": "never"}, {"max_attempts": 0}, {"max_attempts": 1.5}, {"window": 2_000_000}, {"backoff": -1},
    {"lease": 0}, {"commit": -1}, {"max_in_hand": 0}, {"member": "a/b"}, {"start": 5.0}, {"order": "time"}, {"lane": 1},
])  # fmt: skip
def test_wrong_arguments_are_refused_and_make_no_share(topic: Topic, arguments: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        topic.share("mail", **arguments)
    assert topic.shares() == []


def test_released_record_comes_again_with_its_next_attempt(topic: Topic) -> None:
    with topic.share("mail") as share:
        first, second = taken(share, 2)
        first.release()
        (again,) = taken(share, 1)
        assert (again.offset, again.attempt, again.first_begun) == (first.offset, 2, first.first_begun)
        assert again.token > second.token > first.token
        again.release(count=False)
        (third,) = taken(share, 1)
        assert (third.offset, third.attempt) == (first.offset, 2)


def test_release_waits_for_its_delay(topic: Topic, clock: Clock) -> None:
    with topic.share("mail", start="begin") as share:
        (job,) = taken(share, 1)
        job.release(60)
        assert b"0" not in values(share)
        assert only(topic).waiting == {job.offset: 60.0}
        clock.advance(timedelta(seconds=60))
        assert values(share) == [b"0"]


def test_delay_counts_also_for_a_member_that_has_looked_before(topic: Topic, clock: Clock) -> None:
    """Its entry, which begins the free record, lands after another member has begun and released it for later."""
    with topic.share("mail") as late, topic.share("mail") as other:
        (job,) = taken(other, 1)
        job.release()
        acks = late._takings[0].acks
        append = acks.append

        def after_the_other(entries: list[bytes]) -> None:
            acks.append = append  # type: ignore[method-assign]
            (again,) = taken(other, 1)
            assert again.offset == job.offset
            again.release(60)
            append(entries)

        acks.append = after_the_other  # type: ignore[method-assign]
        assert b"0" not in values(late)
        assert only(topic).waiting == {job.offset: 60.0}
        clock.advance(timedelta(seconds=60))
        (third,) = taken(late, 1)
        assert (third.value, third.attempt) == (b"0", 3)
        third.accept()


def test_backoff_doubles_with_each_attempt_and_varies_by_a_fifth(topic: Topic, clock: Clock) -> None:
    with topic.share("mail", backoff=10) as share:
        for expected in (10, 20, 40):
            (job,) = taken(share, 1)
            assert job.value == b"0"
            job.release()
            (waits,) = only(topic).waiting.values()
            assert 0.8 * expected <= waits <= 1.2 * expected
            clock.advance(timedelta(seconds=waits))


def test_record_is_exhausted_after_its_last_attempt_and_the_log_says_why(
    topic: Topic, caplog: pytest.LogCaptureFixture
) -> None:
    with topic.share("mail", max_attempts=2) as share:
        for attempt in (1, 2):
            (job,) = taken(share, 1)
            assert (job.value, job.attempt) == (b"0", attempt)
            with job:
                raise OSError("no route")
        assert values(share) == ALL[1:]
        assert only(topic).counts == (RECORDS - 1, 0, 1, 0)
    assert "has ended after 2 attempts, exhausted: released: OSError('no route')" in caplog.text


def test_rejected_record_never_comes_again_and_the_log_says_why(
    topic: Topic, caplog: pytest.LogCaptureFixture
) -> None:
    with topic.share("mail") as share:
        first, second = taken(share, 2)
        with first:
            raise Reject("no such user")
        second.reject()
        assert values(share) == ALL[2:]
    assert only(topic).counts == (RECORDS - 2, 2, 0, 0)
    assert "after 1 attempts, rejected: no such user" in caplog.text


def test_with_accepts_unless_the_job_is_settled_in_it(topic: Topic) -> None:
    with topic.share("mail") as share:
        first, second, third = taken(share, 3)
        with first:
            pass
        with second:
            second.release()
            raise ValueError("after it was released")
        with third:
            third.accept()
        assert values(share)[0] == b"1"
    assert only(topic).counts.accepted == RECORDS


def test_interrupt_of_a_handler_releases_its_job_and_passes(topic: Topic) -> None:
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        with pytest.raises(KeyboardInterrupt), job:
            raise KeyboardInterrupt
        assert only(topic).free == 1


def test_settling_twice_is_refused_and_changes_nothing(topic: Topic) -> None:
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        job.accept()
        for settle in (job.accept, job.release, job.reject):
            with pytest.raises(ValueError, match="settled already"):
                settle()
    assert only(topic).counts == (1, 0, 0, 0)


def test_explicit_loop_refuses_to_go_on_with_an_unsettled_job(topic: Topic) -> None:
    with topic.share("mail", settle="explicit") as share:
        loop = share.follow(0.0)
        job = next(loop)
        with pytest.raises(UnsettledError) as raised:
            next(loop)
        assert (raised.value.partition, raised.value.offset) == (0, job.offset)
        job.accept()
        for each in share.follow(0.0):
            each.accept()
    assert only(topic).counts.accepted == RECORDS


def test_job_of_a_loop_that_is_left_comes_again(topic: Topic) -> None:
    with topic.share("mail") as share:
        for job in share:
            assert job.attempt == 1
            break
        with pytest.raises(RuntimeError, match="in the body"):
            for job in share:
                assert (job.value, job.attempt) == (b"0", 2)
                raise RuntimeError("in the body")
        assert next(share.follow()).attempt == 3


def test_job_that_nobody_keeps_is_released(topic: Topic) -> None:
    with topic.share("mail") as share:
        taken(share, 2)
        gc.collect()
        assert [(job.value, job.attempt) for job in taken(share, 2)] == [(b"0", 2), (b"1", 2)]


def test_batches_are_taken_and_settled_together(topic: Topic) -> None:
    with topic.share("mail") as share:
        sizes = []
        for batch in share.batches(2, timeout=0.0):
            sizes.append(len(batch))
            assert batch.batch.values == [ALL[sum(sizes) - len(batch) + each] for each in range(len(batch))]
            assert "offsets" in repr(batch)
        assert sizes == [2, 2, 2, 2, 2]
    assert only(topic).counts.accepted == RECORDS


def test_records_of_a_batch_are_settled_one_by_one(topic: Topic) -> None:
    with topic.share("mail") as share:
        for batch in share.batches(3, timeout=0.0):
            if len(batch) == 3 and batch.attempt == 1:
                jobs = batch.jobs()
                jobs[1].release()
                if jobs[0].value == b"0":
                    jobs[0].accept()
                    jobs[2].reject()
                    del batch, jobs
            else:
                assert len(batch) == 1
    assert only(topic).counts == (RECORDS - 1, 1, 0, 0)


def test_batch_is_released_and_then_comes_record_by_record(topic: Topic) -> None:
    with topic.share("mail") as share:
        for batch in share.batches(3, timeout=0.0):
            with batch:
                raise OSError("all of them")
            assert batch.settled and "settled" in repr(batch)
            break
        got = [(batch.batch.values, batch.attempt) for batch in share.batches(3, timeout=0.0)]
        assert got[:3] == [([b"0"], 2), ([b"1"], 2), ([b"2"], 2)] and len(got[3][0]) == 3


def test_settings_of_the_first_member_count(topic: Topic) -> None:
    with topic.share("mail", max_attempts=3, window=20):
        with topic.share("mail"), topic.share("mail", max_attempts=3):
            pass
        for name, value in (("max_attempts", 4), ("window", 21), ("max_in_hand", 5), ("order", "key")):
            with pytest.raises(ShareMismatchError) as raised:
                topic.share("mail", **{name: value})  # type: ignore[arg-type]
            assert raised.value.name == name
    assert topic.share_info("mail").settings == (3, 20, 0, None, "none")


def test_altered_settings_count_for_the_members_that_are_there(topic: Topic) -> None:
    with topic.share("mail", max_attempts=1) as share:
        (job,) = taken(share, 1)
        assert topic.alter_share("mail", max_attempts=2, max_in_hand=1) == (2, 10_000, 1, None, "none")
        job.release()
        (job,) = taken(share, 1)
        assert job.attempt == 2 and share.take(0.0) is None
        assert only(topic).blocked_by == "max_in_hand"
        topic.alter_share("mail", max_in_hand=0)
        assert len(taken(share, 3)) == 3 and only(topic).blocked_by == ""
    with topic.share("mail", max_attempts=2, max_in_hand=None):
        pass


def test_most_in_hand_is_exact_over_all_members(topic: Topic) -> None:
    with topic.share("mail", max_in_hand=3) as one, topic.share("mail") as other:
        jobs = taken(one, 2) + taken(other, 1)
        assert one.take(0.0) is None and other.take(0.0) is None
        jobs[0].accept()
        jobs += taken(other, 1)
        assert one.take(0.0) is None


def test_full_window_begins_nothing_fresh_and_says_so(topic: Topic, clock: Clock) -> None:
    with topic.share("mail", window=2) as share:
        first, second = taken(share, 2)
        first.release(60)
        with pytest.raises(ShareFullError) as raised:
            share.take(0.0)
        assert (raised.value.window, only(topic).blocked_by) == (2, "window")
        second.accept()
        (third,) = taken(share, 1)
        assert third.value == b"2"
        third.accept()
        clock.advance(timedelta(seconds=61))
        assert set(values(share)) == {ALL[0], *ALL[3:]}


def test_lease_that_is_over_gives_the_record_to_another_and_fences_the_first(topic: Topic, clock: Clock) -> None:
    with topic.share("mail", lease=10) as slow, topic.share("mail", lease=10) as quick:
        (job,) = taken(slow, 1)
        clock.advance(timedelta(seconds=9))
        (other,) = taken(quick, 1)
        assert other.value == b"1"
        clock.advance(timedelta(seconds=1))
        (again,) = taken(quick, 1)
        assert (again.offset, again.attempt) == (job.offset, 2)
        for call in (job.accept, lambda: slow.renew(job, 10)):
            with pytest.raises(FencedJobError, match="its lease was over"):
                call()
        again.accept()


def test_renewed_lease_keeps_the_record(topic: Topic, clock: Clock) -> None:
    with topic.share("mail", lease=10) as one, topic.share("mail", lease=10) as other:
        (job,) = taken(one, 1)
        for _ in range(5):
            clock.advance(timedelta(seconds=8))
            job.renew(10)
            assert taken(other, 1)[0].offset != job.offset
        job.accept()


def test_loop_whose_lease_was_over_learns_it_at_its_next_step_and_loses_nothing(topic: Topic, clock: Clock) -> None:
    with topic.share("mail", lease=10) as slow, topic.share("mail", lease=10) as quick:
        loop = slow.follow(0.0)
        assert next(loop).value == b"0"
        clock.advance(timedelta(seconds=11))
        (job,) = taken(quick, 1)
        assert job.value == b"0"
        with pytest.raises(FencedJobError):
            next(loop)
        job.accept()
        assert sorted(values(slow), key=ALL.index) == ALL[1:]


def test_without_a_lease_renew_is_refused_and_slowness_changes_nothing(topic: Topic, clock: Clock) -> None:
    with topic.share("mail") as slow, topic.share("mail") as quick:
        (job,) = taken(slow, 1)
        with pytest.raises(ValueError, match="without lease="):
            job.renew(5)
        clock.advance(timedelta(days=30))
        assert b"0" not in values(quick)
        job.accept()


def test_dead_members_records_come_back_with_their_attempts(topic: Topic) -> None:
    dead = topic.share("mail")
    jobs = taken(dead, 2)
    die(dead)
    with topic.share("mail") as share:
        got = [(job.value, job.attempt) for job in share.follow(0.0)]
    assert got[:2] == [(b"0", 2), (b"1", 2)] and len(got) == RECORDS and jobs
    assert only(topic).counts.accepted == RECORDS


def test_closing_releases_what_is_in_hand_and_settles_what_is_accepted(topic: Topic) -> None:
    share = topic.share("mail")
    loop = share.follow()
    assert [next(loop).value, next(loop).value] == [b"0", b"1"]
    share.close()
    share.close()
    assert list(loop) == []
    assert (only(topic).counts.accepted, only(topic).free, topic.share_info("mail").members) == (1, 1, {})
    with pytest.raises(LogClosedError, match="share mail is closed"):
        share.flush()


def test_job_of_a_closed_share_cannot_be_settled(topic: Topic) -> None:
    with topic.share("mail", lease=5) as share:
        (job,) = taken(share, 1)
    for call in (job.accept, lambda: job.renew(5)):
        with pytest.raises(LogClosedError):
            call()
    assert "closed" in repr(share)


def test_closing_the_topic_ends_its_shares(topic: Topic) -> None:
    share = topic.share("mail")
    loop, waiting = share.follow(0.0), share.follow()
    next(loop)
    topic.close()
    with pytest.raises(LogClosedError):
        next(loop)
    assert list(waiting) == []


def test_close_from_another_thread_ends_a_loop_that_waits(topic: Topic) -> None:
    share = topic.share("mail", start="end")
    got: list[list[Any]] = []
    threads = [threading.Thread(target=lambda: got.append(list(share))) for _ in range(2)]
    for each in threads:
        each.start()
    share.close()
    for each in threads:
        each.join()
    assert got == [[], []]


def test_share_that_was_not_closed_gives_its_records_back(topic: Topic) -> None:
    share = topic.share("mail")
    (job,) = taken(share, 1)
    with pytest.warns(ResourceWarning, match="was not closed"):
        del share, job
        gc.collect()
    with topic.share("mail") as other:
        assert values(other) == ALL


def test_stopped_share_ends_its_loops_and_keeps_its_jobs(topic: Topic) -> None:
    with topic.share("mail") as share:
        got = []
        for job in share:
            got.append(job.value)
            if len(got) == 3:
                share.stop()
        assert got == ALL[:3] and share.take() is None
        assert only(topic).counts.accepted == 3


def test_member_names_are_unique_and_shown(topic: Topic) -> None:
    with topic.share("mail", member="one") as share:
        with pytest.raises(LockedError, match="a member of that name"):
            topic.share("mail", member="one")
        (job,) = taken(share, 1)
        (in_hand,) = only(topic).in_hand
        assert (in_hand.offset, in_hand.attempt, in_hand.member) == (job.offset, 1, "one")
        assert only(topic).oldest == in_hand.since == job.first_begun
        assert topic.share_info("mail").members["one"].host
    with topic.share("mail", member="one"):
        pass


def test_evicted_member_loses_its_records_and_its_place(topic: Topic) -> None:
    with topic.share("mail", member="hangs") as share, topic.share("mail") as other:
        first, second = taken(share, 2)
        assert topic.evict_share_member("mail", "hangs") == {0: [first.offset, second.offset]}
        assert [(job.value, job.attempt) for job in taken(other, 2)] == [(b"0", 2), (b"1", 2)]
        with pytest.raises(FencedJobError, match="evicted"):
            first.accept()
        with pytest.raises(StaleGenerationError):
            share.take(0.0)
        with pytest.raises(LogError, match="no member hangs"):
            topic.evict_share_member("mail", "hangs")


def test_reset_share_begins_again(topic: Topic) -> None:
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        for call in (lambda: topic.reset_share("mail", "begin"), lambda: topic.delete_share("mail")):
            with pytest.raises(GroupBusyError):
                call()
        values(share)
        job.release(1000)
    start = topic.partition(0).log_start_offset
    assert topic.reset_share("mail", "begin") == {0: start}
    assert only(topic)[:4] == (start, start, (), 0)
    with topic.share("mail") as share:
        assert [(job.value, job.attempt) for job in share.follow(0.0)] == [(each, 1) for each in ALL]
    topic.reset_share("mail", {0: "end"})
    with topic.share("mail") as share:
        assert values(share) == []


def test_reset_of_one_partition_leaves_the_others(open_topic: Open) -> None:
    """They began again, too."""
    topic = open_topic(partitions=2)
    for number in (0, 1):
        topic.append(b"%d" % number, partition=number, sync=True)
    with topic.share("mail") as share:
        assert len(values(share)) == 2
    assert topic.reset_share("mail", {1: "begin"}) == {1: topic.partition(1).log_start_offset}
    with topic.share("mail") as share:
        assert values(share) == [b"1"]


def test_deleted_share_is_forgotten(topic: Topic) -> None:
    with topic.share("mail") as share:
        values(share)
    assert topic.shares() == ["mail"]
    topic.delete_share("mail")
    assert topic.shares() == []
    for call in (topic.share_info, topic.delete_share, topic.alter_share):
        with pytest.raises(GroupNotFoundError, match="has no share mail; it has none"):
            call("mail")
    with topic.share("mail") as share:
        assert values(share) == ALL


def test_topic_with_members_is_not_deleted(topic: Topic) -> None:
    with topic.share("mail"), pytest.raises(GroupBusyError):
        Topic.delete(topic.path)


def test_topic_that_is_open_for_reading_has_shares(topic: Topic, open_topic: Open) -> None:
    with closing(open_topic(mode="r")) as reading, reading.share("mail") as share:
        assert values(share) == ALL


def test_partition_that_is_added_is_taken_from_its_begin(open_topic: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loglib.jobs.share._LOOK_S", 0.0)
    monkeypatch.setattr("loglib.jobs.share._LOOKS_S", (0.0,))
    with_records(open_topic).close()
    reading = open_topic(mode="r")
    with reading.share("mail", start="end") as share:
        assert values(share) == []
        with pytest.raises(GroupBusyError):
            Topic.add_partitions(reading.path, 2)
    Topic.add_partitions(reading.path, 2)
    with closing(open_topic()) as writing, open_topic(mode="r").share("mail") as share:
        writing.append(b"there", partition=1, sync=True)
        assert values(share) == [b"there"]


def test_copy_of_a_topic_has_no_shares_of_its_own_where_it_has_no_groups(topic: Topic, open_topic: Open) -> None:
    role = copy_role.Role(copy_role.SUPERSEDED, topic.log_id, "0" * 16, "/other", NOW)
    with closing(open_topic(mode="r")) as reading:
        topic.close()
        role.take(reading._files, reading.path, 0o600)
        with pytest.raises(NotLeaderError):
            reading.share("mail")


def test_run_settles_by_what_the_handler_does(topic: Topic, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[Any, int]] = []

    def handle(job: Job) -> None:
        seen.append((job.value, job.attempt))
        if job.value == b"3":
            raise Reject("three")
        if job.value == b"4" and job.attempt == 1:
            raise OSError("four")
        if job.value == b"5" and job.attempt == 1:
            job.release()

    for settle in ("after", "explicit"):
        seen.clear()
        with topic.share(settle, settle=settle) as share:
            share.run(handle, timeout=0.0)
        assert sorted(seen) == sorted([(each, 1) for each in ALL] + [(b"4", 2), (b"5", 2)])
        assert only(topic, settle).counts == (RECORDS - 1, 1, 0, 0)
    assert "OSError: four" in caplog.text and "rejected: three" in caplog.text


def test_run_in_threads_handles_each_record_once(topic: Topic) -> None:
    seen: list[Any] = []
    with topic.share("mail") as share:
        share.run(lambda job: seen.append(job.value), threads=3, timeout=0.0)
    assert sorted(seen) == ALL and only(topic).counts.accepted == RECORDS


def test_run_in_threads_has_no_more_in_hand_than_it_handles(topic: Topic) -> None:
    together = threading.Barrier(2, timeout=30)
    most = []
    with topic.share("mail") as share:

        def handle(_: Job) -> None:
            together.wait()
            most.append(len(only(topic).in_hand))
            together.wait()

        share.run(handle, threads=2, timeout=0.0)
    assert max(most) == 2 and len(most) == RECORDS


def test_worker_that_is_interrupted_ends_the_run(topic: Topic) -> None:
    def handle(_: Job) -> None:
        raise KeyboardInterrupt

    for threads in (1, 2):
        with topic.share(f"mail{threads}") as share, pytest.raises(KeyboardInterrupt):
            share.run(handle, threads=threads)
        assert only(topic, f"mail{threads}").counts.accepted == 0


def test_run_goes_on_after_a_handler_whose_lease_was_over(
    topic: Topic, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(job: Job) -> None:
        if job.value == b"2" and job.attempt == 1:
            clock.advance(timedelta(seconds=6))
            other.take(0.0)
            values(other)

    for settle, threads in (("after", 1), ("explicit", 1), ("after", 2)):
        name = f"{settle}{threads}"
        with topic.share(name, lease=5) as other, topic.share(name, lease=5, settle=settle) as share:  # type: ignore[arg-type]
            share.run(handle, threads=threads, timeout=0.0)
        assert only(topic, name).counts.accepted == RECORDS
        assert "its lease was over" in caplog.text
        caplog.clear()


def test_call_in_the_middle_of_another_call_is_refused_except_close(topic: Topic) -> None:
    share = topic.share("mail")
    with share._using:
        with pytest.raises(LogError, match="in the middle of another call"):
            share.flush()
        share.close()
        assert not share._left, "the interrupted call holds what closing needs"
    assert share.take() is None and share._left


def test_sharing_twice_in_one_process_needs_no_second_topic(topic: Topic) -> None:
    shares: list[Share] = [topic.share("mail") for _ in range(4)]
    got = [job.value for share in shares for job in taken(share, 2)]
    assert got == ALL[:8]
    for share in shares:
        share.close()


def test_nothing_is_said_of_a_share_that_goes_well(topic: Topic, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with topic.share("mail") as share:
        values(share)
    assert caplog.text == ""


def test_record_that_waits_for_room_in_hand_costs_no_spinning(topic: Topic, clock: Clock) -> None:
    with topic.share("mail", max_in_hand=1, lease=1000) as share:
        (job,) = taken(share, 1)
        job.release(5)
        (held,) = taken(share, 1)
        clock.advance(timedelta(seconds=6))
        assert share.take(0.0) is None
        moments = [taking.acks.state.next_moment() for taking in share._takings.values()]
        assert _rest([monotonic() + 60], moments, share._clock) > 0, "what is due waits for the hand"
        held.accept()
        assert [each.value for each in taken(share, 1)] == [b"0"]


def test_job_of_a_share_that_is_closed_in_its_loop_is_not_settled_again(topic: Topic) -> None:
    share = topic.share("mail")
    for job in share:
        share.close()
        assert job.value == b"0"
    assert (only(topic).free, only(topic).counts.accepted) == (1, 0)


def test_shares_of_other_names_do_not_see_each_other(topic: Topic) -> None:
    with topic.share("mail") as mail, topic.share("sms") as sms:
        assert values(mail) == values(sms) == ALL
    assert topic.shares() == ["mail", "sms"]


def test_two_partitions_are_served_in_turn_by_one_member(open_topic: Open) -> None:
    topic = open_topic(partitions=2)
    for partition in (0, 1):
        topic.append_many([b"%d" % partition] * 5, partition=partition)
    topic.flush()
    with topic.share("mail") as share:
        assert sorted(str(value) for value in values(share)) == ["b'0'"] * 5 + ["b'1'"] * 5


def test_sync_is_made_after_the_commit_interval_and_not_for_each_job(open_topic: Open) -> None:
    from conftest import UnsyncedFiles
    from loglib.testing import RecordingFiles

    for commit, most, least in ((0.0, 100, RECORDS), (1000.0, 0, 0)):
        files = RecordingFiles(UnsyncedFiles())
        topic = with_records(open_topic, files=files)
        with topic.share(f"mail-{commit}", commit=commit) as share:
            files.calls.clear()
            values(share)
            count = len([call for call in files.calls if call.name == "datasync" and call.file.endswith(".acks")])
            assert least <= count <= most
        assert ("datasync", files.calls[-1].file) in files.named() or files.count("datasync")
        topic.close()


def before_the_write(monkeypatch: pytest.MonkeyPatch, share: Share, happens: Callable[[], object]) -> None:
    """Something happens, once, between the composing of the next entries of this member and their write."""
    acks = share._takings[0].acks
    append = acks.append

    def late(written: list[bytes]) -> None:
        monkeypatch.undo()
        happens()
        append(written)

    monkeypatch.setattr(acks, "append", late)


def test_member_that_is_evicted_while_it_takes_begins_nothing(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    with topic.share("mail", member="slow") as share, topic.share("mail") as other:
        before_the_write(monkeypatch, share, lambda: topic.evict_share_member("mail", "slow"))
        with pytest.raises(StaleGenerationError):
            share.take(0.0)
        assert values(other) == ALL


def test_run_whose_second_worker_cannot_be_started_says_so_and_leaves_no_thread(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, before = threading.Thread.start, threading.active_count()

    def start_first(thread: threading.Thread) -> None:
        if thread.name == "loglib-job-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_first)
    with topic.share("mail") as share, pytest.raises(RuntimeError, match="can't start"):
        share.run(lambda _: None, threads=3, timeout=0.0)
    assert threading.active_count() == before and only(topic).counts.accepted == 0


def test_run_leaves_a_handler_of_the_program_for_sigterm_alone(topic: Topic) -> None:
    got: list[int] = []

    def handle(job: Job) -> None:
        if job.value == b"3":
            signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with topic.share("mail") as share:
            share.run(handle, timeout=0.0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM] and only(topic).counts.accepted == RECORDS


def test_run_in_another_thread_than_the_main_one_touches_no_signal(topic: Topic) -> None:
    handlers: list[Any] = []
    with topic.share("mail") as share:
        thread = threading.Thread(
            target=share.run, args=(lambda _: handlers.append(signal.getsignal(signal.SIGTERM)),),
            kwargs={"timeout": 0.0},
        )  # fmt: skip
        thread.start()
        thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)] * RECORDS and only(topic).counts.accepted == RECORDS


def test_explicit_loop_goes_on_after_a_job_that_was_taken_away(topic: Topic, clock: Clock) -> None:
    with topic.share("mail", lease=10, settle="explicit") as share:
        loop = share.follow(0.0)
        first = next(loop)
        clock.advance(timedelta(seconds=11))
        (again,) = taken(share, 1)
        assert (again.offset, again.attempt, next(loop).value) == (first.offset, 2, b"1")


def test_jobs_that_were_dropped_before_an_eviction_are_not_released_twice(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    with topic.share("mail", member="slow") as share, topic.share("mail") as other:
        taken(share, 3)
        gc.collect()
        before_the_write(monkeypatch, share, lambda: topic.evict_share_member("mail", "slow"))
        with pytest.raises(StaleGenerationError):
            share.take(0.0)
        assert [(job.value, job.attempt) for job in taken(other, 3)] == [(each, 2) for each in ALL[:3]]


def test_closing_a_member_that_is_just_evicted_releases_nothing_twice(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = topic.share("mail", member="slow")
    jobs = taken(share, 3)
    before_the_write(monkeypatch, share, lambda: topic.evict_share_member("mail", "slow"))
    share.close()
    with topic.share("mail") as other:
        assert [(job.value, job.attempt) for job in taken(other, 3)] == [(each, 2) for each in ALL[:3]]
    assert len(jobs) == 3


def test_lease_that_is_over_before_the_handler_begins_gives_the_attempt_back(
    topic: Topic, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with topic.share("mail", lease=10) as share:
        before_the_write(monkeypatch, share, lambda: clock.advance(timedelta(seconds=11)))
        (job,) = taken(share, 1)
        assert (job.value, job.attempt) == (b"0", 1)
        assert share._takings[0].acks.state.entries == 3, "a begin, its return, and a begin"


def test_i2_record_is_begun_by_one_of_two_that_compose_together(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    with topic.share("mail") as slow, topic.share("mail") as quick:
        got: list[Job] = []
        before_the_write(monkeypatch, slow, lambda: got.extend(taken(quick, 1)))
        got += taken(slow, 1)
        assert [job.value for job in got] == [b"0", b"1"]
        got[0].release()
        before_the_write(monkeypatch, slow, lambda: got.extend(taken(quick, 1)))
        got += taken(slow, 1)
        assert [(job.value, job.attempt) for job in got[2:]] == [(b"0", 2), (b"2", 1)]


def test_renewal_that_comes_too_late_is_refused(topic: Topic, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with topic.share("mail", lease=10) as slow, topic.share("mail", lease=10) as quick:
        (job,) = taken(slow, 1)
        got: list[Job] = []

        def pass_by() -> None:
            clock.advance(timedelta(seconds=11))
            got.extend(taken(quick, 1))

        before_the_write(monkeypatch, slow, pass_by)
        with pytest.raises(FencedJobError):
            job.renew(20)
        assert got[0].value == b"0"


def test_loop_that_knows_of_the_loss_of_its_job_says_so_at_its_next_step(topic: Topic, clock: Clock) -> None:
    with topic.share("mail", lease=10) as share:
        loop = share.follow(0.0)
        first = next(loop)
        clock.advance(timedelta(seconds=11))
        (again,) = taken(share, 1)
        assert (again.offset, again.attempt) == (first.offset, 2)
        with pytest.raises(FencedJobError):
            next(loop)
        again.accept()


def test_member_that_was_stopped_over_generations_learns_that_its_record_was_taken(
    topic: Topic, clock: Clock
) -> None:
    with topic.share("mail", lease=10) as slow, topic.share("mail", lease=10) as quick:
        (job,) = taken(slow, 1)
        for window in (100, 101):
            topic.alter_share("mail", window=window)
        clock.advance(timedelta(seconds=11))
        assert len(taken(quick, 1)) == 1
        topic.alter_share("mail", window=102)
        with pytest.raises(FencedJobError, match="stopped meanwhile"):
            job.accept()


def test_accept_that_is_void_at_the_close_takes_no_other_accept_with_it(open_topic: Open, clock: Clock) -> None:
    topic = open_topic(partitions=2)
    for partition in range(2):
        topic.append(b"%d" % partition, partition=partition, sync=True)
    share = topic.share("mail", lease=10)
    for job in taken(share, 2):
        if job.partition == 1:
            job.renew(100)
        job.come_back(is_handled=True)  # by the loops of two threads
    clock.advance(timedelta(seconds=11))
    with topic.share("mail", lease=10) as other:
        assert values(other) == [b"0"]
        with pytest.raises(FencedJobError, match="lease"):
            share.close()
        assert values(other) == []
    assert [each.counts.accepted for each in topic.share_info("mail").partitions.values()] == [1, 1]


def test_many_reasons_are_forgotten_and_not_kept_for_ever(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loglib.jobs.taking._MOST_REASONS", 2)
    monkeypatch.setattr("loglib.jobs.taking._MOST_HANDED", 2)
    with topic.share("mail", max_attempts=100) as share:
        for _ in range(5):
            for job in taken(share, 3):
                job.release(count=False, reason="no room")
        assert len(share._takings[0]._reasons) <= 2 and len(share._takings[0]._jobs) <= 6


def test_partition_that_always_has_records_does_not_starve_another(
    open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.jobs.share._JOBS_A_TURN", 2)
    topic = open_topic(partitions=2)
    for partition in (0, 1):
        topic.append_many([b"%d" % partition] * 6, partition=partition)
    topic.flush()
    with topic.share("mail") as share:
        share._turn = 0
        got = []
        for job in share.follow(0.0):
            got.append(job.value)
            in_hand = [each for each in topic.share_info("mail").partitions.values() if each.in_hand]
            assert len(in_hand) == 1, "the accept of the other partition waits for nothing"
    assert got == [b"0", b"0", b"1", b"1"] * 3


def test_accept_that_lands_after_a_seal_with_the_next_begin_is_said_again(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    with topic.share("mail") as share:
        loop = share.follow(0.0)
        got = [next(loop).value]
        before_the_write(monkeypatch, share, lambda: topic.alter_share("mail", window=50))
        got += [job.value for job in loop]
        assert got == ALL
    assert only(topic).counts == (RECORDS, 0, 0, 0)


def test_member_that_is_evicted_over_a_seal_gets_nothing_in_the_new_generation(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has found it: the entry that fences it is in the generation that has ended."""
    with topic.share("mail", member="slow") as share, topic.share("mail") as other:

        def evict_and_seal() -> None:
            topic.evict_share_member("mail", "slow")
            topic.alter_share("mail", window=50)

        before_the_write(monkeypatch, share, evict_and_seal)
        with pytest.raises(StaleGenerationError):
            share.take(0.0)
        other._look_at_members()
        assert sorted(values(other), key=ALL.index) == ALL


def test_replay_that_is_interrupted_in_the_middle_is_made_again(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    from loglib.jobs.entries import ENTRY_BYTES
    from loglib.jobs.state import State

    with topic.share("mail") as share, topic.share("mail") as other:
        jobs = taken(other, 3)
        real = State.apply

        def interrupted(state: State, block: bytes, salt: int) -> int:
            monkeypatch.undo()
            real(state, block[:ENTRY_BYTES], salt)
            raise KeyboardInterrupt

        monkeypatch.setattr(State, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            share.take(0.0)
        (job,) = taken(share, 1)
        job.accept()
        assert only(topic).counts.accepted == 1, "its token is the one that others know"
        for each in jobs:
            each.accept()


def test_records_are_read_again_from_an_earlier_place(topic: Topic) -> None:
    with topic.share("mail") as share:
        records = share._takings[0].records
        assert values(share) == ALL
        batch = records.fresh(0)
        assert batch is not None and batch.offsets.start == 0


def test_interrupt_after_a_block_was_read_loses_no_record(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Cursor.read

    def read_and_interrupt(self: Cursor, limit: int) -> list[Batch]:
        read(self, limit)
        raise KeyboardInterrupt

    with topic.share("mail") as share:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Cursor, "read", read_and_interrupt)
            values(share)
        assert values(share) == ALL


@pytest.mark.slow
def test_interrupt_of_any_call_loses_no_record(open_topic: Open, path: Path) -> None:
    """After it the share goes on, in the process: each record is accepted, and only what was in hand comes again."""
    number = 0

    def once(interrupter: Interrupter) -> bool:
        nonlocal number
        number += 1
        topic = with_records(open_topic, at=path.with_name(f"topic{number}"))
        handled: list[bytes | None] = []

        def work() -> None:
            for job in share.follow(0.0):
                handled.append(job.value)
                if len(handled) == 1:
                    job.release()

        with topic.share("mail", max_attempts=1000) as share:
            was_interrupted = False
            try:
                interrupter.run(work)
            except KeyboardInterrupt:
                was_interrupted = True
            work()
        assert set(handled) == set(ALL), interrupter.where
        assert only(topic).counts == (RECORDS, 0, 0, 0), interrupter.where
        topic.close()
        return was_interrupted

    assert len(list(every_line(once))) > 50
