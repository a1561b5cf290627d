"""Stream: the streaming reader that Spark uses for planning a query's batches and in its tasks.

Invariant: the facts of a batch are in its end offset (stream_offsets.py), which Spark stores before it runs the batch.
So a batch that Spark repeats has the same records. A stream that has read everything returns the same offset again, and
Spark runs no batch.

Spark passes the limit that `getDefaultReadLimit` returned, or none. Its kinds of limits cannot be combined, so the
limits of the options count (limits.py).

Processes: one process with one thread on the driver's host plans the whole run of a query; `read` in executors'
workers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
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

from ..errors import LogError
from ..groups import OffsetMove
from ..system.clock import SYSTEM, monotonic
from ..topic import Topic
from .columns import arrow_schema
from .micro_batch import Follower
from .open_files import warn_of_open_files
from .options import parse
from .pickling import by_value
from .source import as_schema, read_task, tasks_of
from .stream_offsets import INITIAL

_PUBLISH_S = 1.0  # a commit of a group takes some 10 ms, because it is synced

NextOffsets = Mapping[str, Mapping[int, int]]  # by path of the topic, and partition


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a topic's records as they come."""

    def __init__(self, given: Mapping[str, str], schema: StructType | str) -> None:
        schema = as_schema(schema)
        self._made_of = dict(given), schema.json()
        self._options = parse(given, now_us=SYSTEM(), streaming=True)
        self._schema = arrow_schema(schema, self._options)
        self._follower = Follower(self._options)
        self._publisher = _Publisher(self._options.group)

    def __reduce__(self) -> tuple[Any, ...]:
        return by_value(__name__, "StreamReader", *self._made_of)

    def initialOffset(self) -> dict[str, Any]:
        """The place that the options name; the first batch finds it."""
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
        warn_of_open_files()
        end = self._follower.latest(start, limited=not isinstance(limit, ReadAllAvailable))
        if start != INITIAL:
            self._publisher.publish(self._follower.next_offsets(), idle=end == start)
        return end

    def reportLatestOffset(self) -> dict[str, Any]:
        """The log's end, and the lag: `sources[].latestOffset` of the query's progress."""
        return self._follower.report

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of the batch that ends at `end`. The offset itself has the batch's start."""
        return [] if start == end else tasks_of(self._follower.ranges(end), self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_task(partition, self._schema, self._options)

    def stop(self) -> None:
        self._follower.close()


def reader_of(given: Mapping[str, str], schema: StructType) -> DataSourceStreamReader:
    """The reader. If none can be made, one that raises the error when Spark first asks it something.

    PySpark 4.3 calls `stop` of a reader also if making it has raised, and buries that error under an UnboundLocalError.
    """
    try:
        return StreamReader(given, schema)
    except Exception as error:  # noqa: BLE001  # it is raised later
        return _Refusal(error)


class _Refusal(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stands for a reader that could not be made."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:
        raise self._error

    def getDefaultReadLimit(self) -> ReadLimit:
        raise self._error

    def prepareForTriggerAvailableNow(self) -> None:
        raise self._error

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: ARG002
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:  # noqa: ARG002
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        raise self._error


class _Publisher:
    """Commits a query's progress for a consumer group, for tools that show lag.

    It commits once a second at most, or when the query has nothing else to do. Only durable progress is published:
    Spark has committed everything below these offsets. The query never reads them, because its checkpoint has its
    positions. So a failed commit harms no result. The first one of a run fails the query, because then the option is
    wrong (the group has members, or the directory cannot be written). A later one is a warning, and is tried again.

    The group is never ahead of the checkpoint. If it is when a run begins, the checkpoint was set back: a warning.
    """

    def __init__(self, group: str | None) -> None:
        self._group = group
        self._published: NextOffsets | None = None
        self._due = 0.0

    def publish(self, next_offsets: NextOffsets, *, idle: bool) -> None:
        """Commit the offsets, if they are new. `LogError` or `OSError` if the first commit fails."""
        now = monotonic()
        if self._group is None or next_offsets == self._published or (now < self._due and not idle):
            return
        self._due = now + _PUBLISH_S
        try:
            for path, offsets in next_offsets.items():
                with Topic.open(path, mode="r") as topic:
                    moves = topic.reset_group(self._group, offsets)
                if self._published is None:
                    self._warn_if_set_back(path, moves)
        except (LogError, OSError) as error:
            if self._published is None:
                raise
            warnings.warn(
                f"the progress of group {self._group} was not published: {error}", RuntimeWarning, stacklevel=2
            )
            return
        self._published = next_offsets

    def _warn_if_set_back(self, path: str, moves: Mapping[int, OffsetMove]) -> None:
        back = {number: each for number, each in moves.items() if each.before is not None and each.before > each.after}
        if back:
            found = [f"from {each.before} to {each.after} in partition {number}" for number, each in back.items()]
            warnings.warn(
                f"{path}: group {self._group} goes back {', '.join(found)}: the query reads these records again. "
                "Its checkpoint was set back or is new, or another query has the same groupId",
                RuntimeWarning, stacklevel=3,
            )  # fmt: skip
