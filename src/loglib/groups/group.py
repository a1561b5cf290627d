"""Group: one member of a consumer group: who is there, what it owns, and committing how far it got.

Invariant: only what is handled (progress.py) is committed: a process that dies between any two
instructions loses nothing, and repeats what it had not committed. A partition is read and committed by
its owner alone (owners.py), from the last commit on.

All members do the same, each on its own: look who is there (members.py), compute who should own what
(assignment.py), give up what they should not, and claim what they should as soon as it is free. This
happens while records are asked for, at most every `_LOOK_S` seconds: a member that is busy with a record
keeps its partitions until it comes back, however long that takes.

Threads: a group belongs to one thread, but for `close`, which may come from any and ends the iteration.
"""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import repeat
from typing import Any, Literal

from ..arguments import Start, check_count, check_timeout, parse_start, partition_number
from ..config import microseconds
from ..errors import ForkedHandleError, LogClosedError, OffsetOutOfRangeError, StaleGenerationError
from ..log import Log
from ..records import Batch, Record
from ..unique import Unique
from .assignment import STRATEGIES, TopicPartition
from .lag import Lag, measure_lag
from .members import Membership, live_members, new_member_name
from .offsets import Commit
from .owners import Ownership, read_owner
from .place import Place
from .progress import Progress
from .run import Run, Way

__all__ = ["CommitPolicy", "Group", "OnChange", "TopicsGroup"]

CommitPolicy = str | float | timedelta  # "after", "manual", or an interval
OnChange = Callable[[list[Any]], object]

# How often members look at each other: a join or a death is noticed within twice this, at some 0.1 % of a CPU.
_LOOK_S = 0.05
# And look at the owners, though nobody has come or gone: one may have acted on what it saw before the others did.
_ARRANGE_S = 1.0
# And while a partition that is due to this member is still another's.
_CLAIM_S = 0.002
# With commit="after": records that are handled are committed at most this much later.
_COMMIT_AFTER_S = 0.1
# Polled at once, unless more are asked for.
_POLLED_RECORDS = 512


class Group(Unique):
    """One member of a consumer group on one topic; made by `Topic.group`, and a context manager."""

    def __init__(
        self,
        place: Place,
        *,
        start: Start = "begin",
        member: str | None = None,
        commit: CommitPolicy = "after",
        strategy: Literal["range", "sticky"] = "range",
        on_assign: OnChange | None = None,
        on_revoke: OnChange | None = None,
        on_out_of_range: Literal["raise", "start"] = "raise",
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {sorted(STRATEGIES)}, not {strategy!r}")
        if on_out_of_range not in ("raise", "start"):
            raise ValueError(f'on_out_of_range must be "raise" or "start", not {on_out_of_range!r}')
        if isinstance(start, int):
            raise ValueError(f"a group cannot start at offset {start} in every partition; seek() after the start")
        parse_start(start, now_us=place.clock())
        self.name = place.name
        self._commit_every = _commit_interval(commit)
        self._place = place
        self._start = start
        self._assign = STRATEGIES[strategy]
        self._on_assign = on_assign
        self._on_revoke = on_revoke
        self._restart = on_out_of_range == "start"
        self._closed: LogClosedError | None = None
        self._why = ""  # it is closed, if a topic of it is
        self._topics: list[object] = []  # which close themselves when nobody refers to them
        self._using = threading.Lock()  # held while files are in use, so that close() from elsewhere knows
        self._user = 0  # the thread that holds it
        self._progress = Progress(place)
        self._live: list[str] = []
        self._revoking = False  # and the caller is told
        self._waiting = False  # for a partition that another member has still to give up
        self._look_at = 0.0
        self._unsettled = False  # somebody has not yet what is due
        self._arrange_at = 0.0
        self._commit_at = 0.0
        place.make()
        self._offsets = place.offsets()
        self.member = new_member_name() if member is None else member
        try:
            self._membership = Membership(place.files, place.members, self.member, place.topics, place.permissions)
        except BaseException:
            self._offsets.close()
            raise
        self._ownership = Ownership(place.files, place.owners, self.member, place.permissions)
        self._left = False
        _live_groups.add(self)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_left", True):
            # Its locks go now. What it has handled is not committed: the collector may come by in anything.
            self._left = True
            self._ownership.abandon()
            self._membership.abandon()
            self._offsets.close()
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} member={self.member!r}{' closed' if self._closed else ''}>"

    # --- reading ---------------------------------------------------------------------------------

    def follow(self, timeout: float | None = None) -> Iterator[Any]:
        """The group's records, as they come, for ever or until `timeout` seconds bring none.

        A record is handled when the loop asks for the next one, and then committed as the group's
        `commit=` says. One whose loop body raised, or left the loop, is not: this call or another
        member's hands it out again. Raises `StaleGenerationError` if the member was evicted, and
        `OffsetOutOfRangeError` if the group's place in the log is gone (see `on_out_of_range`). Closing the
        group ends the loop; closing its topic raises `LogClosedError` from one with a timeout.
        """
        progress = self._progress
        while (run := self._next(timeout, "one by one")) is not None:
            if self._closed is not None:  # just now, by another thread
                run.cut()
            came_back = True
            try:
                while (few := run.next_few()) is not None:
                    came_back = False
                    yield from self._shown(run.partition, few)
                    came_back = True
            finally:
                progress.leave(run, came_back=came_back)
            del run, few  # or the next records are made in memory that no cache holds

    def poll(self, *, max_records: int = _POLLED_RECORDS, timeout: float | None = 0.0) -> list[Any]:
        """Up to `max_records` records of one partition; an empty list if `timeout` seconds bring none.

        They count as handled with the next call of `poll`, `follow` or `batches`, or when committed.
        """
        check_count("max_records", max_records)
        self._check_open()
        run = self._next(timeout, "polled", max_records)
        if run is None:
            return []
        shown = list(self._shown(run.partition, iter(run.batch.records())))
        run.all_out = True
        return shown

    def batches(self, timeout: float | None = None) -> Iterator[Any]:
        """The same as `follow`, as whole columns."""
        progress = self._progress
        while (run := self._next(timeout, "batch")) is not None:
            came_back = False
            try:
                shown = self._shown_batch(run.partition, run.batch)
                run.all_out = True
                yield shown
                came_back = True
            finally:
                progress.leave(run, came_back=came_back)

    def _shown(self, partition: TopicPartition, records: Iterator[Record]) -> Iterator[Any]:
        """What the caller is given of some records: with several topics, more than the records."""
        del partition
        return records

    def _shown_batch(self, partition: TopicPartition, batch: Batch) -> Any:
        del partition
        return batch

    def _next(self, timeout: float | None, way: Way, most: int | None = None) -> Run | None:
        """The next records, as soon as there are any; None after `timeout` seconds of nothing."""
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        found = None
        try:
            with self._use():
                self._progress.settle()
                found = self._find(deadline, way, most)
        except LogClosedError:
            if self._closed is None:
                raise
            # The topic was closed, and its groups with it, while this thread was reading.
        if isinstance(self._closed, ForkedHandleError):
            raise self._closed
        if self._why and timeout is not None:  # or it would look as if no more records had come
            raise LogClosedError(self._why)
        return found if self._closed is None else None

    def _find(self, deadline: float | None, way: Way, most: int | None) -> Run | None:
        while self._closed is None:
            now = time.monotonic()
            if now >= self._look_at:
                self._look(now)
            self._commit_if_due(now)
            try:
                run = self._progress.take(way, most)
            except OffsetOutOfRangeError:  # retention has overtaken this member
                overtaken = self._progress.overtaken() if self._restart else []
                if not overtaken:
                    raise
                self._start_again(overtaken)
                continue
            if run is not None:
                return run
            if deadline is not None and now >= deadline:
                return None
            until = [self._look_at]
            if deadline is not None:
                until.append(deadline)
            if self._progress.handled and self._commit_every is not None:
                until.append(self._commit_at)
            self._progress.wait(max(0.0, min(until) - now))
        return None

    def _start_again(self, partitions: list[TopicPartition]) -> None:
        """Go to where a group without a commit begins."""
        starts = {each: self._first(self._place.logs[each]) for each in partitions}
        self._commit(starts)
        self._progress.add(starts)

    # --- places -----------------------------------------------------------------------------------

    def tell(self) -> dict[Any, int]:
        """The offset of the next record to be handed out, by partition owned."""
        return self._by_key(self._progress.next_offsets())

    def seek(self, start: Start | Mapping[Any, Start]) -> None:
        """Go to a start in all partitions owned, or in those that a mapping names; committed like any progress."""
        with self._use():
            self._check_open()
            if not self._look_at:  # nobody has asked for records, and so nothing is owned yet
                self._look(time.monotonic())
            named = {self._partition(key): each for key, each in start.items()} if isinstance(start, Mapping) else None
            for partition in named or ():
                self._require_owner(partition)
            offsets = self._place.resolve(start if named is None else named, self._ownership.owned())
            for partition, offset in offsets.items():
                self._progress.seek(partition, offset)

    def pause(self, *partitions: Any) -> None:
        """Hand out nothing more of these partitions, which stay this member's, until `resume`."""
        with self._use():
            for partition in self._owned_of(partitions):
                self._progress.pause(partition)

    def resume(self, *partitions: Any) -> None:
        """Go on with paused partitions where they were left."""
        with self._use():
            for partition in self._owned_of(partitions):
                self._progress.resume(partition)

    def _owned_of(self, keys: Iterable[Any]) -> list[TopicPartition]:
        self._check_open()
        partitions = [self._partition(key) for key in keys]
        for partition in partitions:
            self._require_owner(partition)
        return partitions

    # --- committing ----------------------------------------------------------------------------------

    def commit(self, what: Any = None, *, meta: str = "") -> None:
        """Say how far the group has got; durable when it returns (with durability "disk").

        `what` is a record, which is then handled, and so is all before it; a mapping of partitions to
        the offsets to read next; or None: everything handed out so far, but for a record whose loop
        was left. `meta` is kept with it, for whoever asks `committed()`. Raises `StaleGenerationError`
        if a partition is no longer this member's, and `OffsetOutOfRangeError` or `InvalidOffsetError`
        for what is no place in the log.
        """
        with self._use():
            self._check_open()
            offsets = self._asked(what)
            self._commit(offsets, meta)
            self._progress.committed_by_hand(offsets)

    def committed(self) -> dict[Any, Commit]:
        """The last commit for each partition that has any, whoever made it."""
        commits = self._commits()
        return self._by_key({each: commit for each, commit in commits.items() if each in self._place.logs})

    def lag(self, *, messages: bool = False) -> dict[Any, Lag]:
        """How far the group is behind, by partition, whoever owns it: from the last commit to the flushed end.

        `messages=True` counts records as well, by reading the header of every batch between.
        """
        commits = self._commits()
        found: dict[TopicPartition, Lag] = {}
        for partition, log in self._place.logs.items():
            commit = commits.get(partition)
            offset = self._first(log) if commit is None else commit.offset
            found[partition] = measure_lag(log, offset, now_us=self._place.clock(), messages=messages)
        return self._by_key(found)

    @property
    def assignment(self) -> list[Any]:
        """The partitions that this member owns, sorted."""
        return [self._key(each) for each in self._ownership.owned()]

    @property
    def members(self) -> list[str]:
        """The names of all members, this one's among them."""
        return live_members(self._place.files, self._place.members, known=self.member)

    def _asked(self, what: Any) -> dict[TopicPartition, int]:
        if what is None:
            return self._progress.so_far()
        if isinstance(what, Mapping):
            return self._place.resolve({self._partition(key): offset for key, offset in what.items()})
        record, partition = self._record(what)
        return {partition: record.next_offset}

    def _record(self, what: Any) -> tuple[Record, TopicPartition]:
        if not isinstance(what, Record):
            raise TypeError(f"commit() takes a record or a mapping of partitions to offsets, not {what!r}")
        return what, self._partition(what.partition)

    def _commits(self) -> dict[TopicPartition, Commit]:
        with self._use():
            self._check_open()
            return self._offsets.commits()

    def _commit_if_due(self, now: float) -> None:
        if self._commit_every is not None and self._progress.handled and now >= self._commit_at:
            self._commit(dict(self._progress.handled))
            self._commit_at = time.monotonic() + self._commit_every

    def _commit(self, offsets: Mapping[TopicPartition, int], meta: str = "") -> None:
        if not offsets:
            return
        generations = {partition: self._require_owner(partition) for partition in offsets}
        commits = {each: Commit(offset, meta, generations[each]) for each, offset in offsets.items()}

        def fence() -> None:
            for partition in offsets:
                self._require_owner(partition)

        self._offsets.commit(commits, member=self.member, fence=fence)
        self._progress.committed(offsets)

    def _require_owner(self, partition: TopicPartition) -> int:
        generation = self._ownership.generation(partition)
        if generation is None:
            raise StaleGenerationError(self.name, self.member, str(partition))
        return generation

    # --- members and partitions ----------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """See who is in the group, and give up and claim what follows from it."""
        place = self._place
        if not self._membership.is_valid():
            self._lose(self._ownership.owned())
            raise StaleGenerationError(self.name, self.member)
        lost = [each for each in self._ownership.owned() if self._ownership.generation(each) is None]
        if lost:
            self._lose(lost)
            raise StaleGenerationError(self.name, self.member, str(lost[0]))
        live = live_members(place.files, place.members, known=self.member)
        if live != self._live or self._unsettled or now >= self._arrange_at:
            self._arrange(live)
            self._arrange_at = now + _ARRANGE_S
        self._look_at = now + (_CLAIM_S if self._waiting else _LOOK_S)

    def _arrange(self, live: list[str]) -> None:
        place, owned = self._place, self._ownership.owned()
        owners = {each: read_owner(place.files, place.owners, each).member or "" for each in place.logs}
        assignment = self._assign(place.logs, live, owners)
        due = assignment[self.member]
        self._give_up([each for each in owned if each not in due])
        self._claim([each for each in due if each not in owned])
        self._live = live
        self._waiting = self._ownership.owned() != due
        # Others may have computed with other owners than these: it is over when all have what is due to them.
        self._unsettled = owners != {each: name for name, share in assignment.items() for each in share}

    def _give_up(self, partitions: list[TopicPartition]) -> None:
        if not partitions:
            return
        try:
            if self._on_revoke is not None:
                self._revoking = True
                self._on_revoke([self._key(each) for each in partitions])
            if self._commit_every is not None:
                handled = self._progress.handled
                self._commit({each: handled[each] for each in partitions if each in handled})
        finally:
            self._revoking = False
            self._progress.drop(partitions)
            self._ownership.release(partitions)

    def _claim(self, partitions: list[TopicPartition]) -> None:
        if not partitions:
            return
        commits = self._offsets.commits()
        try:
            claimed = [
                each for each in partitions
                if self._ownership.claim(each, at_least=commits.get(each, Commit(0)).generation)
            ]  # fmt: skip
            if not claimed:
                return
            commits = self._offsets.commits()  # what the owner before has committed last
            starts = {each: self._starting(each, commits.get(each)) for each in claimed}
            # A start that is no commit yet becomes one where it could move: whoever comes next must not begin later.
            self._commit({each: offset for each, offset in starts.items() if self._moves(offset, commits.get(each))})
            self._progress.add(starts)
        except BaseException:
            self._progress.drop(partitions)
            self._ownership.release(each for each in partitions if each in self._ownership.owned())
            raise
        if self._on_assign is not None:
            self._on_assign([self._key(each) for each in claimed])

    def _starting(self, partition: TopicPartition, commit: Commit | None) -> int:
        log = self._place.logs[partition]
        if commit is None:
            return self._first(log)
        try:
            return log.resolve(commit.offset)
        except OffsetOutOfRangeError:
            if not self._restart:
                raise
            return self._first(log)

    def _moves(self, offset: int, commit: Commit | None) -> bool:
        """Whether a start is another than the commit, or, if there is none, one that depends on the time."""
        return self._start != "begin" if commit is None else commit.offset != offset

    def _first(self, log: Log) -> int:
        """Where a group without a commit begins."""
        return log.resolve(parse_start(self._start, now_us=self._place.clock()))

    def _lose(self, lost: list[TopicPartition]) -> None:
        """After an eviction: others may read on already."""
        self._unsettled = True
        self._progress.drop(lost)
        self._ownership.release(lost)
        if lost and self._on_revoke is not None:
            self._on_revoke([self._key(each) for each in lost])

    # --- names ---------------------------------------------------------------------------------------

    def _key(self, partition: TopicPartition) -> Any:
        """What callers call a partition: its number, where there is one topic."""
        return partition.partition

    def _partition(self, key: Any) -> TopicPartition:
        partition = TopicPartition(self._place.topics[0], partition_number(key))
        if partition not in self._place.logs:
            raise ValueError(f"group {self.name} has no partition {key!r}")
        return partition

    def _by_key(self, facts: Mapping[TopicPartition, Any]) -> dict[Any, Any]:
        return {self._key(each): facts[each] for each in sorted(facts)}

    # --- end -----------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed is not None

    def keep(self, topic: object) -> None:
        """Refer to the topic, which closes itself when nobody does."""
        self._topics.append(topic)

    def end(self, why: str) -> None:
        """Close, because a topic is closed: a loop that would have ended after its timeout tells so."""
        if self._closed is None:
            self._why = why
        self.close()

    def close(self) -> None:
        """Commit what is handled, give the partitions up and leave the group; ends an iteration in any thread."""
        self._closed = self._closed or LogClosedError(f"group {self.name} is closed; join it again")
        self._progress.wake()
        self._finish()

    @contextmanager
    def _use(self) -> Iterator[None]:
        """Use the files; who closes the group meanwhile, in another thread or a signal handler, leaves it to us."""
        if self._user == threading.get_ident():  # called from on_assign or on_revoke
            yield
            return
        try:
            with self._using:
                self._user = threading.get_ident()
                try:
                    yield
                finally:
                    self._user = 0
        finally:
            if self._closed is not None:
                self._finish()

    def _finish(self) -> None:
        """Leave the group, unless the files are in use: whoever uses them does it then."""
        if self._using.acquire(blocking=False):
            try:
                self._user = threading.get_ident()
                self._release()
            finally:
                self._user = 0
                self._using.release()

    def _release(self) -> None:
        if self._left:
            return
        self._progress.put_back()
        try:
            if self._membership.is_valid():
                self._give_up(self._ownership.owned())
        finally:
            self._ownership.abandon()
            with suppress(FileNotFoundError):  # the group's directory may be gone
                self._membership.leave()
            self._offsets.close()
            self._progress.close()
            self._left = True
            _live_groups.discard(self)

    def abandon_in_child(self, parent_pid: int) -> None:
        """After a fork: the membership is the parent's, and its locks must not live on in the child."""
        self._using = threading.Lock()
        self._user = 0
        self._closed = ForkedHandleError(self._place.path, parent_pid)
        self._left = True
        if self._progress.run is not None:  # what is left of it is the parent's
            self._progress.run.cut()
            self._progress.run = None
        self._ownership.abandon()
        self._membership.abandon()
        self._offsets.close()

    def _check_open(self) -> None:
        if self._closed is not None and not self._revoking:  # whoever is told of a close may still commit
            raise self._closed


class TopicsGroup(Group):
    """A member of a group on several topics: records come as (topic, record), partitions are `TopicPartition`s."""

    def _shown(self, partition: TopicPartition, records: Iterator[Record]) -> Iterator[Any]:
        return zip(repeat(partition.topic), records)

    def _shown_batch(self, partition: TopicPartition, batch: Batch) -> Any:
        return partition.topic, batch

    def _record(self, what: Any) -> tuple[Record, TopicPartition]:
        match what:
            case (str() as topic, Record() as record):
                return record, self._partition((topic, record.partition))
        raise TypeError(f"commit() takes (topic, record) or a mapping of (topic, partition) to offsets, not {what!r}")

    def _key(self, partition: TopicPartition) -> Any:
        return partition

    def _partition(self, key: Any) -> TopicPartition:
        match key:
            case (str() as topic, int() as number) if TopicPartition(topic, number) in self._place.logs:
                return TopicPartition(topic, number)
        raise ValueError(f"group {self.name} has no partition {key!r}; they are (topic, partition)")


def _commit_interval(policy: CommitPolicy) -> float | None:
    """Seconds between commits; None for those by hand alone."""
    if policy == "manual":
        return None
    if policy == "after":
        return _COMMIT_AFTER_S
    seconds: Any = policy.total_seconds() if isinstance(policy, timedelta) else policy
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 1e-6 <= seconds < math.inf:
        raise ValueError(f'commit must be "after", "manual" or an interval above 0, not {policy!r}')
    return microseconds(seconds) / 1_000_000


_live_groups: weakref.WeakSet[Group] = weakref.WeakSet()
_pid = os.getpid()


def _abandon_groups() -> None:
    global _pid
    parent_pid, _pid = _pid, os.getpid()
    for group in list(_live_groups):
        group.abandon_in_child(parent_pid)
    _live_groups.clear()


os.register_at_fork(after_in_child=_abandon_groups)
