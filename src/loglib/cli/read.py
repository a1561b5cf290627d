"""Read: print the records of a topic, up to its end, or also new ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import click

from ..format.record import Record
from ..log.reader import OnDamage, Reader
from ..partition import Partition
from ..topic import Topic
from .arguments import SOURCE, START, add_options, as_json, partition_start
from .output import DAMAGED, is_terminal, json_line, note, record_facts, safe, when

__all__ = ["cat", "tail"]

_LONG = "{time}  {partition}:{offset}  {key}  {value}"


_printing_options = add_options(
    click.option("-n", "--records", type=click.IntRange(0), metavar="N", help="Print at most N records."),
    click.option("-p", "--partition", type=click.IntRange(0), metavar="P", help="Read only this partition."),
    click.option("--skip-damage", is_flag=True, help="Skip damage, and end with exit code 1."),
    click.option("-l", "--long", "long", is_flag=True, help="Print time, partition, offset, key and value."),
    click.option("--format", "template", metavar="TEXT",
                 help='Such as "{time} {key} {value}"; also partition, offset, timestamp, headers.'),
    click.option("--raw", is_flag=True, help="Print values byte for byte, also to a terminal."),
    click.option("-0", "--null", "nul", is_flag=True, help="End each value with a zero byte instead of a line end."),
    as_json,
)  # fmt: skip


@click.command()
@click.argument("topic", type=SOURCE)
@click.option("--from", "start", type=START, default="begin", show_default=True,
              help="begin, end, a time, an age like -15m, or PARTITION:OFFSET.")  # fmt: skip
@click.option("--to", "end", type=START, help="Where to end.  [default: the present end]")
@_printing_options
def cat(topic: str, start: Any, end: Any, partition: int | None, **how: Any) -> int:
    """Print the values of a topic, one per line.

    On a terminal, control characters and bytes that are not UTF-8 are printed as escapes. To a pipe or file, values are
    printed as they were appended. Records of one partition are in order.
    """
    with Topic.open(topic, mode="r") as opened:
        source = opened if partition is None else opened.partition(partition)
        start, end = partition_start(start, partition), partition_start(end, partition)
        with source.read(start, end, on_damage=_on_gap(how)) as reader:
            return _print(reader, **how)


@click.command()
@click.argument("topic", type=SOURCE)
@click.option("-f", "--follow", is_flag=True, help="Wait for more records, until Ctrl-C.")
@click.option("--from", "start", type=START, help="Where to begin.  [default: the last 10 records]")
@click.option("--timeout", type=float, metavar="SECONDS", help="With -f: end after this time without a record.")
@_printing_options
def tail(
    topic: str, follow: bool, start: Any, timeout: float | None, partition: int | None, records: int | None, **how: Any
) -> int:
    """Print the last records of a topic, and with -f also those that follow.

    Without --from, each partition begins at its last 10 records, or with -n at its last N. With --from, -n ends the
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
        on_damage = _on_gap(how)
        if follow:
            with source.follow(start, timeout, on_damage=on_damage) as reader:
                return _print(reader, records=limit, flush=True, **how)
        with source.read(start, on_damage=on_damage) as reader:
            return _print(reader, records=limit, **how)


def _on_gap(how: dict[str, Any]) -> OnDamage:
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
    return DAMAGED if reader.gaps else 0


def _line(
    *, long: bool, template: str | None, raw: bool, nul: bool, as_json: bool
) -> Callable[[Record], bytes]:
    """The function that returns the bytes to print for a record."""
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
    """The fields of a record by the names that a template may use, safe for a terminal."""
    headers = " ".join(f"{safe(name)}={safe(value)}" for name, value in record.headers)
    return {
        "partition": record.partition, "offset": record.offset, "timestamp": record.timestamp,
        "time": when(record.timestamp), "key": safe(record.key), "value": safe(record.value), "headers": headers,
    }  # fmt: skip


def _check_template(template: str) -> None:
    fields = _texts(Record(0, 0, 0, None, None, (), 1))
    try:
        template.format_map(fields)
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise click.UsageError(f"--format {template!r}: {error}; the names are {', '.join(fields)}") from error
