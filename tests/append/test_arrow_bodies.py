"""append/arrow_bodies.py: Arrow columns as batches, the same bytes as those of the same records in lists."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loglib import RecordTooLargeError
from loglib.append import arrow_bodies
from loglib.append.arrow_bodies import Rows
from loglib.append.record_arguments import record_sizes
from loglib.config.policies import TopicConfig
from loglib.format.arrow import HEADERS_TYPE as HEADERS
from loglib.format.codec import codec_id
from loglib.format.columns import Columns
from loglib.format.header import Body, encode_body

BINARY = pa.binary()
SMALL = TopicConfig(batch_bytes=1 << 20, max_record_bytes=1 << 20)


def table(columns: Columns, kind: pa.DataType = BINARY) -> pa.RecordBatch:
    """The records in Arrow's columns."""
    arrays = {"value": pa.array(columns.values, kind)}
    if columns.keys is not None:
        arrays["key"] = pa.array(columns.keys, kind)
    if columns.timestamps is not None:
        arrays["timestamp"] = pa.array(columns.timestamps, pa.int64())
    if columns.headers is not None:
        pairs = [[{"key": name, "value": value} for name, value in each] or None for each in columns.headers]
        arrays["headers"] = pa.array(pairs, HEADERS)
    return pa.record_batch(arrays)


def bodies(records: pa.RecordBatch, config: TopicConfig) -> list[Body]:
    rows = Rows(records)
    rows.check(limit_bytes=config.max_record_bytes)
    return list(rows.bodies(config, codec_id(config.compression)))


def plain(body: Body) -> tuple[Any, ...]:
    return (b"".join(map(bytes, body.parts)), *body[1:])


items = st.binary(max_size=20)
pairs = st.lists(st.tuples(st.text(max_size=5), items), max_size=3).map(tuple)


@st.composite
def records(draw: st.DrawFn) -> Columns:
    count = draw(st.integers(1, 12))

    def column(of: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(of, min_size=count, max_size=count))

    nullable = draw(st.sampled_from([items, st.none() | items, st.none()]))
    return Columns(
        column(st.none() | items) if draw(st.booleans()) else column(items),
        column(nullable) if draw(st.booleans()) else None,
        column(st.integers(0, 3) if draw(st.booleans()) else st.just(7)) if draw(st.booleans()) else None,
        column(pairs) if draw(st.booleans()) else None,
    )


@settings(max_examples=200, deadline=None)
@given(records(), st.integers(0, 3), st.sampled_from(["none", "zlib"]), st.sampled_from([BINARY, pa.large_binary()]))
def test_batch_has_the_bytes_that_the_core_writes(
    columns: Columns, before: int, compression: str, kind: pa.DataType
) -> None:
    config = TopicConfig(compression=compression)
    parts = [table(columns.part(slice(0, 1)), kind)] * before + [table(columns, kind)]
    whole = pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
    found = list(bodies(whole.slice(before), config))
    expected = columns
    if columns.keys is not None and set(columns.keys) == {None}:
        expected = columns._replace(keys=None)
    assert [plain(each) for each in found] == [plain(encode_body(expected, codec=codec_id(compression)))]


def test_null_of_arrow_that_has_bytes_takes_none() -> None:
    offsets, items = pa.py_buffer(np.array([0, 2, 4], "<i4")), pa.py_buffer(b"abcd")
    values = pa.Array.from_buffers(pa.binary(), 2, [pa.py_buffer(b"\x02"), offsets, items])
    assert values.to_pylist() == [None, b"cd"]
    (body,) = bodies(pa.record_batch({"value": values}), SMALL)
    assert plain(body) == plain(encode_body(Columns([None, b"cd"]), codec=0))


def test_records_are_cut_by_size_and_by_number() -> None:
    values = [b"x" * 300] * 10 + [b"y" * 1500] + [b""] * 30
    config = TopicConfig(batch_bytes=1000, batch_records=20)
    found = list(bodies(table(Columns(values)), config))
    assert [each.record_count for each in found] == [3, 3, 3, 1, 1, 20, 10]


def test_sizes_are_those_that_limits_count() -> None:
    columns = Columns([b"abc", None], [None, b"k"], None, [(("h", b"vv"), ("é", b"")), ()])
    sizes = [3 + (8 + 1 + 2) + (8 + 2), 1]
    assert record_sizes(columns) == sizes
    assert Rows(table(columns)).size_bytes == sum(sizes)
    bodies(table(columns), TopicConfig(max_record_bytes=max(sizes)))
    with pytest.raises(RecordTooLargeError, match="record 7 is 24 bytes, the limit is 23"):
        Rows(table(columns)).check(limit_bytes=max(sizes) - 1, first=7)


def test_batch_has_a_limit_that_counts_the_places_of_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    records = table(Columns([b"v"], None, None, [(("", b""),) * 10]))
    assert len(list(bodies(records, SMALL))) == 1
    monkeypatch.setattr(arrow_bodies, "MAX_BATCH_BYTES", 50)
    with pytest.raises(RecordTooLargeError, match="the batch"):
        list(bodies(records, SMALL))


@pytest.mark.parametrize("pair", [{"key": None, "value": b"v"}, {"key": "h", "value": None}, None])
def test_header_with_a_null_is_refused(pair: Any) -> None:
    with pytest.raises(ValueError, match="a header whose key or value is null"):
        list(bodies(pa.record_batch({"value": pa.array([b"v"]), "headers": pa.array([[pair]], HEADERS)}), SMALL))


def test_column_larger_than_a_batch_is_refused_before_its_offsets_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_bodies, "MAX_BATCH_BYTES", 50)
    with pytest.raises(RecordTooLargeError, match="the batch"):
        bodies(table(Columns([b"x" * 51]), pa.large_binary()), SMALL)


def test_last_two_batches_are_of_about_equal_size() -> None:
    found = bodies(table(Columns([b"x" * 100] * 24)), TopicConfig(batch_bytes=1000))
    assert [each.record_count for each in found] == [10, 7, 7]


@pytest.mark.parametrize("offsets", [[0, 3, 2, 4], [-1, 1, 2, 4], [0, 1, 2, 5]], ids=["fall", "negative", "beyond"])
@pytest.mark.parametrize("name", ["value", "key"])
def test_columns_of_another_program_with_broken_offsets_are_refused(name: str, offsets: list[int]) -> None:
    memory = np.array([0, 1, 2, 4], "<i4")
    broken = pa.Array.from_buffers(BINARY, 3, [None, pa.py_buffer(memory), pa.py_buffer(b"abcd")])
    batch = pa.record_batch({"value": pa.array([b"", b"", b""]), name: broken})
    memory[:] = offsets  # behind the back of pyarrow, which has looked at the ends
    with pytest.raises(ValueError, match="offsets do not rise"):
        bodies(batch, SMALL)


def test_rows_without_content_are_records() -> None:
    assert [each.record_count for each in bodies(table(Columns([b""] * 3, [None] * 3)), SMALL)] == [3]
    (body,) = bodies(pa.record_batch({"value": pa.nulls(2, BINARY)}), SMALL)
    assert plain(body) == plain(encode_body(Columns([None, None]), codec=0))
