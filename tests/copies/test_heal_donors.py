"""Healing takes from no donor what this log does not prove to be its own."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import mended
import pytest
from builders import BODY_AT, encoded, forged, header_of, resealed_segment, spoil
from mended import batches, identity, segments, write

from conftest import QUIET, last_segment, tree
from loglib import LogError, Topic
from loglib.copies import heal
from loglib.format.columns import Columns
from loglib.log.donors import Donors
from loglib.log.log import Log
from loglib.segment import HEADER_BYTES, Identity
from loglib.system.files import REAL

copy = mended.copy
whole = mended.whole


def test_segments_that_lie_differently_are_left_alone(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    """A file of another name stands in the middle of a missing segment."""
    second = segments(path)[1]
    offset = int(second.stem) + batches(second)[1][0] - HEADER_BYTES
    second.rename(second.with_name(f"{offset:020d}.log"))
    report = heal(path, [copy])
    assert not any(each.offsets for each in report.healed)
    assert any("begins in the middle" in each.why for each in report.unhealed)


def test_a_missing_segment_of_which_a_part_is_left_is_not_made(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    name = segments(path)[1].relative_to(path)
    (path / name).unlink()
    spoil(copy / name, batches(copy / name)[1][0] + 140)
    report = heal(path, [copy])
    assert not report.healed and not (path / name).exists()
    assert any("no donor has all of its batches" in each.why for each in report.unhealed)


def test_damage_with_nothing_whole_behind_it_stays(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    """Nothing says what was there: the next segment has lost its header and its first batch, everywhere."""
    second, third = segments(path)[1:3]
    position, _ = batches(second)[-1]
    spoil(second, position + 20)
    place, _ = batches(third)[0]
    spoil(third, 30, place + 20)
    spoil(copy / third.relative_to(path), place + 30)
    report = heal(path, [copy])
    assert not report.healed
    assert any("nothing says which header" in each.why for each in report.unhealed)


def test_a_whole_file_that_is_too_long_before_a_damaged_header_is_left(path: Path, copy: Path) -> None:
    write(path, 60)
    first, second, *_ = segments(path)
    first.write_bytes(first.read_bytes() + b"more")
    spoil(second, 40)
    report = heal(path, [copy])
    assert not report.healed and any("4 bytes too much" in each.why for each in report.unhealed)


def test_wrong_donors_are_refused_in_words(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    with pytest.raises(TypeError, match="a list of directories"):
        heal(path, str(copy))
    with pytest.raises(ValueError, match="a donor of itself"):
        heal(path, [copy, path])
    with pytest.raises(ValueError, match="mode='r'"):
        Topic.open(path, create=True, donors=[copy])
    with pytest.raises(LogError, match="holds no topic"):
        heal(path.parent / "nothing", [copy])


def impostor(kind: str, stored: bytes, base: int, of: Identity) -> bytes:
    """As many bytes as a batch has, with right checksums."""
    facts = header_of(stored, base, identity=of)
    if kind == "later":
        return forged(stored, identity=of, append_time=facts.append_time + 1)
    if kind == "undecodable":
        return forged(stored, identity=of, codec=1, length=facts.length)
    if kind == "cut":
        return stored[:-100]
    first = encoded(Columns([b"one"]), base, identity=of, previous_crc=facts.previous_crc)
    crc = header_of(first, base, identity=of).header_crc
    rest = len(stored) - len(first) - BODY_AT - 8
    place, value = base + len(first), Columns([b"x" * rest])
    second = encoded(value, place, identity=of, previous_crc=crc if kind == "two" else crc + 1)
    assert len(first) + len(second) == len(stored)
    return first + second


@pytest.mark.parametrize("kind", ["later", "undecodable", "cut", "two", "two that do not follow"])
def test_a_whole_batch_that_this_log_does_not_name_is_not_taken(
    path: Path, copy: Path, whole: dict[str, bytes], kind: str
) -> None:
    name = segments(path)[1].relative_to(path)
    position, length = batches(path / name)[1]
    content = (copy / name).read_bytes()
    stored, base = content[position : position + length], int(name.stem) + position - HEADER_BYTES
    other = impostor(kind, stored, base, identity(path))
    (copy / name).write_bytes(content[:position] + other + (content[position + length :] if kind != "cut" else b""))
    spoil(path / name, position + 140)
    before = tree(path)
    report = heal(path, [copy])
    assert not report.healed and len(report.unhealed) == 1 and tree(path) == before


def test_a_batch_that_is_replaced_after_the_proof_is_not_taken(
    path: Path, copy: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = segments(path)[1].relative_to(path)
    position, length = batches(path / name)[1]
    content, of = (copy / name).read_bytes(), identity(path)
    stored = content[position : position + length]
    other = impostor("later", stored, int(name.stem) + position - HEADER_BYTES, of)
    spoil(path / name, position + 140)
    prove = Donors.prove

    def proven(*arguments: Any, **options: Any) -> Any:
        found = prove(*arguments, **options)
        (copy / name).write_bytes(content[:position] + other + content[position + length :])
        return found

    monkeypatch.setattr(Donors, "prove", proven)
    before = tree(path)
    [left] = heal(path, [copy]).unhealed
    assert "has changed meanwhile" in left.why and tree(path) == before


def test_damage_is_not_proven_up_to_a_place_where_nothing_is_whole(
    path: Path, copy: Path, whole: dict[str, bytes]
) -> None:
    segment = segments(path)[1]
    first, second, third = (int(segment.stem) + each - HEADER_BYTES for each, _ in batches(segment)[1:4])
    spoil(segment, *(batches(segment)[number][0] + 20 for number in (1, 2)))
    of = identity(path)
    with closing(Log(REAL, str(path / "0000"), of)) as log, closing(Donors(REAL, [str(copy / "0000")], of)) as donors:
        assert donors.prove(log, range(first, second), log.mark(), before=None)[0] == []
        assert "nothing that is whole" in donors.prove(log, range(first, second), log.mark(), before=None)[1]
        proven, why = donors.prove(log, range(first, third), log.mark(), before=None)
        assert [(each.start, each.end) for each in proven] == [(first, third)] and not why
        assert "before the damage" in donors.prove(log, range(first + 8, third), log.mark(), before=None)[1]
        assert "does not follow" in donors.prove(log, range(first, third), log.mark(), before=1)[1]


def test_headers_of_a_donor_that_do_not_fit_are_not_taken(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    second, third = segments(path)[1:3]
    for each in (second, third):
        spoil(each, 40)
    name = second.relative_to(path)
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(resealed_segment(content, 72, b"\1\2\3\4"))  # it follows another batch
    name = third.relative_to(path)
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(resealed_segment(content, 56, bytes(8)))  # it follows a segment before the second
    report = heal(path, [copy])
    assert not report.healed and len(report.unhealed) == 2
    (path / name).unlink()
    assert any("is missing, and" in each.why for each in heal(path, [copy]).unhealed)


def test_the_header_of_a_segment_of_another_writer_is_not_taken(path: Path, copy: Path) -> None:
    """Two split topics: each has begun its own segment at the same place, behind the same batch."""
    write(path, 5)
    shutil.copytree(path, copy)
    for each in (path, copy):
        with Topic.open(each, create=True, **QUIET) as topic:
            topic.partition(0)._access.writer().roll()
            topic.append(each.parent.name.encode(), sync=True)
    assert last_segment(path).name == last_segment(copy).name
    spoil(last_segment(path), 30)
    before = tree(path)
    report = heal(path, [copy])
    assert not report.healed and "no donor has this segment" in report.unhealed[0].why and tree(path) == before
