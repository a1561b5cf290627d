"""Arrow bodies: Arrow columns as the bodies of batches, without a Python object for each record.

Invariant: the bytes are those that `encode_body` makes of the same records. Both are columns, so Arrow's bytes go to
the file without a copy, and its offsets after a subtraction, because they begin at 0 there. A null has no bytes. The
columns must exist until the batch is written.

    column      Arrow type                                         without it
    value       binary or large_binary                             never
    key         binary or large_binary                             no record has a key
    timestamp   int64, microseconds, without nulls                 the time of appending
    headers     list<struct<key: string, value: binary>>           no record has headers

Needs the extra [arrow]. Threads: pure; a `Rows` belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..config.policies import MAX_BATCH_BYTES, TopicConfig
from ..errors import RecordTooLargeError
from ..format.columns import HEADERS, KEYS, NULL_KEYS, NULL_VALUES, SHARED_HEADERS, TIMESTAMPS, Encoded, aligned
from ..format.header import Body, body_of
from ..system.files import Buffer

Numbers = np.ndarray[Any, Any]

_HEADER_OVERHEAD = 8  # the two offsets of a header; limits count them


class BinaryView:
    """The memory of a column of binary or string: n + 1 offsets, the bytes, and which items are not null."""

    __slots__ = ("content", "offsets", "valid")

    def __init__(self, column: pa.Array) -> None:
        self.valid: Numbers | None = None
        if column.null_count:
            self.valid = column.is_valid().to_numpy(zero_copy_only=False)
            self.offsets, self.content = _memory(column)
            if (self.offsets[1:] > self.offsets[:-1])[~self.valid].any():  # a null of Arrow may have bytes
                is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
                column = pc.fill_null(column, "" if is_text else b"")
        self.offsets, self.content = _memory(column)

    def check(self) -> None:
        """Raise `ValueError` unless the offsets rise within the content. Another program may have made them."""
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if first < 0 or last > len(self.content) or not (self.offsets[1:] >= self.offsets[:-1]).all():
            raise ValueError("an Arrow column whose offsets do not rise within its bytes; validate() says more")

    def part(self, start: int, stop: int) -> tuple[Buffer, Buffer]:
        """The offsets column of some items, and their bytes."""
        offsets = self.offsets[start : stop + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        if last - first > MAX_BATCH_BYTES:
            raise RecordTooLargeError("the batch", last - first, MAX_BATCH_BYTES)
        if first:
            offsets = offsets - offsets[0]
        return offsets.astype("<i4", copy=False).view(np.uint8).data, self.content[first:last]

    def is_repeated(self, start: int, stop: int, times: int) -> bool:
        """True if some items are the same few items, repeated `times` times."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        if (last - first) % times or not _all_as_first(np.diff(self.offsets[start : stop + 1]), times):
            return False
        return _all_as_first(np.frombuffer(self.content, np.uint8, last - first, first), times)

    def validity(self, start: int, stop: int) -> bytes:
        """The validity bitmap of some items; empty if none of them is null."""
        if self.valid is None or self.valid[start:stop].all():
            return b""
        return np.packbits(self.valid[start:stop], bitorder="little").tobytes()


def _memory(column: pa.Array) -> tuple[Numbers, memoryview]:
    kind = "<i8" if pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type) else "<i4"
    _, offsets, content = column.buffers()
    if not len(column):  # which may have no buffers at all
        return np.zeros(1, kind), memoryview(b"")
    size = np.dtype(kind).itemsize
    found = np.frombuffer(offsets, kind, len(column) + 1, size * column.offset)
    return found, memoryview(b"" if content is None else content).cast("B")


def _all_as_first(numbers: Numbers, times: int) -> bool:
    """True if all pieces are equal when the array is cut into `times` equal pieces."""
    rows = numbers.reshape(times, -1)
    return bool((rows[-1] == rows[0]).all() and (rows == rows[0]).all())


class _HeadersView:
    """The headers of all records: a column of names, a column of values, and the first pair of each record."""

    __slots__ = ("_texts", "counts", "names", "values")

    def __init__(self, column: pa.ListArray) -> None:
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        self.counts = np.zeros(len(column) + 1, "<i4")
        np.cumsum(lengths, out=self.counts[1:])
        pairs = column.flatten()
        names, values = pairs.flatten()
        if pairs.null_count or names.null_count or values.null_count:
            raise ValueError("a header whose key or value is null; leave it out, or give it an empty value")
        self._texts, self.names, self.values = names, BinaryView(names), BinaryView(values)

    def check(self) -> None:
        """Raise `ValueError` for names that no reader could decode."""
        self.names.check()
        self.values.check()
        try:
            self._texts.validate(full=True)
        except pa.ArrowInvalid as error:
            raise ValueError("a header whose key is not UTF-8") from error

    def running_sizes(self) -> Numbers:
        """The cumulative size of the headers, in the count of a topic's limits; n + 1 numbers for n records."""
        pairs = self.names.offsets.astype(np.int64) + self.values.offsets
        found: Numbers = pairs[self.counts] + _HEADER_OVERHEAD * self.counts.astype(np.int64)
        return found

    def size_bytes(self, start: int, stop: int) -> int:
        """The size of the headers of some records, in the count of a topic's limits."""
        first, last = int(self.counts[start]), int(self.counts[stop])
        pairs = [int(view.offsets[last]) - int(view.offsets[first]) for view in (self.names, self.values)]
        return sum(pairs) + _HEADER_OVERHEAD * (last - first)

    def have_equal(self, start: int, stop: int) -> bool:
        """True if these records all have the same headers."""
        counts, records = self.counts[start : stop + 1], stop - start
        first, last = int(counts[0]), int(counts[-1])
        if (last - first) % records or not _all_as_first(np.diff(counts), records):
            return False
        return all(view.is_repeated(first, last, records) for view in (self.names, self.values))

    def part(self, start: int, stop: int) -> tuple[bytes, bytes]:
        """The header counts of some records, and the section of their headers."""
        counts = self.counts[start : stop + 1]
        first, last = int(counts[0]), int(counts[-1])
        columns = [view.part(first, last) for view in (self.names, self.values)]
        section = _padded([*(offsets for offsets, _ in columns), *(content for _, content in columns)])
        return (counts - counts[0]).astype("<i4").tobytes(), b"".join(section)


class Rows:
    """Records in Arrow columns, to be encoded. The types are those of the table above."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        def column(name: str) -> pa.Array | None:
            found = batch.column(name) if name in batch.schema.names else None
            return None if found is None or found.null_count == len(found) > 0 else found

        keys, times, headers = column("key"), column("timestamp"), column("headers")
        self.count = batch.num_rows
        self.values = BinaryView(batch.column("value"))
        self.keys = None if keys is None else BinaryView(keys)
        self.times: Numbers | None = None if times is None else times.to_numpy()
        view = None if headers is None else _HeadersView(headers)
        self.headers = None if view is None or not view.counts[-1] else view

    def check(self, *, limit_bytes: int, first: int = 0) -> None:
        """Raise `RecordTooLargeError` for a record above the limit, and `ValueError` for broken columns.

        `first` is the number of the first record, for the message.
        """
        for view in (self.values, self.keys, self.headers):
            if view is not None:
                view.check()
        running = self._running_sizes()
        if int(running[-1]) - int(running[0]) > limit_bytes:  # only then can a single record be too large
            sizes = np.diff(running)
            if sizes.max() > limit_bytes:
                at = int(np.argmax(sizes > limit_bytes))
                raise RecordTooLargeError(f"record {first + at}", int(sizes[at]), limit_bytes)

    @property
    def size_bytes(self) -> int:
        """The size of all records, in the count of a topic's limits."""
        running = self._running_sizes()
        return int(running[-1]) - int(running[0])

    def _running_sizes(self) -> Numbers:
        """The cumulative size of the records, up to a constant; n + 1 numbers for n records."""
        found = self.values.offsets
        if self.keys is not None:
            found = found.astype(np.int64) + self.keys.offsets
        if self.headers is not None:
            found = found.astype(np.int64) + self.headers.running_sizes()
        return found

    def bodies(self, config: TopicConfig, codec: int) -> Iterator[Body]:
        """The records as batches of about the configured size. A larger record gets its own batch."""
        running = self._running_sizes()
        kind, end = running.dtype.type, int(running[-1])
        start = 0
        while start < self.count:
            done = int(running[start])
            room = config.batch_bytes
            if room < end - done < 2 * room:
                room = -(-(end - done) // 2)  # two of equal size, without a short last one
            # A number of the column's own type: an int of Python would convert the whole column each time.
            full = int(running.searchsorted(kind(min(done + room, end)), side="right")) - 1
            stop = min(max(full, start + 1), start + config.batch_records, self.count)
            yield self.body(start, stop, codec)
            start = stop

    def body(self, start: int, stop: int, codec: int) -> Body:
        """Some records as one batch; `RecordTooLargeError` for more than a batch can hold."""
        offsets, values = self.values.part(start, stop)
        flags, fixed, contents, header_bytes, repeated_bytes = 0, [offsets], [values], 0, 0
        validity = [(NULL_VALUES, self.values.validity(start, stop))]
        key_bytes = 0
        if self.keys is not None and (self.keys.valid is None or self.keys.valid[start:stop].any()):
            flags |= KEYS
            offsets, keys = self.keys.part(start, stop)
            fixed.append(offsets)
            contents.append(keys)
            key_bytes = len(keys)
            validity.append((NULL_KEYS, self.keys.validity(start, stop)))
        for flag, bitmap in validity:
            if bitmap:
                flags |= flag
                fixed.append(bitmap)
        base = most = None
        if self.times is not None:
            times = self.times[start:stop]
            base, most = int(times[0]), int(times.max())
            if most != base or int(times.min()) != base:
                flags |= TIMESTAMPS
                fixed.append(times.astype("<i8", copy=False).view(np.uint8).data)
        if self.headers is not None and self.headers.counts[start] != self.headers.counts[stop]:
            flags |= HEADERS
            if self.headers.have_equal(start, stop):
                flags |= SHARED_HEADERS
                section = b"".join(self.headers.part(start, start + 1))
                repeated_bytes = self.headers.size_bytes(start + 1, stop)
            else:
                counts, section = self.headers.part(start, stop)
                fixed.append(counts)
            contents.append(section)
            header_bytes = len(section)
        sizes = len(values), key_bytes, header_bytes
        if sum(sizes) + repeated_bytes > MAX_BATCH_BYTES:
            raise RecordTooLargeError("the batch", sum(sizes) + repeated_bytes, MAX_BATCH_BYTES)
        return body_of(Encoded(_padded([*fixed, *contents]), flags, *sizes, base, most), stop - start, codec=codec)


def _padded(columns: list[Buffer]) -> list[Buffer]:
    """The columns, each with zeros up to the next multiple of 8; empty ones are left out."""
    parts: list[Buffer] = []
    for column in columns:
        if len(column):
            parts.append(column)
            if len(column) & 7:
                parts.append(bytes(aligned(len(column)) - len(column)))
    return parts
