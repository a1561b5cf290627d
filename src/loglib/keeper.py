"""Keeper: the retention passes of one topic; what is known of each partition's age, and dropping what is due.

Invariant: one pass at a time, and only its writer drops a partition's segments. A pass decides by what it sees while no
other drops anything, and looks at no more segments than it drops, and one more of each partition: a roll with nothing
due costs the same with ten segments as with ten thousand.

Each pass looks at the clock and takes the look into the partition's timeline. A look from which anything follows
(the first of a boot, the first after a jump, the one that ends an hour without a jump) is written to the file
`clock`, for the processes to come. That is two writes a boot. A file that is lost, damaged or not to be written is
a longer wait and nothing else.

Partitions of a shared topic that no process holds get their passes from any process that has the topic open for writing
(decision 21). A pass looks at such a partition as a reader does. Only if there is something to do, the process becomes
the partition's writer for that moment. Meanwhile it holds the lock of the topic's directory, so that other processes
know to wait, and its policies must be those of `topic.json`. Errors there are logged once, and no call raises them.

Where space is to stay free, each look at it says how large a segment of the topic may get until the next one. If
space is short and no segment is sealed that could go, the open ones are sealed.

Threads: safe for all. A pass that nobody has asked for is left out while another is running. After a roll it waits for
the other one where space is limited, or threads that append would outrun the passes; a second at most, since a signal
handler may have come in the middle of what the other one waits for.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from . import description
from .append.writer import Writer
from .config import LEAST_SEALED_BYTES, MAX_OFFSET, TopicConfig, microseconds
from .errors import CorruptLogError, LockedError, LogError, StorageFullError, together
from .index import SegmentIndex
from .log import Log
from .retention import Candidate, Decision, Sealed, Space, due, reason_to_keep, segment_limit
from .segment import SegmentReader, read_segment_header, segment_name
from .system import lock
from .system.clock import Clock, Moment
from .system.files import Files
from .timeline import MOST_BYTES, NAME, Age, Stamp, Timeline, began_boottime, decode, encode
from .unique import Unique

__all__ = ["Keeper"]

logger = logging.getLogger("loglib")

_WAIT_S = 1.0  # for another pass, after a roll


class Keeper(Unique):
    """Retention over the partitions of one topic."""

    def __init__(self, files: Files, path: str, config: TopicConfig, clock: Clock, *, shared: bool) -> None:
        self._files = files
        self._path = path
        self._config = config
        self._clock = clock
        self._shared = shared  # and open for writing: passes are for partitions that nobody holds as well
        self._told: dict[int, str] = {}  # by partition that this process does not own, what was wrong there last
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

    def run(self, partition: int, *, rolled: bool = False) -> None:
        """A pass over one partition that this process owns; over all that it owns, if space is to be freed."""
        policy = self._config.retention
        limited = policy.bytes is not None or policy.keep_free > 0
        if not self._lock.acquire(timeout=_WAIT_S if rolled and limited else 0):
            return
        try:
            found = self._look([partition])
            self._drop(found, list(found))
        finally:
            self._lock.release()

    def run_for_others(self) -> None:
        """A pass over the partitions that this process does not own. What a living process holds is left alone."""
        if not self._shared or not self._lock.acquire(blocking=False):
            return
        try:
            others = self._others()
            self._seal_old(others)
            found = self._look(others)
            self._drop(found, list(found))
        finally:
            self._lock.release()

    def retain(self, partition: int | None = None) -> list[Decision]:
        """A pass over a partition that this process owns; returns the decision for each of its segments.

        With none, over all that it owns, and all that nobody does.
        """
        with self._lock:
            if partition is None:
                abandoned = self._abandoned()
                self._seal_old(abandoned)
                partitions = [*self._owned(), *abandoned]
            else:
                partitions = [partition]
            found = self._look(partitions)
            seen = sorted(number for number in partitions if number in found)
            decisions = self._explain(self._kept, found, seen)
            self._drop(found, seen)
            return decisions

    def explain(self, partitions: Sequence[int]) -> list[Decision]:
        """The decisions that such a pass would come to; for partitions that others own as well."""
        if not self._shared and not self._owned():  # a reader's threads share nothing, and a fork finds no lock taken
            copies = {each.log.partition: each.copy() for each in self._kept.values()}
            return self._explain(copies, self._due(copies, partitions, list(copies)), partitions)
        with self._lock:
            return self._explain(self._kept, self._due(self._kept, partitions, list(self._kept)), partitions)

    def _owned(self) -> list[int]:
        return [number for number, kept in self._kept.items() if kept.writer is not None]

    def _others(self) -> list[int]:
        return [number for number, kept in self._kept.items() if kept.writer is None]

    def _abandoned(self) -> list[int]:
        """The partitions that nobody holds, if this process is to see to them, and no other is doing so."""
        free: list[int] = []
        with self._turn() as mine:
            for number in self._others() if mine else ():
                with self._telling_once(number):
                    if lock.is_free(self._files, self._kept[number].log.directory):
                        free.append(number)
        return free

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Take the turn to lock partitions that nobody holds; gives False if this process may not, or not now."""
        held: lock.Lock | None = None
        with suppress(OSError):  # the topic was moved, say
            held = lock.try_acquire(self._files, self._path) if self._shared else None
        try:
            yield held is not None and self._is_current()
        finally:
            if held is not None:
                held.release()

    def _is_current(self) -> bool:
        """Whether the topic at the path is still this one, with the policies by which this process goes."""
        with suppress(LogError, OSError):
            return description.read(self._files, self._path) == (self._kept[0].log.identity.log_id, self._config)
        return False

    @contextmanager
    def _writing(self, kept: _Kept) -> Iterator[SegmentIndex | None]:
        """Become the writer of a partition that nobody holds; gives its segments, or None if somebody holds it."""
        index = SegmentIndex([])
        with self._turn() as mine:
            try:
                writer = Writer(
                    self._files, kept.log.directory, kept.log.identity, self._config, index=index, clock=self._clock
                ) if mine else None  # fmt: skip
            except LockedError:
                writer = None
            if writer is None:
                yield None
                return
            try:
                kept.write_by(writer)
                yield index
            finally:
                kept.write_by(None)
                writer.close()

    @contextmanager
    def _telling_once(self, number: int) -> Iterator[None]:
        """Log an error in a partition that this process does not own, unless the same error was logged last."""
        try:
            yield
        except (LogError, OSError) as error:
            if self._told.get(number) != str(error):
                self._told[number] = str(error)
                logger.warning("%s: retention passes it over: %s", self._kept[number].log.directory, error)

    def _look(self, partitions: Sequence[int]) -> dict[int, list[str]]:
        """What is due of these, and if space is to be freed of all that this process owns, or nobody."""
        policy, space = self._config.retention, self._space()
        if space.is_short(policy):
            partitions = [*self._owned(), *self._abandoned()]
        found = due(self._candidates(partitions), policy, space)
        if space.is_short(policy) and not any(found.values()) and self._seal_open(partitions):
            found = due(self._candidates(partitions), policy, space)
        return found

    def _candidates(self, partitions: Iterable[int]) -> list[Candidate]:
        candidates: list[Candidate] = []
        for number in partitions:
            kept = self._kept[number]
            if kept.writer is not None:
                candidates.append(kept.candidate())
                continue
            with self._telling_once(number):
                found = kept.candidate()
                candidates.append(found._replace(sealed=list(found.sealed)))
        return candidates

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

    def _seal_open(self, partitions: Iterable[int]) -> bool:
        """Seal the open segments of these, the smallest excepted; says if there was one.

        A segment for which there is no room for a successor stays open.
        """
        sealed, failures = False, []
        for number in partitions:
            kept = self._kept[number]
            if kept.writer is None:
                with self._telling_once(number):
                    sealed |= kept.open_bytes() >= LEAST_SEALED_BYTES and self._seal_for_nobody(kept, older_than_us=0)
                continue
            try:
                sealed |= kept.open_bytes() >= LEAST_SEALED_BYTES and kept.writer.roll()
            except LogError as error:
                if error.lost or not isinstance(error, StorageFullError):
                    failures.append(error)
        if failures:
            raise together(failures)
        return sealed

    def _seal_old(self, partitions: Iterable[int]) -> None:
        """Seal the open segments of these, which this process does not own, that have reached their age."""
        age = self._config.segment_age
        if age is None:
            return
        for number in partitions:
            with self._telling_once(number):
                if self._kept[number].open_age_us() >= microseconds(age):
                    self._seal_for_nobody(self._kept[number], older_than_us=microseconds(age))

    def _seal_for_nobody(self, kept: _Kept, *, older_than_us: int) -> bool:
        with self._writing(kept):
            return kept.writer is not None and kept.writer.roll(older_than_us=older_than_us)

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
            kept = self._kept[number]
            if kept.writer is None:
                self._drop_for_nobody(number, found[number])
                continue
            try:
                kept.drop(found[number])
            except (LogError, OSError) as error:  # the others' segments are due all the same
                failures.append(error)
        for number in partitions:
            self._kept[number].write_down()
        if failures:
            raise together(failures)

    def _drop_for_nobody(self, number: int, reasons: Sequence[str]) -> None:
        kept = self._kept[number]
        if not reasons:
            return
        with self._telling_once(number), self._writing(kept) as index:
            end = kept.end_of(reasons)
            if index is not None and index.find(end) == end:  # and nobody has put other files in place meanwhile
                kept.drop(reasons)
                kept.write_down()


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
        self._looks = Timeline()  # what this process has seen itself while it did not own the partition
        self._stamps: dict[int, Stamp] = {}  # by base offset
        self._looked_at: list[Sealed] = []  # in the pass, oldest first
        self._news = False  # whether the timeline knows what the file does not say

    def use(self, config: TopicConfig) -> None:
        self._config = config

    def copy(self) -> _Kept:
        return _Kept(self._files, self.log, self._config, self._clock)

    def own(self, writer: Writer) -> None:
        self.write_by(writer)
        self._timeline, self._stamps = None, {}  # what was known before another process may have changed

    def write_by(self, writer: Writer | None) -> None:
        """Drop and write with this writer from now on; what is known of the segments stays."""
        self.writer = writer
        if writer is not None:
            writer.disk.believes = self._believes

    def candidate(self) -> Candidate:
        """The partition as it is now, the clock looked at."""
        if self.writer is not None:
            self.writer.check_place()
        timeline = self._load()
        mark = self.log.mark()
        open_base = self.log.index.find(mark.flushed_end) or 0
        self._now = self._clock.moment()  # after the look at the open segment: what is below it was sealed by now
        look = Stamp(open_base, *self._now)
        self._news |= timeline.add(look)
        timeline.forget_before(mark.log_start_offset)
        if self.writer is None:
            self._looks.add(look)
            self._looks.forget_before(mark.log_start_offset)
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

    def open_bytes(self) -> int:
        """How large the open segment is, as of the last look at what segments there are."""
        end = self.log.mark().flushed_end if self.writer is None else self.writer.next_offset
        return end - (self.log.index.find(end) or 0)

    def open_age_us(self) -> int:
        """How long ago the first batch of the open segment was written, as its writer tells it; -1: there is none.

        For a process that does not write here.
        """
        self.log.refresh()
        end = self.log.mark().flushed_end
        base = self.log.index.find(end)
        if base is None or base == end:
            return -1
        path = os.path.join(self.log.directory, segment_name(base))
        with SegmentReader(self._files, path, self.log.identity) as segment:
            created, first = Stamp.of(segment.header), segment.header_at(base)
        now = self._clock.moment()
        return now.boottime_us - began_boottime(created, first.append_time, now)

    def end_of(self, reasons: Sequence[str]) -> int:
        """Where the log begins without the oldest segments, one for each reason."""
        return self._looked_at[len(reasons) - 1].end_offset

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
        if self.writer is None or not self._news or self._timeline is None or self._config.retention.age is None:
            return
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
            self._load_stamps()
            self._timeline = None
        else:
            while self.writer.disk.stamps:
                made.append(self.writer.disk.stamps.popleft())
            self._stamps.update((stamp.base_offset, stamp) for stamp in made)
        if self._timeline is None:
            read = self._read()
            looks = self._looks.worth_keeping() if self.writer is None else ()
            self._timeline = Timeline([*self._stamps.values(), *read, *looks])
            self._news = set(self._timeline.worth_keeping()) != set(read)  # headers go with their segments
            return self._timeline
        for stamp in made:
            self._news |= self._timeline.add(stamp)
        return self._timeline

    def _load_stamps(self) -> None:
        """Read the headers of the segments there are now. The last one may be made anew after a crash."""
        self.log.refresh()
        bases = self.log.index.bases()
        self._stamps = {base: self._stamps[base] for base in bases[:-1] if base in self._stamps}
        for base in bases:
            with suppress(FileNotFoundError):  # retention has overtaken this look
                self._stamp(base)

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
