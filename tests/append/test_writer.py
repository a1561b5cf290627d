"""What is appended is what is read: offsets, columns, times, limits, and callers' mistakes."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from conftest import NOW, SECOND, last_segment, opened_since, settled_files, sound, tree, values_of
from loglib import CorruptLogError, Position, RecordTooLargeError, Topic
from loglib.errors import InvalidOffsetError
from loglib.segment import HEADER_BYTES

Open = Callable[..., Topic]


# --- what is appended is what is read ------------------------------------------------------------


def test_append_returns_the_offset_at_which_the_record_is_read(open_topic: Open) -> None:
    topic = open_topic(batch_records=3)
    positions = [topic.append(b"%d" % number) for number in range(10)]
    positions += [
        topic.append(b"k", key=b"key"),
        topic.append(b"h", headers={"a": b"1"}),
        topic.append(b"t", timestamp=5),
    ]
    topic.flush()
    assert [Position(r.partition, r.offset) for r in topic.read()] == positions
    assert topic.partition(0).log_end_offset == topic.partition(0).high_watermark


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 100])
def test_append_many_returns_the_offsets_across_batch_boundaries(count: int, open_topic: Open) -> None:
    topic = open_topic(batch_records=3)
    topic.append(b"before")
    ranges = topic.append_many([b"%d" % number for number in range(count)])
    topic.append(b"after")
    topic.flush()
    records = list(topic.read())
    assert [r.offset for r in records[1:-1]] == [offset for each in ranges for offset in each.offsets]
    assert [r.value for r in records[1:-1]] == [b"%d" % number for number in range(count)]


def test_appending_nothing_appends_nothing(open_topic: Open) -> None:
    topic = open_topic()
    assert topic.append_many([]) == [] == topic.partition(0).append_many([])
    topic.flush()
    assert topic.partition(0).high_watermark == 0


def test_log_end_offset_counts_what_is_buffered(open_topic: Open) -> None:
    topic = open_topic()
    topic.append(b"a")
    topic.append(b"b")
    partition = topic.partition(0)
    assert (partition.high_watermark, partition.log_end_offset) == (0, 2)
    assert topic.append(b"c").offset == 2


def test_null_is_not_empty_in_values_and_keys(open_topic: Open) -> None:
    topic = open_topic()
    given = [(None, None), (b"", b""), (None, b""), (b"", None), (b"v", b"k")]
    for value, key in given:
        topic.append(value, key)
    topic.append_many([value for value, _ in given], keys=[key for _, key in given])
    topic.flush()
    assert [(r.value, r.key) for r in topic.read()] == given * 2


def test_columns_of_every_mixture_share_a_batch(open_topic: Open) -> None:
    topic = open_topic()
    given: list[dict[str, Any]] = [
        {}, {"key": b"k"}, {"timestamp": 7}, {"headers": {"a": b"1"}}, {}, {"key": b"", "timestamp": 9},
        {"headers": [("a", b"1"), ("a", b"2")], "timestamp": -1}, {"key": b"k", "headers": {}}, {},
    ]  # fmt: skip
    for index, arguments in enumerate(given):
        topic.append(b"%d" % index, **arguments)
    topic.flush()
    (batch,) = topic.batches()
    assert [r.value for r in batch.records()] == [b"%d" % index for index in range(len(given))]
    assert batch.keys == [each.get("key") for each in given]
    assert batch.timestamps == [each.get("timestamp", NOW) for each in given]
    assert batch.headers[6] == (("a", b"1"), ("a", b"2")) and batch.headers[3] == (("a", b"1"),)
    assert batch.headers[0] == batch.headers[7] == ()


def test_timestamp_is_the_events_and_append_time_the_logs(open_topic: Open, clock: Any) -> None:
    topic = open_topic()
    moment = datetime(2015, 5, 17, 10, 5, tzinfo=UTC)
    topic.append(b"old", timestamp=moment)
    topic.append(b"now")
    topic.flush()
    clock.now -= SECOND  # a clock set back: append times never fall, and event times follow it
    topic.append(b"later")
    topic.flush()
    first, second = topic.batches()
    assert first.records()[0].time == moment and first.timestamps[1] == NOW
    assert first.append_time == second.append_time == NOW and second.timestamps == [NOW - SECOND]


def test_one_append_in_2037_dates_none_of_the_records_after_it(open_topic: Open, clock: Any) -> None:
    topic = open_topic(segment_bytes=4096)
    year = timedelta(days=365)
    topic.append(b"before", sync=True)
    clock.advance(12 * year)
    topic.append(b"while it was wrong", sync=True)
    clock.advance(-12 * year)
    for _ in range(10):
        clock.advance(timedelta(seconds=1))
        topic.append(b"x" * 900, sync=True)
    topic.append_many([b"many"])
    topic.append(b"with a time", timestamp=NOW)
    topic.append(b"beside it")
    topic.close()
    topic = open_topic()
    topic.append(b"reopened", sync=True)
    times = [record.timestamp for record in topic.read()]
    assert times[2:12] == [NOW + SECOND * number for number in range(1, 11)]
    assert times[12:] == [clock.now, NOW, clock.now, clock.now]
    logged = [batch.append_time for batch in topic.batches()]
    assert logged == sorted(logged), "while the log's own time never falls"
    late = datetime.fromtimestamp(NOW / 1e6 + 7, UTC)
    found = next(iter(topic.read(late)))
    assert found.value == b"while it was wrong", "the first record at or after the time is that of 2037"
    assert sound(topic.partition(0))


def test_last_record_of_a_batch_fills_it_exactly(open_topic: Open) -> None:
    topic = open_topic(batch_bytes=1000)
    for _ in range(10):
        topic.append(b"x" * 100)
    assert topic.partition(0).log_end_offset == 10, "ten of a hundred bytes are one batch"
    topic.append(b"y")
    assert topic.partition(0).log_end_offset > 1000
    topic.flush()
    assert [len(batch) for batch in topic.batches()] == [10, 1]


def test_record_larger_than_a_batch_gets_one_of_its_own(open_topic: Open) -> None:
    topic = open_topic(batch_bytes=100)
    values = [b"a", b"b" * 1000, b"c", b"d" * 99, b"e" * 100]
    for value in values:
        topic.append(value)
    topic.flush()
    assert values_of(topic) == values


def test_too_large_a_record_is_refused_and_loses_nothing_else(open_topic: Open) -> None:
    topic = open_topic(max_record_bytes=100)
    topic.append(b"first")
    for refused in (
        lambda: topic.append(b"x" * 101),
        lambda: topic.append(b"x" * 60, key=b"k" * 60),
        lambda: topic.append_many([b"fine", b"x" * 101]),
    ):
        with pytest.raises(RecordTooLargeError, match="101|120") as raised:
            refused()
        assert raised.value.limit_bytes == 100
    topic.append(b"last")
    topic.flush()
    assert values_of(topic) == [b"first", b"last"]


def test_header_name_without_utf8_is_refused_at_once(open_topic: Open) -> None:
    """It used to be found when the batch was encoded, which then failed for ever with all that was in it."""
    topic = open_topic()
    topic.append(b"first")
    with pytest.raises(ValueError):
        topic.append(b"bad", headers={"\ud800": b""})
    topic.append(b"last")
    topic.flush()
    assert values_of(topic) == [b"first", b"last"]


# --- adopting, and other callers' mistakes -------------------------------------------------------


def test_adopted_batch_must_continue_the_log_if_its_offsets_are_kept(open_topic: Open, tmp_path: Path) -> None:
    source = open_topic()
    source.append_many([b"a", b"b"])
    source.flush()
    source.append(b"c", sync=True)
    first, second = source.batches()
    stored = last_segment(Path(source.path)).read_bytes()[HEADER_BYTES:]
    bodies = [stored[each._header.base_offset + 128 : each._header.next_offset] for each in (first, second)]
    target = open_topic(tmp_path / "target")
    writer = target.partition(0)._access.writer()
    with pytest.raises(InvalidOffsetError):
        writer.adopt([(second._header, bodies[1])], preserve_offsets=True)
    assert writer.adopt([(first._header, bodies[0])], preserve_offsets=True) == range(first._header.next_offset)
    end = second._header.next_offset
    assert writer.adopt([(second._header, bodies[1])], preserve_offsets=True) == range(first._header.next_offset, end)
    target.flush()
    assert values_of(target) == [b"a", b"b", b"c"]
    sound(target.partition(0))


def test_wrong_partition_is_a_value_error(open_topic: Open) -> None:
    topic = open_topic(partitions=2)
    for number in (-1, 2):
        with pytest.raises(ValueError, match="partitions 0 to 1"):
            topic.append(b"x", partition=number)


def test_failed_open_leaks_nothing_and_leaves_the_lock_free(open_topic: Open, path: Path) -> None:
    open_topic().close()
    content = last_segment(path).read_bytes()
    last_segment(path).write_bytes(content[:100])
    before = settled_files()
    for _ in range(3):
        with pytest.raises(CorruptLogError):
            Topic.open(path, create=True)
    assert not opened_since(before)
    last_segment(path).write_bytes(content)
    open_topic().close()
    assert tree(path)
