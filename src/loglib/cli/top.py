"""Top: a table of topics that repeats: sizes, how fast they grow, and how late their groups and shares are.

Invariant: it takes no lock and reads no record, and with --count only headers of batches. A topic that is damaged has
its error in the table, and one that is deleted leaves it.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

import click

from ..append.stats import TopicStats
from ..errors import LogError
from ..log.lag import measure_lag, total_lag
from ..system.clock import SYSTEM
from ..topic import Topic
from .arguments import DIRECTORY, as_json, topic_paths
from .output import age, is_terminal, print_each, sized


@click.command()
@click.argument("directory", type=DIRECTORY, default=".")
@click.option("--every", type=click.FloatRange(min=0.1), default=2.0, show_default=True, metavar="SECONDS",
              help="How often the table is printed again.")
@click.option("--count", is_flag=True, help="Also count the records, by reading the header of each batch.")
@as_json
def top(directory: str, every: float, count: bool, as_json: bool) -> None:
    """Show the topics of a directory, how fast they grow, and how late their groups and shares are, until Ctrl-C.

    On a terminal the table is printed again and again. In a pipe, and with --json, it is printed once, without a rate.
    LAG is that of the slowest group or share. OLDEST and NEWEST are the ages of these batches.
    """
    names = ["topic", ">partitions", *[">records"] * count, ">size", ">rate", ">lag", ">lag time", ">oldest", ">newest"]
    looks: dict[str, _Look] = {}
    repeats = is_terminal() and not as_json
    while True:
        rows = []
        for path in topic_paths(directory):
            facts, looks[path] = _facts(path, looks.get(path), count=count)
            rows.append(facts)
        if repeats:
            click.clear()
        print_each(rows, dict, lambda facts: _row(facts, count=count), names, as_json=as_json)
        if not repeats:
            return
        time.sleep(every)


class _Look(NamedTuple):
    """A look at a topic, with which the next one compares."""

    log_id: bytes
    ends: dict[int, int]  # of the partitions
    taken_at: float
    starts: dict[int, int]
    records: int


def _facts(path: str, before: _Look | None, *, count: bool) -> tuple[dict[str, Any], _Look]:
    name = os.path.basename(os.path.abspath(path))
    try:
        with ExitStack() as opened:
            topic = opened.enter_context(Topic.open(path, mode="r"))
            stats = topic.stats()
            look = _look(topic, stats, before, count=count)
    except (LogError, OSError) as error:
        return {"topic": name, "error": str(error)}, before or _Look(b"", {}, 0.0, {}, 0)
    lags = [total_lag(each.values()) for each in stats.lag.values()]
    lags += [total_lag(each.lag for each in share.partitions.values()) for share in stats.shares.values()]
    lag = max(lags, default=None)
    rate = None
    if before is not None and before.log_id == look.log_id:
        grown = sum(look.ends.values()) - sum(before.ends.values())
        rate = max(0, grown) / max(look.taken_at - before.taken_at, 1e-9)
    now_us = SYSTEM()
    return {
        "topic": name, "partitions": len(stats.partitions), "records": look.records if count else None,
        "size_bytes": stats.size_bytes, "bytes_per_second": rate,
        "lag_bytes": None if lag is None else lag.bytes, "lag_seconds": None if lag is None else lag.seconds,
        "oldest_age_us": _age_us(stats.oldest, now_us), "newest_age_us": _age_us(stats.newest, now_us),
        "error": "; ".join(map(str, stats.damaged)) or None,
    }, look  # fmt: skip


def _look(topic: Topic, stats: TopicStats, before: _Look | None, *, count: bool) -> _Look:
    starts = {each.partition: each.log_start_offset for each in stats.partitions}
    ends = {each.partition: each.high_watermark for each in stats.partitions}
    records = 0
    if count:
        known = before if before is not None and (before.log_id, before.starts) == (topic.log_id, starts) else None
        records = 0 if known is None else known.records
        for log in topic._logs():  # noqa: SLF001
            first = starts.get(log.partition, 0) if known is None else known.ends.get(log.partition, 0)
            newer = measure_lag(log, first, now_us=SYSTEM(), count_records=True)
            records += newer.records or 0
            ends[log.partition] = first + newer.bytes  # up to where they are counted
    return _Look(topic.log_id, ends, stats.taken_at, starts, records)


def _age_us(time_us: int | None, now_us: int) -> int | None:
    return None if time_us is None else max(0, now_us - time_us)


def _row(facts: dict[str, Any], *, count: bool) -> tuple[object, ...]:
    if facts["error"] is not None:
        return (facts["topic"], "?", *["?"] * count, "?", "?", "?", "?", "?", facts["error"])
    rate, lag_bytes, lag_seconds = facts["bytes_per_second"], facts["lag_bytes"], facts["lag_seconds"]
    return (
        facts["topic"], facts["partitions"], *[facts["records"]] * count, sized(facts["size_bytes"]),
        "-" if rate is None else f"{sized(round(rate))}/s", "-" if lag_bytes is None else sized(lag_bytes),
        "-" if lag_seconds is None else age(lag_seconds * 1e6), age(facts["oldest_age_us"]),
        age(facts["newest_age_us"]),
    )  # fmt: skip
