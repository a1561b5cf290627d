"""Ways: every way of reading a topic. All of them must give the same records.

Invariant: nothing here changes a topic, but for the groups that it makes and deletes.

`compare` tries the cheap ways each time and one of the dear ones by chance.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import format_reader
from click.testing import CliRunner

from loglib import Partition, Record, Topic, aio
from loglib.cli.program import _loglib
from loglib.offload import read_archive

from .draw import Choice
from .oracle import Row, Wrong

__all__ = ["compare", "rows_of", "same", "union_of"]

EPOCH = datetime.fromtimestamp(0, UTC)


def rows_of(records: Iterable[Record]) -> list[Row]:
    return [Row(each.partition, each.offset, each.value or b"", each.key, each.timestamp) for each in records]


def in_order(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row[:2])


def same(way: str, found: Iterable[Row], wanted: Iterable[Row]) -> None:
    """Raise `Wrong` unless both have the same records."""
    found, wanted = in_order(found), in_order(wanted)
    if found != wanted:
        places, others = {row[:2] for row in found}, {row[:2] for row in wanted}
        missing, extra = sorted(others - places)[:3], sorted(places - others)[:3]
        raise Wrong(f"way {way}: {len(found)} records of {len(wanted)}; missing {missing}, extra {extra}")


def rows_in_table(table: Any) -> list[Row]:
    columns = ("partition", "offset", "value", "key")
    lists = [table.column(name).to_pylist() for name in columns]
    return [Row(*each) for each in zip(*lists, table.column("timestamp").cast("int64").to_pylist(), strict=True)]


# --- the topic as a whole --------------------------------------------------------------------------------------


def _batches(topic: Topic, choose: Choice) -> list[Row]:
    return [
        Row(batch.partition, offset, value or b"", batch.keys[at], batch.timestamps[at])
        for batch in topic.batches()
        for at, (offset, value) in enumerate(zip(batch.offsets, batch.values, strict=True))
    ]


def _arrow(topic: Topic, choose: Choice) -> list[Row]:
    return rows_in_table(topic.arrow(batch_bytes=choose.pick((100, 5000, 1 << 20))).read_all())


def _follow(topic: Topic, choose: Choice) -> list[Row]:
    with topic.follow("begin", timeout=0) as follower:
        return rows_of(follower)


def _poll(topic: Topic, choose: Choice) -> list[Row]:
    rows: list[Row] = []
    with topic.follow("begin") as follower:
        while some := follower.poll(timeout=0):
            rows += rows_of(some)
    return rows


def _asyncio(topic: Topic, choose: Choice) -> list[Row]:
    async def read() -> list[Row]:
        async with aio.open(topic.path, mode="r") as opened:
            return rows_of([each async for each in opened.read()])

    return asyncio.run(read())


def _group(topic: Topic, choose: Choice) -> list[Row]:
    with topic.group("reads-all", commit="manual") as member:
        rows: list[Row] = []
        while some := member.poll(timeout=0):
            rows += rows_of(some)
    topic.delete_group("reads-all")
    return rows


def _cat(topic: Topic, choose: Choice) -> list[Row]:
    """The command line prints as JSON; its times are not compared."""
    done = CliRunner().invoke(_loglib, ["cat", topic.path, "--json"])
    if done.exit_code:
        raise Wrong(f"cat ends with {done.exit_code}: {done.output[-300:]} {done.exception!r}")
    rows = []
    for line in done.stdout.splitlines():
        each = json.loads(line)
        key = each.get("key")
        rows.append(Row(each["partition"], each["offset"], each["value"].encode(), key and key.encode(), 0))
    return rows


def _format_reader(topic: Topic, choose: Choice) -> list[Row]:
    found = format_reader.read_topic(Path(topic.path))
    return [Row(number, each[0], each[3], each[2], each[1]) for number, records in found.items() for each in records]


CHEAP: Mapping[str, Callable[[Topic, Choice], list[Row]]] = {
    "batches": _batches, "arrow": _arrow, "follow": _follow, "poll": _poll,
}  # fmt: skip
DEAR: Mapping[str, Callable[[Topic, Choice], list[Row]]] = {"asyncio": _asyncio, "group": _group, "cat": _cat}

# By whether the topic may have groups, and whether the directory alone has all of it.
DEAR_OF = {(True, True): ("asyncio", "cat", "group"), (False, True): ("asyncio", "cat"), (True, False): ("group",)}


def compare(
    topic: Topic, rows: Sequence[Row], choose: Choice, *, groups: bool, plain: bool, gaps: bool, tier: str | None = None
) -> None:
    """Read the topic in other ways, too.

    `groups`: it may have groups; `plain`: nothing is compressed, missing or in a place; `gaps`: a repair has declared
    some; `tier`: the place that the topic is read with. Where records are missing, a time and a number of records from
    the end mean something else.
    """
    same(name := choose.pick(sorted(CHEAP)), CHEAP[name](topic, choose), rows)
    chance = choose.random()
    if chance < 0.25 and (groups or tier is None):
        name = choose.pick(DEAR_OF[groups, tier is None])
        without_times = [row._replace(timestamp=0) for row in rows]
        same(name, DEAR[name](topic, choose), without_times if name == "cat" else rows)
    elif chance < 0.4 and plain and _starts_with_segments(topic):
        same("format reader", _format_reader(topic, choose), rows)
    for partition in topic.partitions:
        _compare_parts(partition, [row for row in rows if row.partition == partition.id], choose, gaps=gaps)


def _starts_with_segments(topic: Topic) -> bool:
    return all(each.log_start_offset in {one.base_offset for one in each.segments} for each in topic.partitions)


# --- parts of a partition --------------------------------------------------------------------------------------


def _compare_parts(partition: Partition, rows: list[Row], choose: Choice, *, gaps: bool) -> None:
    """From an offset, between two, from a time, and the last ones."""
    first, count, when, last = choose.random(), choose.random(), choose.random(), choose.random()
    if not rows:
        return
    at = int(first * len(rows))
    until = at + int(count * (len(rows) - at + 1))
    end = rows[until].offset if until < len(rows) else partition.high_watermark
    same("from an offset", rows_of(partition.read(rows[at].offset)), rows[at:])
    same("range", rows_of(partition.read(rows[at].offset, end)), rows[at:until])
    if gaps:
        return
    time = rows[int(when * len(rows))].timestamp
    since = next(number for number, row in enumerate(rows) if row.timestamp >= time)
    same("from a time", rows_of(partition.read(_date(time))), rows[since:])
    tail = int(last * (len(rows) + 1))
    same("last ones", rows_of(partition.read(partition.offset_before_end(tail))), rows[len(rows) - tail :])


def _date(time: int) -> datetime:
    return EPOCH + timedelta(microseconds=time)


# --- past and tail ---------------------------------------------------------------------------------------------


def union_of(topic: Topic, archive: str, choose: Choice) -> list[Row]:
    """The archive and the log as one table, which is compared with its parts."""
    rows = in_order(rows_in_table(topic.arrow(archive=archive).read_all()))
    first, second, number = choose.random(), choose.random(), choose.random()
    if rows:
        partition = rows[int(number * len(rows))].partition
        mine = [row for row in rows if row.partition == partition]
        low, high = sorted((int(first * len(mine)), int(second * len(mine))))
        read = topic.partition(partition).arrow(mine[low].offset, mine[high].offset, archive=archive).read_all()
        same("range of the union", rows_in_table(read), mine[low:high])
        since = next(at for at, row in enumerate(mine) if row.timestamp >= mine[low].timestamp)
        read = topic.partition(partition).arrow(_date(mine[low].timestamp), archive=archive).read_all()
        same("union from a time", rows_in_table(read), mine[since:])
    past = set(rows_in_table(read_archive(archive).read_all()))
    if not past <= set(rows):
        raise Wrong(f"the archive has {len(past - set(rows))} records that the union lacks")
    return rows
