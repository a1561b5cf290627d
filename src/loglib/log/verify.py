"""Verify: reads a whole partition and trusts nothing.

Invariant: verifying changes nothing. It reports no damage only if both slots of the watermark, every
segment header, every batch header and body, every column's bounds and every link between them are whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

from ..errors import CorruptLogError, OffsetOutOfRangeError
from ..format.batch import Batch, stored_header
from ..format.chain import Jumps
from ..format.header import Header
from ..format.record import Damage
from ..format.watermark import MOST_BYTES, Mark, broken_slots
from ..segment import HEADER_BYTES, NO_TIMESTAMP, SegmentHeader, read_producers, read_segment_header
from ..system.files import Files
from . import topic_file
from .cursor import Cursor
from .gaps import Gap, read_gaps
from .log import FixedMark, Log
from .recovery import check_link, list_segments

_AT_THE_TAIL = 2  # segments whose headers are checked with `tail_only`: the last one, and the one that it must follow
Progress = Callable[[int, int], object]  # is called with the number of bytes that are done, and of all bytes


class VerifyReport(NamedTuple):
    """The result of verifying: the amounts that are whole, the damage, and the gaps that a repair has declared.

    `accepted` are those of the gaps whose loss was accepted (`repair` with `accept`).
    """

    segments: int
    batches: int
    records: int
    bytes: int
    damage: tuple[Damage, ...] = ()
    gaps: tuple[Damage, ...] = ()
    accepted: tuple[Damage, ...] = ()

    @property
    def is_whole(self) -> bool:
        """True if nothing is damaged, and nothing is declared as lost except what was accepted."""
        return not self.damage and {*self.gaps} <= {*self.accepted}

    @classmethod
    def of_all(cls, reports: Iterable[VerifyReport]) -> VerifyReport:
        """One report of several."""
        *amounts, damage, gaps, accepted = zip(*reports, strict=True)
        segments, batches, records, size = map(sum, amounts)
        return cls(segments, batches, records, size, sum(damage, ()), sum(gaps, ()), sum(accepted, ()))

    @classmethod
    def of_error(cls, error: CorruptLogError, partition: int | None) -> VerifyReport:
        """The report on damage that prevents all other checks."""
        return cls(0, 0, 0, 0, (Damage.of(error, partition),))


def verify_log(
    log: Log, progress: Callable[[int], object] | None = None, *, tail_only: bool = False
) -> VerifyReport:
    """Verify everything below the flushed end, and report all damage.

    `progress` is called now and then with the number of bytes that are verified. With `tail_only` the watermark, the
    sizes of all segments, the headers of the last two and the last batch are verified, however long the log is.
    """
    try:
        return _Verification(log, progress, tail_only=tail_only).report()
    except CorruptLogError as error:
        return VerifyReport.of_error(error, log.partition)


def verify_logs(
    logs: Sequence[Log], progress: Progress | None = None, *, tail_only: bool = False
) -> VerifyReport:
    """Verify these logs, as `verify_log` does. `progress` is as in `Topic.verify`."""
    sizes = [] if progress is None else list(map(_size_of, logs))
    reports: list[VerifyReport] = []
    for number, log in enumerate(logs):
        done = sum(sizes[:number])
        tell = None if progress is None else lambda more, done=done: progress(done + more, sum(sizes))
        reports.append(verify_log(log, tell, tail_only=tail_only))
    return VerifyReport.of_all(reports)


def _size_of(log: Log) -> int:
    """Bytes of batches to check; 0 if damage hides it."""
    try:
        mark = log.mark()
    except CorruptLogError:
        return 0
    return mark.flushed_end - mark.log_start_offset


def verify_description(files: Files, path: str, log_id: bytes) -> VerifyReport:
    """Verify `topic.json`, which must belong to the log."""
    try:
        described_id, _ = topic_file.read_existing(files, path)
        if described_id != log_id:
            name = os.path.join(path, topic_file.NAME)
            raise CorruptLogError(name, 0, f"log {described_id.hex()}", f"log {log_id.hex()}")
    except CorruptLogError as error:
        return VerifyReport.of_error(error, None)
    return VerifyReport(0, 0, 0, 0)


class _Links(NamedTuple):
    """The facts about the log before it in the header of a batch or a segment."""

    end: int  # the end of the log before it
    last_batch: int
    previous_crc: int
    append_time: int
    running_max_timestamp: int | None  # of the log; None if unknown, as after damage
    segment_max_timestamp: int = NO_TIMESTAMP
    jumps: Jumps | None = None  # of the last batch; None if unknown, as after damage


class _Verification:
    """One verification of one log."""

    def __init__(self, log: Log, progress: Callable[[int], object] | None, *, tail_only: bool) -> None:
        self._log = log
        self._progress = progress
        self._tail_only = tail_only
        self._damage: list[Damage] = []
        self._gaps: list[Damage] = []
        self._declared: Sequence[Gap] = ()

    def report(self) -> VerifyReport:
        while True:  # start again if retention dropped segments during the check
            self._damage.clear()
            self._gaps.clear()
            mark = self._log.mark()
            try:
                report = self._check(mark)
            except OffsetOutOfRangeError:
                continue
            except CorruptLogError:
                if not self._overtaken(mark):
                    raise
            else:
                if not self._damage or not self._overtaken(mark):
                    accepted = tuple(each for each in self._gaps if self._is_accepted(each.offsets))
                    return report._replace(damage=tuple(self._damage), gaps=tuple(self._gaps), accepted=accepted)

    def _overtaken(self, mark: Mark) -> bool:
        return self._log.mark().log_start_offset != mark.log_start_offset

    def _report(self, error: CorruptLogError, offsets: range = range(0)) -> None:
        self._note(Damage.of(error, self._log.partition, offsets))

    def _note(self, damage: Damage) -> None:
        if damage not in self._damage:  # a bad header is found twice: alone, and before its batches
            self._damage.append(damage)

    def _check(self, mark: Mark) -> VerifyReport:
        self._check_watermark()
        self._check_gaps()
        headers = self._check_segments(mark)
        batches = records = size = 0
        before: _Links | None = None
        for batch in self._batches(mark):
            before = self._check_links(batch, before, headers)
            batches += 1
            records += len(batch)
            size += stored_header(batch).length
        if mark.flushed_end in headers:
            self._check_follows(headers[mark.flushed_end], before)
        if before is not None and before.end == mark.flushed_end and before.last_batch != mark.flushed_tail:
            found, expected = f"a last batch at {mark.flushed_tail}", f"{before.last_batch}"
            self._report(CorruptLogError(self._log.watermark_path, 48, found, expected))
        return VerifyReport(len(headers), batches, records, size)

    def _check_watermark(self) -> None:
        """Check both slots. One whole slot is enough for reading, but the next torn write could destroy it."""
        log, path = self._log, self._log.watermark_path
        if isinstance(log.writer, FixedMark):  # the manifest of its place has the ends
            return
        try:
            broken = [0]
            for _ in range(2):  # a slot that is bad only once was just being written
                if broken:
                    broken = broken_slots(log.files.read_whole(path, MOST_BYTES), log.identity.salt, path)
        except FileNotFoundError:
            log.refresh()  # raises another error if the topic is gone
            self._report(CorruptLogError(path, 0, "no file", "the watermark of the partition"))
            return
        for at in broken:
            self._report(CorruptLogError(path, at, "a slot that is not whole", "a mark with its CRC"))

    def _check_gaps(self) -> None:
        self._declared = ()
        try:
            read_gaps(self._log.files, self._log.directory, self._log.identity)
            self._declared = self._log.gaps()
        except CorruptLogError as error:
            self._report(error)

    def _is_accepted(self, lost: range) -> bool:
        return any(each.accepted and each.start <= lost.start and lost.stop <= each.end for each in self._declared)

    def _check_segments(self, mark: Mark) -> dict[int, SegmentHeader]:
        """The whole headers, by base offset. Also checks that each segment follows the segment before it."""
        log = self._log
        found = list_segments(log.files, log.directory)
        found = {base: size for base, size in found.items() if base >= mark.log_start_offset}
        first = min(found, default=None)
        nothing_uploaded = isinstance(log.writer, FixedMark) and mark.flushed_end == mark.log_start_offset
        if first != mark.log_start_offset and not nothing_uploaded:
            expected = f"one at {mark.log_start_offset}"
            self._report(CorruptLogError(log.directory, 0, f"a first segment at {first}", expected))
        headers: dict[int, SegmentHeader] = {}
        previous: int | None = None
        tail = list(found)[-_AT_THE_TAIL:]
        for base in found:
            if self._tail_only and previous is not None and base <= mark.flushed_end:
                self._check_reaches(base, previous, found[previous])
            if self._tail_only and base not in tail:
                previous = base
                continue
            path = self._log.path_of(base)
            try:
                headers[base] = header = read_segment_header(log.files, path, log.identity)
                # Beyond the mark a writer may have continued, so the size of the segment before is not its last one.
                if previous is not None and base <= mark.flushed_end:
                    check_link(path, header, previous, found[previous] - HEADER_BYTES)
                read_producers(log.files, log.directory, header)
            except FileNotFoundError:
                self._report(CorruptLogError(path, 0, "no file", "the segment that was listed"))
            except CorruptLogError as error:
                self._report(error)
            previous = base
        return headers

    def _check_reaches(self, base: int, previous: int, size: int) -> None:
        """Check by its size alone that the segment before ends where the one at `base` begins."""
        wanted = base - previous + HEADER_BYTES
        if size != wanted:
            expected = f"{wanted}: the next segment begins at offset {base}"
            self._report(CorruptLogError(self._log.path_of(previous), size, f"{size} bytes", expected))

    def _batches(self, mark: Mark) -> Iterator[Batch]:
        """The whole batches, with whole columns."""
        start = max(mark.flushed_tail, mark.log_start_offset) if self._tail_only else mark.log_start_offset
        cursor = Cursor(self._log, start, on_damage=self._note, on_gap=self._gaps.append)
        with closing(cursor):
            while block := cursor.read(mark.flushed_end):
                for batch in block:
                    try:
                        batch.decode()
                    except CorruptLogError as error:
                        self._report(error, range(stored_header(batch).base_offset, stored_header(batch).next_offset))
                    else:
                        yield batch
                if self._progress is not None:
                    self._progress(cursor.position - mark.log_start_offset)

    def _check_links(self, batch: Batch, before: _Links | None, headers: dict[int, SegmentHeader]) -> _Links:
        """Check the facts in a batch about itself and earlier batches. The cursor has checked the chain of CRCs."""
        header = stored_header(batch)
        base, largest = header.base_offset, max(batch.timestamps)
        if base in headers:
            before = self._check_follows(headers[base], before)
        if before is not None and before.end != base:  # there is damage between them
            before = None
        segment = self._log.index.find(base)
        first = base == segment
        append_time = header.append_time if before is None else before.append_time
        segment_max = header.running_max_timestamp
        if first:
            segment_max = largest
        elif before is not None:
            segment_max = max(before.segment_max_timestamp, largest)
        facts = (header.max_timestamp, header.running_max_timestamp, header.append_time)
        expected = (largest, segment_max, max(append_time, header.append_time))
        if facts != expected:
            what = "largest event time, running maximum and append time"
            self._report(self._contradiction(base, 72, what, facts, expected))
        jumps = None if before is None else self._check_pointers(header, before, first=first)
        known = None if before is None else before.running_max_timestamp
        if known is None and segment in headers:
            known = headers[segment].running_max_timestamp
        return _Links(
            header.next_offset, base, header.header_crc, header.append_time,
            None if known is None else max(known, header.running_max_timestamp), header.running_max_timestamp, jumps,
        )  # fmt: skip

    def _check_pointers(self, header: Header, before: _Links, *, first: bool) -> Jumps | None:
        """Check the pointers of a batch, given the batch before it. Returns its chain of jumps, if all of it is known.

        `first`: the batch is the first of its segment.
        """
        base, jump = header.base_offset, header.jump_offset
        jumps: Jumps | None = None
        if first:
            jump, jumps = base, Jumps(base, 0, None)
        elif before.jumps is not None:
            jumps = before.jumps
            while jumps.rest is not None and jumps.base_offset > jump:
                jumps = jumps.rest
            jump, jumps = jumps.base_offset, Jumps(base, 0, jumps)
        facts, expected = (header.previous_offset, header.jump_offset), (before.last_batch, jump)
        if facts != expected:
            self._report(self._contradiction(base, 112, "batches pointed to", facts, expected))
        return jumps

    def _check_follows(self, header: SegmentHeader, before: _Links | None) -> _Links:
        """Check a segment header against the batch before it. If that batch was damaged, believe the header."""
        base = header.base_offset
        facts = _Links(
            base, header.previous_batch, header.previous_crc, header.last_append_time, header.running_max_timestamp
        )
        if before is None or before.end != base:
            return facts
        if before.running_max_timestamp is None:
            before = before._replace(running_max_timestamp=header.running_max_timestamp)
        if before[:5] != facts[:5]:
            what = "last batch, its CRC, append time and running maximum"
            self._report(CorruptLogError(self._log.path_of(base), 72, f"{what} {facts[1:5]}", f"{before[1:5]}"))
        return before

    def _contradiction(self, offset: int, at: int, what: str, facts: object, expected: object) -> CorruptLogError:
        base = self._log.index.find(offset) or 0
        position = HEADER_BYTES + offset - base + at
        return CorruptLogError(self._log.path_of(base), position, f"{what} {facts}", f"{expected}")
