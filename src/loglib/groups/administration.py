"""Administration of a group from outside: inspect it, reset its offsets, evict a hung member, delete it.

Invariant: inspecting a group does not join it and writes nothing. A group's offsets are reset, and a group is
deleted, only while it has no members. An evicted member cannot commit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, TypeVar

from ..config.arguments import Start
from ..errors import GroupBusyError, GroupElsewhereError, LogError
from ..log.history import history_at
from ..log.lag import Lag
from ..system.files import Files
from .assignment import TopicPartition
from .directory import GROUPS, GroupDirectory, group_names
from .lag import lag_of_group
from .members import Member, Membership, live_members
from .offsets import Commit, Entries, Entry, LogPartition, Offsets
from .owners import Ownership, evict_owner, holder_of, owned_partitions, read_owner

__all__ = ["GroupInfo", "Move", "check_no_members", "committed", "delete", "evict", "inspect", "lag", "reset"]

Fact = TypeVar("Fact")

_SIGNING_S = 0.05  # between locking an owner's file and writing the owner's name: normally microseconds


class Move(NamedTuple):
    """How a reset moves a partition: from the committed offset (None if there was none) to another offset."""

    before: int | None
    after: int


class GroupInfo(NamedTuple):
    """A group at one moment. Partitions are numbers, or `TopicPartition`s if the group has several topics."""

    name: str
    members: dict[str, Member]  # the live members, by name
    owners: dict[Any, str]  # the owner's name for each owned partition; empty while the owner is still claiming it
    committed: dict[Any, Commit]  # for each partition that has a commit
    lag: dict[Any, Lag]  # for each partition, owned or not; from the log's start if there is no commit

    def of_topic(self, name: str) -> GroupInfo:
        """The part about one topic, with partition numbers as keys."""
        owners, committed, lag = _of(name, self.owners), _of(name, self.committed), _of(name, self.lag)
        return self._replace(owners=owners, committed=committed, lag=lag)


def _of(name: str, facts: dict[Any, Fact]) -> dict[Any, Fact]:
    return {each.partition: fact for each, fact in facts.items() if each.topic == name}


def inspect(place: GroupDirectory, *, count_records: bool) -> GroupInfo:
    """Inspect a group. `GroupNotFoundError` if there is none; `GroupElsewhereError` if another topic keeps it."""
    place.require()
    entries = _entries(place)
    names = _names(place, entries)
    owners: dict[Any, str] = {}
    for each in owned_partitions(place.files, place.owners):
        holder = holder_of(place.files, place.owners, each)
        if holder is not None:
            owners[_name(each, names)] = holder.member or ""
    commits = ((each, entry.commit()) for each, entry in sorted(entries.items()))
    committed: dict[Any, Commit] = {each: commit for each, commit in commits if commit is not None}
    behind = _lag(place, entries, count_records=count_records)
    members = live_members(place.files, place.members, remove=False)
    return GroupInfo(place.name, members, owners, committed, {**behind})


def committed(place: GroupDirectory) -> dict[TopicPartition, int]:
    """The committed offsets of a group; none if it does not exist. Also if another topic beside this one keeps it."""
    try:
        if not place.exists():
            return {}
    except GroupElsewhereError as error:
        place = place.at(error.topic)
    return {
        each: entry.offset
        for each, entry in _entries(place).items()
        if entry.offset is not None and each in place.logs and entry.log_id == place.logs[each].identity.log_id
    }


def lag(place: GroupDirectory) -> dict[TopicPartition, Lag]:
    """The lag of a group in each partition, without its records. `GroupNotFoundError` if there is no such group."""
    place.require()
    return _lag(place, _entries(place), count_records=False)


def _lag(place: GroupDirectory, entries: Entries, *, count_records: bool) -> dict[TopicPartition, Lag]:
    def first(partition: TopicPartition) -> int:
        return place.logs[partition].mark().log_start_offset

    return lag_of_group(place, entries, first=first, count_records=count_records)


def _names(place: GroupDirectory, entries: Entries) -> dict[LogPartition, TopicPartition]:
    """The partitions by name. Those of topics that are not given are called as they were at the last commit."""
    return {LogPartition(entry.log_id, each.partition): each for each, entry in entries.items()} | place.names()


def _name(partition: LogPartition, names: Mapping[LogPartition, TopicPartition]) -> TopicPartition:
    return names.get(partition, TopicPartition(partition.log_id.hex(), partition.partition))


def _entries(place: GroupDirectory) -> Entries:
    offsets = place.offsets()
    try:
        return offsets.entries()
    finally:
        offsets.close()


def check_no_members(files: Files, topic_path: str) -> None:
    """`GroupBusyError` if a group whose directory is in this topic has members."""
    for group in group_names(files, topic_path):
        if members := live_members(files, os.path.join(topic_path, GROUPS, group, "members"), remove=False):
            raise GroupBusyError(group, list(members))


def delete(place: GroupDirectory) -> None:
    """Delete a group and its commits. `GroupBusyError` if it has members, `GroupNotFoundError` if there is none."""
    place.require()
    place.check_role()
    if members := live_members(place.files, place.members):
        raise GroupBusyError(place.name, list(members))
    place.remove()


def reset(
    place: GroupDirectory, start: Start | Mapping[TopicPartition, Start], *, dry_run: bool
) -> dict[TopicPartition, Move]:
    """Commit a start for all partitions, or for those of a mapping, while the group has no members.

    Raises `GroupBusyError` if the group has members. With `dry_run` nothing is committed, and members are
    allowed. Raises `GroupElsewhereError` if another topic keeps the group.
    """
    after = place.resolve(start, place.logs)
    if not place.exists() and dry_run:
        return {each: Move(None, offset) for each, offset in after.items()}
    if not dry_run:
        place.make()
    offsets = place.offsets()
    try:
        before = offsets.commits()
        moves = {each: Move(before[each].offset if each in before else None, after[each]) for each in sorted(after)}
        if not dry_run:
            _commit(place, offsets, moves)
        return moves
    finally:
        offsets.close()


def _commit(place: GroupDirectory, offsets: Offsets, moves: Mapping[TopicPartition, Move]) -> None:
    """Commit as a member that owns the partitions. A member that joins meanwhile waits for the new offsets."""
    if members := live_members(place.files, place.members):
        raise GroupBusyError(place.name, list(members))
    name = f"reset-{os.getpid()}-{os.urandom(4).hex()}"
    with ExitStack() as held:
        membership = Membership(place.files, place.members, name, [], place.permissions)
        held.callback(membership.leave)
        ownership = Ownership(place.files, place.owners, name, place.permissions, place.owner_file)
        held.callback(lambda: ownership.release(ownership.owned()))
        before = offsets.entries()
        for partition in moves:
            if not ownership.claim(partition, at_least=before[partition].generation if partition in before else 0):
                owner = read_owner(place.files, place.owners, place.owner_file(partition))
                raise GroupBusyError(place.name, [owner.member or "another"])
        entries: dict[TopicPartition, Entry] = {}
        for each, move in moves.items():
            log, generation = place.logs[each], ownership.claimed(each) or 0
            history = history_at(log, move.after)
            log.release_files()
            entries[each] = Entry(
                move.after, generation, log.identity.log_id, history, "reset", name, place.clock()
            )  # fmt: skip
        offsets.commit(entries, fence=lambda: None)


def evict(place: GroupDirectory, member: str) -> list[TopicPartition]:
    """Remove a member, which may be hung, and take its partitions. Returns the partitions, of all topics.

    The evicted member gets `StaleGenerationError` when it next asks for records or commits. A file that is
    locked for longer than a claim takes, but names no owner, also counts as the member's.
    """
    place.check_role()
    files, directory = place.files, place.owners
    live = live_members(files, place.members) if place.exists() else {}
    was_live = live.pop(member, None) is not None
    if was_live:
        with suppress(FileNotFoundError):
            files.unlink(os.path.join(place.members, member))
    owned: set[LogPartition] = set()
    unsigned: set[LogPartition] = set()
    for partition in owned_partitions(files, directory) if place.exists() else []:
        holder = holder_of(files, directory, partition)
        if holder is not None and holder.member == member:
            owned.add(partition)
        elif holder is not None and holder.member not in live:
            unsigned.add(partition)
    if not was_live and not owned:
        raise LogError(f"group {place.name} has no member {member}")
    if unsigned:
        time.sleep(_SIGNING_S)
        for partition in unsigned:
            holder = holder_of(files, directory, partition)
            if holder is not None and holder.member not in live_members(files, place.members):
                owned.add(partition)
    for partition in owned:
        evict_owner(files, directory, partition, place.permissions)
    if not owned:
        return []
    names = _names(place, _entries(place))
    return sorted(_name(each, names) for each in owned)
