"""Times: microseconds UTC since 1970, as the log has them, and datetimes, as callers have them.

Invariant: each datetime has a time zone, and converting it and back gives the same time.

Threads: pure functions.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

__all__ = ["from_datetime", "to_datetime"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def to_datetime(timestamp_us: int) -> datetime:
    """The aware UTC datetime of a timestamp in microseconds; `OverflowError` outside years 1 to 9999."""
    return _EPOCH + timestamp_us * _MICROSECOND


def from_datetime(time: datetime) -> int:
    """Microseconds UTC of an aware datetime; `ValueError` if it has no time zone."""
    if time.tzinfo is None:
        raise ValueError(f"{time!r} has no time zone; say which, as in datetime.now(timezone.utc)")
    return (time - _EPOCH) // _MICROSECOND
