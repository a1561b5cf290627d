"""What tasks of the sink stage, without Spark."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType
from spark_logs import all_records

from conftest import NOW, QUIET
from loglib import testing
from loglib.spark.sink_target import parse
from loglib.spark.stage import RowPartitioner, Staging, TaskStage
from loglib.system.files import REAL

SCHEMA = StructType.fromJson(
    {
        "type": "struct",
        "fields": [
            {"name": name, "type": kind, "nullable": True, "metadata": {}}
            for name, kind in (("key", "binary"), ("value", "binary"))
        ],
    }
)


def make(path: Path, **policies: Any) -> Path:
    testing.open_topic(path, partitions=3, clock=lambda: NOW, **QUIET | policies).close()
    return path


def stage(path: Path, values: Iterable[bytes], *, rows: int = 100, write: str | None = None) -> Staging:
    """What a task stages for these values; the key of each is the value. Without `write` it is a write of its own."""
    task = TaskStage(REAL, lambda: NOW, write or os.urandom(8).hex())
    dealer = RowPartitioner(
        parse({"path": str(path)}, SCHEMA, overwrite=False, streaming=False), task, keyless=0, now=int
    )
    values = list(values)
    for start in range(0, len(values), rows):
        column = pa.array(values[start : start + rows], pa.binary())
        dealer.deal(pa.RecordBatch.from_pydict({"key": column, "value": column}))
    return task.finish()


def numbers(count: int, size: int = 0) -> list[bytes]:
    return [(b"%d" % number).ljust(size) for number in range(count)]


def values(path: Path) -> list[bytes]:
    return [record.value or b"" for record in all_records(path)]
