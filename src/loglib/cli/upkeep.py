"""Upkeep: which segments a topic keeps: retention, deleting up to a place, and sealing.

Invariant: what cannot be done because another process has a partition is said, with the holder, and ends with exit code
3. The other partitions are done all the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import click

from ..errors import LockedError, OffsetOutOfRangeError
from ..format.display import counted
from ..partition import Partition
from ..retention import SegmentDecision
from ..segment import SegmentInfo
from ..topic import Topic
from .arguments import START, TOPIC, as_json, confirmed, dry_run, yes
from .output import age, note, print_each, refused, sized

# A process that shares a topic gives a partition up within milliseconds. Others are waited for, at each partition.
_TURNS: dict[str, Any] = {"shared": True, "wait": 1.0}


@click.command()
@click.argument("topic", type=TOPIC)
@click.option("--dry-run", is_flag=True, help="Only print each segment, and why it would be dropped or kept.")
@yes
@as_json
def retain(topic: str, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Drop the segments of a topic that its retention policy does not keep.

    A service that writes the topic does this by itself. This command does it for partitions that nobody writes. If
    another process has a partition with segments to drop, it is named, and the exit code is 3.
    """
    held: dict[int, str] = {}
    with Topic.open(topic, **({"mode": "r"} if dry_run else _TURNS)) as opened:
        decisions = opened.retain(dry_run=True)
        dropped = [each for each in decisions if each.drop]
        if not dry_run and dropped:
            total = sized(sum(each.size_bytes for each in dropped))
            confirmed(f"Drop {counted(len(dropped), 'segment')} of {topic}, {total}?", yes=yes)
            decisions, held = _retained(opened, decisions)
    names = [">partition", ">from", ">size", ">sealed for", "decision", "reason"]
    print_each(decisions, SegmentDecision._asdict, _decision_row, names, as_json=as_json)
    if dry_run and not as_json:
        note("nothing was dropped")
    return refused(topic, held)


def _retained(topic: Topic, due: list[SegmentDecision]) -> tuple[list[SegmentDecision], dict[int, str]]:
    """Run retention, given the decisions of a dry run. Returns the decisions, and who holds what could not be dropped.

    A pass over the whole topic leaves out partitions that other processes hold. It is then repeated for each of them
    alone, which names the holder, or takes the partition if it has become free.
    """
    made: dict[int, list[SegmentDecision]] = {}
    for each in topic.retain():
        made.setdefault(each.partition, []).append(each)
    held: dict[int, str] = {}
    for number in sorted({each.partition for each in due}):
        before = [each for each in due if each.partition == number]
        decided = made.get(number, before)
        start = topic.partition(number).log_start_offset
        if any(each.drop and each.base_offset >= start for each in decided):
            try:
                decided = topic.partition(number).retain()
            except LockedError as error:
                held[number] = error.holder
                decided = [_kept_for(each, error.holder) if each.drop else each for each in before]
        made[number] = decided
    return [each for _, decisions in sorted(made.items()) for each in decisions], held


def _kept_for(each: SegmentDecision, holder: str) -> SegmentDecision:
    """The decision on a segment that would be dropped if another process did not hold its partition."""
    return each._replace(drop=False, reason=f"{each.reason}, but {holder} has the partition", held_by=holder)


def _decision_row(each: SegmentDecision) -> tuple[object, ...]:
    decision = "drop" if each.drop else "keep"
    return each.partition, each.base_offset, sized(each.size_bytes), age(each.age_us), decision, each.reason


# For an age such as -7d; and -1h30m is no -h.
@click.command("delete-before", context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]})
@click.argument("topic", type=TOPIC)
@click.argument("places", type=START, nargs=-1, required=True, metavar="PLACE...")
@dry_run
@yes
@as_json
def delete_before(topic: str, places: tuple[Any, ...], dry_run: bool, yes: bool, as_json: bool) -> int:
    """Drop the segments of a topic that lie wholly before a place.

    PLACE is PARTITION:OFFSET, which may be repeated; or, for all partitions, a time, an age such as -7d, or end, which
    drops all records. Groups, archives and the retention policy are not asked. If another process has a partition, it
    is named, and the exit code is 3.
    """
    held: dict[int, str] = {}
    with Topic.open(topic, **({"mode": "r"} if dry_run else _TURNS)) as opened:
        wanted = sorted(_by_partition(opened, places).items())
        plans = [_plan(opened.partition(number), place) for number, place in wanted]
        dropped = sum(each.segments for each in plans)
        if dropped and not dry_run:
            total = sized(sum(each.size_bytes for each in plans))
            confirmed(f"Drop {counted(dropped, 'segment')} of {topic}, {total}?{_unread(opened, plans)}", yes=yes)
            plans = [_done(opened.partition(each.partition), each, held) for each in plans]
    print_each(plans, _Drop._asdict, _drop_row, [">partition", ">from", ">to", ">segments", ">size"], as_json=as_json)
    if dry_run and not as_json:
        note("nothing was dropped")
    return refused(topic, held)


class _Drop(NamedTuple):
    """The segments of a partition that lie before a place."""

    partition: int
    place: int  # the offset
    log_start_offset: int
    after: int  # the log's start without them
    segments: int
    size_bytes: int
    done: bool = False


def _by_partition(topic: Topic, places: tuple[Any, ...]) -> dict[int, int | str]:
    """The place in each partition: an offset, or a start that all share."""
    if len(places) == 1 and isinstance(places[0], str):
        return dict.fromkeys(range(len(topic.partitions)), places[0])
    named: dict[int, int | str] = {}
    for each in places:
        if not isinstance(each, dict):
            raise click.UsageError(f"{each} is for all partitions; give it alone, or PARTITION:OFFSET for some")
        if each.keys() & named.keys():
            raise click.UsageError(f"partition {min(each)} is named twice")
        named |= each
    return named


def _plan(partition: Partition, place: int | str) -> _Drop:
    start, end = partition.log_start_offset, partition.high_watermark
    if isinstance(place, str):
        place = {"begin": start, "end": end}[place] if place in ("begin", "end") else partition.offset_at(place)
    if place > end:
        raise OffsetOutOfRangeError(partition.id, place, start, end)
    before = _between(partition, start, place)
    dropped = [each for each in before if each.sealed or place == end]
    after = dropped[-1].end_offset if dropped else start
    return _Drop(partition.id, place, start, after, len(dropped), sum(each.size_bytes for each in dropped))


def _between(partition: Partition, start: int, end: int) -> list[SegmentInfo]:
    """The segments that lie wholly between two offsets, and are not empty."""
    return [each for each in partition.segments if start <= each.base_offset < each.end_offset <= end]


def _unread(topic: Topic, plans: Iterable[_Drop]) -> str:
    """Words about the groups that have not read what would be dropped."""
    slow: list[str] = []
    for group in topic.groups():
        committed = topic.group_info(group).committed
        behind = [each for each in plans if each.segments and each.partition in committed]
        if any(committed[each.partition].offset < each.after for each in behind):
            slow.append(group)
    return f" Groups that have not read all of it: {', '.join(slow)}." if slow else ""


def _done(partition: Partition, plan: _Drop, held: dict[int, str]) -> _Drop:
    """Drop the segments of a plan. If another process has the partition, note its holder."""
    if not plan.segments:
        return plan
    before = _between(partition, plan.log_start_offset, plan.after)
    try:
        after = partition.delete_before(plan.place)
        # The open segment stays if another process has meanwhile appended to it.
        gone = [each for each in before if each.end_offset <= after]
        size_bytes = sum(each.size_bytes for each in gone)
        return plan._replace(after=after, segments=len(gone), size_bytes=size_bytes, done=True)
    except LockedError as error:
        held[partition.id] = error.holder
        return plan._replace(after=plan.log_start_offset, segments=0, size_bytes=0)


def _drop_row(each: _Drop) -> tuple[object, ...]:
    return each.partition, each.log_start_offset, each.after, each.segments, sized(each.size_bytes)


@click.command()
@click.argument("topic", type=TOPIC)
@click.option("-p", "--partition", type=click.IntRange(0), metavar="P", help="Seal only this partition's.")
@as_json
def seal(topic: str, partition: int | None, as_json: bool) -> int:
    """Seal the open segments of a topic, so that they can be archived, uploaded and dropped. New ones begin.

    An empty segment stays open. If another process has a partition, it is named, and the exit code is 3.
    """
    held: dict[int, str] = {}
    found: list[dict[str, Any]] = []
    with Topic.open(topic, **_TURNS) as opened:
        for each in opened.partitions if partition is None else (opened.partition(partition),):
            try:
                sealed = each.roll()
            except LockedError as error:
                held[each.id] = error.holder
            else:
                open_from = each.segments[-1].base_offset
                found.append({"partition": each.id, "sealed": sealed, "base_offset": open_from})
    print_each(found, dict, _seal_row, [">partition", "sealed", ">open from"], as_json=as_json)
    return refused(topic, held)


def _seal_row(facts: dict[str, Any]) -> tuple[object, ...]:
    return facts["partition"], "yes" if facts["sealed"] else "it is empty", facts["base_offset"]
