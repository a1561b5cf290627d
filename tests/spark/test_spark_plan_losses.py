"""Damage and losses under a plan of Spark: they are errors, or passed over on request, and each is reported once."""

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from builders import spoil
from spark_logs import Row, all_records, all_rows, as_row, options_of, random_topic, scan_batches, scan_rows, splits_of

from conftest import NOW, alter, last_segment
from loglib import CorruptLogError, OffsetOutOfRangeError, Retention, Topic, repair, testing
from loglib.segment import HEADER_BYTES
from loglib.spark import counts
from loglib.spark.plan import Range
from loglib.spark.ranges import find_ranges
from loglib.system.files import Files


def test_damage_is_never_passed_over_wherever_the_splits_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split that begins before a damaged header must not go on at the next good one."""
    monkeypatch.setattr("loglib.log.cursor.BLOCK_BYTES", 256)  # else each split happens to look far beyond its end
    path = random_topic(tmp_path / "topic", seed=5, partitions=1, batches=30, segment_bytes=1 << 20)
    expected = all_rows(path)
    segment = last_segment(path)
    intact = segment.read_bytes()
    random = Random(5)
    with Topic.open(path, mode="r") as topic:
        bases = [batch._header.base_offset for batch in topic.batches()]
    in_headers = [HEADER_BYTES + base + each for base in bases for each in (0, 12, 36, 90)]
    for position in in_headers + random.choices(range(HEADER_BYTES, len(intact)), k=80):
        damaged = bytearray(intact)
        damaged[position] ^= 1 << random.randrange(8)
        segment.write_bytes(damaged)
        for split_bytes in (150, 2000):
            with pytest.raises(CorruptLogError, match=f"{segment}, byte "):
                assert scan_rows(path, split_bytes=split_bytes, includeHeaders=True) != expected
                raise AssertionError(f"a flipped bit in byte {position} went unseen, splits of {split_bytes}")


def test_missing_segment_is_an_error_in_whichever_split_it_lies(tmp_path: Path) -> None:
    path = random_topic(tmp_path / "topic", seed=6, partitions=1)
    splits = splits_of(find_ranges(options_of(path)), 1000)
    segments = sorted((path / "0000").glob("*.log"))
    segments[len(segments) // 2].unlink()
    bad = 0
    for split in splits:
        try:
            scan_batches(path, splits=[split])
        except CorruptLogError:
            bad += 1
    assert 1 <= bad < len(splits)


def skipped(caplog: pytest.LogCaptureFixture) -> list[range]:
    """The offsets that the query reported as skipped, in order."""
    found = re.findall(r"skipped offsets \[(\d+), (\d+)\), (\d+) bytes \(onGap=skip\): ", caplog.text)
    assert all(int(stop) - int(start) == int(size) for start, stop, size in found)
    return sorted((range(int(start), int(stop)) for start, stop, _ in found), key=lambda gap: gap.start)


def gaps_of(path: Path) -> tuple[list[Row], list[range]]:
    """The rows that the core's reader gives past damage, and the offsets that it leaves out."""
    with Topic.open(path, mode="r") as topic, topic.read(on_damage="skip") as reader:
        rows = [as_row(record, path.name) for record in reader]
        return rows, [gap.offsets for gap in reader.gaps if gap.offsets]


@pytest.mark.parametrize("seed", range(6))
def test_skipped_damage_is_what_the_core_skips_and_each_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    monkeypatch.setattr("loglib.log.cursor.BLOCK_BYTES", 256)
    path = random_topic(tmp_path / "topic", seed, partitions=1, batches=40)
    random = Random(seed)
    segments = sorted((path / "0000").glob("*.log"))
    sizes = {segment: segment.stat().st_size for segment in segments}
    for segment in random.sample(segments, 2):
        content = bytearray(segment.read_bytes())
        for _ in range(random.randint(1, 4)):
            content[random.randrange(HEADER_BYTES, len(content))] ^= 1 << random.randrange(8)
        segment.write_bytes(content)
    if seed % 3 == 1:
        random.choice(segments[:-1]).unlink()
    if seed % 3 == 2:
        cut = random.choice(segments)
        cut.write_bytes(cut.read_bytes()[: random.randrange(HEADER_BYTES, cut.stat().st_size)])
    rows, gaps = gaps_of(path)
    for split_bytes in (61, 150, 1000, 4096, 1 << 40):
        caplog.clear()
        found = scan_rows(path, split_bytes=split_bytes, includeHeaders=True, onGap="skip")
        assert found == rows, f"{split_bytes=}"
        reported = skipped(caplog)
        if last_segment(path).stat().st_size == sizes[last_segment(path)]:
            assert reported == gaps, f"{split_bytes=}"
        else:  # the plan reports what is above the end of the last file, and a task what is below
            assert [each for gap in reported for each in gap] == [each for gap in gaps for each in gap]


@pytest.mark.parametrize("seed", range(4))
def test_gaps_that_a_repair_has_declared_are_passed_over(tmp_path: Path, seed: int) -> None:
    path = random_topic(tmp_path / "topic", seed, partitions=1, batches=40)
    random = Random(seed)
    segments = sorted((path / "0000").glob("*.log"))
    for segment in random.sample(segments, 2):
        spoil(segment, *random.sample(range(HEADER_BYTES, segment.stat().st_size), 3))
    if seed % 2:
        random.choice(segments[:-1]).unlink()
    repair(path)
    rows, gaps = gaps_of(path)
    assert rows and gaps
    for split_bytes in (61, 150, 1000, 4096, 1 << 40):
        for options in ({}, {"onGap": "skip"}):
            assert scan_rows(path, split_bytes=split_bytes, includeHeaders=True, **options) == rows, f"{split_bytes=}"
    assert counts(path) == {0: len(rows)}
    for gap in gaps:
        later = [row for row in rows if row["offset"] >= gap.start]
        assert scan_rows(path, start=gap.start, includeHeaders=True) == later
        assert counts(path, start=gap.start + 1) == {0: len(later)}


def test_gap_that_the_query_does_not_read_is_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = random_topic(tmp_path / "topic", seed=1, partitions=1, segment_bytes=1 << 20)
    records = all_records(path)
    with Topic.open(path, mode="r") as topic:
        damaged = [batch.offsets for batch in topic.batches()][20]
    segment = last_segment(path)
    content = bytearray(segment.read_bytes())
    content[HEADER_BYTES + damaged.start + 50] ^= 1
    segment.write_bytes(content)

    def read(**options: object) -> list[int]:
        caplog.clear()
        return [row["offset"] for row in scan_rows(path, split_bytes=300, onGap="skip", **options)]

    whole = [record.offset for record in records if record.offset not in damaged]
    assert read() == whole
    assert [gap.start for gap in skipped(caplog)] == [damaged.start]
    assert read(end=damaged.start) == [offset for offset in whole if offset < damaged.start]
    assert skipped(caplog) == []
    inside = damaged.start + 1  # no one can know where in the damage a record began
    assert read(start=inside) == [offset for offset in whole if offset > inside]
    assert [gap.start for gap in skipped(caplog)] == [inside]


def after_retention(path: Path) -> tuple[list[Range], list[Range]]:
    """The ranges planned before and after retention has dropped segments."""
    random_topic(path, seed=7, partitions=1, retention=Retention(age=None))
    before = find_ranges(options_of(path))
    alter(path, retention=Retention(age=None, bytes=9000))
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        topic.retain()
    return before, find_ranges(options_of(path))


def test_records_dropped_since_the_plan_are_an_error(tmp_path: Path) -> None:
    before, after = after_retention(tmp_path / "topic")
    assert after[0].start_offset > 0
    with pytest.raises(OffsetOutOfRangeError) as raised:
        scan_rows(tmp_path / "topic", splits=splits_of(before, 3000))
    assert raised.value.log_start_offset == after[0].start_offset
    assert "failOnDataLoss=false" in raised.value.__notes__[0]


@pytest.mark.parametrize("split_bytes", [500, 3000, 1 << 40])
def test_records_dropped_since_the_plan_are_passed_over_on_request(tmp_path: Path, split_bytes: int) -> None:
    before, _ = after_retention(tmp_path / "topic")
    with pytest.warns(RuntimeWarning, match=r"topic, partition 0: \[\d+, \d+\) of the log is gone"):
        rows = scan_rows(
            tmp_path / "topic", splits=splits_of(before, split_bytes), failOnDataLoss=False, includeHeaders=True
        )
    assert rows == all_rows(tmp_path / "topic")


def test_records_below_the_log_start_are_not_read_though_their_files_remain(tmp_path: Path) -> None:
    """As when the writer is killed between moving the log start and removing the files."""

    class KeepsFiles(Files):
        @staticmethod
        def unlink(path: Any, *, dir_fd: int | None = None) -> None:
            pass

    path = random_topic(tmp_path / "topic", seed=7, partitions=1)
    splits = splits_of(find_ranges(options_of(path)), 3000)
    alter(path, retention=Retention(age=None, bytes=9000))
    with testing.open_topic(path, clock=lambda: NOW, files=KeepsFiles()) as topic:
        topic.retain()
    with pytest.raises(OffsetOutOfRangeError):
        scan_batches(path, splits=splits[:1])


def test_segment_dropped_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    """The files that are open stay readable; the next one is gone."""
    path = random_topic(tmp_path / "topic", seed=7, partitions=1)
    (split,) = splits_of(find_ranges(options_of(path)), 1 << 40)
    lost_from = sorted((path / "0000").glob("*.log"))[:-1]

    def drop_all_but_the_last(_: object) -> None:
        alter(path, retention=Retention(age=None, bytes=1))
        with testing.open_topic(path, clock=lambda: NOW) as topic:
            topic.retain()

    from loglib.spark.scan import _pieces

    pieces = _pieces(split, options_of(path, failOnDataLoss=False))
    first = next(pieces)
    drop_all_but_the_last(first)
    assert not any(each.exists() for each in lost_from)
    with pytest.warns(RuntimeWarning, match="of the log is gone"):
        rest = list(pieces)
    assert rest
    kept = all_records(path)
    offsets = [record.offset for piece in rest for record in piece.records()]
    assert offsets[-len(kept) :] == [record.offset for record in kept]
