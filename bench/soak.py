"""Soak: one writer and one group for many minutes, with retention that waits for the group, as a chart.

    python bench/soak.py --minutes 10 --chart docs/images/soak.svg

The writer appends at a fixed rate and takes `Topic.stats` once a second. The group stands still for a while, and
retention waits for it.
Each record has a number; the group checks that it gets each number once, in order within a partition. The program fails
if one is missing or comes again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import pyplot

from loglib import FlushPolicy, Retention, Topic

PARTITIONS = 2
VALUE_BYTES = 500
KEEP_BYTES, HOLD_BYTES = 64 << 20, 512 << 20  # of each partition; the second: if the group has not read it
PAUSE_S = 30  # the group's, at most
GROUP = "soak"
AT_ONCE = 100  # records in a call


class Moment(NamedTuple):
    """The figures of one second."""

    minutes: float
    records_a_second: float
    size_mb: float
    lag_seconds: float
    flush_ms: float
    writer_mb: float
    consumer_mb: float


def main() -> None:
    """Run the soak and draw the chart."""
    parser = argparse.ArgumentParser(description="A writer and a group for many minutes.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rate", type=int, default=20_000, help="records a second")
    parser.add_argument("--dir", type=Path, help="on the disk to be tried")
    parser.add_argument("--chart", type=Path)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="loglib-soak-", dir=arguments.dir) as directory:
        path, done = Path(directory) / "topic", context.Event()
        keep = Retention(age=None, bytes=KEEP_BYTES, hold_for=[GROUP], hold_bytes=HOLD_BYTES)
        with Topic.open(
            path, create=True, partitions=PARTITIONS, retention=keep, segment_bytes=8 << 20,
            flush=FlushPolicy(interval=0.01),
        ) as topic:  # fmt: skip
            answer = context.SimpleQueue()
            consumer = context.Process(target=consume, args=(path, arguments.minutes * 60, done, answer))
            consumer.start()
            while not topic.groups():
                time.sleep(0.01)
            moments, appended = write(topic, arguments.minutes * 60, arguments.rate, consumer.pid or 0)
            topic.flush()
            done.set()
            handled = answer.get()
            consumer.join()
    assert handled == appended, f"{appended} records were appended, and {handled} were handled"
    print(f"{appended:,} records, each handled once; {moments[-1]}")
    if arguments.chart:
        draw(moments, arguments.chart)


def write(topic: Topic, seconds: float, rate: int, consumer: int) -> tuple[list[Moment], int]:
    """Append at the rate, and note the figures of each second. Returns them and the number of records."""
    moments: list[Moment] = []
    began, number = time.monotonic(), 0
    before = topic.stats()
    while (now := time.monotonic() - began) < seconds:
        while number < now * rate:
            values = [b"%012d" % each + bytes(VALUE_BYTES - 12) for each in range(number, number + AT_ONCE)]
            topic.append_many(values, partition=number // AT_ONCE % PARTITIONS)
            number += AT_ONCE
        if now >= len(moments) + 1:
            stats = topic.stats()
            rates = stats.rates_since(before)
            lag = max((each.seconds for each in stats.lag.get(GROUP, {}).values()), default=0.0)
            moments.append(Moment(
                now / 60, rates.records, stats.size_bytes / 1e6, lag, rates.flush_seconds * 1000, memory_mb("self"),
                memory_mb(consumer),
            ))  # fmt: skip
            before = stats
        time.sleep(0.002)
    return moments, number


def consume(path: Path, seconds: float, done: Any, answer: Any) -> None:
    """Handle each record once, and stand still for some time."""
    began, handled, paused = time.monotonic(), 0, False
    expected = {partition: partition * AT_ONCE for partition in range(PARTITIONS)}
    with Topic.open(path, mode="r") as topic, topic.group(GROUP, commit=0.1) as member:
        while True:
            ended, before = done.is_set(), handled
            for batch in member.batches(timeout=0.2):
                for value in batch.values:
                    number = int((value or b"")[:12])
                    assert number == expected[batch.partition], f"{number} came for {expected[batch.partition]}"
                    ends = (number + 1) % AT_ONCE == 0  # the next numbers are in the other partitions
                    expected[batch.partition] = number + 1 + ends * AT_ONCE * (PARTITIONS - 1)
                handled += len(batch)
                if not paused and time.monotonic() - began > 0.4 * seconds:
                    paused = True
                    time.sleep(min(0.1 * seconds, PAUSE_S))
            if ended and handled == before:
                break
    answer.put(handled)


def memory_mb(process: int | str) -> float:
    """Resident memory of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmRSS"))


def draw(moments: list[Moment], path: Path) -> None:
    """The figures over time, one below the other."""
    panels = [
        ("appended, records/s", ["records_a_second"]),
        ("size of the log, MB", ["size_mb"]),
        ("lag of the group, s", ["lag_seconds"]),
        ("mean flush, ms", ["flush_ms"]),
        ("memory, MB", ["writer_mb", "consumer_mb"]),
    ]
    figure, axes = pyplot.subplots(len(panels), 1, sharex=True, figsize=(8, 9), layout="constrained")
    minutes = [each.minutes for each in moments]
    for axis, (title, names) in zip(axes, panels, strict=True):
        for name in names:
            axis.plot(minutes, [getattr(each, name) for each in moments], linewidth=1, label=name.removesuffix("_mb"))
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        if len(names) > 1:
            axis.legend(loc="lower right", fontsize=8)
    axes[-1].set_xlabel("minutes")
    figure.savefig(path)


if __name__ == "__main__":
    main()
