"""Group: one member of a consumer group. It finds the other members, owns partitions, reads and commits.

Invariant: only handled records (delivery.py) are committed. A process that dies between any two
instructions loses no record, and its uncommitted records are read again. Only the owner of a partition
(owners.py) reads it and commits for it. The owner starts at the last commit.

Every member does the same on its own: it lists the members (members.py), computes the assignment
(assignment.py), releases the partitions that it should not own, and claims the ones that it should own
as soon as they are free. A member does this while it asks for records. A member that is busy with a
record keeps its partitions until it asks again, however long that takes.

A member takes in the partitions that are added to its topics, as soon as the system reports that a topic's
description was replaced, and at each look.

A member looks when the system reports that the file of a member or an owner was created, removed or
closed. The system closes the files of a process that dies. A lock is released a moment after its file is
closed, so a member looks several times after a report. Without a report it looks rarely.

Threads: a group belongs to one thread. `close` may be called from any thread, and ends the iteration.
A call in the middle of another call (from a signal handler) is refused, except `close`. Only `on_assign`
and `on_revoke` may call the group, and they may not ask for records.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import repeat
from typing import Any, Generic, Literal, NoReturn, Self, TypeVar

from ..config.arguments import Start, check_count, check_timeout, partition_number
from ..config.policies import microseconds
from ..errors import (
    ForkedHandleError,
    LogClosedError,
    LogError,
    OffsetOutOfRangeError,
    StaleGenerationError,
    StorageIOError,
    is_out_of_descriptors,
)
from ..format.batch import Batch
from ..format.display import Shown
from ..format.record import Record
from ..log.lag import Lag
from ..system.clock import monotonic
from ..system.not_copyable import NotCopyable
from ..system.notify import Observer
from ..system.process import in_child
from .assignment import STRATEGIES, TopicPartition, assign
from .delivery import Delivery, Run, Way
from .directory import GroupDirectory
from .lag import lag_of_group
from .members import Member, Membership, new_member_name
from .offsets import Commit, Entry, merged
from .owners import Ownership, read_owner
from .prepared_commit import PreparedCommit
from .start_position import StartPosition

__all__ = ["POLLED_RECORDS", "AnyGroup", "CommitPolicy", "Group", "OnChange", "TopicsGroup"]

CommitPolicy = str | float | timedelta  # "after", "manual", or an interval
OnChange = Callable[[list[Any]], object]

# How often a member looks at the others without a report. It costs about 0.1 % of a CPU.
_LOOK_S = 2.0
# After this many looks a member checks that it still holds its files. Normally the system reports an eviction.
_LOOKS_A_CHECK = 5
# How often a member looks on a system that reports nothing.
_UNTOLD_LOOK_S = 0.05
# How often a member computes the assignment although the members are the same.
_ARRANGE_S = 10.0
# The times of the looks after a report. A dying process releases its locks after the report, one file at a time.
_LOOKS_S = (0.0, 0.001, 0.004, 0.016, 0.064, 0.25)
# How often a member that always has records reads the reports.
_ASK_S = 0.01
# With commit="after": how often handled records are committed, while the member asks for records or waits for them.
_COMMIT_AFTER_S = 0.1
# The most records of one poll, by default.
POLLED_RECORDS = 512
_MEMBERS, _OWNERS = "members", "owners"  # the observer's names for these directories


_in_child = in_child()

Handed = TypeVar("Handed")  # one record as the caller gets it
HandedBatch = TypeVar("HandedBatch")
Key = TypeVar("Key")  # the caller's name for a partition
Fact = TypeVar("Fact")


class AnyGroup(Shown, NotCopyable, Generic[Handed, HandedBatch, Key]):
    """One member of a consumer group, on one topic or on several."""

    def __init__(
        self,
        place: GroupDirectory,
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
        self.name = place.name
        self.member = new_member_name() if member is None else member
        self._commit_every = _commit_interval(commit)
        self._place = place
        self._beginning = StartPosition(place, start, self.member, restart=on_out_of_range == "start")
        self._strategy = strategy
        self._on_assign = on_assign
        self._on_revoke = on_revoke
        self._closed: LogClosedError | None = None
        self._why = ""  # why the group is closed, if one of its topics was closed
        self._using = threading.RLock()  # held while files are in use; close() from another thread sees it
        self._working = threading.Lock()  # held during a call; a call in the middle of it sees it
        self._calling = False  # on_assign or on_revoke is running, and may call the group
        self._live: dict[str, Member] = {}
        self._revoking = False  # on_revoke is running
        self._waiting = False  # another member has not yet released a partition of this member
        self._unsettled = False  # a member does not yet own all its partitions
        self._lost: StaleGenerationError | None = None  # since the member last asked for records
        self._untold: list[TopicPartition] = []  # claimed, but on_assign has not returned
        self._look_at = 0.0
        self._looks = iter(_LOOKS_S)
        self._ask_at = 0.0
        self._check_at = 0.0
        self._looked = False
        self._arrange_at = 0.0
        self._commit_at = 0.0
        place.make()
        with ExitStack() as made:
            self._offsets = place.offsets()
            made.callback(self._offsets.close)
            self._observer = Observer(use_inotify=place.files.real)
            made.callback(self._observer.close)
            self._observer.observe_directory(_MEMBERS, place.members)
            self._observer.observe_directory(_OWNERS, place.owners)
            for path in place.descriptions:
                self._observer.observe_file(path, path)
            self._membership = Membership(
                place.files, place.members, self.member, place.topics, place.permissions, strategy=strategy
            )
            made.callback(self._membership.leave)
            self._membership.check_strategy(place.name)
            made.pop_all()
        self._progress = Delivery(place, self._observer)
        self._ownership = Ownership(
            place.files, place.owners, self.member, place.permissions, place.owner_file
        )
        self._left = False
        _in_child.add(self._abandon_in_child)
        self._topics = [track(self._end) for track in place.track]  # a topic closes itself when nothing refers to it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_left", True):
            # The locks are released now. Handled records are not committed, because garbage collection may run
            # in the middle of any operation.
            self._left = True
            self._ownership.abandon()
            self._membership.abandon()
            self._offsets.abandon()
            said = f"group {self.name}, member {self.member}, was not closed"
            warnings.warn(said, ResourceWarning, stacklevel=2, source=self)

    def _facts(self) -> Iterator[tuple[str, object]]:
        yield "", self.name
        yield "member", self.member
        if self._closed is not None:
            yield "", "closed"
        else:
            yield "owning", self.assignment

    # --- reading ---------------------------------------------------------------------------------

    def follow(self, timeout: float | None = None) -> Iterator[Handed]:
        """Yield the group's records as they come, for ever or until `timeout` seconds pass without a record.

        A record is handled when the loop asks for the next one. It is then committed according to the
        group's `commit=`. If the loop body raises or leaves the loop, its record is not handled: a later
        call of this member or of another one yields it again.

        Raises `StaleGenerationError` if the member was evicted, and `OffsetOutOfRangeError` if retention has
        removed the group's next record (see `on_out_of_range`). Closing the group ends the loop. If the
        topic is closed, a loop with a timeout raises `LogClosedError`.
        """
        progress = self._progress
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
                progress.leave(run, came_back=came_back)
            del run, few  # so that the next records reuse memory that is in the processor's cache

    def poll(self, *, max_records: int = POLLED_RECORDS, timeout: float | None = 0.0) -> list[Handed]:
        """Return up to `max_records` records of one partition; an empty list if none comes in `timeout` seconds.

        The records count as handled at the next call of `poll`, `follow` or `batches`, or when committed.
        """
        check_count("max_records", max_records)
        self._check_open()
        run = self._next(timeout, "polled", max_records)
        if run is None:
            return []
        shown = list(self._shown(run.partition, iter(run.batch.records())))
        run.all_out = True
        return shown

    def batches(self, timeout: float | None = None) -> Iterator[HandedBatch]:
        """Like `follow`, but yields batches: whole columns instead of single records."""
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

    @abstractmethod
    def _shown(self, partition: TopicPartition, records: Iterator[Record]) -> Iterator[Handed]:
        """Records as the caller gets them: with several topics, each comes with its topic."""

    @abstractmethod
    def _shown_batch(self, partition: TopicPartition, batch: Batch) -> HandedBatch:
        """A batch as the caller gets it."""

    def _next(
        self, timeout: float | None, way: Way, most: int | None = None, *, endless: bool = False
    ) -> Run | None:
        """Wait for the next records and return them; None after `timeout` seconds without a record.

        `endless`: this call is one step of a wait without a timeout.
        """
        check_timeout(timeout)
        deadline = None if timeout is None else monotonic() + timeout
        found = None
        try:
            with self._use(asking=True):
                self._progress.settle()
                found = self._find(deadline, way, most)
        except LogClosedError:
            if self._closed is None:
                raise
            # The topic was closed, and its groups with it, while this thread was reading.
        if isinstance(self._closed, ForkedHandleError):
            raise self._closed
        if self._why and timeout is not None and not endless:  # None would mean that no record came
            raise LogClosedError(self._why)
        return found if self._closed is None else None

    def _find(self, deadline: float | None, way: Way, most: int | None) -> Run | None:
        asked = False  # since the last wait
        while self._closed is None:
            now = monotonic()
            if now >= self._ask_at:
                self._ask(now)
                asked = True
            if now >= self._look_at:
                self._check_members(now)
            self._tell_assigned()
            self._commit_if_due(now)
            try:
                run = self._progress.take(way, most)
            except OffsetOutOfRangeError:  # retention has overtaken this member
                overtaken = self._progress.overtaken() if self._beginning.restart else []
                if not overtaken:
                    raise
                self._start_again(overtaken)
                continue
            if run is not None:
                return run
            if not asked:
                self._ask_at = 0.0
                continue
            if deadline is not None and now >= deadline:
                return None
            self._observer.wait(self._until(deadline))
            self._ask_at, asked = 0.0, False
        return None

    def _until(self, deadline: float | None) -> float:
        """Seconds until something is due: a look at the other members, a commit, or the deadline."""
        until = [self._look_at]
        if deadline is not None:
            until.append(deadline)
        if self._progress.handled and self._commit_every is not None:
            until.append(self._commit_at)
        return max(0.0, min(until) - monotonic())

    def _ask(self, now: float) -> None:
        """Act on the system's reports."""
        changes = self._observer.changed()
        if changes:
            self._progress.changed(changes)
            if _OWNERS in changes:
                self._apply_owner_changes(now, changes[_OWNERS])
            if _MEMBERS in changes and self._observer.reports:
                self._check_members_soon(now)
            if not changes.keys().isdisjoint(self._place.descriptions):
                self._take_in_added()
        self._ask_at = now + _ASK_S

    def _take_in_added(self) -> None:
        """Take in the partitions that were added to the topics, and share them soon."""
        added = self._place.take_in_added()
        if added:
            self._beginning.added.update(added)
            self._offsets.use_names(self._place.names())
            self._look_at = self._arrange_at = 0.0

    def _apply_owner_changes(self, now: float, names: set[str]) -> None:
        if not self._observer.reports:
            return
        if self._waiting or self._strategy == "sticky" or not names:
            self._check_members_soon(now)
        for each in self._ownership.owned():
            if self._place.owner_file(each) in names and self._ownership.generation(each) is None:
                self._look_at = self._check_at = now

    def _check_members_soon(self, now: float) -> None:
        self._looks = iter(_LOOKS_S)
        self._look_at = min(self._look_at, now + next(self._looks, _LOOK_S))

    def _start_again(self, partitions: list[TopicPartition]) -> None:
        """Go to the start of a group without a commit."""
        starts = {each: self._beginning.first(each, {}) for each in partitions}
        self._commit(starts)
        self._progress.add(starts)

    # --- places -----------------------------------------------------------------------------------

    def tell(self) -> dict[Key, int]:
        """The offset of the next record, for each partition that this member owns."""
        return self._by_key(self._progress.next_offsets())

    def seek(self, start: Start | Mapping[Any, Start]) -> None:
        """Go to a start in all owned partitions, or in those of a mapping. It is committed like other progress."""
        with self._use():
            self._check_open()
            if not self._looked:  # before the first request for records the member owns nothing
                self._check_members(monotonic())
                self._tell_assigned()
            named = {self._partition(key): each for key, each in start.items()} if isinstance(start, Mapping) else None
            for partition in named or ():
                self._require_owner(partition)
            offsets = self._place.resolve(start if named is None else named, self._ownership.owned())
            for partition, offset in offsets.items():
                self._progress.seek(partition, offset)

    def pause(self, *partitions: Any) -> None:
        """Stop reading these partitions until `resume`. This member still owns them."""
        with self._use():
            for partition in self._owned_of(partitions):
                self._progress.pause(partition)

    def resume(self, *partitions: Any) -> None:
        """Continue paused partitions at the next record."""
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

    def commit(self, what: Handed | Mapping[Any, int] | None = None, *, meta: str = "") -> None:
        """Commit how far the group has read; durable when it returns (with durability "disk").

        `what` is one of:

        - a record: this record and all before it in its partition are handled;
        - a mapping of partitions to the offsets to read next;
        - None: all records yielded so far, except a record whose loop was left.

        `meta` is text that is kept with the commit; `committed()` returns it.

        Raises `StaleGenerationError` if this member no longer owns a partition. After that error it raises
        again until the member asks for records. Raises `OffsetOutOfRangeError` or `InvalidOffsetError` for
        an offset where no record of the log begins, and `LogError` in a signal handler that interrupted
        another call.
        """
        if not isinstance(meta, str):
            raise TypeError(f"meta must be text, not {meta!r}")
        with self._use():
            self._check_open()
            if self._lost is not None:
                raise StaleGenerationError(self.name, self.member, self._lost.partition)
            offsets = self._asked(what)
            if not offsets and not self._membership.is_valid():
                raise StaleGenerationError(self.name, self.member)
            self._commit(offsets, meta)
            self._progress.committed_by_hand(offsets)

    def committed(self) -> dict[Key, Commit]:
        """The last commit of each partition that has one, by any member."""
        found = {each: entry.commit() for each, entry in self._entries().items() if each in self._place.logs}
        return self._by_key({each: commit for each, commit in found.items() if commit is not None})

    def lag(self, *, count_records: bool = False) -> dict[Key, Lag]:
        """The group's lag for each partition, owned or not: from the last commit to the flushed end.

        `count_records=True` also counts the records. This reads the header of each batch in that range.
        """
        entries = self._entries()

        def first(partition: TopicPartition) -> int:
            return self._beginning.first(partition, entries)

        return self._by_key(lag_of_group(self._place, entries, first=first, count_records=count_records))

    @property
    def assignment(self) -> list[Key]:
        """The partitions that this member owns, sorted."""
        return [self._key(each) for each in self._ownership.owned()]

    @property
    def topics(self) -> list[str]:
        """The names of the group's topics, sorted."""
        return self._place.topics

    @property
    def handed_out(self) -> dict[Key, int]:
        """The number of records that this member has handed out, by partition, with repeated ones."""
        return self._by_key(self._progress.handed_out())

    @property
    def members(self) -> list[str]:
        """The names of all members, including this one."""
        return sorted(self._membership.live())

    def _asked(self, what: Any) -> dict[TopicPartition, int]:
        if what is None:
            return self._progress.so_far()
        if isinstance(what, Mapping):
            return self._place.resolve({self._partition(key): offset for key, offset in what.items()})
        record, partition = self._record(what)
        return {partition: record.next_offset}

    @abstractmethod
    def _record(self, what: Any) -> tuple[Record, TopicPartition]:
        """The record in what the caller passed to `commit`, and its partition."""

    def _transact(self, what: Any, meta: str) -> PreparedCommit:
        """What `commit` with these arguments would commit, for a transaction to commit it."""
        with self._use():
            self._check_open()
            if self._commit_every is not None:
                raise ValueError(f"group {self.name} commits by itself; join it with commit='manual'")
            if self._lost is not None:
                raise StaleGenerationError(self.name, self.member, self._lost.partition)
            offsets = self._asked(what)
            entries = self._offsets.numbered(self._entries_of(offsets, meta))

            def check() -> None:
                for partition in entries:
                    self._require_owner(partition)

            def done() -> None:
                self._progress.committed(offsets)
                self._progress.committed_by_hand(offsets)

            return PreparedCommit(self._place, entries, self._offsets, check, done)

    def _entries(self) -> dict[TopicPartition, Entry]:
        with self._use():
            self._check_open()
            self._take_in_added()
            return self._offsets.entries()

    def _commit_if_due(self, now: float) -> None:
        if self._commit_every is not None and self._progress.handled and now >= self._commit_at:
            self._commit(dict(self._progress.handled))
            self._commit_at = monotonic() + self._commit_every

    def _commit(self, offsets: Mapping[TopicPartition, int], meta: str = "") -> None:
        if offsets:
            self._write(self._entries_of(offsets, meta))
            self._progress.committed(offsets)

    def _entries_of(self, offsets: Mapping[TopicPartition, int], meta: str) -> dict[TopicPartition, Entry]:
        now = self._place.clock()
        entries: dict[TopicPartition, Entry] = {}
        for partition, offset in offsets.items():
            generation = self._ownership.claimed(partition)
            if generation is None:
                raise StaleGenerationError(self.name, self.member, str(partition))
            history = self._progress.history(partition, offset)
            log_id = self._place.logs[partition].identity.log_id
            entries[partition] = Entry(offset, generation, log_id, history, meta, self.member, now)
        return entries

    def _write(self, entries: Mapping[TopicPartition, Entry]) -> None:
        def fence() -> None:
            for partition in entries:
                self._require_owner(partition)

        self._offsets.commit(entries, fence=fence)

    def _require_owner(self, partition: TopicPartition) -> int:
        generation = self._ownership.generation(partition)
        if generation is None:
            raise StaleGenerationError(self.name, self.member, str(partition))
        return generation

    # --- members and partitions ----------------------------------------------------------------------

    def _check_members(self, now: float) -> None:
        """List the members, then release and claim partitions accordingly."""
        self._looked = True
        if not self._membership.is_valid():
            self._lose(self._ownership.owned())
        if now >= self._check_at:
            lost = [each for each in self._ownership.owned() if self._ownership.generation(each) is None]
            if lost:
                self._lose(lost, str(lost[0]))
            self._check_at = now + _LOOKS_A_CHECK * _LOOK_S
        self._lost = None
        self._take_in_added()
        live = self._membership.live()
        if live != self._live or self._waiting or self._unsettled or now >= self._arrange_at:
            self._rebalance(live)
            self._arrange_at = now + _ARRANGE_S
        self._look_at = now + self._until_next_look()

    def _until_next_look(self) -> float:
        soon = next(self._looks, None)
        if soon is not None:
            return min(soon, _LOOK_S)
        self._offsets.fold()
        return _LOOK_S if self._observer.reports else min(_UNTOLD_LOOK_S, _LOOK_S)

    def _rebalance(self, live: dict[str, Member]) -> None:
        place, owned = self._place, self._ownership.owned()
        owners: dict[TopicPartition, str] = {}
        if self._strategy == "sticky":
            owners = {
                each: read_owner(place.files, place.owners, place.owner_file(each)).member or "" for each in place.logs
            }
        readers = {name: member.topics for name, member in live.items()}
        assignment = assign(STRATEGIES[self._strategy], place.logs, readers, owners)
        due = assignment[self.member]
        self._revoke([each for each in owned if each not in due])
        self._claim([each for each in due if each not in owned])
        self._live = live
        self._waiting = self._ownership.owned() != due
        # Other members may have computed with other owners. The group is settled when each member owns its share.
        self._unsettled = bool(owners) and owners != {
            each: name for name, share in assignment.items() for each in share
        }

    def _revoke(self, partitions: list[TopicPartition]) -> None:
        if not partitions:
            return
        try:
            if self._on_revoke is not None:
                self._revoking = True
                self._call(self._on_revoke, partitions)
            if self._commit_every is not None:
                handled = self._progress.handled
                self._commit({each: handled[each] for each in partitions if each in handled})
        finally:
            self._revoking = False
            self._release_partitions(partitions)

    def _release_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        partitions = list(partitions)
        self._untold = [each for each in self._untold if each not in partitions]
        self._progress.drop(partitions)
        self._ownership.release(each for each in partitions if self._ownership.claimed(each) is not None)

    def _claim(self, partitions: list[TopicPartition]) -> None:
        partitions = [each for each in partitions if self._ownership.is_free(each)]
        if not partitions:
            return
        try:
            entries = self._offsets.entries()
            known, file_of = self._place.transactions.known_generations(self._place), self._place.owner_file
            least = {
                each: max(entries[each].generation if each in entries else 0, known.get(file_of(each), 0))
                for each in partitions
            }
            claimed = [each for each in partitions if self._ownership.claim(each, at_least=least[each])]
            if not claimed:
                return
            generations = {each: self._ownership.claimed(each) or 0 for each in claimed}
            pending = self._place.transactions.fence(self._place, generations)
            entries = merged([self._offsets.entries(), pending])  # including the last commit of the previous owner
            beginnings = {}
            for each, generation in generations.items():
                beginnings[each] = self._beginning.after(entries, each, generation=generation)
                self._place.logs[each].release_files()  # so that few of a thousand logs have open files
            # Commit in the new generation: a later write of the previous owner (a stopped process) does not count.
            self._write({each: entry for each, (_, entry) in beginnings.items()})
            self._progress.add({each: offset for each, (offset, _) in beginnings.items()})
            if self._on_assign is not None:
                self._untold += claimed
        except BaseException as error:
            self._release_partitions(partitions)
            if isinstance(error, OSError) and is_out_of_descriptors(error):
                doing = f"claiming {len(partitions)} partitions, each with an open file; raise the limit (ulimit -n)"
                plain = OSError(error.errno, os.strerror(error.errno or 0))
                raise StorageIOError(self._place.path, plain, doing) from error
            raise

    def _tell_assigned(self) -> None:
        """Call `on_assign` for claimed partitions; call it again if it raised."""
        if self._untold and self._on_assign is not None:
            self._call(self._on_assign, sorted(self._untold))
            self._untold = []

    def _call(self, listener: OnChange, partitions: Iterable[TopicPartition]) -> None:
        """Call a listener, which may call the group."""
        self._calling = True
        try:
            listener([self._key(each) for each in partitions])
        finally:
            self._calling = False

    def _lose(self, lost: list[TopicPartition], partition: str = "") -> NoReturn:
        """Drop partitions after an eviction, and raise. Other members may already read them."""
        self._lost = StaleGenerationError(self.name, self.member, partition)
        self._unsettled, self._live = True, {}
        self._release_partitions(lost)
        if lost and self._on_revoke is not None:
            self._call(self._on_revoke, lost)
        raise self._lost

    # --- names ---------------------------------------------------------------------------------------

    @abstractmethod
    def _key(self, partition: TopicPartition) -> Key:
        """The caller's name for a partition: its number, if the group has one topic."""

    @abstractmethod
    def _partition(self, key: Any) -> TopicPartition:
        """The partition of a caller's name; `ValueError` if the group does not have it."""

    def _by_key(self, facts: Mapping[TopicPartition, Fact]) -> dict[Key, Fact]:
        return {self._key(each): facts[each] for each in sorted(facts)}

    # --- end -----------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether this member has left the group."""
        return self._closed is not None

    def _end(self, why: str) -> None:
        """Close because a topic was closed. A loop with a timeout then raises instead of ending."""
        if self._closed is None:
            self._why = why
        self.close()

    def close(self) -> None:
        """Commit handled records, release the partitions and leave the group. Ends an iteration in any thread."""
        self._closed = self._closed or LogClosedError(f"group {self.name} is closed; join it again")
        self._observer.wake()
        self._finish()

    @contextmanager
    def _use(self, *, asking: bool = False) -> Iterator[None]:
        """Use the files. If another thread or a signal handler closes the group meanwhile, this call finishes it.

        `LogError` in the middle of another call in this thread. A listener may call, except for records.
        """
        try:
            with self._using:
                if self._working.locked():
                    if asking or not self._calling:
                        raise LogError(
                            f"group {self.name} is in the middle of another call, which must return first: "
                            "a signal handler may only call close(), and a listener may not ask for records"
                        )
                    self._calling = False
                    try:
                        yield
                    finally:
                        self._calling = True
                else:
                    with self._working:
                        self._calling = False
                        yield
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
        self._progress.put_back()
        try:
            if self._membership.is_valid():
                self._revoke(self._ownership.owned())
        finally:
            self._ownership.abandon()
            with suppress(FileNotFoundError):  # the group's directory may be gone
                self._membership.leave()
            try:
                self._offsets.close()
            finally:
                self._progress.close()
                self._observer.close()
                self._left = True
                _in_child.discard(self._abandon_in_child)

    def _abandon_in_child(self, parent_pid: int) -> None:
        """After a fork: the membership belongs to the parent, and the child must not keep its locks."""
        self._using, self._working = threading.RLock(), threading.Lock()
        self._closed = ForkedHandleError(self._place.path, parent_pid)
        self._left = True
        if self._progress.run is not None:  # its remaining records belong to the parent
            self._progress.run.cut()
            self._progress.run = None
        self._ownership.abandon()
        self._membership.abandon()
        self._offsets.abandon()

    def _check_open(self) -> None:
        if self._closed is not None and not self._revoking:  # on_revoke may still commit during a close
            raise self._closed


class Group(AnyGroup[Record, Batch, int]):
    """One member of a consumer group on one topic. `Topic.group` makes it; it is a context manager."""

    def _shown(self, partition: TopicPartition, records: Iterator[Record]) -> Iterator[Record]:
        del partition
        return records

    def _shown_batch(self, partition: TopicPartition, batch: Batch) -> Batch:
        del partition
        return batch

    def _record(self, what: Any) -> tuple[Record, TopicPartition]:
        if not isinstance(what, Record):
            raise TypeError(f"commit() takes a record or a mapping of partitions to offsets, not {what!r}")
        return what, self._partition(what.partition)

    def _key(self, partition: TopicPartition) -> int:
        return partition.partition

    def _partition(self, key: Any) -> TopicPartition:
        partition = TopicPartition(self._place.topics[0], partition_number(key))
        if partition not in self._place.logs:
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

    def _key(self, partition: TopicPartition) -> TopicPartition:
        return partition

    def _partition(self, key: Any) -> TopicPartition:
        match key:
            case (str() as topic, int() as number) if TopicPartition(topic, number) in self._place.logs:
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
