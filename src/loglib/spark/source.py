"""Source: the batch reader that Spark uses for planning and in its tasks.

Invariant: a plan is made once per `load()`, at its first action. It is a snapshot: the DataFrame gives the
same records each time, even if more are appended. A task's splits carry all that it needs, so a task reads
only the log's own files.

Filters are not pushed down: PySpark 4.3 shares the pushed filters of one scan with all scans of the same
`load()`, which silently gives wrong results. Columns and ranges are options instead.

Processes: planned on the driver's host, in Spark's planning process; `read` in executors' workers.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from ..system.clock import SYSTEM
from .columns import arrow_schema, default_schema
from .options import parse
from .plan import Split, plan
from .ranges import find_ranges, find_topics
from .scan import scan

__all__ = ["BatchReader", "schema_of"]


def schema_of(given: Mapping[str, str]) -> StructType:
    """The schema if the user gives none. Checks options and path, so that `load()` reports mistakes in them."""
    options = parse(given, now_us=SYSTEM())
    find_topics(options.paths)
    return default_schema(options)


class BatchReader(DataSourceReader):
    """Reads the records that existed when the plan was made."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        self._options = parse(given, now_us=SYSTEM())
        self._schema = arrow_schema(schema)
        columns = self._options.columns
        if columns is not None and list(columns) != self._schema.names:
            raise ValueError(f"the option columns ({', '.join(columns)}) and schema() differ; give one of them")

    def partitions(self) -> Sequence[InputPartition]:
        """One partition per task. Spark treats an empty list as one partition of None."""
        tasks = plan(
            find_ranges(self._options),
            max_task_bytes=self._options.max_bytes_per_partition,
            min_tasks=self._options.min_partitions,
            cores=os.cpu_count() or 1,
        )
        return [InputPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task, as Arrow batches."""
        _freeze_worker()
        splits: tuple[Split, ...] = partition.value or ()
        for split in splits:
            yield from scan(
                split,
                self._schema,
                arrow_batch_bytes=self._options.arrow_batch_bytes,
                fail_on_data_loss=self._options.fail_on_data_loss,
            )


@cache
def _freeze_worker() -> None:
    """Freeze the modules once per worker: Spark collects garbage after every task, and need not scan them."""
    gc.freeze()
