"""Placement: the partition that each record of a topic goes to, and its writer.

Invariant: a key always goes to the same partition, and so does a record that a producer repeats. Records without a
key go to the partition of the *sticky* writer until its batch is full, and then to one that is drawn at random. In
shared mode they go to a partition that this process has; else to the one that it had last, or that is free first.

Threads: safe for all. Two threads may draw a sticky writer at the same time; one of the two stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle

from ..config.arguments import partition_number
from ..errors import LockedError, LogMovedError, ReadOnlyError
from ..format.columns import Columns
from ..format.header import NO_PRODUCER, Producer
from ..system import lock
from ..system.clock import monotonic
from .access import Access
from .handles import Handles
from .partitioner import Partitioner, check_choice, spread
from .section_writer import SectionWriter

_STRETCH_S = 0.2  # of the wait for one partition, when another one will do: twice as long as for the turn


@dataclass(eq=False, repr=False)
class Placement:
    """The choice of the partition for the records of one topic."""

    path: str
    accesses: tuple[Access, ...]
    handles: Handles
    by_function: Partitioner | None  # None: it is a function that the application has not given
    named: str  # the partitioner's name
    writable: bool
    sticky: SectionWriter | None = field(default=None, init=False)  # where keyless records go until a batch is full

    def check_writable(self) -> None:
        """Raise the error of a topic that is closed, or open for reading only."""
        if self.handles.closed is not None:
            self.handles.check_open()
        if not self.writable:
            raise ReadOnlyError(self.path)

    def check_still(self, partitions: int) -> None:
        """Raise `LogMovedError` if the topic has another number of partitions now: keys would go to other ones."""
        count = len(self.accesses)
        if partitions != count:
            raise LogMovedError(self.path, f"has other than the {count} partitions that it was opened with")

    @property
    def count(self) -> int:
        """The number of partitions among which keys choose."""
        return len(self.accesses)

    def number(self, given: int) -> int:
        """The number of a partition of this topic; `ValueError` if there is none."""
        number = given if type(given) is int else partition_number(given)
        if not 0 <= number < len(self.accesses):
            raise ValueError(f"{self.path} has partitions 0 to {len(self.accesses) - 1}, not {number}")
        return number

    def partitioner(self) -> Partitioner:
        """The function that chooses partitions by keys; `ValueError` if the application has not given it."""
        if self.by_function is None:
            raise ValueError(
                f"{self.path} spreads keys by your function {self.named}: open it with partitioner={self.named}"
            )
        return self.by_function

    def of_key(self, key: bytes) -> int:
        """The partition of a key."""
        count = len(self.accesses)
        return check_choice((self.by_function or self.partitioner())(key, count), count)

    def of_no_key(self, producer: Producer, records: int = 1, size_bytes: int = 0) -> int:
        """The partition for a call's records without a key; with a producer it is the same at each try."""
        if producer == NO_PRODUCER:
            return self.choose(records, size_bytes).partition
        return (producer.id + producer.sequence) % len(self.accesses)

    def spread(self, columns: Columns, partition: int | None, keyless: Callable[[], int]) -> dict[int, Columns]:
        """The records by partition: the given partition, or the partitions of their keys."""
        if partition is None and len(self.accesses) == 1:
            partition = 0
        if partition is not None:
            return {partition: columns}
        return spread(columns, len(self.accesses), self.partitioner(), keyless)

    def writer_of(self, number: int) -> SectionWriter:
        """The writer of a partition. `LockedError` if another process has it; `ValueError` if there is none."""
        self.check_writable()
        return self.accesses[self.number(number)].writer()

    def open_writer_of(self, number: int) -> SectionWriter | None:
        """The writer of a partition if this process has one; `ValueError` if there is no such partition."""
        return self.accesses[self.number(number)].open_writer

    def choose(self, records: int = 1, size_bytes: int = 0) -> SectionWriter:
        """The writer for keyless records: the sticky one until its batch is full, then one at random."""
        chosen = self.choose_at_once(records, size_bytes)
        if chosen is None:
            chosen = self.sticky = self._own_any(self.sticky)
        return chosen

    def choose_at_once(self, records: int, size_bytes: int) -> SectionWriter | None:
        """As `choose`, without a wait. None if this process has no partition now."""
        self.check_writable()
        sticky = self.sticky
        if sticky is None or not sticky.batch.values or not sticky.batch.has_room(records, size_bytes):
            writers = self.handles.writers
            chosen = writers[_random_below(len(writers))] if writers else None
            if chosen is None or chosen.is_parked:
                having = [each for each in writers if not each.is_parked]
                chosen = having[_random_below(len(having))] if having else None
            if chosen is None:
                return None  # `sticky` stays: it comes first when this process takes a partition again
            sticky = self.sticky = chosen
        return sticky

    def _own_any(self, last: SectionWriter | None) -> SectionWriter:
        """In shared mode, take one partition that no other process has; wait for one if none is free.

        The `last` one comes first: the records of a process that writes now and then stay together, in their order.
        """
        before = None if last is None else last.partition
        accesses = sorted(self.accesses, key=lambda each: (each.id != before, os.urandom(8)))
        for access in accesses:
            with suppress(LockedError):
                return _taken(access, 0.0, says_who=False)
        turns = self.handles.turns
        assert turns is not None  # else this process has all partitions
        deadline = monotonic() + turns.wait_s
        in_turn = cycle(accesses)  # because the process that has one of them may be stopped
        while True:
            rest = max(deadline - monotonic(), 0.0)
            try:
                return _taken(next(in_turn), rest if len(accesses) == 1 else min(rest, _STRETCH_S))
            except LockedError as error:
                holder = error.holder
            if rest <= _STRETCH_S:
                raise LockedError(
                    self.path, f"others: all {len(accesses)} partitions are taken, the last by {holder}",
                    advice=lock.waited_for(turns.wait_s),
                )  # fmt: skip


def _taken(access: Access, wait_s: float, *, says_who: bool = True) -> SectionWriter:
    """The writer of a partition, which it has now. `LockedError` if another process has it after `wait_s` seconds."""
    deadline = monotonic() + wait_s
    writer = access.writer(wait_s=wait_s, says_who=says_who)
    with writer.held(wait_s=max(deadline - monotonic(), 0.0), says_who=says_who):
        return writer


def _random_below(count: int) -> int:
    return int.from_bytes(os.urandom(4), "little") % count if count > 1 else 0
