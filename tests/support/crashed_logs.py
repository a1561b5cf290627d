"""Logs as a crash has left them, for tests of recovery: their marks, their batches, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import crash_copy, last_segment, tree
from loglib import CorruptLogError, Topic
from loglib.format.header import parse_header
from loglib.format.watermark import Mark, encode_new, newest
from loglib.segment import HEADER_BYTES as SEGMENT_HEADER
from loglib.segment import Identity
from loglib.testing import UnsyncedFiles

Open = Callable[..., Topic]


def write_crashed(
    open_topic: Open, path: Path, copy: Path, *, flushed: int = 6, unflushed: int = 8, **policy: Any
) -> Path:
    """A topic killed with `flushed` records promised and `unflushed` written, two a batch; returns the copy."""
    topic = open_topic(batch_records=2, files=UnsyncedFiles(), **policy)
    for number in range(flushed):
        topic.append(b"flushed %d" % number, key=b"k")
    topic.flush()
    for number in range(unflushed + 1):  # the one too many stays in memory
        topic.append(b"written %d" % number, key=b"k")
    return crash_copy(path, copy)


def mark_of(path: Path, partition: int = 0) -> Mark:
    mark = newest((path / f"{partition:04d}" / "watermark").read_bytes(), identity_of(path, partition).salt)
    assert mark is not None
    return mark


def identity_of(path: Path, partition: int = 0) -> Identity:
    with Topic.open(path, mode="r") as topic:
        return Identity.of(topic.log_id, partition)


def set_mark(path: Path, mark: Mark) -> None:
    (path / "0000" / "watermark").write_bytes(encode_new(mark, identity_of(path).salt))


def batch_ends(path: Path, start: int, end: int) -> list[int]:
    """Where the batches in [start, end) of the only segment end, as offsets."""
    content, salt = last_segment(path).read_bytes(), identity_of(path).salt
    ends = []
    while start < end:
        start = parse_header(content, SEGMENT_HEADER + start, salt=salt, offset=start).next_offset
        ends.append(start)
    return ends


def refuses_and_changes_nothing(path: Path, **arguments: Any) -> CorruptLogError:
    before = tree(path)
    with pytest.raises(CorruptLogError) as raised:
        Topic.open(path, create=True, **arguments)
    assert tree(path) == before
    return raised.value


# --- a torn tail ---------------------------------------------------------------------------------


def end_of(path: Path) -> int:
    return last_segment(path).stat().st_size - SEGMENT_HEADER


# --- damage below the watermark --------------------------------------------------------------------


def closed_topic(open_topic: Open, *, records: int = 12, **policy: Any) -> None:
    with open_topic(batch_records=2, files=UnsyncedFiles(), **policy) as topic:
        for number in range(records):
            topic.append(b"value %d" % number, key=b"k")
            if number % 4 == 3:
                topic.flush()


def three_segments(open_topic: Open, path: Path, **policy: Any) -> list[Path]:
    with open_topic(files=UnsyncedFiles(), **policy) as topic:
        for number in range(3):
            topic.partition(0).append(b"value %d" % number)
            if number < 2:
                topic.partition(0).roll()
    return sorted((path / "0000").glob("*.log"))
