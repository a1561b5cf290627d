"""Groups: consumer groups from outside: members, lag, resets, evictions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import click

from ..errors import CorruptLogError, GroupBusyError, GroupElsewhereError, GroupNotFoundError, LogError
from ..format.display import counted
from ..groups import GroupInfo, several_topics
from ..groups.directory import GROUPS, stored_groups
from ..log import catalog
from ..log.lag import total_lag
from ..system.files import REAL
from ..topic import Topic
from .arguments import DIRECTORY, START, TOPIC, as_json, confirmed, dry_run, topic_paths, yes
from .ending import DAMAGED, FAILED, each_of, fail
from .output import age, is_terminal, note, print_each, safe, sized


def _rows(
    path: str, row: Callable[[Topic, GroupInfo], Iterable[dict[str, Any]]], only: str | None = None,
    *, count_records: bool = False,
) -> tuple[list[dict[str, Any]], int]:  # fmt: skip
    """The rows of the groups that are stored with the topics at a path, or of `only` one, and the exit code.

    What is damaged is left out, with a message. In a directory not every topic needs to have the group.
    """
    rows: list[dict[str, Any]] = []
    paths, missing = topic_paths(path), 0

    def look(each: str) -> int:
        nonlocal missing
        code = 0
        with Topic.open(each, mode="r") as topic:
            for name in topic.groups() if only is None else [only]:
                try:
                    rows.extend(row(topic, topic.group_info(name, count_records=count_records)))
                except GroupElsewhereError as error:
                    note(f"{topic.name}: {error}")
                except GroupNotFoundError:
                    if len(paths) == 1:
                        raise
                    missing += 1
                except CorruptLogError as error:
                    note(f"{topic.name}, group {safe(name)}: {error}")
                    code = DAMAGED
        return code

    code = each_of(paths, look)
    return rows, fail(f"no topic in {path} has a group {only}", FAILED) if missing == len(paths) else code


@click.command()
@click.argument("topic", type=DIRECTORY)
@as_json
def groups(topic: str, as_json: bool) -> int:
    """List the consumer groups of a topic, or of all topics in a directory, without joining them.

    A damaged group is left out, with a message and exit code 1.
    """
    found, code = _rows(topic, _group_facts)
    if found or as_json:
        print_each(found, dict, _group_row, ["topic", "group", ">members", ">lag", ">lag time"], as_json=as_json)
    elif not code:
        note("no groups")
    return code


def _group_facts(topic: Topic, info: GroupInfo) -> Iterator[dict[str, Any]]:
    lag = total_lag(info.lag.values())
    yield {
        "topic": topic.name, "group": info.name, "members": sorted(info.members),
        "lag_bytes": lag.bytes, "lag_seconds": lag.seconds,
    }  # fmt: skip


def _group_row(facts: dict[str, Any]) -> tuple[object, ...]:
    return facts["topic"], facts["group"], len(facts["members"]), *_lag_cells(facts)


def _lag_cells(facts: dict[str, Any]) -> tuple[str, str]:
    return sized(facts["lag_bytes"]), age(facts["lag_seconds"] * 1e6)


@click.command()
@click.argument("topic", type=DIRECTORY)
@click.argument("group", required=False)
@click.option("--count", is_flag=True, help="Also count the records, by reading the header of each batch.")
@click.option("--watch", type=click.FloatRange(min=0.1), is_flag=False, flag_value=2.0, metavar="SECONDS",
              help="Repeat, by default every 2 seconds.")  # fmt: skip
@as_json
def lag(topic: str, group: str | None, count: bool, watch: float | None, as_json: bool) -> int:
    """Show the lag of groups, by partition.

    The lag is given in bytes of log, and as the time since the group's next record was appended. A damaged group is
    left out, with a message and exit code 1.
    """
    while True:
        rows, code = _rows(topic, _lags, group, count_records=count)
        if watch is not None and is_terminal() and not as_json:
            click.clear()
        if rows or as_json or not code:
            _print_lags(rows, count=count, as_json=as_json)
        if watch is None:
            return code
        time.sleep(watch)


def _lags(topic: Topic, info: GroupInfo) -> Iterator[dict[str, Any]]:
    for number, behind in sorted(info.lag.items()):
        commit = info.committed.get(number)
        yield {
            "topic": topic.name, "group": info.name, "partition": number,
            "committed": None if commit is None else commit.offset,
            "high_watermark": topic.partition(number).high_watermark, "lag_bytes": behind.bytes,
            "lag_seconds": behind.seconds, "lag_records": behind.records, "owner": info.owners.get(number),
        }  # fmt: skip


def _print_lags(rows: list[dict[str, Any]], *, count: bool, as_json: bool) -> None:
    def row(each: dict[str, Any]) -> tuple[object, ...]:
        committed = "-" if each["committed"] is None else each["committed"]
        return (
            each["topic"], each["group"], each["partition"], committed, each["high_watermark"], *_lag_cells(each),
            *[each["lag_records"]] * count, each["owner"] or "-",
        )  # fmt: skip

    if not rows and not as_json:
        note("no groups")
    names = ["topic", "group", ">partition", ">committed", ">end", ">lag", ">lag time", *[">records"] * count, "owner"]
    print_each(rows, dict, row, names, as_json=as_json)


@click.command()
@click.argument("topic", type=TOPIC)
@click.argument("group")
@click.option("--to", "start", type=START, required=True, help="begin, end, a time, an age, or PARTITION:OFFSET.")
@click.option("--create", is_flag=True, help="Create the group if it does not exist.")
@dry_run
@yes
@as_json
def reset(topic: str, group: str, start: Any, create: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Move the commits of a group that has no members."""
    with Topic.open(topic, mode="r") as opened:
        if not create:
            opened.group_info(group)  # raises an error with the names of the groups, if there is no such group
        moves = opened.reset_group(group, start, dry_run=True)
        if not dry_run:
            confirmed(f"Move {group} in {counted(len(moves), 'partition')} of {topic}?", yes=yes)
            moves = opened.reset_group(group, start)
    facts = [
        {"partition": number, "before": move.before, "after": move.after, "done": not dry_run}
        for number, move in sorted(moves.items())
    ]
    print_each(facts, dict, _move_row, [">partition", ">before", ">after"], as_json=as_json)
    if not as_json:
        note("nothing was changed" if dry_run else f"moved {group}")


def _move_row(facts: dict[str, Any]) -> tuple[object, ...]:
    return facts["partition"], "-" if facts["before"] is None else facts["before"], facts["after"]


@click.command("delete-group")
@click.argument("topic", type=TOPIC)
@click.argument("group")
@dry_run
@yes
def delete_group(topic: str, group: str, dry_run: bool, yes: bool) -> None:
    """Delete a group that has no members, with its commits, also if it reads other topics of this directory, too."""
    with ExitStack() as opened:
        first = opened.enter_context(Topic.open(topic, mode="r"))
        info = first.group_info(group)
        if info.members:
            raise GroupBusyError(group, list(info.members))
        others = list(_others_of(first, group, opened))
        also = f", which also reads {', '.join(each.name for each in others)}" if others else ""
        what = f"group {group} of {topic}{also}, with its commits in {counted(len(info.committed), 'partition')}"
        if dry_run:
            note(f"would delete {what}")
            return
        confirmed(f"Delete {what}?", yes=yes)
        several_topics.delete_group([first, *others], group)
    note(f"deleted group {group}")


def _others_of(first: Topic, group: str, opened: ExitStack) -> Iterator[Topic]:
    """The other topics beside this one that say that the group is stored with it. `opened` closes them."""
    parent = os.path.dirname(first.path)
    for name in catalog.names(REAL, parent):
        if name != first.name and group in stored_groups(REAL, os.path.join(parent, name, GROUPS)):
            other = opened.enter_context(Topic.open(os.path.join(parent, name), mode="r"))
            try:
                other.group_info(group)
            except GroupElsewhereError as error:
                if error.topic == first.name:
                    yield other


@click.command()
@click.argument("topic", type=TOPIC)
@click.argument("group")
@click.argument("member")
@dry_run
@yes
@as_json
def evict(topic: str, group: str, member: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Take its partitions away from a member of a group that hangs. The others claim them immediately.

    `loglib lag` shows which member owns which partition. The evicted member gets an error when it next asks for
    records or commits; what it had not committed is read again.
    """
    with Topic.open(topic, mode="r") as opened:
        info = opened.group_info(group)
        owned = [number for number, owner in info.owners.items() if owner == member]
        if member not in info.members and not owned:
            raise LogError(f"group {group} has no member {member}; its members: {', '.join(info.members) or 'none'}")
        if not dry_run:
            confirmed(f"Evict {member}, which owns {counted(len(owned), 'partition')} of {topic}?", yes=yes)
            taken = several_topics.evict_member([opened], group, member)
    if dry_run:
        taken = [(opened.name, number) for number in sorted(owned)]
    facts = [{"topic": name, "partition": number, "done": not dry_run} for name, number in taken]
    print_each(facts, dict, lambda each: (each["topic"], each["partition"]), ["topic", ">partition"], as_json=as_json)
    if not as_json:
        note("nothing was changed" if dry_run else f"evicted {member}")
