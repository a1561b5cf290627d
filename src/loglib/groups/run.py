"""Run: consecutive records of one partition that are handed out together.

Invariant: `offset` is the next record to be handed out, at any moment and from any thread. A record counts
as handed out only when its receiver has it.

A run is sized to take a few milliseconds (delivery.py): between two runs the group commits and looks at
its members. A run that takes longer is cut, so that the group also acts in a slow loop. The run reads the
clock a few times, not for each record.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from operator import length_hint
from typing import Literal

from ..format.batch import Batch
from ..format.record import Record
from .assignment import TopicPartition

__all__ = ["RUN_S", "Run", "Way"]

Way = Literal["one by one", "batch", "polled"]

RUN_S = 0.005
_LOOKS = 16  # a run reads the clock about so many times
_MOST_AT_ONCE = 256  # records that are made between two looks at the clock; they fit the processor's cache


class Run:
    """The records of a batch, or of a part of a batch, while they are handed out.

    "one by one": a record is handled when the receiver asks for the next one. "batch": all records are
    handled when the loop asks for the next batch. "polled": all records are handled at the next call.
    """

    def __init__(self, partition: TopicPartition, batch: Batch, way: Way) -> None:
        self.partition = partition
        self.batch = batch
        self.way = way
        self.all_out = False  # all records are handed out; an attribute, because an interrupt cannot split its setting
        self._began = time.monotonic()
        self._at_once = max(1, min(len(batch) // _LOOKS, _MOST_AT_ONCE))
        self._few: Iterator[Record] = iter(())  # the records that are being handed out, by a loop in C
        self._taken = batch.offsets.start  # the offset after `_few`
        self._stop = batch.offsets.stop
        if way == "one by one":
            batch.decode()  # once for all parts of the batch

    def next_few(self) -> Iterator[Record] | None:
        """The next records to be handed out; None at the end of the run, or if it took too long."""
        start, taken = self.batch.offsets.start, self._taken
        if taken >= self._stop or (taken > start and self.seconds() > 2 * RUN_S):
            return None
        few = self.batch.between(taken, min(taken + self._at_once, self._stop)).records()
        self._few, self._taken = iter(few), taken + len(few)
        if self._taken > self._stop:  # another thread has meanwhile cut the run
            self.cut()
            return None
        return self._few

    @property
    def offset(self) -> int:
        """The offset of the next record to be handed out; the end, if there is none."""
        return self._stop if self.all_out else self._taken - length_hint(self._few)

    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    def handled_to(self, *, came_back: bool) -> int:
        """The offset up to which records are handled. `came_back`: the receiver asked for more."""
        if came_back:
            return self.offset
        start = self.batch.offsets.start
        return max(start, self.offset - 1) if self.way == "one by one" else start

    def next_after(self, offset: int) -> int:
        """Where a reader at `offset` continues; from the batch's end this is the next batch."""
        return self.batch.next_offset if offset == self.batch.offsets.stop else offset

    def cut(self) -> None:
        """Hand out no more records; any thread may call this."""
        if not self.all_out:
            self._taken -= len(list(self._few))
            self._stop = min(self._stop, self._taken)
