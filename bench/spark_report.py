"""Spark report: the section on Spark in RESULTS.md, and its tables.

Invariant: a table has a column if some run of the case has a figure for it.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from cases import OURS
from measure import Measurement
from report import SPARK, mb_rate, median_text, own_columns, speed, table, target_table, times

if TYPE_CHECKING:
    from results import Results
    from targets import Check

_EXPLANATION = """\
The systems of a case run in one session and take turns. Each has run once before, unmeasured. Each figure is the
median over the repetitions; "best" is the fastest one. "loglib is" divides the system's wall time for a message by that
of the line "loglib" in the same repetition, and is the median of those; "its CPU" divides CPU seconds in the same way.
Both are above 1 where loglib is better. Seconds are of the action alone: schema and plan of each DataFrame exist. CPU
seconds are of all processes, user and system, with the JVM's compiler and garbage collector. Those of workers that
Spark ends early, as for `isEmpty`, are missing, since nobody waits for these. When the machine is busy, wall times say
little and CPU seconds still count. Everything is read from the page cache. A floor is a Python data source that does
nothing of its own, so it shows what Spark takes. Beside a target stands what the floor reaches of the same figure: a
target above that is one that Spark leaves to no Python data source.
"""


def section(results: Results, titles: dict[str, str], checks: list[Check], facts: dict[str, str]) -> str:
    """Return the section, with its heading."""
    about = "\n".join(f"- {name}: {fact}" for name, fact in facts.items())
    tables = "\n\n".join(f"### {titles[key]}\n\n{case_table(results, key)}" for key in results.cases)
    targets = target_table(checks)
    return f"{SPARK}\n{about}\n\n{_EXPLANATION}\n## Targets of Spark\n\n{targets}\n\n## Cases of Spark\n\n{tables}\n"


def case_table(results: Results, key: str) -> str:
    """Return the systems of one case, one per line."""
    measured = {label: results.all_of(key, label) for label in results.cases[key]}
    others = [label for label in measured if label != OURS and OURS in measured]
    columns = [
        ("messages/s", {label: speed(statistics.median(one.rate for one in ones)) for label, ones in measured.items()}),
        ("MB/s", {label: mb_rate(ones) for label, ones in measured.items()}),
        ("s", {label: median_text(ones, lambda one: one.seconds, 2) for label, ones in measured.items()}),
        ("best s", {label: f"{min(one.seconds for one in ones):.2f}" for label, ones in measured.items()}),
        ("loglib is", {label: times(speed_ratio(results, key, OURS, label)) for label in others}),
        ("CPU s", {label: median_text(ones, _cpu, 2) for label, ones in measured.items()}),
        ("its CPU", {label: times(cpu_ratio(results, key, label, OURS)) for label in others}),
        *own_columns(measured, 2),
    ]
    shown = [(title, cells) for title, cells in columns if any(cells.values())]
    rows = [[label, *(cells.get(label, "") for _, cells in shown)] for label in measured]
    return table(["", *(title for title, _ in shown)], rows)


def _cpu(one: Measurement) -> float | None:
    return one.cpu_seconds or None  # 0: it was not measured


def speed_ratio(results: Results, key: str, label: str, other: str) -> float | None:
    """How many times as fast as the other, by wall time for a message."""
    return results.ratio(key, other, label, lambda one: one.seconds / max(1, one.messages))


def cpu_ratio(results: Results, key: str, label: str, other: str) -> float | None:
    """The CPU seconds for a message, as a share of the other's."""
    return results.ratio(key, label, other, lambda one: one.cpu_seconds / max(1, one.messages))
