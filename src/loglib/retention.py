"""Retention: which sealed segments are to be dropped, and why. Pure policy, no clock and no disk.

Invariant: what is dropped is a run of the oldest segments, never the open one; a segment whose age
is unknown is kept, and so is everything after it.

Age counts from the segment's newest *append* time, which the log's own clock gave: a backfill of
old events does not vanish on arrival, an event dated in the future pins nothing, and file times,
which a copy or a restore changes, are not asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .config import Retention, microseconds
from .segment import SegmentInfo

__all__ = ["Decision", "Space", "decide"]


class Space(NamedTuple):
    """The file system's bytes."""

    free: int
    total: int


class Decision(NamedTuple):
    """What becomes of one segment, and the reason in words."""

    partition: int
    base_offset: int
    size_bytes: int
    age_us: int | None  # since its newest record was appended; None for the open segment
    drop: bool
    reason: str
    path: str


def decide(
    partition: int, segments: Sequence[SegmentInfo], policy: Retention, *, now_us: int, space: Space
) -> list[Decision]:
    """A decision for each segment, oldest first."""
    decisions: list[Decision] = []
    kept_bytes = sum(segment.size_bytes for segment in segments)
    free = space.free
    keeping = ""  # why the rest stays, once one does
    for segment in segments:
        age = None if segment.last_append_time is None else now_us - segment.last_append_time
        reason = "" if keeping else _reason_to_drop(segment, age, policy, kept_bytes, Space(free, space.total))
        if reason:
            kept_bytes -= segment.size_bytes
            free += segment.size_bytes
        elif not keeping:
            keeping = _reason_to_keep(segment, age)
        decisions.append(
            Decision(
                partition, segment.base_offset, segment.size_bytes, age, bool(reason), reason or keeping, segment.path
            )
        )
        keeping = keeping and "an older segment stays"
    return decisions


def _reason_to_drop(segment: SegmentInfo, age: int | None, policy: Retention, kept_bytes: int, space: Space) -> str:
    if not segment.sealed or age is None:
        return ""
    if policy.age is not None and age > microseconds(policy.age):
        return f"newest record appended {_words(age)} ago, the limit is {policy.age}"
    if policy.bytes is not None and kept_bytes > policy.bytes:
        return f"the partition holds {kept_bytes} bytes, the limit is {policy.bytes}"
    if space.free < policy.keep_free * space.total:
        return f"{space.free} bytes free, {round(policy.keep_free * space.total)} are to stay free"
    return ""


def _reason_to_keep(segment: SegmentInfo, age: int | None) -> str:
    if not segment.sealed:
        return "the segment being written"
    return "its age is unknown" if age is None else f"within all limits at {_words(age)}"


def _words(age_us: int) -> str:
    seconds = age_us / 1_000_000
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} seconds"
