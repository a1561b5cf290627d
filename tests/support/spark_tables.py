"""A session of Spark and a topic for tests, and the rows that a table has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from spark_logs import Row, random_topic
from spark_session import local_session


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with local_session(tmp_path_factory.mktemp("warehouse")) as session:
        yield session


@pytest.fixture(scope="module")
def topic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A topic that no test changes: three partitions, one of them empty, several segments each."""
    return random_topic(tmp_path_factory.mktemp("logs") / "topic", seed=1, batches=80, empty_partitions=1)


def load(spark: SparkSession, path: Path, **options: object) -> DataFrame:
    return spark.read.format("loglib").options(**{name: str(each) for name, each in options.items()}).load(str(path))


def collect(frame: DataFrame) -> list[Row]:
    """The rows, times as microseconds, binary as bytes."""
    if "timestamp" in frame.columns:
        frame = frame.withColumn("timestamp", f.unix_micros("timestamp"))
    return [{name: _plain(row[name]) for name in frame.columns} for row in frame.collect()]


def _plain(value: Any) -> Any:
    if isinstance(value, bytearray):
        return bytes(value)
    return [{"key": each["key"], "value": bytes(each["value"])} for each in value] if isinstance(value, list) else value
