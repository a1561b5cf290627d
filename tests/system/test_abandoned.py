"""append/retention_pass.py: partitions that nobody holds get their retention from who has the topic open."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from clock_worlds import DAY, HOUR, Machine

from conftest import MANUAL, QUIET, SECOND, Clock, SlowToUnlink, crash_copy, start_python, tree, values_of
from loglib import LockedError, Retention, Topic
from loglib.append.live_policies import LivePolicies
from loglib.append.turns import Turns
from loglib.system.directory import Directory
from loglib.system.files import REAL
from loglib.testing import FaultyFiles, RecordingFiles, UnsyncedFiles

Open = Callable[..., Topic]
TWO_HOURS = Retention(age=timedelta(hours=2))
NOTHING = Retention(age=None, bytes=0)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def open_shared(open_topic: Open) -> Open:
    def open_it(**arguments: Any) -> Topic:
        arguments.setdefault("files", UnsyncedFiles())
        return open_topic(shared=True, **arguments)

    return open_it


def leave_segments(topic: Topic, partition: int, count: int, size: int = 1) -> None:
    """Write sealed segments to a partition, and end."""
    for _ in range(count):
        topic.append(b"x" * size, partition=partition, sync=True)
        topic.partition(partition).roll()
    topic.close()


def look(topic: Topic) -> None:
    """What the background thread does once a minute."""
    for partition in topic.partitions:
        partition._access.keep_house()
    topic._retention.run_for_others()


def dropped(topic: Topic) -> list[int]:
    return [each.partition for each in topic.retain() if each.drop]


def sizes(topic: Topic) -> list[int]:
    return [len(each.segments) for each in topic.partitions]


@pytest.mark.parametrize("act", [Topic.retain, look])
def test_old_segments_of_a_partition_that_nobody_holds_are_dropped(
    act: Callable[[Topic], object], open_shared: Open, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """After restarts onto other partitions nothing deleted them."""
    leave_segments(open_shared(retention=TWO_HOURS, partitions=3, clock=machine), 0, 2)
    topic = open_shared(clock=machine)
    topic.append(b"mine", partition=1, sync=True)
    machine.true_us += 2 * HOUR + 1
    assert [each.partition for each in topic.retain(dry_run=True) if each.drop] == [0, 0]
    with caplog.at_level(logging.INFO, "loglib"):
        act(topic)
    assert sizes(topic) == [1, 1, 1] and topic.partition(0)._access.open_writer is None
    assert "0000: retention dropped 2 segments" in caplog.text
    next_one = open_shared(clock=machine)
    assert next_one.append(b"more", partition=0, sync=True).partition == 0
    recovery = next_one.partition(0).recovery
    assert recovery is not None and recovery.clean
    assert sorted(map(str, values_of(topic))) == ["b'mine'", "b'more'"]
    assert not next_one.verify().damage


def test_background_thread_runs_retention_for_partitions_that_nobody_holds(
    open_shared: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_segments(open_shared(retention=NOTHING, partitions=2), 0, 2)
    monkeypatch.setattr("loglib.append.background._HOUSEKEEPING_S", 0.01)
    topic = open_shared()
    deadline = time.monotonic() + 60
    while sizes(topic) != [1, 1] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sizes(topic) == [1, 1]


def test_process_that_holds_no_partition_keeps_house_as_well(open_shared: Open) -> None:
    leave_segments(open_shared(retention=NOTHING, partitions=2), 1, 2)
    topic = open_shared()
    assert dropped(topic) == [1, 1]
    assert dropped(topic) == []
    assert not any(each._access.open_writer is not None for each in topic.partitions)


def test_topic_that_is_not_shared_has_no_such_passes(open_topic: Open) -> None:
    topic = open_topic(retention=NOTHING)
    topic.append(b"x", sync=True)
    topic.partition(0).roll()
    topic._retention.run_for_others()
    assert sizes(topic) == [2]


def test_partition_that_nobody_holds_is_not_written_to_when_nothing_is_due(open_shared: Open, path: Path) -> None:
    policy = Retention(keep_free=0.0001)
    leave_segments(open_shared(retention=policy, partitions=2, segment_age=timedelta(days=1)), 0, 2)
    files = RecordingFiles(UnsyncedFiles())
    topic = open_shared(files=files)
    before = tree(path), (path / "0000" / "lock").read_bytes()
    files.calls.clear()
    for _ in range(3):
        look(topic)
    assert (tree(path), (path / "0000" / "lock").read_bytes()) == before
    assert files.count("flock", "pwritev", "create", "unlink", "fsync") == 0
    topic.retain()
    assert (tree(path), (path / "0000" / "lock").read_bytes()) == before


@pytest.mark.parametrize("act", [Topic.retain, look])
def test_partition_of_a_living_writer_is_left_alone(
    act: Callable[[Topic], object], open_shared: Open, machine: Machine, path: Path
) -> None:
    living = open_shared(retention=TWO_HOURS, partitions=2, segment_age=timedelta(hours=1), clock=machine)
    living.append(b"x", partition=0, sync=True)
    living.partition(0).roll()
    living.append(b"x", partition=0, sync=True)
    topic = open_shared(clock=machine, wait=0.01)
    patient = open_shared(clock=machine)
    machine.true_us += 2 * HOUR + 1
    with living.partition(0)._access.writer().held():
        before = tree(path)
        act(topic)
        assert tree(path) == before
        assert {each.partition for each in topic.retain()} == {1}
    assert {each.partition for each in patient.retain()} == {0, 1}, "it gives the partition up for a moment"
    assert {each.partition for each in topic.retain(dry_run=True)} == {0, 1}, "a dry run explains others' as well"


def test_open_segment_that_a_dead_writer_left_is_sealed_once_it_is_old_and_goes_in_its_turn(
    open_shared: Open, machine: Machine
) -> None:
    day, week = timedelta(days=1), timedelta(days=7)
    writer = open_shared(retention=Retention(age=week), partitions=2, segment_age=day, clock=machine)
    writer.append(b"x", partition=0, sync=True)
    writer.close()
    topic = open_shared(clock=machine)
    machine.true_us += DAY - HOUR
    look(topic)
    assert sizes(topic) == [1, 1]
    machine.true_us += HOUR
    look(topic)
    assert sizes(topic) == [2, 1]
    machine.true_us += 7 * DAY - 1
    look(topic)
    assert sizes(topic) == [2, 1] and values_of(topic) == [b"x"]
    machine.true_us += 2
    topic.retain()
    assert sizes(topic) == [1, 1] and values_of(topic) == []


def test_age_is_known_after_a_restart_once_the_clock_has_run_for_an_hour(open_shared: Open, machine: Machine) -> None:
    """The looks of this process count, though it writes none of them down."""
    with open_shared(retention=TWO_HOURS, partitions=2, clock=machine) as topic:
        topic.append(b"x", partition=0, sync=True)
        for _ in range(2):
            topic.retain()
            machine.true_us += HOUR + SECOND
        leave_segments(topic, 0, 1)
    machine.restart()
    machine.true_us += 2 * HOUR + SECOND
    topic = open_shared(clock=machine)
    for _ in range(61):
        assert dropped(topic) == []
        machine.true_us += 60 * SECOND
    assert dropped(topic) == [0]


# --- free space ----------------------------------------------------------------------------------------------


class Tight(UnsyncedFiles):
    """A disk of 10,000 bytes."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.free = free

    def free_space(self, path: str) -> tuple[int, int]:
        return self.free, 10_000


def test_space_is_freed_by_the_oldest_segments_of_partitions_with_and_without_a_holder(
    open_shared: Open, clock: Clock
) -> None:
    everything = open_shared(retention=Retention(age=None), partitions=4)
    for number in (3, 0, 1, 2, 0, 1):
        everything.append(b"x", partition=number, sync=True)
        everything.partition(number).roll()
        clock.now += SECOND
    everything.close()
    living, files = open_shared(), Tight(950)
    topic = open_shared(files=files, wait=0.01)
    topic.append(b"x", partition=1, sync=True)
    topic.alter(retention=Retention(age=None, keep_free=0.1))
    with living.partition(3)._access.writer().held():
        assert dropped(topic) == [0], "3 is older, and held"
        assert dropped(topic) == [1]
        topic._retention.run_for_others()
        assert sizes(topic) == [2, 2, 1, 2], "the next oldest is that of 2"
        files.free = 0
        assert dropped(topic) == [0, 1]
        assert dropped(topic) == []
    assert sizes(topic) == [1, 1, 1, 2]


def test_space_is_freed_by_sealing_what_a_dead_writer_left(open_shared: Open) -> None:
    with open_shared(retention=Retention(age=None), partitions=2) as writer:
        writer.append(b"x" * 100_000, partition=0, sync=True)
        writer.append(b"x" * 100, partition=1, sync=True)
    topic = open_shared(files=Tight(900))
    topic.alter(retention=Retention(age=None, keep_free=0.1))
    assert dropped(topic) == [0]
    assert sizes(topic) == [1, 1] and values_of(topic) == [b"x" * 100]


# --- what may go wrong ---------------------------------------------------------------------------------------


def test_damage_where_nobody_writes_is_logged_once_and_ends_nothing(
    open_shared: Open, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave_segments(open_shared(retention=NOTHING, partitions=3), 0, 2)
    leave_segments(open_shared(), 2, 1)
    segment = min((path / "0000").glob("*.log"))
    segment.write_bytes(b"?" * 5000 + segment.read_bytes()[5000:])
    topic = open_shared()
    topic.append(b"x", partition=1, sync=True)
    for _ in range(3):
        look(topic)
        assert [each.drop for each in topic.retain()] == [False, False]
    assert [len(topic.partition(number).segments) for number in (1, 2)] == [1, 1]
    told = [each for each in caplog.records if "retention skips this partition" in each.message]
    assert len(told) == 1 and "0000" in told[0].message
    topic.append(b"y", partition=1, sync=True)


def test_partition_that_may_not_be_written_is_logged_once_and_ends_nothing(
    open_shared: Open, caplog: pytest.LogCaptureFixture
) -> None:
    class Forbidden(FaultyFiles):
        def before(self, call: Any) -> None:
            if "/0000/" in call.path or call.file == "watermark":
                super().before(call)

    leave_segments(open_shared(retention=NOTHING, partitions=2), 0, 1)
    files = Forbidden("pwritev", every=True, error=errno.EACCES)
    topic = open_shared(files=files)
    for _ in range(3):
        look(topic)
    told = [each for each in caplog.records if "retention skips this partition" in each.message]
    assert len(told) == 1 and files.failed >= 3
    files.armed = False
    look(topic)
    assert sizes(topic) == [1, 1]


def test_topic_that_was_moved_is_left_alone(open_shared: Open, path: Path) -> None:
    leave_segments(open_shared(retention=NOTHING, partitions=2), 0, 1)
    topic = open_shared()
    path.rename(path.with_name("elsewhere"))
    assert topic.retain() == []
    topic._retention.run_for_others()
    assert len(list((path.with_name("elsewhere") / "0000").glob("*.log"))) == 2


def test_pass_that_is_interrupted_while_it_lets_a_partition_go_leaves_no_file_open(
    open_shared: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_segments(open_shared(retention=NOTHING, partitions=2), 0, 3)
    topic = open_shared()
    topic.retain(dry_run=True)  # opens what looking at a partition needs
    topic._handles.look()  # opens the file of the turns
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as interrupting:
        interrupting.setattr("loglib.append.writer.Writer._settle", Mock(side_effect=[KeyboardInterrupt, None]))
        with pytest.raises(KeyboardInterrupt):
            topic.retain()
    assert os.listdir("/proc/self/fd") == before
    topic.append(b"y", partition=0, sync=True)


def test_partition_that_an_interrupted_pass_has_left_locked_is_let_go_by_the_next_one(
    open_shared: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_segments(open_shared(retention=NOTHING, partitions=2), 0, 3)
    topic = open_shared(wait=0.01)
    with monkeypatch.context() as interrupting:
        interrupting.setattr("loglib.append.writer.Writer.close", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            topic.retain()
    with pytest.raises(LockedError):
        topic.append(b"y", partition=0)
    topic.retain()
    topic.append(b"y", partition=0, sync=True)
    assert values_of(topic) == [b"y"]
    assert not dropped(topic)  # and goes on with its own writer
    topic.append(b"z", partition=0, sync=True)


def test_two_that_keep_house_do_not_wait_for_each_other(open_shared: Open, path: Path) -> None:
    leave_segments(open_shared(retention=NOTHING, partitions=2), 0, 1)
    topic = open_shared()
    with Directory.open(REAL, str(path)) as held:
        held.lock_for_a_moment("this test", advice="")
        assert topic.retain() == []
        look(topic)
        assert sizes(topic) == [2, 1]
    look(topic)
    assert sizes(topic) == [1, 1]


def test_files_that_somebody_has_put_in_place_meanwhile_are_not_cut_at_an_offset_of_the_old_ones(
    open_shared: Open, path: Path, tmp_path: Path
) -> None:
    class Restored(UnsyncedFiles):
        armed = False

        def try_lock(self, fd: int, name: str = "", *, shared: bool = False) -> bool:
            if self.armed:
                self.armed = False
                crash_copy(tmp_path / "backup", path / "0000")
                with open_shared() as other:
                    other.append(b"z" * 1000, partition=0, sync=True)
                    other.partition(0).roll()
            return super().try_lock(fd, name, shared=shared)

    with open_shared(retention=NOTHING) as topic:
        topic.append(b"x", sync=True)
    crash_copy(path / "0000", tmp_path / "backup")
    leave_segments(open_shared(), 0, 1)
    files = Restored()
    topic = open_shared(files=files)
    files.armed = True
    topic._retention.run_for_others()
    with Topic.open(path, mode="r") as reading:
        assert values_of(reading) == [b"x", b"z" * 1000]
        assert not reading.verify().damage
    assert dropped(open_shared()) == [0]


def test_segments_that_another_has_dropped_meanwhile_are_not_dropped_again(
    open_shared: Open, caplog: pytest.LogCaptureFixture
) -> None:
    class Overtaken(UnsyncedFiles):
        armed = False

        def try_lock(self, fd: int, name: str = "", *, shared: bool = False) -> bool:
            if self.armed:
                self.armed = False
                with open_shared() as other:
                    assert dropped(other) == [0, 0]
            return super().try_lock(fd, name, shared=shared)

    leave_segments(open_shared(retention=NOTHING), 0, 2)
    files = Overtaken()
    topic = open_shared(files=files)
    files.armed = True
    with caplog.at_level(logging.INFO, "loglib"):
        topic._retention.run_for_others()
    assert caplog.text.count("retention dropped 2 segments") == 1
    assert sizes(topic) == [1]


def test_process_that_goes_by_older_policies_drops_nothing_that_is_not_its_own(
    open_shared: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_segments(open_shared(retention=NOTHING, partitions=2), 0, 2)
    topic = open_shared()
    monkeypatch.setattr(LivePolicies, "_found", lambda _: None)  # it does not know them yet
    with open_shared(alter=True, retention=Retention(age=None)):
        pass
    assert topic.retain() == []
    look(topic)
    assert sizes(topic) == [3, 1]
    (path / "topic.json").write_text("?")
    look(topic)
    assert sizes(topic) == [3, 1]


def test_topic_is_deleted_only_after_a_running_pass_of_retention(
    slow_pass: tuple[Topic, threading.Event, threading.Event], path: Path
) -> None:
    topic, _, go_on = slow_pass
    topic.close()
    thread = threading.Thread(target=Topic.delete, args=(path,))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and path.exists()
    go_on.set()
    thread.join(60)
    assert not path.exists()


@pytest.fixture
def slow_pass(open_shared: Open) -> Iterator[tuple[Topic, threading.Event, threading.Event]]:
    """A topic that keeps house for partition 0 until it is told to go on."""
    files = SlowToUnlink()
    leave_segments(open_shared(retention=NOTHING, partitions=2), 0, 1)
    topic = open_shared(files=files)
    topic.partition(1)._access.writer()
    thread = threading.Thread(target=topic._retention.run_for_others)
    thread.start()
    assert files.inside.wait(60)
    yield topic, files.inside, files.go_on
    files.go_on.set()
    thread.join()


@pytest.mark.parametrize("who", ["the same topic", "another"])
def test_append_waits_for_the_one_that_keeps_house(
    who: str, open_shared: Open, slow_pass: tuple[Topic, threading.Event, threading.Event]
) -> None:
    topic, _, go_on = slow_pass
    topic.append(b"elsewhere", partition=1, sync=True)
    appending = topic if who == "the same topic" else open_shared()
    thread = threading.Thread(target=lambda: appending.append(b"y", partition=0, sync=True))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    go_on.set()
    thread.join(60)
    assert sorted(map(str, values_of(topic))) == ["b'elsewhere'", "b'y'"]


def test_append_that_waits_too_long_says_for_whom(
    open_shared: Open, slow_pass: tuple[Topic, threading.Event, threading.Event]
) -> None:
    with pytest.raises(LockedError, match=rf"held by pid {os.getpid()} .*it was waited for 0.05 s"):
        open_shared(wait=0.05).append(b"y", partition=0)


def test_append_to_any_partition_does_not_wait_for_one_that_keeps_house_and_was_stopped(
    open_shared: Open, slow_pass: tuple[Topic, threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_pass[0].partition(1)._access.close()
    monkeypatch.setattr("os.urandom", bytes)  # so that partition 0 is tried first
    monkeypatch.delattr(Directory, "lock_for_a_moment")
    assert open_shared().append(b"y").partition == 1


def test_append_to_any_partition_waits_once_when_all_are_taken(
    open_shared: Open, slow_pass: tuple[Topic, threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    take = Turns.take

    def noted(turns: Turns, place: Directory, *, wait_s: float, **rest: Any) -> bool:
        waits.append(wait_s)
        return take(turns, place, wait_s=wait_s, **rest)

    with slow_pass[0].partition(1)._access.writer().held():
        monkeypatch.setattr(Turns, "take", noted)
        with pytest.raises(LockedError, match="all 2 partitions are taken"):
            open_shared(wait=0.05).append(b"y")
    assert waits[:2] == [0.0, 0.0] and len(waits) == 3
    assert 0 < waits[2] <= 0.05


def test_locked_partition_is_refused_at_once_without_a_wait(open_shared: Open) -> None:
    holder = open_shared(partitions=2)
    with holder.partition(0)._access.writer().held(), pytest.raises(LockedError, match="0000"):
        open_shared(wait=0).append(b"y", partition=0)


# --- processes -----------------------------------------------------------------------------------------------

WRITER = """
    import sys, time
    from loglib import Retention, Topic

    topic = Topic.open(sys.argv[1], create=True, shared=True)
    for number in range(5):
        topic.append(b"%d" % number, partition=int(sys.argv[2]), sync=True)
        topic.partition(int(sys.argv[2])).roll()
    topic.append(b"last", partition=int(sys.argv[2]), sync=True)
    topic.append(b"lost", partition=int(sys.argv[2]))
    print("ready", flush=True)
    time.sleep(600)
"""


def test_retention_of_a_living_process_drops_the_old_segments_of_a_killed_one(path: Path) -> None:
    Topic.open(path, create=True, partitions=3, **QUIET | {"flush": MANUAL}).close()
    with start_python(WRITER, path, 0) as killed, start_python(WRITER, path, 2) as living:
        for each in (killed, living):
            assert each.stdout is not None and each.stdout.readline().strip() == "ready"
        killed.send_signal(signal.SIGKILL)  # before it can see the policy, and follow it
        killed.wait()
        with Topic.open(path, shared=True, alter=True, retention=NOTHING) as topic:
            topic.retain()
            assert sizes(topic) == [1, 1, 1], "the living one gives its partition up for a moment, or runs retention"
            assert values_of(topic.partition(0)) == [b"last"]
        with Topic.open(path, shared=True) as topic:
            assert topic.append(b"again", partition=0, sync=True)
            recovery = topic.partition(0).recovery
            assert recovery is not None and recovery.clean
            assert values_of(topic.partition(0)) == [b"last", b"again"]
            assert topic.append(b"y", partition=2, sync=True).partition == 2
        living.kill()
    with Topic.open(path, mode="r") as topic:
        assert not topic.verify().damage
