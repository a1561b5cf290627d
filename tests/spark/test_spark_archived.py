"""The archived past and the live tail in a real Spark: they are one table."""

import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pytest
import spark_tables
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from spark_logs import COLUMNS, Row, all_rows, in_order, random_topic
from spark_tables import collect, load

import loglib.spark
from conftest import NOW, QUIET
from loglib import Topic
from loglib.config.times import to_datetime
from loglib.spark.where import parse_where

pytestmark = pytest.mark.spark

spark = spark_tables.spark
topic = spark_tables.topic


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Row]]:
    """A topic of which retention has dropped a part, its archive, and all rows that there ever were.

    The names of the archive's directory are what a shell or Spark takes for a pattern.
    """
    directory = tmp_path_factory.mktemp("past")
    path, to = directory / "topic", directory / "an [archive], {of} *all*"
    random_topic(path, seed=5, batches=60)
    with Topic.open(path, create=True) as topic:
        for each in topic.partitions:
            each.roll()
        made = loglib.offload.archive(topic, to, file_bytes=1)
        assert len(made.partitions[0].files) > 2
        for number in range(60):
            topic.append(b"tail", partition=number % len(topic.partitions), timestamp=NOW + number)
        topic.flush()
        rows = all_rows(path)
        for each in topic.partitions:
            each.delete_before(each.segments[len(each.segments) // 2].base_offset)
            assert 0 < each.log_start_offset < made.ends[each.id]
    return path, to, rows


def test_condition_holds_in_the_archive_and_in_the_log(
    spark: SparkSession, archived: tuple[Path, Path, list[Row]]
) -> None:
    path, to, rows = archived
    for where, is_wanted in (
        ("key IN ('k1', 'k3')", lambda row: row["key"] in (b"k1", b"k3")),
        (f"timestamp >= '{to_datetime(NOW + 4).isoformat()}'", lambda row: row["timestamp"] >= NOW + 4),
        ("key = 'k1' AND key = 'k2'", lambda row: False),
    ):
        wanted = [row for row in rows if is_wanted(row)]
        table = loglib.spark.read(spark, path, archive=to, columns=COLUMNS, where=where)
        assert in_order(collect(table)) == wanted
        assert loglib.spark.backfill(spark, path, archive=to, where=where).table.count() == len(wanted)
    with pytest.raises(ValueError, match="AND is missing before OR"):
        loglib.spark.read(spark, path, archive=to, where="key = 'a' OR key = 'b'")


def test_condition_on_an_old_time_is_the_same_in_spark(spark: SparkSession) -> None:
    """Spark took a `datetime` before 1582 for one of the Julian calendar."""
    old = [datetime(year, 7, 1, tzinfo=UTC) for year in (1, 1500, 1582, 1700, 1880, 1950)]
    rows = [((each - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1),) for each in old]
    table = spark.createDataFrame(rows, "us long").select(f.timestamp_micros("us").alias("timestamp"))
    for number, each in enumerate(old):
        earlier = parse_where(f"timestamp < '{each.isoformat()}'", now_us=NOW)
        assert table.where(earlier.as_column()).count() == number


def test_archive_and_log_are_one_table_row_by_row(
    spark: SparkSession, archived: tuple[Path, Path, list[Row]]
) -> None:
    path, to, rows = archived
    table = loglib.spark.read(spark, path, archive=to, columns=COLUMNS)
    assert in_order(collect(table)) == rows
    assert table.dtypes == load(spark, path, includeHeaders=True).select(*COLUMNS).dtypes
    narrow = loglib.spark.read(spark, path, archive=to, columns=["Offset", "partition"])
    assert narrow.columns == ["Offset", "partition"] and narrow.count() == len(rows)
    assert loglib.spark.read(spark, path, archive=to).columns == load(spark, path).columns


def test_uploaded_segments_and_log_are_one_table(spark: SparkSession, tmp_path: Path) -> None:
    path, place = random_topic(tmp_path / "topic", seed=6, batches=40), tmp_path / "place"
    with Topic.open(path, create=True) as topic:
        for each in topic.partitions:
            each.roll()
        made = loglib.offload.tier(topic, place)
        for number in range(20):
            topic.append(b"tail", partition=number % len(topic.partitions), timestamp=NOW + number)
        topic.flush()
        rows = all_rows(path)
        for each in topic.partitions:
            each.delete_before(each.segments[-1].base_offset)
            assert 0 < each.log_start_offset == made.ends[each.id]
    table = loglib.spark.read(spark, path, archive=place, columns=COLUMNS)
    assert in_order(collect(table)) == rows
    assert loglib.spark.read(spark, path, archive=place).columns == load(spark, path).columns
    table = loglib.spark.read(spark, path, archive=place, columns=COLUMNS, where="key IN ('k1', 'k3')")
    assert in_order(collect(table)) == [row for row in rows if row["key"] in (b"k1", b"k3")]
    middle = made.ends[0]
    for first, last in ((0, middle), (middle, "end")):
        table = loglib.spark.read(spark, path, archive=place, start={0: first}, end={0: last}, columns=COLUMNS)
        wanted = range(first, 1 << 62 if last == "end" else int(last))
        assert in_order(collect(table)) == [row for row in rows if row["partition"] or row["offset"] in wanted]
    past = loglib.spark.read(spark, place, columns=COLUMNS)
    below = [row for row in rows if row["offset"] < made.ends[row["partition"]]]
    assert [row | {"topic": "topic"} for row in in_order(collect(past))] == below
    with pytest.raises(Exception, match="which do not grow; stream the topic itself"):
        spark.readStream.format("loglib").load(str(place)).writeStream.format("noop").trigger(availableNow=True).start(
        ).processAllAvailable()


def test_any_range_of_archive_and_log_is_that_range(
    spark: SparkSession, archived: tuple[Path, Path, list[Row]]
) -> None:
    path, to, rows = archived
    random = Random(3)
    for _ in range(5):
        start, end = sorted(random.sample(rows, 2), key=lambda row: (row["partition"], row["offset"]))
        number = random.choice((start["partition"], end["partition"]))
        offsets = [row["offset"] for row in rows if row["partition"] == number]
        first, last = sorted(random.sample(offsets, 2))
        table = loglib.spark.read(spark, path, archive=to, start={number: first}, end={number: last}, columns=COLUMNS)
        expected = [row for row in rows if row["partition"] != number or first <= row["offset"] < last]
        assert in_order(collect(table)) == expected, (number, first, last)


def test_a_time_begins_in_the_archive_or_in_the_log(
    spark: SparkSession, archived: tuple[Path, Path, list[Row]]
) -> None:
    path, to, rows = archived
    made = loglib.offload.archived(to)
    early = [row["timestamp"] for row in rows if row["offset"] < made.ends[row["partition"]]]
    late = [row["timestamp"] for row in rows if row["offset"] >= made.ends[row["partition"]]]
    for time in (sorted(early)[len(early) // 2], max(late), max(early + late) + 1):
        expected = []
        for number in made.ends:
            mine = [row for row in rows if row["partition"] == number]
            first = next((at for at, row in enumerate(mine) if row["timestamp"] >= time), len(mine))
            expected += mine[first:]
        table = loglib.spark.read(spark, path, archive=to, start=to_datetime(time), columns=COLUMNS)
        assert in_order(collect(table)) == expected


def test_range_within_the_archive_starts_no_python(
    spark: SparkSession, archived: tuple[Path, Path, list[Row]]
) -> None:
    path, to, _ = archived
    made = loglib.offload.archived(to)
    table = loglib.spark.read(spark, path, archive=to, end=dict.fromkeys(made.ends, 8))
    plan = table._jdf.queryExecution().toString()
    assert "parquet" in plan.lower() and "loglib" not in plan.lower()


def test_stream_goes_on_where_the_backfill_ended(
    spark: SparkSession, archived: tuple[Path, Path, list[Row]], tmp_path: Path
) -> None:
    source, to, rows = archived
    path = tmp_path / "topic"
    shutil.copytree(source, path)
    table, ends = loglib.spark.backfill(spark, path, archive=to)
    with Topic.open(path, create=True) as topic:
        later = [topic.append(b"later", partition=number % 2, sync=True).offset for number in range(4)]
    assert table.count() == len(rows), "the table was fixed when it was made"
    stream = spark.readStream.format("loglib").option("start", json.dumps(ends)).load(str(path))
    query = stream.writeStream.format("memory").queryName("later").trigger(availableNow=True)
    query.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()
    assert sorted(row["offset"] for row in spark.table("later").collect()) == sorted(later)


def test_table_that_retention_overtakes_fails_and_does_not_shrink(
    spark: SparkSession, archived: tuple[Path, Path, list[Row]], tmp_path: Path
) -> None:
    source, to, _ = archived
    path = tmp_path / "topic"
    shutil.copytree(source, path)
    table = loglib.spark.read(spark, path, archive=to)
    with Topic.open(path, create=True) as topic:
        for each in topic.partitions:
            each.roll()
            each.delete_before(each.segments[-1].base_offset)
    with pytest.raises(PySparkException, match="OffsetOutOfRange|retention|begins at"):
        table.count()


def test_what_is_no_archive_of_the_topic_is_refused_in_words(
    spark: SparkSession, archived: tuple[Path, Path, list[Row]], topic: Path, tmp_path: Path
) -> None:
    path, to, _ = archived
    with pytest.raises(loglib.LogError, match="the archive of another log"):
        loglib.spark.read(spark, topic, archive=to)
    with pytest.raises(FileNotFoundError, match="no archive here"):
        loglib.spark.read(spark, path, archive=tmp_path)
    with pytest.raises(PySparkException, match=r"loglib\.spark\.read\(spark, topic, archive="):
        load(spark, path, archive=to)


def test_topic_whose_archive_is_empty_is_its_log(spark: SparkSession, tmp_path: Path) -> None:
    with Topic.open(tmp_path / "topic", create=True, **QUIET) as made:
        loglib.offload.archive(made, tmp_path / "archive")
        made.append(b"x", sync=True)
        expected = {0: made.partition(0).high_watermark}
    table, ends = loglib.spark.backfill(spark, tmp_path / "topic", archive=tmp_path / "archive", columns=["value"])
    assert collect(table) == [{"value": b"x"}] and ends == expected
