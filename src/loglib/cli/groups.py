"""Groups: consumer groups from outside: members, lag, resets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import click

from ..errors import GroupElsewhereError
from ..groups import GroupInfo
from ..topic import Topic
from .arguments import DIRECTORY, START, TOPIC, as_json, confirmed, topic_paths
from .output import age, is_terminal, note, print_json, print_table, sized

__all__ = ["groups", "lag", "reset"]


class _Found(NamedTuple):
    """A group on one topic."""

    topic: Topic
    info: GroupInfo

    @property
    def lag_bytes(self) -> int:
        return sum(each.bytes for each in self.info.lag.values())

    @property
    def lag_seconds(self) -> float:
        return max((each.seconds for each in self.info.lag.values()), default=0.0)


def _groups(path: str, only: str | None = None, *, count_records: bool = False) -> Iterator[_Found]:
    """The groups that are stored with the topics at a path."""
    for each in topic_paths(path):
        with Topic.open(each, mode="r") as topic:
            names = topic.groups() if only is None else [only]
            for name in names:
                try:
                    yield _Found(topic, topic.group_info(name, count_records=count_records))
                except GroupElsewhereError as error:
                    note(f"{topic.name}: {error}")


@click.command()
@click.argument("topic", type=DIRECTORY)
@as_json
def groups(topic: str, as_json: bool) -> None:
    """List the consumer groups of a topic, or of all topics in a directory. Joins none of them."""
    rows = []
    for each in _groups(topic):
        members = sorted(each.info.members)
        if as_json:
            facts = {"members": members, "lag_bytes": each.lag_bytes, "lag_seconds": each.lag_seconds}
            print_json({"topic": each.topic.name, "group": each.info.name, **facts})
        else:
            behind = sized(each.lag_bytes), age(each.lag_seconds * 1e6)
            rows.append((each.topic.name, each.info.name, len(members), *behind))
    if rows:
        print_table(["topic", "group", ">members", ">behind", ">behind"], rows)
    elif not as_json:
        note("no groups")


@click.command()
@click.argument("topic", type=DIRECTORY)
@click.argument("group", required=False)
@click.option("--count", is_flag=True, help="Count the records, too, by reading the header of each batch.")
@click.option("--watch", type=click.FloatRange(min=0.1), is_flag=False, flag_value=2.0, metavar="SECONDS",
              help="Look again and again, by default every 2 seconds.")  # fmt: skip
@as_json
def lag(topic: str, group: str | None, count: bool, watch: float | None, as_json: bool) -> None:
    """Say how far groups are behind, by partition.

    Bytes are those of the log. The time is how long ago the next record was appended.
    """
    while True:
        rows = [row for each in _groups(topic, group, count_records=count) for row in _lags(each)]
        if watch is not None and is_terminal() and not as_json:
            click.clear()
        if as_json:
            for row in rows:
                print_json(row)
        else:
            _print_lags(rows, count=count)
        if watch is None:
            return
        time.sleep(watch)


def _lags(found: _Found) -> Iterator[dict[str, Any]]:
    info = found.info
    for number, behind in sorted(info.lag.items()):
        commit = info.committed.get(number)
        yield {
            "topic": found.topic.name,
            "group": info.name,
            "partition": number,
            "committed": None if commit is None else commit.offset,
            "high_watermark": found.topic.partition(number).high_watermark,
            "lag_bytes": behind.bytes,
            "lag_seconds": behind.seconds,
            "lag_records": behind.records,
            "owner": info.owners.get(number),
        }


def _print_lags(rows: list[dict[str, Any]], *, count: bool) -> None:
    if not rows:
        note("no groups")
    names = ["topic", "group", ">partition", ">committed", ">end", ">behind", ">behind", *[">records"] * count, "owner"]
    table = [
        (each["topic"], each["group"], each["partition"], "-" if each["committed"] is None else each["committed"],
         each["high_watermark"], sized(each["lag_bytes"]), age(each["lag_seconds"] * 1e6),
         *[each["lag_records"]] * count, each["owner"] or "-")
        for each in rows
    ]  # fmt: skip
    print_table(names, table)


@click.command()
@click.argument("topic", type=TOPIC)
@click.argument("group")
@click.option("--to", "start", type=START, required=True, help="begin, end, a time, an age, or PARTITION:OFFSET.")
@click.option("--dry-run", is_flag=True, help="Only say what would change.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
def reset(topic: str, group: str, start: Any, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Move the commits of a group that has no members."""
    with Topic.open(topic, mode="r") as opened:
        moves = opened.reset_group(group, start, dry_run=True)
        if not dry_run:
            confirmed(f"Move {group} in {len(moves)} partitions of {topic}?", yes=yes)
            moves = opened.reset_group(group, start)
    rows = [(number, "-" if move.before is None else move.before, move.after) for number, move in sorted(moves.items())]
    if as_json:
        for number, move in sorted(moves.items()):
            print_json({"partition": number, "before": move.before, "after": move.after, "done": not dry_run})
    else:
        print_table([">partition", ">before", ">after"], rows)
        note("nothing was changed" if dry_run else f"moved {group}")
