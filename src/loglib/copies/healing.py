"""Heal: damage of a topic is repaired in place, from other copies of it: mirrors, snapshots, backups.

Invariant: a byte is overwritten only if it is damaged and this log itself names what belongs there (log/donors.py).
Bytes that are overwritten or cut are copied aside first. Bytes that were written are synced, dropped from the page
cache, and read again. So after a crash each place is damaged or healed, and a log can be healed again.

    topic.json      a donor's, if it has the log id that most segments here state; it is healed first
    batches         the proven bytes; a file that is too short becomes longer by them
    a segment that  is built aside with its header, synced and renamed, if all of its batches are proven
      is missing
    a header        the donor's, if the first batch after it is the same in both logs; the same for its producers
    a file that is  is cut, as the next segment's header says
      too long
    the watermark   if one of its slots is whole, it is written into both
    gaps.json       declares no longer what can be read again

If nothing proves the bytes of a place, they stay, and the report says why.

Processes: with the partition's lock. Beside a living writer (or mirror) only sealed segments are healed, which no
writer touches: two processes that heal together write the same bytes.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import chain, groupby, pairwise
from typing import NamedTuple

from ..config.arguments import donor_paths, topic_path
from ..config.policies import TopicConfig
from ..errors import CorruptLogError, LogError, StorageIOError
from ..format.header import crc32c
from ..format.watermark import MOST_BYTES
from ..format.watermark import NAME as WATERMARK
from ..log import copy_role, topic_file
from ..log.care import LogCare, care_for, change_description, reach
from ..log.donors import CheckedBatch, Donor, Donors, ProvenRange, crc_before, header_here, last_named
from ..log.examine import Findings, examine
from ..log.gaps import NAME as GAPS
from ..log.gaps import write_gaps
from ..log.log import Log, log_as_found
from ..log.recovery import list_segments, read_mark, rebuild_watermark
from ..log.repair import stated_log_id
from ..log.verify import Progress, VerifyReport
from ..segment import (
    HEADER_BYTES,
    Identity,
    SegmentHeader,
    producers_name,
    read_producers,
    read_segment_header,
    segment_name,
)
from ..system import lock
from ..system.directory import Directory
from ..system.files import REAL, Files
from .local_source import SourceLog
from .sources import SegmentStart

_Parts = Callable[[], Iterable[tuple[int, list[bytes]]]]  # file positions, and successive contents there

_PAGE_BYTES = 1 << 16  # the largest page size of any system
_MOST_PRODUCERS_BYTES = 16 << 20


class HealedRange(NamedTuple):
    """One thing that was healed, or would be. `str` describes it."""

    partition: int | None  # None: the whole topic
    path: str  # of the file
    what: str  # a description
    offsets: range = range(0)  # of the batches that were replaced
    donor: str | None = None  # the directory that the bytes come from; None: the log itself says what belongs there
    kept: str | None = None  # the file that keeps the bytes which were overwritten or cut

    def __str__(self) -> str:
        donor = f" from {self.donor}" if self.donor else ""
        kept = f" (its bytes are kept in {self.kept})" if self.kept else ""
        return f"{self.path}: {self.what}{donor}{kept}"


class UnhealedRange(NamedTuple):
    """Damage that stays, and why. `str` describes it."""

    partition: int | None
    path: str  # of the file or directory
    why: str
    offsets: range = range(0)  # that still cannot be read

    def __str__(self) -> str:
        lost = f"offsets [{self.offsets.start}, {self.offsets.stop}) stay damaged: " if self.offsets else ""
        return f"{self.path}: {lost}{self.why}"


class HealReport(NamedTuple):
    """The result of healing a topic."""

    healed: tuple[HealedRange, ...]  # what was done; of a dry run: what would be done
    unhealed: tuple[UnhealedRange, ...]  # what stays damaged, and why
    verified: VerifyReport  # after the healing; of a dry run: of the unchanged topic

    @property
    def not_accepted(self) -> tuple[UnhealedRange, ...]:
        """The damage that stays, except gaps whose loss was accepted."""
        accepted = [(each.partition, each.offsets) for each in self.verified.accepted]
        return tuple(each for each in self.unhealed if not any(
            each.offsets and each.partition == partition
            and gap.start <= each.offsets.start and each.offsets.stop <= gap.stop for partition, gap in accepted
        ))  # fmt: skip


def heal(
    path: str | os.PathLike[str], donors: Iterable[str | os.PathLike[str]],
    *, dry_run: bool = False, progress: Progress | None = None,
) -> HealReport:  # fmt: skip
    """Replace damaged bytes of the topic at `path` by those of other copies of it, in place.

    `donors` are the directories of mirrors, snapshots or restored backups of this topic, or the topic that this one is
    a copy of. Damaged bytes are replaced only by bytes that this log itself names: each batch has the checksum of the
    batch before it. So a donor may be older, of another history, or damaged itself: only its bytes that belong here are
    taken. A whole topic is only read. Overwritten bytes are kept beside the segments, in files `*.damaged-*`. Gaps that
    `repair` has declared are healed as well, and declared no longer. Commits of groups are not healed.

    `dry_run` changes nothing and reports what would be done. `progress` is called now and then with two numbers of
    bytes: those that are read, and all. Reads every partition twice.

    A partition's lock is held while it is healed. Beside a living writer, or a mirror that runs into this copy, only
    sealed segments are healed; the report says what is left. Raises `LogError` if there is no topic, `CorruptLogError`
    if `topic.json` is damaged and no donor has it, and `StorageIOError` if the disk fails.
    """
    absolute = topic_path(path)
    return heal_topic(REAL, absolute, donor_paths(donors, absolute), dry_run=dry_run, progress=progress)


def heal_topic(
    files: Files, path: str, donors: Sequence[str],
    *, dry_run: bool = False, progress: Progress | None = None, only: Collection[int] | None = None,
) -> HealReport:  # fmt: skip
    """Heal a topic on these files; with `only`, only these partitions."""
    if not dry_run:
        copy_role.check(files, path, copy_role.HEAL)
    healed: list[HealedRange] = []
    unhealed: list[UnhealedRange] = []
    log_id, config = _description(files, path, donors, healed, dry_run=dry_run)

    def care(identity: Identity, progress: Callable[[int], None]) -> None:
        number = identity.partition
        place, *others = (topic_file.partition_directory(each, number) for each in (path, *donors))
        try:
            done, left = _heal_log(files, place, others, identity, config.permissions, progress, dry_run=dry_run)
        except CorruptLogError as error:
            why = f"found {error.found}, expected {error.expected}: nothing is left that names the log; mirror it"
            done, left = [], [UnhealedRange(number, place, why)]
        healed.extend(done)
        unhealed.extend(left)

    numbers = [number for number in range(config.partitions) if only is None or number in only]
    verified = care_for(files, path, log_id, numbers, care, progress)
    return HealReport(tuple(healed), tuple(unhealed), verified)


def _description(
    files: Files, path: str, donors: Sequence[str], healed: list[HealedRange], *, dry_run: bool
) -> tuple[bytes, TopicConfig]:
    """The log id and the policies of the topic. If its description is damaged, it is replaced by a donor's."""
    try:
        return topic_file.read_existing(files, path)
    except CorruptLogError as error:
        fault = error
    log_id, name = stated_log_id(files, path), topic_file.NAME
    for donor in donors:
        with suppress(LogError, OSError):
            described = topic_file.read(files, donor)
            if described is None or described[0] != log_id:
                continue
            content = files.read_whole(os.path.join(donor, name), topic_file.MOST_BYTES)
            write = partial(Directory.replace, name=name, content=content, permissions=described[1].permissions)
            kept = None if dry_run else change_description(files, path, name, write)
            healed.append(HealedRange(None, fault.path, f"rebuilt (found {fault.found})", donor=donor, kept=kept))
            return described
    raise fault


# --- one log -----------------------------------------------------------------------------------------


def _heal_log(
    files: Files, path: str, donors: Sequence[str], identity: Identity, permissions: int,
    progress: Callable[[int], object], *, dry_run: bool,
) -> tuple[list[HealedRange], list[UnhealedRange]]:  # fmt: skip
    """Heal the log in the directory `path` from the same log in the directories `donors`. A whole log is only read.

    If something is damaged, the partition's lock is taken; if another process has it, only sealed segments are healed.
    `dry_run` changes nothing and returns what would be healed. `progress` is called now and then with the number of
    bytes that are examined.

    Raises `CorruptLogError` if neither a watermark nor a segment is left, and `OSError` of the disk.
    """
    findings = examine(files, path, identity, progress=progress)
    if not _is_damaged(findings):
        return [], []
    with (
        reach(files, path, permissions, dry_run=dry_run) as (directory, refusal),
        closing(Donors(files, donors, identity)) as given,
    ):
        holder = None if refusal is None else refusal.holder
        if dry_run and not lock.is_free(files, path):
            holder = "another process"
        if holder is None and not dry_run:
            findings = examine(files, path, identity, progress=progress)  # a writer may have mended it meanwhile
        return _Healing(directory, given, identity, permissions, findings, holder=holder, dry_run=dry_run).run()


def _is_damaged(findings: Findings) -> bool:
    back = findings.known_gaps != findings.remaining(lambda _: False)
    return bool(findings.damage or back or findings.needs_lock or findings.fault_of_gaps)


class _Healing(LogCare):
    """The healing of one log. `holder` is the process that has the lock, if another one has it."""

    def __init__(
        self, directory: Directory, donors: Donors, identity: Identity, permissions: int, findings: Findings,
        *, holder: str | None, dry_run: bool,
    ) -> None:  # fmt: skip
        super().__init__(directory, identity, permissions, findings, dry_run=dry_run)
        self._donors = donors
        self._holder = holder
        self._log = log_as_found(self._files, directory.path, identity, findings.mark)
        found, start = list_segments(self._files, directory.path), findings.mark.log_start_offset
        self._bases = {base for base in found if base >= start}
        self._first_crcs: dict[int, int] = {}  # of the first batches of segments, when they are proven
        self._touched: set[int] = set()  # segments beside which batches were healed
        self._healed: list[HealedRange] = []
        self._unhealed: list[UnhealedRange] = []

    def run(self) -> tuple[list[HealedRange], list[UnhealedRange]]:
        with closing(self._log):
            for lost in _joined(each.offsets for each in (*self._findings.damage, *self._findings.lost_gaps)):
                self._heal_batches(lost)
            for base in sorted(self._bases):
                self._heal_header(base)
            for base, following in pairwise(sorted(self._bases)):
                self._cut_surplus(base, following)
            self._heal_watermark()
            self._take_back_gaps()
        return self._healed, self._unhealed

    def _done(self, name: str, what: str, offsets: range = range(0), **facts: str | None) -> None:
        self._healed.append(HealedRange(self._identity.partition, self._path(name), what, offsets, **facts))

    def _refuse(self, name: str, why: str, offsets: range = range(0)) -> None:
        self._unhealed.append(UnhealedRange(self._identity.partition, self._path(name), why, offsets))

    def _is_held(self, base: int) -> bool:
        """True if another process may be writing this segment: the last one."""
        return self._holder is not None and base >= self._findings.places[-1].base

    @property
    def _held_text(self) -> str:
        return f"{self._holder} writes it: close that writer, and heal again"

    def _log_start_now(self) -> int:
        with closing(Log(self._files, self._directory.path, self._identity)) as log:
            return log.published().log_start_offset

    # --- batches -----------------------------------------------------------------------------------------

    def _heal_batches(self, lost: range) -> None:
        mark = self._findings.mark
        before = crc_before(self._log, lost.start, mark)
        proven, why = self._donors.prove(self._log, lost, mark, before=before)
        for base, group in groupby(proven, key=lambda each: each.segment):
            ranges = list(group)
            self._first_crcs[ranges[0].start] = ranges[0].first_crc
            if refusal := self._place(base, ranges):
                self._refuse(segment_name(base), refusal, range(ranges[0].start, ranges[-1].end))
        if why:
            stop = proven[0].start if proven else lost.stop
            start = last_named(self._log, range(lost.start, stop), mark)
            self._refuse(segment_name(self._log.index.find(start) or 0), why, range(start, stop))
            if start > lost.start:  # the header of a segment in the middle names the batch before it
                self._heal_batches(range(lost.start, start))
        elif lost.stop in self._bases:
            self._touched.add(lost.stop)

    def _place(self, base: int, ranges: list[ProvenRange]) -> str:
        """Write proven batches into the segment with this base. Returns why not, if that cannot be done."""
        start, end = ranges[0].start, ranges[-1].end
        if self._is_held(base):
            return self._held_text
        if self._holder is not None and base < self._log_start_now():
            return "retention has dropped it meanwhile"
        if any(base < each < end for each in self._bases):
            return f"a segment begins in the middle of one of {ranges[0].donor.directory}"
        if base not in self._bases and start > base:
            return "the segment is missing, and no donor has all of its batches whole"
        try:
            if base in self._bases:
                self._overwrite(base, ranges)
                return ""
            return self._make(base, ranges)
        except _DonorFailedError as error:
            return str(error)

    def _overwrite(self, base: int, ranges: list[ProvenRange]) -> None:
        """Write the batches that differ from the segment."""
        name = segment_name(base)
        differing = self._differing(base, ranges)
        if not differing:
            return
        kept = self._keep(name, HEADER_BYTES + differing[0].start - base, differing[-1].end - differing[0].start)
        if not self._dry_run:
            self._write_parts(name, lambda: self._parts(base, ranges))
        self._touched.add(base)
        for each in differing:
            count = f"{each.batches} batch{'es' * (each.batches > 1)}"
            self._done(name, count, range(each.start, each.end), donor=each.donor, kept=kept)

    def _differing(self, base: int, ranges: Iterable[ProvenRange]) -> list[_Piece]:
        """Find neighbouring batches of one donor that differ from the file."""
        pieces: list[_Piece] = []
        with self._opened(segment_name(base)) as fd:
            for proven in ranges:
                donor = proven.donor.directory
                for header, stored in _fetch(proven):
                    start, end = header.base_offset, header.next_offset
                    if self._files.read_at(fd, header.length, HEADER_BYTES + start - base) == stored:
                        continue
                    if pieces and (pieces[-1].end, pieces[-1].donor) == (start, donor):
                        pieces[-1] = pieces[-1]._replace(end=end, batches=pieces[-1].batches + 1)
                    else:
                        pieces.append(_Piece(start, end, donor, 1))
        return pieces

    def _parts(self, base: int, ranges: Iterable[ProvenRange]) -> Iterator[tuple[int, list[bytes]]]:
        """The file positions of the proven batches, and their bytes."""
        for proven in ranges:
            yield HEADER_BYTES + proven.start - base, [each.stored for each in _fetch(proven)]

    def _make(self, base: int, ranges: list[ProvenRange]) -> str:
        """Make a missing segment. Returns why not, if that cannot be done."""
        begun, donor, why = self._proven_header(base, ranges[0].first_crc)
        if begun is None:
            return f"the segment is missing, and {why}"
        name = segment_name(base)
        if not self._dry_run:
            self._put_producers(base, begun)
            temporary = f"{name}.{self._files.random_bytes(8).hex()}.tmp"  # another process may heal as well
            if self._directory.exists(temporary):
                self._directory.unlink(temporary)
            self._files.close(self._directory.create(temporary, self._permissions))
            header = begun.header.encode()
            self._write_parts(temporary, lambda: chain([(0, [header])], self._parts(base, ranges)))
            self._directory.rename(temporary, name)
            self._directory.sync()
            self._log.refresh()
        self._bases.add(base)
        self._touched.add(base)
        offsets = range(ranges[0].start, ranges[-1].end)
        self._done(name, "the segment was missing: rebuilt", offsets, donor=donor)
        return ""

    # --- headers -----------------------------------------------------------------------------------------

    def _heal_header(self, base: int) -> None:
        """Heal the header of a segment, and its file of producers.

        The header may be one that a repair has made, and not fit the batches that were healed beside it.
        """
        name, own, wrong = segment_name(base), None, ""
        try:
            own = read_segment_header(self._files, self._path(name), self._identity)
            read_producers(self._files, self._directory.path, own)
        except CorruptLogError as error:
            wrong = f"found {error.found}, expected {error.expected}"
            own = None
        except FileNotFoundError:  # a dry run has not made it, or retention has dropped it
            return
        if own is not None and not self._follows(base, own):
            wrong = "it is not the one that follows the segment before"
        if not wrong and base not in self._touched:
            return
        here = header_here(self._log, base)
        begun, donor, why = self._proven_header(base, self._first_crcs.get(base) if here is None else here.header_crc)
        if begun is not None and own is not None and _has_same_facts(own, begun.header):
            begun, why = None, "a donor has the same one"
        if begun is None or self._is_held(base):
            if wrong:
                self._refuse(name, f"the header: {wrong}; {why or self._held_text}")
            return
        kept = self._keep(name, 0, HEADER_BYTES)
        if not self._dry_run:
            self._put_producers(base, begun)
            self._write_parts(name, lambda: [(0, [begun.header.encode()])])
        self._done(name, f"the segment header ({wrong or 'it did not fit what was healed'})", donor=donor, kept=kept)

    def _base_before(self, base: int) -> int | None:
        return max((each for each in self._bases if each < base), default=None)

    def _follows(self, base: int, header: SegmentHeader) -> bool:
        """True if a header names the segment that is before it."""
        before = self._base_before(base)
        return before is None or (header.previous_base_offset, header.previous_bytes) == (before, base - before)

    def _proven_header(self, base: int, first_crc: int | None) -> tuple[SegmentStart | None, str, str]:
        """The beginning of the segment at a donor with the same first batch, and that donor; or why there is none."""
        mark, before = self._findings.mark, self._base_before(base)
        known = crc_before(self._log, base, mark)
        for donor in self._donors.opened():
            with suppress(LogError, OSError):
                begun = self._begun(donor, base)
                header = begun.header
                if before is not None and header.previous_base_offset < before:
                    continue
                if known not in (None, header.previous_crc):
                    continue
                if first_crc is not None:
                    same = donor.segment_of(base).header_at(base).header_crc == first_crc
                else:
                    writer, of = (mark.writer_epoch, mark.writer_nonce), (header.writer_epoch, header.writer_nonce)
                    same = base == mark.flushed_end and donor.has_durable(base, writer, of)
                if same:
                    return begun, donor.directory, ""
        if first_crc is None and base < mark.flushed_end:
            return None, "", "its first batch is not whole here, so nothing says which header is the right one"
        return None, "", "; ".join(["no donor has this segment as it begins", *self._donors.refused])

    def _begun(self, donor: Donor, base: int) -> SegmentStart:
        with closing(SourceLog(self._files, donor.directory, self._identity)) as source:
            begun = source.begun(base)
        stated = begun.header.more_producers_crc
        if begun.more_producers is not None and crc32c(begun.more_producers) != stated:
            path = os.path.join(donor.directory, producers_name(base))
            raise CorruptLogError(path, 0, "other bytes", f"CRC {stated:08x}, as the segment has it")
        return begun

    def _put_producers(self, base: int, begun: SegmentStart) -> None:
        name, content = producers_name(base), begun.more_producers
        if content is None:
            return
        if self._directory.exists(name):
            if self._directory.read_whole(name, _MOST_PRODUCERS_BYTES) == content:
                return
            self._keep(name)
        self._directory.replace(name, content, self._permissions)

    # --- the rest ----------------------------------------------------------------------------------------

    def _cut_surplus(self, base: int, following: int) -> None:
        """Cut the surplus bytes of a sealed segment. The next segment's header states its size."""
        name, size = segment_name(base), following - base
        more = self._directory.sizes().get(name, 0) - HEADER_BYTES - size
        if more <= 0:
            return
        stated = None
        with suppress(CorruptLogError, FileNotFoundError):
            header = read_segment_header(self._files, self._path(segment_name(following)), self._identity)
            stated = header.previous_base_offset, header.previous_bytes
        if stated != (base, size) or self._is_held(base):
            why = "the header of the next segment does not say so" if stated != (base, size) else self._held_text
            self._refuse(name, f"it has {more} bytes too much; {why}")
            return
        kept = self._keep(name, HEADER_BYTES + size, more)
        self._resize(name, HEADER_BYTES + size)
        self._done(name, f"the file was {more} bytes too long: they were cut", kept=kept)

    def _heal_watermark(self) -> None:
        fault = self._findings.fault_of_mark
        if not fault:
            return
        mark = None
        with suppress(CorruptLogError):
            mark = read_mark(self._directory, self._identity)
        if mark is None:
            why = "so nothing says for sure where the log ends; loglib.repair finds the end, or opening it to write"
            self._refuse(WATERMARK, f"{fault}, {why}")
        elif self._holder is not None:
            self._refuse(WATERMARK, f"{fault}; {self._held_text}")
        else:
            kept = self._keep(WATERMARK, 0, MOST_BYTES)
            if not self._dry_run:
                rebuild_watermark(self._directory, self._identity, self._permissions, mark)
            self._done(WATERMARK, f"both slots, from the one that is whole ({fault})", kept=kept)

    def _take_back_gaps(self) -> None:
        """Remove gaps that can be read again from the list of declared gaps."""
        if self._findings.fault_of_gaps:
            self._refuse(GAPS, f"{self._findings.fault_of_gaps}; loglib.repair rebuilds it")
        lost = [each.offsets for each in self._unhealed]
        still = self._findings.remaining(lambda gap: any(one.start < gap.end and gap.start < one.stop for one in lost))
        back = len({*self._findings.known_gaps} - {*still})
        if back:
            if not self._dry_run:
                write_gaps(self._directory, self._identity, still, self._permissions)
            self._done(GAPS, f"{back} declared gap{'s' * (back > 1)} can be read again: taken back")

    # --- bytes -------------------------------------------------------------------------------------------

    def _write_parts(self, name: str, parts: _Parts) -> None:
        """Write the bytes of a file that differ from these, and read all of them again from the disk. Synced.

        If only the body of a batch is damaged, its header is not written: it may be the only proof of the batch, and a
        torn write cannot spoil it.
        """
        files = self._files
        with self._opened(name, to_write=True) as fd:
            for position, contents in parts():
                for content in contents:
                    start, end = _difference(files.read_at(fd, len(content), position), content)
                    if start < end:
                        # First, so that the file is read again from the disk; see recovery.rewrite.
                        self._drop_cached(fd, position + start, end - start)
                        files.write_all(fd, [content[start:end]], position + start)
                    position += len(content)
            files.datasync(fd)
            for position, contents in parts():
                content = b"".join(contents)
                self._drop_cached(fd, position, len(content))
                if files.read_at(fd, len(content), position) != content:
                    error = OSError(errno.EIO, "the disk gives other bytes than were written")
                    raise StorageIOError(self._path(name), error, f"healing at byte {position}")

    def _drop_cached(self, fd: int, position: int, size_bytes: int) -> None:
        first = position - position % _PAGE_BYTES
        self._files.drop_cached(fd, first, position + size_bytes - first + _PAGE_BYTES)


class _DonorFailedError(Exception):
    """A donor has lost or changed batches after they were proven."""


def _fetch(proven: ProvenRange) -> list[CheckedBatch]:
    try:
        return proven.donor.fetch(proven)
    except (LogError, OSError) as error:
        raise _DonorFailedError(f"{proven.donor.directory} has changed meanwhile: {error}") from error


def _difference(old: bytes, new: bytes) -> tuple[int, int]:
    """The shortest range of the new bytes that contains all differences from the old ones."""
    sizes = range(1, len(new) + 1)
    start = bisect_left(sizes, True, key=lambda size: old[:size] != new[:size])
    if len(old) < len(new) or start == len(new):
        return start, len(new)
    return start, len(new) - bisect_left(sizes, True, key=lambda size: old[-size:] != new[-size:])


def _has_same_facts(own: SegmentHeader, other: SegmentHeader) -> bool:
    """True if two headers state the same facts about the log before them."""
    return own[:10] == other[:10] and own.previous_batch == other.previous_batch


class _Piece(NamedTuple):
    """Neighbouring batches that are replaced."""

    start: int
    end: int
    donor: str
    batches: int


def _joined(ranges: Iterable[range]) -> list[range]:
    """The ranges in order; those that touch or overlap are joined."""
    found: list[range] = []
    for each in sorted(ranges, key=lambda one: one.start):
        if found and each.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, each.stop))
        else:
            found.append(each)
    return found
