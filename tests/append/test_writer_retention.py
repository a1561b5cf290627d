"""Dropping segments, as far as the writer does it: the log start moves first, and never back."""

import errno
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from conftest import NOW, crash_copy, once_each, sound, values_of
from loglib import OffsetOutOfRangeError, Retention, Topic, testing
from loglib.log.index import SegmentIndex
from loglib.testing import RecordingFiles, UnsyncedFiles

Open = Callable[..., Topic]


def segments_of_one_record(topic: Topic, count: int, clock: Any = None, step: timedelta = timedelta(days=1)) -> None:
    for number in range(count):
        topic.partition(0).append(b"%d" % number, timestamp=NOW)
        topic.partition(0).flush()
        if clock is not None:
            clock.advance(step)
        topic.partition(0).roll()


def test_segment_may_be_filled_to_the_byte(open_topic: Open, path: Path) -> None:
    """`segment_bytes` is the most that a segment holds, and a batch that fills it does not need another."""
    value = b"x" * 2000
    with open_topic(path / "probe") as topic:
        topic.append(value, sync=True)
        size = topic.partition(0).high_watermark
    for limit, expected in ((3 * size - 1, [2, 2, 2]), (3 * size, [3, 3]), (3 * size + 1, [3, 3])):
        with open_topic(path / f"of-{limit}", segment_bytes=limit) as topic:
            for _ in range(6):
                topic.append(value, sync=True)
            assert [each.size_bytes for each in topic.partition(0).segments] == [count * size for count in expected]


def test_log_start_is_durable_before_the_first_file_goes(open_topic: Open) -> None:
    files = RecordingFiles()
    topic = open_topic(files=files, retention=Retention(age=None, bytes=0))
    segments_of_one_record(topic, 3)
    names = [os.path.basename(each.path) for each in topic.partition(0).segments[:3]]
    files.calls.clear()
    topic.retain()
    calls = once_each(files.named(), "pwritev", "datasync", "unlink", "fsync")
    removed = calls.index(("unlink", names[0]))
    assert calls[:2] == [("pwritev", "watermark"), ("datasync", "watermark")] and removed >= 2
    kept = {("pwritev", "start.header.tmp"), ("datasync", "start.header.tmp"), ("fsync", "0000")}
    assert {call for call in calls[:removed] if call[0] != "unlink"} == {*calls[:2], *kept}
    assert calls[removed:] == [*[("unlink", name) for name in names], ("fsync", "0000")]


def test_retention_that_dies_anywhere_leaves_no_gap(open_topic: Open, path: Path, tmp_path: Path) -> None:
    from loglib.testing import DyingFiles, Killed

    with open_topic(retention=Retention(age=None, bytes=0)) as topic:
        segments_of_one_record(topic, 3)
        topic.append(b"last")
    at = 0
    while True:
        at += 1
        copy = crash_copy(path, tmp_path / "copy")
        dying = DyingFiles(1 << 30)
        topic = testing.open_topic(copy, files=dying)
        dying.changes, dying.at = 0, at
        died = False
        try:
            topic.retain()
        except Killed:
            died = True
        image = crash_copy(copy, tmp_path / "image")
        dying.at = 1 << 30
        topic.close()
        with Topic.open(image, create=True) as recovered:
            assert values_of(recovered)[-1:] == [b"last"]
            sound(recovered.partition(0))
            start = recovered.partition(0).log_start_offset
            assert min(int(each.stem) for each in (image / "0000").glob("*.log")) == start
        if not died:
            break
    assert at >= 7


def test_dropping_nothing_or_too_much_does_nothing(open_topic: Open) -> None:
    topic = open_topic()
    segments_of_one_record(topic, 2)
    writer = topic.partition(0)._access.writer()
    assert writer.drop_before(0) == []
    assert writer.drop_before(10_000_000) == []
    assert len(writer.drop_before(topic.partition(0).segments[1].base_offset)) == 1


def test_listing_while_segments_are_dropped_does_not_move_the_log_start_back(open_topic: Open, path: Path) -> None:
    """It brought their bases back, and a pass that had decided earlier published its older start: no way to open."""
    listed: list[list[int]] = []

    class ListedMeanwhile(UnsyncedFiles):
        """Another thread lists the directory when the new log start is out and the first file is not yet gone."""

        def unlink(self, path: Any, **within: Any) -> None:
            if path.endswith(".log") and not listed:
                log = topic.partition(0)._access.log
                log.refresh()
                listed.append(log.index.bases())
            super().unlink(path, **within)

    topic = open_topic(files=ListedMeanwhile())
    segments_of_one_record(topic, 5)
    topic.append(b"last", sync=True)
    bases = [each.base_offset for each in topic.partition(0).segments]
    writer = topic.partition(0)._access.writer()
    assert len(writer.drop_before(bases[3])) == 3
    assert writer.drop_before(bases[1]) == []  # decided when the log began further back
    topic.partition(0)._access.log.refresh()
    assert topic.partition(0).log_start_offset == bases[3]
    assert [each.base_offset for each in topic.partition(0).segments] == bases[3:]
    assert values_of(topic) == values_of(topic, "-1h") == [b"3", b"4", b"last"]
    topic.close()
    with open_topic() as topic:
        assert topic.partition(0).log_start_offset == bases[3]
        assert values_of(topic) == [b"3", b"4", b"last"]
    assert listed == [bases]


def test_pass_that_decided_earlier_does_not_drop_less(open_topic: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the index says: the published log start is looked at where it is moved."""
    topic = open_topic()
    segments_of_one_record(topic, 4)
    bases = [each.base_offset for each in topic.partition(0).segments]
    writer = topic.partition(0)._access.writer()
    writer.drop_before(bases[2])
    monkeypatch.setattr(writer.disk, "_index", SegmentIndex(bases))
    assert writer.drop_before(bases[1]) == []
    assert topic.partition(0).log_start_offset == bases[2]


def test_pass_that_ended_half_way_is_finished_by_the_next(open_topic: Open, path: Path) -> None:
    """Its files stayed until the topic was opened again."""

    class FailingOnce(UnsyncedFiles):
        left = 1

        def unlink(self, path: Any, **within: Any) -> None:
            if path.endswith(".log"):
                self.left -= 1
                if self.left == -1:
                    raise OSError(errno.EIO, "not now")
            super().unlink(path, **within)

    topic = open_topic(files=FailingOnce())
    segments_of_one_record(topic, 4)
    bases = [each.base_offset for each in topic.partition(0).segments]
    with pytest.raises(OSError, match="not now"):
        topic.partition(0)._access.writer().drop_before(bases[2])
    assert topic.partition(0).log_start_offset == bases[2]
    assert values_of(topic) == [b"2", b"3"]
    topic.partition(0)._access.writer().drop_before(bases[3])
    assert sorted(int(each.stem) for each in (path / "0000").glob("*.log")) == bases[3:]


def test_segment_that_somebody_else_removed_does_not_stop_retention(open_topic: Open) -> None:
    topic = open_topic(retention=Retention(age=None, bytes=0))
    segments_of_one_record(topic, 2)
    segments = topic.partition(0).segments
    os.unlink(segments[0].path)
    assert len(topic.partition(0)._access.writer().drop_before(segments[2].base_offset)) == 2


def test_reading_what_retention_dropped_raises_with_the_range(open_topic: Open) -> None:
    topic = open_topic(retention=Retention(age=None, bytes=0))
    segments_of_one_record(topic, 3)
    topic.append(b"last", sync=True)
    topic.retain()
    start = topic.partition(0).log_start_offset
    with pytest.raises(OffsetOutOfRangeError) as raised:
        topic.read(0)
    assert (raised.value.log_start_offset, raised.value.high_watermark) == (
        start, topic.partition(0).high_watermark,
    )  # fmt: skip
    assert values_of(topic) == [b"last"]
