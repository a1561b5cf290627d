"""Heal log: damaged bytes of one log are replaced by those of other copies of it, in place.

Invariant: a byte is overwritten only if it is damaged and this log itself names what belongs there (log/donors.py).
What is overwritten or cut is copied aside first. What was written is synced, dropped from the page cache, and read
again. So a crash leaves a place damaged or healed, and a log can be healed again.

    batches         the proven bytes; a file that is too short becomes longer by them
    a segment that  is built aside with its header, synced and renamed, if all of its batches are proven
      is missing
    a header        the donor's, if the first batch behind it is the same in both logs; the same for its producers
    a file that is  is cut, as the next segment's header says
      too long
    the watermark   if one of its slots is whole, it is written into both
    gaps.json       declares no longer what can be read again

Where nothing proves the bytes they stay as they are, and the report says why.

Processes: with the partition's lock. Beside a living writer (or mirror) only sealed segments are healed, which no
writer touches: two that heal at once write the same bytes.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import chain, groupby, pairwise
from typing import NamedTuple

from ..errors import CorruptLogError, LockedError, LogError, StorageIOError
from ..format.header import crc32c
from ..format.watermark import MOST_BYTES, newest
from ..format.watermark import NAME as WATERMARK
from ..log.donors import CheckedBatch, Donor, Donors, ProvenRange, crc_before, header_here
from ..log.examine import Findings, examine
from ..log.gaps import NAME as GAPS
from ..log.gaps import write_gaps
from ..log.log import Log, log_as_found
from ..log.quarantine import copy_aside
from ..log.recovery import detach, list_segments, rebuild_watermark
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
from ..system.files import Files
from .log_source import SegmentStart, SourceLog

__all__ = ["Healed", "LogHealing", "Unhealed", "heal_log"]

_Parts = Callable[[], Iterable[tuple[int, list[bytes]]]]  # file positions, and what follows each other there

_PAGE_BYTES = 1 << 16  # the largest page size of any system
_MOST_PRODUCERS_BYTES = 16 << 20


class Healed(NamedTuple):
    """One thing that was healed, or would be. `str` gives it in words."""

    partition: int | None  # None: the whole topic
    path: str  # of the file
    what: str  # in words
    offsets: range = range(0)  # of the batches that were replaced
    donor: str | None = None  # the directory that has given the bytes; None: the log itself says what belongs there
    kept: str | None = None  # the file that keeps what was overwritten or cut

    def __str__(self) -> str:
        donor = f" from {self.donor}" if self.donor else ""
        kept = f" (its bytes are kept in {self.kept})" if self.kept else ""
        return f"{self.path}: {self.what}{donor}{kept}"


class Unhealed(NamedTuple):
    """Damage that stays, and why. `str` gives it in words."""

    partition: int | None
    path: str  # of the file or directory
    why: str
    offsets: range = range(0)  # that still cannot be read

    def __str__(self) -> str:
        lost = f"offsets [{self.offsets.start}, {self.offsets.stop}) stay damaged: " if self.offsets else ""
        return f"{self.path}: {lost}{self.why}"


class LogHealing(NamedTuple):
    """What became of the damage of one log."""

    healed: tuple[Healed, ...] = ()
    unhealed: tuple[Unhealed, ...] = ()


def heal_log(
    files: Files,
    path: str,
    donors: Sequence[str],
    identity: Identity,
    permissions: int,
    *,
    dry_run: bool = False,
    held: Directory | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> LogHealing:
    """Heal the log in the directory `path` from the same log in the directories `donors`. A whole log is only read.

    `held` is the directory, if the caller has locked it. Otherwise its lock is taken, if something is damaged; if
    another process has it, only sealed segments are healed. `dry_run` changes nothing and says what would be healed.
    `progress` is called now and then with the number of bytes that are examined.

    Raises `CorruptLogError` if neither a watermark nor a segment is left, and `OSError` of the disk.
    """
    findings = examine(files, path, identity, progress=progress)
    if not _is_damaged(findings):
        return LogHealing()
    holder: str | None = None
    with ExitStack() as opened:
        if held is None and not dry_run:
            try:
                taken = lock.acquire(files, os.path.join(path, lock.NAME), permissions)
            except LockedError as error:
                holder = error.holder
            else:
                opened.callback(taken.release)
                held = taken.directory
                detach(held)
                findings = examine(files, path, identity, progress=progress)  # a writer may have mended it meanwhile
        elif held is None and not lock.is_free(files, path):
            holder = "another process"
        directory = held or opened.enter_context(Directory.open(files, path))
        given = opened.enter_context(closing(Donors(files, donors, identity)))
        return _Healing(directory, given, identity, permissions, findings, holder=holder, dry_run=dry_run).run()


def _is_damaged(findings: Findings) -> bool:
    back = findings.known_gaps != findings.remaining(lambda _: False)
    return bool(findings.damage or back or findings.needs_lock or findings.fault_of_gaps)


class _Healing:
    """The healing of one log."""

    def __init__(
        self,
        directory: Directory,
        donors: Donors,
        identity: Identity,
        permissions: int,
        findings: Findings,
        *,
        holder: str | None,
        dry_run: bool,
    ) -> None:
        self._directory = directory
        self._files = directory.files
        self._donors = donors
        self._identity = identity
        self._permissions = permissions
        self._findings = findings
        self._holder = holder
        self._dry_run = dry_run
        self._log = log_as_found(self._files, directory.path, identity, findings.mark)
        found, start = list_segments(self._files, directory.path), findings.mark.log_start_offset
        self._bases = {base for base in found if base >= start}
        self._first_crcs: dict[int, int] = {}  # of the first batches of segments, as they are proven
        self._touched: set[int] = set()  # segments beside which batches were healed
        self._healed: list[Healed] = []
        self._unhealed: list[Unhealed] = []

    def run(self) -> LogHealing:
        with closing(self._log):
            for lost in _joined(each.offsets for each in (*self._findings.damage, *self._findings.met)):
                self._heal_batches(lost)
            for base in sorted(self._bases):
                self._heal_header(base)
            for base, following in pairwise(sorted(self._bases)):
                self._cut_what_is_too_long(base, following)
            self._heal_watermark()
            self._take_back_gaps()
        return LogHealing(tuple(self._healed), tuple(self._unhealed))

    def _path(self, name: str) -> str:
        return os.path.join(self._directory.path, name)

    def _done(self, name: str, what: str, offsets: range = range(0), **facts: str | None) -> None:
        self._healed.append(Healed(self._identity.partition, self._path(name), what, offsets, **facts))

    def _refuse(self, name: str, why: str, offsets: range = range(0)) -> None:
        self._unhealed.append(Unhealed(self._identity.partition, self._path(name), why, offsets))

    def _is_held(self, base: int) -> bool:
        """Whether another process may be writing this segment: the last one."""
        return self._holder is not None and base >= self._findings.places[-1].base

    @property
    def _held_words(self) -> str:
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
            stretches = list(group)
            self._first_crcs[stretches[0].start] = stretches[0].first_crc
            if refusal := self._place(base, stretches):
                self._refuse(segment_name(base), refusal, range(stretches[0].start, stretches[-1].end))
        if why:
            stop = proven[0].start if proven else lost.stop
            name = segment_name(self._log.index.find(lost.start) or 0)
            self._refuse(name, why, range(lost.start, stop))
        elif lost.stop in self._bases:
            self._touched.add(lost.stop)

    def _place(self, base: int, stretches: list[ProvenRange]) -> str:
        """Put proven batches where they belong: in a segment with this base. Says why not, if it cannot."""
        start, end = stretches[0].start, stretches[-1].end
        if self._is_held(base):
            return self._held_words
        if self._holder is not None and base < self._log_start_now():
            return "retention has dropped it meanwhile"
        if any(base < each < end for each in self._bases):
            return f"a segment begins in the middle of what {stretches[0].donor.directory} has as one"
        if base not in self._bases and start > base:
            return "the segment is missing, and no donor has all of its batches whole"
        try:
            if base in self._bases:
                self._overwrite(base, stretches)
                return ""
            return self._make(base, stretches)
        except _DonorFailedError as error:
            return str(error)

    def _overwrite(self, base: int, stretches: list[ProvenRange]) -> None:
        """Write the batches that differ from what is there."""
        name = segment_name(base)
        differing = list(self._differing(base, stretches))
        if not differing:
            return
        kept = self._keep(name, HEADER_BYTES + differing[0].start - base, differing[-1].end - differing[0].start)
        if not self._dry_run:
            self._overwrite_with(name, lambda: self._parts(base, stretches))
        self._touched.add(base)
        for each in differing:
            count = f"{each.batches} batch{'es' * (each.batches > 1)}"
            self._done(name, count, range(each.start, each.end), donor=each.donor, kept=kept)

    def _differing(self, base: int, stretches: Iterable[ProvenRange]) -> Iterator[_Piece]:
        """Neighbouring batches of one donor that differ from what is in the file."""
        piece: _Piece | None = None
        with self._reading(segment_name(base)) as fd:
            for stretch in stretches:
                for whole in _fetch(stretch):
                    header = whole.header
                    if self._files.read_at(fd, header.length, HEADER_BYTES + header.base_offset - base) == whole.stored:
                        continue
                    donor = stretch.donor.directory
                    if piece is not None and (piece.end, piece.donor) == (header.base_offset, donor):
                        piece = piece._replace(end=header.next_offset, batches=piece.batches + 1)
                        continue
                    if piece is not None:
                        yield piece
                    piece = _Piece(header.base_offset, header.next_offset, donor, 1)
        if piece is not None:
            yield piece

    def _parts(self, base: int, stretches: Iterable[ProvenRange]) -> Iterator[tuple[int, list[bytes]]]:
        """The proven batches: file positions, and what follows each other there."""
        for stretch in stretches:
            yield HEADER_BYTES + stretch.start - base, [each.stored for each in _fetch(stretch)]

    def _make(self, base: int, stretches: list[ProvenRange]) -> str:
        """Make a missing segment. Says why not, if it cannot."""
        begun, donor, why = self._proven_header(base, stretches[0].first_crc)
        if begun is None:
            return f"the segment is missing, and {why}"
        name = segment_name(base)
        if not self._dry_run:
            self._put_producers(base, begun)
            temporary = f"{name}.{self._files.random_bytes(8).hex()}.tmp"  # another process may heal as well
            if self._directory.exists(temporary):
                self._directory.unlink(temporary)
            fd, header = self._directory.create(temporary, self._permissions), begun.header.encode()
            try:
                self._write(fd, temporary, lambda: chain([(0, [header])], self._parts(base, stretches)))
            finally:
                self._files.close(fd)
            self._directory.rename(temporary, name)
            self._directory.sync()
            self._log.refresh()
        self._bases.add(base)
        self._touched.add(base)
        offsets = range(stretches[0].start, stretches[-1].end)
        self._done(name, "the segment was missing: made anew", offsets, donor=donor)
        return ""

    # --- headers -----------------------------------------------------------------------------------------

    def _heal_header(self, base: int) -> None:
        """Put the header of a segment right, and its file of producers.

        A repair may have made a header anew that does not fit what was healed beside it.
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
                self._refuse(name, f"the header: {wrong}; {why or self._held_words}")
            return
        kept = self._keep(name, 0, HEADER_BYTES)
        if not self._dry_run:
            self._put_producers(base, begun)
            self._overwrite_with(name, lambda: [(0, [begun.header.encode()])])
        self._done(name, f"the segment header ({wrong or 'it did not fit what was healed'})", donor=donor, kept=kept)

    def _base_before(self, base: int) -> int | None:
        return max((each for each in self._bases if each < base), default=None)

    def _follows(self, base: int, header: SegmentHeader) -> bool:
        """Whether a header says of the segment before it what is there."""
        before = self._base_before(base)
        return before is None or (header.previous_base_offset, header.previous_bytes) == (before, base - before)

    def _proven_header(self, base: int, first_crc: int | None) -> tuple[SegmentStart | None, str, str]:
        """The segment as it begins at a donor that has the same first batch, and that donor; or why there is none."""
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
            copy_aside(self._directory, name, 0, self._directory.sizes()[name])
        self._directory.replace(name, content, self._permissions)

    # --- the rest ----------------------------------------------------------------------------------------

    def _cut_what_is_too_long(self, base: int, following: int) -> None:
        """Cut what a sealed segment has too much. The next segment's header says how much it should have."""
        name, size = segment_name(base), following - base
        more = self._directory.sizes().get(name, 0) - HEADER_BYTES - size
        if more <= 0:
            return
        stated = None
        with suppress(CorruptLogError, FileNotFoundError):
            header = read_segment_header(self._files, self._path(segment_name(following)), self._identity)
            stated = header.previous_base_offset, header.previous_bytes
        if stated != (base, size) or self._is_held(base):
            why = "the header of the next segment does not say so" if stated != (base, size) else self._held_words
            self._refuse(name, f"it has {more} bytes too much; {why}")
            return
        kept = self._keep(name, HEADER_BYTES + size, more)
        if not self._dry_run:
            fd = self._directory.open_write(name)
            try:
                self._files.ftruncate(fd, HEADER_BYTES + size)
                self._files.datasync(fd)
            finally:
                self._files.close(fd)
        self._done(name, f"the file was {more} bytes too long: they were cut", kept=kept)

    def _heal_watermark(self) -> None:
        fault = self._findings.fault_of_mark
        if not fault:
            return
        mark = None
        with suppress(FileNotFoundError, CorruptLogError):
            mark = newest(self._directory.read_whole(WATERMARK, MOST_BYTES), self._identity.salt, WATERMARK)
        if mark is None:
            said = "so nothing says for sure where the log ends; loglib.repair finds the end, or opening it to write"
            self._refuse(WATERMARK, f"{fault}, {said}")
        elif self._holder is not None:
            self._refuse(WATERMARK, f"{fault}; {self._held_words}")
        else:
            kept = self._keep(WATERMARK, 0, MOST_BYTES)
            if not self._dry_run:
                rebuild_watermark(self._directory, self._identity, self._permissions, mark)
            self._done(WATERMARK, f"both slots, from the one that is whole ({fault})", kept=kept)

    def _take_back_gaps(self) -> None:
        """Declare no longer what can be read again."""
        if self._findings.fault_of_gaps:
            self._refuse(GAPS, f"{self._findings.fault_of_gaps}; loglib.repair makes it anew")
        lost = [each.offsets for each in self._unhealed]
        still = self._findings.remaining(
            lambda gap: any(each.start < gap.end and gap.start < each.stop for each in lost)
        )  # fmt: skip
        back = len({*self._findings.known_gaps} - {*still})
        if back:
            if not self._dry_run:
                write_gaps(self._directory, self._identity, still, self._permissions)
            self._done(GAPS, f"{back} declared gap{'s' * (back > 1)} can be read again: taken back")

    # --- bytes -------------------------------------------------------------------------------------------

    def _reading(self, name: str) -> _Open:
        return _Open(self._files, self._directory.open_read(name))

    def _keep(self, name: str, start: int, size_bytes: int) -> str | None:
        """Copy bytes of a file aside, if it has any there."""
        if self._dry_run or self._directory.sizes().get(name, 0) <= start:
            return None
        return copy_aside(self._directory, name, start, size_bytes)

    def _overwrite_with(self, name: str, parts: _Parts) -> None:
        fd = self._directory.open_write(name)
        try:
            self._write(fd, name, parts)
        finally:
            self._files.close(fd)

    def _write(self, fd: int, name: str, parts: _Parts) -> None:
        """Write what differs from the bytes that are there, and read all of it again from the disk. Synced.

        Of a batch whose body is damaged the header is not written: if it proves the batch, no torn write can spoil it.
        """
        files = self._files
        for position, contents in parts():
            for content in contents:
                start, end = _difference(files.read_at(fd, len(content), position), content)
                if start < end:
                    self._drop_cached(fd, position + start, end - start)  # see recovery.rewrite: other pages are needed
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
    """A donor does not have any more what it had."""


def _fetch(stretch: ProvenRange) -> list[CheckedBatch]:
    try:
        return stretch.donor.fetch(stretch)
    except (LogError, OSError) as error:
        raise _DonorFailedError(f"{stretch.donor.directory} has changed meanwhile: {error}") from error


def _difference(old: bytes, new: bytes) -> tuple[int, int]:
    """The shortest range of the new bytes that has all in which they differ from the old ones."""
    sizes = range(1, len(new) + 1)
    start = bisect_left(sizes, True, key=lambda size: old[:size] != new[:size])
    if len(old) < len(new) or start == len(new):
        return start, len(new)
    return start, len(new) - bisect_left(sizes, True, key=lambda size: old[-size:] != new[-size:])


def _has_same_facts(own: SegmentHeader, other: SegmentHeader) -> bool:
    """Whether two headers say the same of the log before them."""
    return own[:10] == other[:10] and own.previous_batch == other.previous_batch


class _Piece(NamedTuple):
    """Neighbouring batches that are replaced."""

    start: int
    end: int
    donor: str
    batches: int


class _Open(NamedTuple):
    """An open file, which is closed at the end of `with`."""

    files: Files
    fd: int

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *exception: object) -> None:
        self.files.close(self.fd)


def _joined(ranges: Iterable[range]) -> list[range]:
    """The ranges in order, and those that meet or overlap as one."""
    found: list[range] = []
    for each in sorted(ranges, key=lambda one: one.start):
        if found and each.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, each.stop))
        else:
            found.append(each)
    return found
