"""Dump: the segments and batches of a partition in their stored form, header by header.

Invariant: damage is printed in its place, and the dump continues after it. The dump reads the files without a lock:
beside a writer it may end in a batch that is being written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import click

from ..config.policies import CODEC_NAMES
from ..errors import CorruptLogError
from ..format.columns import HEADERS, KEYS, NULL_KEYS, NULL_VALUES, SHARED_HEADERS, TIMESTAMPS
from ..format.header import HEADER_BYTES, PRODUCERS, SECTION, SECTION_END, Header
from ..log.log import Log
from ..log.recovery import list_segments
from ..log.search import around
from ..segment import Identity, SegmentReader, read_segment_header
from ..system.files import REAL
from ..topic import Topic
from .arguments import TOPIC, as_json
from .output import DAMAGED, print_json, record_facts, safe, sized, when

__all__ = ["dump"]

_FLAGS = {
    KEYS: "KEYS", NULL_VALUES: "NULL_VALUES", NULL_KEYS: "NULL_KEYS", TIMESTAMPS: "TIMESTAMPS", HEADERS: "HEADERS",
    SHARED_HEADERS: "SHARED_HEADERS",
    PRODUCERS: "PRODUCERS", SECTION: "SECTION", SECTION_END: "SECTION_END",
}  # fmt: skip
_WIDTH = 16  # bytes in a line of --hex


class _Chosen(NamedTuple):
    """The options: the parts to print."""

    start: int
    batches: int | None
    records: bool
    hex: bool
    as_json: bool


@click.command()
@click.argument("topic", type=TOPIC)
@click.option("-p", "--partition", type=click.IntRange(0), metavar="P", default=0, show_default=True,
              help="The partition to print.")
@click.option("--from", "start", type=click.IntRange(0), default=0, metavar="OFFSET",
              help="Skip batches that end before this offset.")
@click.option("-n", "--batches", type=click.IntRange(1), metavar="N", help="Print at most N batches.")
@click.option("--records", is_flag=True, help="Also print the records of each batch.")
@click.option("--hex", "as_hex", is_flag=True, help="Also print the bytes of each batch.")
@as_json
def dump(
    topic: str, partition: int, start: int, batches: int | None, records: bool, as_hex: bool, as_json: bool
) -> int:
    """Print the stored form of segments and batches, to find a fault. docs/format.md explains the names.

    Exit code 1 if anything is damaged.
    """
    with Topic.open(topic, mode="r") as opened:
        directory = opened.partition(partition).path
        log = Log(REAL, directory, Identity.of(opened.log_id, partition))
        try:
            return _dump(log, _Chosen(start, batches, records, as_hex, as_json))
        finally:
            log.close()


def _dump(log: Log, chosen: _Chosen) -> int:
    code, left = 0, chosen.batches
    mark = log.mark()
    bases = [base for base in list_segments(log.files, log.directory) if base >= mark.log_start_offset]
    for base, end in zip(bases, [*bases[1:], mark.flushed_end], strict=True):
        if base < end <= chosen.start:
            continue
        with log.open_base(base, past_damage=True) as segment:
            code |= _show_segment(log, segment, end, as_json=chosen.as_json)
            for found in _headers(log, segment, end, chosen.start):
                if left == 0:
                    return code
                if isinstance(found, Header):
                    code |= _show_batch(segment, found, chosen)
                    left = None if left is None else left - 1
                else:
                    code = DAMAGED
                    _show("damage", {"error": str(found)}, as_json=chosen.as_json)
    return code


def _headers(log: Log, segment: SegmentReader, end: int, start: int) -> Iterator[Header | CorruptLogError]:
    """The headers of the segment's batches that end above `start`, and the damage between them."""
    place = segment.base_offset
    if place < start < end:
        _, place = around(segment, start, *log.end_of(segment, log.mark()))
    while place < end:
        try:
            for header in segment.headers(place, end):
                place = header.next_offset
                yield header
            return
        except CorruptLogError as error:
            yield error
            place = log.behind_damage(place, end)


def _show_segment(log: Log, segment: SegmentReader, end: int, *, as_json: bool) -> int:
    base = segment.base_offset
    facts: dict[str, Any] = {"path": segment.path, "base_offset": base, "size_bytes": end - base}
    try:
        header = read_segment_header(log.files, segment.path, log.identity)
    except CorruptLogError as error:
        _show("segment", facts | {"error": str(error)}, as_json=as_json)
        return DAMAGED
    facts |= header._asdict() | {"log_id": header.log_id.hex(), "boot_id": header.boot_id.hex()}
    facts["producers"] = len(header.producers)
    for name in ("created", "last_append_time"):
        facts[name] = facts[name] if as_json else when(facts[name])
    _show("segment", facts, as_json=as_json)
    return 0


def _show_batch(segment: SegmentReader, header: Header, chosen: _Chosen) -> int:
    facts: dict[str, Any] = {
        **header._asdict(),
        "magic": header.magic.hex(),
        "codec": CODEC_NAMES[header.codec],
        "flags": [name for bit, name in _FLAGS.items() if header.flags & bit],
    }
    code, batch = 0, None
    try:
        (batch,) = segment.batches(header.base_offset, header.next_offset, block_bytes=header.length)
        batch.decode()
    except CorruptLogError as error:
        facts["error"], code = str(error), DAMAGED
    if not chosen.as_json:
        facts["flags"] = "|".join(facts["flags"]) or "none"
        for name in ("append_time", "base_timestamp", "max_timestamp", "running_max_timestamp"):
            facts[name] = when(facts[name])
        for name in ("header_crc", "body_crc", "previous_crc", "writer_nonce"):
            facts[name] = f"{facts[name]:08x}"
    _show("batch", facts, as_json=chosen.as_json)
    if chosen.records and batch is not None and not code:
        for record in batch.records():
            if chosen.as_json:
                print_json({"what": "record", **record_facts(record)})
            else:
                place, time = record.offset, when(record.timestamp)
                click.echo(f"    {place}  {time}  {safe(record.key)}  {safe(record.value)}")
    if chosen.hex:
        _show_bytes(segment, header)
    return code


def _show(what: str, facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json({"what": what, **facts})
        return
    words = [f"{name} {sized(value) if name.endswith('_bytes') else value}" for name, value in facts.items()]
    click.echo(f"{what}: {', '.join(words)}")


def _show_bytes(segment: SegmentReader, header: Header) -> None:
    data = segment.read(header.base_offset, header.length)
    for at in range(0, len(data), _WIDTH):
        line = data[at : at + _WIDTH]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in line)
        part = "header" if at < HEADER_BYTES else "body"
        place = segment.file_position(header.base_offset) + at
        click.echo(f"    {place:010x}  {line.hex(' '):{3 * _WIDTH}} {text}  {part}")
