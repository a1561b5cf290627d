"""Promote: a copy of a topic becomes a topic of its own.

Invariant: the role of a directory changes by the replacement of one small file, which is synced. A promotion that is
cut has happened or not, and may be repeated. The topic's leader, which chain.py finds through any number of copies,
loses its role before the copy gets it, and stays locked until then: after a cut between the two there is no leader,
never two. Only with `force`, when the old topic cannot be reached or is being written, there may be two.

The log of the copy is not changed: the first writer recovers it like any other topic. It takes an epoch and a nonce of
its own, so batches of the source that are put into the copy's files later are refused, and a mirror of the new topic
finds the end up to which an old one is the same.

Threads: no state, safe for all.
"""

from __future__ import annotations

import errno
import logging
import os
from contextlib import ExitStack, suppress

from ..append.writer import Writer
from ..config.arguments import topic_path
from ..config.policies import TopicConfig
from ..errors import LogError, OffsetOutOfRangeError, TooFewCopiesError
from ..log import copy_role, store_pointer, topic_file
from ..log.index import SegmentIndex
from ..log.pending_marks import forget_marks, read_marks
from ..log.recovery import list_segments
from ..offload.tier_files import newest
from ..segment import Identity
from ..system import lock
from ..system.clock import SYSTEM
from ..system.directory import Directory
from ..system.files import REAL, Files
from ..transactions.transaction import recover_transactions
from .assemble import assemble
from .chain import Former, former_of
from .commit_copier import settle_commits
from .follower_log import FollowerLog
from .mirrors import Mirror
from .roster import ReplicaRequest

logger = logging.getLogger("loglib")

_REPLICA_TIMEOUT_S = 1.0  # as by default in `Topic.open`


def promote(copy: str | os.PathLike[str], *, force: bool = False) -> None:
    """Make a copy a topic of its own: after that it opens with mode="a". A topic of its own is not changed.

    A mirror takes the place of the topic, which may be its source, the source's source, and so on; of a topic with
    replicas, all directories. The topic must have no writer; the records that the mirror lacks are copied, and the
    topic is not written any more: it opens with mode="r", and can become a mirror of the new topic
    (`mirror(new, old)`). If a directory on the way cannot be reached, if a writer holds the topic, or if retention has
    dropped records there that follow the mirror's last one, `force` promotes the mirror without these records. Then
    there may be two topics with one history up to that point, until you stop the old one's writers: records that they
    append later are not in the new topic.

    The topic that a snapshot was copied from stays a topic, too. Both have the same log id, and from here on different
    records at the same offsets. So stop the writers of the old one first, if this one takes its place; consumers that
    have read more than the snapshot has must go back.

    Raises `FileNotFoundError` if there is no topic, `LockedError` if the mirror is still running, or the topic or the
    copy is being written or changed, `NotLeaderError` for a topic that was superseded and for a replica, `LogError` if
    a directory on the way to the topic cannot be reached, `OffsetOutOfRangeError` if the topic has dropped records that
    the mirror lacks, and `CorruptLogError` for damage.
    """
    promote_on(REAL, topic_path(copy), now=SYSTEM(), force=force)


def promote_on(files: Files, path: str, *, now: int, force: bool = False) -> None:
    """Promote a copy on these files."""
    described = topic_file.read(files, path)
    if described is None:
        raise FileNotFoundError(errno.ENOENT, "no topic here", path)
    while not _promoted(files, path, described, now=now, force=force):
        pass  # another promotion was faster: it may have taken the source's place, or this one's


def _promoted(files: Files, path: str, described: tuple[bytes, TopicConfig], *, now: int, force: bool) -> bool:
    """Promote the copy. False if the directories changed their roles meanwhile."""
    found = copy_role.read(files, path)
    if found is None or found.role == copy_role.LEADER:
        return True
    action = copy_role.FORCE if force else copy_role.PROMOTE
    if found.role not in action.roles:
        raise copy_role.refusal(path, found, action)
    with ExitStack() as held:  # until the copy has its role, so that no other copy takes the same place
        if found.role == copy_role.MIRROR and not _take_over(files, path, found, described, held, now=now, force=force):
            return False
        if found.role == copy_role.TIER:  # it has only partitions with a sealed segment
            _make_empty_partitions(files, path, *described, now=now)
        _lock(files, path, described[1], held)  # no mirror copies into it any more
        again = copy_role.read(files, path)
        if again is None or again.role != found.role:
            return False
        _leave_lost_store(files, path)
        again._replace(role=copy_role.LEADER, time=now).take(files, path, described[1].permissions)
    return True


def _take_over(
    files: Files, path: str, found: copy_role.Role, described: tuple[bytes, TopicConfig], held: ExitStack,
    *, now: int, force: bool,
) -> bool:  # fmt: skip
    """Copy the records that the mirror lacks from the topic's leader, and supersede the leader.

    False if the directories changed their roles meanwhile. `held` gets the locks.
    """
    log_id, config = described
    try:
        former = former_of(files, path, found.of, log_id)
        with ExitStack() as trying:
            _hold(files, former, log_id, trying, now=now)
            if copy_role.read(files, path) != found or former_of(files, path, found.of, log_id) != former:
                return False
            held.push(trying.pop_all())
    except LogError:
        if not force:
            raise
        former = Former()
    if not former.paths:
        _settle(files, path, log_id, config)
        return True
    if found.of != former.paths[0]:  # a cut from here on is found by this name
        found._replace(of=former.paths[0], time=now).take(files, path, config.permissions)
    with Mirror(former.paths[0], path, files=files) as mirror, suppress(*[OffsetOutOfRangeError] if force else []):
        mirror.copy()
    _settle(files, path, log_id, config)
    for each in reversed(former.paths):  # the first one is found first, so it goes last: a cut may be repeated
        old = copy_role.read(files, each)
        drawn = files.random_bytes(8).hex() if old is None else old.id
        copy_role.Role(copy_role.SUPERSEDED, log_id, drawn, path, now).take(files, each, config.permissions)
    return True


def _hold(files: Files, former: Former, log_id: bytes, held: ExitStack, *, now: int) -> None:
    """Lock the former directories, and let the first of them have all acknowledged records."""
    if not former.paths:
        return
    described = topic_file.read(files, former.paths[0])
    assert described is not None
    if former.are_members:
        try:
            _assemble(files, former, log_id, described[1], held, now=now)
        except TooFewCopiesError:
            if not former.superseded:
                raise
            # A promotion that was cut had assembled them. Nobody can have opened them since.
        else:
            return
    else:
        stored = store_pointer.read_pointer(files, former.paths[0])
        if stored is not None and files is REAL:
            recover_transactions(stored.path)  # what is committed and not yet in the source's partitions
    for each in former.paths:
        _lock(files, each, described[1], held)


def _assemble(files: Files, former: Former, log_id: bytes, config: TopicConfig, held: ExitStack, *, now: int) -> None:
    """Open a topic with replicas as its writer does, and keep it open in `held`: all records are in the first one."""
    own, *others = former.paths
    request = ReplicaRequest((*others, *former.superseded), None, _REPLICA_TIMEOUT_S, ())
    members = assemble(files, own, request, log_id, config, now=now)
    held.callback(members.close)
    writers: list[Writer] = []
    for number in range(config.partitions):
        place, identity = topic_file.partition_directory(own, number), Identity.of(log_id, number)
        index = SegmentIndex(list_segments(files, place))
        made = Writer(
            files, place, identity, config, index=index,
            held=members.first_lock(number), copies=members.copies(number),
        )  # fmt: skip
        held.callback(made.close)
        writers.append(made)
    members.begin(writers)


def _make_empty_partitions(files: Files, path: str, log_id: bytes, config: TopicConfig, *, now: int) -> None:
    """Make the partitions of a tier that never had a sealed segment; `LogError` if another partition is missing."""
    uploaded = newest(files, path)
    for number in range(config.partitions):
        directory = topic_file.partition_directory(path, number)
        if not files.exists(directory) and (uploaded is None or uploaded.partition(number).segments):
            raise LogError(f"{directory} is missing, and the place has segments of it; copy the whole place again")
    with Directory.open(files, path) as place:
        topic_file.make_missing(place, log_id, config, range(config.partitions), now=now)


def _leave_lost_store(files: Files, path: str) -> None:
    """Forget the store of the source's transactions if it cannot be reached from here."""
    if store_pointer.is_lost(files, path):
        logger.warning(
            "%s: the store of its transactions is not here: its next transaction makes a new one, which does not know "
            "the versions of apps that were committed before", path,
        )  # fmt: skip
        with Directory.open(files, path) as directory:
            directory.unlink(store_pointer.NAME)
            directory.sync()


def _settle(files: Files, path: str, log_id: bytes, config: TopicConfig) -> None:
    """Bring the copy to the state that its mirror has promised; the mirror may have died. `LockedError` if it runs."""
    promised = read_marks(files, path, log_id)
    for number in range(config.partitions):
        place, identity = topic_file.partition_directory(path, number), Identity.of(log_id, number)
        FollowerLog(files, place, identity, config.permissions, promised=promised.get(number)).close()
    settle_commits(files, path, log_id, config.permissions)
    forget_marks(files, path)


def _lock(files: Files, path: str, config: TopicConfig, held: ExitStack) -> None:
    """Hold the writers' locks of all partitions; `LockedError` if a process has one."""
    for number in range(config.partitions):
        partition = topic_file.partition_directory(path, number)
        held.callback(lock.acquire(files, partition, config.permissions).release)
