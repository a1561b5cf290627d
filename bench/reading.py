"""Reading: the workloads that read a whole log from the page cache.

Invariant: every message becomes what the case's name says, and is freed before the next batch. Every
reader counts the messages, so a reader that does the work lazily is noticed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import alternatives
from alternatives import BLOCK_BYTES, COMMIT_MESSAGES
from inputs import keys_of, payload_bytes_of, value_sizes, values_of
from measure import Measurement, timed_rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    import pyarrow as pa

    from job import Options


def read_columns(directory: Path, options: Options) -> Measurement:
    """Read whole columns of values, as lists of bytes."""
    read = _column_reader(directory, options)

    def work() -> None:
        messages = 0
        for values in read():
            messages += len(values)
        _expect(messages, options)

    return _measured(work, options)


def read_records(directory: Path, options: Options) -> Measurement:
    """Read records one by one: offset, timestamp, key, value and headers, where the system has them."""
    read = _record_reader(directory, options)

    def work() -> None:
        messages = 0
        for _ in read():
            messages += 1
        _expect(messages, options)

    return _measured(work, options)


def read_arrow(directory: Path, options: Options) -> Measurement:
    """Read Arrow record batches; for the machine's limit, the bytes of 1 MiB blocks."""
    if options.text("system") == "raw":
        return _measured(lambda: _pread_all(directory / "raw"), options)
    if options.text("system") == "floor":
        from floors import pread_and_check

        return _measured(lambda: pread_and_check(directory / "raw"), options)
    read = _arrow_reader(options.text("system"), directory)

    def work() -> None:
        messages = 0
        for batch in read():
            messages += batch.num_rows
        _expect(messages, options)

    return _measured(work, options)


def _column_reader(directory: Path, options: Options) -> Callable[[], Iterable[Sequence[bytes | None]]]:
    system, keyed = options.text("system"), "+" in options.text("shape")
    if system == "loglib, with Arrow":
        import pyarrow  # noqa: F401 - so that loglib slices by it

        system = "loglib"
    if system == "slices":
        return _slices(options)
    if system == "checked slices":
        from floors import checked_slices

        return partial(checked_slices, options.number("messages"), options.number("per_call"))
    if system == "loglib":
        import numpy  # noqa: F401 - a reader of small batches would import it in the first round

        from ours import batches

        return lambda: (batch.values for batch in batches(directory))
    if system == "obvious":
        return lambda: _obvious_values(directory, keyed=keyed)
    if system == "sqlite3":
        return lambda: alternatives.sqlite_values(directory)
    if system == "lmdb":
        from lmdb_log import lmdb_values

        return lambda: lmdb_values(directory)
    from arrow_stream import arrow_values

    return lambda: arrow_values(directory)


def _record_reader(directory: Path, options: Options) -> Callable[[], Iterable[object]]:
    system, shape = options.text("system"), options.text("shape")
    if system.startswith("loglib"):
        import numpy  # noqa: F401 - a reader of small batches would import it in the first round

        from ours import general_ways, records

        if system == "loglib, alone":
            _batch_by_batch()
        elif system == "loglib, general":
            general_ways()
        elif system == "loglib, with Arrow":
            import pyarrow  # noqa: F401 - so that loglib slices by it
        return lambda: records(directory)
    if system == "floor":
        from floors import records_of

        messages = options.number("messages")
        values, keys = values_of(shape, messages), keys_of(shape, messages)
        return lambda: records_of(values, keys)
    if system == "obvious":
        return lambda: alternatives.obvious_records(directory, keyed="+" in shape)
    if system == "sqlite3":
        return lambda: alternatives.sqlite_records(directory)
    from lmdb_log import lmdb_records

    return lambda: lmdb_records(directory)


def _batch_by_batch() -> None:
    from ours import batch_by_batch

    batch_by_batch()


def _arrow_reader(system: str, directory: Path) -> Callable[[], Iterable[pa.RecordBatch]]:
    import pyarrow  # noqa: F401 - loaded before the clock starts

    if system.startswith("loglib"):
        import loglib.format.arrow  # noqa: F401 - the same
        from ours import arrow, batches

        if system == "loglib, alone":
            _batch_by_batch()
            return lambda: (batch.to_arrow() for batch in batches(directory))
        return lambda: arrow(directory, ["value"] if system == "loglib, value" else None)
    from arrow_stream import arrow_batches

    return lambda: arrow_batches(directory)


def _obvious_values(directory: Path, *, keyed: bool) -> Iterator[list[bytes]]:
    values: list[bytes] = []
    for _, _, value in alternatives.obvious_records(directory, keyed=keyed):
        values.append(value)
        if len(values) == COMMIT_MESSAGES:
            yield values
            values = []
    yield values


def _slices(options: Options) -> Callable[[], Iterator[list[bytes]]]:
    """Make a list of bytes in the cheapest way: slices of one buffer at known places.

    No message is made before: that would leave room in the heap, which only this reader would use.
    """
    messages = options.number("messages")
    bounds = list(accumulate(value_sizes(options.text("shape"), messages), initial=0))
    chunks = [bounds[first : first + COMMIT_MESSAGES + 1] for first in range(0, messages, COMMIT_MESSAGES)]
    buffer = os.urandom(bounds[-1])

    def read() -> Iterator[list[bytes]]:
        for places in chunks:
            yield [buffer[start:end] for start, end in pairwise(places)]

    return read


def _pread_all(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    position = 0
    while block := os.pread(fd, BLOCK_BYTES, position):
        position += len(block)
    os.close(fd)


def _expect(messages: int, options: Options) -> None:
    if messages != options.number("messages"):
        raise ValueError(f"read {messages} messages, expected {options.number('messages')}")


def _measured(work: Callable[[], None], options: Options) -> Measurement:
    messages = options.number("messages")
    timing = timed_rounds(work)
    return Measurement(
        messages=messages,
        payload_bytes=payload_bytes_of(options.text("shape"), messages),
        seconds=timing.seconds,
        best_seconds=timing.best_seconds,
        cpu_seconds=timing.cpu_seconds,
        peak_bytes=timing.peak_bytes,
    )
