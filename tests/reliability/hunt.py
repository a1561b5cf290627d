"""Hunt: run the tests that find faults in durability soonest. Exit status: 1 for a fault, 0 for none, otherwise 2.

    python hunt.py [--tests | --states] [TESTS ...]      with the package to be judged on PYTHONPATH

A test is named as "writer", for test_writer.py and each test_writer_*.py, or as "writer_flush::test_name", for one.

The order: the crash states of single calls, the single tests that are named, the modules that are named, the crash
states of transactions (if their tests are named) and of longer workloads, and last the other ordinary tests of writing
and recovery.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pytest

NOTHING_RAN = 2
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "support"), str(TESTS / "reliability")]
ORDINARY = (
    "watermark", "batch", "segment", "search", "recovery", "writer", "lock", "topic_file", "producers", "files",
    "verify", "log", "payloads", "topic", "partition", "fork", "moved", "ages", "retention", "retention_pass", "hold",
    "abandoned", "accounts", "transfer", "reader", "columns", "transactions", "transaction_store",
    "transaction_recovery", "transaction_segments", "repair", "lone", "spin", "bundle", "snapshot",
    "append_arrow", "arrow_bodies", "archive", "delta_table", "mirror_stream_forged", "mirror_stream", "mirror",
    "heal", "reader_donors", "replicas",
)  # fmt: skip


def main(named: list[str]) -> int:
    """With "--tests" or "--states" only these are tried, for a package that is to survive."""
    from crash_engine import run_workloads  # what they import may have the fault
    from crash_workloads import SHORT, workloads

    tests, states = "--states" not in named, "--tests" not in named
    single = [name for name in named if "::" in name]
    first = [name for name in ORDINARY if name in named]
    kinds = workloads(long=40)
    if states:
        run_workloads(islice(kinds, len(SHORT)))  # each call alone
    if tests and (fail(single) or fail(first)):
        return 1
    if states:
        if "transaction_recovery" in named:
            programs(8)
        run_workloads(kinds)
    return int(tests and fail(name for name in ORDINARY if name not in first))


def programs(count: int) -> None:
    """The crash states of some programs with transactions; raises for a fault."""
    from test_transaction_crashes import Judge, run

    judge = Judge()
    for seed in range(count):
        run(seed, judge)


def fail(names: Iterable[str]) -> bool:
    """Whether a fast test of these fails."""
    found = [each for name in names for each in files_of(name)]
    plain = ["-x", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "--timeout=30"]
    fast = ["-m", "not slow and not spark and not reliability"]
    code = pytest.main([*plain, *fast, *found]) if found else pytest.ExitCode.OK
    if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit(NOTHING_RAN)
    return code != pytest.ExitCode.OK


def files_of(name: str) -> list[str]:
    """What pytest calls the tests of this name."""
    module, colons, test = name.partition("::")
    if colons:
        return [f"{each}::{test}" for each in TESTS.rglob(f"test_{module}.py")]
    return sorted(map(str, (*TESTS.rglob(f"test_{module}.py"), *TESTS.rglob(f"test_{module}_*.py"))))


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except Exception:  # of any kind: the library fails where it must not
        traceback.print_exc()
        status = 1
    sys.exit(status)
