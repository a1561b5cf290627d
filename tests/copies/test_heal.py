"""Healing: what is damaged becomes what it was, from copies that this log itself proves to be the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import mended
import pytest
from builders import forged, spoil
from healed import DAMAGED, FOREIGN, HEALTHY, KINDS, OLDER, SPLIT, beside, copies, healed, judge
from mended import SMALL, batches, changed, identity, mirrored, segments, write

from conftest import QUIET, last_segment, tree, values_of
from loglib import LogError, Topic, repair, testing
from loglib.copies import HealReport, heal, promote, snapshot
from loglib.format.watermark import encode_new, newest
from loglib.log.gaps import read_gaps
from loglib.segment import HEADER_BYTES
from loglib.system.files import REAL

copy = mended.copy
whole = mended.whole


# --- any damage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_any_damage_is_healed_and_no_donor_does_harm(seed: int) -> None:
    given = copies(Random(seed))
    for names in ([HEALTHY], [DAMAGED], [OLDER], [SPLIT], [FOREIGN], list(KINDS[1:]), list(reversed(KINDS))):
        files = beside(given.tree, given.donors, names)
        report = healed(files, names)
        if report is not None:
            judge(files, report, given, names)


@pytest.mark.parametrize("seed", range(2))
def test_healing_that_is_cut_is_repeated_and_what_it_has_done_stays(seed: int) -> None:
    given = copies(Random(100 + seed))
    while {"watermark", "no watermark"} & set(given.kinds):
        given = copies(Random(seed := seed + 1000))
    files = beside(given.tree, given.donors, [HEALTHY])
    report = healed(files, [HEALTHY])
    assert report is not None and not report.unhealed
    states = list(files.crash_states(seed=seed, random=1))
    for state in Random(seed).sample(states, min(len(states), 25)):
        cut = state.files
        again = healed(cut, [HEALTHY])
        assert again is not None
        judge(cut, again, given, [HEALTHY])
    for state in files.crash_states(seed=seed, random=1, since=len(files.operations)):
        cut = state.files
        again = healed(cut, [FOREIGN])
        assert again is not None and not again.healed and not again.verified.damage, f"{seed}: {state!r}"


def test_a_dry_run_says_the_same_and_changes_nothing() -> None:
    for seed in range(8):
        given = copies(Random(seed))
        files = beside(given.tree, given.donors, [HEALTHY])
        before = files.tree()
        would = healed(files, [HEALTHY], dry_run=True)
        assert files.tree() == before
        done = healed(files, [HEALTHY])
        if would is not None and done is not None:
            assert would.healed == tuple(each._replace(kept=None) for each in done.healed)
            assert would.unhealed == done.unhealed


def test_a_whole_topic_is_only_read(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    seen: list[tuple[int, int]] = []
    report = heal(path, [copy], progress=lambda done, total: seen.append((done, total)))
    assert report == HealReport((), (), report.verified) and report.verified.records == 120
    assert seen[-1][0] == seen[-1][1] and tree(path) == whole


# --- one damage ----------------------------------------------------------------------------------------------


def test_a_batch_is_healed_and_its_bytes_are_kept(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    segment = segments(path)[1]
    position, length = batches(segment)[2]
    spoil(segment, position + 150)
    damaged = segment.read_bytes()
    [done] = heal(path, [copy]).healed
    start = int(segment.stem) + position - HEADER_BYTES
    assert (done.offsets, done.donor, done.what) == (range(start, start + length), str(copy / "0000"), "1 batch")
    assert done.kept is not None and Path(done.kept).read_bytes() == damaged[position : position + length]
    assert "1 batch from" in str(done) and "are kept in" in str(done)
    assert not changed(path, whole)
    assert heal(path, [copy]).healed == ()


def test_damaged_copies_complete_each_other(path: Path, copy: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    third = tmp_path / "third" / path.name
    mirrored(path, third)
    name = segments(path)[1].relative_to(path)
    places = batches(path / name)
    for each, spoiled in ((path, (1, 2, 3)), (copy, (2,)), (third, (1, 3))):
        spoil(each / name, *(places[number][0] + 140 for number in spoiled))
    report = heal(path, [copy, third])
    assert not report.unhealed and not changed(path, whole)
    assert [each.donor for each in report.healed] == [str(each / "0000") for each in (copy, third, copy)]
    assert heal(copy, [third]).unhealed == () and heal(third, [copy]).unhealed == ()


def test_what_no_donor_has_stays_damaged_and_is_named(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    name = segments(path)[1].relative_to(path)
    places = batches(path / name)
    spoil(path / name, places[1][0] + 140, places[2][0] + 140)
    spoil(copy / name, places[1][0] + 30)
    report = heal(path, [copy, path.parent / "nothing"])
    [left] = report.unhealed
    start = int(segments(path)[1].stem) + places[1][0] - HEADER_BYTES
    assert left.offsets == range(start, start + places[1][1]) and len(report.healed) == 1
    assert "no donor has the batch" in str(left) and "nothing/0000 cannot be used" in str(left)
    assert [each.offsets for each in report.verified.damage] == [left.offsets]


def test_damage_beside_a_gap_that_no_donor_can_fill_is_healed(
    path: Path, copy: Path, whole: dict[str, bytes]
) -> None:
    """The header of the segment with the gap still names the batch that ends before it."""
    before, lost = (each.relative_to(path) for each in segments(path)[1:3])
    spoil(path / lost, batches(path / lost)[0][0] + 140)
    repair(path)
    spoil(copy / lost, batches(copy / lost)[0][0] + 140)
    place, length = batches(path / before)[-1]
    spoil(path / before, place + 140)
    would = heal(path, [copy], dry_run=True)
    report = heal(path, [copy])
    [done], [left] = report.healed, report.unhealed
    assert done.offsets == range(int(lost.stem) - length, int(lost.stem)) == would.healed[0].offsets
    assert left.offsets == range(int(lost.stem), int(lost.stem) + batches(copy / lost)[0][1])
    assert str(before) not in changed(path, whole)


def producers_of_many(path: Path) -> None:
    """Segments that begin with more producers than a header holds."""
    with testing.open_topic(path, files=testing.UnsyncedFiles(), **QUIET, **SMALL) as topic:
        for number in range(150):
            topic.append(b"v" * 60, producer=(f"app {number}", 1))
            topic.flush()


@pytest.mark.parametrize("change", [Path.unlink, lambda each: spoil(each, 5)], ids=["missing", "spoiled"])
def test_a_file_of_producers_is_healed(path: Path, copy: Path, change: Callable[[Path], object]) -> None:
    producers_of_many(path)
    mirrored(path, copy)
    whole = tree(path)
    change(next((path / "0000").glob("*.producers")))
    assert not heal(path, [copy]).unhealed and not changed(path, whole)


def test_a_segment_with_many_producers_is_healed(path: Path, copy: Path) -> None:
    producers_of_many(path)
    mirrored(path, copy)
    whole = tree(path)
    name = next((path / "0000").glob("*.producers")).name
    (path / "0000" / name).unlink()
    (path / "0000" / name.replace(".producers", ".log")).unlink()
    assert not heal(path, [copy]).unhealed and not changed(path, whole)
    (path / "0000" / name).unlink()
    spoil(copy / "0000" / name, 7)
    [left] = heal(path, [copy]).unhealed
    assert "no donor has this segment as it begins" in left.why


def test_headers_and_files_of_wrong_length_are_healed(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    first, second, third, fourth, *_ = segments(path)
    spoil(first, 40)
    second.write_bytes(second.read_bytes() + b"too much")
    third.write_bytes(third.read_bytes()[:100])
    fourth.unlink()
    report = heal(path, [copy])
    assert not report.unhealed and not report.verified.damage and not changed(path, whole)
    assert any("8 bytes too long" in each.what for each in report.healed)


def test_segments_that_are_all_missing_are_made_anew(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    for each in segments(path):
        each.unlink()
    assert not heal(path, [copy]).unhealed and not changed(path, whole)


def test_a_slot_of_the_watermark_is_healed(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    name, salt = path / "0000" / "watermark", identity(path).salt
    mark = newest(name.read_bytes(), salt)
    assert mark is not None
    spoil(name, 10 if mark.sequence % 2 else 4106)  # the older slot
    report = heal(path, [copy])
    assert not report.unhealed and name.read_bytes() == encode_new(mark, salt)
    spoil(name, 10, 4106)
    [left] = heal(path, [copy]).unhealed
    assert "nothing says for sure where the log ends" in left.why


def test_a_partition_that_is_gone_is_named(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    shutil.rmtree(path / "0000")
    report = heal(path, [copy])
    assert not report.healed and "mirror it" in report.unhealed[0].why and report.verified.damage


def test_gaps_that_are_healed_are_taken_back_and_others_stay(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    names = [each.relative_to(path) for each in segments(path)]
    for number in (1, 2):
        spoil(path / names[number], batches(path / names[number])[1][0] + 140)
    (path / names[3]).unlink()
    repair(path)
    spoil(copy / names[2], batches(copy / names[2])[1][0] + 140)
    assert len(heal(path, [copy], dry_run=True).healed) == len(heal(path, [copy]).healed)
    [gap] = read_gaps(REAL, str(path / "0000"), identity(path))
    assert gap.start == int(names[2].stem) + batches(copy / names[2])[1][0] - HEADER_BYTES
    copied = path.parent / "whole" / path.name
    restore(copied, whole)
    report = heal(path, [copied])
    assert not report.unhealed and not report.verified.gaps and not report.verified.damage
    assert read_gaps(REAL, str(path / "0000"), identity(path)) == ()
    assert changed(path, whole) <= {"0000/gaps.json", "0000/watermark"}
    assert len(values_of(Topic.open(path, mode="r"))) == 120


def restore(path: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)


def test_a_damaged_list_of_gaps_is_left_to_a_repair(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    (path / "0000" / "gaps.json").write_bytes(b"nonsense")
    [left] = heal(path, [copy]).unhealed
    assert "loglib.repair rebuilds it" in left.why


def test_a_log_that_went_on_behind_a_gap_keeps_it(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    """A repair has sealed the damaged end. What was appended behind it is of this copy alone."""
    last = last_segment(path)
    spoil(last, batches(last)[-1][0] + 20)
    repair(path)
    with Topic.open(path, create=True) as topic:
        topic.append(b"behind it", sync=True)
    before = tree(path)
    report = heal(path, [copy])
    assert [len(each.offsets) > 0 for each in report.unhealed] == [True] and len(report.verified.gaps) == 1
    assert tree(path) == before


# --- the end of the log --------------------------------------------------------------------------------------


def test_the_last_batch_is_healed_by_a_copy_of_the_same_writer(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    last = last_segment(path)
    spoil(last, batches(last)[-1][0] + 20)
    assert not heal(path, [copy]).unhealed and not changed(path, whole)


def test_the_last_batch_is_not_taken_from_beyond_a_donors_mark(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    """What a copy has and has not promised may be of another history: its power failed before it knew."""
    last = last_segment(path)
    position, length = batches(last)[-1]
    mark = newest(whole["0000/watermark"], identity(path).salt)
    assert mark is not None and mark.flushed_end - mark.flushed_tail == length
    spoil(last, position + 20)
    for lower in (
        mark._replace(durable_end=mark.flushed_tail, durable_tail=mark.flushed_tail),
        mark._replace(flushed_end=mark.flushed_tail, durable_end=mark.flushed_tail, flushed_tail=0, durable_tail=0),
    ):
        (copy / "0000" / "watermark").write_bytes(encode_new(lower, identity(path).salt))
        report = heal(path, [copy])
        assert not report.healed and "no donor has the batch" in report.unhealed[0].why


def test_the_last_batch_is_not_taken_from_another_writer(path: Path, copy: Path, tmp_path: Path) -> None:
    """Two topics that were split by a promotion: the same place, the same length, other records."""
    write(path, 30)
    snapshot(path, copy, links=False)
    promote(copy)
    for each in (path, copy):
        with Topic.open(each, create=True) as topic:
            topic.append(each.parent.name.encode()[:4].ljust(4), sync=True)
    last = last_segment(path)
    assert len(last.read_bytes()) == len((copy / last.relative_to(path)).read_bytes())
    spoil(last, batches(last)[-1][0] + 20)
    report = heal(path, [copy])
    assert not report.healed and len(report.unhealed) == 1


def test_the_last_batch_is_healed_if_its_header_is_whole_or_the_marks_agree(path: Path, copy: Path) -> None:
    write(path, 30)
    with Topic.open(path, create=True):  # another writer has published since then, and appended nothing
        pass
    mirrored(path, copy)
    whole = tree(path)
    last = last_segment(path)
    for at in (20, 140):
        spoil(last, batches(last)[-1][0] + at)
        assert not heal(path, [copy]).unhealed and not changed(path, whole)


def test_a_batch_with_whole_checksums_that_nobody_can_decode_is_not_healed(path: Path, copy: Path) -> None:
    write(path, 10)
    name = last_segment(path).relative_to(path)
    position, length = batches(path / name)[-1]
    content = (path / name).read_bytes()
    of = identity(path)
    (path / name).write_bytes(content[:position] + forged(content[position:], identity=of, codec=1, length=length))
    shutil.copytree(path, copy)
    report = heal(path, [copy])
    assert not report.healed and len(report.unhealed) == len(report.verified.damage) == 1


def test_the_header_of_an_empty_segment_is_healed(path: Path, copy: Path) -> None:
    write(path, 30)
    with Topic.open(path, create=True) as topic:
        topic.partition(0)._access.writer().roll()
    mirrored(path, copy)
    shutil.copy(last_segment(path), copy / "0000")  # the mirror has not been told of it
    whole = tree(path)
    assert len(whole[str(last_segment(path).relative_to(path))]) == HEADER_BYTES
    spoil(last_segment(path), 50)
    assert not heal(path, [copy]).unhealed and not changed(path, whole)
    before = segments(path)[-2]
    spoil(before, batches(before)[-1][0] + 20)
    assert not heal(path, [copy]).unhealed and not changed(path, whole)
    spoil(last_segment(path), 50)
    spoil(last_segment(copy), 50)
    assert "no donor has this segment" in heal(path, [copy]).unhealed[0].why


# --- topic.json ----------------------------------------------------------------------------------------------


def test_the_description_is_taken_from_a_donor_of_the_same_log(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    foreign = path.parent / "foreign" / path.name
    write(foreign, 3)
    for change in (lambda name: spoil(name, 30), Path.unlink):
        change(path / "topic.json")
        with pytest.raises(LogError, match=r"topic\.json"):
            heal(path, [foreign, path.parent / "nothing"])
        assert heal(path, [foreign, copy], dry_run=True).healed[0].donor == str(copy)
        [done] = heal(path, [foreign, copy]).healed
        assert done.partition is None and done.donor == str(copy) and not changed(path, whole)


# --- donors whose bytes are whole, and not those of this log --------------------------------------------------


def test_a_dry_run_of_a_slot_and_of_a_file_that_is_too_long(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    spoil(path / "0000" / "watermark", 10)
    segments(path)[0].write_bytes(segments(path)[0].read_bytes() + b"more")
    before = tree(path)
    assert len(heal(path, [copy], dry_run=True).healed) == 2 and tree(path) == before
    assert len(heal(path, [copy]).healed) == 2


def test_a_header_is_healed_whose_producers_are_whole(path: Path, copy: Path) -> None:
    producers_of_many(path)
    mirrored(path, copy)
    whole = tree(path)
    name = next((path / "0000").glob("*.producers")).name
    spoil(path / "0000" / name.replace(".producers", ".log"), 30)
    assert not heal(path, [copy]).unhealed and not changed(path, whole)
