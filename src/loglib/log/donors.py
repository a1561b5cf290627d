"""Donors: other copies of a log, whose batches replace damaged ones.

Invariant: a batch of a donor is taken only if this log names it. The batch after the damage names the CRC and the place
of the batch before it, and each proven batch names the one before. So the proof goes backwards from what is whole here.
Nothing is taken from older or diverged copies, and several damaged copies can together restore a log.

    after the damage       what names the last damaged batch
    a batch                its previous_crc and previous_bytes
    a segment without one  the same facts in its header
    the end of the log     the header of the last batch, if it is whole. Otherwise the watermark names the place of the
                           batch and its writer (the epoch and the nonce). A writer's log only grows: so a copy that
                           has durable what this writer has published has the same bytes

If the batch before the damage is whole, the first proven batch must follow it, too.

Threads: one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from ..config.policies import MAX_BATCH_BYTES
from ..errors import LogError
from ..format.batch import Batch, Source, batch_of
from ..format.chain import End, follow
from ..format.header import HEADER_BYTES, BadBatch, Header, NewerBatch, layout
from ..format.watermark import Mark
from ..segment import Identity, SegmentReader
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .log import Log

# Of the batches of a proven range, if they are more than one.
_RANGE_BYTES = 1 << 20
_MOST_DECOMPRESSED = 4 << 20


class CheckedBatch(NamedTuple):
    """The stored bytes of a batch whose CRCs are right."""

    header: Header
    stored: bytes


class ProvenRange(NamedTuple):
    """Neighbouring batches in one segment of a donor that this log names."""

    start: int
    end: int
    segment: int  # base offset of the donor's segment
    first_crc: int  # of the first batch's header
    last_crc: int  # of the last batch's header; it proves all of them
    decompressed_bytes: int
    donor: Donor


class _Link(NamedTuple):
    """The facts that a log has about its batch that ends at an offset."""

    base: int
    crc: int | None  # of the batch's header; None: only its writer is known
    writer: tuple[int, int] = (0, 0)  # epoch and nonce


class Donor(NotCopyable):
    """One other copy of a log. Its methods raise `LogError` or `OSError` for what it does not have."""

    def __init__(self, files: Files, directory: str, identity: Identity) -> None:
        self.directory = directory
        self.log = Log(files, directory, identity)
        self.mark = self.log.mark()
        self._segment: SegmentReader | None = None
        self._stop = 0  # where the open segment ends

    def release_files(self) -> None:
        """Close the files until the next use."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self.log.release_files()

    def segment_of(self, offset: int) -> SegmentReader:
        """The segment that holds the offset, open."""
        segment = self._segment
        if segment is None or not segment.base_offset <= offset < self._stop:
            self.release_files()
            self._segment = segment = self.log.open_segment(offset, past_damage=True)
            self._stop = self.log.index.after(segment.base_offset) or self.mark.flushed_end
        return segment

    def batch(self, base: int, length: int) -> CheckedBatch:
        """The batch at `base` with this length, checked down to its columns."""
        segment = self.segment_of(base)
        if base + length > self.mark.flushed_end or not 0 < length <= MAX_BATCH_BYTES:
            segment.corrupt(base, f"a flushed end at {self.mark.flushed_end}", f"a batch of {length} bytes")
        batches = self._batches(base, length)
        if len(batches) > 1:
            segment.corrupt(base, f"{len(batches)} batches", f"one of {length} bytes")
        self.as_batch(batches[0]).decode()
        return batches[0]

    def fetch(self, proven: ProvenRange) -> list[CheckedBatch]:
        """The batches of the range, proven again, because the files of a donor may change at any time."""
        batches = self._batches(proven.start, proven.end - proven.start)
        if batches[-1].header.header_crc != proven.last_crc:
            found = f"batches that end with CRC {batches[-1].header.header_crc:08x}"
            self.segment_of(proven.start).corrupt(proven.start, found, f"{proven.last_crc:08x}")
        return batches

    def _batches(self, start: int, size_bytes: int) -> list[CheckedBatch]:
        """The batches that fill these bytes of the log, each following the one before."""
        segment = self.segment_of(start)
        content = segment.read(start, size_bytes)
        try:
            headers = list(follow(content, End(start, start, None), start=start, salt=segment.salt))
        except (BadBatch, NewerBatch) as error:
            segment.refuse(error, start)
        if not headers or headers[-1].next_offset < start + len(content):
            segment.corrupt(headers[-1].next_offset if headers else start, "a part of a batch", "a whole one")
        return [CheckedBatch(each, content[each.base_offset - start : each.next_offset - start]) for each in headers]

    def as_batch(self, whole: CheckedBatch) -> Batch:
        """A batch of this copy as readers get it."""
        header, stored = whole
        segment = self.segment_of(header.base_offset)
        source = Source(segment.path, segment.file_position(header.base_offset))
        try:
            return batch_of(header, stored, source, partition=segment.partition, body_at=HEADER_BYTES)
        except BadBatch as error:
            raise error.in_file(*source) from error

    def has_durable(self, end: int, by: tuple[int, int], of: tuple[int, int]) -> bool:
        """True if this copy has durable what the writer `by` published up to `end`.

        `of` is the writer of the copy's batch there. It, or the writer in the copy's mark, must be `by`.
        """
        ours = self.mark.writer_epoch, self.mark.writer_nonce
        return self.mark.durable_end >= end and by[0] > 0 and by in (of, ours)


class Donors(NotCopyable):
    """The other copies of a log. Each is opened at its first use."""

    def __init__(self, files: Files, directories: Sequence[str], identity: Identity) -> None:
        self._files = files
        self._directories = directories
        self._identity = identity
        self._opened: list[Donor] | None = None
        self._proven: dict[int, ProvenRange] = {}  # by start: what `lend` has proven and not yet returned
        self.refused: list[str] = []  # the donors that cannot be used, and why

    def close(self) -> None:
        """Close the files. The next use opens the donors again."""
        for each in self._opened or ():
            each.release_files()
        self._opened = None
        self._proven.clear()

    def opened(self) -> list[Donor]:
        """The copies that can be read."""
        if self._opened is None:
            self._opened, self.refused = [], []
            for directory in self._directories:
                try:
                    self._opened.append(Donor(self._files, directory, self._identity))
                except (LogError, OSError) as error:
                    self.refused.append(f"{directory} cannot be used: {error}")
        return self._opened

    # --- the proof -------------------------------------------------------------------------------------

    def prove(self, log: Log, lost: range, mark: Mark, *, before: int | None) -> tuple[list[ProvenRange], str]:
        """The parts of the damaged offsets that the donors have, oldest first, up to their end; and why not all.

        `lost` begins and ends where a batch of the log does. `before` is the CRC of the batch before, if it is known.
        """
        link = _link_at(log, lost.stop, mark)
        if link is None:
            return [], f"nothing that is whole at offset {lost.stop} names the batch that ends there"
        proven: list[ProvenRange] = []
        at, why = lost.stop, ""
        while at > lost.start:
            if link.base < lost.start:
                why = f"what is whole here names a batch at offset {link.base}, before the damage"
                break
            found = self._find(link, at, latest=proven[-1].donor if proven else None)
            if found is None:
                why = f"no donor has the batch at offset {link.base} that is named here, whole"
                break
            whole, donor = found
            header = whole.header
            if header.base_offset == lost.start and before not in (None, header.previous_crc):
                why = f"the batch at offset {header.base_offset} of {donor.directory} does not follow the one before"
                break
            _extend(proven, whole, donor)
            at, link = header.base_offset, _Link(header.previous_offset, header.previous_crc)
        return proven[::-1], "; ".join([why, *self.refused]) if why else ""

    def _find(self, link: _Link, end: int, *, latest: Donor | None) -> tuple[CheckedBatch, Donor] | None:
        """The batch before `end` that the link names, and a donor that has it. The latest donor is asked first."""
        for donor in sorted(self.opened(), key=lambda each: each is not latest):
            with suppress(LogError, OSError):
                whole = donor.batch(link.base, end - link.base)
                header = whole.header
                if link.crc is None:
                    if donor.has_durable(end, link.writer, (header.writer_epoch, header.writer_nonce)):
                        return whole, donor
                elif link.crc == header.header_crc:
                    return whole, donor
        return None

    # --- for a reader ------------------------------------------------------------------------------------

    def lend(self, log: Log, lost: range, *, before: int | None) -> tuple[list[Batch], str] | None:
        """The first batches of the damaged offsets, and the donor's directory; None if no donor has all of them.

        They end before or at the end of `lost`. The next call may begin there, and does not prove it again.
        """
        if lost.start not in self._proven:
            self.close()  # a donor may have grown since then
            ranges, why = self.prove(log, lost, log.mark(), before=before)
            self._proven = {} if why else {each.start: each for each in ranges}
        proven = self._proven.pop(lost.start, None)
        if proven is None:
            return None
        donor = proven.donor
        try:
            batches = list(map(donor.as_batch, donor.fetch(proven)))
        except (LogError, OSError):  # it has changed meanwhile
            return None
        return batches, donor.directory


def _extend(proven: list[ProvenRange], whole: CheckedBatch, donor: Donor) -> None:
    """Add a proven batch. It comes before those that were added earlier."""
    header, segment = whole.header, donor.segment_of(whole.header.base_offset).base_offset
    size, crc = layout(header).end, header.header_crc
    if proven:
        last = proven[-1]
        small = last.end - header.base_offset <= _RANGE_BYTES and last.decompressed_bytes + size <= _MOST_DECOMPRESSED
        if small and last.donor is donor and last.segment == segment:
            proven[-1] = last._replace(
                start=header.base_offset, first_crc=crc, decompressed_bytes=last.decompressed_bytes + size
            )
            return
    proven.append(ProvenRange(header.base_offset, header.next_offset, segment, crc, crc, size, donor))


# --- what is whole here -----------------------------------------------------------------------------------


def header_here(log: Log, offset: int) -> Header | None:
    """The header of this log's batch at the offset; None if it is not whole."""
    base = log.index.find(offset)
    if base is not None:
        with suppress(LogError, OSError), log.open_base(base, past_damage=True) as segment:
            return segment.header_at(offset)
    return None


def crc_before(log: Log, offset: int, mark: Mark) -> int | None:
    """The CRC of this log's batch that ends at the offset; None if it is not whole, or if there is none."""
    if offset > mark.log_start_offset:
        with suppress(LogError, OSError):
            header = log.header_around(offset - 1, mark)
            if header.record_count and header.next_offset == offset:
                return header.header_crc
    return None


def named_end(log: Log, offset: int, limit: int) -> int:
    """The first place after the damage for which this log names the batch that ends there; at most `limit`."""
    end, mark = log.after_damage(offset, limit), log.mark()
    while end < limit and _link_at(log, end, mark) is None:  # the batch there is damaged, too
        end = log.after_damage(end, limit)
    return end


def last_named(log: Log, lost: range, mark: Mark) -> int:
    """The last begin of a segment inside the damage that names the batch before it; the damage's begin if none does."""
    inside = (base for base in reversed(log.index.bases()) if lost.start < base < lost.stop)
    return next((base for base in inside if _link_at(log, base, mark) is not None), lost.start)


def _link_at(log: Log, end: int, mark: Mark) -> _Link | None:
    """The link that names the batch that ends at `end`; None if nothing whole names it."""
    following = header_here(log, end) if end < mark.flushed_end else None
    if following is not None:
        return _Link(following.previous_offset, following.previous_crc)
    if end in log.index.bases():
        with suppress(LogError, OSError), log.open_base(end) as segment:
            return _Link(segment.header.previous_batch, segment.header.previous_crc)
    if end != mark.flushed_end:
        return None
    own = header_here(log, mark.flushed_tail)
    if own is not None and own.next_offset == end:
        return _Link(own.base_offset, own.header_crc)
    return _Link(mark.flushed_tail, None, (mark.writer_epoch, mark.writer_nonce))
