"""Parquet: a file of an archive, which is written, read back, and compared with the log.

Invariant: after `write` the file is complete and synced, and only its name is missing. `compare` reads it again, and
raises an error unless the file has the log's records, in every column.

The columns are those of Spark's source for Kafka, with one row for each record. Keys and values have no dictionary:
Parquet would give it up after some pages, and zstd finds what repeats. Offsets and times are stored as differences.
Their statistics let engines skip row groups. Each page has a CRC. About one row group is in memory.

Needs the extra [arrow]. The packages are imported when a function is called.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CorruptLogError
from ..format.header import crc32c
from ..system.files import Buffer, Files

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_ENDING_BYTES = 8  # the length of the metadata, and four letters
_WRITE_BYTES = 1 << 20
_MOST_PARTS = 512  # the system takes at most 1024 in one call
CREATE_TIME = 0  # Kafka's number for a timestamp that the producer gave


class Written(NamedTuple):
    """Facts of a file that was written."""

    rows: int
    bytes: int
    crc: int
    footer_crc: int
    first_time: int  # microseconds UTC
    last_time: int


@cache
def schema() -> pa.Schema:
    """The columns of an archive's files."""
    import pyarrow as pa

    from ..format.arrow import SCHEMA

    return pa.schema([
        SCHEMA.field("key"), SCHEMA.field("value"), pa.field("topic", pa.string()), SCHEMA.field("partition"),
        SCHEMA.field("offset"), SCHEMA.field("timestamp"), pa.field("timestampType", pa.int32()),
        SCHEMA.field("headers"),
    ])  # fmt: skip


def write(
    files: Files, fd: int, topic: str, records: Iterable[pa.RecordBatch], *, row_group_bytes: int
) -> Written:  # fmt: skip
    """Write the batches of a topic's records to an open, empty file. Synced."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    sink = _Sink(files, fd)
    rows, times = 0, []
    with pq.ParquetWriter(
        sink, schema(),
        compression="zstd", compression_level=1,
        use_dictionary=["topic", "partition", "timestampType", "headers.list.element.key"],
        column_encoding={"offset": "DELTA_BINARY_PACKED", "timestamp": "DELTA_BINARY_PACKED"},
        write_statistics=["partition", "offset", "timestamp"],
        write_page_checksum=True, write_page_index=True, data_page_size=1 << 20,
    ) as writer:  # fmt: skip
        for group in _row_groups((_with_constants(each, topic) for each in records), row_group_bytes):
            writer.write_table(group, row_group_size=group.num_rows)
            rows += group.num_rows
            extremes = pc.min_max(group.column("timestamp").cast("int64"))
            times += [extremes["min"].as_py(), extremes["max"].as_py()]
            times = [min(times), max(times)]
    sink.drain()
    files.datasync(fd)
    return Written(rows, sink.size, sink.crc, footer_crc(files, fd, sink.size), *times)


def compare(files: Files, fd: int, path: str, written: Written, topic: str, records: Iterable[pa.RecordBatch]) -> None:
    """Read a written file from the disk, and compare it with the log's records.

    Raises `CorruptLogError` at the first difference.
    """
    files.drop_cached(fd, 0, written.bytes)
    with sound(path):
        if _crc_of(files, fd) != (written.bytes, written.crc):
            raise CorruptLogError(path, 0, "bytes that differ from those that were written", "the same bytes")
        stored = batches(files, fd, schema().names, batch_bytes=None)
        for found, expected in _side_by_side(stored, (_with_constants(each, topic) for each in records)):
            if found is None or expected is None or not found.equals(expected):
                raise CorruptLogError(path, 0, "records that differ from the log's", "the log's records")


def footer_crc(files: Files, fd: int, size_bytes: int) -> int:
    """The CRC-32C of the footer of an open Parquet file; -1 if the file has none."""
    ending = files.read_at(fd, _ENDING_BYTES, max(0, size_bytes - _ENDING_BYTES))
    length = int.from_bytes(ending[:4], "little") + _ENDING_BYTES
    return crc32c(files.read_at(fd, length, size_bytes - length)) if length <= size_bytes else -1


@contextmanager
def sound(path: str) -> Iterator[None]:
    """Turn Arrow's errors about a file into a `CorruptLogError` that names the file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's
            raise
        raise CorruptLogError(path, 0, f"no sound Parquet ({error})", "the records of an archive") from error


def opened(files: Files, fd: int) -> pq.ParquetFile:
    """The open file, which checks the CRC of each page that it reads."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source: Any = _Source(files, fd)
    if files.real:
        with suppress(OSError):  # a container may have no such directory
            source = pa.OSFile(f"/dev/fd/{fd}")  # Arrow's own reads take half the time
    return pq.ParquetFile(source, page_checksum_verification=True)


def largest(file: pq.ParquetFile, group: int, column: str) -> int:
    """The largest number of a column in a row group, by its statistics."""
    return int(_statistics(file, group, column).max_raw)


def bounds(file: pq.ParquetFile, column: str) -> tuple[int, int]:
    """The smallest and the largest number of a column in the whole file, by its statistics."""
    statistics = [_statistics(file, group, column) for group in range(file.num_row_groups)]
    return min(int(each.min_raw) for each in statistics), max(int(each.max_raw) for each in statistics)


def _statistics(file: pq.ParquetFile, group: int, column: str) -> pq.Statistics:
    facts = file.metadata.row_group(group)
    places = {facts.column(number).path_in_schema: number for number in range(facts.num_columns)}
    return facts.column(places[column]).statistics


def batches(
    files: Files, fd: int, columns: Sequence[str], *, batch_bytes: int | None, groups: Iterable[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of an open file, or only those of `groups`. Without `batch_bytes` each batch is a row group."""
    import pyarrow as pa

    wanted = pa.schema([schema().field(name) for name in columns])
    with opened(files, fd) as file:
        for number in range(file.num_row_groups) if groups is None else groups:
            facts = file.metadata.row_group(number)
            rows = facts.num_rows
            if batch_bytes is not None:
                rows = max(1, rows * batch_bytes // max(1, facts.total_byte_size))
            for batch in file.iter_batches(rows, [number], columns=list(columns)):
                yield batch.select(list(columns)).cast(wanted)


def _row_groups(records: Iterable[pa.RecordBatch], row_group_bytes: int) -> Iterator[pa.Table]:
    """The batches as tables of about this size, counted in keys and values. The bytes are not copied."""
    import pyarrow as pa

    group: list[pa.RecordBatch] = []
    size = 0
    for batch in records:
        group.append(batch)
        size += batch.column("key").nbytes + batch.column("value").nbytes
        if size >= row_group_bytes:
            yield pa.Table.from_batches(group)
            group, size = [], 0
    if group:
        yield pa.Table.from_batches(group)


def _with_constants(batch: pa.RecordBatch, topic: str) -> pa.RecordBatch:
    """The log's columns, and those that have one value in all records."""
    import pyarrow as pa

    count = batch.num_rows
    constant = {
        "topic": pa.repeat(pa.scalar(topic), count),
        "timestampType": pa.repeat(pa.scalar(CREATE_TIME, pa.int32()), count),
    }
    columns = [constant[name] if name in constant else batch.column(name) for name in schema().names]
    return pa.RecordBatch.from_arrays(columns, schema=schema())


def _side_by_side(
    left: Iterator[pa.RecordBatch], right: Iterator[pa.RecordBatch]
) -> Iterator[tuple[pa.RecordBatch | None, pa.RecordBatch | None]]:
    """Pairs of pieces with the same length; None after the end of a stream."""
    one, other = next(left, None), next(right, None)
    while one is not None and other is not None:
        count = min(one.num_rows, other.num_rows)
        yield one.slice(0, count), other.slice(0, count)
        one = one.slice(count) if count < one.num_rows else next(left, None)
        other = other.slice(count) if count < other.num_rows else next(right, None)
    if one is not None or other is not None:
        yield one, other


def _crc_of(files: Files, fd: int) -> tuple[int, int]:
    """The size of an open file, and the CRC-32C of its bytes."""
    crc = position = 0
    while block := files.pread(fd, 1 << 20, position):
        crc = crc32c(block, crc)
        position += len(block)
    return position, crc


class _Sink(io.RawIOBase):
    """A new file for Arrow: takes its bytes in order, writes them in large pieces, and computes their CRC."""

    def __init__(self, files: Files, fd: int) -> None:
        self._files = files
        self._fd = fd
        self._parts: list[Buffer] = []  # not yet written
        self._waiting = 0  # bytes of them
        self._written = self.crc = 0

    @property
    def size(self) -> int:
        return self._written + self._waiting

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view: Buffer = memoryview(data).cast("B")
        self._parts.append(view)
        self._waiting += len(view)
        self.crc = crc32c(view, self.crc)
        if self._waiting >= _WRITE_BYTES or len(self._parts) >= _MOST_PARTS:
            self.drain()
        return len(view)

    def drain(self) -> None:
        # Not `flush`: the base class calls that when it is collected, and the descriptor may be another file's then.
        self._files.write_all(self._fd, self._parts, self._written)
        self._written, self._waiting, self._parts = self.size, 0, []


class _Source(io.RawIOBase):
    """An open file with a position of its own. Arrow reads it from one thread at a time."""

    def __init__(self, files: Files, fd: int) -> None:
        self._files = files
        self._fd = fd
        self._position = 0

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._files.size(self._fd)}
        self._position = start[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = 0) -> bytes:  # Arrow always gives the size
        data = self._files.read_at(self._fd, size, self._position)
        self._position += len(data)
        return data
