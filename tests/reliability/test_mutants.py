"""G2: each mutant is killed, and the library without a mutant passes the same tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import counts
import pytest
from mutants import MUTANTS, PACKAGE, Mutant

HUNT = Path(__file__).with_name("hunt.py")


def hunt(package: Path, *tests: str, timeout_s: float = 500) -> subprocess.CompletedProcess[str]:
    """Judge the package in a separate process; these tests run before others."""
    environment = os.environ | {
        "PYTHONPATH": str(package), "CI": "hunt", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, str(HUNT), *tests],
        env=environment, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


@pytest.mark.reliability
@pytest.mark.timeout(650)  # all tests that a mutant names, and no mutant ends them early
@pytest.mark.parametrize("part", [pytest.param("--tests", marks=pytest.mark.slow), "--states"])
def test_library_as_it_is_survives_the_hunt(part: str) -> None:
    tests = {test for mutant in MUTANTS for test in (mutant.tests if part == "--states" else mutant.found_by)}
    found = hunt(PACKAGE.parent, part, *tests, timeout_s=620)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]


@pytest.mark.reliability
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    mutant.plant(tmp_path)
    killed = hunt(tmp_path, *mutant.tests).returncode == 1
    counts.count("G2", mutants=1, killed=int(killed), survived=int(not killed))
    assert killed, f"nothing notices that {mutant.name}"


def test_mutants_have_their_places_in_the_source() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    for mutant in MUTANTS:
        mutant.source()
