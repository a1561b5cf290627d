"""The format is frozen: each structure has a golden file, which is read for good and written again byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_structures import STRUCTURES
from make_golden import GOLDEN

PLACE = GOLDEN / "structures"
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text("utf-8")


@pytest.mark.parametrize("name", STRUCTURES)
def test_golden_structure_is_read(name: str) -> None:
    structure = STRUCTURES[name]
    assert structure.read((PLACE / name).read_bytes()) == structure.says


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure_is_written_as_it_was_frozen(name: str) -> None:
    structure = STRUCTURES[name]
    written = structure.write()
    assert structure.read(written) == structure.says
    assert written == (PLACE / name).read_bytes() or not structure.same_bytes


def test_every_golden_structure_is_on_the_page_that_promises_it() -> None:
    promised = PAGE.split("## The format is frozen\n", 1)[1].split("\n## ", 1)[0]
    names = sorted(path.name for path in PLACE.iterdir())
    assert names == sorted(STRUCTURES)
    assert [name for name in names if f"`{name}`" not in promised] == []
