"""Repair: what is damaged becomes a declared gap, what is whole stays, and the topic opens."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from builders import a_mark, forged, spoil
from conftest import crash_copy, last_segment, tree, values_of
from damaged import damage, files_with, judge, repaired, rows_of, whole_log
from loglib import (
    CorruptLogError,
    FlushPolicy,
    LockedError,
    LogError,
    Reader,
    RecordTooLargeError,
    RepairReport,
    Topic,
    UnsupportedFormatError,
    repair,
)
from loglib.format.watermark import encode_new
from loglib.gaps import NAME as GAPS
from loglib.gaps import Gap, joined, read_gaps, write_gaps
from loglib.sealed import seal
from loglib.segment import HEADER_BYTES, Identity
from loglib.system.directory import Directory
from loglib.system.files import REAL
from loglib.times import to_datetime

POLICIES: dict[str, Any] = {"segment_bytes": 4096, "batch_bytes": 512}


@pytest.fixture
def offsets(path: Path) -> dict[int, bytes | None]:
    """A topic of one partition with some segments: its records by offset."""
    with Topic.open(path, **POLICIES) as topic:
        for number in range(120):
            topic.append(b"%03d" % number + b"." * 100, key=b"k", timestamp=1_000_000 * number)
            if number % 3 == 2:
                topic.flush()
        topic.flush()
        assert len(topic.partition(0).segments) > 3
        return {record.offset: record.value for record in topic.read()}


def segments(path: Path) -> list[Path]:
    return sorted((path / "0000").glob("*.log"))


def first_batches(segment: Path, count: int) -> list[tuple[int, int]]:
    """Offset and end of the first batches of a segment."""
    base = int(segment.stem)
    content, found, at = segment.read_bytes(), [], HEADER_BYTES
    for _ in range(count):
        length = int.from_bytes(content[at + 12 : at + 16], "little")
        found.append((base + at - HEADER_BYTES, base + at - HEADER_BYTES + length))
        at += length
    return found


def spoil_batch(path: Path, number: int = 1, which: int = 1, at: int = 40) -> range:
    """Flip a byte in a batch of a segment; returns its offsets."""
    segment = segments(path)[number]
    start, end = first_batches(segment, which + 1)[which]
    spoil(segment, HEADER_BYTES + start - int(segment.stem) + at)
    return range(start, end)


def read_all(path: Path, **options: Any) -> tuple[dict[int, bytes | None], list[range]]:
    with Topic.open(path, mode="r") as topic:
        reader = topic.read(**options)
        return {record.offset: record.value for record in reader}, [gap.offsets for gap in reader.gaps]


def without(records: dict[int, bytes | None], *gaps: range) -> dict[int, bytes | None]:
    return {offset: value for offset, value in records.items() if not any(offset in gap for gap in gaps)}


def test_a_whole_topic_stays_as_it_is(path: Path, offsets: dict[int, bytes | None]) -> None:
    before = tree(path)
    for dry_run in (True, False):
        report = repair(path, dry_run=dry_run)
        assert not report.repairs and not report.verified.damage
        assert report.verified.records == len(offsets)
    assert {name: each for name, each in tree(path).items() if not name.endswith("lock")} == {
        name: each for name, each in before.items() if not name.endswith("lock")
    }


@pytest.mark.parametrize("at", [40, 150], ids=["header", "body"])
def test_a_damaged_batch_becomes_a_gap(path: Path, offsets: dict[int, bytes | None], at: int) -> None:
    gap = spoil_batch(path, at=at)
    damaged = segments(path)[1].read_bytes()
    with pytest.raises(CorruptLogError):
        read_all(path)
    would = repair(path, dry_run=True)
    assert [each.offsets for each in would.repairs] == [gap] and would.verified.damage
    assert not (path / "0000" / GAPS).exists()
    report = repair(path)
    assert report.repairs == would.repairs and report.lost_bytes == len(gap)
    assert not report.verified.damage and [each.offsets for each in report.verified.gaps] == [gap]
    assert segments(path)[1].read_bytes() == damaged, "damaged bytes stay where they are"
    for on_gap in ("raise", "skip"):
        assert read_all(path, on_gap=on_gap) == (without(offsets, gap), [gap])
    with Topic.open(path) as topic:
        assert [each.offsets for each in topic.verify().gaps] == [gap]
        assert topic.append(b"more").offset > max(offsets)


def test_a_gap_that_is_healed_is_read(path: Path, offsets: dict[int, bytes | None]) -> None:
    segment = segments(path)[1]
    whole = segment.read_bytes()
    spoil_batch(path)
    repair(path)
    segment.write_bytes(whole)
    assert read_all(path) == (offsets, [])
    assert [GAPS in each.path for each in repair(path).repairs] == [True]
    assert not (report := repair(path)).repairs and not report.verified.gaps
    with Topic.open(path, mode="r") as topic:
        assert read_gaps(REAL, str(path / "0000"), Identity.of(topic.log_id, 0)) == ()


def test_reading_begins_in_a_gap_and_before_and_behind_it(path: Path, offsets: dict[int, bytes | None]) -> None:
    gap = spoil_batch(path)
    repair(path)
    kept = without(offsets, gap)
    with Topic.open(path, mode="r") as topic:
        for start in [gap.start, gap.start + 1, gap.stop - 8, gap.stop]:
            assert [each.offset for each in topic.read({0: start})] == [each for each in kept if each >= start]
        before = max(each for each in kept if each < gap.start)
        reader = topic.read({0: before}, {0: gap.start + 8})
        assert [each.offset for each in reader] == [before]
        partition = topic.partition(0)
        counts = [partition.offset_before_end(count) for count in range(1, len(kept) + 1)]
        assert counts == sorted(kept, reverse=True)


@pytest.mark.parametrize("at", [40, 150], ids=["header", "body"])
def test_a_time_is_found_around_a_gap(path: Path, offsets: dict[int, bytes | None], at: int) -> None:
    gap = spoil_batch(path, at=at)
    repair(path)
    times = {offset: 1_000_000 * number for number, offset in enumerate(offsets)}
    with Topic.open(path, mode="r") as topic:
        for offset in offsets:
            reader = topic.read(to_datetime(times[offset]))
            expected = [each for each in offsets if each >= offset and each not in gap]
            assert [each.offset for each in reader if each.timestamp >= times[offset]] == expected
            reported = [each.offsets for each in reader.gaps]
            assert reported == [gap] or (offset >= gap.stop and not reported)  # the records of a gap may be later


def test_groups_go_on_behind_a_gap(path: Path, offsets: dict[int, bytes | None]) -> None:
    gap = spoil_batch(path)
    place = [each for each in offsets if each in gap][1]
    with Topic.open(path) as topic, topic.group("fresh", commit="manual") as member:
        assert len(list(polled(member, before=gap.start))) == len([each for each in offsets if each < gap.start])
        member.commit()
    repair(path)
    kept = without(offsets, gap)
    with Topic.open(path) as topic:
        topic.reset_group("fresh", {0: place})
        [lag] = topic.group_info("fresh", count_records=True).lag.values()
        assert lag.records == len([each for each in kept if each >= place])
        with topic.group("fresh", commit="manual") as member:
            found: list[int] = []
            while len(found) < lag.records:
                found += [record.offset for record in member.poll(timeout=30)]
            assert found == [each for each in kept if each >= place]
            member.commit()


def polled(member: Any, before: int) -> Iterator[Any]:
    """The records before an offset, one at a time, so that damage behind them is not met."""
    while True:
        for record in member.poll(max_records=1, timeout=30):
            yield record
            if record.next_offset >= before:
                return


def test_a_transfer_leaves_gaps_out(path: Path, tmp_path: Path, offsets: dict[int, bytes | None]) -> None:
    gap = spoil_batch(path)
    repair(path)
    ours, theirs = socket.socketpair()
    with Topic.open(path, mode="r") as topic, Topic.open(tmp_path / "copy", partitions=1) as copy, ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        place, partition = 0, topic.partition(0)
        while place < partition.high_watermark:
            place = partition.transfer(ours, place)
        assert place == partition.high_watermark
        ours.shutdown(socket.SHUT_WR)
        while copy.partition(0).receive(theirs) is not None:
            pass
        copy.flush()
        assert values_of(copy) == list(without(offsets, gap).values())


def test_a_damaged_end_is_sealed_and_no_offset_is_used_again(path: Path, offsets: dict[int, bytes | None]) -> None:
    last = last_segment(path)
    base, end = int(last.stem), int(last.stem) + last.stat().st_size - HEADER_BYTES
    with last.open("r+b") as file:
        file.truncate(HEADER_BYTES + 100)
    with pytest.raises(CorruptLogError):
        Topic.open(path)
    report = repair(path)
    assert not report.verified.damage
    assert int(last_segment(path).stem) == end
    kept = without(offsets, range(base, end))
    assert read_all(path) == (kept, [range(base, end)])
    with Topic.open(path) as topic:
        assert topic.append(b"next", sync=True).offset == end
        assert values_of(topic)[-1] == b"next"
        assert topic.partition(0).offset_before_end(2) == max(kept)


def test_a_repair_that_was_cut_behind_its_declaration_goes_on(path: Path, offsets: dict[int, bytes | None]) -> None:
    with Topic.open(path, mode="r") as topic:
        start, end = [(batch.offsets.start, batch.next_offset) for batch in topic.read().batches()][-1]
    segment = last_segment(path)
    spoil(segment, HEADER_BYTES + start - int(segment.stem) + 40)
    with Directory.open(REAL, str(path / "0000")) as directory:
        write_gaps(directory, identity_of(path), [Gap(start, end, "declared, and then the power failed", 0)], 0o600)
    with pytest.raises(CorruptLogError):
        Topic.open(path)
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
    with Topic.open(path) as topic:
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
    with Topic.open(path, **POLICIES) as topic:
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
        assert "header was made anew" in done.what and done.kept is not None
        assert Path(done.kept).read_bytes()[:30] == before[:30]
        # Only who made it, and when, is not known any more.
        after = segment.read_bytes()[:HEADER_BYTES]
        for known in (slice(16, 36), slice(40, 48), slice(56, 120), slice(124, 128), slice(160, None)):
            assert after[known] == before[known], known
    with Topic.open(path) as topic:
        assert len(list(topic.read())) == records
        for number in range(57, 60):
            topic.append_many([b"x" * 90] * 2, partition=0, producer=(f"app {number % 3}", number))
        topic.flush()
        assert len(list(topic.read())) == records, "a repeat was appended"


def test_a_header_whose_producers_are_lost_keeps_those_it_has(path: Path) -> None:
    with Topic.open(path) as topic:
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
    assert "header was made anew" in done.what
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
    assert "written anew" in done.what
    assert read_all(path) == (offsets, [])


def test_a_description_is_made_anew(path: Path, offsets: dict[int, bytes | None]) -> None:
    spoil(path / "topic.json", 30)
    with pytest.raises(CorruptLogError):
        Topic.open(path)
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
    with Topic.open(path, partitions=2) as topic:
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
    assert any("cannot be decoded" in each.what for each in repair(path, dry_run=True).repairs)
    report = repair(path)
    (aside,) = [each.kept for each in report.repairs if each.kept]
    assert Path(aside).read_bytes() == bad and not report.verified.damage
    assert read_all(path) == ({each: value for each, value in offsets.items() if each < start},
                              [range(start, start + len(bad))])  # fmt: skip


def unflushed(path: Path, target: Path) -> dict[int, bytes | None]:
    """A copy of the topic whose last segment has whole batches above the watermark; returns its records."""
    with Topic.open(path, segment_bytes=1 << 20, flush=FlushPolicy(None, None, None)) as topic:
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
    with Topic.open(path, **POLICIES) as topic:
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
    with Topic.open(path, partitions=1):
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
    monkeypatch.setattr("loglib.gaps._MOST_BYTES", 100)
    with Directory.open(REAL, directory) as opened, pytest.raises(RecordTooLargeError, match="list of gaps"):
        write_gaps(opened, identity, [Gap(0, 8, "x" * 100, 0)], 0o600)


def test_sealed_damage_is_declared_beside_a_writer(path: Path, offsets: dict[int, bytes | None]) -> None:
    gap = spoil_batch(path)
    with Topic.open(path) as topic:
        assert repair(path).lost_bytes == len(gap)
        reader = topic.read()
        assert len(list(reader)) == len(without(offsets, gap))
        assert [each.offsets for each in reader.gaps] == [gap]
        spoil(segments(path)[2], 30)
        with pytest.raises(LockedError, match="cannot be repaired beside it"):
            repair(path)
    assert not repair(path).verified.damage


def test_a_damaged_list_of_gaps_is_reported_and_made_anew(
    path: Path, offsets: dict[int, bytes | None], caplog: pytest.LogCaptureFixture
) -> None:
    gap = spoil_batch(path)
    repair(path)
    spoil(path / "0000" / GAPS, 40)
    with Topic.open(path, mode="r") as topic:
        assert any(each.path.endswith(GAPS) for each in topic.verify().damage)
        with caplog.at_level(logging.WARNING, "loglib"), pytest.raises(CorruptLogError, match=r"\.log"):
            list(topic.read())
    assert GAPS in caplog.text
    report = repair(path)
    assert any("made anew" in each.what for each in report.repairs) and not report.verified.damage
    assert read_all(path) == (without(offsets, gap), [gap])


def test_new_gaps_join_those_that_are_declared(path: Path, offsets: dict[int, bytes | None]) -> None:
    one = spoil_batch(path, which=2)
    repair(path)
    two = spoil_batch(path, which=1)
    with pytest.raises(CorruptLogError):  # nobody has declared this yet
        read_all(path)
    (path / "0000" / f"{GAPS}.tmp").write_bytes(b"left by a repair that was cut")
    assert repair(path).lost_bytes == len(two)
    assert read_all(path)[1] == [range(two.start, one.stop)]


def test_nothing_that_is_no_topic_is_touched(tmp_path: Path, path: Path) -> None:
    with pytest.raises(LogError, match="holds no topic"):
        repair(tmp_path)
    with pytest.raises(LogError, match="no such directory"):
        repair(tmp_path / "nowhere")
    with Topic.open(path) as topic:
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


def test_gaps_of_another_log_are_not_believed(path: Path, offsets: dict[int, bytes | None]) -> None:
    spoil_batch(path)
    repair(path)
    with Topic.open(path, mode="r") as topic:
        identity = Identity.of(topic.log_id, 0)
    directory = str(path / "0000")
    assert read_gaps(REAL, directory, identity)
    for other in (Identity.of(bytes(16), 0), Identity.of(identity.log_id, 1)):
        with pytest.raises(CorruptLogError, match="no valid facts"):
            read_gaps(REAL, directory, other)


def test_joined() -> None:
    gaps = [Gap(10, 20, "b", 2), Gap(0, 10, "a", 1), Gap(30, 40, "c", 3), Gap(35, 36, "c", 1)]
    assert joined(gaps) == [Gap(0, 20, "a; b", 2), Gap(30, 40, "c", 3)]


@pytest.mark.parametrize("seed", range(60))
def test_any_damage_is_repaired(seed: int) -> None:
    random = Random(1000 + seed)
    whole = whole_log(random)
    damaged, kinds = damage(whole.tree, random)
    before = rows_of(files_with(damaged), on_gap="skip")
    files = files_with(damaged)
    would: RepairReport | None = repaired(files, dry_run=True)
    assert files.tree() == files_with(damaged).tree()
    report = repaired(files)
    if report is not None and would is not None:
        judge(files, report, whole, before, kinds)
        told = [(each.what, each.offsets) for each in would.repairs]
        assert sorted(map(str, told)) == sorted(str((each.what, each.offsets)) for each in report.repairs)


def test_a_reader_that_has_met_damage_goes_on_after_the_repair(path: Path, offsets: dict[int, bytes | None]) -> None:
    gap = spoil_batch(path)
    with Topic.open(path, mode="r") as topic:
        reader: Reader = topic.read()
        found: list[int] = []
        with pytest.raises(CorruptLogError):
            found.extend(record.offset for record in reader)
        repair(path)
        found.extend(record.offset for record in reader)
        assert len(set(found)) == len(found)
        assert {*without(offsets, gap)} >= {*found} and reader.gaps

