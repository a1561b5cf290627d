"""The code in the documentation runs: each page's ```python blocks, in order, as one program in an empty directory.

Blocks that need Spark are fenced ```python spark. They run, after the others on their page, only in the Spark tests.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCED = re.compile(
    r"^(?P<indent> *)```python(?P<spark> spark)?\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]
TEXTS = [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "reliability" / "README.md"]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


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
    script = directory / f"page_{page.stem}.py"  # a page may be named as a module of the standard library
    script.write_text(program(page.read_text("utf-8"), spark=spark), "utf-8")
    environment = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"}
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "VIRTUAL_ENV"):  # the pages say what to set
        environment.pop(name, None)
    places = [each for each in environment["PATH"].split(":") if Path(each) != Path(sys.executable).parent]
    environment["PATH"] = ":".join(places)  # as where the virtual environment is not activated
    command = [sys.executable, "-W", "error", script.name]
    ran = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert ran.returncode == 0, f"{page.name} (line numbers are the page's):\n{ran.stdout}\n{ran.stderr}"


@pytest.mark.parametrize("page", pages(spark=False))
def test_code_on_the_page_runs(page: Path, tmp_path: Path) -> None:
    check_runs(page, tmp_path, spark=False)


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_page_shows_what_its_program_prints(name: str, tmp_path: Path) -> None:
    page = (ROOT / name).read_text("utf-8")
    shown = textwrap.dedent(page.split("It prints:\n\n")[1].split("\n\n")[0])
    for attempt in range(5):  # on a busy machine a flush may come between two appends, and split their batch
        directory = tmp_path / str(attempt)
        directory.mkdir()
        (directory / "program.py").write_text(program(page, spark=False), "utf-8")
        command = [sys.executable, "-W", "error", "program.py"]
        ran = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True, timeout=60)
        if ran.stdout.splitlines() == shown.splitlines():
            return
    pytest.fail(f"it prints:\n{ran.stdout}")


def test_readme_is_short_and_begins_with_a_command() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 150
    assert lines[2].startswith("    pip install ")


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("page", pages(spark=True))
def test_code_on_the_page_runs_with_spark(page: Path, tmp_path: Path) -> None:
    check_runs(page, tmp_path, spark=True)


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be linked by."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_the_page_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text("utf-8")):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_tests_and_files_that_the_pages_name_exist() -> None:
    """A guarantee names its test, and a test that was renamed would leave it without one."""
    sources = {path: path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    known = set(re.findall(r"^def (test_\w+)\(", "\n".join(sources.values()), re.MULTILINE))
    known |= {name for path in sources for name in (path.name, path.stem)}
    for page in TEXTS:
        named = re.findall(r"\b(test_\w+(?:\.py)?)\b", page.read_text("utf-8"))
        assert {name for name in named if name not in known} == set(), page.name


def test_page_of_public_names_is_up_to_date_and_describes_each() -> None:
    """`python scripts/reference.py` writes it again."""
    script = run_path(str(ROOT / "scripts" / "reference.py"))
    page = script["PAGE"].read_text("utf-8")
    assert page == script["reference"](), "run scripts/reference.py"
    assert "|  |" not in page


def test_program_keeps_the_lines_of_the_page() -> None:
    page = "# A\n```python\na = 1\n```\n* item\n  ```python\n  if a:\n      b = 2\n  ```\n```python spark\nc = 3\n```\n"
    assert program(page, spark=False).rstrip("\n").split("\n") == ["", "", "a = 1", "", "", "", "if a:", "    b = 2"]
    assert program(page, spark=True).rstrip("\n").split("\n")[-1] == "c = 3"
