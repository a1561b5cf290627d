"""A package that is missing: the error names the extra that has it, before anything is made."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest

from conftest import QUIET, ROOT, SOURCE, run_python
from loglib import Topic
from loglib.config.extras import _EXTRAS, _WITHOUT_EXTRA, how_to_install

REQUIRED = {"fastcrc", "sortedcontainers"}
# pytest loads the fixtures, so it is there.
AT_HOME = {"pytest"}
CALLS = {
    "topic.arrow()": ("pyarrow", "[arrow]"), "next(topic.batches()).to_arrow()": ("pyarrow", "[arrow]"),
    "topic.read().arrow(decode='text')": ("pyarrow", "[arrow]"), "topic.scan_polars()": ("pyarrow", "[arrow]"),
    "topic.append_arrow(None)": ("pyarrow", "[arrow]"), "topic.partition(0).append_arrow(None)": ("numpy", "[arrow]"),
    "offload.archive(topic, 'archive')": ("pyarrow", "[arrow]"),
    "offload.archive(topic, 'archive', delta=True)": ("deltalake", "[delta]"),
    "Topic.open('s3://bucket/topic', mode='r')": ("pyarrow", "[arrow]"),
    "topic.to_pandas()": ("pandas", ""), "topic.to_polars()": ("polars", ""),
    "importlib.import_module('loglib.metrics.prometheus')": ("prometheus_client", "[prometheus]"),
    "importlib.import_module('loglib.metrics.exporter')": ("prometheus_client", "[prometheus]"),
    "importlib.import_module('loglib.metrics.opentelemetry')": ("opentelemetry", "[opentelemetry]"),
    "importlib.import_module('loglib.testing.strategies')": ("hypothesis", "[testing]"),
}  # fmt: skip
PROGRAM = """
    import importlib, os, sys
    from loglib import Topic, offload

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == sys.argv[2]:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Missing())
    os.chdir(sys.argv[3])
    with Topic.open(sys.argv[3] + "/topic") as topic:
        topic.append(b"x", sync=True)
        try:
            eval(sys.argv[1])
        except ImportError as error:
            print(type(error).__name__, error)
    print(os.listdir("."))
"""


@pytest.mark.parametrize("call", CALLS)
def test_call_names_the_extra_that_it_needs_and_makes_nothing(call: str, tmp_path: Path) -> None:
    Topic.create(tmp_path / "topic", **QUIET).close()
    package, extra = CALLS[call]
    said, left = run_python(PROGRAM, call, package, tmp_path).splitlines()
    to_install = f"'loglib-segments{extra}'" if extra else package
    assert said == f"ModuleNotFoundError this needs {package}: pip install {to_install}"
    assert left == "['topic']"


def imported(path: Path) -> set[str]:
    """The packages that a module imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"loglib"}


def test_every_package_that_is_imported_is_known() -> None:
    packages = set().union(*(imported(path) for path in SOURCE.rglob("*.py")))
    assert packages - REQUIRED - AT_HOME - set(_WITHOUT_EXTRA) <= set(_EXTRAS)


def test_every_extra_that_is_named_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert set(_EXTRAS.values()) <= set(extras)


def test_error_about_something_else_is_left_alone() -> None:
    assert how_to_install(ModuleNotFoundError("no", name="something")) is None
    assert how_to_install(ImportError("no")) is None
    assert how_to_install(ModuleNotFoundError("no", name="pyarrow.fs")) == (
        "this needs pyarrow: pip install 'loglib-segments[arrow]'"
    )
