"""Recovery with a watermark that is lost, old, or contradicts the data."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from crashed_logs import closed_topic, mark_of, refuses_and_changes_nothing, set_mark, three_segments

from conftest import last_segment, values_of
from loglib import Topic
from loglib.format.header import HEADER_BYTES as BATCH_HEADER
from loglib.segment import HEADER_BYTES as SEGMENT_HEADER

Open = Callable[..., Topic]


@pytest.mark.parametrize("content", [None, b"", b"\0" * 8192, b"\xff" * 8192])
def test_lost_watermark_is_rebuilt_from_the_last_segment(
    content: bytes | None, open_topic: Open, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    three_segments(open_topic, path)
    watermark = path / "0000" / "watermark"
    watermark.unlink() if content is None else watermark.write_bytes(content)
    with caplog.at_level(logging.WARNING, "loglib"), Topic.open(path, create=True) as topic:
        assert values_of(topic) == [b"value 0", b"value 1", b"value 2"]
        recovery = topic.partition(0).recovery
        assert recovery is not None and recovery.watermark_lost and not recovery.clean
        topic.append(b"value 3")
    assert "rebuilt the watermark" in caplog.text
    with Topic.open(path) as topic:
        again = topic.partition(0).recovery
        assert again is not None and again.clean
        assert len(values_of(topic)) == 4


def test_lost_watermark_is_rebuilt_in_place_so_that_readers_of_it_go_on(open_topic: Open, path: Path) -> None:
    """A reader keeps the file open: a new file under the same name would leave it with the lost one for ever."""
    closed_topic(open_topic, records=2)
    with Topic.open(path, mode="r") as reading:
        follower = reading.follow("begin")
        assert len(follower.poll()) == 2
        (path / "0000" / "watermark").write_bytes(b"\0" * 8192)
        with open_topic() as topic:
            topic.append(b"new", sync=True)
            assert [each.value for each in follower.poll(timeout=30)] == [b"new"]


def test_lost_watermark_does_not_turn_rot_into_a_torn_tail(open_topic: Open, path: Path) -> None:
    closed_topic(open_topic)
    (path / "0000" / "watermark").unlink()
    segment = last_segment(path)
    content = bytearray(segment.read_bytes())
    content[SEGMENT_HEADER + BATCH_HEADER] ^= 1
    segment.write_bytes(content)
    refuses_and_changes_nothing(path)


def test_lost_watermark_leaves_alone_what_a_batch_proves_to_be_durable(open_topic: Open, path: Path) -> None:
    """Only the last flush has no batch behind it that says so, and is written again."""
    with open_topic() as topic:
        for value in (b"first", b"second", b"third"):
            last = topic.append(value, sync=True)
        end = topic.partition(0).high_watermark
    (path / "0000" / "watermark").unlink()
    with Topic.open(path, create=True) as topic:
        recovery = topic.partition(0).recovery
        assert recovery is not None and recovery.rewritten_bytes == end - last.offset


def test_watermark_ahead_of_the_data_is_corruption(open_topic: Open, path: Path) -> None:
    closed_topic(open_topic)
    mark = mark_of(path)
    set_mark(path, mark._replace(flushed_end=mark.flushed_end + 8, durable_end=mark.durable_end + 8))
    refuses_and_changes_nothing(path)


def test_watermark_inside_a_batch_is_corruption(open_topic: Open, path: Path) -> None:
    closed_topic(open_topic)
    mark = mark_of(path)
    set_mark(path, mark._replace(flushed_end=mark.flushed_end - 8, durable_end=mark.durable_end - 8))
    assert "ends at offset" in str(refuses_and_changes_nothing(path))


def test_stale_watermark_costs_a_rewrite_and_no_record(open_topic: Open, path: Path) -> None:
    """After a power cut the watermark may be older than the data that it once called durable."""
    with open_topic(batch_records=2) as topic:
        topic.append(b"a", sync=True)
        stale = mark_of(path)
        for value in (b"b", b"c"):
            topic.append(value, sync=True)
    set_mark(path, stale)
    with Topic.open(path, create=True) as topic:
        recovery = topic.partition(0).recovery
        assert recovery is not None and recovery.rewritten_bytes > 0
        assert values_of(topic) == [b"a", b"b", b"c"]


def test_watermark_from_before_a_roll_is_no_harm(open_topic: Open, path: Path) -> None:
    with open_topic() as topic:
        topic.append(b"a", sync=True)
        stale = mark_of(path)
        topic.partition(0).roll()
        topic.append(b"b", sync=True)
    set_mark(path, stale)
    with Topic.open(path, create=True) as topic:
        assert values_of(topic) == [b"a", b"b"]
