"""Arrow columns: the data of a caller of `append_arrow`, as record batches of the columns of a log.

Invariant: a batch that `Source.batches` yields has only these columns, in these types, with header names in UTF-8.
Content that is binary or string already is not copied. Everything else raises a `TypeError` or `ValueError` that says
what to give instead.

    column      type                                         may be given as
    value       binary or large_binary                       also string, large_string, views, fixed size, dictionary
    key         the same                                     the same
    timestamp   int64, microseconds UTC, null: no time       int64, or timestamp of any unit with a time zone
    headers     list<struct<key: string, value: binary>>     what Arrow casts to this: large lists, maps, views
    partition   int64, null: by the key                      any integers

Needs the extra [arrow]. Threads: a source belongs to one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..format.arrow import HEADERS_TYPE
from .record_arguments import look_at_unit

_PIECE_BYTES = 16 << 20  # converted together, if a column must be converted
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
# Beside `offset`, in the output of loglib and of Spark: the places of records in the log that they were read from.
_PLACE = ("topic", "partition", "offset", "timestampType")
_WANTED = "a pyarrow Table, RecordBatch or RecordBatchReader, or an object with __arrow_c_stream__ (a data frame)"
_PACKING = (
    "pack what belongs to the value into one column (as JSON, or rows together as an Arrow IPC stream; docs/arrow.md "
    "shows both), or leave it out with select()"
)
_INDEX = "it is the index of the data frame: give frame.reset_index(drop=True)"


class Names(NamedTuple):
    """The names of the columns that a caller gives. None: the default name, if there is such a column."""

    value: str | None = None
    key: str | None = None
    timestamp: str | None = None
    headers: str | None = None
    partition: str | None = None


class Source(NamedTuple):
    """The records of one call."""

    given: Iterable[pa.RecordBatch]
    convert: Callable[[pa.RecordBatch], Iterator[pa.RecordBatch]]
    columns: tuple[str, ...]  # those of the table above that the data has
    records: int | None  # their number, if they are in memory: then `batches` can be called again. None: a stream

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The records, in batches as they were given or smaller."""
        for batch in self.given:
            yield from self.convert(batch)


def open_source(data: Any, names: Names) -> Source:
    """Check the columns of the data. The records are not checked yet."""
    given: Iterable[pa.RecordBatch]
    match data:
        case pa.RecordBatch():
            schema, given = data.schema, [data]
        case pa.Table():
            schema, given = data.schema, data.to_batches()
        case pa.RecordBatchReader():
            schema, given = data.schema, data
        case _:
            given = imported = _imported(data)
            schema = imported.schema
    places = _places(schema, names)
    converters = {name: _converter(name, schema.field(place)) for name, place in places.items()}

    def convert(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        # A view or a dictionary may expand to more than its own memory, so it is converted in parts.
        step = max(1, batch.num_rows * _PIECE_BYTES // max(batch.nbytes, 1))
        if not any(each.copies for each in converters.values()):
            step = max(batch.num_rows, 1)
        for start in range(0, batch.num_rows, step):
            part = batch.slice(start, step)
            columns = {name: each.convert(part.column(places[name])) for name, each in converters.items()}
            yield pa.RecordBatch.from_pydict(columns)

    records = sum(map(len, given)) if isinstance(given, list) else None
    return Source(given, convert, tuple(places), records)


def _imported(data: Any) -> pa.RecordBatchReader:
    polars = sys.modules.get("polars")
    if polars is not None and isinstance(data, polars.DataFrame) and polars.Object in data.dtypes:
        # Polars would give their addresses in memory, as bytes.
        raise TypeError("the data frame has a column of Python objects; a value is bytes or text")
    if hasattr(data, "__arrow_c_stream__") and not isinstance(data, pa.ChunkedArray):
        try:
            return pa.RecordBatchReader.from_stream(data)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:  # a stream of single columns
            raise TypeError(f"data must be {_WANTED}; {type(data).__name__} has no named columns ({error})") from error
    if hasattr(data, "__arrow_c_array__") and not isinstance(data, pa.Array):
        try:
            batch = pa.record_batch(data)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise TypeError(f"data must be {_WANTED}; {type(data).__name__} has no named columns ({error})") from error
        return pa.RecordBatchReader.from_batches(batch.schema, [batch])
    hint = ", as in pa.table({'value': data})" if isinstance(data, pa.Array | pa.ChunkedArray) else ""
    raise TypeError(f"data must be {_WANTED}, not {type(data).__name__}{hint}")


# --- which columns ------------------------------------------------------------------------------------------


def _places(schema: pa.Schema, names: Names) -> dict[str, int]:
    """The number of each column that is used, by the name that it has in a log."""
    places: dict[str, int] = {}
    for name, given in names._asdict().items():
        if given is not None and not isinstance(given, str):
            raise TypeError(f"{name} must be the name of a column, not {given!r}")
        found = schema.get_all_field_indices(name if given is None else given)
        if name == "partition" and given is None:
            continue  # in the output of a log it is the place where a record was, so it is used only on request
        if len(found) > 1:
            raise ValueError(f"column {schema.field(found[0]).name!r} is there {len(found)} times")
        if found:
            places[name] = found[0]
        elif given is not None:
            raise ValueError(f"no column {given!r} for {name}; there are {schema.names}")
        elif name == "value":
            raise ValueError(f"no column 'value'; there are {schema.names}: name one, as in value='payload'")
    from_a_log = {"offset", "partition"} <= set(schema.names)
    for place, field in enumerate(schema):
        if place in places.values() or (from_a_log and field.name in _PLACE):
            continue
        if field.name == "partition":
            raise ValueError("column 'partition' is not used unless you name it: give partition='partition'")
        is_index = field.name in (schema.pandas_metadata or {}).get("index_columns", ())  # of a pandas data frame
        advice = _INDEX if is_index else _PACKING
        raise ValueError(f"column {field.name!r} is none of value, key, timestamp, headers, partition; {advice}")
    return places


# --- one column ---------------------------------------------------------------------------------------------


class _Converter(NamedTuple):
    convert: Callable[[pa.Array], pa.Array]
    copies: bool = False


def _converter(name: str, field: pa.Field) -> _Converter:
    if name in ("value", "key"):
        return _binary_converter(name, field)
    if name == "timestamp":
        return _times_converter(field)
    if name == "headers":
        return _headers_converter(field)
    if not pa.types.is_integer(field.type):
        raise TypeError(f"column {field.name!r} must have the numbers of partitions, not {field.type}")
    return _Converter(lambda column: column.cast(pa.int64()))


def _binary_converter(name: str, field: pa.Field) -> _Converter:
    kind, types = field.type, pa.types
    if isinstance(kind, pa.BaseExtensionType):  # for example JSON and UUID: their storage
        stored = _binary_converter(name, field.with_type(kind.storage_type))
        return stored._replace(convert=lambda column: stored.convert(column.storage))
    if types.is_binary(kind) or types.is_large_binary(kind):
        return _Converter(lambda column: column)
    if types.is_string(kind):
        return _Converter(lambda column: column.cast(pa.binary()))
    if types.is_large_string(kind):
        return _Converter(lambda column: column.cast(pa.large_binary()))
    coded = types.is_dictionary(kind)
    content = kind.value_type if coded else kind
    known = (
        types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view, types.is_string,
        types.is_large_string, types.is_string_view, types.is_null,
    )  # fmt: skip
    if not any(each(content) for each in known):
        raise TypeError(
            f"column {field.name!r} is {kind}, and a {name} is bytes: give binary or string, for example "
            "pc.cast(column, pa.string()), or JSON"
        )
    if coded:
        return _Converter(lambda column: column.dictionary.cast(pa.large_binary()).take(column.indices), copies=True)
    return _Converter(lambda column: column.cast(pa.large_binary()), copies=True)


def _times_converter(field: pa.Field) -> _Converter:
    kind = field.type
    if pa.types.is_int64(kind):
        return _Converter(_checked_times)
    if pa.types.is_null(kind):
        return _Converter(lambda column: column.cast(pa.int64()))
    if not pa.types.is_timestamp(kind):
        raise TypeError(f"column {field.name!r} is {kind}; give a timestamp with a time zone, or int64 microseconds")
    if kind.tz is None:
        raise ValueError(
            f"column {field.name!r} has times without a zone; if they are UTC, cast it to pa.timestamp('us', 'UTC')"
        )
    return _Converter(lambda column: _in_microseconds(column.view(pa.int64()), kind.unit, field.name))


def _checked_times(column: pa.Array) -> pa.Array:
    if column.null_count < len(column):
        look_at_unit(pc.max(column).as_py())
    return column


def _in_microseconds(column: pa.Array, unit: str, name: str) -> pa.Array:
    """Times since 1970 in microseconds; nanoseconds are rounded down."""
    if unit == "us":
        return column
    if unit == "ns":
        mask = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
        return pa.array(np.floor_divide(column.fill_null(0).to_numpy(), 1000), mask=mask)
    try:
        return pc.multiply_checked(column, 10**6 // _PER_SECOND[unit])
    except pa.ArrowInvalid as error:
        raise ValueError(f"column {name!r} has a time that does not fit 64 bits in microseconds") from error


def _headers_converter(field: pa.Field) -> _Converter:
    wanted = TypeError(f"column {field.name!r} is {field.type}; headers are {HEADERS_TYPE}, or a map")
    kind = field.type
    pair = kind.value_type if _is_list(kind) else None
    if pa.types.is_null(kind) or pa.types.is_map(kind):
        pass
    elif pair is None or not pa.types.is_struct(pair) or {each.name for each in pair} != {"key", "value"}:
        raise wanted

    def convert(column: pa.Array) -> pa.Array:
        if kind != HEADERS_TYPE:
            try:
                column = column.cast(HEADERS_TYPE)
            except pa.ArrowInvalid as error:  # a text that is not UTF-8
                raise ValueError(f"column {field.name!r}: {error}") from error
            except (pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
                raise wanted from error
        return column

    return _Converter(convert, copies=kind != HEADERS_TYPE)


def _is_list(kind: pa.DataType) -> bool:  # pyarrow casts a list_view with nulls wrongly (26.0.1)
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
