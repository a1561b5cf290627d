"""Section: the records of one transaction for one partition, and how they get into its log.

Invariant: a section is in the log whole or as a prefix, in order, once. Readers see nothing of it, nor of what
follows it, until the transaction is done. Each batch of it has the flag SECTION, and the number and id of
the transaction, so a repeated call counts the batches that are there, and continues after them.

    begin    the hold is published: readers stop at the end of the log
    append   the batches, with new headers; the owner's own records may go between them. A large piece that was
             staged as a file of its own becomes a segment: its headers are written anew, and the file gets a name
    end      fdatasync, with any durability; then the number is published as applied, and this is synced, too:
             readers that come after a power cut, and before any writer, see the section as soon as it is done
    release  the hold is given up, when the transaction is done in all its partitions

Threads: one thread at a time applies to a writer; others may append.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from ..errors import LogError
from ..format.header import SECTION, SECTION_END, Header, Producer
from ..log.recovery import Extent, is_part
from ..system.files import Buffer
from ..system.reentry import enter
from .tail import NewBatch, Txn
from .writer import Writer

__all__ = ["Piece", "apply_section"]

_PIECE_BYTES = 8 << 20  # written under the writer's lock at once


class Piece(NamedTuple):
    """A part of a section. Its batches are checked when they are read."""

    total: int  # of batches
    batches: Callable[[], Iterable[tuple[Header, Buffer]]]
    path: str  # of its file
    headers: Callable[[], Sequence[Header]]  # of all batches, if the file may become a segment; else none


def apply_section(writer: Writer, txn: Txn, pieces: Sequence[Piece]) -> None:
    """Append the section of the transaction, as far as it is not in the log yet. Synced.

    No other transaction may be held. Raises the errors of `Writer.append_body`, and `LogError` if the log has another
    history, whose numbers go as far as this one; the call may be repeated.
    """
    with enter(writer.applying, writer.directory):
        if not _is_applied(writer, txn):
            _apply(writer, txn, pieces)


def _is_applied(writer: Writer, txn: Txn) -> bool:
    """Whether the log has the section. A number alone proves nothing: another store may have given it, too."""
    mark = writer.disk.mark
    if mark.applied_txn < txn.number:
        return False
    if (mark.applied_txn, mark.applied_id) == txn[:2]:
        return True
    if Extent.among(writer.section_headers(mark.log_start_offset), txn.number, txn.id) == Extent.WHOLE:
        return True
    raise LogError(
        f"{writer.directory} has transaction {mark.applied_txn} of another history, and not transaction {txn.number}, "
        "which was committed for it: the directory was replaced since. Put the one that was there back, or give the "
        "transaction up with `loglib repair` for its store"
    )


def _apply(writer: Writer, txn: Txn, pieces: Sequence[Piece]) -> None:
    mark = writer.disk.mark
    there = 0
    if mark.held_txn:
        there = sum(1 for each in writer.section_headers(mark.held_from) if is_part(each, txn.number, txn.id))
    else:
        writer.begin_section(txn)
    count = sum(each.total for each in pieces)

    def new(number: int, header: Header, *parts: Buffer) -> NewBatch:
        flags = SECTION | SECTION_END if number == count else SECTION
        return NewBatch(header, parts, Producer(txn.id, txn.number), flags)

    before = 0  # batches of the pieces before
    for piece in pieces:
        present = min(max(there - before, 0), piece.total)
        first, before = before + present + 1, before + piece.total
        if present == piece.total:
            continue
        ready = [] if present else [new(number, header) for number, header in enumerate(piece.headers(), first)]
        if ready and writer.attach_section(piece.path, ready):
            continue
        rest = enumerate(islice(piece.batches(), present, None), first)
        _copy(writer, (new(number, header, body) for number, (header, body) in rest))
    writer.end_section()


def _copy(writer: Writer, batches: Iterable[NewBatch]) -> None:
    """Append the batches, which are one at least; many at once."""
    waiting: list[NewBatch] = []
    size = 0
    for batch in batches:
        length = batch.body.length
        if waiting and size + length > min(_PIECE_BYTES, writer.disk.segment_bytes()):
            writer.append_section(waiting)
            waiting, size = [], 0
        waiting.append(batch)
        size += length
    writer.append_section(waiting)
