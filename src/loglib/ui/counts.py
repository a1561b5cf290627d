"""Counts: how many records a topic has, from the headers of its batches, a part at each call.

Invariant: a batch is counted once. What is counted is exact; `Count.is_whole` says if it is all. A segment that
retention drops takes its records out of the count. No batch body is read.

The log has no count of records, so each header is read once: the new ones at each call, and the old ones from the
newest segment to the oldest, until the time for them is used up.

Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from ..errors import LogError
from ..log.log import Log
from ..system.clock import monotonic
from ..system.not_copyable import NotCopyable
from ..topic import Topic
from .topics import log_of

_PART = 256  # headers between two looks at the clock: a few milliseconds
_PATIENCE_S = 20.0  # for the old batches of a topic, in all


@dataclass(frozen=True, slots=True)
class Count:
    """The records that were counted."""

    records: int
    is_whole: bool  # False: there are more, which are not counted yet, or which are too many or damaged
    appended: int  # records that came since the first look; it never falls


NOTHING = Count(0, is_whole=False, appended=0)  # before the first count


class RecordCounts(NotCopyable):
    """The records of one topic."""

    def __init__(self) -> None:
        self._partitions: dict[int, _PartitionCount] = {}
        self._left_s = _PATIENCE_S

    def step(self, topic: Topic, budget_s: float) -> Count:
        """Count the new records, and for at most this time old ones; returns what is known then."""
        began = monotonic()
        deadline = began + budget_s
        for each in topic.partitions:
            if each.id not in self._partitions:
                self._partitions[each.id] = _PartitionCount(log_of(each))
        counted = list(self._partitions.values())
        for one in counted:
            one.count_new(log_of(topic.partition(one.number)), deadline)
        if self._left_s > 0:
            old = monotonic()
            for one in counted:
                if monotonic() < deadline:
                    one.count_old(log_of(topic.partition(one.number)), deadline)
            self._left_s -= monotonic() - old
        return Count(
            sum(one.records() for one in counted), all(one.is_whole() for one in counted),
            sum(one.appended for one in counted),
        )  # fmt: skip


class _PartitionCount:
    """The records of one partition: those above the end at the first look, and those below it by segment."""

    def __init__(self, log: Log) -> None:
        log.refresh()
        mark = log.mark()
        self.number = log.partition
        self.appended = 0
        self._upto = mark.flushed_end  # all above the first look's end, up to here, are counted
        self._new: dict[int, int] = {}  # by the base offset of the segment
        self._old: dict[int, int] = {}  # likewise
        bases = [base for base in log.index.bases() if mark.log_start_offset <= base < mark.flushed_end]
        ends = [*bases[1:], mark.flushed_end]
        self._todo = list(zip(bases, ends, strict=False))  # ranges of the old batches, the newest one last
        self._at: tuple[int, int] | None = None  # where the last of them is counted next, and its records so far
        self._is_damaged = False

    def records(self) -> int:
        begun = 0 if self._at is None else self._at[1]
        return sum(self._new.values()) + sum(self._old.values()) + begun

    def is_whole(self) -> bool:
        return not self._todo and not self._is_damaged

    def count_new(self, log: Log, deadline: float) -> None:
        mark = log.mark()
        start, end = mark.log_start_offset, mark.flushed_end
        for counted in (self._new, self._old):
            for base in [base for base in counted if base < start]:
                del counted[base]
        if self._todo and self._todo[-1][0] < start:
            self._at = None
        self._todo = [each for each in self._todo if each[0] >= start]
        if end <= self._upto:
            return
        self._upto = max(self._upto, start)
        log.refresh()
        try:
            for headers in _parts(log, self._upto, end):
                for base_offset, next_offset, count in headers:
                    base = log.index.find(base_offset) or 0
                    self._new[base] = self._new.get(base, 0) + count
                    self.appended += count
                    self._upto = next_offset
                if monotonic() >= deadline:
                    break
        except LogError:
            self._is_damaged, self._upto = True, end
        finally:
            log.release_files()

    def count_old(self, log: Log, deadline: float) -> None:
        try:
            while self._todo and monotonic() < deadline:
                base, end = self._todo[-1]
                at, records = self._at or (base, 0)
                for headers in _parts(log, at, end):
                    at, records = headers[-1][1], records + sum(count for _, _, count in headers)
                    self._at = at, records
                    if monotonic() >= deadline:
                        break
                if at >= end:
                    self._todo.pop()
                    self._old[base], self._at = records, None
        except LogError:  # damage, or retention: the rest of this segment is not counted
            base, _ = self._todo.pop()
            self._is_damaged = True
            self._old[base], self._at = 0 if self._at is None else self._at[1], None
        finally:
            log.release_files()


def _parts(log: Log, start: int, end: int) -> Iterator[list[tuple[int, int, int]]]:
    """The base, the next offset and the number of records of each batch in [start, end), in parts."""
    headers = log.headers(start, end, log.mark())
    found = ((each.base_offset, each.next_offset, each.record_count) for each in headers)
    while part := list(islice(found, _PART)):
        yield part
