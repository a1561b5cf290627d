"""Offload: the sealed segments of a topic as Parquet files, or unchanged in an object store or another directory."""

from __future__ import annotations

from typing import Any

import click

from ..format.display import counted
from ..offload.archive_manifest import ArchivedPartition
from ..offload.archiving import archive as archive_topic
from ..offload.storage import storage_of
from ..offload.tier_manifest import TieredPartition
from ..offload.tiering import tier as tier_topic
from .arguments import DIRECTORY, SIZE, TOPIC, add_options, as_json, roll_all
from .output import bar, note, print_each, sized, when

_NONE_SEALED = "only sealed segments are taken, and this topic has none yet; --roll seals the open ones first"
_topic_and_roll = add_options(
    click.argument("topic", type=TOPIC),
    click.option("--roll", is_flag=True, help="Seal the open segments first, so that every record is included."),
)


@click.command()
@_topic_and_roll
@click.argument("to", type=DIRECTORY)
@click.option("--file-bytes", type=SIZE, default="512MiB", show_default=True, help="Least bytes of log per file.")
@click.option("--skip-gaps", "on_damage", flag_value="skip", default="raise", help="Skip damage, and records that "
              "retention dropped before they were archived.")  # fmt: skip
@click.option("--delta", is_flag=True, help="Also make TO a Delta table of the same files; needs the extra [delta].")
@as_json
def archive(topic: str, to: str, roll: bool, as_json: bool, **options: Any) -> None:
    """Write the sealed segments of a topic as Parquet files to TO, a directory or s3://bucket/key.

    It continues where the last call ended, and may run beside a writer. Each file is read back and compared with the
    log before it counts. --roll cannot run beside a writer.
    """
    if roll:
        roll_all(topic)
    with bar(topic) as progress:
        made = archive_topic(topic, to, progress=progress, **options)

    def facts(each: ArchivedPartition) -> dict[str, Any]:
        return {"version": made.version, **each._asdict(), "files": [file._asdict() for file in each.files]}

    names = [">partition", ">from", ">to", ">files", ">records", ">size", "newest record"]
    print_each(made.partitions, facts, _archived_row, names, as_json=as_json)
    if not as_json:
        size = f"{sized(made.bytes)}, {made.bytes / made.log_bytes:.0%} of the log" if made.log_bytes else "empty"
        note(f"version {made.version} of {storage_of(to)[1]}: {counted(made.rows, 'record')}, {size}")
        if not made.rows:
            note(_NONE_SEALED)


def _archived_row(each: ArchivedPartition) -> tuple[object, ...]:
    rows, size = sum(file.rows for file in each.files), sum(file.bytes for file in each.files)
    newest = max((file.last_time for file in each.files), default=None)
    return each.partition, each.start, each.end, len(each.files), rows, sized(size), when(newest)


@click.command()
@_topic_and_roll
@click.argument("to")
@click.option("--in-flight", type=click.IntRange(1), metavar="N", default=4, show_default=True,
              help="Segments to upload at the same time.")  # fmt: skip
@as_json
def tier(topic: str, to: str, roll: bool, in_flight: int, as_json: bool) -> None:
    """Upload the sealed segments of a topic to TO, a directory or a URI such as s3://bucket/logs/clicks.

    It continues where the last call ended, and may run beside a writer. Each segment is read back and compared with the
    log before it counts. --roll cannot run beside a writer.
    """
    if roll:
        roll_all(topic)
    with bar(topic) as progress:
        made = tier_topic(topic, to, in_flight=in_flight, progress=progress)

    def facts(each: TieredPartition) -> dict[str, Any]:
        segments = [segment._asdict() for segment in each.segments]
        return {
            "version": made.version, "partition": each.partition, "start": each.start, "end": each.end,
            "segments": segments,
        }  # fmt: skip

    names = [">partition", ">from", ">to", ">segments", ">size", "last added"]
    print_each(made.partitions, facts, _tiered_row, names, as_json=as_json)
    if not as_json:
        note(f"version {made.version}: {sized(made.bytes)}")
        if not made.bytes:
            note(_NONE_SEALED)


def _tiered_row(each: TieredPartition) -> tuple[object, ...]:
    size = sum(segment.bytes for segment in each.segments)
    added = max((segment.added for segment in each.segments), default=None)
    return each.partition, each.start, each.end, len(each.segments), sized(size), when(added)
