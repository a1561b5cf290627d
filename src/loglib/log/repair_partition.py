"""Repair partition: the repair of one partition, step by step.

Invariant: gaps are declared before anything else, and after each step another repair can continue. Bytes are
overwritten or cut only after they were copied aside. Segments are repaired oldest first, because a header is made from
the segment before it. The last step is recovery, which proves that the partition opens.

Processes: declaring gaps needs no lock. All else is done with the partition's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing, suppress
from typing import NamedTuple

from ..errors import CorruptLogError, LockedError
from ..format.header import Header
from ..format.record import Damage
from ..format.watermark import NAME as WATERMARK
from ..segment import (
    HEADER_BYTES,
    NO_TIMESTAMP,
    Identity,
    ProducerState,
    SegmentHeader,
    SegmentReader,
    create_segment,
    parse_segment_name,
    producers_name,
    read_producers,
    segment_name,
    write_producers,
)
from ..system.directory import Directory
from ..system.files import Files
from . import start_header, topic_file
from .care import LogCare, reach
from .examine import ExpectedSegment, Findings, examine
from .gaps import NAME as GAPS
from .gaps import Gap, joined, write_gaps
from .log import log_as_found
from .producers import Producers
from .recovery import Sections, rebuild_watermark, recover

__all__ = ["Repair", "repair_partition"]

_ADVICE = "close that writer: this damage cannot be repaired beside it"


class Repair(NamedTuple):
    """One thing that a repair has done, or would do. `str` describes it."""

    partition: int | None  # None: the whole topic
    path: str  # of the file
    what: str  # a description
    offsets: range = range(0)  # declared as lost
    kept: str | None = None  # the file that keeps the bytes which were overwritten or cut

    def __str__(self) -> str:
        kept = f" (its bytes are kept in {self.kept})" if self.kept else ""
        return f"{self.path}: {self.what}{kept}"


def repair_partition(
    files: Files, topic_path: str, identity: Identity, permissions: int,
    *, now_us: int, dry_run: bool, progress: Callable[[int], object],
) -> list[Repair]:  # fmt: skip
    """Repair a partition. Returns what was done, or would be done."""
    path = topic_file.partition_directory(topic_path, identity.partition)
    if not files.exists(path):
        if not dry_run:
            _make_empty(files, path, identity, permissions, now_us)
        what = "the directory was gone, with all its records: an empty log was made, whose offsets begin at 0 again"
        return [Repair(identity.partition, path, what)]
    with reach(files, path, permissions, dry_run=dry_run) as (directory, refusal):
        findings = examine(files, path, identity, progress=progress)
        if refusal is not None and findings.needs_lock:
            raise LockedError(refusal.path, refusal.holder, advice=_ADVICE)
        repair = _PartitionRepair(directory, identity, permissions, findings, now_us, dry_run=dry_run)
        repair.declare()
        if refusal is None:
            repair.mend()
        return repair.done


def _make_empty(files: Files, path: str, identity: Identity, permissions: int, now_us: int) -> None:
    aside = f"{path}.{files.random_bytes(4).hex()}.tmp"

    def build() -> None:
        files.make_directory(aside, permissions)
        topic_file.make_partition(files, aside, identity, now=now_us, permissions=permissions)

    topic_file.put_in_place(files, aside, path, build)
    files.sync_directory(os.path.dirname(path))


class _PartitionRepair(LogCare):
    """The repair of one partition whose directory is there."""

    def __init__(
        self, directory: Directory, identity: Identity, permissions: int, findings: Findings, now_us: int,
        *, dry_run: bool,
    ) -> None:  # fmt: skip
        super().__init__(directory, identity, permissions, findings, dry_run=dry_run)
        self._now_us = now_us
        self.done: list[Repair] = []  # or what would be done

    def _note(self, name: str, what: str, offsets: range = range(0), kept: str | None = None) -> None:
        self.done.append(Repair(self._identity.partition, self._path(name), what, offsets, kept))

    def declare(self) -> None:
        """Declare what cannot be read as gaps. The damaged bytes stay."""
        findings, new = self._findings, list[Gap]()
        for each in findings.damage:
            name = os.path.basename(each.path)
            new.append(Gap(each.offsets.start, each.offsets.stop, f"{name}: {each.found}", self._now_us))
            lost = f"offsets [{each.offsets.start}, {each.offsets.stop}) are declared as a gap"
            what = f"{lost}: at byte {each.file_position} found {each.found}, expected {each.expected}"
            self._note(name, what, each.offsets)
        if findings.healed:
            self._note(GAPS, f"{findings.healed} declared gaps can be read again: they are taken back")
        if findings.fault_of_gaps:
            self._note(GAPS, f"rebuilt ({findings.fault_of_gaps})")
            self._keep(GAPS)
        if self.done and not self._dry_run:
            gaps = joined([*findings.still_gaps, *new])
            write_gaps(self._directory, self._identity, gaps, self._permissions)

    # --- all else ------------------------------------------------------------------------------------

    def mend(self) -> None:
        """Repair the files, and recover the log as a writer does."""
        findings = self._findings
        if findings.needs_lock:
            for each in findings.undecodable:
                self._invalidate(each)
            before: SegmentHeader | None = None
            for place in findings.places:
                before = self._put_right(place, before)
            if findings.needs_new_end:
                before = self._make(findings.end, before)
                self._note(segment_name(findings.end), "a new segment begins here, because the last one has a gap")
            if findings.fault_of_mark:
                self._rebuild_mark(before)
        if self._dry_run:
            return
        recovered = recover(self._directory, self._identity, self._permissions)
        end, last_batch = recovered.tail[:2]
        if self.done and recovered.mark.flushed_end < end:  # a watermark that is older than the files
            mark = recovered.mark.durable_to(end, last_batch)
            rebuild_watermark(self._directory, self._identity, self._permissions, mark)

    def _rebuild_mark(self, last: SegmentHeader | None) -> None:
        """Write the watermark again; `last` is the header of the last segment."""
        mark, fault = self._findings.mark, self._findings.fault_of_mark
        if not self._dry_run:
            end = mark
            if last is not None and mark.flushed_end == last.base_offset:  # that header may be new
                end = mark._replace(flushed_tail=last.previous_batch, durable_tail=last.previous_batch)
            rebuild_watermark(self._directory, self._identity, self._permissions, end)
        self._note(WATERMARK, f"written again, for offsets [{mark.log_start_offset}, {mark.flushed_end}) ({fault})")

    def _invalidate(self, bad: Damage) -> None:
        """Quarantine a batch that passes its checksums but cannot be decoded, and invalidate its header."""
        name, offsets = os.path.basename(bad.path), bad.offsets
        at = HEADER_BYTES + offsets.start - (parse_segment_name(name) or 0)
        kept = self._keep(name, at, len(offsets))
        self._write(name, at, bytes(8))
        what = f"a batch that has its checksums was made invalid: found {bad.found}, expected {bad.expected}"
        self._note(name, what, kept=kept)

    def _put_right(self, place: ExpectedSegment, before: SegmentHeader | None) -> SegmentHeader | None:
        """Repair a segment, which follows the one with the header `before`; returns its header.

        The header is whole then; None in a dry run, if it is damaged.
        """
        findings, name, header = self._findings, segment_name(place.base), place.header
        is_last = place is findings.places[-1]
        end = findings.end if is_last and findings.needs_new_end else place.end
        if place.held is None:
            header = self._make(place.base, before)
            self._resize(name, HEADER_BYTES + end - place.base)
            end = findings.end if is_last else place.end
            self._note(name, f"the segment was missing: rebuilt, with zeros up to offset {end}")
            return header
        if misplaced := findings.misplaced(place):
            kept = self._keep(name, HEADER_BYTES + end - place.base, misplaced)
            self._resize(name, HEADER_BYTES + end - place.base)
            fault = f"{-misplaced} bytes too short: it ends with zeros now"
            self._note(name, f"the file was {fault if misplaced < 0 else f'{misplaced} bytes too long: they were cut'}",
                       kept=kept)  # fmt: skip
        elif is_last and findings.needs_new_end:
            self._resize(name, HEADER_BYTES + end - place.base)  # its bytes may never have been synced
        if header is None:
            kept = self._keep(name, 0, HEADER_BYTES)
            if not self._dry_run:
                header = self._header(place.base, before)
                self._write(name, 0, header.encode())
            self._note(name, f"the segment header was rebuilt ({place.fault})", kept=kept)
        return header

    def _make(self, base: int, before: SegmentHeader | None) -> SegmentHeader | None:
        """Make a segment without batches; None in a dry run."""
        if self._dry_run:
            return None
        header = self._header(base, before)
        self._files.close(create_segment(self._directory, header, self._permissions))
        return header

    # --- headers -------------------------------------------------------------------------------------

    def _header(self, base: int, before: SegmentHeader | None) -> SegmentHeader:
        """Make the header of a segment from the segment before it, whose header is `before`, and its own first batch.

        The header of the log's first segment was kept when the segments before it were dropped.
        """
        directory, first = self._directory, self._first_batch(base)
        if before is None and (found := self._kept_header(base, first)) is not None:
            return found
        mark, identity = self._findings.mark, self._identity
        if before is None:
            tail = _Tail(base, 0, 0, _running_max_before(self._findings, base), Sections(0, 0, 0, 0), ())
            previous_base = base
        else:
            tail = self._tail_of(before, base)
            previous_base = before.base_offset
        last_batch, crc = tail.last_batch, tail.crc
        if first is not None and (before is None or last_batch is None):
            last_batch, crc = first.previous_offset, first.previous_crc
        if last_batch is None:  # it is in a gap
            last_batch = previous_base
        more_name = producers_name(base)
        self._keep(more_name)
        table, more, more_crc = write_producers(directory, base, tail.producers, self._permissions)
        append_time = tail.append_time
        created = append_time if first is None else first.append_time
        return SegmentHeader(
            identity.log_id, identity.partition, mark.writer_epoch if first is None else first.writer_epoch, base,
            created or self._now_us, previous_base, base - previous_base, crc, append_time, tail.running_max,
            applied_txn=tail.sections.applied_txn, held_txn=tail.sections.held_txn, held_from=tail.sections.held_from,
            applied_id=tail.sections.applied_id, held_id=tail.sections.held_id, txn_store=tail.sections.txn_store,
            writer_nonce=mark.writer_nonce if first is None else first.writer_nonce,
            previous_batch_bytes=base - last_batch, more_producers=more, more_producers_crc=more_crc, producers=table,
        )  # fmt: skip

    def _kept_header(self, base: int, first: Header | None) -> SegmentHeader | None:
        """The stored copy of the first segment's header, if its first batch follows the batch that the copy names."""
        found = start_header.kept(self._directory, self._identity, base)
        if found is None or (first is not None and first.previous_crc != found.previous_crc):
            return None
        try:
            read_producers(self._files, self._directory.path, found)
        except CorruptLogError:  # those in the separate file, which are the oldest, are lost
            return found._replace(more_producers=0, more_producers_crc=0)
        return found

    def _first_batch(self, base: int) -> Header | None:
        """The header of the segment's first batch, if it is whole."""
        with suppress(CorruptLogError, FileNotFoundError):
            path = self._path(segment_name(base))
            with SegmentReader(self._files, path, self._identity, base_offset=base) as segment:
                return segment.header_at(base)
        return None

    def _tail_of(self, header: SegmentHeader, end: int) -> _Tail:
        """The facts of a segment's whole batches for the header of the next one. Gaps are passed over."""
        path, mark = self._directory.path, self._findings.mark
        before = read_producers(self._files, path, header)
        mark = mark._replace(flushed_end=max(mark.flushed_end, end))
        with closing(log_as_found(self._files, path, self._identity, mark)) as log:
            batches = [each for each in log.headers(header.base_offset, end, mark) if each.record_count]
        last = batches[-1] if batches else None
        sections = Sections.of(header, 0)
        for each in batches:
            sections = sections.after(each)
        producers = Producers(self._identity.partition, before, lambda: iter(batches)).snapshot()
        running_max = max([header.running_max_timestamp, *(each.running_max_timestamp for each in batches)])
        append_time = header.last_append_time if last is None else last.append_time
        if last is None or last.next_offset != end:
            return _Tail(None, 0, append_time, running_max, sections, producers)
        return _Tail(last.base_offset, last.header_crc, append_time, running_max, sections, producers)


def _running_max_before(findings: Findings, base: int) -> int:
    """An upper bound of the event times before the first segment, which the next whole header states.

    A search by time that begins too early still finds its record; one that begins too late does not.
    """
    known = (each.header.running_max_timestamp for each in findings.places if each.base > base and each.header)
    return next(known, NO_TIMESTAMP) if base else NO_TIMESTAMP


class _Tail(NamedTuple):
    """The facts of a segment for the header of the next one."""

    last_batch: int | None  # None: it is in a gap
    crc: int
    append_time: int
    running_max: int
    sections: Sections
    producers: tuple[ProducerState, ...]
