"""What the driver's process brings with it: its threads, its open files, and the cores that Spark has."""

import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from spark_logs import all_records
from spark_session import local_session

import loglib
from conftest import NOW, QUIET, SOURCE, needs_proc
from loglib import testing

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with local_session(tmp_path_factory.mktemp("warehouse"), master="local[3]") as session:
        yield session


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A topic with two records."""
    with testing.open_topic(tmp_path / "logs" / "topic", clock=lambda: NOW, **QUIET) as topic:
        topic.append_many([b"a", b"b"])
    return tmp_path / "logs" / "topic"


def values(path: Path) -> list[bytes]:
    return sorted(record.value or b"" for record in all_records(path))


# --- threads -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_threads_read_and_write(spark: SparkSession, path: Path) -> None:
    copy = path.with_name("copy")
    testing.open_topic(copy, clock=lambda: NOW, **QUIET).close()

    def save(number: int) -> int:
        frame = spark.read.format("loglib").option("columns", "value").load(str(path))
        if number:
            frame.write.format("loglib").mode("append").save(str(copy))
        else:
            stream = spark.readStream.format("loglib").schema("value string").option("start", "begin").load(str(path))
            writer = stream.writeStream.format("loglib").option("checkpointLocation", str(path.with_name("checkpoint")))
            writer.trigger(availableNow=True).start(str(copy)).awaitTermination()
        return loglib.spark.read(spark, path).count()

    with ThreadPoolExecutor(2, initializer=loglib.spark.activate, initargs=(spark,)) as pool:
        assert list(pool.map(save, range(3))) == [2, 2, 2]
    assert values(copy) == [b"a"] * 3 + [b"b"] * 3


# --- cores -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tasks_are_made_for_the_cores_that_spark_has(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for those of the driver's host; a task reads 8 MiB or more."""
    large = tmp_path / "large"
    with testing.open_topic(large, clock=lambda: NOW, **QUIET) as topic:
        topic.append_many([bytes(1 << 20)] * 56)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)  # of the present process, for map_batches
    assert loglib.spark.read(spark, large).rdd.getNumPartitions() == 3
    mapped = loglib.spark.map_batches(spark, large, lambda batches: batches, "offset long", columns=["offset"])
    assert mapped.rdd.getNumPartitions() == 3
    frame = spark.read.format("loglib").option("cores", 5).load(str(large))
    assert frame.rdd.getNumPartitions() == 5


# --- open files --------------------------------------------------------------------------------------------

MANY_FILES = """
    import sys
    from pyspark.sql import SparkSession
    import loglib.spark

    spark = loglib.spark.configure(SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false"))
    spark = spark.getOrCreate()
    files = [open("/dev/null") for _ in range(1000)]
    for column in ("value", "offset"):
        stream = spark.readStream.format("loglib").option("columns", column).load(sys.argv[1])
        query = stream.writeStream.format("noop").option("checkpointLocation", sys.argv[1] + "-checkpoint-" + column)
        query.trigger(availableNow=True).start().awaitTermination()
        files.clear()
    spark.stop()
"""


@pytest.mark.slow
@needs_proc
def test_query_warns_of_a_driver_with_many_open_files(path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(MANY_FILES), str(path)]
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "SPARK_LOCAL_IP": "127.0.0.1"}
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=400,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most)),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stderr.count("open files. If PySpark's socket for foreachBatch gets a number above 1023") == 1
