"""Membership: one member's share of a group's partitions: it looks at the other members, claims, commits and releases.

Invariant: only the owner of a partition (owners.py) reads it and commits for it. A new owner raises the partition's
generation before it reads, and commits in this generation. So a later commit of the former owner does not count.

Every member does the same by itself: it lists the members (members.py), computes the assignment (assignment.py),
releases the partitions that it should not own, and claims those that it should own when they are free.

A member looks when the system reports that the file of a member or an owner was created, removed or closed. The system
closes the files of a process that dies. A lock is released a moment after its file is closed, so a member looks several
times after a report. Without a report it looks rarely. It also looks when the system reports that the description of a
topic was replaced, because partitions may have been added.

Threads: as group.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import NoReturn

from ..errors import StaleGenerationError, StorageIOError
from ..system.failures import is_out_of_descriptors
from ..system.not_copyable import NotCopyable
from ..system.notify import Observer
from .assignment import STRATEGIES, TopicPartition, assign
from .commit_log import Entries, Entry, merged
from .delivery import Delivery
from .directory import GroupDirectory
from .members import Member, MemberFile
from .owners import Ownership, read_owner
from .start_position import StartPosition

Listener = Callable[[list[TopicPartition]], object]

# How often a member looks at the others without a report. It costs about 0.1 % of a CPU.
_LOOK_S = 2.0
# After this many looks a member checks that it still holds its files. Normally the system reports an eviction.
_LOOKS_A_CHECK = 5
# How often a member looks on a system that reports nothing.
_UNREPORTED_LOOK_S = 0.05
# How often a member computes the assignment although the members are the same.
_REBALANCE_S = 10.0
# The times of the looks after a report. A dying process releases its locks after the report, one file at a time.
_LOOKS_S = (0.0, 0.001, 0.004, 0.016, 0.064, 0.25)
# How often a member that always has records reads the reports.
_READ_S = 0.01
_MEMBERS, _OWNERS = "members", "owners"  # the observer's names for these directories


class Membership(NotCopyable):
    """One member of a group, from joining to `leave`: its file, its partitions and its log of commits."""

    def __init__(
        self, directory: GroupDirectory, member: str, strategy: str, start: StartPosition, delivery: Delivery,
        observer: Observer, *, commits_itself: bool, on_assign: Listener | None, on_revoke: Listener | None,
    ) -> None:  # fmt: skip
        """Join. `LockedError` if the group has a member of this name; `GroupMismatchError` for another strategy.

        `commits_itself`: handled records are committed when their partition is revoked.
        """
        self.start = start
        self.look_at = 0.0  # when the next look is due
        self.read_at = 0.0  # when the next reading of the system's reports is due
        self.looked = False
        self.in_listener = False  # `on_assign` or `on_revoke` is running, and may call the group
        self.revoking = False  # `on_revoke` is running
        self._directory = directory
        self._strategy = strategy
        self._delivery = delivery
        self._observer = observer
        self._commits_itself = commits_itself
        self._on_assign = on_assign
        self._on_revoke = on_revoke
        self._live: dict[str, Member] = {}
        self._waiting = False  # another member has not yet released a partition of this member
        self._unsettled = False  # a member does not yet own all its partitions
        self._lost: StaleGenerationError | None = None  # since the member last looked
        self._unannounced: list[TopicPartition] = []  # claimed, but `on_assign` has not returned
        self._looks = iter(_LOOKS_S)
        self._check_at = 0.0
        self._rebalance_at = 0.0
        with ExitStack() as opened:
            self.offsets = directory.offsets()
            opened.callback(self.offsets.close)
            observer.observe_directory(_MEMBERS, directory.members)
            observer.observe_directory(_OWNERS, directory.owners)
            for path in directory.descriptions:
                observer.observe_file(path, path)
            self.file = MemberFile(
                directory.files, directory.members, member, directory.topics, directory.permissions, strategy=strategy
            )
            opened.callback(self.file.leave)
            self.file.check_strategy(directory.name)
            opened.pop_all()
        self.ownership = Ownership(
            directory.files, directory.owners, member, directory.permissions, directory.owner_file
        )

    # --- looking ---------------------------------------------------------------------------------------

    def act(self, now: float) -> bool:
        """Read the system's reports, look at the others and call `on_assign`, each if it is due.

        True if the reports were read.
        """
        reads = now >= self.read_at
        if reads:
            self._read_reports(now)
        if now >= self.look_at:
            self.look(now)
        self.announce()
        return reads

    def _read_reports(self, now: float) -> None:
        changes = self._observer.changed()
        if changes:
            self._delivery.changed(changes)
            if _OWNERS in changes:
                self._apply_owner_changes(now, changes[_OWNERS])
            if _MEMBERS in changes and self._observer.reports:
                self._look_soon(now)
            if not changes.keys().isdisjoint(self._directory.descriptions):
                self.take_in_added()
        self.read_at = now + _READ_S

    def take_in_added(self) -> None:
        """Take in the partitions that were added to the topics, and share them at the next look."""
        added = self._directory.take_in_added()
        if added:
            self.start.added.update(added)
            self.offsets.names_now = self._directory.names()
            self.look_at = self._rebalance_at = 0.0

    def _apply_owner_changes(self, now: float, names: set[str]) -> None:
        if not self._observer.reports:
            return
        if self._waiting or self._strategy == "sticky" or not names:
            self._look_soon(now)
        for partition in self.ownership.owned():
            if self._directory.owner_file(partition) in names and self.ownership.generation(partition) is None:
                self.look_at = self._check_at = now

    def _look_soon(self, now: float) -> None:
        self._looks = iter(_LOOKS_S)
        self.look_at = min(self.look_at, now + next(self._looks, _LOOK_S))

    def look(self, now: float) -> None:
        """List the members, then release and claim partitions accordingly."""
        self.looked = True
        if not self.file.is_valid():
            self._lose(self.ownership.owned())
        if now >= self._check_at:
            lost = [each for each in self.ownership.owned() if self.ownership.generation(each) is None]
            if lost:
                self._lose(lost, str(lost[0]))
            self._check_at = now + _LOOKS_A_CHECK * _LOOK_S
        self._lost = None
        self.take_in_added()
        live = self.file.live()
        if live != self._live or self._waiting or self._unsettled or now >= self._rebalance_at:
            self._rebalance(live)
            self._rebalance_at = now + _REBALANCE_S
        self.look_at = now + self._until_next_look()

    def _until_next_look(self) -> float:
        soon = next(self._looks, None)
        if soon is not None:
            return min(soon, _LOOK_S)
        self.offsets.fold()
        return _LOOK_S if self._observer.reports else min(_UNREPORTED_LOOK_S, _LOOK_S)

    # --- partitions --------------------------------------------------------------------------------------

    def _rebalance(self, live: dict[str, Member]) -> None:
        """Revoke the partitions that this member should not own, and claim those that it should own."""
        directory, owned = self._directory, self.ownership.owned()
        owners: dict[TopicPartition, str] = {}
        if self._strategy == "sticky":
            owners = {
                each: read_owner(directory.files, directory.owners, directory.owner_file(each)).member or ""
                for each in directory.logs
            }
        readers = {name: member.topics for name, member in live.items()}
        assignment = assign(STRATEGIES[self._strategy], directory.logs, readers, owners)
        share = assignment[self.file.name]
        self._revoke([each for each in owned if each not in share])
        self._claim([each for each in share if each not in owned])
        self._live = live
        self._waiting = self.ownership.owned() != share
        # Other members may have computed with other owners. The group is settled when each member owns its share.
        assigned = {each: name for name, partitions in assignment.items() for each in partitions}
        self._unsettled = bool(owners) and owners != assigned

    def _claim(self, partitions: list[TopicPartition]) -> None:
        """Claim the partitions that no member owns, and go to their start positions."""
        partitions = [each for each in partitions if self.ownership.is_free(each)]
        if not partitions:
            return
        try:
            generations = self._own(partitions)
            if generations:
                self._go_to_starts(generations)
        except BaseException as error:
            self._release(partitions)
            if isinstance(error, OSError) and is_out_of_descriptors(error):
                doing = f"claiming {len(partitions)} partitions, each with an open file; raise the limit (ulimit -n)"
                plain = OSError(error.errno, os.strerror(error.errno or 0))
                raise StorageIOError(self._directory.path, plain, doing) from error
            raise

    def _own(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        """Become the owner of the partitions that are free; returns their generations."""
        entries = self.offsets.entries()
        known = self._directory.transactions.known_generations(self._directory)
        generations: dict[TopicPartition, int] = {}
        for partition in partitions:
            committed = entries[partition].generation if partition in entries else 0
            least = max(committed, known.get(self._directory.owner_file(partition), 0))
            generation = self.ownership.claim(partition, at_least=least)
            if generation is not None:
                generations[partition] = generation
        return generations

    def _go_to_starts(self, generations: Mapping[TopicPartition, int]) -> None:
        pending = self._directory.transactions.fence(self._directory, generations)
        entries = merged([self.offsets.entries(), pending])  # including the last commit of the previous owner
        starts = {}
        for partition, generation in generations.items():
            starts[partition] = self.start.after(entries, partition, generation=generation)
            self._directory.logs[partition].release_files()  # so that few of a thousand logs have open files
        # Commit in the new generation: a later write of the previous owner (a stopped process) does not count.
        self._write({partition: entry for partition, (_, entry) in starts.items()})
        self._delivery.add({partition: offset for partition, (offset, _) in starts.items()})
        if self._on_assign is not None:
            self._unannounced += generations

    def start_again(self, partitions: list[TopicPartition]) -> None:
        """Go to the start of a group without a commit in these partitions, and commit it."""
        starts = {each: self.start.first(each, {}) for each in partitions}
        self.commit(starts)
        self._delivery.add(starts)

    def announce(self) -> None:
        """Call `on_assign` for claimed partitions; call it again if it raised."""
        if self._unannounced and self._on_assign is not None:
            self._call(self._on_assign, sorted(self._unannounced))
            self._unannounced = []

    def _call(self, listener: Listener, partitions: list[TopicPartition]) -> None:
        self.in_listener = True
        try:
            listener(partitions)
        finally:
            self.in_listener = False

    def revoke_all(self) -> None:
        """Commit and release all partitions, unless the member was evicted."""
        if self.file.is_valid():
            self._revoke(self.ownership.owned())

    def _revoke(self, partitions: list[TopicPartition]) -> None:
        """Call `on_revoke`, commit what is handled, and release the partitions."""
        if not partitions:
            return
        try:
            if self._on_revoke is not None:
                self.revoking = True
                self._call(self._on_revoke, partitions)
            if self._commits_itself:
                handled = self._delivery.handled
                self.commit({each: handled[each] for each in partitions if each in handled})
        finally:
            self.revoking = False
            self._release(partitions)

    def _release(self, partitions: list[TopicPartition]) -> None:
        self._unannounced = [each for each in self._unannounced if each not in partitions]
        self._delivery.drop(partitions)
        self.ownership.release(each for each in partitions if self.ownership.claimed(each) is not None)

    def _lose(self, lost: list[TopicPartition], partition: str = "") -> NoReturn:
        """Drop partitions after an eviction, and raise. Other members may already read them."""
        self._lost = self.stale(partition)
        self._unsettled, self._live = True, {}
        self._release(lost)
        if lost and self._on_revoke is not None:
            self._call(self._on_revoke, lost)
        raise self._lost

    # --- committing --------------------------------------------------------------------------------------

    def stale(self, partition: str = "") -> StaleGenerationError:
        """The error for a commit of a member that does not own the partition."""
        return StaleGenerationError(self._directory.name, self.file.name, partition)

    def check_not_lost(self) -> None:
        """`StaleGenerationError` if the member has lost a partition and has not asked for records since."""
        if self._lost is not None:
            raise self.stale(self._lost.partition)

    def check_owns(self, partitions: Iterable[TopicPartition]) -> None:
        """`StaleGenerationError` if this member does not own all of these partitions."""
        for partition in partitions:
            if self.ownership.generation(partition) is None:
                raise self.stale(str(partition))

    def commit(self, offsets: Mapping[TopicPartition, int], meta: str = "") -> None:
        """Commit these offsets. `StaleGenerationError` if this member does not own their partitions."""
        if offsets:
            self._write(self.entries_of(offsets, meta))
            self._delivery.committed(offsets)

    def entries_of(self, offsets: Mapping[TopicPartition, int], meta: str) -> Entries:
        """The entries that commit these offsets in the generations of this member's claims."""
        now = self._directory.clock()
        entries: Entries = {}
        for partition, offset in offsets.items():
            generation = self.ownership.claimed(partition)
            if generation is None:
                raise self.stale(str(partition))
            history = self._delivery.history(partition, offset)
            log_id = self._directory.logs[partition].identity.log_id
            entries[partition] = Entry(offset, generation, log_id, history, meta, self.file.name, now)
        return entries

    def _write(self, entries: Entries) -> None:
        self.offsets.commit(entries, fence=lambda: self.check_owns(entries))

    # --- end ---------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the group and release what is still owned. `offsets` stays open."""
        self.ownership.abandon()
        with suppress(FileNotFoundError):  # the group's directory may be gone
            self.file.leave()

    def abandon(self) -> None:
        """Close the files and write nothing: after a fork they belong to the parent."""
        self.ownership.abandon()
        self.file.abandon()
        self.offsets.abandon()
