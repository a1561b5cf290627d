"""Auditor: compares the counts of several places, window by window.

Invariant: a difference in a closed window is a difference between records, and never between the moments of counting. A
window is closed when each place has counted all its records after the window's end and a time of grace, and no record
of the window was dropped uncounted. Balancing changes nothing.

The counts of a log are those of its trail (trail.py), since retention may have dropped the records. Records that the
trail has not counted, or all records without a trail, are counted in the log itself.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import NamedTuple

from ..config.quantities import microseconds
from ..format.record import OffsetRange
from ..log import catalog
from ..partition import Partition
from ..segment import Identity, read_segment_header
from ..system.clock import SYSTEM
from ..system.files import REAL
from ..topic import Topic
from .counter import WINDOW
from .tally import NOTHING, Tally, Windows, merged, tallies
from .trail import LOG, Entry, entries, logs_of, once

_LONG_AGO, _FOR_EVER = -1 << 63, 1 << 63
TRAIL = "_audit"  # name of the topic that is the trail of the topics beside it


class Balance(NamedTuple):
    """One window of one topic at one place, compared with the expected counts."""

    topic: str
    window_us: int  # the first microsecond of the window
    place: str  # the directory
    tier: str  # "log", or the application that counted
    expected: Tally
    found: Tally
    closed: bool  # False: more may come
    offsets: tuple[OffsetRange, ...] = ()  # if they differ: the ranges to examine, in the log of this place
    superseded: bool = False  # True: `tier` counted records of a history that the log no longer has

    @property
    def adds_up(self) -> bool:
        """True if the counts are equal."""
        return self.expected == self.found

    @property
    def missing(self) -> int:
        """The number of missing records; negative if there are too many."""
        return self.expected.records - self.found.records


class BalanceReport(NamedTuple):
    """The result of a comparison."""

    balances: tuple[Balance, ...]

    @property
    def differences(self) -> tuple[Balance, ...]:
        """The closed windows that do not add up."""
        return tuple(each for each in self.balances if each.closed and not each.adds_up)


def balance(
    sources: Sequence[str | os.PathLike[str]], destination: str | os.PathLike[str] | None = None, *,
    window: timedelta = WINDOW, grace: timedelta | None = None, trail: str = TRAIL, now_us: int | None = None,
) -> BalanceReport:  # fmt: skip
    """Compare the records of directories of topics, and the counts of applications there.

    The logs of a topic in all `sources` together should contain the records of its log in the `destination`. Each tier
    of a trail should have counted the records of the log in the same directory. Without a destination only the second
    is compared, and the log with the counts that a trail has of logs elsewhere, if entries of other hosts were copied
    into it. A topic that only a source has is missing at the destination in all its windows.

    An empty report would look like a proof. So `ValueError` is raised for several sources without a destination, which
    are not compared with each other, and for a source without a destination whose trail has no counts.

    `window` must be that of the trails. Records may be late by `grace`, one window by default. The call reads all
    records that no trail has counted. It raises `ValueError` if a trail has other windows, and the errors of
    `Topic.open`.
    """
    window_us = microseconds(window)
    grace_us = window_us if grace is None else microseconds(grace)
    now = SYSTEM() if now_us is None else now_us
    if destination is None and len(sources) != 1:
        raise ValueError(
            f"{len(sources)} sources and no destination: nothing is compared. Give the directory that should contain "
            "the records of all of them as the destination, or compare each source with its own trail alone"
        )
    with ExitStack() as opened:
        places = [_Place(os.fspath(path), trail, window_us, now, opened) for path in sources]
        found = [row for place in places for row in (*_superseded(place), *_tiers(place, grace_us))]
        if destination is None:
            (place,) = places
            if not place.tiers and not place.elsewhere:
                raise ValueError(
                    f"nothing to compare: no application has counted the topics of {place.path} in {trail}; give a "
                    "destination, or let the applications count"
                )
            for name, elsewhere in place.elsewhere.items():
                found += _logs(name, [elsewhere], place, grace_us)
        else:
            target = _Place(os.fspath(destination), trail, window_us, now, opened)
            found += (*_superseded(target), *_tiers(target, grace_us))
            having: dict[str, list[_Counts]] = defaultdict(list)  # in the sources, by the name at the destination
            for place in places:
                for name, counts in place.logs.items():
                    having[target.called(name, place)].append(counts)
            for name in sorted(having):
                found += _logs(name, having[name], target, grace_us)
    return BalanceReport(tuple(found))


class _Counts(NamedTuple):
    """The counts of one tier for one topic."""

    windows: Windows
    ranges: tuple[Entry, ...]  # one for each counted range
    through: int  # all records flushed before this time are counted; microseconds
    complete_from: int = _LONG_AGO  # records of earlier windows may have been dropped uncounted

    def is_closed(self, window: int, until: int) -> bool:
        """True if the counts of a window are complete, if it is over at `until`."""
        return self.complete_from <= window and until <= self.through


class _Place:
    """A directory of topics, with its trail."""

    def __init__(self, path: str, trail: str, window_us: int, now: int, opened: ExitStack) -> None:
        self.path = path
        self.window_us = window_us
        self.logs: dict[str, _Counts] = {}
        self.tiers: dict[tuple[str, str], _Counts] = {}  # by topic and tier
        self.elsewhere: dict[str, _Counts] = {}  # by topic: logs that are not in this place
        self.topics: dict[str, Topic] = {}
        self.superseded: list[tuple[str, Entry]] = []  # by topic: counts of a history that its log no longer has
        self._recounted: dict[tuple[str, int, int], Windows] = {}
        names = catalog.names(REAL, os.path.abspath(path))
        if not names:
            raise ValueError(f"{path} has no topic")
        found: list[Entry] = []
        if trail in names:
            with Topic.open(os.path.join(path, trail), mode="r") as topic:
                found = list(entries(topic))
        for entry in found:
            if entry.window_us != window_us:
                raise ValueError(
                    f"{os.path.join(path, trail)} counts windows of {timedelta(microseconds=entry.window_us)}, and not "
                    f"of {timedelta(microseconds=window_us)}: give that window"
                )
        for name in names:
            if name != trail:
                self.topics[name] = opened.enter_context(Topic.open(os.path.join(path, name), mode="r"))
        for name, topic in self.topics.items():
            logs, present, superseded = logs_of(topic), list[Entry](), list[Entry]()
            for each in found:
                if self._is_of(each, topic):
                    (superseded if each.is_superseded(logs) else present).append(each)
            self.superseded += [(name, each) for each in once(superseded)]
            of_topic = once(present)
            self.logs[name] = self._log(topic, [each for each in of_topic if each.tier == LOG], now)
            for tier in sorted({each.tier for each in of_topic} - {LOG}):
                ranges = tuple(each for each in of_topic if each.tier == tier)
                windows = merged(each.windows for each in ranges)
                self.tiers[name, tier] = _Counts(windows, ranges, max(each.time for each in ranges))
        local = {topic.log_id.hex() for topic in self.topics.values()}
        others = [each for each in found if each.tier == LOG and each.log_id not in local]
        for name in sorted({each.topic for each in others} & self.topics.keys()):
            self.elsewhere[name] = _of_logs(once([each for each in others if each.topic == name]))

    def _is_of(self, entry: Entry, topic: Topic) -> bool:
        """True if the entry counts this topic, also under an earlier path. A copy beside it has entries of its own."""
        named = self.topics.get(entry.topic)
        is_named = named is not None and named.log_id == topic.log_id
        return entry.log_id == topic.log_id.hex() and (entry.topic == topic.name or not is_named)

    def called(self, name: str, source: _Place) -> str:
        """The name in this place of a topic of another place. The topic may have been moved in either place."""
        log_id = source.topics[name].log_id
        same = [here for here, topic in self.topics.items() if topic.log_id == log_id]
        return name if name in self.topics or len(same) != 1 else same[0]

    def _log(self, topic: Topic, counted: list[Entry], now: int) -> _Counts:
        """The counts of a log: those of its trail, and of the records that the trail has not counted."""
        ranges = [each for each in counted if each.partition is not None]
        complete_from = _LONG_AGO
        for partition in topic.partitions:
            done = sorted((each.start, each.end) for each in ranges if each.partition == partition.id)
            if any(_holes(done, 0, partition.log_start_offset)):
                complete_from = max(complete_from, _latest_before(topic, partition) + 1)
            place = LOG, topic.name, topic.log_id.hex(), partition.id
            for start, end in _holes(done, partition.log_start_offset, partition.high_watermark):
                windows = self.recount(partition, start, end)
                ranges.append(Entry(*place, start, end, 0, 0, self.window_us, windows, now))
        return _Counts(merged(each.windows for each in ranges), tuple(ranges), now, complete_from)

    def recount(self, partition: Partition, start: int, end: int) -> Windows:
        """The tallies of the readable records in [start, end) of a log. Each range is read once."""
        key = partition.path, start, end
        if key not in self._recounted:
            batches = partition.batches(start, end, on_damage="skip")
            self._recounted[key] = merged(tallies(batch, self.window_us) for batch in batches)
        return self._recounted[key]


def _of_logs(ranges: list[Entry]) -> _Counts:
    """The counts of logs in other places."""
    through = dict.fromkeys([each.log_id for each in ranges], 0)
    for each in ranges:
        if each.partition is None:
            through[each.log_id] = max(through[each.log_id], each.time)
    return _Counts(merged(each.windows for each in ranges), tuple(ranges), min(through.values()))


def _latest_before(topic: Topic, partition: Partition) -> int:
    """The largest timestamp in the log before its start."""
    path, identity = partition.segments[0].path, Identity.of(topic.log_id, partition.id)
    return read_segment_header(REAL, path, identity).running_max_timestamp


def _holes(done: Iterable[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of [start, end) that are in none of the `done` ranges, which are sorted."""
    for first, stop in done:
        if start < min(first, end):
            yield start, min(first, end)
        start = max(start, stop)
    if start < end:
        yield start, end


# --- comparing -----------------------------------------------------------------------------------------


def _tiers(place: _Place, grace_us: int) -> Iterator[Balance]:
    """The counts of applications, compared with the log in the same place."""
    for (name, tier), counts in place.tiers.items():
        log = place.logs[name]
        for window in sorted({*log.windows, *counts.windows}):
            expected, found = log.windows.get(window, NOTHING), counts.windows.get(window, NOTHING)
            closed = log.is_closed(window, window + place.window_us + grace_us)  # a tier that lags behind is reported
            offsets = () if expected == found else tuple(_uncounted(place, name, window, counts))
            yield Balance(name, window, place.path, tier, expected, found, closed, offsets)


def _superseded(place: _Place) -> Iterator[Balance]:
    """The counts of histories that a log no longer has: it was set back, and then written differently."""
    having: defaultdict[tuple[str, str, int], list[Entry]] = defaultdict(list)
    for name, entry in place.superseded:
        for window in entry.windows:
            having[name, entry.tier, window].append(entry)
    for (name, tier, window), counted in sorted(having.items()):
        expected = merged({window: each.windows[window]} for each in counted)[window]
        offsets = tuple(OffsetRange(each.partition or 0, range(each.start, each.end)) for each in counted)
        yield Balance(name, window, place.path, tier, expected, NOTHING, True, offsets, superseded=True)


def _uncounted(place: _Place, name: str, window: int, counts: _Counts) -> Iterator[OffsetRange]:
    """The ranges of the log with records of the window that the tier has not counted, or counted differently."""
    for partition in place.topics[name].partitions:
        ranges = sorted((each.start, each.end) for each in counts.ranges if each.partition == partition.id)
        for start, end in _holes(ranges, partition.log_start_offset, partition.high_watermark):
            if window in place.recount(partition, start, end):
                yield OffsetRange(partition.id, range(start, end))
    yield from _differing(place, name, window, counts.ranges)


def _differing(place: _Place, name: str, window: int, ranges: Iterable[Entry]) -> Iterator[OffsetRange]:
    """The counted ranges in which the log now has other records of the window."""
    topic = place.topics[name]
    for each in ranges:
        if each.partition is None or each.partition >= len(topic.partitions) or window not in each.windows:
            continue
        log = topic.partition(each.partition)
        if log.log_start_offset <= each.start:
            found = place.recount(log, each.start, min(each.end, log.high_watermark))
            if found.get(window, NOTHING) != each.windows[window]:
                yield OffsetRange(log.id, range(each.start, each.end))


def _logs(name: str, sources: Sequence[_Counts], target: _Place, grace_us: int) -> Iterator[Balance]:
    """The logs of a topic in all sources, compared with its log in the destination."""
    expected = merged(each.windows for each in sources)
    found = target.logs.get(name, _Counts({}, (), _FOR_EVER))
    for window in sorted({*expected, *found.windows}):
        one, other = expected.get(window, NOTHING), found.windows.get(window, NOTHING)
        over = window + target.window_us + grace_us
        closed = all(each.is_closed(window, over) for each in (*sources, found))
        offsets: tuple[OffsetRange, ...] = ()
        if one != other and name in target.topics:
            log_id = target.topics[name].log_id.hex()
            same = [each for source in sources for each in source.ranges if each.log_id == log_id]
            offsets = tuple(_differing(target, name, window, same))
        yield Balance(name, window, target.path, LOG, one, other, closed, offsets)
