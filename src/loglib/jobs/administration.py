"""Administration of a share from outside: look at it, change its settings, reset it, evict a member, delete it.

Invariant: looking joins nothing and writes nothing. A share is reset and deleted only while it has no members. Each
change of what is in hand is an entry in the share's files, whose order decides, as for members.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, NamedTuple

from ..append.stats import SharePartitionStats, ShareStats
from ..errors import CorruptLogError, GroupBusyError, LogError, LogMovedError, ShareReplacedError
from ..groups.administration import check_no_members as check_no_group_members
from ..groups.administration import check_no_readers as check_no_group_readers
from ..log.lag import measure_lag
from ..log.lookup import StartLike
from ..system.files import Files
from .ack_log import AckLog, Pin, pins_of
from .directory import SHARES, ShareDirectory, check_settings, share_names
from .entries import DEAD, REAP, RELEASED
from .members import NOBODY, Member, file_of, live_members
from .state import Counts, Settings, State

logger = logging.getLogger("loglib")

_US = 1_000_000


class InHandInfo(NamedTuple):
    """A record in the hand of a member."""

    offset: int
    attempt: int
    member: str  # its name; "" if it is dead, and nobody has taken the record back yet
    since: int  # microseconds UTC, whole seconds


class SharePartition(NamedTuple):
    """A share in one partition."""

    settled_to: int  # all records before this offset are settled
    next_offset: int  # no record from here on was begun
    in_hand: tuple[InHandInfo, ...]
    free: int  # records that were begun before, or wait for their first time, and may be begun now or later
    waiting: dict[int, float]  # of these, the ones that wait: seconds from now, by offset
    counts: Counts  # records accepted, rejected, exhausted and lost since the share exists
    oldest: int | None  # when the oldest unsettled record was first begun: microseconds UTC; None: there is none
    blocked_by: str  # "window" or "max_in_hand" if no fresh record may be begun; else ""
    deferred: int = 0  # of the free ones, those that wait for earlier records of their keys
    dead_letters_due: int = 0  # records that are never handled again, and whose dead letters are not written yet
    is_of_another_log: bool = False  # the log is not the one whose records the share has settled: nobody can join

    def unbegun_from(self, end: int) -> int:
        """The offset from which on no record of a log with this end was begun. 0 if an older log was put in place."""
        return 0 if self.is_of_another_log or self.next_offset > end else self.next_offset


class ShareInfo(NamedTuple):
    """A share at one moment."""

    name: str
    settings: Settings
    members: dict[str, Member]  # the living members, by name
    partitions: dict[int, SharePartition]


def inspect(directory: ShareDirectory) -> ShareInfo:
    """Look at a share. `GroupNotFoundError` if there is none, `CorruptLogError` if it is damaged."""
    directory.require()
    try:
        return _inspect(directory)
    except (CorruptLogError, LogMovedError):
        directory.require()  # a share that was just deleted is neither damaged nor moved
        raise


def _inspect(directory: ShareDirectory) -> ShareInfo:
    members = live_members(directory.files, directory.members)
    names = {member.number: member.name for member in members}
    partitions = {}
    for partition in directory.partitions():
        with closing(directory.acks(partition, 0)) as acks:
            found = _inspected(acks.state, names, directory.clock.moment().boottime_us)
            partitions[partition] = found._replace(is_of_another_log=_is_of_another_log(directory, acks))
    return ShareInfo(directory.name, directory.settings(), {each.name: each for each in members}, partitions)


def _is_of_another_log(directory: ShareDirectory, acks: AckLog) -> bool:
    try:
        directory.check_history(acks)
    except LogError as error:  # a damaged log is reported where it is read
        return isinstance(error, ShareReplacedError)
    return False


def settled_to(directory: ShareDirectory) -> dict[int, int]:
    """For each partition of the share: all records before this offset are settled. `GroupNotFoundError` without it.

    A partition whose log is not the one of which the share has settled records is left out, with a warning.
    """
    directory.require()
    found = {}
    for partition in directory.partitions():
        with closing(directory.acks(partition, 0)) as acks:
            try:
                directory.check_history(acks)
            except ShareReplacedError as error:
                logger.warning("%s", error)
                continue
            found[partition] = acks.state.settled_to()
    return found


def figures(directory: ShareDirectory) -> ShareStats:
    """The figures of a share, for monitoring. `GroupNotFoundError` if there is none."""
    info = inspect(directory)
    logs, now_us = directory.find_logs(), directory.clock()
    partitions = {}
    for number, each in info.partitions.items():
        unbegun = each.unbegun_from(logs[number].mark().flushed_end)
        oldest_s = 0.0 if each.oldest is None else max(0.0, (now_us - each.oldest) / _US)
        partitions[number] = SharePartitionStats(
            len(each.in_hand), each.free, len(each.waiting), each.oldest, oldest_s, each.counts._asdict(),
            measure_lag(logs[number], unbegun, now_us=now_us),
        )  # fmt: skip
        logs[number].release_files()  # so that few of thousands of logs have open files
    return ShareStats(len(info.members), partitions)


def _inspected(state: State, names: Mapping[int, str], now_us: int) -> SharePartition:
    in_hand = sorted(
        InHandInfo(offset, hand.attempt, names.get(hand.member, ""), hand.begun * _US)
        for hand in state.hands.values() for offset in hand.offsets()
    )  # fmt: skip
    first = [hand.first_begun for hand in state.hands.values()] + [
        free.first_begun for free in state.free.values() if free.first_begun
    ]
    first += [doomed.first_begun for doomed in state.doomed.values()]
    waits = [(offset, free.until - now_us) for offset, free in sorted(state.free.items()) if free.until > now_us]
    waiting = {offset: wait_us / _US for offset, wait_us in waits}
    blocked_by = "" if state.may_take() else "max_in_hand"
    if not blocked_by and state.room() <= 0:
        blocked_by = "window"
    return SharePartition(
        state.settled_to(), state.fresh, tuple(in_hand), len(state.free) + len(state.deferred), waiting,
        Counts(*state.counts), min(first) * _US if first else None, blocked_by, len(state.deferred), len(state.doomed),
    )  # fmt: skip


def alter(directory: ShareDirectory, given: Mapping[str, Any]) -> Settings:
    """Change settings, for present and future members. Durable. `GroupNotFoundError` if there is no such share."""
    check_settings(given, directory.topic_path)
    directory.require()
    directory.check_role()
    settings = directory.alter(given)
    for partition in directory.partitions():
        with closing(_writing(directory, partition)) as acks:
            directory.follow_settings(acks)
    return settings


def reset(directory: ShareDirectory, start: StartLike) -> dict[int, int]:
    """Begin again at a start, while the share has no members; returns the offset of each partition. Durable.

    Partitions that are missing from a mapping stay unchanged.
    """
    directory.require()
    directory.check_role()
    _check_no_members(directory)
    _resolve(directory)
    logs = directory.find_logs()
    starts = directory.starts(start, logs, others=None)
    for partition, offset in starts.items():
        directory.make_added(partition)
        with closing(_writing(directory, partition)) as acks:
            acks.reset(offset)
    return starts


def delete(directory: ShareDirectory) -> None:
    """Delete a share, also with a damaged file. `GroupBusyError` if it has members, `GroupNotFoundError` without it."""
    directory.require()
    directory.check_role()
    try:
        _check_no_members(directory)
        _resolve(directory)
    except CorruptLogError as error:  # what transactions are to settle is not known; whoever applies them logs it
        logger.warning("share %s is deleted with a damaged file: %s", directory.name, error)
    directory.remove()


def evict(directory: ShareDirectory, member: str) -> dict[int, list[int]]:
    """Remove a member, which may hang, and take its records back; returns their offsets by partition.

    `LogError` if there is no such member.
    """
    directory.require()
    directory.check_role()
    live = live_members(directory.files, directory.members)
    numbers = [each.number for each in live if each.name == member]
    if not numbers:
        names = ", ".join(each.name for each in live)
        raise LogError(f"share {directory.name} has no member {member}; its members: {names or 'none'}")
    for number in numbers:  # first: the member looks at its file when it goes to another generation
        with suppress(FileNotFoundError):
            directory.files.unlink(os.path.join(directory.members, file_of(number)))
    taken: dict[int, list[int]] = {}
    for partition in directory.partitions():
        with closing(_writing(directory, partition)) as acks:
            hands = [each for each in acks.state.hands.values() if each.member in numbers]
            offsets = sorted(offset for hand in hands for offset in hand.loose())
            while not acks.state.gone.issuperset(numbers):  # the entry may have landed after a seal
                acks.append([acks.encode(REAP, DEAD, moment=each, offset=NOBODY) for each in numbers])
                acks.look()
            if offsets:
                taken[partition] = offsets
    return taken


def _resolve(directory: ShareDirectory) -> None:
    """Let no transaction settle records of the share any more."""
    for partition in directory.partitions():
        with closing(_writing(directory, partition)) as acks:
            directory.transactions.resolve(directory, _AllPins(partition, acks))


class _AllPins(NamedTuple):
    """The pinned records of a partition of a share without members: the `Doubts` of one who changes the share."""

    partition: int
    acks: AckLog

    def pins(self) -> list[Pin]:
        state = self.acks.look()
        hands = [(token, state.hands[token]) for token in sorted(state.pins)]
        return [pin for token, hand in hands for pin in pins_of(hand.member, token, sorted(hand.pinned), RELEASED)]

    def release(self, pins: Sequence[Pin]) -> None:
        self.acks.end_pins(pins)


def _writing(directory: ShareDirectory, partition: int) -> AckLog:
    return directory.acks(partition, NOBODY)


def _check_no_members(directory: ShareDirectory) -> None:
    if members := live_members(directory.files, directory.members):
        raise GroupBusyError(directory.name, [each.name for each in members], "share")


def check_no_members(files: Files, topic_path: str) -> None:
    """`GroupBusyError` if a group or a share that is stored with this topic has members."""
    check_no_group_members(files, topic_path)
    _check_no_share_members(files, topic_path)


def check_no_readers(files: Files, topic_path: str) -> None:
    """`GroupBusyError` also if a group of another topic beside this one has members that read it."""
    check_no_group_readers(files, topic_path)
    _check_no_share_members(files, topic_path)


def _check_no_share_members(files: Files, topic_path: str) -> None:
    for share in share_names(files, topic_path):
        with suppress(FileNotFoundError):
            directory = os.path.join(topic_path, SHARES, share, "members")
            if members := live_members(files, directory):
                raise GroupBusyError(share, [each.name for each in members], "share")
