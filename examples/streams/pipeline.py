"""From a log through Spark to a log, and from there to a consumer group: each view counts exactly once, end to end.

Spark reads the topic `hits` and writes the topic `views`. A consumer group reads `views` and adds to the topic
`totals`. The recipe stops both in the middle, as a crash would, and starts them again.
"""

from collections import Counter
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

import loglib
from loglib import Topic
from streams.common import Kitchen, forget_last_commit, hits_of, page_views
from streams.plain import View, agree, views_of


def start(hits: DataFrame, views: Path, checkpoint: Path) -> StreamingQuery:
    """The query: each page view becomes a record with the page as its key."""
    return (
        page_views(hits)
        .select(f.col("page").alias("key"), f.col("host").alias("value"), f.col("time").alias("timestamp"))
        .writeStream.format("loglib")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start(str(views))
    )


def add_up(views: Topic, totals: Topic, *, most: int | None = None) -> None:
    """The consumer: it appends what it counts and commits what it read in one transaction."""
    done = 0
    with views.group("totals", commit="manual") as group:
        while records := group.poll(max_records=500, timeout=0.5):
            if most is not None and done >= most:
                return  # leaves without a commit: the next member gets these records again
            with loglib.transaction("totals") as tx:
                for page, count in Counter(record.key for record in records).items():
                    tx.append(totals, b"%d" % count, page)
                tx.commit(group)
            done += len(records)


def run(kitchen: Kitchen) -> str:
    hits = hits_of(kitchen.lines)
    path = kitchen.topic("hits", hits, partitions=4)
    views_path, checkpoint = kitchen.directory / "views", kitchen.directory / "checkpoint"

    with Topic.open(
        views_path, create=True, partitions=2
    ) as views, Topic.open(kitchen.directory / "totals", create=True) as totals:
        start(kitchen.stream(path), views_path, checkpoint).awaitTermination()
        forget_last_commit(checkpoint)
        add_up(views, totals, most=1000)
        start(kitchen.stream(path), views_path, checkpoint).awaitTermination()
        add_up(views, totals)

        expected = [view for view in views_of(hits) if view]
        found = [View(record.timestamp, text(record.value), text(record.key)) for record in views.read()]
        count = agree(found, expected)
        sums: Counter[str] = Counter()
        for record in totals.read():
            sums[text(record.key)] += int(text(record.value))
    pages = agree(sums.items(), Counter(view.page for view in expected).items())
    return f"{count:,} views of {pages:,} pages, each counted once, though Spark and the consumer stopped in the middle"


def text(given: bytes | None) -> str:
    return (given or b"").decode()
