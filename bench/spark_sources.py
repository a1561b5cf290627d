"""Spark sources: what the connector is compared with, as data sources of PySpark.

Invariant: the floors do what no Python data source can leave out, and nothing else. A floor of reading hands the same
Arrow batch to Spark again and again, from memory. A floor of writing takes Arrow batches and drops them. The source
of tuples is what its author writes first: `Topic.read`, and a tuple for each record.

Processes: Spark's workers import this module by name, from PYTHONPATH.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit
from pyspark.sql.types import StructType

from loglib import Topic
from loglib.spark.source import BatchReader, freeze_worker, schema_of

_TASK_RECORDS = 625_000  # 125 MB of values of 200 bytes: as much as a task of loglib reads


def lengths(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The sum of the lengths of all values, for `map_batches`."""
    total = sum(pc.sum(pc.binary_length(batch.column("value"))).as_py() or 0 for batch in batches)
    yield pa.RecordBatch.from_pydict({"total": [total]})


def register(spark: SparkSession) -> None:
    """Let the session find the formats of this module."""
    for source in (Floor, FloorStream, FloorSink, Lines, Tuples):
        spark.dataSource.register(source)


class Floor(DataSource):
    """`records` records in tasks of `task`, from memory: the first batch of the topic `path`, again and again."""

    @classmethod
    def name(cls) -> str:
        return "bench_floor"

    def schema(self) -> StructType:
        return schema_of(_of_loglib(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        return FloorReader(dict(self.options), schema)


class FloorReader(DataSourceReader):
    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._records = int(options["records"])
        self._task = int(options.get("task", _TASK_RECORDS))
        self._batch = json.dumps(_of_loglib(options)), schema.json()

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(start) for start in range(0, self._records, self._task)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        freeze_worker()
        batch = _first_batch(*self._batch)
        left = min(self._task, self._records - partition.value)
        while left > 0:
            yield batch.slice(0, left)
            left -= batch.num_rows


@cache
def _first_batch(options: str, schema: str) -> pa.RecordBatch:
    """The first batch of a topic, read once for each worker."""
    reader = BatchReader(json.loads(options), schema)
    return next(iter(reader.read(reader.partitions()[0])))


def _of_loglib(options: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if name not in ("records", "task")}


class Tuples(DataSource):
    """A topic, read by `Topic.read` into tuples. A task reads one partition."""

    @classmethod
    def name(cls) -> str:
        return "bench_tuples"

    def schema(self) -> str:
        return "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, kind int"

    def reader(self, schema: StructType) -> DataSourceReader:
        return TupleReader(self.options["path"])


class TupleReader(DataSourceReader):
    def __init__(self, path: str) -> None:
        self._path = path

    def partitions(self) -> Sequence[InputPartition]:
        with Topic.open(self._path, mode="r") as topic:
            return [InputPartition(each.id) for each in topic.partitions]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        freeze_worker()
        name = os.path.basename(self._path)
        with Topic.open(self._path, mode="r") as topic:
            for record in topic.partitions[partition.value].read():
                yield record.key, record.value, name, record.partition, record.offset, record.time, 0


class FloorStream(DataSource):
    """A stream that has one new record whenever Spark asks."""

    @classmethod
    def name(cls) -> str:
        return "bench_stream"

    def schema(self) -> str:
        return "value binary"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return FloorStreamReader()


class FloorStreamReader(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:
        return {"next": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        return {"next": start["next"] + 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [InputPartition(start["next"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        freeze_worker()
        yield pa.RecordBatch.from_arrays([pa.array([b"x"], pa.binary())], names=["value"])


class Lines(DataSource):
    """The lines of a file that grows, with the fewest steps that a stream can have."""

    @classmethod
    def name(cls) -> str:
        return "bench_lines"

    def schema(self) -> str:
        return "value binary"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return LinesReader(self.options["path"])


class LinesReader(FloorStreamReader):
    def __init__(self, path: str) -> None:
        self._path = path

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        return {"next": os.stat(self._path).st_size}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [InputPartition((start["next"], end["next"]))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        freeze_worker()
        start, end = partition.value
        with open(self._path, "rb") as file:
            file.seek(start)
            lines = file.read(end - start).splitlines()
        yield pa.RecordBatch.from_arrays([pa.array(lines, pa.binary())], names=["value"])


class FloorSink(DataSource):
    """Takes Arrow batches and drops them."""

    @classmethod
    def name(cls) -> str:
        return "bench_drop"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return Drop()


class Drop(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        freeze_worker()
        for _ in iterator:
            pass
        return WriterCommitMessage()
