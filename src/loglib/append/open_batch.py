"""Open batch: records appended to a partition but not yet written.

Invariant: all columns are as long as `values`, or `resume` makes them so after an interrupt. Record i gets
offset `tail.end + i`, whatever the batch looks like on disk.

Threads: guarded by the writer's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TypeVar

from ..errors import LogError
from ..format.columns import Columns, Headers
from ..format.record import Position, new_tuple
from ..log.recovery import Tail
from ..system.failures import together

NO_ROOM = -1
_NO_POSITIONS: Iterator[Position] = iter(())
_SMALL_BYTES = 1 << 16  # joining more to one piece costs more than it saves

Item = TypeVar("Item")


class OpenBatch:
    """Records appended but not yet written, and the tail of the log that they will follow.

    `plain_room` is how many bytes of values the fast path (in `Topic.append`) may still add, and `keyed_room` how many
    bytes of values and keys `add_keyed` may. Below zero they must not use the batch, for one of these reasons: the
    batch is empty (its first record starts the flush timer); it has other columns; the size of a record must be
    checked; the writer accepts no more records. `positions` yields the positions of the records that they may add.
    """

    __slots__ = (
        "any_size", "capacity", "headers", "keyed_room", "keys", "limit", "lost", "owed", "partition", "plain_room",
        "positions", "room", "tail", "timestamps", "values",
    )  # fmt: skip

    def __init__(self, tail: Tail, partition: int, *, any_size: bool = False, owed: LogError | None = None) -> None:
        """`any_size`: a record that fits the batch is within all limits, so its size need not be checked."""
        self.tail = tail
        self.owed = owed  # the writer's next call raises it; it is here so that one assignment changes both
        self.any_size = any_size
        self.partition = partition
        # The number of records and bytes at which the batch is full or a flush is due; set with the first record.
        self.limit = 0
        self.capacity = 0
        self.room = 0  # bytes left; plain_room or keyed_room counts instead while it is not negative
        self.plain_room = self.keyed_room = NO_ROOM
        self.lost: LogError | None = None  # why its records could not be written
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] | None = None
        self.timestamps: list[int | None] | None = None
        self.headers: list[Headers] | None = None
        self.positions = _NO_POSITIONS

    def take_up_to(self, records: int, size_bytes: int) -> None:
        """Set the limits of the batch, which has no records yet."""
        self.limit = records
        self.capacity = self.room = size_bytes

    def has_room(self, records: int, size_bytes: int) -> bool:
        return size_bytes <= self.bytes_left() and len(self.values) + records <= self.limit

    def owe(self, error: LogError) -> None:
        """Let the writer's next call raise this error, together with an error that is owed already."""
        owed, names_records = self.owed, error.lost or error.in_doubt
        if owed is None:
            self.owed = error
        elif owed is not error and (names_records or type(owed) is not type(error)):  # otherwise the error is not new
            main = together([owed, error])
            assert isinstance(main, LogError)
            self.owed = main
            other = error if main is owed else owed
            other.lost = other.in_doubt = ()  # it may still be raised, and lost records must be named only once
        self._close_fast_paths()

    def is_full(self) -> bool:
        """True if a limit is reached."""
        return len(self.values) >= self.limit or self.bytes_left() <= 0

    def buffered_bytes(self) -> int:
        return self.capacity - self.bytes_left()

    def bytes_left(self) -> int:
        return self.plain_room if self.plain_room >= 0 else self.keyed_room if self.keyed_room >= 0 else self.room

    def add_keyed(self, value: bytes, key: bytes) -> Position | None:
        """Add a record with a key, if it does not fill the batch, which might make a flush due. Else return None.

        It needs a third of the time of `extend`.
        """
        room, keys = self.keyed_room - len(value) - len(key), self.keys
        if room <= 0 or keys is None:
            return None
        try:
            position = next(self.positions, None)
            if position is not None:
                self.keyed_room = room
                keys.append(key)
                self.values.append(value)
            return position
        except BaseException:
            self.resume()  # an interrupt came between the position and the value
            raise

    def extend(self, columns: Columns, size_bytes: int) -> range:
        """Add records and return their offsets. Values are added last, because their number counts."""
        values, keys, timestamps, headers = columns
        start, count = len(self.values), len(values)
        self.room = self.bytes_left() - size_bytes
        self.plain_room = self.keyed_room = NO_ROOM
        if keys is not None or self.keys is not None:
            self.keys = _extended(self.keys, keys, None, start, count)
        if timestamps is not None or self.timestamps is not None:
            self.timestamps = _extended(self.timestamps, timestamps, None, start, count)
        if headers is not None or self.headers is not None:
            self.headers = _extended(self.headers, headers, (), start, count)
        self.values.extend(values)
        self.resume()
        return range(self.tail.end + start, self.tail.end + start + count)

    def resume(self) -> None:
        """Make the other columns and the positions agree with the values, for example after an interrupt."""
        count = len(self.values)
        for column in (self.keys, self.timestamps, self.headers):
            if column is not None:
                del column[count:]
        self._close_fast_paths()
        if self.any_size and count > 0 and self.timestamps is None and self.headers is None:
            self.positions = _positions(self.partition, range(self.tail.end + count, self.tail.end + self.limit - 1))
            if self.keys is None:
                self.plain_room = max(self.room, NO_ROOM)
            else:
                self.keyed_room = max(self.room, NO_ROOM)

    def _close_fast_paths(self) -> None:
        self.room, self.plain_room, self.keyed_room = self.bytes_left(), NO_ROOM, NO_ROOM

    def lone_record(self) -> tuple[bytes, bytes | None] | None:
        """The value and the key of the only record; None if there are more, or if it is large or has more columns."""
        if len(self.values) > 1 or self.timestamps is not None or self.headers is not None:
            return None
        value, key = self.values[0], None if self.keys is None else self.keys[0]
        if value is None or len(value) > _SMALL_BYTES or (self.keys is not None and key is None):
            return None
        return value, key

    def columns(self, now_us: int) -> Columns:
        """The columns to encode. If some records have a time, the records without one get `now_us`."""
        filled = None if self.timestamps is None else [now_us if each is None else each for each in self.timestamps]
        return Columns(self.values, self.keys, filled, self.headers)


def _extended(
    column: list[Item] | None, added: Sequence[Item] | None, missing: Item, start: int, count: int
) -> list[Item]:
    """The column of `start` records, with `count` more."""
    if column is None:
        column = [missing] * start
    column.extend(added if added is not None else repeat(missing, count))
    return column


def _positions(partition: int, offsets: range) -> Iterator[Position]:
    """The positions that appends return, made in C: see bench/RESULTS.md."""
    return map(new_tuple, repeat(Position), zip(repeat(partition), offsets))
