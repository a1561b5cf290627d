"""Bundle: many small batches of one block, checked and decoded as columns.

A program that flushes each record makes batches of one record. A batch by itself costs some twenty microseconds to
check and decode, most of it the interpreter's. Here each check is made once for a column of all batches.

Invariant: every batch of a bundle has passed the checks of `header.py` and `columns.py`, and each follows the batch
before it. Batches are found by their lengths, one after the other, and never by what their bytes look like. A batch
that fails a check ends the bundle, and so does one with compression, nulls or record headers, which are rare in small
batches. The caller reads such a batch by itself, and that call raises its error.

This module does no I/O and keeps no state: bytes in, facts out. It needs NumPy; the core imports it only when it reads
many small batches and NumPy is installed.
"""

from __future__ import annotations

from itertools import repeat
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..config.policies import MAX_BATCH_BYTES, MAX_OFFSET, MAX_RECORDS_PER_BATCH
from .columns import HEADERS, KEYS, NULL_KEYS, NULL_VALUES, TIMESTAMPS, BinaryColumn
from .header import FIELD_KINDS, HEADER_BYTES, MAGIC, VERSION, Header, crc32c

Numbers: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_KINDS = {"B": "u1", "H": "<u2", "I": "<u4", "Q": "<u8", "q": "<i8"}  # in NumPy
_FIELDS = np.dtype([(name, _KINDS[kind]) for name, kind in zip(Header._fields, "I" + FIELD_KINDS, strict=True)])
assert _FIELDS.itemsize == HEADER_BYTES
_UNSEALED = 8  # bytes of a header that its CRC does not cover
_SEALED = np.dtype(f"V{HEADER_BYTES - _UNSEALED}")
_LENGTH_AT = 12
_length = Struct("<I").unpack_from
_MUST_KNOW = 0x00FF
_RARE = NULL_VALUES | NULL_KEYS | HEADERS | _MUST_KNOW & ~(KEYS | TIMESTAMPS)


class Items(NamedTuple):
    """Where the items of a column of byte strings lie."""

    starts: Numbers  # int64[records]: the first byte of each item in the block
    ends: Numbers  # int64[records]
    columns: Numbers  # int64[batches]: where each batch's items begin in the block
    sizes: Numbers  # int64[batches]: the bytes of each batch's items

    def together(self, block: bytes, first: int, stop: int, batches: range) -> tuple[bytes, BinaryColumn]:
        """The items [first, stop), all those of these batches, as a body with one column.

        The items of a batch lie together, so they are copied batch by batch.
        """
        starts, ends = self.starts[first:stop], self.ends[first:stop]
        begins = self.columns[batches.start : batches.stop]
        stops = (begins + self.sizes[batches.start : batches.stop]).tolist()
        begins = begins.tolist()
        begins[0], stops[-1] = int(starts[0]), int(ends[-1])  # records of these two batches may be left out
        offsets = np.zeros(len(starts) + 1, "<i4")
        np.cumsum(ends - starts, out=offsets[1:])
        body = b"".join([offsets.tobytes(), *map(block.__getitem__, map(slice, begins, stops))])
        return body, BinaryColumn(len(starts), 0, offsets.nbytes, int(offsets[-1]))


class Bundled(NamedTuple):
    """The batches at the beginning of a block. Facts of batches are by batch, those of records by record."""

    positions: Numbers  # int64: each batch's place in the block
    first_records: Numbers  # int64: the number of records before each batch
    end: int  # the place after the last batch
    previous_crc: int  # of the batch before the first one
    last_crc: int  # the header CRC of the last batch
    offsets: Numbers  # int64, of each record
    timestamps: Numbers  # int64, of each record: microseconds UTC
    values: Items
    keys: Items | None  # None: no record has a key
    keyed: Numbers | None  # bool, of each record; None: all or none

    @property
    def begin(self) -> int:
        """The offset of the first batch, which is that of the block."""
        return int(self.offsets[0])

    def record_from(self, offset: int) -> int:
        """The number of the first record whose offset is not below `offset`."""
        # A NumPy number: for one of Python's the whole column would be converted.
        return int(self.offsets.searchsorted(np.int64(offset)))

    def batch_from(self, offset: int) -> int:
        """The number of the first batch whose base offset is not below `offset`."""
        return int(self.positions.searchsorted(np.int64(offset - self.begin)))

    def batches_of(self, first: int, stop: int) -> range:
        """The numbers of the batches that have the records [first, stop)."""
        starts = self.first_records.searchsorted(np.int64(first), side="right")
        return range(int(starts) - 1, int(self.first_records.searchsorted(np.int64(stop))))


def bundled(block: bytes, offset: int, *, salt: int) -> Bundled | None:
    """The batches that lie whole at the beginning of the block, whose first byte is `offset` of the log.

    None if the first of them must be read by itself.
    """
    positions = _places(block)
    rows = _headers(block, positions)
    count = _good(block, offset, salt, positions, rows)
    return _decoded(block, positions[:count], rows[:count]) if count else None


def _places(block: bytes) -> Numbers:
    """The places of the whole batches, found by their lengths, which are not yet checked."""
    places, place, last = [], 0, len(block) - HEADER_BYTES
    while place <= last:
        (length,) = _length(block, place + _LENGTH_AT)
        if length <= HEADER_BYTES or length & 7 or place + length > len(block):
            break
        places.append(place)
        place += length
    return np.array(places, np.int64)


def _headers(block: bytes, positions: Numbers) -> Numbers:
    words = np.frombuffer(block, "<u8", len(block) // 8)
    rows: Numbers = words[(positions >> 3)[:, None] + np.arange(HEADER_BYTES // 8)]
    return rows.view(np.uint8)


def _good(block: bytes, offset: int, salt: int, positions: Numbers, rows: Numbers) -> int:
    """The number of leading batches that pass all checks of their headers, their CRCs and their links."""
    at = rows.view(_FIELDS).ravel()
    lengths, stored, counts = (at[name].astype(np.int64) for name in ("length", "stored_bytes", "record_count"))
    sealed = np.ascontiguousarray(rows[:, _UNSEALED:]).view(_SEALED).ravel().tolist()
    header_crcs = np.fromiter(map(crc32c, sealed, repeat(salt)), np.uint32, len(positions))
    starts, ends = (positions + HEADER_BYTES).tolist(), (positions + lengths).tolist()
    bodies = map(memoryview(block).__getitem__, map(slice, starts, ends))
    body_crcs = np.fromiter(map(crc32c, bodies), np.uint32, len(positions))
    good = (
        (at["magic"] == int.from_bytes(MAGIC, "little"))
        & (at["header_crc"] == header_crcs)
        & (at["body_crc"] == body_crcs)
        & (at["base_offset"] == (positions + offset).astype(np.uint64))
        & (at["version"] == VERSION)
        & (at["codec"] == 0)
        & (at["flags"] & _RARE == 0)
        & (at["header_bytes"] == 0)
        & (lengths <= MAX_BATCH_BYTES)
        & (positions + lengths <= MAX_OFFSET - offset)
        & (counts >= 1)
        & (counts <= np.minimum(lengths, MAX_RECORDS_PER_BATCH))
        & (stored <= lengths - HEADER_BYTES)
        & (at["value_bytes"].astype(np.int64) + at["key_bytes"] <= MAX_BATCH_BYTES)
        & (_layout(at, positions)[-1] - positions - HEADER_BYTES == stored)
    )
    good[1:] &= at["previous_crc"][1:] == at["header_crc"][:-1]
    return _first_false(good)


def _layout(at: Numbers, positions: Numbers) -> tuple[Numbers, ...]:
    """The places of the columns in the block, as `columns.layout` has them.

    Value offsets, key offsets, timestamps, values, keys, and the end. A column that a batch leaves out has no bytes.
    """
    counts = at["record_count"].astype(np.int64)
    offsets_bytes = _aligned(4 * (counts + 1))
    value_offsets = positions + HEADER_BYTES
    key_offsets = value_offsets + offsets_bytes
    timestamps = key_offsets + offsets_bytes * (at["flags"] & KEYS != 0)
    values = timestamps + 8 * counts * (at["flags"] & TIMESTAMPS != 0)
    keys = values + _aligned(at["value_bytes"].astype(np.int64))
    return value_offsets, key_offsets, timestamps, values, keys, keys + _aligned(at["key_bytes"].astype(np.int64))


def _decoded(block: bytes, positions: Numbers, rows: Numbers) -> Bundled | None:
    """The columns of batches that are good so far, up to one whose column offsets do not rise."""
    at = rows.view(_FIELDS).ravel()
    counts = at["record_count"].astype(np.int64)
    ends = np.cumsum(counts)
    first_records = ends - counts
    batches = np.repeat(np.arange(len(counts)), counts)  # of each record
    within = np.arange(len(batches)) - first_records[batches]  # the record's number in its batch
    value_offsets, key_offsets, timestamps, values, keys, _ = _layout(at, positions)
    keyed = at["flags"] & KEYS != 0

    value_items, good = _items(block, value_offsets, values, at["value_bytes"], counts, batches, within)
    key_items = None
    if keyed.any():
        # Batches without keys yield empty keys; the caller treats them as null.
        some = np.where(keyed, counts, 0)
        key_items, rising = _items(block, key_offsets, keys, at["key_bytes"], some, batches, within * keyed[batches])
        good &= rising
    count = _first_false(good)
    if count < len(good):
        return _decoded(block, positions[:count], rows[:count]) if count else None

    stamped = at["flags"] & TIMESTAMPS != 0
    times = at["base_timestamp"][batches]
    if stamped.any():
        of_record = stamped[batches]
        longs = np.frombuffer(block, "<i8", len(block) // 8)
        times[of_record] = longs[(timestamps >> 3)[batches[of_record]] + within[of_record]]
    return Bundled(
        positions,
        first_records,
        int(positions[-1]) + int(at["length"][-1]),
        int(at["previous_crc"][0]),
        int(at["header_crc"][-1]),
        at["base_offset"].astype(np.int64)[batches] + within,
        times,
        value_items,
        key_items,
        None if keyed.all() or not keyed.any() else keyed[batches],
    )


def _items(
    block: bytes, offsets: Numbers, columns: Numbers, sizes: Numbers, counts: Numbers, batches: Numbers, within: Numbers
) -> tuple[Items, Numbers]:
    """The items of a column; and for each batch, True if their offsets rise from 0 to the size of the column.

    A batch whose count is 0 has no such column. Its records get empty items.
    """
    numbers = np.frombuffer(block, "<i4", len(block) // 4)
    sizes = sizes.astype(np.int64)
    absent = counts == 0
    first = np.where(absent, 0, offsets >> 2)
    good = absent | ((numbers[first] == 0) & (numbers[first + counts] == sizes))
    at = first[batches] + within
    starts, ends = numbers[at], numbers[at + 1]
    if absent.any():
        starts, ends = (np.where(absent[batches], 0, each) for each in (starts, ends))
    falling = np.flatnonzero(ends < starts)
    good[batches[falling]] = False
    data = columns[batches]
    return Items(data + starts, data + ends, columns, sizes), good


def _aligned(sizes: Numbers) -> Numbers:
    return sizes + 7 & ~7


def _first_false(good: Numbers) -> int:
    wrong = np.flatnonzero(~good)
    return int(wrong[0]) if len(wrong) else len(good)
