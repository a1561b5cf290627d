"""The sink in a real Spark: what is written, once, also if workers, commits and queries die on the way."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext, cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource
from spark_logs import all_records
from spark_session import local_session

import loglib
from conftest import NOW, QUIET, ROOT, SOURCE
from loglib import Record, Topic, testing
from loglib.append.partitioner import by_crc32
from pyspark_loglib import DefaultSource

pytestmark = pytest.mark.spark

HERE = [str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT / "tests" / "support")]  # what this module imports

# Spark's Python processes cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with local_session(tmp_path_factory.mktemp("warehouse"), master="local[2,3]") as session:
        yield session


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """An empty topic of three partitions."""
    return make(tmp_path / "logs" / "target")


def make(path: Path, *, partitions: int = 3, **policies: Any) -> Path:
    testing.open_topic(path, partitions=partitions, clock=lambda: NOW, **QUIET | policies).close()
    return path


def log_id_of(path: Path) -> str:
    with Topic.open(path, mode="r") as topic:
        return topic.log_id.hex()


def save(frame: DataFrame, path: Path, **options: object) -> None:
    writer = frame.write.format("loglib").options(**{name: str(each) for name, each in options.items()})
    writer.mode("append").save(str(path))


def values(path: Path) -> list[bytes | None]:
    return [record.value for record in all_records(path)]


def numbers(spark: SparkSession, count: int, parts: int = 4) -> DataFrame:
    """Values "0", "1", ... with keys."""
    return spark.range(0, count, 1, parts).selectExpr("CAST(id AS string) value", "CAST(id % 7 AS string) key")


def assert_once(path: Path, count: int) -> None:
    assert Counter(values(path)) == Counter(b"%d" % each for each in range(count))
    with Topic.open(path, mode="r") as topic:
        assert topic.verify().damage == ()
    assert not list((path / "staging").glob("*"))


# --- batch -------------------------------------------------------------------------------------------


def test_every_row_is_written_once_to_the_partition_of_its_key(spark: SparkSession, target: Path) -> None:
    save(numbers(spark, 1000), target)
    assert_once(target, 1000)
    for record in all_records(target):
        assert record.key is not None
        assert record.partition == by_crc32(record.key, 3)
    for partition in range(3):  # the order of the tasks, and of the rows in each
        found = [int(each.value or b"") for each in all_records(target) if each.partition == partition]
        assert found == sorted(found)


def test_second_write_is_another_one(spark: SparkSession, target: Path) -> None:
    for _ in range(2):
        save(numbers(spark, 10), target)
    assert Counter(values(target)) == Counter([b"%d" % each for each in range(10)] * 2)


def test_topic_is_made_by_the_sink_when_asked(spark: SparkSession, tmp_path: Path) -> None:
    """By the driver, or by the tasks that have the rows for it, all of which need it together."""
    made = tmp_path / "logs" / "made"
    save(numbers(spark, 100), made, createTopic="true", partitions="3")
    assert_once(made, 100)
    with Topic.open(made, mode="r") as topic:
        assert len(topic.partitions) == 3
    frame = numbers(spark, 100).withColumn("topic", f.expr("IF(CAST(value AS int) % 2 = 0, 'even', 'odd')"))
    save(frame, tmp_path / "many", createTopic="true")
    assert Counter(values(tmp_path / "many" / "even")) == Counter(b"%d" % each for each in range(0, 100, 2))
    assert Counter(values(tmp_path / "many" / "odd")) == Counter(b"%d" % each for each in range(1, 100, 2))


@pytest.mark.slow
def test_write_that_is_large_goes_through_files(
    spark: SparkSession, tmp_path: Path
) -> None:
    target = make(tmp_path / "logs" / "target", batch_bytes=1 << 16, compression="zlib")
    frame = spark.range(0, 40_000, 1, 3).selectExpr("CAST(id AS string) key", "repeat(id, 50) value")
    save(frame, target)
    assert Counter(values(target)) == Counter(b"%d" % each * 50 for each in range(40_000))
    assert not list((target / "staging").glob("*"))


def test_all_columns_arrive(spark: SparkSession, target: Path) -> None:
    source = make(target.parent / "source", partitions=2)
    with testing.open_topic(source, clock=lambda: NOW) as topic:
        topic.append_many(
            [b"a", None, b"", b"d"], keys=[b"k", None, b"", b"k"], timestamps=[1, 2, 3, NOW],
            headers=[(), [("h", b"1"), ("h", b"")], (), [("é", b"x")]], partition=1,
        )  # fmt: skip
    frame = spark.read.format("loglib").option("includeHeaders", "true").load(str(source))
    save(frame, target)  # with the columns that a source gives

    def content(record: Record) -> tuple[Any, ...]:
        return record.partition, record.key, record.value, record.timestamp, record.headers

    assert list(map(content, all_records(target))) == list(map(content, all_records(source)))


@pytest.mark.slow
def test_column_and_option_say_which_topic(spark: SparkSession, target: Path) -> None:
    other = make(target.parent / "other", partitions=1)
    frame = numbers(spark, 10).withColumn("topic", f.expr("IF(CAST(value AS int) < 4, 'other', 'target')"))
    save(frame, target.parent)
    assert (len(values(other)), len(values(target))) == (4, 6)
    save(frame, target.parent, topic="other")
    assert (len(values(other)), len(values(target))) == (14, 6)
    with pytest.raises(PySparkException, match="no topic here"):
        save(frame.withColumn("topic", f.lit("missing")), target.parent)
    with pytest.raises(PySparkException, match="a row whose topic is null"):
        save(frame.withColumn("topic", f.expr("CAST(NULL AS string)")), target.parent)
    assert (len(values(other)), len(values(target))) == (14, 6)


def test_column_says_which_partition(spark: SparkSession, target: Path) -> None:
    frame = numbers(spark, 30).withColumn("partition", f.expr("IF(CAST(value AS int) < 20, 2, CAST(NULL AS int))"))
    save(frame, target)
    for record in all_records(target):
        assert record.key is not None
        assert record.partition == (2 if int(record.value or b"") < 20 else by_crc32(record.key, 3))
    with pytest.raises(PySparkException, match="a record for partition 3, and .* has 3 partitions"):
        save(frame.withColumn("partition", f.lit(3)), target)
    assert len(values(target)) == 30


@pytest.mark.slow
def test_rows_without_a_key_stay_together(spark: SparkSession, target: Path) -> None:
    save(numbers(spark, 30, 1).select("value"), target)
    (partition,) = {record.partition for record in all_records(target)}
    assert values(target) == [b"%d" % each for each in range(30)]
    assert 0 <= partition < 3


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (["key"], {}, "there is no column value"),
        (["value", "key AS kay"], {}, "column kay cannot be written; did you mean key"),
        (["1 AS value"], {}, "column value must be binary or string, not int"),
        (["value", "array(1) AS headers"], {}, "column headers must be array<struct"),
        (["value"], {"txnAppId": "etl"}, "both of the options txnAppId and txnVersion"),
        (["value"], {"txnAppId": "etl", "txnVersion": "one"}, "txnVersion must be a number"),
        (["value"], {"topik": "a"}, "unknown option topik; did you mean topic"),
        (["value"], {"kafka.bootstrap.servers": "a"}, "sets up a Kafka"),
        (["value"], {"topic": "other"}, "names another one"),
    ],
)  # fmt: skip
def test_mistake_is_named(
    spark: SparkSession, target: Path, columns: list[str], options: dict[str, str], message: str
) -> None:
    with pytest.raises(PySparkException, match=message):
        save(numbers(spark, 1).selectExpr(*columns), target, **options)


def test_header_key_that_is_not_utf8_is_refused(spark: SparkSession, target: Path) -> None:
    """Spark casts bytes to text without a look at them; no reader could decode the batch."""
    headers = "array(named_struct('key', CAST(X'FF' AS string), 'value', X'00')) AS headers"
    with pytest.raises(PySparkException, match="a header whose key is not UTF-8"):
        save(numbers(spark, 3).selectExpr("value", headers), target)
    assert values(target) == []


def test_overwriting_is_refused(spark: SparkSession, target: Path) -> None:
    with pytest.raises(PySparkException, match='never overwritten: use mode\\("append"\\)'):
        numbers(spark, 1).write.format("loglib").mode("overwrite").save(str(target))


def test_version_is_written_once(spark: SparkSession, target: Path) -> None:
    other = make(target.parent / "other")
    for version in (0, 1, 1, 0):
        save(numbers(spark, 5), target, txnAppId="etl", txnVersion=version)
    save(numbers(spark, 5), other, txnAppId="etl", txnVersion=0)  # another topic, in the same batch
    assert len(values(target)) == 10
    assert len(values(other)) == 5
    assert loglib.transactions.last_version(f"etl/{log_id_of(target)}", store=target.parent) == 1
    assert not list((target / "staging").glob("*"))


# --- failures of tasks ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_task_that_fails_and_is_repeated_writes_once(spark: SparkSession, target: Path) -> None:
    def fail_at_first(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() < 2 and context.partitionId() % 2:
            raise OSError("the first attempts fail")

    frame = numbers(spark, 1000)
    save(frame.mapInArrow(fail_at_first, frame.schema), target)
    assert_once(target, 1000)


@pytest.mark.slow
def test_write_that_fails_leaves_nothing(spark: SparkSession, target: Path) -> None:
    def fail(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        if TaskContext.get().partitionId() == 3:  # type: ignore[union-attr]
            time.sleep(2)  # the others have staged what they have
            raise OSError("it always fails")

    frame = spark.range(0, 40_000, 1, 4).selectExpr("CAST(id AS string) key", "repeat(id, 50) value")
    with pytest.raises(PySparkException, match="it always fails"):
        save(frame.mapInArrow(fail, frame.schema), target)
    assert values(target) == []
    assert not list((target / "staging").glob("*"))


# --- processes that are killed -----------------------------------------------------------------------------


def source_that(
    name: str, module: str, where: str, happens: Callable[[Path], object], marker: Path
) -> type[DataSource]:
    """The format `name`: loglib, but once something happens just before a function of a module is called.

    It happens in the process that calls the function: a worker of a task, or one of Spark's that plan and commit.
    """

    def prepare() -> None:
        owner: Any = import_module(module)
        *path, last = where.split(".")
        for each in path:
            owner = getattr(owner, each)
        original = getattr(owner, last)
        original = getattr(original, "original", original)  # an earlier test may have used this process

        def replaced(*arguments: Any, **keywords: Any) -> Any:
            try:
                marker.unlink()
            except FileNotFoundError:
                pass
            else:
                happens(marker)
            return original(*arguments, **keywords)

        replaced.original = original  # type: ignore[attr-defined]
        setattr(owner, last, replaced)

    def wrapped(writer: Any) -> Any:
        base: Any = type(writer)

        def reduce(self: Any) -> Any:
            rebuild, arguments = base.__reduce__(self)

            def again(*values: Any) -> Any:
                prepare()
                return wrapped(rebuild(*values))

            return again, arguments

        writer.__class__ = type(base.__name__, (base,), {"__reduce__": reduce})
        return writer

    class Source(DefaultSource):
        @classmethod
        def name(cls) -> str:
            return name

        def __reduce__(self) -> tuple[Any, ...]:
            return Source, (dict(self.options),)

        def writer(self, schema: Any, overwrite: bool) -> Any:
            prepare()
            return wrapped(super().writer(schema, overwrite))

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:
            prepare()
            return wrapped(super().streamWriter(schema, overwrite))

    return Source


def kill_self(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_driver(_: Path) -> None:
    """Kill the JVM: the parent of the daemon that has forked this worker."""
    with open(f"/proc/{os.getppid()}/stat") as file:
        jvm = int(file.read().rpartition(")")[2].split()[1])
    with open(f"/proc/{jvm}/comm") as file:
        assert file.read() == "java\n"
    os.kill(jvm, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def fail_here(_: Path) -> None:
    raise OSError("the commit fails here")


STEPS = {
    "before the commit point": ("loglib.transactions.store", "Store.commit"),
    "before it is applied": ("loglib.transactions.apply", "Applier.run"),
    "before a partition": ("loglib.transactions.apply", "apply_section"),
    "before it is done": ("loglib.transactions.store", "Store.finish"),
    "before staging is removed": ("loglib.spark.commit", "sweep_staging"),
}


class Pipeline:
    """A query from a topic to another one, with a checkpoint."""

    def __init__(self, spark: SparkSession, source: Path, target: Path, format_: str = "loglib") -> None:
        self.spark, self.source, self.target = spark, source, target
        self.format = format_
        self.checkpoint = target.parent.parent / f"checkpoint-{source.name}"

    def run(self) -> str:
        """Run up to the present end; returns the query's id."""
        frame = self.spark.readStream.format("loglib").options(startingOffsets="earliest", maxOffsetsPerTrigger=200)
        rows = frame.load(str(self.source)).select("key", "value")
        writer = rows.writeStream.format(self.format).option("checkpointLocation", str(self.checkpoint))
        query = writer.trigger(availableNow=True).start(str(self.target))
        query.awaitTermination()
        return str(query.id)

    def forget_last_commit(self) -> None:
        """As if the driver had died before Spark noted that the last batch is done."""
        last = max((self.checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
        last.unlink()
        last.with_name(f".{last.name}.crc").unlink(missing_ok=True)


def fill(path: Path, start: int, stop: int) -> None:
    """Values with their number; the source's partition is the key."""
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        for number in range(start, stop):
            partition = number % len(topic.partitions)
            topic.append(b"%d" % number, key=b"%s-%d" % (path.name.encode(), partition), partition=partition)


def assert_in_order(path: Path) -> None:
    """The records of each partition of the source stand in its order."""
    found: dict[tuple[int, bytes | None], list[int]] = {}
    for record in all_records(path):
        found.setdefault((record.partition, record.key), []).append(int(record.value or b""))
    for each in found.values():
        assert each == sorted(each)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = make(tmp_path / "in" / "source")
    fill(path, 0, 500)
    return path


def test_stream_writes_every_record_once_in_order(spark: SparkSession, source: Path, target: Path) -> None:
    pipeline = Pipeline(spark, source, target)
    query = pipeline.run()
    assert loglib.transactions.last_version(f"{query}/{log_id_of(target)}", store=target.parent) == 2
    assert_once(target, 500)
    fill(source, 500, 600)
    assert pipeline.run() == query
    assert_once(target, 600)
    assert_in_order(target)


def test_batch_that_is_repeated_is_dropped(spark: SparkSession, source: Path, target: Path) -> None:
    pipeline = Pipeline(spark, source, target)
    for _ in range(2):
        pipeline.run()
        pipeline.forget_last_commit()
    pipeline.run()
    assert_once(target, 500)
    assert_in_order(target)


@pytest.mark.slow
@pytest.mark.parametrize("happens", [kill_self, fail_here], ids=["killed", "raises"])
@pytest.mark.parametrize("step", STEPS)
def test_commit_that_dies_at_any_step_is_finished_once(
    spark: SparkSession, source: Path, target: Path, step: str, happens: Callable[[Path], object], tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    name = f"{happens.__name__}{list(STEPS).index(step)}"
    spark.dataSource.register(source_that(name, *STEPS[step], happens, marker))
    pipeline = Pipeline(spark, source, target, name)
    marker.touch()
    try:
        pipeline.run()
    except PySparkException:
        assert happens is kill_self or step == "before the commit point"
    assert not marker.exists()
    pipeline.run()
    assert_once(target, 500)
    assert_in_order(target)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["before the commit point", "before a partition", "before staging is removed"])
def test_driver_that_is_killed_goes_on_where_it_was(step: str, source: Path, target: Path, tmp_path: Path) -> None:
    program = f"""
        import sys
        from pathlib import Path
        sys.path[:0] = {HERE!r}
        from spark_session import local_session
        from test_spark_sink import STEPS, Pipeline, kill_driver, source_that

        path = Path({str(tmp_path)!r})
        with local_session(path / "warehouse") as spark:
            spark.dataSource.register(source_that("deadly", *STEPS[{step!r}], kill_driver, path / "marker"))
            Pipeline(spark, path / "in" / "source", path / "logs" / "target", "deadly").run()
            print("ended")
    """
    marker = tmp_path / "marker"
    marker.touch()
    assert "ended" not in run_driver(program)
    assert not marker.exists()
    assert "ended" in run_driver(program)
    assert_once(target, 500)
    assert_in_order(target)


@pytest.mark.slow
def test_two_drivers_with_one_checkpoint_write_each_record_once(
    spark: SparkSession, source: Path, target: Path, tmp_path: Path
) -> None:
    """As when a supervisor starts a query again while the old one still runs. Spark ends the slower one."""
    program = f"""
        import sys, time
        from pathlib import Path
        sys.path[:0] = {HERE!r}
        from pyspark.errors import PySparkException
        from spark_session import local_session
        from test_spark_sink import Pipeline

        path = Path({str(tmp_path)!r})
        with local_session(path / sys.argv[1]) as spark:
            pipeline = Pipeline(spark, path / "in" / "source", path / "logs" / "target")
            (path / f"{{sys.argv[1]}} is there").touch()
            while not (path / "begin").exists():
                time.sleep(0.001)
            try:
                pipeline.run()
            except PySparkException as error:
                print(error)
            print("ended")
    """
    pipeline = Pipeline(spark, source, target)
    pipeline.run()
    pipeline.forget_last_commit()  # so that both begin with the same batch
    fill(source, 500, 3000)
    drivers = [start_driver(program, name) for name in ("one", "two")]
    while not all((tmp_path / f"{name} is there").exists() for name in ("one", "two")):
        assert all(driver.poll() is None for driver in drivers)
        time.sleep(0.01)
    (tmp_path / "begin").touch()
    for driver in drivers:
        output, _ = driver.communicate(timeout=240)
        assert "ended" in output
    pipeline.run()  # if both have ended before the end
    assert_once(target, 3000)
    assert_in_order(target)


def start_driver(program: str, *arguments: str) -> subprocess.Popen[str]:
    """A program that has a Spark of its own."""
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def run_driver(program: str) -> str:
    """What it prints."""
    return start_driver(program).communicate(timeout=400)[0]


@pytest.mark.slow
def test_worker_that_is_killed_is_repeated(spark: SparkSession, source: Path, target: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    spark.dataSource.register(source_that("deadly", "loglib.spark.stage", "TaskStage.finish", kill_self, marker))
    marker.touch()
    Pipeline(spark, source, target, "deadly").run()
    assert not marker.exists()
    assert_once(target, 500)
    assert_in_order(target)


@pytest.mark.slow
def test_what_a_killed_attempt_has_staged_goes_with_the_commit(
    spark: SparkSession, target: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    spark.dataSource.register(source_that("deadly", "loglib.spark.stage", "sync_names", kill_self, marker))
    marker.touch()
    frame = spark.range(0, 40_000, 1, 2).selectExpr("CAST(id AS string) key", "repeat(id, 50) value")
    frame.write.format("deadly").mode("append").save(str(target))
    assert not marker.exists()
    assert len(values(target)) == 40_000
    assert not list((target / "staging").glob("*"))


# --- others who write ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_queries_and_a_native_writer_share_a_topic(
    spark: SparkSession, source: Path, tmp_path: Path
) -> None:
    other = make(tmp_path / "in" / "other")
    fill(other, 0, 300)
    target = tmp_path / "logs" / "shared"
    with Topic.open(target, create=True, partitions=3) as topic:
        time.sleep(0.3)  # from now on it answers transactions
        topic.append_many([b"before"] * 10, partition=0)
        for path in (source, other):
            Pipeline(spark, path, target).run()
            topic.append_many([b"between"] * 10, partition=1)
    found = Counter((record.key or b"").partition(b"-")[0] for record in all_records(target))
    assert found == {b"source": 500, b"other": 300, b"": 30}
    assert_in_order_of_sources(target)


def assert_in_order_of_sources(path: Path) -> None:
    for source in (b"source", b"other"):
        found = [record for record in all_records(path) if (record.key or b"").startswith(source)]
        assert len({record.value for record in found}) == len(found)


APPENDING = """
import os, sys
from loglib import Topic

path, over = sys.argv[1:]
workers = []
for name in (b"first", b"second", b"third"):
    workers.append(os.fork())
    if not workers[-1]:
        number = 0
        with Topic.open(path, shared=True) as topic:
            while not os.path.exists(over):
                topic.append(b"%d" % number, key=name, sync=number % 10 == 0)
                number += 1
        os.write(1, b"%s %d\\n" % (name, number))
        os._exit(0)
sys.exit(any([os.waitpid(worker, 0)[1] for worker in workers]))
"""


@pytest.mark.slow
def test_processes_that_take_turns_append_while_queries_write(
    spark: SparkSession, source: Path, target: Path, tmp_path: Path
) -> None:
    over = tmp_path / "over"
    command = [sys.executable, "-c", APPENDING, str(target), str(over)]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    appending = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    pipeline = Pipeline(spark, source, target)
    for end in range(500, 800, 100):
        pipeline.run()
        save(numbers(spark, 100), target)
        fill(source, end, end + 100)
    over.touch()
    told = {name: int(count) for name, count in map(str.split, appending.communicate(timeout=300)[0].splitlines())}
    assert appending.returncode == 0 and len(told) == 3
    found: dict[str, list[int]] = {}
    for record in all_records(target):
        name = (record.key or b"").decode()
        found.setdefault("source" if name.startswith("source-") else name, []).append(int(record.value or b""))
    for name, count in told.items():
        assert found.pop(name) == list(range(count)), name
    assert sorted(found.pop("source")) == list(range(700))
    assert Counter(number for numbers in found.values() for number in numbers) == Counter(list(range(100)) * 3)


# --- foreachBatch ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_batches_of_foreach_batch_are_written_once(
    spark: SparkSession, source: Path, target: Path, tmp_path: Path
) -> None:
    other = make(target.parent / "other")

    def both(frame: DataFrame, batch: int) -> None:
        for path in (target, other):
            save(frame.select("key", "value"), path, txnAppId="both", txnVersion=batch)

    def run(checkpoint: str) -> None:
        frame = spark.readStream.format("loglib").options(startingOffsets="earliest", maxOffsetsPerTrigger=200)
        writer = frame.load(str(source)).writeStream.foreachBatch(both)
        writer = writer.option("checkpointLocation", str(tmp_path / checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination()

    run("first")
    (tmp_path / "first" / "commits" / "2").unlink()
    (tmp_path / "first" / "commits" / ".2.crc").unlink(missing_ok=True)
    run("first")
    assert_once(target, 500)
    assert_once(other, 500)
    with pytest.raises(PySparkException, match="app both/[0-9a-f]{32}: its versions count what comes from source"):
        run("second")
    assert_once(target, 500)
