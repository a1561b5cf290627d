"""A topic against plain lists: whatever is called in whatever order, readers see what was appended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from builders import calm
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from model_ledger import Disk
from topic_machine import TopicMachine

from conftest import QUIET, Clock, crash_copy
from loglib import OffsetOutOfRangeError, testing
from loglib.format.watermark import NAME, SECOND_SLOT


def test_topic_behaves_like_lists() -> None:
    run_state_machine_as_test(TopicMachine, settings=settings(calm, max_examples=25, stateful_step_count=30))


@pytest.mark.slow
def test_topic_behaves_like_lists_for_longer() -> None:
    run_state_machine_as_test(TopicMachine, settings=settings(calm, max_examples=80, stateful_step_count=40))


def test_seek_of_one_partition_keeps_what_was_read_ahead_of_another(path: Path, clock: Clock) -> None:
    """A reader that retention had overtaken in two partitions could not seek in one, and lost records of a third."""
    with testing.open_topic(path, partitions=3, clock=clock, **QUIET) as topic:
        topic.append_many([b"1", b"2", b"3"], partition=2)
        topic.flush()
        reader = topic.follow("begin", timeout=0)
        assert [record.value for record in reader.poll(max_records=1)] == [b"1"]
        for partition in topic.partitions[:2]:
            partition.append(b"dropped")
            partition.roll()
            partition._access.writer().drop_before(partition.high_watermark)
        before = reader.tell()
        reader.seek({0: "begin"})
        assert reader.tell() == before | {0: topic.partition(0).log_start_offset}
        reader.seek({1: "begin"})
        assert [record.value for record in reader] == [b"2", b"3"]


def test_poll_that_meets_an_overtaken_partition_loses_none_of_the_others_records(path: Path, clock: Clock) -> None:
    with testing.open_topic(path, partitions=2, clock=clock, **QUIET) as topic:
        topic.append(b"kept", partition=0)
        topic.flush()
        reader = topic.follow("begin")
        overtaken = topic.partition(1)
        overtaken.append(b"dropped")
        overtaken.roll()
        overtaken._access.writer().drop_before(overtaken.high_watermark)
        assert [record.value for record in reader.poll(max_records=9)] == [b"kept"]
        with pytest.raises(OffsetOutOfRangeError):
            reader.poll(max_records=9)


def test_torn_watermark_slot_after_retention_is_no_missing_segment(path: Path, clock: Clock) -> None:
    """The other slot still had the log start from before: the partition did not open again."""
    disk = Disk()
    with testing.open_topic(path, clock=clock, files=disk, **QUIET) as topic:
        partition = topic.partition(0)
        partition.append(b"dropped")
        partition.roll()
        partition._access.writer().drop_before(partition.high_watermark)
        synced = disk.synced[os.path.join(partition.path, NAME)]
        for number, torn in enumerate([slice(0, SECOND_SLOT), slice(SECOND_SLOT, None)]):
            copy = crash_copy(path, path.parent / str(number))
            content = bytearray(synced)
            content[torn] = bytes(len(content[torn]))
            (copy / "0000" / NAME).write_bytes(content)
            testing.open_topic(copy, clock=clock).close()
