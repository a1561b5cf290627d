"""Arrow: a batch's columns as a `pyarrow.RecordBatch` over the very bytes that were read.

Invariant: keys, values and record headers are not copied. An array is built over them only after
its offsets have been proved to rise from 0 to the column's size, so that a forged file gives an
error and no read outside the buffer.

Needs the extra [arrow]; nothing in the core imports this module, or what it needs, before
`Batch.to_arrow` is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from .batch import BadBatch, Header, Layout

__all__ = ["SCHEMA", "record_batch"]

_BINARY, _STRING, _TIMESTAMP = pa.binary(), pa.string(), pa.timestamp("us", tz="UTC")
_HEADER_TYPE = pa.struct([pa.field("key", _STRING), pa.field("value", _BINARY)])
_HEADERS_TYPE = pa.list_(_HEADER_TYPE)
SCHEMA = pa.schema(
    [
        pa.field("key", _BINARY),
        pa.field("value", _BINARY),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", _TIMESTAMP),
        pa.field("headers", _HEADERS_TYPE),  # null for a record without headers, as in Spark's Kafka source
    ]
)
_NAMES = tuple(SCHEMA.names)


def record_batch(
    partition: int, header: Header, at: Layout, data: bytes, body_at: int, *, columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """The batch whose body begins at `body_at` of `data`; `columns` picks from `SCHEMA`, in that order.

    Raises `BadBatch` when the columns do not fit each other.
    """
    view = _View(header, memoryview(data)[body_at:], at)
    if columns is None:
        columns, schema = _NAMES, SCHEMA
    else:
        if isinstance(columns, str):
            raise TypeError(f"columns must be names in a list, not {columns!r}")
        columns = list(columns)
        unknown = [name for name in columns if name not in _NAMES]
        if unknown:
            raise ValueError(f"no column {unknown[0]!r}; there are {SCHEMA.names}")
        schema = pa.schema([SCHEMA.field(name) for name in columns])
    return pa.RecordBatch.from_arrays([view.column(name, partition) for name in columns], schema=schema)


class _View:
    """One body, and the Arrow arrays over it."""

    def __init__(self, header: Header, body: memoryview, at: Layout) -> None:
        self._header = header
        self._body = body
        self._at = at
        self._count = header.record_count

    def column(self, name: str, partition: int) -> pa.Array:
        header, count = self._header, self._count
        match name:
            case "key":
                return self._keys()
            case "value":
                at = self._at
                return self._binary(at.value_offsets, at.values, header.value_bytes, at.value_validity)
            case "partition":
                return _partition_column(partition, count)
            case "offset":
                first = header.base_offset
                return _numbers(pa.int64(), np.arange(first, first + count, dtype=np.int64))
            case "timestamp":
                return self._timestamps()
            case _:
                return self._headers()

    def _keys(self) -> pa.Array:
        at = self._at
        if at.key_offsets < 0:
            return _nulls(_BINARY, self._count)
        return self._binary(at.key_offsets, at.keys, self._header.key_bytes, at.key_validity)

    def _binary(self, offsets_at: int, bytes_at: int, size: int, validity_at: int) -> pa.Array:
        offsets = self._offsets(offsets_at, self._count, size)
        validity = None
        if validity_at >= 0:
            validity = pa.py_buffer(self._body[validity_at : validity_at + -(-self._count // 8)])
        items = pa.py_buffer(self._body[bytes_at : bytes_at + size])
        return pa.Array.from_buffers(_BINARY, self._count, [validity, offsets, items])

    def _offsets(self, at: int, count: int, size: int | None) -> pa.Buffer:
        """An offsets column that rises from 0, to `size` if that is known."""
        buffer = self._body[at : at + 4 * (count + 1)]
        if len(buffer) < 4 * (count + 1):
            raise BadBatch(at, "the end of the body", f"{count + 1} column offsets")
        offsets = np.frombuffer(buffer, "<i4")
        rising = offsets[0] == 0 and bool((offsets[1:] >= offsets[:-1]).all())
        if not rising or (size is not None and offsets[-1] != size):
            raise BadBatch(at, "column offsets that do not rise from 0 to the column's size", f"0 to {size}")
        return pa.py_buffer(buffer)

    def _timestamps(self) -> pa.Array:
        at = self._at.timestamps
        if at < 0:
            return _numbers(_TIMESTAMP, np.full(self._count, self._header.base_timestamp, np.int64))
        stored = pa.py_buffer(self._body[at : at + 8 * self._count])
        return pa.Array.from_buffers(_TIMESTAMP, self._count, [None, stored])

    def _headers(self) -> pa.Array:
        count, at = self._count, self._at
        if at.header_counts < 0:
            return _nulls(_HEADERS_TYPE, count)
        counts = self._offsets(at.header_counts, count, None)
        running = np.frombuffer(counts, "<i4")
        total = int(running[-1])
        present = pa.py_buffer(np.packbits(running[1:] > running[:-1], bitorder="little"))
        start, end = at.headers, at.headers + self._header.header_bytes
        aligned = 4 * (total + 1) + 7 & ~7
        if start + 2 * aligned > end:
            raise BadBatch(start, f"{total} record headers", "as many as their section has room for")
        names_at = start + 2 * aligned
        name_bytes = self._last_offset(start, total)
        values_at = names_at + (name_bytes + 7 & ~7)
        value_bytes = self._last_offset(start + aligned, total)
        if name_bytes < 0 or value_bytes < 0 or values_at + value_bytes > end:
            raise BadBatch(start, "record headers beyond their section", f"at most {end - start} bytes")
        names = self._child(_STRING, start, names_at, name_bytes, total)
        values = self._child(_BINARY, start + aligned, values_at, value_bytes, total)
        try:
            names.validate(full=True)  # a name that is not UTF-8 would break whoever reads the string
        except pa.ArrowInvalid as error:
            raise BadBatch(start, "a header name that is not UTF-8", "UTF-8") from error
        pairs = pa.StructArray.from_arrays([names, values], fields=list(_HEADER_TYPE))
        return pa.Array.from_buffers(_HEADERS_TYPE, count, [present, counts], children=[pairs])

    def _last_offset(self, at: int, count: int) -> int:
        return int.from_bytes(self._body[at + 4 * count : at + 4 * count + 4], "little", signed=True)

    def _child(self, type_: pa.DataType, offsets_at: int, bytes_at: int, size: int, count: int) -> pa.Array:
        items = pa.py_buffer(self._body[bytes_at : bytes_at + size])
        return pa.Array.from_buffers(type_, count, [None, self._offsets(offsets_at, count, size), items])


def _numbers(type_: pa.DataType, numbers: np.ndarray[Any, Any]) -> pa.Array:
    """An array over numbers made here; half the time of `pa.array`, which has to look at them."""
    return pa.Array.from_buffers(type_, len(numbers), [None, pa.py_buffer(numbers)])


# Columns that are the same for batch after batch; arrays do not change, so batches may share them. Those of large
# batches are made anew, which their records outweigh: 6 MiB are kept in all.
_KEPT_MOST = 1 << 14  # records


def _nulls(type_: pa.DataType, count: int) -> pa.Array:
    return (_kept_nulls if count <= _KEPT_MOST else _made_nulls)(type_, count)


def _partition_column(partition: int, count: int) -> pa.Array:
    return (_kept_partition if count <= _KEPT_MOST else _made_partition)(partition, count)


@lru_cache(maxsize=16)
def _kept_nulls(type_: pa.DataType, count: int) -> pa.Array:
    return _made_nulls(type_, count)


def _made_nulls(type_: pa.DataType, count: int) -> pa.Array:
    return pa.nulls(count, type_)


@lru_cache(maxsize=64)
def _kept_partition(partition: int, count: int) -> pa.Array:
    return _made_partition(partition, count)


def _made_partition(partition: int, count: int) -> pa.Array:
    return _numbers(pa.int32(), np.full(count, partition, np.int32))
