"""The sample: the part of the proof that continuous integration runs. The same change always gets the same part.

It has the first of each test's cases and every third after it. Of the mutants it has every tenth, and those whose
module differs from that of the commit in the file `proved` on which the reliability tests last passed as a whole.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant

CASES = 3  # the distance from one case of a test to the next: odd, since cases often alternate between file systems
EVERY = 10  # and from one mutant to the next
ROOT = Path(__file__).resolve().parents[2]
PROVED = Path(__file__).with_name("proved")
OF_A_MUTANT = "::test_mutant_is_killed["


def changed_files() -> set[str] | None:
    """The library's files that differ from the commit that is proved; None if git does not know that commit."""
    try:
        stages = dict(line.split() for line in PROVED.read_text("utf-8").splitlines())
        command = ["git", "diff", "--name-status", "--find-renames", stages.get("reliability", ""), "--", "src"]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return changed(found.stdout.splitlines())


def changed(lines: Iterable[str]) -> set[str]:
    """What git lists as changed, by its new names. A file that was only moved is not."""
    return {line.rpartition("\t")[2] for line in lines if not line.startswith("R100")}


def of_mutants(mutants: Sequence[Mutant], files: set[str]) -> list[Mutant]:
    """The mutants that are chosen when these files have changed."""
    every = mutants[::EVERY]
    return [each for each in mutants if each in every or f"src/loglib/{each.module}" in files]


def of_cases(tests: Iterable[str], mutants: Iterable[Mutant]) -> set[str]:
    """The tests, as pytest names them, that are chosen with these mutants."""
    seen: Counter[str] = Counter()
    names = {f"{each.name}]" for each in mutants}
    found = set()
    for test in tests:
        function = test.partition("[")[0]
        _, of_a_mutant, name = test.partition(OF_A_MUTANT)
        if name in names if of_a_mutant else seen[function] % CASES == 0:
            found.add(test)
        seen[function] += 1
    return found


def summary() -> str:
    """Which mutants are chosen, and why, in a line."""
    files = changed_files()
    chosen = of_mutants(MUTANTS, files or set())
    why = "every tenth" if files is None else f"every tenth, and those of the {len(files)} files that have changed"
    unknown = "; git does not know the commit that is proved" if files is None else ""
    return f"sample: {len(chosen)} of {len(MUTANTS)} mutants, {why}{unknown}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """This module is a plugin, where `--sample` is given."""
    mutants = of_mutants(MUTANTS, changed_files() or set())
    chosen = of_cases([item.nodeid for item in items], mutants)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(summary())
