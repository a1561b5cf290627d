"""Repair of files: what is missing, too long, or has no whole header is made anew, and what is cut is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import spoilt
from builders import a_mark, forged, spoil
from spoilt import POLICIES, first_batches, read_all, segments, spoil_batch, without

from conftest import crash_copy, last_segment, values_of
from loglib import CorruptLogError, FlushPolicy, LogError, RecordTooLargeError, Topic, UnsupportedFormatError, repair
from loglib.format.checked_json import seal
from loglib.format.watermark import encode_new
from loglib.log.gaps import NAME as GAPS
from loglib.log.gaps import Gap, read_gaps, write_gaps
from loglib.segment import HEADER_BYTES, Identity
from loglib.system.directory import Directory
from loglib.system.files import REAL

offsets = spoilt.offsets


def test_a_repair_that_was_cut_behind_its_declaration_goes_on(path: Path, offsets: dict[int, bytes | None]) -> None:
    with Topic.open(path, mode="r") as topic:
        start, end = [(batch.offsets.start, batch.next_offset) for batch in topic.read().batches()][-1]
    segment = last_segment(path)
    spoil(segment, HEADER_BYTES + start - int(segment.stem) + 40)
    with Directory.open(REAL, str(path / "0000")) as directory:
        write_gaps(directory, identity_of(path), [Gap(start, end, "declared, and then the power failed", 0)], 0o600)
    with pytest.raises(CorruptLogError):
        Topic.open(path, create=True)
    assert not repair(path).verified.damage
    assert read_all(path) == (without(offsets, range(start, end)), [range(start, end)])
    with Topic.open(path) as topic:
        assert topic.append(b"next", sync=True).offset == end


@pytest.mark.parametrize("number", [0, 1, 2, -1], ids=["first", "second", "third", "last"])
def test_a_missing_segment_becomes_a_gap(path: Path, offsets: dict[int, bytes | None], number: int) -> None:
    gone = segments(path)[number]
    base, end = int(gone.stem), int(gone.stem) + gone.stat().st_size - HEADER_BYTES
    gone.unlink()
    report = repair(path)
    assert not report.verified.damage
    assert read_all(path) == (without(offsets, range(base, end)), [range(base, end)])
    with Topic.open(path, create=True) as topic:
        assert topic.append(b"next", sync=True).offset >= end


def test_two_missing_segments_side_by_side(path: Path, offsets: dict[int, bytes | None]) -> None:
    one, two = segments(path)[1:3]
    lost = range(int(one.stem), int(segments(path)[3].stem))
    for each in (one, two):
        each.unlink()
    assert not repair(path).verified.damage
    assert read_all(path) == (without(offsets, lost), [lost])


def test_a_file_that_is_too_long_is_cut_and_what_is_cut_is_kept(path: Path, offsets: dict[int, bytes | None]) -> None:
    segment = segments(path)[1]
    size = segment.stat().st_size
    with segment.open("ab") as file:
        file.write(b"a line that somebody echoed")
    [done] = repair(path).repairs
    assert segment.stat().st_size == size and done.kept is not None
    assert Path(done.kept).read_bytes() == b"a line that somebody echoed"
    assert "27 bytes too long" in str(done) and done.kept in str(done)
    assert read_all(path) == (offsets, [])


def test_a_segment_header_is_made_anew_with_its_producers(path: Path) -> None:
    with Topic.open(path, create=True, **POLICIES) as topic:
        for number in range(60):
            topic.append_many([b"x" * 90] * 2, partition=0, producer=(f"app {number % 3}", number))
        topic.flush()
        records = len(list(topic.read()))
        count = len(topic.partition(0).segments)
        assert count > 2
    for number in range(count):
        segment = segments(path)[number]
        before = segment.read_bytes()[:HEADER_BYTES]
        spoil(segment, 30)
        [done] = repair(path).repairs
        assert "header was rebuilt" in done.what and done.kept is not None
        assert Path(done.kept).read_bytes()[:30] == before[:30]
        # Only who made it, and when, is not known any more.
        after = segment.read_bytes()[:HEADER_BYTES]
        for known in (slice(16, 36), slice(40, 48), slice(56, 120), slice(124, 128), slice(160, 184), slice(224, None)):
            assert after[known] == before[known], known
    with Topic.open(path) as topic:
        assert len(list(topic.read())) == records
        for number in range(57, 60):
            topic.append_many([b"x" * 90] * 2, partition=0, producer=(f"app {number % 3}", number))
        topic.flush()
        assert len(list(topic.read())) == records, "a repeat was appended"


def test_a_header_whose_producers_are_lost_keeps_those_it_has(path: Path) -> None:
    with Topic.open(path, create=True) as topic:
        for number in range(200):
            topic.append(b"x", partition=0, producer=(f"app {number}", 1))
        topic.partition(0).roll()
        topic.append(b"y", partition=0, sync=True)
        topic.partition(0).roll()
    extra = max((path / "0000").glob("*.producers"))
    spoil(extra, 7)
    spoilt = extra.read_bytes()
    with pytest.raises(CorruptLogError):
        Topic.open(path)
    [done] = repair(path).repairs
    assert "header was rebuilt" in done.what
    assert extra.with_name(extra.name + ".damaged-0").read_bytes() == spoilt
    with Topic.open(path) as topic:  # the segment before has them all
        assert {topic.partition(0).last_sequence(f"app {number}") for number in range(200)} == {1}


@pytest.mark.parametrize("missing", [True, False])
def test_a_watermark_is_written_anew(path: Path, offsets: dict[int, bytes | None], *, missing: bool) -> None:
    watermark = path / "0000" / "watermark"
    if missing:
        watermark.unlink()
    else:
        spoil(watermark, 20)
    [done] = repair(path).repairs
    assert "written again" in done.what
    assert read_all(path) == (offsets, [])


def test_a_description_is_made_anew(path: Path, offsets: dict[int, bytes | None]) -> None:
    spoil(path / "topic.json", 30)
    with pytest.raises(CorruptLogError):
        Topic.open(path, create=True)
    would = repair(path, dry_run=True)
    [done] = repair(path).repairs
    assert [done._replace(kept=None)] == list(would.repairs) and done.partition is None
    assert done.kept is not None and Path(done.kept).exists()
    assert read_all(path) == (offsets, [])
    (path / "topic.json").unlink()
    assert not repair(path).verified.damage
    assert read_all(path) == (offsets, [])


@pytest.mark.parametrize("half_made", [True, False])
def test_a_partition_whose_directory_is_gone_begins_anew(path: Path, tmp_path: Path, *, half_made: bool) -> None:
    with Topic.open(path, create=True, partitions=2) as topic:
        topic.append(b"a", partition=0), topic.append(b"b", partition=1)
    gone = (path / "0001").rename(path / "0001.tmp" if half_made else tmp_path / "elsewhere")
    assert "directory was gone" in repair(path, dry_run=True).repairs[0].what
    assert not repair(path).verified.damage
    with Topic.open(path) as topic:
        assert values_of(topic) == [b"a"]
        assert topic.append(b"c", partition=1, sync=True).offset == 0
    assert list(gone.glob("*.log")), "nothing is deleted"


def identity_of(path: Path) -> Identity:
    with Topic.open(path, mode="r") as topic:
        return Identity.of(topic.log_id, 0)


def test_what_has_checksums_and_is_no_batch_is_set_aside(path: Path, offsets: dict[int, bytes | None]) -> None:
    segment = last_segment(path)
    with Topic.open(path, mode="r") as topic:
        start = [batch.offsets.start for batch in topic.read().batches()][-1]
    at = HEADER_BYTES + start - int(segment.stem)
    content = segment.read_bytes()
    stored = content[at:]
    bad = forged(stored, body=b"\xff" * (len(stored) - 128), identity=identity_of(path))
    segment.write_bytes(content[:at] + bad)
    with Topic.open(path, mode="r") as topic, pytest.raises(CorruptLogError):
        list(topic.read())
    assert any("was made invalid" in each.what for each in repair(path, dry_run=True).repairs)
    report = repair(path)
    (aside,) = [each.kept for each in report.repairs if each.kept]
    assert Path(aside).read_bytes() == bad and not report.verified.damage
    assert read_all(path) == ({each: value for each, value in offsets.items() if each < start},
                              [range(start, start + len(bad))])  # fmt: skip


def unflushed(path: Path, target: Path) -> dict[int, bytes | None]:
    """A copy of the topic whose last segment has whole batches above the watermark; returns its records."""
    with Topic.open(path, create=True, segment_bytes=1 << 20, flush=FlushPolicy(None, None, None)) as topic:
        topic.append_many([b"flushed"] * 2000, partition=0)
        topic.flush()
        for _ in range(3):
            topic.append_many([b"not flushed"] * 2000, partition=0)
        crash_copy(path, target)
        topic.flush()
        return {record.offset: record.value for record in topic.read()}


def test_whole_batches_above_a_damaged_end_are_kept(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    offsets = unflushed(path, copy)
    spoil(last_segment(copy), HEADER_BYTES + 40)
    report = repair(copy)
    (gap,) = [each.offsets for each in report.repairs if each.offsets]
    assert read_all(copy) == (without(offsets, gap), [gap]) and len(without(offsets, gap)) == 6000


def test_bytes_above_a_damaged_end_that_do_not_follow_are_cut_and_kept(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    offsets = unflushed(path, copy)
    segment = last_segment(copy)
    (_, start), (_, end) = first_batches(segment, 2)
    at = HEADER_BYTES + start - int(segment.stem)
    content = segment.read_bytes()
    strange = forged(content[at : at + end - start], previous_bytes=8, identity=identity_of(copy))
    segment.write_bytes(content[: HEADER_BYTES + 40] + b"!" + content[HEADER_BYTES + 41 : at] + strange)
    (aside,) = [each.kept for each in repair(copy).repairs if each.kept]
    assert Path(aside).read_bytes() == strange
    assert not read_all(copy)[0].keys() - offsets.keys()


def test_a_watermark_that_contradicts_itself_is_written_anew(path: Path, offsets: dict[int, bytes | None]) -> None:
    bad = encode_new(a_mark(9, 100, 50, 60, 1), identity_of(path).salt)
    (path / "0000" / "watermark").write_bytes(bad)
    [done] = repair(path).repairs
    assert "log start 100" in done.what
    assert read_all(path) == (offsets, [])


@pytest.mark.parametrize("header", [False, True], ids=["whole", "damaged"])
def test_an_old_watermark_is_no_reason_to_lose_segments(path: Path, *, header: bool) -> None:
    with Topic.open(path, create=True, **POLICIES) as topic:
        topic.append(b"first", sync=True)
        old = (path / "0000" / "watermark").read_bytes()
        for number in range(60):
            topic.append(b"%d" % number + bytes(100), sync=True)
        topic.partition(0).roll()
        records = {record.offset: record.value for record in topic.read()}
    (path / "0000" / "watermark").write_bytes(old)
    gap = spoil_batch(path, number=1)
    if header:
        spoil(last_segment(path), 30)
    assert not repair(path).verified.damage
    assert read_all(path) == (without(records, gap), [gap])


def test_a_missing_segment_behind_one_that_is_too_long(path: Path, offsets: dict[int, bytes | None]) -> None:
    before, gone, after = segments(path)[1:4]
    gone.unlink()
    with before.open("ab") as file:
        file.write(b"?" * 5000)
    assert not repair(path).verified.damage
    lost = range(int(gone.stem), int(after.stem))
    assert read_all(path) == (without(offsets, lost), [lost])


def test_a_second_copy_of_the_same_bytes_gets_another_name(path: Path, offsets: dict[int, bytes | None]) -> None:
    kept = []
    for _ in range(3):
        spoil(segments(path)[1], 30)
        [done] = repair(path).repairs
        kept.append(Path(done.kept or "").suffix)
    assert kept == [".damaged-0", ".2", ".3"]


def test_gaps_that_are_no_gaps_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Topic.open(path, create=True, partitions=1):
        pass
    identity, directory = identity_of(path), str(path / "0000")
    facts = {"format": 1, "log_id": identity.log_id.hex(), "partition": 0, "gaps": []}
    one, next_to_it = {"start": 0, "end": 8, "found": "", "time": 0}, {"start": 8, "end": 16, "found": "", "time": 0}
    changes: dict[str, Any]
    for changes in ({"gaps": [one, next_to_it]}, {"gaps": [one | {"end": 0}]}, {"gaps": [{}]}, {"format": 0}):
        (path / "0000" / GAPS).write_bytes(seal(facts | changes))
        with pytest.raises(CorruptLogError, match="no valid facts"):
            read_gaps(REAL, directory, identity)
    (path / "0000" / GAPS).write_bytes(seal(facts | {"format": 2}))
    with pytest.raises(UnsupportedFormatError):
        read_gaps(REAL, directory, identity)
    monkeypatch.setattr("loglib.log.gaps._MOST_BYTES", 100)
    with Directory.open(REAL, directory) as opened, pytest.raises(RecordTooLargeError, match="list of gaps"):
        write_gaps(opened, identity, [Gap(0, 8, "x" * 100, 0)], 0o600)


def test_nothing_that_is_no_topic_is_touched(tmp_path: Path, path: Path) -> None:
    with pytest.raises(LogError, match="holds no topic"):
        repair(tmp_path)
    with pytest.raises(LogError, match="no such directory"):
        repair(tmp_path / "nowhere")
    with Topic.open(path, create=True) as topic:
        topic.append(b"x")
    for each in (path / "0000").iterdir():
        each.unlink()
    with pytest.raises(CorruptLogError, match="no watermark and no segment"):
        repair(path)
    (path / "topic.json").unlink()
    with pytest.raises(CorruptLogError, match="no whole header"):
        repair(path)


def test_progress_reaches_all_bytes(path: Path, offsets: dict[int, bytes | None]) -> None:
    seen: list[tuple[int, int]] = []
    repair(path, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and len({total for _, total in seen}) == 1
    assert seen[0][0] > 0 and seen[-1][0] <= seen[-1][1]
