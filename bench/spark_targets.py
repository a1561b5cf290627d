"""Spark targets: what the connector wants to reach, compared with a run of its benchmarks.

Invariant: as for targets.py, a check only reports. A check whose cases were not run is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cases import OURS
from spark_cases import (
    ARCHIVING,
    BY_KEY,
    COUNT,
    COUNTS,
    DROPPED,
    EVERYTHING,
    FLOOR,
    FLOOR_LINES,
    FLOOR_OFFSET,
    FLOOR_ONE,
    LATENCY,
    LOG_ALONE,
    MAP_BATCHES,
    MEMORY,
    OFFSET,
    ONE_COLUMN,
    PAST,
    PAST_COUNT,
    PAST_FIRST,
    PAST_NARROW,
    PLAN,
    RATE,
    SCAN,
    SINK,
    SNAPPY,
    STREAM,
    TASKS,
    TUPLES,
    UNCOMPRESSED,
)
from spark_report import cpu_ratio, speed_ratio
from targets import Check, at_least

if TYPE_CHECKING:
    from results import Results

_SPEEDS = (
    # case, run, other run, at least, in which words, the same two runs of Spark's floor
    (SCAN, OURS, SNAPPY, 0.65, "of the speed of Parquet, snappy, with all columns", (FLOOR, SNAPPY)),
    (SCAN, ONE_COLUMN, SNAPPY, 0.9, "of the speed of Parquet, snappy, with columns=value", (FLOOR_ONE, SNAPPY)),
    (SCAN, OURS, TUPLES, 15.0, "x a source of tuples", (FLOOR, TUPLES)),
    (COUNT, OFFSET, OURS, 3.0, "x as fast with columns=offset as with all", (FLOOR_OFFSET, FLOOR)),
    (BY_KEY, f"{OURS}, columns=key", SNAPPY, 0.6, "of the speed of Parquet, snappy", (FLOOR, SNAPPY)),
    (SINK, OURS, SNAPPY, 1 / 1.2, "of the speed of Parquet's writer, snappy", (DROPPED, SNAPPY)),
    (PAST, OURS, EVERYTHING, 0.9, "of the speed of Parquet of everything", None),
    (PAST, OURS, LOG_ALONE, 2.0, "x the log alone", None),
)
_LARGEST_GROWTH = 1.1
LOG_BYTES = 204  # of a message with its part of a batch


def spark_checks(results: Results) -> list[Check]:
    """Return every check whose cases were run."""
    found = []
    for key, run, other, wanted, words, floor in _SPEEDS:
        wall, cpu = speed_ratio(results, key, run, other), cpu_ratio(results, key, other, run)
        if wall is not None and cpu is not None:
            best = _best(results, key, run, other)
            figure = f"{wall:.2f} {words} (best rounds {best:.2f}, by CPU {cpu:.2f})"
            reached = None if floor is None else speed_ratio(results, key, *floor)
            if floor is not None and reached is not None:
                figure += f"; Spark's floor: {reached:.2f} (by CPU {cpu_ratio(results, key, *reversed(floor)):.2f})"
            least, target = at_least(wanted, reached)
            found.append(Check(f"Spark {key}", figure, target, wall >= least))
    others = (_map_batches, _counts, _plan, _tasks, _stream, _latency, _memory, _archiving, _later)
    return [*found, *(check for each in others for check in each(results))]


def _best(results: Results, key: str, run: str, other: str) -> float:
    own, others = (
        min(one.seconds / max(1, one.messages) for one in results.all_of(key, label)) for label in (run, other)
    )
    return others / own


def _map_batches(results: Results) -> list[Check]:
    ratio = cpu_ratio(results, SCAN, MAP_BATCHES, UNCOMPRESSED)
    if ratio is None:
        return []
    return [Check("Spark map_batches", f"{ratio:.2f} of the CPU of Parquet, uncompressed", "<= 0.5", ratio <= 0.5)]


def _counts(results: Results) -> list[Check]:
    seconds = results.median(COUNT, COUNTS, lambda one: one.seconds)
    return [] if seconds is None else [Check("Spark counts()", f"{seconds * 1000:.0f} ms", "< 100 ms", seconds < 0.1)]


def _stream(results: Results) -> list[Check]:
    ours = results.median(STREAM, f"{OURS}, its own part", lambda one: one.figures["ours ms"])
    return [] if ours is None else [Check("Spark micro-batch, our part", f"{ours:.1f} ms", "< 10 ms", ours < 10)]


def _latency(results: Results) -> list[Check]:
    """Spark asks each source for news every 10 ms, and writes two files for each micro-batch."""
    return [
        *_beside_lines(results, "Spark stream, append to foreachBatch", "p50 ms", "ms", 1.2),
        *_beside_lines(results, "Spark stream, idle", "idle CPU %", "% CPU", 1.5),
    ]


def _beside_lines(results: Results, title: str, name: str, unit: str, most: float) -> list[Check]:
    ours, floor, rate = (
        results.median(LATENCY, run, lambda one: one.figures[name]) for run in (OURS, FLOOR_LINES, RATE)
    )
    if ours is None or floor is None or rate is None:
        return []
    figure = f"{ours:.0f} {unit}; Spark's floor: {floor:.0f}; Spark's rate source: {rate:.0f}"
    return [Check(title, figure, f"<= {most} x the floor", ours <= most * floor)]


def _tasks(results: Results) -> list[Check]:
    slot, floor = (results.median(TASKS, run, lambda one: one.figures["slot ms a task"]) for run in (OURS, FLOOR))
    if slot is None or floor is None:
        return []
    return [Check("Spark task, slot time", f"{slot:.1f} ms; Spark's floor: {floor:.1f} ms", "<= 15 ms", slot <= 15)]


def _plan(results: Results) -> list[Check]:
    found = (results.median(PLAN, run, lambda one: one.seconds) for run in (OURS, FLOOR, UNCOMPRESSED))
    ours, floor, parquet = found
    if ours is None or floor is None or parquet is None:
        return []
    figure = f"{ours:.2f} s; Spark's floor: {floor:.2f} s; Parquet: {parquet:.2f} s"
    return [Check("Spark isEmpty(), the beginning of each task", figure, "<= 1.3 x the floor", ours <= 1.3 * floor)]


def _memory(results: Results) -> list[Check]:
    sizes = results.cases.get(MEMORY, {})
    peaks = [(label, results.all_of(MEMORY, label)[0].figures["peak MB of a worker"]) for label in sizes]
    if len(peaks) < 2:
        return []
    figure = ", ".join(f"{label}: {peak:.0f} MB" for label, peak in peaks)
    flat = peaks[-1][1] / peaks[0][1] <= _LARGEST_GROWTH
    return [Check("Spark memory of a worker", figure, f"flat (<= {_LARGEST_GROWTH} x)", flat)]


def _archiving(results: Results) -> list[Check]:
    rate = results.median(PAST, ARCHIVING, lambda one: one.messages * LOG_BYTES / one.cpu_seconds / 1e6)
    if rate is None:
        return []
    return [Check("loglib.offload.archive", f"{rate:.0f} MB of log in a second of one core", ">= 150", rate >= 150)]


def _later(results: Results) -> list[Check]:
    """How much later a query of archive and log ends than one of Parquet files."""
    found = []
    for key in (PAST_COUNT, PAST_FIRST, PAST_NARROW):
        ours, plain = (results.median(key, label, lambda one: one.seconds) for label in (OURS, EVERYTHING))
        if ours is not None and plain is not None:
            figure = f"{ours - plain:+.2f} s beside Parquet of everything"
            found.append(Check(f"Spark {key}", figure, "<= 0.25 s", ours - plain <= 0.25))
    return found
