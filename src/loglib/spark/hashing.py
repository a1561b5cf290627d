"""Hashing: the partition of each key of a column, the same as append/partitioner.py chooses key by key.

Invariant: the hashes are computed for all keys at once, one byte or one word of each key per step. Keys that are much
longer than usual are hashed one by one.

Processes: pure; executors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from ..append.partitioner import BUILT_IN

__all__ = ["can_hash", "partitions_of"]

Numbers = np.ndarray[Any, Any]

_LONG_BYTES = 256
_SEED, _FACTOR = np.uint32(0x9747B28C), np.uint32(0x5BD1E995)  # of murmur2, as in append/partitioner.py


def can_hash(partitioner: str) -> bool:
    """Whether the partitioner is one that this module knows; a function of the application is not."""
    return partitioner in _HASHES


def partitions_of(keys: pa.Array, partitioner: str, partitions: int, *, keyless: int) -> Numbers:
    """The partition of each key of a binary column, as int64; `keyless` for nulls."""
    found = np.full(len(keys), keyless, np.int64)
    if keys.null_count < len(keys):
        there = keys.is_valid().to_numpy(zero_copy_only=False)
        hashes = _hash(keys.drop_null(), partitioner)
        found[there] = hashes % partitions
    return found


def _hash(keys: pa.Array, partitioner: str) -> Numbers:
    """The hash of each key, before the modulo."""
    _, offsets_buffer, items = keys.buffers()
    offsets = np.frombuffer(offsets_buffer, "<i4", len(keys) + 1, 4 * keys.offset).astype(np.int64)
    starts, lengths = offsets[:-1], np.diff(offsets)
    content = np.frombuffer(items, np.uint8) if items is not None else np.zeros(0, np.uint8)
    found = np.zeros(len(keys), np.int64)
    short = np.flatnonzero(lengths <= _LONG_BYTES)
    short = short[np.argsort(-lengths[short], kind="stable")]  # the longest first: each step works on a prefix
    found[short] = _HASHES[partitioner](content, starts[short], lengths[short])
    one_by_one = BUILT_IN[partitioner]
    for index in np.flatnonzero(lengths > _LONG_BYTES):
        found[index] = one_by_one(keys[int(index)].as_py(), 1 << 32)
    return found


@cache
def _crc_table() -> Numbers:
    """The CRC-32 of each byte (polynomial EDB88320, reflected)."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(0xEDB88320), table >> 1)
    return table


def _crc32(content: Numbers, starts: Numbers, lengths: Numbers) -> Numbers:
    """The CRC-32 of each key. The lengths fall."""
    found = np.full(len(starts), 0xFFFFFFFF, np.uint32)
    table = _crc_table()
    for at, count in _steps(lengths, 1):
        part = found[:count]
        found[:count] = table[(part ^ content[starts[:count] + at]) & 0xFF] ^ part >> np.uint32(8)
    return (found ^ np.uint32(0xFFFFFFFF)).astype(np.int64)


def _murmur2(content: Numbers, starts: Numbers, lengths: Numbers) -> Numbers:
    """Kafka's hash of each key, without its sign bit. The lengths fall."""
    found = _SEED ^ lengths.astype(np.uint32)
    for at, count in _steps(lengths, 4):
        word = _word(content, starts[:count] + at, 4) * _FACTOR
        found[:count] = found[:count] * _FACTOR ^ (word ^ word >> np.uint32(24)) * _FACTOR
    for rest in (1, 2, 3):
        ends = np.flatnonzero(lengths % 4 == rest)
        last = _word(content, starts[ends] + (lengths[ends] - rest), rest)
        found[ends] = (found[ends] ^ last) * _FACTOR
    found = (found ^ found >> np.uint32(13)) * _FACTOR
    return ((found ^ found >> np.uint32(15)) & np.uint32(0x7FFFFFFF)).astype(np.int64)


def _word(content: Numbers, at: Numbers, size: int) -> Numbers:
    found = np.zeros(len(at), np.uint32)
    for each in range(size):
        found |= content[at + each].astype(np.uint32) << np.uint32(8 * each)
    return found


def _steps(lengths: Numbers, size: int) -> list[tuple[int, int]]:
    """Each place of `size` whole bytes in the keys, and how many keys have it. The lengths fall."""
    most = int(lengths[0]) // size if len(lengths) else 0
    places = np.arange(most) * size
    counts = np.searchsorted(-lengths, -(places + size), side="right")
    return [(int(at), int(count)) for at, count in zip(places, counts, strict=True)]


_HASHES = {"crc32": _crc32, "murmur2": _murmur2}
assert _HASHES.keys() == BUILT_IN.keys()
