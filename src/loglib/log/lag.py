"""Lag: how far behind the log's end a position is, in bytes, seconds and records.

Invariant: measuring changes nothing and reads no batch body. Bytes come from offsets, the rest from batch headers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..errors import OffsetOutOfRangeError
from ..format.watermark import Mark
from .log import Log


class Lag(NamedTuple):
    """The distance from a position to the flushed end of a partition."""

    bytes: int  # bytes of log, headers included
    seconds: float  # since the next record was appended; 0 if there is no next record
    records: int | None = None  # None if the records were not counted


def total_lag(lags: Iterable[Lag]) -> Lag:
    """The lag in several partitions together: the bytes of all, and the longest time. Without records."""
    lags = list(lags)
    return Lag(sum(each.bytes for each in lags), max((each.seconds for each in lags), default=0.0))


def measure_lag(log: Log, offset: int, *, now_us: int, count_records: bool = False) -> Lag:
    """The lag of a reader that will read `offset` next. Records dropped by retention do not count."""
    while True:
        mark = log.mark()
        try:
            return _measure(log, max(offset, mark.log_start_offset), mark, now_us=now_us, count_records=count_records)
        except OffsetOutOfRangeError:  # retention has meanwhile dropped more
            continue


def _measure(log: Log, offset: int, mark: Mark, *, now_us: int, count_records: bool) -> Lag:
    end = mark.flushed_end
    if offset >= end:
        return Lag(0, 0.0, 0 if count_records else None)
    first = log.header_around(offset, mark)
    seconds = max(0, now_us - first.append_time) / 1_000_000
    if not count_records:
        return Lag(end - offset, seconds)
    headers = log.headers(first.base_offset, end, mark)
    wanted = (range(max(each.base_offset, offset), each.offsets.stop) for each in headers)
    return Lag(end - offset, seconds, sum(map(len, wanted)))
