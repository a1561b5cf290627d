"""Retention that waits for groups: what a group has not committed past stays, up to the ceiling."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import loglib
from conftest import Clock, alter
from loglib import Retention, Topic, testing
from loglib.retention import SegmentDecision

# All that is sealed is due at once, so a segment stays for the group alone.
NOTHING = Retention(age=None, bytes=0, hold_for=["etl"], hold_bytes=1 << 20)


@pytest.fixture
def topic(path: Path) -> Iterator[Topic]:
    with Topic.open(path, create=True, retention=NOTHING) as opened:
        yield opened


def seal(topic: Topic, segments: int, *, value: bytes = b"x") -> None:
    for _ in range(segments):
        topic.append(value, partition=0, sync=True)
        topic.partition(0).roll()


def handle(topic: Topic, records: int, group: str = "etl") -> None:
    with topic.group(group, commit="manual") as member:
        for _ in range(records):
            assert len(member.poll(max_records=1, timeout=60)) == 1
        member.commit()


def drops(decisions: list[SegmentDecision]) -> list[bool]:
    return [each.drop for each in decisions]


def test_segment_stays_until_the_group_has_committed_past_it(topic: Topic) -> None:
    seal(topic, 3)
    assert drops(topic.retain()) == [False] * 4, "the group is not there yet"
    handle(topic, 2)
    assert drops(topic.retain()) == [True, True, False, False]
    handle(topic, 1)
    assert drops(topic.retain()) == [True, False]


def test_segment_stays_until_the_share_has_settled_each_record(topic: Topic) -> None:
    seal(topic, 4)
    with topic.share("etl", max_attempts=9) as share:
        assert drops(topic.retain(dry_run=True)) == [False] * 5, "nothing is settled"
        jobs = [share.take(0.0) for _ in range(3)]
        assert all(jobs)
        for job in (jobs[0], jobs[2]):
            job.accept()  # type: ignore[union-attr]
        decisions = topic.retain()
        assert drops(decisions) == [True, False, False, False, False]
        second = topic.partition(0).segments[0].base_offset
        assert decisions[1].reason.endswith(f"but share etl has settled all records before offset {second}")
        jobs[1].release(delay=3600)  # type: ignore[union-attr]
        assert drops(topic.retain()) == [False] * 4, "it comes again in an hour"
    topic.reset_share("etl", "end")
    assert drops(topic.retain()) == [True, True, True, False]
    assert topic.share_info("etl").partitions[0].counts.lost == 0


def test_share_that_has_settled_all_holds_not_even_the_last_segment(topic: Topic) -> None:
    topic.append_many([b"x"] * 3)
    topic.flush()
    topic.partition(0).roll()
    with topic.share("etl") as share:
        assert len(list(share.follow(0.0))) == 3
        assert drops(topic.retain()) == [True, False]


def test_slower_one_decides_of_a_group_and_a_share_with_one_name(topic: Topic) -> None:
    seal(topic, 3)
    topic.group("etl").close()
    with topic.share("etl") as share:
        assert len(list(share.follow(0.0))) == 3
        assert drops(topic.retain()) == [False] * 4, "the group has no commit"
        handle(topic, 2)
        assert drops(topic.retain()) == [True, True, False, False]
        handle(topic, 1)
        seal(topic, 1)
        handle(topic, 1)
        assert topic.retain(dry_run=True)[-2].held_by == "etl"


def test_decisions_name_the_group_that_is_waited_for(topic: Topic) -> None:
    seal(topic, 2)
    first, second, last = topic.retain(dry_run=True)
    assert (first.held_by, second.held_by, last.held_by) == ("etl", None, None)
    assert first.reason.endswith("bytes, the limit is 0, but group etl has committed nothing")
    assert second.reason == "an older segment stays"
    handle(topic, 1)
    first, second, _ = topic.retain(dry_run=True)
    assert (first.drop, first.held_by, second.held_by) == (True, None, "etl")
    assert second.reason.endswith(f"but group etl has committed offset {second.base_offset}")


def test_slowest_of_several_groups_decides(path: Path) -> None:
    policy = Retention(age=None, bytes=0, hold_for=["fast", "slow"], hold_bytes=1 << 20)
    with Topic.open(path, create=True, retention=policy) as topic:
        seal(topic, 3)
        handle(topic, 3, "fast")
        handle(topic, 1, "slow")
        decisions = topic.retain()
        assert drops(decisions) == [True, False, False, False]
        assert decisions[1].held_by == "slow"


def test_partitions_wait_each_for_itself(path: Path) -> None:
    with Topic.open(path, create=True, partitions=2, retention=NOTHING) as topic:
        for partition in topic.partitions:
            partition.append(b"x", sync=True)
            partition.roll()
        topic.reset_group("etl", {1: "end"})
        assert [(each.partition, each.drop) for each in topic.retain()] == [
            (0, False), (0, False), (1, True), (1, False),
        ]  # fmt: skip


def test_ceiling_of_bytes_drops_what_nobody_reads_and_says_who_loses(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "loglib")
    policy = Retention(age=None, bytes=0, hold_for=["etl"], hold_bytes=3000)
    with Topic.open(path, create=True, retention=policy) as topic:
        seal(topic, 5, value=bytes(900))
        (first, *_, last) = (each.reason for each in topic.retain() if each.drop)
        assert "the limit is 3000; group etl has committed nothing, and loses records" in first
        assert drops(topic.retain()) == [False] * len(topic.partition(0).segments)
        assert topic.partition(0).high_watermark - topic.partition(0).log_start_offset <= 3000
    assert f"reason for the last one: {last}" in caplog.text


def test_ceiling_of_age(path: Path, clock: Clock) -> None:
    policy = Retention(age=timedelta(seconds=1), hold_for=["etl"], hold_age=timedelta(seconds=5))
    with testing.open_topic(path, clock=clock, retention=policy) as topic:
        seal(topic, 1)
        for passed, dropped in ((2, False), (4, True)):
            clock.now += passed * 1_000_000
            assert topic.retain()[0].drop == dropped, passed


def test_free_space_is_worth_more_than_what_waits_but_takes_it_last(clock: Clock) -> None:
    class Tight(testing.MemoryFiles):
        free = 1000

        def free_space(self, path: str) -> tuple[int, int]:
            return self.free, 10_000

    policy = Retention(age=None, keep_free=0.1, hold_for=["etl"], hold_bytes=1 << 20)
    with testing.open_topic("/topic", files=Tight(), clock=clock, partitions=2, retention=policy) as topic:
        for partition in topic.partitions:
            partition.append(b"x", sync=True)
            partition.roll()
            clock.now += 1_000_000
        topic.reset_group("etl", {1: "end"})
        Tight.free = 999
        assert [each.partition for each in topic.retain() if each.drop] == [1], "0 is older, and waits"
        (decision,) = (each for each in topic.retain() if each.drop)
        assert decision.partition == 0
        assert decision.reason == (
            "999 bytes free, 1000 must stay free; group etl has committed nothing, and loses records"
        )


def test_group_that_another_topic_keeps_is_waited_for(tmp_path: Path) -> None:
    with Topic.open(
        tmp_path / "a", create=True
    ) as first, Topic.open(tmp_path / "b", create=True, retention=NOTHING) as second:
        seal(second, 2)
        with loglib.group([first, second], "etl", commit="manual") as member:
            member.poll(max_records=1, timeout=60)
            member.commit()
        assert drops(second.retain()) == [True, False, False]


@pytest.mark.parametrize(
    "content", [{"topic": "gone"}, {"topic": "../a"}, {}], ids=["gone", "outside", "another-version"]
)
def test_group_whose_commits_cannot_be_found_holds_everything(
    path: Path, topic: Topic, content: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    seal(topic, 1)
    (path / "groups").mkdir()
    (path / "groups" / "etl").write_text(json.dumps(content))
    assert drops(topic.retain()) == [False, False]
    assert "retention waits for etl: " in caplog.text


def test_commits_of_a_topic_that_was_made_again_hold_nothing_back_and_release_nothing(path: Path) -> None:
    """The committed offsets are those of another log."""
    with Topic.open(path, create=True) as topic:
        seal(topic, 2)
        handle(topic, 2)
    groups = path / "groups"
    kept = groups.rename(path.with_name("groups"))
    Topic.delete(path)
    with Topic.create(path, retention=NOTHING) as topic:
        kept.rename(groups)
        seal(topic, 2)
        assert drops(topic.retain()) == [False] * 3


def test_partitions_that_nobody_holds_wait_too(path: Path) -> None:
    with Topic.open(path, create=True, retention=NOTHING, shared=True) as topic:
        seal(topic, 2)
    with Topic.open(path, shared=True) as topic:
        assert drops(topic.retain()) == [False] * 3
        handle(topic, 1)
        assert drops(topic.retain()) == [True, False, False]


def test_pass_over_a_topic_that_nobody_has_any_more_finds_no_commits(path: Path) -> None:
    Topic.open(path, create=True).close()
    topic = Topic.open(path, mode="r")
    keeper = topic._retention
    del topic
    gc.collect()
    assert keeper._held_by("etl") == {}


def test_reader_explains_the_hold(topic: Topic, path: Path) -> None:
    seal(topic, 1)
    with Topic.open(path, mode="r") as reading:
        assert reading.retain(dry_run=True)[0].held_by == "etl"


def test_policy_without_a_group_to_wait_for_is_written_as_before(path: Path) -> None:
    with Topic.open(path, create=True, retention=Retention(bytes=5)):
        described = json.loads((path / "topic.json").read_bytes())
        assert described["retention"].keys() == {"age", "bytes", "keep_free"}
    alter(path, retention=NOTHING)
    with Topic.open(path) as topic:
        assert topic.config.retention == NOTHING
        assert topic.config.retention.hold_for == ("etl",)


# --- a log that was set back ---------------------------------------------------------------------------------


def set_back(path: Path) -> None:
    """A group and a share handle all records; then an older copy of the log takes the place of their log."""
    with Topic.open(path, create=True, retention=NOTHING) as topic:
        seal(topic, 1)
        topic.close()
        shutil.copytree(path / "0000", path.parent / "older")
    with Topic.open(path, create=True) as topic:
        topic.append_many([b"of the newer log"] * 3)
        topic.flush()
        with topic.share("etl") as share:
            assert len(list(share.follow(0.0))) == 4
        handle(topic, 4, "readers")
    shutil.rmtree(path / "0000")
    (path.parent / "older").rename(path / "0000")


@pytest.mark.parametrize("name", ["etl", "readers"])
def test_what_was_settled_in_another_history_lets_retention_drop_nothing(path: Path, name: str) -> None:
    set_back(path)
    with Topic.open(path, create=True) as topic:
        topic.alter(retention=dataclasses.replace(NOTHING, hold_for=[name]))
        assert drops(topic.retain()) == [False] * 2, "it has settled more than the log has"
        seal(topic, 1, value=b"of another log" * 100)
        seal(topic, 1)
        assert drops(topic.retain()) == [False] * 4, "the log has grown beyond the place, with other records"
        (topic.reset_share if name == "etl" else topic.reset_group)(name, "end")
        assert drops(topic.retain()) == [True] * 3 + [False]


def test_lag_of_a_group_counts_from_the_begin_of_a_log_that_was_set_back(path: Path) -> None:
    set_back(path)
    with Topic.open(path, create=True) as topic:
        assert topic.group_info("readers", count_records=True).lag[0].records == 1
        seal(topic, 1, value=b"of another log" * 100)
        assert topic.group_info("readers", count_records=True).lag[0].records == 2
