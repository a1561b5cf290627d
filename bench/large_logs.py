"""Large logs: two things that must not grow with the log: the time of a seek, and the memory in use.

Invariant: each seek goes to the offset of a real record, and each answer is checked.
"""

from __future__ import annotations

import json
import os
import random
import time
import zlib
from typing import TYPE_CHECKING

from alternatives import COMMIT_MESSAGES
from inputs import values_of
from loglib import Topic
from measure import Measurement, percentile, start_peak
from measure import peak_bytes as peak_bytes_now
from ours import open_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from job import Options

_SEEKS = 500
_MESSAGE_BYTES = 200


def fill_large(directory: Path, options: Options) -> None:
    """Write a log with this many megabytes of values."""
    with open_topic(directory / "log", flush="no fsync") as topic:
        for values in _calls(options.number("megabytes")):
            topic.append_many(values)


def fill_for_seek(directory: Path, options: Options) -> None:
    """Write a log of this many megabytes, and beside it a file with the places of some records all over the log."""
    megabytes = options.number("megabytes")
    choose = random.Random(megabytes)
    calls = -(-megabytes * 1_000_000 // (COMMIT_MESSAGES * _MESSAGE_BYTES))
    places = []
    with open_topic(directory / "log", flush="no fsync") as topic:
        for values in _calls(megabytes):
            offsets = [offset for found in topic.append_many(values) for offset in found.offsets]
            chosen = choose.choices(range(len(values)), k=-(-_SEEKS // calls))
            places += [(offsets[index], zlib.crc32(values[index])) for index in chosen]
    os.sync()  # Only clean pages can be dropped from the cache.
    (directory / "places.json").write_text(json.dumps(places))


def seek(directory: Path, options: Options) -> Measurement:
    """Open the log, read the message at an offset, close the log. Then again without its pages in the cache."""
    places = json.loads((directory / "places.json").read_text())
    random.Random(5).shuffle(places)
    segments = sorted((directory / "log").rglob("*.log"))
    read = _raw_read(segments[0]) if options.text("system") == "raw" else _loglib_read(directory / "log")
    _timed_seeks(read, places[:_SEEKS])  # The system may have dropped pages that nobody has read for a while.
    warm = sorted(_timed_seeks(read, places[:_SEEKS]))
    cold = sorted(_timed_seeks(read, places[: _SEEKS // 4], before=lambda: drop_pages(segments)))
    return Measurement(
        messages=len(warm),
        seconds=sum(warm) / 1e6,
        p50_us=percentile(warm, 50),
        p99_us=percentile(warm, 99),
        figures={
            "min us": warm[0],
            "pages dropped: p50 us": percentile(cold, 50),
            "pages dropped: p99 us": percentile(cold, 99),
            "segments": len(segments),
        },
    )


def memory_append_many(directory: Path, options: Options) -> Measurement:
    """Write by `append_many`."""
    calls = list(_calls(options.number("megabytes")))

    def work() -> int:
        with open_topic(directory / "log", flush="no fsync") as topic:
            for values in calls:
                topic.append_many(values)
        return options.number("megabytes") * 1_000_000

    return _peak_of(work)


def memory_append(directory: Path, options: Options) -> Measurement:
    """Write by `append` under the default flush policy."""
    calls = list(_calls(options.number("megabytes")))

    def work() -> int:
        with Topic.open(directory / "log", create=True) as topic:
            append = topic.append
            for values in calls:
                for value in values:
                    append(value)
        return options.number("megabytes") * 1_000_000

    return _peak_of(work)


def memory_append_arrow(directory: Path, options: Options) -> Measurement:
    """Write a stream of Arrow batches, each of which exists only while it is taken."""
    import pyarrow as pa

    megabytes = options.number("megabytes")
    batch = pa.record_batch({"value": pa.array(next(_calls(megabytes)), pa.binary())})

    def batches() -> Iterator[pa.RecordBatch]:
        for values in _calls(megabytes):
            yield pa.record_batch({"value": pa.array(values, pa.binary())})

    def work() -> int:
        with open_topic(directory / "log", flush="no fsync") as topic:
            topic.append_arrow(pa.RecordBatchReader.from_batches(batch.schema, batches()))
        return megabytes * 1_000_000

    return _peak_of(work)


def memory_values(directory: Path, options: Options) -> Measurement:
    """Read whole columns."""

    def work() -> int:
        with Topic.open(directory / "log", mode="r") as topic:
            return sum(len(batch.values) for batch in topic.batches()) * _MESSAGE_BYTES

    return _peak_of(work)


def memory_records(directory: Path, options: Options) -> Measurement:
    """Read record by record."""

    def work() -> int:
        with Topic.open(directory / "log", mode="r") as topic:
            return sum(1 for _ in topic.read()) * _MESSAGE_BYTES

    return _peak_of(work)


def memory_arrow(directory: Path, options: Options) -> Measurement:
    """Read as a stream of Arrow batches."""
    import loglib.format.arrow  # noqa: F401 - loaded before memory is measured

    def work() -> int:
        with Topic.open(directory / "log", mode="r") as topic:
            messages: int = sum(batch.num_rows for batch in topic.arrow())
            return messages * _MESSAGE_BYTES

    return _peak_of(work)


def _calls(megabytes: int) -> Iterator[list[bytes]]:
    """Yield the messages of each call: the same list of 10,000, until this many megabytes are reached."""
    values = values_of(str(_MESSAGE_BYTES), COMMIT_MESSAGES)
    messages = megabytes * 1_000_000 // _MESSAGE_BYTES
    for first in range(0, messages, COMMIT_MESSAGES):
        yield values if messages - first >= COMMIT_MESSAGES else values[: messages - first]


def _loglib_read(path: Path) -> Callable[[int, int], None]:
    def read(offset: int, crc: int) -> None:
        with Topic.open(path, mode="r") as topic:
            record = next(iter(topic.partition(0).read(start=offset)))
        if record.offset != offset or zlib.crc32(record.value or b"") != crc:
            raise ValueError(f"offset {offset}: a wrong record came back")

    return read


def _raw_read(segment: Path) -> Callable[[int, int], None]:
    last = segment.stat().st_size - _MESSAGE_BYTES

    def read(offset: int, crc: int) -> None:
        fd = os.open(segment, os.O_RDONLY)
        os.pread(fd, _MESSAGE_BYTES, min(offset, last))
        os.close(fd)

    return read


def _timed_seeks(
    read: Callable[[int, int], None], places: list[tuple[int, int]], *, before: Callable[[], None] = lambda: None
) -> list[float]:
    latencies = []
    for offset, crc in places:
        before()
        start = time.perf_counter_ns()
        read(offset, crc)
        latencies.append((time.perf_counter_ns() - start) / 1000)
    return latencies


def drop_pages(paths: list[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _peak_of(work: Callable[[], int]) -> Measurement:
    """Run the work once. Report the peak memory above what the process used after it imported loglib."""
    floor_bytes = start_peak()
    start, cpu_start = time.perf_counter(), time.process_time()
    payload_bytes = work()
    return Measurement(
        messages=payload_bytes // _MESSAGE_BYTES,
        payload_bytes=payload_bytes,
        seconds=time.perf_counter() - start,
        cpu_seconds=time.process_time() - cpu_start,
        peak_bytes=peak_bytes_now() - floor_bytes,
    )
