"""Builders of logs, down to single bytes, for the tests of what lies below the writer.

Everything here is fixed: log id, times, epochs. The same records give the same bytes in every run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import Any

from hypothesis import HealthCheck, settings

from loglib.config.policies import TopicConfig
from loglib.format import header as batch
from loglib.format.batch import Batch, Source, take
from loglib.format.chain import added
from loglib.format.columns import Columns
from loglib.format.header import NO_PRODUCER, Body, Header, Producer, crc32c
from loglib.format.record import Record
from loglib.format.watermark import Mark, encode_new
from loglib.log import topic_file
from loglib.segment import (
    HEADER_BYTES,
    NO_TIMESTAMP,
    Identity,
    SegmentReader,
    create_segment,
    first_segment,
    segment_name,
)
from loglib.system.directory import Directory
from loglib.system.files import REAL, Files

# A busy machine is no failure, and a failure can be replayed.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)

LOG_ID = bytes(range(16))
NOW = 1_700_000_000_000_000
IDENTITY = Identity.of(LOG_ID, 0)
BODY_AT = batch.HEADER_BYTES
NONCE = 0x4C4C4C4C

# Every combination of columns a batch can have, each with nulls where it can.
EVERYTHING = Columns(
    values=[b"one", None, b"", b"four", "fünf".encode()],
    keys=[b"k1", b"", None, b"k4", None],
    timestamps=[NOW, NOW - 5, NOW + 7, NOW, NOW],
    headers=[(), (("a", b"1"), ("a", b"2")), (("ключ", b""),), (), (("", b"\x00"),)],
)
PLAIN = Columns([b"alpha", b"beta", b"gamma"])


def stamped(
    body: Body | Header, base_offset: int = 0, *, identity: Identity = IDENTITY, previous_crc: int = 0,
    append_time: int = NOW, running_max: int | None = None, durable_up_to: int = 0, producer: Producer = NO_PRODUCER,
    previous_bytes: int = 0, jump_offset: int | None = None,
) -> bytes:  # fmt: skip
    """The header of a batch at `base_offset`."""
    latest = _latest(body, append_time) if running_max is None else running_max
    header, _ = batch.stamp(
        body, base_offset=base_offset, durable_up_to=durable_up_to, writer_epoch=1, writer_nonce=NONCE,
        previous_crc=previous_crc, previous_bytes=previous_bytes,
        jump_offset=base_offset if jump_offset is None else jump_offset,
        append_time=append_time, event_time=append_time, running_max_timestamp=latest,
        producer=producer, producers_in_segment=producer != NO_PRODUCER, salt=identity.salt,
    )  # fmt: skip
    return header


def _latest(body: Body | Header, append_time: int) -> int:
    return append_time if body.max_timestamp is None else body.max_timestamp


def encoded(columns: Columns, base_offset: int = 0, *, codec: int = 0, **facts: Any) -> bytes:
    """A whole batch."""
    body = batch.encode_body(columns, codec=codec)
    return stamped(body, base_offset, **facts) + b"".join(body.parts)


def chained(parts: Sequence[Columns], *, codec: int = 0, identity: Identity = IDENTITY, start: int = 0) -> bytes:
    """Batches back to back, with the chain and the running maximum that a writer gives them."""
    stored, previous_crc, previous_bytes, running_max = b"", 0, 0, NO_TIMESTAMP
    jumps = None
    for columns in parts:
        body = batch.encode_body(columns, codec=codec)
        running_max = max(running_max, _latest(body, NOW))
        jumps = added(jumps, start + len(stored))
        header = stamped(
            body, start + len(stored), identity=identity, previous_crc=previous_crc, running_max=running_max,
            previous_bytes=previous_bytes, jump_offset=jumps.jump_offset,
        )  # fmt: skip
        previous_crc, previous_bytes = int.from_bytes(header[4:8], "little"), body.length
        stored += header + b"".join(body.parts)
    return stored


def header_of(stored: bytes, base_offset: int = 0, *, identity: Identity = IDENTITY) -> Header:
    return batch.parse_header(stored, 0, salt=identity.salt, offset=base_offset)


def write_segment(directory: Path, batches: bytes, *, identity: Identity = IDENTITY) -> Path:
    """The first segment of a partition, with these bytes behind its header."""
    with Directory.open(REAL, str(directory)) as made:
        os.close(create_segment(made, first_segment(identity, created=NOW), 0o600))
    path = directory / segment_name(0)
    with path.open("ab") as file:
        file.write(batches)
    return path


def read_back(path: Path, *, limit: int | None = None, identity: Identity = IDENTITY) -> list[Batch]:
    """All batches of a segment, through the reader that the library uses."""
    with SegmentReader(REAL, str(path), identity) as segment:
        end = segment.end_of_file() if limit is None else limit
        offset, found = segment.base_offset, []
        while offset < end:
            found += segment.batches(offset, end, block_bytes=1 << 20)
            offset = found[-1]._header.next_offset
        return found


def batch_of(stored: bytes, base_offset: int = 0, *, identity: Identity = IDENTITY) -> Batch:
    """The batch in these bytes, checked as a segment's reader checks it."""
    found = take(
        stored, 0, Source("a batch", 0), offset=base_offset, partition=identity.partition, salt=identity.salt
    )
    assert isinstance(found, Batch), "it is cut"
    return found


def columns_of(found: Batch) -> Columns:
    """What a batch says its columns are."""
    return Columns(found.values, found.keys, found.timestamps, found.headers)


def records_of(batches: Sequence[Batch]) -> list[Record]:
    return [record for each in batches for record in each.records()]


def make_topic(path: Path, config: TopicConfig, *, log_id: bytes = LOG_ID) -> None:
    """An empty topic whose log id is not drawn at random."""
    path.mkdir(parents=True)
    for number in range(config.partitions):
        identity = Identity.of(log_id, number)
        directory = path / f"{number:04d}"
        directory.mkdir()
        (directory / "watermark").write_bytes(encode_new(Mark.at_rest(0), identity.salt))
        with Directory.open(REAL, str(directory)) as made:
            os.close(create_segment(made, first_segment(identity, created=NOW), config.permissions))
    describe(path, log_id, config)


def describe(path: Path | str, log_id: bytes, config: TopicConfig, *, files: Files = REAL) -> None:
    """Write the topic's description into its directory."""
    with Directory.open(files, str(path)) as directory:
        topic_file.write(directory, log_id, config)


def a_mark(sequence: int, log_start: int, flushed_end: int, durable_end: int, epoch: int, *, tail: int = 0) -> Mark:
    """A mark of a log whose last batch begins at `tail`."""
    return Mark(sequence, log_start, flushed_end, durable_end, epoch, NONCE, tail, 0, 0, 0, 0, tail)


def edit_json(path: Path, **values: Any) -> None:
    """Change names in a `topic.json` by hand, as its last line allows."""
    changed = json.loads(path.read_text("utf-8")) | values
    changed.pop("crc", None)
    path.write_text(json.dumps(changed), "utf-8")


# --- bytes that no writer would write, but whose checksums are right -------------------------------

_BATCH = Struct("<4sIIIQQIIBBHIIIIIqqqqQQIIQ")


def forged(stored: bytes, *, body: bytes | None = None, identity: Identity = IDENTITY, **fields: int) -> bytes:
    """The batch with other header fields or another body, and checksums that agree with them."""
    values = dict(zip(Header._fields, _BATCH.unpack_from(stored), strict=True))
    body = stored[BODY_AT:] if body is None else body
    if "length" not in fields:
        body = body.ljust(-(-len(body) // 8) * 8, b"\0")
        fields["length"] = BODY_AT + len(body)
    values |= {"body_crc": crc32c(body), **fields}
    header = _BATCH.pack(*values.values())
    return header[:4] + crc32c(header[8:], identity.salt).to_bytes(4, "little") + header[8:] + body


def resealed_segment(content: bytes, at: int, replacement: bytes) -> bytes:
    """A segment file with other bytes in its header and the checksum that agrees with them."""
    changed = bytearray(content)
    changed[at : at + len(replacement)] = replacement
    changed[12:16] = crc32c(changed[16:HEADER_BYTES], crc32c(changed[:12])).to_bytes(4, "little")
    return bytes(changed)


def resealed_slot(slot: bytes, at: int, replacement: bytes, *, salt: int = IDENTITY.salt) -> bytes:
    """A watermark slot with other bytes and the checksum that agrees with them."""
    changed = bytearray(slot)
    changed[at : at + len(replacement)] = replacement
    changed[4:8] = crc32c(changed[8:], crc32c(changed[:4], salt)).to_bytes(4, "little")
    return bytes(changed)


def resealed_frame(frame: bytes, at: int, replacement: bytes) -> bytes:
    """A transfer frame with other bytes in its header and the checksum that agrees with them."""
    changed = bytearray(frame)
    changed[at : at + len(replacement)] = replacement
    changed[32:36] = crc32c(changed[:32]).to_bytes(4, "little")
    return bytes(changed)


def spoil(file: Path, *places: int) -> None:
    """Flip a bit of the bytes at these places."""
    content = bytearray(file.read_bytes())
    for at in places:
        content[at] ^= 1
    file.write_bytes(content)
