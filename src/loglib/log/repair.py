"""Repair: a damaged topic opens again, and its readers report and pass over what is lost.

Invariant: everything that can be read before a repair is read after it, at the same offsets. No offset is used again.
Bytes that a repair overwrites or cuts are copied aside first, and damaged bytes of batches stay where they are. A
repair may crash at any point and be run again. These are its steps for each partition, in order:

    gaps.json       declares the ranges that cannot be read (gaps.py), and no longer those that can be read again
    headers         a damaged segment header is made from the segment before it and its own first batch, so the
                    oldest segment is repaired first
    places          a missing segment becomes a file of zeros, and a file that is too short ends with zeros: gaps;
                    surplus bytes of a file are cut
    the end         if the end of the log is damaged, the last segment is sealed, and a new one begins after it
    the watermark   is written again, if one of its slots is not whole
    recovery        the steps of a writer before it appends (recovery.py): they prove that the partition opens

Before that, `topic.json` is written again if it is damaged, with the default policies.

Threads: no state. Processes: declaring gaps needs no lock and may be done beside a writer. All else needs the
partition's lock.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from typing import NamedTuple

from ..config.policies import TopicConfig
from ..errors import CorruptLogError, LockedError, LogError
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
    kept_start_header,
    parse_segment_name,
    producers_name,
    read_producers,
    segment_name,
    write_producers,
)
from ..system.clock import SYSTEM
from ..system.directory import Directory
from ..system.files import Files
from . import copy_role, store_pointer, topic_file
from .care import LogCare, care_for, change_description, reach
from .examine import ExpectedSegment, Findings, examine
from .gaps import NAME as GAPS
from .gaps import Gap, joined, write_gaps
from .log import log_as_found
from .producers import Producers
from .recovery import NO_SECTIONS, Sections, rebuild_watermark, recover
from .verify import Progress, VerifyReport

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


class RepairReport(NamedTuple):
    """The result of repairing a topic."""

    repairs: tuple[Repair, ...]  # what was done; of a dry run: what would be done
    verified: VerifyReport  # after the repair; of a dry run: of the unchanged topic

    @property
    def lost_bytes(self) -> int:
        """Number of bytes of the log that these repairs declare as lost."""
        return sum(len(each.offsets) for each in self.repairs)


def repair_topic(
    files: Files, path: str,
    *, dry_run: bool = False, accept: bool = False, progress: Progress | None = None,
    clock: Callable[[], int] = SYSTEM,
) -> RepairReport:  # fmt: skip
    """Repair a topic; see `transactions.repair_store.repair`, which takes a store, too."""
    repairs: list[Repair] = []
    held: dict[int, LockedError] = {}
    if not dry_run:
        copy_role.check(files, path, copy_role.REPAIR)
    log_id, config = _description(files, path, repairs, dry_run=dry_run)
    _remove_lost_store(files, path, repairs, dry_run=dry_run)

    def care(identity: Identity, progress: Callable[[int], None]) -> None:
        try:
            repairs.extend(_repair_partition(
                files, path, identity, config.permissions,
                now_us=clock(), dry_run=dry_run, accept=accept, progress=progress,
            ))  # fmt: skip
        except LockedError as error:  # the other partitions are repaired all the same
            held[identity.partition] = error

    verified = care_for(files, path, log_id, range(config.partitions), care, progress)
    report = RepairReport(tuple(repairs), verified)
    if held:
        first = next(iter(held.values()))
        vars(first)["report"], vars(first)["holders"] = report, {number: each.holder for number, each in held.items()}
        raise first
    return report


def _remove_lost_store(files: Files, path: str, repairs: list[Repair], *, dry_run: bool) -> None:
    """Forget a store of transactions that is gone. The topic's logs contain what is left of its transactions."""
    name, kept = store_pointer.NAME, None
    try:
        what = "" if not store_pointer.is_lost(files, path) else "its store of transactions is gone"
    except CorruptLogError as error:
        what = f"found {error.found}"
    if not what:
        return

    def remove(directory: Directory) -> None:
        directory.unlink(name)
        directory.sync()

    if not dry_run:
        kept = change_description(files, path, name, remove)
    what = f"removed ({what}): the next transaction names a store, which does not know the versions of apps before"
    repairs.append(Repair(None, os.path.join(path, name), what, kept=kept))


# --- the description ---------------------------------------------------------------------------------


def _description(files: Files, path: str, repairs: list[Repair], *, dry_run: bool) -> tuple[bytes, TopicConfig]:
    """The log id and the policies of the topic. A description that is lost is written again."""
    try:
        return topic_file.read_existing(files, path)
    except CorruptLogError as error:
        fault = error
    log_id, config = stated_log_id(files, path), TopicConfig(partitions=max(_partitions(files, path)) + 1)
    kept = None
    if not dry_run:
        kept = change_description(files, path, topic_file.NAME, lambda made: topic_file.write(made, log_id, config))
    what = f"rebuilt for {config.partitions} partitions; all policies are the default ones: set them again"
    repairs.append(Repair(None, fault.path, f"{what} (found {fault.found})", kept=kept))
    return log_id, config


def _partitions(files: Files, path: str) -> list[int]:
    try:
        names = files.sizes(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise LogError(f"{path} holds no topic: there is no such directory") from error
    return [int(name) for name in names if len(name) == 4 and name.isascii() and name.isdigit()]


def stated_log_id(files: Files, path: str) -> bytes:
    """The log id that most headers of segments state. `LogError` if there is no partition."""
    stated: Counter[bytes] = Counter()
    numbers = _partitions(files, path)
    if not numbers:
        raise LogError(f"{path} holds no topic: it has neither {topic_file.NAME} nor a partition")
    for number in numbers:
        directory = topic_file.partition_directory(path, number)
        for name in files.sizes(directory):
            if name.endswith(".log"):
                opened = files.closing(files.open_read(os.path.join(directory, name)))
                with opened as fd, suppress(CorruptLogError):
                    stated[SegmentHeader.decode(files.read_at(fd, HEADER_BYTES, 0), name).log_id] += 1
    if not stated:
        raise CorruptLogError(path, 0, "no whole header of a segment", "at least one, which has the log's id")
    return stated.most_common(1)[0][0]


# --- a partition -------------------------------------------------------------------------------------


def _repair_partition(
    files: Files, topic_path: str, identity: Identity, permissions: int,
    *, now_us: int, dry_run: bool, accept: bool, progress: Callable[[int], object],
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
        if refusal is not None and findings.needs_lock:  # perhaps its writer has just begun a segment: look again
            findings = examine(files, path, identity, progress=progress)
            if findings.needs_lock:
                raise LockedError(refusal.path, refusal.holder, advice=_ADVICE)
        repair = _PartitionRepair(directory, identity, permissions, findings, now_us, dry_run=dry_run)
        repair.declare(accept=accept)
        if refusal is None:
            repair.mend()
        return repair.done


def _make_empty(files: Files, path: str, identity: Identity, permissions: int, now_us: int) -> None:
    aside = f"{path}.{files.random_bytes(4).hex()}.tmp"
    make = partial(topic_file.make_partition, files, aside, identity, now=now_us, permissions=permissions)
    topic_file.put_in_place(files, aside, path, make)
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

    def declare(self, *, accept: bool) -> None:
        """Declare what cannot be read as gaps, and with `accept` accept all gaps. The damaged bytes stay."""
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
        gaps = joined([*findings.still_gaps, *new])
        for at, gap in enumerate(gaps):
            if accept and not gap.accepted:
                self._note(GAPS, f"the loss of offsets [{gap.start}, {gap.end}) is accepted")
                gaps[at] = gap._replace(accepted=self._now_us)
        if self.done and not self._dry_run:
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
            tail = _Tail(base, 0, 0, _running_max_before(self._findings, base), NO_SECTIONS, ())
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
        found = kept_start_header(self._directory, self._identity, base)
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
