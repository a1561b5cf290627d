"""Columns: the body of a batch. Records by column, to bytes and back.

Invariant: each column begins at a multiple of 8 bytes, and its place follows from the header alone
(`layout`). A column whose items would all be the same is left out, and the reader makes it.
Decoded items lie inside their column: offsets must rise from 0 to the column's size, else `BadColumns` is
raised. This module does no I/O and keeps no state: bytes in, facts out.

    body, in this order, each column padded to 8 bytes with zeros     left out if
      value offsets    int32[n + 1]                                   never
      key offsets      int32[n + 1]   with KEYS                       all keys are null
      value validity   bit[n]         with NULL_VALUES                no value is null
      key validity     bit[n]         with NULL_KEYS                  no key is null
      timestamps       int64[n]       with TIMESTAMPS                 all equal the header's base_timestamp
      header counts    int32[n + 1]   with HEADERS                    no record has headers, or with SHARED_HEADERS
      value bytes
      key bytes
      headers section                 with HEADERS: name offsets, value offsets, names, values
                                      with SHARED_HEADERS, too: int32[2] header counts of one record before them;
                                      all records have these headers

Numbers are little-endian. Offsets run from 0 to the size of their column's bytes, and header counts
from 0 to the number of headers. The first bit of a validity bitmap is the least significant one of
its first byte; 1 means not null.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from itertools import accumulate, pairwise
from operator import sub
from struct import Struct, pack
from typing import Any, Literal, NamedTuple

from ..config.policies import MAX_BATCH_BYTES
from ..errors import RecordTooLargeError
from ..system.files import Buffer

KEYS, NULL_VALUES, NULL_KEYS, TIMESTAMPS, HEADERS = 1, 2, 4, 8, 16  # flags in the header of a batch
SHARED_HEADERS = 64  # with HEADERS: all records have the same headers, and these are stored once

# The most bytes of a piece: above half a mebibyte they fall out of the processor's cache before they are written.
_PIECE_BYTES = 256 << 10
_MOST_PIECES = 400  # of a column; the system takes 1,024 in one write
_KEPT_MOST = 1 << 16  # the most items of an offsets column that is kept for the next batch: at most 4 MiB are kept
_ARROW_LEAST = 100  # items; fewer are sliced as fast by the standard library
_COUNTS_OF_ONE = 8  # bytes of the header counts of one record
_UNIFORM_MOST = 8192  # limits the two caches of uniform columns to a few megabytes

_new_tuple = tuple.__new__  # half the time of calling the NamedTuple; see bench/RESULTS.md

Headers = tuple[tuple[str, bytes], ...]  # of one record: pairs in order; names may repeat


@dataclass(eq=False, repr=False)
class BadColumns(Exception):
    """The bytes are not the expected columns."""

    at: int  # the byte of the body
    found: str
    expected: str


class Columns(NamedTuple):
    """Records to encode, by column. A column that no record uses is None."""

    values: Sequence[bytes | None]
    keys: Sequence[bytes | None] | None = None
    timestamps: Sequence[int] | None = None  # microseconds UTC
    headers: Sequence[Headers] | None = None

    def part(self, take: slice) -> Columns:
        """The records of this slice."""
        values, keys, timestamps, headers = self
        return Columns(
            values[take],
            None if keys is None else keys[take],
            None if timestamps is None else timestamps[take],
            None if headers is None else headers[take],
        )


class Encoded(NamedTuple):
    """A body before compression, and the facts about its columns for a header."""

    parts: list[Buffer]
    flags: int
    value_bytes: int
    key_bytes: int
    header_bytes: int
    base_timestamp: int | None  # None: the records have no timestamps
    max_timestamp: int | None


class BinaryColumn(NamedTuple):
    """The place of a column of byte strings in a body."""

    length: int  # number of strings
    offsets: int
    items: int  # the strings, one after the other
    size_bytes: int  # of the items
    validity: int | None = None  # None: no string is null


class HeadersColumn(NamedTuple):
    """The place of the record headers in a body."""

    length: int  # number of records
    counts: int
    section: int
    size_bytes: int  # of the section
    is_shared: bool = False  # there is one set of headers, which all records have


class Layout(NamedTuple):
    """The places of the columns in a decompressed body. None: the column is left out (see the table above)."""

    values: BinaryColumn
    keys: BinaryColumn | None
    timestamps: int | None
    headers: HeadersColumn | None
    end: int  # the size of the body


# --- places -----------------------------------------------------------------------------------


def aligned(size: int) -> int:
    """The next multiple of 8."""
    return size + 7 & ~7


def offsets_bytes(count: int) -> int:
    """The size of an offsets column of `count` items, or of their header counts, without padding."""
    return 4 * (count + 1)


def bitmap_bytes(count: int) -> int:
    """The size of a bitmap of `count` bits, without padding."""
    return count + 7 >> 3


@lru_cache(maxsize=64)  # called when a header is checked and when its batch is read: the second call costs a tenth
def layout(count: int, flags: int, value_bytes: int, key_bytes: int, header_bytes: int) -> Layout:
    """The places of the columns in the body, from facts of the header alone."""
    end = 0

    def take(size_bytes: int) -> int:
        """The place of the next column."""
        nonlocal end
        place, end = end, end + aligned(size_bytes)
        return place

    def take_if(flag: int, size_bytes: int) -> int | None:
        return take(size_bytes) if flags & flag else None

    value_offsets = take(offsets_bytes(count))
    key_offsets = take_if(KEYS, offsets_bytes(count))
    value_validity = take_if(NULL_VALUES, bitmap_bytes(count))
    key_validity = take_if(NULL_KEYS, bitmap_bytes(count))
    timestamps = take_if(TIMESTAMPS, 8 * count)
    header_counts = None
    if flags & HEADERS and not flags & SHARED_HEADERS:
        header_counts = take(offsets_bytes(count))
    values, keys, headers = take(value_bytes), take(key_bytes), take(header_bytes)
    headers_at = None
    if flags & HEADERS:
        if header_counts is None:
            headers_at = HeadersColumn(count, headers, headers + _COUNTS_OF_ONE, header_bytes - _COUNTS_OF_ONE, True)
        else:
            headers_at = HeadersColumn(count, header_counts, headers, header_bytes)
    return Layout(
        BinaryColumn(count, value_offsets, values, value_bytes, value_validity),
        None if key_offsets is None else BinaryColumn(count, key_offsets, keys, key_bytes, key_validity),
        timestamps,
        headers_at,
        end,
    )


def common_headers(column: Sequence[Headers]) -> Headers | None:
    """The headers that all records have; None if they differ, or if there is no record."""
    if not column or not column[0] == column[-1] == column[len(column) // 2]:
        return None  # most columns with different headers end here, without a look at each record
    return column[0] if column.count(column[0]) == len(column) else None


def header_columns(
    body: Buffer, at: HeadersColumn, total: int, *, body_at: int = 0
) -> tuple[BinaryColumn, BinaryColumn]:
    """The names and the values of all `total` headers. In the section they follow their two offsets columns.

    Raises `BadColumns` if they do not fit the section, or if shared ones are too many for a batch that repeats them.
    """
    start, end = at.section, at.section + at.size_bytes
    value_offsets = start + aligned(offsets_bytes(total))
    names = value_offsets + (value_offsets - start)
    if names > end:
        raise BadColumns(start, f"{total} record headers", "as many as their section has room for")
    name_bytes = _last_offset(body, body_at + start, total)
    value_bytes = _last_offset(body, body_at + value_offsets, total)
    values = names + aligned(name_bytes)
    if name_bytes < 0 or value_bytes < 0 or values + value_bytes > end:
        raise BadColumns(start, "record headers beyond their section", f"at most {at.size_bytes} bytes")
    if at.is_shared and (each := 8 * total + name_bytes + value_bytes) * at.length > MAX_BATCH_BYTES:
        raise BadColumns(start, f"{each} bytes of headers for {at.length} records", f"{MAX_BATCH_BYTES} bytes at most")
    return (
        _new_tuple(BinaryColumn, (total, start, names, name_bytes, None)),
        _new_tuple(BinaryColumn, (total, value_offsets, values, value_bytes, None)),
    )


def _last_offset(data: Buffer, at: int, count: int) -> int:
    return int.from_bytes(data[at + 4 * count : at + 4 * count + 4], "little", signed=True)


# --- records to bytes -------------------------------------------------------------------------


def encode(columns: Columns, *, limit_bytes: int = MAX_BATCH_BYTES) -> Encoded:
    """Encode the records. Without a timestamp column they get the time of appending.

    Raises `RecordTooLargeError` if they have more than `limit_bytes` of keys, values and headers, nearly always before
    more than twice as much is copied (see items.py), and `TypeError` for a value or key that is neither null nor bytes.
    Loops in C over whole lists make the columns, because work per record is too slow in Python.
    """
    values = _encode_binary(columns.values, limit_bytes)
    keys = _NO_COLUMN if columns.keys is None else _encode_binary(columns.keys, limit_bytes)
    flags, before_items, headers, repeated_bytes = 0, [values.offsets], b"", 0
    if columns.keys is not None:
        flags |= KEYS
        before_items.append(keys.offsets)
    if values.validity:
        flags |= NULL_VALUES
        before_items.append(values.validity)
    if keys.validity:
        flags |= NULL_KEYS
        before_items.append(keys.validity)
    base_timestamp = max_timestamp = None
    if columns.timestamps is not None:
        base_timestamp, max_timestamp = columns.timestamps[0], max(columns.timestamps)
        if max_timestamp != base_timestamp or min(columns.timestamps) != base_timestamp:
            flags |= TIMESTAMPS
            before_items.append(pack(f"<{len(columns.timestamps)}q", *columns.timestamps))
    if columns.headers is not None and any(columns.headers):
        flags |= HEADERS
        shared = common_headers(columns.headers)
        header_counts, headers = _encode_headers(columns.headers if shared is None else (shared,))
        if shared is None:
            before_items.append(header_counts)
        else:
            flags |= SHARED_HEADERS
            repeated_bytes = (len(columns.values) - 1) * headers_bytes(shared)
            headers = header_counts + headers
    if (size := values.size_bytes + keys.size_bytes + len(headers) + repeated_bytes) > limit_bytes:
        raise RecordTooLargeError("the batch", size, limit_bytes)
    parts: list[Buffer] = []
    for each in before_items:
        _add(parts, [each], len(each))
    if values.size_bytes:
        _add(parts, values.pieces, values.size_bytes)
    if keys.size_bytes:
        _add(parts, keys.pieces, keys.size_bytes)
    if headers:
        _add(parts, [headers], len(headers))
    facts = parts, flags, values.size_bytes, keys.size_bytes, len(headers), base_timestamp, max_timestamp
    return _new_tuple(Encoded, facts)


class _Column(NamedTuple):
    """One encoded binary column."""

    offsets: bytes
    pieces: Sequence[Buffer]
    size_bytes: int  # of the pieces
    validity: bytes  # bitmap; empty when nothing is null


_NO_COLUMN = _Column(b"", [], 0, b"")


def _encode_binary(items: Sequence[bytes | None], limit_bytes: int = MAX_BATCH_BYTES) -> _Column:
    if len(items) >= _ARROW_LEAST and _may_use_arrow() and _differ(items):
        from .items import column

        if (found := column(items, limit_bytes)) is not None:
            return _new_tuple(_Column, (*found, b""))
    validity = b""
    try:
        sizes = list(map(len, items))  # type: ignore[arg-type]
    except TypeError:  # a null has no len(); nulls are rare, so this check is cheap
        validity = _bitmap([item is not None for item in items])
        items = [b"" if item is None else item for item in items]
        sizes = list(map(len, items))  # type: ignore[arg-type]
    size_bytes = sum(sizes)
    if size_bytes > limit_bytes:  # checked here, because offsets have only 32 bits
        raise RecordTooLargeError("the batch", size_bytes, limit_bytes)
    pieces = _joined(items, size_bytes)  # type: ignore[arg-type]
    if sum(map(len, pieces)) != size_bytes:
        raise TypeError("an item whose length is not its size in bytes")  # such as a view of larger numbers
    return _new_tuple(_Column, (_encode_offsets(sizes), pieces, size_bytes, validity))


def _may_use_arrow() -> bool:
    """True if the program has imported the packages that items.py needs."""
    return {"pyarrow", "numpy"} <= sys.modules.keys() and sys.byteorder == "little"


def _differ(items: Sequence[bytes | None]) -> bool:
    """True if a few of the items have different sizes. Items of one size need no Arrow."""
    return len({None if item is None else len(item) for item in items[:: max(1, len(items) // 8)]}) > 1


def _encode_offsets(sizes: list[int]) -> bytes:
    if sizes.count(sizes[0]) == len(sizes):  # the check costs 0.5 ns per record and can save 20 ns
        return _uniform_offsets(sizes[0], len(sizes))
    return pack(f"<{len(sizes) + 1}i", *accumulate(sizes, initial=0))


def _joined(items: Sequence[bytes], size_bytes: int) -> list[bytes]:
    """The items joined into a few pieces. Each piece is small enough to stay in the cache until it is written."""
    if size_bytes <= _PIECE_BYTES:
        return [b"".join(items)]
    step = max(1, len(items) * _PIECE_BYTES // size_bytes, len(items) // _MOST_PIECES)
    return [b"".join(items[start : start + step]) for start in range(0, len(items), step)]


def headers_bytes(pairs: Headers) -> int:
    """The size in bytes of a record's headers in a batch: two offsets, the name and the value of each.

    A name with a lone surrogate raises `UnicodeEncodeError`, a `ValueError`, here and not at the flush.
    """
    return sum(8 + (len(name) if name.isascii() else len(name.encode())) + len(value) for name, value in pairs)


def _encode_headers(headers: Sequence[Headers]) -> tuple[bytes, bytes]:
    """The header counts, and the headers section."""
    counts = pack(f"<{len(headers) + 1}i", *accumulate(map(len, headers), initial=0))
    names = _encode_binary([name.encode() for pairs in headers for name, _ in pairs])
    values = _encode_binary([value for pairs in headers for _, value in pairs])
    parts: list[Buffer] = []
    for each in (names, values):
        _add(parts, [each.offsets], len(each.offsets))
    for each in (names, values):
        if each.size_bytes:
            _add(parts, each.pieces, each.size_bytes)
    return counts, b"".join(parts)


def _bitmap(bits: Sequence[bool]) -> bytes:
    as_text = "".join("1" if bit else "0" for bit in reversed(bits))
    return int(as_text, 2).to_bytes(bitmap_bytes(len(bits)), "little")


def _add(parts: list[Buffer], column: Sequence[Buffer], size_bytes: int) -> None:
    """Add a column's pieces and its zero padding."""
    parts += column
    if size_bytes & 7:
        parts.append(bytes(aligned(size_bytes) - size_bytes))


# --- bytes to records -------------------------------------------------------------------------
#
# `data` is the block that was read; several batches may share it. The body begins at byte `body_at` of the block.


def decode_binary(data: bytes, body_at: int, at: BinaryColumn) -> list[bytes | None]:
    """The strings; None for null. `BadColumns` unless their offsets rise from 0 to the size of the items."""
    count, offsets, items_at, size, validity = at
    stored = b""
    if 0 < count <= _UNIFORM_MOST and size % count == 0:
        stored = data[body_at + offsets : body_at + offsets + 4 * (count + 1)]
    items: list[bytes | None]
    if stored and stored == _uniform_offsets(size // count, count):  # items of one size unpack twice as fast
        items = list(_uniform_struct(size // count, count).unpack_from(data, body_at + items_at))
    elif count >= _ARROW_LEAST and _may_use_arrow():
        from .items import items as through_arrow

        null_at = None if validity is None else body_at + validity
        found = through_arrow(data, count, body_at + offsets, body_at + items_at, size, null_at)
        if found is None:
            raise _falling(offsets, size)
        return found
    else:
        bounds = _integers("i", data, body_at + offsets, count + 1)
        sizes = list(map(sub, bounds[1:], bounds))
        if bounds[0] != 0 or bounds[-1] != size or (sizes and min(sizes) < 0):
            raise _falling(offsets, size)
        source = BytesIO(data)  # shares the bytes; its read() is the fastest way to slice in the standard library
        source.seek(body_at + items_at)
        items = list(map(source.read, sizes))
    if validity is None:
        return items
    bits = _bits(data[body_at + validity : body_at + validity + bitmap_bytes(count)])
    return [item if bit == "1" else None for item, bit in zip(items, bits, strict=False)]


def _falling(at: int, size_bytes: int) -> BadColumns:
    return BadColumns(at, "column offsets that do not rise from 0 to the column's size", f"0 to {size_bytes}")


def decode_timestamps(data: bytes, body_at: int, at: int, count: int) -> list[int]:
    """The event times of `count` records, microseconds UTC."""
    return _integers("q", data, body_at + at, count)


def decode_headers(data: bytes, body_at: int, at: HeadersColumn) -> list[Headers]:
    """The headers of each record; `BadColumns` unless they fit each other and their section."""
    sets = 1 if at.is_shared else at.length
    if at.size_bytes < 0:  # shared headers without their counts
        raise BadColumns(at.counts, f"record headers of {at.section + at.size_bytes - at.counts} bytes", "at least 8")
    counts = _integers("i", data, body_at + at.counts, sets + 1)
    if counts[0] != 0 or min(map(sub, counts[1:], counts)) < 0:
        raise BadColumns(at.counts, "header counts that do not rise from 0", "counts from 0, never falling")
    names_at, values_at = header_columns(data, at, counts[-1], body_at=body_at)
    names: list[Any] = decode_binary(data, body_at, names_at)
    values: list[Any] = decode_binary(data, body_at, values_at)
    try:
        pairs = list(zip((name.decode() for name in names), values, strict=True))
    except UnicodeDecodeError as error:
        raise BadColumns(names_at.items, "a header name that is not UTF-8", "UTF-8") from error
    found = [tuple(pairs[first:stop]) for first, stop in pairwise(counts)]
    return found * at.length if at.is_shared else found


def _bits(bitmap: bytes) -> str:
    """The bits of a bitmap in order, as "0" and "1". Shifting one large number would take quadratic time."""
    return f"{int.from_bytes(bitmap, 'little'):0{8 * len(bitmap)}b}"[::-1]


def _integers(typecode: Literal["i", "q"], data: bytes, at: int, count: int) -> list[int]:
    """`count` little-endian int32 ("i") or int64 ("q") numbers."""
    stored = memoryview(data)[at : at + (4 if typecode == "i" else 8) * count]
    if sys.byteorder == "little":
        return stored.cast(typecode).tolist()
    numbers = array(typecode, bytes(stored))  # with a memoryview, each byte would become a number
    numbers.byteswap()
    return numbers.tolist()


# --- items of equal size, which are common: kept for the next batch --------------------------------


def _uniform_offsets(size: int, count: int) -> bytes:
    """The offsets column of `count` items of equal size."""
    return (_kept_offsets if count <= _KEPT_MOST else _kept_offsets.__wrapped__)(size, count)


@lru_cache(maxsize=16)
def _kept_offsets(size: int, count: int) -> bytes:
    return pack(f"<{count + 1}i", *range(0, size * count + 1, size)) if size else bytes(offsets_bytes(count))


@lru_cache(maxsize=16)
def _uniform_struct(size: int, count: int) -> Struct:
    return Struct(f"{size}s" * count)
