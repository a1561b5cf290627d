"""The arithmetic of docs/spark.md, and a simulation that checks it with a thousand partitions.

Usage: spark_sizing.py   prints the table of the page

The simulation runs the batches of a streaming query one after the other. Each batch takes what `maxBytesPerTrigger`
allows, in proportion to what waits in each partition, as the source does. `loglib.spark.plan` cuts it into tasks, and
each core takes the next task when it is free. No bytes are read: a task lasts as long as the measured figures say.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from loglib.spark.plan import Part, Range, plan

MB = 10**6
MIB = 1 << 20

# Measured: docs/spark.md, "What it costs", and the notes there. Bytes of values, uncompressed, from the page cache.
CORE_BYTES_S = 974 * MB / 2  # all columns, on two cores
TASK_S = 0.012  # what a task costs besides its bytes
BATCH_S = 0.09  # what a micro-batch costs besides its tasks: mostly files of the checkpoint
PARTITION_S = 0.0001  # what a partition costs the driver in each batch


@dataclass(frozen=True)
class Plan:
    """A streaming query on a cluster."""

    bytes_s: float  # that all writers append
    partitions: int
    hosts: int
    cores: int  # per host
    trigger_s: float
    trigger_bytes: float = float("inf")  # maxBytesPerTrigger
    task_bytes: int = 128 * MIB  # maxBytesPerPartition
    query: float = 1.0  # CPU of the query itself, as a multiple of reading
    skew: float = 0.8  # of Zipf's law: partition i gets 1 / i**skew of the bytes; 0: all get the same

    @property
    def all_cores(self) -> int:
        return self.hosts * self.cores

    @property
    def core_bytes_s(self) -> float:
        return CORE_BYTES_S / (1 + self.query)


# --- the arithmetic of the page ----------------------------------------------------------------------------------


def batch_seconds(of: Plan, size: float) -> float:
    """How long a batch of this many bytes takes: the fixed cost, and the work divided among the cores.

    At the end the cores wait for the last task. On average half of the cores are busy during that time.
    """
    tasks = max(1.0, size / of.task_bytes)
    work = tasks * TASK_S + size / of.core_bytes_s
    task_s = work / tasks
    return BATCH_S + of.partitions * PARTITION_S + max(work / of.all_cores + task_s / 2, task_s)


def trigger_bytes(of: Plan, seconds: float) -> float:
    """The largest batch that takes this long: a value for maxBytesPerTrigger."""
    low, high = 0.0, 1e15
    while high - low > MB:
        middle = (low + high) / 2
        low, high = (middle, high) if batch_seconds(of, middle) <= seconds else (low, middle)
    return low


def capacity(of: Plan) -> float:
    """Bytes per second while there is a backlog."""
    return of.trigger_bytes / batch_seconds(of, of.trigger_bytes)


def catch_up_seconds(of: Plan, outage_s: float) -> float:
    """How long the query needs to have read everything after a pause."""
    return outage_s * of.bytes_s / (capacity(of) - of.bytes_s)


def network_bytes_s(of: Plan) -> float:
    """What one host must receive from the storage while there is a backlog."""
    return capacity(of) / of.hosts


def requests(size: float, *, window: int = 8 * MIB, segment: int = 1 << 30, task_bytes: int = 128 * MIB) -> float:
    """Requests to read this many bytes from an object store: windows, and some smaller ones per task and segment."""
    tasks = size / task_bytes
    return size / window + 6 * (tasks + size / segment)


# --- the simulation ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """A batch that was simulated."""

    start_s: float
    seconds: float
    size: float
    tasks: int


def shares(of: Plan) -> list[float]:
    """The part of each partition in the bytes that are appended."""
    weights = [1 / (number + 1) ** of.skew for number in range(of.partitions)]
    return [weight / sum(weights) for weight in weights]


def run_batch(of: Plan, parts: list[float]) -> tuple[float, int]:
    """The seconds and the tasks of a batch that reads so much of each partition."""
    ranges = [
        Range(Part("t", "/logs/t", b"", number), 0, 0, int(size), int(size))
        for number, size in enumerate(parts)
        if size >= 1
    ]
    tasks = plan(ranges, max_task_bytes=of.task_bytes, cores=of.all_cores)
    free_at = [0.0] * of.all_cores
    for task in tasks:
        begin = heapq.heappop(free_at)
        size = sum(split.size_bytes for split in task)
        heapq.heappush(free_at, begin + TASK_S + size / of.core_bytes_s)
    return BATCH_S + of.partitions * PARTITION_S + max(free_at), len(tasks)


def simulate(of: Plan, *, outage_s: float, until_s: float) -> list[Batch]:
    """The batches of a query that begins after a pause of `outage_s`."""
    rates = [of.bytes_s * share for share in shares(of)]
    waiting = [outage_s * rate for rate in rates]
    now, batches = 0.0, []
    while now < until_s:
        total = sum(waiting)
        part = min(1.0, of.trigger_bytes / total) if total else 0.0
        parts = [each * part for each in waiting]
        seconds, tasks = run_batch(of, parts)
        batches.append(Batch(now, seconds, sum(parts), tasks))
        lasts = seconds if part < 1 else max(seconds, of.trigger_s)  # the next trigger comes at once, or on time
        waiting = [left - taken + lasts * rate for left, taken, rate in zip(waiting, parts, rates, strict=True)]
        now += lasts
    return batches


def caught_up_at(of: Plan, batches: list[Batch]) -> float:
    """The end of the first batch that read everything."""
    return next(each.start_s + each.seconds for each in batches if each.size < of.trigger_bytes * 0.999)


# --- the example of the page -------------------------------------------------------------------------------------

EXAMPLE = Plan(bytes_s=1000 * MB, partitions=1000, hosts=4, cores=4, trigger_s=10)
EXAMPLE = replace(EXAMPLE, trigger_bytes=trigger_bytes(EXAMPLE, 10))
OUTAGE_S = 1800


def rows() -> list[tuple[str, str, str]]:
    """The table of the page: a quantity, by the formulas, and simulated."""
    steady_size = EXAMPLE.bytes_s * EXAMPLE.trigger_s
    batches = simulate(EXAMPLE, outage_s=OUTAGE_S, until_s=850)
    at_once = [each for each in batches if each.size >= EXAMPLE.trigger_bytes * 0.999]
    steady = batches[-8:]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return [
        (
            "a batch of 10 s of records",
            f"{batch_seconds(EXAMPLE, steady_size):.1f} s",
            f"{mean([each.seconds for each in steady]):.1f} s",
        ),
        (
            "tasks of such a batch",
            f"{steady_size / EXAMPLE.task_bytes:.0f} or some more",
            f"{mean([each.tasks for each in steady]):.0f}",
        ),
        (
            "a batch of `maxBytesPerTrigger`",
            f"{batch_seconds(EXAMPLE, EXAMPLE.trigger_bytes):.1f} s",
            f"{mean([each.seconds for each in at_once]):.1f} s",
        ),
        (
            "speed with a backlog",
            f"{capacity(EXAMPLE) / 1e9:.1f} GB/s",
            f"{sum(each.size for each in at_once) / sum(each.seconds for each in at_once) / 1e9:.1f} GB/s",
        ),
        (
            "after a pause of half an hour, all is read in",
            f"{catch_up_seconds(EXAMPLE, OUTAGE_S) / 60:.0f} minutes",
            f"{caught_up_at(EXAMPLE, batches) / 60:.0f} minutes",
        ),
    ]


def table() -> str:
    lines = ["| | by the formulas | simulated |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows())])


if __name__ == "__main__":
    print(table())  # noqa: T201
