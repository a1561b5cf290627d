"""Mutants: small, named changes that break the durability of the log. The tests must notice each of them.

They stand in mutants.diff: a name, the module, and lines that are removed (-), are added (+), or stay and
only show the place. After the module's name stand the tests to be tried first, if they are not the module's
own. A proof that passes whatever the code does proves nothing; test_mutants.py shows that this proof can fail.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "loglib"


class Mutant(NamedTuple):
    """The lines `old` stand once in the module; `new` replaces them."""

    name: str
    module: str
    tests: tuple[str, ...]  # which find it soonest, as hunt.py names them
    old: str
    new: str

    @property
    def found_by(self) -> tuple[str, ...]:
        """The single tests that find it; if none is named, the modules."""
        return tuple(each for each in self.tests if "::" in each) or self.tests

    def plant(self, directory: Path) -> None:
        """Put a copy of the package with the mutant into a directory for PYTHONPATH."""
        source = self.source()
        target = directory / "loglib"
        # With the byte code of the modules that are not changed, but for what another process is just writing.
        shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("*.pyc.*"))
        (target / self.module).write_text(source, "utf-8")

    def source(self) -> str:
        """The module with the mutant. It must still be Python: anything would kill one that is not."""
        source = "\n" + (PACKAGE / self.module).read_text("utf-8")
        assert source.count(self.old) == 1, f"{self.name}: {source.count(self.old)} times in {self.module}:{self.old}"
        changed = source.replace(self.old, self.new).removeprefix("\n")
        compile(changed, self.module, "exec")
        return changed


def _parse(text: str) -> Mutant:
    name, where, *lines = text.strip("\n").split("\n")
    module, *tests = where.split()
    old = [line[1:] for line in lines if line[0] in " -"]
    new = [line[1:] for line in lines if line[0] in " +"]
    if all("::" in each for each in tests):
        tests = [*tests, Path(module).stem]
    return Mutant(name, module, tuple(tests), "\n".join(["", *old, ""]), "\n".join(["", *new, ""]))


_TEXT = "\n" + Path(__file__).with_suffix(".diff").read_text("utf-8")
MUTANTS = [_parse(each) for each in _TEXT.split("\n== ")[1:]]
