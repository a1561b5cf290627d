"""Lag: how far the commits of a group are behind the ends of its logs.

Invariant: as log/lag.py.
"""

from __future__ import annotations

from collections.abc import Callable

from ..log.lag import Lag, measure_lag
from .assignment import TopicPartition
from .directory import GroupDirectory
from .offsets import Entries

__all__ = ["lag_of_group"]


def lag_of_group(
    place: GroupDirectory, entries: Entries, *, first: Callable[[TopicPartition], int], count_records: bool
) -> dict[TopicPartition, Lag]:
    """The lag of each partition from its last commit; `first` gives the offset of a partition without a commit."""
    found: dict[TopicPartition, Lag] = {}
    for partition, log in place.logs.items():
        entry = entries.get(partition)
        if entry is None or entry.offset is None or entry.log_id != log.identity.log_id:
            offset = first(partition)
        else:
            offset = entry.offset
        found[partition] = measure_lag(log, offset, now_us=place.clock(), count_records=count_records)
        log.release_files()  # so that few of a thousand logs have open files
    return found
