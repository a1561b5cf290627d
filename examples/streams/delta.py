"""Loading into a Delta table, each row once, with the package `deltalake`, which needs no `.jar`.

The table's log has the number of the last batch that it has got, under the name of the load. So a batch that Spark
repeats is left out.
"""

from pathlib import Path

from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from streams.common import Kitchen, forget_last_commit, hits_of, page_views
from streams.plain import View, agree, views_of


def load(views: DataFrame, target: Path, checkpoint: Path) -> StreamingQuery:
    """The query: each batch is one version of the table. The rows of a batch pass through the driver's memory."""

    def save(batch: DataFrame, number: int) -> None:
        last = DeltaTable(target).transaction_version("views") if DeltaTable.is_deltatable(str(target)) else None
        if last is not None and number <= last:
            return  # a batch that Spark repeats
        once = CommitProperties(app_transactions=[Transaction("views", number)])
        write_deltalake(target, batch.toArrow(), partition_by=["date"], mode="append", commit_properties=once)

    return (
        views.withColumn("date", f.to_date("time"))
        .writeStream.foreachBatch(save)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def run(kitchen: Kitchen) -> str:
    hits = hits_of(kitchen.lines)
    path, target = kitchen.topic("hits", hits, partitions=4), kitchen.directory / "views"
    checkpoint = kitchen.directory / "checkpoint"
    load(page_views(kitchen.stream(path)), target, checkpoint).awaitTermination()
    forget_last_commit(checkpoint)
    load(page_views(kitchen.stream(path)), target, checkpoint).awaitTermination()

    table = DeltaTable(target)
    found = table.to_pyarrow_table()
    columns = [found["time"].cast("int64").to_pylist(), found["host"].to_pylist(), found["page"].to_pylist()]
    count = agree(map(View, *columns), [view for view in views_of(hits) if view])
    return f"{count:,} views in version {table.version()} of the table"
