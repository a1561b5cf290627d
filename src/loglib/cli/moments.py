"""Moments: times as people give them for --since and --until.

Invariant: a text has one meaning, or it raises a `ValueError` with the forms to write. A time without a zone is in the
zone that the caller gives, which is UTC by default.

    now, today, yesterday      the present; the midnight with which that day begins
    15m, 1h30m, -15m           that long before now
    2024-05-01                 the midnight with which that day begins
    2024-05-01T12:00           also with a space for the T, seconds, a fraction, and a zone such as Z or +02:00
    12:00                      that time of today

Threads: pure functions.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime, time, timedelta, tzinfo

from ..config.quantities import parse_microseconds
from ..config.times import from_datetime

_DATE, _TIME = re.compile(r"\d{4}-"), re.compile(r"\d\d:")
_DAYS = {"today": 0, "yesterday": 1}


def parse_moment(text: str, *, now: datetime, zone: tzinfo) -> int:
    """The time in microseconds UTC since 1970. `now` has a zone."""
    if text == "now":
        return from_datetime(now)
    today = now.astimezone(zone).date()
    if text in _DAYS:
        return _in_zone(datetime.combine(today - timedelta(days=_DAYS[text]), time()), zone)
    age_us = parse_microseconds(text.removeprefix("-"))
    if age_us is not None:
        return from_datetime(now) - age_us
    with suppress(ValueError):
        if _DATE.match(text):
            return _in_zone(datetime.fromisoformat(text), zone)
        if _TIME.match(text):  # without this look, 2024 would be 20:24
            return _in_zone(datetime.combine(today, time.fromisoformat(text)), zone)
    raise ValueError(
        f"{text!r} is no time; write 15m or 1h30m for an age, today, yesterday, 12:00, 2024-05-01 or 2024-05-01T12:00Z"
    )


def _in_zone(moment: datetime, zone: tzinfo) -> int:
    return from_datetime(moment if moment.tzinfo is not None else moment.replace(tzinfo=zone))
