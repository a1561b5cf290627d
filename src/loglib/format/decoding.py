"""Decoding: keys and values as text, and values as the columns of their JSON.

Invariant: each row is decoded as a whole, or an error names its partition and offset. Nothing is bent to fit a type:
1.5 is no integer, "5" is no number, and true is neither; only a whole number may stand for a floating one.
A field that the type does not have is left out, and one that a value does not have is null.

Python's `json` parses. The parser of pyarrow is hardly faster, takes two objects in a row for two records, and ends the
process at a lone `null` and at deep nesting.

Needs the extra [arrow]. Threads: immutable; safe for all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa
import pyarrow.types as types

from ..errors import DecodeError
from .arrow import schema_of

_PLACE = ("partition", "offset")  # of a row, for errors
_MOST_FIELDS = 1000  # of an object whose type is learned: more are keys of data, and the type of no column
_SHOWN = 60  # characters of a value in an error


class _MisfitError(Exception):
    """A value does not fit its type."""


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


_parse = json.JSONDecoder(parse_constant=_no_number).decode


# Deep nesting, and half of a surrogate pair, which JSON may name and UTF-8 does not have, beside it.
_MISFITS = (_MisfitError, RecursionError, UnicodeError)


class _BadRowError(Exception):
    """A row that cannot be decoded: its number, the column, and why."""

    def __init__(self, number: int, column: str, why: str) -> None:
        self.number, self.column, self.why = number, column, why


class Decoder:
    """Decodes the columns of batches: keys and values as text, or keys as text and values as a type for JSON."""

    def __init__(self, columns: Sequence[str] | None, value_type: pa.DataType | None) -> None:
        """`value_type` is that of the values' JSON; None means text."""
        raw = schema_of(columns)
        decoded = {"key": pa.string(), "value": pa.string() if value_type is None else value_type}
        self._value_type = value_type
        self.schema = pa.schema([each.with_type(decoded.get(each.name, each.type)) for each in raw])
        self.read_columns = [*raw.names, *(name for name in _PLACE if name not in raw.names)]

    def decode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of a batch of `read_columns` before the first that cannot be decoded: `DecodeError` if it is first.

        The batch has at least one row.
        """
        try:
            columns = [self._decoded(name, batch.column(at)) for at, name in enumerate(self.schema.names)]
        except _BadRowError as bad:
            if bad.number == 0:
                raise _error(bad, batch) from None
            return self.decode(batch.slice(0, bad.number))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def each(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches, decoded. `DecodeError` comes after all rows before it."""
        for batch in batches:
            while batch.num_rows:
                decoded = self.decode(batch)
                yield decoded
                batch = batch.slice(decoded.num_rows)

    def _decoded(self, name: str, column: pa.Array) -> pa.Array:
        if name == "value" and self._value_type is not None:
            return _typed(_parsed(column), self._value_type)
        return _text(column, name) if name in ("key", "value") else column


def learned_type(batches: Iterable[pa.RecordBatch]) -> pa.DataType:
    """The type of the JSON of all values; the batches have the columns value, partition and offset.

    Whole numbers become int64, or float64 if others are not whole; objects become structs of all their fields.
    Raises `DecodeError` for a value that is not JSON, and for one whose type does not go with those before it.
    """
    known = pa.null()
    for batch in batches:
        known = _learned_with(known, batch)
    return known


def json_type(schema: pa.Schema | pa.DataType | Mapping[str, pa.DataType | str]) -> pa.DataType:
    """The type for values that `schema` describes: the fields of an object, or a type. `ValueError` if JSON has none.

    All of it may be null.
    """
    wanted = schema if isinstance(schema, pa.DataType) else pa.struct(list(pa.schema(schema)))
    return _supported(wanted, "value")


def _supported(type_: pa.DataType, name: str) -> pa.DataType:
    if types.is_struct(type_):
        return pa.struct([(each.name, _supported(each.type, f"{name}.{each.name}")) for each in type_])
    if types.is_list(type_):
        return pa.list_(_supported(type_.value_type, f"{name}[]"))
    if not _python_types(type_) and not types.is_null(type_):
        raise ValueError(
            f"{name} is {type_}, which JSON does not have: booleans, integers, float32 and float64, strings, lists and "
            "structs can be read; read it as one of these, and cast the column"
        )
    return type_


def _python_types(type_: pa.DataType) -> set[type]:
    """The types of Python's values that a type takes, beside None."""
    if types.is_boolean(type_):
        return {bool}
    if types.is_integer(type_):
        return {int}
    if types.is_float32(type_) or types.is_float64(type_):
        return {int, float}
    if types.is_string(type_) or types.is_large_string(type_):
        return {str}
    if types.is_list(type_):
        return {list}
    return {dict} if types.is_struct(type_) else set()


def _error(bad: _BadRowError, batch: pa.RecordBatch) -> DecodeError:
    partition, offset = (batch.column(batch.schema.names.index(name))[bad.number].as_py() for name in _PLACE)
    return DecodeError(partition, offset, bad.column, bad.why)


def _text(column: pa.Array, name: str) -> pa.Array:
    """The column as text, over the same memory."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        raise _first_refused(column.to_pylist(), lambda item: (item or b"").decode(), name, "is not UTF-8") from None


def _parsed(column: pa.Array) -> list[Any]:
    """The JSON of a column of bytes as Python's values; null is None."""
    rows: list[Any] = []
    try:
        for text in _text(column, "value").to_pylist():
            rows.append(None if text is None else _parse(text))  # noqa: PERF401  An error needs their number.
    except (ValueError, RecursionError) as error:
        raise _BadRowError(len(rows), "value", f"is not JSON: {error}") from None
    return rows


def _typed(rows: list[Any], type_: pa.DataType) -> pa.Array:
    try:
        return _array(rows, type_, "value")
    except _MISFITS:
        raise _first_refused(rows, lambda row: _array([row], type_, "value"), "value", "does not fit") from None


def _first_refused(rows: list[Any], attempt: Callable[[Any], object], column: str, what: str) -> _BadRowError:
    """The error for the first row for which `attempt` raises."""
    refusals = ((number, _refusal(attempt, row)) for number, row in enumerate(rows))
    number, why = next((number, why) for number, why in refusals if why)
    return _BadRowError(number, column, f"{what}: {why}")


def _refusal(attempt: Callable[[Any], object], row: Any) -> str:
    try:
        attempt(row)
    except _MISFITS as error:
        return str(error)
    return ""


def _array(items: list[Any], type_: pa.DataType, name: str) -> pa.Array:
    """The items as an array of the type; `name` is how an error calls them."""
    kinds = set(map(type, items)) - {type(None)}
    if odd := kinds - _python_types(type_):
        shown = next(item for item in items if type(item) in odd)
        raise _MisfitError(f"{name} is {_shown(shown)}, where {type_} is expected")
    if types.is_struct(type_):
        return _structs(items, type_, name)
    if types.is_list(type_):
        return _lists(items, type_, name)
    try:
        if int in kinds and types.is_floating(type_):
            items = [None if item is None else float(item) for item in items]
        return pa.array(items, type_)
    except (pa.ArrowException, OverflowError) as error:
        raise _MisfitError(f"{name} is no {type_}: {error}") from None


def _structs(items: list[Any], type_: pa.DataType, name: str) -> pa.Array:
    if not len(type_):
        return pa.array([None if item is None else {} for item in items], type_)
    children = [
        _array([None if item is None else item.get(field.name) for item in items], field.type, f"{name}.{field.name}")
        for field in type_
    ]
    return pa.StructArray.from_arrays(children, fields=list(type_), mask=_nulls(items))


def _lists(items: list[Any], type_: pa.DataType, name: str) -> pa.Array:
    values = _array(list(chain.from_iterable(item or () for item in items)), type_.value_type, f"{name}[]")
    offsets = pa.array(accumulate((len(item or ()) for item in items), initial=0), pa.int32())
    return pa.ListArray.from_arrays(offsets, values, type=type_, mask=_nulls(items))


def _nulls(items: list[Any]) -> pa.Array:
    return pa.array([item is None for item in items], pa.bool_())


def _learned_with(known: pa.DataType, batch: pa.RecordBatch) -> pa.DataType:
    """The type that has the values of this type and of these rows. `DecodeError` for the first row that does not go."""
    try:
        return _joined(known, _parsed(batch.column("value")))
    except _BadRowError as bad:
        # All rows are parsed before the first is compared: one before this row may have no type with the others.
        _learned_with(known, batch.slice(0, bad.number))
        raise _error(bad, batch) from None


def _joined(known: pa.DataType, rows: list[Any]) -> pa.DataType:
    def learn(rows: list[Any]) -> None:
        nonlocal known
        known = _merged(known, _learned(rows, "value"), "value")

    try:
        learn(rows)
    except _MISFITS:
        what = "has no type that goes with the others"
        raise _first_refused(rows, lambda row: learn([row]), "value", what) from None
    return known


def _learned(items: list[Any], name: str) -> pa.DataType:
    kinds = set(map(type, items)) - {type(None)}
    if kinds == {list}:
        return pa.list_(_learned(list(chain.from_iterable(item or () for item in items)), f"{name}[]"))
    if kinds == {dict}:
        items = [item for item in items if item is not None]
        names = dict.fromkeys(chain.from_iterable(items))
        _check_fields(len(names), name)
        return pa.struct([(each, _learned([item.get(each) for item in items], f"{name}.{each}")) for each in names])
    for type_ in (pa.null(), pa.bool_(), pa.int64(), pa.float64(), pa.string()):
        if kinds <= _python_types(type_):
            return type_
    raise _MisfitError(f"{name} has values of several types")


def _merged(known: pa.DataType, other: pa.DataType, name: str) -> pa.DataType:
    """The type that has the values of both."""
    if known.equals(other) or types.is_null(other):
        return known
    if types.is_null(known):
        return other
    if {known, other} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if types.is_list(known) and types.is_list(other):
        return pa.list_(_merged(known.value_type, other.value_type, f"{name}[]"))
    if types.is_struct(known) and types.is_struct(other):
        fields = {each.name: each.type for each in known}
        for each in other:
            fields[each.name] = _merged(fields.get(each.name, pa.null()), each.type, f"{name}.{each.name}")
        _check_fields(len(fields), name)
        return pa.struct(list(fields.items()))
    raise _MisfitError(f"{name} is {other} here, and {known} in earlier records")


def _check_fields(count: int, name: str) -> None:
    if count > _MOST_FIELDS:
        raise _MisfitError(f"{name} has more than {_MOST_FIELDS:,} fields; name those that you want in a schema")


def _shown(item: Any) -> str:
    text = json.dumps(item)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
