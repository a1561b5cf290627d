"""Promises: which records a writer that will be killed has begun, and which it was told are safe.

A writer runs in a forked process. It reports to its parent by numbers in shared memory, one store each, so no message
can be half sent or late. Its records have their partition, serial number and life of the writer, and the rest of each
record follows from these. So the records that are found later can be judged: are they whole, in order, expected and
enough?
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["PARTITIONS", "Broken", "Ledger", "Partition", "key_of", "value_of"]

PARTITIONS = 4


class Broken(AssertionError):
    """A promise was broken. `kind` is lost, phantom or refused."""

    def __init__(self, kind: str, what: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {what}")


class Ledger:
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


@dataclass
class Partition:
    """What one partition may hold, by the promises of all lives since the last check."""

    number: int
    seed: str
    first: int = 0  # serial number of the first record
    values: list[bytes] = field(default_factory=list)  # as found at the last check
    lives: list[tuple[int, int, int]] = field(default_factory=list)  # (life, begun, acknowledged) since then
    dropping: int = 0
    dropped: int = 0

    def note(self, life: int, begun: int, acknowledged: int, dropping: int, dropped: int) -> None:
        """Note the numbers that a life has left in the ledger."""
        self.lives.append((life, begun, acknowledged))
        self.dropping = max(self.dropping, dropping)
        self.dropped = max(self.dropped, dropped)

    @property
    def owed(self) -> int:
        """The serial number up to which records must be there."""
        return max([self.first + len(self.values), *(acknowledged for _, _, acknowledged in self.lives)])

    def judge(self, found: Sequence[bytes | None]) -> None:
        """Raise `Broken` unless these are the records that the partition must hold; then remember them."""
        names = [_name_of(value) for value in found]
        first = names[0][1] if names else self.first
        end = first + len(names)
        if not max(self.first, self.dropped) <= first <= max(self.first, self.dropping):
            raise Broken("lost", f"partition {self.number} begins with record {first}, not {self.first}; {self}")
        for serial, (value, (partition, number, life)) in enumerate(zip(found, names, strict=True), first):
            if (partition, number) != (self.number, serial):
                raise Broken("lost", f"record {number} of partition {partition} stands where {serial} should; {self}")
            if value != value_of(self.seed, partition, number, life):
                raise Broken("lost", f"record {number} was changed: {value!r}")
        if end < self.owed:
            raise Broken("lost", f"the end is {end} and {self.owed} records were acknowledged; {self}")
        overlap = self.values[first - self.first :]
        if list(found[: len(overlap)]) != overlap:
            raise Broken("lost", f"records that were there have been replaced by later ones; {self}")
        lives = {serial: life for _, serial, life in names}
        if list(lives.values()) != sorted(lives.values()):
            raise Broken("phantom", f"a record that was given up has come back; lives {lives}")
        known_end = self.first + len(self.values)
        self._judge_lives({serial: life for serial, life in lives.items() if serial >= known_end})
        self.first, self.values, self.lives = first, [value for value in found if value is not None], []

    def _judge_lives(self, new: dict[int, int]) -> None:
        """Check that each new record, by serial number, may come from the life that it names."""
        for life, begun, acknowledged in self.lives:
            if any(serial < acknowledged and each > life for serial, each in new.items()):
                raise Broken("lost", f"records acknowledged in life {life} were written again later; {self}")
            if any(serial >= begun and each == life for serial, each in new.items()):
                raise Broken("phantom", f"life {life} has not begun to append so many; {self}")
        if not set(new.values()) <= {life for life, _, _ in self.lives}:
            raise Broken("phantom", f"records of no life since the last look; {self}")

    def __str__(self) -> str:
        held = f"[{self.first}, {self.first + len(self.values)})"
        return f"held {held}; lives (number, begun, acknowledged) {self.lives}; dropped {self.dropped}, {self.dropping}"


def value_of(seed: str, partition: int, serial: int, life: int) -> bytes:
    """The only value that the record may have."""
    chance = random.Random(f"{seed} {partition} {serial} {life}")
    return b"%d %d %d " % (partition, serial, life) + chance.randbytes(chance.choice((0, 1, 30, 200, 1500)))


def key_of(partition: int, serial: int) -> bytes:
    """A key that goes to this partition of PARTITIONS."""
    return _KEYS[partition][serial % len(_KEYS[partition])]


def _name_of(value: bytes | None) -> tuple[int, int, int]:
    try:
        assert value is not None
        partition, serial, life, _ = value.split(b" ", 3)
        return int(partition), int(serial), int(life)
    except (ValueError, AssertionError):
        raise Broken("phantom", f"no writer has written {value!r}") from None


def _keys() -> list[list[bytes]]:
    from loglib.append.partitioner import by_crc32

    keys: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
    for number in range(40):
        key = b"key %d" % number
        keys[by_crc32(key, PARTITIONS)].append(key)
    return keys


_KEYS = _keys()
