"""What a new user meets first: an environment that is not activated, and actions that end early."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from spark_logs import all_records, random_topic

from conftest import SOURCE

ROOT = SOURCE.parent
MARK = "--- the session is there ---\n"

PROGRAM = """
    import json, shutil, sys
    from pyspark.sql import SparkSession
    import loglib.spark

    settings = {
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    spark = loglib.spark.configure(SparkSession.builder.master("local[2]").config(map=settings)).getOrCreate()
    sys.stderr.write(sys.argv[2])
    frame = spark.read.format("loglib").option("minPartitions", 3).option("arrowBatchBytes", "1k").load(sys.argv[1])
    for _ in range(20):
        frame.show(3)
        saw = {"first": frame.first()["offset"], "limit": len(frame.limit(3).collect()), "empty": frame.isEmpty()}
    saw["count"] = frame.count()
    spark.stop()
    print()
    print(json.dumps(saw))
"""


def environment() -> dict[str, str]:
    """That of a shell in which no virtual environment is active and nothing is set for Spark."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK", "LOGLIB"))}
    kept.pop("VIRTUAL_ENV", None)
    places = [each for each in kept["PATH"].split(":") if Path(each) != Path(sys.executable).parent]
    return kept | {"PATH": ":".join(places), "SPARK_LOCAL_IP": "127.0.0.1"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, int]:
    """What the program saw, what it wrote to standard error once Spark was there, and the number of records."""
    directory = tmp_path_factory.mktemp("user")
    path = random_topic(directory / "topic", seed=1, batches=300)
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(path), MARK]
    done = subprocess.run(
        command, cwd=directory, env=environment() | {"PYTHONPATH": str(SOURCE)},
        capture_output=True, text=True, check=False, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr.partition(MARK)[2], len(all_records(path))


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_first_program_works_where_nothing_is_activated_or_set(ran: tuple[dict[str, Any], str, int]) -> None:
    saw, _, records = ran
    assert saw == {"first": 0, "limit": 3, "empty": False, "count": records}


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_actions_that_end_early_print_nothing_on_standard_error(ran: tuple[dict[str, Any], str, int]) -> None:
    assert ran[1] == ""
