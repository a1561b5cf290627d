"""A generated stream: the events of orders in a shop. The same seed gives the same events.

Each order is placed. Most orders are paid, most of these are shipped, and some take too long. The value of an event is
JSON: `{"order": 17, "what": "paid"}`.
"""

import json
import random
from collections.abc import Iterable
from typing import NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from streams.common import Event
from streams.plain import MINUTE

START = 1_772_409_600_000_000  # 2026-03-02
KINDS = ("placed", "paid", "shipped")


class Step(NamedTuple):
    """What an event says."""

    time: int
    order: int
    what: str

    def event(self) -> Event:
        return Event(self.time, b"%d" % self.order, json.dumps({"order": self.order, "what": self.what}).encode())


def steps(count: int, *, seed: int = 1) -> list[Step]:
    """The steps of so many orders, one placed in each minute, in the order of their times."""
    rng = random.Random(seed)
    found = []
    for order in range(count):
        placed = START + order * MINUTE + rng.randrange(0, MINUTE, 1000)
        paid = placed + rng.randrange(MINUTE, rng.choice((90, 20, 20, 20)) * MINUTE, 1000)
        shipped = paid + rng.randrange(MINUTE, rng.choice((90, 20, 20, 20)) * MINUTE, 1000)
        reached = rng.choices((1, 2, 3), cum_weights=(10, 20, 100))[0]
        found += [Step(*step) for step in list(zip((placed, paid, shipped), [order] * 3, KINDS, strict=True))[:reached]]
    return sorted(found)


def delayed(sent: Iterable[Step], *, most: int, seed: int = 1) -> list[Step]:
    """The steps as they arrive, each up to `most` microseconds late."""
    rng = random.Random(seed)
    return sorted(sent, key=lambda step: step.time + rng.randrange(most))


def parsed(events: DataFrame) -> DataFrame:
    """The columns `time`, `order` and `what` of a stream of events."""
    step = f.from_json(f.col("value").cast("string"), "order long, what string")
    return events.select(f.col("timestamp").alias("time"), step.alias("step")).select("time", "step.*")
