"""Archives: how fast the past becomes Parquet, how small it is, and how soon a range of time is found in it.

Invariant: archiving is measured with its comparison. What a query returns is checked.
"""

from __future__ import annotations

import shutil
from datetime import timedelta
from typing import TYPE_CHECKING

import duckdb

import loglib
from inputs import in_calls, values_of
from loglib import Topic
from measure import Measurement, timed_rounds
from ours import open_topic

if TYPE_CHECKING:
    from pathlib import Path

    from job import Options

_PER_CALL = 10_000
_SHARE = 0.95  # of the log is archived
_RECORDS_A_SECOND = 1_000


def fill(directory: Path, options: Options) -> None:
    """Write a log, archive most of it, and seal the rest."""
    values = values_of(options.text("shape"), options.number("messages"))
    calls = in_calls(values, _PER_CALL)
    archived = int(len(calls) * _SHARE)
    with open_topic(directory / "log", flush="no fsync") as topic:
        for number, call in enumerate(calls):
            if number == archived:
                topic.partition(0).roll()
                loglib.offload.archive(topic, directory / "archive")
            first = number * _PER_CALL
            times = [(first + each) * 1_000_000 // _RECORDS_A_SECOND for each in range(len(call))]
            topic.append_many(call, timestamps=times)
        topic.partition(0).roll()


def archive(directory: Path, options: Options) -> Measurement:
    """Archive the whole log: write, read back, compare."""
    path, to = directory / "log", directory / "archived-again"
    made = loglib.offload.archive(path, to)  # the first call imports what it needs
    timing = timed_rounds(lambda: loglib.offload.archive(path, to), before=lambda: shutil.rmtree(to))
    shutil.rmtree(to)
    messages = options.number("messages")
    return Measurement(
        messages=messages, payload_bytes=made.log_bytes, seconds=timing.seconds, best_seconds=timing.best_seconds,
        cpu_seconds=timing.cpu_seconds, peak_bytes=timing.peak_bytes,
        figures={
            "% of the log's size": 100 * made.bytes / made.log_bytes,
            "MB of log per CPU s": made.log_bytes / timing.cpu_seconds / 1e6,
        },
    )  # fmt: skip


def filter_by_time(directory: Path, options: Options) -> Measurement:
    """Count by DuckDB the records of ten seconds in the middle of the past."""
    to = directory / "archive"
    files = loglib.offload.archived(to).partitions[0].files
    start = loglib.Record(0, 0, (files[0].first_time + files[0].last_time) // 2, None, None, (), 0).time
    end = start + timedelta(seconds=10)
    connection = duckdb.connect()

    def count() -> None:
        with Topic.open(directory / "log", mode="r") as topic:
            rows = topic.arrow(start, end, archive=to) if options.text("system") == "archive" else topic.arrow()
            found = connection.execute(
                "select count(*) from rows where timestamp >= ? and timestamp < ?", [start, end]
            ).fetchone()
            assert rows is not None
        if found != (10 * _RECORDS_A_SECOND,):
            raise AssertionError(f"the answer is {found}")

    count()
    timing = timed_rounds(count)
    return Measurement(
        seconds=timing.seconds, best_seconds=timing.best_seconds, cpu_seconds=timing.cpu_seconds,
        peak_bytes=timing.peak_bytes, figures={"ms": timing.seconds * 1000},
    )  # fmt: skip
