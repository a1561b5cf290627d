"""Shares: who works on the records of a topic one by one: members, what is in hand, what waits, what is dead.

Invariant: a share is looked at from outside, as `Topic.share_info` does: nobody joins it, and nothing is written. A
look replays the share's files, so it serves all who ask for ten times as long as it took: looks take a tenth of one
core at most. Long lists come in parts.

Threads: safe for all.
"""

from __future__ import annotations

import os
import shlex
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from ..errors import GroupNotFoundError, LogClosedError, LogError, LogMovedError
from ..jobs import ShareInfo, SharePartition
from ..jobs.directory import SHARES
from ..partition import Partition
from ..system.clock import monotonic
from ..system.not_copyable import NotCopyable
from ..topic import Topic
from .topics import Topics, log_of
from .troubles import Trouble, command

_FRESH_S = 1.5
_COST = 10.0  # a look that takes a second serves for ten
_MOST_KEPT = 32  # topics whose shares are kept
_MOST_MEMBERS = 100  # of a share that are listed
_MOST_TROUBLES = 20  # of a topic's shares

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShareSums:
    """A share in all partitions of its topic. The figures are 0 if it cannot be read: `error` says why."""

    name: str
    members: int = 0
    in_hand: int = 0  # records
    waiting: int = 0  # records that were released, and may not be begun yet
    free: int = 0  # records that were begun before, and may be begun again now
    accepted: int = 0
    dead: int = 0  # records that were rejected or exhausted: they do not come again
    lost: int = 0  # records that retention has dropped after they were begun
    left_bytes: int = 0  # of log that nobody has begun
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ShareMember:
    """A living member."""

    name: str  # empty while it is joining
    pid: int
    host: str
    since: str  # when it joined, by its own clock: ISO 8601, UTC
    boot: str  # names the boot of its machine: 32 hexadecimal digits
    in_hand: int  # records, of all partitions


@dataclass(frozen=True, slots=True)
class WorkedRow:
    """A share in one partition. Offsets are text, since JavaScript rounds large numbers."""

    partition: int
    settled_to: str
    next_offset: str  # no record from here on was begun
    log_start_offset: str  # above `next_offset` if retention has dropped the log there, begun or not
    high_watermark: str
    left_bytes: int  # of log that nobody has begun
    in_hand: int
    waiting: int
    free: int
    accepted: int
    dead: int
    lost: int
    oldest_us: int | None  # when the oldest unsettled record was first begun
    blocked_by: str  # "window", "max_in_hand" or nothing


@dataclass(frozen=True, slots=True)
class HandRow:
    """A record in the hand of a member."""

    partition: int
    offset: str
    attempt: int
    member: str  # empty: it has died, and nobody has taken the record back yet
    since_us: int


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A record that was released, and waits."""

    partition: int
    offset: str
    seconds: float  # from now


@dataclass(frozen=True, slots=True)
class ShareFacts:
    """One share. `members`, `partitions`, `in_hand` and `waiting` are parts of longer lists."""

    sums: ShareSums
    settings: dict[str, Any]
    members: list[ShareMember]
    partitions: list[WorkedRow]
    all_partitions: int
    in_hand: list[HandRow]  # the longest in hand first
    waiting: list[WaitingRow]  # the next to come first
    now_us: int


class Part(NamedTuple):
    """A part of a list: from this number on, up to a size."""

    start: int
    size: int

    def of(self, items: list[T]) -> list[T]:
        """The items in this part."""
        return items[self.start : self.start + self.size]


class _Log(NamedTuple):
    """The log of a partition."""

    start: int
    end: int
    left_bytes: dict[str, int]  # that nobody has begun, by share


class _Look(NamedTuple):
    """The shares of a topic at one moment."""

    path: str
    infos: dict[str, ShareInfo | str]  # the text of an error for one that cannot be read
    logs: dict[int, _Log]  # by partition


class _Kept(NotCopyable):
    """The last look at a topic."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held for one look; a second thread that asks waits for its result
        self.due = 0.0
        self.look: _Look | None = None


class Shares(NotCopyable):
    """The shares of the topics that were asked for last."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def sums(self, name: str, part: Part) -> tuple[list[ShareSums], int]:
        """A part of the topic's shares, sorted by name, and their number. Raises what opening the topic raises."""
        look = self._look(name)
        return [_sums(look, each) for each in part.of(list(look.infos))], len(look.infos)

    def troubles(self, name: str) -> list[Trouble]:
        """The reasons why shares of the topic do not continue, or cannot be read."""
        look = self._look(name)
        found = (each for share, info in look.infos.items() for each in _troubles(look, share, info))
        return list(islice(found, _MOST_TROUBLES))

    def facts(
        self, name: str, share: str, *, partitions: Part, in_hand: Part, waiting: Part, now_us: int
    ) -> ShareFacts:  # fmt: skip
        """The facts of one share. `GroupNotFoundError` if the topic has none of this name."""
        look = self._look(name)
        info = look.infos.get(share)
        if info is None:
            raise GroupNotFoundError(look.path, share, list(look.infos))
        if isinstance(info, str):
            return ShareFacts(_sums(look, share), {}, [], [], 0, [], [], now_us)
        holds = Counter(each.member for one in info.partitions.values() for each in one.in_hand)
        members = [
            ShareMember(each.name, each.pid, each.host, each.since, each.boot, holds[each.name])
            for each in list(info.members.values())[:_MOST_MEMBERS]
        ]
        known = [(number, one) for number, one in info.partitions.items() if number in look.logs]
        rows = [_worked(share, number, one, look.logs[number]) for number, one in partitions.of(known)]
        return ShareFacts(
            _sums(look, share), info.settings._asdict(), members, rows, len(known),
            _in_hand(info, in_hand), _waiting(info, waiting), now_us,
        )  # fmt: skip

    def _look(self, name: str) -> _Look:
        """A look that is not older than a moment, or than ten times what it has cost."""
        with self._lock:
            kept = self._kept.setdefault(name, _Kept())
            self._kept.move_to_end(name)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        with kept.lock:
            began = monotonic()
            if kept.look is None or began >= kept.due:
                kept.look = None
                kept.look = self._topics.ask(name, _looked)
                ended = monotonic()
                kept.due = ended + max(_FRESH_S, (ended - began) * _COST)
            return kept.look


def _looked(topic: Topic) -> _Look:
    infos: dict[str, ShareInfo | str] = {}
    names = topic.shares()
    for share in names:
        try:
            infos[share] = topic.share_info(share)
        except (LogMovedError, LogClosedError):  # the topic is opened again
            raise
        except GroupNotFoundError:  # it was deleted just now
            continue
        except (LogError, OSError, ValueError) as error:
            infos[share] = str(error)
    found = topic.partitions if infos else ()
    logs = {each.id: _Log(each.log_start_offset, each.high_watermark, _left(each, infos)) for each in found}
    return _Look(topic.path, infos, logs)


def _left(partition: Partition, infos: Mapping[str, ShareInfo | str]) -> dict[str, int]:
    """The bytes of log that nobody has begun, by share. Where the batch is damaged, it may be a batch more."""
    log = log_of(partition)
    mark = log.mark()
    start, end = mark.log_start_offset, mark.flushed_end
    left: dict[str, int] = {}
    try:
        for share, info in infos.items():
            begun = info.partitions.get(partition.id) if not isinstance(info, str) else None
            place = start if begun is None else max(start, begun.unbegun_from(end))
            with suppress(LogError):
                if start < place < end:  # the offset after the last record of a batch is none of the next batch
                    header = log.header_around(place - 1, mark)
                    place = header.next_offset if place >= header.offsets.stop else place
            left[share] = max(0, end - place)
    finally:
        log.release_files()
    return left


def _sums(look: _Look, share: str) -> ShareSums:
    info = look.infos[share]
    if isinstance(info, str):
        return ShareSums(share, error=info)
    parts = info.partitions.values()
    waiting = sum(len(one.waiting) for one in parts)
    return ShareSums(
        share, len(info.members), sum(len(one.in_hand) for one in parts), waiting,
        sum(one.free for one in parts) - waiting, sum(one.counts.accepted for one in parts), sum(map(_dead, parts)),
        sum(one.counts.lost for one in parts), sum(each.left_bytes[share] for each in look.logs.values()),
    )  # fmt: skip


def _dead(one: SharePartition) -> int:
    return one.counts.rejected + one.counts.exhausted


def _worked(share: str, number: int, one: SharePartition, log: _Log) -> WorkedRow:
    return WorkedRow(
        number, str(one.settled_to), str(one.next_offset), str(log.start), str(log.end), log.left_bytes[share],
        len(one.in_hand), len(one.waiting), one.free - len(one.waiting), one.counts.accepted, _dead(one),
        one.counts.lost, one.oldest, one.blocked_by,
    )  # fmt: skip


def _in_hand(info: ShareInfo, part: Part) -> list[HandRow]:
    found = ((each.since, number, each.offset, each) for number, one in info.partitions.items() for each in one.in_hand)
    return [
        HandRow(number, str(offset), each.attempt, each.member, since)
        for since, number, offset, each in part.of(nsmallest(part.start + part.size, found))
    ]


def _waiting(info: ShareInfo, part: Part) -> list[WaitingRow]:
    found = (
        (seconds, number, offset) for number, one in info.partitions.items() for offset, seconds in one.waiting.items()
    )
    return [
        WaitingRow(number, str(offset), seconds)
        for seconds, number, offset in part.of(nsmallest(part.start + part.size, found))
    ]


def _troubles(look: _Look, share: str, info: ShareInfo | str) -> Iterator[Trouble]:
    if isinstance(info, str):
        files = os.path.join(look.path, SHARES, share)
        yield Trouble("share", f"share {share} cannot be read: {info}", f"ls -lR {shlex.quote(files)}")
        return
    for number, one in info.partitions.items():
        if one.blocked_by == "window":
            text = (
                f"share {share} begins no other record of partition {number}: {info.settings.window:,} records are "
                f"begun and not settled, as many as its window allows; the first of them has offset {one.settled_to}"
            )
            look_at = command("cat", look.path, "-p", str(number), "--from", f"{number}:{one.settled_to}", "-n", "1")
            yield Trouble("share", text, look_at)
