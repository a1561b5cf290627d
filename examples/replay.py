"""Replay: append a topic's records to another topic, at their original pace or faster.

Reading removes nothing from a log, so records can be replayed many times: to try a new version of a consumer on last
night's traffic, or to load a test system. Order holds only within a partition; the partitions are merged by time.

    python examples/replay.py pageviews-out/hits again --speed 3600          # an hour in a second
    python examples/replay.py pageviews-out/hits again --start -1h
"""

import argparse
import heapq
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic, sleep

from loglib import LogError, Record, Topic


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("topic", type=Path, help="directory of the topic to read")
    parser.add_argument("into", type=Path, help="directory of the topic to append to; made if missing")
    parser.add_argument("--start", default="begin", help='"begin" or a time ago like -15m (default begin)')
    parser.add_argument("--speed", type=float, default=1.0, help="how many times as fast (default 1)")
    args = parser.parse_args()
    if args.speed <= 0:
        parser.error("--speed must be above 0")

    count = 0
    with Topic.open(args.topic, mode="r") as source, Topic.open(
        args.into, create=True, partitions=len(source.partitions)
    ) as target:
        past = heapq.merge(*(p.read(start=args.start) for p in source.partitions), key=lambda record: record.timestamp)
        for record in at_pace(past, args.speed):
            target.append(record.value, record.key, timestamp=record.timestamp, headers=record.headers)
            count += 1
    print(f"{count:,} records replayed into {args.into}")


def at_pace(records: Iterable[Record], speed: float) -> Iterator[Record]:
    """Yield each record at its time, counted from the time of the first record."""
    began = first = None
    for record in records:
        if began is None or first is None:
            began, first = monotonic(), record.timestamp
        ahead = (record.timestamp - first) / 1e6 / speed - (monotonic() - began)
        if ahead > 0:
            sleep(ahead)
        yield record


if __name__ == "__main__":
    try:
        main()
    except (LogError, OSError) as error:
        sys.exit(f"replay: {error}")
