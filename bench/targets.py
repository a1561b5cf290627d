"""Targets: the speeds that the project wants to reach, compared with a run of the benchmarks.

Invariant: a check only reports and never fails, because the speed of a shared machine on one day is not
a test. A check whose cases were not run is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cases import (
    ALONE,
    ARROW,
    CP,
    FILE_HANDLER,
    FLOOR,
    GENERAL,
    IMPORTED,
    INOTIFY,
    LMDB,
    MACHINE,
    OBVIOUS,
    OURS,
    RAW,
    REDIS,
    SPINNING,
    SQLITE,
    TWICE,
)

if TYPE_CHECKING:
    from results import Results

_LARGE = "append_many[200B, batch=10000, no fsync]"
_VARYING = "append_many[50-350B, batch=10000, no fsync]"
_FIFTY = "append_many[200B, batch=50, no fsync]"
_SINGLE = "append[200B, one a call, default flush policy]"
_SPREAD = "append_many[16B key + 200B, batch=10000, 8 partitions, no fsync]"
_TABLE = "append_arrow[200B, one table, no fsync]"
_SPREAD_TABLE = "append_arrow[16B key + 200B, one table, 8 partitions, no fsync]"
_SYNCED = "append[200B, one a call, fsync each call]"
_THREADS = "append[200B, one a call, sync=True, 16 threads]"
_FOLLOW = "follow[200B, 1000 messages/s, another process, flush each, no fsync]"
_GROUP = "group[200B records, 4 partitions]"
_TAKEOVER = "group[takeover after SIGKILL, 4 members, 8 partitions]"

_TURNS = "turns[16B key + 200B, one a call, 4 processes, 4 partitions, default flush policy]"

_JOBS = "jobs[200B, one at a time, 4 workers]"

_REPLICAS, _OF_ONE = "replicas", "of one directory"

_OF_A_FLOOR = 0.75  # the part of a floor that is wanted where the floor lies below a target
_FLAT = 1.5  # Flat: the largest log's p50, in its least disturbed repetition, is at most so many times the smallest's.
_PEAK_MB = 64.0
_RATIOS = (
    # case, run, other run, at least, in which words
    (_LARGE, OURS, RAW, 0.5, "of the raw write"),
    (_LARGE, OURS, SQLITE, 10.0, "x sqlite3"),
    (_LARGE, OURS, LMDB, 2.5, "x lmdb"),
    (_LARGE, OURS, ARROW, 1.5, "x a pyarrow IPC stream"),
    (_LARGE, OURS, OBVIOUS, 4.0, "x the obvious log"),
    (_LARGE, OURS, f"{FLOOR}: join, CRC, write", 0.61, "of join, CRC and write; 0.61 before"),
    (_VARYING, IMPORTED, ARROW, 0.65, "x a pyarrow IPC stream; 0.56 before"),
    (_FIFTY, OURS, SQLITE, 5.0, "x sqlite3, executemany of 50"),
    (_SPREAD, OURS, f"{OURS}, no keys, one partition", 0.5, "of the unkeyed figure"),
    (_TABLE, f"{OURS}, one thread", RAW, 0.6, "of the raw write, one thread"),
    (_TABLE, OURS, RAW, 0.75, "of the raw write, with the helper"),
    (_TABLE, OURS, f"{ARROW}, CRC-32C", 1.1, "x a pyarrow IPC stream with a checksum"),
    (_SPREAD_TABLE, OURS, f"{OURS}, append_many", 3.0, "x append_many"),
    ("read values[200B]", OURS, "slices of one buffer", 0.65, "of slicing one buffer"),
    ("read values[200B]", OURS, ARROW, 1.0, "x a pyarrow IPC stream to bytes"),
    ("read values[50-350B]", OURS, "slices of one buffer", 0.65, "of slicing one buffer"),
    ("read values[50-350B]", IMPORTED, "slices of one buffer", 1.1, "of slicing one buffer"),
    ("read values[50-350B]", OURS, ARROW, 1.0, "x a pyarrow IPC stream to bytes"),
    ("read records[200B]", OURS, SQLITE, 1.5, "x sqlite3, the same columns"),
    ("read records[200B]", OURS, OBVIOUS, 3.0, "x the obvious log"),
    ("read records[200B]", OURS, GENERAL, 1.2, "x as records were made before"),
    ("read records[50-350B]", IMPORTED, GENERAL, 1.4, "x as records were made before"),
    ("to_arrow[200B]", OURS, "raw pread, 1 MiB blocks", 0.5, "of the raw pread"),
    ("to_arrow[200B]", OURS, f"{FLOOR}: pread and CRC", 0.6, "of pread and CRC"),
    ("to_arrow[200B]", f"{OURS}, value alone", f"{FLOOR}: pread and CRC", 0.75, "of pread and CRC, value alone"),
    ("read records[200B, batches of 50]", OURS, f"{OURS}, batch by batch", 1.2, "x batch by batch"),
    ("read values[200B, batches of 10]", OURS, f"{FLOOR}: CRC and slices", 0.75, "of CRC and slices, batch by batch"),
    ("arrow[200B, batches of 50]", OURS, f"{OURS}, batch by batch", 4.5, "x batch by batch"),
    (_GROUP, f"{OURS}, topic.group().follow", f"{OURS}, topic.follow", 0.9, "of following without a group"),
    (_SYNCED, OURS, MACHINE, 1.0, "of write and fdatasync"),
    (_SYNCED, OURS, SQLITE, 1.1, "x sqlite3, synchronous=FULL"),
    ("append_many[200B, batch=10, fsync each call]", OURS, SQLITE, 1.3, "x sqlite3, synchronous=FULL"),
    ("append_many[200B, batch=100, fsync each call]", OURS, SQLITE, 2.0, "x sqlite3, synchronous=FULL"),
    ("mirror[2 GB, cold, synced]", OURS, CP, 0.7, "of cp and sync"),
    (f"append_many[200B, batch=10000, default flush policy, {_REPLICAS}]", TWICE, OURS, 0.6, _OF_ONE),
    (f"append[200B, one a call, sync=True, {_REPLICAS}]", TWICE, OURS, 0.6, _OF_ONE),
    (f"append[200B, one a call, sync=True, 16 threads, {_REPLICAS}]", TWICE, OURS, 0.7, _OF_ONE),
    (_THREADS, OURS, SQLITE, 6.0, "x sqlite3, synchronous=FULL"),
    (_TURNS, OURS, ALONE, 0.8, "of one process"),
    (_TURNS, OURS, SQLITE, 10.0, "x sqlite3"),
    (_JOBS, OURS, f"{SQLITE}, UPDATE RETURNING, DELETE", 3.0, "x sqlite3"),
    (_JOBS, OURS, f"{REDIS} group, XACK each", 4.0, "x a Redis stream's group"),
    (_JOBS, OURS, "persist-queue, 4 threads", 25.0, "x persist-queue"),
    (_JOBS, OURS, "litequeue", 40.0, "x litequeue"),
    (_JOBS, OURS, "huey, without settling", 10.0, "x huey"),
    ("jobs[200B, 32 together, 4 workers]", OURS, f"{REDIS} group, one XACK", 2.0, "x a Redis stream's group"),
    ("logging[text]", f"{OURS}, LogHandler", FILE_HANDLER, 1 / 1.3, "of FileHandler"),
    ("logging[JSON]", f"{OURS}, LogHandler", FILE_HANDLER, 1 / 1.3, "of FileHandler"),
)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the target table."""

    case: str
    figure: str
    target: str
    reached: bool


def checks(results: Results) -> list[Check]:
    """Return every check whose cases were run."""
    ratios = [found for each in _RATIOS if (found := _ratio(results, *each)) is not None]
    others = (_single_append, _single_batches, _follow, _groups, _seek, _memory, _archive, _opening)
    return [*ratios, *(check for found in others for check in found(results))]


def _ratio(results: Results, case: str, run: str, other: str, least: float, words: str) -> Check | None:
    """Compare two runs. If the floor of the case lies below the target, a share of the floor takes its place."""
    ratio, best = results.ratio(case, run, other), results.best_ratio(case, run, other)
    if ratio is None:
        return None
    figure = f"{ratio:.2f} {words} (best rounds {best:.2f})"
    floor = next((each for each in results.cases[case] if each.startswith((f"{FLOOR}:", MACHINE))), other)
    reached = None if floor == other else results.ratio(case, floor, other)
    if reached is not None:
        figure += f"; the floor: {reached:.2f}"
    least, target = at_least(least, reached)
    return Check(case, figure, target, ratio >= least)


def at_least(least: float, floor: float | None) -> tuple[float, str]:
    """A target and its text. If the floor of the figure lies below it, a share of the floor takes its place."""
    if floor is None or floor >= least:
        return least, f">= {least:.3g}"
    return _OF_A_FLOOR * floor, f">= {_OF_A_FLOOR * floor:.2f}, {_OF_A_FLOOR:g} of the floor"


def _single_append(results: Results) -> list[Check]:
    rate = results.median(_SINGLE, OURS, lambda one: one.rate)
    floor = results.median(_SINGLE, "list.append and join", lambda one: one.rate)
    if rate is None or floor is None:
        return []
    least = min(1_500_000, 0.4 * floor)
    words = f"{rate / 1e6:.2f} M messages/s ({rate / floor:.2f} of list.append and join)"
    return [Check(_SINGLE, words, f">= {least / 1e6:.2f} M/s", rate >= least)]


def _single_batches(results: Results) -> list[Check]:
    """What a record costs in a log whose batches have one each."""
    found = []
    for case, most_us in (("read records[200B, batches of 1]", 3.0), ("arrow[200B, batches of 1]", 2.0)):
        each_us = results.median(case, OURS, lambda one: one.seconds / one.messages * 1e6)
        if each_us is not None:
            best = 1e6 / max(one.best_rate for one in results.all_of(case, OURS))
            figure = f"{each_us:.2f} us a record (best rounds {best:.2f})"
            found.append(Check(case, figure, f"<= {most_us:g} us", each_us <= most_us))
    return found


def _follow(results: Results) -> list[Check]:
    p50 = results.median(_FOLLOW, OURS, lambda one: one.p50_us or 0.0)
    p99 = results.median(_FOLLOW, OURS, lambda one: one.p99_us or 0.0)
    asleep = results.ratio(_FOLLOW, OURS, GENERAL, lambda one: one.p50_us or 0.0)
    spinning = results.ratio(_FOLLOW, SPINNING, GENERAL, lambda one: one.p50_us or 0.0)
    tail = results.ratio(_FOLLOW, OURS, INOTIFY, lambda one: one.p99_us or 0.0)
    if p50 is None or p99 is None or asleep is None or spinning is None or tail is None:
        return []
    return [
        Check(_FOLLOW, f"p50 {p50:.0f} us, {asleep:.2f} of the general ways", "<= 0.55", asleep <= 0.55),
        Check(_FOLLOW, f"p50 while spinning {spinning:.2f} of the general ways", "<= 0.27", spinning <= 0.27),
        Check(_FOLLOW, f"p99 {p99:.0f} us, {tail:.1f} x a file and inotify", "<= 3 x", tail <= 3),
    ]


def _groups(results: Results) -> list[Check]:
    commits = results.median("group[commit, one partition]", f'{OURS}, durability="os"', lambda one: one.rate)
    p99 = results.median(_TAKEOVER, OURS, lambda one: one.p99_us or 0.0)
    found = []
    if commits is not None:
        found.append(Check("group[commit], not synced", f"{commits:,.0f} a second", ">= 10,000", commits >= 10_000))
    if p99 is not None:
        found.append(Check(_TAKEOVER, f"p99 {p99 / 1000:.0f} ms", "< 150 ms", p99 < 150_000))
    return found


def _seek(results: Results) -> list[Check]:
    found = []
    for name in _names(results, "seek["):
        p50 = results.least(name, OURS, lambda one: one.p50_us or 0.0)
        if p50 is not None:
            found.append((name.partition("log=")[2].rstrip("]"), p50))
    if len(found) < 2:
        return []
    figure = ", ".join(f"{size}: {p50:.0f} us" for size, p50 in found)
    times = found[-1][1] / found[0][1]
    return [Check("seek[random offset, fresh Topic]", f"p50 {figure}", f"flat (<= {_FLAT} x)", times <= _FLAT)]


def _memory(results: Results) -> list[Check]:
    found = []
    for name in _names(results, "memory["):
        for label in results.cases[name]:
            peak = results.median(name, label, lambda one: one.peak_bytes / 1e6)
            if peak is not None:
                figure = f"peak {peak:.1f} MB above import"
                found.append(Check(f"{name} {label}", figure, f"< {_PEAK_MB:.0f} MB", peak < _PEAK_MB))
    return found


def _archive(results: Results) -> list[Check]:
    case = "archive[access log lines]"
    share = results.median(case, OURS, lambda one: one.figures["% of the log's size"] / 100)
    rate = results.median(case, OURS, lambda one: one.figures["MB of log per CPU s"])
    if share is None or rate is None:
        return []
    return [
        Check(case, f"{share:.3f} of the log's size", "<= 0.16", share <= 0.16),
        Check(case, f"{rate:.0f} MB of log in a second of one core", ">= 150", rate >= 150),
    ]


def _opening(results: Results) -> list[Check]:
    found = []
    for name in _names(results, "open["):
        for label in results.cases[name]:
            seconds = results.median(name, label, lambda one: one.seconds)
            if seconds is not None:
                found.append(Check(f"{name} {label}", f"{seconds:.3f} s", "well under 1 s", seconds < 0.5))
    imported = results.median("import[loglib, above bare Python]", OURS, lambda one: one.figures["ms above bare"])
    if imported is not None:
        found.append(Check("import[loglib, above bare Python]", f"{imported:.0f} ms", "< 60 ms", imported < 60))
    idle = results.median("follow[idle]", OURS, lambda one: one.figures["CPU %"])
    if idle is not None:
        found.append(Check("follow[idle]", f"{idle:.2f} % CPU", "< 1 %", idle < 1))
    return found


def _names(results: Results, start: str) -> list[str]:
    return [name for name in results.cases if name.startswith(start)]
