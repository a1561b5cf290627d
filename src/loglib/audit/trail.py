"""Trail: the topic to which counts are published, an entry for each counted range of a partition.

Invariant: the ranges of one tier in one partition follow on one another, also across restarts, except where records
were gone before they were counted. So the counts of a tier are the sum of its entries, each range taken once. A range
can be there twice: a process that is killed between writing and publishing an entry leaves it to be found later, when
another process has counted the same records again. `once` leaves out what is there twice.

Several processes write a trail that is open with `shared=True`. None of them keeps a partition: `publish` takes one
that is free, and gives it back. So as many as like share even one partition, and wait for each other only for the
moment of a publication.

An entry is a record whose value is JSON:

    {"tier": "log", "topic": "orders", "log_id": "<32 digits>", "partition": 0, "start": 0, "end": 4096,
     "chain": 2868113408, "epoch": 1, "window_us": 600000000,
     "windows": {"1764000000000000": [12, 3456, "<32 digits>"]}, "time": 1764000300000000}

`tier` says where the records were counted: "log" in the log itself, another name in an application. `windows` has for
each window the number of records, their bytes and their digest (tally.py). `chain` and `epoch` are those of the log at
`end` (log/history.py). If the log was set back, and was then written otherwise, they tell that the entry counts records
which the log does not have any more. An entry with the partition null says that by its `time` everything that was
flushed in the topic had been counted.
"""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ..errors import CorruptLogError, LockedError
from ..log.history import AHEAD, BESIDE, HistoryPoint, compare_history
from ..log.log import Log
from ..topic import Topic, open_topic
from .tally import Tally, Windows

__all__ = ["LOG", "SET_BACK", "Entry", "entries", "logs_of", "once", "publish"]

LOG = "log"  # the tier of what is in the log itself
SET_BACK = (BESIDE, AHEAD)  # how a trail stands to a log that was set back; what is counted was flushed
_PATIENCE_S = 10.0  # a publication by another process takes milliseconds
_NAP_S = 0.005
_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


class Entry(NamedTuple):
    """The counts of one range of a partition."""

    tier: str
    topic: str
    log_id: str
    partition: int | None  # None: the range is empty, and all that was flushed before `time` is counted
    start: int
    end: int
    chain: int  # of the log at `end`, and the epoch of its writer there; 0: not known
    epoch: int
    window_us: int
    windows: Windows
    time: int  # microseconds UTC

    @property
    def point(self) -> HistoryPoint:
        """Where the range ends, and what proves the history up to there."""
        return HistoryPoint(bytes.fromhex(self.log_id), self.end, self.chain, self.epoch)

    def is_superseded(self, logs: Sequence[Log]) -> bool:
        """Whether the log, one of the topic's, was set back, and so has not all that was counted."""
        if self.partition is None or self.partition >= len(logs):
            return False
        return compare_history([self.point], logs[self.partition]).relation in SET_BACK


def logs_of(topic: Topic) -> list[Log]:
    """The logs of a topic, by partition."""
    return topic._logs()  # noqa: SLF001


def publish(trail: Topic, found: Iterable[Entry]) -> None:
    """Append the entries and flush them.

    If the trail is shared, all of them go to one partition that no process has. `LockedError` if there is none for ten
    seconds; the entries can be published again later.
    """
    values, times = [], []
    for entry in found:
        values.append(_encoded(entry))
        times.append(entry.time)
    if not trail.shared:
        trail.append_many(values, timestamps=times)
    trail.flush()  # raises if it is closed, or belongs to the parent process
    if not values or not trail.shared:
        return
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with open_topic(trail.path, shared=True, create=False, files=trail._files) as mine:  # noqa: SLF001
                mine.append_many(values, timestamps=times)
            return
        except LockedError:
            if time.monotonic() >= until:
                raise
            time.sleep(random.uniform(0.5, 1.5) * _NAP_S)


def _encoded(entry: Entry) -> bytes:
    windows = {str(window): [*tally[:2], f"{tally.digest:032x}"] for window, tally in entry.windows.items()}
    return json.dumps(entry._asdict() | {"windows": windows}).encode()


def _tally(facts: Any) -> Tally:
    records, size, digest = facts
    return Tally(int(records), int(size), int(digest, 16))


def entries(trail: Topic) -> Iterator[Entry]:
    """The entries of a trail, in the order of the log. Raises `CorruptLogError` for a record that is none."""
    for record in trail.read():
        try:
            facts: dict[str, Any] = json.loads(record.value or b"")
            windows = {int(window): _tally(tally) for window, tally in facts["windows"].items()}
            partition = facts["partition"]
            yield Entry(
                str(facts["tier"]), str(facts["topic"]), str(facts["log_id"]),
                None if partition is None else int(partition), int(facts["start"]), int(facts["end"]),
                int(facts["chain"]), int(facts["epoch"]), int(facts["window_us"]), windows, int(facts["time"]),
            )  # fmt: skip
        except _ERRORS as error:
            found = f"no valid counts in partition {record.partition}, offset {record.offset} ({error!r})"
            raise CorruptLogError(trail.path, 0, found, "an entry of an audit") from error


def once(found: Iterable[Entry]) -> list[Entry]:
    """The entries, without those that count again what others have counted."""
    groups: defaultdict[tuple[str, str, int | None], list[Entry]] = defaultdict(list)
    for entry in found:
        groups[entry.tier, entry.log_id, entry.partition].append(entry)
    parts = (group if key[2] is None else _chain(group) for key, group in groups.items())
    return [entry for part in parts for entry in part]


def _chain(group: list[Entry]) -> Iterator[Entry]:
    """Entries that follow on one another and reach as far as possible. Both ways that lead there are right."""
    reach: dict[int, int] = {}  # from a start: how far entries lead
    best: dict[int, Entry] = {}
    for entry in sorted(group, key=lambda each: each.start, reverse=True):
        end = reach.get(entry.end, entry.end)
        if entry.start not in best or end > reach[entry.start]:
            reach[entry.start], best[entry.start] = end, entry
    at = -1
    for start in sorted(best):
        if start >= at:
            yield best[start]
            at = best[start].end
