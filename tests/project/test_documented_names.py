"""Every documented name is reachable as it is documented, in a program that has imported nothing else of loglib."""

import re

import pytest

from conftest import ROOT, run_python

PAGE = (ROOT / "docs" / "reference.md").read_text("utf-8")
MODULES = {
    module: re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)
    for module, rows in re.findall(r"^## `([\w.]+)`\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}

# As logging.config and other programs that take names as text do it: import the first part, then each next part is an
# attribute, or else a module.
RESOLVE = """
import importlib, sys
for name in sys.argv[1:]:
    found, path = None, ""
    for part in name.split("."):
        path = f"{path}.{part}".strip(".")
        if not hasattr(found, part):
            importlib.import_module(path)
        found = sys.modules[path] if found is None else getattr(found, part)
"""


def test_page_has_the_modules_that_users_import() -> None:
    assert {"loglib", "loglib.logging", "loglib.aio", "loglib.spark"} <= MODULES.keys()


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("module", MODULES)
def test_documented_names_are_found_by_a_program_that_has_them_as_text(module: str) -> None:
    run_python(RESOLVE, *(f"{module}.{name}" for name in MODULES[module]))
