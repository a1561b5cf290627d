"""When a segment is rolled, and what stands after a roll that fails."""

import errno
import itertools
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from clock_worlds import Machine

from conftest import SECOND, crash_copy, sound, values_of
from loglib import LogError, StorageIOError, Topic, WriterFailedError
from loglib.segment import HEADER_BYTES
from loglib.testing import CHANGES, FaultyFiles, RecordingFiles

Open = Callable[..., Topic]


def test_segments_roll_by_size_and_their_bases_are_contiguous(open_topic: Open, path: Path) -> None:
    with open_topic(segment_bytes=4096, batch_records=4) as topic:
        for number in range(200):
            topic.append(b"%05d" % number * 10)
    sizes = {int(each.stem): each.stat().st_size - HEADER_BYTES for each in sorted((path / "0000").glob("*.log"))}
    bases = list(sizes)
    assert len(bases) > 3
    assert all(base + sizes[base] == after for base, after in itertools.pairwise(bases))
    assert all(size <= 4096 for size in sizes.values())
    with open_topic() as topic:
        assert sound(topic.partition(0)).records == 200
        assert len(topic.partition(0).segments) == len(bases)


def test_batch_larger_than_a_segment_gets_a_segment_of_its_own(open_topic: Open) -> None:
    topic = open_topic(segment_bytes=4096)
    for _ in range(3):
        topic.append(b"x" * 10_000)
        topic.flush()
    assert len(topic.partition(0).segments) == 3
    assert sound(topic.partition(0)).records == 3


def test_segment_rolls_when_its_first_record_is_old(open_topic: Open, clock: Any) -> None:
    topic = open_topic(segment_age=timedelta(hours=1))
    topic.append(b"a")
    topic.flush()
    clock.advance(timedelta(minutes=59))
    topic.append(b"b")
    topic.flush()
    assert len(topic.partition(0).segments) == 1
    clock.advance(timedelta(minutes=1))
    topic.append(b"c")
    topic.flush()
    assert [s.sealed for s in topic.partition(0).segments] == [True, False]
    assert values_of(topic) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("jump", [timedelta(days=400), -timedelta(days=400)], ids=["forward", "back"])
@pytest.mark.parametrize("reopened", [False, True])
def test_jump_of_the_wall_clock_neither_rolls_a_young_segment_nor_keeps_an_old_one(
    jump: timedelta, reopened: bool, open_topic: Open
) -> None:
    machine = Machine()
    topic = open_topic(segment_age=timedelta(hours=1), clock=machine)
    topic.append(b"first", sync=True)
    topic.partition(0).roll()  # so that the header says when, by both clocks
    topic.append(b"a", sync=True)
    machine.error_us = jump // timedelta(microseconds=1)
    if reopened:
        topic.close()
        topic = open_topic(clock=machine)
    machine.true_us += 59 * 60 * SECOND
    topic.append(b"b", sync=True)
    assert len(topic.partition(0).segments) == 2
    machine.true_us += 60 * SECOND
    topic.append(b"c", sync=True)
    assert len(topic.partition(0).segments) == 3


def test_age_of_a_segment_counts_on_after_reopening(open_topic: Open, clock: Any) -> None:
    with open_topic(segment_age=timedelta(hours=1)) as topic:
        topic.append(b"a")
    clock.advance(timedelta(hours=2))
    with open_topic() as topic:
        topic.append(b"b")
        topic.flush()
        assert len(topic.partition(0).segments) == 2


def test_rolling_an_empty_segment_does_nothing(open_topic: Open) -> None:
    topic = open_topic()
    assert not topic.partition(0).roll()
    topic.append(b"x")
    assert topic.partition(0).roll()
    assert not topic.partition(0).roll()
    assert len(topic.partition(0).segments) == 2


def test_each_writer_has_a_higher_epoch(open_topic: Open, path: Path, tmp_path: Path) -> None:
    epochs = []
    for number in range(3):
        with open_topic() as topic:
            topic.append(b"%d" % number)
    topic = open_topic()
    topic.append(b"and one that is killed")
    topic.flush()
    with open_topic(crash_copy(path, tmp_path / "after")) as after:
        after.append(b"the next")
        after.flush()
        epochs = [batch._header.writer_epoch for batch in after.batches()]
    assert epochs == sorted(set(epochs)), "of two batches for one place the later writer's must be known"


def test_roll_makes_everything_durable_in_order(open_topic: Open) -> None:
    files = RecordingFiles()
    topic = open_topic(files=files)
    topic.append(b"x")
    files.calls.clear()
    topic.partition(0).roll()
    old, new = "00000000000000000000.log", f"{topic.partition(0).log_end_offset:020d}.log"
    assert files.named(*CHANGES, "close") == [
        ("pwritev", old), ("datasync", old), ("pwritev", "watermark"), ("datasync", "watermark"),
        ("create", new + ".tmp"), ("pwritev", new + ".tmp"), ("datasync", new + ".tmp"),
        ("rename", new + ".tmp"), ("fsync", "0000"), ("close", old),
        ("pwritev", "watermark"),  # so that copies see the boundary
    ]  # fmt: skip


def test_failed_roll_leaves_no_file_that_later_batches_run_into(open_topic: Open, path: Path) -> None:
    """The new segment had its name, then syncing the directory failed; smaller batches still fit the old one."""
    files = FaultyFiles("fsync", armed=False)
    topic = open_topic(files=files, segment_bytes=4096)
    topic.append(b"a" * 3000, sync=True)
    files.armed = True
    topic.append(b"b" * 3000)
    with pytest.raises(StorageIOError):
        topic.flush()
    assert files.failed == 1
    topic.append(b"c" * 10, sync=True)
    assert values_of(topic) == [b"a" * 3000, b"c" * 10]
    topic.append(b"d", sync=True)
    topic.close()
    with open_topic() as topic:
        assert sound(topic.partition(0)).records == 3


@pytest.mark.parametrize("name", ["create", "pwritev", "datasync", "rename", "fsync", "ftruncate", "fstat"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_roll_that_fails_at_any_call_loses_nothing_flushed(name: str, error: int, open_topic: Open, path: Path) -> None:
    for at in range(1, 6):
        if path.exists():
            shutil.rmtree(path)
        files = FaultyFiles(name, at=at, error=error, armed=False)
        topic = open_topic(files=files)
        topic.append(b"a", sync=True)
        files.armed = True
        try:
            topic.partition(0).roll()
        except LogError:
            assert files.failed
        files.armed = False
        expected = [b"a"]
        try:
            topic.append(b"b", sync=True)
            expected.append(b"b")
        except WriterFailedError:
            with pytest.raises(WriterFailedError):
                topic.close()
        topic.close()
        with open_topic() as topic:
            assert values_of(topic) == expected, (name, at)
            sound(topic.partition(0))


def test_roll_that_cannot_read_the_producers_costs_the_failing_records_only(open_topic: Open) -> None:
    with open_topic() as topic:
        topic.partition(0).append_many([b"a"], producer=("p", 1))
    files = FaultyFiles("pread", armed=False)
    topic = open_topic(files=files)
    topic.append(b"lost")
    files.armed = True
    with pytest.raises(StorageIOError, match="reading"):
        topic.partition(0).roll()
    topic.append(b"b", sync=True)
    assert topic.partition(0).roll()
    assert [value for value in values_of(topic) if value != b"lost"] == [b"a", b"b"]


def test_segment_that_is_not_old_enough_is_not_rolled(open_topic: Open, clock: Any) -> None:
    topic = open_topic()
    writer = topic.partition(0)._access.writer()
    topic.append(b"x")
    assert not writer.roll(older_than_us=10 * SECOND)
    clock.now += 10 * SECOND
    assert writer.roll(older_than_us=10 * SECOND)
