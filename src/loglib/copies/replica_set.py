"""Replica set: the other directories of a replicated topic while it is open, and what goes there besides the records.

Invariant: a flush is acknowledged by as many directories as the list of members says. The directories take the writers
for their own, and get the new list, before anything is published.

The groups' commits and the topic's policies follow asynchronously: once a second if they have changed, and when the
topic is closed. A commit is never ahead of the records there, because it is copied after they were acknowledged.

Threads: one for each other directory (replica.py), and one for all of them that carries the commits.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..append.writer import Writer
from ..config.policies import TopicConfig
from ..errors import LogError, TooFewCopiesError
from ..groups.directory import ALL, GROUPS, MIRRORED, stored_groups
from ..log import copy_role, topic_file
from ..system import lock
from ..system.directory import Directory
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from ..system.process import try_each
from ..system.reentry import enter
from .commit_copier import CopiedCommits, settle_commits
from .log_copier import LogCopier
from .member_list import Members, needed
from .replica import PartitionCopies, Replica, ReplicaState
from .topic_source import LocalTopicSource

__all__ = ["MemberDirectory", "ReplicaSet"]

logger = logging.getLogger("loglib")

_CARRY_S = 1.0  # how often to look for news of groups and policies
_MOST_BYTES = 1 << 20


class MemberDirectory(NamedTuple):
    """A directory that can be reached; its logs hold the same as those of the others."""

    path: str
    id: str
    members: Members | None  # the list that it has now
    locks: Mapping[int, lock.Lock]  # of its partitions
    pairs: Mapping[int, LogCopier]  # its partitions as copies of the own directory's; none for the own directory


class ReplicaSet(NotCopyable):
    """All directories of an open topic; the first is its own. Made by `assemble` in assemble.py."""

    def __init__(
        self,
        files: Files,
        members: Members,
        seats: Sequence[MemberDirectory],
        missing: Mapping[str, str],
        timeout_s: float,
        config: TopicConfig,
        *,
        takes_all: bool,
        now: int,
    ) -> None:
        self._files = files
        self._takes_all = takes_all  # to begin: the list of members changes
        self._own, self._others = seats[0], seats[1:]
        self._members = members
        self._config = config
        self._timeout_s = timeout_s
        self._now = now
        self._writers: list[Writer] = []
        absent = set(members.paths) - {each.id for each in seats}
        permissions = config.permissions
        self._in_reach = [Replica(files, each.path, members, {each.id}, permissions) for each in self._others]
        self._replicas = [*self._in_reach, *(Replica(files, each, members, absent, permissions) for each in missing)]
        for replica in self._replicas[len(self._in_reach) :]:
            replica.leave_out(missing[replica.path])
        self._needed = needed(members.acks, len(members.paths))
        self._copies = [
            PartitionCopies(topic_file.partition_directory(self._own.path, number), number, self._replicas,
                            self._needed, timeout_s)
            for number in range(config.partitions)
        ]  # fmt: skip
        self._here = LocalTopicSource(files, self._own.path)  # whose groups are copied
        self._closing = threading.Event()
        self._carried: dict[Replica, tuple[CopiedCommits, bytes]] = {}
        self._carrying = threading.RLock()
        self._carrier = threading.Thread(target=self._carry_on, name="loglib-carrier", daemon=True)

    @property
    def paths(self) -> list[str]:
        """All directories, the own one first."""
        return [self._own.path, *(each.path for each in self._replicas)]

    # --- what a partition's access needs -----------------------------------------------------------------

    def first_lock(self, number: int) -> lock.Lock:
        """The lock of a partition in the own directory. The caller has it from now on."""
        return self._own.locks[number]

    def copies(self, number: int) -> PartitionCopies:
        """The partition in the other directories."""
        return self._copies[number]

    # --- begin and end -----------------------------------------------------------------------------------

    def begin(self, writers: Sequence[Writer]) -> None:
        """Accept the writers in the other directories, and let readers see all of the logs.

        `TooFewCopiesError` if too few directories can do that.
        """
        self._writers = list(writers)
        for seat, replica in zip(self._others, self._in_reach, strict=True):
            replica.join(writers, seat.pairs)
            try:
                replica.set_epoch()
            except (LogError, OSError) as error:
                replica.leave_out(str(error))
        for replica in self._replicas[len(self._in_reach) :]:
            replica.join(writers, {})
        missing = {each.path: each.fault for each in self._replicas if each.fault is not None}
        accepted = 1 + len(self._replicas) - len(missing)
        least = len(self._members.paths) if self._takes_all else self._needed
        if accepted < least:
            raise TooFewCopiesError(self._own.path, least, accepted, missing, "opening it for writing")
        self._write_lists()
        self._own_groups()
        for copies, writer in zip(self._copies, writers, strict=True):
            copies.accepted = True
            writer.publication.publish(flushed=writer.disk.start, durable=writer.disk.start)
            writer.publication.sync()
            writer.disk.catch_up_start(max([each.log_start(copies.number) for each in self._in_reach], default=0))
        for each in self._replicas:
            each.start()
        if self._files.real:
            self._carrier.start()

    def _write_lists(self) -> None:
        """Give the list of members to those who have another one: first those who have been members. Synced."""
        seats = [self._own, *(seat for seat, each in zip(self._others, self._in_reach, strict=True) if not each.fault)]
        if len(self._members.paths) == 1:  # it is a topic of its own again
            self._leave()
            return
        for seat in sorted(seats, key=_is_new):
            new = self._members._replace(id=seat.id)
            if seat.members is None or seat.members[3:] != new[3:] or seat.members.paths != new.paths:
                new.write(self._files, seat.path, self._config.permissions, now=self._now)

    def _leave(self) -> None:
        found = copy_role.Role(copy_role.LEADER, self._members.log_id, self._own.id, self._own.path, self._now)
        with Directory.open(self._files, self._own.path) as directory:
            found.write(directory, self._config.permissions)

    def _own_groups(self) -> None:
        """The groups of the own directory are joined from now on, and those of the others are copies."""
        files, path = self._files, self._own.path
        with suppress(FileNotFoundError):
            groups = [os.path.join(path, GROUPS, name) for name in stored_groups(files, os.path.join(path, GROUPS))]
            mirrored = [each for each in groups if files.exists(os.path.join(each, MIRRORED))]
            if mirrored:
                settle_commits(files, path, self._members.log_id, self._config.permissions)
            for each in mirrored:
                files.unlink(os.path.join(each, MIRRORED))
                files.sync_directory(each)
            files.unlink(os.path.join(path, GROUPS, ALL))
            files.sync_directory(os.path.join(path, GROUPS))

    def is_here(self) -> bool:
        """Whether the caller is one of the threads of these directories."""
        return self._carrier is threading.current_thread() or any(each.is_here() for each in self._replicas)

    def states(self) -> list[ReplicaState]:
        """All directories, the own one first."""
        ends = tuple(each.disk.mark.durable_end for each in self._writers)
        return [ReplicaState(self._own.path, self._own.id, "own", ends, 0, None), *(r.state() for r in self._replicas)]

    def close(self) -> None:
        """Let the others show what was acknowledged, and release them. The writers are closed."""
        self._closing.set()
        if self._carrier.ident is not None:
            self._carrier.join(self._timeout_s)
        elif self._replicas and self._replicas[0].has_begun():
            self.carry()
        for each in self._replicas:
            each.stop()
        for each in self._replicas:
            if each.wait(self._timeout_s):
                each.close()
            else:
                logger.warning("%s: does not answer; it stays locked until its disk does", each.path)
        for seat, each in zip(self._others, self._in_reach, strict=True):
            if not each.has_begun():
                try_each(seat.pairs.values(), LogCopier.close)
        for held in self._own.locks.values():
            held.release()

    # --- commits and policies ----------------------------------------------------------------------------

    def _carry_on(self) -> None:
        while not self._closing.wait(_CARRY_S):
            self.carry()
        self.carry()

    def carry(self) -> None:
        """Copy the groups' commits and the topic's policies to the directories that are in step."""
        with enter(self._carrying, self._own.path):
            in_step = [each for each in self._replicas if each.fault is None]
            for replica, error in try_each(in_step, self._carry_to):
                replica.last_error = str(error)
                logger.warning("%s: the groups' commits could not be copied: %s", replica.path, error)

    def _carry_to(self, replica: Replica) -> None:
        files, permissions = self._files, self._config.permissions
        commits, described = self._carried.get(replica, (None, b""))
        if commits is None:
            commits = CopiedCommits(files, self._here, replica.path, self._members.log_id, permissions)
            commits.adopt()
            commits.own_nothing()
        commits.copy(commits.note())
        content = files.read_whole(os.path.join(self._own.path, topic_file.NAME), _MOST_BYTES)
        if content != described:
            with Directory.open(files, replica.path) as directory:
                directory.replace(topic_file.NAME, content, permissions)
        self._carried[replica] = commits, content


def _is_new(seat: MemberDirectory) -> bool:
    """Whether the directory was no member when the opening began. The first one of all was a topic of its own."""
    return seat.members is not None and not seat.members.version
