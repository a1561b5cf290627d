"""Record: single records, and facts about records: positions, damage.

Invariant: a record's `next_offset` is where a reader continues after it: the next record of its batch, or
the next batch. All ranges are half-open, all times are microseconds UTC.

Threads: immutable facts.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from ..config.times import to_datetime
from ..errors import CorruptLogError, OffsetRange
from .columns import Headers

__all__ = ["Damage", "OffsetRange", "Position", "Record", "new_tuple"]

new_tuple = tuple.__new__  # half the time of calling the NamedTuple; see bench/RESULTS.md


class Position(NamedTuple):
    """The place of an appended record: its partition and its offset there."""

    partition: int
    offset: int


class Damage(NamedTuple):
    """Bytes that differ from what was written, and the offsets that cannot be read because of them.

    `offsets` is empty if readers lose nothing. A bad segment header is an example: the batches after it
    have headers of their own. `partition` is None for damage that concerns the whole topic.
    """

    partition: int | None
    offsets: range
    path: str
    file_position: int
    found: str
    expected: str

    @classmethod
    def of(cls, error: CorruptLogError, partition: int | None, offsets: range = range(0)) -> Damage:
        """The damage that an error names, and the offsets that are lost by it."""
        return cls(partition, offsets, error.path, error.file_position, error.found, error.expected)

    def __str__(self) -> str:
        lost = f"offsets [{self.offsets.start}, {self.offsets.stop}) cannot be read" if self.offsets else "nothing lost"
        return f"{self.path}, byte {self.file_position}: found {self.found}, expected {self.expected}; {lost}"


class Record(NamedTuple):
    """One record, with its place in the log.

    `value` and `key` are bytes or None (null, which differs from empty). `headers` is a tuple of
    (name, bytes) pairs. `timestamp` is the event time in microseconds UTC. `next_offset` is where a
    reader continues after this record.
    """

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    next_offset: int

    @property
    def time(self) -> datetime:
        """The timestamp as an aware UTC datetime.

        Raises `OverflowError`, which is also a `ValueError`, outside the years 1 to 9999: no datetime has these.
        """
        return to_datetime(self.timestamp)
