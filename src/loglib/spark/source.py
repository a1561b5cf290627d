"""Source: the batch reader that Spark uses for planning and in its tasks.

Invariant: a plan is made once per `load()`, at its first action. It is a snapshot: the DataFrame has the
same records each time, even if more are appended. A task's splits contain all facts that it needs, so a task
reads only the log's own files, by name.

Filters are not pushed down: PySpark 4.3 shares the pushed filters of one scan with all scans of the same
`load()`, and the results are silently wrong. Columns, ranges and conditions are options instead.

Processes: planned on the driver's host, in Spark's planning process; `read` in executors' workers.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from ..system.clock import SYSTEM
from .columns import arrow_schema, default_schema
from .options import Options, for_streams, parse
from .pickling import by_value
from .plan import Range, Split, plan
from .ranges import find_ranges, find_topics
from .scan import scan


def schema_of(given: Mapping[str, str]) -> StructType:
    """The schema of a query whose user gives none. Checks options and path, so that `load()` reports mistakes.

    Spark does not pass whether the query is a batch or a stream. So options that one of them accepts are accepted
    here, and the reader refuses the others.
    """
    options = _of_either_kind(given)
    find_topics(options.paths)
    return default_schema(options)


def _of_either_kind(given: Mapping[str, str]) -> Options:
    now_us = SYSTEM()
    try:
        return parse(given, now_us=now_us, streaming=for_streams(given))
    except ValueError:
        with suppress(ValueError):
            return parse(given, now_us=now_us, streaming=True)
        raise


class BatchReader(DataSourceReader):
    """Reads the records that existed when the plan was made."""

    def __init__(self, given: Mapping[str, str], schema: StructType | str, now_us: int | None = None) -> None:
        schema = as_schema(schema)
        now_us = SYSTEM() if now_us is None else now_us
        self._made_of = dict(given), schema.json(), now_us
        self._options = parse(given, now_us=now_us)
        self._schema = arrow_schema(schema, self._options)

    def __reduce__(self) -> tuple[Any, ...]:
        return by_value(__name__, "BatchReader", *self._made_of)

    def partitions(self) -> Sequence[InputPartition]:
        """One partition per task. Spark treats an empty list as one partition of None."""
        return tasks_of(find_ranges(self._options), self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_task(partition, self._schema, self._options)


def as_schema(schema: StructType | str) -> StructType:
    """The schema, from JSON if a worker makes the reader."""
    return StructType.fromJson(json.loads(schema)) if isinstance(schema, str) else schema


def tasks_of(ranges: Iterable[Range], options: Options) -> list[InputPartition]:
    """One partition of Spark per task. A planning process of PySpark 4.3 cannot know how many cores the cluster has."""
    most, least, cores = options.max_bytes_per_partition, options.min_partitions, options.cores or os.cpu_count() or 1
    return [InputPartition(task) for task in plan(ranges, max_task_bytes=most, min_tasks=least, cores=cores)]


def read_task(partition: InputPartition, schema: pa.Schema, options: Options) -> Iterator[pa.RecordBatch]:
    """The records of one task, as Arrow batches."""
    freeze_worker()
    splits: tuple[Split, ...] = partition.value or ()
    for split in splits:
        yield from scan(split, schema, options)


@cache
def freeze_worker() -> None:
    """Freeze the modules once per worker, so that Spark's garbage collection after every task does not scan them."""
    gc.freeze()
