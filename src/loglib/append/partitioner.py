"""Partitioner: which partition a key belongs to, the same in every process and every release.

Invariant: `crc32` is CRC-32 (zlib's) of the key modulo the number of partitions, the default of
librdkafka and so of every client built on it: the same keys land in the same partitions. A null key
has no place of its own. The name stands in `topic.json`, so that no later open changes it; a function
of the application's has its own name there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

from ..arguments import binary_column
from ..config import PARTITIONER_NAME
from ..format.batch import Columns

__all__ = ["BUILT_IN", "Partitioner", "by_crc32", "name_of", "spread"]

Partitioner = Callable[[bytes, int], int]  # (key, number of partitions) -> partition


def by_crc32(key: bytes, partitions: int) -> int:
    return crc32(key) % partitions


BUILT_IN: dict[str, Partitioner] = {"crc32": by_crc32}


def name_of(partitioner: str | Partitioner) -> str:
    """The name that stands in `topic.json` for what `Topic.open` was given; `ValueError` if it has none."""
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
    """The records of each partition, in their order; those with a null key go where `keyless` says."""
    assert columns.keys is not None
    if partitioner is by_crc32 and columns.timestamps is None and columns.headers is None:
        try:
            return _spread_pairs(columns.values, columns.keys, partitions)
        except (TypeError, BufferError):  # a null key has no CRC, nor has what is no bytes: rare enough to find out so
            pass
    keys = binary_column("key", columns.keys)
    elsewhere = keyless() if None in keys else 0
    targets = [elsewhere if key is None else _checked(partitioner(key, partitions), partitions) for key in keys]
    values = _split(columns.values, targets, partitions)
    split_keys = _split(keys, targets, partitions)
    timestamps = _split(columns.timestamps, targets, partitions)
    headers = _split(columns.headers, targets, partitions)
    return {
        partition: Columns(values[partition], split_keys[partition], timestamps[partition], headers[partition])
        for partition in range(partitions)
        if values[partition]
    }


def _spread_pairs(values: Sequence[bytes | None], keys: Sequence[bytes | None], partitions: int) -> dict[int, Columns]:
    """The common case in one loop, which takes two thirds of the time of a pass for each step."""
    lists: list[tuple[list[bytes | None], list[bytes | None]]] = [([], []) for _ in range(partitions)]
    for value, key in zip(values, keys, strict=True):
        to_values, to_keys = lists[crc32(key) % partitions]  # type: ignore[arg-type]
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


def _checked(partition: int, partitions: int) -> int:
    if not 0 <= partition < partitions:
        raise ValueError(f"the partitioner chose partition {partition} of {partitions}")
    return partition
