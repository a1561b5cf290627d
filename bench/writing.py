"""Writing: the workloads that append.

Invariant: a round starts with an empty directory and ends when `flush` has returned. Opening and
closing are not timed, and so sqlite3's last checkpoint is not timed either.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from itertools import cycle, islice, repeat
from typing import TYPE_CHECKING

from alternatives import BLOCK_BYTES, COMMIT_MESSAGES, Shared
from inputs import in_calls, keys_of, values_of
from measure import Measurement, Timing, percentile, timed_rounds
from systems import FlushingWriter, open_alternative, open_writer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from job import Options

# Reading the clock around each call costs 0.1 us, so latencies are measured in separate calls, for this long.
_LATENCY_SECONDS = 0.4
_LATENCY_CALLS = 200_000


def write(directory: Path, options: Options) -> Measurement:
    """Append `messages` of a shape, `per_call` in each call."""
    shape, per_call = options.text("shape"), options.number("per_call")
    values = values_of(shape, options.number("messages"))
    keys = keys_of(shape, len(values))
    payload_bytes = sum(map(len, values)) + sum(map(len, keys or ()))
    rounds = _Rounds(directory, options)
    if options.text("system") == "raw":
        return _measurement(rounds.timed(_raw_calls(values, keys, options)), len(values), payload_bytes)
    calls = _calls(values, keys, per_call)
    timing = rounds.timed(calls)
    latencies = rounds.latencies(values, keys, per_call)
    return _measurement(timing, len(values), payload_bytes, latencies)


def write_from_threads(directory: Path, options: Options) -> Measurement:
    """Append from many threads; each call is durable when it returns."""
    threads, messages = options.number("threads"), options.number("messages")
    shares = in_calls(values_of("200", messages), -(-messages // threads))
    latencies: list[float] = []

    def work(append: Callable[[bytes], object]) -> None:
        workers = [threading.Thread(target=_timed_calls, args=(append, share, latencies)) for share in shares]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    if options.text("system") == "loglib":
        from loglib import Topic

        with Topic.open(directory / "log", create=True) as topic:
            timing = timed_rounds(lambda: work(lambda value: topic.append(value, sync=True)))
    else:
        shared = Shared(open_alternative(options.text("system"), directory, sync=True))
        timing = timed_rounds(lambda: work(lambda value: shared.append_many([value])))
        shared.close()
    return _measurement(timing, messages, messages * 200, latencies)


def list_append(directory: Path, options: Options) -> Measurement:
    """Gather messages in the cheapest way: append to a list, and join every 10,000."""
    values = values_of("200", options.number("messages"))

    def work() -> None:
        for chunk in chunks:
            gathered: list[bytes] = []
            append = gathered.append
            for value in chunk:
                append(value)
            b"".join(gathered)

    chunks = in_calls(values, COMMIT_MESSAGES)
    return _measurement(timed_rounds(work), len(values), len(values) * 200)


def fill(directory: Path, options: Options) -> None:
    """Write the log that a reading case reads."""
    shape = options.text("shape")
    values = values_of(shape, options.number("messages"))
    keys = keys_of(shape, len(values))
    if options.text("system") == "raw":
        writer = open_alternative("raw", directory, sync=False)
        writer.append_many(in_blocks(values, keys))
        writer.close()
        return
    flush = options.text("flush", "no fsync")
    writing = open_writer(options.text("system"), directory, flush=flush, gather=False, partitions=1)
    _calls(values, keys, options.number("per_call"))(writing)
    writing.flush()
    writing.close()


def compress(directory: Path, options: Options) -> Measurement:
    """Write and read text with a codec: measure both speeds, and how much smaller the files are."""
    from ours import batches, open_topic

    lines = values_of("text", options.number("messages"))
    calls = in_calls(lines, COMMIT_MESSAGES)
    payload_bytes = sum(map(len, lines))
    path = directory / "log"

    def work() -> None:
        with open_topic(path, flush="no fsync", compression=options.text("codec")) as topic:
            for values in calls:
                topic.append_many(values)

    writing = timed_rounds(work, before=lambda: shutil.rmtree(path, ignore_errors=True))
    stored_bytes = sum(file.stat().st_size for file in path.rglob("*.log"))
    reading = timed_rounds(lambda: [batch.values for batch in batches(path)])
    figures = {
        "times smaller": payload_bytes / stored_bytes,
        "read MB/s": payload_bytes / reading.seconds / 1e6,
        "read messages/s": len(lines) / reading.seconds,
    }
    return _measurement(writing, len(lines), payload_bytes, figures=figures)


def in_blocks(values: list[bytes], keys: list[bytes] | None) -> list[bytes]:
    """Return the same bytes cut into blocks of 1 MiB."""
    payload = b"".join(values) + b"".join(keys or ())
    return [payload[start : start + BLOCK_BYTES] for start in range(0, len(payload), BLOCK_BYTES)]


class _Rounds:
    """Opens a new writer for each round of a case, and removes what it wrote."""

    def __init__(self, directory: Path, options: Options) -> None:
        self._path = directory / "log"
        self._options = options
        self._writer: FlushingWriter

    def timed(self, work: Callable[[FlushingWriter], object]) -> Timing:
        def work_and_flush() -> None:
            work(self._writer)
            self._writer.flush()

        return timed_rounds(work_and_flush, before=self._open, after=self._close)

    def latencies(self, values: list[bytes], keys: list[bytes] | None, per_call: int) -> list[float]:
        """Time each of many calls on its own."""
        self._open()
        latencies: list[float] = []
        if per_call == 1:
            _timed_calls(self._writer.append, values[:_LATENCY_CALLS], latencies)
        else:
            keyed = None if keys is None else in_calls(keys, per_call)
            _timed_batches(self._writer, in_calls(values, per_call), keyed, latencies)
        self._close()
        return latencies

    def _open(self) -> None:
        self._path.mkdir()
        self._writer = open_writer(
            self._options.text("system"),
            self._path,
            flush=self._options.text("flush"),
            gather=self._options.flag("gather"),
            partitions=self._options.number("partitions", 1),
        )

    def _close(self) -> None:
        self._writer.close()
        shutil.rmtree(self._path)
        if self._options.text("flush") != "no fsync":
            os.sync()  # The writes of the removal must not overlap with those of the next round.


def _calls(values: list[bytes], keys: list[bytes] | None, per_call: int) -> Callable[[FlushingWriter], None]:
    """Return the loop of a case, with as few instructions around each call as Python allows."""
    if per_call == 1:
        return lambda writer: _one_a_call(writer, values)
    batches = in_calls(values, per_call)
    if keys is None:
        return lambda writer: _many_a_call(writer, batches)
    keyed = list(zip(batches, in_calls(keys, per_call), strict=True))
    return lambda writer: _many_keyed_a_call(writer, keyed)


def _raw_calls(values: list[bytes], keys: list[bytes] | None, options: Options) -> Callable[[FlushingWriter], None]:
    """Return the loop for the machine's limit: blocks of 1 MiB, or one write per call if each call is synced."""
    if options.text("flush") != "fsync":
        blocks = in_blocks(values, keys)
        return lambda writer: _many_a_call(writer, [blocks])
    writes = [[b"".join(call)] for call in in_calls(values, options.number("per_call"))]
    return lambda writer: _many_a_call(writer, writes)


def _one_a_call(writer: FlushingWriter, values: list[bytes]) -> None:
    append = writer.append
    for value in values:
        append(value)


def _many_a_call(writer: FlushingWriter, batches: list[list[bytes]]) -> None:
    append_many = writer.append_many
    for values in batches:
        append_many(values)


def _many_keyed_a_call(writer: FlushingWriter, batches: list[tuple[list[bytes], list[bytes]]]) -> None:
    append_many = writer.append_many
    for values, keys in batches:
        append_many(values, keys=keys)


def _timed_calls(append: Callable[[bytes], object], values: list[bytes], latencies: list[float]) -> None:
    clock = time.perf_counter_ns
    for value in values:
        start = clock()
        append(value)
        latencies.append((clock() - start) / 1000)


def _timed_batches(
    writer: FlushingWriter, batches: list[list[bytes]], keyed: list[list[bytes]] | None, latencies: list[float]
) -> None:
    clock = time.perf_counter_ns
    end = time.monotonic() + _LATENCY_SECONDS
    pairs = zip(batches, keyed or repeat(None), strict=False)
    for values, keys in islice(cycle(list(pairs)), _LATENCY_CALLS):
        start = clock()
        writer.append_many(values, keys=keys)
        latencies.append((clock() - start) / 1000)
        if time.monotonic() > end:
            return


def _measurement(
    timing: Timing,
    messages: int,
    payload_bytes: int,
    latencies: list[float] | None = None,
    figures: dict[str, float] | None = None,
) -> Measurement:
    ordered = sorted(latencies or ())
    return Measurement(
        messages=messages,
        payload_bytes=payload_bytes,
        seconds=timing.seconds,
        best_seconds=timing.best_seconds,
        cpu_seconds=timing.cpu_seconds,
        peak_bytes=timing.peak_bytes,
        p50_us=percentile(ordered, 50) if ordered else None,
        p99_us=percentile(ordered, 99) if ordered else None,
        figures=figures or {},
    )
