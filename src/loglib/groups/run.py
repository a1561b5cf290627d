"""Run: consecutive records of one partition that are handed out together, and how far that has got.

Invariant: `offset` is the next record to be handed out, at any moment and whoever asks: a record counts
as handed out when its receiver has it, not before.

A run is sized to take a few milliseconds (progress.py): between two runs the group commits and looks at
its members. One that takes longer than that is cut off, so that a loop that becomes slow is noticed; the
clock is looked at a few times in each run, and not with each record.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from operator import length_hint
from typing import Literal

from ..batch import Batch
from ..records import Record
from .assignment import TopicPartition

__all__ = ["RUN_S", "Run", "Way"]

Way = Literal["one by one", "batch", "polled"]

RUN_S = 0.005
_LOOKS = 16  # at the clock, in each run,
_MOST_AT_ONCE = 256  # and at least once in so many records, which are made together: they fit the processor's cache


class Run:
    """The records of a batch, or of a part of one, on their way out.

    One by one: each is handled when the next is asked for. As a batch: all of them are, when the loop
    comes back. Polled: with the next call of the group, whichever; there is no loop that could come back.
    """

    def __init__(self, partition: TopicPartition, batch: Batch, way: Way) -> None:
        self.partition = partition
        self.batch = batch
        self.way = way
        self.all_out = False  # handed out all at once; an attribute, for setting it cannot be interrupted
        self._began = time.monotonic()
        self._at_once = max(1, min(len(batch) // _LOOKS, _MOST_AT_ONCE))
        self._few: Iterator[Record] = iter(())  # being handed out, as a loop in C,
        self._taken = batch.offsets.start  # up to this offset
        self._stop = batch.offsets.stop
        if way == "one by one":
            batch.decode()  # once for all its parts

    def next_few(self) -> Iterator[Record] | None:
        """The next records to be handed out; None when there are none, or it has taken too long."""
        start, taken = self.batch.offsets.start, self._taken
        if taken >= self._stop or (taken > start and self.seconds() > 2 * RUN_S):
            return None
        few = self.batch.between(taken, min(taken + self._at_once, self._stop)).records()
        self._few, self._taken = iter(few), taken + len(few)
        if self._taken > self._stop:  # cut meanwhile, by another thread
            self.cut()
            return None
        return self._few

    @property
    def offset(self) -> int:
        """The next record to be handed out; the end, if there is none."""
        return self._stop if self.all_out else self._taken - length_hint(self._few)

    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    def handled_to(self, *, came_back: bool) -> int:
        """The offset up to which records are handled, if the receiver of the last has come back for more or not."""
        if came_back:
            return self.offset
        start = self.batch.offsets.start
        return max(start, self.offset - 1) if self.way == "one by one" else start

    def next_after(self, offset: int) -> int:
        """Where a reader goes on that has come to `offset`: behind the batch, from its end."""
        return self.batch.next_offset if offset == self.batch.offsets.stop else offset

    def cut(self) -> None:
        """Hand out no more, whichever thread asks."""
        if not self.all_out:
            self._taken -= len(list(self._few))
            self._stop = min(self._stop, self._taken)
