"""Pieces: the records of one `append_arrow`, gathered or cut into pieces that are encoded and written at once.

Invariant: a piece has about `piece_bytes`, whatever the batches are that the caller gives, so memory is constant. Its
records have passed every check. Records in memory are all checked before the first piece is given; of a stream this
holds for the first 16 MiB, and the rest is checked piece by piece.

Needs the extra [arrow]. Threads: all of it runs in the caller's thread, because it reads the caller's stream and calls
its function for keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import RecordTooLargeError
from .arrow_bodies import Numbers, Rows
from .arrow_columns import Source

__all__ = ["Piece", "checked_pieces", "gathered", "joined", "whole"]

_AHEAD_BYTES = 16 << 20

Place = Callable[[pa.RecordBatch], Numbers | int | None]


class Piece(NamedTuple):
    """Some records of a call."""

    records: pa.RecordBatch  # of the columns that `Rows` knows
    first: int  # the number of its first record in the call
    partitions: Numbers | int | None  # of each record, or of all; None: the hashes of the keys say it


def checked_pieces(
    source: Source,
    gather: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    *,
    limit_bytes: int,
    now_us: Callable[[], int],
    place: Place,
) -> Iterator[Piece]:
    """The records in pieces, checked ahead as far as the invariant says.

    `place` finds the partitions of a piece, as far as that is up to the caller's thread. Raises the errors of
    `Rows.check` and of `place`, and those of the caller's stream.
    """

    def pieces(*, check: bool) -> Iterator[Piece]:
        first = 0
        for batch in gather(source.batches()):
            records = _with_times(batch, now_us)
            if check:
                Rows(records).check(limit_bytes=limit_bytes, first=first)
            yield Piece(records, first, place(records))
            first += len(records)

    checked = pieces(check=True)
    ahead: list[Piece] = []
    room = _AHEAD_BYTES
    for piece in checked:
        ahead.append(piece)
        room -= piece.records.nbytes
        if room < 0:
            break
    if source.records is None:
        yield from ahead
        yield from checked
        return
    for _ in checked:  # only checked, because the memory for what is converted has a limit
        pass
    yield from ahead
    if room < 0:
        yield from islice(pieces(check=False), len(ahead), None)


def _with_times(records: pa.RecordBatch, now_us: Callable[[], int]) -> pa.RecordBatch:
    """The records, with the time of appending for those that have none if others have one."""
    at = records.schema.get_field_index("timestamp")
    if at < 0 or not 0 < records.column(at).null_count < len(records):
        return records
    return records.set_column(at, "timestamp", pc.fill_null(records.column(at), now_us()))


# --- gathered or cut ----------------------------------------------------------------------------------------


def gathered(batches: Iterable[pa.RecordBatch], piece_bytes: int) -> Iterator[pa.RecordBatch]:
    """The records in batches of at most `piece_bytes`, and of at least half of it where there are so many."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        for part, part_bytes in _cut(batch, piece_bytes):
            if waiting and size + part_bytes > piece_bytes:
                yield joined(waiting)
                waiting, size = [], 0
            waiting.append(part)
            size += part_bytes
    if waiting:
        yield joined(waiting)


def whole(batches: Iterable[pa.RecordBatch], *, limit_bytes: int) -> Iterator[pa.RecordBatch]:
    """All records as one batch; `RecordTooLargeError` if they are larger together."""
    parts: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        parts.append(batch)
        size += batch.nbytes
        if size > limit_bytes:
            raise RecordTooLargeError("the batch", size, limit_bytes)
    if parts:
        yield joined(parts)


def joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """The records of several batches in one; nothing is copied of a single one."""
    return batches[0] if len(batches) == 1 else pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _cut(batch: pa.RecordBatch, most_bytes: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The batch, halved until no part is larger, and the sizes of the parts."""
    size = batch.nbytes
    if size <= most_bytes or len(batch) == 1:
        yield batch, size
        return
    half = len(batch) // 2
    yield from _cut(batch.slice(0, half), most_bytes)
    yield from _cut(batch.slice(half), most_bytes)
