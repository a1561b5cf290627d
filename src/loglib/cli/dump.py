"""Dump: the segments and batches of a partition in their stored form, header by header.

Invariant: damage is printed in its place, and the dump continues after it. The dump reads the files without a lock:
beside a writer it may end in a batch that is being written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import click

from ..config.policies import CODEC_NAMES
from ..errors import CorruptLogError
from ..format.columns import HEADERS, KEYS, NULL_KEYS, NULL_VALUES, SHARED_HEADERS, TIMESTAMPS
from ..format.header import HEADER_BYTES, PRODUCERS, SECTION, SECTION_END, Header
from ..format.record import Record
from ..log.log import Log
from ..log.recovery import list_segments
from ..log.search import around
from ..segment import Identity, SegmentReader, read_segment_header
from ..system.files import REAL
from ..topic import Topic
from .arguments import TOPIC, as_json
from .ending import DAMAGED
from .output import print_json, record_facts, safe, sized, when

_FLAGS = {
    KEYS: "KEYS", NULL_VALUES: "NULL_VALUES", NULL_KEYS: "NULL_KEYS", TIMESTAMPS: "TIMESTAMPS", HEADERS: "HEADERS",
    SHARED_HEADERS: "SHARED_HEADERS",
    PRODUCERS: "PRODUCERS", SECTION: "SECTION", SECTION_END: "SECTION_END",
}  # fmt: skip
_WIDTH = 16  # bytes in a line of --hex


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
def dump(topic: str, partition: int, **options: Any) -> int:
    """Print the stored form of segments and batches, to find a fault. docs/format.md explains the names.

    Exit code 1 if anything is damaged.
    """
    with Topic.open(topic, mode="r") as opened:
        log = Log(REAL, opened.partition(partition).path, Identity.of(opened.log_id, partition))
        with closing(log):
            shown = _Dump(log, **options)
            shown.run()
    return shown.code


class _Dump:
    """Prints the segments and batches of a log. `code` is the exit code."""

    def __init__(
        self, log: Log, *, start: int, batches: int | None, records: bool, as_hex: bool, as_json: bool
    ) -> None:
        self._log, self._start, self._left = log, start, batches
        self._records, self._as_hex, self._as_json = records, as_hex, as_json
        self.code = 0

    def run(self) -> None:
        log = self._log
        mark = log.mark()
        bases = [base for base in list_segments(log.files, log.directory) if base >= mark.log_start_offset]
        for base, end in zip(bases, [*bases[1:], mark.flushed_end], strict=True):
            if base < end <= self._start:
                continue
            with log.open_base(base, past_damage=True) as segment:
                self._print_segment(segment, end)
                for found in _headers(log, segment, end, self._start):
                    if self._left == 0:
                        return
                    if isinstance(found, Header):
                        self._print_batch(segment, found)
                        self._left = None if self._left is None else self._left - 1
                    else:
                        self._print("damage", {"error": str(found)})

    def _print(self, what: str, facts: dict[str, Any]) -> None:
        """Print the facts of one thing. An `error` among them is damage."""
        if "error" in facts:
            self.code = DAMAGED
        if self._as_json:
            print_json({"what": what, **facts})
            return
        words = [f"{name} {sized(value) if name.endswith('_bytes') else value}" for name, value in facts.items()]
        click.echo(f"{what}: {', '.join(words)}")

    def _print_segment(self, segment: SegmentReader, end: int) -> None:
        base = segment.base_offset
        facts: dict[str, Any] = {"path": segment.path, "base_offset": base, "size_bytes": end - base}
        try:
            header = read_segment_header(self._log.files, segment.path, self._log.identity)
        except CorruptLogError as error:
            self._print("segment", facts | {"error": str(error)})
            return
        facts |= header._asdict() | {"log_id": header.log_id.hex(), "boot_id": header.boot_id.hex()}
        facts["producers"] = len(header.producers)
        for name in ("created", "last_append_time"):
            facts[name] = facts[name] if self._as_json else when(facts[name])
        self._print("segment", facts)

    def _print_batch(self, segment: SegmentReader, header: Header) -> None:
        flags = [name for bit, name in _FLAGS.items() if header.flags & bit]
        codec = CODEC_NAMES[header.codec]
        facts: dict[str, Any] = {**header._asdict(), "magic": header.magic.hex(), "codec": codec, "flags": flags}
        records: Iterable[Record] = ()
        try:
            (batch,) = segment.batches(header.base_offset, header.next_offset, block_bytes=header.length)
            batch.decode()
            if self._records:
                records = batch.records()
        except CorruptLogError as error:
            facts["error"] = str(error)
        if not self._as_json:
            facts["flags"] = "|".join(flags) or "none"
            for name in ("append_time", "base_timestamp", "max_timestamp", "running_max_timestamp"):
                facts[name] = when(facts[name])
            for name in ("header_crc", "body_crc", "previous_crc", "writer_nonce"):
                facts[name] = f"{facts[name]:08x}"
        self._print("batch", facts)
        for each in records:
            if self._as_json:
                self._print("record", record_facts(each))
            else:
                click.echo(f"    {each.offset}  {when(each.timestamp)}  {safe(each.key)}  {safe(each.value)}")
        if self._as_hex:
            _print_bytes(segment, header)


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
            place = log.after_damage(place, end)


def _print_bytes(segment: SegmentReader, header: Header) -> None:
    data = segment.read(header.base_offset, header.length)
    for at in range(0, len(data), _WIDTH):
        line = data[at : at + _WIDTH]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in line)
        part = "header" if at < HEADER_BYTES else "body"
        place = segment.file_position(header.base_offset) + at
        click.echo(f"    {place:010x}  {line.hex(' '):{3 * _WIDTH}} {text}  {part}")
