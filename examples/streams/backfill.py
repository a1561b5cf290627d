"""Backfill and live with the same code: a batch query has the past, a stream goes on exactly where it ends."""

import json
from collections import Counter
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from loglib import Topic
from streams.common import Kitchen, hits_of, page_views
from streams.plain import HOUR, agree, views_of


def hourly(hits: DataFrame) -> DataFrame:
    """Views per page and hour. Batch and stream share this function."""
    return page_views(hits).groupBy(f.window("time", "1 hour")["start"].alias("hour"), "page").count()


def ends_of(path: Path) -> str:
    """Where the topic ends now, as Spark's options have it."""
    with Topic.open(path, mode="r") as topic:
        ends = {str(partition.id): partition.high_watermark for partition in topic.partitions}
    return json.dumps({path.name: ends})


def run(kitchen: Kitchen) -> str:
    hits = hits_of(kitchen.lines)
    past = len(hits) * 2 // 3
    path = kitchen.topic("hits", hits[:past], partitions=4)
    cut = ends_of(path)

    kitchen.topic("hits", hits[past:], partitions=4)  # meanwhile new records come
    target = str(kitchen.directory / "hourly")
    topic = kitchen.spark.read.format("loglib").option("endingOffsets", cut).load(str(path))
    hourly(topic).write.parquet(f"{target}/part=past")

    def save(batch: DataFrame, number: int) -> None:
        hourly(batch).write.mode("overwrite").parquet(f"{target}/part={number}")  # a repeated batch replaces itself

    topic = kitchen.spark.readStream.format("loglib").option("startingOffsets", cut).load(str(path))
    query = (
        topic.writeStream.foreachBatch(save)
        .option("checkpointLocation", str(kitchen.directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()

    parts = kitchen.spark.read.parquet(target).groupBy("hour", "page")
    sums = parts.agg(f.sum("count")).select(f.unix_micros("hour"), "page", "sum(count)")
    expected = Counter((view.time // HOUR * HOUR, view.page) for view in views_of(hits) if view)
    count = agree(map(tuple, sums.collect()), ((*key, count) for key, count in expected.items()))
    return f"{count:,} hours and pages; {past:,} hits from the past, {len(hits) - past:,} live"
