"""Oracle: what a topic was given and has acknowledged, and whether what is read back is right.

Invariant: each value is given to one topic once. A value that is acknowledged is read, once, at one place, in the order
of the appends to its partition, unless something has excused it: retention, damage that a repair has declared, an older
backup. A transaction that was not committed shows nothing, and one whose process died shows all or nothing.

A change of a ledger is one call with plain values. So a child process can tell its changes to its parent before it
dies, and the parent's ledger is then what the child's was.

Threads: one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Ledger", "Row", "Section", "Wrong", "judge_sections"]

Place = tuple[int, int]  # partition and offset


class Row(NamedTuple):
    """A record as any way of reading gives it."""

    partition: int
    offset: int
    value: bytes
    key: bytes | None
    timestamp: int


class Wrong(AssertionError):
    """Something is read that must not be, or is not read that must be."""


class Section(NamedTuple):
    """The values of one transaction in one topic."""

    topic: str
    values: tuple[bytes, ...]


class Ledger:
    """One topic."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.order: dict[bytes, int] = {}  # when each value was given; in a transaction: when that was committed
        self.acked: set[bytes] = set()
        self.absent: set[bytes] = set()  # must not be read: repetitions, and what was aborted
        self.excused: set[bytes] = set()  # may be missing, for good
        self.places: dict[bytes, Place] = {}  # where each value was read
        self.free = False  # retention may have dropped what stands below the log start
        self._count = 0

    # --- notes --------------------------------------------------------------------------------------------

    def given(self, values: Iterable[bytes]) -> None:
        for value in values:
            self._count += 1
            self.order[value] = self._count

    def again(self, values: Iterable[bytes]) -> None:
        """They are committed now, so they stand behind all that was given until now."""
        self.given(values)

    def acknowledged(self, values: Iterable[bytes]) -> None:
        self.acked.update(values)

    def refused(self, values: Iterable[bytes]) -> None:
        self.absent.update(values)
        self.acked.difference_update(values)

    def excuse(self, values: Iterable[bytes]) -> None:
        """These may be missing. If they come back, they may stand elsewhere."""
        for value in values:
            self.excused.add(value)
            self.places.pop(value, None)

    def may_drop(self) -> None:
        self.free = True

    # --- judgement ----------------------------------------------------------------------------------------

    def judge(self, rows: Sequence[Row], starts: Mapping[int, int], *, elsewhere: Collection[bytes] = ()) -> None:
        """Raise `Wrong` unless these are the topic's records. `elsewhere`: what an archive has beside them."""
        seen: dict[bytes, Place] = {}
        for row in rows:
            place = row.partition, row.offset
            if row.value not in self.order:
                raise Wrong(f"{self.name}: invented {row.value[:12]!r} at {place}")
            if row.value in self.absent:
                raise Wrong(f"{self.name}: {row.value[:12]!r} at {place} was refused or aborted")
            if row.value in seen:
                raise Wrong(f"{self.name}: {row.value[:12]!r} twice, at {seen[row.value]} and {place}")
            if self.places.get(row.value, place) != place:
                raise Wrong(f"{self.name}: {row.value[:12]!r} has moved from {self.places[row.value]} to {place}")
            seen[row.value] = place
        self._judge_order(rows)
        self.places.update({value: place for value, place in seen.items() if value not in self.excused})
        for value in self.acked - self.excused - seen.keys() - set(elsewhere):
            known = self.places.get(value)
            if not (self.free and (known is None or known[1] < starts.get(known[0], 0))):
                raise Wrong(f"{self.name}: LOST {value[:12]!r}, known at {known}; log starts {dict(starts)}")

    def _judge_order(self, rows: Sequence[Row]) -> None:
        last: dict[int, tuple[int, bytes]] = {}
        for row in rows:
            if row.value not in self.excused:
                now = self.order[row.value], row.value
                if now < last.get(row.partition, now):
                    before = last[row.partition][1][:12]
                    raise Wrong(f"{self.name}: {row.value[:12]!r} stands behind {before!r}, which was given later")
                last[row.partition] = now


def judge_sections(
    sections: Sequence[Section], ledgers: Mapping[str, Ledger], seen: Mapping[str, Collection[bytes]], state: str
) -> None:
    """Raise `Wrong` if a part of a transaction is read and another part is not."""
    expected = [(each.topic, value) for each in sections for value in each.values]
    there = [value in seen[topic] for topic, value in expected]
    if any(there) and not all(there):
        missing = [
            value[:12]
            for (topic, value), found in zip(expected, there, strict=True)
            if not found and value not in ledgers[topic].excused and not ledgers[topic].free
        ]
        if missing:
            raise Wrong(f"a part of a transaction ({state}): {missing} are missing of {len(expected)}")
