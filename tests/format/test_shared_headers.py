"""Headers that all records of a batch share are stored once, whoever writes them, and every reader sees them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import pack
from typing import Any

import pyarrow as pa
import pytest
from batch_contents import arrow_rows, rows
from builders import BODY_AT, batch_of, encoded, forged, header_of
from format_reader import read_topic

from loglib import CorruptLogError, RecordTooLargeError, Topic, transaction
from loglib.append import arrow_bodies
from loglib.append.arrow_bodies import Rows
from loglib.append.record_arguments import record_sizes
from loglib.config.policies import MAX_BATCH_BYTES
from loglib.format.columns import HEADERS, SHARED_HEADERS, Columns, Headers, common_headers, encode
from loglib.format.header import body_of, layout

TRACE: dict[str, bytes] = {"trace": b"0123456789abcdef", "ключ": b"", "schema": b"7"}
PAIRS: Headers = tuple(TRACE.items())
HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
SHARED = HEADERS | SHARED_HEADERS


def shared(count: int, headers: Headers = PAIRS) -> Columns:
    return Columns([b"%d" % number for number in range(count)], headers=[headers] * count)


def flags_of(topic: Topic) -> set[int]:
    """The flags for headers of all batches."""
    return {batch._header.flags & SHARED for batch in topic.batches()}


# --- the bytes ------------------------------------------------------------------------------------------


def test_shared_headers_cost_no_byte_for_a_record() -> None:
    def cost(count: int) -> int:
        return len(encoded(shared(count))) - len(encoded(Columns(shared(count).values)))

    assert cost(1) == cost(10) == cost(10_000) > 0


@pytest.mark.parametrize("codec", [0, 1, 2, 3], ids=["none", "zlib", "lz4", "zstd"])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_shared_headers_come_back_for_every_record(count: int, codec: int) -> None:
    found = batch_of(encoded(shared(count), codec=codec))
    assert found._header.flags & SHARED == SHARED
    assert found.headers == [PAIRS] * count
    assert [record.headers for record in found.records()] == [PAIRS] * count
    assert arrow_rows(found.to_arrow()) == rows(found)
    for start, stop in ((0, 1), (count - 1, count), (0, 0)):
        part = found.part(start, stop)
        assert part.headers == [PAIRS] * (stop - start)
        assert arrow_rows(part.to_arrow()) == rows(part)
        assert rows(pickle.loads(pickle.dumps(part))) == rows(part)


def test_size_of_a_batch_counts_shared_headers_for_each_record_that_is_shown() -> None:
    found = batch_of(encoded(shared(10)))
    assert found.content_bytes == 10 + 10 * found._header.header_bytes
    assert found.part(2, 5).content_bytes == 3 + 3 * found._header.header_bytes


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param([PAIRS, PAIRS, PAIRS[:2]], id="fewer"),
        pytest.param([PAIRS, (), PAIRS], id="one-has-none"),
        pytest.param([(), PAIRS, PAIRS], id="the-first-has-none"),
        pytest.param([PAIRS, PAIRS[::-1], PAIRS], id="another-order"),
        pytest.param([(("a", b"1"),), (("a", b"2"),), (("a", b"1"),)], id="another-value"),
        pytest.param([(("a", b"1"),), (("b", b"1"),), (("a", b"1"),)], id="another-name"),
        pytest.param([(("a", b"12"), ("b", b"3")), (("a", b"1"), ("b", b"23"))] * 2, id="the-same-bytes-cut-otherwise"),
        pytest.param([PAIRS] * 3 + [(("a", b"1"),)] + [PAIRS] * 4, id="one-of-many"),
    ],
)
def test_headers_that_differ_are_kept_apart(headers: list[Headers]) -> None:
    columns = Columns([b"x"] * len(headers), headers=headers)
    found = batch_of(encoded(columns))
    assert found._header.flags & SHARED == HEADERS
    assert found.headers == headers
    assert arrow_bytes(columns) == encoded_bytes(columns)


def test_no_record_has_no_common_headers() -> None:
    assert common_headers([]) is None


# --- every way to write ---------------------------------------------------------------------------------


def rows_in_arrow(columns: Columns) -> pa.RecordBatch:
    headers = [[{"key": name, "value": value} for name, value in pairs] for pairs in columns.headers or ()]
    return pa.RecordBatch.from_pydict(
        {"value": pa.array(columns.values, pa.binary()), "headers": pa.array(headers, HEADERS_TYPE)}
    )


def arrow_bytes(columns: Columns) -> bytes:
    return b"".join(Rows(rows_in_arrow(columns)).body(0, len(columns.values), 0).parts)


def encoded_bytes(columns: Columns) -> bytes:
    return b"".join(body_of(encode(columns), len(columns.values), codec=0).parts)


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_arrow_makes_the_same_bytes_of_shared_headers(count: int) -> None:
    assert arrow_bytes(shared(count)) == encoded_bytes(shared(count))
    several = Rows(pa.concat_batches([rows_in_arrow(shared(2, (("a", b"1"),))), rows_in_arrow(shared(count))]))
    assert b"".join(several.body(2, 2 + count, 0).parts) == encoded_bytes(shared(count))
    assert not several.headers or several.headers.have_equal(0, 3) is False


def one_by_one(topic: Topic, values: list[bytes]) -> None:
    for value in values:
        topic.append(value, value, headers=dict(TRACE))


def in_a_transaction(topic: Topic, values: list[bytes]) -> None:
    with transaction("app") as made:
        for value in values[:5]:
            made.append(topic, value, value, headers=TRACE)
        made.append_many(topic, values[5:], keys=values[5:], headers=[TRACE] * len(values[5:]))


def from_arrow(topic: Topic, values: list[bytes]) -> None:
    records = rows_in_arrow(Columns(values, headers=[PAIRS] * len(values)))
    topic.append_arrow(records.append_column("key", records.column("value")))


WRITERS: list[Callable[[Topic, list[bytes]], object]] = [
    one_by_one,
    in_a_transaction,
    from_arrow,
    lambda topic, values: topic.append_many(values, keys=values, headers=[TRACE] * len(values)),
    lambda topic, values: topic.append_many(values, keys=values, headers=(list(PAIRS) for _ in values)),
    lambda topic, values: topic.append_many(values, keys=values, headers=[dict(TRACE) for _ in values]),
    lambda topic, values: topic.append_many(values, keys=values, headers=[TRACE] * len(values), producer=("p", 1)),
    lambda topic, values: topic.append_many(values, headers=[PAIRS] * len(values), timestamps=range(len(values))),
]
WRITER_NAMES = ["append", "transaction", "arrow", "one-object", "lists", "equal-objects", "producer", "times"]


@pytest.mark.parametrize("count", [1, 20, 1500])
@pytest.mark.parametrize("write", WRITERS, ids=WRITER_NAMES)
def test_every_writer_shares_equal_headers_and_every_reader_sees_them(
    tmp_path: Path, write: Callable[[Topic, list[bytes]], object], count: int
) -> None:
    values = [b"%d" % number for number in range(count)]
    with Topic.open(tmp_path / "t", create=True, partitions=3, batch_bytes=1 << 15) as topic:
        write(topic, values)
        topic.flush()
        assert flags_of(topic) == {SHARED}
        records = list(topic.read())
        assert sorted((record.value, record.headers) for record in records) == sorted((each, PAIRS) for each in values)
        seen = [row for part in topic.partitions for batch in part.batches() for row in rows(batch)]
        in_arrow = [row for part in topic.partitions for each in part.batches() for row in arrow_rows(each.to_arrow())]
        assert seen == in_arrow
        assert [next(iter(topic.partition(each.partition).read(each.offset))) for each in records[:9]] == records[:9]
        assert not topic.verify().damage
    plain = read_topic(tmp_path / "t")
    assert sorted((each[3], each[4]) for part in plain.values() for each in part) == sorted((e, PAIRS) for e in values)


def test_headers_given_once_as_an_iterator_belong_to_the_first_record_only(tmp_path: Path) -> None:
    """As always: an iterator has its items once."""
    pairs: Iterator[tuple[str, bytes]] = iter([("a", b"1")])
    with Topic.open(tmp_path / "t", create=True) as topic:
        topic.append_many([b"x", b"y"], headers=[pairs, pairs])
        topic.flush()
        assert [record.headers for record in topic.read()] == [(("a", b"1"),), ()]


@pytest.mark.parametrize(
    "bad",
    [{"a": "text"}, {1: b""}, {"a": bytearray(b"1")}, {"\ud800": b""}, [("a",)], "text", 7],
    ids=["value-text", "name-number", "bytearray", "surrogate", "no-pair", "text", "number"],
)
@pytest.mark.parametrize("count", [1, 2, 2000])
def test_bad_headers_for_all_records_are_refused(tmp_path: Path, bad: Any, count: int) -> None:
    with Topic.open(tmp_path / "t", create=True) as topic:
        with pytest.raises((TypeError, ValueError), match=r"headers must|utf-8"):
            topic.append_many([b"x"] * count, headers=[bad] * count)
        assert topic.partition(0).log_end_offset == 0


# --- limits ---------------------------------------------------------------------------------------------


def test_shared_headers_count_for_each_record() -> None:
    assert record_sizes(shared(3)) == [1 + sum(8 + len(name.encode()) + len(value) for name, value in PAIRS)] * 3


@pytest.mark.parametrize("count", [10, 5000])
@pytest.mark.parametrize("way", ["lists", "arrow"])
def test_record_that_is_too_large_by_its_shared_headers_is_refused(tmp_path: Path, count: int, way: str) -> None:
    columns = shared(count, (("a", bytes(3000)),))
    with Topic.open(tmp_path / "t", create=True, max_record_bytes=3000) as topic:
        with pytest.raises(RecordTooLargeError, match="record 0"):
            if way == "arrow":
                topic.append_arrow(rows_in_arrow(columns))
            else:
                topic.append_many(columns.values, headers=columns.headers)
        assert topic.partition(0).log_end_offset == 0


@pytest.mark.parametrize("way", ["lists", "arrow"])
def test_batches_of_records_with_shared_headers_have_about_the_size_that_the_records_have(
    tmp_path: Path, way: str
) -> None:
    """A reader makes the headers of each record again: a batch must not become a hundred times as large by that."""
    columns = shared(5000, (("a", bytes(1000)),))
    with Topic.open(tmp_path / "t", create=True, batch_bytes=100_000) as topic:
        if way == "arrow":
            topic.append_arrow(rows_in_arrow(columns))
        else:
            topic.append_many(columns.values, headers=columns.headers)
        topic.flush()
        assert 40 <= max(len(batch) for batch in topic.batches()) <= 100


def test_batch_that_would_be_too_large_with_the_headers_of_each_record_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = shared(1025, (("a", bytes(1 << 20)),))
    with pytest.raises(RecordTooLargeError):
        encode(large)
    assert encode(large.part(slice(1000))).header_bytes < 1 << 21
    monkeypatch.setattr(arrow_bodies, "MAX_BATCH_BYTES", 3000)
    rows = Rows(rows_in_arrow(shared(100, (("a", bytes(50)),))))
    with pytest.raises(RecordTooLargeError):
        rows.body(0, 100, 0)
    assert rows.body(0, 40, 0).flags & SHARED == SHARED


# --- damage ---------------------------------------------------------------------------------------------


def refuse(stored: bytes, message: str) -> None:
    """Both ways to decode refuse the headers in the same words."""
    found = batch_of(stored)
    for read in (found.to_arrow, lambda: found.headers):
        with pytest.raises(CorruptLogError, match=message):
            read()


def test_shared_headers_without_their_section_are_damage() -> None:
    stored = forged(encoded(Columns([b"12345678"])), flags=SHARED)
    with pytest.raises(CorruptLogError, match="record headers of 0 bytes"):
        _ = batch_of(stored).headers
    with pytest.raises(CorruptLogError):
        batch_of(stored).to_arrow()


def test_shared_headers_may_be_none_at_all() -> None:
    """No writer makes such a batch, but the page allows it."""
    stored = encoded(shared(3))
    at = layout(header_of(stored)).headers
    assert at is not None
    body = stored[BODY_AT:][: at.counts] + bytes(24)
    found = batch_of(forged(stored, body=body, stored_bytes=len(body), header_bytes=24))
    assert found.headers == [()] * 3
    assert arrow_rows(found.to_arrow()) == rows(found)


@pytest.mark.parametrize("count", [-1, 1 << 20, 4])
def test_count_of_shared_headers_that_does_not_fit_is_damage(count: int) -> None:
    stored = encoded(shared(3))
    at = layout(header_of(stored)).headers
    assert at is not None
    body = bytearray(stored[BODY_AT:])
    body[at.counts : at.counts + 8] = pack("<2i", 0, count)
    refuse(forged(stored, body=bytes(body)), "do not rise|as many as|beyond their section")


def test_shared_headers_that_would_fill_the_memory_are_damage() -> None:
    """A few megabytes that were forged must not become terabytes."""
    count = 1 << 20
    stored = encoded(shared(1, (("a", bytes(2000)),)))
    at = layout(header_of(stored))
    assert at.headers is not None and MAX_BATCH_BYTES // count < 2000
    body = bytes(4 * (count + 2)) + stored[BODY_AT + at.headers.counts :]
    forged_batch = forged(stored, body=body, record_count=count, stored_bytes=len(body), value_bytes=0)
    refuse(forged_batch, f"2009 bytes of headers for {count} records")
