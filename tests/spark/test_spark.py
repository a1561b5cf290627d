"""The Spark source in a real Spark: one session for the module, with two slots and a time zone that is not UTC."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
import spark_tables
from builders import BODY_AT, make_topic
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from spark_logs import COLUMNS, all_records, all_rows, in_order, random_topic
from spark_tables import collect, load

import loglib.spark
from conftest import NOW, QUIET, SOURCE, alter, last_segment
from loglib import Retention, Topic, testing
from loglib.config.policies import TopicConfig
from loglib.config.times import to_datetime
from loglib.segment import HEADER_BYTES

pytestmark = pytest.mark.spark

spark = spark_tables.spark
topic = spark_tables.topic


# --- what is read ------------------------------------------------------------------------------------


def test_format_is_found_without_registering_and_has_kafkas_columns(spark: SparkSession, topic: Path) -> None:
    assert [tuple(each) for each in load(spark, topic).dtypes] == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
    ]
    with_headers = load(spark, topic, includeHeaders=True).dtypes
    assert with_headers[7:] == [("headers", "array<struct<key:string,value:binary>>")]


@pytest.mark.parametrize("compression", ["none", "zlib"])
@pytest.mark.parametrize("seed", range(2))
def test_spark_reads_what_the_core_reads(spark: SparkSession, tmp_path: Path, seed: int, compression: str) -> None:
    path = random_topic(tmp_path / "topic", seed, batches=60, compression=compression)
    for options in ({}, {"minPartitions": 7, "arrowBatchBytes": 1024}, {"minPartitions": 50}):
        rows = collect(load(spark, path, includeHeaders=True, **options))
        assert in_order(rows) == all_rows(path), options


def test_every_column_alone_and_any_mixture_in_any_order(spark: SparkSession, topic: Path) -> None:
    types = dict(load(spark, topic, includeHeaders=True).dtypes)
    random = Random(2)
    mixtures = [[name] for name in COLUMNS] + [random.sample(COLUMNS, random.randint(2, 8)) for _ in range(4)]
    expected = all_rows(topic)
    for names in mixtures:
        ddl = ", ".join(f"{name} {types[name]}" for name in names)
        rows = collect(spark.read.format("loglib").schema(ddl).load(str(topic)))
        assert rows == [{name: row[name] for name in names} for row in expected], ddl
    assert load(spark, topic, columns="offset,value").dtypes == [("offset", "bigint"), ("value", "binary")]


def test_text_is_read_as_text_and_checked(spark: SparkSession, tmp_path: Path) -> None:
    with Topic.open(tmp_path / "topic", create=True, **QUIET) as topic:
        topic.append_many(["grün".encode(), b"", None], keys=[b"k", None, b""])
    schema = "value string, key string"
    rows = collect(spark.read.format("loglib").schema(schema).load(str(tmp_path / "topic")))
    assert rows == [{"value": "grün", "key": "k"}, {"value": "", "key": None}, {"value": None, "key": ""}]
    with Topic.open(tmp_path / "topic") as topic:
        wrong = topic.append(b"\xff")
    with pytest.raises(PySparkException, match=f"offset {wrong.offset}: the value is not UTF-8"):
        spark.read.format("loglib").schema(schema).load(str(tmp_path / "topic")).collect()


def test_time_is_the_events_instant_in_any_time_zone(spark: SparkSession, tmp_path: Path) -> None:
    instant = datetime(2024, 7, 1, 12, 30, 0, 123456, tzinfo=UTC)
    with Topic.open(tmp_path / "topic", create=True, **QUIET) as topic:
        topic.append(b"", timestamp=instant)
    shown = load(spark, tmp_path / "topic").select(f.col("timestamp").cast("string").alias("time")).collect()
    assert shown[0]["time"] == "2024-07-01 10:00:00.123456"  # St John's is two and a half hours behind then
    (row,) = collect(load(spark, tmp_path / "topic"))
    assert row["timestamp"] == instant.timestamp() * 1_000_000


def test_one_huge_record_among_small_ones(spark: SparkSession, tmp_path: Path) -> None:
    with Topic.open(tmp_path / "topic", create=True, **QUIET) as topic:
        topic.append_many([b"small"] * 1000 + [bytes(40 << 20)] + [b"small"] * 1000)
    lengths = load(spark, tmp_path / "topic", columns="value").select(f.length("value").alias("n"))
    (row,) = lengths.agg(f.count("n"), f.sum("n"), f.max("n")).collect()
    assert row[:] == (2001, 2000 * 5 + (40 << 20), 40 << 20)


def test_spark_counted_152_rows_where_there_were_2(spark: SparkSession, tmp_path: Path) -> None:
    """A value of 19.5 MB with 300 batches in it, each in its right place: the second split began with some of them."""
    size = 65_000
    for name in ("topic", "forged"):
        make_topic(tmp_path / name, TopicConfig(**QUIET))  # two logs with the same id
    with testing.open_topic(tmp_path / "topic", clock=lambda: NOW) as topic:
        topic.append(b"first", sync=True)
        place = topic.partition(0).log_end_offset + BODY_AT + 8
        with testing.open_topic(tmp_path / "forged", clock=lambda: NOW) as forged:
            forged.append(bytes(place - BODY_AT - 8), sync=True)
            for _ in range(300):
                forged.append(bytes(size - BODY_AT - 8), sync=True)
        fakes = last_segment(tmp_path / "forged").read_bytes()[HEADER_BYTES + place :]
        assert len(fakes) == 300 * size
        topic.append(fakes, sync=True)
    frame = load(spark, tmp_path / "topic")
    assert frame.count() == 2
    assert frame.select(f.length("value")).collect() == [(5,), (len(fakes),)]


def test_empty_topic_is_an_empty_dataframe(spark: SparkSession, tmp_path: Path) -> None:
    with Topic.open(tmp_path / "topic", create=True, partitions=3, **QUIET):
        pass
    frame = load(spark, tmp_path / "topic")
    assert (frame.count(), frame.collect()) == (0, [])


def test_directory_of_topics_several_paths_and_subscriptions(spark: SparkSession, tmp_path: Path) -> None:
    for seed, name in enumerate(("clicks", "views", "errors")):
        random_topic(tmp_path / name, seed, batches=9)

    def counts(frame: DataFrame) -> dict[str, int]:
        return {row["topic"]: row["count"] for row in frame.groupBy("topic").count().collect()}

    expected = {name: len(all_records(tmp_path / name)) for name in ("clicks", "views", "errors")}
    assert counts(load(spark, tmp_path)) == expected
    assert counts(load(spark, tmp_path, subscribe="views")) == {"views": expected["views"]}
    paths = [str(tmp_path / "clicks"), str(tmp_path / "errors")]
    assert counts(spark.read.format("loglib").load(paths)).keys() == {"clicks", "errors"}


def test_number_of_tasks_follows_the_size_and_min_partitions(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "topic"
    with Topic.open(path, create=True, partitions=4, **QUIET) as topic:
        for each in range(8):
            topic.append_many([bytes(1000)] * 256, partition=each % 4)
    assert load(spark, path).rdd.getNumPartitions() == 1  # 2 MB: a second task would cost more than it brings
    assert load(spark, path, minPartitions=8).rdd.getNumPartitions() == 8
    assert load(spark, path, maxBytesPerPartition="256k").rdd.getNumPartitions() == 8
    assert load(spark, path, maxBytesPerPartition="1m").rdd.getNumPartitions() == 2
    assert load(spark, path).count() == load(spark, path, minPartitions=5).count() == 8 * 256


def test_sql_view_counts_the_records_of_each_partition(spark: SparkSession, topic: Path) -> None:
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW logs USING loglib OPTIONS (path '{topic}', minPartitions '3')")
    rows = spark.sql("SELECT partition, count(*) AS n FROM logs GROUP BY partition ORDER BY partition").collect()
    records = all_records(topic)
    assert [row["n"] for row in rows] == [sum(each.partition == number for each in records) for number in (0, 1)]


def test_limit_stops_early_without_an_error(spark: SparkSession, topic: Path) -> None:
    assert len(load(spark, topic, minPartitions=9).limit(3).collect()) == 3


# --- where to start and end --------------------------------------------------------------------------


def test_read_takes_what_a_reader_takes(spark: SparkSession, tmp_path: Path) -> None:
    with Topic.open(tmp_path / "topic", create=True, partitions=2, **QUIET) as topic:
        for each in range(10):
            at = datetime.now(UTC) - timedelta(hours=10 - each)
            topic.append_many([b"%d" % each] * 2, timestamps=[at] * 2, partition=each % 2)
            topic.flush()
        positions = topic.read(start={0: "begin", 1: "end"}).tell()

        def values(**arguments: Any) -> list[int]:
            frame = loglib.spark.read(spark, topic, columns=["value"], **arguments)
            assert frame.columns == ["value"]
            return sorted(int(row["value"]) for row in frame.collect())

        twice = [each for each in range(10) for _ in range(2)]
        assert values() == twice
        assert values(start=positions) == [each for each in twice if each % 2 == 0]
        assert values(start=timedelta(hours=3, minutes=30)) == [7, 7, 8, 8, 9, 9]
        assert values(start="-210m", end=datetime.now(UTC) - timedelta(hours=1, minutes=30)) == [7, 7, 8, 8]
        middle = topic.partition(0).read().poll()[1].offset  # the second record of its batch
        assert values(start={0: middle, 1: "end"}) == [0, 2, 2, 4, 4, 6, 6, 8, 8]
        assert values(start={1: "end"}, end={0: middle}) == [0]


def test_offsets_as_kafka_writes_them(spark: SparkSession, topic: Path) -> None:
    records = [record for record in all_records(topic) if record.partition == 0]
    first, stop = records[len(records) // 3].offset, records[-2].offset
    rows = collect(
        load(
            spark, topic, minPartitions=5,
            startingOffsets=json.dumps({"topic": {"0": first, "1": -2, "2": -2}}),
            endingOffsets=json.dumps({"topic": {"0": stop, "1": 0, "2": -1}}),
        )
    )  # fmt: skip
    assert [row["offset"] for row in rows] == [each.offset for each in records if first <= each.offset < stop]


# --- without the JVM ---------------------------------------------------------------------------------


def test_map_batches_gives_what_the_function_makes_of_all_records(spark: SparkSession, topic: Path) -> None:
    def lengths(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        count = total = 0
        for batch in batches:
            assert batch.schema.names == ["value", "partition"]
            count += batch.num_rows
            total += sum(len(each or b"") for each in batch.column("value").to_pylist())
        yield pa.RecordBatch.from_pydict({"count": [count], "total": [total]})

    records = all_records(topic)
    for tasks in ("1", "7"):
        frame = loglib.spark.map_batches(
            spark, topic, lengths, "count long, total long", columns=["value", "partition"],
            options={"minPartitions": tasks},
        )  # fmt: skip
        rows = frame.collect()
        assert len(rows) >= int(tasks)
        assert sum(row["count"] for row in rows) == len(records)
        assert sum(row["total"] for row in rows) == sum(len(record.value or b"") for record in records)


def test_condition_chooses_what_sparks_own_filter_chooses(spark: SparkSession, topic: Path) -> None:
    table = load(spark, topic)
    for where in (
        "key IN ('k1', 'k3')",
        f"timestamp >= '{to_datetime(NOW - 3).isoformat()}' AND timestamp < '{to_datetime(NOW + 2).isoformat()}'",
        f"key = 'k2' AND timestamp > '{to_datetime(NOW).isoformat()}'",
    ):
        wanted = in_order(collect(table.where(where)))
        assert 0 < len(wanted) < table.count()
        assert in_order(collect(loglib.spark.read(spark, topic, where=where))) == wanted
        assert loglib.spark.read(spark, topic, where=where).count() == len(wanted)
        mapped = loglib.spark.map_batches(
            spark, topic, lambda batches: batches, "offset long, partition int", columns=["offset", "partition"],
            where=where,
        )  # fmt: skip
        places = [(row["partition"], row["offset"]) for row in mapped.collect()]
        assert sorted(places) == [(row["partition"], row["offset"]) for row in wanted]
    with pytest.raises(ValueError, match="there is no condition on value"):
        loglib.spark.map_batches(spark, topic, lambda batches: batches, "offset long", where="value = 'a'")
    with pytest.raises(PySparkException, match="there is no condition on value"):
        loglib.spark.read(spark, topic, where="value = 'a'")


def test_map_batches_takes_ranges_and_is_a_snapshot(spark: SparkSession, tmp_path: Path) -> None:
    path = random_topic(tmp_path / "topic", seed=3, partitions=1, batches=10)
    records = all_records(path)
    frame = loglib.spark.map_batches(
        spark, path, lambda batches: batches, "value binary, offset long",
        start=records[3].offset, end=records[-2].offset, columns=["value", "offset"],
    )  # fmt: skip
    random_topic(path, seed=4, partitions=1, batches=10)
    for _ in range(2):
        rows = [(row["offset"], row["value"]) for row in frame.collect()]
        assert rows == [(record.offset, record.value) for record in records[3:-2]]
    with Topic.open(tmp_path / "empty", create=True, **QUIET) as empty:
        nothing = loglib.spark.map_batches(spark, empty, lambda batches: batches, "offset long", columns=["offset"])
    assert nothing.collect() == []


# --- one plan for each load --------------------------------------------------------------------------


def test_dataframe_is_a_snapshot_until_it_is_loaded_again(spark: SparkSession, tmp_path: Path) -> None:
    path = random_topic(tmp_path / "topic", seed=3, batches=10)
    frame = load(spark, path, includeHeaders=True)
    before = collect(frame)
    random_topic(path, seed=4, batches=10)
    assert collect(frame) == before
    assert frame.count() == len(before)
    assert in_order(collect(load(spark, path, includeHeaders=True))) == all_rows(path)
    assert len(all_rows(path)) > len(before)


def test_dataframe_joined_and_united_with_itself(spark: SparkSession, topic: Path) -> None:
    frame = load(spark, topic)
    records = all_records(topic)
    early, late = frame.where("offset < 2000"), frame.where("offset >= 2000")
    assert early.unionAll(late).count() == len(records)
    assert frame.unionAll(frame).count() == 2 * len(records)
    assert frame.alias("a").join(frame.alias("b"), ["partition", "offset"]).count() == len(records)
    assert (early.count(), frame.count()) == (sum(each.offset < 2000 for each in records), len(records))


# --- what goes wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffset": "earliest"}, "unknown option startingoffset; did you mean startingOffsets?"),
        ({"kafka.bootstrap.servers": "a:9092"}, "sets up a Kafka consumer"),
        ({"path": "/nowhere"}, "no such directory on the driver: '/nowhere'"),
        ({"columns": "value,ofset"}, "no column ofset; did you mean offset?"),
    ],
)
def test_wrong_options_fail_at_load(spark: SparkSession, topic: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(PySparkException) as raised:
        spark.read.format("loglib").options(**({"path": str(topic)} | options)).load()
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        ("offset string", {}, "column offset is bigint, not string; cast it in the query"),
        ("offset long", {"columns": "value"}, "the option columns (value) and schema() differ"),
        ("offset long", {"start": "4096"}, "offset 4096 means another record in each of 3 partitions"),
        ("value binary NOT NULL", {}, "the value is null, and the schema says NOT NULL"),
    ],
)
def test_wrong_schemas_and_places_fail_at_the_first_action(
    spark: SparkSession, topic: Path, schema: str, options: dict[str, str], message: str
) -> None:
    frame = spark.read.format("loglib").schema(schema).options(**options).load(str(topic))
    with pytest.raises(PySparkException) as raised:
        frame.collect()
    assert message in str(raised.value)


def test_corruption_fails_the_job_and_names_file_and_byte(spark: SparkSession, tmp_path: Path) -> None:
    path = random_topic(tmp_path / "topic", seed=5, partitions=1)
    segment = last_segment(path)
    damaged = bytearray(segment.read_bytes())
    damaged[-20] ^= 1
    segment.write_bytes(damaged)
    with pytest.raises(PySparkException) as raised:
        load(spark, path, columns="partition").count()
    assert f"CorruptLogError: {segment}, byte " in str(raised.value)
    assert "nothing was changed" in str(raised.value)


def test_damage_that_is_skipped_is_reported_in_sparks_table_of_logs(spark: SparkSession, tmp_path: Path) -> None:
    path = random_topic(tmp_path / "topic", seed=5, partitions=1)
    segment = last_segment(path)
    damaged = bytearray(segment.read_bytes())
    damaged[-20] ^= 1
    segment.write_bytes(damaged)
    with Topic.open(path, mode="r") as topic, topic.read(on_damage="skip") as reader:
        kept = list(reader)
        (gap,) = reader.gaps
    spark.conf.set("spark.sql.pyspark.worker.logging.enabled", "true")
    try:
        assert load(spark, path, onGap="skip", minPartitions=7).count() == len(kept)
        logs = spark.tvf.python_worker_logs().where("logger = 'loglib'")
        (row,) = logs.where(f"msg LIKE '{path}%'").collect()
    finally:
        spark.conf.set("spark.sql.pyspark.worker.logging.enabled", "false")
    lost = f"skipped offsets [{gap.offsets.start}, {gap.offsets.stop}), {len(gap.offsets)} bytes (onGap=skip)"
    assert row["level"] == "WARNING"
    assert row["msg"].startswith(f"{path}, partition 0: {lost}: {segment}, byte ")


def test_missing_segment_fails_the_job(spark: SparkSession, tmp_path: Path) -> None:
    path = random_topic(tmp_path / "topic", seed=5, partitions=1)
    segments = sorted((path / "0000").glob("*.log"))
    segments[1].unlink()
    with pytest.raises(PySparkException, match="CorruptLogError"):
        load(spark, path).count()
    segments[0].unlink()
    with pytest.raises(PySparkException, match="found no segment file"):
        load(spark, path).count()


def test_topic_that_the_executors_do_not_see_says_what_logs_need(spark: SparkSession, tmp_path: Path) -> None:
    path = random_topic(tmp_path / "topic", seed=5)
    frame = load(spark, path)
    assert frame.count() > 0
    path.rename(tmp_path / "moved")
    with pytest.raises(PySparkException, match="logs must be on storage that all executors mount at the same path"):
        frame.count()
    shutil.copytree(random_topic(tmp_path / "another", seed=6), path)
    with pytest.raises(PySparkException, match="the topic was made again"):
        frame.count()


def test_retention_under_a_held_plan_fails_or_is_passed_over(spark: SparkSession, tmp_path: Path) -> None:
    path = random_topic(tmp_path / "topic", seed=7, partitions=1)
    strict, lenient = load(spark, path), load(spark, path, failOnDataLoss=False)
    everything = strict.count()
    assert lenient.count() == everything
    alter(path, retention=Retention(age=None, bytes=9000))
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        topic.retain()
    with pytest.raises(PySparkException) as raised:
        strict.count()
    assert "OffsetOutOfRangeError" in str(raised.value)
    assert "failOnDataLoss=false" in str(raised.value)
    kept = lenient.count()
    assert kept == len(all_records(path))
    assert 0 < kept < everything


# --- finding the format ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_broken_neighbour_hides_the_format_until_it_is_registered(tmp_path: Path) -> None:
    """PySpark imports every module named pyspark_* and guards none of these imports."""
    random_topic(tmp_path / "topic", seed=1, batches=3)
    (tmp_path / "pyspark_broken.py").write_text("raise RuntimeError('a neighbour')\n")
    program = """
        import sys
        from py4j.protocol import Py4JJavaError
        from pyspark.sql import SparkSession

        spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
        spark.sparkContext.setLogLevel("OFF")
        read = spark.read.format("loglib")
        try:
            read.load(sys.argv[1])
        except Py4JJavaError as error:
            print("DATA_SOURCE_NOT_FOUND" in str(error))
        from pyspark_loglib import DefaultSource

        spark.dataSource.register(DefaultSource)
        print(read.load(sys.argv[1]).count())
        spark.stop()
    """
    environment = os.environ | {
        "PYTHONPATH": f"{SOURCE}:{tmp_path}",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "topic")]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert ran.stdout.split() == ["True", str(len(all_records(tmp_path / "topic")))], ran.stderr[-3000:]


# --- the archived past, and the live tail ---------------------------------------------------------------------


def test_configure_leaves_a_threshold_that_is_set() -> None:
    name = "spark.sql.sources.parallelPartitionDiscovery.threshold"
    builder = SparkSession.Builder().master("local[1]")
    assert loglib.spark.configure(builder)._options[name] == "10000"
    builder = SparkSession.Builder().master("local[1]").config(name, "7")
    assert loglib.spark.configure(builder)._options[name] == "7"
