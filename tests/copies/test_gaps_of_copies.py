"""A declared gap travels with what it is about: a copy keeps it while its own bytes are damaged, and no longer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from spoilt import spoil_batch

import loglib
from conftest import values_of
from loglib import Topic
from loglib.copies import mirror, snapshot
from loglib.copies.follower_log import FollowerLog
from loglib.log.gaps import NAME, read_gaps
from loglib.segment import HEADER_BYTES, Identity
from loglib.system.files import REAL

OpenTopic = Callable[..., Topic]


@pytest.fixture
def whole(open_topic: OpenTopic, tmp_path: Path) -> Path:
    """A closed topic of two segments with three batches each, of which there is a whole snapshot."""
    topic = open_topic(partitions=1)
    for number in range(6):
        topic.append(b"%d" % number, sync=True)
        if number == 2:
            topic.partition(0).roll()
    topic.close()
    snapshot(topic.path, tmp_path / "whole", links=False)
    return Path(topic.path)


def read(path: Path) -> list[bytes]:
    with Topic.open(path, mode="r") as topic:
        assert topic.verify().damage == ()
        return values_of(topic)


def declared(path: Path) -> list[range]:
    with Topic.open(path, mode="r") as topic:
        gaps = read_gaps(REAL, str(path / "0000"), Identity.of(topic.log_id, 0))
    return [range(gap.start, gap.end) for gap in gaps]


def test_copy_with_a_gap_whose_source_is_healed_declares_it_until_it_is_healed(
    whole: Path, to: Path, tmp_path: Path
) -> None:
    lost = spoil_batch(whole, number=0)
    loglib.repair(whole)
    mirror(whole, to)
    loglib.copies.heal(whole, [tmp_path / "whole"])
    later = spoil_batch(whole, number=1)
    loglib.repair(whole)
    mirror(whole, to)
    assert declared(to) == [lost, later]  # of the second one the copy has whole bytes
    assert read(to) == [b"0", b"2", b"3", b"4", b"5"]
    loglib.copies.heal(whole, [tmp_path / "whole"])
    loglib.copies.heal(to, [whole])
    mirror(whole, to)
    assert declared(to) == [] and read(to) == read(whole)


def test_gap_of_which_the_copy_has_whole_bytes_goes_with_that_of_the_source(
    whole: Path, to: Path, tmp_path: Path
) -> None:
    mirror(whole, to)
    lost = spoil_batch(whole, number=1)
    loglib.repair(whole)
    mirror(whole, to)
    assert declared(to) == [lost]
    loglib.copies.heal(whole, [tmp_path / "whole"])
    mirror(whole, to)
    assert declared(to) == [] and read(to) == read(whole)


def test_copy_whose_own_list_of_gaps_is_damaged_takes_that_of_its_source(whole: Path, to: Path) -> None:
    lost = spoil_batch(whole, number=0)
    loglib.repair(whole)
    mirror(whole, to)
    (to / "0000" / NAME).write_bytes(b"{}")
    mirror(whole, to)
    assert declared(to) == [lost]


def test_file_that_is_too_short_is_not_whole(whole: Path) -> None:
    with Topic.open(whole, mode="r") as topic:
        segment, identity = topic.partition(0).segments[-1], Identity.of(topic.log_id, 0)
    log = FollowerLog(REAL, str(whole / "0000"), identity, 0o644)
    assert log.is_whole(0, segment.end_offset)
    os.truncate(segment.path, HEADER_BYTES + 8)
    assert not log.is_whole(segment.base_offset, segment.end_offset)
    os.truncate(segment.path, HEADER_BYTES)
    assert not log.is_whole(segment.base_offset, segment.end_offset)
    log.close()
