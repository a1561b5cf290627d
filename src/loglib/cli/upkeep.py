"""Upkeep: drop what retention says, and check everything."""

from __future__ import annotations

import click

from ..topic import Topic
from ..verify import VerifyReport
from .bar import bar
from .given import DIRECTORY, TOPIC, as_json, confirmed, topic_paths
from .shown import age, note, print_json, print_table, sized

__all__ = ["retain", "verify"]

_DAMAGED = 1


@click.command()
@click.argument("topic", type=TOPIC)
@click.option("--dry-run", is_flag=True, help="Say what would be dropped, and why, and why other segments stay.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
def retain(topic: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Drop the segments of a topic that its retention policy does not keep.

    A service that writes the topic does this by itself. Here it is done for partitions that nobody writes.
    """
    with Topic.open(topic, create=False, **({"mode": "r"} if dry_run else {"shared": True})) as opened:
        decisions = opened.retain(dry_run=True)
        dropped = [each for each in decisions if each.drop]
        if not dry_run and dropped:
            total = sized(sum(each.size_bytes for each in dropped))
            confirmed(f"Drop {len(dropped)} segments of {topic}, {total}?", yes=yes)
            decisions = opened.retain()
    if as_json:
        for each in decisions:
            print_json(each._asdict())
        return
    rows = [
        (each.partition, each.base_offset, sized(each.size_bytes), age(each.age_us), "drop" if each.drop else "keep",
         each.reason)
        for each in decisions
    ]  # fmt: skip
    print_table([">partition", ">from", ">size", ">sealed for", "decision", "reason"], rows)
    if dry_run:
        note("nothing was dropped")


@click.command()
@click.argument("topics", type=DIRECTORY, nargs=-1, required=True)
@as_json
def verify(topics: tuple[str, ...], as_json: bool) -> int:
    """Read and check all of a topic: every header, batch and link. Exit code 1 if anything is damaged.

    Changes nothing, and may run beside a writer.
    """
    damaged = False
    for path in [each for one in topics for each in topic_paths(one)]:
        with Topic.open(path, mode="r") as topic, bar(path) as progress:
            report = topic.verify(progress=progress)
        damaged |= bool(report.damage)
        _print_report(path, report, as_json=as_json)
    return _DAMAGED if damaged else 0


def _print_report(path: str, report: VerifyReport, *, as_json: bool) -> None:
    if as_json:
        damage = [
            each._asdict() | {"offsets": [each.offsets.start, each.offsets.stop] if each.offsets else None}
            for each in report.damage
        ]
        print_json({"topic": path, **report._asdict(), "damage": damage})
        return
    whole = f"{report.records:,} records in {report.batches:,} batches, {sized(report.bytes)}"
    click.echo(f"{path}: {whole} in {report.segments:,} segments: {len(report.damage) or 'no'} damage")
    for each in report.damage:
        click.echo(f"  {each}")
