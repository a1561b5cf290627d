"""What the recipes share: filling topics, reading them as streams, and running a query to the present end.

A topic of these recipes has its records in the order of arrival. A stream reads the same number of records in each
micro-batch (`maxOffsetsPerTrigger`), so plain Python knows the batches, too: `plain.micro_batches` has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f

import accesslog
from loglib import Topic

AT_ONCE = 1000  # records in a micro-batch
_names = count()


class Event(NamedTuple):
    """A record of a topic, before it is appended."""

    time: int  # microseconds since 1970
    key: bytes
    value: bytes


@dataclass(frozen=True)
class Kitchen:
    """What a recipe gets: the session, an empty directory for topics and checkpoints, and access log lines."""

    spark: SparkSession
    directory: Path
    lines: list[bytes] = field(repr=False)

    def topic(self, name: str, events: Sequence[Event], *, partitions: int = 1) -> Path:
        """A topic of these events, appended in this order."""
        path = self.directory / name
        with Topic.open(path, create=True, partitions=partitions) as topic:
            times, keys, values = zip(*events, strict=True)
            topic.append_many(values, keys=keys, timestamps=times)
        return path

    def stream(self, path: Path) -> DataFrame:
        """The topic as a stream from its beginning."""
        return (
            self.spark.readStream.format("loglib")
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", AT_ONCE)
            .load(str(path))
        )

    def rows(self, frame: DataFrame) -> list[Row]:
        """Run the query up to the present end of its topics; all rows that it has put out."""
        name = f"recipe_{next(_names)}"
        writer = frame.writeStream.format("memory").queryName(name).trigger(availableNow=True)
        writer.option("checkpointLocation", str(self.directory / name)).start().awaitTermination()
        rows = self.spark.table(name).collect()
        self.spark.catalog.dropTempView(name)
        return rows


def hits_of(lines: Sequence[bytes]) -> list[Event]:
    """The hits of an access log as events: the key is the host, the time is that of the request."""
    return [Event(hit.timestamp_us, hit.host, line) for line in lines if (hit := accesslog.parse(line))]


def page_views(hits: DataFrame) -> DataFrame:
    """The page views among the hits: without images, style sheets and the like."""
    page = f.regexp_extract(f.col("value").cast("string"), accesslog.PAGE, 1).alias("page")
    views = hits.select(f.col("timestamp").alias("time"), f.col("key").cast("string").alias("host"), page)
    return views.where((f.col("page") != "") & ~f.col("page").rlike(accesslog.NOT_A_PAGE))


def forget_last_commit(checkpoint: Path) -> None:
    """As if Spark had died just before it noted that its last batch is done: the next start repeats this batch."""
    commits = checkpoint / "commits"
    last = max(int(each.name) for each in commits.iterdir() if each.name.isdigit())
    for each in (commits / str(last), commits / f".{last}.crc"):
        each.unlink(missing_ok=True)
