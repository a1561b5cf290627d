"""Counts: what the reliability tests did, gathered from all their processes and printed as one table.

Each test adds its figures under the goal that it serves. The figures of a goal are the sums over its
tests. `LOGLIB_SOAK` multiplies the number of cases: 1 by default, 20 for a soak of some hours.

    counts.count("G4", kills=100, lost=0)       one more line in .reliability/counts.jsonl
    python tests/reliability/counts.py          the table
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / ".reliability" / "counts.jsonl"
# What must be 0 in every goal.
NEVER = (
    "lost", "phantoms", "refused", "undetected", "wrong", "survived", "untold", "invented", "hidden",
    "falsely_damaged",
)  # fmt: skip

GOALS = {
    "G1": "crash states",
    "G2": "durability mutants",
    "G3": "damaged bytes",
    "G4": "SIGKILL",
    "G5": "power cuts",
    "G6": "failing calls",
    "G7": "interrupts",
    "G8": "readers at once",
    "G9": "hostile bytes",
    "G10": "model",
    "G12": "writers at once",
    "G13": "consumer groups",
    "G14": "accounted records",
    "G15": "moved directories",
    "G16": "clocks that lie",
    "G17": "hostile payloads",
    "G18": "transactions",
    "G19": "repairs",
    "G20": "mirrors",
    "G21": "healing",
    "G24": "replicas",
}


def scale(number: int) -> int:
    """How many cases to run where `number` is the default: more in a soak, and at least one."""
    return max(1, round(number * float(os.environ.get("LOGLIB_SOAK", "1"))))


def part() -> int:
    """One in how many cases is run by a test that has all there are: each one, unless `LOGLIB_SOAK` is less than 1.

    An odd number: such cases often alternate.
    """
    return max(1, 100 // scale(100)) | 1


def count(goal: str, **figures: int) -> None:
    """Add figures to a goal. One write in append mode, so that the lines of processes do not mix."""
    assert goal in GOALS, goal
    FILE.parent.mkdir(exist_ok=True)
    with FILE.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"goal": goal, **figures}) + "\n")


def need(condition: object, what: str) -> None:
    """Skip the test with a clear message if the machine lacks something; fail instead if `CI` is set."""
    if condition:
        return
    if os.environ.get("CI"):
        pytest.fail(f"this machine lacks {what}, without which nothing is proved here")
    pytest.skip(f"NOT PROVED: this machine lacks {what}")


Sums = dict[str, dict[str, int]]  # the figures by goal


def sums_of(lines: list[str]) -> Sums:
    sums: Sums = {goal: defaultdict(int) for goal in GOALS}
    for line in lines:
        figures = json.loads(line)
        goal = figures.pop("goal")
        for name, number in figures.items():
            sums[goal][name] += number
    return sums


def unproved(sums: Sums) -> list[str]:
    """What keeps a run from being a proof: the goals that were not run, and what must be 0 and is not."""
    return [
        f"{goal} is not proved: {', '.join(wrong) or 'not run'}"
        for goal, figures in sums.items()
        if (wrong := [f"{figures[name]:,} {_words(name)}" for name in NEVER if figures.get(name)]) or not figures
    ]


def table(sums: Sums) -> list[str]:
    """The figures by goal, as rows of a table in Markdown."""
    rows = ["| goal | what | done | must be 0 |", "| --- | --- | --- | --- |"]
    for goal, what in GOALS.items():
        figures = sums[goal]
        done = ", ".join(f"{number:,} {_words(name)}" for name, number in figures.items() if name not in NEVER)
        never = ", ".join(f"{number:,} {_words(name)}" for name, number in figures.items() if name in NEVER)
        rows.append(f"| {goal} | {what} | {done or 'not run'} | {never} |")
    return rows


def _words(name: str) -> str:
    return "wrongly refused" if name == "refused" else name.replace("_", " ")


if __name__ == "__main__":
    gathered = FILE.read_text("utf-8").splitlines() if FILE.exists() else []
    found = sums_of(gathered)
    print("\n".join(table(found) + unproved(found)))
    sys.exit(1 if unproved(found) else 0)
