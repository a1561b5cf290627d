"""Retention state: one partition as passes of retention see it, with the ages of its segments.

Invariant: only a writer drops segments, the partition's own or one that a pass has borrowed. The moment of a pass is
read after the open segment is known. So all segments below it were sealed by then, and no age is too high.

Each pass reads the clock and adds the moment to the partition's timeline. Some moments prove something: the first of
a boot, the first after a jump, and the end of an hour without a jump. The pass writes these to the file `clock`, for
later processes; that is two writes per boot. If that file is lost, damaged or cannot be written, retention only waits
longer.

Threads: the lock of the `RetentionRunner` guards it. A copy, without what passes have read, belongs to its call.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ..config.policies import TopicConfig
from ..errors import CorruptLogError
from ..log.ages import MOST_BYTES, NAME, Age, Stamp, Timeline, decode, encode, open_since
from ..log.log import Log
from ..retention import ArchiveHold, Candidate, Hold, RetentionPlan, Sealed, SegmentDecision, reason_to_keep
from ..segment import SegmentReader, read_segment_header, segment_name
from ..system.clock import Clock, Moment
from ..system.files import Files
from .writer import Writer

logger = logging.getLogger("loglib")


@dataclass(eq=False, repr=False)
class PartitionRetention:
    """One partition: its timeline, and the segments that the last pass has read."""

    files: Files
    log: Log
    config: TopicConfig  # assigned when the policies change
    clock: Clock
    writer: Writer | None = None

    def __post_init__(self) -> None:
        self._borrowed: Writer | None = None  # for a pass over a partition that nobody holds; until it is closed
        self._path = os.path.join(self.log.directory, NAME)
        self._timeline: Timeline | None = None
        self._openings = 0  # of the writer: other processes may have rolled segments before each one
        self._now = Moment(0, 0, b"")  # the moment of the pass
        self._looks = Timeline()  # the moments of this process while it did not own the partition
        self._stamps: dict[int, Stamp] = {}  # by base offset
        self._passed: list[Sealed] = []  # the segments that the pass has read, oldest first
        self._news = False  # whether the timeline has stamps that the file does not have

    def own(self, writer: Writer) -> None:
        self._borrowed = None  # it has released the lock, or this writer had not been made
        self._write_by(writer)
        self._timeline, self._stamps = None, {}  # another process may have changed the partition

    def borrow(self, writer: Writer) -> None:
        """Drop and write with this writer until it is given back. The facts about the segments stay."""
        self._borrowed = writer
        self._write_by(writer)

    def give_back(self) -> None:
        """Close the borrowed writer, if there is one. After an interrupt it may be called again."""
        if self._borrowed is not None:
            self.writer = None
            self._borrowed.close()
            self._borrowed = None

    def _write_by(self, writer: Writer) -> None:
        self.writer, self._openings = writer, writer.disk.openings
        writer.disk.believes = self._believes

    def candidate(
        self, hold: Callable[[int], Hold | None], archived: Callable[[int, int], ArchiveHold | None]
    ) -> Candidate:
        """The partition at this moment. Also reads the clock.

        `hold` returns what groups hold of a partition, and `archived` what an archive has of it from its start on.
        """
        if self.writer is not None:
            self.writer.check_place()
        timeline = self._load()
        mark = self.log.mark()
        open_base = self.log.index.find(mark.flushed_end) or 0
        self._now = self.clock.moment()  # after the open segment is known: all segments below it are sealed by now
        look = Stamp(open_base, *self._now)
        self._news |= timeline.add(look)
        timeline.forget_before(mark.log_start_offset)
        if self.writer is None:
            self._looks.add(look)
            self._looks.forget_before(mark.log_start_offset)
        number, start = self.log.partition, mark.log_start_offset
        return Candidate(
            number, mark.flushed_end - start, self._sealed(start), partial(hold, number),
            partial(archived, number, start),
        )  # fmt: skip

    def decisions(self, plan: RetentionPlan) -> list[SegmentDecision]:
        """A decision for each segment, oldest first."""
        dropped = {each.base_offset: reason for each, reason in zip(self._passed, plan.reasons, strict=False)}
        decisions: list[SegmentDecision] = []
        keeping = ""  # the reason to keep all segments after the first that is kept
        for segment in self.log.segments():
            age = self._age(segment.end_offset) if segment.sealed else None
            drop = segment.base_offset in dropped
            held_by = None if drop or keeping or plan.blocker is None else plan.blocker[0]
            reason = dropped.get(segment.base_offset) or keeping
            if held_by is not None:
                reason = f"{plan.held_against}, but {plan.blocker}"
            keeping = keeping if drop else "an older segment stays"
            decisions.append(
                SegmentDecision(
                    self.log.partition, segment.base_offset, segment.size_bytes,
                    None if age is None else age.at_least_us,
                    drop, reason or self._reason_to_keep(age), segment.path, held_by,
                )
            )  # fmt: skip
        return decisions

    def open_bytes(self) -> int:
        """The size of the open segment at the last listing."""
        end = self.log.mark().flushed_end if self.writer is None else self.writer.next_offset
        return end - (self.log.index.find(end) or 0)

    def open_age_us(self) -> int:
        """The time since the first batch of the open segment, by its writer's clock; -1 without a batch.

        For a process that does not write here.
        """
        self.log.refresh()
        end = self.log.mark().flushed_end
        base = self.log.index.find(end)
        if base is None or base == end:
            return -1
        path = os.path.join(self.log.directory, segment_name(base))
        with SegmentReader(self.files, path, self.log.identity) as segment:
            now = self.clock.moment()
            return now.boottime_us - open_since(segment, now)

    def end_of(self, reasons: Sequence[str]) -> int:
        """The log start after dropping the oldest segments, one for each reason."""
        return self._passed[len(reasons) - 1].end_offset

    def drop(self, reasons: Sequence[str], *, background: bool = False) -> None:
        """Drop the oldest segments that the pass has read, one for each reason; see `Writer.drop_before`."""
        assert self.writer is not None
        if not reasons:
            return
        dropped = self._passed[: len(reasons)]
        if self.writer.drop_before(dropped[-1].end_offset, background=background):  # False: another pass was quicker
            logger.info(
                "%s: retention dropped %d segments, offsets %d to %d; reason for the last one: %s",
                self.log.directory, len(dropped), dropped[0].base_offset, dropped[-1].end_offset, reasons[-1],
            )  # fmt: skip
        for each in dropped:
            self._stamps.pop(each.base_offset, None)

    def write_down(self) -> None:
        """Write the timeline to its file, if there is a limit on age. Synced."""
        if self.writer is None or not self._news or self._timeline is None or self.config.retention.age is None:
            return
        content = encode(self._timeline.worth_keeping(), self.log.identity.salt)
        try:
            self.writer.disk.place.replace(NAME, content, self.config.permissions)
        except OSError as error:  # a full disk must not stop the pass that frees it
            logger.warning("%s: not written (%s); retention by age may wait longer after a restart", self._path, error)
        self._news = False

    def _sealed(self, base: int) -> Iterator[Sealed]:
        self._passed = []
        while (end := self.log.index.after(base)) is not None:
            self._passed.append(Sealed(base, end, self._age(end)))
            yield self._passed[-1]
            base = end

    def _age(self, end_offset: int) -> Age:
        """The age of the sealed segment that ends there."""
        assert self._timeline is not None
        return self._timeline.age(self._stamp(end_offset), self._now)

    def _believes(self, now: Moment) -> bool:
        return (self._timeline or Timeline()).believes(now)

    def _reason_to_keep(self, age: Age | None) -> str:
        assert self._timeline is not None
        believed, steady = self._timeline.believes(self._now), self._timeline.steady_us(self._now)
        return reason_to_keep(age, self.config.retention, believed=believed, steady_us=steady)

    def _stamp(self, base_offset: int) -> Stamp:
        stamp = self._stamps.get(base_offset)
        if stamp is None:
            path = os.path.join(self.log.directory, segment_name(base_offset))
            within = None if self.writer is None else self.writer.disk.place
            stamp = Stamp.of(read_segment_header(self.files, path, self.log.identity, within=within))
            self._stamps[base_offset] = stamp
        return stamp

    def _load(self) -> Timeline:
        """The partition's timeline, from its segment headers and from its file."""
        made: list[Stamp] = []
        if self.writer is None:  # another process may write here
            self._load_stamps()
            self._timeline = None
        else:
            if self.writer.disk.openings != self._openings:
                self._openings = self.writer.disk.openings
                self._timeline, self._stamps = None, {}
            while self.writer.disk.stamps:
                made.append(self.writer.disk.stamps.popleft())
            self._stamps.update((stamp.base_offset, stamp) for stamp in made)
        if self._timeline is None:
            read = self._read()
            looks = self._looks.worth_keeping() if self.writer is None else ()
            self._timeline = Timeline([*self._stamps.values(), *read, *looks])
            self._news = set(self._timeline.worth_keeping()) != set(read)  # a header is dropped with its segment
            return self._timeline
        for stamp in made:
            self._news |= self._timeline.add(stamp)
        return self._timeline

    def _load_stamps(self) -> None:
        """Read the headers of the existing segments. The last one may be made again after a crash."""
        self.log.refresh()
        bases = self.log.index.bases()
        self._stamps = {base: self._stamps[base] for base in bases[:-1] if base in self._stamps}
        for base in bases:
            with suppress(FileNotFoundError):  # retention has dropped it meanwhile
                self._stamp(base)

    def _read(self) -> list[Stamp]:
        try:
            if self.writer is None:
                content = self.files.read_whole(self._path, MOST_BYTES)
            else:
                content = self.writer.disk.place.read_whole(NAME, MOST_BYTES)
            return decode(content, self.log.identity.salt, self._path)
        except FileNotFoundError:
            return []
        except CorruptLogError as error:
            logger.warning("%s; retention by age starts to observe the clock again", error)
            return []
