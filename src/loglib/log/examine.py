"""Examine: the faults of a partition's files, and how the files should lie. For repair and healing.

Invariant: an examination changes nothing. It finds exactly the ranges of offsets that a reader with
`on_damage="skip"` would leave out. So a declared gap hides nothing that can be read.

The end of the log is that of the watermark. If no slot of it is whole, the end is that of the last whole batch that
can be found in the last segment.

Threads: no state, safe for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from typing import NamedTuple

from ..errors import CorruptLogError
from ..format.batch import stored_header
from ..format.header import Header
from ..format.record import Damage
from ..format.watermark import MOST_BYTES, Mark, broken_slots, newest
from ..segment import HEADER_BYTES, Identity, SegmentHeader, read_producers, read_segment_header
from ..system.files import Files
from .cursor import Cursor
from .gaps import Gap, read_gaps
from .log import Log, log_as_found
from .recovery import NO_SECTIONS, UNKNOWN, Extent, Sections, is_part, list_segments
from .search import after_damage
from .store_pointer import is_pending_here

_BLOCK_BYTES = 1 << 20


class ExpectedSegment(NamedTuple):
    """The place where a segment should lie, and the file that is there."""

    base: int
    end: int  # of its batches: the base of the next segment
    held: int | None  # bytes of batches in the file; None if there is no file
    header: SegmentHeader | None  # None if it is damaged, or contradicts the other files
    fault: str  # of the header, as a text; "" if it is whole


class Findings(NamedTuple):
    """The faults of a partition."""

    mark: Mark  # of the whole log
    fault_of_mark: str  # as a text; "" if the watermark is whole
    places: tuple[ExpectedSegment, ...]  # all segments as they should lie, oldest first
    known_gaps: tuple[Gap, ...]
    lost_gaps: tuple[Damage, ...]  # the parts of them that still cannot be read
    fault_of_gaps: str
    damage: tuple[Damage, ...]  # ranges that cannot be read and that no gap declares
    undecodable: tuple[Damage, ...]  # those of them whose bytes have right checksums, but are no batch
    end: int  # of the last whole batch, at or above the mark's

    @property
    def healed(self) -> int:
        """The number of declared gaps that can be read again."""
        return len({*self.known_gaps} - {*self.still_gaps})

    @property
    def still_gaps(self) -> tuple[Gap, ...]:
        """The declared gaps that still cannot be read, at least in part."""
        ends = {each.offsets.stop for each in self.lost_gaps}
        return self.remaining(lambda gap: gap.end in ends)

    def remaining(self, is_lost: Callable[[Gap], bool]) -> tuple[Gap, ...]:
        """The declared gaps that are lost, and the parts of the others before the log, which a tier may have."""
        start = self.mark.log_start_offset
        kept = (gap if is_lost(gap) else gap._replace(end=min(gap.end, start)) for gap in self.known_gaps)
        return tuple(each for each in kept if each.start < each.end)

    @property
    def needs_new_end(self) -> bool:
        """True if the last segment must be sealed, because the log cannot continue at its end."""
        last = self.places[-1]
        if self.end == last.base:  # it has no batch
            return False
        lost = last.held is None or last.held < self.mark.flushed_end - last.base
        return lost or any(each.offsets.stop > last.base for each in (*self.damage, *self.lost_gaps))

    def misplaced(self, place: ExpectedSegment) -> int:
        """The number of bytes that the file has too many; negative if they are too few. The last file may be longer."""
        assert place.held is not None
        if place is self.places[-1]:
            return place.held - (self.end - place.base) if self.needs_new_end else 0
        return place.held - (place.end - place.base)

    @property
    def needs_lock(self) -> bool:
        """True if the repair needs more than a declaration of gaps."""
        faulty = any(each.held is None or each.fault or self.misplaced(each) for each in self.places)
        return bool(self.fault_of_mark or faulty or self.undecodable or self.needs_new_end)


def examine(files: Files, path: str, identity: Identity, *, progress: Callable[[int], object]) -> Findings:
    """Examine a partition. Reads all of it, and calls `progress` now and then with the number of bytes that are read.

    Raises `CorruptLogError` if there is neither a watermark nor a segment, so that nothing shows what the log was,
    and `UnsupportedFormatError` for files of a newer format.
    """
    log = Log(files, path, identity)
    found = {base: size - HEADER_BYTES for base, size in list_segments(files, path).items()}
    mark, fault_of_mark = _mark(log, found)
    places = _places(log, mark, found)
    known, fault_of_gaps = _known_gaps(log)
    damage: list[Damage] = []
    lost_gaps: list[Damage] = []
    undecodable: list[Damage] = []
    if _is_unfinishable(log, mark):
        fault_of_mark = f"part of transaction {mark.held_txn}, which nobody can finish, hides what follows it"
        unfinished, mark = mark, mark._replace(held_txn=0, held_id=0, applied_txn=mark.held_txn, applied_id=0)
    else:
        unfinished = None
    with closing(log_as_found(files, path, identity, mark)) as readable:
        cursor = Cursor(readable, mark.log_start_offset, on_damage=damage.append, on_gap=lost_gaps.append)
        with closing(cursor):
            while batches := cursor.read(mark.flushed_end):
                for batch in batches:
                    header = stored_header(batch)
                    if unfinished is not None and is_part(header, unfinished.held_txn, unfinished.held_id):
                        undecodable.append(_unfinished(log, header))
                        continue
                    try:
                        batch.decode()
                    except CorruptLogError as error:
                        lost = range(header.base_offset, header.next_offset)
                        undecodable.append(Damage.of(error, identity.partition, lost))
                progress(cursor.position - mark.log_start_offset)
    lost_to = [each for each in damage if each.offsets]
    end = _end_of_whole(log, places[-1].base, mark)
    return Findings(
        mark, fault_of_mark, places, known, tuple(lost_gaps), fault_of_gaps, (*lost_to, *undecodable),
        tuple(undecodable), end,
    )  # fmt: skip


def _is_unfinishable(log: Log, mark: Mark) -> bool:
    """True if the log has a part of a transaction that is not pending, so that nobody adds the rest."""
    if not mark.held_txn or mark.applied_txn == mark.held_txn:
        return False
    if is_pending_here(log.files, os.path.dirname(log.directory), *mark.held):
        return False
    return Extent.among(log.headers_from(mark.held_from, mark), *mark.held) == Extent.PART


def _unfinished(log: Log, header: Header) -> Damage:
    number, lost = header.producer_sequence, range(header.base_offset, header.next_offset)
    path = log.path_of(log.index.find(lost.start) or 0)
    return Damage(log.partition, lost, path, 0, f"part of transaction {number}", "all of it")


def _known_gaps(log: Log) -> tuple[tuple[Gap, ...], str]:
    try:
        return read_gaps(log.files, log.directory, log.identity), ""
    except CorruptLogError as error:
        return (), f"{error.path} is damaged: {error.found}"


# --- the ends of the log ---------------------------------------------------------------------------


def _mark(log: Log, found: dict[int, int]) -> tuple[Mark, str]:
    """The mark of the whole log, and the fault of the watermark."""
    mark, fault, path, salt = None, "", log.watermark_path, log.identity.salt
    try:
        raw = log.files.read_whole(path, MOST_BYTES)
        mark, broken = newest(raw, salt, path), broken_slots(raw, salt, path)
        fault = f"{len(broken)} of its 2 slots are not whole" if broken else ""
    except FileNotFoundError:
        fault = "there is no file"
    except CorruptLogError as error:
        fault = error.found
    if mark is None:
        if not found:
            raise CorruptLogError(log.directory, 0, "no watermark and no segment", "at least one of them")
        mark = _mark_without_watermark(log, found)
    last = max(found, default=0)
    if mark.flushed_end < last:  # the segment was begun after the mark: all before it was durable
        header = _whole_header(log, last)
        tail = last if header is None else header.previous_batch
        mark = mark.durable_to(last, tail)
    return mark, fault


def _mark_without_watermark(log: Log, found: dict[int, int]) -> Mark:
    """A mark at the end of the last whole batch that can be found in the last segment."""
    last = max(found)
    header = _whole_header(log, last)
    end, tail = last, last if header is None else header.previous_batch
    sections = NO_SECTIONS if header is None else Sections.of(header, UNKNOWN)
    with log.open_base(last, past_damage=True) as segment:
        place, limit = last, segment.end_of_file()
        while place < limit:
            try:
                batches = segment.batches(place, limit, block_bytes=_BLOCK_BYTES)
                for batch in batches:
                    sections = sections.after(stored_header(batch))
                tail = stored_header(batches[-1]).base_offset
                place = end = batches[-1].next_offset
            except CorruptLogError:
                place = after_damage(segment, place, limit, None)
    mark = Mark.at_rest(1, min(found), end, tail)
    sections = sections.within(mark.log_start_offset, end, tail, partial(_batch_before, log))
    return mark._replace(**sections._asdict())


def _batch_before(log: Log, offset: int) -> int:
    """Base offset of the batch before the one at `offset`."""
    base = log.index.find(offset) or 0
    if base == offset:
        header = _whole_header(log, base)
        return base if header is None else header.previous_batch
    with log.open_base(base, past_damage=True) as segment:
        return segment.header_at(offset).previous_offset


def _end_of_whole(log: Log, last: int, mark: Mark) -> int:
    """The end of the whole batches after the mark's end in the last segment. They may not be synced yet."""
    end = mark.flushed_end
    with suppress(FileNotFoundError, CorruptLogError), log.open_base(last, past_damage=True) as segment:
        before, limit = mark.flushed_tail, segment.end_of_file()
        while end < limit:
            for batch in segment.batches(end, limit, block_bytes=_BLOCK_BYTES):
                header = stored_header(batch)
                if header.previous_offset != before:
                    return end
                before, end = header.base_offset, header.next_offset
    return end


# --- where segments should lie -----------------------------------------------------------------------


def _places(log: Log, mark: Mark, found: dict[int, int]) -> tuple[ExpectedSegment, ...]:
    found = {base: held for base, held in found.items() if base >= mark.log_start_offset}
    headers: dict[int, SegmentHeader] = {}
    faults: dict[int, str] = {}
    for base in found:
        try:
            header = read_segment_header(log.files, log.path_of(base), log.identity)
            read_producers(log.files, log.directory, header)
            headers[base] = header
        except CorruptLogError as error:
            faults[base] = f"{os.path.basename(error.path)}: found {error.found}, expected {error.expected}"
    bases = {mark.log_start_offset, *found}
    for base, header in headers.items():
        before = max((each for each in bases if each < base), default=None)
        stated = header.previous_base_offset
        if before is not None and before + found.get(before, 0) <= stated < base:
            bases.add(stated)  # a segment is missing
    ordered = sorted(bases)
    places = []
    for number, base in enumerate(ordered):
        end = ordered[number + 1] if number + 1 < len(ordered) else max(mark.flushed_end, base)
        whole = headers.get(base)
        if whole is not None and number and (whole.previous_base_offset, whole.previous_bytes) != (
            ordered[number - 1], base - ordered[number - 1],
        ):  # fmt: skip
            whole, faults[base] = None, "the segment before it is another one than its header states"
        places.append(ExpectedSegment(base, end, found.get(base), whole, faults.get(base, "")))
    return tuple(places)


def _whole_header(log: Log, base: int) -> SegmentHeader | None:
    with suppress(CorruptLogError, FileNotFoundError):
        return read_segment_header(log.files, log.path_of(base), log.identity)
    return None
