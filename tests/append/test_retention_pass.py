"""append/retention_pass.py: passes of retention cost nothing when nothing is due; limits below one segment."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import aged
import pytest
from aged import dropped
from clock_worlds import HOUR, Machine

from conftest import MANUAL, SECOND, Clock, SlowToUnlink, values_of
from loglib import Retention, StorageFullError, Topic, testing
from loglib.system.files import REAL
from loglib.testing import FaultyFiles, MemoryFiles, RecordingFiles, UnsyncedFiles

Open = Callable[..., Topic]

machine = aged.machine


# --- passes --------------------------------------------------------------------------------------------------


def test_roll_with_nothing_due_costs_the_same_with_ten_segments_as_with_hundreds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In lines of the library that are run, and in calls to the system."""
    monkeypatch.setattr("loglib.log.log.LOOK_S", float("inf"))  # a look by the time of day would be a call more
    policy = Retention(age=timedelta(days=7), bytes=1 << 40, keep_free=0.001)
    costs = []
    for count in (10, 300):
        files = RecordingFiles(MemoryFiles())
        lines = 0

        def counted(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
            nonlocal lines
            lines += event == "line"
            parts = Path(frame.f_code.co_filename).parts
            return counted if "loglib" in parts and "testing" not in parts else None

        with testing.open_topic(
            "/topic", files=files, clock=Machine(), retention=policy, flush=MANUAL, segment_age=None,
            segment_bytes=4096, batch_records=1,
        ) as topic:  # fmt: skip
            for _ in range(count):
                topic.append(b"x" * 3000)
            before = len(files.calls)
            tracing = sys.gettrace()
            sys.settrace(counted)
            try:
                topic.append(b"x" * 3000)
            finally:
                sys.settrace(tracing)
            costs.append((lines, [call.name for call in files.calls[before:]]))
            assert len(topic.partition(0).segments) == count
    (few, calls), (many, same_calls) = costs
    assert calls == same_calls and "listdir" not in calls and "statvfs" in calls
    assert 100 < few == many


def tight(free: int) -> type[UnsyncedFiles]:
    class Tight(UnsyncedFiles):
        def free_space(self, path: str) -> tuple[int, int]:
            return free, 10_000

    return Tight


def test_space_is_freed_by_the_oldest_segment_of_all_partitions(open_topic: Open, clock: Clock) -> None:
    policy = Retention(age=None, keep_free=0.11)
    topic = open_topic(retention=policy, files=tight(1000)(), partitions=3)
    for number in (2, 1, 0, 0, 1, 2):
        topic.append(b"x", partition=number, sync=True)
        topic.partition(number).roll()
        clock.now += SECOND
    explained = topic.retain(dry_run=True)
    assert topic.retain() == explained
    assert [each.partition for each in explained if each.drop] == [2]
    assert [len(each.segments) for each in topic.partitions] == [3, 3, 2]
    topic.partition(0).retain()
    assert [len(each.segments) for each in topic.partitions] == [3, 3, 2], "1 is to go next, and nobody asked for it"
    topic.append(b"x" * 100, partition=0, sync=True)
    topic.partition(0)._access.keep_house()
    assert [len(each.segments) for each in topic.partitions] == [3, 2, 2], "in the background all are seen to"


def test_failure_in_one_partition_leaves_the_others_their_retention(open_topic: Open) -> None:
    class NoRemoval(FaultyFiles):
        def before(self, call: Any) -> None:
            if "/0000/" in call.path and call.file.endswith(".log"):
                super().before(call)

    topic = open_topic(retention=Retention(age=None, bytes=0), files=NoRemoval("unlink"), partitions=2)
    for number in (0, 1):
        topic.append(b"x", partition=number, sync=True)
        topic.partition(number).roll()
    with pytest.raises(OSError, match="Input/output"):
        topic.retain()
    assert len(topic.partition(1).segments) == 1


def test_pass_that_fails_in_two_partitions_names_what_was_lost_in_both() -> None:
    files = MemoryFiles(capacity=1 << 20)
    with testing.open_topic(
        "/topic", files=files, retention=Retention(age=None, bytes=0), partitions=2, flush=MANUAL
    ) as topic:
        lost = []
        for partition in topic.partitions:
            partition.append(b"x", sync=True)
            partition.roll()
            lost.append(partition.append(b"x" * 800_000))
        fd = files.create("/others", 0o600)
        files.write_all(fd, [bytes(files.free_space("/")[0] - 4096)], 0)
        for partition in topic.partitions:
            with pytest.raises(StorageFullError) as caught:  # as the background thread does
                partition._access.writer().flush(background=True)
            partition._access.writer().raise_soon(caught.value)
        with pytest.raises(StorageFullError) as caught:
            topic.retain()
        assert [(each.partition, each.offsets.start) for each in caught.value.lost] == lost
        assert sum(each.drop for each in topic.retain()) == 2


def test_pass_that_no_caller_asked_for_is_skipped_while_another_runs(open_topic: Open) -> None:
    files = SlowToUnlink()
    topic = open_topic(retention=Retention(age=None, bytes=0), files=files, partitions=2)
    for number in (0, 1):
        topic.append(b"x", partition=number, sync=True)
        topic.partition(number).roll()
    thread = threading.Thread(target=topic.partition(0).retain)
    thread.start()
    assert files.inside.wait(60)
    topic.partition(1)._access.keep_house()
    assert len(topic.partition(1).segments) == 2
    files.go_on.set()
    thread.join()
    topic.partition(1)._access.keep_house()
    assert [len(each.segments) for each in topic.partitions] == [1, 1]
    after = threading.Thread(target=topic.partition(0).retain, daemon=True)
    after.start()
    after.join(60)
    assert not after.is_alive(), "the pass before has let the lock go"


def test_decisions_say_why_a_segment_goes_and_why_the_rest_stays(open_topic: Open) -> None:
    topic = open_topic(retention=Retention(age=None, bytes=300), files=UnsyncedFiles())
    for _ in range(4):
        topic.append(b"x", sync=True)
        topic.partition(0).roll()
    for decisions in (topic.retain(dry_run=True), topic.retain()):
        assert [each.drop for each in decisions] == [True, True, False, False, False]
        assert [each.reason.split(",")[0] for each in decisions[:2]] == [
            "the partition holds 576 bytes", "the partition holds 432 bytes"
        ]  # fmt: skip
        assert decisions[2].reason.startswith("within all limits at ")
        assert [each.reason for each in decisions[3:]] == ["an older segment stays"] * 2


def test_retention_of_a_shared_topic_takes_what_others_write_for_a_moment(open_topic: Open, machine: Machine) -> None:
    policy = Retention(age=timedelta(hours=2))
    first = open_topic(retention=policy, partitions=2, shared=True, clock=machine)
    second = open_topic(shared=True, clock=machine)
    assert len(first.retain()) == len(first.retain(dry_run=True)) == 2
    for number, topic in enumerate([first, second]):
        topic.append(b"x", partition=number, sync=True)
        topic.partition(number).roll()
    machine.true_us += 2 * HOUR + 1
    for topic in (first, second):
        assert [each.drop for each in topic.retain(dry_run=True)] == [True, False] * 2, "all is explained"
    assert [each.partition for each in first.retain() if each.drop] == [0, 1]
    assert [len(each.segments) for each in second.partitions] == [1, 1]
    second.append(b"y", partition=1, sync=True)
    assert [each.partition for each in second.retain()] == [0, 1], "it has seen what the other process has dropped"


def test_partition_that_another_process_has_written_meanwhile_is_seen_anew(open_topic: Open, machine: Machine) -> None:
    policy = Retention(age=timedelta(hours=2))
    topic = open_topic(retention=policy, shared=True, clock=machine)
    other = open_topic(shared=True, clock=machine)
    assert len(topic.retain(dry_run=True)) == 1
    other.append(b"x", sync=True)
    other.partition(0).roll()
    other.close()
    machine.restart()
    machine.true_us += HOUR
    topic.append(b"y", sync=True)
    machine.true_us += HOUR
    assert [each.age_us for each in topic.retain()] == [0, None], "the first look of this boot comes after the sealing"
    machine.true_us += 2 * HOUR + 1
    assert dropped(topic) == 1


def test_retention_in_a_reader_meets_no_files_that_retention_has_dropped(open_topic: Open, path: Path) -> None:
    topic = open_topic(retention=Retention(age=None, bytes=0), files=UnsyncedFiles())
    for number in range(3):
        topic.append(b"%d" % number, sync=True)
        topic.partition(0).roll()

    class Overtaken(UnsyncedFiles):
        def open(self, path: Any, flags: int, mode: int = 0o777, **within: Any) -> int:
            if path.endswith(".log"):
                topic.retain()
            return REAL.open(path, flags, mode, **within)

    with testing.open_topic(path, mode="r", files=Overtaken()) as reading:
        decisions = reading.retain(dry_run=True)
    assert not decisions[-1].drop


# --- limits below one segment --------------------------------------------------------------------------------

DISK = 8 << 20


@pytest.mark.parametrize("size", [20_000, 100_000, 1_500_000])
def test_limit_on_size_below_one_segment_filled_the_disk(size: int) -> None:
    files = MemoryFiles(capacity=DISK)
    for reopened in range(3):
        with testing.open_topic(
            "/topic", files=files, retention=Retention(age=None, bytes=2 << 20), flush=MANUAL
        ) as topic:
            for _ in range(4 * DISK // size):
                topic.append(b"x" * size, sync=not reopened)
            topic.flush()
            partition = topic.partition(0)
            kept = partition.high_watermark - partition.log_start_offset
            assert size <= kept <= (2 << 20) + (512 << 10) + max(size, 1 << 20)
            assert all(each.size_bytes <= max(size + 1000, 1 << 20) for each in partition.segments)
            assert len(partition.segments) <= 8, "no more than a small limit needs"
            assert 0 < len(values_of(topic)) <= kept // size


def test_limit_on_size_that_was_set_on_a_large_segment_holds_from_the_next_append() -> None:
    files = MemoryFiles()
    with testing.open_topic("/topic", files=files, retention=Retention(age=None), flush=MANUAL) as topic:
        topic.append_many([b"x" * 100_000] * 50)
        topic.flush()
        topic.alter(retention=Retention(age=None, bytes=1 << 20))
        assert dropped(topic) == 0
        topic.append(b"last", sync=True)
        assert values_of(topic) == [b"last"]


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("size", [20_000, 100_000])
def test_limit_on_free_space_below_one_segment_filled_the_disk(size: int, partitions: int) -> None:
    files = MemoryFiles(capacity=DISK)
    policy = Retention(age=None, keep_free=0.5)
    for reopened in range(3):
        with testing.open_topic(
            "/topic", files=files, retention=policy, partitions=partitions, flush=MANUAL, batch_bytes=1 << 17
        ) as topic:
            least = DISK
            for number in range(4 * DISK // size):
                topic.append(b"x" * size, partition=number % partitions, sync=not reopened)
                least = min(least, files.free_space("/topic")[0])
            assert least > DISK // 4
            topic.flush()
            topic.retain()
            assert files.free_space("/topic")[0] >= 0.5 * DISK
            assert sum(len(each.segments) for each in topic.partitions) <= 24
            assert len(values_of(topic)) * size > DISK // 8, "what there is room for is kept"


@pytest.mark.parametrize(
    "policy", [Retention(age=None, bytes=512 << 10), Retention(age=None, keep_free=0.4)], ids=["bytes", "keep_free"]
)
def test_threads_that_append_do_not_outrun_the_passes(policy: Retention) -> None:
    files = MemoryFiles(capacity=DISK)
    with testing.open_topic(
        "/topic", files=files, partitions=4, retention=policy, flush=MANUAL, batch_bytes=1 << 16
    ) as topic:

        def write(number: int) -> int:
            appends = (topic.append(b"x" * 20_000, partition=number) for _ in range(600))
            return min(files.free_space("/topic")[0] for _ in appends)

        with ThreadPoolExecutor(4) as threads:
            assert min(threads.map(write, range(4))) > DISK // 8
        topic.flush()
        assert values_of(topic)


def test_limit_on_free_space_that_was_set_on_a_large_segment_seals_it() -> None:
    files = MemoryFiles(capacity=DISK)
    with testing.open_topic("/topic", files=files, partitions=2, retention=Retention(age=None), flush=MANUAL) as topic:
        topic.append_many([b"x" * 100_000] * 60, partition=0)
        topic.append(b"x", partition=1, sync=True)
        topic.alter(retention=Retention(age=None, keep_free=0.5))
        assert not any(each.drop for each in topic.retain(dry_run=True)), "a dry run seals nothing"
        assert [each.partition for each in topic.retain() if each.drop] == [0]
        assert files.free_space("/topic")[0] >= 0.5 * DISK
        assert [len(each.segments) for each in topic.partitions] == [1, 1]
        assert values_of(topic) == [b"x"], "a segment of a few bytes is not worth sealing"
        topic.alter(retention=Retention(age=None))
        topic.append_many([b"x" * 1000] * 3000, partition=1)
        topic.flush()
        assert len(topic.partition(1).segments) == 1


def test_space_that_others_have_taken_makes_no_storm_of_segments() -> None:
    files = MemoryFiles(capacity=DISK)
    fd = files.create("/others", 0o600)
    files.write_all(fd, [bytes(DISK - (1 << 20))], 0)
    with testing.open_topic("/topic", files=files, retention=Retention(age=None, keep_free=0.5), flush=MANUAL) as topic:
        partition, rolls = topic.partition(0), 0
        for _ in range(500):
            topic.append(b"x" * 1000, sync=True)
            before = partition.segments[-1].base_offset
            topic.retain()
            partition._access.keep_house()
            rolls += partition.segments[-1].base_offset > before
        assert 0 < rolls <= 520_000 // (64 << 10) + 1


def test_segment_that_has_no_room_for_a_successor_stays() -> None:
    files = MemoryFiles(capacity=1 << 20)
    with testing.open_topic("/topic", files=files, retention=Retention(age=None, keep_free=0.5), flush=MANUAL) as topic:
        topic.append(b"x" * (files.free_space("/topic")[0] - 400), sync=True)
        topic.retain()
        assert len(topic.partition(0).segments) == 1 and len(values_of(topic)) == 1


def test_records_that_are_lost_when_a_segment_is_sealed_for_space_are_named() -> None:
    files = MemoryFiles(capacity=1 << 20)
    policy = Retention(age=None, keep_free=0.5)
    with testing.open_topic("/topic", files=files, retention=policy, partitions=2, flush=MANUAL) as topic:
        kept = [topic.append(b"x" * 200_000, partition=number, sync=True) for number in (0, 1)]
        lost = [topic.append(b"y" * 300_000, partition=number) for number in (0, 1)]
        fd = files.create("/others", 0o600)
        files.write_all(fd, [bytes(files.free_space("/")[0] - 100)], 0)
        with pytest.raises(StorageFullError) as caught:
            topic.retain()
        assert {(each.partition, each.offsets.start) for each in caught.value.lost} == {*lost}
        topic.flush()
        assert [(each.partition, each.offset) for each in topic.read()] == kept
