"""config/arguments.py: what cannot be appended is refused with advice, before anything is appended."""

from __future__ import annotations

import json
import os
import warnings
from array import array
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from builders import NOW, calm
from hypothesis import given
from hypothesis import strategies as st

from loglib import RecordTooLargeError, Topic
from loglib.append.record_arguments import (
    check_columns,
    gather_columns,
    header_pairs,
    record_columns,
    record_sizes,
    timestamp_us,
)
from loglib.config.arguments import Time, check_names, parse_start, partition_number, partition_numbers
from loglib.format.columns import Columns
from loglib.log.reader import Reader

MAX = (1 << 63) - 1


@pytest.fixture
def topic(open_topic: Any) -> Topic:
    """Two partitions, ten records in each."""
    made: Topic = open_topic(partitions=2)
    for number in range(20):
        made.append(b"%d" % number, partition=number % 2)
    made.flush()
    return made


# --- start ----------------------------------------------------------------------------------------------

STARTS = [
    ("begin", "begin"),
    ("end", "end"),
    (0, 0),
    (1 << 62, 1 << 62),
    ("-15m", Time(NOW - 15 * 60 * 10**6)),
    ("-1.5h", Time(NOW - 90 * 60 * 10**6)),
    ("-0.25d", Time(NOW - 6 * 3600 * 10**6)),
    ("-2w", Time(NOW - 14 * 86400 * 10**6)),
    ("-3s", Time(NOW - 3 * 10**6)),
    ("-20ms", Time(NOW - 20_000)),
    ("-7us", Time(NOW - 7)),
    ("-0s", Time(NOW)),
    ("-1h30m", Time(NOW - 90 * 60 * 10**6)),
    ("-1d2h3.5s", Time(NOW - 26 * 3600 * 10**6 - 3_500_000)),
    ("2023-11-14T22:13:20Z", Time(NOW)),
    ("20231114T221320Z", Time(NOW)),
    ("2023-11-14 23:13:20.000005+01:00", Time(NOW + 5)),
    (timedelta(minutes=1), Time(NOW - 60 * 10**6)),
    (timedelta(minutes=-1), Time(NOW - 60 * 10**6)),
    (datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC), Time(NOW)),
    (datetime(2023, 11, 14, 23, 13, 20, 5, tzinfo=timezone(timedelta(hours=1))), Time(NOW + 5)),
]


@pytest.mark.parametrize(("start", "expected"), STARTS, ids=[str(start) for start, _ in STARTS])
def test_start_has_one_meaning(start: Any, expected: object) -> None:
    assert parse_start(start, now_us=NOW) == expected


@pytest.mark.parametrize(
    "start",
    ["", "Begin", "beginning", "15m", "+15m", "-15", "-m", "-1y", "-1.m", "-.5s", "- 1s", "-1s ", "-1e3s", "--1s",
     "-1m\n", "0", "earliest", "-" + "9" * 400 + "s", "-1h-30m", "-1h 30m", "2023-11-14", "2023-11-14T22:13:20",
     "2023-13-14T22:13:20Z", "2023-11-14T22:13:20Z\n"],
)  # fmt: skip
def test_start_in_other_words_is_refused(start: str) -> None:
    with pytest.raises(ValueError, match='"begin", "end"'):
        parse_start(start, now_us=NOW)


@pytest.mark.parametrize(("start", "here"), [("earliest", "begin"), ("latest", "end")])
def test_start_word_of_another_system_is_refused_with_ours(start: str, here: str) -> None:
    with pytest.raises(ValueError, match=f'what is {start} elsewhere is "{here}" here'):
        parse_start(start, now_us=NOW)


@pytest.mark.parametrize("start", [None, True, 1.0, b"begin", [0]], ids=repr)
def test_start_of_another_type_is_refused(start: Any) -> None:
    with pytest.raises(TypeError, match='"begin", "end"'):
        parse_start(start, now_us=NOW)


def test_start_without_a_time_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="no time zone"):
        parse_start(datetime(2024, 1, 1), now_us=NOW)  # noqa: DTZ001


# --- timestamps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timestamp", "advice"), [(NOW // 10**6, "in seconds, multiply it by 1,000,000"), (NOW // 1000, "in milliseconds")]
)
def test_timestamp_that_looks_like_one_of_another_unit_is_warned_of(topic: Topic, timestamp: int, advice: str) -> None:
    """It was 1970 without a word."""
    for append in (
        lambda: topic.append(b"x", timestamp=timestamp),
        lambda: topic.append_many([b"x", b"y"], timestamps=[timestamp - 5, timestamp]),
    ):
        with pytest.warns(UserWarning, match=advice):
            append()


def test_warning_of_a_unit_is_shown_once_and_not_for_each_record(topic: Topic) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for number in range(5):
            topic.append(b"x", timestamp=NOW // 10**6 + number)
    assert len(shown) == 1


def test_timestamps_unlike_seconds_or_milliseconds_give_no_warning(topic: Topic) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for timestamp in (0, 5, -NOW, 10**9 - 1, 10**14, NOW, (1 << 63) - 1):
            topic.append(b"x", timestamp=timestamp)
            topic.append_many([b"x"], timestamps=[timestamp])
    assert shown == []


# --- names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "A-b_c.9", "a" * 249, "...", ".hidden", "..a"])
def test_name_of_safe_letters_is_taken(name: str) -> None:
    check_names(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "a\0b", "a b", "a\n", "ä", "a" * 250, "~", "a:b", "*"], ids=repr
)
def test_name_that_could_leave_a_directory_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        check_names("fine", name)


def take_columns(values: Any, keys: Any, timestamps: Any, headers: Any, *, limit_bytes: int) -> Any:
    return check_columns(gather_columns(values, keys, timestamps, headers), limit_bytes=limit_bytes)


# --- one record -----------------------------------------------------------------------------------------


def one(value: Any, key: Any = None, timestamp: Any = None, headers: Any = None, *, limit: int = 100) -> Any:
    return record_columns(value, key, timestamp, headers, limit_bytes=limit)


@pytest.mark.parametrize(
    "item",
    [b"xyz", bytearray(b"xyz"), memoryview(b"xyz"), memoryview(b"x.y.z")[::2]],
    ids=["bytes", "bytearray", "memoryview", "strided"],
)
def test_bytes_of_any_kind_become_bytes(item: Any) -> None:
    assert one(item, item) == (Columns([b"xyz"], [b"xyz"]), 6)
    assert take_columns([item], [item], None, None, limit_bytes=9) == (Columns([b"xyz"], [b"xyz"]), 6)


class Tagged(bytes):
    """A kind of bytes."""


def test_kind_of_bytes_becomes_plain_bytes() -> None:
    (columns, _) = one(Tagged(b"x"))
    assert type(columns.values[0]) is bytes


@pytest.mark.parametrize("what", ["value", "key"])
@pytest.mark.parametrize(
    ("item", "advice"),
    [("text", "encode it first"), (5, "not int"), ([b"x"], "not list"), (array("b", b"x"), "not array")],
    ids=["str", "int", "list", "array"],
)
def test_what_is_not_bytes_is_refused_with_advice(what: str, item: Any, advice: str) -> None:
    given_items = {"value": b"v", "key": b"k"} | {what: item}
    with pytest.raises(TypeError, match=f"{what}.*{advice}"):
        one(given_items["value"], given_items["key"])
    with pytest.raises(TypeError, match=f"{what}.*{advice}"):
        take_columns([given_items["value"]], [given_items["key"]], None, None, limit_bytes=100)


def test_columns_left_out_are_left_out() -> None:
    assert one(None) == (Columns([None]), 0)
    assert one(b"v", None, 5, {}) == (Columns([b"v"], None, [5], None), 1)


def test_record_above_the_limit_is_refused() -> None:
    assert one(b"v" * 60, b"k" * 40)[1] == 100
    with pytest.raises(RecordTooLargeError) as caught:
        one(b"v" * 60, b"k" * 41)
    assert (caught.value.size_bytes, caught.value.limit_bytes) == (101, 100)


def test_headers_count_with_the_offsets_that_they_take() -> None:
    # A million headers without a name or a value were counted as nothing.
    assert one(b"", headers=[("", b"")] * 12)[1] == 96
    assert one(b"", headers={"ключ": b"12"})[1] == 8 + 8 + 2
    with pytest.raises(RecordTooLargeError):
        one(b"", headers=[("", b"")] * 13)


# --- headers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [{"a": b"1", "b": b""}, OrderedDict(a=b"1", b=b""), [("a", b"1"), ("b", b"")], (["a", b"1"], ["b", b""]),
     iter([("a", b"1"), ("b", b"")])],
    ids=["dict", "mapping", "pairs", "lists", "iterator"],
)  # fmt: skip
def test_headers_become_pairs(headers: Any) -> None:
    pairs = header_pairs(headers)
    assert pairs == (("a", b"1"), ("b", b""))
    assert {type(pair) for pair in pairs} == {tuple}


@pytest.mark.parametrize(
    "headers",
    [{"a": "1"}, {b"a": b"1"}, {"a": None}, {"a": bytearray(b"1")}, [("a",)], [("a", b"1", b"2")], ["ab"], [5]],
    ids=repr,
)
def test_headers_of_another_kind_are_refused(headers: Any) -> None:
    with pytest.raises(TypeError, match="headers must map str to bytes"):
        header_pairs(headers)


def test_header_name_that_is_no_text_is_refused_before_anything_is_appended(tmp_path: Path) -> None:
    # It was taken, and then no flush could write the batch that it was in.
    with Topic.open(tmp_path / "topic", create=True) as topic:
        with pytest.raises(ValueError, match="surrogates"):
            topic.append(b"bad", headers={"\ud800": b""})
        with pytest.raises(ValueError, match="surrogates"):
            topic.append_many([b"bad"], headers=[{"\ud800": b""}])
        topic.append(b"good", headers={"ä": b""})
        topic.flush()
        assert [record.value for record in topic.read()] == [b"good"]


# --- timestamps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, -1, MAX, -MAX - 1, NOW])
def test_timestamp_of_64_bits_is_taken(number: int) -> None:
    assert timestamp_us(number) == number
    assert take_columns([b""], None, [number], None, limit_bytes=9)[0].timestamps == [number]


@pytest.mark.parametrize("number", [MAX + 1, -MAX - 2, 10**30])
def test_timestamp_beyond_64_bits_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="does not fit 64 bits"):
        timestamp_us(number)
    with pytest.raises(ValueError, match="does not fit 64 bits"):
        take_columns([b"", b""], None, [0, number], None, limit_bytes=9)


@pytest.mark.parametrize("time", [1.5, "now", True, b"1"], ids=repr)
def test_timestamp_of_another_type_is_refused(time: Any) -> None:
    with pytest.raises(TypeError, match="int microseconds UTC or an aware datetime"):
        one(b"", None, time)
    with pytest.raises(TypeError, match="int microseconds UTC or an aware datetime"):
        take_columns([b""], None, [time], None, limit_bytes=9)


def test_timestamps_may_be_mixed() -> None:
    times = [5, datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)]
    assert take_columns([b"", b""], None, times, None, limit_bytes=9)[0].timestamps == [5, NOW]


# --- many records ---------------------------------------------------------------------------------------

BINARY = st.none() | st.binary(max_size=5)


HEADERS = st.dictionaries(st.text(max_size=3), st.binary(max_size=3))


@calm
@given(st.lists(st.tuples(BINARY, BINARY, st.integers(-MAX, MAX), HEADERS)))
def test_many_records_are_the_same_as_one_by_one(records: list[tuple[Any, Any, int, dict[str, bytes]]]) -> None:
    values, keys, times, headers = ([each[i] for each in records] for i in range(4))
    many, size = take_columns(iter(values), iter(keys), iter(times), iter(headers), limit_bytes=1 << 20)
    singles = [one(*each, limit=1 << 20) for each in records]
    assert many.values == [single.values[0] for single, _ in singles]
    assert many.keys == keys
    assert many.timestamps == times
    assert many.headers == [single.headers[0] if single.headers else () for single, _ in singles]
    assert size == sum(bytes_of for _, bytes_of in singles) == sum(record_sizes(many))


@pytest.mark.parametrize(
    "values", [b"abc", bytearray(b"abc"), memoryview(b"abc"), "abc"], ids=["bytes", "bytearray", "memoryview", "str"]
)
def test_one_value_is_not_many(values: Any) -> None:
    with pytest.raises(TypeError, match=r"an iterable of bytes.*use append\(\) for one"):
        take_columns(values, None, None, None, limit_bytes=9)


@pytest.mark.parametrize(
    ("name", "columns"),
    [("keys", ([b"k"], None, None)), ("timestamps", (None, [1, 2, 3], None)), ("headers", (None, None, []))],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_columns_of_another_length_are_refused(name: str, columns: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ValueError, match=rf"\d {name} for 2 values"):
        take_columns([b"", b""], *columns, limit_bytes=9)


def test_headers_may_be_none_for_a_record() -> None:
    found, _ = take_columns([b"", b""], None, None, [None, {"a": b"1"}], limit_bytes=99)
    assert found.headers == [(), (("a", b"1"),)]


def test_each_of_many_is_held_against_the_limit_and_named() -> None:
    take_columns([b"x" * 10] * 100, None, None, None, limit_bytes=10)
    with pytest.raises(RecordTooLargeError, match="record 2 is 11 bytes"):
        take_columns([b"x" * 10, None, b"x" * 11], None, None, None, limit_bytes=10)
    with pytest.raises(RecordTooLargeError, match="record 1 is 27 bytes"):
        take_columns([b"x", b"x"], [None, b"k" * 16], None, [None, {"a": b"1"}], limit_bytes=20)


def test_large_records_of_one_key_do_not_make_one_batch_far_too_large(tmp_path: Path) -> None:
    # The share of a partition in a call was reckoned by the number of its records alone.
    limits: dict[str, Any] = {"batch_bytes": 4096, "max_record_bytes": 20_000}
    with Topic.open(tmp_path / "topic", create=True, partitions=2, **limits) as topic:
        large, small = (next(b"%d" % n for n in range(99) if crc32(b"%d" % n) % 2 == side) for side in (0, 1))
        topic.append_many([bytes(10_000)] * 50 + [b""] * 5000, keys=[large] * 50 + [small] * 5000)
        topic.flush()
        assert max(batch._header.length for batch in topic.partition(0).batches()) < 3 * 10_000


@pytest.mark.parametrize("headers", [5, "ab", b"ab", None])
def test_headers_that_are_no_pairs_are_named(headers: Any) -> None:
    with pytest.raises(TypeError, match=r"or be \(str, bytes\) pairs"):
        header_pairs(headers)


def test_what_is_no_iterable_is_named() -> None:
    for name, columns in {
        "values": (5, None, None, None), "keys": ([b"x"], 5, None, None), "timestamps": ([b"x"], None, 5, None),
        "headers": ([b"x"], None, None, 5),
    }.items():  # fmt: skip
        with pytest.raises(TypeError, match=f"{name} must be an iterable"):
            gather_columns(*columns)  # type: ignore[arg-type]

    def broken() -> Any:
        yield b"x"
        raise TypeError("an error of its own")

    with pytest.raises(TypeError, match="of its own"):
        gather_columns(broken(), None, None, None)


# --- keys, partitions, counts and times that callers may pass --------------------------------------------


@pytest.mark.parametrize("count", [2, 3000])
@pytest.mark.parametrize("key", ["abc", 5, 1.5, ["k"]])
def test_key_that_is_no_bytes_is_refused_with_advice_and_appends_nothing(key: Any, count: int, topic: Topic) -> None:
    """It ended in whatever the CRC of it raised."""
    ends = [each.log_end_offset for each in topic.partitions]
    for call in (
        lambda: topic.append(b"x", key),
        lambda: topic.append_many([b"x"] * count, keys=[b"k"] * (count - 1) + [key]),
        lambda: topic.append_many([b"x"] * count, keys=[b"k"] * (count - 1) + [key], timestamps=[0] * count),
    ):
        with pytest.raises(TypeError, match="key must be bytes"):
            call()
    assert [each.log_end_offset for each in topic.partitions] == ends


STRIDED = memoryview(b"a-b-c-")[::2]


@pytest.mark.parametrize("partitioner", ["crc32", "murmur2"])
@pytest.mark.parametrize("key", [bytearray(b"abc"), memoryview(b"abc"), STRIDED, memoryview(b"cba")[::-1]])
def test_key_of_another_kind_of_bytes_goes_where_its_bytes_go(key: Any, partitioner: str, open_topic: Any) -> None:
    """A strided view ended in BufferError, and a partitioner of one's own was given what is no bytes."""
    topic = open_topic(partitions=2, partitioner=partitioner)
    expected = topic.append(b"x", b"abc").partition
    assert topic.append(b"x", key).partition == expected
    for count in (2, 3000):
        for more in ({}, {"timestamps": [0] * count}):
            (found,) = topic.append_many([b"x"] * count, keys=[key] * count, **more)
            assert found.partition == expected
    topic.flush()
    assert {each.key for each in topic.partition(expected).read() if each.key is not None} == {b"abc"}


def test_own_partitioner_is_given_bytes(tmp_path: Path) -> None:
    given: list[Any] = []

    def first(key: bytes, _: int) -> int:
        given.append(key)
        return 0

    with Topic.open(tmp_path / "own", create=True, partitions=2, partitioner=first) as topic:
        topic.append(b"x", bytearray(b"abc"))  # type: ignore[arg-type]
        topic.append_many([b"x"] * 2, keys=[STRIDED, b"abc"])  # type: ignore[list-item]
    assert given == [b"abc"] * 3 and {type(each) for each in given} == {bytes}


@pytest.mark.parametrize("partitioner", ["random", "by_region", 5, "", ["crc32"], b"crc32", lambda key, partitions: 0])
def test_partitioner_that_is_unknown_is_refused_before_a_topic_is_made(partitioner: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one of \('crc32', 'murmur2'\) or a function|needs a name of its own"):
        Topic.open(tmp_path / "topic", create=True, partitioner=partitioner)
    assert not (tmp_path / "topic").exists()


class Whole:
    """As the whole numbers of other libraries are."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


def test_partition_may_be_named_as_json_names_it(topic: Topic) -> None:
    assert partition_numbers({"0": 5, Whole(1): 6}) == {0: 5, 1: 6}
    assert topic.partition("1") is topic.partition(Whole(1)) is topic.partitions[1]  # type: ignore[arg-type]
    for wrong in (True, 1.0, "x", "-1", "", None, b"0", "\u0661"):
        with pytest.raises(TypeError, match="named by its number"):
            partition_number(wrong)
        if wrong is not None:
            with pytest.raises(TypeError, match="named by its number"):
                topic.append(b"x", partition=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="named twice"):
        partition_numbers({0: 1, "0": 2})


def test_positions_go_to_json_and_back(topic: Topic) -> None:
    """It said: no partition 0 here; there are [0]."""
    reader = topic.read()
    reader.poll(max_records=7)
    told = json.loads(json.dumps(reader.tell()))
    rest = list(reader)
    assert len(rest) == 13
    reader.seek(told)
    assert sorted(reader) == sorted(rest) == sorted(topic.read(told))
    assert list(topic.read(told, end=told)) == []
    with pytest.raises(TypeError, match="named by its number"):
        reader.seek({"x": 0})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="no partition 7 here"):
        reader.seek({"7": 0})  # type: ignore[dict-item]


def wrong_calls(reader: Reader) -> list[Callable[[], object]]:
    """Calls with a count or a time-out that is none."""
    counts: list[Any] = [0, -3, 1.5, "3", True, float("nan")]
    times: list[Any] = ["3", True, float("nan"), datetime(2026, 1, 1, tzinfo=UTC), []]
    calls: list[Callable[[], object]] = []
    for each in counts:
        calls += [partial(reader.poll, max_records=each), partial(reader.poll, max_bytes=each)]
    return calls + [partial(reader.poll, timeout=each) for each in times]


def test_count_or_timeout_that_makes_no_sense_is_refused_and_moves_nothing(topic: Topic) -> None:
    """A count of -3 moved the reader back, and a time-out that is not a number waited for ever."""
    reader = topic.read()
    reader.poll(max_records=3)
    told = reader.tell()
    for call in wrong_calls(reader):
        with pytest.raises((TypeError, ValueError), match="must be"):
            call()
        assert reader.tell() == told
    assert len(list(reader)) == 17
    wrong: Any
    for wrong in (float("nan"), "1", True):
        for follow in (topic.follow, topic.partition(0).follow):
            with pytest.raises((TypeError, ValueError), match="timeout must be a"):
                follow("begin", timeout=wrong)
    assert len(list(topic.follow("begin", timeout=-1.0))) == 20  # as one that is over
    for start, most in ((1.5, 10), (True, 10), (0, 1.5), (0, None)):
        with pytest.raises(TypeError, match="must be whole numbers"):
            topic.partition(0).transfer(None, start, most)  # type: ignore[arg-type]


def test_group_refuses_what_makes_no_sense(topic: Topic) -> None:
    wrong: Any
    for wrong in (None, True, 0, -1, float("nan"), float("inf"), "often", timedelta(0)):
        with pytest.raises(ValueError, match="commit must be"):
            topic.group("etl", commit=wrong)
    for wrong in (None, 5, b"etl"):
        with pytest.raises(TypeError, match="a name must be a str"):
            topic.group(wrong)
    with topic.group("etl", commit=timedelta(seconds=1)) as group:
        for call in (
            lambda: group.poll(max_records=0), lambda: group.poll(max_records=1.5),  # type: ignore[arg-type]
            lambda: group.poll(timeout=float("nan")), lambda: next(group.follow(timeout=float("nan"))),
            lambda: next(group.batches(timeout="1")),
        ):  # fmt: skip
            with pytest.raises((TypeError, ValueError), match="must be"):
                call()
        assert len(group.poll()) + len(group.poll()) == 20


def test_poll_without_limits_returns_one_batch(topic: Topic) -> None:
    """It returned 512 records of it."""
    topic.append_many([b"x"] * 3000, partition=0)
    topic.flush()
    reader = topic.partition(0).read()
    assert [len(polled) for polled in iter(reader.poll, [])] == [10, 3000]
    reader = topic.partition(0).read()
    assert len(list(zip(reader, range(20), strict=False))) == 20
    assert len(reader.poll()) == 2989  # the rest of it: the loop has taken one more


def test_offsets_of_a_part_and_names_of_columns_are_checked(topic: Topic) -> None:
    batch = next(topic.batches())
    for start, end in ((0.0, 5), (0, None), ("0", 5), (True, 5)):
        with pytest.raises(TypeError, match="offsets are whole numbers"):
            batch.between(start, end)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="names in a list"):
        batch.to_arrow("value")
    with pytest.raises(ValueError, match="no column 'x'"):
        batch.to_arrow(["value", "x"])


def test_path_of_a_topic_is_a_path(tmp_path: Path) -> None:
    """The empty one meant the current directory."""
    with pytest.raises(ValueError, match="empty"):
        Topic.open("", create=True)
    with pytest.raises(TypeError):
        Topic.open(None, create=True)  # type: ignore[arg-type]
    Topic.open(os.fsencode(tmp_path / "topic"), create=True).close()  # type: ignore[arg-type]
    assert (tmp_path / "topic" / "topic.json").exists()
