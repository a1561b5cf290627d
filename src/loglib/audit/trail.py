"""Trail: the topic to which counts are published, with an entry for each counted range of a partition.

Invariant: the ranges of one tier in one partition are consecutive, also across restarts, except where records were
dropped before they were counted. So the counts of a tier are the sum of its entries, each range taken once. A range can
occur twice: an entry of a process that was killed while it published may appear after another process has counted the
same records again. `once` omits duplicates.

Several processes write a trail that is open with `shared=True`. They take turns, so any number of them can share one
partition.

An entry is a record whose value is JSON:

    {"tier": "log", "topic": "orders", "log_id": "<32 digits>", "partition": 0, "start": 0, "end": 4096,
     "chain": 2868113408, "epoch": 1, "window_us": 600000000,
     "windows": {"1764000000000000": [12, 3456, "<32 digits>"]}, "time": 1764000300000000}

`tier` is "log" for counts of the log itself, or the name of an application. `windows` has for each window the number of
records, their bytes and their digest (tally.py). `chain` and `epoch` are those of the log at `end` (log/history.py). If
the log was set back, and then written differently, they show that the entry counts records which the log no longer has.
An entry with the partition null means that all records of the topic that were flushed before its `time` are counted.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ..errors import CorruptLogError
from ..log.history import SET_BACK, HistoryPoint, compare_history
from ..log.log import Log
from ..topic import Topic
from .tally import Tally, Windows

LOG = "log"  # the tier of what is in the log itself
_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


class Entry(NamedTuple):
    """The counts of one range of a partition."""

    tier: str
    topic: str
    log_id: str
    partition: int | None  # None: all records flushed before `time` are counted; no range
    start: int
    end: int
    chain: int  # of the log at `end`, and the epoch of its writer there; 0: not known
    epoch: int
    window_us: int
    windows: Windows
    time: int  # microseconds UTC

    @property
    def point(self) -> HistoryPoint:
        """The end of the range, with the proof of the history up to there."""
        return HistoryPoint(bytes.fromhex(self.log_id), self.end, self.chain, self.epoch)

    def is_superseded(self, logs: Sequence[Log]) -> bool:
        """True if the entry's log, one of the topic's `logs`, was set back, so that it lacks counted records.

        So was the log of a partition that the topic does not have any more: an older copy of the topic is there.
        """
        if self.partition is None:
            return False
        if self.partition >= len(logs):
            return True
        return compare_history([self.point], logs[self.partition]).relation in SET_BACK


def logs_of(topic: Topic) -> list[Log]:
    """The logs of a topic, by partition."""
    return topic._logs()  # noqa: SLF001


def publish(trail: Topic, found: Iterable[Entry]) -> None:
    """Append the entries and flush them. All of them go to one partition.

    `LockedError` if other processes keep a shared trail for longer than its `wait`. The entries can be published again
    later.
    """
    values, times = [], []
    for entry in found:
        values.append(_encoded(entry))
        times.append(entry.time)
    trail.append_many(values, timestamps=times)
    trail.flush()


def _encoded(entry: Entry) -> bytes:
    windows = {str(window): [*tally[:2], f"{tally.digest:032x}"] for window, tally in entry.windows.items()}
    return json.dumps(entry._asdict() | {"windows": windows}).encode()


def entries(trail: Topic) -> Iterator[Entry]:
    """The entries of a trail, in the order of the log. Raises `CorruptLogError` for a record that is no entry."""
    for record in trail.read():
        try:
            facts: dict[str, Any] = json.loads(record.value or b"")
            windows = {
                int(window): Tally(int(records), int(size), int(digest, 16))
                for window, (records, size, digest) in facts["windows"].items()
            }
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
    """The entries, without those that count records of other entries again."""
    groups: defaultdict[tuple[str, str, int | None], list[Entry]] = defaultdict(list)
    for entry in found:
        groups[entry.tier, entry.log_id, entry.partition].append(entry)
    parts = (group if key[2] is None else _chain(group) for key, group in groups.items())
    return [entry for part in parts for entry in part]


def _chain(group: list[Entry]) -> Iterator[Entry]:
    """Consecutive entries that reach the highest end. If two chains do, either is right."""
    reach: dict[int, int] = {}  # by start: the highest end of a chain
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
