"""A pyarrow IPC stream as a log: the columnar alternative.

Invariant: each commit is one record batch, made from Python lists of bytes and read back as lists of bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa


class ArrowStream:
    """A pyarrow IPC stream: one record batch per commit, built from Python lists of bytes."""

    VALUES = pa.schema([("value", pa.binary())])
    KEYED = pa.schema([("key", pa.binary()), ("value", pa.binary())])

    def __init__(self, directory: Path, *, sync: bool) -> None:
        self._file = open(directory / "log.arrows", "wb", buffering=0)  # noqa: SIM115 - closed by close().
        self._stream: pa.ipc.RecordBatchStreamWriter | None = None
        self._sync = sync

    def append_many(self, values: list[bytes], keys: list[bytes] | None = None) -> None:
        schema = self.VALUES if keys is None else self.KEYED
        if self._stream is None:
            self._stream = pa.ipc.new_stream(self._file, schema)
        columns = [values] if keys is None else [keys, values]
        self._stream.write_batch(pa.record_batch([pa.array(column, pa.binary()) for column in columns], schema=schema))
        if self._sync:
            os.fdatasync(self._file.fileno())

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._file.close()


def arrow_batches(directory: Path) -> Iterator[pa.RecordBatch]:
    """Yield the record batches as they are, mapped from the file."""
    with pa.memory_map(str(directory / "log.arrows")) as file, pa.ipc.open_stream(file) as stream:
        yield from stream


def arrow_values(directory: Path) -> Iterator[list[bytes]]:
    """Yield the values as lists of bytes, one record batch at a time."""
    for batch in arrow_batches(directory):
        yield batch.column("value").to_pylist()
