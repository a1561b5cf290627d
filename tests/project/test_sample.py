"""The sample of the proof: the same for the same change, with something of each goal, or it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import counts
import pytest
import sample
from mutants import MUTANTS

from conftest import ROOT


def test_sample_has_something_of_each_test_and_every_tenth_mutant() -> None:
    tests = [f"r.py::test_{name}[{shard}]" for name in "ab" for shard in range(12)] + ["r.py::test_c"]
    mutants = sample.of_mutants(MUTANTS, set())
    assert mutants == MUTANTS[::10]
    hunts = [f"r.py{sample.OF_A_MUTANT}{each.name}]" for each in MUTANTS]
    chosen = sample.of_cases(tests + hunts, mutants)
    assert {each for each in chosen if each in hunts} == set(hunts[::10])
    assert {each.partition("[")[0] for each in chosen} >= {"r.py::test_a", "r.py::test_b", "r.py::test_c"}
    assert len(chosen) < len(tests) + len(mutants)
    assert chosen == sample.of_cases(tests + hunts, mutants)


def test_sample_has_all_mutants_of_what_has_changed() -> None:
    module = MUTANTS[1].module
    mutants = sample.of_mutants(MUTANTS, {f"src/loglib/{module}", "docs/format.md"})
    assert {each.name for each in mutants} == {
        each.name for number, each in enumerate(MUTANTS) if each.module == module or number % 10 == 0
    }
    assert sample.of_mutants(MUTANTS, {f"src/loglib/{each.module}" for each in MUTANTS}) == MUTANTS


def test_file_that_was_only_moved_has_not_changed() -> None:
    listed = [
        "M\tsrc/loglib/log.py",
        "R100\tsrc/loglib/a.py\tsrc/loglib/b.py",
        "R087\tsrc/loglib/c.py\tsrc/loglib/d.py",
    ]
    assert sample.changed(listed) == {"src/loglib/log.py", "src/loglib/d.py"}


def test_commit_that_git_does_not_know_leaves_every_tenth_mutant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sample, "PROVED", tmp_path / "proved")
    assert sample.changed_files() is None
    (tmp_path / "proved").write_text("coverage HEAD\n")
    assert sample.changed_files() is None
    (tmp_path / "proved").write_text(f"reliability {'0' * 40}\n")
    assert sample.changed_files() is None
    assert "git does not know" in sample.summary()


def test_stage_that_has_passed_on_these_files_is_not_run_again(tmp_path: Path) -> None:
    """The file of the notes itself may change, and nothing is noted of files that no commit has."""
    script, notes = tmp_path / "scripts/prove.sh", tmp_path / "tests/reliability/proved"
    for path in (script, notes):
        path.parent.mkdir(parents=True)
    shutil.copy(ROOT / "scripts/prove.sh", script)
    (tmp_path / "Makefile").write_text("first:\n\t@echo first runs\nsecond:\n\t@exit 1\n")
    notes.write_text("second 1\n")

    def run(*command: str) -> str:
        others = ("GIT_", "LOGLIB_", "MAKE")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        environment |= {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return found.stdout + str(found.returncode)

    def commit() -> str:
        run("git", "add", ".")
        run("git", "commit", "--quiet", "--message", "a step")
        return run("git", "rev-parse", "HEAD").split()[0]

    run("git", "init", "--quiet")
    first = commit()
    assert "first runs" in run("scripts/prove.sh", "first")
    assert notes.read_text() == f"first {first}\nsecond 1\n"
    commit()
    assert run("scripts/prove.sh", "first") == "== first: passed on these files before\n0"
    assert run("scripts/prove.sh", "second").endswith("2")
    (tmp_path / "code").write_text("1")
    second = commit()
    (tmp_path / "code").write_text("2")
    assert "first runs" in run("scripts/prove.sh", "first")
    assert notes.read_text() == f"first {first}\nsecond 1\n"
    (tmp_path / "code").write_text("1")
    assert "first runs" in run("scripts/prove.sh", "first")
    assert notes.read_text() == f"first {second}\nsecond 1\n"


def test_goal_that_was_not_run_or_has_failed_is_named() -> None:
    lines = [f'{{"goal": "{goal}", "cases": 1, "lost": 0}}' for goal in counts.GOALS]
    assert counts.unproved(counts.sums_of(lines)) == []
    found = counts.sums_of([*lines[1:], '{"goal": "G2", "mutants": 1, "survived": 2}'])
    assert counts.unproved(found) == ["G1 is not proved: not run", "G2 is not proved: 2 survived"]


@pytest.mark.parametrize(("soak", "one_in"), [("20", 1), ("1", 1), ("0.05", 21), ("0.001", 101)])
def test_short_run_has_a_part_of_what_is_tried_everywhere(
    monkeypatch: pytest.MonkeyPatch, soak: str, one_in: int
) -> None:
    monkeypatch.setenv("LOGLIB_SOAK", soak)
    assert counts.part() == one_in
