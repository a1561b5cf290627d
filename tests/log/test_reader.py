"""A reader begins where it is told, gives what is flushed by then, and knows where it stands."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from conftest import NOW, SECOND, Clock, fill, values_of, wait_until_waiting
from loglib import OffsetOutOfRangeError, Retention, Topic
from loglib.config.times import to_datetime
from loglib.errors import InvalidOffsetError

Open = Callable[..., Topic]


# --- read ----------------------------------------------------------------------------------------


def test_read_ends_at_the_end_as_of_now(open_topic: Open) -> None:
    topic = open_topic()
    fill(topic, 5)
    reader = topic.read()
    topic.append(b"too late", sync=True)
    assert [r.value for r in reader] == [b"%d" % n for n in range(5)]
    assert list(reader) == [] and reader.poll() == []


def test_reader_sees_only_what_is_flushed(open_topic: Open) -> None:
    topic = open_topic(batch_records=2)
    for _ in range(5):
        topic.append(b"x")  # two batches are written, but not flushed
    assert values_of(topic) == []
    assert topic.follow("begin").poll() == []
    topic.flush()
    assert len(values_of(topic)) == 5


@pytest.mark.parametrize("mode", ["a", "r"])
def test_every_form_of_start_finds_its_record(mode: str, open_topic: Open, path: Path, clock: Clock) -> None:
    with open_topic(batch_records=3, segment_bytes=4096) as topic:
        offsets = fill(topic, 60)
    clock.now = NOW + 59 * SECOND
    topic = open_topic(mode=mode)
    forms: list[tuple[Any, int]] = [
        ("begin", 0),
        ("end", 60),
        (offsets[0], 0),
        (offsets[31], 31),
        (to_datetime(NOW + 31 * SECOND), 31),
        (to_datetime(NOW + 31 * SECOND - 1), 31),
        (to_datetime(NOW + 31 * SECOND + 1), 32),
        (to_datetime(NOW - 10**12), 0),
        (to_datetime(NOW + 10**12), 60),
        (datetime.fromtimestamp(NOW // SECOND + 7, UTC), 7),
        (timedelta(seconds=9), 50),
        (timedelta(seconds=-9), 50),
        ("-9s", 50),
        ("-1m", 0),
        ("-0s", 59),
        ({0: offsets[12]}, 12),
        ({0: "-9s"}, 50),
    ]
    for start, index in forms:
        expected = [b"%d" % n for n in range(index, 60)]
        assert values_of(topic, start) == expected, start
        assert values_of(topic.partition(0), start) == expected, start
        assert [v for batch in topic.batches(start) for v in batch.values] == expected, start
        assert [r.value for r in topic.follow(start, timeout=0)] == expected, start
    assert values_of(topic, topic.partition(0).high_watermark) == []
    topic.close()


def test_end_bounds_what_is_read(open_topic: Open) -> None:
    topic = open_topic(batch_records=3)
    offsets = fill(topic, 20)
    for start, end in [(0, 20), (0, 7), (4, 5), (5, 5), (7, 6), (3, 9)]:
        stop = offsets[end] if end < 20 else "end"
        expected = [b"%d" % n for n in range(start, end)]
        assert [r.value for r in topic.read(offsets[start], stop)] == expected
        assert [v for batch in topic.batches(offsets[start], stop) for v in batch.values] == expected
    assert [r.value for r in topic.read("begin", to_datetime(NOW + 3 * SECOND))] == [b"0", b"1", b"2"]


@pytest.mark.parametrize(
    ("start", "error"),
    [
        (datetime(2020, 1, 1), ValueError),  # noqa: DTZ001
        ("start", ValueError),
        ("-5 minutes", ValueError),
        (1.5, TypeError),
        (None, TypeError),
        (b"begin", TypeError),
        (True, TypeError),
        ({1: "begin"}, ValueError),
    ],
)
def test_bad_start_is_refused(start: Any, error: type[Exception], open_topic: Open) -> None:
    topic = open_topic()
    for read in (topic.read, topic.follow, topic.partition(0).read, topic.partition(0).follow):
        with pytest.raises(error):
            read(start)
    with pytest.raises(error):
        topic.batches(start)
    with pytest.raises(error):
        topic.read().seek(start)


def test_offset_outside_the_log_raises_with_the_valid_range(open_topic: Open) -> None:
    topic = open_topic(retention=Retention(age=None, bytes=0))
    fill(topic, 4)
    topic.partition(0).roll()
    fill(topic, 4)
    topic.retain()
    start, end = topic.partition(0).log_start_offset, topic.partition(0).high_watermark
    assert 0 < start < end
    for offset in (0, start - 1, end + 1, 1 << 62, -1):
        with pytest.raises(OffsetOutOfRangeError) as raised:
            topic.read(offset)
        assert (raised.value.offset, raised.value.log_start_offset, raised.value.high_watermark) == (offset, start, end)
        assert isinstance(raised.value, LookupError)


def test_offset_of_no_record_raises_with_its_neighbours(open_topic: Open) -> None:
    topic = open_topic(batch_records=2)
    offsets = fill(topic, 6)
    end = topic.partition(0).high_watermark
    for offset in range(end):
        if offset in offsets:
            assert next(iter(topic.read(offset))).offset == offset
            continue
        with pytest.raises(InvalidOffsetError) as raised:
            topic.read(offset)
        around = raised.value
        assert around.offset == offset and around.batch_offsets.stop <= offset < around.next_offset
        assert around.next_offset in (*offsets, end)


def test_one_offset_for_several_partitions_is_refused(open_topic: Open) -> None:
    topic = open_topic(partitions=2)
    with pytest.raises(ValueError, match="another record in each partition"):
        topic.read(0)
    fill(topic, 2, partition=0)
    offsets = fill(topic, 3, partition=1)
    assert [(r.partition, r.value) for r in topic.read({1: offsets[1], 0: "end"})] == [(1, b"1"), (1, b"2")]
    assert len(list(topic.read({1: offsets[2]}))) == 3, "a partition not named is read from its beginning"
    assert len(list(topic.read("begin", {0: 0}))) == 3


def test_partitions_take_turns_and_keep_their_order(open_topic: Open) -> None:
    topic = open_topic(partitions=3)
    for number in range(300):
        topic.append_many([b"%d" % number + b"x" * 20_000], partition=number % 3)
    topic.flush()
    seen = [r.partition for r in topic.read()]
    assert len(seen) == 300 and set(seen[:120]) == {0, 1, 2}
    for partition in range(3):
        numbers = [int(r.value.split(b"x")[0]) for r in topic.read() if r.partition == partition and r.value]
        assert numbers == sorted(numbers)


def test_topic_without_records_reads_as_empty(open_topic: Open) -> None:
    topic = open_topic(partitions=2)
    assert list(topic.read()) == [] == list(topic.follow("begin", timeout=0))
    assert list(topic.batches()) == []
    assert topic.read(timedelta(days=1)).tell() == {0: 0, 1: 0}


# --- poll, seek, tell ----------------------------------------------------------------------------


def test_poll_honours_its_limits(open_topic: Open) -> None:
    topic = open_topic(batch_records=4)
    fill(topic, 10)
    reader = topic.read()
    assert [r.value for r in reader.poll(max_records=3)] == [b"0", b"1", b"2"]
    assert [r.value for r in reader.poll()] == [b"3"], "the rest of the batch"
    assert [r.value for r in reader.poll()] == [b"4", b"5", b"6", b"7"]
    assert [r.value for r in reader.poll(max_records=100)] == [b"8", b"9"]
    assert reader.poll(max_records=100) == []
    reader.seek("begin")
    assert len(reader.poll(max_bytes=5)) == 5, "of one byte each"
    assert len(reader.poll(max_bytes=1)) == 1, "at least one"
    assert len(reader.poll(max_records=2, max_bytes=1 << 20)) == 2
    assert len(reader.poll(max_bytes=1 << 20)) == 2
    with pytest.raises(ValueError, match="max_records"):
        reader.poll(max_records=0)


def test_poll_counts_the_bytes_of_keys(open_topic: Open) -> None:
    topic = open_topic()
    topic.append_many([b"v", None, b"v"], keys=[b"kkkk", b"kkkkk", None])
    topic.flush()
    assert len(topic.read().poll(max_bytes=10)) == 2


def test_poll_waits_for_the_first_record_only(open_topic: Open) -> None:
    topic = open_topic()
    reader = topic.follow()
    assert reader.poll(timeout=0.001) == []
    timer = threading.Timer(0.05, lambda: topic.append(b"x", sync=True))
    timer.start()
    assert [r.value for r in reader.poll(max_records=10, timeout=60)] == [b"x"]
    timer.join()


def test_poll_without_timeout_waits_for_ever(open_topic: Open) -> None:
    topic = open_topic()
    reader = topic.follow()
    threading.Timer(0.05, lambda: topic.append(b"x", sync=True)).start()
    assert [r.value for r in reader.poll(timeout=None)] == [b"x"]


def test_very_long_timeout_is_no_overflow(open_topic: Open, path: Path) -> None:
    with open_topic() as topic, Topic.open(path, mode="r") as other:
        readers = [topic.follow(timeout=1e12), other.follow(timeout=1e12)]
        results: list[bytes | None] = []
        threads = [threading.Thread(target=lambda r=r: results.append(next(iter(r)).value)) for r in readers]
        for each in threads:
            each.start()
        wait_until_waiting(*readers)
        topic.append(b"x", sync=True)
        for each in threads:
            each.join()
        assert results == [b"x", b"x"]


@pytest.mark.parametrize("how", ["iterate", "poll", "batches"])
def test_tell_and_seek_round_trip_at_every_record(how: str, open_topic: Open) -> None:
    topic = open_topic(batch_records=4)
    offsets = fill(topic, 11)
    end = topic.partition(0).high_watermark
    reader = topic.read()
    assert reader.tell() == {0: offsets[0]}
    for index, offset in enumerate(offsets):
        if how == "iterate":
            assert next(iter(reader)).offset == offset
        elif how == "poll":
            assert reader.poll(max_records=1)[0].offset == offset
        else:
            reader.seek(offset)
            rest = next(reader.batches())
            assert rest.offsets.start == offset and rest.values[0] == b"%d" % index
            reader.seek(offset)
            next(iter(reader))
        following = offsets[index + 1] if index + 1 < len(offsets) else end
        told = reader.tell()
        if (index + 1) % 4:
            assert told == {0: following}
        resumed = topic.read(told)
        assert [r.value for r in resumed] == [b"%d" % n for n in range(index + 1, 11)]
        reader.seek(told)
    assert list(reader) == []


def test_batches_after_partial_iteration_give_the_rest(open_topic: Open) -> None:
    topic = open_topic(batch_records=5)
    offsets = fill(topic, 12)
    reader = topic.read()
    iterator = iter(reader)
    next(iterator), next(iterator)
    batch = next(reader.batches())
    assert batch.values == [b"2", b"3", b"4"] and batch.offsets == range(offsets[2], offsets[4] + 1)
    assert batch.next_offset == offsets[5]
    assert next(iterator).value == b"5", "and a loop goes on behind them"
    assert [b.values for b in reader.batches()] == [[b"6", b"7", b"8", b"9"], [b"10", b"11"]]


def test_records_are_made_a_few_at_a_time_and_all_arrive(open_topic: Open) -> None:
    topic = open_topic()
    topic.append_many([b"%d" % n for n in range(3000)])
    topic.flush()
    reader = topic.read()
    values = [next(iter(reader)).value for _ in range(700)]
    told = reader.tell()
    assert told == {0: 700}
    assert len(next(reader.batches())) == 2300
    reader.seek(told)
    values += [r.value for r in reader]
    assert values == [b"%d" % n for n in range(3000)]


def test_seek_moves_the_partitions_named_and_leaves_the_others(open_topic: Open) -> None:
    topic = open_topic(partitions=2)
    fill(topic, 4, partition=0)
    fill(topic, 4, partition=1)
    reader = topic.read()
    first = next(iter(reader))
    reader.seek({first.partition: "end"})
    assert {r.partition for r in reader} == {1 - first.partition}
    reader.seek("begin")
    assert len(list(reader)) == 8


def test_failed_seek_changes_nothing(open_topic: Open) -> None:
    topic = open_topic()
    fill(topic, 4)
    reader = topic.read()
    next(iter(reader))
    with pytest.raises(OffsetOutOfRangeError):
        reader.seek(1 << 40)
    assert [r.value for r in reader] == [b"1", b"2", b"3"]


def test_lag_is_a_subtraction(open_topic: Open) -> None:
    topic = open_topic()
    fill(topic, 4)
    reader = topic.follow("begin")
    assert reader.lag_bytes() == {0: topic.partition(0).high_watermark}
    list(reader.poll())
    assert reader.lag_bytes() == {0: 0}


def test_reader_that_has_come_to_an_end_inside_a_batch_tells_that_end(open_topic: Open) -> None:
    """Whoever goes on from there misses nothing: the rest of the batch was read with what stands before it."""
    topic = open_topic()
    fill(topic, 10)
    fill(topic, 10)
    for end in (4, topic.partition(0).high_watermark - 100):
        offsets = [record.offset for record in topic.read()]
        end = next(offset for offset in offsets if offset >= min(end, offsets[-1]))
        for reader in (topic.read(end=end), topic.read(end=end)):
            seen = [record.offset for record in reader]
            assert reader.tell() == {0: end}
            assert seen + [record.offset for record in topic.read(reader.tell())] == offsets
            reader.seek("begin")
            assert [offset for batch in reader.batches() for offset in batch.offsets] == seen
            assert reader.tell() == {0: end}
