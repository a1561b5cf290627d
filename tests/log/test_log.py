"""The log as a range: its marks, its segments, its places, and what it says when files are not there."""

import errno
import logging
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from builders import a_mark, forged, spoil
from hypothesis import given
from hypothesis import strategies as st

from conftest import (
    NOW,
    QUIET,
    SECOND,
    Clock,
    Overtaken,
    last_segment,
    needs_proc,
    opened_since,
    settled_files,
    values_of,
)
from loglib import CorruptLogError, LogClosedError, OffsetOutOfRangeError, Retention, Topic, testing
from loglib import segment as segments
from loglib.config.arguments import Time
from loglib.config.times import to_datetime
from loglib.format.header import parse_header
from loglib.format.watermark import encode_new
from loglib.log.cursor import Cursor
from loglib.log.log import Log
from loglib.log.lookup import resolve
from loglib.segment import Identity
from loglib.system.files import REAL, with_a_free_descriptor
from loglib.testing import Call, RecordingFiles, UnsyncedFiles, WatchedFiles

Open = Callable[..., Topic]


def rolled(open_topic: Open, segments: int, **policies: Any) -> Topic:
    topic = open_topic(retention=Retention(age=None, bytes=0), files=UnsyncedFiles(), **policies)
    for number in range(segments):
        topic.append(b"%d" % number, timestamp=NOW + number * SECOND)
        topic.partition(0).roll()
    topic.append(b"last", timestamp=NOW + segments * SECOND, sync=True)
    return topic


def test_segments_are_listed_with_their_ranges_and_times(open_topic: Open, clock: Clock, path: Path) -> None:
    topic = open_topic()
    times = []
    for number in range(3):
        topic.append(b"%d" % number, timestamp=5)
        times.append(clock.now)
        topic.partition(0).roll()
        clock.advance(timedelta(hours=1))
    topic.append(b"open", sync=True)
    with Topic.open(path, mode="r") as reading:
        for source in (topic, reading):
            segments = source.partition(0).segments
            assert [s.sealed for s in segments] == [True, True, True, False]
            assert [s.last_append_time for s in segments] == [*times, None]
            assert [s.base_offset for s in segments[1:]] == [s.end_offset for s in segments[:-1]]
            assert segments[-1].end_offset == topic.partition(0).high_watermark
            assert all(Path(s.path).exists() and s.size_bytes > 0 for s in segments)


def test_listing_segments_again_reads_no_header_again(open_topic: Open) -> None:
    files = RecordingFiles()
    topic = open_topic(files=files)
    for _ in range(5):
        topic.append(b"x")
        topic.partition(0).roll()
    assert len(topic.partition(0).segments) == 6
    files.calls.clear()
    assert len(topic.partition(0).segments) == 6
    assert files.count("open_read") == 0


def test_listing_that_retention_overtakes_leaves_the_segment_out(open_topic: Open, path: Path) -> None:
    topic = rolled(open_topic, 3)
    with Topic.open(path, mode="r") as reading:
        log = reading.partition(0)._access.log
        stale = log.mark()
        topic.retain()
        log.writer = StaleWriter(stale)
        log.index.replace([s.base_offset for s in topic.partition(0).segments] + [0])
        assert [s.base_offset for s in log.segments()] == [topic.partition(0).log_start_offset]


class StaleWriter:
    """Says what was true a moment ago."""

    def __init__(self, mark: Any) -> None:
        self._mark = mark

    def mark(self) -> Any:
        return self._mark

    def listen(self, waiter: Any) -> None:
        raise AssertionError("nobody waits here")

    def is_moved(self) -> bool:
        raise AssertionError("nobody asks here")


def test_time_is_found_over_many_segments(open_topic: Open, path: Path) -> None:
    topic = rolled(open_topic, 20)
    offsets = [record.offset for record in topic.read()]
    with Topic.open(path, mode="r") as reading:
        for source in (topic, reading):
            log = source.partition(0)._access.log
            for number in range(21):
                assert resolve(log, Time(NOW + number * SECOND)) == offsets[number]
                assert resolve(log, Time(NOW + number * SECOND - 1)) == offsets[number]
            assert resolve(log, Time(NOW + 20 * SECOND + 1)) == log.mark().flushed_end


def test_time_finds_the_first_at_or_after_it_among_unordered_ones(open_topic: Open) -> None:
    topic = open_topic(batch_records=2)
    times = [50, 10, 20, 90, 30, 40, 95, 60]
    offsets = [topic.append(b"x", timestamp=each).offset for each in times]
    topic.flush()
    log = topic.partition(0)._access.log
    for wanted in range(0, 100, 5):
        expected = next((offsets[i] for i, each in enumerate(times) if each >= wanted), log.mark().flushed_end)
        assert resolve(log, Time(wanted)) == expected, wanted


def test_time_is_found_after_retention_dropped_the_event_that_was_ahead(open_topic: Open) -> None:
    """The headers of the segments still tell of it, and those of the batches do not."""
    topic = open_topic(retention=Retention(age=None, bytes=0), batch_records=1)
    topic.append(b"ahead", timestamp=1_000)
    topic.partition(0).roll()
    offsets = [topic.append(b"x", timestamp=each).offset for each in (10, 20, 30)]
    topic.flush()
    topic.partition(0)._access.writer().drop_before(topic.partition(0).segments[1].base_offset)
    log = topic.partition(0)._access.log
    assert resolve(log, Time(20)) == offsets[1]
    assert resolve(log, Time(500)) == log.mark().flushed_end


def test_event_of_2037_made_every_later_start_by_time_read_the_whole_log(open_topic: Open) -> None:
    """Counted: the batches looked at, after retention has dropped the event."""
    topic = open_topic(retention=Retention(age=None, bytes=0), batch_records=1)
    topic.append(b"of 2037", timestamp=NOW + 10 * 365 * 86_400 * SECOND)
    offsets = []
    for number in range(600):
        if number % 200 == 0:
            topic.partition(0).roll()
        offsets.append(topic.append(b"x", timestamp=NOW + number).offset)
    topic.flush()
    topic.partition(0)._access.writer().drop_before(topic.partition(0).segments[1].base_offset)
    log = topic.partition(0)._access.log
    with mock.patch.object(segments, "parse_header", wraps=parse_header) as parse:
        for number in (0, 99, 399, 400, 401, 599):
            assert resolve(log, Time(NOW + number)) == offsets[number]
        assert resolve(log, Time(NOW + 600)) == log.mark().flushed_end
    assert parse.call_count < 7 * 150  # the way there, and the block that has the record


def test_reader_in_another_process_finds_segments_made_since(open_topic: Open, path: Path) -> None:
    topic = rolled(open_topic, 1)
    with Topic.open(path, mode="r") as reading:
        assert values_of(reading) == [b"0", b"last"]
        topic.partition(0).roll()
        late = topic.append(b"new", timestamp=NOW + 100 * SECOND, sync=True)
        assert resolve(reading.partition(0)._access.log, Time(NOW + 50 * SECOND)) == late.offset
        assert values_of(reading, late.offset) == [b"new"]
        topic.partition(0).roll()
        topic.append(b"newer", sync=True)
        assert values_of(reading)[-2:] == [b"new", b"newer"]


def test_offset_in_a_segment_made_since_the_last_look_is_found(open_topic: Open, path: Path) -> None:
    """It used to be sought in the segment that was the last one then, and not found was corruption."""
    topic = rolled(open_topic, 1)
    with Topic.open(path, mode="r") as reading:
        for number in range(3):
            topic.partition(0).roll()
            late = topic.append(b"%d" % number, sync=True)
            assert values_of(reading, late.offset) == [b"%d" % number]


def test_missing_segment_is_corruption_and_no_missing_file(open_topic: Open, path: Path) -> None:
    topic = rolled(open_topic, 3)
    segments = topic.partition(0).segments
    topic.close()
    Path(segments[1].path).unlink()
    with Topic.open(path, mode="r") as reading:
        with pytest.raises(CorruptLogError):
            values_of(reading)
        with pytest.raises(CorruptLogError):
            reading.read(segments[1].base_offset)
        assert values_of(reading, segments[2].base_offset) == [b"2", b"last"], "healthy ranges stay readable"
    Path(segments[0].path).unlink()
    with (
        Topic.open(path, mode="r") as reading,
        pytest.raises(CorruptLogError, match="no segment file, .* that holds offset 0"),
    ):
        values_of(reading)


def test_segment_that_vanishes_while_it_is_looked_for_is_corruption(open_topic: Open, path: Path) -> None:
    topic = rolled(open_topic, 1)
    topic.close()

    class Vanishing(UnsyncedFiles):
        def open_read(self, path: str, **within: Any) -> int:
            if path.endswith(".log"):
                raise FileNotFoundError(2, "gone", path)
            return super().open_read(path, **within)

    with testing.open_topic(path, mode="r", files=Vanishing()) as reading:
        for start in (0, to_datetime(NOW)):
            with pytest.raises(CorruptLogError, match="no file"):
                list(reading.read(start))


def test_file_cut_below_the_mark_is_corruption(open_topic: Open, path: Path) -> None:
    with open_topic(batch_records=1) as topic:
        offsets = [topic.append(b"%d" % n).offset for n in range(3)]
    segment = last_segment(path)
    segment.write_bytes(segment.read_bytes()[: 4096 + offsets[2]])
    with Topic.open(path, mode="r") as reading:
        with pytest.raises(CorruptLogError, match="the end of the file"):
            values_of(reading)
        assert [r.value for r in reading.read(0, offsets[1])] == [b"0"]


def test_lost_watermark_lets_readers_have_what_later_batches_prove(
    open_topic: Open, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_topic() as topic:
        for number in range(3):
            topic.append(b"%d" % number, sync=True)
    watermark = path / "0000" / "watermark"
    for damage in (lambda: watermark.write_bytes(bytes(8192)), watermark.unlink):
        damage()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "loglib"), Topic.open(path, mode="r") as reading:
            assert values_of(reading) == [b"0", b"1"], "the third batch says that two were durable"
            assert reading.partition(0).verify().records == 2
        assert caplog.text.count("the watermark is lost") == 1, "said once, not at every look"


def test_lost_watermark_and_no_segment_is_corruption(open_topic: Open, path: Path) -> None:
    open_topic().close()
    (path / "0000" / "watermark").unlink()
    last_segment(path).unlink()
    with Topic.open(path, mode="r") as reading, pytest.raises(CorruptLogError, match="no segment"):
        reading.read()


def test_mark_without_segments_reads_as_corruption(open_topic: Open, path: Path) -> None:
    open_topic().close()
    last_segment(path).unlink()
    with Topic.open(path, mode="r") as reading:
        assert reading.partition(0).segments == []
        assert resolve(reading.partition(0)._access.log, Time(5)) == 0


def test_closed_log_says_so(open_topic: Open, path: Path) -> None:
    open_topic().close()
    with Topic.open(path, mode="r") as reading:
        partition = reading.partition(0)
        assert partition.high_watermark == 0
    with pytest.raises(LogClosedError):
        partition._access.log.mark()
    assert repr(partition) == f"<Partition 0, at {partition.path}>"


@needs_proc
def test_file_of_the_watermark_closes_with_its_last_user(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    topic.append(b"x", sync=True)
    before = settled_files()
    log = Log(REAL, str(path / "0000"), Identity.of(topic.log_id, 0))
    assert log.mark().flushed_end > 0
    assert len(opened_since(before)) == 1
    log.close()
    assert not opened_since(before)


def test_log_that_is_collected_while_files_are_closed_for_a_descriptor_is_no_error(
    open_topic: Open, path: Path
) -> None:
    class Last(Log):
        def release_files(self) -> None:
            logs[:] = [each for each in logs if each is self]
            super().release_files()

    topic = open_topic()
    topic.append(b"x", sync=True)
    logs = [Last(REAL, str(path / "0000"), Identity.of(topic.log_id, 0)) for _ in range(2)]
    assert all(each.mark().flushed_end for each in logs)
    full = [OSError(errno.EMFILE, "Too many open files")]

    def call() -> int:
        if full:
            raise full.pop()
        return 5

    assert with_a_free_descriptor("file", call) == 5
    assert len(logs) == 1 and logs[0].mark().flushed_end


def test_cursor_moves_over_segments_and_stops_at_its_limit(open_topic: Open) -> None:
    topic = rolled(open_topic, 3)
    log = topic.partition(0)._access.log
    offsets = [record.offset for record in topic.read()]
    cursor = Cursor.at(log, offsets[1])
    assert cursor.offset == offsets[1]
    assert [b.values for b in cursor.read(offsets[2])] == [[b"1"]]
    assert cursor.read(offsets[2]) == []
    assert [b.values for b in cursor.read(offsets[3])] == [[b"2"]]
    cursor.seek(log.mark().flushed_end)
    assert cursor.read(log.mark().flushed_end) == []
    with pytest.raises(OffsetOutOfRangeError):
        cursor.seek(1 << 50)
    cursor.close()
    cursor.close()


def test_blocks_follow_the_size_of_the_batches(open_topic: Open) -> None:
    """So that no batch is read in part and then again."""
    topic = open_topic(batch_bytes=700_000, files=UnsyncedFiles())
    topic.append_many([b"x" * 70_000] * 100)
    topic.flush()
    files = RecordingFiles()
    with open_topic(mode="r", files=files) as reading:
        assert len(values_of(reading)) == 100
    total = topic.partition(0).high_watermark
    assert files.bytes_read["00000000000000000000.log"] < 1.25 * total


def test_cursor_starts_anywhere(open_topic: Open) -> None:
    topic = rolled(open_topic, 1)
    assert Cursor(topic.partition(0)._access.log, 0).offset == 0


def test_seek_by_time_that_retention_overtakes_begins_again(open_topic: Open, path: Path) -> None:
    topic = rolled(open_topic, 5)
    files = Overtaken(topic.retain)
    with testing.open_topic(path, mode="r", files=files) as reading:
        assert values_of(reading, to_datetime(NOW)) == [b"last"]
    assert files.done


@given(st.lists(st.one_of(st.integers(1, 6), st.just("roll")), max_size=12), st.integers(0, 30))
def test_offset_before_the_end_has_so_many_records_behind_it(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int | str], count: int
) -> None:
    path = tmp_path_factory.mktemp("logs") / "topic"
    with testing.open_topic(path, files=UnsyncedFiles(), **QUIET) as topic:
        partition = topic.partition(0)
        for step in steps:
            if isinstance(step, str):
                partition.roll()
            else:
                partition.append_many([b"x"] * step)
                partition.flush()
        offsets = [record.offset for record in partition.read()]
        expected = [*offsets, partition.high_watermark][max(0, len(offsets) - count)]
        assert partition.offset_before_end(count) == expected
    shutil.rmtree(path.parent)


def test_offset_before_the_end_that_retention_overtakes_is_the_new_start(open_topic: Open, path: Path) -> None:
    topic = rolled(open_topic, 5)
    with testing.open_topic(path, mode="r", files=Overtaken(topic.retain)) as reading:
        assert reading.partition(0).offset_before_end(100) == topic.partition(0).log_start_offset


def test_offset_before_the_end_lies_after_damage(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    offsets = [topic.append(b"%d" % number, sync=True).offset for number in range(4)]
    with last_segment(path).open("r+b") as file:
        file.seek(4096 + offsets[1] + 20)
        file.write(b"\xff")
    assert topic.partition(0).offset_before_end(4) == offsets[2]
    assert topic.partition(0).offset_before_end(2) == offsets[2]
    with pytest.raises(ValueError, match="records must be at least 1"):
        topic.partition(0).offset_before_end(-1)


@pytest.mark.parametrize("end", [1 << 40, (1 << 63) - 1])
def test_mark_far_beyond_the_data_is_an_error_and_no_search_without_end(end: int, open_topic: Open, path: Path) -> None:
    """A forged watermark, say: the search for an offset went back over all that the file does not have."""
    topic = open_topic()
    first = topic.append(b"x", timestamp=NOW, sync=True)
    topic.close()
    identity = Identity.of(topic.log_id, 0)
    (path / "0000" / "watermark").write_bytes(encode_new(a_mark(1 << 40, 0, end, end, 1), identity.salt))
    with Topic.open(path, mode="r") as reading:
        for start in ("begin", end // 2, to_datetime(NOW + SECOND)):
            with pytest.raises(CorruptLogError):
                values_of(reading, start)
        reader = reading.read(first.offset, on_damage="skip")
        assert [record.value for record in reader] == [b"x"]
        assert reader.gaps[0].offsets.stop == end
        assert values_of(reading, end) == []
        assert list(reading.read(end - 100, on_damage="skip")) == [], "no system takes so large a place in a file"
        assert reading.verify().damage
    with pytest.raises(CorruptLogError):
        Topic.open(path, create=True)


def test_time_that_a_header_claims_and_no_record_has_is_passed_over(open_topic: Open, path: Path) -> None:
    """Forged: it used to end the search with an error of Python's."""
    topic = open_topic()
    topic.append(b"early", timestamp=NOW, sync=True)
    late = topic.append(b"late", timestamp=NOW + SECOND, sync=True)
    segment = last_segment(path)
    content = segment.read_bytes()
    identity = Identity.of(topic.log_id, 0)
    first = forged(content[4096:4240], max_timestamp=NOW + 9, running_max_timestamp=NOW + 9, identity=identity)
    second = forged(content[4240:], previous_crc=int.from_bytes(first[4:8], "little"), identity=identity)
    segment.write_bytes(content[:4096] + first + second)
    with Topic.open(path, mode="r") as reading:
        assert resolve(reading.partition(0)._access.log, Time(NOW + 5)) == late.offset


def three_segments(topic: Topic) -> list[int]:
    for number in range(3):
        topic.append(b"%d" % number, sync=True)
        topic.partition(0).roll()
    return [each.base_offset for each in topic.partition(0).segments][:3]


def test_retention_that_comes_after_the_listing_is_no_corruption(open_topic: Open, path: Path) -> None:
    """A reader that lost the race was told of a missing file, and stopped for good."""
    topic = open_topic()
    bases = three_segments(topic)

    class Overtaken(WatchedFiles):
        armed = False

        def after(self, call: Call, result: Any) -> Any:
            if self.armed and call.name == "listdir":
                self.armed = False
                topic.partition(0)._access.writer().drop_before(bases[2])
            return result

    files = Overtaken()
    with testing.open_topic(path, mode="r", files=files) as reading:
        log = reading.partition(0)._access.log
        log.index.replace([])
        files.armed = True
        with pytest.raises(OffsetOutOfRangeError) as refused:
            log.open_segment(bases[0])
        assert refused.value.log_start_offset == bases[2]


def test_segment_that_a_listing_missed_is_found_by_the_next(open_topic: Open, path: Path) -> None:
    """Between two parts of a long listing the writer may roll twice; the segment before was believed to go on."""
    bases = three_segments(open_topic())
    with Topic.open(path, mode="r") as reading:
        log = reading.partition(0)._access.log
        log.index.replace([bases[0], bases[2]])
        with log.open_segment(bases[1]) as segment:
            assert segment.base_offset == bases[1]
        log.index.replace([bases[0], bases[2]])
        assert values_of(reading) == [b"0", b"1", b"2"]


def test_reader_that_is_interrupted_before_it_moves_on_finds_no_damage(open_topic: Open) -> None:
    """It remembered the batch that it had read, and took the same batch for one of another history."""
    topic = open_topic()
    topic.append(b"x", sync=True)
    topic.append(b"y", sync=True)
    cursor = Cursor.at(topic.partition(0)._access.log, 0)
    end = topic.partition(0).high_watermark
    first = cursor.read(end)
    cursor.position = 0  # as an interrupt leaves it that comes before the assignment
    assert [each.offsets for each in cursor.read(end)] == [each.offsets for each in first]
    cursor.close()


def test_reader_that_is_interrupted_as_it_hands_out_a_batch_hands_it_out_again(open_topic: Open) -> None:
    topic = open_topic()
    for letter in (b"a", b"b", b"c"):
        topic.append_many([letter * 1000] * 300)
        topic.flush()
    reader = topic.read()
    batches = reader.batches()
    first = next(batches)
    assert next(iter(reader)).value == b"b" * 1000
    reader._unmake_records()  # as an interrupt leaves it that comes before the rest of `_take_batch`
    assert [len(each) for each in (first, *batches)] == [300, 299, 300]


def test_offset_is_found_though_the_next_segment_tells_nothing_of_the_end_of_this_one(
    open_topic: Open, path: Path
) -> None:
    """Neither its header nor its first batch is whole: the way is forwards, from where the segment begins."""
    with open_topic() as topic:
        offsets = [topic.append(b"%d" % number, sync=True).offset for number in range(4)]
        topic.partition(0).roll()
        for number in (4, 5):
            topic.append(b"%d" % number, sync=True)
    second = last_segment(path)
    content = bytearray(second.read_bytes())
    content[50] ^= 1
    content[4096 + 20] ^= 1
    second.write_bytes(content)
    with Topic.open(path, mode="r") as reading:
        assert next(iter(reading.read(offsets[2]))).value == b"2"
        reader = reading.read(offsets[1], on_damage="skip")
        assert [record.value for record in reader] == [b"1", b"2", b"3", b"5"]


def damaged(open_topic: Open, path: Path, *places: tuple[int, int]) -> list[int]:
    """A log of three segments with three batches each, 10 us apart, but for the third, which is 1,000 us late.

    With bytes changed: (number of the segment, place in its file). Returns the offsets.
    """
    topic = open_topic(files=UnsyncedFiles(), batch_records=1)
    offsets = []
    for number in range(9):
        if number in (3, 6):
            topic.partition(0).roll()
        offsets.append(topic.append(b"x", timestamp=NOW + 10 * number + (1000 if number == 2 else 0)).offset)
    topic.close()
    segments = sorted((path / "0000").glob("*.log"))
    for number, at in places:
        spoil(segments[number], at)
    return offsets


FIRST, THIRD = (0, 4096 + 140), (0, 4096 + 288 + 140)  # batches
HEADER_OF_THE_LAST = (2, 50)  # which the search for a time asks first


@pytest.mark.parametrize(("places", "wanted", "first"), [
    ([FIRST], 5, 0),  # the damaged one may have it, as the one after it does
    ([FIRST], 15, 2),  # the one after it says that nothing was so late until then
    ([THIRD], 500, 2),  # the next segment says that something was so late before it
    ([THIRD], 2000, 9),  # and that nothing was so late
    ([THIRD, (1, 50)], 2000, 2),  # and if its header is damaged, nobody knows
])  # fmt: skip
def test_gap_that_may_hold_the_first_record_of_a_time_is_where_reading_starts(
    open_topic: Open, path: Path, places: list[tuple[int, int]], wanted: int, first: int
) -> None:
    offsets = damaged(open_topic, path, HEADER_OF_THE_LAST, *places)
    with Topic.open(path, mode="r") as topic:
        log = topic.partition(0)._access.log
        expected = [*offsets, log.mark().flushed_end][first]
        assert resolve(log, Time(NOW + wanted), past_damage=True) == expected


@pytest.mark.parametrize("by_time", [True, False])
def test_lookup_that_retention_overtook_in_a_shared_topic_found_damage(by_time: bool, path: Path) -> None:
    """A thread had opened the last segment; another one listed the directory when that and the next were gone."""
    policies: dict[str, Any] = QUIET | {"segment_bytes": 4096, "retention": Retention(age=None)}
    with Topic.open(path, create=True, **policies) as topic:
        partition = topic.partition(0)

        def append() -> None:
            topic.append(b"x" * 1500, timestamp=NOW, sync=True)

        class Overtaken(UnsyncedFiles):
            armed = True

            def open(self, path: Any, *arguments: Any, **named: Any) -> int:
                fd = super().open(path, *arguments, **named)
                if self.armed and str(path).endswith(f"{0:020d}.log"):
                    self.armed = False
                    for _ in range(6):
                        append()
                    partition.delete_before(partition.segments[2].base_offset)
                    reading.partition(0)._access.log.refresh()
                return fd

        append()
        append()
        files = Overtaken()
        with testing.open_topic(path, mode="r", files=files) as reading:
            if by_time:
                assert list(reading.read(to_datetime(NOW + 1))) == []
            else:
                with pytest.raises(OffsetOutOfRangeError):
                    list(reading.read(1))
        assert not files.armed
