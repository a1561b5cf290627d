"""Repair: damaged batches become declared gaps, what is whole stays, and the topic opens."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import spoilt
from builders import spoil
from damaged import damage, files_with, judge, repaired, rows_of, whole_log
from spoilt import read_all, segments, spoil_batch, without

from conftest import last_segment, tree, values_of
from loglib import CorruptLogError, LockedError, Reader, Topic, repair
from loglib.config.times import to_datetime
from loglib.log import RepairReport
from loglib.log.gaps import NAME as GAPS
from loglib.log.gaps import Gap, joined, read_gaps
from loglib.segment import HEADER_BYTES, Identity
from loglib.system.files import REAL

offsets = spoilt.offsets


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
    for on_damage in ("raise", "skip"):
        assert read_all(path, on_damage=on_damage) == (without(offsets, gap), [gap])
    with Topic.open(path, create=True) as topic:
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
    with Topic.open(path, create=True) as topic, topic.group("fresh", commit="manual") as member:
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
    with Topic.open(path, mode="r") as topic, Topic.open(
        tmp_path / "copy", create=True, partitions=1
    ) as copy, ours, theirs:
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
        Topic.open(path, create=True)
    report = repair(path)
    assert not report.verified.damage
    assert int(last_segment(path).stem) == end
    kept = without(offsets, range(base, end))
    assert read_all(path) == (kept, [range(base, end)])
    with Topic.open(path) as topic:
        assert topic.append(b"next", sync=True).offset == end
        assert values_of(topic)[-1] == b"next"
        assert topic.partition(0).offset_before_end(2) == max(kept)


def test_sealed_damage_is_declared_beside_a_writer(path: Path, offsets: dict[int, bytes | None]) -> None:
    gap = spoil_batch(path)
    with Topic.open(path, create=True) as topic:
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
    assert any("rebuilt" in each.what for each in report.repairs) and not report.verified.damage
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


@pytest.mark.parametrize(("first", "second", "accepted"), [
    ((0, 8, 5), (8, 16, 0), 0), ((0, 8, 5), (8, 16, 6), 6), ((0, 16, 5), (8, 16, 0), 5), ((0, 16, 0), (8, 16, 5), 0),
    ((0, 8, 0), (0, 8, 5), 5), ((0, 8, 5), (0, 8, 0), 5), ((0, 8, 0), (0, 16, 5), 5), ((0, 8, 5), (0, 16, 0), 0),
    ((0, 12, 5), (8, 16, 0), 0),
])  # fmt: skip
def test_joined_gap_is_accepted_if_all_of_it_was(
    first: tuple[int, int, int], second: tuple[int, int, int], accepted: int
) -> None:
    gaps = [Gap(start, end, "a", 1, when) for start, end, when in (first, second)]
    (both,) = joined(gaps)
    assert both.accepted == accepted
    (same,) = joined(reversed(gaps))
    assert same.accepted == accepted


@pytest.mark.usefixtures("offsets")
def test_gap_that_was_accepted_stays_so_until_it_grows(path: Path) -> None:
    spoil_batch(path, which=2)
    report = repair(path, accept=True)
    assert report.verified.is_whole and report.verified.gaps == report.verified.accepted
    assert repair(path).repairs == ()
    spoil_batch(path, which=1)
    report = repair(path)
    assert len(report.verified.gaps) == 1 and report.verified.accepted == () and not report.verified.is_whole


def test_joined() -> None:
    gaps = [Gap(10, 20, "b", 2), Gap(0, 10, "a", 1), Gap(30, 40, "c", 3), Gap(35, 36, "c", 1)]
    assert joined(gaps) == [Gap(0, 20, "a; b", 2), Gap(30, 40, "c", 3)]


@pytest.mark.parametrize("seed", range(60))
def test_any_damage_is_repaired(seed: int) -> None:
    random = Random(1000 + seed)
    whole = whole_log(random)
    damaged, kinds = damage(whole.tree, random)
    before = rows_of(files_with(damaged), on_damage="skip")
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
