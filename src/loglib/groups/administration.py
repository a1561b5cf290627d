"""Administration of a group from outside: inspect it, reset its offsets, evict a hung member, delete it.

Invariant: inspecting a group does not join it and writes nothing. A group's offsets are reset, and a group is
deleted, only while it has no members. An evicted member cannot commit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from typing import Any, NamedTuple, TypeVar

from ..config.arguments import Start
from ..errors import GroupBusyError, GroupElsewhereError, LogError
from ..log import catalog
from ..log.history import history_at
from ..log.lag import Lag
from ..system.files import Files
from .assignment import TopicPartition
from .commit_log import Commit, Entries, Entry, LogPartition, commits_of
from .directory import GROUPS, GroupDirectory, group_names
from .members import Member, MemberFile, live_members
from .offsets import Offsets
from .owners import Ownership, evict_owner, holder_of, owned_partitions, read_owner

Value = TypeVar("Value")

_SIGNING_S = 0.05  # between locking an owner's file and writing the owner's name: normally microseconds


class OffsetMove(NamedTuple):
    """A reset of a partition: from the committed offset (None if there was none) to another offset."""

    before: int | None
    after: int


class GroupInfo(NamedTuple):
    """A group at one moment. Partitions are numbers, or `TopicPartition`s if the group has several topics."""

    name: str
    members: dict[str, Member]  # the live members, by name
    owners: dict[Any, str]  # the owner's name for each owned partition; "" while the owner is still claiming it
    committed: dict[Any, Commit]  # for each partition that has a commit
    lag: dict[Any, Lag]  # for each partition, owned or not; from the log's start if there is no commit

    def of_topic(self, name: str) -> GroupInfo:
        """The part about one topic, with partition numbers as keys."""
        owners, committed, lag = _of(name, self.owners), _of(name, self.committed), _of(name, self.lag)
        return self._replace(owners=owners, committed=committed, lag=lag)


def _of(name: str, values: dict[Any, Value]) -> dict[Any, Value]:
    return {each.partition: value for each, value in values.items() if each.topic == name}


def inspect(directory: GroupDirectory, *, count_records: bool) -> GroupInfo:
    """Inspect a group. `GroupNotFoundError` if there is none; `GroupElsewhereError` if another topic has it."""
    directory.require()
    entries = _entries(directory)
    names = _names(directory, entries)
    owners: dict[Any, str] = {}
    for each in owned_partitions(directory.files, directory.owners):
        holder = holder_of(directory.files, directory.owners, each)
        if holder is not None:
            owners[_name(each, names)] = holder.member or ""
    committed = dict(sorted(commits_of(entries).items()))
    lag = directory.lag(entries, count_records=count_records)
    members = live_members(directory.files, directory.members, remove=False)
    return GroupInfo(directory.name, members, owners, {**committed}, {**lag})


def committed(directory: GroupDirectory) -> dict[TopicPartition, int]:
    """The committed offsets of a group, also if another topic in this directory has it; empty if it does not exist.

    A commit of another log, or of another history of the log, does not count.
    """
    return {each: offset for each, offset, is_lost in _places(directory) if not is_lost}


def lost_places(directory: GroupDirectory) -> dict[TopicPartition, int]:
    """The committed offsets that the log does not reach, or has in another history: it was set back.

    A member that joins there gets `LogReplacedError`. Empty if the group does not exist.
    """
    return {each: offset for each, offset, is_lost in _places(directory) if is_lost}


def _places(directory: GroupDirectory) -> Iterator[tuple[TopicPartition, int, bool]]:
    """The commits of these logs: the partition, the offset, and True if this history of the log does not have it."""
    directory = _at_home(directory)
    for each, entry in _entries(directory).items() if directory.exists() else ():
        log = directory.logs.get(each)
        if log is not None and entry.offset is not None and entry.log_id == log.identity.log_id:
            yield each, entry.offset, directory.place(each, entry) is None
            log.release_files()  # so that few of a thousand logs have open files


def lag(directory: GroupDirectory) -> dict[TopicPartition, Lag]:
    """The lag of a group in each partition, without its records, also if another topic in this directory has the group.

    `GroupNotFoundError` if there is no such group.
    """
    directory = _at_home(directory)
    directory.require()
    return directory.lag(_entries(directory), count_records=False)


def _at_home(directory: GroupDirectory) -> GroupDirectory:
    """The group's directory, in this topic or in the one beside it that has the group."""
    try:
        directory.exists()
    except GroupElsewhereError as error:
        return directory.at(error.topic)
    return directory


def _names(directory: GroupDirectory, entries: Entries) -> dict[LogPartition, TopicPartition]:
    """The partitions by name. A topic that is not given has the name that it had at the last commit."""
    return {LogPartition(entry.log_id, each.partition): each for each, entry in entries.items()} | directory.names()


def _name(partition: LogPartition, names: Mapping[LogPartition, TopicPartition]) -> TopicPartition:
    return names.get(partition, TopicPartition(partition.log_id.hex(), partition.partition))


def _entries(directory: GroupDirectory) -> Entries:
    with closing(directory.offsets()) as offsets:
        return offsets.entries()


def check_no_members(files: Files, topic_path: str) -> None:
    """`GroupBusyError` if a group whose directory is in this topic has members."""
    for group in group_names(files, topic_path):
        if members := live_members(files, os.path.join(topic_path, GROUPS, group, "members"), remove=False):
            raise GroupBusyError(group, list(members))


def check_no_readers(files: Files, topic_path: str) -> None:
    """`GroupBusyError` if a group has members that read this topic, also a group of another topic beside it."""
    check_no_members(files, topic_path)
    parent, name = os.path.split(topic_path)
    for other in (os.path.join(parent, each) for each in catalog.names(files, parent) if each != name):
        for group in group_names(files, other):
            found = live_members(files, os.path.join(other, GROUPS, group, "members"), remove=False)
            if members := [each for each, member in found.items() if name in member.topics]:
                raise GroupBusyError(group, members)


def delete(directory: GroupDirectory) -> None:
    """Delete a group and its commits. `GroupBusyError` if it has members, `GroupNotFoundError` if there is none."""
    directory.require()
    directory.check_role()
    if members := live_members(directory.files, directory.members):
        raise GroupBusyError(directory.name, list(members))
    directory.remove()


def reset(
    directory: GroupDirectory, start: Start | Mapping[TopicPartition, Start], *, dry_run: bool
) -> dict[TopicPartition, OffsetMove]:
    """Commit a start for all partitions, or for those of a mapping, while the group has no members.

    Raises `GroupBusyError` if the group has members. With `dry_run` nothing is committed, and members are
    allowed. Raises `GroupElsewhereError` if another topic has the group.
    """
    after = directory.resolve(start, directory.logs)
    if not directory.exists() and dry_run:
        return {each: OffsetMove(None, offset) for each, offset in after.items()}
    if not dry_run:
        directory.make()
    with closing(directory.offsets()) as offsets:
        before = offsets.commits()
        moves = {
            each: OffsetMove(before[each].offset if each in before else None, after[each]) for each in sorted(after)
        }
        if not dry_run:
            _commit(directory, offsets, moves)
        return moves


def _commit(directory: GroupDirectory, offsets: Offsets, moves: Mapping[TopicPartition, OffsetMove]) -> None:
    """Commit as a member that owns the partitions. A member that joins meanwhile waits for the new offsets."""
    if members := live_members(directory.files, directory.members):
        raise GroupBusyError(directory.name, list(members))
    name = f"reset-{os.getpid()}-{os.urandom(4).hex()}"
    with ExitStack() as ends:
        file = MemberFile(directory.files, directory.members, name, [], directory.permissions)
        ends.callback(file.leave)
        ownership = Ownership(directory.files, directory.owners, name, directory.permissions, directory.owner_file)
        ends.callback(lambda: ownership.release(ownership.owned()))
        before = offsets.entries()
        entries: dict[TopicPartition, Entry] = {}
        for each, move in moves.items():
            generation = ownership.claim(each, at_least=before[each].generation if each in before else 0)
            if generation is None:
                owner = read_owner(directory.files, directory.owners, directory.owner_file(each))
                raise GroupBusyError(directory.name, [owner.member or "another"])
            log = directory.logs[each]
            history = history_at(log, move.after)
            log.release_files()
            entries[each] = Entry(
                move.after, generation, log.identity.log_id, history, "reset", name, directory.clock()
            )  # fmt: skip
        offsets.commit(entries, fence=lambda: None)


def evict(directory: GroupDirectory, member: str) -> list[TopicPartition]:
    """Remove a member, which may hang, and take its partitions. Returns the partitions, of all topics.

    The evicted member gets `StaleGenerationError` when it next asks for records or commits. A file that is
    locked for longer than a claim takes, but names no owner, also counts as the member's.
    """
    directory.check_role()
    files, owners = directory.files, directory.owners
    live = live_members(files, directory.members) if directory.exists() else {}
    no_member = LogError(f"group {directory.name} has no member {member}; its members: {', '.join(live) or 'none'}")
    if not directory.exists():
        raise no_member
    was_live = live.pop(member, None) is not None
    if was_live:
        with suppress(FileNotFoundError):
            files.unlink(os.path.join(directory.members, member))
    owned: set[LogPartition] = set()
    unsigned: set[LogPartition] = set()
    for partition in owned_partitions(files, owners):
        holder = holder_of(files, owners, partition)
        if holder is not None and holder.member == member:
            owned.add(partition)
        elif holder is not None and holder.member not in live:
            unsigned.add(partition)
    if not was_live and not owned:
        raise no_member
    if unsigned:
        time.sleep(_SIGNING_S)
        for partition in unsigned:
            holder = holder_of(files, owners, partition)
            if holder is not None and holder.member not in live_members(files, directory.members):
                owned.add(partition)
    for partition in owned:
        evict_owner(files, owners, partition, directory.permissions)
    if not owned:
        return []
    names = _names(directory, _entries(directory))
    return sorted(_name(each, names) for each in owned)
