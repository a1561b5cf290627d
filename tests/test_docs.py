"""The code in the documentation runs: each page's ```python blocks, in order, as one program in an empty directory.

Blocks that need Spark are fenced ```python spark. They run, after the others on their page, only in the Spark tests.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FENCED = re.compile(
    r"^(?P<indent> *)```python(?P<spark> spark)?\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]


def program(text: str, *, spark: bool) -> str:
    """The page's blocks, each in the lines where it stands on the page, so that tracebacks name those lines."""
    lines = [""] * (text.count("\n") + 1)
    for block in FENCED.finditer(text):
        if spark or not block["spark"]:
            first = text.count("\n", 0, block.start("code"))
            code = textwrap.dedent(block["code"]).splitlines()
            lines[first : first + len(code)] = code
    return "\n".join(lines)


def pages(*, spark: bool) -> list[object]:
    kind = "```python spark\n" if spark else "```python\n"
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in PAGES if kind in path.read_text("utf-8")]


def check_runs(page: Path, directory: Path, *, spark: bool) -> None:
    script = directory / f"{page.stem}.py"
    script.write_text(program(page.read_text("utf-8"), spark=spark), "utf-8")
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [sys.executable, "-W", "error", script.name]
    ran = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert ran.returncode == 0, f"{page.name} (line numbers are the page's):\n{ran.stdout}\n{ran.stderr}"


@pytest.mark.parametrize("page", pages(spark=False))
def test_code_on_the_page_runs(page: Path, tmp_path: Path) -> None:
    check_runs(page, tmp_path, spark=False)


@pytest.mark.spark
@pytest.mark.parametrize("page", pages(spark=True))
def test_code_on_the_page_runs_with_spark(page: Path, tmp_path: Path) -> None:
    check_runs(page, tmp_path, spark=True)


def test_program_keeps_the_lines_of_the_page() -> None:
    page = "# A\n```python\na = 1\n```\n* item\n  ```python\n  if a:\n      b = 2\n  ```\n```python spark\nc = 3\n```\n"
    assert program(page, spark=False).rstrip("\n").split("\n") == ["", "", "a = 1", "", "", "", "if a:", "    b = 2"]
    assert program(page, spark=True).rstrip("\n").split("\n")[-1] == "c = 3"
