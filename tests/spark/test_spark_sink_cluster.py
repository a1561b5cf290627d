"""The sink on executors that are processes of their own: one of them dies while it writes."""

import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from spark_cluster import environment
from spark_logs import all_records

from loglib import Topic

COUNT = 20_000

PROGRAM = """
    import os, signal, sys, time
    import loglib.spark
    from pyspark import TaskContext
    from pyspark.sql import SparkSession

    target, marks, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    settings = {
        "spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.executor.memory": "512m",
    }
    builder = SparkSession.builder.master("local-cluster[2,2,1024]").config(map=settings)
    spark = loglib.spark.configure(builder).getOrCreate()

    def die_at_first(batches):
        yield from batches
        context = TaskContext.get()
        open(f"{marks}/{context.partitionId()}-{context.attemptNumber()}", "x").close()
        if context.partitionId() == 2 and context.attemptNumber() == 0:
            with open(f"/proc/{os.getppid()}/stat") as file:  # of the daemon that forks workers
                executor = int(file.read().rpartition(")")[2].split()[1])
            os.kill(executor, signal.SIGKILL)
            time.sleep(60)

    rows = spark.range(0, count, 1, 4).selectExpr("CAST(id AS string) value", "CAST(id % 7 AS string) key")
    rows.mapInArrow(die_at_first, rows.schema).write.format("loglib").mode("append").save(target)
    spark.stop()
"""


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_executor_that_dies_while_it_writes_doubles_no_row(tmp_path: Path) -> None:
    path, marks = tmp_path / "logs" / "target", tmp_path / "marks"
    marks.mkdir()
    Topic.open(path, create=True, partitions=3).close()
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(path), str(marks), str(COUNT)]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=280)
    assert ran.returncode == 0, ran.stderr[-6000:]
    attempts = {each.name for each in marks.iterdir()}
    assert {"2-0", "2-1"} <= attempts
    assert Counter(record.value for record in all_records(path)) == {b"%d" % number: 1 for number in range(COUNT)}
    with Topic.open(path, mode="r") as topic:
        assert topic.verify().damage == ()
