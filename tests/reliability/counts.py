"""Counts: what the reliability tests did, gathered from all their processes and printed as one table.

Each test adds its figures under the goal that it serves. The figures of a goal are the sums over its
tests. `LOGLIB_SOAK` multiplies the number of cases: 1 by default, 20 for a soak of some hours.

    counts.count("G4", kills=100, lost=0)       one more line in .reliability/counts.jsonl
    python tests/reliability/counts.py          the table
    python tests/reliability/counts.py pairs    how often each pair of features was met
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
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
    "G8": "concurrent readers",
    "G9": "hostile bytes",
    "G10": "model",
    "G12": "concurrent writers",
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
    "G25": "worlds",
    "G26": "jobs",
}
# A goal with pairs has met each pair of its features so often in so many of its worlds.
PAIRS, LEAST, OF = "pairs", 20, 2000


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
    _add(goal, figures)


def count_pairs(goal: str, pairs: Mapping[str, int]) -> None:
    """Add how often each pair of features was met."""
    _add(goal, {PAIRS: pairs})


def _add(goal: str, figures: Mapping[str, object]) -> None:
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
    """The sums. Of pairs: how many there are, and how often the rarest of them was met."""
    sums: Sums = {goal: defaultdict(int) for goal in GOALS}
    met: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for line in lines:
        figures = json.loads(line)
        goal = figures.pop("goal")
        for pair, number in figures.pop(PAIRS, {}).items():
            met[goal][pair] += number
        for name, number in figures.items():
            sums[goal][name] += number
    for goal, pairs in met.items():
        sums[goal] |= {PAIRS: len(pairs), "times_the_rarest_pair": min(pairs.values())}
    return sums


def matrix(lines: list[str]) -> list[str]:
    """How often each pair was met, the rarest first."""
    met: dict[str, int] = defaultdict(int)
    for line in lines:
        for pair, number in json.loads(line).get(PAIRS, {}).items():
            met[pair] += number
    return [f"{number:6,}  {pair}" for pair, number in sorted(met.items(), key=lambda each: (each[1], each[0]))]


def unproved(sums: Sums) -> list[str]:
    """What keeps a run from being a proof: the goals that were not run, and what must be 0 and is not."""
    return [
        f"{goal} is not proved: {', '.join(wrong) or 'not run'}"
        for goal, figures in sums.items()
        if (wrong := [f"{figures[name]:,} {_words(name)}" for name in NEVER if figures.get(name)] + _rare(figures))
        or not figures
    ]


def _rare(figures: Mapping[str, int]) -> list[str]:
    """What is wrong with pairs: one was met less often than the number of worlds asks for."""
    least, met = figures.get("worlds", 0) * LEAST // OF, figures.get("times_the_rarest_pair")
    return [] if met is None or met >= least else [f"a pair was met {met:,} times of {least:,}"]


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
    if sys.argv[1:] == [PAIRS]:
        print("\n".join(matrix(gathered)))
        sys.exit()
    found = sums_of(gathered)
    print("\n".join(table(found) + unproved(found)))
    sys.exit(1 if unproved(found) else 0)
