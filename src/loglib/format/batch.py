"""Batch: one stored batch, or a part of it, as columns.

Invariant: offsets in a batch are consecutive (`offsets` is a `range`). `next_offset` is the place after
the last record that the batch shows: the next record of the stored batch, or the next batch. All ranges are
half-open, all times are microseconds UTC.

Threads: immutable facts. A column is decoded at its first use; the batch keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from operator import attrgetter
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..config.extras import with_extra
from ..config.times import to_text
from ..errors import CorruptLogError
from ..system.malloc import keep_arenas
from .columns import (
    SHARED_HEADERS,
    BadColumns,
    BinaryColumn,
    Columns,
    Headers,
    Layout,
    decode_binary,
    decode_headers,
    decode_timestamps,
)
from .display import Shown
from .header import HEADER_BYTES, Header, check_body, crc32c, encode_body, layout, open_body, parse_header
from .record import Record, new_tuple

if TYPE_CHECKING:
    import pyarrow as pa

_ONE_OFFSET = Struct("<2i")  # the offsets column of one item

Item = TypeVar("Item")
Where = TypeVar("Where")


class Source(NamedTuple):
    """The file and position of a batch, for error messages."""

    path: str
    file_position: int


_SHOWN_RECORDS = 5  # in a notebook
_SHOWN_BYTES = 80  # of a key or a value there

# The header fields that describe the body.
_OF_A_BODY = (
    "body_crc", "codec", "flags", "stored_bytes", "value_bytes", "key_bytes", "header_bytes", "base_timestamp",
    "max_timestamp",
)  # fmt: skip


class Batch(Shown):
    """Consecutive records of one partition as columns, decoded from one stored batch at their first use.

    If reading starts or ends inside a stored batch, the batch shows only the requested records: see
    `offsets`. Columns are lists with one item per record.
    """

    __slots__ = (
        "_body_at", "_data", "_first", "_header", "_headers", "_keys", "_layout_or_none", "_source", "_stop",
        "_timestamps", "_values", "partition",
    )  # fmt: skip

    def __init__(
        self, partition: int, header: Header, data: bytes, body_at: int, source: Source,
        values: list[bytes | None] | None = None,
    ) -> None:  # fmt: skip
        self.partition = partition
        self._header = header
        self._data = data
        self._body_at = body_at
        self._source = source
        self._first = 0
        self._stop = header.record_count
        self._layout_or_none: Layout | None = None
        self._values = values  # if the caller has decoded them
        self._keys: list[bytes | None] | None = None
        self._timestamps: list[int] | None = None
        self._headers: list[Headers] | None = None

    def __len__(self) -> int:
        return self._stop - self._first

    @property
    def _layout(self) -> Layout:
        found = self._layout_or_none
        if found is None:
            found = self._layout_or_none = layout(self._header)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the records that the batch shows, not the block or the rest of the stored batch.

        A part becomes a batch of its own, with a header that describes its records.
        """
        if len(self) == self._header.record_count:
            body = self._data[self._body_at : self._body_at + self._layout.end]
            return Batch, (self.partition, self._header, body, 0, self._source)
        header, body = self._as_stored()
        return Batch, (self.partition, header, body, 0, self._source)

    def _as_stored(self) -> tuple[Header, bytes]:
        """A header and a body of only these records."""
        at, offsets = self._layout, self.offsets
        facts: dict[str, Any] = {
            "base_offset": offsets.start, "record_count": len(self), "length": self.next_offset - offsets.start,
        }  # fmt: skip
        if not len(self):
            return self._header._replace(**facts | dict.fromkeys(_OF_A_BODY, 0)), bytes(8)
        keys = None if at.keys is None else self.keys
        headers = None if at.headers is None else self.headers
        body = encode_body(Columns(self.values, keys, self.timestamps, headers), codec=0)
        facts |= {name: getattr(body, name) for name in _OF_A_BODY}
        return self._header._replace(**facts), b"".join(body.parts)

    def _facts(self) -> Iterator[tuple[str, object]]:
        yield "of partition", self.partition
        yield "offsets", f"{self.offsets.start} to {self.next_offset}"
        yield "records", f"{len(self):,}"
        yield "from", to_text(min(self.timestamps))
        yield "to", to_text(max(self.timestamps))

    def _rows(self) -> Iterator[Sequence[object]]:
        """The first records, for a notebook. Bytes are shown as Python writes them, so nothing in them is markup."""
        yield "offset", "time", "key", "value"
        first = self.part(0, _SHOWN_RECORDS)
        for offset, time, key, value in zip(first.offsets, first.timestamps, first.keys, first.values, strict=True):
            yield offset, to_text(time), _short(key), _short(value)
        if len(self) > _SHOWN_RECORDS:
            yield "", "", "", f"and {len(self) - _SHOWN_RECORDS:,} more records"

    def between(self, start_offset: int, end_offset: int) -> Batch:
        """The part of the batch with offsets in [start_offset, end_offset), over the same memory."""
        if type(start_offset) is not int or type(end_offset) is not int:
            raise TypeError(f"offsets are whole numbers, not {start_offset!r} and {end_offset!r}")
        base = self._header.base_offset
        part = Batch(self.partition, self._header, self._data, self._body_at, self._source)
        part._first = min(max(start_offset - base, self._first), self._stop)
        part._stop = max(min(end_offset - base, self._stop), part._first)
        take = slice(part._first - self._first, part._stop - self._first)
        part._values = self._values and self._values[take]
        part._keys = self._keys and self._keys[take]
        part._timestamps = self._timestamps and self._timestamps[take]
        part._headers = self._headers and self._headers[take]
        return part

    @property
    def content_bytes(self) -> int:
        """The bytes of keys, values and headers; for a part of a stored batch its share of them, by records."""
        at = self._header
        if at.flags & SHARED_HEADERS:
            return (at.value_bytes + at.key_bytes) * len(self) // at.record_count + at.header_bytes * len(self)
        return (at.value_bytes + at.key_bytes + at.header_bytes) * len(self) // at.record_count

    @property
    def held_bytes(self) -> int:
        """Bytes that the batch's columns keep in memory."""
        at = self._header
        return max(at.length, at.value_bytes + at.key_bytes + at.header_bytes)

    def part(self, first: int, stop: int) -> Batch:
        """The records with the numbers [first, stop), where 0 is the first that the batch shows."""
        start = self.offsets.start
        return self.between(start + first, start + stop)

    def offset_of(self, number: int) -> int:
        """The offset of a record. For the number after the last one: where a reader continues after the batch."""
        return self.offsets.start + number if number < len(self) else self.next_offset

    def decode(self) -> None:
        """Decode the columns now, once for all parts that `between` returns."""
        at = self._layout
        _ = self.values
        if at.keys is not None:
            _ = self.keys
        if at.timestamps is not None:
            _ = self.timestamps
        if at.headers is not None:
            _ = self.headers

    @property
    def offsets(self) -> range:
        """The records' offsets."""
        base = self._header.base_offset
        return range(base + self._first, base + self._stop)

    @property
    def next_offset(self) -> int:
        """The offset where a reader continues after this batch."""
        whole = self._stop == self._header.record_count
        return self._header.next_offset if whole else self._header.base_offset + self._stop

    @property
    def append_time(self) -> int:
        """When the batch was written, by the log's clock: microseconds UTC, never falling."""
        return self._header.append_time

    @property
    def values(self) -> list[bytes | None]:
        """The values; None for null."""
        if self._values is None:
            self._values = self._decoded(decode_binary, self._layout.values)
            keep_arenas(self._values)
        return self._values

    @property
    def keys(self) -> list[bytes | None]:
        """The keys; None for null."""
        if self._keys is None:
            at = self._layout.keys
            self._keys = [None] * len(self) if at is None else self._decoded(decode_binary, at)
        return self._keys

    @property
    def timestamps(self) -> list[int]:
        """The event times, in microseconds UTC."""
        if self._timestamps is None:
            at = self._layout.timestamps
            if at is None:
                self._timestamps = [self._header.base_timestamp] * len(self)
            else:
                stored = decode_timestamps(self._data, self._body_at, at, self._header.record_count)
                self._timestamps = stored[self._first : self._stop]
        return self._timestamps

    @property
    def headers(self) -> list[Headers]:
        """The record headers: a tuple of (name, bytes) pairs for each record, empty if it has none."""
        if self._headers is None:
            at = self._layout.headers
            self._headers = [()] * len(self) if at is None else self._decoded(decode_headers, at)
        return self._headers

    def records(self) -> list[Record]:
        """The records as `Record` objects."""
        if len(self) == 1 and (record := self._lone_record()) is not None:
            return [record]
        offsets, at = self.offsets, self._layout
        # A column that is left out has one item for all records, and needs no list.
        times = repeat(self._header.base_timestamp) if at.timestamps is None else self.timestamps
        keys = repeat(None) if at.keys is None else self.keys
        headers = repeat(()) if at.headers is None else self.headers
        places = [*offsets, self.next_offset]  # an int for each, which two records share
        fields = zip(repeat(self.partition), places, times, keys, self.values, headers, places[1:])
        return list(map(new_tuple, repeat(Record), fields))

    def _lone_record(self) -> Record | None:
        """The record of a batch that has only one, without nulls and headers; None for any other batch.

        A follower that waits for each record gets such batches. This way takes a fifth of the time of the general one.
        """
        header, at, data, body_at = self._header, self._layout, self._data, self._body_at
        if header.record_count != 1 or at.timestamps is not None or at.headers is not None:
            return None
        value, key = _only_item(data, body_at, at.values), None
        if value is None or (at.keys is not None and (key := _only_item(data, body_at, at.keys)) is None):
            return None
        fields = self.partition, header.base_offset, header.base_timestamp, key, value, (), header.next_offset
        return new_tuple(Record, fields)

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """The columns as a `pyarrow.RecordBatch` over the same memory, without copying keys or values.

        Columns: key, value (binary), partition (int32), offset (int64), timestamp
        (timestamp[us, UTC]), headers (list of name and value). `columns` selects from these, in the
        given order. Needs the extra [arrow].
        """
        try:
            from .arrow import record_batch

            whole = record_batch(self.partition, self._header, self._layout, self._data, self._body_at, columns=columns)
        except BadColumns as error:
            raise self._corrupt(error) from error
        except ModuleNotFoundError as error:
            raise with_extra(error) from None
        return whole if len(self) == self._header.record_count else whole.slice(self._first, len(self))

    def _decoded(self, decode: Callable[[bytes, int, Where], list[Item]], at: Where) -> list[Item]:
        """The part of a stored column that this batch shows."""
        try:
            column = decode(self._data, self._body_at, at)
        except BadColumns as error:
            raise self._corrupt(error) from error
        return column if len(self) == self._header.record_count else column[self._first : self._stop]

    def _corrupt(self, error: BadColumns) -> CorruptLogError:
        path, position = self._source
        in_body = 0 if self._header.codec else error.at  # in a compressed body the error names its first byte
        return CorruptLogError(path, position + HEADER_BYTES + in_body, error.found, error.expected)


def _short(data: bytes | None) -> str:
    """The bytes as Python writes them, cut with their size."""
    if data is None or len(data) <= _SHOWN_BYTES:
        return repr(data)
    return f"{data[:_SHOWN_BYTES]!r}... {len(data):,} bytes"


def _only_item(data: bytes, body_at: int, at: BinaryColumn) -> bytes | None:
    """The item of a column that has one; None if it is null, or if its offsets are wrong."""
    _, offsets, items, size_bytes, validity = at
    if validity is not None or _ONE_OFFSET.unpack_from(data, body_at + offsets) != (0, size_bytes):
        return None
    return data[body_at + items : body_at + items + size_bytes]


# The header of the stored batch of which a batch shows all records or some. In C, so it costs no call in Python.
stored_header: Callable[[Batch], Header] = attrgetter("_header")


def take(
    block: bytes, position: int, source: Source, *, offset: int, partition: int, salt: int, room: int | None = None
) -> Batch | Header:
    """The checked batch at `position` of the block, ready to be decoded; its base offset must be `offset`.

    Its header alone if the block ends before the batch does, or if its columns have more than `room` bytes when they
    are decompressed. `BadBatch` if the bytes are not that batch, and `NewerBatch` if this version cannot read it.
    """
    header = parse_header(block, position, salt=salt, offset=offset)
    body_at, end = position + HEADER_BYTES, position + header.length
    if end > len(block) or (header.codec and room is not None and layout(header).end > room):
        return header
    body = memoryview(block)[body_at:end]
    if crc32c(body) != header.body_crc:  # without this line, the call would cost 3 % of reading a small batch
        check_body(header, body)
    if header.codec:
        return Batch(partition, header, open_body(header, body), 0, source)
    return Batch(partition, header, block, body_at, source)


def batch_of(header: Header, data: bytes, source: Source, *, partition: int, body_at: int = 0) -> Batch:
    """The batch of a checked header, with its stored body from `body_at` on; `BadBatch` if that body is damaged."""
    body = memoryview(data)[body_at : body_at + header.length - HEADER_BYTES]
    check_body(header, body)
    if header.codec:
        return Batch(partition, header, open_body(header, body), 0, source)
    return Batch(partition, header, data, body_at, source)
