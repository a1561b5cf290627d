"""Spark cases: what is measured of the connector, each case on one session.

Invariant: all runs of a case give the same answer, which is checked. DataFrames are made before any clock starts, and
planned in the round that is not measured: Spark keeps the plan of a `load`. Only the case "plan" measures planning.
Each round has a new aggregation, because Spark keeps what the tasks of an old one have written.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.streaming.query import StreamingQuery

import loglib
import loglib.spark
from cases import OURS
from loglib import Topic
from loglib.spark.source import schema_of
from loglib.spark.stream import StreamReader
from measure import nothing, percentile
from process_tree import usage
from spark_inputs import KEYS, VALUE_BYTES, Inputs, whole_calls, write_topic
from spark_sources import lengths

SCAN, COUNT, PLAN, TASKS, STREAM, SINK, MEMORY = "scan", "count", "plan", "tasks", "stream", "sink", "memory"
LATENCY, BY_KEY = "latency", "by-key"
PAST, PAST_COUNT, PAST_FIRST, PAST_NARROW = "past", "past-count", "past-first", "past-narrow"

ONE_COLUMN = f"{OURS}, columns=value"
MAP_BATCHES = f"{OURS}, map_batches"
COUNTS = f"{OURS}, counts()"
OFFSET = f"{OURS}, columns=offset"
SNAPPY = "Parquet, snappy"
UNCOMPRESSED = "Parquet, uncompressed"
TUPLES = "source of tuples"
FLOOR = "floor: a batch from memory"
FLOOR_ONE = "floor, columns=value"
FLOOR_OFFSET = "floor, columns=offset"
FLOOR_STREAM = "floor: a record from memory"
DROPPED = "floor: batches dropped"
READ = "floor: only read"
OF_JVM = "spark.range"
FLOOR_LINES = "floor: the lines of a file"
RATE = "Spark's rate source"
LOG_ALONE = "the log alone"
EVERYTHING = "Parquet of everything"
ARCHIVING = "loglib.offload.archive, all of it"

_TASKS = 200
_BATCHES = 40
_PAUSE_S = 0.37  # between two records of the latency case: longer than a batch, and no whole part of a second
_IDLE_S = 10.0
_ONE_TASK = str(1 << 50)

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class SparkRun:
    """One system's part of a case. `work` may return figures of its own; `before` is not timed."""

    label: str
    messages: int
    work: Callable[[], Figures | None]
    before: Callable[[], object] = nothing


@dataclass(frozen=True, slots=True)
class SparkCase:
    """Runs that take turns. Each of them runs once before, because the JVM compiles what runs often."""

    title: str
    runs: tuple[SparkRun, ...]
    repeats: int
    shows_memory: bool = False


def spark_cases(spark: SparkSession, inputs: Inputs, repeats: int, *, full: bool) -> dict[str, Callable[[], SparkCase]]:
    """What makes each case, by name, in the order of running. A case makes its files when it is made."""
    return {
        SCAN: partial(_scan, spark, inputs, repeats),
        COUNT: partial(_count, spark, inputs, repeats),
        PLAN: partial(_plan, spark, inputs, repeats),
        TASKS: partial(_tasks, spark, inputs, repeats),
        BY_KEY: partial(_by_key, spark, inputs, repeats),
        STREAM: partial(_stream, spark, inputs),
        LATENCY: partial(_latency, spark, inputs),
        SINK: partial(_sink, spark, inputs, repeats),
        PAST: partial(_past, spark, inputs, repeats),
        PAST_COUNT: partial(_past_count, spark, inputs, repeats),
        PAST_FIRST: partial(_past_first, spark, inputs, repeats),
        PAST_NARROW: partial(_past_narrow, spark, inputs, repeats),
        MEMORY: partial(_memory, spark, inputs, (1, 4, 10) if full else (1, 4)),
    }


def _load(spark: SparkSession, path: str, *, source: str = "loglib", **options: object) -> DataFrame:
    return spark.read.format(source).options(**{name: str(value) for name, value in options.items()}).load(path)


# --- reading -------------------------------------------------------------------------------------------------


def _scan(spark: SparkSession, inputs: Inputs, repeats: int) -> SparkCase:
    messages, few = inputs.messages, inputs.few_messages

    def summed(label: str, frame: DataFrame, count: int = messages) -> SparkRun:
        return SparkRun(label, count, partial(_check_answer, frame, f.sum(f.length("value")), count * VALUE_BYTES))

    parts = loglib.spark.map_batches(spark, inputs.topic, lengths, "total long", columns=["value"])
    runs = (
        summed(OURS, _load(spark, inputs.topic)),
        summed(ONE_COLUMN, _load(spark, inputs.topic, columns="value")),
        SparkRun(MAP_BATCHES, messages, partial(_check_answer, parts, f.sum("total"), messages * VALUE_BYTES)),
        summed(SNAPPY, spark.read.parquet(inputs.snappy)),
        summed(UNCOMPRESSED, spark.read.parquet(inputs.uncompressed)),
        summed(TUPLES, _load(spark, inputs.few, source="bench_tuples"), few),
        summed(FLOOR, _load(spark, inputs.topic, source="bench_floor", records=messages)),
        summed(FLOOR_ONE, _load(spark, inputs.topic, source="bench_floor", records=messages, columns="value")),
    )
    return SparkCase(f"{messages / 1e6:g} M values of {VALUE_BYTES} B: sum(length(value))", runs, repeats)


def _count(spark: SparkSession, inputs: Inputs, repeats: int) -> SparkCase:
    messages = inputs.messages

    def counted(label: str, frame: DataFrame) -> SparkRun:
        return SparkRun(label, messages, partial(_check_answer, frame, f.count("*"), messages))

    runs = (
        counted(OURS, _load(spark, inputs.topic)),
        counted(OFFSET, _load(spark, inputs.topic, columns="offset")),
        SparkRun(COUNTS, messages, lambda: _check(sum(loglib.spark.counts(inputs.topic).values()), messages)),
        counted(UNCOMPRESSED, spark.read.parquet(inputs.uncompressed)),
        counted(FLOOR, _load(spark, inputs.topic, source="bench_floor", records=messages)),
        counted(FLOOR_OFFSET, _load(spark, inputs.topic, source="bench_floor", records=messages, columns="offset")),
    )
    return SparkCase(f"{messages / 1e6:g} M values of {VALUE_BYTES} B: count()", runs, repeats)


def _by_key(spark: SparkSession, inputs: Inputs, repeats: int) -> SparkCase:
    """The records for each key, as text: a column that Spark must decode and shuffle."""
    messages, keyed = inputs.messages, inputs.keyed

    def grouped(label: str, frame: DataFrame) -> SparkRun:
        counts = frame.groupBy(f.col("key").cast("string").alias("key")).count()
        return SparkRun(label, messages, partial(_check_answer, counts, f.sum("count"), messages))

    runs = (
        grouped(OURS, _load(spark, keyed.topic)),
        grouped(f"{OURS}, columns=key", _load(spark, keyed.topic, columns="key")),
        grouped(SNAPPY, spark.read.parquet(keyed.snappy)),
        grouped(FLOOR, _load(spark, keyed.topic, source="bench_floor", records=messages, columns="key")),
    )
    return SparkCase(f"{messages / 1e6:g} M records of {KEYS:,} keys: groupBy(key).count()", runs, repeats)


def _plan(spark: SparkSession, inputs: Inputs, repeats: int) -> SparkCase:
    """`isEmpty` reads the beginning of each task, and Spark ends the worker of each.

    The floor's tasks read one batch of the log, since each has a new worker, and give it away again and again.
    """
    ours, parquet, messages = inputs.topic, inputs.uncompressed, inputs.messages

    def floor() -> DataFrame:
        return _load(spark, ours, source="bench_floor", records=messages)

    runs = (
        SparkRun(OURS, 0, lambda: _check(_load(spark, ours).isEmpty(), False)),
        SparkRun(FLOOR, 0, lambda: _check(floor().isEmpty(), False)),
        SparkRun(UNCOMPRESSED, 0, lambda: _check(spark.read.parquet(parquet).isEmpty(), False)),
    )
    return SparkCase("load(path).isEmpty(): the schema, the plan, the beginning of each task", runs, 3 * repeats)


def _tasks(spark: SparkSession, inputs: Inputs, repeats: int) -> SparkCase:
    """The time of a slot is wall time by slots and tasks: what starting and ending a job takes is in it."""
    path = write_topic(inputs.directory / "topics" / "tiny", _TASKS * 1_000, partitions=1)
    messages = _TASKS * 1_000
    ours = _load(spark, path, minPartitions=_TASKS, columns="offset")
    floor = _load(spark, path, source="bench_floor", records=messages, task=1_000, columns="offset")
    numbers = spark.range(0, messages, 1, _TASKS)
    slots = spark.sparkContext.defaultParallelism

    def run(label: str, frame: DataFrame) -> SparkRun:
        tasks = frame.rdd.getNumPartitions()

        def work() -> Figures:
            start = time.perf_counter()
            _check_answer(frame, f.count("*"), messages)
            return {"tasks": tasks, "slot ms a task": (time.perf_counter() - start) * 1000 * slots / tasks}

        return SparkRun(label, messages, work)

    runs = (run(OURS, ours), run(FLOOR, floor), run(OF_JVM, numbers))
    return SparkCase(f"{_TASKS} tasks of some 1,000 records: count()", runs, 2 * repeats)


# --- streams -------------------------------------------------------------------------------------------------


def _stream(spark: SparkSession, inputs: Inputs) -> SparkCase:
    runs = (
        SparkRun(OURS, 0, partial(_ours_streams, spark, inputs)),
        SparkRun(FLOOR_STREAM, 0, partial(_floor_streams, spark)),
        SparkRun(f"{OURS}, its own part", 0, partial(_own_part, inputs)),
    )
    return SparkCase(f"micro-batches of 10 records, the medians of {_BATCHES}", runs, 1)


def _ours_streams(spark: SparkSession, inputs: Inputs) -> Figures:
    path = _fresh(inputs, "streamed")
    with Topic.open(path, create=True) as topic:
        stream = spark.readStream.format("loglib").option("startingOffsets", "earliest").load(path)
        query = stream.writeStream.format("noop").start()
        for _ in range(_BATCHES):
            topic.append_many([b"x" * VALUE_BYTES] * 10)
            topic.flush()
            query.processAllAvailable()
        query.stop()
        return _durations(query.recentProgress)


def _floor_streams(spark: SparkSession) -> Figures:
    query = spark.readStream.format("bench_stream").load().writeStream.format("noop").start()
    while len(query.recentProgress) < _BATCHES:
        time.sleep(0.05)
    query.stop()
    return _durations(query.recentProgress)


def _durations(progress: Iterable[object]) -> Figures:
    """Medians of what Spark says of its batches, without the first ones, when workers start."""
    found = [each.durationMs for each in progress if each.numInputRows][5:]  # type: ignore[attr-defined]
    names = {"triggerExecution": "trigger ms", "latestOffset": "latestOffset ms", "addBatch": "addBatch ms"}
    return {title: statistics.median(each[name] for each in found) for name, title in names.items()}


def _own_part(inputs: Inputs) -> Figures:
    """What the reader itself does for a batch, without Spark: finding its end, planning, and reading."""
    path = _fresh(inputs, "own")
    given = {"path": path, "startingOffsets": "earliest"}
    wall = []
    with Topic.open(path, create=True) as topic:
        reader = StreamReader(given, schema_of(given))
        start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        for _ in range(_BATCHES):
            topic.append_many([b"x" * VALUE_BYTES] * 10)
            topic.flush()
            begin = time.perf_counter()
            end = reader.latestOffset(start, ReadAllAvailable())
            batches = [batch for task in reader.partitions(start, end) for batch in reader.read(task)]
            wall.append((time.perf_counter() - begin) * 1000)
            _check(sum(batch.num_rows for batch in batches), 10)
            start = end
        reader.stop()
    return {"ours ms": percentile(sorted(wall), 50), "ours p99 ms": percentile(sorted(wall), 99)}


def _latency(spark: SparkSession, inputs: Inputs) -> SparkCase:
    """From an append, flushed, to the record in the function of `foreachBatch`; and the CPU of a query without records.

    The rate source gives its row of a second when that second is over, so its clock begins there.
    """
    runs = (
        SparkRun(OURS, 0, partial(_ours_arrives, spark, inputs)),
        SparkRun(FLOOR_LINES, 0, partial(_lines_arrive, spark, inputs)),
        SparkRun(RATE, 0, partial(_rate_arrives, spark)),
    )
    return SparkCase(f"a stream that waits: {_BATCHES} single records, each handed to foreachBatch", runs, 1)


def _ours_arrives(spark: SparkSession, inputs: Inputs) -> Figures:
    path = _fresh(inputs, "arriving")
    with Topic.open(path, create=True) as topic:

        def append(value: bytes) -> None:
            topic.append(value)
            topic.flush()

        return _arrive(spark.readStream.format("loglib").load(path), append)


def _lines_arrive(spark: SparkSession, inputs: Inputs) -> Figures:
    path = inputs.directory / "lines"
    with open(path, "wb", buffering=0) as file:
        return _arrive(
            spark.readStream.format("bench_lines").load(str(path)), lambda value: file.write(value + b"\n")
        )


def _arrive(stream: DataFrame, append: Callable[[bytes], object]) -> Figures:
    late: list[float] = []

    def note(rows: DataFrame, number: int) -> None:
        late.extend(time.time() - float(row.value) for row in rows.select("value").collect())

    query = stream.writeStream.foreachBatch(note).start()
    while query.status["message"] != "Waiting for data to arrive":
        time.sleep(0.05)
    for _ in range(_BATCHES):
        append(repr(time.time()).encode())
        time.sleep(_PAUSE_S)
    query.processAllAvailable()
    return _arrivals(late, query)


def _rate_arrives(spark: SparkSession) -> Figures:
    late: list[float] = []

    def note(rows: DataFrame, number: int) -> None:
        late.extend(time.time() - row.timestamp.timestamp() - 1 for row in rows.collect())

    query = spark.readStream.format("rate").option("rowsPerSecond", 1).load().writeStream.foreachBatch(note).start()
    while len(late) < _BATCHES:
        time.sleep(0.05)
    return _arrivals(late, query)


def _arrivals(late: list[float], query: StreamingQuery) -> Figures:
    """The times without the first ones, when workers start; and the CPU of JVM and driver while nothing is appended."""
    began = usage().jvm_seconds + time.process_time()
    time.sleep(_IDLE_S)
    used = usage().jvm_seconds + time.process_time() - began
    query.stop()
    found = sorted(late[5:])
    return {
        "p50 ms": percentile(found, 50) * 1000,
        "p90 ms": percentile(found, 90) * 1000,
        "idle CPU %": used / _IDLE_S * 100,
    }


def _fresh(inputs: Inputs, name: str) -> str:
    """The path of a new topic."""
    path = inputs.directory / "topics" / name
    shutil.rmtree(path, ignore_errors=True)
    Topic.open(path, create=True).close()
    return str(path)


# --- writing -------------------------------------------------------------------------------------------------


def _sink(spark: SparkSession, inputs: Inputs, repeats: int) -> SparkCase:
    messages = inputs.messages
    rows = spark.read.parquet(inputs.uncompressed).selectExpr("CAST(offset AS string) key", "value")
    topics, files = inputs.directory / "topics" / "written", str(inputs.directory / "written")

    def clear() -> None:
        shutil.rmtree(topics, ignore_errors=True)
        shutil.rmtree(files, ignore_errors=True)
        Topic.open(topics / "rows", create=True, partitions=4).close()

    def written(label: str, target: str, path: str, **options: str) -> SparkRun:
        writer = rows.write.format(target).mode("append").options(**options)
        return SparkRun(label, messages, lambda: writer.save(path), clear)

    noop = rows.write.format("noop").mode("overwrite")
    runs = (
        written(OURS, "loglib", str(topics / "rows")),
        written(SNAPPY, "parquet", files, compression="snappy"),
        written(UNCOMPRESSED, "parquet", files, compression="none"),
        written(DROPPED, "bench_drop", files),
        SparkRun(READ, messages, noop.save, clear),
    )
    title = f"write {messages / 1e6:g} M rows of a key and {VALUE_BYTES} B, read from Parquet, uncompressed"
    return SparkCase(title, runs, repeats)


# --- an archive and the live log ------------------------------------------------------------------------------


def _past(spark: SparkSession, inputs: Inputs, repeats: int) -> SparkCase:
    messages, past, fresh = inputs.messages, inputs.past, inputs.directory / "archived-again"

    def summed(label: str, frame: DataFrame) -> SparkRun:
        work = partial(_check_answer, frame, f.sum(f.length("value")), messages * VALUE_BYTES)
        return SparkRun(label, messages, work)

    def archive() -> None:
        _check(loglib.offload.archive(past.topic, fresh).rows, messages)

    runs = (
        summed(OURS, loglib.spark.read(spark, past.topic, archive=past.archive)),
        summed(LOG_ALONE, _load(spark, past.topic)),
        summed(EVERYTHING, spark.read.parquet(f"{past.everything}/[0-9]*")),
        SparkRun(ARCHIVING, messages, archive, partial(shutil.rmtree, fresh, ignore_errors=True)),
    )
    title = f"95 % archived, {messages / 1e6:g} M values of {VALUE_BYTES} B: sum(length(value))"
    return SparkCase(title, runs, repeats)


def _past_count(spark: SparkSession, inputs: Inputs, repeats: int) -> SparkCase:
    messages, past = inputs.messages, inputs.past
    ours = loglib.spark.read(spark, past.topic, archive=past.archive)
    plain = spark.read.parquet(f"{past.everything}/[0-9]*")
    runs = tuple(
        SparkRun(label, messages, partial(_check_answer, frame, f.count("*"), messages))
        for label, frame in ((OURS, ours), (EVERYTHING, plain))
    )
    return SparkCase("95 % archived: count()", runs, repeats)


def _past_first(spark: SparkSession, inputs: Inputs, repeats: int) -> SparkCase:
    past = inputs.past
    ours = loglib.spark.read(spark, past.topic, archive=past.archive)
    plain = spark.read.parquet(f"{past.everything}/[0-9]*")

    def first(frame: DataFrame) -> None:
        _check(frame.select("value").first() is None, False)

    runs = tuple(SparkRun(label, 0, partial(first, frame)) for label, frame in ((OURS, ours), (EVERYTHING, plain)))
    return SparkCase("95 % archived: first()", runs, repeats)


def _past_narrow(spark: SparkSession, inputs: Inputs, repeats: int) -> SparkCase:
    """Some ten thousand messages by time, each time planned anew."""
    past = inputs.past
    start, end = past.narrow

    def found() -> int:
        return loglib.spark.read(spark, past.topic, start=start, end=end, archive=past.archive).count()

    def filtered() -> int:
        plain = spark.read.parquet(f"{past.everything}/[0-9]*")
        return plain.where((f.col("timestamp") >= f.lit(start)) & (f.col("timestamp") < f.lit(end))).count()

    expected = found()
    runs = tuple(
        SparkRun(label, 0, lambda work=work: _check(work(), expected))  # type: ignore[misc]
        for label, work in ((OURS, found), (EVERYTHING, filtered))
    )
    title = f"95 % archived: the {expected:,} messages of {(end - start).microseconds // 1000} ms"
    return SparkCase(title, runs, repeats)


# --- memory --------------------------------------------------------------------------------------------------


def _memory(spark: SparkSession, inputs: Inputs, times: tuple[int, ...]) -> SparkCase:
    """Half of the values of the other cases, and multiples of that."""
    runs = []
    for factor in times:
        messages = whole_calls(factor * inputs.wanted // 2)
        path = inputs.directory / "topics" / f"times-{factor}"
        label = f"{messages * VALUE_BYTES / 1e9:g} GB"
        work = partial(_sum_in_one_task, spark, str(path), messages)
        runs.append(SparkRun(label, messages, work, partial(_write_once, path, messages)))
    return SparkCase("one task reads all columns of a topic: memory of its worker", tuple(runs), 1, shows_memory=True)


def _write_once(path: Path, messages: int) -> None:
    if not path.exists():
        write_topic(path, messages, partitions=1)


def _sum_in_one_task(spark: SparkSession, path: str, messages: int) -> None:
    frame = _load(spark, path, maxBytesPerPartition=_ONE_TASK, minPartitions=1)
    _check_answer(frame, f.sum(f.length("value")), messages * VALUE_BYTES)


def _check_answer(frame: DataFrame, aggregate: Column, expected: int) -> None:
    _check(frame.agg(aggregate).collect()[0][0], expected)


def _check(found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"the answer is {found}, not {expected}")
