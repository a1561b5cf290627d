"""Tiering: the sealed segments of a topic, as they are, in an object store or another directory."""

from __future__ import annotations

import click

from ..offload.tier import tier as tier_topic
from ..offload.tier_manifest import TieredPartition
from .arguments import TOPIC, as_json, roll_all
from .bar import bar
from .output import note, print_json, print_table, sized, when

__all__ = ["tier"]


@click.command()
@click.argument("topic", type=TOPIC)
@click.argument("to")
@click.option("--roll", is_flag=True, help="Seal the open segments first, so that every record is uploaded.")
@click.option("--in-flight", type=click.IntRange(1), default=4, show_default=True, help="Segments at once.")
@as_json
def tier(topic: str, to: str, roll: bool, in_flight: int, as_json: bool) -> None:
    """Upload the sealed segments of a topic to TO, a directory or a URI such as s3://bucket/logs/clicks.

    Goes on where the last call ended, and may run beside a writer. Each segment is read back and compared with the log
    before it counts. --roll cannot run beside a writer.
    """
    if roll:
        roll_all(topic)
    with bar(topic) as progress:
        made = tier_topic(topic, to, in_flight=in_flight, progress=progress)
    if as_json:
        for partition in made.partitions:
            print_json({"version": made.version, **_facts(partition)})
        return
    print_table([">partition", ">from", ">to", ">segments", ">size", "last added"], list(map(_row, made.partitions)))
    note(f"version {made.version}: {sized(made.bytes)}")


def _facts(each: TieredPartition) -> dict[str, object]:
    return {
        "partition": each.partition, "start": each.start, "end": each.end,
        "segments": [segment._asdict() for segment in each.segments],
    }  # fmt: skip


def _row(each: TieredPartition) -> tuple[object, ...]:
    size = sized(sum(segment.bytes for segment in each.segments))
    added = max((segment.added for segment in each.segments), default=None)
    return each.partition, each.start, each.end, len(each.segments), size, when(added)
