"""Streaming queries in a real Spark: what the batches read, restarts, and logs that change below a query."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from spark_logs import Row, all_rows, in_order, random_topic
from spark_session import local_session

from conftest import NOW, QUIET, alter
from loglib import Retention, Topic, testing

pytestmark = pytest.mark.spark

COLUMNS = ("topic", "partition", "offset", "value")


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with local_session(tmp_path_factory.mktemp("warehouse")) as session:
        yield session


@pytest.fixture(autouse=True)
def stop_queries(spark: SparkSession) -> Iterator[None]:
    yield
    for query in spark.streams.active:
        query.stop()


class Stream:
    """A query with a checkpoint, and what its sink got: the rows by number of the batch."""

    def __init__(self, spark: SparkSession, path: Path, **options: object) -> None:
        self.spark = spark
        self.path = path
        self.options = {"columns": ",".join(COLUMNS)} | {name: str(each) for name, each in options.items()}
        self.checkpoint = path.parent / "checkpoint"
        self.batches: dict[int, list[Row]] = {}

    def frame(self) -> DataFrame:
        return self.spark.readStream.format("loglib").options(**self.options).load(str(self.path))

    def start(self, **options: object) -> StreamingQuery:
        """Start the query, or start it again, with triggers as fast as possible."""
        self.options |= {name: str(each) for name, each in options.items()}
        return self._start(self.frame(), processingTime="0 seconds")

    def run(self, **options: object) -> StreamingQuery:
        """Run the query up to the present end."""
        self.options |= {name: str(each) for name, each in options.items()}
        query = self._start(self.frame(), availableNow=True)
        query.awaitTermination()
        return query

    def _start(self, frame: DataFrame, **trigger: Any) -> StreamingQuery:
        writer = frame.writeStream.foreachBatch(self._take).option("checkpointLocation", str(self.checkpoint))
        return writer.trigger(**trigger).start()

    def _take(self, frame: DataFrame, number: int) -> None:
        self.batches[number] = [plain(row.asDict()) for row in frame.collect()]

    @property
    def rows(self) -> list[Row]:
        return in_order(row for number in sorted(self.batches) for row in self.batches[number])

    @property
    def sizes(self) -> list[int]:
        return [len(self.batches[number]) for number in sorted(self.batches)]

    def forget(self, kind: str, number: int) -> None:
        """Remove an entry of Spark's offset log or commit log."""
        (self.checkpoint / kind / str(number)).unlink()
        (self.checkpoint / kind / f".{number}.crc").unlink(missing_ok=True)


def plain(row: Row) -> Row:
    return {name: bytes(value) if isinstance(value, bytearray) else value for name, value in row.items()}


def core_rows(path: Path) -> list[Row]:
    return in_order({name: row[name] for name in COLUMNS} for row in all_rows(path))


def append(path: Path, values: list[bytes], **arguments: Any) -> None:
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        topic.append_many(values, **arguments)


def wait_for(condition: Callable[[], object], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.05)


def sources(query: StreamingQuery) -> list[dict[str, Any]]:
    """The source's part of the progress of each batch."""
    found: list[dict[str, Any]] = []
    for progress in query.recentProgress:
        (source,) = json.loads(progress.json)["sources"]
        found.append(source)
    return found


def failure(query: StreamingQuery) -> str:
    with pytest.raises(StreamingQueryException) as raised:
        query.processAllAvailable()
        query.awaitTermination(30)
    return str(raised.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A topic of three partitions with ten batches of ten records."""
    with testing.open_topic(tmp_path / "topic", partitions=3, clock=lambda: NOW, **QUIET) as topic:
        for each in range(10):
            topic.append_many([b"%d" % number for number in range(each * 10, each * 10 + 10)], partition=each % 3)
            topic.flush()
    return tmp_path / "topic"


# --- which records -----------------------------------------------------------------------------------


def test_each_trigger_has_exactly_n_records_while_there_are_as_many(spark: SparkSession, path: Path) -> None:
    stream = Stream(spark, path, startingOffsets="earliest", maxOffsetsPerTrigger=33)
    query = stream.run()
    assert stream.sizes == [33, 33, 33, 1]
    assert stream.rows == core_rows(path)
    assert [source["numInputRows"] for source in sources(query)] == [33, 33, 33, 1]
    lags = [source["latestOffset"]["lag"]["bytes"] for source in sources(query)]
    assert lags == sorted(lags, reverse=True)
    assert lags[2] > lags[3] == 0


def test_condition_on_a_stream_chooses_what_sparks_own_filter_chooses(spark: SparkSession, path: Path) -> None:
    keys = [b"k%d" % (number % 4) for number in range(20)]
    append(path, [b"%s %d" % each for each in zip(keys, range(20), strict=True)], keys=keys)
    stream = Stream(spark, path, startingOffsets="earliest", where="key IN ('k1', 'k3')")
    stream.run()
    append(path, [b"k0 20", b"k3 21"], keys=[b"k0", b"k3"])
    stream.run()
    assert stream.sizes == [10, 1]
    assert stream.rows == [row for row in core_rows(path) if row["value"][:2] in (b"k1", b"k3")]


@pytest.mark.slow
def test_limits_of_every_kind_pass_through_spark(spark: SparkSession, path: Path) -> None:
    stream = Stream(spark, path, startingOffsets="earliest", maxBytesPerTrigger=1)
    stream.run()
    assert stream.sizes == [10] * 10
    shutil.rmtree(stream.checkpoint)
    waiting = Stream(spark, path, startingOffsets="latest", minOffsetsPerTrigger=10, maxTriggerDelay="1h")
    query = waiting.start()
    wait_for(lambda: waiting.sizes == [0])
    append(path, [b"a"] * 9, partition=1)
    time.sleep(1)
    append(path, [b"b"], partition=2)
    query.processAllAvailable()
    assert waiting.sizes == [0, 10]


@pytest.mark.slow
def test_idle_query_runs_no_batch(spark: SparkSession, path: Path) -> None:
    stream = Stream(spark, path)
    query = stream.start()
    wait_for(lambda: stream.sizes == [0])
    time.sleep(10)
    assert stream.sizes == [0]
    assert [each.name for each in (stream.checkpoint / "offsets").iterdir() if each.name[0] != "."] == ["0"]
    append(path, [b"new"], partition=1)
    query.processAllAvailable()
    assert stream.sizes == [0, 1]
    time.sleep(1)
    assert stream.sizes == [0, 1]


def test_available_now_ends_at_the_present_end_and_goes_on_there_next_time(spark: SparkSession, path: Path) -> None:
    stream = Stream(spark, path, startingOffsets="earliest")
    stream.run()
    append(path, [b"new"] * 7, partition=0)
    stream.run()
    assert stream.sizes == [100, 7]
    stream.run()
    assert stream.sizes == [100, 7]
    assert stream.rows == core_rows(path)


@pytest.mark.slow
def test_partitions_added_under_a_query_are_read_from_their_beginning(spark: SparkSession, path: Path) -> None:
    stream = Stream(spark, path, startingOffsets="latest")
    query = stream.start()
    wait_for(lambda: stream.sizes == [0])
    Topic.add_partitions(path, 5)
    append(path, [b"a"] * 3, partition=4)
    append(path, [b"b"] * 2, partition=0)
    wait_for(lambda: sum(stream.sizes) == 5)
    query.stop()
    assert sorted((row["partition"], row["value"]) for row in stream.rows) == [(0, b"b")] * 2 + [(4, b"a")] * 3


@pytest.mark.slow
def test_windows_over_a_stream_are_those_of_a_batch(spark: SparkSession, tmp_path: Path) -> None:
    path = random_topic(tmp_path / "topic", seed=3, partitions=3)
    stream = spark.readStream.format("loglib").option("startingOffsets", "earliest")
    stream = stream.option("maxOffsetsPerTrigger", 50)

    def counted(frame: DataFrame) -> DataFrame:
        return frame.groupBy("partition", f.window("timestamp", "1 second").alias("at")).count()

    written = counted(stream.load(str(path))).writeStream.format("memory").queryName("windows").outputMode("complete")
    written.trigger(availableNow=True).start().awaitTermination()
    expected = counted(spark.read.format("loglib").load(str(path))).collect()
    assert sorted(spark.table("windows").collect()) == sorted(expected)


@pytest.mark.slow
def test_query_over_two_streams_of_which_one_is_idle(spark: SparkSession, path: Path, tmp_path: Path) -> None:
    other = random_topic(tmp_path / "other", seed=1, partitions=1, batches=5)
    stream = Stream(spark, path, startingOffsets="earliest")
    second = Stream(spark, other, startingOffsets="earliest")
    query = stream._start(stream.frame().unionAll(second.frame()), processingTime="0 seconds")
    query.processAllAvailable()
    append(path, [b"new"] * 4, partition=2)
    query.processAllAvailable()
    query.stop()
    append(other, [b"newer"] * 3, partition=0)
    query = stream._start(stream.frame().unionAll(second.frame()), processingTime="0 seconds")
    query.processAllAvailable()
    assert stream.sizes[1:] == [4, 3]
    assert stream.rows == in_order([*core_rows(path), *core_rows(other)])


# --- restarts ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_query_goes_on_after_a_restart(spark: SparkSession, path: Path) -> None:
    stream = Stream(spark, path, startingOffsets="earliest", maxOffsetsPerTrigger=40)
    query = stream.start()
    query.processAllAvailable()
    query.stop()
    append(path, [b"meanwhile"] * 30, partition=1)
    query = stream.start(startingOffsets="latest", maxOffsetsPerTrigger=20)
    query.processAllAvailable()
    query.stop()
    assert stream.sizes == [40, 40, 20, 20, 10]
    assert stream.rows == core_rows(path)


@pytest.mark.slow
def test_last_batch_that_is_repeated_has_the_same_records(spark: SparkSession, path: Path) -> None:
    stream = Stream(spark, path, startingOffsets="earliest", maxOffsetsPerTrigger=60)
    stream.run()
    before = dict(stream.batches)
    append(path, [b"later"] * 5, partition=0)
    stream.forget("commits", 1)
    stream.run(maxOffsetsPerTrigger=1000)
    assert stream.batches.pop(2) == [row for row in core_rows(path) if row["value"] == b"later"]
    assert stream.batches == before


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_first_batch_that_is_repeated_has_the_same_records(spark: SparkSession, path: Path, start: str) -> None:
    """Spark plans it again from a new initial offset; from a new "latest" its records would be lost."""
    stream = Stream(spark, path, startingOffsets=start)
    query = stream.start()
    wait_for(lambda: len(stream.sizes) == 1)
    append(path, [b"new"] * 5, partition=1)
    query.processAllAvailable()
    query.stop()
    if start == "latest":  # as if the records had come before the first batch was planned
        shutil.copy(stream.checkpoint / "offsets" / "1", stream.checkpoint / "offsets" / "0")
        stream.batches[0] = stream.batches[1]
        (stream.checkpoint / "offsets" / ".0.crc").unlink()
    for kind, number in (("offsets", 1), ("commits", 1), ("commits", 0)):
        stream.forget(kind, number)
    expected = stream.batches.pop(0)
    assert expected
    append(path, [b"later"] * 3, partition=2)
    stream.batches.clear()
    stream.run()
    assert stream.batches[0] == expected
    assert [row["value"] for row in stream.batches[1]][-3:] == [b"later"] * 3


# --- losses ------------------------------------------------------------------------------------------


def drop_all_but(path: Path, size_bytes: int) -> None:
    alter(path, retention=Retention(age=None, bytes=size_bytes))
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        topic.retain()


@pytest.mark.slow
def test_retention_under_a_running_query_stops_it_or_is_passed_over(spark: SparkSession, tmp_path: Path) -> None:
    path = random_topic(tmp_path / "topic", seed=7, partitions=1, retention=Retention(age=None))
    stream = Stream(spark, path, startingOffsets="earliest", maxOffsetsPerTrigger=20)
    take = stream._take

    def take_and_drop(frame: DataFrame, number: int) -> None:
        take(frame, number)
        if number == 0:
            drop_all_but(path, 5000)

    stream._take = take_and_drop  # type: ignore[method-assign]
    message = failure(stream.start())
    start = core_rows(path)[0]["offset"]
    assert f"{path}, partition 0: retention has dropped [" in message
    assert f", {start})" in message
    assert "failOnDataLoss=false" in message
    query = stream.start(failOnDataLoss=False)
    query.processAllAvailable()
    assert query.isActive
    assert stream.rows[20:] == core_rows(path)


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_topic_deleted_or_made_again_under_a_query(spark: SparkSession, path: Path, again: bool) -> None:
    stream = Stream(spark, path, startingOffsets="earliest")
    query = stream.start()
    query.processAllAvailable()
    shutil.rmtree(path)
    if again:
        random_topic(path, seed=4)
    with pytest.raises(StreamingQueryException) as raised:
        query.awaitTermination(30)
    assert ("the topic was made again" if again else "topic topic is gone") in str(raised.value)
    if again:
        assert "the topic was made again" in failure(stream.start())
        query = stream.start(failOnDataLoss=False)
        query.processAllAvailable()
        assert in_order(stream.batches[1]) == core_rows(path)


# --- what is known of a query, and what is refused -----------------------------------------------------


@pytest.mark.slow
def test_progress_is_seen_as_a_group_with_lag(spark: SparkSession, path: Path) -> None:
    stream = Stream(spark, path, startingOffsets="earliest", groupId="dashboards", maxOffsetsPerTrigger=30)
    stream.run()
    append(path, [b"new"] * 3, partition=1)
    with Topic.open(path, mode="r") as topic:
        assert topic.groups() == ["dashboards"]
        lag = topic.group_info("dashboards", count_records=True).lag
    assert {number: each.records for number, each in lag.items()} == {0: 0, 1: 3, 2: 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endingOffsets": "latest"}, "option endingOffsets is for batch reads, and a stream has no end"),
        ({"maxOffsetsPerTriger": "7"}, "did you mean maxOffsetsPerTrigger?"),
        ({"maxBytesPerTrigger": "much"}, "option maxBytesPerTrigger must be a size like 64m, in bytes 1 or more, not"),
        ({"start": "7"}, "offset 7 means another record in each of 3 partitions"),
    ],
)
@pytest.mark.slow
def test_wrong_options_of_a_stream_say_what_is_wrong(
    spark: SparkSession, path: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(PySparkException) as raised:
        Stream(spark, path, **options).run()
    assert message in str(raised.value)
    assert "UnboundLocalError" not in str(raised.value)
    assert "During handling" not in str(raised.value)
