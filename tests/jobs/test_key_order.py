"""jobs/key_order.py, delays.py: records that wait for earlier ones of their keys, or for a time."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from shared_jobs import only, taken, values

from conftest import MANUAL, NOW, Clock
from loglib import Job, Share, Topic
from loglib.errors import LogError, ShareFullError, ShareMismatchError
from loglib.jobs import ack_log, not_before

Open = Callable[..., Topic]


@pytest.fixture
def topic(open_topic: Open) -> Topic:
    return open_topic(flush=MANUAL)


def add(topic: Topic, text: str) -> None:
    """Records in one batch: each word has a key, its first letter, or none if that is a dash."""
    words = text.split()
    topic.append_many(
        [word.encode() for word in words], keys=[None if word[0] == "-" else word[:1].encode() for word in words],
        partition=0,
    )  # fmt: skip
    topic.flush()


def got(share: Share) -> Job | None:
    return share.take(0.0)


def all_of(share: Share) -> list[str]:
    """The values of all records that come, while each of them stays in hand."""
    jobs: list[Job] = []
    while (job := got(share)) is not None:
        jobs.append(job)
    return [value(each) for each in jobs]


def value(job: Job | None) -> str:
    assert job is not None
    return (job.value or b"").decode()


# --- keys -------------------------------------------------------------------------------------------------


def test_record_waits_until_all_earlier_ones_of_its_key_are_settled(topic: Topic) -> None:
    add(topic, "a1 a2 b1 a3 b2 c1")
    with topic.share("mail", order="key") as share:
        a1, b1, c1 = (got(share) for _ in range(3))
        assert [value(each) for each in (a1, b1, c1)] == ["a1", "b1", "c1"]
        assert got(share) is None
        assert (only(topic).deferred, only(topic).free, len(only(topic).in_hand)) == (3, 3, 3)
        b1.accept()  # type: ignore[union-attr]
        b2 = got(share)
        assert value(b2) == "b2" and got(share) is None
        a1.release()  # type: ignore[union-attr]
        again = got(share)
        assert value(again) == "a1" and again.attempt == 2 and got(share) is None  # type: ignore[union-attr]
        again.reject("it is wrong")  # type: ignore[union-attr]
        assert all_of(share) == ["a2"]


def test_loop_gets_each_key_in_its_order(topic: Topic) -> None:
    add(topic, "a1 b1 a2 a3 b2 c1 a4")
    add(topic, "c2 a5 b3")
    with topic.share("mail", order="key") as share:
        found = [value.decode() for value in values(share)]
    assert sorted(found) == sorted(["a1", "b1", "a2", "a3", "b2", "c1", "a4", "c2", "a5", "b3"])
    for key in "abc":
        assert [each for each in found if each[0] == key] == sorted(each for each in found if each[0] == key)
    assert only(topic).counts.accepted == 10 and only(topic).deferred == 0


def test_records_without_a_key_have_no_order(topic: Topic) -> None:
    add(topic, "-1 -2 a1 -3")
    with topic.share("mail", order="key") as share:
        jobs = taken(share, 4)
        assert [value(each) for each in jobs] == ["-1", "-2", "a1", "-3"]


def test_other_members_keep_the_order_also_of_records_that_they_have_not_met(topic: Topic) -> None:
    add(topic, "a1 b1 a2 b2 a3")
    with topic.share("mail", order="key") as one:
        (a1,) = taken(one, 1)
        with topic.share("mail", order="key") as other:
            (b1,) = taken(other, 1)
            assert value(b1) == "b1" and got(other) is None and got(one) is None
            a1.accept()
            a2 = got(other)
            assert value(a2) == "a2"
        assert sorted(all_of(one)) == ["a2", "b1"], "the other one has left, and released both"


def test_batch_has_records_of_one_key_together_and_stops_before_one_that_waits(topic: Topic) -> None:
    add(topic, "a1 a2 b1 a3 c1 b2")
    with topic.share("mail", order="key") as share:
        batches = share.batches(4, 0.0)
        first = next(batches)
        assert first.batch.values == [b"a1", b"a2", b"b1", b"a3"]
        with topic.share("mail") as other:
            assert all_of(other) == ["c1"]
        first.release()  # they come again one by one
        with topic.share("mail") as other:
            assert sorted(all_of(other)) == ["a1", "b1", "c1"]


def test_order_outlives_generations_and_members(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ack_log, "_LOG_BYTES", 0)
    monkeypatch.setattr(ack_log, "_MORE_FOR_EACH", 0)
    add(topic, "a1 a2 b1 b2")
    for _ in range(3):
        with topic.share("mail", order="key") as share:
            assert sorted(all_of(share)) == ["a1", "b1"]
    with topic.share("mail") as share:
        assert len(values(share)) == 4


def test_order_is_that_of_the_share_and_another_one_is_refused(topic: Topic) -> None:
    add(topic, "a1")
    topic.share("mail", order="key").close()
    with pytest.raises(ShareMismatchError, match="order"):
        topic.share("mail", order="none")
    with pytest.raises(ValueError, match="order must be"):
        topic.share("other", order="keys")  # type: ignore[arg-type]
    assert topic.share_info("mail").settings.order == "key"
    assert topic.alter_share("mail", window=5).order == "key"
    with topic.share("mail") as share:
        add(topic, "a2")
        assert value(got(share)) == "a1" and got(share) is None


def test_records_that_wait_for_a_key_count_in_the_window(topic: Topic) -> None:
    add(topic, "a1 a2 a3 a4 b1")
    with topic.share("mail", order="key", window=3) as share:
        (a1,) = taken(share, 1)
        with pytest.raises(ShareFullError):
            got(share)
        assert (only(topic).deferred, only(topic).blocked_by) == (2, "window")
        a1.accept()
        assert value(got(share)) == "a2"


def test_record_that_is_lost_holds_nobody_up(topic: Topic) -> None:
    add(topic, "a1 a2")
    topic.partition(0).roll()
    add(topic, "a3 b1")
    with topic.share("mail", order="key", max_attempts=9) as share:
        (a1, b1) = taken(share, 2)
        assert value(b1) == "b1" and only(topic).deferred == 2
        a1.release()
        topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
        assert value(got(share)) == "a3"
    assert only(topic).counts.lost == 2


def test_record_in_hand_that_retention_has_dropped_holds_nobody_up_who_cannot_read_it(topic: Topic) -> None:
    add(topic, "a1")
    topic.partition(0).roll()
    add(topic, "a2")
    with topic.share("mail", order="key") as one:
        (a1,) = taken(one, 1)
        topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
        assert got(one) is None, "it knows the key"
        with topic.share("mail") as other:
            assert all_of(other) == ["a2"]
        a1.accept()


def test_record_that_waits_and_is_lost_is_told_by_a_member_that_never_knew_its_key(topic: Topic) -> None:
    """It was never settled, and retention waited for it for ever."""
    add(topic, "a1 a2")
    with topic.share("mail", order="key") as one:
        (a1,) = taken(one, 1)
        assert got(one) is None, "a2 waits"
        topic.partition(0).roll()
        add(topic, "b1")
        assert value(got(one)) == "b1"
        topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
        a1.accept()
    with topic.share("mail") as other:
        assert all_of(other) == ["b1"]
    assert (only(topic).counts.lost, only(topic).deferred) == (1, 0)


def test_reset_forgets_who_waits(topic: Topic) -> None:
    add(topic, "a1 a2 a3")
    with topic.share("mail", order="key") as share:
        assert all_of(share) == ["a1"]
    topic.reset_share("mail", "begin")
    assert (only(topic).deferred, only(topic).free) == (0, 0)
    with topic.share("mail") as share:
        assert values(share) == [b"a1", b"a2", b"a3"]


@pytest.mark.parametrize("seed", range(12))
def test_i5_no_record_is_begun_before_an_earlier_one_of_its_key_is_settled(
    topic: Topic, clock: Clock, seed: int
) -> None:
    """Members accept, release, reject, leave and come; the oracle knows what was begun and settled."""
    draw = random.Random(seed)
    keys: dict[int, bytes | None] = {}
    unsettled: dict[bytes | None, set[int]] = defaultdict(set)
    members: list[tuple[Share, list[Job]]] = []

    def join() -> None:
        members.append((topic.share("mail", order="key", max_attempts=1000, window=200), []))

    def settled(job: Job) -> None:
        unsettled[job.key].discard(job.offset)

    def step() -> None:
        share, jobs = draw.choice(members)
        action = draw.choice(["take"] * 6 + ["accept"] * 4 + ["release", "delay", "reject", "leave", "time"])
        if action == "take":
            job = got(share)
            if job is not None:
                earlier = {each for each in unsettled[job.key] if each < job.offset}
                assert job.key is None or not earlier, f"{earlier} of key {job.key!r} are not settled"
                jobs.append(job)
        elif action == "time":
            clock.now += 10_000_000
        elif action == "leave" and len(members) > 1:
            members.remove((share, jobs))
            share.close()
        elif jobs and action != "leave":
            job = jobs.pop(draw.randrange(len(jobs)))
            if action == "accept":
                job.accept()
                settled(job)
            elif action == "reject":
                job.reject()
                settled(job)
            else:
                job.release(5.0 if action == "delay" else None)

    for _ in range(4):
        topic.append_many(
            [b"x"] * 10, keys=[draw.choice([b"a", b"b", b"c", None]) for _ in range(10)], partition=0
        )  # fmt: skip
        topic.flush()
    for record in topic.read():
        keys[record.offset] = record.key
        unsettled[record.key].add(record.offset)
    join()
    join()
    for number in range(300):
        if number % 40 == 39:
            join()
        step()
    for share, _ in members:
        share.close()
    clock.now += 3600_000_000
    left = sum(map(len, unsettled.values()))
    with topic.share("mail") as share:
        assert len(values(share)) == left
    assert left < 40 == sum(only(topic).counts)


# --- times ------------------------------------------------------------------------------------------------


def append(topic: Topic, text: str, after_s: float | None = None, key: bytes | None = None) -> None:
    due = datetime.fromtimestamp((NOW + round((after_s or 0) * 1e6)) / 1e6, tz=UTC)
    headers: Any = {} if after_s is None else not_before(due)
    topic.append(text.encode(), key, partition=0, headers=headers)


def test_record_is_handed_out_only_when_its_time_has_come(topic: Topic, clock: Clock) -> None:
    append(topic, "later", 60)
    append(topic, "now")
    append(topic, "soon", 30)
    topic.flush()
    with topic.share("mail") as share:
        assert values(share) == [b"now"]
        assert [round(each) for each in only(topic).waiting.values()] == [60, 30]
        assert only(topic).oldest is None, "none of them was begun"
        clock.now += 31_000_000
        (soon,) = taken(share, 1)
        assert (value(soon), soon.attempt) == ("soon", 1)
        soon.accept()
        clock.now += 30_000_000
        assert values(share) == [b"later"]
    assert [record.value for record in topic.read()] == [b"later", b"now", b"soon"], "readers do not wait"


def test_batch_ends_before_a_record_whose_time_has_not_come(topic: Topic, clock: Clock) -> None:
    for number in range(3):
        append(topic, f"{number}")
    append(topic, "late", 60)
    append(topic, "4")
    topic.flush()
    with topic.share("mail") as share:
        assert [each.batch.values for each in share.batches(100, 0.0)] == [[b"0", b"1", b"2"], [b"4"]]
        clock.now += 61_000_000
        assert [each.batch.values for each in share.batches(100, 0.0)] == [[b"late"]]


def test_delayed_record_holds_up_the_later_ones_of_its_key(topic: Topic, clock: Clock) -> None:
    append(topic, "a1", 60, b"a")
    append(topic, "a2", None, b"a")
    append(topic, "b1", None, b"b")
    append(topic, "b2", 90, b"b")
    topic.flush()
    with topic.share("mail", order="key") as share:
        assert values(share) == [b"b1"]
        clock.now += 61_000_000
        assert values(share) == [b"a1", b"a2"]
        clock.now += 30_000_000
        assert values(share) == [b"b2"]
    assert only(topic).counts.accepted == 4


def test_delay_goes_on_in_the_next_generation(topic: Topic, clock: Clock) -> None:
    append(topic, "late", 60)
    topic.flush()
    topic.share("mail").close()
    with topic.share("mail") as share:
        assert got(share) is None
    topic.alter_share("mail", window=7)
    with topic.share("mail") as share:
        assert got(share) is None
        clock.now += 61_000_000
        assert values(share) == [b"late"]


@pytest.mark.parametrize("text", [b"", b"soon", b"-5", b"1.5", b"9" * 19])
def test_header_that_is_no_time_delays_nothing(topic: Topic, text: bytes) -> None:
    topic.append(b"x", partition=0, headers={"loglib-not-before": text}, sync=True)
    with topic.share("mail") as share:
        assert values(share) == [b"x"]


def test_time_is_a_moment_or_a_duration_from_now() -> None:
    at = datetime(2030, 1, 2, tzinfo=UTC)
    assert not_before(at) == {"loglib-not-before": b"1893542400000000"}
    assert not_before(datetime(1960, 1, 1, tzinfo=UTC)) == {"loglib-not-before": b"0"}
    now = int(not_before(0)["loglib-not-before"])
    for later in ("10m", 600, timedelta(minutes=10)):
        assert 0 <= int(not_before(later)["loglib-not-before"]) - now - 600_000_000 < 60_000_000
    with pytest.raises(ValueError, match="time zone"):
        not_before(datetime(2030, 1, 1))  # noqa: DTZ001
    with pytest.raises(ValueError, match="duration"):
        not_before("soon")


def test_scheduled_records_fill_the_window_and_nothing_else_is_begun(topic: Topic) -> None:
    for number in range(4):
        append(topic, f"{number}", 60 if number < 3 else None)
    topic.flush()
    with topic.share("mail", window=3) as share:
        with pytest.raises(ShareFullError):
            got(share)
        assert only(topic).blocked_by == "window"
        topic.alter_share("mail", window=4)
        assert value(got(share)) == "3"


def test_damage_of_a_record_that_others_have_in_hand_is_raised(topic: Topic, path: Path) -> None:
    add(topic, "a1 a2")
    topic.partition(0).roll()
    add(topic, "b1")
    with topic.share("mail", order="key") as one:
        taken(one, 1)
        segment = min((path / "0000").glob("*.log"))
        content = bytearray(segment.read_bytes())
        content[4096 + 80] ^= 1
        segment.write_bytes(content)
        with topic.share("mail") as other, pytest.raises(LogError):
            got(other)
