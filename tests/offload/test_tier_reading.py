"""Reading uploaded segments: by themselves, and as the past of a topic, as one range of offsets without a seam."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from builders import spoil
from tiered import bytes_of, records, seal

from conftest import NOW
from loglib import (
    ConfigConflictError,
    CorruptLogError,
    LogError,
    OffsetOutOfRangeError,
    ReadOnlyError,
    Retention,
    Topic,
    testing,
)
from loglib.config.times import to_datetime
from loglib.offload import tier

Open = Callable[..., Topic]


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "tier" / "topic"


def drop(topic: Topic, segments: int, partition: int = 0) -> None:
    """Drop the oldest segments, as retention does."""
    part = topic.partition(partition)
    part.delete_before(part.segments[segments].base_offset)


# --- a place by itself -----------------------------------------------------------------------------------------------


def test_a_place_reads_as_the_log_did(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic(partitions=2, compression="zlib")
    seal(topic, 3, partitions=(0, 1))
    made = tier(topic, to)
    expected = records(topic)
    shutil.rmtree(path)
    with Topic.open(to, mode="r") as place:
        assert records(place) == expected
        assert place.name == "topic" and place.config.compression == "zlib"
        report = place.verify()
        assert report.damage == () and report.records == len(expected) and report.segments == 6
        assert place.arrow(columns=["offset", "value"]).read_all().num_rows == len(expected)
        assert sum(len(batch) for batch in place.batches()) == len(expected)
        middle = expected[7]
        assert next(iter(place.partition(middle.partition).read(middle.offset))) == middle
        assert place.partition(1).high_watermark == made.ends[1] and place.partition(1).log_start_offset == 0
        assert records(pickle.loads(pickle.dumps(place))) == expected
        assert place.groups() == [] and place.stats().partitions[0].high_watermark == made.ends[0]
        with pytest.raises(OffsetOutOfRangeError):
            place.partition(0).read(made.ends[0] + 1)
        with pytest.raises(ReadOnlyError):
            place.append(b"x")


def test_a_reader_that_follows_a_place_ends_at_its_end(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    seal(topic, 2)
    tier(topic, to)
    expected = records(topic)
    with Topic.open(to, mode="r") as place:
        seal(topic, 1)
        tier(topic, to)
        assert list(place.follow("begin")) == list(place.partition(0).follow("begin")) == expected
        assert list(place.follow()) == []
    with Topic.open(to, mode="r") as place:
        assert records(place) == records(topic), "a later opening sees what was uploaded since"


def test_only_what_a_manifest_names_counts(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    seal(topic, 2)
    tier(topic, to)
    expected = records(topic)
    seal(topic, 1)
    unnamed = list(bytes_of(path))[2]
    (to / unnamed).write_bytes((path / unnamed).read_bytes()[:-7])
    with Topic.open(to, mode="r") as place:
        assert records(place) == expected and place.verify().damage == ()
        assert len(place.partition(0).segments) == 2


def test_damage_in_a_place_is_reported(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    seal(topic, 3)
    tier(topic, to)
    whole = records(topic)
    names = sorted(to.glob("0000/*.log"))
    spoil(names[1], 4096 + 150)
    with Topic.open(to, mode="r") as place:
        assert [each.path for each in place.verify().damage] == [str(names[1])]
        with pytest.raises(CorruptLogError, match=names[1].name):
            list(place.read())
        reader = place.read(on_damage="skip")
        assert 0 < len(list(reader)) < len(whole) and reader.gaps
    names[1].unlink()
    with Topic.open(to, mode="r") as place, pytest.raises(CorruptLogError, match=names[1].name):
        list(place.read())


def test_wrong_arguments_are_refused(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    seal(topic)
    tier(topic, to)
    with pytest.raises(ValueError, match="tier= is for reading"):
        Topic.open(path, create=True, tier=to)
    with pytest.raises(ValueError, match="has uploaded segments, and no live tail"):
        Topic.open(to, mode="r", tier=to)
    with pytest.raises(ValueError, match="donors are for a topic's directory"):
        Topic.open(to, mode="r", donors=[path])
    with pytest.raises(ValueError, match="only read; open it with mode='r'"):
        Topic.open("s3://key:secret@bucket/topic", create=True)
    with pytest.raises(FileNotFoundError, match="no uploaded segments here"):
        Topic.open(path, mode="r", tier=path)
    with pytest.raises(ConfigConflictError):
        Topic.open(to, mode="r", partitions=3)


# --- past and tail ---------------------------------------------------------------------------------------------------


def test_past_and_tail_are_one_range_of_offsets(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic(partitions=2)
    seal(topic, 4, partitions=(0, 1))
    topic.append(b"live", partition=0, sync=True)
    expected = records(topic)
    tier(topic, to)
    drop(topic, 3, 0)
    drop(topic, 1, 1)
    with Topic.open(path, mode="r") as alone:
        assert len(records(alone)) < len(expected)
    with Topic.open(path, mode="r", tier=to) as both:
        assert records(both) == expected
        assert both.partition(0).log_start_offset == 0
        assert both.verify().damage == () and both.verify().records == len(expected)
        assert both.arrow().read_all().num_rows == len(expected)
        assert both.partition(0).segments[0].base_offset == 0
        assert records(pickle.loads(pickle.dumps(both))) == expected
        at = expected[12]
        assert next(iter(both.partition(at.partition).read(at.offset))) == at
        assert next(iter(both.read(to_datetime(NOW)))).offset == 0


def test_range_that_ends_in_the_place_is_read(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    seal(topic, 4)
    expected = records(topic)
    tier(topic, to)
    drop(topic, 3, 0)
    with Topic.open(path, mode="r", tier=to) as both:
        assert list(both.partition(0).read(expected[1].offset, expected[3].offset)) == expected[1:3]


def test_a_follower_reads_the_past_and_goes_on_in_the_tail(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    seal(topic, 3)
    tier(topic, to)
    drop(topic, 2)
    with Topic.open(path, mode="r", tier=to) as both:
        follower = both.follow("begin", timeout=5)
        for number in range(15):
            [record] = follower.poll(max_records=1)
            assert record.value is not None and record.value[:3] == b"0-%d" % (number % 5)
        assert follower.poll() == []
        assert both.partition(0)._access.log.next_mark() is None
        for value in (b"a", b"b"):
            topic.append(value, sync=True)
            news = both.partition(0)._access.log.next_mark()
            assert news is None or news.log_start_offset == 0
            assert [each.value for each in follower.poll(timeout=5)] == [value]
        seal(topic, 1)
        assert len(follower.poll(max_records=5, timeout=5)) == 5


def test_what_retention_drops_in_between_is_read_on_from_the_place(open_topic: Open, path: Path, to: Path) -> None:
    """The reader has opened both when a segment is uploaded and dropped, in front of it and under it."""
    topic = open_topic()
    seal(topic, 2)
    tier(topic, to)
    seal(topic, 4)
    expected = records(topic)
    with Topic.open(path, mode="r", tier=to) as both:
        reader = both.read()
        first = reader.poll(max_records=12)  # in the third segment, which is not yet in the place
        tier(topic, to)
        drop(topic, 5)
        assert first + list(reader) == expected
        assert records(both) == expected
        assert both.partition(0).segments[0].base_offset == 0


def test_a_group_takes_the_past_from_the_place(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    seal(topic, 3)
    topic.append(b"live", sync=True)
    expected = records(topic)
    tier(topic, to)
    drop(topic, 3)
    with Topic.open(path, mode="r", tier=to) as both, both.group("etl") as group:
        assert list(group.follow(timeout=0)) == expected
        group.commit()
        assert all(lag.bytes == 0 for lag in group.lag().values())


def test_producers_of_dropped_segments_are_found_in_the_place(
    open_topic: Open, path: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.segment.MAX_PRODUCERS", 1)
    topic = open_topic()
    for each in range(4):
        topic.append(b"x", producer=(f"p{each}", 1), sync=True)
    seal(topic, 2)
    tier(topic, to)
    drop(topic, 2)
    assert list(to.glob("0000/*.producers"))
    with Topic.open(path, mode="r", tier=to) as both:
        assert both.verify().damage == ()


def test_transfer_sends_the_past_as_well(open_topic: Open, path: Path, tmp_path: Path, to: Path) -> None:
    topic = open_topic()
    seal(topic, 2)
    tier(topic, to)
    expected = [each.value for each in records(topic)]
    drop(topic, 1)
    with Topic.open(path, mode="r", tier=to) as both, open_topic(tmp_path / "copy") as copy:
        offset = 0
        while offset < both.partition(0).high_watermark:
            with open(tmp_path / "frame", "wb") as frame:
                offset = both.partition(0).transfer(frame.fileno(), offset)
            with open(tmp_path / "frame", "rb") as frame:
                while copy.partition(0).receive(frame) is not None:
                    continue
        copy.flush()
        assert [each.value for each in copy.read()] == expected


def test_a_gap_between_place_and_directory_is_an_error(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    seal(topic, 1)
    tier(topic, to)
    seal(topic, 2)
    with Topic.open(path, mode="r", tier=to) as opened:
        drop(topic, 2)
        assert opened.partition(0).log_start_offset == topic.partition(0).log_start_offset
        with pytest.raises(OffsetOutOfRangeError):
            opened.partition(0).read(0)
    with pytest.raises(LogError, match="is too old: .* what lies between is missing"):
        Topic.open(path, mode="r", tier=to)


def test_a_place_that_begins_later_than_the_directory_adds_nothing(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic(partitions=2)
    seal(topic, 2)
    backup = path.parent / "backup" / "topic"
    shutil.copytree(path, backup)
    drop(topic, 1)
    tier(topic, to)
    with Topic.open(backup, mode="r", tier=to) as both, Topic.open(backup, mode="r") as alone:
        assert records(both) == records(alone) and both.partition(0).log_start_offset == 0


def test_another_log_and_another_history_are_refused(open_topic: Open, path: Path, tmp_path: Path, to: Path) -> None:
    topic = open_topic()
    seal(topic, 1)
    topic.close()
    backup = tmp_path / "backup" / "topic"
    shutil.copytree(path, backup)
    topic = open_topic()
    seal(topic, 2)
    tier(topic, to)
    open_topic(tmp_path / "other").close()
    with pytest.raises(LogError, match="has the segments of another log"):
        Topic.open(tmp_path / "other", mode="r", tier=to)
    with testing.open_topic(backup, clock=lambda: NOW + 5) as restored:
        seal(restored, 2)
        drop(restored, 2)
    with pytest.raises(LogError, match="has another history than"):
        Topic.open(backup, mode="r", tier=to)


def test_a_missing_segment_that_no_place_has_is_damage(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    seal(topic, 1)
    tier(topic, to)
    seal(topic, 2)
    os.unlink(topic.partition(0).segments[2].path)
    with Topic.open(path, mode="r", tier=to) as both, pytest.raises(CorruptLogError, match="the end of the file"):
        list(both.read())


def test_a_segment_that_is_uploaded_and_dropped_before_it_is_opened_is_found(
    open_topic: Open, path: Path, to: Path
) -> None:
    topic = open_topic()
    seal(topic, 1)
    tier(topic, to)
    seal(topic, 3)
    uploaded, lost = (topic.partition(0).segments[number].path for number in (1, 3))
    with Topic.open(path, mode="r", tier=to) as both:
        files = both._files
        os.rename(lost, f"{lost}.aside")
        with pytest.raises(FileNotFoundError):
            files.open_read(lost)
        os.rename(f"{lost}.aside", lost)
        content = Path(uploaded).read_bytes()
        tier(topic, to)
        drop(topic, 2)
        assert files.read_whole(uploaded, 1 << 20) == content


def test_files_of_a_topic_with_a_place_are_closed(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    seal(topic, 3)
    tier(topic, to)
    drop(topic, 2)
    with Topic.open(path, mode="r", tier=to) as both:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            assert len(records(both)) == 15
        assert len(os.listdir("/proc/self/fd")) <= before + 1  # the watermark stays open
        assert both._files._elsewhere == {}  # type: ignore[attr-defined]


# --- retention -------------------------------------------------------------------------------------------------------


def due_at_once(to: Path | str, grace: timedelta = timedelta(0)) -> Retention:
    return Retention(age=None, bytes=0, archive=to, archive_grace=grace)


def drops(topic: Topic) -> list[bool]:
    return [each.drop for each in topic.retain()]


def test_retention_drops_only_what_the_place_has(
    open_topic: Open, path: Path, to: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = open_topic()
    seal(topic, 3)
    tier(topic, to)
    topic.alter(retention=due_at_once(to, timedelta(minutes=5)))
    assert drops(topic) == [False] * 4, "within the grace time"
    topic.alter(retention=due_at_once("../tier/topic"))
    assert drops(topic) == [False] * 4, "added at this very moment"
    topic._clock.advance(timedelta(seconds=1))  # type: ignore[attr-defined]
    seal(topic, 1)
    [*dropped, held, last] = topic.retain()
    assert [each.drop for each in dropped] == [True] * 3 and not held.drop and not last.drop
    assert held.held_by == str(to)
    assert topic.partition(0).log_start_offset == held.base_offset
    topic._clock.advance(timedelta(seconds=1))  # type: ignore[attr-defined]
    tier(topic, to)
    topic._clock.advance(timedelta(seconds=1))  # type: ignore[attr-defined]
    assert drops(topic) == [True, False]
    assert not caplog.records


@pytest.mark.parametrize("wrong", ["gone", "short", "unreadable", "damaged", "other log", "other history"])
def test_what_the_place_does_not_have_safely_stays(
    open_topic: Open, path: Path, tmp_path: Path, to: Path, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = open_topic(partitions=2)
    seal(topic, 1, partitions=(0, 1))
    if wrong == "other history":
        topic.close()
        backup = tmp_path / "backup" / "topic"
        shutil.copytree(path, backup)
        with testing.open_topic(backup, clock=lambda: NOW + 5) as other:
            seal(other, 2)
            tier(other, to)
        topic = open_topic()
    seal(topic, 2)
    if wrong == "other log":
        other = open_topic(tmp_path / "other")
        seal(other)
        tier(other, to)
    elif wrong != "other history":
        tier(topic, to)
    segments = sorted(to.glob("0000/*.log"))
    expected = 0
    if wrong == "gone":
        segments[1].unlink()
        expected = 1
    elif wrong == "short":
        segments[0].write_bytes(segments[0].read_bytes()[:-1])
    elif wrong == "unreadable":
        shutil.rmtree(to / "_tier")
        (to / "_tier").mkdir()
    elif wrong == "damaged":
        spoil(next(to.glob("_tier/*")), 5)
    topic.alter(retention=due_at_once(to))
    topic._clock.advance(timedelta(seconds=1))  # type: ignore[attr-defined]
    decisions = [each.drop for each in topic.retain() if each.partition == 0]
    assert decisions == [True] * expected + [False] * (4 - expected)
    if wrong not in ("gone", "short"):
        assert "retention drops nothing" in caplog.text


def test_a_partition_that_the_place_does_not_have_stays(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    seal(topic)
    topic.close()
    backup = path.parent / "backup" / "topic"
    shutil.copytree(path, backup)
    topic = open_topic()
    seal(topic)
    drop(topic, 1)
    tier(topic, to)
    with testing.open_topic(backup, clock=topic._clock, alter=True, retention=due_at_once(to)) as older:
        topic._clock.advance(timedelta(seconds=1))  # type: ignore[attr-defined]
        assert drops(older) == [False, False], "the place begins later"
