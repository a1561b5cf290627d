"""Generation: one file of a share in a partition: the unsettled records at its begin, and then entries.

Invariant: a file `<generation>.acks` is whole up to its first entry: it is written aside, synced, and gets its name by
a link. The first one to link a generation decides what it has; all others use that one. Two checkpoints of one sealed
generation differ at most in `boot`, because the entries alone decide the rest.

    byte  size  field         type    meaning
       0     8  magic         bytes   "LOGLACKS"
       8     4  version       u32 le  1
      12     4  partition     u32 le
      16    16  log_id        bytes   of the topic
      32     8  generation    u64 le  as in the file's name
      40     8  fresh         u64 le  no record from this offset on was begun
      48     8  history       u64 le  `log.history.history_at` that offset; 0: not known.
                                          Where the log was replaced: as the share has known it last
      56     8  accepted      u64 le  records that have ended so, since the share exists; and so on
      64     8  rejected      u64 le
      72     8  exhausted     u64 le
      80     8  lost          u64 le
      88     8  max_attempts  u64 le  the settings
      96     8  window        u64 le
     104     8  max_in_hand   u64 le  0: any number
     112    16  boot_id       bytes   of the machine, when the file was made
     128     8  boottime      u64 le  microseconds since that boot
     136     8  wall          u64 le  microseconds UTC
     144     8  items         u64 le  unsettled records, of 40 bytes each, from byte 160 on
     152     4  flags         u32 le  1: dead letters are written; 2: the order of keys is kept; the rest is zero
     156     4  crc           u32 le  CRC-32C of bytes 0..155 and of the items, with the salt of entries.py

    an item: offset, token (0: it is free), the end of its lease or wait (u64 le each),
    member, first begun, begun (u32 le each; seconds UTC), attempts (u16 le),
    flags (u16 le): PINNED 1, DOOMED 2, DEFERRED by its key 4

Zeros follow, up to a multiple of 32 bytes; then come the entries.

Threads: pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from ..errors import CorruptLogError, UnsupportedFormatError
from ..format.header import crc32c
from ..system.clock import Moment
from .entries import ENTRY_BYTES, salt_of
from .state import KEY_ORDER, NO_ORDER, Counts, Item, Settings

_FIELDS = Struct("<8sII16sQQQQQQQQQQ16sQQQII")
HEADER_BYTES = _FIELDS.size
assert HEADER_BYTES == 160
_CRC = Struct("<I")
_CRC_AT = HEADER_BYTES - _CRC.size
_ITEM = Struct("<QQQIIIHH")
ITEM_BYTES = _ITEM.size
assert ITEM_BYTES == 40
MAGIC = b"LOGLACKS"
VERSION = 1
_DEAD_LETTERS, _ORDER_BY_KEY = 1, 2  # flags
SUFFIX = ".acks"
_MOST_ITEMS = 1 << 24


class Place(NamedTuple):
    """The share and the partition to which a file belongs."""

    log_id: bytes
    partition: int
    share: str

    def salt(self, generation: int) -> int:
        """The start of the checksums in a generation."""
        return salt_of(self.log_id, self.partition, self.share, generation)


class Checkpoint(NamedTuple):
    """The begin of a generation's file."""

    generation: int
    fresh: int
    history: int
    settings: Settings
    counts: Counts
    moment: Moment
    items: Sequence[Item]

    def encode(self, place: Place) -> bytes:
        """The file without entries."""
        header = _FIELDS.pack(
            MAGIC, VERSION, place.partition, place.log_id, self.generation, self.fresh, self.history, *self.counts,
            *self.settings[:3], self.moment.boot_id, self.moment.boottime_us, self.moment.wall_us, len(self.items),
            self._flags(), 0,
        )[:_CRC_AT]  # fmt: skip
        items = b"".join(_ITEM.pack(*each) for each in self.items)
        crc = crc32c(items, crc32c(header, place.salt(self.generation)))
        return b"".join((header, _CRC.pack(crc), items, bytes(-len(items) % ENTRY_BYTES)))

    def _flags(self) -> int:
        has_letters, by_key = self.settings.dead_letter is not None, self.settings.order == KEY_ORDER
        return (_DEAD_LETTERS if has_letters else 0) | (_ORDER_BY_KEY if by_key else 0)

    def rebased(self, moment: Moment) -> Checkpoint:
        """The checkpoint on a machine that has been started again: its clock begins again, and no lease is left.

        Released records wait for the rest of their time by the wall clock, and never longer than before.
        """
        lead = moment.wall_us - self.moment.wall_us  # since the older boottime, if the wall clock is right
        items = []
        for each in self.items:
            until = each.until
            if until and each.token:
                until = 1
            elif until:
                rest = until - self.moment.boottime_us
                until = moment.boottime_us + min(max(rest - lead, 0), max(rest, 0))
            items.append(each._replace(until=until))
        return self._replace(moment=moment, items=items)


def file_name(generation: int) -> str:
    """The name of a generation's file."""
    return f"{generation:020d}{SUFFIX}"


def generation_of(name: str) -> int | None:
    """The generation of a file; None for any other name."""
    number, suffix = name[: -len(SUFFIX)], name[-len(SUFFIX) :]
    return int(number) if suffix == SUFFIX and number.isascii() and number.isdigit() else None


def first_entry(items: int) -> int:
    """The position of the first entry, after that many items."""
    return HEADER_BYTES + (items * ITEM_BYTES + ENTRY_BYTES - 1) // ENTRY_BYTES * ENTRY_BYTES


def decode(content: bytes, path: str, place: Place, generation: int) -> Checkpoint:
    """The checkpoint at the begin of a file. `CorruptLogError` and `UnsupportedFormatError` if it is none."""
    if len(content) < HEADER_BYTES or content[:8] != MAGIC:
        raise CorruptLogError(path, 0, f"{len(content)} bytes, {content[:8]!r}", f"a share's file, {MAGIC!r}")
    _, version, partition, log_id, number, fresh, history, *rest = _FIELDS.unpack_from(content)
    counts, numbers, (boot_id, boottime, wall, count, flags, crc) = Counts(*rest[:4]), rest[4:7], rest[7:]
    has_letters, order = flags & _DEAD_LETTERS, KEY_ORDER if flags & _ORDER_BY_KEY else NO_ORDER
    settings = Settings(*numbers)._replace(dead_letter="" if has_letters else None, order=order)
    end = HEADER_BYTES + count * ITEM_BYTES
    if count > _MOST_ITEMS or len(content) < end:
        raise CorruptLogError(path, 144, f"{count} items in {len(content)} bytes", "all of them")
    actual = crc32c(content[HEADER_BYTES:end], crc32c(content[:_CRC_AT], place.salt(generation)))
    if crc != actual:
        found = f"CRC {crc:08x} in a file of log {log_id.hex()}, partition {partition}, generation {number}"
        expected = f"{actual:08x}, as in log {place.log_id.hex()}, partition {place.partition}, generation {generation}"
        raise CorruptLogError(path, _CRC_AT, found, expected)
    if version > VERSION:
        raise UnsupportedFormatError(path, "version of a share's file", version, VERSION)
    items = [Item(*each) for each in _ITEM.iter_unpack(content[HEADER_BYTES:end])]
    moment = Moment(wall, boottime, boot_id)
    return Checkpoint(number, fresh, history, settings, counts, moment, items)
