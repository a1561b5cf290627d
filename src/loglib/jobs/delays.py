"""Delays: the header of a record that shares are not to hand out before a time.

Invariant: only shares look at it. For groups and readers it is a header as any other.

    loglib-not-before    microseconds UTC, as decimal digits

Threads: pure functions.
"""

from __future__ import annotations

from datetime import datetime

from ..config.quantities import Duration, seconds
from ..config.times import from_datetime
from ..format.columns import Headers
from ..system.clock import SYSTEM

NOT_BEFORE = "loglib-not-before"
_US = 1_000_000
_MOST_DIGITS = 18  # until the year 33658


def not_before(time: datetime | Duration) -> dict[str, bytes]:
    """The headers of a record that shares hand out only at a time, or a duration from now.

    `topic.append(value, headers=not_before("10m"))`. A datetime needs a time zone. The wall clock counts until a member
    first meets the record; then it waits as a released record does. Raises `ValueError` for a naive datetime, and for a
    duration below zero.
    """
    due = from_datetime(time) if isinstance(time, datetime) else SYSTEM() + round(seconds("time", time) * _US)
    return {NOT_BEFORE: b"%d" % max(due, 0)}


def due_time(headers: Headers) -> int | None:
    """The time before which the record is not to be handled: microseconds UTC; None if it has none."""
    for name, value in headers:
        if name == NOT_BEFORE and value.isdigit() and len(value) <= _MOST_DIGITS:
            return int(value)
    return None
