"""Assemble: the directories of a replicated topic become one topic again, after any crash.

Invariant: nothing is appended, and readers see nothing new, before as many directories as acknowledge have the chosen
log whole, durable, and accepted. After a crash between two steps the next opening comes to the same judgement.

    find       which members the directories are (roster.py); nothing is changed
    lock       every partition of every directory that can be reached; enough of them, or nothing is changed
    floor      in each directory: no writer with a lower epoch than this opening's
    choose     for each partition, one log (election.py)
    bring up   the others: what the chosen log does not have is set aside, what is missing is copied and checked, or
               the whole partition if it is damaged; synced
    accept     the epoch and nonce of the writer, in each; enough of them
    list       the members, if they change (roster.py)
    publish    readers see all of it, and the topic is open

The last three are the first steps of the `ReplicaSet` that `assemble` returns.

Threads: one; then those of the replicas.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress

from ..config.policies import TopicConfig
from ..errors import CorruptLogError, LockedError, LogError, StorageIOError
from ..log import gaps, topic_file
from ..log.ages import NAME as CLOCK
from ..log.recovery import read_mark
from ..log.store_pointer import NAME as STORE_POINTER
from ..system import lock
from ..system.directory import Directory
from ..system.files import Files
from .election import choose, claim_of
from .follower_log import FollowerLog, set_epoch_floor
from .local_source import SourceLog
from .log_copier import LogCopier
from .replica_set import ReplicaSet
from .roster import MemberDirectory, Opening, ReplicaRequest, Roster, find_members

logger = logging.getLogger("loglib")

_ROTTEN = "rotten"


def assemble(
    files: Files, path: str, request: ReplicaRequest, log_id: bytes, config: TopicConfig, *, now: int
) -> ReplicaSet:
    """Make one topic of these directories; the caller opens the writers, and then calls `begin`.

    Raises what `Topic.open` says.
    """
    if config.durability != "disk":
        raise ValueError(f"{path} has durability={config.durability!r}; a topic with replicas needs 'disk'")
    if files.exists(os.path.join(path, STORE_POINTER)):
        raise LogError(f"{path} takes part in transactions, and a topic with replicas cannot; copy it to a new topic")
    opening = Opening(files, path, request, log_id, config, now)
    with ExitStack() as opened:
        roster = _lock_all(opening, find_members(opening), opened)
        roster, epochs = _set_floors(opening, roster)
        for number, epoch in enumerate(epochs):
            roster = _bring_up(opening, roster, number, epoch, opened)
        for directory in roster.directories[1:]:
            _copy_description(opening, directory)
        opened.pop_all()
    members = roster.new or roster.stored
    assert members is not None
    here = {each.id: each.path for each in roster.directories}
    members = members._replace(paths={id_: here.get(id_, where) for id_, where in members.paths.items()})
    return ReplicaSet(
        files, members, roster.directories, roster.missing, request.timeout_s, config,
        takes_all=roster.takes_all, now=now,
    )  # fmt: skip


def _in_each(opening: Opening, roster: Roster, step: Callable[[MemberDirectory], object]) -> Roster:
    """Take a step in each directory. One that fails now cannot be reached any more, unless it is the topic's own."""
    for directory in roster.directories:
        try:
            step(directory)
        except (LogError, OSError) as error:
            if isinstance(error, LockedError) or directory is roster.own:
                raise
            roster = roster.without(opening, directory, error)
    return roster


# --- locks and floors --------------------------------------------------------------------------------


def _lock_all(opening: Opening, roster: Roster, opened: ExitStack) -> Roster:
    """Lock all partitions of all directories, and read their marks. `LockedError` if a process has one."""

    def lock_all(directory: MemberDirectory) -> None:
        for number in range(opening.config.partitions):
            partition = directory.partition(number)
            if opening.files.exists(partition):
                held = lock.acquire(opening.files, partition, opening.config.permissions)
                directory.locks[number] = held
                opened.callback(held.release)

    def revoke_vote(directory: MemberDirectory) -> None:
        """A new directory, or one without a mark, has no vote until it is complete. Synced."""
        if roster.is_first_member(directory):
            return
        if directory.members is None:
            _make_member(opening, roster, directory)
        elif directory.is_witness and not directory.has_marks(opening):
            logger.warning("%s: a watermark is lost or damaged there; it is brought up from the others", directory.path)
            _distrust(opening, directory)

    def read_marks(directory: MemberDirectory) -> None:
        for number, held in directory.locks.items():
            with suppress(CorruptLogError):
                mark = read_mark(held.directory, opening.identity(number))
                if mark is not None:
                    directory.marks[number] = mark

    for step in (lock_all, revoke_vote, read_marks):
        roster = _in_each(opening, roster, step)
    return roster


def _make_member(opening: Opening, roster: Roster, directory: MemberDirectory) -> None:
    """Make a new directory, which is not complete yet. Synced, with its name."""
    files, permissions = opening.files, opening.config.permissions
    assert roster.new is not None
    directory.members = roster.new._replace(id=directory.id, version=0, joins=roster.new.version)
    files.make_directories(directory.path, permissions)
    directory.members.write(files, directory.path, permissions, now=opening.now)


def _distrust(opening: Opening, directory: MemberDirectory) -> None:
    """Take the vote of a directory until it is complete again. Synced."""
    if directory.members is not None and directory.is_witness:
        directory.members = directory.members._replace(version=0, joins=0)
        directory.members.write(opening.files, directory.path, opening.config.permissions, now=opening.now)


def _set_floors(opening: Opening, roster: Roster) -> tuple[Roster, list[int]]:
    """Refuse other openings with a lower epoch from now on. Synced. Returns the epoch of each partition."""
    epochs: list[int] = []
    for number in range(opening.config.partitions):
        known = [each.marks[number] for each in roster.directories if number in each.marks]
        epochs.append(1 + max(max(mark.promised_epoch, mark.writer_epoch) for mark in known))

    def set_floor(directory: MemberDirectory) -> None:
        for number, mark in directory.marks.items():
            place = directory.locks[number].directory
            directory.marks[number] = set_epoch_floor(place, opening.identity(number), mark, epochs[number])

    return _in_each(opening, roster, set_floor), epochs


# --- one history -------------------------------------------------------------------------------------


def _bring_up(opening: Opening, roster: Roster, number: int, epoch: int, opened: ExitStack) -> Roster:
    """Copy the chosen log of a partition to each directory. Synced. The first donor that can be read gives it."""
    claims = {
        each: claim_of(each.locks[number].directory, opening.identity(number), each.marks[number])
        for each in roster.directories if number in each.marks
    }  # fmt: skip
    votes = {each: claim for each, claim in claims.items() if each.is_witness or roster.is_first_member(each)}
    donors = choose(votes, least=roster.least)
    shown = max((each.marks[number].flushed_end, each.marks[number].flushed_tail) for each in votes)
    for each, claim in claims.items():
        if claim.damage is not None and claim.is_rotten:
            each.rotten[number] = claim.damage
    while True:
        roster, damage = _bring_up_from(opening, roster, donors.pop(0), number, epoch, shown, opened)
        if damage is None:
            return roster
        if not donors:
            raise damage
        logger.warning("%s; it is copied from another directory", damage)


def _bring_up_from(
    opening: Opening, roster: Roster, donor: MemberDirectory, number: int, epoch: int, shown: tuple[int, int],
    opened: ExitStack,
) -> tuple[Roster, LogError | None]:  # fmt: skip
    """Copy the donor's log of a partition to all other directories, then make them follow the topic's own one.

    Every directory records the highest end that any of them has published, `shown`, so damage is never mistaken for an
    unsynced tail. Returns the damage if the donor cannot be read.
    """
    files, identity, permissions = opening.files, opening.identity(number), opening.config.permissions
    source, damage = donor.partition(number), list[LogError]()
    if number in donor.copiers:  # it was to be brought up from another one, which turned out to be damaged
        donor.copiers.pop(number).detach_lock()
    log = FollowerLog(files, source, identity, permissions, held=donor.locks[number], shows=False)
    end, mark = log.end, log.mark
    log.publish_end(*shown)
    log.release_files()  # the lock stays with the directory
    target = mark.durable_to(end.end, end.last_batch)

    def bring_up(directory: MemberDirectory) -> None:
        if directory is donor or damage:
            return
        copier = _copier(opening, directory, number, source, opened)
        try:
            copier.advance(target, lambda _: None, restart=True, acknowledged=mark.flushed_end)
        except (CorruptLogError, StorageIOError) as error:  # further inside than `claim_of` looks
            damage.append(error)
            return
        for name in (CLOCK, gaps.NAME):
            copier.carry(name)
        copier.copied.publish_end(*shown)
        copier.copied.set_epoch_floor(epoch)

    roster = _in_each(opening, roster, bring_up)
    if damage:
        return roster, damage[0]
    if donor is not roster.own:
        roster.own.copiers.pop(number).detach_lock()
        for directory in roster.directories[1:]:
            _copier(opening, directory, number, roster.own.partition(number), opened)
    return roster, None


def _copier(
    opening: Opening, directory: MemberDirectory, number: int, source: str, opened: ExitStack
) -> LogCopier:  # fmt: skip
    """The copier of a partition from this source. If the partition is damaged, it is set aside, and made again."""
    files, identity, permissions = opening.files, opening.identity(number), opening.config.permissions
    if number in directory.copiers:
        directory.copiers[number].turn_to(SourceLog(files, source, identity))
        return directory.copiers[number]
    to, held = directory.partition(number), directory.locks.get(number)
    try:
        if number in directory.rotten:
            raise directory.rotten[number]
        log = SourceLog(files, source, identity)
        copier = LogCopier(files, log, to, identity, permissions, held=held, shows=False)
    except CorruptLogError as error:
        directory.locks.pop(number).release()
        _distrust(opening, directory)
        _set_aside(files, directory.path, to, error)
        copier = LogCopier(files, SourceLog(files, source, identity), to, identity, permissions, shows=False)
    directory.copiers[number], directory.locks[number] = copier, copier.copied.held
    opened.callback(copier.close)
    return copier


def _set_aside(files: Files, parent: str, partition: str, error: CorruptLogError) -> None:
    """Rename a damaged partition. Synced."""
    attempt = 0
    while files.exists(kept := f"{partition}.{_ROTTEN}-{attempt}"):
        attempt += 1
    files.move_directory(partition, kept)
    files.sync_directory(parent)
    logger.warning("%s: set aside in %s, and copied again from another directory: %s", partition, kept, error)


def _copy_description(opening: Opening, directory: MemberDirectory) -> None:
    content = opening.files.read_whole(os.path.join(opening.path, topic_file.NAME), topic_file.MOST_BYTES)
    with Directory.open(opening.files, directory.path) as place:
        place.sync()  # the names of the partitions
        place.replace(topic_file.NAME, content, opening.config.permissions)
