"""Stateful processing with timers: an order is done when it is shipped within an hour; otherwise it is overdue.

`transformWithState` in Python needs the package `protobuf`, and Spark's state store in RocksDB, which PySpark brings.
"""

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from streams.common import Kitchen
from streams.plain import HOUR, MINUTE, agree, micro_batches
from streams.shop import Step, delayed, parsed, steps

DELAY = 10 * MINUTE
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


class Monitor(StatefulProcessor):
    """Remembers when an order was placed; a timer goes off an hour later."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.placed = handle.getValueState("placed", "time long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in sorted(rows, key=lambda row: row.time):  # Spark promises no order
            if row.what == "placed":
                self.placed.update((row.time,))
                self.handle.registerTimer((row.time + HOUR) // 1000)
            elif row.what == "shipped" and (state := self.placed.get()):
                (placed,) = state
                if row.time <= placed + HOUR:
                    self.placed.clear()
                    self.handle.deleteTimer((placed + HOUR) // 1000)
                    yield Row(order=key[0], state="done", minutes=(row.time - placed) // MINUTE)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self.placed.clear()
        yield Row(order=key[0], state="overdue", minutes=None)

    def close(self) -> None:
        pass


def monitored(steps: DataFrame) -> DataFrame:
    """What becomes of each order."""
    return (
        steps.withWatermark("time", "10 minutes")
        .selectExpr("order", "what", "unix_micros(time) AS time")
        .groupBy("order")
        .transformWithState(Monitor(), "order long, state string, minutes long", "append", "EventTime")
    )


def run(kitchen: Kitchen) -> str:
    kitchen.spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    arrived = delayed(steps(800), most=MINUTE)
    path = kitchen.topic("events", [step.event() for step in arrived])
    rows = kitchen.rows(monitored(parsed(kitchen.stream(path))))
    kitchen.spark.conf.unset("spark.sql.streaming.stateStore.providerClass")
    expected = orders_done(arrived)
    count, overdue = agree(map(tuple, rows), expected), sum(state == "overdue" for _, state, _ in expected)
    return f"{count:,} orders, {overdue:,} of them overdue"


def orders_done(arrived: list[Step]) -> list[tuple[int, str, int | None]]:
    """What has become of each order when the watermark is where it is at the end."""
    times = {(step.order, step.what): step.time for step in arrived}
    *_, (_, _, watermark) = micro_batches(arrived, delay=DELAY)
    found: list[tuple[int, str, int | None]] = []
    for (order, what), placed in times.items():
        if what == "placed":
            shipped = times.get((order, "shipped"))
            if shipped is not None and shipped <= placed + HOUR:
                found.append((order, "done", (shipped - placed) // MINUTE))
            elif placed + HOUR <= watermark:
                found.append((order, "overdue", None))
    return found
