"""Times: microseconds UTC since 1970, as the log has them, and datetimes, as callers have them.

Invariant: each datetime has a time zone, and converting it and back gives the same time.

Threads: pure functions.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class CalendarError(OverflowError, ValueError):
    """A time that no datetime can have."""


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def to_datetime(timestamp_us: int) -> datetime:
    """The aware UTC datetime of a timestamp in microseconds.

    Raises `CalendarError`, an `OverflowError` and `ValueError`, outside of the years 1 to 9999: no datetime has these.
    """
    try:
        return _EPOCH + timestamp_us * _MICROSECOND
    except OverflowError:
        raise CalendarError(
            f"timestamp {timestamp_us} us is outside of the years 1 to 9999, which a datetime can have; use the number"
        ) from None


def to_text(timestamp_us: int) -> str:
    """The time in ISO 8601, UTC; the number itself outside of the years 1 to 9999."""
    try:
        return to_datetime(timestamp_us).isoformat()
    except CalendarError:
        return f"{timestamp_us} us"


def from_datetime(time: datetime) -> int:
    """Microseconds UTC of an aware datetime; `ValueError` if it has no time zone."""
    if time.tzinfo is None:
        raise ValueError(f"{time!r} has no time zone; say which, as in datetime.now(timezone.utc)")
    return (time - _EPOCH) // _MICROSECOND
