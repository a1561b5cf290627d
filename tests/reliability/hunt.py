"""Hunt: run what finds faults in durability soonest; exit status 1 if there is one, 0 if all seems well.

    python hunt.py [MODULE]      with the package to be judged on PYTHONPATH

First crash states of short workloads, then the ordinary tests of what writes and recovers, those of the
module first.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "reliability")]
ORDINARY = (
    "watermark", "batch", "segment", "recovery", "writer", "lock", "description", "producers", "files", "check", "log",
    "topic", "partition", "fork",
)  # fmt: skip


def main(module: str) -> int:
    from crash_engine import run_workloads, workloads  # what they import may be the mutant's own fault

    run_workloads(workloads(long=40))
    first = [name for name in ORDINARY if name == module]
    files = [str(TESTS / f"test_{name}.py") for name in dict.fromkeys([*first, *ORDINARY])]
    fast = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not spark and not reliability", "--timeout=120"]
    return int(pytest.main([*fast, *files]) != pytest.ExitCode.OK)


if __name__ == "__main__":
    try:
        status = main("".join(sys.argv[1:]).removesuffix(".py"))
    except Exception:  # of whatever kind: the library fails where it must not
        traceback.print_exc()
        status = 1
    sys.exit(status)
