"""Free records: the records of one partition that were begun and are in no hand, or that wait for their first time.

Invariant: each of them is ready, or waits for a time. State (state.py) changes them, by the entries of the share's
file.
"""

from __future__ import annotations

import heapq
from itertools import islice
from typing import NamedTuple

CHOICES = 8  # of the free records, so that members choose different ones


class Free(NamedTuple):
    """A record that was begun and is not in hand, or that waits for its first time."""

    attempts: int
    until: int  # not before this time since the boot, microseconds; 0: now
    first_begun: int  # seconds UTC; 0: never


class FreeRecords(dict[int, Free]):
    """The free records by offset. `put`, `take` and `clear` change them."""

    def __init__(self) -> None:
        super().__init__()
        self._ready: dict[int, None] = {}  # offsets that need not wait
        self._waiting: list[tuple[int, int]] = []  # a heap of (until, offset); some are no longer free

    def put(self, offset: int, free: Free) -> None:
        """This record is free now."""
        self[offset] = free
        if free.until:
            heapq.heappush(self._waiting, (free.until, offset))
        else:
            self._ready[offset] = None

    def take(self, offset: int) -> Free | None:
        """This record is free no longer; None if it was not."""
        self._ready.pop(offset, None)
        return self.pop(offset, None)

    def clear(self) -> None:
        """No record is free any more."""
        super().clear()
        self._ready.clear()
        self._waiting.clear()

    def ready(self, now_us: int, choice: int) -> int | None:
        """A record that may be begun now; members with another `choice` get another one, if there are several."""
        self._end_waits(now_us)
        if not self._ready:
            return None
        return next(islice(self._ready, choice % min(CHOICES, len(self._ready)), None))

    def all_ready(self, now_us: int) -> list[int]:
        """The records that may be begun now, if their keys allow it."""
        self._end_waits(now_us)
        return list(self._ready)

    def _end_waits(self, now_us: int) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] <= now_us:
            until, offset = heapq.heappop(waiting)
            free = self.get(offset)
            if free is not None and free.until == until:
                self._ready[offset] = None

    @property
    def is_timed(self) -> bool:
        """True if a record may wait for a time."""
        return bool(self._waiting)

    def next_moment(self) -> int | None:
        """When the first of those that wait need not wait any longer: microseconds since the boot."""
        waiting = self._waiting
        while waiting and ((free := self.get(waiting[0][1])) is None or free.until != waiting[0][0]):
            heapq.heappop(waiting)
        return waiting[0][0] if waiting else None
