"""loglib on a Spark cluster of three hosts that share nothing but a directory.

A task stands still, so that Spark starts a second attempt on the other host. At the end a host dies in mid-query.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from counts import need
from spark_hosts import can_be_hosts, cluster_of_hosts, start_driver
from spark_logs import all_records, random_topic

from conftest import QUIET
from loglib import Topic

PROGRAM = """
    import json, os, sys, time
    import loglib.spark
    from pyspark.sql import SparkSession

    address, directory, shared = sys.argv[1:]
    settings = {
        "spark.driver.host": address.split(":")[1].strip("/"),
        "spark.executor.memory": "512m",
        "spark.task.maxFailures": "2",
        "spark.speculation": "true",
        "spark.speculation.minTaskRuntime": "8s",  # longer than any task but the one that stands still
        "spark.speculation.quantile": "0.5",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master(address).config(map=settings)
    spark = loglib.spark.configure(builder).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    while spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < 3:  # the driver counts, too
        time.sleep(0.05)

    def load(path):
        return spark.read.format("loglib").option("minPartitions", 12).load(path)

    def slow(batches):
        import os, socket, time
        import pyarrow
        for batch in batches:
            host = socket.gethostname()
            with open(f"{shared}/marks/{host}.{time.time_ns()}", "x") as mark:
                mark.write(json.dumps(os.listdir(directory)))
            time.sleep(0.3)
            names = ["value", "partition", "offset"]
            columns = {name: batch.column(name) for name in names}
            yield pyarrow.RecordBatch.from_pydict(columns | {"host": [host] * batch.num_rows})

    def told(result):
        with open(f"{shared}/results", "a") as file:
            file.write(json.dumps(result) + "\\n")

    columns = "value binary, partition int, offset long, host string"
    written = load(f"{shared}/topic").mapInArrow(slow, columns).selectExpr("value", "host AS key")
    written.write.format("loglib").mode("append").save(f"{shared}/written")
    told("written")

    def stands_still(batches):
        import time
        from pyspark import TaskContext
        task, attempt = TaskContext.get().partitionId(), TaskContext.get().attemptNumber()
        open(f"{shared}/attempts/{task}.{attempt}", "x").close()
        yield from batches
        if (task, attempt) == (0, 0):
            time.sleep(100)

    rows = load(f"{shared}/topic").select("key", "value")
    rows.mapInArrow(stands_still, rows.schema).write.format("loglib").mode("append").save(f"{shared}/overtaken")
    told("overtaken")

    here = f"{directory}/local/topic"
    with loglib.Topic.open(here, create=True) as topic:
        topic.append(b"seen by one host only")
    try:
        told(load(here).count())
    except Exception as error:
        told(str(error))

    os.mkdir(f"{shared}/reading")
    rows = load(f"{shared}/topic").mapInArrow(slow, columns).collect()
    told([[row.partition, row.offset, None if row.value is None else bytes(row.value).hex()] for row in rows])
    spark.stop()
"""


@pytest.fixture(scope="module")
def on_hosts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a driver saw on three hosts, of which the third died while it read."""
    need(can_be_hosts(), "root, unshare, nsenter and ip, to have hosts of its own")
    base = tmp_path_factory.mktemp("hosts")
    directory, shared = base / "disk", base / "disk" / "shared"
    (shared / "marks").mkdir(parents=True)
    (shared / "attempts").mkdir()
    path = random_topic(shared / "topic", seed=1, batches=120)
    for name in ("written", "overtaken"):
        Topic.open(shared / name, create=True, partitions=2, **QUIET).close()
    with cluster_of_hosts(2, directory, shared, base) as (address, made):
        driver = start_driver(made[0], PROGRAM, address, directory, shared, log=base / "driver.log")
        _wait((shared / "reading").exists, driver, base)
        before = set((shared / "marks").iterdir())
        third = made[2].name
        _wait(lambda: any(each.name.startswith(third) for each in _since(shared, before)), driver, base)
        made[2].kill_all()
        at_death = _since(shared, before)
        driver.wait(120)
        assert driver.returncode == 0, (base / "driver.log").read_text()[-6000:]
        after = _since(shared, before) - at_death
    results = [json.loads(line) for line in (shared / "results").read_text().splitlines()]
    return {
        "shared": shared,
        "expected": [[each.partition, each.offset, _hex(each.value)] for each in all_records(path)],
        "seen": {name for mark in before for name in json.loads(mark.read_text())},
        "before": {mark.name.partition(".")[0] for mark in before},
        "after": {mark.name.partition(".")[0] for mark in after},
        "refusal": results[2],
        "rows": results[3],
    }


def _hex(value: bytes | None) -> str | None:
    return None if value is None else value.hex()


def _since(shared: Path, before: set[Path]) -> set[Path]:
    return set((shared / "marks").iterdir()) - before


def _wait(condition: Any, driver: Any, base: Path) -> None:
    while not condition():
        assert driver.poll() is None, (base / "driver.log").read_text()[-6000:]
        time.sleep(0.02)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_query_is_right_after_a_host_died_in_the_middle(on_hosts: dict[str, Any]) -> None:
    assert sorted(on_hosts["rows"]) == sorted(on_hosts["expected"])
    assert on_hosts["after"] == {"host2"}


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_hosts_that_share_one_directory_write_each_row_once(on_hosts: dict[str, Any]) -> None:
    with Topic.open(on_hosts["shared"] / "written", mode="r") as topic:
        written = list(topic.read())
    assert {each.key for each in written} == {b"host2", b"host3"}
    values = sorted(str(_hex(each.value)) for each in written)
    assert values == sorted(str(value) for _, _, value in on_hosts["expected"])
    assert on_hosts["before"] == {"host2", "host3"}
    assert on_hosts["seen"] == {"local", "shared"}  # of the directory, each host has its own but for `shared`


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_task_with_two_attempts_at_once_writes_each_row_once(on_hosts: dict[str, Any]) -> None:
    attempts = sorted(path.name for path in (on_hosts["shared"] / "attempts").iterdir())
    assert {"0.0", "0.1"} <= set(attempts)
    written = sorted(str(_hex(each.value)) for each in all_records(on_hosts["shared"] / "overtaken"))
    assert written == sorted(str(value) for _, _, value in on_hosts["expected"])


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_log_that_only_the_driver_sees_is_refused_in_words(on_hosts: dict[str, Any]) -> None:
    assert "/disk/local/topic" in on_hosts["refusal"]
    assert "no topic on host" in on_hosts["refusal"]
