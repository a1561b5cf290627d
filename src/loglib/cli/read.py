"""Read: print the records of a topic, up to its end, or also new ones."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import click

from ..errors import InvalidOffsetError, OffsetOutOfRangeError
from ..format.record import Damage, Record
from ..log.reader import OnDamage, Reader
from ..partition import Partition
from ..topic import Topic
from .arguments import SOURCE, START, add_options, as_json, partition_start
from .ending import DAMAGED
from .filters import Filter, filter_options, split_options
from .output import is_terminal, note, safe, when
from .record_lines import CSV_HEAD, FORMS, to_csv, to_json

_LONG = "{time}  {partition}:{offset}  {key}  {value}"


form_options = add_options(
    click.option("-l", "--long", "long", is_flag=True, help="Print time, partition, offset, key and value."),
    click.option("--format", "form", metavar="FORMAT", help="jsonl, csv or parquet, which `loglib append --format` "
                 'reads; or text such as "{time} {key} {value}", also with partition, offset, timestamp, headers.'),
    click.option("--raw", is_flag=True, help="Print values byte for byte, also to a terminal."),
    click.option("-0", "--null", "nul", is_flag=True, help="End each value with a zero byte instead of a line end."),
    as_json,
)  # fmt: skip

_printing_options = add_options(
    click.option("-n", "--records", type=click.IntRange(0), metavar="N", help="Print at most N records."),
    click.option("-p", "--partition", type=click.IntRange(0), metavar="P", help="Read only this partition."),
    click.option("--skip-damage", "on_damage", flag_value="skip", default="raise",
                 help="Skip damage, and end with exit code 1."),
    form_options,
)  # fmt: skip


@click.command()
@click.argument("topic", type=SOURCE)
@click.option("--from", "start", type=START,
              help="begin, end, a time, an age like -15m, or PARTITION:OFFSET.  [default: begin, or --since]")
@click.option("--to", "end", type=START, help="Where to end.  [default: the present end]")
@filter_options
@_printing_options
def cat(
    topic: str, start: Any, end: Any, partition: int | None, on_damage: OnDamage, **options: Any
) -> int:  # fmt: skip
    """Print the values of a topic, one per line.

    On a terminal, control characters and bytes that are not UTF-8 are printed as escapes. To a pipe or file, values are
    printed as they were appended. Records of one partition are in order.
    """
    filters, how = split_options(options)
    with Topic.open(topic, mode="r") as opened:
        source = opened if partition is None else opened.partition(partition)
        start, end = partition_start(filters.start(start) or "begin", partition), partition_start(end, partition)
        with source.read(start, end, on_damage=on_damage) as reader:
            return _print(reader, filters, **how)


@click.command()
@click.argument("topic", type=SOURCE)
@click.option("-f", "--follow", is_flag=True, help="Wait for more records, until Ctrl-C.")
@click.option("--from", "start", type=START, help="Where to begin.  [default: the last 10 records]")
@click.option("--timeout", type=float, metavar="SECONDS", help="With -f: end after this time without a record.")
@filter_options
@_printing_options
def tail(
    topic: str, follow: bool, start: Any, timeout: float | None, partition: int | None, records: int | None,
    on_damage: OnDamage, **options: Any,
) -> int:  # fmt: skip
    """Print the last records of a topic, and with -f also those that follow.

    Without --from and --since, each partition begins at its last 10 records that pass the filters, or with -n at its
    last N. With them, -n ends the output after N records.
    """
    filters, how = split_options(options)
    with Topic.open(topic, mode="r") as opened:
        source: Topic | Partition = opened if partition is None else opened.partition(partition)
        partitions = opened.partitions if partition is None else (opened.partition(partition),)
        limit, code = records, 0
        start = filters.start(start)
        if start is None:
            count = 10 if records is None else records
            start, limit = filters.last_starts(partitions, count, on_damage), None
            for damage in [damage for each in partitions if count for damage in _before(each, start[each.id])]:
                note(f"there may be more records before this damage: {damage}")
                code = DAMAGED
        start = partition_start(start, partition)
        if follow:
            reader = source.follow(start, timeout, on_damage=on_damage)
        else:
            reader = source.read(start, on_damage=on_damage)
        with reader:
            return _print(reader, filters, records=limit, flush=follow, **how) or code


def _before(partition: Partition, offset: int) -> Sequence[Damage]:
    """The damage directly before an offset."""
    if offset <= partition.log_start_offset:
        return ()
    try:
        with partition.read(offset - 1, offset, on_damage="skip") as reader:
            deque(reader, maxlen=0)
            return reader.gaps
    except (InvalidOffsetError, OffsetOutOfRangeError):  # a whole batch ends there; or retention has just dropped it
        return ()


def _print(reader: Reader, filters: Filter, *, records: int | None, flush: bool = False, **how: Any) -> int:
    found = filters.passing(reader)
    if records is not None:
        found = islice(found, records)
    print_records(found, flush=flush, **how)
    for damage in reader.gaps:
        note(f"damage: {damage}")
    return DAMAGED if reader.gaps else 0


def print_records(records: Iterable[Record], *, flush: bool = False, **how: Any) -> None:
    """Print the records in the form that the options say; with `flush` each one immediately."""
    if how["form"] == "parquet":
        _check_one_form(**how)
        from .parquet import write_parquet

        write_parquet(records)
        return
    head, line = text_form(**how)
    output = sys.stdout.buffer
    output.write(head)
    for record in records:
        output.write(line(record))
        if flush:
            output.flush()
    output.flush()


def text_form(
    *, long: bool, form: str | None, raw: bool, nul: bool, as_json: bool
) -> tuple[bytes, Callable[[Record], bytes]]:
    """The bytes to print first, and the function that returns those to print for a record."""
    _check_one_form(long=long, form=form, raw=raw, nul=nul, as_json=as_json)
    end = b"\0" if nul else b"\n"
    if as_json or form == "jsonl":
        return b"", lambda record: to_json(record) + end
    if form == "csv":
        if is_terminal():
            return CSV_HEAD, lambda record: safe(to_csv(record)).encode() + b"\n"
        return CSV_HEAD, lambda record: to_csv(record) + b"\n"
    template = _LONG if long else form
    if template is not None:
        _check_template(template)
        return b"", lambda record: template.format_map(_texts(record)).encode(errors="surrogateescape") + end
    if is_terminal() and not raw:
        return b"", lambda record: safe(record.value).encode() + end
    return b"", lambda record: (record.value or b"") + end


def _check_one_form(*, long: bool, form: str | None, raw: bool, nul: bool, as_json: bool) -> None:
    if sum([long, form is not None, raw, as_json]) > 1:
        raise click.UsageError("give one of --long, --format, --raw and --json")
    if nul and form in ("csv", "parquet"):
        raise click.UsageError(f"--null is not for --format {form}, which has ends of its own")


def _texts(record: Record) -> dict[str, object]:
    """The fields of a record by the names that a template may use, safe for a terminal."""
    headers = " ".join(f"{safe(name)}={safe(value)}" for name, value in record.headers)
    return {
        "partition": record.partition, "offset": record.offset, "timestamp": record.timestamp,
        "time": when(record.timestamp), "key": safe(record.key), "value": safe(record.value), "headers": headers,
    }  # fmt: skip


def _check_template(template: str) -> None:
    # Texts without a letter, as records may have them: a template such as "{key[0]}" would end the command there.
    fields = _texts(Record(0, 0, 0, b"", b"", (), 1)) | {"time": ""}
    if "{" not in template:
        from difflib import get_close_matches  # imported here: only an error needs it

        close = get_close_matches(template.lower().replace("json", "jsonl"), FORMS, 1)
        hint = f"; is {close[0]} meant?" if close else ""
        raise click.UsageError(f"--format {template!r} is none of {', '.join(FORMS)}, and names no field{hint}")
    try:
        template.format_map(fields)
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise click.UsageError(f"--format {template!r}: {error}; the names are {', '.join(fields)}") from error
