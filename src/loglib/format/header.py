"""Header: the header of a batch. A batch is a header and a body of columns: the unit of write, CRC and compression.

Invariant: a batch that these functions accept has passed the checks of its header CRC, its body CRC and its
bounds, so every column lies inside the body. `columns` has the table of the body, and checks that every
value lies inside its column. This module does no I/O and keeps no state: bytes in, facts out.

    byte size field                  meaning (all little-endian)
       0   4  magic                  89 4C 4C 42
       4   4  header_crc             CRC-32C of bytes 8..127, salted with log id and partition
       8   4  body_crc               CRC-32C of bytes 128..length-1, unsalted: re-stamping leaves it
      12   4  length                 of the whole batch, a multiple of 8, never below record_count
      16   8  base_offset            offset of the first record; record i has base_offset + i
      24   8  durable_up_to          the writer's synced end when this batch was made
      32   4  writer_epoch           grows with each writer that opens the partition
      36   4  record_count           at least 1
      40   1  version                3
      41   1  codec                  0 none, 1 zlib, 2 lz4, 3 zstd
      42   2  flags                  low byte: a reader must know each bit; high byte: may ignore.
                                     1 KEYS, 2 NULL_VALUES, 4 NULL_KEYS, 8 TIMESTAMPS, 16 HEADERS, 64 SHARED_HEADERS,
                                     256 PRODUCERS: a batch with a producer id is in this segment,
                                     here or before. 512 SECTION: the batch is part of a
                                     transaction, 1024 SECTION_END: its last one in this log.
                                     Reserved: 32 OFFSETS, 128 TYPED
      44   4  stored_bytes           of the body as stored; zero padding follows up to length
      48   4  value_bytes            size of the value column's bytes
      52   4  key_bytes              size of the key column's bytes
      56   4  header_bytes           size of the record headers' section
      60   4  previous_crc           header_crc of the batch before, 0 for the first of a log
      64   8  append_time            log clock in microseconds UTC, never decreasing
      72   8  base_timestamp         event time of the first record, microseconds UTC
      80   8  max_timestamp          largest event time in this batch
      88   8  running_max_timestamp  largest event time in the segment up to and with this batch
      96   8  producer_id            0 = none; with SECTION, the start of the id of the transactions' store
     104   8  producer_sequence      with SECTION, the number of the transaction
     112   4  previous_bytes         length of the batch before, 0 for the first of a log
     116   4  writer_nonce           drawn at random by each writer that opens the partition
     120   8  jump_offset            base offset of an earlier batch of this segment (chain.py); its own,
                                     if it is the segment's first
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from struct import Struct
from typing import NamedTuple

from fastcrc import crc32

from ..config.policies import MAX_BATCH_BYTES, MAX_DECOMPRESSED_BYTES, MAX_OFFSET, MAX_RECORDS_PER_BATCH
from ..errors import CorruptLogError, UnsupportedFormatError
from ..system.files import Buffer
from . import codec as codecs
from .columns import (
    HEADERS,
    KEYS,
    NULL_KEYS,
    NULL_VALUES,
    SHARED_HEADERS,
    TIMESTAMPS,
    Columns,
    Encoded,
    Layout,
    aligned,
    encode,
)
from .columns import layout as layout_of_columns

crc32c: Callable[..., int] = crc32.iscsi  # (data, initial=0) -> int; initial chains and salts

MAGIC = b"\x89LLB"
VERSION = 3
# Flags besides those of the columns.
OFFSETS = 0x0020  # reserved: records have been left out, and a column says which offsets the others have
TYPED = 0x0080  # reserved: the body has columns of types, and the id of their schema
PRODUCERS = 0x0100  # this batch, or one before it in its segment, names a producer
SECTION, SECTION_END = 0x0200, 0x0400  # the batch is part of a transaction; it is the last one in this log
_KNOWN_FLAGS = KEYS | NULL_VALUES | NULL_KEYS | TIMESTAMPS | HEADERS | SHARED_HEADERS
_MUST_KNOW = 0x00FF

FIELD_KINDS = "IIIQQIIBBHIIIIIqqqqQQIIQ"  # of the fields after the magic, as the module struct names them
_HEADER = Struct("<4s" + FIELD_KINDS)
_HEADER_START, _SEALED = Struct("<4sI"), Struct("<" + FIELD_KINDS[1:])  # its two parts: the CRC covers the second
_ONE_OFFSET, _TWO_OFFSETS = Struct("<2i").pack, Struct("<4i").pack  # the offsets columns of one record
_PADDING = [bytes(-size & 7) for size in range(8)]  # after a column, by the last three bits of its size
HEADER_BYTES = _HEADER.size
assert HEADER_BYTES == 128 == _HEADER_START.size + _SEALED.size


@dataclass(eq=False, repr=False)
class BadBatch(Exception):
    """The bytes are not the expected batch."""

    at: int  # the byte of the batch
    found: str
    expected: str

    def in_file(self, path: str, file_position: int) -> CorruptLogError:
        """The public error for a batch that begins at `file_position` of the file."""
        return CorruptLogError(path, file_position + self.at, self.found, self.expected)


@dataclass(eq=False, repr=False)
class NewerBatch(Exception):
    """The batch is intact, but of a version or with a required flag that this version of loglib does not read."""

    what: str
    found: int
    supported: int | str

    def in_file(self, path: str, _: int) -> UnsupportedFormatError:
        """The public error for a batch of the file. It names no position: the batch is whole."""
        return UnsupportedFormatError(path, self.what, self.found, self.supported)


class Producer(NamedTuple):
    """The producer of a batch, and its number for the batch. A pair that is appended again is ignored."""

    id: int
    sequence: int


NO_PRODUCER = Producer(0, 0)


class Header(NamedTuple):
    """A batch header's fields. The table at the top of the module explains them."""

    magic: bytes
    header_crc: int
    body_crc: int
    length: int
    base_offset: int
    durable_up_to: int
    writer_epoch: int
    record_count: int
    version: int
    codec: int
    flags: int
    stored_bytes: int
    value_bytes: int
    key_bytes: int
    header_bytes: int
    previous_crc: int
    append_time: int
    base_timestamp: int
    max_timestamp: int
    running_max_timestamp: int
    producer_id: int
    producer_sequence: int
    previous_bytes: int
    writer_nonce: int
    jump_offset: int

    @property
    def previous_offset(self) -> int:
        """Base offset of the previous batch; for the first batch of a log, its own."""
        return self.base_offset - self.previous_bytes

    @property
    def next_offset(self) -> int:
        """Offset of the batch after this one."""
        return self.base_offset + self.length

    @property
    def offsets(self) -> range:
        """The offsets of the records."""
        return range(self.base_offset, self.base_offset + self.record_count)


class Body(NamedTuple):
    """An encoded body and its facts for a header, without a place in a log."""

    parts: list[Buffer]  # stored bytes and padding
    body_crc: int
    length: int  # of the batch, with header and padding
    record_count: int
    codec: int
    flags: int
    stored_bytes: int
    value_bytes: int
    key_bytes: int
    header_bytes: int
    base_timestamp: int | None  # None: the time of appending
    max_timestamp: int | None


def make_salt(log_id: bytes, partition: int) -> int:
    """The salt of a partition's CRCs: a batch of another log or partition fails the check."""
    return crc32c(log_id + partition.to_bytes(4, "little"))


# --- records to bytes -------------------------------------------------------------------------


def encode_body(columns: Columns, *, codec: int, limit_bytes: int = MAX_BATCH_BYTES) -> Body:
    """Encode the records. Without a timestamp column they get the time of appending.

    Raises `RecordTooLargeError` or `ValueError` for more than the limit or a batch can hold, and `TypeError` for a
    value or key that is neither null nor bytes.
    """
    count = len(columns.values)
    if count > MAX_RECORDS_PER_BATCH:
        raise ValueError(f"a batch holds at most {MAX_RECORDS_PER_BATCH} records, not {count}; append them in parts")
    return body_of(encode(columns, limit_bytes=limit_bytes), count, codec=codec)


def body_of(encoded: Encoded, count: int, *, codec: int) -> Body:
    """The body of `count` records whose columns are encoded already: compressed, padded and with its CRC."""
    parts, flags, value_bytes, key_bytes, header_bytes, base_timestamp, max_timestamp = encoded
    codec, parts, stored_bytes = _compressed(parts, codec)
    length = aligned(max(HEADER_BYTES + stored_bytes, count))
    if length > HEADER_BYTES + stored_bytes:
        parts.append(bytes(length - HEADER_BYTES - stored_bytes))
    body_crc = 0
    for part in parts:
        body_crc = crc32c(part, body_crc)
    return Body(
        parts, body_crc, length, count, codec, flags, stored_bytes,
        value_bytes, key_bytes, header_bytes, base_timestamp, max_timestamp,
    )  # fmt: skip


def _compressed(parts: list[Buffer], codec: int) -> tuple[int, list[Buffer], int]:
    size = sum(map(len, parts))
    if codec and size <= MAX_DECOMPRESSED_BYTES:
        stored = codecs.compress(codec, b"".join(parts))
        if len(stored) < size:
            return codec, [stored], len(stored)
    return codecs.NONE, parts, size


def stamp(
    body: Body | Header,
    *,
    base_offset: int,
    durable_up_to: int,
    writer_epoch: int,
    writer_nonce: int,
    previous_crc: int,
    previous_bytes: int,
    jump_offset: int,
    append_time: int,
    event_time: int,
    running_max_timestamp: int,
    producer: Producer,
    producers_in_segment: bool,
    salt: int,
    section: int = 0,
) -> tuple[bytes, int]:
    """Bind a body to its place in a log; returns the header's bytes and its CRC.

    A `Header` as `body` gives an existing batch a new place without a change of its body. Records without
    timestamps get the `event_time`. `section`: the flags SECTION and SECTION_END, for a transaction's batch.
    """
    flags = body.flags & _MUST_KNOW | (PRODUCERS if producers_in_segment else 0) | section
    times = (body.base_timestamp, body.max_timestamp) if body.base_timestamp is not None else (event_time, event_time)
    unsealed = _HEADER.pack(
        MAGIC, 0, body.body_crc, body.length, base_offset, durable_up_to, writer_epoch, body.record_count,
        VERSION, body.codec, flags, body.stored_bytes, body.value_bytes, body.key_bytes, body.header_bytes,
        previous_crc, append_time, *times, running_max_timestamp,
        producer.id, producer.sequence, previous_bytes, writer_nonce, jump_offset,
    )  # fmt: skip
    sealed = unsealed[8:]
    header_crc = crc32c(sealed, salt)
    return _HEADER_START.pack(MAGIC, header_crc) + sealed, header_crc


def batch_of_one(
    value: bytes, key: bytes | None, place: tuple[int, int, int], rest: tuple[int, ...], *, flags: int, salt: int
) -> tuple[bytes, int]:
    """One record without headers, timestamp and codec as a whole batch; returns its bytes and its header's CRC.

    The bytes are those of `encode_body` and `stamp`, in one step: for a record that is flushed alone. Both tuples are
    fields in the order of the header, because names would cost as much as the packing: `place` from base_offset to
    writer_epoch, `rest` from previous_crc on.
    """
    value_bytes, key_bytes = len(value), 0
    if key is None:
        body = b"".join((_ONE_OFFSET(0, value_bytes), value, _PADDING[value_bytes & 7]))
    else:
        key_bytes, flags = len(key), flags | KEYS
        offsets = _TWO_OFFSETS(0, value_bytes, 0, key_bytes)
        body = b"".join((offsets, value, _PADDING[value_bytes & 7], key, _PADDING[key_bytes & 7]))
    stored_bytes = len(body)
    sealed = _SEALED.pack(
        crc32c(body), HEADER_BYTES + stored_bytes, *place, 1,
        VERSION, codecs.NONE, flags, stored_bytes, value_bytes, key_bytes, 0, *rest,
    )  # fmt: skip
    header_crc = crc32c(sealed, salt)
    return b"".join((_HEADER_START.pack(MAGIC, header_crc), sealed, body)), header_crc


# --- bytes to facts ---------------------------------------------------------------------------


def parse_header(buffer: Buffer, position: int, *, salt: int, offset: int) -> Header:
    """The checked header at `position` of the buffer. Its base offset must be `offset`.

    Raises `BadBatch` if the bytes are not that batch, and `NewerBatch` if this version cannot read the batch.
    """
    if len(buffer) - position < HEADER_BYTES:
        raise BadBatch(len(buffer) - position, "the end of the data", f"a batch header of {HEADER_BYTES} bytes")
    header = unchecked_header(buffer, position)
    if header.magic != MAGIC:
        raise BadBatch(0, f"bytes {header.magic.hex()}", f"the batch magic {MAGIC.hex()}")
    actual = crc32c(buffer[position + 8 : position + HEADER_BYTES], salt)
    if header.header_crc != actual:
        raise BadBatch(4, f"header CRC {header.header_crc:08x}", f"{actual:08x}, that of the header's bytes")
    if header.base_offset != offset:
        raise BadBatch(16, f"a batch made for offset {header.base_offset}", f"offset {offset}")
    if header.version != VERSION:
        if header.version:
            raise NewerBatch("batch version", header.version, VERSION)
        raise BadBatch(40, "batch version 0", f"at least {VERSION}")
    if header.flags & _MUST_KNOW & ~_KNOWN_FLAGS:
        # A set of bits is not newer because it is a larger number, so what is known is a text.
        raise NewerBatch("batch flags", header.flags & _MUST_KNOW & ~_KNOWN_FLAGS, f"{_KNOWN_FLAGS:#x}")
    _check_sizes(header)
    return header


def unchecked_header(buffer: Buffer, position: int) -> Header:
    """The fields of the header at `position`, which the caller has checked or will check."""
    return tuple.__new__(Header, _HEADER.unpack_from(buffer, position))  # as `new_tuple` in record.py


def unchecked_headers(buffer: bytes, positions: Sequence[int]) -> list[Header]:
    """The fields of many headers, as `unchecked_header` has them, in loops in C."""
    found = b"".join(buffer[position : position + HEADER_BYTES] for position in positions)
    return list(map(tuple.__new__, repeat(Header), _HEADER.iter_unpack(found)))


def _check_sizes(header: Header) -> None:
    """Refuse impossible sizes: a CRC proves that the bytes are unchanged, not that they make sense."""
    length, count, stored = header.length, header.record_count, header.stored_bytes
    if not HEADER_BYTES < length <= MAX_BATCH_BYTES or length & 7:
        raise BadBatch(12, f"length {length}", f"a multiple of 8 up to {MAX_BATCH_BYTES}")
    if header.base_offset + length > MAX_OFFSET:
        raise BadBatch(16, f"base offset {header.base_offset}", f"an end of the batch up to {MAX_OFFSET}")
    if not 1 <= count <= min(length, MAX_RECORDS_PER_BATCH):
        raise BadBatch(36, f"record count {count}", f"1 to {min(length, MAX_RECORDS_PER_BATCH)}")
    if header.codec > codecs.ZSTD:
        raise NewerBatch("codec", header.codec, codecs.ZSTD)
    if stored > length - HEADER_BYTES:
        raise BadBatch(44, f"stored bytes {stored}", f"at most {length - HEADER_BYTES}")
    if header.value_bytes + header.key_bytes + header.header_bytes > MAX_BATCH_BYTES:
        raise BadBatch(48, "column sizes beyond the limit", f"at most {MAX_BATCH_BYTES} bytes together")
    body_bytes = layout(header).end
    if header.codec == codecs.NONE:
        if body_bytes != stored:
            raise BadBatch(44, f"stored bytes {stored}", f"{body_bytes}, the sum of the columns")
    elif body_bytes > MAX_DECOMPRESSED_BYTES:
        raise BadBatch(48, f"{body_bytes} bytes when decompressed", f"at most {MAX_DECOMPRESSED_BYTES}")


def layout(header: Header) -> Layout:
    """The places of the columns in the body, from the header alone."""
    return layout_of_columns(
        header.record_count, header.flags, header.value_bytes, header.key_bytes, header.header_bytes
    )


def check_body(header: Header, body: Buffer) -> None:
    """Check the CRC over all bytes after the header, with padding; `BadBatch` if it fails."""
    actual = crc32c(body)
    if actual != header.body_crc:
        raise BadBatch(HEADER_BYTES, f"a body with CRC {actual:08x}", f"{header.body_crc:08x}, as its header says")


def open_body(header: Header, body: Buffer) -> bytes:
    """The decompressed columns of a body that passed `check_body`; `BadBatch` if it cannot be decompressed."""
    try:
        return codecs.decompress(header.codec, body[: header.stored_bytes], body_bytes=layout(header).end)
    except codecs.BadCompression as error:
        raise BadBatch(HEADER_BYTES, str(error), "a body that decompresses to its declared size") from error
