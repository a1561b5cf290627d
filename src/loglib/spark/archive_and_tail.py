"""Archive and tail: the archived past and the live tail of a topic as one table.

Invariant: the table has each record once. The rows below the end of the archive come from its files, with Spark's own
reader, which prunes and filters; the rest comes from the log, from exactly that offset. Both parts are fixed when the
table is made: later records are not in it. If retention drops a part of the tail meanwhile, the query fails.

Processes: the user's driver.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql.functions import lit

from ..config.arguments import partition_numbers
from ..config.uri import is_remote
from ..log.copy_role import is_tier
from ..log.reader import StartLike
from ..offload.archive_reader import ArchiveReader, Range, is_in_a_store
from ..offload.tier_files import Tier
from ..system.clock import SYSTEM
from ..system.files import REAL
from ..topic import Topic
from .columns import default_schema, known_name
from .options import as_option, cores_of, parse, selecting
from .where import parse_where

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PATTERN = re.compile(r"([\\*?\[\]{},])")  # letters that make a path a pattern for Spark


class Backfill(NamedTuple):
    """A table of all records up to now, and the offsets where later records begin."""

    table: DataFrame
    ends: dict[int, int]  # the offset of each partition where a stream continues


def past_and_tail(
    spark: SparkSession,
    topic_path: str,
    archive: str | os.PathLike[str],
    *,
    start: StartLike,
    end: StartLike,
    columns: Iterable[str] | None,
    where: str | None,
) -> Backfill:
    """The records from `start` to `end`, and the offsets where they end."""
    if is_remote(topic_path):
        raise ValueError("archive= needs a topic in a directory that this host and the executors mount")
    condition = None if where is None else parse_where(where, now_us=SYSTEM())
    timed = None if condition is None else condition.as_option()  # without ages: both parts count from one moment
    place = _place_of(archive)
    if place is not None:
        chosen = selecting(columns, timed)
        return _segments_and_tail(spark, topic_path, place, start=start, end=end, chosen=chosen)
    schema = default_schema(parse({"path": topic_path, **selecting(columns, None)}, now_us=SYSTEM()))
    past = ArchiveReader.load(REAL, archive)
    with Topic.open(topic_path, mode="r") as topic:
        logs = [each.log for each in topic._accesses]  # noqa: SLF001
        past.check_log(topic.log_id, topic_path, logs)
        split = past.split([each.id for each in topic.partitions], start, end, now_us=SYSTEM())
        tail = topic.read(split.starts)
        past.begin_tail(tail, logs, split.starts)
        starts, ends = tail.tell(), topic.read(split.ends).tell()
    names = [known_name(name) for name in schema.names]
    files = [os.path.join(past.path, file.name) for each in split.ranges for file in past.files(each)]
    parts = []
    if files:
        archived = spark.read.schema(default_schema(parse({"path": topic_path, "includeHeaders": "true"}, now_us=0)))
        rows = archived.parquet(*map(_as_path, files)).where(_within(past, split.ranges))
        if condition is not None:
            rows = rows.where(condition.as_column())
        parts.append(rows.select(*names).toDF(*schema.names))
    if starts != ends or not files:
        log = spark.read.format("loglib").schema(schema).options(**selecting(None, timed))
        log = log.options(**cores_of(spark), start=as_option(starts), end=as_option(ends))
        parts.append(log.load(topic_path))
    for each in split.ranges:
        if starts[each.partition] == ends[each.partition]:  # the end may be in the archive
            ends[each.partition] = each.end
    return Backfill(reduce(DataFrame.union, parts), ends)


def _place_of(archive: str | os.PathLike[str]) -> str | None:
    """The path or URI, if `loglib.offload.tier` writes there; None for an archive of Parquet files."""
    path = os.fspath(archive)
    if is_in_a_store(path):
        raise ValueError(
            "Spark reads Parquet archives in directories that this host and the executors mount; read one in a store "
            "with loglib.offload.read_archive, or upload segments with loglib.offload.tier: Spark reads them there"
        )
    return path if is_remote(path) or is_tier(REAL, path) else None


def _segments_and_tail(
    spark: SparkSession,
    topic_path: str,
    place: str,
    *,
    start: StartLike,
    end: StartLike,
    chosen: Mapping[str, str],
) -> Backfill:
    """As `past_and_tail`, with uploaded segments: all records that the place has come from there."""
    tiered = Tier(REAL, place).tiered
    with Topic.open(topic_path, mode="r", tier=place) as topic:
        if isinstance(end, Mapping):  # other partitions are read to their ends
            end = dict.fromkeys(range(len(topic.partitions)), "end") | partition_numbers(end)
        starts, ends = topic.read(start).tell(), topic.read(end).tell()
        present = {each.id: each.high_watermark for each in topic.partitions}
        name = topic.name
    seams = {number: min(max(tiered.partition(number).end, at), ends[number]) for number, at in starts.items()}
    past = {number: (starts[number], seams[number]) for number in range(len(tiered.partitions))}
    tail = {number: (seam, ends[number]) for number, seam in seams.items()}
    reader = spark.read.format("loglib").options(**cores_of(spark), **chosen)
    parts = []
    if any(first < last for first, last in past.values()):
        nothing = {number: tiered.partition(number).end for number in past}
        rows = reader.options(**_bounds(past, nothing)).load(place)
        same = [each for each in rows.columns if each.lower() == "topic"]
        parts.append(rows.withColumn(same[0], lit(name)) if same else rows)
    if any(first < last for first, last in tail.values()) or not parts:
        parts.append(reader.options(**_bounds(tail, present)).load(topic_path))
    return Backfill(reduce(DataFrame.union, parts), ends)


def _bounds(ranges: Mapping[int, tuple[int, int]], nothing: Mapping[int, int]) -> dict[str, str]:
    """The options for these ranges. For an empty range, `nothing` has an offset that exists in any case."""
    starts = {number: first if first < last else nothing[number] for number, (first, last) in ranges.items()}
    ends = {number: last if first < last else nothing[number] for number, (first, last) in ranges.items()}
    return {"start": as_option(starts), "end": as_option(ends)}


def _as_path(path: str) -> str:
    """The path of a local file for Spark, whatever the session's default file system is."""
    return "file://" + _PATTERN.sub(r"\\\1", path)


def _within(past: ArchiveReader, ranges: Iterable[Range]) -> str:
    """The condition for the wanted rows of the files; files that are wanted as a whole need none."""
    parts = ["true"]
    for each in ranges:
        files = past.files(each)
        if any(file.start < each.start or each.end < file.end for file in files):
            wanted = f"offset >= {each.start} and offset < {each.end}"
            parts.append(f"(partition != {each.partition} or ({wanted}))")
    return " and ".join(parts)
