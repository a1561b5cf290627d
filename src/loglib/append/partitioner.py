"""Partitioner: the partition of a key, the same in every process and every release.

Invariant: `crc32` is zlib's CRC-32 of the key modulo the number of partitions. It is the default of
librdkafka, and so of every client built on it. `murmur2` is the default of Kafka's Java client: the hash
without its sign bit modulo the number of partitions. So a key has the same partition as there. A null key
has no fixed partition. `topic.json` has the partitioner's name, so that no later open changes it; a function
of the application has its own name there.

Threads: safe for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any
from zlib import crc32

from ..config.policies import PARTITIONER_NAME
from ..format.columns import Columns, common_headers
from .record_arguments import binary_column

Partitioner = Callable[[bytes, int], int]  # (key, number of partitions) -> partition

_SEED = 0x9747B28C  # Kafka's, in org.apache.kafka.common.utils.Utils
_FACTOR = 0x5BD1E995
_MASK = 0xFFFFFFFF
_WORDS = Struct("<I").iter_unpack
_KEPT_KEYS = 1 << 16  # with the next limit, 11 MiB at most
_KEPT_KEY_BYTES = 64


def by_crc32(key: bytes, partitions: int) -> int:
    return crc32(key) % partitions


def by_murmur2(key: bytes, partitions: int) -> int:
    return _positive_murmur2(key) % partitions


def murmur2(key: bytes) -> int:
    """MurmurHash2 of 32 bits, unsigned, with Kafka's seed."""
    length = len(key)
    whole = length & ~3
    found = _SEED ^ length
    for (word,) in _WORDS(key[:whole]):
        word = word * _FACTOR & _MASK
        found = (found * _FACTOR ^ (word ^ word >> 24) * _FACTOR) & _MASK
    if whole < length:
        found = (found ^ int.from_bytes(key[whole:], "little")) * _FACTOR & _MASK
    found = (found ^ found >> 13) * _FACTOR & _MASK
    return found ^ found >> 15


class _PositiveHashes(dict[bytes, int]):
    """The hash of each key, without its sign bit. Keys usually repeat, so the hashes of short keys are kept.

    Threads: two threads may hash the same key, which does no harm.
    """

    def __missing__(self, key: bytes) -> int:
        if type(key) is not bytes:  # a view would keep its buffer alive
            raise TypeError(f"key must be bytes, not {type(key).__name__}")
        found = murmur2(key) & 0x7FFFFFFF
        if len(key) <= _KEPT_KEY_BYTES:
            if len(self) >= _KEPT_KEYS:
                self.clear()
            self[key] = found
        return found


_positive_murmur2 = _PositiveHashes().__getitem__

BUILT_IN: dict[str, Partitioner] = {"crc32": by_crc32, "murmur2": by_murmur2}


def name_of(partitioner: str | Partitioner) -> str:
    """The name in `topic.json` for the partitioner given to `Topic.open`; `ValueError` if it has none."""
    if isinstance(partitioner, str) and partitioner in BUILT_IN:
        return partitioner
    if not callable(partitioner):
        raise ValueError(f"partitioner must be one of {tuple(BUILT_IN)} or a function, not {partitioner!r}")
    name = getattr(partitioner, "__name__", None)
    if not isinstance(name, str) or not PARTITIONER_NAME.fullmatch(name) or name in BUILT_IN:
        raise ValueError(
            f"partitioner {partitioner!r} needs a name of its own, of at most 100 ASCII letters, digits and "
            "underscores; give it one: def by_region(key, partitions): ..."
        )
    return name


def spread(
    columns: Columns, partitions: int, partitioner: Partitioner, keyless: Callable[[], int]
) -> dict[int, Columns]:
    """The records of each partition, in their order. `keyless` chooses the partition of records with a null key."""
    assert columns.keys is not None
    if columns.headers is not None and (shared := common_headers(columns.headers)) is not None:
        found = spread(columns._replace(headers=None), partitions, partitioner, keyless)
        return {number: each._replace(headers=[shared] * len(each.values)) for number, each in found.items()}
    hash_of = crc32 if partitioner is by_crc32 else _positive_murmur2 if partitioner is by_murmur2 else None
    if hash_of is not None and columns.timestamps is None and columns.headers is None:
        try:
            return _spread_pairs(columns.values, columns.keys, partitions, hash_of)
        except (TypeError, BufferError, ValueError):  # a null key, or a key that is not bytes: rare
            pass
    keys = binary_column("key", columns.keys)
    elsewhere = keyless() if None in keys else 0
    targets = [elsewhere if key is None else check_choice(partitioner(key, partitions), partitions) for key in keys]
    values = _split(columns.values, targets, partitions)
    split_keys = _split(keys, targets, partitions)
    timestamps = _split(columns.timestamps, targets, partitions)
    headers = _split(columns.headers, targets, partitions)
    return {
        partition: Columns(values[partition], split_keys[partition], timestamps[partition], headers[partition])
        for partition in range(partitions)
        if values[partition]
    }


def _spread_pairs(
    values: Sequence[bytes | None], keys: Sequence[bytes | None], partitions: int, hash_of: Callable[[bytes], int]
) -> dict[int, Columns]:
    """The common case in one loop: it takes two thirds of the time of separate passes."""
    lists: list[tuple[list[bytes | None], list[bytes | None]]] = [([], []) for _ in range(partitions)]
    for value, key in zip(values, keys, strict=True):
        to_values, to_keys = lists[hash_of(key) % partitions]  # type: ignore[arg-type]
        to_values.append(value)
        to_keys.append(key)
    return {partition: Columns(*each) for partition, each in enumerate(lists) if each[0]}


def _split(column: Sequence[Any] | None, targets: list[int], partitions: int) -> list[Any]:
    """The column's items for each partition; None for each if there is no column."""
    if column is None:
        return [None] * partitions
    lists: list[list[Any]] = [[] for _ in range(partitions)]
    for target, item in zip(targets, column, strict=True):
        lists[target].append(item)
    return lists


def check_choice(partition: int, partitions: int) -> int:
    """The partition that a partitioner has chosen; `ValueError` if there is no such partition."""
    if not 0 <= partition < partitions:
        raise ValueError(f"the partitioner chose partition {partition} of {partitions}")
    return partition
