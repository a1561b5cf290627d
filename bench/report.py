"""Report: results as Markdown tables, for the terminal and for RESULTS.md.

Invariant: a table has a column if some run of the case has a figure for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from cases import OURS

if TYPE_CHECKING:
    from measure import Measurement
    from results import Results
    from targets import Check

SPARK = "# Results with Spark\n"

_EXPLANATION = """\
Each figure is the median over the repetitions of a case; a repetition runs every system once, in a process of its own,
one after another. "best" is the fastest round of all. "loglib is" divides loglib's messages a second by the system's in
the same repetition, and is the median of those. MB are 10^6 bytes of keys and values. p50 and p99 are of single calls
(append, append_many) or messages (follow, seek). CPU seconds are of all threads, for one pass over the messages. Peak
memory is what the work added to the process, inputs not counted (in the memory cases: above import). What
lmdb and pyarrow have touched of a file that they map counts as theirs. Of the alternatives only the obvious log has
checksums of the messages.

A floor is what no log in pure Python can leave out, done alone in this run (bench/floors.py). Where it lies below a
target, 0.75 of the floor takes the target's place: so "no" means that there is work to do.
"""


def document(results: Results, checks: list[Check], facts: dict[str, str]) -> str:
    """Return the whole of RESULTS.md."""
    about = "\n".join(f"- {name}: {fact}" for name, fact in facts.items())
    tables = "\n\n".join(f"### {case}\n\n{case_table(results, case)}" for case in results.cases)
    return (
        f"# Results of the benchmarks\n\n{about}\n\n{_EXPLANATION}\n## Targets\n\n{target_table(checks)}\n\n"
        f"## Cases\n\n{tables}\n"
    )


def with_spark(text: str, spark: str) -> str:
    """Return RESULTS.md with another section on Spark, which is the last one."""
    return text.partition(SPARK)[0].rstrip() + "\n\n" + spark


def spark_section(text: str) -> str:
    """Return the section on Spark of RESULTS.md; empty if there is none."""
    _, heading, behind = text.partition(SPARK)
    return heading + behind


def target_table(checks: list[Check]) -> str:
    """Return the targets, one per line."""
    rows = [[check.case, check.figure, check.target, "yes" if check.reached else "**no**"] for check in checks]
    return table(["case", "figure", "target", "reached"], rows)


def case_table(results: Results, case: str) -> str:
    """Return the systems of one case, one per line."""
    labels = [label for label in results.cases[case] if results.all_of(case, label)]
    measured = {label: results.all_of(case, label) for label in labels}
    columns = [
        ("messages/s", {label: speed(statistics.median(one.rate for one in ones)) for label, ones in measured.items()}),
        ("best", {label: speed(max(one.best_rate for one in ones)) for label, ones in measured.items()}),
        ("MB/s", {label: mb_rate(ones) for label, ones in measured.items()}),
        ("loglib is", {label: times(results.ratio(case, OURS, label)) for label in labels if label != OURS}),
        ("p50 us", {label: median_text(ones, lambda one: one.p50_us) for label, ones in measured.items()}),
        ("p99 us", {label: median_text(ones, lambda one: one.p99_us) for label, ones in measured.items()}),
        *own_columns(measured),
        ("CPU s", {label: median_text(ones, lambda one: one.cpu_seconds, 3) for label, ones in measured.items()}),
        ("peak MB", {label: median_text(ones, lambda one: one.peak_bytes / 1e6) for label, ones in measured.items()}),
    ]
    shown = [(title, cells) for title, cells in columns if any(cells.values())]
    rows = [[label, *(cells.get(label, "") for _, cells in shown)] for label in labels]
    failed = [[label, "failed", *[""] * (len(shown) - 1)] for label in results.cases[case] if label not in labels]
    return table(["", *(title for title, _ in shown)], rows + failed)


def own_columns(measured: dict[str, list[Measurement]], digits: int = 1) -> list[tuple[str, dict[str, str]]]:
    """The columns of the case's own figures."""
    names = dict.fromkeys(name for ones in measured.values() for one in ones for name in one.figures)
    return [
        (name, {label: median_text(ones, _figure(name), digits) for label, ones in measured.items()}) for name in names
    ]


def _figure(name: str) -> Callable[[Measurement], float | None]:
    return lambda one: one.figures.get(name)


def speed(rate: float) -> str:
    if rate >= 100_000:
        return f"{rate / 1e6:.2f} M"
    return f"{rate:,.0f}" if rate else ""


def mb_rate(ones: list[Measurement]) -> str:
    rate = statistics.median(one.byte_rate for one in ones) / 1e6
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}" if rate else ""


def median_text(ones: list[Measurement], figure: Callable[[Measurement], float | None], digits: int = 1) -> str:
    figures = [found for one in ones if (found := figure(one)) is not None]
    if not figures:
        return ""
    median = statistics.median(figures)
    return f"{median:,.0f}" if median >= 1000 or median == int(median) else f"{median:.{digits}f}"


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} x"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
