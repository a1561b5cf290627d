"""Segment header: the fixed header of a segment's file, the names of segments, and the log that they belong to.

Invariant: the header has all facts about the log before the segment, so a sealed segment never changes. A header of
another log or partition, or of another name, is refused by what reads it (segment.py).

    byte size field                  meaning (little-endian)
       0    8  magic                 89 4C 4C 53 45 47 0D 0A
       8    2  version               3
      10    2  flags                 low byte: a reader must know each bit; high byte: may ignore. Reserved: 1 REWRITTEN
      12    4  crc                   CRC-32C of bytes 0..11 and 16..4095
      16   16  log_id                of the topic
      32    4  partition
      36    4  writer_epoch          of the writer that made the segment
      40    8  base_offset           as in the file's name
      48    8  created               microseconds UTC
      56    8  previous_base_offset  of the segment before; base_offset itself if there is none
      64    8  previous_bytes        of batches in the segment before
      72    4  previous_crc          header CRC of the last batch before this segment
      76    4  producer_count        0 to 121
      80    8  last_append_time      of the newest batch before this segment, microseconds UTC
      88    8  running_max_timestamp largest event time in the log before this segment
      96    8  applied_txn           these three as in the watermark (format/watermark.py), when the segment was made
     104    8  held_txn
     112    8  held_from
     120    4  writer_nonce          of the writer that made the segment
     124    4  previous_batch_bytes  length of the last batch before this segment; 0 if there is none
     128    8  created_boottime      CLOCK_BOOTTIME at `created`, microseconds; 0 if unknown
     136   16  boot_id               of the system that it ran in; zeros if unknown
     152    4  more_producers        number of entries in the file <base>.producers
     156    4  more_producers_crc    CRC-32C of that file
     160    8  applied_id            these three as in the watermark
     168    8  held_id
     176    8  txn_store
     184    4  rewritten_crc         with REWRITTEN: header CRC of the last batch before the rewriting
     188    4  rewritten_bytes       and its length
     192    8  rewritten_generation  and how often the segment was rewritten
     200   24  zero
     224 3872  producers             121 of: id u64, sequence u64, base offset u64, records u32, seconds u32

This module does no I/O and keeps no state: bytes in, facts out.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import NamedTuple

from ..config.policies import MAX_OFFSET
from ..errors import CorruptLogError, UnsupportedFormatError
from .chain import End
from .header import crc32c, make_salt

MAGIC = b"\x89LLSEG\r\n"
VERSION = 3
REWRITTEN = 0x0001  # reserved: a compaction has written the segment again, with another last batch
_MUST_KNOW = 0x00FF
HEADER_BYTES = 4096
NO_TIMESTAMP = -(1 << 63)  # running maximum of no timestamps at all

_FIELDS = Struct("<8sHHI16sIIQQQQIIqqQQQIIq16sIIQQQIIQ24x")
_PRODUCER = Struct("<QQQII")
PRODUCER_BYTES = _PRODUCER.size
MAX_PRODUCERS = (HEADER_BYTES - _FIELDS.size) // _PRODUCER.size
assert _FIELDS.size == 224 and MAX_PRODUCERS == 121


class Identity(NamedTuple):
    """The log and the partition that a file must belong to."""

    log_id: bytes
    partition: int
    salt: int

    @classmethod
    def of(cls, log_id: bytes, partition: int) -> Identity:
        return cls(log_id, partition, make_salt(log_id, partition))


class ProducerState(NamedTuple):
    """The last batch that a producer appended to a partition."""

    producer_id: int
    sequence: int
    base_offset: int
    record_count: int
    last_append_s: int = 0  # append time of that batch, in whole seconds since 1970, rounded up


class SegmentHeader(NamedTuple):
    """The facts in a segment header. The table at the top of the module explains each."""

    log_id: bytes
    partition: int
    writer_epoch: int
    base_offset: int
    created: int
    previous_base_offset: int
    previous_bytes: int
    previous_crc: int
    last_append_time: int
    running_max_timestamp: int
    applied_txn: int = 0
    held_txn: int = 0
    held_from: int = 0
    writer_nonce: int = 0
    previous_batch_bytes: int = 0
    created_boottime: int = 0
    boot_id: bytes = bytes(16)
    more_producers: int = 0
    more_producers_crc: int = 0
    applied_id: int = 0
    held_id: int = 0
    txn_store: int = 0
    rewritten_crc: int = 0
    rewritten_bytes: int = 0
    rewritten_generation: int = 0
    producers: tuple[ProducerState, ...] = ()
    flags: int = 0

    @property
    def previous_batch(self) -> int:
        """Base offset of the last batch before the segment; the segment's base offset, if there is none."""
        return self.base_offset - self.previous_batch_bytes

    @property
    def chain_end(self) -> End:
        """The end of the chain of batches before the segment."""
        return End(self.base_offset, self.previous_batch, self.previous_crc)

    def encode(self) -> bytes:
        *before, last_append_time, running_max = self[:10]
        numbers = (*before, len(self.producers), last_append_time, running_max, *self[10:25])
        fields = _FIELDS.pack(MAGIC, VERSION, self.flags, 0, *numbers)
        content = bytearray((fields + encode_producers(self.producers)).ljust(HEADER_BYTES, b"\0"))
        content[12:16] = _crc(content).to_bytes(4, "little")
        return bytes(content)

    @classmethod
    def decode(cls, content: bytes, path: str) -> SegmentHeader:
        """Decode a header; `CorruptLogError` or `UnsupportedFormatError` if the bytes are not a header."""
        if len(content) < HEADER_BYTES:
            raise CorruptLogError(
                path, len(content), "the end of the file", f"a segment header of {HEADER_BYTES} bytes"
            )
        magic, version, flags, crc, *numbers = _FIELDS.unpack_from(content)
        if magic != MAGIC:
            raise CorruptLogError(path, 0, f"bytes {magic.hex()}", f"the segment magic {MAGIC.hex()}")
        actual = _crc(content)
        if crc != actual:
            raise CorruptLogError(path, 12, f"header CRC {crc:08x}", f"{actual:08x}, the CRC of the header's bytes")
        if not version:
            raise CorruptLogError(path, 8, "segment version 0", f"at least {VERSION}")
        if version != VERSION:
            raise UnsupportedFormatError(path, "segment version", version, VERSION)
        if flags & _MUST_KNOW:
            raise UnsupportedFormatError(path, "segment flags", flags, 0)
        count = numbers.pop(8)
        table = content[_FIELDS.size : _FIELDS.size + min(count, MAX_PRODUCERS) * _PRODUCER.size]
        header = cls._make((*numbers, decode_producers(table) if table else (), flags))
        if header.base_offset > MAX_OFFSET:
            raise CorruptLogError(path, 40, f"base offset {header.base_offset}", f"at most {MAX_OFFSET}")
        if header.previous_batch_bytes > header.base_offset:
            found = f"a last batch of {header.previous_batch_bytes} bytes before offset {header.base_offset}"
            raise CorruptLogError(path, 124, found, f"one of at most {header.base_offset}")
        if count > MAX_PRODUCERS:
            raise CorruptLogError(path, 76, f"{count} producers", f"at most {MAX_PRODUCERS}")
        return header


def segment_name(base_offset: int) -> str:
    return f"{base_offset:020d}.log"


def parse_segment_name(name: str) -> int | None:
    """The base offset in a file name; None if it is not the name of a segment."""
    stem = name[:-4]
    return int(stem) if len(name) == 24 and name.endswith(".log") and stem.isascii() and stem.isdigit() else None


def producers_name(base_offset: int) -> str:
    return f"{base_offset:020d}.producers"


def parse_producers_name(name: str) -> int | None:
    """The base offset in the name of a file of producers; None for another name."""
    stem, _, suffix = name.partition(".")
    return parse_segment_name(f"{stem}.log") if suffix == "producers" else None


def parse_beside_name(name: str) -> int | None:
    """The base offset in the name of a file that has no meaning without its segment; None for another name.

    These are files of producers, and `<base>.keys`: a hint of a later version, which no reader of this one needs.
    """
    stem, _, suffix = name.partition(".")
    return parse_segment_name(f"{stem}.log") if suffix in ("producers", "keys") else None


def first_segment(identity: Identity, *, created: int) -> SegmentHeader:
    """The header of a new partition's first segment."""
    return SegmentHeader(identity.log_id, identity.partition, 0, 0, created, 0, 0, 0, 0, NO_TIMESTAMP)


def encode_producers(producers: Iterable[ProducerState]) -> bytes:
    """The stored form of the producers, in a header and in the separate file."""
    return b"".join(_PRODUCER.pack(*state) for state in producers)


def decode_producers(content: bytes) -> tuple[ProducerState, ...]:
    """The producers in these bytes, which have a whole number of them."""
    return tuple(map(ProducerState._make, _PRODUCER.iter_unpack(content)))


def _crc(content: bytes | bytearray) -> int:
    return crc32c(content[16:HEADER_BYTES], crc32c(content[:12]))
