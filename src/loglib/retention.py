"""Retention: which sealed segments must be dropped, and why. Pure policy, no clock and no disk.

Invariant: retention drops a partition's oldest segments, without gaps, and never the open one. By age it drops
only segments that are proved to be older than the limit (timeline.py).

Age counts from the moment when a segment was sealed, so its newest record is at least as old. A backfill of
old events is not dropped on arrival, and an event dated in the future keeps nothing. File times are not used,
because a copy or a restore changes them. Limits of bytes need no clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .config import LEAST_SEALED_BYTES, MAX_OFFSET, SEGMENTS_KEPT, Retention, microseconds
from .timeline import BELIEVED_AFTER_US, Age

__all__ = ["Candidate", "Decision", "Sealed", "Space", "due", "reason_to_keep", "segment_limit"]


class Space(NamedTuple):
    """The size and the free space of the file system, in bytes."""

    free: int
    total: int

    def is_short(self, policy: Retention) -> bool:
        """Whether less space is free than the policy demands."""
        return self.free < policy.keep_free * self.total


class Sealed(NamedTuple):
    """A sealed segment."""

    base_offset: int
    end_offset: int
    age: Age

    @property
    def size_bytes(self) -> int:
        return self.end_offset - self.base_offset


class Candidate(NamedTuple):
    """A partition whose segments may be dropped."""

    partition: int
    kept_bytes: int  # of all its segments, including the open one
    sealed: Iterable[Sealed]  # oldest first; read only as far as needed


class Decision(NamedTuple):
    """Whether a segment is dropped, and the reason in words."""

    partition: int
    base_offset: int
    size_bytes: int
    age_us: int | None  # least time since it was sealed; None for the open segment
    drop: bool
    reason: str
    path: str


def due(candidates: Iterable[Candidate], policy: Retention, space: Space) -> dict[int, list[str]]:
    """For each partition the reasons to drop its oldest segments: one reason per segment, oldest first.

    Age and bytes are limits of each partition. To free space, the oldest segments of all partitions go first.
    """
    fronts = [_Front(each) for each in candidates]
    for front in fronts:
        while front.oldest is not None and (reason := _beyond_limit(front.oldest, policy, front.kept_bytes)):
            front.give_up(reason)
    wanted = round(policy.keep_free * space.total)
    free = space.free + sum(front.freed_bytes for front in fronts)
    oldest = [(front.oldest.age.order, front.partition, front) for front in fronts if front.oldest is not None]
    heapq.heapify(oldest)
    while oldest and free < policy.keep_free * space.total:
        *_, front = heapq.heappop(oldest)
        free += front.give_up(f"{free} bytes free, {wanted} must stay free")
        if front.oldest is not None:
            heapq.heappush(oldest, (front.oldest.age.order, front.partition, front))
    return {front.partition: front.reasons for front in fronts}


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
    """Why the oldest remaining segment stays. Without an age it is the open segment."""
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

    def __init__(self, candidate: Candidate) -> None:
        self.partition = candidate.partition
        self.kept_bytes = candidate.kept_bytes
        self.freed_bytes = 0
        self.reasons: list[str] = []
        self._sealed: Iterator[Sealed] = iter(candidate.sealed)
        self.oldest = next(self._sealed, None)

    def give_up(self, reason: str) -> int:
        """Mark the oldest segment to be dropped, and return its size in bytes."""
        assert self.oldest is not None
        size_bytes = self.oldest.size_bytes
        self.reasons.append(reason)
        self.kept_bytes -= size_bytes
        self.freed_bytes += size_bytes
        self.oldest = next(self._sealed, None)
        return size_bytes


def _beyond_limit(segment: Sealed, policy: Retention, kept_bytes: int) -> str:
    if policy.age is not None and segment.age.at_least_us > microseconds(policy.age):
        return f"sealed {_words(segment.age.at_least_us)} ago, the limit is {policy.age}"
    if policy.bytes is not None and kept_bytes > policy.bytes:
        return f"the partition holds {kept_bytes} bytes, the limit is {policy.bytes}"
    return ""


def _words(age_us: int) -> str:
    seconds = age_us / 1_000_000
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} seconds"
