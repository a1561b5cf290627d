"""Group: one member of a consumer group, as its users know it: it yields records and commits.

Invariant: only handled records (delivery.py) are committed, and only by the owner of their partition (membership.py).
A process that dies between any two instructions loses no record, and its uncommitted records are read again.

A member looks at the others, and so claims and releases partitions, while it asks for records. A member that is busy
with a record keeps its partitions until it asks again, however long that takes.

Threads: a group belongs to one thread. `close` may be called from any thread, and ends the iteration.
A call in the middle of another call (from a signal handler) is refused, except `close`. Only `on_assign`
and `on_revoke` may call the group, and they may not ask for records.
"""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import repeat
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar

from ..config.arguments import Start, check_count, partition_number
from ..config.quantities import Duration, microseconds, timeout_seconds
from ..errors import ForkedHandleError, LogClosedError, LogError, OffsetOutOfRangeError
from ..format.batch import Batch
from ..format.display import sized
from ..format.record import Record
from ..log.lag import Lag
from ..system.clock import monotonic
from ..system.files import with_a_free_descriptor
from ..system.notify import Observer
from ..system.process import in_child
from .assignment import STRATEGIES, TopicPartition
from .commit_log import Commit, Entries, commits_of
from .delivery import Delivery, Run, Way
from .directory import GroupDirectory
from .joined import Joined
from .members import new_member_name
from .membership import Listener, Membership
from .offsets import Offsets
from .start_position import StartPosition

CommitPolicy = str | float | timedelta  # "after", "manual", or an interval
OnChange = Callable[[list[Any]], object]

# With commit="after": how often handled records are committed, while the member asks for records or waits for them.
_COMMIT_AFTER_S = 0.1
# The most records of one poll, by default.
POLLED_RECORDS = 512

_in_child = in_child()

Handed = TypeVar("Handed")  # one record as the caller gets it
HandedBatch = TypeVar("HandedBatch")
Key = TypeVar("Key")  # the caller's name for a partition
Value = TypeVar("Value")


class GroupOptions(TypedDict, total=False):
    """The options of a member, which `Topic.group` explains. `AnyGroup` has their defaults."""

    start: Start
    member: str | None
    commit: CommitPolicy
    strategy: Literal["range", "sticky"]
    on_assign: OnChange | None
    on_revoke: OnChange | None
    on_out_of_range: Literal["raise", "start"]


OPTIONS = GroupOptions.__annotations__.keys()


class PreparedCommit(NamedTuple):
    """A commit that a transaction makes, together with records. Preparing it writes nothing."""

    directory: GroupDirectory
    entries: Entries
    offsets: Offsets  # the member's
    check: Callable[[], None]  # `StaleGenerationError` if the member no longer owns the partitions; before the commit
    done: Callable[[], None]  # to be called when the commit is made


class AnyGroup(Joined, Generic[Handed, HandedBatch, Key]):
    """One member of a consumer group, on one topic or on several."""

    _kind = "group"

    def __init__(
        self,
        directory: GroupDirectory,
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
        self.name = directory.name
        self.member = new_member_name() if member is None else member
        self._commit_every = _commit_interval(commit)
        self._directory = directory
        start_position = StartPosition(directory, start, self.member, restart=on_out_of_range == "start")
        self._closed: LogClosedError | None = None
        self._using = threading.RLock()  # held while files are in use; close() from another thread sees it
        self._working = threading.Lock()  # held during a call; a call in the middle of it sees it
        self._commit_at = 0.0
        directory.make()
        with ExitStack() as opened:
            self._observer = with_a_free_descriptor(directory.path, lambda: Observer(use_inotify=directory.files.real))
            opened.callback(self._observer.close)
            self._delivery = Delivery(directory, self._observer)
            self._membership = Membership(
                directory, self.member, strategy, start_position, self._delivery, self._observer,
                commits_itself=self._commit_every is not None,
                on_assign=self._with_keys(on_assign), on_revoke=self._with_keys(on_revoke),
            )  # fmt: skip
            opened.pop_all()
        self._left = False
        _in_child.add(self._abandon_in_child)
        self._topics = [track(self._end) for track in directory.track]  # a topic closes itself if nothing refers to it

    def _abandon(self) -> None:
        self._membership.abandon()

    def _holding(self) -> tuple[str, object]:
        return "owning", self.assignment

    def _rows(self) -> Iterator[Sequence[object]]:
        if self._closed is None:
            owned, committed = self.assignment, self.committed()
            yield "partition", "owner", "committed", "by", "lag"
            for each, behind in self.lag().items():
                commit = committed.get(each)
                offset, by = ("nothing", "") if commit is None else (commit.offset, commit.member)
                yield each, "this member" if each in owned else "", offset, by, sized(behind.bytes)

    # --- reading ---------------------------------------------------------------------------------

    def follow(self, timeout: Duration | None = None) -> Iterator[Handed]:
        """Yield the group's records as they come, for ever or until `timeout` seconds pass without a record.

        A record is handled when the loop asks for the next one. It is then committed according to the
        group's `commit=`. If the loop body raises or leaves the loop, its record is not handled: a later
        call of this member or of another one yields it again.

        Raises `StaleGenerationError` if the member was evicted, and `OffsetOutOfRangeError` if retention has
        removed the group's next record (see `on_out_of_range`). Closing the group ends the loop. If the
        topic is closed, a loop with a timeout raises `LogClosedError`.
        """
        delivery = self._delivery
        while (run := self._next(timeout, "one by one")) is not None:
            if self._closed is not None:  # another thread has just closed it
                run.cut()
            came_back = True
            try:
                while (few := run.next_few()) is not None:
                    came_back = False
                    yield from self._shown(run.partition, few)
                    came_back = True
            finally:
                delivery.leave(run, came_back=came_back)
            del run, few  # so that the next records reuse memory that is in the processor's cache

    def poll(self, *, max_records: int = POLLED_RECORDS, timeout: Duration | None = 0.0) -> list[Handed]:
        """Return up to `max_records` records of one partition; an empty list if none comes in `timeout` seconds.

        The records count as handled at the next call of `poll`, `follow` or `batches`, or when committed.
        """
        check_count("max_records", max_records)
        self._check_open()
        run = self._next(timeout, "polled", max_records)
        return [] if run is None else self._polled(run)

    def _polled(self, run: Run) -> list[Handed]:
        shown = list(self._shown(run.partition, iter(run.batch.records())))
        run.all_out = True
        return shown

    def batches(self, timeout: Duration | None = None) -> Iterator[HandedBatch]:
        """Like `follow`, but yields batches: whole columns instead of single records."""
        delivery = self._delivery
        while (run := self._next(timeout, "batch")) is not None:
            came_back = False
            try:
                shown = self._shown_batch(run.partition, run.batch)
                run.all_out = True
                yield shown
                came_back = True
            finally:
                delivery.leave(run, came_back=came_back)

    @abstractmethod
    def _shown(self, partition: TopicPartition, records: Iterator[Record]) -> Iterator[Handed]:
        """Records as the caller gets them: with several topics, each comes with its topic."""

    @abstractmethod
    def _shown_batch(self, partition: TopicPartition, batch: Batch) -> HandedBatch:
        """A batch as the caller gets it."""

    def _next(
        self, timeout: Duration | None, way: Way, most: int | None = None, *, endless: bool = False
    ) -> Run | None:
        """Wait for the next records and return them; None after `timeout` seconds without a record.

        `endless`: this call is one step of a wait without a timeout.
        """
        timeout = timeout_seconds(timeout)
        deadline = None if timeout is None else monotonic() + timeout
        run = None
        try:
            with self._use(asking=True):
                self._delivery.settle()
                run = self._wait_for_run(deadline, way, most)
        except LogClosedError:
            if self._closed is None:
                raise
            # The topic was closed, and its groups with it, while this thread was reading.
        if isinstance(self._closed, ForkedHandleError):
            raise self._closed
        if self._why and timeout is not None and not endless:  # None would mean that no record came
            raise LogClosedError(self._why)
        return run if self._closed is None else None

    def _wait_for_run(self, deadline: float | None, way: Way, most: int | None) -> Run | None:
        membership, delivery = self._membership, self._delivery
        has_read_reports = False  # since the last wait
        while self._closed is None:
            now = monotonic()
            has_read_reports |= membership.act(now)
            if self._commit_every is not None and delivery.handled and now >= self._commit_at:
                membership.commit(dict(delivery.handled))
                self._commit_at = monotonic() + self._commit_every
            try:
                run = delivery.take(way, most)
            except OffsetOutOfRangeError:  # retention has overtaken this member
                overtaken = delivery.overtaken() if membership.start.restart else []
                if not overtaken:
                    raise
                membership.start_again(overtaken)
                continue
            if run is not None:
                return run
            if has_read_reports:
                if deadline is not None and now >= deadline:
                    return None
                self._observer.wait(self._until(deadline))
                has_read_reports = False
            membership.read_at = 0.0
        return None

    def _until(self, deadline: float | None) -> float:
        """Seconds until something is due: a look at the other members, a commit, or the deadline."""
        until = [self._membership.look_at]
        if deadline is not None:
            until.append(deadline)
        if self._delivery.handled and self._commit_every is not None:
            until.append(self._commit_at)
        return max(0.0, min(until) - monotonic())

    # --- places -----------------------------------------------------------------------------------

    def tell(self) -> dict[Key, int]:
        """The offset of the next record, for each partition that this member owns."""
        return self._by_key(self._delivery.next_offsets())

    def seek(self, start: Start | Mapping[Any, Start]) -> None:
        """Go to a start in all owned partitions, or in those of a mapping. It is committed like other progress."""
        membership = self._membership
        with self._use():
            self._check_open()
            if not membership.looked:  # before the first request for records the member owns nothing
                membership.look(monotonic())
                membership.announce()
            named = {self._partition(key): each for key, each in start.items()} if isinstance(start, Mapping) else None
            membership.check_owns(named or ())
            offsets = self._directory.resolve(start if named is None else named, membership.ownership.owned())
            for partition, offset in offsets.items():
                self._delivery.seek(partition, offset)

    def pause(self, *partitions: Any) -> None:
        """Stop reading these partitions until `resume`. This member still owns them."""
        with self._use():
            for partition in self._owned_of(partitions):
                self._delivery.pause(partition)

    def resume(self, *partitions: Any) -> None:
        """Continue paused partitions at the next record."""
        with self._use():
            for partition in self._owned_of(partitions):
                self._delivery.resume(partition)

    def _owned_of(self, keys: Iterable[Any]) -> list[TopicPartition]:
        self._check_open()
        partitions = [self._partition(key) for key in keys]
        self._membership.check_owns(partitions)
        return partitions

    # --- committing ----------------------------------------------------------------------------------

    def commit(self, what: Handed | Mapping[Any, int] | None = None, *, meta: str = "") -> None:
        """Commit the group's progress; durable when it returns (with durability "disk").

        `what` is one of:

        - a record: this record and all before it in its partition are handled;
        - a mapping of partitions to the offsets to read next;
        - None: all records yielded so far, except a record whose loop was left.

        `meta` is text that is kept with the commit; `committed()` returns it.

        Raises `StaleGenerationError` if this member no longer owns a partition, and then in each call until the
        member asks for records. Raises `OffsetOutOfRangeError` or `InvalidOffsetError` for an offset where no
        record of the log begins, and `LogError` in a signal handler that interrupted another call.
        """
        if not isinstance(meta, str):
            raise TypeError(f"meta must be text, not {meta!r}")
        with self._use():
            self._check_open()
            self._membership.check_not_lost()
            offsets = self._asked(what)
            if not offsets and not self._membership.file.is_valid():
                raise self._membership.stale()
            self._membership.commit(offsets, meta)
            self._delivery.committed_by_hand(offsets)

    def committed(self) -> dict[Key, Commit]:
        """The last commit of each partition that has one, by any member."""
        commits = commits_of(self._entries())
        return self._by_key({each: commit for each, commit in commits.items() if each in self._directory.logs})

    def lag(self, *, count_records: bool = False) -> dict[Key, Lag]:
        """The group's lag for each partition, owned or not: from the last commit to the flushed end.

        `count_records=True` also counts the records. This reads the header of each batch in that range.
        """
        entries, start = self._entries(), self._membership.start
        lag = self._directory.lag(entries, first=lambda each: start.first(each, entries), count_records=count_records)
        return self._by_key(lag)

    @property
    def assignment(self) -> list[Key]:
        """The partitions that this member owns, sorted."""
        return [self._key(each) for each in self._membership.ownership.owned()]

    @property
    def topics(self) -> list[str]:
        """The names of the group's topics, sorted."""
        return self._directory.topics

    @property
    def handed_out(self) -> dict[Key, int]:
        """The number of records that this member has handed out, by partition, with repeated ones."""
        return self._by_key(self._delivery.handed_out())

    @property
    def members(self) -> list[str]:
        """The names of all members, including this one."""
        return sorted(self._membership.file.live())

    def _asked(self, what: Any) -> dict[TopicPartition, int]:
        if what is None:
            return self._delivery.so_far()
        if isinstance(what, Mapping):
            return self._directory.resolve({self._partition(key): offset for key, offset in what.items()})
        record, partition = self._record(what)
        return {partition: record.next_offset}

    @abstractmethod
    def _record(self, what: Any) -> tuple[Record, TopicPartition]:
        """The record in what the caller passed to `commit`, and its partition."""

    def _transact(self, what: Any, meta: str) -> PreparedCommit:
        """Prepare what `commit` with these arguments would commit, for a transaction."""
        membership = self._membership
        with self._use():
            self._check_open()
            if self._commit_every is not None:
                raise ValueError(f"group {self.name} commits by itself; join it with commit='manual'")
            membership.check_not_lost()
            offsets = self._asked(what)
            entries = membership.offsets.numbered(membership.entries_of(offsets, meta))

            def done() -> None:
                self._delivery.committed(offsets)
                self._delivery.committed_by_hand(offsets)

            check = partial(membership.check_owns, entries)
            return PreparedCommit(self._directory, entries, membership.offsets, check, done)

    def _entries(self) -> Entries:
        with self._use():
            self._check_open()
            self._membership.take_in_added()
            return self._membership.offsets.entries()

    # --- names ---------------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def _key(partition: TopicPartition) -> Key:
        """The caller's name for a partition: its number, if the group has one topic."""

    @abstractmethod
    def _partition(self, key: Any) -> TopicPartition:
        """The partition of a caller's name; `ValueError` if the group does not have it."""

    def _with_keys(self, listener: OnChange | None) -> Listener | None:
        """The listener for partitions. It does not refer to this group, which would then not be freed."""
        key = self._key
        return None if listener is None else lambda partitions: listener([key(each) for each in partitions])

    def _by_key(self, values: Mapping[TopicPartition, Value]) -> dict[Key, Value]:
        return {self._key(each): values[each] for each in sorted(values)}

    # --- end -----------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True if this member has left the group."""
        return self._closed is not None

    def close(self) -> None:
        """Commit handled records, release the partitions and leave the group. Ends an iteration in any thread."""
        self._closed = self._closed or LogClosedError(f"group {self.name} is closed; join it again")
        self._observer.wake()
        self._finish()

    @contextmanager
    def _use(self, *, asking: bool = False) -> Iterator[None]:
        """Use the files. If another thread or a signal handler closes the group, this call leaves the group at its end.

        `LogError` in the middle of another call in this thread. A listener may call, except for records.
        """
        membership = self._membership
        try:
            with self._using:
                is_nested = self._working.locked()
                if is_nested and (asking or not membership.in_listener):
                    raise LogError(
                        f"group {self.name} is in the middle of another call, which must return first: "
                        "a signal handler may only call close(), and a listener may not ask for records"
                    )
                with nullcontext() if is_nested else self._working:
                    membership.in_listener = False
                    try:
                        yield
                    finally:
                        membership.in_listener = is_nested
        finally:
            if self._closed is not None:
                self._finish()

    def _finish(self) -> None:
        """Leave the group. If a call is using the files, that call does it at its end."""
        if self._using.acquire(blocking=False):
            try:
                if not self._working.locked():
                    with self._working:
                        self._release()
            finally:
                self._using.release()

    def _release(self) -> None:
        if self._left:
            return
        self._delivery.settle(asks=False)
        try:
            self._membership.revoke_all()
        finally:
            self._membership.leave()
            try:
                self._membership.offsets.close()
            finally:
                self._delivery.close()
                self._observer.close()
                self._left = True
                _in_child.discard(self._abandon_in_child)

    def _abandon_in_child(self, parent_pid: int) -> None:
        """After a fork: the membership belongs to the parent, and the child must not keep its locks."""
        self._using, self._working = threading.RLock(), threading.Lock()
        self._closed = ForkedHandleError(self._directory.path, parent_pid)
        self._left = True
        if self._delivery.run is not None:  # its remaining records belong to the parent
            self._delivery.run.cut()
            self._delivery.run = None
        self._membership.abandon()

    def _check_open(self) -> None:
        if self._closed is not None and not self._membership.revoking:  # on_revoke may still commit during a close
            raise self._closed


class Group(AnyGroup[Record, Batch, int]):
    """One member of a consumer group on one topic. `Topic.group` makes it; it is a context manager."""

    def _shown(self, _: TopicPartition, records: Iterator[Record]) -> Iterator[Record]:
        return records

    def _shown_batch(self, _: TopicPartition, batch: Batch) -> Batch:
        return batch

    def _record(self, what: Any) -> tuple[Record, TopicPartition]:
        if not isinstance(what, Record):
            raise TypeError(f"commit() takes a record or a mapping of partitions to offsets, not {what!r}")
        return what, self._partition(what.partition)

    @staticmethod
    def _key(partition: TopicPartition) -> int:
        return partition.partition

    def _partition(self, key: Any) -> TopicPartition:
        partition = TopicPartition(self._directory.topics[0], partition_number(key))
        if partition not in self._directory.logs:
            raise ValueError(f"group {self.name} has no partition {key!r}")
        return partition


class TopicsGroup(AnyGroup[tuple[str, Record], tuple[str, Batch], TopicPartition]):
    """A member of a group on several topics: it yields (topic, record), and its partitions are `TopicPartition`s."""

    def _shown(self, partition: TopicPartition, records: Iterator[Record]) -> Iterator[tuple[str, Record]]:
        return zip(repeat(partition.topic), records)

    def _shown_batch(self, partition: TopicPartition, batch: Batch) -> tuple[str, Batch]:
        return partition.topic, batch

    def _record(self, what: Any) -> tuple[Record, TopicPartition]:
        match what:
            case (str() as topic, Record() as record):
                return record, self._partition((topic, record.partition))
        raise TypeError(f"commit() takes (topic, record) or a mapping of (topic, partition) to offsets, not {what!r}")

    @staticmethod
    def _key(partition: TopicPartition) -> TopicPartition:
        return partition

    def _partition(self, key: Any) -> TopicPartition:
        match key:
            case (str() as topic, int() as number) if TopicPartition(topic, number) in self._directory.logs:
                return TopicPartition(topic, number)
        raise ValueError(f"group {self.name} has no partition {key!r}; they are (topic, partition)")


def _commit_interval(policy: CommitPolicy) -> float | None:
    """Seconds between automatic commits; None if the caller commits."""
    if policy == "manual":
        return None
    if policy == "after":
        return _COMMIT_AFTER_S
    seconds: Any = policy.total_seconds() if isinstance(policy, timedelta) else policy
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 1e-6 <= seconds < math.inf:
        raise ValueError(f'commit must be "after", "manual" or an interval above 0, not {policy!r}')
    return microseconds(seconds) / 1_000_000
