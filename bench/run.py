"""Run: the benchmarks, `python bench/run.py [--only PATTERN] [--quick] [--full] [--write]`.

Invariant: every measurement has its own process and its own directory. The systems of a case take
turns. All files are removed at the end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
from cases import Case, Run, Sizes, all_cases
from job import Job
from measure import Measurement
from report import case_table, document, spark_section, target_table, with_spark
from results import Results
from targets import checks

_WORKER = Path(__file__).with_name("worker.py")
_RESULTS = Path(__file__).with_name("RESULTS.md")
_TIMEOUT_SECONDS = 300  # For one measurement. The largest, a log of 10 GB, takes about a minute.


def main() -> int:
    """Run the chosen cases, print them and the targets. Return 1 if a measurement failed."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the directory is removed.
    cases = all_cases(Sizes.chosen(quick=arguments.quick, full=arguments.full))
    if arguments.only:
        cases = [case for case in cases if re.search(arguments.only, case.name)]
    parent = arguments.dir or machine.disk_directory()
    results, failures = Results(), 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="loglib-bench-", dir=parent) as directory:
        facts = _facts(Path(directory))
        for number, case in enumerate(cases, 1):
            print(f"\n[{number}/{len(cases)}, {time.monotonic() - started:.0f} s] {case.name}", flush=True)
            failures += _run_case(case, results, Path(directory))
            if case.name in results.cases:
                print(case_table(results, case.name), flush=True)
    facts["took"] = f"{time.monotonic() - started:.0f} s"
    print("\n" + target_table(checks(results)))
    if arguments.write:
        old = _RESULTS.read_text() if _RESULTS.exists() else ""
        _RESULTS.write_text(with_spark(document(results, checks(results), facts), spark_section(old)))
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure loglib against what else one would use.")
    parser.add_argument("--only", metavar="PATTERN", help="run the cases whose names match this regular expression")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work: to see that everything runs")
    parser.add_argument("--full", action="store_true", help="also the logs of 10 GB")
    parser.add_argument("--write", action="store_true", help="write bench/RESULTS.md")
    parser.add_argument("--dir", type=Path, help="where to put the logs; must be on a disk")
    return parser.parse_args()


def _run_case(case: Case, results: Results, directory: Path) -> int:
    """Run every repetition of a case and return how many measurements failed."""
    if machine.free_bytes(directory) < case.needs_bytes:
        print(f"left out: needs {case.needs_bytes / 1e9:.0f} GB of free disk", flush=True)
        return 0
    failures = 0
    prepared: dict[str, Path] = {}
    try:
        for _ in range(case.repeats):
            for run in case.runs:
                measurement = _measured(run, prepared, directory)
                results.add(case.name, run.label, measurement)
                failures += measurement is None
                print("." if measurement else "F", end="", flush=True)
    finally:
        for path in prepared.values():
            shutil.rmtree(path, ignore_errors=True)
    print()
    return failures


def _measured(run: Run, prepared: dict[str, Path], directory: Path) -> Measurement | None:
    """Measure one run. Its `prepare`, if it has one, runs once, and later repetitions use the same files."""
    try:
        if run.prepare is None:
            with tempfile.TemporaryDirectory(dir=directory) as fresh:
                return _work(run.job, Path(fresh))
        name = run.prepare.to_json()
        if name not in prepared:
            path = Path(tempfile.mkdtemp(dir=directory))
            _work(run.prepare, path)
            prepared[name] = path
        return _work(run.job, prepared[name])
    except subprocess.SubprocessError as error:
        print(f"\n{run.label}: {error}", file=sys.stderr)
        return None


def _work(job: Job, directory: Path) -> Measurement | None:
    """Let one process do a job. Return what it measured, or None if it only prepared files."""
    command = [sys.executable, str(_WORKER), job.to_json(), str(directory)]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_SECONDS)
    fields = json.loads(finished.stdout)
    return None if fields is None else Measurement(**fields)


def _facts(directory: Path) -> dict[str, str]:
    now = datetime.datetime.now(datetime.UTC)
    command = " ".join(["python bench/run.py", *machine.shown_arguments(sys.argv[1:])])
    return {**machine.description(directory), "date": f"{now:%Y-%m-%d %H:%M} UTC", "command": f"`{command}`"}


if __name__ == "__main__":
    sys.exit(main())
