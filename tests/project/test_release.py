"""What is released: a wheel and an sdist, in an environment with nothing but what each extra names."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import loglib

ROOT = Path(__file__).resolve().parents[2]
NAME = "loglib-segments"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def build(source: Path, to: Path) -> Path:
    """Build the wheel and the sdist of a checkout, without the network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", str(to)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return to


def wheel_in(directory: Path) -> zipfile.ZipFile:
    (wheel,) = directory.glob("*.whl")
    return zipfile.ZipFile(wheel)


def metadata_in(wheel: zipfile.ZipFile) -> Message:
    (facts,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(facts).decode())


def test_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    with wheel_in(built) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        there = {
            str(path.relative_to(ROOT / "src"))
            for path in (ROOT / "src").rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert names == there and "loglib/py.typed" in names
        metadata = metadata_in(wheel)
        assert (metadata["Name"], metadata["Version"]) == (NAME, loglib.__version__)
        assert metadata["Requires-Python"] == ">=3.11" and metadata["License-Expression"] == "Apache-2.0"
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
        (entry_points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
        assert "[pytest11]\nloglib = pytest_loglib" in wheel.read(entry_points).decode()


def test_sdist_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.2 lacks it
        archive.extractall(tmp_path, **safely)
    (source,) = tmp_path.iterdir()
    for name in ("CHANGELOG.md", "SECURITY.md", "CITATION.cff", "tests/conftest.py", "docs/format.md"):
        assert (source / name).exists(), name
    with wheel_in(built) as ours, wheel_in(build(source, tmp_path / "dist")) as theirs:
        assert {each.filename: each.CRC for each in ours.infolist()} == {
            each.filename: each.CRC for each in theirs.infolist()
        }


def test_page_of_links_for_programs_is_up_to_date() -> None:
    checked = subprocess.run([sys.executable, ROOT / "scripts" / "llms.py", "--check"], check=False)
    assert checked.returncode == 0, "run scripts/llms.py"


# --- an environment with what an extra names -------------------------------------------------------------------

PROGRAMS = {
    "": """
        import loglib
        from loglib import Topic
        with Topic.create("data/t", partitions=2) as topic:
            topic.append_many([b"1", b"2"], keys=[b"a", b"b"])
            topic.flush()
            with topic.group("g") as group:
                assert len(list(group.follow(timeout=0))) == 2
        with loglib.transaction("app") as tx, Topic.open("data/t", mode="r") as topic:
            tx.append(topic, b"3")
        assert loglib.repair("data/t").repairs == ()
    """,
    "arrow": """
        from loglib import Topic
        with Topic.create("t") as topic:
            topic.append(b"1", sync=True)
            assert topic.arrow().read_all().column("value").to_pylist() == [b"1"]
    """,
    "cli": """
        from loglib.cli.program import run
        assert run(["create", "t", "--partitions", "2"]) == 0
        assert run(["ls", "."]) == 0
        assert run(["verify", "t"]) == 0
    """,
    "codecs": """
        from loglib import Topic
        for codec in ("zstd", "lz4"):
            with Topic.create(codec, compression=codec) as topic:
                topic.append(b"1" * 1000, sync=True)
                assert [record.value for record in topic.read()] == [b"1" * 1000]
    """,
    "prometheus": "import loglib.metrics.prometheus",
    "opentelemetry": "import loglib.metrics.opentelemetry",
    "testing": "import loglib.testing.strategies",
    "ui": "import loglib.ui.app, loglib.ui.server",
    "spark": "import loglib.spark, pyspark_loglib; pyspark_loglib.DefaultSource",
}


def needed(extra: str, own: list[str]) -> set[str]:
    """The distributions that the extra needs, and those that they need, as they are installed here.

    `own`: the requirements in the wheel.
    """
    found: set[tuple[str, str]] = set()
    wanted = [(NAME, extra)]
    while wanted:
        name, extras = wanted.pop()
        try:
            requirements = own if name == NAME else distribution(name).requires or []
        except PackageNotFoundError:  # for another system
            continue
        for each in map(Requirement, requirements):
            if each.marker is None or each.marker.evaluate({"extra": extras}):
                for inner in each.extras or {""}:
                    if (each.name, inner) not in found:
                        found.add((each.name, inner))
                        wanted.append((each.name, inner))
                        wanted.append((each.name, ""))
    return {name for name, _ in found} - {NAME}


def tops(installed: Distribution) -> Iterator[Path]:
    """The files and directories of a distribution, beside each other."""
    for path in {Path(str(each)).parts[0] for each in installed.files or ()}:
        if not path.startswith(".."):
            yield Path(str(installed.locate_file(path)))


@pytest.mark.parametrize("extra", PROGRAMS, ids=lambda extra: extra or "none")
def test_wheel_runs_with_what_an_extra_installs(extra: str, built: Path, tmp_path: Path) -> None:
    place = tmp_path / "site"
    with wheel_in(built) as wheel:
        wheel.extractall(place)
        own = metadata_in(wheel).get_all("Requires-Dist", [])
    for name in needed(extra, own):
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        for path in tops(found):
            if path.exists() and not (place / path.name).exists():
                (place / path.name).symlink_to(path)
    program = re.sub(r"^        ", "", PROGRAMS[extra], flags=re.MULTILINE)
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(place)!r})\n{program}"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
