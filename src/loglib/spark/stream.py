"""Stream: the streaming reader that Spark uses for planning a query's batches and in its tasks.

Invariant: the facts of a batch are in its end offset (stream_offsets.py), which Spark stores before it runs the batch.
So a batch that Spark repeats has the same records. A stream that has read everything returns the same offset again, and
Spark runs no batch.

Spark gives a limit only to repeat what `getDefaultReadLimit` said, or says that there is none. Its kinds of limits
cannot be combined, so the limits of the options count (limits.py).

Processes: one process on the driver's host plans the whole run of a query; `read` in executors' workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from ..system.clock import SYSTEM
from .micro_batch import Follower
from .options import parse
from .pickling import by_value
from .publish import Publisher
from .source import arrow_schema_of, as_schema, read_task, tasks_of
from .stream_offsets import INITIAL

__all__ = ["StreamReader"]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a topic's records as they come."""

    def __init__(self, given: Mapping[str, str], schema: StructType | str) -> None:
        schema = as_schema(schema)
        self._made_of = dict(given), schema.json()
        self._options = parse(given, now_us=SYSTEM(), streaming=True)
        self._schema = arrow_schema_of(self._options, schema)

    def __reduce__(self) -> tuple[Any, ...]:
        return by_value(__name__, "StreamReader", *self._made_of)

    @cached_property
    def _follower(self) -> Follower:
        """Made at its first use: the reader that Spark sends to the tasks plans nothing."""
        return Follower(self._options)

    @cached_property
    def _publisher(self) -> Publisher:
        return Publisher(self._options.group)

    def initialOffset(self) -> dict[str, Any]:
        """Where the options say; the first batch finds the place."""
        return INITIAL

    def getDefaultReadLimit(self) -> ReadLimit:
        """A limit if the options have one; Spark shows it."""
        trigger = self._options.trigger
        if trigger.max_records is not None:
            return ReadMaxRows(trigger.max_records)
        if trigger.max_bytes is not None:
            return ReadMaxBytes(trigger.max_bytes)
        return ReadAllAvailable() if trigger.min_records is None else ReadMinRows(trigger.min_records)

    def prepareForTriggerAvailableNow(self) -> None:
        """Read up to the present end, and nothing that comes later."""
        self._follower.stop_at_present_end()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch, or `start` if there is nothing new."""
        end = self._follower.latest(start, limited=not isinstance(limit, ReadAllAvailable))
        if start != INITIAL:
            self._publisher.publish(self._follower.positions(), idle=end == start)
        return end

    def reportLatestOffset(self) -> dict[str, Any]:
        """The log's end, and the lag behind it: `sources[].latestOffset` of the query's progress."""
        return self._follower.report()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of the batch that ends at `end`. The offset itself has the batch's start."""
        return [] if start == end else tasks_of(self._follower.ranges(end), self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task, as Arrow batches."""
        return read_task(partition, self._schema, self._options)

    def stop(self) -> None:
        self._follower.close()
