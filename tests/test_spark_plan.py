"""The Spark source without Spark: options, ranges, splits, and scanning a split into Arrow batches."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from counts import need
from hypothesis import given
from hypothesis import strategies as st
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from builders import a_mark, calm, spoil
from conftest import NOW, QUIET, SOURCE, last_segment, run_python
from loglib import (
    CorruptLogError,
    InvalidOffsetError,
    LogError,
    OffsetOutOfRangeError,
    Retention,
    Topic,
    repair,
    testing,
)
from loglib.arguments import Time
from loglib.format.watermark import encode_new
from loglib.segment import HEADER_BYTES, Identity
from loglib.spark import counts
from loglib.spark.columns import arrow_schema, default_schema
from loglib.spark.options import Options, parse
from loglib.spark.plan import Range, cut, plan
from loglib.spark.ranges import find_ranges, find_topics
from loglib.spark.source import BatchReader
from loglib.system.files import Files
from spark_logs import (
    COLUMNS,
    Row,
    all_records,
    all_rows,
    as_row,
    in_order,
    options_of,
    random_topic,
    rows_of,
    scan_batches,
    scan_rows,
    splits_of,
)

MILLISECONDS = NOW // 1000


@pytest.fixture(scope="module")
def topic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A topic that no test changes: two partitions, several segments each."""
    return random_topic(tmp_path_factory.mktemp("logs") / "topic", seed=1, batches=80)


def a_range(start: int = 0, size: int = 1000, **changes: Any) -> Range:
    facts: dict[str, Any] = {
        "start_position": start,
        "start_offset": start,
        "end_offset": start + size,
        "flushed_end": start + size,
    }
    return Range("t", "/logs/t", bytes(16), 0, **facts | changes)


# --- plan --------------------------------------------------------------------------------------------


@calm
@given(st.integers(0, 1 << 62), st.integers(0, 1 << 40), st.integers(1, 1 << 45))
def test_splits_of_a_range_follow_on_one_another_and_fill_it(start: int, size: int, split_bytes: int) -> None:
    split_bytes = max(split_bytes, size // 1000)  # at most a thousand
    splits = cut(a_range(start, size), split_bytes)
    assert [split.end_position for split in splits[:-1]] == [split.start_position for split in splits[1:]]
    assert all(0 < split.end_position - split.start_position <= split_bytes for split in splits)
    if size:
        assert (splits[0].start_position, splits[-1].end_position) == (start, start + size)
    else:
        assert splits == []


@calm
@given(st.lists(st.integers(0, 1 << 32), min_size=1, max_size=20), st.integers(1, 200))
def test_plan_makes_about_as_many_tasks_as_asked_for(sizes: list[int], min_tasks: int) -> None:
    sizes.append(1 << 20)  # so that there are bytes enough for each task
    ranges = [a_range(start, size) for start, size in enumerate(sizes)]
    tasks = plan(ranges, max_task_bytes=1 << 62, min_tasks=min_tasks)
    assert min_tasks <= len(tasks) <= min_tasks + len(sizes)
    size = -(-sum(sizes) // min_tasks)
    assert [split for task in tasks for split in task] == splits_of(ranges, size)
    assert all(sum(split.size_bytes for split in task) <= size for task in tasks)


def test_plan_uses_all_cores_when_there_is_enough_to_do() -> None:
    assert len(plan([a_range(size=1 << 30)], max_task_bytes=1 << 30, cores=6)) == 6
    assert len(plan([a_range(size=20 << 20)], max_task_bytes=1 << 30, cores=6)) == 2
    assert len(plan([a_range(size=1)], max_task_bytes=1 << 30, cores=6)) == 1
    assert plan([], max_task_bytes=1, cores=6) == []


def test_small_partitions_share_a_task() -> None:
    ranges = [a_range(size=1 << 20) for _ in range(20)]
    assert [len(task) for task in plan(ranges, max_task_bytes=1 << 30, cores=6)] == [10, 10]
    assert [len(task) for task in plan(ranges, max_task_bytes=8 << 20, cores=6)] == [8, 8, 4]
    assert [len(task) for task in plan(ranges, max_task_bytes=1 << 30, min_tasks=20)] == [1] * 20


def test_range_without_records_has_no_splits_though_its_batch_has_bytes() -> None:
    assert cut(a_range(start_offset=5, end_offset=5), 10) == []
    assert cut(a_range(start_offset=9, end_offset=5), 10) == []


def test_watermark_that_lies_is_damage_and_not_tasks_without_end(tmp_path: Path) -> None:
    """The driver used to fill its memory with them."""
    with Topic.open(tmp_path / "topic", **QUIET) as topic:
        topic.append(b"x", sync=True)
    watermark = encode_new(a_mark(9, 0, 1 << 60, 1 << 60, 1), Identity.of(topic.log_id, 0).salt)
    (tmp_path / "topic" / "0000" / "watermark").write_bytes(watermark)
    with pytest.raises(CorruptLogError, match="data up to offset"):
        find_ranges(options_of(tmp_path / "topic"))


# --- scan --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "zlib"])
@pytest.mark.parametrize("seed", range(4))
def test_splits_of_any_size_give_each_record_once_and_in_order(tmp_path: Path, seed: int, compression: str) -> None:
    path = random_topic(tmp_path / "topic", seed, compression=compression)
    expected = all_rows(path)
    for split_bytes in (61, 112, 113, 400, 1000, 4096, 4097, 10_007, 1 << 40):
        rows = scan_rows(path, split_bytes=split_bytes, includeHeaders=True)
        assert rows == expected, f"{seed=} {split_bytes=}"


def test_every_subset_of_columns_is_what_the_core_reads(topic: Path) -> None:
    expected = all_rows(topic)
    subsets = [names for size in range(1, len(COLUMNS) + 1) for names in combinations(COLUMNS, size)]
    for names in subsets:
        names = tuple(Random(str(names)).sample(names, len(names)))
        rows = scan_rows(topic, columns=",".join(names))
        assert rows == [{name: row[name] for name in names} for row in expected], names
        assert list(rows[0]) == list(names)


@pytest.mark.parametrize("arrow_batch_bytes", [1 << 10, 3000, 1 << 14, 1 << 20])
def test_arrow_batches_keep_to_their_size(topic: Path, arrow_batch_bytes: int) -> None:
    batches = scan_batches(topic, arrow_batch_bytes=arrow_batch_bytes, includeHeaders=True)
    assert all(batch.nbytes <= arrow_batch_bytes or batch.num_rows == 1 for batch in batches)
    neighbours = [a.nbytes + b.nbytes for a, b in pairwise(batches)]
    merged = [size for size in neighbours if size > arrow_batch_bytes]
    assert len(merged) >= len(neighbours) - 1  # but for the border between the two partitions
    assert [row for batch in batches for row in rows_of(batch)] == all_rows(topic)


def test_arrow_batches_do_not_keep_the_whole_log_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Topic.open(tmp_path / "topic", **QUIET) as topic:
        for each in range(8):
            topic.append_many([bytes(50_000)] * 2, timestamps=[NOW, NOW + each])
            topic.flush()
    monkeypatch.setattr("loglib.spark.scan._HELD_BYTES", 200_000)
    batches = scan_batches(tmp_path / "topic", columns="timestamp")
    assert [batch.num_rows for batch in batches] == [2] * 8


def test_large_batch_is_cut_and_a_huge_record_comes_alone(tmp_path: Path) -> None:
    huge = bytes(3 << 20)
    with Topic.open(tmp_path / "topic", **QUIET) as topic:
        topic.append_many([b"x" * 1000] * 5000 + [huge] + [b"y"] * 3)
    batches = scan_batches(tmp_path / "topic", arrow_batch_bytes=1 << 20)
    assert [row["value"] for batch in batches for row in rows_of(batch)] == [b"x" * 1000] * 5000 + [huge] + [b"y"] * 3
    assert [batch.num_rows for batch in batches if batch.nbytes > 1 << 20] == [1]
    assert min(batch.nbytes for batch in batches[:4]) > 1 << 18


def test_large_batches_are_passed_on_as_they_were_read(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "topic", **QUIET) as topic:
        for _ in range(2):
            topic.append_many([b"x" * 1000] * 900)
            topic.flush()
    batches = scan_batches(tmp_path / "topic", columns="value", arrow_batch_bytes=4 << 20)
    assert [batch.num_rows for batch in batches] == [900, 900]
    # The bytes of a block cannot be changed; memory that Arrow has copied to can.
    assert not any(batch.column("value").buffers()[2].is_mutable for batch in batches)


@pytest.mark.parametrize("seed", range(3))
def test_start_and_end_inside_batches_are_exact(tmp_path: Path, seed: int) -> None:
    path = random_topic(tmp_path / "topic", seed, partitions=1)
    records = all_records(path)
    random = Random(seed)
    for _ in range(60):
        first, stop = sorted(random.choices(range(len(records) + 1), k=2))
        places = [*(record.offset for record in records), records[-1].next_offset]
        rows = scan_rows(path, split_bytes=random.choice((100, 999, 1 << 30)), start=places[first], end=places[stop])
        assert [row["offset"] for row in rows] == [record.offset for record in records[first:stop]], (first, stop)


def test_damage_is_never_passed_over_wherever_the_splits_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split that begins before a damaged header must not go on at the next good one."""
    monkeypatch.setattr("loglib.cursor.BLOCK_BYTES", 256)  # else each split happens to look far beyond its end
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


def test_text_columns_are_checked_to_be_utf8(tmp_path: Path) -> None:
    text = StructType([StructField("value", StringType()), StructField("key", StringType())])
    with Topic.open(tmp_path / "topic", **QUIET) as topic:
        topic.append("grün".encode(), key=None)
        topic.append(None, key=b"k")
        topic.flush()
        assert scan_rows(tmp_path / "topic", schema=text) == [
            {"value": "grün", "key": None},
            {"value": None, "key": "k"},
        ]
        topic.append(b"fine")
        wrong = topic.append(b"\xff")
    with pytest.raises(ValueError, match=rf"topic, partition 0, offset {wrong.offset}: the value is not UTF-8"):
        scan_rows(tmp_path / "topic", schema=text)


def test_null_in_a_column_that_must_have_none_is_an_error(tmp_path: Path) -> None:
    strict = StructType([StructField("value", BinaryType(), nullable=False), StructField("offset", LongType())])
    with Topic.open(tmp_path / "topic", **QUIET) as topic:
        topic.append(b"a")
        topic.flush()
        assert scan_rows(tmp_path / "topic", schema=strict) == [{"value": b"a", "offset": 0}]
        null = topic.append(None)
    with pytest.raises(ValueError, match=f"offset {null.offset}: the value is null, and the schema says NOT NULL"):
        scan_rows(tmp_path / "topic", schema=strict)


# --- damage that is skipped ---------------------------------------------------------------------------------


def skipped(caplog: pytest.LogCaptureFixture) -> list[range]:
    """The offsets that the query reported as skipped, in order."""
    found = re.findall(r"skipped offsets \[(\d+), (\d+)\), (\d+) bytes \(onGap=skip\): ", caplog.text)
    assert all(int(stop) - int(start) == int(size) for start, stop, size in found)
    return sorted((range(int(start), int(stop)) for start, stop, _ in found), key=lambda gap: gap.start)


def gaps_of(path: Path) -> tuple[list[Row], list[range]]:
    """The rows that the core's reader gives past damage, and the offsets that it leaves out."""
    with Topic.open(path, mode="r") as topic, topic.read(on_gap="skip") as reader:
        rows = [as_row(record, path.name) for record in reader]
        return rows, [gap.offsets for gap in reader.gaps if gap.offsets]


@pytest.mark.parametrize("seed", range(6))
def test_skipped_damage_is_what_the_core_skips_and_each_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    monkeypatch.setattr("loglib.cursor.BLOCK_BYTES", 256)
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


# --- what becomes of a log between planning and reading --------------------------------------------------


def after_retention(path: Path) -> tuple[list[Range], list[Range]]:
    """The ranges planned before and after retention has dropped segments."""
    random_topic(path, seed=7, partitions=1, retention=Retention(age=None))
    before = find_ranges(options_of(path))
    Topic.reconfigure(path, retention=Retention(age=None, bytes=9000))
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
    Topic.reconfigure(path, retention=Retention(age=None, bytes=9000))
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
        Topic.reconfigure(path, retention=Retention(age=None, bytes=1))
        with testing.open_topic(path, clock=lambda: NOW) as topic:
            topic.retain()

    from loglib.spark.scan import _pieces

    pieces = _pieces(split, fail_on_data_loss=False)
    first = next(pieces)
    drop_all_but_the_last(first)
    assert not any(each.exists() for each in lost_from)
    with pytest.warns(RuntimeWarning, match="of the log is gone"):
        rest = list(pieces)
    assert rest
    kept = all_records(path)
    offsets = [record.offset for piece in rest for record in piece.records()]
    assert offsets[-len(kept) :] == [record.offset for record in kept]


def test_topic_that_is_not_there_on_the_executor_says_what_logs_need(tmp_path: Path) -> None:
    path = random_topic(tmp_path / "topic", seed=8)
    splits = splits_of(find_ranges(options_of(path)), 1 << 40)
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="logs must be on storage that all executors mount at the same path"):
        scan_rows(path, splits=splits)


def test_topic_made_again_is_not_mistaken_for_the_one_planned(tmp_path: Path) -> None:
    path = random_topic(tmp_path / "topic", seed=8)
    splits = splits_of(find_ranges(options_of(path)), 1 << 40)
    shutil.rmtree(path)
    random_topic(path, seed=8)
    with pytest.raises(LogError, match=f"the query was planned for {splits[0].range.log_id.hex()}"):
        scan_rows(path, splits=splits)


def test_task_lists_no_directory_of_the_log(tmp_path: Path) -> None:
    """On a network file system a listing costs more than reading a batch, and each of many tasks would ask for one."""
    need(shutil.which("strace"), "strace")
    path = random_topic(tmp_path / "topic", seed=9)
    reader = BatchReader({"path": str(path), "minpartitions": "5"}, default_schema(options_of(path)))
    plan_file = tmp_path / "plan"
    tasks = reader.partitions()
    plan_file.write_bytes(CloudPickleSerializer().dumps((reader, tasks)))  # type: ignore[no-untyped-call]
    rows = len(all_records(path))
    random_topic(path, seed=10)  # the log grows and rolls after the plan
    program = """
        import os, sys
        from pyspark.serializers import CloudPickleSerializer
        with open(sys.argv[1], "rb") as file:
            reader, tasks = CloudPickleSerializer().loads(file.read())
        print(sum(batch.num_rows for task in tasks for batch in reader.read(task)))
        if sys.argv[2:]:
            os.listdir(sys.argv[2])
    """

    def listings(*arguments: Path) -> list[str]:
        log = tmp_path / "strace"
        command = ["strace", "-f", "-y", "-o", str(log), "-e", "trace=getdents,getdents64", sys.executable, "-c"]
        ran = subprocess.run(
            [*command, textwrap.dedent(program), str(plan_file), *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert ran.stdout.split() == [str(rows)]
        return [line for line in log.read_text().splitlines() if str(path) in line]

    assert len(tasks) >= 5
    assert listings() == []
    assert listings(path) != []  # strace shows a listing if there is one


@pytest.mark.parametrize("split_bytes", [700, 10_000])
def test_split_names_the_segments_that_it_needs_and_no_more(tmp_path: Path, split_bytes: int) -> None:
    path = random_topic(tmp_path / "topic", seed=9)
    for split in splits_of(find_ranges(options_of(path)), split_bytes):
        bases = sorted(int(each.stem) for each in (path / f"{split.range.partition:04}").glob("*.log"))
        ends = [*bases[1:], 1 << 62]
        needed = [
            base
            for base, end in zip(bases, ends, strict=True)
            if base < split.end_position and end > split.start_position
        ]
        after = [base for base in bases if base > needed[-1]][:1]
        assert split.range.segments == (*needed, *after)


def test_appends_after_the_plan_are_not_read(tmp_path: Path) -> None:
    path = random_topic(tmp_path / "topic", seed=9)
    splits = splits_of(find_ranges(options_of(path)), 1000)
    expected = all_rows(path)
    random_topic(path, seed=10)
    assert scan_rows(path, splits=splits, includeHeaders=True) == expected
    assert len(all_rows(path)) > len(expected)


# --- ranges ------------------------------------------------------------------------------------------


def test_planning_reads_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = random_topic(tmp_path / "topic", seed=11)
    for segment in path.rglob("*.log"):
        segment.write_bytes(bytes(segment.stat().st_size))
    assert all(each.size_bytes > 0 for each in find_ranges(options_of(path)))


def test_directory_of_topics_is_all_of_them_or_those_asked_for(tmp_path: Path) -> None:
    for name in ("clicks", "views", "errors"):
        random_topic(tmp_path / name, seed=len(name), partitions=2, batches=9)
    (tmp_path / "not-a-topic").mkdir()
    shutil.copytree(tmp_path / "views", tmp_path / ".views.0123.tmp")  # one that is just being made

    def read(**options: object) -> list[tuple[str, int]]:
        return sorted({(each.topic, each.partition) for each in find_ranges(options_of(tmp_path, **options))})

    assert read() == [(name, number) for name in ("clicks", "errors", "views") for number in (0, 1)]
    assert read(subscribe="views, clicks") == [("clicks", 0), ("clicks", 1), ("views", 0), ("views", 1)]
    assert read(subscribePattern="[ev].*s") == [("errors", 0), ("errors", 1), ("views", 0), ("views", 1)]
    assert read(subscribePattern="nothing") == []
    assert read(assign='{"views": [1], "clicks": [0]}') == [("clicks", 0), ("views", 1)]
    rows = scan_rows(tmp_path, split_bytes=500, includeHeaders=True)
    expected = [row for name in ("clicks", "errors", "views") for row in all_rows(tmp_path / name)]
    assert in_order(rows) == in_order(expected)
    for wrong, message in (
        ({"subscribe": "clicks,vews"}, "no topic vews at .*; there are clicks, errors, views"),
        ({"assign": '{"views": [2]}'}, "views has partitions 0 to 1, not 2"),
    ):
        with pytest.raises(ValueError, match=message):
            read(**wrong)


def test_path_without_a_topic_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no topic\.json here or one level below"):
        find_topics([str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="no such directory on the driver"):
        find_topics([str(tmp_path / "missing")])
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="no such directory on the driver"):
        find_topics([str(tmp_path / "file")])


def test_two_topics_of_one_name_are_refused(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        random_topic(tmp_path / parent / "topic", seed=1, batches=1)
    with pytest.raises(ValueError, match="have the same name; load them separately"):
        find_topics([str(tmp_path / "a"), str(tmp_path / "b" / "topic")])
    assert len(find_topics([str(tmp_path / "a"), str(tmp_path / "a" / "topic")])) == 1


def test_empty_partitions_and_topics_have_empty_ranges(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "topic", partitions=3, **QUIET) as topic:
        assert scan_rows(tmp_path / "topic") == []
        topic.append(b"one", partition=1)
    ranges = find_ranges(options_of(tmp_path / "topic"))
    assert [each.size_bytes > 0 for each in ranges] == [False, True, False]
    assert scan_rows(tmp_path / "topic", includeHeaders=True) == all_rows(tmp_path / "topic")


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two partitions of twenty records, a millisecond apart, two in a batch."""
    path = tmp_path_factory.mktemp("timed") / "topic"
    with testing.open_topic(path, partitions=2, clock=lambda: NOW, **QUIET) as topic:
        for each in range(0, 20, 2):
            for partition in (0, 1):
                times = [NOW + each * 1000, NOW + (each + 1) * 1000]
                topic.append_many([b"%d" % each, b"%d" % (each + 1)], timestamps=times, partition=partition)
                topic.flush()
    return path


def numbers(path: Path, **options: object) -> dict[int, list[int]]:
    rows = scan_rows(path, split_bytes=300, **options)
    return {number: [int(row["value"]) for row in rows if row["partition"] == number] for number in (0, 1)}


def ms(after: int) -> int:
    return MILLISECONDS + after


def test_kafkas_options_choose_the_records_that_they_choose_there(timed: Path) -> None:
    def both(start: int, stop: int) -> dict[int, list[int]]:
        return {0: list(range(start, stop)), 1: list(range(start, stop))}

    offsets = [record.offset for record in all_records(timed) if record.partition == 0]
    assert numbers(timed) == both(0, 20)
    assert numbers(timed, startingOffsets="earliest", endingOffsets="latest") == both(0, 20)
    assert numbers(timed, startingTimestamp=ms(3), endingTimestamp=ms(7)) == both(3, 7)
    assert numbers(timed, endingTimestamp=ms(99)) == both(0, 20)
    assert numbers(timed, startingTimestamp=ms(3), startingOffsets="earliest") == both(3, 20)
    times = json.dumps({"topic": {"0": ms(5), "1": ms(8)}})
    assert numbers(timed, startingOffsetsByTimestamp=times) == {0: [*range(5, 20)], 1: [*range(8, 20)]}
    assert numbers(timed, endingOffsetsByTimestamp=times) == {0: [*range(5)], 1: [*range(8)]}
    places = json.dumps({"topic": {"0": offsets[5], "1": -2}})
    assert numbers(timed, startingOffsets=places) == {0: [*range(5, 20)], 1: [*range(20)]}
    places = json.dumps({"topic": {"0": offsets[5], "1": -1}})
    assert numbers(timed, endingOffsets=places) == {0: [*range(5)], 1: [*range(20)]}
    late = {"startingTimestamp": ms(99)}
    with pytest.raises(ValueError, match="no record is as late as option startingTimestamp says"):
        numbers(timed, **late)
    assert numbers(timed, **late, startingOffsetsByTimestampStrategy="latest") == both(0, 0)


def test_start_and_end_take_every_form_that_the_core_takes(timed: Path) -> None:
    offsets = [record.offset for record in all_records(timed) if record.partition == 0]
    assert numbers(timed, start="begin", end="end")[1] == [*range(20)]
    assert numbers(timed, start="end") == {0: [], 1: []}
    assert numbers(timed, start="-0s", end="2023-11-14T22:13:20.004Z")[0] == [*range(4)]
    assert numbers(timed, start="2023-11-14T23:13:20.018+01:00")[1] == [18, 19]
    assert numbers(timed, start=json.dumps({"1": offsets[7]})) == {0: [*range(20)], 1: [*range(7, 20)]}
    assert numbers(timed, end=json.dumps({"0": "begin", "1": "-0s"})) == {0: [], 1: []}
    one = json.dumps({"topic": [1]})
    assert numbers(timed, assign=one, start=offsets[3], end=offsets[5]) == {0: [], 1: [3, 4]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 4096}, "offset 4096 means another record in each of 2 partitions"),
        ({"start": '{"2": 0}'}, "option start names partition 2, which is not read"),
        ({"startingOffsets": '{"topic": {"0": 0}}'}, "must name every partition .* lacks partition 1 of topic topic"),
        ({"startingOffsets": '{"topic": {"0": 0, "1": 0}, "other": {"0": 0}}'}, "partition 0 of topic other"),
        ({"assign": '{"topic": [1]}', "start": 1 << 40}, "outside the log"),
        ({"assign": '{"topic": [1]}', "start": 3}, "no record has offset 3"),
        ({"start": "2023-11-14T22:13:20.009Z", "end": "2023-11-14T22:13:20.002Z"}, "lies after the end"),
    ],
)
def test_places_that_mean_nothing_here_are_refused(timed: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, LookupError), match=message):
        find_ranges(options_of(timed, **options))


def test_offset_that_is_no_record_is_refused_also_where_loss_is_accepted(timed: Path) -> None:
    with pytest.raises(InvalidOffsetError):
        find_ranges(options_of(timed, start='{"0": 3}', failOnDataLoss=False))


def test_offset_outside_the_log_is_moved_into_it_on_request(timed: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"partition 0: offset 1099511627776 is gone \(option start\)"):
        ranges = find_ranges(options_of(timed, start=json.dumps({"0": 1 << 40}), failOnDataLoss=False))
    assert [each.size_bytes > 0 for each in ranges] == [False, True]


# --- counts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_counts_are_those_of_the_records_wherever_the_range_begins_and_ends(tmp_path: Path, seed: int) -> None:
    path = random_topic(tmp_path / "topic", seed, empty_partitions=1)
    records = all_records(path)
    assert counts(path) == {number: sum(each.partition == number for each in records) for number in (0, 1, 2)}
    offsets = [record.offset for record in records if record.partition == 0]
    random = Random(seed)
    for _ in range(20):
        first, stop = sorted(random.choices(range(len(offsets)), k=2))
        found = counts(path, start={0: offsets[first], 1: "end"}, end={0: offsets[stop]})
        assert found == {0: stop - first, 1: 0, 2: 0}


def test_counting_reads_no_bodies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Topic.open(tmp_path / "topic", **QUIET) as topic:
        for _ in range(8):
            topic.append_many([bytes(100_000)] * 10)
            topic.flush()
    sizes: list[int] = []

    def read_at(files: Files, fd: int, size_bytes: int, position: int) -> bytes:
        sizes.append(size_bytes)
        return plain(files, fd, size_bytes, position)

    plain = Files.read_at
    monkeypatch.setattr(Files, "read_at", read_at)
    assert counts(tmp_path / "topic") == {0: 80}
    assert sum(sizes) < 100_000


def test_counts_of_a_directory_of_topics_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        random_topic(tmp_path / name, seed=1, batches=1)
    with pytest.raises(ValueError, match=r"is a directory of topics \(a, b\)"):
        counts(tmp_path)


# --- options -----------------------------------------------------------------------------------------


def parsed(**options: object) -> Options:
    return parse({"path": "/logs"} | {name: str(value) for name, value in options.items()}, now_us=NOW)


def test_options_are_known_in_any_case_and_have_defaults() -> None:
    options = parsed(
        INCLUDEHEADERS="True", maxbytesperpartition="64K", arrowBatchBytes="2mib", columns=" value, headers"
    )
    assert options.include_headers
    assert options.max_bytes_per_partition == 64 << 10
    assert options.arrow_batch_bytes == 2 << 20
    assert options.columns == ("value", "headers")
    defaults = parsed()
    assert (defaults.max_bytes_per_partition, defaults.arrow_batch_bytes) == (128 << 20, 4 << 20)
    assert (defaults.start.otherwise, defaults.end.otherwise, defaults.fail_on_data_loss) == ("begin", "end", True)
    assert parsed(start="-15m").start.otherwise == Time(NOW - 15 * 60 * 1_000_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffset": "earliest"}, "unknown option startingoffset; did you mean startingOffsets"),
        ({"minpartition": 3}, "did you mean minPartitions"),
        ({"zzz": 3}, "unknown option zzz; there are path, "),
        ({"archive": "/a"}, "gives the archive and the log as one table"),
        ({"archive": "/a", "failOnDataLoss": "false"}, "gives the archive and the log as one table"),
        ({"kafka.bootstrap.servers": "a:9092"}, "kafka.bootstrap.servers sets up a Kafka consumer"),
        ({"kafka.group.id": "a"}, "sets up a Kafka consumer"),
        ({"groupidprefix": "a"}, "option groupIdPrefix sets up a Kafka consumer"),
        ({"fetchOffset.numRetries": "3"}, "sets up a Kafka consumer"),
        ({"kafkaConsumer.pollTimeoutMs": "3"}, "sets up a Kafka consumer"),
        ({"maxoffsetspertrigger": "3"}, "option maxOffsetsPerTrigger is for streams"),
        ({"owner": "me", "provider": "loglib"}, "make a temporary view"),
        ({"subscribe": "a", "assign": "{}"}, "give one of the options subscribe, subscribePattern and assign"),
        ({"subscribe": "a,,b"}, "different names separated by commas"),
        ({"subscribePattern": "("}, "is not a regular expression"),
        ({"assign": '{"a": 1}'}, "must be JSON of partitions by topic"),
        ({"assign": '{"a": [1, 1]}'}, "must be JSON of partitions by topic"),
        ({"assign": "[]"}, "must be JSON of partitions by topic"),
        ({"startingOffsets": "latest"}, "cannot be latest"),
        ({"startingOffsets": '{"a": {"0": -1}}'}, "cannot be latest"),
        ({"endingOffsets": "earliest"}, "cannot be earliest"),
        ({"endingOffsets": '{"a": {"0": -2}}'}, "cannot be earliest"),
        ({"columns": "value,Value"}, "different names separated by commas"),
        ({"columns": "value", "includeHeaders": "true"}, "includeHeaders=true and columns=value contradict each other"),
        ({"columns": "Headers", "includeHeaders": "false"}, "includeHeaders=false and columns=Headers contradict"),
        ({"start": "9", "end": "8"}, r"the start, 9, lies after the end, 8 \(options start and end\)"),
        ({"start": "end", "end": "begin"}, "the start, end, lies after the end, begin"),
        ({"start": '{"1": 9}', "end": '{"0": 1, "1": 8}'}, "the start, 9, lies after the end, 8 in partition 1"),
        ({"start": "-1m", "end": "-2m"}, r"the start, 2023-.*, lies after the end, 2023-"),
        (
            {"startingTimestamp": "2000", "endingOffsetsByTimestamp": '{"a": {"0": 1000}}'},
            r"00:00:02.*after the end, .*00:00:01\+00:00 in partition 0 of topic a \(options startingTimestamp and end",
        ),
        ({"endingOffsets": "tomorrow"}, "must be earliest, latest or JSON"),
        ({"endingOffsets": '{"a": {"x": 1}}'}, "must be earliest, latest or JSON"),
        ({"endingOffsets": '{"a": {"0": true}}'}, "must be earliest, latest or JSON"),
        ({"startingTimestamp": "noon"}, "a time in milliseconds"),
        ({"startingOffsetsByTimestamp": "{]"}, "JSON of milliseconds"),
        ({"startingOffsetsByTimestampStrategy": "skip"}, "error or latest"),
        ({"start": "2024-05-01"}, "a time with its zone"),
        ({"start": "yesterday"}, "option start must be"),
        ({"end": '{"a": 1}'}, "JSON of places by partition"),
        ({"end": "begin", "endingOffsets": "latest"}, "options end and endingOffsets say the same thing twice"),
        ({"failOnDataLoss": "no"}, "true or false"),
        ({"onGap": "ignore"}, "option onGap must be raise or skip, not 'ignore'"),
        ({"minPartitions": "0"}, "a number, at least 1"),
        ({"minPartitions": "many"}, "a number, at least 1"),
        ({"maxBytesPerPartition": "10"}, "a size like 64m, in bytes 65536"),
        ({"arrowBatchBytes": "17m"}, "a size like 64m, in bytes 1024 to 16777216"),
        ({"arrowBatchBytes": "big"}, "a size like 64m"),
    ],
)
def test_wrong_options_are_refused_with_what_to_write_instead(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(**options)


def test_paths_are_directories_that_everyone_can_see() -> None:
    assert parse({"path": "file:///logs/a%20b"}, now_us=NOW).paths == ("/logs/a b",)
    assert parse({"paths": '["/a", "b"]'}, now_us=NOW).paths == ("/a", "b")
    with pytest.raises(ValueError, match="s3://bucket/logs is not on a file system: a stream reads a log that is"):
        parse({"path": "s3a://bucket/logs"}, now_us=NOW, streaming=True)
    with pytest.raises(ValueError, match="no path: give load"):
        parse({}, now_us=NOW)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (StructField("vaule", BinaryType()), "no column vaule; did you mean value"),
        (StructField("Offfset", LongType()), "no column Offfset; did you mean offset"),
        (StructField("Offset", StringType()), "column Offset is bigint, not string"),
        (StructField("qqq", LongType()), "no column qqq; there are key, value"),
        (StructField("offset", StringType()), "column offset is bigint, not string; cast it in the query"),
        (StructField("value", LongType()), "column value is binary or string, not bigint"),
    ],
)
def test_spark_schema_with_columns_that_do_not_exist_is_refused(field: StructField, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arrow_schema(StructType([field]))


def test_column_that_is_there_twice_is_refused() -> None:
    fields = [StructField("offset", LongType()), StructField("OFFSET", LongType())]
    with pytest.raises(ValueError, match="column OFFSET is there twice"):
        arrow_schema(StructType(fields))


def test_columns_are_known_in_any_case_and_named_as_the_user_wrote_them(topic: Path) -> None:
    expected = [{"VALUE": row["value"], "Offset": row["offset"], "TOPIC": row["topic"]} for row in all_rows(topic)]
    assert scan_rows(topic, columns="VALUE,Offset,TOPIC") == expected
    with pytest.raises(ValueError, match="no column Ofset; did you mean offset"):
        scan_rows(topic, columns="Ofset")


def test_reader_on_an_executor_is_the_planned_one(topic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ages count from the time of the plan; counted from the time of a task, this start would lie after the end."""
    given = {"path": str(topic), "start": "-2m", "end": "2023-11-14T22:13:20Z", "columns": "value"}
    monkeypatch.setattr("loglib.spark.source.SYSTEM", lambda: NOW)
    reader = BatchReader(given, default_schema(options_of(topic, columns="value")))
    monkeypatch.setattr("loglib.spark.source.SYSTEM", lambda: NOW + 200_000_000)
    rebuild, arguments = reader.__reduce__()
    again = rebuild(*arguments)
    assert (again._options, again._schema) == (reader._options, reader._schema)


def test_headers_that_the_schema_has_not_are_refused(topic: Path) -> None:
    schema = StructType([StructField("value", BinaryType())])
    with pytest.raises(ValueError, match=r"includeHeaders asks for headers, and schema\(\) \(value\) has none"):
        BatchReader({"path": str(topic), "includeheaders": "true"}, schema)
    BatchReader({"path": str(topic), "columns": "VALUE"}, schema)
    with pytest.raises(ValueError, match=r"the option columns \(key\) and schema\(\) differ"):
        BatchReader({"path": str(topic), "columns": "key"}, schema)


# --- the module that Spark finds --------------------------------------------------------------------------


def test_what_every_session_imports_is_next_to_nothing() -> None:
    program = """
        import sys
        import pyspark.sql.datasource
        before = set(sys.modules)
        import pyspark_loglib
        assert issubclass(pyspark_loglib.DefaultSource, pyspark.sql.datasource.DataSource)
        print(sorted(set(sys.modules) - before))
    """
    assert run_python(program).strip() == "['pyspark_loglib']"


def test_task_imports_no_pandas(topic: Path) -> None:
    """It would cost every worker half a second, and its garbage collections for ever after."""
    program = """
        import sys
        from loglib.spark.source import BatchReader, schema_of
        options = {"path": sys.argv[1], "includeheaders": "true"}
        reader = BatchReader(options, schema_of(options))
        rows = sum(batch.num_rows for partition in reader.partitions() for batch in reader.read(partition))
        print(rows, "pandas" in sys.modules)
    """
    assert run_python(program, topic).split() == [str(len(all_records(topic))), "False"]


def test_module_that_spark_finds_is_silent_without_pyspark() -> None:
    program = """
        import sys
        sys.modules["pyspark"] = sys.modules["pyspark.sql"] = sys.modules["pyspark.sql.datasource"] = None
        import pyspark_loglib
        print(hasattr(pyspark_loglib, "DefaultSource"))
    """
    assert run_python(program).strip() == "False"


def test_row_of_a_record_has_every_column(topic: Path) -> None:
    row = as_row(all_records(topic)[0])
    assert tuple(row) == COLUMNS
