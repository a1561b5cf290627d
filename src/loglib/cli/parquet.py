"""Parquet: records to standard output as a Parquet file, and back from a file or from standard input.

Invariant: the columns are those of a topic in Arrow's memory, so bytes are bytes, and null and empty differ. About
16 MiB of records are in memory. Parquet is read from its end, so what comes from a pipe is first copied to a file
without a name.

Needs the extra [arrow]. The packages are imported when a function is called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ..errors import LogError
from ..format.record import Record
from ..offload.parquet import opened
from ..system.files import REAL
from .lines import whole_file
from .output import Progress
from .signals import Held
from .streams import INPUT

if TYPE_CHECKING:
    import pyarrow as pa

_GROUP_BYTES = 16 << 20
_GROUP_RECORDS = 1 << 16


def write_parquet(records: Iterable[Record]) -> None:
    """Write the records to standard output, which must not be a terminal."""
    import pyarrow.parquet as pq

    from ..format.arrow import SCHEMA

    if sys.stdout.isatty():
        raise click.UsageError("Parquet is binary: redirect standard output to a file or a pipe")
    with pq.ParquetWriter(_Sink(), SCHEMA, compression="zstd") as writer:
        for group in _groups(records):
            writer.write_batch(_batch(group))


def _groups(records: Iterable[Record]) -> Iterator[list[Record]]:
    group: list[Record] = []
    size = 0
    for record in records:
        group.append(record)
        size += len(record.value or b"") + len(record.key or b"")
        if size >= _GROUP_BYTES or len(group) >= _GROUP_RECORDS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _batch(group: list[Record]) -> pa.RecordBatch:
    import pyarrow as pa

    from ..format.arrow import SCHEMA

    headers = [
        [{"key": name, "value": value} for name, value in record.headers] if record.headers else None
        for record in group
    ]  # fmt: skip
    columns = {
        "key": [record.key for record in group], "value": [record.value for record in group],
        "partition": [record.partition for record in group], "offset": [record.offset for record in group],
        "timestamp": [record.timestamp for record in group], "headers": headers,
    }  # fmt: skip
    arrays = [
        pa.array(columns[field.name], pa.int64()).cast(field.type) if field.name == "timestamp"
        else pa.array(columns[field.name], field.type)
        for field in SCHEMA
    ]  # fmt: skip
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


class _Sink:
    """Standard output as Arrow takes a file: it counts its own position, which a pipe does not have."""

    closed = False

    def __init__(self) -> None:
        self._position = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        sys.stdout.buffer.write(view)
        self._position += len(view)
        return len(view)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        sys.stdout.buffer.flush()

    def close(self) -> None:
        self.flush()


@contextmanager
def batches_of(name: str, held: Held, progress: Progress | None) -> Iterator[Iterator[pa.RecordBatch]]:
    """The records of a Parquet file, in batches of about 16 MiB; `-` is standard input.

    `progress` gets the bytes before compression of the batches that were handed out, and of all.

    `LogError` if it is no Parquet file.
    """
    import pyarrow as pa

    with whole_file(name, held) as fd:
        try:
            with opened(REAL, fd) as file:
                yield _batches(file, progress)
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # the system's
                raise
            raise LogError(f"{INPUT if name == '-' else name}: no Parquet that can be read: {error}") from error


def _batches(file: Any, progress: Progress | None) -> Iterator[pa.RecordBatch]:
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    done, whole = 0.0, sum(group.total_byte_size for group in groups)
    for number, group in enumerate(groups):
        rows = max(1, group.num_rows * _GROUP_BYTES // max(1, group.total_byte_size))
        for batch in file.iter_batches(min(rows, max(1, group.num_rows)), [number]):
            yield batch
            done += group.total_byte_size * batch.num_rows / group.num_rows
            if progress is not None and whole:
                progress(min(round(done), whole), whole)
