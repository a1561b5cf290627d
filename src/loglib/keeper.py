"""Keeper: the retention passes of one topic. It knows each partition's age, and drops segments that are due.

Invariant: one pass runs at a time, and only a partition's writer drops its segments. During a pass nothing else drops
segments. A pass looks at the segments that it drops, and at one more of each partition. So a roll with nothing due
costs the same with ten segments as with ten thousand.

Each pass reads the clock and adds the moment to the partition's timeline. Some moments prove something: the first of
a boot, the first after a jump, and the end of an hour without a jump. The pass writes these to the file `clock`, for
later processes; that is two writes per boot. If that file is lost, damaged or cannot be written, retention only waits
longer.

If no process holds a partition of a shared topic, any process with the topic open for writing runs its passes
(decision 21). A pass looks at such a partition as a reader. Only if there is work, the process becomes the partition's
writer for a moment. Meanwhile it holds the lock of the topic's directory, so that other processes wait, and its
policies must be those of `topic.json`. Errors there are logged once, and no call raises them.

If the policy demands free space, each look at the free space limits the size of segments until the next look. If space
is short and no sealed segment can be dropped, the open segments are sealed.

Threads: safe for all. A pass that no caller asked for is skipped while another runs. With a limit on space, a pass
after a roll waits for the other pass; otherwise appending threads would fill the disk faster than the passes free it.
It waits for one second at most, because a signal handler may have interrupted the other pass.
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
from .timeline import MOST_BYTES, NAME, Age, Stamp, Timeline, decode, encode, open_since
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
        self._shared = shared  # and open for writing: passes also cover partitions that no process holds
        self._told: dict[int, str] = {}  # the last error of each partition that this process does not own
        # Held during a pass. It is reentrant, because a signal handler may ask for a pass in the middle of another.
        self._lock = threading.RLock()
        self._kept: dict[int, _Kept] = {}
        self._segment_limit = MAX_OFFSET  # bytes, until the next look at the free space

    def use(self, config: TopicConfig) -> None:
        """Use these policies from now on."""
        with self._lock:
            self._config = config
            for kept in self._kept.values():
                kept.use(config)
            self._limit_segments()

    def add(self, log: Log) -> None:
        """Add a partition of the topic."""
        self._kept[log.partition] = _Kept(self._files, log, self._config, self._clock)

    def own(self, partition: int, writer: Writer) -> None:
        """Note that this process writes the partition, and so may drop its segments."""
        with self._lock:
            self._kept[partition].own(writer)
            writer.disk.segment_limit = lambda: self._segment_limit
            self._limit_segments()

    def run(self, partition: int, *, rolled: bool = False) -> None:
        """A pass over one partition that this process owns. To free space, the pass covers all that it owns."""
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
        """A pass over the partitions that no process holds."""
        if not self._shared or not self._lock.acquire(blocking=False):
            return
        try:
            self._give_back()
            others = self._others()
            self._seal_old(others)
            found = self._look(others)
            self._drop(found, list(found))
        finally:
            self._lock.release()

    def retain(self, partition: int | None = None) -> list[Decision]:
        """A pass over a partition that this process owns; returns the decision for each of its segments.

        Without a partition, the pass covers all that it owns, and all that no process holds.
        """
        with self._lock:
            self._give_back()
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
        """The decisions that a pass would make, also for partitions that other processes own."""
        if not self._shared and not self._owned():  # a reader takes no lock, so a fork cannot find it taken
            copies = {each.log.partition: each.copy() for each in self._kept.values()}
            return self._explain(copies, self._due(copies, partitions, list(copies)), partitions)
        with self._lock:
            return self._explain(self._kept, self._due(self._kept, partitions, list(self._kept)), partitions)

    def _owned(self) -> list[int]:
        return [number for number, kept in self._kept.items() if kept.writer is not None]

    def _others(self) -> list[int]:
        return [number for number, kept in self._kept.items() if kept.writer is None]

    def _abandoned(self) -> list[int]:
        """The partitions that no process holds, if this process may run their passes now."""
        free: list[int] = []
        with self._turn() as mine:
            for number in self._others() if mine else ():
                with self._telling_once(number):
                    if lock.is_free(self._files, self._kept[number].log.directory):
                        free.append(number)
        return free

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Take the turn to lock partitions that no process holds. Gives False if this process may not do so now."""
        held: lock.Lock | None = None
        with suppress(OSError):  # for example the topic was moved
            held = lock.try_acquire(self._files, self._path) if self._shared else None
        try:
            yield held is not None and self._is_current()
        finally:
            if held is not None:
                held.release()

    def _is_current(self) -> bool:
        """Whether the path still leads to this topic, with the policies that this process uses."""
        with suppress(LogError, OSError):
            return description.read(self._files, self._path) == (self._kept[0].log.identity.log_id, self._config)
        return False

    @contextmanager
    def _writing(self, kept: _Kept) -> Iterator[SegmentIndex | None]:
        """Become the writer of a partition that no process holds. Gives its segments; None if a process holds it."""
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
                kept.borrow(writer)
                yield index
            finally:
                try:
                    kept.give_back()
                finally:
                    kept.give_back()  # goes on if an interrupt has ended it

    def _give_back(self) -> None:
        """Let go what a pass has left locked that an interrupt ended."""
        for number, kept in self._kept.items():
            with self._telling_once(number):
                kept.give_back()

    @contextmanager
    def _telling_once(self, number: int) -> Iterator[None]:
        """Log an error in a partition that this process does not own, unless it was also the last one logged."""
        try:
            yield
        except (LogError, OSError) as error:
            if self._told.get(number) != str(error):
                self._told[number] = str(error)
                logger.warning("%s: retention skips this partition: %s", self._kept[number].log.directory, error)

    def _look(self, partitions: Sequence[int]) -> dict[int, list[str]]:
        """The reasons to drop segments of these. To free space, it covers all that this or no process owns."""
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
        """The file system's bytes, if the policy demands free space. Also sets the limit on the size of segments."""
        policy, space = self._config.retention, Space(0, 0)
        if policy.keep_free:
            space = Space(*self._files.free_space(self._kept[0].log.directory))
        self._segment_limit = segment_limit(policy, space, len(self._kept))
        return space

    def _limit_segments(self) -> None:
        with suppress(OSError):  # the next pass raises it
            self._space()

    def _seal_open(self, partitions: Iterable[int]) -> bool:
        """Seal the open segments of these partitions, except very small ones. True if it sealed one.

        A segment stays open if the disk has no room for a new segment.
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
        """Seal open segments that have reached their age, in partitions that this process does not own."""
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
        """The reasons to drop segments of each partition looked at: these, and all candidates to free space."""
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
            except (LogError, OSError) as error:  # other partitions' segments are still due
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
        self._borrowed: Writer | None = None  # for a pass over a partition that nobody holds; until it is closed
        self._files = files
        self._config = config
        self._clock = clock
        self._path = os.path.join(log.directory, NAME)
        self._timeline: Timeline | None = None
        self._now = Moment(0, 0, b"")  # the moment of the pass
        self._looks = Timeline()  # the moments of this process while it did not own the partition
        self._stamps: dict[int, Stamp] = {}  # by base offset
        self._looked_at: list[Sealed] = []  # the segments that the pass looked at, oldest first
        self._news = False  # whether the timeline has stamps that the file does not have

    def use(self, config: TopicConfig) -> None:
        self._config = config

    def copy(self) -> _Kept:
        return _Kept(self._files, self.log, self._config, self._clock)

    def own(self, writer: Writer) -> None:
        self._borrowed = None  # it has let the lock go, or this writer had not been made
        self._write_by(writer)
        self._timeline, self._stamps = None, {}  # another process may have changed the partition

    def borrow(self, writer: Writer) -> None:
        """Drop and write with this writer until it is given back. The facts about the segments stay."""
        self._borrowed = writer
        self._write_by(writer)

    def give_back(self) -> None:
        """Close the writer that was borrowed, if any. When an interrupt ends it, it may be called again."""
        if self._borrowed is not None:
            self.writer = None
            self._borrowed.close()
            self._borrowed = None

    def _write_by(self, writer: Writer) -> None:
        self.writer = writer
        writer.disk.believes = self._believes

    def candidate(self) -> Candidate:
        """The partition as it is now. Also reads the clock."""
        if self.writer is not None:
            self.writer.check_place()
        timeline = self._load()
        mark = self.log.mark()
        open_base = self.log.index.find(mark.flushed_end) or 0
        self._now = self._clock.moment()  # after the open segment is known: all segments below it are sealed by now
        look = Stamp(open_base, *self._now)
        self._news |= timeline.add(look)
        timeline.forget_before(mark.log_start_offset)
        if self.writer is None:
            self._looks.add(look)
            self._looks.forget_before(mark.log_start_offset)
        kept_bytes = mark.flushed_end - mark.log_start_offset
        return Candidate(self.log.partition, kept_bytes, self._sealed(mark.log_start_offset))

    def decisions(self, reasons: Sequence[str]) -> list[Decision]:
        """A decision for each segment, oldest first. `reasons` are those to drop the oldest segments."""
        dropped = {each.base_offset: reason for each, reason in zip(self._looked_at, reasons, strict=False)}
        decisions: list[Decision] = []
        keeping = ""  # once a segment stays: why the rest stays
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
        with SegmentReader(self._files, path, self.log.identity) as segment:
            now = self._clock.moment()
            return now.boottime_us - open_since(segment, now)

    def end_of(self, reasons: Sequence[str]) -> int:
        """The log start after dropping the oldest segments, one for each reason."""
        return self._looked_at[len(reasons) - 1].end_offset

    def drop(self, reasons: Sequence[str]) -> None:
        """Drop the oldest segments that the pass looked at, one for each reason."""
        assert self.writer is not None
        if not reasons:
            return
        dropped = self._looked_at[: len(reasons)]
        if self.writer.drop_before(dropped[-1].end_offset):  # False: another pass has dropped them
            logger.info(
                "%s: retention dropped %d segments, offsets %d to %d; reason for the last one: %s",
                self.log.directory, len(dropped), dropped[0].base_offset, dropped[-1].end_offset, reasons[-1],
            )  # fmt: skip
        for each in dropped:
            self._stamps.pop(each.base_offset, None)

    def write_down(self) -> None:
        """Write the timeline to its file, if there is a limit on age. Synced, except its name."""
        if self.writer is None or not self._news or self._timeline is None or self._config.retention.age is None:
            return
        place, temporary = self.writer.disk.place, f"{NAME}.tmp"
        content = encode(self._timeline.worth_keeping(), self.log.identity.salt)
        try:
            with suppress(FileNotFoundError):
                place.unlink(temporary)
            place.write_new(temporary, content, self._config.permissions)
            place.rename(temporary, NAME)
        except OSError as error:  # a full disk must not stop the pass that frees it
            logger.warning("%s: not written (%s); retention by age may wait longer after a restart", self._path, error)
        self._news = False

    def _sealed(self, base: int) -> Iterator[Sealed]:
        self._looked_at = []
        while (end := self.log.index.after(base)) is not None:
            self._looked_at.append(Sealed(base, end, self._age(end)))
            yield self._looked_at[-1]
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
        """The partition's timeline, from its segment headers and from its file."""
        made: list[Stamp] = []
        if self.writer is None:  # another process may write here
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
            self._news = set(self._timeline.worth_keeping()) != set(read)  # headers go when segments go
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
                content = self._files.read_whole(self._path, MOST_BYTES)
            else:
                content = self.writer.disk.place.read_whole(NAME, MOST_BYTES)
            return decode(content, self.log.identity.salt, self._path)
        except FileNotFoundError:
            return []
        except CorruptLogError as error:
            logger.warning("%s; retention by age starts to observe the clock again", error)
            return []
