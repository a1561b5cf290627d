"""Segments: the files of a partition, and why each of them stays or goes.

Invariant: the reason is that of retention itself, from a dry run that locks and drops nothing. A long list comes in
parts; the whole of it is explained for the first part, and kept for some seconds for the others.

Threads: safe for all.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from ..config.uri import is_remote
from ..partition import Partition
from ..retention import SegmentDecision
from ..system.clock import monotonic
from ..system.not_copyable import NotCopyable
from ..topic import Topic
from .topics import Topics
from .troubles import archive_of, command

_FRESH_S = 10.0
_MOST_KEPT = 8  # partitions whose segments are kept
_NOT_ASKED = "retention waits for an archive in an object store, which this page does not ask; see the command"


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One segment."""

    name: str
    base_offset: str
    end_offset: str
    size_bytes: int
    is_sealed: bool
    created_us: int
    last_append_us: int | None  # None while it is open
    goes: bool  # True if the next pass of retention drops it
    reason: str
    held_by: str | None  # the group or the archive without which it would go


@dataclass(frozen=True, slots=True)
class SegmentPage:
    """A part of the segments of a partition, oldest first, and what all of them are together."""

    partition: int
    segments: list[SegmentRow]
    start: int
    total: int
    total_bytes: int
    going: int
    going_bytes: int
    command: str  # that explains the same in a shell


class Segments(NotCopyable):
    """The explained segments of the partitions that were asked for last."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._kept: dict[tuple[str, int], tuple[float, list[SegmentRow]]] = {}
        self._lock = threading.Lock()

    def page(self, name: str, partition: int, start: int, count: int) -> SegmentPage:
        """`count` segments from number `start` on. A negative `start` counts from the end."""
        rows = self._rows(name, partition)
        start = max(0, len(rows) + start) if start < 0 else start
        going = [each for each in rows if each.goes]
        return SegmentPage(
            partition, rows[start : start + count], start, len(rows), sum(each.size_bytes for each in rows),
            len(going), sum(each.size_bytes for each in going),
            command("retain", self._topics.path_of(name), "--dry-run"),
        )  # fmt: skip

    def _rows(self, name: str, partition: int) -> list[SegmentRow]:
        with self._lock:
            at, rows = self._kept.get((name, partition), (-_FRESH_S, []))
        if monotonic() - at < _FRESH_S:
            return rows
        rows = self._topics.ask(name, lambda topic: explained(topic, topic.partition(partition)))
        with self._lock:
            self._kept[name, partition] = monotonic(), rows
            while len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
        return rows


def explained(topic: Topic, partition: Partition) -> list[SegmentRow]:
    """The segments of a partition, oldest first, each with the decision of retention and its reason."""
    place = archive_of(topic)
    decisions: dict[int, SegmentDecision] = {}
    if place is None or not is_remote(place):
        _ = topic.config  # so that policies that another process has changed count
        decisions = {each.base_offset: each for each in partition.retain(dry_run=True)}
    rows: list[SegmentRow] = []
    for each in partition.segments:
        decision = decisions.get(each.base_offset)
        if decision is not None:
            goes, reason, held_by = decision.drop, decision.reason, decision.held_by
        else:
            goes, held_by = False, None
            reason = "it has just been begun" if place is None or not is_remote(place) else _NOT_ASKED
        rows.append(
            SegmentRow(
                os.path.basename(each.path), str(each.base_offset), str(each.end_offset), each.size_bytes, each.sealed,
                each.created, each.last_append_time, goes, reason, held_by,
            )
        )  # fmt: skip
    return rows
