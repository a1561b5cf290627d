"""Loading into Parquet, a directory for each hour: the load into Hadoop of the Kafka paper."""

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from streams.common import Kitchen, hits_of, page_views
from streams.plain import HOUR, agree, views_of


def load(views: DataFrame, target: Path, checkpoint: Path) -> StreamingQuery:
    """The query: one file for each hour and micro-batch. The hour is that of the session's time zone, here UTC."""
    return (
        views.withColumn("date", f.to_date("time"))
        .withColumn("hour", f.hour("time"))
        .repartition("date", "hour")
        .writeStream.format("parquet")
        .partitionBy("date", "hour")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start(str(target))
    )


def run(kitchen: Kitchen) -> str:
    hits = hits_of(kitchen.lines)
    path, target = kitchen.topic("hits", hits, partitions=4), kitchen.directory / "by-hour"
    load(page_views(kitchen.stream(path)), target, kitchen.directory / "checkpoint").awaitTermination()

    loaded = kitchen.spark.read.parquet(str(target))
    expected = [view for view in views_of(hits) if view]
    count = agree(map(tuple, loaded.select(f.unix_micros("time"), "host", "page").collect()), map(tuple, expected))

    by_hour = Counter(view.time // HOUR for view in expected)
    hour, busiest = max(by_hour.items(), key=lambda each: each[1])
    date = f"{datetime.fromtimestamp(hour * 3600, UTC):%Y-%m-%d}"
    of_hour = loaded.where(f"date = DATE '{date}' AND hour = {hour % 24}")
    directories = len(list(target.glob("date=*/hour=*")))
    agree([of_hour.count(), directories], [busiest, len(by_hour)])
    return f"{count:,} views in {directories} directories; the busiest hour has {busiest:,}"
