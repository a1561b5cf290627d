"""Encoding: Arrow columns as the body of a batch, without a Python object for each record.

Invariant: the bytes are those that `encode_body` makes of the same records. Both are columns, so Arrow's offsets and
bytes are copied as they are: offsets begin at 0, and a null takes no bytes.

    column      Arrow type                                   if it is not there
    value       binary                                       never
    key         binary                                       no record has a key
    timestamp   int64, microseconds, without nulls           the time of appending
    headers     list<struct<key: string, value: binary>>     no record has headers

Processes: pure; executors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..config import MAX_BATCH_BYTES, TopicConfig
from ..errors import RecordTooLargeError
from ..format.batch import Body, body_of
from ..format.codec import codec_id
from ..format.columns import HEADERS, KEYS, NULL_KEYS, NULL_VALUES, TIMESTAMPS, Encoded, aligned
from ..system.files import Buffer

__all__ = ["bodies", "record_sizes"]

Numbers = np.ndarray[Any, Any]


def bodies(records: pa.Table, config: TopicConfig) -> Iterator[Body]:
    """The records as batches of about the configured size. A larger record gets its own batch.

    Raises `RecordTooLargeError` for a record above the limit of the topic.
    """
    whole = records.combine_chunks().to_batches()
    codec = codec_id(config.compression)
    for batch in whole:
        sizes = record_sizes(batch)
        _check_sizes(sizes, config.max_record_bytes)
        ends = np.cumsum(sizes)
        start = done = 0
        while start < batch.num_rows:
            full = int(np.searchsorted(ends, done + config.batch_bytes, side="right"))
            stop = min(max(full, start + 1), start + config.batch_records, batch.num_rows)
            yield _body(batch.slice(start, stop - start), codec)
            start, done = stop, int(ends[stop - 1])


def record_sizes(batch: pa.RecordBatch) -> Numbers:
    """The size in bytes of each record, as the limits of a topic count it."""
    sizes = np.zeros(batch.num_rows, np.int64)
    for name in ("value", "key"):
        if name in batch.schema.names:
            sizes += _lengths(batch.column(name))
    if "headers" in batch.schema.names:
        headers = batch.column("headers")
        names, values = _pairs(headers)
        ends = np.concatenate(([0], np.cumsum(_lengths(names.cast(pa.binary())) + _lengths(values))))
        counts = _offsets_of(_counts(headers))
        sizes += ends[counts[1:]] - ends[counts[:-1]]
    return sizes


def _check_sizes(sizes: Numbers, limit: int) -> None:
    too_large = sizes > limit
    if too_large.any():
        first = int(np.argmax(too_large))
        raise RecordTooLargeError("a record", int(sizes[first]), limit)


# --- one batch -------------------------------------------------------------------------------------------


def _body(batch: pa.RecordBatch, codec: int) -> Body:
    names = batch.schema.names
    flags, before, behind = 0, [], []
    values = batch.column("value")
    keys = batch.column("key") if "key" in names else None
    if keys is not None and keys.null_count == len(keys):
        keys = None
    value_offsets, value_bytes = _binary(values)
    before.append(value_offsets)
    behind.append(value_bytes)
    key_bytes = header_bytes = b""
    if keys is not None:
        flags |= KEYS
        key_offsets, key_bytes = _binary(keys)
        before.append(key_offsets)
        behind.append(key_bytes)
    if values.null_count:
        flags |= NULL_VALUES
        before.append(_validity(values))
    if keys is not None and keys.null_count:
        flags |= NULL_KEYS
        before.append(_validity(keys))
    base = most = None
    if "timestamp" in names:
        times = batch.column("timestamp").to_numpy()
        base, most = int(times[0]), int(times.max())
        if most != base or int(times.min()) != base:
            flags |= TIMESTAMPS
            before.append(times.astype("<i8").tobytes())
    if "headers" in names:
        counts = _counts(batch.column("headers"))
        if counts.any():
            flags |= HEADERS
            header_bytes = _header_section(batch.column("headers"))
            before.append(_offsets_of(counts).tobytes())
            behind.append(header_bytes)
    sizes = len(value_bytes), len(key_bytes), len(header_bytes)
    if sum(sizes) > MAX_BATCH_BYTES:
        raise RecordTooLargeError("the batch", sum(sizes), MAX_BATCH_BYTES)
    encoded = Encoded(_padded([*before, *behind]), flags, *sizes, base, most)
    return body_of(encoded, batch.num_rows, codec=codec)


def _padded(columns: list[Buffer]) -> list[Buffer]:
    """The columns, each with zeros up to the next multiple of 8; empty ones are left out."""
    parts: list[Buffer] = []
    for column in columns:
        if len(column):
            parts.append(column)
            if len(column) & 7:
                parts.append(bytes(aligned(len(column)) - len(column)))
    return parts


def _binary(column: pa.Array) -> tuple[bytes, bytes]:
    """The offsets and the bytes of a column of binary or string."""
    if column.null_count:
        column = pc.fill_null(column, b"")  # a null of Arrow may have bytes
    _, offsets_buffer, items = column.buffers()
    offsets = np.frombuffer(offsets_buffer, "<i4", len(column) + 1, 4 * column.offset)
    start, stop = int(offsets[0]), int(offsets[-1])
    content = b"" if start == stop else memoryview(items)[start:stop].tobytes()
    return (offsets - offsets[0]).astype("<i4").tobytes(), content


def _validity(column: pa.Array) -> bytes:
    return np.packbits(column.is_valid().to_numpy(zero_copy_only=False), bitorder="little").tobytes()


def _lengths(column: pa.Array) -> Numbers:
    found: Numbers = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    return found.astype(np.int64)


# --- headers -----------------------------------------------------------------------------------------------


def _counts(headers: pa.ListArray) -> Numbers:
    """The number of headers of each record."""
    found: Numbers = pc.fill_null(pc.list_value_length(headers), 0).to_numpy(zero_copy_only=False)
    return found


def _offsets_of(counts: Numbers) -> Numbers:
    return np.concatenate(([0], np.cumsum(counts))).astype("<i4")


def _pairs(headers: pa.ListArray) -> tuple[pa.Array, pa.Array]:
    """The names and the values of all headers. `ValueError` if one is null: a log has no such header."""
    pairs = headers.flatten()
    names, values = pairs.flatten()
    if pairs.null_count or names.null_count or values.null_count:
        raise ValueError("a header whose key or value is null; leave it out, or give it an empty value")
    return names, values


def _header_section(headers: pa.ListArray) -> bytes:
    names, values = _pairs(headers)
    name_offsets, name_bytes = _binary(names)
    value_offsets, value_bytes = _binary(values)
    return b"".join(_padded([name_offsets, value_offsets, name_bytes, value_bytes]))
