"""The Spark source without Spark: ranges, splits, and scanning a split into Arrow batches."""

import os
import shutil
import subprocess
import sys
import textwrap
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import spark_planned
from builders import a_mark, calm
from counts import need
from hypothesis import given
from hypothesis import strategies as st
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType
from spark_logs import (
    COLUMNS,
    all_records,
    all_rows,
    as_row,
    options_of,
    random_topic,
    rows_of,
    scan_batches,
    scan_rows,
    splits_of,
)

from conftest import NOW, QUIET, SOURCE, run_python
from loglib import CorruptLogError, LogError, Topic
from loglib.format.watermark import encode_new
from loglib.segment import Identity
from loglib.spark import counts
from loglib.spark.columns import default_schema
from loglib.spark.plan import Part, Range, cut, plan
from loglib.spark.ranges import find_ranges
from loglib.spark.source import BatchReader
from loglib.system.files import Files

topic = spark_planned.topic


def a_range(start: int = 0, size: int = 1000, **changes: Any) -> Range:
    facts: dict[str, Any] = {
        "start_position": start,
        "start_offset": start,
        "end_offset": start + size,
        "flushed_end": start + size,
    }
    return Range(Part("t", "/logs/t", bytes(16), 0), **facts | changes)


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
    with Topic.open(tmp_path / "topic", create=True, **QUIET) as topic:
        topic.append(b"x", sync=True)
    watermark = encode_new(a_mark(9, 0, 1 << 60, 1 << 60, 1), Identity.of(topic.log_id, 0).salt)
    (tmp_path / "topic" / "0000" / "watermark").write_bytes(watermark)
    with pytest.raises(CorruptLogError, match="data up to offset"):
        find_ranges(options_of(tmp_path / "topic"))


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
    with Topic.open(tmp_path / "topic", create=True, **QUIET) as topic:
        for each in range(8):
            topic.append_many([bytes(50_000)] * 2, timestamps=[NOW, NOW + each])
            topic.flush()
    monkeypatch.setattr("loglib.spark.scan._HELD_BYTES", 200_000)
    batches = scan_batches(tmp_path / "topic", columns="timestamp")
    assert [batch.num_rows for batch in batches] == [2] * 8


def test_large_batch_is_cut_and_a_huge_record_comes_alone(tmp_path: Path) -> None:
    huge = bytes(3 << 20)
    with Topic.open(tmp_path / "topic", create=True, **QUIET) as topic:
        topic.append_many([b"x" * 1000] * 5000 + [huge] + [b"y"] * 3)
    batches = scan_batches(tmp_path / "topic", arrow_batch_bytes=1 << 20)
    assert [row["value"] for batch in batches for row in rows_of(batch)] == [b"x" * 1000] * 5000 + [huge] + [b"y"] * 3
    assert [batch.num_rows for batch in batches if batch.nbytes > 1 << 20] == [1]
    assert min(batch.nbytes for batch in batches[:4]) > 1 << 18


def test_large_batches_are_passed_on_as_they_were_read(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "topic", create=True, **QUIET) as topic:
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


def test_text_columns_are_checked_to_be_utf8(tmp_path: Path) -> None:
    text = StructType([StructField("value", StringType()), StructField("key", StringType())])
    with Topic.open(tmp_path / "topic", create=True, **QUIET) as topic:
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
    with Topic.open(tmp_path / "topic", create=True, **QUIET) as topic:
        topic.append(b"a")
        topic.flush()
        assert scan_rows(tmp_path / "topic", schema=strict) == [{"value": b"a", "offset": 0}]
        null = topic.append(None)
    with pytest.raises(ValueError, match=f"offset {null.offset}: the value is null, and the schema says NOT NULL"):
        scan_rows(tmp_path / "topic", schema=strict)


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
    with pytest.raises(LogError, match=f"the query was planned for {splits[0].range.part.log_id.hex()}"):
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
        bases = sorted(int(each.stem) for each in (path / f"{split.range.part.partition:04}").glob("*.log"))
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
    with Topic.open(tmp_path / "topic", create=True, **QUIET) as topic:
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
