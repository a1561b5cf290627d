"""Read: print the records of a topic, to its end or as they come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import click

from ..format.record import Record
from ..log.reader import OnGap, Reader
from ..partition import Partition
from ..topic import Topic
from .arguments import SOURCE, START, as_json, partition_start
from .output import is_terminal, json_line, note, record_facts, safe, when

__all__ = ["cat", "tail"]

_DAMAGED = 1
_LONG = "{time}  {partition}:{offset}  {key}  {value}"
_FIELDS = ("partition", "offset", "timestamp", "time", "key", "value", "headers")


def _printing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        as_json,
        click.option("-0", "--null", "nul", is_flag=True, help="End each value with a zero byte, not a line end."),
        click.option("--raw", is_flag=True, help="Values byte for byte, also to a terminal."),
        click.option("--format", "template", metavar="TEXT",
                     help='As in "{time} {key} {value}"; also partition, offset, timestamp, headers.'),
        click.option("-l", "--long", "long", is_flag=True, help="Time, place, key and value."),
        click.option("--skip-damage", is_flag=True, help="Read on behind damage, and end with exit code 1."),
        click.option("-p", "--partition", type=click.IntRange(0), help="Only this partition."),
        click.option("-n", "--records", type=click.IntRange(0), metavar="N", help="At most so many records."),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command()
@click.argument("topic", type=SOURCE)
@click.option("--from", "start", type=START, default="begin", show_default=True,
              help="begin, end, a time, an age like -15m, or PARTITION:OFFSET.")  # fmt: skip
@click.option("--to", "end", type=START, help="Where to end; by default at the present end.")
@_printing_options
def cat(topic: str, start: Any, end: Any, partition: int | None, **how: Any) -> int:
    """Print the values of a topic, one a line.

    On a terminal, control characters and bytes that are not UTF-8 are shown as escapes. In a pipe the values are as
    they were appended. Records of one partition are in order.
    """
    with Topic.open(topic, mode="r") as opened:
        source = opened if partition is None else opened.partition(partition)
        start, end = partition_start(start, partition), partition_start(end, partition)
        with source.read(start, end, on_gap=_on_gap(how)) as reader:
            return _print(reader, **how)


@click.command()
@click.argument("topic", type=SOURCE)
@click.option("-f", "--follow", is_flag=True, help="Wait for more, until Ctrl-C.")
@click.option("--from", "start", type=START, help="Where to begin, instead of the last 10 records.")
@click.option("--timeout", type=float, metavar="SECONDS", help="With -f: end after so long without a record.")
@_printing_options
def tail(
    topic: str, follow: bool, start: Any, timeout: float | None, partition: int | None, records: int | None, **how: Any
) -> int:
    """Print the last records of a topic; with -f also those that come.

    Without --from, each partition begins at its last 10 records, or at its last N with -n. With --from, -n ends the
    output after N records.
    """
    with Topic.open(topic, mode="r") as opened:
        source: Topic | Partition = opened if partition is None else opened.partition(partition)
        partitions = opened.partitions if partition is None else (opened.partition(partition),)
        limit = records
        if start is None:
            count = 10 if records is None else records
            start, limit = {each.id: each.offset_before_end(count) for each in partitions}, None
        start = partition_start(start, partition)
        on_gap = _on_gap(how)
        if follow:
            with source.follow(start, timeout, on_gap=on_gap) as reader:
                return _print(reader, records=limit, flush=True, **how)
        with source.read(start, on_gap=on_gap) as reader:
            return _print(reader, records=limit, **how)


def _on_gap(how: dict[str, Any]) -> OnGap:
    return "skip" if how.pop("skip_damage") else "raise"


def _print(reader: Reader, *, records: int | None, flush: bool = False, **how: Any) -> int:
    line = _line(**how)
    found: Iterable[Record] = reader if records is None else islice(reader, records)
    output = sys.stdout.buffer
    for record in found:
        output.write(line(record))
        if flush:
            output.flush()
    output.flush()
    for damage in reader.gaps:
        note(f"damage: {damage}")
    return _DAMAGED if reader.gaps else 0


def _line(
    *, long: bool, template: str | None, raw: bool, nul: bool, as_json: bool
) -> Callable[[Record], bytes]:
    """What makes the bytes that are printed for a record."""
    if sum([long, template is not None, raw, as_json]) > 1:
        raise click.UsageError("give one of --long, --format, --raw and --json")
    end = b"\0" if nul else b"\n"
    if as_json:
        return lambda record: json_line(record_facts(record)).encode() + end
    if long:
        template = _LONG
    if template is not None:
        _check_template(template)
        return lambda record: template.format_map(_texts(record)).encode() + end
    if is_terminal() and not raw:
        return lambda record: safe(record.value).encode() + end
    return lambda record: (record.value or b"") + end


def _texts(record: Record) -> dict[str, object]:
    """The names that a template may have, safe for a terminal."""
    return {
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "time": when(record.timestamp),
        "key": safe(record.key),
        "value": safe(record.value),
        "headers": " ".join(f"{safe(name)}={safe(value)}" for name, value in record.headers),
    }


def _check_template(template: str) -> None:
    try:
        template.format_map(_texts(Record(0, 0, 0, None, None, (), 1)))
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise click.UsageError(f"--format {template!r}: {error}; names are {', '.join(_FIELDS)}") from error
