"""Bundle reader: neighbouring small batches of one block, handed out together.

Invariant: a bundle shows the records that its batches would show one by one, in the same order and with the same
places. All checks are made when a bundle is made (format/bundle.py), so nothing in it is damaged.

Threads: immutable facts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING

from ..format.batch import Batch, Source
from ..format.chain import End
from ..format.columns import decode_binary
from ..format.header import HEADER_BYTES, unchecked_headers
from ..format.record import Record, new_tuple
from ..segment import SegmentReader

if TYPE_CHECKING:
    import pyarrow as pa

    from ..format.bundle import Bundled, Items

_WORTH_JOINING = 8  # records per batch; from this number on, their values are joined and then decoded as one column


@cache
def _parser() -> Callable[..., Bundled | None] | None:
    """The parser of bundles, which needs NumPy; None if that is not installed."""
    try:
        from ..format.bundle import bundled
    except ImportError:
        return None
    return bundled


class Bundle:
    """Records of neighbouring batches, by number: 0 is the first that the bundle shows."""

    __slots__ = ("_block", "_first", "_position", "_stop", "facts", "partition", "path")

    def __init__(self, partition: int, facts: Bundled, block: bytes, path: str, file_position: int) -> None:
        self.partition = partition
        self.path = path
        self.facts = facts  # of all batches, also of those that are not shown
        self._block = block
        self._position = file_position  # of the block
        self._first = 0
        self._stop = len(facts.offsets)

    @staticmethod
    def costs_no_import() -> bool:
        """True if the program has imported NumPy already."""
        return "numpy" in sys.modules

    @classmethod
    def read(cls, segment: SegmentReader, offset: int, limit: int, *, block_bytes: int) -> Bundle | None:
        """The whole checked batches from `offset` in one block of the segment, all of them below `limit`.

        None if NumPy is not installed, or if the first of them must be read by itself.
        """
        if _parser() is None:
            return None
        block = segment.read(offset, min(block_bytes, limit - offset))
        source = Source(segment.path, segment.file_position(offset))
        return cls.of(block, offset, source, segment.partition, segment.salt)

    @classmethod
    def of(cls, block: bytes, offset: int, source: Source, partition: int, salt: int) -> Bundle | None:
        """The whole checked batches at the beginning of a block that was read already. The block begins at `offset`."""
        parse = _parser()
        facts = None if parse is None else parse(block, offset, salt=salt)
        return facts and cls(partition, facts, block, source.path, source.file_position)

    def __len__(self) -> int:
        return self._stop - self._first

    @property
    def next_offset(self) -> int:
        """The offset where a reader continues after this bundle."""
        return self.offset_of(len(self))

    @property
    def chain_end(self) -> End:
        """The end of the chain of batches, also of those that are not shown."""
        facts = self.facts
        return End(facts.begin + facts.end, facts.begin + int(facts.positions[-1]), facts.last_crc)

    @property
    def stored(self) -> bytes:
        """The stored bytes of the batches, also of those that are not shown."""
        return self._block[: self.facts.end]

    @property
    def held_bytes(self) -> int:
        """Bytes of the log that the bundle keeps in memory."""
        return len(self._block)

    @property
    def content_bytes(self) -> int:
        """The bytes of keys and values; for a part of the bundle its share of them, by records."""
        values, keys = self.facts.values, self.facts.keys
        whole = int(values.sizes.sum()) + (0 if keys is None else int(keys.sizes.sum()))
        return whole * len(self) // len(self.facts.offsets)

    def offset_of(self, number: int) -> int:
        """The offset of a record. For the number after the last one: where a reader continues after the bundle."""
        facts, at = self.facts, self._first + number
        return int(facts.offsets[at]) if at < len(facts.offsets) else facts.begin + facts.end

    def part(self, first: int, stop: int) -> Bundle:
        """The records with the numbers [first, stop), over the same memory."""
        part = Bundle(self.partition, self.facts, self._block, self.path, self._position)
        part._first = min(self._first + first, self._stop)
        part._stop = max(min(self._first + stop, self._stop), part._first)
        return part

    def between(self, start_offset: int, end_offset: int) -> Bundle:
        """The records with offsets in [start_offset, end_offset)."""
        first, stop = self.facts.record_from(start_offset), self.facts.record_from(end_offset)
        return self.part(max(first - self._first, 0), max(stop - self._first, 0))

    def beginning_before(self, offset: int) -> Bundle:
        """The records of those batches whose base offsets are below `offset`."""
        facts = self.facts
        batch = facts.batch_from(offset)
        return self if batch == len(facts.positions) else self.part(0, int(facts.first_records[batch]) - self._first)

    def decode(self) -> None:
        """Do nothing: all columns were decoded and checked when the bundle was made."""

    def records(self) -> list[Record]:
        """The records as `Record` objects."""
        facts, take = self.facts, slice(self._first, self._stop)
        offsets = facts.offsets[self._first : self._stop + 1].tolist()
        if self._stop == len(facts.offsets):
            offsets.append(self.next_offset)
        keys: Iterable[bytes | None] = repeat(None)
        if facts.keys is not None:
            keys = self._items(facts.keys)
            if facts.keyed is not None:
                keys = [key if keyed else None for key, keyed in zip(keys, facts.keyed[take].tolist(), strict=True)]
        fields = zip(
            repeat(self.partition), offsets, facts.timestamps[take].tolist(), keys, self._values(), repeat(()),
            offsets[1:],
        )  # fmt: skip
        return list(map(new_tuple, repeat(Record), fields))

    def _values(self) -> Iterable[bytes | None]:
        facts = self.facts
        batches = facts.batches_of(self._first, self._stop)
        if len(self) < _WORTH_JOINING * max(1, len(batches)):
            return self._items(facts.values)
        body, column = facts.values.together(self._block, self._first, self._stop, batches)
        return decode_binary(body, 0, column)

    def _items(self, items: Items) -> Iterator[bytes]:
        take = slice(self._first, self._stop)
        return map(self._block.__getitem__, map(slice, items.starts[take].tolist(), items.ends[take].tolist()))

    def batches(self) -> list[Batch]:
        """The records batch by batch, with their values; the first and the last batch may be shown in part."""
        facts, block, count = self.facts, self._block, len(self)
        numbers = facts.batches_of(self._first, self._stop)
        if not numbers:
            return []
        positions, firsts = (each[numbers.start : numbers.stop] for each in (facts.positions, facts.first_records))
        headers = unchecked_headers(block, positions.tolist())
        bodies = (positions + HEADER_BYTES).tolist()
        sources = list(map(new_tuple, repeat(Source), zip(repeat(self.path), (positions + self._position).tolist())))
        starts, values = (firsts - self._first).tolist(), list(self._values())
        shown = map(values.__getitem__, map(slice, starts, [*starts[1:], count]))
        found = list(map(Batch, repeat(self.partition), headers, repeat(block), bodies, sources, shown))
        for at, is_part in ((0, starts[0] < 0), (-1, starts[-1] + headers[-1].record_count > count)):
            if is_part:
                whole = Batch(self.partition, headers[at], block, bodies[at], sources[at])
                found[at] = whole.between(self.offset_of(0), self.next_offset)
        return found

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """The columns of all records, as in `Batch.to_arrow`. Keys and values are copied once."""
        from ..format.arrow import bundle_batch

        whole = bundle_batch(self.partition, self.facts, self._block, columns=columns)
        return whole if len(self) == whole.num_rows else whole.slice(self._first, len(self))
