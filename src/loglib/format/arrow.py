"""Arrow: a batch's columns as a `pyarrow.RecordBatch` over the bytes that were read.

Invariant: keys, values and record headers are not copied. An array is built over them only after a check
that its offsets rise from 0 to the column's size. So a forged file gives an error, and no read outside the
buffer.

Needs the extra [arrow]. The core imports this module and its packages only when `Batch.to_arrow` is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from .bundle import Bundled, Items
from .columns import BadColumns, BinaryColumn, HeadersColumn, Layout, bitmap_bytes, header_columns, offsets_bytes
from .header import Header

_BINARY, _STRING, _TIMESTAMP = pa.binary(), pa.string(), pa.timestamp("us", tz="UTC")
_HEADER_TYPE = pa.struct([pa.field("key", _STRING), pa.field("value", _BINARY)])
HEADERS_TYPE = pa.list_(_HEADER_TYPE)
SCHEMA = pa.schema(
    [
        pa.field("key", _BINARY),
        pa.field("value", _BINARY),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", _TIMESTAMP),
        pa.field("headers", HEADERS_TYPE),  # null for a record without headers, as in Spark's Kafka source
    ]
)
_NAMES = tuple(SCHEMA.names)


def record_batch(
    partition: int, header: Header, at: Layout, data: bytes, body_at: int, *, columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """The batch whose body begins at `body_at` of `data`; `columns` picks from `SCHEMA`, in that order.

    Raises `BadColumns` if the columns do not fit each other.
    """
    view, schema = _View(header, memoryview(data)[body_at:], at), schema_of(columns)
    return pa.RecordBatch.from_arrays([view.column(name, partition) for name in schema.names], schema=schema)


def bundle_batch(
    partition: int, facts: Bundled, block: bytes, *, columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """The records of many small batches. Their keys and values are copied once, since a column is contiguous."""
    schema = schema_of(columns)
    return pa.RecordBatch.from_arrays(
        [_bundle_column(name, partition, facts, block) for name in schema.names], schema=schema
    )


def join(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """The batches as one; more than one are copied, since a column is contiguous."""
    first = batches[0]
    if len(batches) == 1:
        return first
    columns = [pa.concat_arrays(arrays) for arrays in zip(*(batch.columns for batch in batches), strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=first.schema)


def schema_of(columns: Sequence[str] | None) -> pa.Schema:
    """The schema of these columns, in this order; of all columns if `columns` is None."""
    if columns is None:
        return SCHEMA
    if isinstance(columns, str):
        raise TypeError(f"columns must be names in a list, not {columns!r}")
    return _schema_of(tuple(columns))


@lru_cache(maxsize=64)  # all batches of a stream have the same one
def _schema_of(columns: tuple[str, ...]) -> pa.Schema:
    unknown = [name for name in columns if name not in _NAMES]
    if unknown:
        raise ValueError(f"no column {unknown[0]!r}; there are {SCHEMA.names}")
    return pa.schema([SCHEMA.field(name) for name in columns])


class _View(NamedTuple):
    """One body, and the Arrow arrays over it."""

    header: Header
    body: memoryview
    at: Layout

    def column(self, name: str, partition: int) -> pa.Array:
        at, count = self.at, self.header.record_count
        match name:
            case "key":
                return _nulls(_BINARY, count) if at.keys is None else self._binary(_BINARY, at.keys)
            case "value":
                return self._binary(_BINARY, at.values)
            case "partition":
                return _partition_column(partition, count)
            case "offset":
                first = self.header.base_offset
                return _numbers(pa.int64(), np.arange(first, first + count, dtype=np.int64))
            case "timestamp":
                return self._timestamps(at.timestamps)
            case _:
                return _nulls(HEADERS_TYPE, count) if at.headers is None else self._headers(at.headers)

    def _binary(self, type_: pa.DataType, at: BinaryColumn) -> pa.Array:
        count, offsets_at, items_at, size, validity_at = at
        offsets = self._offsets(offsets_at, count, size)
        validity = None
        if validity_at is not None:
            validity = pa.py_buffer(self.body[validity_at : validity_at + bitmap_bytes(count)])
        items = pa.py_buffer(self.body[items_at : items_at + size])
        return pa.Array.from_buffers(type_, count, [validity, offsets, items])

    def _offsets(self, at: int, count: int, size: int | None) -> pa.Buffer:
        """An offsets column that rises from 0, and ends at `size` if that is given."""
        needed = offsets_bytes(count)
        buffer = self.body[at : at + needed]
        if len(buffer) < needed:
            raise BadColumns(at, "the end of the body", f"{count + 1} column offsets")
        offsets = np.frombuffer(buffer, "<i4")
        rising = offsets[0] == 0 and bool((offsets[1:] >= offsets[:-1]).all())
        if not rising or (size is not None and offsets[-1] != size):
            raise BadColumns(at, "column offsets that do not rise from 0 to the column's size", f"0 to {size}")
        return pa.py_buffer(buffer)

    def _timestamps(self, at: int | None) -> pa.Array:
        if at is None:
            return _numbers(_TIMESTAMP, np.full(self.header.record_count, self.header.base_timestamp, np.int64))
        stored = pa.py_buffer(self.body[at : at + 8 * self.header.record_count])
        return pa.Array.from_buffers(_TIMESTAMP, self.header.record_count, [None, stored])

    def _headers(self, at: HeadersColumn) -> pa.Array:
        sets = 1 if at.is_shared else self.header.record_count
        counts = self._offsets(at.counts, sets, None)
        running = np.frombuffer(counts, "<i4")
        present = pa.py_buffer(np.packbits(running[1:] > running[:-1], bitorder="little"))
        names_at, values_at = header_columns(self.body, at, int(running[-1]))
        names, values = self._binary(_STRING, names_at), self._binary(_BINARY, values_at)
        try:
            names.validate(full=True)  # a reader of a name that is not UTF-8 would fail
        except pa.ArrowInvalid as error:
            raise BadColumns(names_at.items, "a header name that is not UTF-8", "UTF-8") from error
        if at.is_shared:
            if not len(names):
                return _nulls(HEADERS_TYPE, self.header.record_count)
            names, values = (_repeated(each, self.header.record_count) for each in (names, values))
            present, counts = None, pa.py_buffer(np.arange(0, len(names) + 1, int(running[-1]), dtype=np.int32))
        pairs = pa.StructArray.from_arrays([names, values], fields=list(_HEADER_TYPE))
        return pa.Array.from_buffers(HEADERS_TYPE, self.header.record_count, [present, counts], children=[pairs])


def _repeated(column: pa.Array, times: int) -> pa.Array:
    """A column of byte strings, repeated."""
    _, offsets, content = column.buffers()
    bounds = np.frombuffer(offsets, "<i4", len(column) + 1)
    starts = np.arange(times, dtype=np.int32)[:, None] * bounds[-1] + bounds[:-1]
    offsets = np.append(starts.ravel(), np.int32(times * int(bounds[-1])))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(content.to_pybytes() * times)]
    return pa.Array.from_buffers(column.type, times * len(column), buffers)


def _bundle_column(name: str, partition: int, facts: Bundled, block: bytes) -> pa.Array:
    count = len(facts.offsets)
    match name:
        case "key":
            return _nulls(_BINARY, count) if facts.keys is None else _gathered(block, facts.keys, facts.keyed)
        case "value":
            return _gathered(block, facts.values, None)
        case "partition":
            return _partition_column(partition, count)
        case "offset":
            return _numbers(pa.int64(), facts.offsets)
        case "timestamp":
            return _numbers(_TIMESTAMP, facts.timestamps)
        case _:
            return _nulls(HEADERS_TYPE, count)


def _gathered(block: bytes, items: Items, present: np.ndarray[Any, Any] | None) -> pa.Array:
    """The items as one array, copied batch by batch.

    Arrow sees each column of the block as an item, and the bytes between two columns as another one. Taking every
    second of them copies the columns in one loop in C++.
    """
    count = len(items.columns)
    bounds = np.empty(2 * count + 1, np.int32)
    bounds[0:-1:2], bounds[1::2], bounds[-1] = items.columns, items.columns + items.sizes, len(block)
    pieces = pa.Array.from_buffers(_BINARY, 2 * count, [None, pa.py_buffer(bounds), pa.py_buffer(block)])
    joined = pieces.take(_numbers(pa.int32(), np.arange(0, 2 * count, 2, dtype=np.int32))).buffers()[2]
    offsets = np.zeros(len(items.starts) + 1, np.int32)
    np.cumsum(items.ends - items.starts, out=offsets[1:])
    validity = None if present is None else pa.py_buffer(np.packbits(present, bitorder="little"))
    return pa.Array.from_buffers(_BINARY, len(items.starts), [validity, pa.py_buffer(offsets), joined])


def _numbers(type_: pa.DataType, numbers: np.ndarray[Any, Any]) -> pa.Array:
    """An array over NumPy numbers. It takes half the time of `pa.array`, which visits each number."""
    return pa.Array.from_buffers(type_, len(numbers), [None, pa.py_buffer(numbers)])


# These columns are the same in many batches. Arrays are immutable, so batches may share them. Large batches get new
# ones, because their cost is small beside that of the records. At most 6 MiB are kept.
_KEPT_MOST = 1 << 14  # records


def _nulls(type_: pa.DataType, count: int) -> pa.Array:
    return (_kept_nulls if count <= _KEPT_MOST else _kept_nulls.__wrapped__)(type_, count)


def _partition_column(partition: int, count: int) -> pa.Array:
    return (_kept_partition if count <= _KEPT_MOST else _kept_partition.__wrapped__)(partition, count)


@lru_cache(maxsize=16)
def _kept_nulls(type_: pa.DataType, count: int) -> pa.Array:
    return pa.nulls(count, type_)


@lru_cache(maxsize=64)
def _kept_partition(partition: int, count: int) -> pa.Array:
    return _numbers(pa.int32(), np.full(count, partition, np.int32))
