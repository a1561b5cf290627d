"""Topics for the tests of monitoring: one place in which all is well, and one in which everything is wrong."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from builders import spoil

from conftest import MANUAL, last_segment
from loglib import Retention, Topic, testing

QUIET: dict[str, Any] = {"flush": MANUAL, "retention": Retention(age=None), "segment_age": None}
HOUR_S = 3600


def made(path: Path, *, age_s: float = 0.0, records: int = 6, partitions: int = 1) -> Path:
    """A topic whose records were appended this long ago."""
    at_us = time.time_ns() // 1000 - int(age_s * 1e6)
    with testing.open_topic(path, clock=lambda: at_us, partitions=partitions, **QUIET) as topic:
        for number in range(records):
            topic.append(b"%d" % number, partition=number % partitions, sync=True)
    return path


def committed(path: Path, group: str, start: str) -> None:
    with Topic.open(path, mode="r") as topic:
        topic.reset_group(group, start)


def begun(path: Path, *, age_s: float) -> None:
    """A share began its first record this long ago, and has not settled it."""
    at_us = time.time_ns() // 1000 - int(age_s * 1e6)
    with testing.open_topic(path, clock=lambda: at_us, mode="r", **QUIET) as topic, topic.share("mail") as share:
        assert share.take(0.0) is not None


def healthy(place: Path) -> Path:
    """A directory of topics: a topic with two directories, a group and a share that have done everything."""
    with Topic.open(place / "orders", create=True, partitions=2, replicas=[place / "copy" / "orders"]) as topic:
        topic.append_many([b"x"] * 10)
    committed(place / "orders", "billing", "end")
    made(place / "mails")
    with Topic.open(place / "mails", mode="r") as topic, topic.share("mail") as share:
        share.run(lambda _: None, timeout=0.0)
    return place


def troubled(place: Path) -> Path:
    """A directory of topics, each with a fault: damage, lag, old records, a clock that was wrong, a lost replica."""
    committed(made(place / "lagging", age_s=2 * HOUR_S), "billing", "begin")
    begun(made(place / "jobs", age_s=2 * HOUR_S, records=200), age_s=2 * HOUR_S)
    made(place / "future", age_s=-HOUR_S)
    made(place / "stopped")
    damaged = made(place / "damaged")
    spoil(last_segment(damaged), last_segment(damaged).stat().st_size - 10)
    unreadable = made(place / "unreadable")
    spoil(unreadable / "topic.json", 30)
    with Topic.open(place / "alone", create=True, replicas=[place.parent / "lost" / "alone"]) as topic:
        topic.append(b"x", sync=True)
    shutil.rmtree(place.parent / "lost")
    left_behind(place / "halved", place.parent)
    return place


def left_behind(path: Path, beside: Path) -> None:
    """A topic in three directories, one of which was away when the last record came."""
    others = [beside / "second" / path.name, beside / "third" / path.name]
    at_us = time.time_ns() // 1000 - 2 * HOUR_S * 1_000_000
    for value in (b"x", b"y"):
        with testing.open_topic(path, clock=lambda: at_us, replicas=others, acks="quorum", **QUIET) as topic:
            topic.append(value, sync=True)
        if value == b"x":
            others[1].rename(beside / "away")
    (beside / "away").rename(others[1])
