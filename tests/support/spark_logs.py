"""Random topics for the Spark tests, and their records in the shape in which Spark gives them."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from conftest import NOW, QUIET
from loglib import Record, Topic, testing
from loglib.spark.columns import arrow_schema, default_schema
from loglib.spark.options import Options, parse
from loglib.spark.plan import Range, Split, cut
from loglib.spark.ranges import find_ranges
from loglib.spark.scan import scan

COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
Row = dict[str, Any]


def random_topic(
    path: Path, seed: int, *, partitions: int = 2, empty_partitions: int = 0, batches: int = 40, **policies: Any
) -> Path:
    """A topic of small segments with nulls, empties, headers, equal and differing times, by the seed."""
    random = Random(seed)
    policies = QUIET | {"segment_bytes": 4096} | policies
    with testing.open_topic(path, partitions=partitions + empty_partitions, clock=lambda: NOW, **policies) as topic:
        for _ in range(batches):
            count = random.randint(1, 12)
            topic.append_many(
                [random.choice((None, b"", random.randbytes(random.randint(1, 90)))) for _ in range(count)],
                keys=random.choice((None, [random.choice((None, b"", b"k%d" % each)) for each in range(count)])),
                timestamps=random.choice((None, [NOW + random.randint(-9, 9) for _ in range(count)])),
                headers=random.choice((None, [random.choice(((), _headers(random))) for _ in range(count)])),
                partition=random.randrange(partitions),
            )
            topic.flush()
    return path


def _headers(random: Random) -> list[tuple[str, bytes]]:
    return [(random.choice(("a", "b", "ключ")), random.randbytes(random.randint(0, 9))) for _ in range(2)]


def all_records(path: Path) -> list[Record]:
    """What the core's own reader gives, partition by partition."""
    with Topic.open(path, mode="r") as topic:
        return [record for partition in topic.partitions for record in partition.read()]


def as_row(record: Record, topic: str = "topic") -> Row:
    headers = [{"key": name, "value": value} for name, value in record.headers]
    content = (record.key, record.value, topic, record.partition, record.offset, record.timestamp, 0, headers or None)
    return dict(zip(COLUMNS, content, strict=True))


def all_rows(path: Path) -> list[Row]:
    return [as_row(record, path.name) for record in all_records(path)]


def in_order(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["topic"], row["partition"], row["offset"]))


# --- the source without Spark ------------------------------------------------------------------------


def options_of(path: Path | str, **given: object) -> Options:
    return parse({"path": str(path)} | {name: str(value) for name, value in given.items()}, now_us=NOW)


def splits_of(ranges: Iterable[Range], split_bytes: int) -> list[Split]:
    return [split for each in ranges for split in cut(each, split_bytes)]


def scan_batches(
    path: Path | str,
    *,
    split_bytes: int = 1 << 40,
    arrow_batch_bytes: int = 1 << 20,
    schema: StructType | None = None,
    splits: Iterable[Split] | None = None,
    **given: object,
) -> list[pa.RecordBatch]:
    """All Arrow batches of a query, in the order of its splits."""
    options = replace(options_of(path, **given), arrow_batch_bytes=arrow_batch_bytes)
    arrow = arrow_schema(schema or default_schema(options), options)
    batches: list[pa.RecordBatch] = []
    for split in splits_of(find_ranges(options), split_bytes) if splits is None else splits:
        batches += scan(split, arrow, options)
    assert all(batch.schema.equals(arrow) for batch in batches)
    return batches


def scan_rows(path: Path | str, **arguments: Any) -> list[Row]:
    """The same as rows; times are microseconds."""
    return [row for batch in scan_batches(path, **arguments) for row in rows_of(batch)]


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    batch.validate(full=True)
    names = batch.schema.names
    if "timestamp" in names:
        at = names.index("timestamp")
        batch = batch.set_column(at, "timestamp", batch.column(at).cast(pa.int64()))
    rows: list[Row] = batch.to_pylist()
    return rows
