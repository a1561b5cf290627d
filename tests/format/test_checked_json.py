"""Checked JSON: facts come back as they were written, and anything else is an error that says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loglib import CorruptLogError, UnsupportedFormatError
from loglib.format.checked_json import decode, read, seal
from loglib.system.files import REAL


def count(facts: dict[str, Any]) -> int:
    return int(facts["count"])


def test_facts_come_back(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    assert read(REAL, str(file), 100, count, "the facts") is None
    file.write_bytes(seal({"count": 7}))
    assert read(REAL, str(file), 100, count, "the facts") == 7
    with pytest.raises(CorruptLogError):
        read(REAL, str(file), 10, count, "the facts")


def test_flipped_bit_is_found_and_may_be_mended() -> None:
    line = bytearray(seal({"count": 7}))
    line[15] ^= 1
    with pytest.raises(CorruptLogError, match="found no valid facts"):
        decode(bytes(line), "facts.json", count, "the facts")
    assert decode(bytes(line), "facts.json", count, "the facts", mended=True) == 7


@pytest.mark.parametrize("facts", [{}, {"count": None}, {"count": "x"}, {"count": 7, "format": 0}, {"format": "1"}])
def test_other_facts_are_damage(facts: dict[str, Any]) -> None:
    with pytest.raises(CorruptLogError, match="no valid facts .*, expected the facts"):
        decode(seal(facts), "facts.json", count, "the facts")


def test_newer_format_is_not_damage() -> None:
    with pytest.raises(UnsupportedFormatError, match="format 2 is newer"):
        decode(seal({"format": 2}), "facts.json", count, "the facts")
