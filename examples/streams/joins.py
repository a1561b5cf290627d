"""Joins: of a stream with a table, and of two streams within a time."""

import random

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from streams.common import Kitchen, hits_of, page_views
from streams.plain import HOUR, MINUTE, agree, micro_batches, views_of
from streams.shop import Step, parsed, steps

DELAY = 10 * MINUTE


def with_section(views: DataFrame, sections: DataFrame) -> DataFrame:
    """Each view with the owner of its section; a section without an owner has null."""
    section = f.split_part("page", f.lit("/"), f.lit(2))
    return views.withColumn("section", section).join(f.broadcast(sections), "section", "left")


def with_payment(orders: DataFrame, payments: DataFrame) -> DataFrame:
    """Each order with its payment within an hour; null if there is none."""
    orders = orders.withWatermark("placed", "10 minutes")
    payments = payments.withWatermark("paid", "10 minutes")
    in_time = f.col("paid").between(f.col("placed"), f.col("placed") + f.expr("INTERVAL 1 HOUR"))
    return orders.join(payments, (f.col("order") == f.col("payment_of")) & in_time, "left_outer")


def run(kitchen: Kitchen) -> str:
    return f"{with_a_table(kitchen)}; {with_a_stream(kitchen)}"


def with_a_table(kitchen: Kitchen) -> str:
    owners = {"blog": "editors", "docs": "engineers", "": "marketing", "presentations": "speakers"}
    sections = kitchen.spark.createDataFrame(list(owners.items()), "section string, owner string")
    hits = hits_of(kitchen.lines)
    views = page_views(kitchen.stream(kitchen.topic("hits", hits, partitions=4)))
    rows = kitchen.rows(with_section(views, sections).select("host", "page", "owner"))
    expected = [(view.host, view.page, owners.get(view.page.split("/")[1])) for view in views_of(hits) if view]
    return f"{agree(map(tuple, rows), expected):,} views with the owners of their sections"


def with_a_stream(kitchen: Kitchen) -> str:
    orders, payments = arriving(count=2000)
    of_orders = parsed(kitchen.stream(kitchen.topic("orders", [step.event() for step in orders])))
    of_payments = parsed(kitchen.stream(kitchen.topic("payments", [step.event() for step in payments])))
    joined = with_payment(
        of_orders.select("order", f.col("time").alias("placed")),
        of_payments.select(f.col("order").alias("payment_of"), f.col("time").alias("paid")),
    )
    rows = kitchen.rows(joined.select("order", f.unix_micros("placed"), f.unix_micros("paid")))
    expected = paid_in_time(orders, payments)
    count, unpaid = agree(map(tuple, rows), expected), sum(paid is None for _, _, paid in expected)
    return f"{count:,} orders, {unpaid:,} of them without a payment within an hour"


def arriving(*, count: int) -> tuple[list[Step], list[Step]]:
    """Orders and payments as they arrive: up to eight minutes late, and one payment in fifty two days late."""
    rng = random.Random(1)

    def arrival(step: Step) -> int:
        days_late = step.what == "paid" and rng.random() < 0.02
        return step.time + (48 * HOUR if days_late else rng.randrange(8 * MINUTE))

    found = sorted(steps(count), key=arrival)
    return [step for step in found if step.what == "placed"], [step for step in found if step.what == "paid"]


def paid_in_time(orders: list[Step], payments: list[Step]) -> list[tuple[int, int, int | None]]:
    """The orders with their payments. Late payments are dropped; an order without one waits for the watermark."""
    placed: dict[int, int] = {}
    paid: dict[int, int] = {}
    last = 0
    for (new_orders, new_payments), late, final in micro_batches(orders, payments, delay=DELAY):
        placed |= {step.order: step.time for step in new_orders if step.time > late}
        paid |= {step.order: step.time for step in new_payments if step.time > late}
        last = final
    found: list[tuple[int, int, int | None]] = []
    for order, time in placed.items():
        if time <= paid.get(order, 0) <= time + HOUR:
            found.append((order, time, paid[order]))
        elif time + HOUR < last:
            found.append((order, time, None))
    return found
