"""Room: how many zeros a writer puts after the end of its log, so that small synced writes do not make the file grow.

A sync of a file that has grown also writes the file system's journal: on ext4 it takes 1.3 to 1.5 times as long as one
of bytes that were there before. Databases and etcd have their logs in such files, too. Zeros after the log mean nothing
(docs/format.md), and a writer cuts them off when it seals the segment, closes it or gives it to another process.

Invariant: nothing depends on the advice but speed. There is no room where it brings nothing: for large writes, without
a disk, and where a write over old bytes takes as long as a new one (file systems that copy on write).

Threads: `note` from the thread that syncs, `wanted` from the one that writes. Each fact is one assignment.
"""

from __future__ import annotations

from collections import deque

_SMALL_BYTES = 1 << 14  # of one sync; more are worth a growing file
_FEW_SYNCS = 32  # in a row, small: then there is room; and the number that decides if it is worth it
_LATER_SYNCS = 2000  # after which it is tried again, where it was not worth it
_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 20  # of room; twice as many each time that it was used up
_LEAST_SYNC_S = 30e-6  # a shorter sync has no disk to wait for
_WORTH = 0.95  # of the time of a sync that made the file grow


class Room:
    """The advice for one segment file."""

    def __init__(self) -> None:
        self._small = 0  # small syncs in a row
        self._next_bytes = _LEAST_BYTES
        self._growing = deque[float](maxlen=_FEW_SYNCS)  # seconds of the last small syncs that made the file grow
        self._within = deque[float](maxlen=_FEW_SYNCS)  # and of those that did not

    def note(self, size_bytes: int, seconds: float, *, has_grown: bool) -> None:
        """A sync of this many new bytes has taken that long."""
        if size_bytes > _SMALL_BYTES:
            self._small, self._next_bytes = 0, _LEAST_BYTES
        elif size_bytes:
            self._small += 1
            (self._growing if has_grown else self._within).append(seconds)

    def wanted(self) -> int:
        """The number of zeros to write after the batch that has used up the room, in bytes; 0: none."""
        if self._small < _FEW_SYNCS or len(self._growing) < _FEW_SYNCS:
            return 0
        before, is_known = _usual(self._growing), len(self._within) == _FEW_SYNCS
        if before < _LEAST_SYNC_S or (is_known and _usual(self._within) > _WORTH * before):
            self.give_up()
            return 0
        wanted, self._next_bytes = self._next_bytes, min(2 * self._next_bytes, _MOST_BYTES)
        return wanted

    def give_up(self) -> None:
        """It is not worth it now, or the disk is full."""
        self._small, self._next_bytes = -_LATER_SYNCS, _LEAST_BYTES
        self._within.clear()


def _usual(seconds: deque[float]) -> float:
    """The first quartile: what others do on the disk makes some syncs longer, and none shorter."""
    return sorted(seconds)[len(seconds) // 4]
