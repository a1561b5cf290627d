"""Map batches: results from a topic whose records do not pass through the JVM.

Invariant: the range of records is chosen as for `read`, when the function is called. `counts` reads batch headers in
the driver's process, and no batch body. `map_batches` plans there as the data source does, and calls the user's
function in the executors' Python, on the Arrow batches of the log.

Processes: the user's driver; the user's function in executors' workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING

from ..format.watermark import Mark
from ..log.reader import StartLike
from ..system.clock import SYSTEM
from ..topic import Topic
from .options import as_option, parse
from .session import path_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from .plan import Range

__all__ = ["counts", "map_batches"]

# A task reads this in 0.2 s, and costs Spark 50 ms of CPU. Records that pass through the JVM take five times as long.
_TASK_BYTES = "512m"


def counts(
    topic: str | os.PathLike[str] | Topic, *, start: StartLike = "begin", end: StartLike = "end"
) -> dict[int, int]:
    """The number of records in each partition of a topic, from the headers of its batches.

    `start` and `end` are as in `Topic.read`. This needs no Spark session. Bodies are not read, so their damage is not
    noticed; a damaged header raises `CorruptLogError`. `ValueError` if the path is a directory of several topics.
    """
    from .ranges import find_ranges

    path = path_of(topic)
    options = parse({"path": path, "start": as_option(start), "end": as_option(end)}, now_us=SYSTEM())
    ranges = find_ranges(options)
    names = sorted({each.topic for each in ranges})
    if len(names) > 1:
        raise ValueError(f"{path} is a directory of topics ({', '.join(names)}); count each by its own path")
    return {each.partition: _count(each) for each in ranges}


def map_batches(
    spark: SparkSession,
    topic: str | os.PathLike[str] | Topic,
    fn: Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]],
    schema: StructType | str,
    *,
    start: StartLike = "begin",
    end: StartLike = "end",
    columns: Iterable[str] | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """A DataFrame of the results of `fn` for the topic's records. Only the results pass through the JVM.

    Spark calls `fn` once per task with an iterator of the task's Arrow batches, as `DataFrame.mapInArrow` does. It
    returns batches of `schema`. A task reads a range of one partition, or several ranges of small partitions, one after
    the other. So `fn` may filter, convert, or make partial sums, which Spark adds up.

    `start` and `end` are as in `Topic.read`. `columns` are all but `headers` by default. `options` are further options
    of the data source, such as `{"minPartitions": "8", "onGap": "skip"}`; `maxBytesPerPartition` is 512 MiB by
    default. The range is fixed by this call.
    """
    from .source import BatchReader, schema_of

    given = {"maxBytesPerPartition": _TASK_BYTES, **(options or {})}
    given |= {"path": path_of(topic), "start": as_option(start), "end": as_option(end)}
    if columns is not None:
        given["columns"] = ",".join(columns)
    reader = BatchReader(given, schema_of(given))
    tasks = reader.partitions()

    def run(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from fn(reader.read(tasks[number]))

    return spark.range(0, len(tasks), 1, max(1, len(tasks))).mapInArrow(run, schema)


def _count(range_: Range) -> int:
    from .ranges import open_range

    if not range_.size_bytes:
        return 0
    count, planned = 0, Mark.at_rest(0, 0, range_.flushed_end, range_.flushed_tail)
    with closing(open_range(range_)) as log:
        for header in log.headers(range_.start_position, range_.end_offset, planned):
            first, stop = header.offsets.start, header.offsets.stop
            count += max(0, min(stop, range_.end_offset) - max(first, range_.start_offset))
    return count
