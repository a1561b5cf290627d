"""Record arguments: the records of callers, checked and converted to columns.

Invariant: a checked value or key is bytes or None, a timestamp is whole microseconds, and headers are a tuple of
pairs. Every other argument raises a `TypeError` or `ValueError` that says what to pass instead, before anything is
appended.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import repeat
from operator import add, is_
from typing import Any

from ..config.times import from_datetime
from ..errors import RecordTooLargeError
from ..format.columns import Columns, Headers, common_headers, headers_bytes
from ..format.record import new_tuple

HeadersLike = Mapping[str, bytes] | Iterable[tuple[str, bytes]]

_INT64 = range(-(1 << 63), 1 << 63)
# Taken as microseconds, these are times from 1970 to 1973; as seconds, from 2001 to 5138, and as milliseconds as well.
_OTHER_UNITS = range(10**9, 10**14)
_FIRST_MS = 10**12


def record_columns(
    value: Any, key: Any, timestamp: Any, headers: HeadersLike | None, *, limit_bytes: int
) -> tuple[Columns, int]:
    """One record as columns, and its size in bytes; `RecordTooLargeError` above the limit."""
    if type(value) is bytes and key is None and timestamp is None and headers is None and len(value) <= limit_bytes:
        return new_tuple(Columns, ([value], None, None, None)), len(value)  # the common case, without a call
    value = _binary("value", value)
    key = _binary("key", key)
    pairs = None if headers is None else header_pairs(headers)
    size = len(value or b"") + len(key or b"") + headers_bytes(pairs or ())
    if size > limit_bytes:
        raise RecordTooLargeError("the record", size, limit_bytes)
    columns = Columns(
        [value],
        None if key is None else [key],
        None if timestamp is None else [timestamp_us(timestamp)],
        None if not pairs else [pairs],
    )
    return columns, size


def gather_columns(
    values: Iterable[Any],
    keys: Iterable[Any] | None,
    timestamps: Iterable[Any] | None,
    headers: Iterable[HeadersLike | None] | None,
) -> Columns:
    """Many records as columns of equal length. Their values and keys are not yet checked."""
    value_column = _sequence("value", values)
    key_column = None if keys is None else _sequence("key", keys)
    time_column = None if timestamps is None else _time_column(timestamps)
    header_column = None if headers is None else _header_column(headers)
    count = len(value_column)
    for name, column in (("keys", key_column), ("timestamps", time_column), ("headers", header_column)):
        if column is not None and len(column) != count:
            raise ValueError(f"{len(column)} {name} for {count} values; give one for each value")
    return Columns(value_column, key_column, time_column, header_column)


def check_columns(columns: Columns, *, limit_bytes: int, first: int = 0) -> tuple[Columns, int]:
    """Check the values and keys of gathered columns. Returns the columns, and their total size in bytes.

    The limit holds for each record; `first` is the number of the first record, for error messages.
    """
    values, value_bytes = _sized_column("value", columns.values)
    keys, key_bytes = (None, 0) if columns.keys is None else _sized_column("key", columns.keys)
    columns = Columns(values, keys, columns.timestamps, columns.headers)
    size = value_bytes + key_bytes + (0 if columns.headers is None else sum(_headers_sizes(columns.headers)))
    if size > limit_bytes:  # only then can a single record be too large
        for index, each in enumerate(record_sizes(columns), first):
            if each > limit_bytes:
                raise RecordTooLargeError(f"record {index}", each, limit_bytes)
    return columns, size


def record_sizes(columns: Columns) -> list[int]:
    """The size in bytes of each checked record, as the limit counts it."""
    sizes = [len(value or b"") for value in columns.values]
    if columns.keys is not None:
        sizes = [size + len(key or b"") for size, key in zip(sizes, columns.keys, strict=True)]
    if columns.headers is not None:
        sizes = list(map(add, sizes, _headers_sizes(columns.headers)))
    return sizes


def timestamp_us(timestamp: Any) -> int:
    """Microseconds UTC of a timestamp in microseconds or of an aware datetime."""
    if isinstance(timestamp, datetime):
        return from_datetime(timestamp)
    if isinstance(timestamp, int) and not isinstance(timestamp, bool):
        if timestamp not in _INT64:
            raise ValueError(f"timestamp {timestamp} does not fit 64 bits; give microseconds since 1970")
        look_at_unit(timestamp)
        return timestamp
    raise TypeError(f"timestamp must be int microseconds UTC or an aware datetime, not {timestamp!r}")


def header_pairs(headers: HeadersLike) -> Headers:
    """Headers as a tuple of (name, bytes) pairs."""
    if type(headers) is dict:  # the common case, in a quarter of the time
        found = tuple(headers.items())
        for name, value in found:
            if type(name) is not str or type(value) is not bytes or not name.isascii():
                break
        else:
            return found
    pairs: Any = headers.items() if isinstance(headers, Mapping) else headers
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise TypeError(f"headers must map str to bytes, or be (str, bytes) pairs; found {headers!r}")
    pairs = tuple(pairs)
    for pair in pairs:
        match pair:
            case (str() as name, bytes()):
                name.encode()  # refuse a lone surrogate (not UTF-8) now, not when the batch is written
            case _:
                raise TypeError(f"headers must map str to bytes; found {pair!r}")
    return tuple((name, value) for name, value in pairs)  # a list given as a pair could change before the flush


def _binary(what: str, item: Any) -> bytes | None:
    if item is None or type(item) is bytes:
        return item
    if isinstance(item, str):
        raise TypeError(f"{what} must be bytes, not str; encode it first, as in {what}.encode()")
    if isinstance(item, bytes | bytearray | memoryview):
        return bytes(item)
    raise TypeError(f"{what} must be bytes or None, not {type(item).__name__}")


def _sequence(what: str, items: Iterable[Any]) -> Sequence[Any]:
    if isinstance(items, (bytes, bytearray, memoryview, str)):
        raise TypeError(f"{what}s must be an iterable of bytes, not one {type(items).__name__}; use append() for one")
    return items if isinstance(items, list | tuple) else _listed(f"{what}s", items)


def _listed(what: str, items: Any) -> list[Any]:
    try:
        return list(items)
    except TypeError:
        if hasattr(items, "__iter__"):  # the error came from inside the iterable
            raise
        raise TypeError(f"{what} must be an iterable, with one for each value, not {items!r}") from None


def binary_column(what: str, column: Sequence[Any]) -> Sequence[bytes | None]:
    """The column as bytes and nulls; the same object, if it needs no change."""
    if list(map(type, column)).count(bytes) == len(column):
        return column
    return [_binary(what, item) for item in column]


def _sized_column(what: str, column: Sequence[Any]) -> tuple[Sequence[bytes | None], int]:
    checked = binary_column(what, column)
    if checked is column:
        return column, sum(map(len, column))
    return checked, sum(len(item) for item in checked if item is not None)


def _time_column(timestamps: Iterable[Any]) -> list[int]:
    column = _listed("timestamps", timestamps)
    if column and list(map(type, column)).count(int) == len(column):
        earliest, latest = min(column), max(column)
        if earliest in _INT64 and latest in _INT64:
            look_at_unit(latest)
            return column
    return [timestamp_us(each) for each in column]


def look_at_unit(timestamp: int) -> None:
    """Warn if the timestamp seems to be in another unit. The text is constant, so Python shows it once."""
    if timestamp in _OTHER_UNITS:
        unit, factor = ("seconds", 10**6) if timestamp < _FIRST_MS else ("milliseconds", 1000)
        warnings.warn(
            f"a timestamp is in microseconds, and a given one is a time in the early 1970s; if it is a present time "
            f"in {unit}, multiply it by {factor:,}",
            stacklevel=2,
        )


def _header_column(headers: Iterable[HeadersLike | None]) -> list[Headers]:
    """The headers of each record as pairs. If all records have the same object, it is checked a single time."""
    column = _listed("headers", headers)
    if column and isinstance(column[0], Mapping | Sequence) and all(map(is_, column, repeat(column[0]))):
        return [header_pairs(column[0])] * len(column)
    return [() if each is None else header_pairs(each) for each in column]


def _headers_sizes(column: Sequence[Headers]) -> Iterable[int]:
    """The size of each record's headers, as the limit counts it."""
    shared = common_headers(column)
    return map(headers_bytes, column) if shared is None else [headers_bytes(shared)] * len(column)
