"""Overview: a topic in one row, and the facts of one topic: partitions, policies, copies, its archive.

Invariant: the figures are those of `Topic.stats`, taken by the sampler, and those of shares are from a look that their
view has, too. So a row costs nothing that the charts and the views have not paid for. Long lists come in parts.

Threads: safe for all.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..config.uri import is_remote
from ..errors import LogError
from ..log import copy_role
from ..log.copy_role import is_tier
from ..log.lag import total_lag
from ..metrics.health import copies_of, rooms_of, writers_of
from ..offload.archiving import archived
from ..offload.storage import storage_of
from ..offload.tiering import tiered
from ..system.clock import monotonic
from ..system.files import REAL
from ..system.not_copyable import NotCopyable
from ..topic import Topic
from .samples import Sampler
from .shares import Part, Shares, ShareSums
from .topics import Topics
from .troubles import Trouble, archive_of, command, trouble_of, troubles_of

_FRESH_S = 10.0  # a look for troubles costs some reads for each partition
_SHARES = Part(0, 20)  # of a topic, in a row
_MOST_DAMAGE = 50  # that readers of the page have met, for each topic


@dataclass(frozen=True, slots=True)
class GroupLag:
    """The lag of a group in all partitions of a topic."""

    name: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TopicRow:
    """A topic among others. Figures are None if the topic cannot be read: `troubles` says why."""

    name: str
    path: str
    partitions: int | None
    size_bytes: int | None
    records: int | None
    records_are_all: bool  # False: there are at least that many; the rest is not counted
    records_per_s: float | None  # None until there are two samples
    bytes_per_s: float | None
    oldest_us: int | None  # append time of the oldest batch
    newest_us: int | None
    groups: list[GroupLag]
    shares: list[ShareSums]  # the first ones
    all_shares: int
    troubles: list[Trouble]
    now_us: int


@dataclass(frozen=True, slots=True)
class PartitionRow:
    """A partition of a topic."""

    partition: int
    log_start_offset: str  # offsets are text: JavaScript rounds large numbers
    high_watermark: str
    size_bytes: int
    segments: int
    oldest_us: int | None
    newest_us: int | None
    is_written: bool | None  # a process has it open for writing; None where the system does not show it


@dataclass(frozen=True, slots=True)
class CopyRow:
    """A directory of a topic with replicas, or a mirror with its source."""

    path: str
    lag_bytes: int | None
    lag_seconds: float | None
    error: str | None


@dataclass(frozen=True, slots=True)
class ArchiveFacts:
    """The archive or place that retention waits for."""

    path: str
    kind: str  # "archive", "tier", or "object store", which is not asked
    committed_us: int | None
    records: int | None
    bytes: int | None
    ends: dict[str, str]  # by partition, the offset up to which it holds the log
    lacks_bytes: int | None  # bytes of the log above these ends, with the open segments
    error: str | None
    command: str


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """One topic."""

    row: TopicRow
    log_id: str
    role: str  # "leader" for a topic of its own, or the role of a copy
    role_of: str | None  # the source of a copy
    policies: dict[str, Any]
    copies: list[CopyRow]
    archive: ArchiveFacts | None
    rooms: dict[str, tuple[int, int]]  # free and all bytes of each file system, by path


class Overview(NotCopyable):
    """Rows and facts of the topics at a path, with what readers of the page have met."""

    def __init__(self, topics: Topics, sampler: Sampler, shares: Shares) -> None:
        self._topics = topics
        self._sampler = sampler
        self._shares = shares
        self._troubles: dict[str, tuple[float, list[Trouble]]] = {}
        self._met: dict[str, dict[str, None]] = {}  # texts of damage, in the order in which they were met
        self._lock = threading.Lock()

    def note_damage(self, name: str, texts: Iterable[str]) -> None:
        """Remember damage that a reader has met in a topic."""
        with self._lock:
            met = self._met.setdefault(name, {})
            for text in texts:
                if text not in met and len(met) < _MOST_DAMAGE:
                    met[text] = None
                    self._troubles.pop(name, None)

    def row(self, name: str) -> TopicRow:
        """The row of a topic, also of one that cannot be read. `FileNotFoundError` if there is none."""
        path, now_us = self._topics.path_of(name), time.time_ns() // 1000
        troubles = self.troubles(name)
        try:
            stats, count = self._sampler.taken(name)
        except (LogError, OSError, ValueError) as error:
            found = trouble_of(path, error)
            troubles = troubles if found in troubles else [found, *troubles]
            return TopicRow(name, path, None, None, None, False, None, None, None, None, [], [], 0, troubles, now_us)
        shares, all_shares, found_in_shares = self._shares_of(name, path)
        troubles = list(dict.fromkeys([*troubles, *found_in_shares]))
        records_per_s, bytes_per_s = self._sampler.rate_now(name)
        lags = {group: total_lag(each.values()) for group, each in sorted(stats.lag.items())}
        groups = [GroupLag(group, lag.bytes, lag.seconds) for group, lag in lags.items()]
        return TopicRow(
            name, path, len(stats.partitions), stats.size_bytes, count.records, count.is_whole, records_per_s,
            bytes_per_s, stats.oldest, stats.newest, groups, shares, all_shares, troubles, now_us,
        )  # fmt: skip

    def _shares_of(self, name: str, path: str) -> tuple[list[ShareSums], int, list[Trouble]]:
        """The first shares of a topic, their number, and the reasons why they do not continue or cannot be read."""
        try:
            return *self._shares.sums(name, _SHARES), self._shares.troubles(name)
        except FileNotFoundError:
            raise
        except (LogError, OSError, ValueError) as error:
            return [], 0, [trouble_of(path, error)]

    def troubles(self, name: str) -> list[Trouble]:
        """The troubles of a topic, looked for at most every ten seconds."""
        with self._lock:
            at, found = self._troubles.get(name, (-_FRESH_S, []))
            met = tuple(self._met.get(name, ()))
        if monotonic() - at < _FRESH_S:
            return found
        try:
            found = self._topics.ask(name, lambda topic: troubles_of(topic, damage_met=met))
        except FileNotFoundError:
            raise
        except (LogError, OSError, ValueError) as error:
            found = [trouble_of(self._topics.path_of(name), error)]
        with self._lock:
            self._troubles[name] = monotonic(), found
        return found

    def facts(self, name: str) -> TopicFacts:
        """The facts of a topic. Raises what opening it raises."""
        row = self.row(name)

        def look(topic: Topic) -> TopicFacts:
            role = copy_role.read(REAL, topic.path)
            rooms = {path: (room.free, room.total) for path, room in rooms_of(topic).items()}
            return TopicFacts(
                row, topic.log_id.hex(), copy_role.LEADER if role is None else role.role,
                None if role is None else role.of or None, topic.config.to_json(), copies(topic), archive_facts(topic),
                rooms,
            )  # fmt: skip

        return self._topics.ask(name, look)

    def partitions(self, name: str, start: int, count: int) -> tuple[list[PartitionRow], int]:
        """A part of the partitions, and their number."""
        stats = self._sampler.taken(name).stats
        part = stats.partitions[start : start + count]
        written = self._topics.ask(name, writers_of) if part else None
        return [
            PartitionRow(
                each.partition, str(each.log_start_offset), str(each.high_watermark), each.size_bytes, each.segments,
                each.oldest, each.newest, None if written is None else written.get(each.partition),
            )
            for each in part
        ], len(stats.partitions)  # fmt: skip


def copies(topic: Topic) -> list[CopyRow]:
    """The other directories of a topic with replicas, or the source of a mirror, as `metrics/health.py` sees them."""
    return [
        CopyRow(
            each.path, None if each.lag is None else each.lag.bytes, None if each.lag is None else each.lag.seconds,
            each.error,
        )
        for each in copies_of(topic)
    ]  # fmt: skip


def archive_facts(topic: Topic) -> ArchiveFacts | None:
    """The archive or the place, and the ends of what it has; None if the topic's retention waits for none."""
    place = archive_of(topic)
    if place is None:
        return None
    if is_remote(place):
        shown = storage_of(place)[1]  # without credentials
        return ArchiveFacts(
            shown, "object store", None, None, None, {}, None, "this page sends no request to another host",
            command("archive", topic.path, shown),
        )  # fmt: skip
    is_place = is_tier(REAL, place)
    kind, next_step = ("tier" if is_place else "archive"), command("tier" if is_place else "archive", topic.path, place)
    try:
        made = tiered(place) if is_place else archived(place)
    except (LogError, OSError, ValueError, ImportError) as error:
        why = "no archive is there yet" if isinstance(error, FileNotFoundError) else str(error)
        return ArchiveFacts(place, kind, None, None, None, {}, None, why, next_step)
    ends = made.ends
    lacks = sum(
        max(0, each.high_watermark - max(ends.get(each.id, 0), each.log_start_offset)) for each in topic.partitions
    )
    return ArchiveFacts(
        place, kind, made.time, getattr(made, "rows", None), made.bytes,
        {str(number): str(end) for number, end in ends.items()}, lacks, None, next_step,
    )  # fmt: skip


def page_title(topics: Topics) -> str:
    """The name of what is shown: the topic, or the directory."""
    return topics.only or os.path.basename(topics.root) or topics.root
