"""Keeper: the retention passes of one topic; what is known of each partition's age, and dropping what is due.

Invariant: one pass at a time. A pass decides by what it sees while no other drops anything, and looks at no more
segments than it drops, and one more of each partition: a roll with nothing due costs the same with ten segments as
with ten thousand.

Each pass looks at the clock and takes the look into the partition's timeline. A look from which anything follows
(the first of a boot, the first after a jump, the one that ends an hour without a jump) is written to the file
`clock`, for the processes to come. That is two writes a boot. A file that is lost, damaged or not to be written is
a longer wait and nothing else.

Where space is to stay free, each look at it says how large a segment of the topic may get until the next one. If
space is short and no segment is sealed that could go, the open ones are sealed.

Threads: safe for all. A pass that nobody has asked for is left out while another is running.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

from .append.writer import Writer
from .config import LEAST_SEALED_BYTES, MAX_OFFSET, TopicConfig
from .errors import CorruptLogError, LogError, StorageFullError, together
from .log import Log
from .retention import Candidate, Decision, Sealed, Space, due, reason_to_keep, segment_limit
from .segment import read_segment_header, segment_name
from .system.clock import Clock, Moment
from .system.files import Files
from .timeline import MOST_BYTES, NAME, Age, Stamp, Timeline, decode, encode
from .unique import Unique

__all__ = ["Keeper"]

logger = logging.getLogger("loglib")


class Keeper(Unique):
    """Retention over the partitions of one topic."""

    def __init__(self, files: Files, config: TopicConfig, clock: Clock) -> None:
        self._files = files
        self._config = config
        self._clock = clock
        # Held over a pass. A signal handler may ask for one in the middle of another: hence reentrant.
        self._lock = threading.RLock()
        self._kept: dict[int, _Kept] = {}
        self._segment_limit = MAX_OFFSET  # bytes, until the next look at the free space

    def use(self, config: TopicConfig) -> None:
        """Go on by these policies."""
        with self._lock:
            self._config = config
            for kept in self._kept.values():
                kept.use(config)
            self._limit_segments()

    def add(self, log: Log) -> None:
        """A partition of the topic."""
        self._kept[log.partition] = _Kept(self._files, log, self._config, self._clock)

    def own(self, partition: int, writer: Writer) -> None:
        """This process writes the partition, and so may drop its segments."""
        with self._lock:
            self._kept[partition].own(writer)
            writer.disk.segment_limit = lambda: self._segment_limit
            self._limit_segments()

    def run(self, partition: int) -> None:
        """A pass over one partition that this process owns; over all that it owns, if space is to be freed."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            found = self._look([partition])
            self._drop(found, list(found))
        finally:
            self._lock.release()

    def retain(self, partitions: Sequence[int]) -> list[Decision]:
        """A pass over these, which this process owns; returns the decision for each of their segments."""
        with self._lock:
            found = self._look(partitions)
            decisions = self._explain(self._kept, found, partitions)
            self._drop(found, partitions)
            return decisions

    def explain(self, partitions: Sequence[int]) -> list[Decision]:
        """The decisions that such a pass would come to; for partitions that others own as well."""
        if not self._owned():  # a reader's threads share nothing, and a fork finds no lock taken
            copies = {each.log.partition: each.copy() for each in self._kept.values()}
            return self._explain(copies, self._due(copies, partitions, list(copies)), partitions)
        with self._lock:
            return self._explain(self._kept, self._due(self._kept, partitions, list(self._kept)), partitions)

    def _owned(self) -> list[int]:
        return [number for number, kept in self._kept.items() if kept.writer is not None]

    def _look(self, partitions: Sequence[int]) -> dict[int, list[str]]:
        """What is due of these, and of all that this process owns if space is to be freed."""
        found = self._due(self._kept, partitions, self._owned())
        if not any(found.values()) and self._space().is_short(self._config.retention) and self._seal_open():
            found = self._due(self._kept, partitions, self._owned())
        return found

    def _space(self) -> Space:
        """The file system's bytes, if some are to stay free; from now on segments are as small as that asks for."""
        policy, space = self._config.retention, Space(0, 0)
        if policy.keep_free:
            space = Space(*self._files.free_space(self._kept[0].log.directory))
        self._segment_limit = segment_limit(policy, space, len(self._kept))
        return space

    def _limit_segments(self) -> None:
        with suppress(OSError):  # the next pass tells
            self._space()

    def _seal_open(self) -> bool:
        """Seal the open segments that this process writes, the smallest excepted; says if there was one.

        A segment for which there is no room for a successor stays open.
        """
        sealed, failures = False, []
        for number in self._owned():
            try:
                sealed |= self._kept[number].seal(LEAST_SEALED_BYTES)
            except LogError as error:
                if error.lost or not isinstance(error, StorageFullError):
                    failures.append(error)
        if failures:
            raise together(failures)
        return sealed

    def _due(
        self, kept: dict[int, _Kept], partitions: Sequence[int], candidates: Sequence[int]
    ) -> dict[int, list[str]]:
        """The reasons to drop of each partition looked at: these, and all candidates if space is to be freed."""
        policy, space = self._config.retention, self._space()
        looked_at = candidates if space.is_short(policy) else partitions
        return due([kept[number].candidate() for number in looked_at], policy, space)

    def _explain(
        self, kept: dict[int, _Kept], found: dict[int, list[str]], partitions: Sequence[int]
    ) -> list[Decision]:
        return [each for number in partitions for each in kept[number].decisions(found[number])]

    def _drop(self, found: dict[int, list[str]], partitions: Sequence[int]) -> None:
        failures: list[Exception] = []
        for number in partitions:
            try:
                self._kept[number].drop(found[number])
            except (LogError, OSError) as error:  # the others' segments are due all the same
                failures.append(error)
        for number in partitions:
            self._kept[number].write_down()
        if failures:
            raise together(failures)


class _Kept:
    """One partition: its timeline, and its segments as far as a pass has looked at them."""

    def __init__(self, files: Files, log: Log, config: TopicConfig, clock: Clock) -> None:
        self.log = log
        self.writer: Writer | None = None
        self._files = files
        self._config = config
        self._clock = clock
        self._path = os.path.join(log.directory, NAME)
        self._timeline: Timeline | None = None
        self._now = Moment(0, 0, b"")  # of the pass
        self._stamps: dict[int, Stamp] = {}  # by base offset
        self._looked_at: list[Sealed] = []  # in the pass, oldest first
        self._news = False  # whether the timeline knows what the file does not say

    def use(self, config: TopicConfig) -> None:
        self._config = config

    def copy(self) -> _Kept:
        return _Kept(self._files, self.log, self._config, self._clock)

    def own(self, writer: Writer) -> None:
        self.writer = writer
        writer.disk.believes = self._believes
        self._timeline, self._stamps = None, {}  # what was known before another process may have changed

    def candidate(self) -> Candidate:
        """The partition as it is now, the clock looked at."""
        if self.writer is not None:
            self.writer.check_place()
        timeline = self._load()
        mark = self.log.mark()
        open_base = self.log.index.find(mark.flushed_end) or 0
        self._now = self._clock.moment()  # after the look at the open segment: what is below it was sealed by now
        self._news |= timeline.add(Stamp(open_base, *self._now))
        timeline.forget_before(mark.log_start_offset)
        kept_bytes = mark.flushed_end - mark.log_start_offset
        return Candidate(self.log.partition, kept_bytes, self._sealed(mark.log_start_offset))

    def decisions(self, reasons: Sequence[str]) -> list[Decision]:
        """A decision for each segment, oldest first; these are the reasons to drop the oldest."""
        dropped = {each.base_offset: reason for each, reason in zip(self._looked_at, reasons, strict=False)}
        decisions: list[Decision] = []
        keeping = ""  # why the rest stays, once one does
        for segment in self.log.segments():
            age = self._age(segment.end_offset) if segment.sealed else None
            drop = segment.base_offset in dropped
            reason = dropped.get(segment.base_offset) or keeping or self._reason_to_keep(age)
            keeping = keeping if drop else "an older segment stays"
            at_least_us = None if age is None else age.at_least_us
            decisions.append(
                Decision(
                    self.log.partition, segment.base_offset, segment.size_bytes, at_least_us, drop, reason, segment.path
                )
            )
        return decisions

    def seal(self, least_bytes: int) -> bool:
        """Seal the open segment if it has so many bytes; says if it did."""
        assert self.writer is not None
        end = self.writer.next_offset
        return end - (self.log.index.find(end) or 0) >= least_bytes and self.writer.roll()

    def drop(self, reasons: Sequence[str]) -> None:
        """Drop the oldest of the segments that have been looked at, one for each reason."""
        assert self.writer is not None
        if not reasons:
            return
        dropped = self._looked_at[: len(reasons)]
        if self.writer.drop_before(dropped[-1].end_offset):  # or another pass was quicker
            logger.info(
                "%s: retention dropped %d segments, offsets %d to %d; the last one since %s",
                self.log.directory, len(dropped), dropped[0].base_offset, dropped[-1].end_offset, reasons[-1],
            )  # fmt: skip
        for each in dropped:
            self._stamps.pop(each.base_offset, None)

    def write_down(self) -> None:
        """Have the file say what the timeline knows, if retention goes by age. Synced, but for its name."""
        if not self._news or self._timeline is None or self._config.retention.age is None:
            return
        assert self.writer is not None
        place, temporary = self.writer.disk.place, f"{NAME}.tmp"
        content = encode(self._timeline.worth_keeping(), self.log.identity.salt)
        try:
            with suppress(FileNotFoundError):
                place.unlink(temporary)
            place.write_new(temporary, content, self._config.permissions)
            place.rename(temporary, NAME)
        except OSError as error:  # a full disk must not stand in the way of what frees it
            logger.warning("%s: not written (%s); retention by age may wait longer after a restart", self._path, error)
        self._news = False

    def _sealed(self, base: int) -> Iterator[Sealed]:
        self._looked_at = []
        while (end := self.log.index.after(base)) is not None:
            self._looked_at.append(Sealed(base, end, self._age(end)))
            yield self._looked_at[-1]
            base = end

    def _age(self, end_offset: int) -> Age:
        """Of the sealed segment that ends there."""
        assert self._timeline is not None
        return self._timeline.age(self._stamp(end_offset), self._now)

    def _believes(self, now: Moment) -> bool:
        return (self._timeline or Timeline()).believes(now)

    def _reason_to_keep(self, age: Age | None) -> str:
        assert self._timeline is not None
        believed, steady = self._timeline.believes(self._now), self._timeline.steady_us(self._now)
        return reason_to_keep(age, self._config.retention, believed=believed, steady_us=steady)

    def _stamp(self, base_offset: int) -> Stamp:
        stamp = self._stamps.get(base_offset)
        if stamp is None:
            path = os.path.join(self.log.directory, segment_name(base_offset))
            within = None if self.writer is None else self.writer.disk.place
            stamp = Stamp.of(read_segment_header(self._files, path, self.log.identity, within=within))
            self._stamps[base_offset] = stamp
        return stamp

    def _load(self) -> Timeline:
        """What is known of the partition: from the headers of its segments, and from the file."""
        made: list[Stamp] = []
        if self.writer is None:  # then another process may write here
            self._timeline, self._stamps = None, {}
            self.log.refresh()
            for segment in self.log.segments():
                self._stamp(segment.base_offset)
        else:
            while self.writer.disk.stamps:
                made.append(self.writer.disk.stamps.popleft())
            self._stamps.update((stamp.base_offset, stamp) for stamp in made)
        if self._timeline is None:
            read = self._read()
            self._timeline = Timeline([*self._stamps.values(), *read])
            self._news = set(self._timeline.worth_keeping()) != set(read)  # headers go with their segments
            return self._timeline
        for stamp in made:
            self._news |= self._timeline.add(stamp)
        return self._timeline

    def _read(self) -> list[Stamp]:
        try:
            if self.writer is None:
                content = self._files.read_whole(self._path, MOST_BYTES)
            else:
                content = self.writer.disk.place.read_whole(NAME, MOST_BYTES)
            return decode(content, self.log.identity.salt, self._path)
        except FileNotFoundError:
            return []
        except CorruptLogError as error:
            logger.warning("%s; retention by age begins to look at the clock anew", error)
            return []
