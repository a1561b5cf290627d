"""Roster: the members of a replicated topic, and which of them the directories of one opening are.

Invariant: a member is known by an id that was drawn for it, not by its path: mounts get swapped. The list with the
highest version counts. A list is written when every member of it has the log, and before anything is appended; old
members get it before new ones. A directory with version 0 is not complete: it is brought up, and it has no vote on
what was acknowledged; the others are *witnesses*. A new one has the version of the list that it `joins`: while there is
such a member, all must be there. Finding the members changes nothing.

Each member has the list in its `copy.json`, in one line. The paths are where the members were last, for messages.

    {"format": 1, "role": "replica", "log_id": "<32 digits>", "id": "<16 digits>", "of": "<paths>", "time": <us>,
     "members": {"<16 digits>": "<path>", ...}, "acks": "all", "version": 3, "joins": 0,
     "crc": "<8 digits>"}

Threads: one; functions about a list have no state and are safe for all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ..config.arguments import topic_path
from ..config.policies import TopicConfig
from ..errors import CorruptLogError, LogError, NotLeaderError, TooFewCopiesError
from ..format import checked_json
from ..format.watermark import Mark
from ..log import copy_role, topic_file
from ..log.recovery import read_mark
from ..segment import Identity
from ..system.directory import Directory
from ..system.files import Files
from ..system.lock import Lock
from ..system.not_copyable import NotCopyable
from .log_copier import LogCopier

logger = logging.getLogger("loglib")

Acks = Literal["all", "quorum", "leader"]
ACKS: tuple[Acks, ...] = ("all", "quorum", "leader")
_MOST_BYTES = 1 << 20
_APART = (
    "a part of them was opened apart from the others with forget_replicas=; "
    "open one part, with the others in forget_replicas=[...]"
)


def needed(acks: Acks, members: int) -> int:
    """Number of directories that must have a record before it is acknowledged."""
    return {"all": members, "quorum": members // 2 + 1, "leader": 1}[acks]


class Members(NamedTuple):
    """The list as one directory has it."""

    log_id: bytes
    id: str  # of this directory
    paths: Mapping[str, str]  # by id: the last path of each member
    acks: Acks
    version: int
    joins: int = 0

    def write(self, files: Files, path: str, permissions: int, *, now: int) -> None:
        """Write this list into the directory at `path`. Synced."""
        others = ", ".join(each for id_, each in self.paths.items() if id_ != self.id)
        facts = {
            "role": copy_role.REPLICA, "log_id": self.log_id.hex(), "id": self.id,
            "of": others, "time": now, "members": dict(self.paths), "acks": self.acks, "version": self.version,
            "joins": self.joins,
        }  # fmt: skip
        with Directory.open(files, path) as directory:
            directory.replace(copy_role.NAME, checked_json.seal(facts), permissions)


def read_members(files: Files, path: str) -> Members | None:
    """The list that the directory has; None if it is no member of a replicated topic."""
    found = copy_role.read(files, path)
    if found is None or found.role != copy_role.REPLICA:
        return None

    def members(facts: dict[str, Any]) -> Members:
        paths = {str(each): str(where) for each, where in facts["members"].items()}
        if facts["acks"] not in ACKS or facts["id"] not in paths:
            raise ValueError(f"acks {facts['acks']}, id {facts['id']}")
        return Members(found.log_id, found.id, paths, facts["acks"], int(facts["version"]), int(facts["joins"]))

    name = os.path.join(path, copy_role.NAME)
    return checked_json.read(files, name, _MOST_BYTES, members, "the members of a replicated topic")


# --- an opening ------------------------------------------------------------------------------------------


class ReplicaRequest(NamedTuple):
    """The arguments of `Topic.open` about the topic's other directories."""

    paths: tuple[str, ...]  # absolute
    acks: Acks | None  # None: as stored, or "all"
    timeout_s: float
    forget_replicas: tuple[str, ...]  # absolute paths, or ids

    @classmethod
    def of(
        cls, path: str, replicas: Sequence[str | os.PathLike[str]], acks: Acks | None, timeout_s: float,
        forget_replicas: Sequence[str | os.PathLike[str]],
    ) -> ReplicaRequest:  # fmt: skip
        """Check the arguments of `Topic.open`."""
        for name, given in (("replicas", replicas), ("forget_replicas", forget_replicas)):
            if isinstance(given, str | bytes | os.PathLike):
                raise TypeError(f"{name} is a list of directories, not {given!r}")
        if acks is not None and acks not in ACKS:
            raise ValueError(f"acks is one of {', '.join(map(repr, ACKS))}, not {acks!r}")
        if not timeout_s > 0:
            raise ValueError(f"replica_timeout is a number of seconds above 0, not {timeout_s!r}")
        paths = tuple(map(topic_path, replicas))
        if len({path, *paths}) <= len(paths):
            raise ValueError(f"a directory is named twice in {[path, *paths]}")
        given_up = tuple(map(topic_path, forget_replicas))
        if path in given_up:
            raise ValueError(
                f"{path} is opened, so it cannot be in forget_replicas=[...]; open another directory of the topic"
            )
        return cls(paths, acks, timeout_s, given_up)


class Opening(NamedTuple):
    """The facts of one opening of a topic with replicas."""

    files: Files
    path: str  # of the topic's own directory
    request: ReplicaRequest
    log_id: bytes
    config: TopicConfig
    now: int

    def identity(self, number: int) -> Identity:
        return Identity.of(self.log_id, number)


class MemberDirectory(NotCopyable):
    """A directory that was given, with its list of members and its open partitions."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.members: Members | None = None  # the list that it has now
        self.id = ""  # if it is a member, or will be one
        self.why: str | None = None  # why it cannot be reached, or is no member
        self.is_empty = False
        self.locks: dict[int, Lock] = {}
        self.copiers: dict[int, LogCopier] = {}  # none in the topic's own directory
        self.marks: dict[int, Mark] = {}
        self.rotten: dict[int, CorruptLogError] = {}  # partitions that are damaged below their marks

    @classmethod
    def examine(cls, files: Files, path: str) -> MemberDirectory:
        """Find out what is in a directory. Nothing is changed."""
        directory = cls(path)
        try:
            directory.members = read_members(files, path)
            if directory.members is not None:
                directory.id = directory.members.id
                return directory
            role = copy_role.read(files, path)
            if role is not None and role.role != copy_role.LEADER:
                directory.why = str(NotLeaderError(path, role.role, role.of))
            elif not files.exists(path) or set(files.names_in(path)) <= {f"{copy_role.NAME}.tmp"}:  # left by a crash
                directory.is_empty = True
            elif not topic_file.exists(files, path):
                directory.why = "holds files but no topic"
        except (LogError, OSError) as error:
            directory.why = str(error)
        return directory

    @property
    def is_witness(self) -> bool:
        """True if the directory is a whole member."""
        return self.members is not None and self.members.version > 0

    def partition(self, number: int) -> str:
        """The path of a partition."""
        return topic_file.partition_directory(self.path, number)

    def has_marks(self, opening: Opening) -> bool:
        """True if the mark of each partition can be read."""
        try:
            for number in range(opening.config.partitions):
                with Directory.open(opening.files, self.partition(number)) as place:
                    if read_mark(place, opening.identity(number)) is None:
                        return False
        except (LogError, OSError):
            return False
        return True

    def release(self) -> None:
        """Release the locks, and close the partitions."""
        for copier in self.copiers.values():
            copier.close()
        for held in self.locks.values():
            held.release()


@dataclass(frozen=True, slots=True)
class Roster:
    """The members that take part in an opening."""

    directories: tuple[MemberDirectory, ...]  # that can be reached; the topic's own first
    missing: Mapping[str, str]  # why each other directory that was given cannot be used, by its path
    stored: Members | None  # the list that counts now; None if the topic was not replicated before
    new: Members | None = None  # the list that will count, if it is another one
    expected: int = 0  # members of the stored list that are not given up
    gives_up: bool = False
    takes_all: bool = False  # if all members must take part in this opening
    least: int = 1  # this many witnesses have every acknowledged record among them

    @property
    def own(self) -> MemberDirectory:
        return self.directories[0]

    def is_first_member(self, directory: MemberDirectory) -> bool:
        """True for the topic's own directory when replication is being turned on."""
        return self.stored is None and directory is self.own

    def without(self, opening: Opening, directory: MemberDirectory, error: Exception) -> Roster:
        """Return the roster without a directory that cannot be reached any more. It is counted again."""
        directory.release()
        if self.stored is None:
            raise error
        others = tuple(each for each in self.directories if each is not directory)
        return count_members(opening, replace(
            self, directories=others, missing={**self.missing, directory.path: str(error)}
        ))  # fmt: skip


def check_new(files: Files, request: ReplicaRequest) -> None:
    """Raise `LogError` if a replica directory is not empty although the topic does not exist yet."""
    for path in request.paths:
        if not (directory := MemberDirectory.examine(files, path)).is_empty:
            what = directory.why or "holds a topic"
            raise LogError(
                f"{path}: {what}; the directory to be opened has none. If it was a member of that topic, open the "
                "other one instead, and name the lost directory in forget_replicas=[...]"
            )


def find_members(opening: Opening) -> Roster:
    """Find out which members the given directories are. Raises what `Topic.open` says if they do not fit together."""
    path, log_id = opening.path, opening.log_id
    given = [MemberDirectory.examine(opening.files, each) for each in (path, *opening.request.paths)]
    for each in given:
        if each.members is not None and each.members.log_id != log_id:
            raise LogError(f"{each.path} is a member of another topic; it belongs elsewhere")
    lists = [each.members for each in given if each.is_witness and each.members is not None]
    if given[0].why is not None:
        raise LogError(f"{path}: {given[0].why}")
    if given[0].members is None:
        return _first_roster(opening, given)
    stored = max(lists, key=lambda each: each.version, default=None)
    if stored is None:
        raise LogError(f"{path} is not a whole member of its topic yet, and no other member is there")
    if any(each.version == stored.version and {*each.paths} != {*stored.paths} for each in lists):
        raise LogError(f"{path}: the directories have two lists of members: {_APART}")
    return count_members(opening, _matched(opening, given, stored))


def _first_roster(opening: Opening, given: Sequence[MemberDirectory]) -> Roster:
    """The roster of a topic that was not replicated before: the other directories are new."""
    for each in given[1:]:
        begun = each.members is not None and not each.is_witness
        if not each.is_empty and not begun:
            what = each.why or "holds a topic, or a member of an earlier list"
            raise LogError(f"{each.path}: {what}; a new replica is made in an empty directory")
    if opening.request.forget_replicas:
        raise ValueError(f"{opening.path} has no replicas yet, so forget_replicas=[...] names nothing")
    new = _list_with(opening, {}, given, opening.request.acks or "all", 1)
    return Roster(tuple(given), {}, None, new, takes_all=True)


def _list_with(
    opening: Opening, paths: Mapping[str, str], added: Iterable[MemberDirectory], acks: Acks, version: int
) -> Members:
    """A list of these members and the added ones. An id is drawn for each directory that has none."""
    paths = dict(paths)
    for each in sorted(added, key=lambda each: not each.id):
        while not each.id:
            drawn = opening.files.random_bytes(8).hex()
            each.id = "" if drawn in paths else drawn
        paths[each.id] = each.path
    return Members(opening.log_id, next(iter(paths)), paths, acks, version)


def _matched(opening: Opening, given: Sequence[MemberDirectory], stored: Members) -> Roster:
    """Compare the given directories with the stored list."""
    path, forget_replicas = opening.path, opening.request.forget_replicas
    replaced = {each.id for each in given if each.members is not None and each.members.joins == stored.version}
    lost = _lost(opening, given, stored) - replaced
    expected = [id_ for id_ in stored.paths if id_ not in lost]
    here: dict[str, MemberDirectory] = {}
    new: list[MemberDirectory] = []
    missing: dict[str, str] = {}
    for each in given:
        if each.members is None:
            if each.is_empty and each.path in forget_replicas:
                new.append(each)
            elif not each.is_empty and each.why is None:
                raise LogError(f"{each.path} is a topic of its own, and no member of {path}")
            else:
                missing[each.path] = each.why or "empty; is its disk mounted?"
        elif each.id in here:
            raise LogError(f"{each.path} is a copy of {here[each.id].path}, made by another program; remove one")
        elif each.id in lost:
            raise LogError(
                f"{each.path} is in forget_replicas=[...] and in replicas=[...], and not empty: "
                "if it was made again already, "
                "leave it out of forget_replicas=[...]; if it is lost, empty it first"
            )
        elif each.id in stored.paths:
            here[each.id] = each
        elif not each.is_witness and each.path in forget_replicas:  # new, and not complete
            new.append(each)
        else:
            raise LogError(
                f"{each.path} was given up with forget_replicas=[...], or is new; remove what is there, or leave it out"
            )
    unmatched = [each for each in expected if each not in here]
    if len(missing) != len(unmatched) or len(new) > len(lost):
        raise LogError(
            f"{path} is written in {len(stored.paths)} directories, last seen at "
            f"{', '.join(stored.paths.values())}; name all of them: the others than the first in replicas=[...], "
            "and those that are lost for good in forget_replicas=[...]. "
            f"Given: {', '.join(each.path for each in given)}"
            + (f"; lost: {', '.join(forget_replicas)}" if lost else "")
        )
    acks, changed = opening.request.acks or stored.acks, None
    if lost or acks != stored.acks or new:
        paths = {each: here[each].path if each in here else stored.paths[each] for each in expected}
        changed = _list_with(opening, paths, new, acks, stored.version + 1)
    return Roster((*here.values(), *new), missing, stored, changed, len(expected), bool(lost))


def _lost(opening: Opening, given: Sequence[MemberDirectory], stored: Members) -> set[str]:
    """The ids of the members that are given up. A member that is there by another path than the last is not lost."""
    there = {each.id: each.path for each in given if each.members is not None}
    lost: set[str] = set()
    swapped: dict[str, str] = {}
    for path in opening.request.forget_replicas:
        id_, is_sure = _named(opening.files, path, stored)
        if is_sure or id_ not in there:
            lost.add(id_)
        else:
            swapped[path] = id_
    absent = [each for each in stored.paths if each not in there and each not in lost]
    if swapped and len(swapped) != len(absent):
        path, id_ = next(iter(swapped.items()))
        raise LogError(
            f"forget_replicas=[{path!r}]: the last member there, {id_}, is at {there[id_]} now, and {len(absent)} "
            f"others are not there: {', '.join(absent) or 'none'}; name the lost ones by these ids"
        )
    return lost | set(absent if swapped else ())


def _named(files: Files, given: str, stored: Members) -> tuple[str, bool]:
    """The id of the member that `forget_replicas` names, and True if more than its last path says so."""
    with suppress(LogError, OSError):
        found = read_members(files, given)
        if found is not None and found.id in stored.paths:
            return found.id, True
    for id_, where in stored.paths.items():
        if given in (where, topic_path(id_)):
            return id_, given != where
    raise ValueError(
        f"forget_replicas=[{given!r}]: no member is there or was there; last seen: "
        f"{', '.join(f'{where} ({id_})' for id_, where in stored.paths.items())}"
    )


def count_members(opening: Opening, roster: Roster) -> Roster:
    """Set `takes_all` and `least`. `TooFewCopiesError` unless enough members of the stored list can be reached."""
    stored, directories = roster.stored, roster.directories
    assert stored is not None
    members, acks = len(stored.paths), stored.acks
    acknowledge = needed(acks, members)
    is_whole = {each.path: each.is_witness and each.has_marks(opening) for each in directories}
    witnesses = sum(is_whole.values())
    reached = sum(each.members is not None for each in directories)
    takes_all, enough = roster.takes_all, max(acknowledge, members - acknowledge + 1)
    least = members - acknowledge + 1
    if roster.new is not None:
        takes_all, enough = True, roster.expected  # a list changes in all its members
    elif any(each.members is not None and each.members.joins == stored.version for each in directories):
        takes_all, enough = True, members
        least = min(least, max(witnesses, 1))  # nothing was appended yet, or all that have it are there
    if roster.gives_up and acks == "leader":  # the caller wants that
        lost = ", ".join(opening.request.forget_replicas)
        logger.warning("%s: acks='leader' continues without %s: what only it had is lost", opening.path, lost)
        least = 1
    if reached < enough or witnesses < least:
        missing = dict(roster.missing)
        for each in directories:
            if each.members is not None and not is_whole[each.path]:
                missing[each.path] = "not whole, so it does not say what was acknowledged"
        wanted = enough if reached < enough else least
        raise TooFewCopiesError(opening.path, wanted, min(reached, witnesses), missing, "opening it for writing")
    return replace(roster, takes_all=takes_all, least=least)
