"""format/decoding.py: a column of JSON holds what `json.loads` says, and a row that it cannot hold is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from builders import calm
from hypothesis import given, settings
from hypothesis import strategies as st

from loglib.errors import DecodeError
from loglib.format.decoding import Decoder, json_type, learned_type

NAMES = st.sampled_from(["page", "ms", "", "key", "ä"])
SCALARS = {
    pa.bool_(): st.booleans(),
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1),
    pa.float64(): st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(1 << 50), 1 << 50),
    pa.string(): st.text(),
    pa.null(): st.none(),
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)


def typed_values(type_: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type, also null ones, and objects without some of the fields."""
    if pa.types.is_struct(type_):
        return st.none() | st.fixed_dictionaries({}, optional={each.name: typed_values(each.type) for each in type_})
    if pa.types.is_list(type_):
        return st.none() | st.lists(typed_values(type_.value_type), max_size=3)
    return st.none() | SCALARS[type_]


TYPES = st.recursive(
    st.sampled_from(list(SCALARS)),
    lambda inner: inner.map(pa.list_) | st.dictionaries(NAMES, inner, max_size=3).map(
        lambda fields: pa.struct(list(fields.items()))
    ),
    max_leaves=5,
)  # fmt: skip


def batch_of(values: Sequence[bytes | None], keys: Sequence[bytes | None] = ()) -> pa.RecordBatch:
    """The values as a batch of partition 3, with offsets 0, 8, 16 and so on."""
    count = len(values)
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array(keys or [None] * count, pa.binary()), "value": pa.array(values, pa.binary()),
            "partition": pa.array([3] * count, pa.int32()), "offset": pa.array(range(0, 8 * count, 8), pa.int64()),
        }
    )  # fmt: skip


def decoded(values: list[bytes | None], type_: pa.DataType | None) -> list[Any]:
    """The values that a decoder makes of these, in several batches."""
    decoder = Decoder(["value"], type_)
    read = batch_of(values).select(decoder.read_columns)
    return [item for part in decoder.each([read.slice(0, 2), read.slice(2)]) for item in part.column(0).to_pylist()]


def full(value: Any, type_: pa.DataType) -> Any:
    """The value with all fields of the type and no other; a field that is missing is None."""
    if value is None:
        return None
    if pa.types.is_struct(type_):
        return {each.name: full(value.get(each.name), each.type) for each in type_}
    if pa.types.is_list(type_):
        return [full(each, type_.value_type) for each in value]
    return value


def holds(shown: Any, value: Any) -> bool:
    """True if the column shows all that the value has."""
    if isinstance(value, dict):
        return set(value) <= set(shown) and all(holds(shown[name], value.get(name)) for name in shown)
    if isinstance(value, list):
        return len(shown) == len(value) and all(map(holds, shown, value))
    return bool(shown == value) and (isinstance(shown, bool) is isinstance(value, bool))


@settings(calm, max_examples=60)
@given(st.data(), TYPES)
def test_json_of_a_type_comes_back_as_json_loads_reads_it(data: st.DataObject, type_: pa.DataType) -> None:
    values = data.draw(st.lists(typed_values(type_), max_size=5))
    stored: list[bytes | None] = [json.dumps(value, indent=data.draw(st.sampled_from([None, 2]))).encode()
                                  for value in values]  # fmt: skip
    assert decoded(stored, type_) == [full(json.loads(value or b""), type_) for value in stored]


@settings(calm, max_examples=60)
@given(st.lists(ANYTHING, max_size=5))
def test_learned_type_holds_all_values_or_names_the_first_that_goes_with_no_other(values: list[Any]) -> None:
    stored: list[bytes | None] = [json.dumps(value).encode() for value in values]
    read = batch_of(stored)
    try:
        learned = learned_type([read.slice(0, 2), read.slice(2)])
    except DecodeError as error:
        first = error.offset // 8
        assert error.partition == 3
        assert len(decoded(stored[:first], learned_type([read.slice(0, first)]))) == first
        with pytest.raises(DecodeError):
            learned_type([read.slice(0, first + 1)])
        return
    assert all(map(holds, decoded(stored, learned), values))


BAD = {
    "no text": (b"\xff", None, "the value is not UTF-8: .*position 0: invalid start byte"),
    "no JSON": (b"{x}", {"a": "int64"}, "the value is not JSON: Expecting property name"),
    "no number": (b'{"a": NaN}', {"a": "int64"}, "the value is not JSON: NaN is no number of JSON"),
    "no finite number": (b'{"a": -Infinity}', {"a": "double"}, "not JSON: -Infinity is no number of JSON"),
    "two objects": (b'{"a": 1}{"a": 2}', {"a": "int64"}, "the value is not JSON: Extra data"),
    "nothing": (b"", {"a": "int64"}, "the value is not JSON: Expecting value"),
    "no text as JSON": (b'{"a": "\xff"}', {"a": "string"}, "not UTF-8"),
    "deep nesting": (b"[" * 100_000, {"a": "int64"}, "the value is not JSON: maximum recursion"),
    "no object": (b"5", {"a": "int64"}, "the value does not fit: value is 5, where struct<a: int64> is expected"),
    "a fraction": (b'{"a": 1.5}', {"a": "int64"}, "value.a is 1.5, where int64 is expected"),
    "a text": (b'{"a": "5"}', {"a": "int64"}, 'value.a is "5", where int64'),
    "true": (b'{"a": true}', {"a": "float64"}, "value.a is true, where double"),
    "a large number": (b'{"a": 300}', {"a": "int8"}, "value.a is no int8: "),
    "a larger number": (b'{"a": 9223372036854775808}', {"a": "int64"}, "value.a is no int64: "),
    "text for a list": (b'{"a": "ab"}', {"a": pa.list_(pa.string())}, 'value.a is "ab", where list'),
    "inside a list": (b'{"a": [1, "x"]}', {"a": pa.list_(pa.int64())}, r'value.a\[\] is "x", where int64'),
    "half a pair": (b'{"a": "\\ud800"}', {"a": "string"}, "surrogates not allowed"),
}


@pytest.mark.parametrize("value, schema, why", BAD.values(), ids=BAD)
def test_row_that_does_not_decode_is_named_after_all_rows_before_it(value: bytes, schema: Any, why: str) -> None:
    decoder = Decoder(["value"], None if schema is None else json_type(schema))
    read = batch_of([b'{"a": null}'] * 3 + [value] + [b"{}"]).select(decoder.read_columns)
    parts = decoder.each([read])
    assert next(parts).num_rows == 3
    with pytest.raises(DecodeError, match=f"partition 3, offset 24: .*{why}"):
        next(parts)


UNLEARNED = {
    "a text among numbers": ([b'{"a": 1}', b'{"a": "x"}'], 'value.a is string here, and int64 in earlier records'),
    "an object among lists": ([b"[]", b"{}"], "value is struct<> here, and list<"),
    "a list of several types": ([b"[]", b'[1, "x"]'], r"value\[\] has values of several types"),
    "no JSON": ([b"{}", b"x"], "not JSON"),
    "a name that is no text": ([b"{}", b'{"\\ud800": 1}'], "surrogates not allowed"),
    "keys of data as fields": ([b"{}", json.dumps(dict.fromkeys(map(str, range(2000)))).encode()], "than 1,000 fields"),
}


@pytest.mark.parametrize("values, why", UNLEARNED.values(), ids=UNLEARNED)
@pytest.mark.parametrize("cut", [1, 2])
def test_value_whose_type_goes_with_no_other_is_named(values: list[bytes | None], why: str, cut: int) -> None:
    read = batch_of(values)
    with pytest.raises(DecodeError, match=f"partition 3, offset 8: .*{why}"):
        learned_type([read.slice(0, cut), read.slice(cut)])


@pytest.mark.parametrize("later", [b"x", b"\xff"], ids=["no JSON", "no text"])
def test_learning_names_the_first_bad_row_though_a_later_one_fails_in_an_earlier_step(later: bytes) -> None:
    read = batch_of([b"[]", b"{}", later])
    with pytest.raises(DecodeError, match="offset 8: .*value is struct<> here"):
        learned_type([read])


def test_numbers_of_both_kinds_are_floating_and_null_goes_with_all() -> None:
    first, second = batch_of([b'{"a": 1}', None, b'{"a": null, "b": [null]}']), batch_of([b'{"a": 1.5}', b"null"])
    learned = learned_type([first, second])
    assert learned == pa.struct([("a", pa.float64()), ("b", pa.list_(pa.null()))])
    assert learned_type([]) == pa.null()


def test_key_that_is_no_text_is_named() -> None:
    decoder = Decoder(["key", "value"], None)
    read = batch_of([b"v", b"w"], [b"k", b"\xfe"]).select(decoder.read_columns)
    parts = decoder.each([read])
    assert next(parts).to_pylist() == [{"key": "k", "value": "v"}]
    with pytest.raises(DecodeError, match="partition 3, offset 8: the key is not UTF-8"):
        next(parts)


def test_text_is_not_copied() -> None:
    decoder = Decoder(["value"], None)
    read = batch_of([b"v" * 1000] * 10).select(decoder.read_columns)
    assert decoder.decode(read).column(0).buffers()[2].address == read.column(0).buffers()[2].address


@pytest.mark.parametrize(
    "schema", [{"at": pa.timestamp("us")}, {"at": pa.list_(pa.date32())}, {"at": {}}, pa.binary(), pa.decimal128(5, 2)]
)
def test_types_that_json_does_not_have_are_refused(schema: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        json_type(schema)
