"""Described: values that describe themselves, so that a reader can tell a right record from any wrong one.

partition:number:life:size:crc xxxxxxxx...      in ASCII; the CRC covers all other bytes
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32


class Value(NamedTuple):
    """What a record was when it was appended."""

    partition: int
    number: int  # from 0, one by one in each partition
    life: int = 0  # of the writer that appended it

    def encode(self, size_bytes: int = 0) -> bytes:
        """The value, `size_bytes` longer than the shortest one."""
        facts = b"%d:%d:%d:%d" % (*self, size_bytes)
        filling = (facts + b" ") * (size_bytes // (len(facts) + 1) + 1)
        rest = filling[:size_bytes]
        return b"%s:%d %s" % (facts, crc32(facts + rest), rest)


def decode(value: bytes | None) -> Value:
    """The description in the value; AssertionError if the value was changed."""
    assert value is not None
    head, _, rest = value.partition(b" ")
    facts, _, crc = head.rpartition(b":")
    assert int(crc) == crc32(facts + rest), value
    partition, number, life, size_bytes = map(int, facts.split(b":"))
    assert len(rest) == size_bytes, value
    return Value(partition, number, life)
