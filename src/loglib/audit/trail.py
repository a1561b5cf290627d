"""Trail: the topic to which counts are published, an entry for each counted range of a partition.

Invariant: the ranges of one tier in one partition follow on one another, also across restarts, except where records
were gone before they were counted. So the counts of a tier are the sum of its entries, each range taken once. A range
can be there twice: a process that is killed between writing and publishing an entry leaves it to be found later, when
another process has counted the same records again. `once` leaves out what is there twice.

An entry is a record whose value is JSON:

    {"tier": "log", "topic": "orders", "log_id": "<32 digits>", "partition": 0, "start": 0, "end": 4096,
     "window_us": 600000000, "windows": {"1764000000000000": [12, 3456, 99]}, "time": 1764000300000000}

`tier` says where the records were counted: "log" in the log itself, another name in an application. `windows` has for
each window the number of records, their bytes and their digest (tally.py). An entry with the partition null says that
by its `time` everything that was flushed in the topic had been counted.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ..errors import CorruptLogError
from ..topic import Topic
from .tally import Tally, Windows

__all__ = ["LOG", "Entry", "entries", "once", "publish"]

LOG = "log"  # the tier of what is in the log itself
_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


class Entry(NamedTuple):
    """The counts of one range of a partition."""

    tier: str
    topic: str
    log_id: str
    partition: int | None  # None: the range is empty, and all that was flushed before `time` is counted
    start: int
    end: int
    window_us: int
    windows: Windows
    time: int  # microseconds UTC


def publish(trail: Topic, entry: Entry) -> None:
    """Append the entry; it is not flushed."""
    windows = {str(window): list(tally) for window, tally in entry.windows.items()}
    key = f"{entry.tier}/{entry.topic}/{entry.partition}"
    trail.append(json.dumps(entry._asdict() | {"windows": windows}).encode(), key=key.encode(), timestamp=entry.time)


def entries(trail: Topic) -> Iterator[Entry]:
    """The entries of a trail, in the order of the log. Raises `CorruptLogError` for a record that is none."""
    for record in trail.read():
        try:
            facts: dict[str, Any] = json.loads(record.value or b"")
            windows = {int(window): Tally(*map(int, tally)) for window, tally in facts["windows"].items()}
            partition = facts["partition"]
            yield Entry(
                str(facts["tier"]), str(facts["topic"]), str(facts["log_id"]),
                None if partition is None else int(partition), int(facts["start"]), int(facts["end"]),
                int(facts["window_us"]), windows, int(facts["time"]),
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
