"""Retention pass: which partitions one pass covers, and which of their segments it drops.

Invariant: one pass runs at a time, and only a partition's writer drops its segments. During a pass nothing else drops
segments. A pass reads the headers of the segments that it drops, and of one more in each partition. So a roll with
nothing due costs the same with ten segments as with ten thousand.

If no process holds a partition of a shared topic, any process with the topic open for writing runs its passes
(decision 21). A pass reads such a partition as a reader does. Only if there is work, the process becomes the
partition's writer for a moment. Meanwhile it holds the lock of the topic's directory, so that other processes wait,
and its policies must be those of `topic.json`. Errors there are logged once, and no call raises them.

If the policy demands free space, each pass limits the size of segments until the next pass. If space is short and no
sealed segment can be dropped, the open segments are sealed.

Threads: safe for all. A pass that no caller asked for is skipped while another runs. With a limit on space, a pass
after a roll waits for the other pass; otherwise appending threads would fill the disk faster than the passes free it.
It waits for one second at most, because a signal handler may have interrupted the other pass.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial

from ..config.policies import LEAST_SEALED_BYTES, MAX_OFFSET, TopicConfig
from ..config.quantities import microseconds
from ..errors import LockedError, LogError, StorageFullError
from ..log import copy_role, topic_file
from ..log.index import SegmentIndex
from ..log.log import Log
from ..retention import (
    ArchiveHold,
    ArchiveHolds,
    Candidate,
    Hold,
    RetentionPlan,
    SegmentDecision,
    Space,
    due,
    segment_limit,
)
from ..system import lock
from ..system.clock import Clock, monotonic
from ..system.directory import Directory
from ..system.failures import together
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .retention_state import PartitionRetention
from .turns import Turns
from .writer import Writer

logger = logging.getLogger("loglib")

_WAIT_S = 1.0  # for another pass, after a roll
_BUSY_S = 0.5  # for a process that changes the topic: it writes and syncs a file
_NAP_S = 0.001


@dataclass(eq=False, repr=False)
class RetentionRunner(NotCopyable):
    """Retention over the partitions of one topic."""

    files: Files
    path: str
    config: TopicConfig
    clock: Clock
    shared: bool  # and open for writing: passes also cover partitions that no process holds
    holds_of: Callable[[str], Mapping[int, Hold]]  # of the group or the share with this name, by partition
    archives: Callable[..., ArchiveHolds]  # `offload.safe_offset.floors_of`: opens the archive that the policy names

    def __post_init__(self) -> None:
        self._logged: dict[int, str] = {}  # the last error of each partition that this process does not own
        # Held during a pass. It is reentrant, because a signal handler may ask for a pass in the middle of another.
        self._lock = threading.RLock()
        self._partitions: dict[int, PartitionRetention] = {}
        self._segment_limit = MAX_OFFSET  # bytes, until the next pass
        self.turns: Turns | None = None  # of the topic, if other processes may write it, too
        self._wait_s = 0.0  # how long this pass waits for a partition that another process has

    def use(self, config: TopicConfig) -> None:
        """Use these policies from now on."""
        with self._lock:
            self.assign(config)
            self._limit_segments()

    def assign(self, config: TopicConfig) -> None:
        """Explain by these policies from now on, as a reader does. Takes no lock."""
        self.config = config
        for each in list(self._partitions.values()):
            each.config = config

    def add(self, log: Log) -> None:
        """Add a partition of the topic, at any time."""
        self._partitions[log.partition] = PartitionRetention(self.files, log, self.config, self.clock)

    def own(self, partition: int, writer: Writer) -> None:
        """Note that this process writes the partition, and so may drop its segments."""
        with self._lock:
            self._partitions[partition].own(writer)
            writer.disk.segment_limit = partial(getattr, self, "_segment_limit")  # in C: each write asks
            self._limit_segments()

    def run(self, partition: int, *, rolled: bool = False) -> None:
        """A pass over one partition that this process owns. To free space, the pass covers all that it owns."""
        policy = self.config.retention
        limited = policy.bytes is not None or policy.keep_free > 0
        if not self._lock.acquire(timeout=_WAIT_S if rolled and limited else 0):
            return
        try:
            with ExitStack() as held:
                self._drop(self._plan([partition], held), background=True)
        finally:
            self._lock.release()

    def run_for_others(self) -> None:
        """A pass over the partitions that no process holds."""
        if not self.shared or not self._lock.acquire(blocking=False):
            return
        try:
            self._give_back()
            others = self._others()
            self._seal_old(others)
            with ExitStack() as held:
                self._drop(self._plan(others, held))
        finally:
            self._lock.release()

    def retain(self, partition: int | None = None) -> list[SegmentDecision]:
        """A pass over a partition that this process owns; returns the decision for each of its segments.

        Without a partition, the pass covers all that it owns, and all that no process holds.
        """
        with self._lock, ExitStack() as held:
            self._give_back()
            self._wait_s = 0.0 if self.turns is None else self.turns.wait_s
            held.callback(setattr, self, "_wait_s", 0.0)
            for number in self._owned() if partition is None else [partition]:
                writer = self._partitions[number].writer
                assert writer is not None  # its caller has made it
                held.enter_context(writer.held())
            if partition is None:
                abandoned = self._abandoned()
                self._seal_old(abandoned)
                partitions = [*self._owned(), *abandoned]
            else:
                partitions = [partition]
            plans = self._plan(partitions, held)
            plans = {number: plans[number] for number in sorted(partitions) if number in plans}
            decisions = [each for number, plan in plans.items() for each in self._partitions[number].decisions(plan)]
            self._drop(plans)
            return decisions

    def explain(self, partitions: Sequence[int]) -> list[SegmentDecision]:
        """The decisions that a pass would make, also for partitions that other processes own."""
        if not self.shared and not self._owned():  # a reader takes no lock, so a fork cannot find it taken
            copies = {number: replace(each, writer=None) for number, each in list(self._partitions.items())}
            return self._explain(copies, partitions)
        with self._lock:
            known = dict(self._partitions)
            for number, each in known.items():
                if each.writer is not None and each.writer.is_parked:  # another process may write there
                    known[number] = replace(each, writer=None)
            return self._explain(known, partitions)

    def _explain(self, known: dict[int, PartitionRetention], numbers: Sequence[int]) -> list[SegmentDecision]:
        """The decisions for these partitions. If space is short, it reads all, because the oldest segments go first."""
        policy, space = self.config.retention, self._space()
        hold, archived = self._holds(), self._archived()
        candidates = [
            known[number].candidate(hold, archived)
            for number in (known if space.is_short(policy) else numbers)
        ]
        plans = due(candidates, policy, space)
        return [each for number in numbers for each in known[number].decisions(plans[number])]

    # --- partitions that this process does not own -----------------------------------------------

    def _owned(self) -> list[int]:
        return [number for number, each in list(self._partitions.items()) if each.writer is not None]

    def _hold_owned(self, held: ExitStack) -> list[int]:
        """Hold the partitions that this process owns. It waits for none: others may wait for one that it has."""
        numbers: list[int] = []
        for number in self._owned():
            writer = self._partitions[number].writer
            assert writer is not None
            with suppress(LockedError):  # the process that has the partition does it
                held.enter_context(writer.held(wait_s=0.0, says_who=False))
                numbers.append(number)
        return numbers

    def _others(self) -> list[int]:
        return [number for number, each in list(self._partitions.items()) if each.writer is None]

    def _abandoned(self) -> list[int]:
        """The partitions that no process holds, if this process may run their passes now."""
        free: list[int] = []
        with self._turn() as mine:
            for number in self._others() if mine else ():
                directory = self._partitions[number].log.directory
                with self._logging_once(number), Directory.open(self.files, directory) as place:
                    if self._take(place):
                        self.files.unlock(place.fd)
                        free.append(number)
        return free

    def _take(self, place: Directory) -> bool:
        """Take the lock of a partition for a moment, also from a process that shares it. False if another keeps it."""
        turns, wait_s = self.turns, self._wait_s
        assert turns is not None  # else no pass covers partitions of others
        taken = turns.take(place, wait_s=wait_s)
        turns.given_up(place)
        self._wait_s = wait_s if taken else 0.0  # a process that keeps one partition may keep them all
        return taken

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Take the turn to lock partitions that no process holds. Yields False if this process may not do so now."""
        held: lock.Lock | None = None
        deadline = monotonic() + _BUSY_S
        with suppress(OSError):  # for example the topic was moved
            # A process that has just changed the policies may have it, which is why this pass runs.
            while self.shared and (held := lock.try_acquire(self.files, self.path)) is None and monotonic() <= deadline:
                time.sleep(_NAP_S)
        try:
            yield held is not None and self._is_current()
        finally:
            if held is not None:
                held.release()

    def _is_current(self) -> bool:
        """True if the path still leads to this topic, with the policies that this process uses."""
        with suppress(LogError, OSError):
            copy_role.check_leader(self.files, self.path)
            return topic_file.read(self.files, self.path) == (self._partitions[0].log.identity.log_id, self.config)
        return False

    @contextmanager
    def _writing(self, partition: PartitionRetention) -> Iterator[SegmentIndex | None]:
        """Become the writer of a partition that no process holds. Yields its segments; None if a process holds it."""
        index = SegmentIndex([])
        with self._turn() as mine:
            try:
                writer = Writer(
                    self.files, partition.log.directory, partition.log.identity, self.config,
                    index=index, clock=self.clock,
                    held=lock.acquire(
                        self.files, partition.log.directory, self.config.permissions, take=self._take, says_who=False
                    ),
                ) if mine else None  # fmt: skip
            except LockedError:
                writer = None
            if writer is None:
                yield None
                return
            try:
                partition.borrow(writer)
                yield index
            finally:
                try:
                    partition.give_back()
                finally:
                    partition.give_back()  # continues if an interrupt has ended the first call

    def _give_back(self) -> None:
        """Release the partitions that an interrupted pass has left locked."""
        for number, each in list(self._partitions.items()):
            with self._logging_once(number):
                each.give_back()

    @contextmanager
    def _logging_once(self, number: int) -> Iterator[None]:
        """Log an error in a partition that a pass can leave unchanged, unless it was also the last one logged."""
        try:
            yield
        except (LogError, OSError) as error:
            if self._logged.get(number) != str(error):
                self._logged[number] = str(error)
                directory = self._partitions[number].log.directory
                logger.warning("%s: retention skips this partition: %s", directory, error)

    # --- plans -----------------------------------------------------------------------------------

    def _plan(self, numbers: Sequence[int], held: ExitStack) -> dict[int, RetentionPlan]:
        """The plans for these partitions. If space is short, for all that this process or no process owns.

        The partitions of this process are then `held` to the end of the pass.
        """
        policy, space = self.config.retention, self._space()
        if space.is_short(policy):
            for each in self._partitions.values():
                if each.writer is not None:
                    each.writer.give_room_back()
            space = self._space()
        if space.is_short(policy):
            numbers = [*self._hold_owned(held), *self._abandoned()]
        plans = due(self._candidates(numbers), policy, space)
        nothing = not any(each.reasons for each in plans.values())
        if space.is_short(policy) and nothing and self._seal_open(numbers):
            plans = due(self._candidates(numbers), policy, space)
        return plans

    def _candidates(self, numbers: Iterable[int]) -> list[Candidate]:
        candidates: list[Candidate] = []
        hold, archived = self._holds(), self._archived()
        for number in numbers:
            partition = self._partitions[number]
            if partition.writer is not None:
                candidates.append(partition.candidate(hold, archived))
                continue
            with self._logging_once(number):
                other = partition.candidate(hold, archived)
                candidates.append(other._replace(sealed=list(other.sealed)))
        return candidates

    def _holds(self) -> Callable[[int], Hold | None]:
        """A function of a partition that returns what the slowest reader holds. It reads commits once, when asked."""
        names, held = self.config.retention.hold_for, cache(self._held_by)

        def hold(partition: int) -> Hold | None:
            holds = [held(name).get(partition, Hold(name, None)) for name in names]
            return min(holds, key=lambda each: -1 if each.offset is None else each.offset, default=None)

        return hold

    def _archived(self) -> Callable[[int, int], ArchiveHold | None]:
        """A function of a partition and its start that returns what the archive holds. It reads it once, when asked."""
        policy, archive = self.config.retention, self.config.retention.archive

        @cache
        def floors() -> ArchiveHolds:
            log_id = self._partitions[0].log.identity.log_id
            before_us = self.clock.moment().wall_us - microseconds(policy.archive_grace)
            return self.archives(self.files, self.path, str(archive), log_id, before_us=before_us)

        def archived(partition: int, start: int) -> ArchiveHold | None:
            return None if archive is None else floors()(partition, start)

        return archived

    def _held_by(self, name: str) -> Mapping[int, Hold]:
        """The holds of a group or a share. If they cannot be read, it holds everything, so that nothing is lost."""
        try:
            return self.holds_of(name)
        except (LogError, OSError) as error:
            logger.warning("%s: retention waits for %s: %s", self.path, name, error)
            return {}

    def _space(self) -> Space:
        """The file system's bytes, if the policy demands free space. Also sets the limit on the size of segments."""
        policy, space = self.config.retention, Space(0, 0)
        if policy.keep_free:
            space = Space(*self.files.free_space(self._partitions[0].log.directory))
        self._segment_limit = segment_limit(policy, space, len(self._partitions))
        return space

    def _limit_segments(self) -> None:
        with suppress(OSError):  # the next pass raises it
            self._space()

    # --- seal and drop ---------------------------------------------------------------------------

    def _seal_open(self, numbers: Iterable[int]) -> bool:
        """Seal the open segments of these partitions, except very small ones. True if it sealed one.

        A segment stays open if the disk has no room for a new segment.
        """
        sealed, failures = False, []
        for number in numbers:
            partition = self._partitions[number]
            if partition.writer is None:
                with self._logging_once(number):
                    sealed |= partition.open_bytes() >= LEAST_SEALED_BYTES and self._seal_unowned(partition, 0)
                continue
            try:
                sealed |= partition.open_bytes() >= LEAST_SEALED_BYTES and partition.writer.roll()
            except LogError as error:
                if error.lost or not isinstance(error, StorageFullError):
                    failures.append(error)
                    continue
                with self._logging_once(number):  # nothing can be dropped of it
                    raise
        if failures:
            raise together(failures)
        return sealed

    def _seal_old(self, numbers: Iterable[int]) -> None:
        """Seal open segments that have reached their age, in partitions that this process does not own."""
        if self.config.segment_age is None:
            return
        age_us = microseconds(self.config.segment_age)
        for number in numbers:
            with self._logging_once(number):
                if self._partitions[number].open_age_us() >= age_us:
                    self._seal_unowned(self._partitions[number], age_us)

    def _seal_unowned(self, partition: PartitionRetention, older_than_us: int) -> bool:
        with self._writing(partition):
            return partition.writer is not None and partition.writer.roll(older_than_us=older_than_us)

    def _drop(self, plans: dict[int, RetentionPlan], *, background: bool = False) -> None:
        failures: list[Exception] = []
        for number, plan in plans.items():
            partition = self._partitions[number]
            try:
                if partition.writer is not None:
                    partition.drop(plan.reasons, background=background)
                elif plan.reasons:
                    self._drop_unowned(number, plan.reasons)
            except (LogError, OSError) as error:  # other partitions' segments are still due
                failures.append(error)
        for number in plans:
            self._partitions[number].write_down()
        if failures:
            raise together(failures)

    def _drop_unowned(self, number: int, reasons: Sequence[str]) -> None:
        partition = self._partitions[number]
        with self._logging_once(number), self._writing(partition) as index:
            end = partition.end_of(reasons)
            if index is not None and index.find(end) == end:  # and nobody has put other files in place meanwhile
                partition.drop(reasons)
                partition.write_down()
