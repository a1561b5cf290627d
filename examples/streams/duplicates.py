"""Deduplication: a client that gets no answer sends its event again. Each event counts once."""

import random

from pyspark.sql import DataFrame

from streams.common import Kitchen
from streams.plain import HOUR, MINUTE, agree, micro_batches
from streams.shop import Step, parsed, steps

DELAY = 30 * MINUTE


def once(events: DataFrame) -> DataFrame:
    """Each event once. Spark remembers an event until the watermark has passed it by 30 minutes."""
    return events.withWatermark("time", "30 minutes").dropDuplicatesWithinWatermark(["order", "what"])


def run(kitchen: Kitchen) -> str:
    arrived = sent_again(steps(800))
    path = kitchen.topic("events", [step.event() for step in arrived])
    rows = kitchen.rows(once(parsed(kitchen.stream(path))).selectExpr("unix_micros(time)", "order", "what"))
    count = agree(map(tuple, rows), map(tuple, distinct(arrived)))
    return f"{count:,} different events among {len(arrived):,}"


def sent_again(sent: list[Step]) -> list[Step]:
    """The steps as they arrive: some of them twice, within 20 minutes, or a day later, which is too late."""
    rng = random.Random(1)
    copies = [(step.time + rng.randrange(5 * MINUTE), step) for step in sent]
    copies += [(at + rng.randrange(15 * MINUTE), step) for at, step in copies if rng.random() < 0.3]
    copies += [(at + 24 * HOUR, step) for at, step in copies if rng.random() < 0.02]
    return [step for _, step in sorted(copies)]


def distinct(arrived: list[Step]) -> list[Step]:
    """The steps that are neither late nor remembered."""
    remembered: dict[tuple[int, str], int] = {}  # until when
    found = []
    for (new,), late, final in micro_batches(arrived, delay=DELAY):
        for step in new:
            if step.time > late and (step.order, step.what) not in remembered:
                remembered[step.order, step.what] = step.time + DELAY
                found.append(step)
        remembered = {step: until for step, until in remembered.items() if until > final}
    return found
