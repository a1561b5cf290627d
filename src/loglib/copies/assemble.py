"""Assemble: the directories of a replicated topic become one topic again, after any crash.

Invariant: nothing is appended, and readers see nothing new, before as many directories as acknowledge have the chosen
log whole, durable, and accepted. A crash between two steps leaves what the next opening judges in the same way.

    lock       every partition of every directory that can be reached; enough of them, or nothing is changed
    promise    in each: no writer with a lower number than this opening's
    measure    what each has; nothing is changed
    choose     for each partition: see election.py
    bring up   the others: what the chosen log does not have is set aside, what is missing is copied and checked, or
               the whole partition if it is damaged; synced
    accept     the number and nonce of the writer, in each; enough of them
    list       the members, if they change: see member_list.py
    publish    readers see all of it, and the topic is open

Threads: one; then those of the replicas.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from ..config.arguments import topic_path
from ..config.policies import TopicConfig
from ..errors import CorruptLogError, LockedError, LogError, NotLeaderError, StorageIOError, TooFewCopiesError
from ..format.watermark import Mark
from ..log import copy_role, gaps, topic_file
from ..log.ages import NAME as CLOCK
from ..log.store_pointer import NAME as HOME
from ..segment import Identity
from ..system import lock
from ..system.directory import Directory
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .election import choose, standing_of
from .follower_log import FollowerLog, read_mark, set_epoch_floor
from .log_copier import LogCopier
from .log_source import SourceLog
from .member_list import ACKS, Acks, Members, needed, read_members
from .replica_set import MemberDirectory, ReplicaSet

__all__ = ["ReplicaRequest", "assemble", "check_new"]

logger = logging.getLogger("loglib")

_ROTTEN = "rotten"
_APART = "a part of them was opened apart from the others with lose=; open one part, with the others in lose=[...]"
_MOST_BYTES = 1 << 20


class ReplicaRequest(NamedTuple):
    """What the caller of `Topic.open` says about the topic's other directories."""

    paths: tuple[str, ...]  # absolute
    acks: Acks | None  # None: as stored, or "all"
    timeout_s: float
    lose: tuple[str, ...]  # absolute paths, or ids

    @classmethod
    def of(
        cls,
        path: str,
        replicas: Sequence[str | os.PathLike[str]],
        acks: Acks | None,
        timeout_s: float,
        lose: Sequence[str | os.PathLike[str]],
    ) -> ReplicaRequest:
        """Check the arguments of `Topic.open`."""
        for name, given in (("replicas", replicas), ("lose", lose)):
            if isinstance(given, str | bytes | os.PathLike):
                raise TypeError(f"{name} is a list of directories, not {given!r}")
        if acks is not None and acks not in ACKS:
            raise ValueError(f"acks is one of {', '.join(map(repr, ACKS))}, not {acks!r}")
        if not timeout_s > 0:
            raise ValueError(f"replica_timeout is a number of seconds above 0, not {timeout_s!r}")
        paths = tuple(map(topic_path, replicas))
        if len({path, *paths}) <= len(paths):
            raise ValueError(f"a directory is named twice in {[path, *paths]}")
        given_up = tuple(map(topic_path, lose))
        if path in given_up:
            raise ValueError(f"{path} is opened, so it cannot be in lose=[...]; open another directory of the topic")
        return cls(paths, acks, timeout_s, given_up)


class _MemberDirectory(NotCopyable):
    """A directory that was given, and what is found there."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.members: Members | None = None
        self.why: str | None = None  # why it cannot be reached, or is no member
        self.is_empty = False
        self.locks: dict[int, lock.Lock] = {}
        self.pairs: dict[int, LogCopier] = {}
        self.marks: dict[int, Mark] = {}
        self.rotten: dict[int, CorruptLogError] = {}  # partitions that are damaged below their marks

    @property
    def id(self) -> str:
        assert self.members is not None
        return self.members.id

    @property
    def is_witness(self) -> bool:
        """Whether what it has says something about what was acknowledged."""
        return self.members is not None and self.members.version > 0


def check_new(files: Files, wish: ReplicaRequest) -> None:
    """`LogError` if another directory has something already, while the own directory has no topic."""
    for path in wish.paths:
        if not (seat := _examine(files, path)).is_empty:
            what = seat.why or "holds a topic"
            raise LogError(
                f"{path}: {what}; the directory to be opened has none. If it was a member of that topic, open the "
                "other one instead, and name the lost directory in lose=[...]"
            )


def assemble(
    files: Files, path: str, wish: ReplicaRequest, log_id: bytes, config: TopicConfig, *, now: int
) -> ReplicaSet:
    """Make one topic of these directories; the caller opens the writers, and then calls `begin`.

    Raises what `Topic.open` says.
    """
    if config.durability != "disk":
        raise ValueError(f"{path} has durability={config.durability!r}; a topic with replicas needs 'disk'")
    if files.exists(os.path.join(path, HOME)):
        raise LogError(f"{path} takes part in transactions, and a topic with replicas cannot; copy it to a new topic")
    with ExitStack() as opened:
        made = _Assembly(files, path, wish, log_id, config, now, opened)
        made.seat()
        made.lock()
        made.set_epoch_floor()
        made.bring_up()
        opened.pop_all()
        return made.result()


class _Assembly(NotCopyable):
    """The steps of one opening, up to the point where all directories that can be reached hold the same."""

    def __init__(
        self,
        files: Files,
        path: str,
        wish: ReplicaRequest,
        log_id: bytes,
        config: TopicConfig,
        now: int,
        opened: ExitStack,
    ) -> None:
        self._files = files
        self._path = path
        self._wish = wish
        self._log_id = log_id
        self._config = config
        self._now = now
        self._opened = opened  # what to undo if a step fails
        self._seats: list[_MemberDirectory] = []  # that can be reached; the own directory first
        self._missing: dict[str, str] = {}  # why each other directory that was given is not there, by its path
        self._stored: Members | None = None  # the list that counts so far; None: the topic was no replicated one
        self._list: Members | None = None  # the list that will count, if it is another one
        self._expected = 0  # members of the stored list that are not given up
        self._gives_up = False
        self._takes_all = False  # whether all members must take part in this opening
        self._least = 1  # so many witnesses have every acknowledged record among them
        self._epochs: list[int] = []  # of this opening, by partition

    # --- who is there ----------------------------------------------------------------------------------

    def seat(self) -> None:
        """Find out which members the given directories are. Nothing is changed."""
        seats = [_examine(self._files, each) for each in (self._path, *self._wish.paths)]
        for seat in seats:
            if seat.members is not None and seat.members.log_id != self._log_id:
                raise LogError(f"{seat.path} is a member of another topic; it belongs elsewhere")
        lists = [seat.members for seat in seats if seat.is_witness and seat.members is not None]
        if seats[0].why is not None:
            raise LogError(f"{self._path}: {seats[0].why}")
        if seats[0].members is None:
            self._begin_list(seats)
        else:
            self._stored = stored = max(lists, key=lambda each: each.version, default=None)
            if stored is None:
                raise LogError(f"{self._path} is not a whole member of its topic yet, and no other member is there")
            if any(each.version == stored.version and {*each.paths} != {*stored.paths} for each in lists):
                raise LogError(f"{self._path}: the directories have two lists of members: {_APART}")
            self._match(seats, stored)

    def _begin_list(self, seats: Sequence[_MemberDirectory]) -> None:
        """The topic was no replicated one: the other directories are new."""
        for seat in seats[1:]:
            begun = seat.members is not None and not seat.is_witness
            if not seat.is_empty and not begun:
                what = seat.why or "holds a topic, or a member of an earlier list"
                raise LogError(f"{seat.path}: {what}; a new replica is made in an empty directory")
        if self._wish.lose:
            raise ValueError(f"{self._path} has no replicas yet, so lose=[...] names nothing")
        self._seats, self._takes_all = list(seats), True
        self._list = self._list_of(self._with_new({}, seats), self._wish.acks or "all", 1)

    def _with_new(self, paths: Mapping[str, str], seats: Sequence[_MemberDirectory]) -> dict[str, str]:
        """These members and those of the seats. An id is drawn for each directory that has none."""
        paths = dict(paths) | {each.id: each.path for each in seats if each.members is not None}
        for seat in seats:
            while seat.path not in paths.values():
                paths.setdefault(self._files.random_bytes(8).hex(), seat.path)
        return paths

    def _list_of(self, paths: Mapping[str, str], acks: Acks, version: int) -> Members:
        return Members(self._log_id, next(iter(paths)), paths, acks, version)

    def _match(self, seats: Sequence[_MemberDirectory], stored: Members) -> None:
        """Compare the given directories with the list that is stored."""
        replaced = [each.id for each in seats if each.members is not None and each.members.joins == stored.version]
        lost = self._lost(seats, stored) - set(replaced)
        expected = [id_ for id_ in stored.paths if id_ not in lost]
        here: dict[str, _MemberDirectory] = {}
        new: list[_MemberDirectory] = []
        for seat in seats:
            if seat.members is None:
                if seat.is_empty and seat.path in self._wish.lose:
                    new.append(seat)
                elif not seat.is_empty and seat.why is None:
                    raise LogError(f"{seat.path} is a topic of its own, and no member of {self._path}")
                else:
                    self._missing[seat.path] = seat.why or "empty; is its disk mounted?"
            elif seat.id in here:
                raise LogError(f"{seat.path} is a copy of {here[seat.id].path}, made by another program; remove one")
            elif seat.id in lost:
                raise LogError(
                    f"{seat.path} is in lose=[...] and in replicas=[...], and not empty: if it was made anew already, "
                    "leave it out of lose=[...]; if it is lost, empty it first"
                )
            elif seat.id not in stored.paths:
                self._refuse_stranger(seat, new)
            else:
                here[seat.id] = seat
        unmatched = [stored.paths[each] for each in expected if each not in here]
        if len(self._missing) != len(unmatched) or len(new) > len(lost):
            raise LogError(
                f"{self._path} is written in {len(stored.paths)} directories, last seen at "
                f"{', '.join(stored.paths.values())}; name all of them: the others than the first in replicas=[...], "
                f"and those that are lost for good in lose=[...]. Given: {', '.join(each.path for each in seats)}"
                + (f"; lost: {', '.join(self._wish.lose)}" if lost else "")
            )
        self._seats = [*here.values(), *new]
        acks = self._wish.acks or stored.acks
        if lost or acks != stored.acks or new:
            paths = {each: here[each].path if each in here else stored.paths[each] for each in expected}
            self._list = self._list_of(self._with_new(paths, new), acks, stored.version + 1)
        self._expected, self._gives_up = len(expected), bool(lost)
        self._count(stored)

    def _lost(self, seats: Sequence[_MemberDirectory], stored: Members) -> set[str]:
        """The ids of the members that are given up. One that is there by another path than the last is not lost."""
        there = {seat.id: seat.path for seat in seats if seat.members is not None}
        lost: set[str] = set()
        swapped: dict[str, str] = {}
        for given in self._wish.lose:
            id_, is_sure = self._named(given, stored)
            if is_sure or id_ not in there:
                lost.add(id_)
            else:
                swapped[given] = id_
        absent = [each for each in stored.paths if each not in there and each not in lost]
        if swapped and len(swapped) != len(absent):
            given, id_ = next(iter(swapped.items()))
            raise LogError(
                f"lose=[{given!r}]: the member that was there last, {id_}, is at {there[id_]} now, and {len(absent)} "
                f"others are not there: {', '.join(absent) or 'none'}; name the lost ones by these ids"
            )
        return lost | set(absent if swapped else ())

    def _named(self, given: str, stored: Members) -> tuple[str, bool]:
        """The id of the member that `lose` names, and whether more than its last path says so."""
        with suppress(LogError, OSError):
            found = read_members(self._files, given)
            if found is not None and found.id in stored.paths:
                return found.id, True
        for id_, where in stored.paths.items():
            if given in (where, topic_path(id_)):
                return id_, given != where
        raise ValueError(
            f"lose=[{given!r}]: no member is there or was there; last seen: "
            f"{', '.join(f'{where} ({id_})' for id_, where in stored.paths.items())}"
        )

    def _refuse_stranger(self, seat: _MemberDirectory, new: list[_MemberDirectory]) -> None:
        """A directory that is not in the list: new and not complete, or given up before."""
        if not seat.is_witness and seat.path in self._wish.lose:
            new.append(seat)
            return
        raise LogError(f"{seat.path} was given up with lose=[...], or is new; remove what is there, or leave it out")

    def _count(self, stored: Members) -> None:
        """`TooFewCopiesError` unless enough of the list that counts so far can be reached."""
        members, acks = len(stored.paths), stored.acks
        acknowledge = needed(acks, members)
        witnesses = sum(each.is_witness and self._has_marks(each) for each in self._seats)
        seats = sum(each.members is not None for each in self._seats)
        enough = max(acknowledge, members - acknowledge + 1)
        least = members - acknowledge + 1
        if self._list is not None:
            self._takes_all, enough = True, self._expected  # a list changes in all its members
        elif any(each.members is not None and each.members.joins == stored.version for each in self._seats):
            self._takes_all, enough = True, members
            least = min(least, max(witnesses, 1))  # nothing was appended yet, or all that have it are there
        if self._gives_up and acks == "leader":  # it was asked for in words
            lost = ", ".join(self._wish.lose)
            logger.warning("%s: acks='leader' goes on without %s: what only it had is lost", self._path, lost)
            least = 1
        self._least = least
        if seats < enough or witnesses < least:
            for seat in self._seats:
                if seat.members is not None and not (seat.is_witness and self._has_marks(seat)):
                    self._missing[seat.path] = "not whole, so it does not say what was acknowledged"
            wanted = enough if seats < enough else least
            raise TooFewCopiesError(self._path, wanted, min(seats, witnesses), self._missing, "opening it for writing")

    def _identity(self, number: int) -> Identity:
        return Identity.of(self._log_id, number)

    def _directory(self, seat: _MemberDirectory, number: int) -> str:
        return topic_file.partition_directory(seat.path, number)

    def _has_marks(self, seat: _MemberDirectory) -> bool:
        """Whether the mark of each partition can be read."""
        try:
            for number in range(self._config.partitions):
                with Directory.open(self._files, self._directory(seat, number)) as place:
                    if read_mark(place, self._identity(number)) is None:
                        return False
        except (LogError, OSError):
            return False
        return True

    # --- locks and promises ----------------------------------------------------------------------------

    def lock(self) -> None:
        """Lock all partitions of all directories, and note their marks. `LockedError` if a process has one."""
        self._each(self._lock)
        self._each(self._revoke_vote)
        self._each(self._read_marks)

    def _each(self, step: Callable[[_MemberDirectory], None]) -> None:
        """Take a step in each directory. One that fails now is out of reach, unless it is the own one."""
        for seat in list(self._seats):
            try:
                step(seat)
            except (LogError, OSError) as error:
                if isinstance(error, LockedError) or seat is self._seats[0]:
                    raise
                self._lose_reach(seat, error)

    def _lose_reach(self, seat: _MemberDirectory, error: Exception) -> None:
        self._seats.remove(seat)
        for pair in seat.pairs.values():
            pair.close()
        for held in seat.locks.values():
            held.release()
        self._missing[seat.path] = str(error)
        if self._stored is None:
            raise error
        self._count(self._stored)

    def _is_first_member(self, seat: _MemberDirectory) -> bool:
        """Whether this is the own directory of a topic that was no replicated one until now."""
        return self._stored is None and seat is self._seats[0]

    def _lock(self, seat: _MemberDirectory) -> None:
        for number in range(self._config.partitions):
            name = os.path.join(self._directory(seat, number), lock.NAME)
            if self._files.exists(os.path.dirname(name)):
                held = lock.acquire(self._files, name, self._config.permissions)
                seat.locks[number] = held
                self._opened.callback(held.release)

    def _revoke_vote(self, seat: _MemberDirectory) -> None:
        """Let a directory that is new, or lacks a mark, be no witness until it is whole again. Synced."""
        if self._is_first_member(seat):
            return
        if seat.members is None:
            self._make_member(seat)
        elif seat.is_witness and not self._has_marks(seat):
            logger.warning("%s: a watermark is lost or damaged there; it is brought up from the others", seat.path)
            self._distrust(seat)

    def _distrust(self, seat: _MemberDirectory) -> None:
        """What the directory has says nothing about what was acknowledged, until it is whole again. Synced."""
        if seat.members is not None and seat.is_witness:
            seat.members = seat.members._replace(version=0, joins=0)
            seat.members.write(self._files, seat.path, self._config.permissions, now=self._now)

    def _make_member(self, seat: _MemberDirectory) -> None:
        """Make a new directory, which is not whole yet. Synced, with its name."""
        files, permissions = self._files, self._config.permissions
        assert self._list is not None
        seat.members = self._list._replace(id=_id_of(seat, self._list), version=0, joins=self._list.version)
        files.make_directories(seat.path, permissions)
        seat.members.write(files, seat.path, permissions, now=self._now)

    def _read_marks(self, seat: _MemberDirectory) -> None:
        for number, held in seat.locks.items():
            with suppress(CorruptLogError):
                mark = read_mark(held.directory, self._identity(number))
                if mark is not None:
                    seat.marks[number] = mark

    def set_epoch_floor(self) -> None:
        """Let no other opening with a lower number go on. Synced."""
        for number in range(self._config.partitions):
            known = [seat.marks[number] for seat in self._seats if number in seat.marks]
            self._epochs.append(1 + max(max(mark.promised_epoch, mark.writer_epoch) for mark in known))
        self._each(self._set_epoch_floor)

    def _set_epoch_floor(self, seat: _MemberDirectory) -> None:
        for number, mark in seat.marks.items():
            place = seat.locks[number].directory
            seat.marks[number] = set_epoch_floor(place, self._identity(number), mark, self._epochs[number])

    # --- one history -------------------------------------------------------------------------------------

    def bring_up(self) -> None:
        """Let each directory hold the chosen log of each partition. Synced."""
        for number in range(self._config.partitions):
            identity = self._identity(number)
            standings = {
                seat: standing_of(seat.locks[number].directory, identity, seat.marks[number])
                for seat in self._seats if number in seat.marks
            }  # fmt: skip
            witnesses = {
                seat: each for seat, each in standings.items() if seat.is_witness or self._is_first_member(seat)
            }
            donors = choose(witnesses, least=self._least)
            shown = max((seat.marks[number].flushed_end, seat.marks[number].flushed_tail) for seat in witnesses)
            for seat, found in standings.items():
                if found.damage is not None and found.is_rotten:
                    seat.rotten[number] = found.damage
            self._bring_up_by(donors, number, shown)
        for seat in self._seats[1:]:
            self._carry(seat)

    def _bring_up_by(self, donors: Sequence[_MemberDirectory], number: int, shown: tuple[int, int]) -> None:
        """Let the other directories hold what these have of a partition; the first that can be read gives it."""
        try:
            self._bring_up_from(donors[0], number, shown)
        except _DamagedDonor as error:  # further inside than was looked at
            if not donors[1:]:
                raise error.damage from None
            logger.warning("%s; it is copied from another directory", error.damage)
            self._bring_up_by(donors[1:], number, shown)

    def _bring_up_from(self, donor: _MemberDirectory, number: int, shown: tuple[int, int]) -> None:
        """Let the other directories hold what this one has of a partition, and follow the own one from then on.

        All of them promise what any of them has shown: then damage cannot pass for a tail that was never synced.
        """
        files, identity, permissions = self._files, self._identity(number), self._config.permissions
        source, own = self._directory(donor, number), self._seats[0]
        if number in donor.pairs:  # it was to be brought up from another one, which turned out to be damaged
            donor.pairs.pop(number).detach_lock()
        copied = FollowerLog(files, source, identity, permissions, held=donor.locks[number], shows=False)
        end, mark = copied.end, copied.mark
        copied.publish_end(*shown)
        copied.detach_lock()
        target = mark.durable_to(end.end, end.last_batch)

        def bring_up(seat: _MemberDirectory) -> None:
            if seat is not donor:
                pair = self._pair(seat, number, source)
                try:
                    pair.advance(target, lambda _: None, restart=True, acknowledged=mark.flushed_end)
                except (CorruptLogError, StorageIOError) as error:
                    raise _DamagedDonor(error) from error
                for name in (CLOCK, gaps.NAME):
                    pair.carry(name)
                pair.copied.publish_end(*shown)
                pair.copied.set_epoch_floor(self._epochs[number])

        self._each(bring_up)
        if donor is not own:
            own.pairs.pop(number).detach_lock()
            for seat in self._seats[1:]:
                self._pair(seat, number, self._directory(own, number))

    def _pair(self, seat: _MemberDirectory, number: int, source: str) -> LogCopier:
        """A partition of a directory, as a copy of this source. What is damaged there is set aside, and made anew."""
        if number in seat.pairs:
            seat.pairs[number].turn_to(SourceLog(self._files, source, self._identity(number)))
            return seat.pairs[number]
        files, identity, permissions = self._files, self._identity(number), self._config.permissions
        directory = self._directory(seat, number)
        try:
            if number in seat.rotten:
                raise seat.rotten[number]
            log = SourceLog(files, source, identity)
            pair = LogCopier(files, log, directory, identity, permissions, held=seat.locks.get(number), shows=False)
        except CorruptLogError as error:
            seat.locks.pop(number).release()
            self._distrust(seat)
            self._set_aside(seat, directory, error)
            log = SourceLog(files, source, identity)
            pair = LogCopier(files, log, directory, identity, permissions, shows=False)
        seat.pairs[number], seat.locks[number] = pair, pair.copied.held
        self._opened.callback(pair.close)
        return pair

    def _set_aside(self, seat: _MemberDirectory, directory: str, error: CorruptLogError) -> None:
        """Keep a damaged partition beside its place. Synced."""
        files, attempt = self._files, 0
        while files.exists(kept := f"{directory}.{_ROTTEN}-{attempt}"):
            attempt += 1
        files.move_directory(directory, kept)
        files.sync_directory(seat.path)
        logger.warning("%s: set aside in %s, and copied anew from another directory: %s", directory, kept, error)

    def _carry(self, seat: _MemberDirectory) -> None:
        """The description of the topic."""
        content = self._files.read_whole(os.path.join(self._path, topic_file.NAME), _MOST_BYTES)
        with Directory.open(self._files, seat.path) as directory:
            directory.sync()  # the names of the partitions
            directory.replace(topic_file.NAME, content, self._config.permissions)

    # --- the result --------------------------------------------------------------------------------------

    def result(self) -> ReplicaSet:
        """The directories, ready for the writers."""
        members = self._list or self._stored
        assert members is not None
        here = {_id_of(each, members): each.path for each in self._seats}
        members = members._replace(paths={id_: here.get(id_, where) for id_, where in members.paths.items()})
        seats = [
            MemberDirectory(each.path, _id_of(each, members), each.members, each.locks, each.pairs)
            for each in self._seats
        ]
        return ReplicaSet(
            self._files, members, seats, self._missing, self._wish.timeout_s, self._config,
            takes_all=self._takes_all, now=self._now,
        )  # fmt: skip


class _DamagedDonor(Exception):
    """The copy that was chosen cannot be read."""

    def __init__(self, damage: LogError) -> None:
        self.damage = damage
        super().__init__(str(damage))


def _id_of(seat: _MemberDirectory, members: Members) -> str:
    """The id of a directory, which it may not know yet."""
    return next(each for each, where in members.paths.items() if where == seat.path) if not seat.members else seat.id


def _examine(files: Files, path: str) -> _MemberDirectory:
    """What is in a directory. It changes nothing."""
    seat = _MemberDirectory(path)
    try:
        seat.members = read_members(files, path)
        if seat.members is not None:
            return seat
        found = copy_role.read(files, path)
        if found is not None and found.role != copy_role.LEADER:
            seat.why = str(NotLeaderError(path, found.role, found.of))
        elif not files.exists(path) or set(files.listdir(path)) <= {f"{copy_role.NAME}.tmp"}:  # left by a crash
            seat.is_empty = True
        elif not files.exists(os.path.join(path, topic_file.NAME)):
            seat.why = "holds files but no topic"
    except (LogError, OSError) as error:
        seat.why = str(error)
    return seat
