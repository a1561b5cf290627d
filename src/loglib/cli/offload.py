"""Offload: the sealed segments of a topic as Parquet files, or as they are in an object store or another directory."""

from __future__ import annotations

import click

from ..offload.archive import archive as archive_topic
from ..offload.archive_manifest import Archived, ArchivedPartition
from ..offload.storage import storage_of
from ..offload.tier import tier as tier_topic
from ..offload.tier_manifest import TieredPartition
from .arguments import SIZE, TOPIC, as_json, roll_all
from .output import bar, note, print_json, print_table, sized, when

__all__ = ["archive", "tier"]


@click.command()
@click.argument("topic", type=TOPIC)
@click.argument("to", type=click.Path(file_okay=False))
@click.option("--roll", is_flag=True, help="Seal the open segments first, so that every record is archived.")
@click.option("--file-bytes", type=SIZE, default="512MiB", show_default=True, help="Of log, at least, for each file.")
@click.option("--skip-gaps", is_flag=True, help="Pass over damage, and over what retention dropped too soon.")
@click.option("--delta", is_flag=True, help="Also make TO a Delta table of the same files; needs the extra [delta].")
@as_json
def archive(topic: str, to: str, roll: bool, file_bytes: int, skip_gaps: bool, delta: bool, as_json: bool) -> None:
    """Write the sealed segments of a topic to Parquet files in TO, a directory or s3://bucket/key.

    Goes on where the last call ended, and may run beside a writer. Each file is read back and compared with the log
    before it counts. --roll cannot run beside a writer.
    """
    if roll:
        roll_all(topic)
    with bar(topic) as progress:
        made = archive_topic(
            topic, to, file_bytes=file_bytes, on_gap="skip" if skip_gaps else "raise", progress=progress, delta=delta
        )
    if as_json:
        for partition in made.partitions:
            print_json({"version": made.version, **_facts(partition)})
        return
    print_table([">partition", ">from", ">to", ">files", ">records", ">size", "newest record"], _rows(made))
    size = f"{sized(made.bytes)}, {made.bytes / made.log_bytes:.0%} of the log" if made.log_bytes else "empty"
    note(f"version {made.version} of {storage_of(to)[1]}: {made.rows:,} records, {size}")


def _facts(each: ArchivedPartition) -> dict[str, object]:
    return each._asdict() | {"files": [file._asdict() for file in each.files]}


def _rows(made: Archived) -> list[tuple[object, ...]]:
    return [
        (
            each.partition, each.start, each.end, len(each.files), sum(file.rows for file in each.files),
            sized(sum(file.bytes for file in each.files)),
            when(max((file.last_time for file in each.files), default=None)),
        )
        for each in made.partitions
    ]  # fmt: skip


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
            print_json({"version": made.version, **_facts_of_tier(partition)})
        return
    print_table([">partition", ">from", ">to", ">segments", ">size", "last added"], list(map(_row, made.partitions)))
    note(f"version {made.version}: {sized(made.bytes)}")


def _facts_of_tier(each: TieredPartition) -> dict[str, object]:
    return {
        "partition": each.partition, "start": each.start, "end": each.end,
        "segments": [segment._asdict() for segment in each.segments],
    }  # fmt: skip


def _row(each: TieredPartition) -> tuple[object, ...]:
    size = sized(sum(segment.bytes for segment in each.segments))
    added = max((segment.added for segment in each.segments), default=None)
    return each.partition, each.start, each.end, len(each.segments), size, when(added)
