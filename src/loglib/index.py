"""Index: the base offsets of a partition's segments, sorted, in memory; the only index there is.

Invariant: the segment that holds an offset is the one with the largest base at or below it. Nothing
of this is on disk: the file names are.

Threads: safe for all; a sorted dictionary must not be searched while it changes, so each operation
takes a lock for the microsecond it lasts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from sortedcontainers import SortedDict

__all__ = ["SegmentIndex"]


class SegmentIndex:
    """The sorted base offsets of one partition."""

    def __init__(self, bases: Iterable[int] = ()) -> None:
        self._bases: SortedDict[int, None] = SortedDict.fromkeys(bases)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._bases)

    def bases(self) -> list[int]:
        """All base offsets, rising."""
        with self._lock:
            return list(self._bases)

    def find(self, offset: int) -> int | None:
        """The base of the segment that would hold `offset`; None if all begin after it."""
        with self._lock:
            at = self._bases.bisect_right(offset)
            return self._bases.peekitem(at - 1)[0] if at else None

    def after(self, base_offset: int) -> int | None:
        """The base of the segment after the one that begins at `base_offset`; None if it is the last."""
        with self._lock:
            at = self._bases.bisect_right(base_offset)
            return self._bases.peekitem(at)[0] if at < len(self._bases) else None

    def add(self, base_offset: int) -> None:
        with self._lock:
            self._bases[base_offset] = None

    def remove(self, bases: Iterable[int]) -> None:
        with self._lock:
            for base in bases:
                self._bases.pop(base, None)

    def replace(self, bases: Iterable[int]) -> None:
        """Take over a new listing of the directory."""
        fresh = SortedDict.fromkeys(bases)
        with self._lock:
            self._bases = fresh
