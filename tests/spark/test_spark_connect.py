"""loglib where the driver's session is elsewhere: Spark Connect, and executors in processes of their own."""

import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
from counts import need
from spark_cluster import environment
from spark_logs import all_records, random_topic

PROGRAM = """
    import sys
    import loglib.spark
    from pyspark.sql import SparkSession

    how, path = sys.argv[1:]
    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    if how == "connect":
        builder = SparkSession.builder.remote("local[2]")
    else:
        builder = SparkSession.builder.master(how).config("spark.executor.memory", "512m")
    spark = loglib.spark.configure(builder.config(map=settings)).getOrCreate()
    print(type(spark).__module__)
    frame = loglib.spark.read(spark, path, columns=["partition", "offset"])
    print(sorted((row.partition, row.offset) for row in frame.collect()))
    def lengths(batches):
        for batch in batches:
            yield batch.select(["offset"])
    print(loglib.spark.map_batches(spark, path, lengths, "offset long", columns=["offset"]).count())
    written = path + "-written"
    loglib.Topic.open(written, create=True, partitions=2).close()
    rows = loglib.spark.read(spark, path, columns=["key", "value"])
    rows.write.format("loglib").mode("append").save(written)
    print(loglib.spark.read(spark, written, columns=["offset"]).count())
    spark.stop()
"""


def run(how: str, path: Path) -> list[str]:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), how, str(path)]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stderr[-6000:]
    return ran.stdout.splitlines()


def check(how: str, module: str, tmp_path: Path) -> None:
    path = random_topic(tmp_path / "topic", seed=1)
    of_session, rows, count, written = run(how, path)
    assert of_session == module
    records = all_records(path)
    assert rows == str(sorted((each.partition, each.offset) for each in records))
    assert count == written == str(len(records))
    copied = sorted((each.key or b"", each.value or b"") for each in all_records(tmp_path / "topic-written"))
    assert copied == sorted((each.key or b"", each.value or b"") for each in records)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_session_of_spark_connect_reads_and_writes_topics(tmp_path: Path) -> None:
    need(find_spec("grpc_status"), "the packages of pyspark[connect]")
    check("connect", "pyspark.sql.connect.session", tmp_path)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_local_cluster_reads_and_writes_topics(tmp_path: Path) -> None:
    """Each executor is a JVM of its own, with Python workers of its own."""
    check("local-cluster[2,1,1024]", "pyspark.sql.session", tmp_path)
