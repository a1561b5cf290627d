"""Entries: what the members of a share write into the share's file of a partition, as 32 bytes each.

Invariant: an entry has 32 bytes, and a file has entries only at multiples of 32. So no entry crosses a page, and a
killed process leaves all of an entry or nothing. The checksum is salted by the log id, the partition, the share and the
generation: an entry of another file is none of this one.

    byte  size  field      type    meaning
       0     4  crc        u32 le  CRC-32C of bytes 4..31, with the salt
       4     1  kind       u8      BEGIN 1, SETTLE 2, RENEW 3, REAP 4, LOST 5, PIN 6, SEAL 7,
                                   PASS 8, DEFER 9
       5     1  outcome    u8      of a SETTLE: ACCEPTED 1, RELEASED 2, RETURNED 3, REJECTED 4; of a REAP: DEAD 1,
                                   EXPIRED 2; of a SEAL: PLAIN 0, ALTERED 1, RESET 2; otherwise 0
                                   of a DEFER: BY_TIME 1, BY_KEY 2; of a BEGIN of fresh records: `spare`, the number
                                   of records after them that may be taken instead
                                   of a PIN: ACCEPTED 1, RELEASED 2, REJECTED 4, EXHAUSTED 5, PINNED 6, UNPINNED 7
       6     2  count      u16 le  of a BEGIN, a SETTLE, a PIN and a DEFER: the number of records, with
                                   consecutive offsets
                                   of a LOST: 1: the record at the offset; 0: all records before it
       8     8  moment     u64 le  of a BEGIN: the member (4 bytes), and when (4 bytes, seconds UTC)
                                   of a SETTLE: RELEASED until this time since the boot, microseconds; 0: now
                                   of a DEFER that is BY_TIME: the same
                                   of a RENEW: the new end of the lease; of a REAP: the dead member, or the time now
                                   of a PIN: the member that has the records in hand
                                   of a PASS: `log.history.history_at` that offset; 0: not known
                                   of a SEAL: `max_attempts` (4 bytes), `window` (4 bytes)
      16     8  offset     u64 le  of a BEGIN, a SETTLE, a RENEW, a PIN and a DEFER: the first record
                                   of a LOST: the log's start; of a PASS: where the next batch begins
                                   of a REAP: the member that writes it
                                   of a SEAL: `max_in_hand`, or with RESET the next record
      24     8  token      u64 le  of a BEGIN: the end of the lease, microseconds since the boot; 0: no lease
                                   of a SETTLE, a RENEW, a PIN and a REAP of a lease: the token of the BEGIN
                                   of a LOST: the member that writes it
                                   of a SEAL that is ALTERED: 1 if dead letters are written, else 0

A token is the place of a BEGIN: the generation in the upper 32 bits, the number of the entry in the lower ones.

Threads: pure functions.
"""

from __future__ import annotations

from struct import Struct

from ..format.header import crc32c

ENTRY = Struct("<IBBHQQQ")
ENTRY_BYTES = ENTRY.size
assert ENTRY_BYTES == 32
_BODY = Struct("<BBHQQQ")

BEGIN, SETTLE, RENEW, REAP, LOST, PIN, SEAL, PASS, DEFER = 1, 2, 3, 4, 5, 6, 7, 8, 9
ACCEPTED, RELEASED, RETURNED, REJECTED, EXHAUSTED, PINNED, UNPINNED = 1, 2, 3, 4, 5, 6, 7
DEAD, EXPIRED = 1, 2
BY_TIME, BY_KEY = 1, 2
PLAIN, ALTERED, RESET = 0, 1, 2
MOST_TOGETHER = 0xFFFF  # records in one entry
MOST_SPARE = 0xFF


def salt_of(log_id: bytes, partition: int, share: str, generation: int) -> int:
    """The start of the checksums in one generation of a share's file."""
    return crc32c(log_id + partition.to_bytes(4, "little") + generation.to_bytes(8, "little") + share.encode())


def encode(
    salt: int, kind: int, outcome: int = 0, count: int = 0, moment: int = 0, offset: int = 0, token: int = 0
) -> bytes:  # fmt: skip
    """One entry."""
    body = _BODY.pack(kind, outcome, count, moment, offset, token)
    return crc32c(body, salt).to_bytes(4, "little") + body


def pair(low: int, high: int) -> int:
    """Two numbers of 4 bytes as one of 8."""
    return low | high << 32


def unpair(both: int) -> tuple[int, int]:
    """The two numbers in `pair`."""
    return both & 0xFFFFFFFF, both >> 32
