"""Health: what can be seen of a topic from outside that is no figure of `Topic.stats`: room, writers, copies.

Invariant: looking changes nothing, locks nothing and waits for nobody. `loglib check` compares these facts with limits,
and `loglib exporter` exports them, so each is found out in one place.

Threads: no state, safe for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from typing import NamedTuple

from ..copies.roster import Members, read_members
from ..errors import LogError, OffsetOutOfRangeError
from ..groups.administration import lost_places
from ..groups.directory import followed_groups
from ..log import copy_role
from ..log.history import SET_BACK, compare_history, point_at
from ..log.lag import Lag, total_lag
from ..log.log import Log
from ..retention import Space
from ..system.files import REAL
from ..system.lock import seen_locks
from ..topic import Topic

__all__ = ["CopyState", "LostPlace", "copies_of", "lost_places_of", "rooms_of", "writers_of"]


class CopyState(NamedTuple):
    """A directory of a topic with replicas, or a mirror. It lags the directory with the most, or its source."""

    path: str
    lag: Lag | None  # of all partitions together: bytes are added up, seconds are the longest; None if unknown
    error: str | None  # why it is unknown


class LostPlace(NamedTuple):
    """A commit of a group that is not in this history of the log: it was set back, and the group cannot continue."""

    group: str
    partition: int
    offset: int  # that is committed
    end: int  # of the log

    def __str__(self) -> str:
        now = f"ends at {self.end}" if self.offset > self.end else "has other records before it"
        return (
            f"group {self.group} has committed offset {self.offset} of partition {self.partition}, and the log {now}: "
            "it was set back, and the group cannot continue"
        )


def lost_places_of(topic: Topic) -> list[LostPlace]:
    """The commits of groups that are not in the history of this topic's log."""
    return [
        LostPlace(name, place.partition, offset, topic.partition(place.partition).high_watermark)
        for name in followed_groups(REAL, topic.path)
        for place, offset in lost_places(topic._group_directory(name)).items()  # noqa: SLF001
        if place.topic == topic.name
    ]


def rooms_of(topic: Topic) -> dict[str, Space]:
    """Free and all bytes of the file systems of a topic, by path: of its directory, and of its other ones, if it has.

    Free is what a user without privileges may use. A directory that cannot be reached is left out: `copies_of` has it.
    """
    found = {topic.path: Space(*REAL.free_space(topic.path))}
    members = read_members(REAL, topic.path)
    for path in () if members is None else members.paths.values():
        with suppress(OSError):
            found.setdefault(path, Space(*REAL.free_space(path)))
    return found


def writers_of(topic: Topic) -> dict[int, bool] | None:
    """For each partition, whether a process has it open for writing, by the system's list of locks (Linux).

    None if it cannot be seen: see `loglib.system.lock.seen_locks`.
    """
    paths = {each.path: each.id for each in topic.partitions}
    seen = seen_locks(REAL, paths)
    return None if seen is None else {paths[path]: held for path, held in seen.items()}


def copies_of(topic: Topic) -> list[CopyState]:
    """The directories of a topic with replicas, this one among them; of a mirror, its own directory.

    A copy on another host is not known here.
    """
    role = copy_role.read(REAL, topic.path)
    if role is None:
        return []
    if role.role == copy_role.REPLICA:
        return _replicas(topic)
    if role.role == copy_role.MIRROR and not role.of.startswith(copy_role.ELSEWHERE):
        return [_mirror(topic, role.of)]
    return []


def _mirror(topic: Topic, source: str) -> CopyState:
    ends = _ends(topic)  # before the source is looked at: what comes meanwhile is not missing
    try:
        with _opened(source, topic.log_id) as opened:
            if any(map(_is_beside, topic._logs(), opened._logs())):  # noqa: SLF001
                return CopyState(topic.path, None, f"its source {source} was set back, and has another history now")
            return CopyState(topic.path, _lag(opened, ends), None)
    except (LogError, OSError) as error:
        return CopyState(topic.path, None, f"its source {source}: {_why(error)}")


def _is_beside(copy: Log, source: Log) -> bool:
    """True if the copy has records that its source does not have."""
    with suppress(OffsetOutOfRangeError):  # retention has just dropped the end of the copy
        return compare_history([point_at(copy, copy.mark().flushed_end)], source).relation in SET_BACK
    return False


def _replicas(topic: Topic) -> list[CopyState]:
    own = read_members(REAL, topic.path)
    if own is None:
        return []
    found, failed = [_Directory(topic, own, _ends(topic))], list[CopyState]()
    with ExitStack() as at_end:
        for path in [each for id_, each in own.paths.items() if id_ != own.id]:
            try:
                opened = at_end.enter_context(_opened(path, topic.log_id))
                members = read_members(REAL, path)
                if members is None:  # it continues alone
                    return [_given_up(topic.path, [path])]
                found.append(_Directory(opened, members, _ends(opened)))
            except (LogError, OSError) as error:
                failed.append(CopyState(path, None, _why(error)))
        newest = max((each.members for each in found), key=lambda each: each.version)
        furthest = max(found, key=lambda each: sum(each.ends))
        return [*(_state(each, furthest, newest) for each in found), *failed]


class _Directory(NamedTuple):
    """A directory of a topic with replicas that can be read."""

    topic: Topic
    members: Members  # the list that it has
    ends: list[int]


def _state(directory: _Directory, furthest: _Directory, newest: Members) -> CopyState:
    path = directory.topic.path
    if directory.members.id not in newest.paths:
        return _given_up(path, newest.paths.values())
    return CopyState(path, Lag(0, 0.0) if directory is furthest else _lag(furthest.topic, directory.ends), None)


def _given_up(path: str, others: Iterable[str]) -> CopyState:
    return CopyState(path, None, f"it was given up; the topic is now in {', '.join(others)}")


def _opened(path: str, log_id: bytes) -> closing[Topic]:
    topic = Topic.open(path, mode="r")
    if topic.log_id != log_id:
        topic.close()
        raise LogError("holds another topic")
    return closing(topic)


def _ends(topic: Topic) -> list[int]:
    return [each.high_watermark for each in topic.partitions]


def _lag(topic: Topic, ends: Sequence[int]) -> Lag:
    """The lag of a copy whose partitions have these ends, to the topic."""
    missing = [0] * (len(topic.partitions) - len(ends))
    return total_lag(each.lag(end) for each, end in zip(topic.partitions, [*ends, *missing], strict=False))


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no topic is there"
    return str(error) if isinstance(error, LogError) or not isinstance(error, OSError) else str(error.strerror)
