"""Retention: which sealed segments must be dropped, and why. Pure policy, no clock and no disk.

Invariant: retention drops a partition's oldest segments, without gaps, and never the open one. By age it drops
only segments that are proved to be older than the limit (log/ages.py). What a group of `hold_for` has not read is
dropped beyond a ceiling only, or when nothing else can free the space that must be free. What an archive must have
first, and has not, is never dropped.

Age counts from the moment when a segment was sealed, so its newest record is at least as old. A backfill of
old events is not dropped on arrival, and an event dated in the future keeps nothing. File times are not used,
because a copy or a restore changes them. Limits of bytes need no clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import cache
from typing import NamedTuple

from .config.policies import LEAST_SEALED_BYTES, MAX_OFFSET, SEGMENTS_KEPT, Retention
from .config.quantities import microseconds
from .log.ages import BELIEVED_AFTER_US, Age


class Space(NamedTuple):
    """The size and the free space of the file system, in bytes."""

    free: int
    total: int

    def is_short(self, policy: Retention) -> bool:
        """True if less space is free than the policy demands."""
        return self.free < policy.keep_free * self.total


class Sealed(NamedTuple):
    """A sealed segment."""

    base_offset: int
    end_offset: int
    age: Age

    @property
    def size_bytes(self) -> int:
        return self.end_offset - self.base_offset


class Hold(NamedTuple):
    """The commit of the slowest group: segments that end above it must stay."""

    holder: str  # the group; of an `ArchiveHold` the path of the archive's directory
    offset: int | None  # None: all of the partition stays, since the holder has nothing of it

    def keeps(self, segment: Sealed) -> bool:
        return self.offset is None or segment.end_offset > self.offset

    def __str__(self) -> str:
        done = "has committed nothing" if self.offset is None else f"has committed offset {self.offset}"
        return f"group {self.holder} {done}"


class ShareHold(Hold):
    """The first record that a share has not settled: segments that end above it must stay."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"share {self.holder} has settled all records before offset {self.offset}"


class ArchiveHold(Hold):
    """The end of what an archive holds safely: segments that end above it must stay."""

    __slots__ = ()

    def __str__(self) -> str:
        done = "nothing" if self.offset is None else f"offsets below {self.offset}"
        return f"the archive {self.holder} has held {done} for its grace time"


# What an archive has of a partition, without a gap from an offset on. Raises nothing.
ArchiveHolds = Callable[[int, int], ArchiveHold]


class Candidate(NamedTuple):
    """A partition whose segments may be dropped."""

    partition: int
    kept_bytes: int  # of all its segments, including the open one
    sealed: Iterable[Sealed]  # oldest first; at most one more is read than is dropped
    hold: Callable[[], Hold | None] = lambda: None  # called at most once, and only if a segment is due
    archived: Callable[[], ArchiveHold | None] = lambda: None  # likewise


class RetentionPlan(NamedTuple):
    """The segments of a partition to drop, oldest first, as one reason each; and what prevents the next due one."""

    reasons: list[str]
    blocker: Hold | None = None
    held_against: str = ""  # the reason to drop the segment that is held


class SegmentDecision(NamedTuple):
    """The decision on one segment, with its reason."""

    partition: int
    base_offset: int
    size_bytes: int
    age_us: int | None  # least time since it was sealed; None for the open segment
    drop: bool
    reason: str
    path: str
    held_by: str | None = None  # the group, or the archive's directory, without which it would be dropped


def due(candidates: Iterable[Candidate], policy: Retention, space: Space) -> dict[int, RetentionPlan]:
    """The plan for each partition. Only its oldest segments are dropped.

    Age and bytes are limits of each partition. To free space, the oldest segments of all partitions are dropped first,
    and what a group holds last.
    """
    fronts = [_Front(each, policy) for each in candidates]
    for front in fronts:
        while (reason := front.beyond_limit()) and front.blocker() is None:
            front.drop_oldest(reason)
    free = space.free + sum(front.freed_bytes for front in fronts)
    if space.is_short(policy):
        free = _free_space(fronts, policy, space, free, held=False)
        _free_space(fronts, policy, space, free, held=True)
    return {front.partition: front.plan() for front in fronts}


def _free_space(fronts: Iterable[_Front], policy: Retention, space: Space, free: int, *, held: bool) -> int:
    """Drop the oldest segments until enough is free, with `held` also what groups hold; returns the free bytes."""
    wanted = round(policy.keep_free * space.total)
    oldest = [each for front in fronts for each in front.in_order(held=held)]
    heapq.heapify(oldest)
    while oldest and free < policy.keep_free * space.total:
        *_, front = heapq.heappop(oldest)
        free += front.drop_oldest(f"{free} bytes free, {wanted} must stay free")
        for each in front.in_order(held=held):
            heapq.heappush(oldest, each)
    return free


def segment_limit(policy: Retention, space: Space, partitions: int) -> int:
    """The largest size of a segment in bytes, given the free space.

    The topic's open segments together take at most a quarter of the free space, and of the space that the policy
    leaves to the topic. So a pass runs before the disk is full, and finds sealed segments.
    """
    if not policy.keep_free:
        return MAX_OFFSET
    room = min(space.free, round((1 - policy.keep_free) * space.total))
    return max(LEAST_SEALED_BYTES, room // (SEGMENTS_KEPT * partitions))


def reason_to_keep(age: Age | None, policy: Retention, *, believed: bool, steady_us: int) -> str:
    """The reason why the oldest remaining segment stays. Without an age it is the open segment."""
    if age is None:
        return "the segment that is being written"
    if age.exact or policy.age is None:
        return f"within all limits at {'' if age.exact else 'no less than '}{_words(age.at_least_us)}"
    if believed:
        return f"sealed while the clock could not be believed; at least {_words(age.at_least_us)} ago"
    return (
        f"at least {_words(age.at_least_us)} old; the clock has run for {_words(steady_us)} without a jump, "
        f"and is believed after {BELIEVED_AFTER_US // 60_000_000} minutes"
    )


class _Front:
    """The oldest remaining segment of a partition, while segments are marked to be dropped."""

    def __init__(self, candidate: Candidate, policy: Retention) -> None:
        self.partition = candidate.partition
        self.kept_bytes = candidate.kept_bytes
        self.freed_bytes = 0
        self.reasons: list[str] = []
        self._policy = policy
        self._hold = cache(candidate.hold)
        self._archived = cache(candidate.archived)
        self._sealed: Iterator[Sealed] = iter(candidate.sealed)
        self.oldest = next(self._sealed, None)

    def beyond_limit(self) -> str:
        """The reason to drop the oldest segment by age or bytes; empty if there is none."""
        return "" if self.oldest is None else self._beyond(self.oldest, self._policy.age, self._policy.bytes)

    def blocker(self) -> Hold | None:
        """The hold on the oldest segment. A hold of a group ends beyond its ceiling."""
        if self.oldest is not None and (unarchived := self._unarchived(self.oldest)) is not None:
            return unarchived
        if self.oldest is None or self._beyond(self.oldest, self._policy.hold_age, self._policy.hold_bytes):
            return None
        return self._hold_on(self.oldest)

    def in_order(self, *, held: bool) -> list[tuple[tuple[int, int], int, _Front]]:
        """The oldest segment's rank among those of all, if it may be dropped; `held`: also if a group holds it."""
        if self.oldest is None or self._unarchived(self.oldest) is not None:
            return []
        if not held and self.blocker() is not None:
            return []
        return [(self.oldest.age.order, self.partition, self)]

    def plan(self) -> RetentionPlan:
        """The segments that are marked to be dropped, and what holds the next one if that is due."""
        reason = self.beyond_limit()
        return RetentionPlan(self.reasons, self.blocker(), reason) if reason else RetentionPlan(self.reasons)

    def drop_oldest(self, reason: str) -> int:
        """Mark the oldest segment to be dropped, and return its size in bytes."""
        assert self.oldest is not None
        size_bytes = self.oldest.size_bytes
        hold = self._hold_on(self.oldest)
        if hold is not None:
            reason = self._beyond(self.oldest, self._policy.hold_age, self._policy.hold_bytes) or reason
            reason += f"; {hold}, and loses records"
        self.reasons.append(reason)
        self.kept_bytes -= size_bytes
        self.freed_bytes += size_bytes
        self.oldest = next(self._sealed, None)
        return size_bytes

    def _unarchived(self, segment: Sealed) -> ArchiveHold | None:
        archived = self._archived()
        return archived if archived is not None and archived.keeps(segment) else None

    def _hold_on(self, segment: Sealed) -> Hold | None:
        hold = self._hold() if self._policy.hold_for else None
        return hold if hold is not None and hold.keeps(segment) else None

    def _beyond(self, segment: Sealed, age: timedelta | None, limit_bytes: int | None) -> str:
        if age is not None and segment.age.at_least_us > microseconds(age):
            return f"sealed {_words(segment.age.at_least_us)} ago, the limit is {age}"
        if limit_bytes is not None and self.kept_bytes > limit_bytes:
            return f"the partition holds {self.kept_bytes} bytes, the limit is {limit_bytes}"
        return ""


def _words(age_us: int) -> str:
    seconds = age_us / 1_000_000
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} seconds"
