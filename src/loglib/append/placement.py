"""Placement: the partition that each record of a topic goes to, and its writer.

Invariant: a key always goes to the same partition, and so does a record that a producer repeats. Records without a
key go to the partition of the *sticky* writer until its batch is full, and then to one that is drawn at random. In
shared mode they go to partitions that this process has, or that no process has.

Threads: safe for all. Two threads may draw a sticky writer at the same time; one of the two stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product

from ..config.arguments import partition_number
from ..errors import LockedError, LogMovedError, ReadOnlyError
from ..format.columns import Columns
from ..format.header import NO_PRODUCER, Producer
from .access import Access
from .handles import Handles
from .partitioner import Partitioner, check_choice, spread
from .section_writer import SectionWriter

__all__ = ["Placement"]


class Placement:
    """The choice of the partition for the records of one topic."""

    def __init__(
        self,
        path: str,
        accesses: tuple[Access, ...],
        handles: Handles,
        partitioner: Partitioner | None,
        *,
        named: str,
        writable: bool,
    ) -> None:
        self._path = path
        self._accesses = accesses
        self._handles = handles
        self._partitioner = partitioner  # None: it is a function that the application has not given
        self._partitioner_name = named
        self._writable = writable
        self.sticky: SectionWriter | None = None  # where keyless records go until a batch is full

    def check_writable(self) -> None:
        """Raise the error of a topic that is closed, or open for reading only."""
        if self._handles.closed is not None:
            self._handles.check_open()
        if not self._writable:
            raise ReadOnlyError(self._path)

    def check_still(self, partitions: int) -> None:
        """Raise `LogMovedError` if the topic has another number of partitions now: keys would go to other ones."""
        count = len(self._accesses)
        if partitions != count:
            raise LogMovedError(self._path, f"has other than the {count} partitions that it was opened with")

    @property
    def count(self) -> int:
        """The number of partitions among which keys choose."""
        return len(self._accesses)

    def number(self, given: int) -> int:
        """The number of a partition of this topic; `ValueError` if there is none."""
        number = partition_number(given)
        if not 0 <= number < len(self._accesses):
            raise ValueError(f"{self._path} has partitions 0 to {len(self._accesses) - 1}, not {number}")
        return number

    def partitioner(self) -> Partitioner:
        """The function that chooses partitions by keys; `ValueError` if the application has not given it."""
        if self._partitioner is None:
            name = self._partitioner_name
            raise ValueError(f"{self._path} spreads keys by your function {name}: open it with partitioner={name}")
        return self._partitioner

    def of_key(self, key: bytes) -> int:
        """The partition of a key."""
        return check_choice(self.partitioner()(key, len(self._accesses)), len(self._accesses))

    def of_no_key(self, producer: Producer, records: int = 1, size_bytes: int = 0) -> int:
        """The partition for a call's records without a key; with a producer it is the same at each try."""
        if producer == NO_PRODUCER:
            return self.choose(records, size_bytes).partition
        return (producer.id + producer.sequence) % len(self._accesses)

    def spread(self, columns: Columns, partition: int | None, keyless: Callable[[], int]) -> dict[int, Columns]:
        """The records by partition: the given partition, or the partitions of their keys."""
        if partition is None and len(self._accesses) == 1:
            partition = 0
        if partition is not None:
            return {partition: columns}
        return spread(columns, len(self._accesses), self.partitioner(), keyless)

    def writer_of(self, number: int) -> SectionWriter:
        """The writer of a partition. `LockedError` if another process has it; `ValueError` if there is none."""
        self.check_writable()
        return self._accesses[self.number(number)].writer()

    def open_writer_of(self, number: int) -> SectionWriter | None:
        """The writer of a partition if this process has one; `ValueError` if there is no such partition."""
        return self._accesses[self.number(number)].open_writer

    def choose(self, records: int = 1, size_bytes: int = 0) -> SectionWriter:
        """The writer for keyless records: the sticky one until its batch is full, then one at random."""
        self.check_writable()
        sticky = self.sticky
        if sticky is None or not sticky.batch.values or not sticky.batch.has_room(records, size_bytes):
            writers = self._handles.writers or [self._own_any()]
            sticky = self.sticky = writers[_random_below(len(writers)) if len(writers) > 1 else 0]
        return sticky

    def _own_any(self) -> SectionWriter:
        """In shared mode, take one partition that no other process has.

        If none is free, it waits for a process that has a partition only to run retention.
        """
        refused: LockedError | None = None
        accesses = sorted(self._accesses, key=lambda _: os.urandom(8))
        for wait, access in product((False, True), accesses):
            try:
                return access.writer(wait=wait)
            except LockedError as error:
                refused = error
                if error.path == self._path:  # the wait timed out, and would time out for each partition
                    break
        assert refused is not None
        count = len(self._accesses)
        raise LockedError(
            self._path, f"others: all {count} partitions are taken, the last by {refused.holder}",
            advice="append again when one of them has closed it, or use a topic with more partitions",
        )  # fmt: skip


def _random_below(count: int) -> int:
    return int.from_bytes(os.urandom(4), "little") % count if count > 1 else 0
