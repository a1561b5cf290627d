"""Coverage-guided fuzzing of the decoders, where the package `atheris` is installed (Linux, CPython 3.11 to 3.13).

    pip install atheris
    python tests/reliability/coverage_guided.py batch_columns -runs=1000000

The targets are those of fuzzing.py. The fuzzer's input replaces their random numbers, and each
exception is a finding. The seeded runs of test_hostile.py do not need this module.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2] / "src"), str(HERE.parents[1]), str(HERE.parents[1] / "support"), str(HERE.parent)]

with atheris.instrument_imports(include=["loglib"]):
    import fuzzing
    import hostile_bytes


def numbers_from(content: bytes) -> hostile_bytes.Draw:
    """Two bytes of the input make a number in [0, 1); after the end of the input all numbers are 0."""
    provider = atheris.FuzzedDataProvider(content)
    return lambda: provider.ConsumeIntInRange(0, 65535) / 65536


def main() -> None:
    names = {target.__name__: target for target in fuzzing.TARGETS}
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        sys.exit(f"which target? {', '.join(names)}")
    target = names[sys.argv.pop(1)]

    def run(content: bytes) -> None:
        target(numbers_from(content))

    atheris.Setup(sys.argv, run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
