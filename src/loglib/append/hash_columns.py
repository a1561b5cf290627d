"""Hash columns: the records of Arrow columns, split by the partitions of their keys without a Python object for each.

Invariant: a key has the same partition as in partitioner.py, bit for bit, and records of one partition keep their
order. All keys of one length are hashed together. A few keys of a length, and long keys, are hashed one by one.

    crc32     is linear: the checksum of a key is that of the same number of zeros, XOR a number for each pair of its
              bytes. The number depends on the pair and its place: a table of 65,536 numbers for each place is enough.
    murmur2   processes one word of 4 bytes of all keys at a time.

Needs the extra [arrow]. Threads: safe for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa

from .arrow_bodies import BinaryView, Numbers
from .partitioner import BUILT_IN, Partitioner, check_choice

_FEW = 48  # keys of one length; hashing them one by one takes as long as one pass over columns
_SEED, _FACTOR = np.uint32(0x9747B28C), np.uint32(0x5BD1E995)  # of murmur2, as in partitioner.py


class Share(NamedTuple):
    """The records of one partition, and their indexes among all records of the piece."""

    partition: int
    records: pa.RecordBatch
    indexes: Numbers | range


def deal(records: pa.RecordBatch, partitions: Numbers) -> Iterator[Share]:
    """The records of each partition, in their order; `partitions` has the partition of each record."""
    first = int(partitions[0])
    if (partitions == partitions[0]).all():
        yield Share(first, records, range(len(partitions)))
        return
    order = np.argsort(partitions, kind="stable")  # a radix sort, because the numbers have 16 bits
    sorted_records = records.take(pa.array(order))
    bounds = np.flatnonzero(np.diff(partitions[order])) + 1
    for start, stop in zip([0, *bounds.tolist()], [*bounds.tolist(), len(order)], strict=True):
        yield Share(int(partitions[order[start]]), sorted_records.slice(start, stop - start), order[start:stop])


def place_rows(
    count: int,
    keys: pa.Array | None,
    chosen: pa.Array | None,
    of_keys: Callable[[pa.Array], Numbers],
    partitions: int,
    *,
    keyless: int,
    topic: str = "the topic",
) -> Numbers:
    """The partition of each of `count` records, as uint16.

    It is the one in the column `chosen`; where that is null, `of_keys` finds it; without a key it is `keyless`.
    `ValueError` if a chosen partition does not exist; the message names the topic.
    """

    def checked(column: pa.Array) -> Numbers:
        numbers: Numbers = column.to_numpy()
        wrong = (numbers < 0) | (numbers >= partitions)
        if wrong.any():
            first = int(numbers[np.argmax(wrong)])
            raise ValueError(f"a record for partition {first}, and {topic} has {partitions} partitions")
        return numbers.astype(np.uint16)

    if chosen is not None and not chosen.null_count:
        return checked(chosen)
    has_keys = keys is not None and keys.null_count < len(keys)
    found = of_keys(keys) if has_keys else np.full(count, keyless, np.uint16)
    if chosen is not None:
        given = chosen.is_valid().to_numpy(zero_copy_only=False)
        found[given] = checked(chosen.drop_null())
    return found


# --- the partitions of keys ------------------------------------------------------------------------------


def can_hash(partitioner: str) -> bool:
    """True if this module knows the partitioner. A function of the application is not known."""
    return partitioner in _HASHES


def partitions_of(keys: pa.Array, partitioner: str, partitions: int, *, keyless: int) -> Numbers:
    """The partition of each key of a binary column, as uint16; `keyless` for nulls."""
    if not keys.null_count:
        return _modulo(_hash(keys, partitioner), partitions)
    found = np.full(len(keys), keyless, np.uint16)
    if keys.null_count < len(keys):
        there = keys.is_valid().to_numpy(zero_copy_only=False)
        found[there] = _modulo(_hash(keys.drop_null(), partitioner), partitions)
    return found


def partitions_by(function: Partitioner, keys: pa.Array, partitions: int, *, keyless: int) -> Numbers:
    """The partition of each key by a function of the application, which is called once for each different key.

    `ValueError` if it returns an invalid partition number.
    """
    coded = keys.dictionary_encode()
    chosen = [check_choice(function(key, partitions), partitions) for key in coded.dictionary.to_pylist()]
    numbers = coded.indices.fill_null(len(chosen)).to_numpy()
    found: Numbers = np.array([*chosen, keyless], np.uint16)[numbers]
    return found


def _modulo(hashes: Numbers, partitions: int) -> Numbers:
    """The remainders, as uint16. A division by one number is vectorised in NumPy; the remainder operator is not."""
    count = np.uint32(partitions)
    found: Numbers = (hashes - hashes // count * count).astype(np.uint16)
    return found


def _hash(keys: pa.Array, partitioner: str) -> Numbers:
    """The hash of each key as uint32, before the modulo. There are no nulls."""
    view = BinaryView(keys)
    starts, lengths = view.offsets[:-1], np.diff(view.offsets)
    content = np.frombuffer(view.content, np.uint8)
    longest, at_once = _HASHES[partitioner]
    if len(keys) >= _FEW and lengths[0] <= longest and (lengths == lengths[0]).all():
        size = int(lengths[0])
        return at_once(content[int(starts[0]) : int(starts[0]) + size * len(keys)].reshape(len(keys), size))
    found = np.empty(len(keys), np.uint32)
    one_by_one = BUILT_IN[partitioner]
    order = np.argsort(lengths, kind="stable")
    bounds = [0, *(np.flatnonzero(np.diff(lengths[order])) + 1).tolist(), len(keys)]
    for start, stop in pairwise(bounds):
        same = order[start:stop]
        size = int(lengths[same[0]]) if len(same) else 0
        if len(same) < _FEW or size > longest:
            found[same] = [one_by_one(key, 1 << 32) for key in keys.take(pa.array(same)).to_pylist()]
        else:
            windows = np.lib.stride_tricks.sliding_window_view(content, size) if size else np.empty((1, 0), np.uint8)
            found[same] = at_once(windows[starts[same] if size else np.zeros(len(same), np.intp)])
    return found


_CRC_LONGEST = 64  # bytes; the tables for this length take 8 MiB


def _crc32(keys: Numbers) -> Numbers:
    """The CRC-32 of each row of bytes."""
    count, size = keys.shape
    found = np.full(count, crc32(bytes(size)), np.uint32)
    if size & 1:  # a zero in front changes nothing
        padded = np.zeros((count, size + 1), np.uint8)
        padded[:, 1:] = keys
        keys = padded
    pairs = keys.view("<u2")
    for column in range(pairs.shape[1]):
        found ^= _crc_table(pairs.shape[1] - 1 - column).take(pairs[:, column], mode="wrap")  # half the time of []
    return found


@lru_cache(maxsize=_CRC_LONGEST // 2)
def _crc_table(pairs_after: int) -> Numbers:
    """The share of each pair of bytes, as a number, in the CRC-32 of a key that has `pairs_after` pairs after it."""
    if pairs_after:
        before = _crc_table(pairs_after - 1)
        found: Numbers = _crc_table(0)[before & 0xFFFF] ^ before >> np.uint32(16)
        return found
    of_byte = np.arange(256, dtype=np.uint32)
    for _ in range(8):  # polynomial EDB88320, reflected
        of_byte = np.where(of_byte & 1, of_byte >> 1 ^ np.uint32(0xEDB88320), of_byte >> 1)
    pairs = np.arange(1 << 16)
    first = of_byte[pairs & 0xFF]
    both: Numbers = of_byte[(first ^ pairs >> 8) & 0xFF] ^ first >> np.uint32(8)
    return both


_MURMUR_LONGEST = 256


def _murmur2(keys: Numbers) -> Numbers:
    """Kafka's hash of each row of bytes, without its sign bit."""
    count, size = keys.shape
    whole = size & ~3
    found = np.full(count, _SEED ^ np.uint32(size), np.uint32)
    words = np.ascontiguousarray(keys[:, :whole]).view("<u4")
    for column in range(whole // 4):
        word = words[:, column] * _FACTOR
        found = found * _FACTOR ^ (word ^ word >> np.uint32(24)) * _FACTOR
    if whole < size:
        for place in range(whole, size):
            found ^= keys[:, place].astype(np.uint32) << np.uint32(8 * (place - whole))
        found *= _FACTOR
    found = (found ^ found >> np.uint32(13)) * _FACTOR
    positive: Numbers = (found ^ found >> np.uint32(15)) & np.uint32(0x7FFFFFFF)
    return positive


_HASHES: dict[str, tuple[int, Callable[[Numbers], Numbers]]] = {
    "crc32": (_CRC_LONGEST, _crc32), "murmur2": (_MURMUR_LONGEST, _murmur2),
}  # fmt: skip
assert _HASHES.keys() == BUILT_IN.keys()
