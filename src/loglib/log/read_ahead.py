"""Read ahead: the batches that a reader has read, and how many of their records it has handed out.

Invariant: a piece (a batch or a bundle) stays until all its records are handed out, and each record is noted in one
step: the step of an iterator in C. So an interrupt in any line loses no record and repeats none.

    _pieces        read ahead, oldest first; the first may be handed out in part
    _current       the first of these, if some of its records are made into objects or handed out; None before that
    _made          the number of records of `_current` that are made, or handed out as a whole
    _records       the records that were made last
    _unread        an iterator over `_records`: it has those that are not yet handed out
    _left          those that were not yet handed out when the reader was closed

Threads: those of a reader, which is the only subclass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from operator import length_hint

from ..format.batch import Batch
from ..format.record import Record
from .bundle_reader import Bundle
from .cursor import Piece

_RECORDS_TOGETHER = 512  # made into objects in one go; more do not fit the processor's cache and cost 50 % more each


class ReadAhead:
    """The pieces that are read ahead. The table at the top of the module explains the attributes."""

    def __init__(self) -> None:
        self._pieces: deque[Piece] = deque()
        self._current: Piece | None = None
        self._made = 0
        self._records: list[Record] = []
        self._unread: Iterator[Record] = iter(self._records)
        self._left: list[Record] = []

    def _make_records(self, piece: Piece) -> None:
        """Make the next records of the first piece into objects."""
        part, start = piece, self._next_number(piece)
        if start or len(piece) > _RECORDS_TOGETHER:
            piece.decode()  # once for all its parts
            part = piece.part(start, start + _RECORDS_TOGETHER)
        records = part.records()
        self._current, self._made, self._records, self._unread = piece, start + len(part), records, iter(records)

    def _next_number(self, piece: Piece) -> int:
        """The number in the piece of the record that is handed out next; the piece's length if there is none.

        The iterator itself counts what is handed out, because a counter beside it would be wrong after an interrupt
        between two lines. `length_hint` of a list's iterator is exact: the records that it still has.
        """
        if piece is not self._current:
            return 0
        return self._made - length_hint(self._unread) - len(self._left)

    def _is_current_made(self) -> bool:
        """True if all records of the piece that is being handed out are made."""
        return self._current is None or self._made >= len(self._current)

    def _unmake_records(self) -> None:
        """Forget the records that are made but not handed out. They are made again later."""
        records = self._records
        self._made, self._records, self._unread = self._made - length_hint(self._unread), [], iter(())
        records.clear()  # a list iterator ends with its list, even if a loop holds the iterator

    def _forget(self, partition: int) -> None:
        """Drop the pieces of this partition. Those of others stay: it may be impossible to read them again."""
        if self._current is not None and self._current.partition == partition:
            self._unmake_records()
            self._current = None
        self._pieces = deque(piece for piece in self._pieces if piece.partition != partition)

    def _take_batch(self, batch: Batch) -> Batch:
        """Hand out the remaining records of the first piece, which is a batch."""
        part = batch.part(self._next_number(batch), len(batch)) if batch is self._current else batch
        if self._records:
            self._unmake_records()
        self._current, self._made = batch, len(batch)
        return part

    def _after_whole_batch(self) -> Batch | None:
        """The batch after one that was handed out as a whole, in few steps. None in any other case."""
        pieces = self._pieces
        if len(pieces) < 2 or pieces[0] is not self._current or self._records or not isinstance(pieces[1], Batch):
            return None
        if self._made < len(self._current) or self._left:
            return None
        pieces.popleft()  # first: an interrupt after it loses and repeats nothing
        return pieces[0]  # type: ignore[return-value]

    def _split_bundle(self, bundle: Bundle) -> None:
        """Replace the first piece, a bundle, by the batches of its remaining records."""
        batches = bundle.part(self._next_number(bundle), len(bundle)).batches()
        others = islice(self._pieces, 1, None)
        self._unmake_records()
        self._pieces = deque([*batches, *others])  # one step: from here on the bundle's progress does not count
