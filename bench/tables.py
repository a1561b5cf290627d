"""Tables: the workloads that append columns in Arrow's memory.

Invariant: as in `writing`, a round starts with an empty directory and ends when `flush` has returned. The table exists
before the clock starts, in one chunk, and is appended by one call; the alternatives get it in blocks of 1 MiB, or in
record batches of as many rows as a batch of loglib has.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
from fastcrc.crc32 import iscsi

from alternatives import BLOCK_BYTES
from inputs import in_calls, keys_of, values_of
from loglib import Topic
from loglib.append import tables
from measure import Measurement, timed_rounds
from ours import open_topic

if TYPE_CHECKING:
    from job import Options

_ROWS = 5_000  # 1 MiB of values of 200 bytes
_PER_CALL = 10_000  # of append_many


class Writer(Protocol):
    """What takes the table of a round. Opening and closing are not timed."""

    def write(self) -> object: ...

    def close(self) -> None: ...


Make = Callable[[Path, list[bytes], "list[bytes] | None", int], Callable[[], Writer]]


def write(directory: Path, options: Options) -> Measurement:
    """Append a table of `messages` of a shape."""
    shape, partitions = options.text("shape"), options.number("partitions", 1)
    values = values_of(shape, options.number("messages"))
    keys = keys_of(shape, len(values))
    path = directory / "log"
    open_writer = _SYSTEMS[options.text("system")](path, values, keys, partitions)
    writers: list[Writer] = []

    def before() -> None:
        path.mkdir()
        writers.append(open_writer())

    def after() -> None:
        writers.pop().close()
        shutil.rmtree(path)

    def work() -> None:
        writers[-1].write()

    timing = timed_rounds(work, before=before, after=after)
    payload_bytes = sum(map(len, values)) + sum(map(len, keys or ()))
    return Measurement(
        messages=len(values), payload_bytes=payload_bytes, seconds=timing.seconds, best_seconds=timing.best_seconds,
        cpu_seconds=timing.cpu_seconds, peak_bytes=timing.peak_bytes,
    )  # fmt: skip


def _table(values: list[bytes], keys: list[bytes] | None) -> pa.Table:
    columns = {"value": pa.array(values, pa.binary())}
    return pa.table(columns if keys is None else columns | {"key": pa.array(keys, pa.binary())})


# --- loglib -------------------------------------------------------------------------------------------------


class _Log:
    """A topic, and what is appended to it."""

    def __init__(self, path: Path, partitions: int, work: Callable[[Topic], object]) -> None:
        self._topic = open_topic(path, flush="no fsync", partitions=partitions)
        self._work = work

    def write(self) -> None:
        self._work(self._topic)
        self._topic.flush()

    def close(self) -> None:
        self._topic.close()


def _append_arrow(path: Path, values: list[bytes], keys: list[bytes] | None, partitions: int) -> Callable[[], Writer]:
    table = _table(values, keys)
    return lambda: _Log(path, partitions, lambda topic: topic.append_arrow(table))


def _on_one_core(path: Path, values: list[bytes], keys: list[bytes] | None, partitions: int) -> Callable[[], Writer]:
    """The same without the helper thread."""
    tables.WorkAhead = InTurn  # type: ignore[attr-defined, assignment]
    return _append_arrow(path, values, keys, partitions)


class InTurn:
    """In place of `WorkAhead`: works when its results are taken."""

    def __init__(self, work: Callable[[Any], Iterator[Any]]) -> None:
        self._work = work
        self._given: list[Any] = []

    def give(self, piece: Any) -> None:
        self._given.append(piece)

    def take(self) -> Iterator[Any]:
        return self._work(self._given.pop(0))

    def stop(self) -> None:
        """Nothing runs."""


def _append_many(path: Path, values: list[bytes], keys: list[bytes] | None, partitions: int) -> Callable[[], Writer]:
    calls = in_calls(values, _PER_CALL)
    keyed = [None] * len(calls) if keys is None else in_calls(keys, _PER_CALL)

    def work(topic: Topic) -> None:
        for call, its_keys in zip(calls, keyed, strict=True):
            topic.append_many(call, keys=its_keys)

    return lambda: _Log(path, partitions, work)


# --- files --------------------------------------------------------------------------------------------------


class _File:
    """A file, and what is written to it."""

    def __init__(self, path: Path, work: Callable[[int], object]) -> None:
        self._fd = os.open(path / "file", os.O_CREAT | os.O_WRONLY)
        self._work = work

    def write(self) -> None:
        self._work(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _raw(path: Path, values: list[bytes], keys: list[bytes] | None, partitions: int) -> Callable[[], Writer]:
    payload = memoryview(b"".join(values) + b"".join(keys or ()))

    def work(fd: int) -> None:
        for start in range(0, len(payload), BLOCK_BYTES):
            os.write(fd, payload[start : start + BLOCK_BYTES])

    return lambda: _File(path, work)


def _stream(path: Path, values: list[bytes], keys: list[bytes] | None, partitions: int) -> Callable[[], Writer]:
    return _ipc(path, _table(values, keys), os.write)


def _checked_stream(path: Path, values: list[bytes], keys: list[bytes] | None, partitions: int) -> Callable[[], Writer]:
    """An IPC stream, with a CRC-32C of each part that it writes: what a log of IPC messages would need."""

    def write(fd: int, part: Any) -> int:
        iscsi(part)
        return os.write(fd, part)

    return _ipc(path, _table(values, keys), write)


def _ipc(path: Path, table: pa.Table, write: Callable[[int, Any], int]) -> Callable[[], Writer]:
    batches = table.to_batches(max_chunksize=_ROWS)

    def work(fd: int) -> None:
        with pa.PythonFile(_Sink(fd, write), "w") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            for batch in batches:
                stream.write_batch(batch)

    return lambda: _File(path, work)


class _Sink:
    """What pyarrow needs of a file."""

    closed = False

    def __init__(self, fd: int, write: Callable[[int, Any], int]) -> None:
        self._fd = fd
        self._write = write

    def write(self, part: Any) -> int:
        return self._write(self._fd, part)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        self.closed = True


_SYSTEMS: dict[str, Make] = {
    "append_arrow": _append_arrow,
    "append_arrow, one thread": _on_one_core,
    "append_many": _append_many,
    "raw": _raw,
    "ipc": _stream,
    "checked ipc": _checked_stream,
}
