"""An idle member is told at once when there is something to do, and costs nothing until then."""

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from consumers import die, fill, numbers, rest, wait_for

import loglib
from loglib import StaleGenerationError, Topic, testing
from loglib.groups import delivery, membership
from loglib.groups.commit_log import LogPartition
from loglib.groups.owners import evict_owner
from loglib.system.files import REAL
from loglib.testing import RecordingFiles

Opener = Callable[..., Topic]

pytestmark = pytest.mark.usefixtures("attentive")


def rare_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members look at each other, and logs at their files, when something is reported, and not again for a minute."""
    monkeypatch.setattr(membership, "_LOOK_S", 60.0)
    monkeypatch.setattr("loglib.log.log.LOOK_S", 60.0)


def test_member_that_waits_for_a_busy_one_is_told_when_that_gives_up(
    open_topic: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    rare_looks(monkeypatch)
    topic = open_topic(partitions=2)
    fill(topic, 2)
    with topic.group("etl", member="a") as busy, ExitStack() as stack:
        assert numbers(busy.poll(timeout=10)) == [0]
        waiting = stack.enter_context(topic.group("etl", member="b"))
        looks: list[int] = []
        look = waiting._membership.file.live

        def counted_look() -> Any:
            looks.append(1)
            return look()

        monkeypatch.setattr(waiting._membership.file, "live", counted_look)
        assert waiting.poll(timeout=1.0) == [] and waiting.assignment == []
        assert 0 < len(looks) <= 2 * len(membership._LOOKS_S)  # and not one each 2 ms
        giving_up = threading.Timer(0.2, rest, [busy])
        giving_up.start()
        assert numbers(waiting.poll(timeout=30)) == [1]
        giving_up.join()
        assert (busy.assignment, waiting.assignment) == ([0], [1])


@pytest.mark.parametrize("strategy", ["range", "sticky"])
def test_idle_member_is_told_when_others_come_and_go_and_die(
    open_topic: Opener, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    rare_looks(monkeypatch)
    topic = open_topic(partitions=4)
    with topic.group("etl", member="a", strategy=strategy) as idle:
        asked = threading.Event()

        def follow() -> None:
            with pytest.raises(StaleGenerationError):
                for _ in idle.follow():
                    asked.set()

        thread = threading.Thread(target=follow)
        thread.start()
        wait_for(lambda: idle.assignment == [0, 1, 2, 3])
        with topic.group("etl", member="b", strategy=strategy) as other:
            wait_for(lambda: other.poll(timeout=0.01) == [] and len(other.assignment) == 2)
            assert len(idle.assignment) == 2
        wait_for(lambda: len(idle.assignment) == 4)
        dying = topic.group("etl", member="c", strategy=strategy)
        wait_for(lambda: dying.poll(timeout=0.01) == [] and len(dying.assignment) == 2)
        die(dying)
        wait_for(lambda: len(idle.assignment) == 4)
        fill(topic, 1)
        assert asked.wait(30)
        loglib.groups.evict_member(topic, "etl", "a")
        thread.join(30)
        assert not thread.is_alive()

        def is_told() -> bool:
            with pytest.raises(StaleGenerationError) as told:  # first, perhaps, of a partition that it could not commit
                idle.poll()
            return "was evicted" in str(told.value)

        wait_for(is_told)
        assert idle.assignment == []


def test_evicted_owner_is_told_at_once(open_topic: Opener, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rare_looks(monkeypatch)
    topic = open_topic(partitions=2)
    with topic.group("etl", member="a") as group:
        assert group.poll(timeout=0.4) == []
        evict_owner(REAL, str(path / "groups/etl/owners"), LogPartition(topic.log_id, 1), 0o600)
        with pytest.raises(StaleGenerationError, match="topic-1"):
            group.poll(timeout=30)


@pytest.mark.parametrize("strategy", ["range", "sticky"])
def test_group_without_reports_of_the_system_works_all_the_same(
    open_topic: Opener, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    monkeypatch.setattr(sys, "platform", "plan9")
    monkeypatch.setattr(membership, "_LOOK_S", 2.0)
    topic = open_topic(partitions=2)
    with topic.group("etl", member="a", strategy=strategy) as a, topic.group("etl", member="b", strategy=strategy) as b:
        assert not a._observer.reports
        wait_for(lambda: a.poll() == b.poll() == [] and a.assignment == [0] and b.assignment == [1])
        fill(topic, 2)
        assert (numbers(a.poll(timeout=30)), numbers(b.poll(timeout=30))) == ([0], [1])
        threading.Timer(0.05, fill, [topic, 1], {"first": 2}).start()
        assert numbers(a.poll(timeout=30)) == [2]


def test_many_idle_partitions_are_not_looked_at(open_topic: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_MOST_OPEN", 2)
    rare_looks(monkeypatch)
    topic = open_topic(partitions=20)
    files = RecordingFiles()
    with testing.open_topic(topic.path, mode="r", files=files) as reading, reading.group("etl") as group:
        assert group.poll(timeout=0.5) == []
        files.calls.clear()
        assert group.poll(timeout=0.5) == []
        assert files.calls == []
        fill(topic, 60)
        assert sorted(rest(group)) == list(range(60))
        fill(topic, 1, first=60)
        files.calls.clear()
        assert numbers(group.poll(timeout=30)) == [60]
        assert {call.path.split("/")[-2] for call in files.calls if call.name == "open_read"} <= {"0000"}


def test_member_that_only_reads_is_woken(topic: Topic, path: Path) -> None:
    with Topic.open(path, mode="r") as reading, reading.group("etl", commit=3600) as group:
        assert len(rest(group)) == 10
        waiting = threading.Thread(target=lambda: found.extend(numbers(group.poll(timeout=60))))
        found: list[int] = []
        waiting.start()
        fill(topic, 1, first=10)
        waiting.join(60)
        assert found == [10]
