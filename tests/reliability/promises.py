"""Promises: which records a writer that will be killed has begun, and which it was told are safe.

A writer runs in a forked process. It reports to its parent by numbers in shared memory, one store each, so no message
can be half sent or late. Its records have their partition, serial number and life of the writer, and the rest of each
record follows from these. So the parent knows every record that a life has begun, and enters it in an `Account`.
"""

from __future__ import annotations

import mmap
import random

__all__ = ["PARTITIONS", "Told", "key_of", "value_of"]

PARTITIONS = 4


class Told:
    """Numbers for each partition, which the writer sets and the parent reads."""

    def __init__(self) -> None:
        numbers = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
        self._all = numbers
        self.state = numbers[:3]  # [whether it has opened the log, steps done, whether the power is being cut]
        self.begun = numbers[8:][:PARTITIONS]  # serial number after the last that it has tried to append
        self.acknowledged = numbers[16:][:PARTITIONS]  # serial number after the last that is safe
        self.dropping = numbers[24:][:PARTITIONS]  # first serial number that retention keeps, once it has begun
        self.dropped = numbers[32:][:PARTITIONS]  # the same, once it has ended

    def clear(self) -> None:
        self._all[:] = memoryview(bytes(self._all.nbytes)).cast("Q")


def value_of(seed: str, partition: int, serial: int, life: int) -> bytes:
    """The only value that the record may have."""
    chance = random.Random(f"{seed} {partition} {serial} {life}")
    return b"%d %d %d " % (partition, serial, life) + chance.randbytes(chance.choice((0, 1, 30, 200, 1500)))


def key_of(partition: int, serial: int) -> bytes:
    """A key that goes to this partition of PARTITIONS."""
    return _KEYS[partition][serial % len(_KEYS[partition])]


def _keys() -> list[list[bytes]]:
    from loglib.append.partitioner import by_crc32

    keys: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
    for number in range(40):
        key = b"key %d" % number
        keys[by_crc32(key, PARTITIONS)].append(key)
    return keys


_KEYS = _keys()
