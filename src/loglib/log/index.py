"""Index: the base offsets of a partition's segments, sorted, in memory; the only index there is.

Invariant: the segment that holds an offset is the segment with the largest base at or below it. The index is
not stored on disk; it comes from the file names. A listing of the directory never replaces newer facts: another
thread's later listing, or a change by the writer. A dropped segment does not come back if a later listing
finds its file.

Threads: safe for all. A search uses an immutable snapshot and takes no lock; a change puts a new snapshot in
its place. Changes share one lock, and a fork waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sortedcontainers import SortedList

from ..system.process import fork_lock

_changing = fork_lock()


class SegmentIndex:
    """The sorted base offsets of one partition."""

    def __init__(self, bases: Iterable[int] = ()) -> None:
        self._bases: SortedList[int] = SortedList(bases)
        self._start = 0  # bases below this are dropped, even if a listing finds them
        self._begun = 0  # changes and listings, counted as they begin
        self._newest = 0  # the number of the change or listing that made the snapshot

    def __len__(self) -> int:
        return len(self._bases)

    def bases(self) -> list[int]:
        """All base offsets, rising."""
        return list(self._bases)

    def find(self, offset: int) -> int | None:
        """The base of the segment that would hold `offset`; None if all begin after it."""
        bases = self._bases
        at = bases.bisect_right(offset)
        return bases[at - 1] if at else None

    def after(self, base_offset: int) -> int | None:
        """The base of the segment after the one that begins at `base_offset`; None after the last."""
        bases = self._bases
        at = bases.bisect_right(base_offset)
        return bases[at] if at < len(bases) else None

    def add(self, base_offset: int) -> None:
        with _changing:
            bases = self._bases.copy()
            bases.discard(base_offset)
            bases.add(base_offset)
            self._put(bases)

    def drop_before(self, base_offset: int) -> None:
        """Forget the bases below `base_offset` for good. Their files are removed later, and may still be listed."""
        with _changing:
            self._start = max(self._start, base_offset)
            self._put(self._kept(self._bases))

    def replace(self, bases: Iterable[int]) -> None:
        """Use the segments found when opening for writing. They are complete."""
        with _changing:
            self._start = 0
            self._put(SortedList(bases))

    def refresh(self, listing: Callable[[], Iterable[int]]) -> None:
        """Use the segments that the directory's listing finds, but keep changes since it began."""
        with _changing:
            self._begun += 1
            number = self._begun
        bases = list(listing())
        with _changing:
            if number > self._newest:
                self._bases, self._newest = self._kept(bases), number

    def _kept(self, bases: Iterable[int]) -> SortedList[int]:
        return SortedList(base for base in bases if base >= self._start)

    def _put(self, bases: SortedList[int]) -> None:
        self._begun += 1
        self._bases, self._newest = bases, self._begun
