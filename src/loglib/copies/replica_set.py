"""Replica set: the other directories of a replicated topic while it is open, and the data that follows the records.

Invariant: a flush is acknowledged by as many directories as the list of members says. The directories accept the
writers, and get the new list, before anything is published.

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

from ..append.writer import Writer
from ..config.policies import TopicConfig
from ..errors import LogError, TooFewCopiesError
from ..groups.directory import ALL, GROUPS, MIRRORED, stored_groups
from ..log import copy_role, topic_file
from ..system.directory import Directory
from ..system.files import Files
from ..system.lock import Lock
from ..system.not_copyable import NotCopyable
from ..system.process import try_each
from ..system.reentry import enter
from .commit_copier import CommitCopier, settle_commits
from .local_source import LocalTopicSource
from .log_copier import LogCopier
from .replica import PartitionCopies, Replica, ReplicaState
from .roster import MemberDirectory, Members, needed

logger = logging.getLogger("loglib")

_CARRY_S = 1.0  # how often to look for changes of groups and policies


class ReplicaSet(NotCopyable):
    """All directories of an open topic, which `assemble` has made one. The first of them is the topic's own.

    `missing` says why each other directory that was given is not among them. `takes_all`: all must take part in the
    beginning, because the list of members changes.
    """

    def __init__(
        self, files: Files, members: Members, directories: Sequence[MemberDirectory], missing: Mapping[str, str],
        timeout_s: float, config: TopicConfig, *, takes_all: bool, now: int,
    ) -> None:  # fmt: skip
        self._files = files
        self._takes_all = takes_all
        self._own, self._others = directories[0], directories[1:]
        self._members = members
        self._config = config
        self._timeout_s = timeout_s
        self._now = now
        self._writers: list[Writer] = []
        absent = set(members.paths) - {each.id for each in directories}
        permissions = config.permissions
        self._in_reach = [Replica(files, each.path, members, {each.id}, permissions) for each in self._others]
        self._replicas = [*self._in_reach, *(Replica(files, each, members, absent, permissions) for each in missing)]
        for replica in self._replicas[len(self._in_reach) :]:
            replica.leave_out(missing[replica.path])
        self._needed = needed(members.acks, len(members.paths))
        self._copies = [
            PartitionCopies(self._own.partition(number), number, self._replicas, self._needed, timeout_s)
            for number in range(config.partitions)
        ]
        self._here = LocalTopicSource(files, self._own.path)  # whose groups are copied
        self._closing = threading.Event()
        self._carried: dict[Replica, tuple[CommitCopier, bytes]] = {}
        self._carrying = threading.RLock()
        self._carrier = threading.Thread(target=self._carry_often, name="loglib-carrier", daemon=True)

    @property
    def paths(self) -> list[str]:
        """All directories, the topic's own first."""
        return [self._own.path, *(each.path for each in self._replicas)]

    # --- what a partition's access needs -----------------------------------------------------------------

    def first_lock(self, number: int) -> Lock:
        """The lock of a partition in the topic's own directory. The caller holds it from now on."""
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
        for directory, replica in zip(self._others, self._in_reach, strict=True):
            replica.join(writers, directory.copiers)
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
        """Write the list of members where another one is: first in those that have been members. Synced."""
        reached = zip(self._others, self._in_reach, strict=True)
        directories = [self._own, *(directory for directory, each in reached if not each.fault)]
        if len(self._members.paths) == 1:  # it is a topic of its own again
            self._leave()
            return
        for each in sorted(directories, key=_is_new):
            new = self._members._replace(id=each.id)
            if each.members is None or each.members[3:] != new[3:] or each.members.paths != new.paths:
                new.write(self._files, each.path, self._config.permissions, now=self._now)

    def _leave(self) -> None:
        leader = copy_role.Role(copy_role.LEADER, self._members.log_id, self._own.id, self._own.path, self._now)
        with Directory.open(self._files, self._own.path) as directory:
            leader.write(directory, self._config.permissions)

    def _own_groups(self) -> None:
        """Let members join groups in the topic's own directory; groups in the replicas become read-only copies."""
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
        """True if the caller is one of the threads of these directories."""
        return self._carrier is threading.current_thread() or any(each.is_here() for each in self._replicas)

    def states(self) -> list[ReplicaState]:
        """The states of all directories, the topic's own first."""
        ends = tuple(each.disk.mark.durable_end for each in self._writers)
        return [ReplicaState(self._own.path, self._own.id, "own", ends, 0, None), *(r.state() for r in self._replicas)]

    def close(self) -> None:
        """Publish the acknowledged records in the other directories, and release them. The writers are closed."""
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
        for directory, each in zip(self._others, self._in_reach, strict=True):
            if not each.has_begun():
                try_each(directory.copiers.values(), LogCopier.close)
        for held in self._own.locks.values():
            held.release()

    # --- commits and policies ----------------------------------------------------------------------------

    def _carry_often(self) -> None:
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
            commits = CommitCopier(files, self._here, replica.path, self._members.log_id, permissions)
            commits.adopt()
            commits.own_nothing()
        commits.copy(self._here.groups())
        content = files.read_whole(os.path.join(self._own.path, topic_file.NAME), topic_file.MOST_BYTES)
        if content != described:
            with Directory.open(files, replica.path) as directory:
                directory.replace(topic_file.NAME, content, permissions)
        self._carried[replica] = commits, content


def _is_new(directory: MemberDirectory) -> bool:
    """True if the directory was no member when the opening began. The first one of all was a topic of its own."""
    return directory.members is not None and not directory.members.version
