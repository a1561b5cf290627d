"""Promote: a copy of a topic becomes a topic of its own.

Invariant: the role of a directory changes by the replacement of one small file, which is synced. A promotion that is
cut has happened or not, and may be repeated. The old topic loses its role before the copy gets it: after a cut between
the two there is no leader, never two. Only with `force`, when the old topic cannot be reached, there may be two.

What the copy has is not changed: the first writer recovers it like any other topic. It takes an epoch and a nonce of
its own, so batches of the source that are put into the copy's files later are refused, and a mirror of the new topic
finds where an old one differs.

Threads: no state, safe for all.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack

from ..config.arguments import topic_path
from ..config.policies import TopicConfig
from ..errors import LogError, NotLeaderError
from ..log import copy_role, store_pointer, topic_file
from ..log.pending_marks import forget_marks, read_marks
from ..segment import Identity
from ..system import lock
from ..system.clock import SYSTEM
from ..system.directory import Directory
from ..system.files import REAL, Files
from ..transactions.transaction import recover_transactions
from .commit_copier import settle_commits
from .follower_log import FollowerLog
from .mirror import Mirror

__all__ = ["promote"]


def promote(copy: str | os.PathLike[str], *, force: bool = False) -> None:
    """Make a copy a topic of its own: after that it opens with mode="a". A topic of its own stays what it is.

    A mirror takes the place of its source. The source must have no writer; what the mirror still lacks is copied, and
    the source is not written any more: it opens with mode="r", and can become a mirror of the new topic
    (`loglib.mirror(new, old)`). If the source cannot be reached, or a writer holds it, `force` promotes the mirror as
    it is. Then there may be two topics with one history up to that point, until you stop the old one's writers: what
    they append later is not in the new topic.

    The topic that a snapshot was copied from stays a topic, too. Both have the same log id, and from here on different
    records at the same offsets. So stop the writers of the old one first, if this one takes its place; consumers that
    have read more than the snapshot has must go back.

    Raises `FileNotFoundError` if there is no topic, `LockedError` if the mirror is still running, or the source or the
    copy is being written or changed, `NotLeaderError` for a topic that was superseded, `LogError` if the source of a
    mirror cannot be reached, and `CorruptLogError` for damage.
    """
    promote_on(REAL, topic_path(copy), now=SYSTEM(), force=force)


def promote_on(files: Files, path: str, *, now: int, force: bool = False) -> None:
    """The same on other files."""
    described = topic_file.read(files, path)
    if described is None:
        raise FileNotFoundError(errno.ENOENT, "no topic here", path)
    config = described[1]
    found = copy_role.read(files, path)
    if found is None or found.role == copy_role.LEADER:
        return
    if found.role == copy_role.REPLICA or (found.role == copy_role.SUPERSEDED and not force):
        raise NotLeaderError(path, found.role, found.of)
    if found.role == copy_role.MIRROR:
        _take_over(files, path, found, described, now=now, force=force)
    with ExitStack() as held:
        _lock(files, path, config, held)  # nobody copies into it any more
        _take_role(files, path, config, found._replace(role=copy_role.LEADER, time=now))


def _take_over(
    files: Files, path: str, found: copy_role.Role, described: tuple[bytes, TopicConfig], *, now: int, force: bool
) -> None:
    """Copy what the mirror lacks from its source, and let the source be written no more."""
    source, (log_id, config) = found.of, described
    there = None if source.startswith(copy_role.ELSEWHERE) else _described(files, source)
    if there is None or there[0] != log_id:
        if not force:
            raise LogError(
                f"{source}, of which {path} is a mirror, cannot be reached: no topic is there, or another one; "
                "stop its writers and promote with force=True"
            )
        _settle(files, path, log_id, config)
        return
    old = copy_role.read(files, source)
    if old is not None and old.role == copy_role.SUPERSEDED:
        _settle(files, path, log_id, config)
        return
    stored = store_pointer.read_pointer(files, source)
    if stored is not None and files is REAL:
        recover_transactions(stored.path)  # what is committed and not yet in the source's partitions
    with ExitStack() as held:
        try:
            _lock(files, source, there[1], held)
        except LogError:
            if not force:
                raise
            _settle(files, path, log_id, config)
            return
        with Mirror(source, path, files=files) as mirror:
            mirror.copy()
        _settle(files, path, log_id, config)
        superseded = copy_role.Role(copy_role.SUPERSEDED, log_id, files.random_bytes(8).hex(), path, now)
        _take_role(files, source, there[1], superseded)


def _settle(files: Files, path: str, log_id: bytes, config: TopicConfig) -> None:
    """Bring the copy to what its mirror has promised; the mirror may have died. `LockedError` if it still runs."""
    promised = read_marks(files, path, log_id)
    for number in range(config.partitions):
        place, identity = topic_file.partition_directory(path, number), Identity.of(log_id, number)
        FollowerLog(files, place, identity, config.permissions, promised=promised.get(number)).close()
    settle_commits(files, path, log_id, config.permissions)
    forget_marks(files, path)


def _described(files: Files, path: str) -> tuple[bytes, TopicConfig] | None:
    try:
        return topic_file.read(files, path)
    except OSError:  # a host or a disk that does not answer
        return None


def _lock(files: Files, path: str, config: TopicConfig, held: ExitStack) -> None:
    """Hold the writers' locks of all partitions; `LockedError` if a process has one."""
    for number in range(config.partitions):
        name = os.path.join(topic_file.partition_directory(path, number), lock.NAME)
        held.callback(lock.acquire(files, name, config.permissions).release)


def _take_role(files: Files, path: str, config: TopicConfig, new: copy_role.Role) -> None:
    with Directory.open(files, path) as directory:
        directory.lock_for_a_moment("a process that changes the topic", advice="try again")
        new.write(directory, config.permissions)
