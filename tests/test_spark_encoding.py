"""Arrow columns as batches, and the partitions of columns of keys: the same as the core's, record by record."""

from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loglib import RecordTooLargeError
from loglib.append.partitioner import BUILT_IN
from loglib.config import TopicConfig
from loglib.format.batch import Body, encode_body
from loglib.format.codec import codec_id
from loglib.format.columns import Columns
from loglib.spark import encoding
from loglib.spark.encoding import bodies, record_sizes
from loglib.spark.hashing import can_hash, partitions_of

HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
SMALL = TopicConfig(batch_bytes=1 << 20, max_record_bytes=1 << 20)


def table(columns: Columns) -> pa.Table:
    """The records in Arrow's columns."""
    arrays = {"value": pa.array(columns.values, pa.binary())}
    if columns.keys is not None:
        arrays["key"] = pa.array(columns.keys, pa.binary())
    if columns.timestamps is not None:
        arrays["timestamp"] = pa.array(columns.timestamps, pa.int64())
    if columns.headers is not None:
        pairs = [[{"key": name, "value": value} for name, value in each] or None for each in columns.headers]
        arrays["headers"] = pa.array(pairs, HEADERS)
    return pa.table(arrays)


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
@given(records(), st.integers(0, 3), st.sampled_from(["none", "zlib"]))
def test_batch_has_the_bytes_that_the_core_writes(columns: Columns, before: int, compression: str) -> None:
    config = TopicConfig(compression=compression)
    whole = pa.concat_tables([table(columns.part(slice(0, 1)))] * before + [table(columns)])
    found = list(bodies(whole.slice(before), config))
    expected = columns
    if columns.keys is not None and set(columns.keys) == {None}:
        expected = columns._replace(keys=None)
    assert [plain(each) for each in found] == [plain(encode_body(expected, codec=codec_id(compression)))]


def test_null_of_arrow_that_has_bytes_takes_none() -> None:
    offsets, items = pa.py_buffer(np.array([0, 2, 4], "<i4")), pa.py_buffer(b"abcd")
    values = pa.Array.from_buffers(pa.binary(), 2, [pa.py_buffer(b"\x02"), offsets, items])
    assert values.to_pylist() == [None, b"cd"]
    (body,) = bodies(pa.table({"value": values}), SMALL)
    assert plain(body) == plain(encode_body(Columns([None, b"cd"]), codec=0))


def test_records_are_cut_by_size_and_by_number() -> None:
    values = [b"x" * 300] * 10 + [b"y" * 1500] + [b""] * 30
    config = TopicConfig(batch_bytes=1000, batch_records=20)
    found = list(bodies(table(Columns(values)), config))
    assert [each.record_count for each in found] == [3, 3, 3, 1, 1, 20, 10]


def test_sizes_are_those_that_limits_count() -> None:
    columns = Columns([b"abc", None], [None, b"k"], None, [(("h", b"vv"), ("é", b"")), ()])
    assert record_sizes(table(columns).to_batches()[0]).tolist() == [3 + 1 + 2 + 2, 1]
    with pytest.raises(RecordTooLargeError, match="a record"):
        list(bodies(table(columns), TopicConfig(max_record_bytes=7)))


def test_batch_has_a_limit_that_counts_the_places_of_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    records = table(Columns([b"v"], None, None, [(("", b""),) * 10]))
    assert len(list(bodies(records, SMALL))) == 1
    monkeypatch.setattr(encoding, "MAX_BATCH_BYTES", 50)
    with pytest.raises(RecordTooLargeError, match="the batch"):
        list(bodies(records, SMALL))


@pytest.mark.parametrize("pair", [{"key": None, "value": b"v"}, {"key": "h", "value": None}, None])
def test_header_with_a_null_is_refused(pair: Any) -> None:
    with pytest.raises(ValueError, match="a header whose key or value is null"):
        list(bodies(pa.table({"value": [b"v"], "headers": pa.array([[pair]], HEADERS)}), SMALL))


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.parametrize("partitions", [1, 3, 16])
def test_partitions_of_a_column_are_those_of_its_keys(name: str, partitions: int) -> None:
    random = Random(partitions)
    sizes = [random.choice((None, 0, 1, 2, 3, 4, 5, 7, 8, 40, 300)) for _ in range(500)]
    keys = [None if size is None else random.randbytes(size) for size in sizes]
    expected = [9 if key is None else BUILT_IN[name](key, partitions) for key in keys]
    column = pa.array([b"first", *keys], pa.binary()).slice(1)
    assert partitions_of(column, name, partitions, keyless=9).tolist() == expected


def test_column_without_keys_and_of_empty_keys() -> None:
    assert partitions_of(pa.array([None, None], pa.binary()), "crc32", 4, keyless=2).tolist() == [2, 2]
    assert partitions_of(pa.array([], pa.binary()), "murmur2", 4, keyless=2).tolist() == []
    for name, one in BUILT_IN.items():
        assert partitions_of(pa.array([b"", b""]), name, 7, keyless=2).tolist() == [one(b"", 7)] * 2
        assert can_hash(name)
    assert not can_hash("by_region")
