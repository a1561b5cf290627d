"""Key order: which records of a partition may be begun if the earlier ones of their keys come first.

Invariant: a record is begun only if no earlier record with its key is unsettled, as the member has seen it. That is
enough, whatever others do meanwhile: a record that was seen settled stays settled, and no earlier one can arrive,
because all records below `fresh` were begun or deferred before. Records without a key have no order.

The file of a share has no keys. So a member reads the keys of the unsettled records from the log; there are at most
`window`. The key of a record that retention has dropped is not known any more: it holds nobody up, and if it waits
for its key, it is a candidate, so that it is found to be lost.

Threads: one at a time; the share's lock is held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from ..errors import OffsetOutOfRangeError
from ..system.not_copyable import NotCopyable
from .records import Records
from .state import State


class KeyOrder(NotCopyable):
    """The keys of the unsettled records of one partition."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._state: State | None = None  # whose records are known; None also if an interrupt came between them
        self._lines: dict[bytes, deque[int]] = {}  # by key: rising offsets; the first ones may be settled
        self._keys: dict[int, bytes] = {}  # by offset, of those in `_lines`
        self._held_up: dict[bytes, None] = {}  # the keys of records that were deferred
        self._gone: list[int] = []  # records whose keys are not known any more

    def follow(self, state: State) -> None:
        """Learn the keys of the records that are no longer fresh since the last call."""
        known, self._state = self._state, None
        arrived = state.arrived
        assert arrived is not None
        if known is not state:
            self._lines.clear()
            self._keys.clear()
            self._held_up.clear()
            self._gone.clear()
            arrived[:] = [range(offset, offset + 1) for offset in sorted(state.unsettled_offsets())]
        for each in arrived:
            for offset in each:
                self._learn(offset, state)
        arrived.clear()
        self._state = state

    def _learn(self, offset: int, state: State) -> None:
        if not state.is_unsettled(offset):
            return
        try:
            key = self._records.key_at(offset)
        except OffsetOutOfRangeError:
            self._gone.append(offset)
            return
        if key is None:
            return
        self._lines.setdefault(key, deque()).append(offset)
        self._keys[offset] = key
        if offset in state.deferred:
            self._held_up[key] = None

    def _first_of(self, key: bytes, state: State) -> int | None:
        """The first unsettled record with this key."""
        line = self._lines.get(key)
        while line:
            if state.is_unsettled(line[0]):
                return line[0]
            self._keys.pop(line.popleft(), None)
        self._lines.pop(key, None)
        self._held_up.pop(key, None)
        return None

    def is_held_up(self, key: bytes | None, offset: int, state: State) -> bool:
        """True if an earlier record with this key is unsettled."""
        first = None if key is None else self._first_of(key, state)
        return first is not None and first < offset

    def candidates(self, state: State, ready: Iterable[int]) -> Iterator[int]:
        """Those of the `ready` records that nothing holds up, and then those that were deferred and are first now."""
        self._gone = [offset for offset in self._gone if offset in state.deferred]
        yield from self._gone
        for offset in ready:
            if not self.is_held_up(self._keys.get(offset), offset, state):
                yield offset
        for key in list(self._held_up):
            first = self._first_of(key, state)
            if first is not None and first in state.deferred:
                yield first
