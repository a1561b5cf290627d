"""Repair partition: the repair of one partition, as changes of its files in their order.

Invariant: gaps are declared before anything else, and after each step another repair can continue. Bytes are
overwritten or cut only after they were copied aside. Segments are repaired oldest first, because a header is made from
the segment before it. The last step is recovery, which proves that the partition opens.

Processes: declaring gaps needs no lock. All else is done with the partition's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
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
from ..system import lock as writer_lock
from ..system.directory import Directory
from ..system.files import Files
from . import start_header, topic_file
from .examine import ExpectedSegment, Findings, examine
from .gaps import NAME as GAPS
from .gaps import Gap, joined, write_gaps
from .log import log_as_found
from .producers import Producers
from .quarantine import copy_aside
from .recovery import Sections, detach, rebuild_watermark, recover

__all__ = ["PartitionRepair", "Repair"]

_ADVICE = "close that writer: this damage cannot be repaired beside it"


class Repair(NamedTuple):
    """One action of a repair, done or planned. `str` gives it as a text."""

    partition: int | None  # None: the whole topic
    path: str  # of the file
    what: str  # the action, as a text
    offsets: range = range(0)  # declared as lost
    kept: str | None = None  # the file that keeps the bytes which were overwritten or cut

    def __str__(self) -> str:
        kept = f" (its bytes are kept in {self.kept})" if self.kept else ""
        return f"{self.path}: {self.what}{kept}"


class PartitionRepair:
    """The repair of one partition."""

    def __init__(self, files: Files, topic_path: str, identity: Identity, permissions: int, now_us: int) -> None:
        self._files = files
        self._path = topic_file.partition_directory(topic_path, identity.partition)
        self._identity = identity
        self._permissions = permissions
        self._now_us = now_us
        self._repairs: list[Repair] = []

    def run(self, *, dry_run: bool, progress: Callable[[int], object]) -> list[Repair]:
        """Repair the partition; returns the actions that were done, or would be done in a `dry_run`."""
        if not self._files.exists(self._path):
            return self._make_empty(dry_run=dry_run)
        if dry_run:
            self._report(examine(self._files, self._path, self._identity, progress=progress))
            return self._repairs
        with ExitStack() as opened:
            held: LockedError | None = None
            try:
                lock = writer_lock.acquire(
                    self._files, os.path.join(self._path, writer_lock.NAME), self._permissions
                )
                opened.callback(lock.release)
                directory = lock.directory
                detach(directory)
            except LockedError as error:
                held = error
                directory = opened.enter_context(Directory.open(self._files, self._path))
            findings = examine(self._files, self._path, self._identity, progress=progress)
            if held is not None and findings.needs_lock:
                raise LockedError(held.path, held.holder, advice=_ADVICE)
            self._declare(directory, findings)
            if held is None:
                self._mend(directory, findings)
        return self._repairs

    def _make_empty(self, *, dry_run: bool) -> list[Repair]:
        """Make an empty log for a partition whose directory is gone."""
        if not dry_run:
            aside = f"{self._path}.{self._files.random_bytes(4).hex()}.tmp"

            def build() -> None:
                self._files.make_directory(aside, self._permissions)
                topic_file.make_partition(
                    self._files, aside, self._identity, now=self._now_us, permissions=self._permissions
                )

            topic_file.put_in_place(self._files, aside, self._path, build)
            self._files.sync_directory(os.path.dirname(self._path))
        what = "the directory was gone, with all its records: an empty log was made, whose offsets begin at 0 again"
        self._note(self._path, what)
        return self._repairs

    def _note(self, path: str, what: str, offsets: range = range(0), kept: str | None = None) -> None:
        self._repairs.append(Repair(self._identity.partition, path, what, offsets, kept))

    def _name(self, name: str) -> str:
        return os.path.join(self._path, name)

    def _report(self, findings: Findings) -> None:
        """Note the actions that would be done."""
        self._note_gaps(findings)
        for each in findings.undecodable:
            self._note(each.path, _invalid(each))
        for place in findings.places:
            name = self._name(segment_name(place.base))
            if place.held is None:
                self._note(name, _missing(findings, place))
            else:
                if misplaced := findings.misplaced(place):
                    self._note(name, _misplaced(misplaced))
                if place.fault:
                    self._note(name, _header(place))
        if findings.needs_new_end:
            self._note(self._name(segment_name(findings.end)), _NEW_END)
        if findings.fault_of_mark:
            self._note(self._name(WATERMARK), _watermark(findings))

    # --- gaps --------------------------------------------------------------------------------------

    def _note_gaps(self, findings: Findings) -> None:
        for each in findings.damage:
            lost = f"offsets [{each.offsets.start}, {each.offsets.stop}) are declared as a gap"
            what = f"{lost}: at byte {each.file_position} found {each.found}, expected {each.expected}"
            self._note(each.path, what, each.offsets)
        if findings.healed:
            self._note(self._name(GAPS), f"{findings.healed} declared gaps can be read again: they are taken back")
        if findings.fault_of_gaps:
            self._note(self._name(GAPS), f"rebuilt ({findings.fault_of_gaps})")

    def _declare(self, directory: Directory, findings: Findings) -> None:
        """Declare the ranges that cannot be read as gaps. The damaged bytes stay."""
        new = [
            Gap(each.offsets.start, each.offsets.stop, f"{os.path.basename(each.path)}: {each.found}", self._now_us)
            for each in findings.damage
        ]
        if not new and not findings.fault_of_gaps and not findings.healed:
            return
        gaps = joined([*findings.still_gaps, *new])
        if findings.fault_of_gaps and directory.exists(GAPS):
            copy_aside(directory, GAPS, 0, directory.sizes()[GAPS])
        write_gaps(directory, self._identity, gaps, self._permissions)
        self._note_gaps(findings)

    # --- all else ------------------------------------------------------------------------------------

    def _mend(self, directory: Directory, findings: Findings) -> None:
        if findings.needs_lock:
            for each in findings.undecodable:
                self._invalidate(directory, each)
            before: SegmentHeader | None = None
            for place in findings.places:
                before = self._put_right(directory, findings, place, before)
            if findings.needs_new_end:
                assert before is not None
                before = self._make(directory, findings, findings.end, before)
                self._note(self._name(segment_name(findings.end)), _NEW_END)
            if findings.fault_of_mark:
                mark = findings.mark
                if before is not None and mark.flushed_end == before.base_offset:  # that header may be new
                    mark = mark._replace(flushed_tail=before.previous_batch, durable_tail=before.previous_batch)
                rebuild_watermark(directory, self._identity, self._permissions, mark)
                self._note(self._name(WATERMARK), _watermark(findings))
        recovered = recover(directory, self._identity, self._permissions)
        end, last_batch = recovered.tail[:2]
        if self._repairs and recovered.mark.flushed_end < end:  # a watermark that is older than the files
            rebuild_watermark(
                directory, self._identity, self._permissions, recovered.mark.durable_to(end, last_batch)
            )

    def _invalidate(self, directory: Directory, bad: Damage) -> None:
        """Quarantine a batch that passes its checksums but cannot be decoded, and invalidate its header."""
        name, offsets = os.path.basename(bad.path), bad.offsets
        fd = directory.open_write(name)
        try:
            at = HEADER_BYTES + offsets.start - (parse_segment_name(name) or 0)
            kept = copy_aside(directory, name, at, len(offsets))
            self._files.write_all(fd, [bytes(8)], at)
            self._files.datasync(fd)
        finally:
            self._files.close(fd)
        self._note(bad.path, _invalid(bad), kept=kept)

    def _put_right(
        self, directory: Directory, findings: Findings, place: ExpectedSegment, before: SegmentHeader | None
    ) -> SegmentHeader:
        """Bring a segment to its place and size; returns its header, which is whole then."""
        name, header = segment_name(place.base), place.header
        is_last = place is findings.places[-1]
        end = findings.end if is_last and findings.needs_new_end else place.end
        if place.held is None:
            header = self._make(directory, findings, place.base, before)
            self._resize(directory, name, place.base, end)
            self._note(self._name(name), _missing(findings, place))
            return header
        if misplaced := findings.misplaced(place):
            kept = None
            if misplaced > 0:
                kept = copy_aside(directory, name, HEADER_BYTES + end - place.base, misplaced)
            self._resize(directory, name, place.base, end)
            self._note(self._name(name), _misplaced(misplaced), kept=kept)
        elif is_last and findings.needs_new_end:
            self._resize(directory, name, place.base, end)  # its bytes may never have been synced
        if header is None:
            kept = copy_aside(directory, name, 0, HEADER_BYTES)
            header = self._header(directory, findings, place.base, before)
            fd = directory.open_write(name)
            try:
                self._files.write_all(fd, [header.encode()], 0)
                self._files.datasync(fd)
            finally:
                self._files.close(fd)
            self._note(self._name(name), _header(place), kept=kept)
        return header

    def _resize(self, directory: Directory, name: str, base: int, end: int) -> None:
        fd = directory.open_write(name)
        try:
            if self._files.size(fd) != HEADER_BYTES + end - base:
                self._files.ftruncate(fd, HEADER_BYTES + end - base)
            self._files.datasync(fd)
        finally:
            self._files.close(fd)

    def _make(
        self, directory: Directory, findings: Findings, base: int, before: SegmentHeader | None
    ) -> SegmentHeader:
        """Make a segment without batches."""
        header = self._header(directory, findings, base, before)
        self._files.close(create_segment(directory, header, self._permissions))
        return header

    # --- headers -------------------------------------------------------------------------------------

    def _header(
        self, directory: Directory, findings: Findings, base: int, before: SegmentHeader | None
    ) -> SegmentHeader:
        """The header of a segment, from the segment before it and from its own first batch.

        The header of the first segment is the copy that was kept when the segments before it were dropped.
        """
        first = self._first_batch(base)
        if before is None and (found := self._kept_header(directory, base, first)) is not None:
            return found
        mark, identity = findings.mark, self._identity
        if before is None:
            tail = _Tail(base, 0, 0, _running_max_before(findings, base), Sections(0, 0, 0, 0), ())
            previous_base = base
        else:
            tail = self._tail_of(findings, before, base)
            previous_base = before.base_offset
        last_batch, crc = tail.last_batch, tail.crc
        if first is not None and (before is None or last_batch is None):
            last_batch, crc = first.previous_offset, first.previous_crc
        if last_batch is None:  # it is in a gap
            last_batch = previous_base
        more_name = producers_name(base)
        if directory.exists(more_name):
            copy_aside(directory, more_name, 0, directory.sizes()[more_name])
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

    def _kept_header(self, directory: Directory, base: int, first: Header | None) -> SegmentHeader | None:
        """The kept header of the first segment, if the first batch follows it."""
        found = start_header.kept(directory, self._identity, base)
        if found is None or (first is not None and first.previous_crc != found.previous_crc):
            return None
        try:
            read_producers(self._files, self._path, found)
        except CorruptLogError:  # those in the separate file, which are the oldest, are lost
            return found._replace(more_producers=0, more_producers_crc=0)
        return found

    def _first_batch(self, base: int) -> Header | None:
        """The header of the segment's first batch, if it is whole."""
        with suppress(CorruptLogError, FileNotFoundError):
            path = self._name(segment_name(base))
            with SegmentReader(self._files, path, self._identity, base_offset=base) as segment:
                return segment.header_at(base)
        return None

    def _tail_of(self, findings: Findings, header: SegmentHeader, end: int) -> _Tail:
        """The facts that the whole batches of a segment have for the header of the next one. Gaps are skipped."""
        before = read_producers(self._files, self._path, header)
        mark = findings.mark._replace(flushed_end=max(findings.mark.flushed_end, end))
        with closing(log_as_found(self._files, self._path, self._identity, mark)) as log:
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
    """The largest event time that the log before the first segment may have, by the header of the next one.

    A search by time that begins too early still finds its record; one that begins too late does not.
    """
    known = (each.header.running_max_timestamp for each in findings.places if each.base > base and each.header)
    return next(known, NO_TIMESTAMP) if base else NO_TIMESTAMP


class _Tail(NamedTuple):
    """The facts that a segment has for the header of the next one."""

    last_batch: int | None  # None: it is in a gap
    crc: int
    append_time: int
    running_max: int
    sections: Sections
    producers: tuple[ProducerState, ...]


_NEW_END = "a new segment begins here, because the last one has a gap"


def _invalid(bad: Damage) -> str:
    return f"a batch that has its checksums was made invalid: found {bad.found}, expected {bad.expected}"


def _missing(findings: Findings, place: ExpectedSegment) -> str:
    end = findings.end if place is findings.places[-1] else place.end
    return f"the segment was missing: rebuilt, with zeros up to offset {end}"


def _misplaced(size_bytes: int) -> str:
    if size_bytes < 0:
        return f"the file was {-size_bytes} bytes too short: it ends with zeros now"
    return f"the file was {size_bytes} bytes too long: they were cut"


def _header(place: ExpectedSegment) -> str:
    return f"the segment header was rebuilt ({place.fault})"


def _watermark(findings: Findings) -> str:
    mark = findings.mark
    return f"written again, for offsets [{mark.log_start_offset}, {mark.flushed_end}) ({findings.fault_of_mark})"
