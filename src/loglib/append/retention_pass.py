"""Retention pass: which partitions one pass covers, and which of their segments it drops.

Invariant: one pass runs at a time, and only a partition's writer drops its segments. During a pass nothing else drops
segments. A pass looks at the segments that it drops, and at one more of each partition. So a roll with nothing due
costs the same with ten segments as with ten thousand.

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
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Protocol

from ..config.policies import LEAST_SEALED_BYTES, MAX_OFFSET, TopicConfig, microseconds
from ..errors import LockedError, LogError, StorageFullError, together
from ..log import copy_role, topic_file
from ..log.index import SegmentIndex
from ..log.log import Log
from ..retention import (
    ArchiveFloors,
    ArchiveHold,
    Candidate,
    Hold,
    RetentionPlan,
    SegmentDecision,
    Space,
    due,
    segment_limit,
)
from ..system import lock
from ..system.clock import Clock
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .retention_state import PartitionRetention
from .writer import Writer

__all__ = ["OpenArchive", "RetentionRunner"]

logger = logging.getLogger("loglib")

_WAIT_S = 1.0  # for another pass, after a roll


class OpenArchive(Protocol):
    """Looks how far the archive that a topic's policy names holds the topic's log. Raises nothing."""

    def __call__(
        self, files: Files, topic_path: str, archive: str, log_id: bytes, *, before_us: int
    ) -> ArchiveFloors: ...


class RetentionRunner(NotCopyable):
    """Retention over the partitions of one topic."""

    def __init__(
        self,
        files: Files,
        path: str,
        config: TopicConfig,
        clock: Clock,
        *,
        shared: bool,
        committed: Callable[[str], Mapping[int, int]],
        archives: OpenArchive,
    ) -> None:
        self._files = files
        self._path = path
        self._config = config
        self._clock = clock
        self._shared = shared  # and open for writing: passes also cover partitions that no process holds
        self._committed = committed  # the committed offsets of a group, by partition
        self._archives = archives  # tells how far an archive holds this topic's log
        self._told: dict[int, str] = {}  # the last error of each partition that this process does not own
        # Held during a pass. It is reentrant, because a signal handler may ask for a pass in the middle of another.
        self._lock = threading.RLock()
        self._kept: dict[int, PartitionRetention] = {}
        self._segment_limit = MAX_OFFSET  # bytes, until the next look at the free space

    def use(self, config: TopicConfig) -> None:
        """Use these policies from now on."""
        with self._lock:
            self._config = config
            for kept in list(self._kept.values()):
                kept.use(config)
            self._limit_segments()

    def add(self, log: Log) -> None:
        """Add a partition of the topic, at any time."""
        self._kept[log.partition] = PartitionRetention(self._files, log, self._config, self._clock)

    def own(self, partition: int, writer: Writer) -> None:
        """Note that this process writes the partition, and so may drop its segments."""
        with self._lock:
            self._kept[partition].own(writer)
            writer.disk.segment_limit = partial(getattr, self, "_segment_limit")  # in C: each write asks
            self._limit_segments()

    def run(self, partition: int, *, rolled: bool = False) -> None:
        """A pass over one partition that this process owns. To free space, the pass covers all that it owns."""
        policy = self._config.retention
        limited = policy.bytes is not None or policy.keep_free > 0
        if not self._lock.acquire(timeout=_WAIT_S if rolled and limited else 0):
            return
        try:
            self._drop(self._plan([partition]))
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
            self._drop(self._plan(others))
        finally:
            self._lock.release()

    def retain(self, partition: int | None = None) -> list[SegmentDecision]:
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
            found = self._plan(partitions)
            seen = sorted(number for number in partitions if number in found)
            decisions = self._decisions(self._kept, found, seen)
            self._drop({number: found[number] for number in seen})
            return decisions

    def explain(self, partitions: Sequence[int]) -> list[SegmentDecision]:
        """The decisions that a pass would make, also for partitions that other processes own."""
        if not self._shared and not self._owned():  # a reader takes no lock, so a fork cannot find it taken
            return self._explain({each.log.partition: each.copy() for each in list(self._kept.values())}, partitions)
        with self._lock:
            return self._explain(self._kept, partitions)

    def _owned(self) -> list[int]:
        return [number for number, kept in list(self._kept.items()) if kept.writer is not None]

    def _others(self) -> list[int]:
        return [number for number, kept in list(self._kept.items()) if kept.writer is None]

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
            copy_role.check_leader(self._files, self._path)
            return topic_file.read(self._files, self._path) == (self._kept[0].log.identity.log_id, self._config)
        return False

    @contextmanager
    def _writing(self, kept: PartitionRetention) -> Iterator[SegmentIndex | None]:
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
        for number, kept in list(self._kept.items()):
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

    def _plan(self, partitions: Sequence[int]) -> dict[int, RetentionPlan]:
        """What goes from these partitions. To free space, it covers all that this or no process owns."""
        policy, space = self._config.retention, self._space()
        if space.is_short(policy):
            partitions = [*self._owned(), *self._abandoned()]
        found = due(self._candidates(partitions), policy, space)
        nothing = not any(each.reasons for each in found.values())
        if space.is_short(policy) and nothing and self._seal_open(partitions):
            found = due(self._candidates(partitions), policy, space)
        return found

    def _candidates(self, partitions: Iterable[int]) -> list[Candidate]:
        candidates: list[Candidate] = []
        hold, archived = self._holds(), self._archived()
        for number in partitions:
            kept = self._kept[number]
            if kept.writer is not None:
                candidates.append(kept.candidate(hold, archived))
                continue
            with self._telling_once(number):
                found = kept.candidate(hold, archived)
                candidates.append(found._replace(sealed=list(found.sealed)))
        return candidates

    def _holds(self) -> Callable[[int], Hold | None]:
        """Tells what the slowest group holds in a partition. It reads the groups' commits once, and only when asked."""
        groups, committed = self._config.retention.hold_for, cache(self._commits_of)

        def hold(partition: int) -> Hold | None:
            holds = [Hold(group, committed(group).get(partition)) for group in groups]
            return min(holds, key=lambda each: -1 if each.offset is None else each.offset, default=None)

        return hold

    def _archived(self) -> Callable[[int, int], ArchiveHold | None]:
        """Tells how far the archive holds a partition. It reads the archive's manifest once, and only when asked."""
        policy, archive = self._config.retention, self._config.retention.archive

        @cache
        def floors() -> ArchiveFloors:
            log_id = self._kept[0].log.identity.log_id
            before_us = self._clock.moment().wall_us - microseconds(policy.archive_grace)
            return self._archives(self._files, self._path, str(archive), log_id, before_us=before_us)

        def archived(partition: int, start: int) -> ArchiveHold | None:
            return None if archive is None else floors().hold(partition, start)

        return archived

    def _commits_of(self, group: str) -> Mapping[int, int]:
        """A group's committed offsets. What cannot be read holds everything: nothing may be lost by mistake."""
        try:
            return self._committed(group)
        except (LogError, OSError) as error:
            logger.warning("%s: retention waits for group %s: %s", self._path, group, error)
            return {}

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

    def _seal_for_nobody(self, kept: PartitionRetention, *, older_than_us: int) -> bool:
        with self._writing(kept):
            return kept.writer is not None and kept.writer.roll(older_than_us=older_than_us)

    def _explain(self, kept: dict[int, PartitionRetention], partitions: Sequence[int]) -> list[SegmentDecision]:
        """The decisions for these partitions. To free space, it looks at all, because the oldest segments go first."""
        policy, space = self._config.retention, self._space()
        looked_at = list(kept) if space.is_short(policy) else partitions
        hold, archived = self._holds(), self._archived()
        found = due([kept[number].candidate(hold, archived) for number in looked_at], policy, space)
        return self._decisions(kept, found, partitions)

    def _decisions(
        self, kept: dict[int, PartitionRetention], found: dict[int, RetentionPlan], partitions: Sequence[int]
    ) -> list[SegmentDecision]:
        return [each for number in partitions for each in kept[number].decisions(found[number])]

    def _drop(self, found: dict[int, RetentionPlan]) -> None:
        failures: list[Exception] = []
        for number, verdict in found.items():
            kept = self._kept[number]
            if kept.writer is None:
                self._drop_for_nobody(number, verdict.reasons)
                continue
            try:
                kept.drop(verdict.reasons)
            except (LogError, OSError) as error:  # other partitions' segments are still due
                failures.append(error)
        for number in found:
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
