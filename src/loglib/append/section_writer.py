"""Section writer: how the records of one transaction for one partition get into its log. They are a *section*.

Invariant: a section is in the log whole or as a prefix, in order, once. Readers see neither the section nor what
follows it until the transaction is done. Each batch of it has the flag SECTION, and the number and id of
the transaction. So a repeated call counts the batches that are there, and continues after them.

    begin    the hold is published: readers stop at the end of the log
    append   the batches, with new headers; the owner's own records may go between them. A large piece that was
             staged as a file becomes a segment: its headers are written again, and the file gets the segment's name
    end      fdatasync, with any durability; then the number is published as applied, and this is synced, too:
             readers that come after a power cut, and before any writer, see the section when it is done
    release  the hold is given up, when the transaction is done in all its partitions

Threads: one thread at a time applies or ends a transaction in a partition (`settling`); others may append.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, starmap
from typing import NamedTuple

from ..errors import LogError, LogMovedError
from ..format.header import SECTION, SECTION_END, Header, Producer
from ..log.recovery import Extent, is_part
from ..system.files import Buffer
from ..system.reentry import enter
from .publication import NO_HOLD, Hold
from .tail import NewBatch, Txn
from .writer import Writer

_PIECE_BYTES = 8 << 20  # of one write, during which the writer's lock is held
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP)


class Piece(NamedTuple):
    """A part of a section. Its batches are checked when they are read."""

    total: int  # of batches
    batches: Callable[[], Iterable[tuple[Header, Buffer]]]
    path: str  # of its file
    headers: Callable[[], Sequence[Header]]  # of all batches, if the file may become a segment; else none


class SectionWriter(Writer):
    """A writer that also appends the sections of transactions."""

    @contextmanager
    def settling(self, *, wait_s: float | None = None) -> Iterator[None]:
        """Keep the partition for several steps, as `held` does, and other threads away from its transactions."""
        self._check_unawaited(wait_s)  # that thread may have `applying`
        with enter(self.applying, self.directory), self.held(wait_s=wait_s):
            yield

    def begin_section(self, txn: Txn) -> None:
        """Hide from readers all that is appended from now on, until `release` of this transaction."""
        self.check_outside()
        with self._losses.reporting(), self.entered():
            self.check_usable()
            self._seal()  # the offsets of its records are promised
            tail = self.batch.tail
            self.publication.publish(hold=Hold(txn.number, tail.end, tail.last_batch, txn.id, txn.store))

    def append_section(self, batches: Sequence[NewBatch]) -> None:
        """Append batches of a section, all of them or none. They must fit one segment, or be one batch."""
        self.check_outside()
        with self._losses.reporting():
            with self.entered():
                self.check_usable()
                self._seal()
                self._write(batches, self._clock.moment())
            self._tell_rolled()

    def attach_section(self, path: str, batches: Sequence[NewBatch]) -> bool:
        """Make a file with batches of a section the next segment, instead of copying them; see `TailWriter.attach`.

        False, and nothing has changed, if they must be copied: the active segment has no batch yet, or the file is
        larger than a segment, or in another file system.
        """
        self.check_outside()
        with self._losses.reporting():
            with self.entered():
                self.check_usable()
                self._seal()
                tail, sealed = self.batch.tail, self.disk.active
                if tail.end == sealed.base_offset:  # its name would be the new segment's
                    return False
                if sum([each.body.length for each in batches]) > self.disk.segment_bytes():
                    return False
                try:
                    tail, active = self.disk.attach(tail, path, batches, self._clock.moment())
                except (LogMovedError, OSError) as error:
                    if isinstance(error, OSError) and error.errno in _NO_LINKS:
                        return False
                    self._undo(error)
                _assign_together((self.disk, "active", active), (self, "batch", self.open_batch(tail)))
                self.disk.retire(sealed)
            self._tell_rolled()
        return True

    def section_headers(self, start: int) -> Iterator[Header]:
        """The headers of all written batches from `start`, the base offset of a batch."""
        self.check_outside()
        with self.entered():
            self._check_alive()
            end = self.batch.tail.end
        return self.disk.headers(start, end)

    def end_section(self) -> None:
        """Make the whole section durable, with any durability, and publish that it is complete."""
        self._take_reporting(self._end_section)

    def _end_section(self) -> None:
        with self.lock:
            self._check_alive()
            self._seal()
            self._check_moved()
            tail, active = self.batch.tail, self.disk.active
        self.disk.sync(active, tail)
        self.publication.publish(flushed=tail, durable=tail, applied=True)
        self.publication.sync()  # else a power cut takes the section from readers here, and not elsewhere
        self._limits.flushed_records = tail.records
        self.disk.close_retired()

    def release(self, txn: int) -> None:
        """Show readers the section of a transaction that is done. Does nothing if it is not held."""
        if self.published().held_txn == txn and self.closed is None:
            with self.settling():
                self.end_hold(txn)

    def end_hold(self, txn: int) -> None:
        """Show readers the section, as `release` does. The caller is in `settling`."""
        if self.disk.mark.held_txn == txn:
            self.publication.publish(hold=NO_HOLD)


def _assign_together(*assignments: tuple[object, str, object]) -> None:
    """Assign attributes in C code, so that no interrupt comes between the first assignment and the last."""
    deque(starmap(setattr, assignments), maxlen=0)


# --- a whole section -------------------------------------------------------------------------------


def apply_section(writer: SectionWriter, txn: Txn, pieces: Sequence[Piece]) -> None:
    """Append what the log does not have of the transaction's section yet. Synced.

    The caller is in `settling`, and no other transaction may be held. Raises the errors of `Writer.append_body`, and
    `LogError` if the log has a number of another history that is not below this one. The call may be repeated.
    """
    if not _is_applied(writer, txn):
        _apply(writer, txn, pieces)


def _is_applied(writer: SectionWriter, txn: Txn) -> bool:
    """True if the log has the section. A number alone proves nothing: another store may have given it, too."""
    mark = writer.disk.mark
    if mark.applied_txn < txn.number:
        return False
    if (mark.applied_txn, mark.applied_id) == txn[:2]:
        return True
    if Extent.among(writer.section_headers(mark.log_start_offset), txn.number, txn.id) == Extent.WHOLE:
        return True
    raise LogError(
        f"{writer.directory} has transaction {mark.applied_txn} of another history, and not transaction "
        f"{txn.number}, which was committed for it: the directory was replaced since. Put the one that was there "
        "back, or give the transaction up with `loglib repair` for its store"
    )


def _apply(writer: SectionWriter, txn: Txn, pieces: Sequence[Piece]) -> None:
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


def _copy(writer: SectionWriter, batches: Iterable[NewBatch]) -> None:
    """Append the batches, of which there is at least one; many in one write."""
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
