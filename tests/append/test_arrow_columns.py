"""append/arrow_columns.py: columns of many types become the few of a log, and everything else is refused in words."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from loglib.append import arrow_columns
from loglib.append.arrow_bodies import Rows
from loglib.append.arrow_columns import Names, open_source
from loglib.format.arrow import HEADERS_TYPE, SCHEMA

TEXTS = ["a", None, "", "ccc"]
BINARY_TYPES = [
    pa.binary(), pa.large_binary(), pa.string(), pa.large_string(), pa.binary_view(), pa.string_view(),
    pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.uint32(), pa.string_view()),
]  # fmt: skip


def texts(kind: pa.DataType) -> pa.Array:
    """The texts behind one that is sliced off."""
    whole = pa.array(["before", *TEXTS])
    if pa.types.is_dictionary(kind):
        coded = whole.dictionary_encode()
        indices = coded.indices.cast(kind.index_type)
        return pa.DictionaryArray.from_arrays(indices, coded.dictionary.cast(kind.value_type)).slice(1)
    return whole.cast(kind).slice(1)


PAIRS = pa.struct([("key", pa.string()), ("value", pa.binary())])


def columns_of(data: Any, **names: str) -> dict[str, list[Any]]:
    """What the columns of a log are, of all batches together."""
    source = open_source(data, Names(**names))
    table = pa.Table.from_batches(list(source.batches()))
    for name, field in zip(table.schema.names, table.schema, strict=True):
        kinds = {
            "value": (pa.binary(), pa.large_binary()), "key": (pa.binary(), pa.large_binary()),
            "timestamp": (pa.int64(),), "partition": (pa.int64(),), "headers": (HEADERS_TYPE,),
        }  # fmt: skip
        assert field.type in kinds[name]
    assert source.columns == tuple(table.schema.names)
    return {name: table.column(name).to_pylist() for name in table.schema.names}


@pytest.mark.parametrize("kind", BINARY_TYPES, ids=str)
@pytest.mark.parametrize("name", ["value", "key"])
def test_binary_and_string_types_give_bytes(kind: pa.DataType, name: str) -> None:
    table = pa.table({"value": [b"v"] * 4, name: texts(kind)})
    assert columns_of(table)[name] == [None if text is None else text.encode() for text in TEXTS]


def test_fixed_size_and_null_columns_are_taken() -> None:
    table = pa.table({"value": pa.array([b"ab", None], pa.binary(2)), "key": [None, None], "headers": [None, None]})
    assert columns_of(table.append_column("timestamp", pa.nulls(2))) == {
        "value": [b"ab", None], "key": [None, None], "timestamp": [None, None], "headers": [None, None],
    }  # fmt: skip


@pytest.mark.parametrize("coded", [False, True], ids=["plain", "dictionary"])
@pytest.mark.parametrize("name", ["value", "key"])
def test_extension_types_give_what_they_are_stored_as(name: str, coded: bool) -> None:
    stored = pa.array(['{"a": 1}', None, "[]"])
    column = named(stored.dictionary_encode()) if coded else pa.ExtensionArray.from_storage(pa.json_(), stored)
    assert columns_of(pa.table({"value": column, name: column}))[name] == [b'{"a": 1}', None, b"[]"]
    with pytest.raises(TypeError, match="is int64, and a value is bytes"):
        columns_of(pa.table({"value": named(pa.array([1]))}))


class Named(pa.ExtensionType):  # type: ignore[misc]
    """Another type under a name."""

    def __init__(self, stored: pa.DataType) -> None:
        super().__init__(stored, "tests.named")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Named:
        return cls(storage_type)


def named(stored: pa.Array) -> pa.Array:
    return pa.ExtensionArray.from_storage(Named(stored.type), stored)


def test_large_views_are_converted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_columns, "_PIECE_BYTES", 1000)
    values = [b"%d" % number * 10 for number in range(500)]
    source = open_source(pa.table({"value": pa.array(values, pa.binary_view())}), Names())
    batches = list(source.batches())
    assert len(batches) > 5
    assert [value for batch in batches for value in batch.column("value").to_pylist()] == values


def test_content_of_binary_and_string_is_not_copied() -> None:
    for kind in BINARY_TYPES[:4]:
        column = pa.array(["abc"] * 100, kind)
        (batch,) = open_source(pa.table({"value": column}), Names()).batches()
        assert batch.column("value").buffers()[2].address == column.buffers()[2].address


@pytest.mark.parametrize(
    ("unit", "given", "expected"),
    [
        ("s", [1_700_000_000, None], [1_700_000_000_000_000, None]),
        ("ms", [-1, 5], [-1000, 5000]),
        ("us", [-1, None], [-1, None]),
        ("ns", [-1, 1999, None], [-1, 1, None]),
        ("ns", [-1000, 1999], [-1, 1]),
    ],
)
@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_timestamps_of_any_unit_are_microseconds(unit: str, zone: str, given: list[Any], expected: list[Any]) -> None:
    times = pa.array(given, pa.timestamp(unit, zone))
    assert columns_of(pa.table({"value": [b""] * len(given), "timestamp": times}))["timestamp"] == expected


def test_int64_is_microseconds_and_looks_like_another_unit_at_times() -> None:
    values = [b"a", b"b"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = pa.table({"value": values, "timestamp": pa.array([1, None])})
        assert columns_of(given)["timestamp"] == [1, None]
        assert columns_of(given.slice(1))["timestamp"] == [None]
        with pytest.raises(UserWarning, match="a time in seconds|in the early 1970s"):
            columns_of(pa.table({"value": values, "timestamp": pa.array([0, 1_700_000_000])}))


@pytest.mark.parametrize(
    "kind",
    [
        HEADERS_TYPE,
        pa.large_list(pa.struct([("key", pa.large_string()), ("value", pa.large_binary())])),
        pa.list_(pa.struct([("value", pa.string()), ("key", pa.string())])),
        pa.list_(pa.struct([("key", pa.string_view()), ("value", pa.binary_view())])),
    ],
    ids=str,
)
def test_lists_of_pairs_are_headers(kind: pa.DataType) -> None:
    given = [[{"key": "a", "value": "1"}, {"key": "é", "value": ""}], None, []]
    expected = [[{"key": "a", "value": b"1"}, {"key": "é", "value": b""}], None, []]
    table = pa.table({"value": [b""] * 3, "headers": pa.array(given, kind)})
    assert columns_of(table)["headers"] == expected
    assert columns_of(table.slice(1))["headers"] == expected[1:]


def test_map_is_headers() -> None:
    given = pa.array([[("a", b"1")], None], pa.map_(pa.string(), pa.binary()))
    found = columns_of(pa.table({"value": [b""] * 2, "headers": given}))["headers"]
    assert found == [[{"key": "a", "value": b"1"}], None]


class OneArray:
    """An object with `__arrow_c_array__` alone."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __arrow_c_array__(self, requested_schema: object = None) -> Any:
        return self._array.__arrow_c_array__(requested_schema)


class OneStream:
    """An object with `__arrow_c_stream__` alone."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        return self._stream.__arrow_c_stream__(requested_schema)


def reader(table: pa.Table) -> pa.RecordBatchReader:
    def batches() -> Iterator[pa.RecordBatch]:
        yield from table.to_batches()

    return pa.RecordBatchReader.from_batches(table.schema, batches())


def test_each_form_of_data_is_taken() -> None:
    table = pa.table({"value": pa.chunked_array([[b"a"], [b"b", None]])})
    expected = {"value": [b"a", b"b", None]}
    batch = table.combine_chunks().to_batches()[0]
    for data in (table, batch, reader(table), OneStream(table), OneStream(reader(table)), OneArray(batch)):
        assert columns_of(data) == expected
    assert open_source(table, Names()).records == open_source(batch, Names()).records == 3
    assert open_source(reader(table), Names()).records is None


def test_columns_are_named() -> None:
    table = pa.table({"payload": [b"v"], "user": [b"k"], "at": pa.array([5]), "more": pa.array([[]], HEADERS_TYPE),
                      "where": pa.array([2], pa.uint8())})  # fmt: skip
    found = columns_of(table, value="payload", key="user", timestamp="at", headers="more", partition="where")
    assert found == {"value": [b"v"], "key": [b"k"], "timestamp": [5], "headers": [[]], "partition": [2]}
    assert columns_of(table.select(["payload"]), value="payload", key="payload") == {"value": [b"v"], "key": [b"v"]}


def test_output_of_a_log_is_taken_without_its_places() -> None:
    table = SCHEMA.empty_table()
    assert open_source(table, Names()).columns == ("value", "key", "timestamp", "headers")
    spark = table.append_column("topic", pa.array([], "string")).append_column("timestampType", pa.array([], "int32"))
    assert open_source(spark, Names()).columns == ("value", "key", "timestamp", "headers")
    assert "partition" in open_source(spark, Names(partition="partition")).columns


VALUE = pa.array([b"v"])


@pytest.mark.parametrize(
    ("data", "names", "error", "words"),
    [
        ([b"v"], {}, TypeError, "data must be a pyarrow Table, .* not list"),
        (VALUE, {}, TypeError, "not BinaryArray, as in pa.table"),
        (pa.chunked_array([VALUE]), {}, TypeError, "not ChunkedArray, as in pa.table"),
        (OneArray(VALUE), {}, TypeError, "OneArray has no named columns"),
        (OneStream(pa.chunked_array([VALUE])), {}, TypeError, "OneStream has no named columns"),
        ({"payload": VALUE}, {}, ValueError, r"no column 'value'; there are \['payload'\]: name one"),
        ({"value": VALUE}, {"key": "user"}, ValueError, "no column 'user' for key"),
        ({"value": VALUE}, {"key": 3}, TypeError, "key must be the name of a column, not 3"),
        ({"value": VALUE, "user": VALUE}, {}, ValueError, "column 'user' is none of value, .* JSON, .* IPC .*select"),
        ({"value": VALUE, "topic": VALUE}, {}, ValueError, "column 'topic' is none of"),
        ({"value": VALUE, "offset": VALUE}, {}, ValueError, "column 'offset' is none of"),
        ({"value": VALUE, "partition": VALUE}, {}, ValueError, "give partition='partition'"),
        ({"value": VALUE, "p": VALUE}, {"partition": "p"}, TypeError, "the numbers of partitions, not binary"),
        ({"value": pa.array([1])}, {}, TypeError, "column 'value' is int64, and a value is bytes"),
        ({"value": VALUE, "key": pa.array([1.5])}, {}, TypeError, "column 'key' is double, and a key is bytes"),
        ({"value": pa.array([{"a": 1}])}, {}, TypeError, "is struct<a: int64>, and a value is bytes: .* JSON"),
        ({"value": VALUE, "timestamp": pa.array([1], pa.int32())}, {}, TypeError, "is int32; give a timestamp"),
        ({"value": VALUE, "timestamp": pa.array([1], pa.timestamp("us"))}, {}, ValueError, "zone; .* cast it"),
        ({"value": VALUE, "timestamp": pa.array([1 << 62], pa.timestamp("s", "UTC"))}, {}, ValueError, "fit 64 bits"),
        ({"value": VALUE, "headers": pa.array(["x"])}, {}, TypeError, "headers are list<"),
        ({"value": VALUE, "headers": pa.array([None], pa.list_view(PAIRS))}, {}, TypeError, "headers are list<"),
        ({"value": VALUE, "headers": pa.array([["x"]])}, {}, TypeError, "headers are list<"),
        ({"value": VALUE, "headers": pa.array([[{"name": "x", "value": b""}]])}, {}, TypeError, "headers are list<"),
        ({"value": VALUE, "headers": pa.array([[{"key": 1, "value": [1]}]])}, {}, TypeError, "headers are list<"),
        ({"value": VALUE, "headers": pa.array([[{"key": b"\xff", "value": b""}]])}, {}, ValueError, "'headers': .*UTF"),
    ],
)
def test_what_is_refused_says_what_to_give(
    data: Any, names: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        columns_of(pa.table(data) if isinstance(data, dict) else data, **names)


def test_column_that_is_there_twice_is_refused() -> None:
    twice = pa.Table.from_arrays([VALUE, VALUE], names=["value", "value"])
    with pytest.raises(ValueError, match="column 'value' is there 2 times"):
        columns_of(twice)


def test_names_of_headers_that_are_not_utf8_are_refused_although_their_type_says_so() -> None:
    names = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(np.array([0, 1], "<i4")), pa.py_buffer(b"\xff")])
    pairs = pa.StructArray.from_arrays([names, pa.array([b""])], fields=list(PAIRS))
    headers = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), pairs)
    rows = Rows(pa.RecordBatch.from_pydict({"value": [b"v"], "headers": headers.cast(HEADERS_TYPE)}))
    with pytest.raises(ValueError, match="a header whose key is not UTF-8"):
        rows.check(limit_bytes=100)
