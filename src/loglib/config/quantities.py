"""Quantities: durations and sizes, in the forms that callers may give.

Invariant: each quantity has one spelling, in Python, in policies and at the command line. A duration is a number of
seconds, a `timedelta`, or text such as "90s" and "1h30m". A size is a number of bytes, or text such as "10MB" and
"1GiB". A wrong value raises `TypeError` or `ValueError` with the forms to use.

Threads: pure functions.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from datetime import timedelta

Duration = float | timedelta | str  # seconds, a timedelta, or text such as "90s"
Size = int | str  # bytes, or text such as "1GiB"

_DURATION = re.compile(r"(?:\d{1,18}(?:\.\d{1,18})?(?:us|ms|s|m|h|d|w))+")
_PART = re.compile(r"([\d.]+)([a-z]+)")
_UNITS = {"us": 1, "ms": 10**3, "s": 10**6, "m": 60 * 10**6, "h": 3600 * 10**6, "d": 86400 * 10**6, "w": 604800 * 10**6}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?) ?([kmgt]?)(i?)b?", re.IGNORECASE)


def microseconds(duration: float | timedelta) -> int:
    """A duration in seconds, or as a `timedelta`, in whole microseconds."""
    if isinstance(duration, timedelta):
        return duration // timedelta(microseconds=1)
    return round(duration * 1_000_000)


def parse_microseconds(text: str) -> int | None:
    """The microseconds of a text such as "1h30m"; None if it is no duration."""
    if _DURATION.fullmatch(text) is None:
        return None
    return round(sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text)))


def parse_duration(text: str) -> timedelta:
    """The duration of a text such as "1h30m"; `ValueError` if it is none."""
    parsed = parse_microseconds(text)
    with suppress(OverflowError):  # more than a timedelta can have
        if parsed is not None:
            return timedelta(microseconds=parsed)
    raise ValueError(f"{text!r} is not a duration; write 90s, 15m, 12h, 7d or 1h30m")


def parse_size(text: str) -> int:
    """The bytes of a text such as "1GiB"; `ValueError` if it is no size."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a number of bytes; write 4096, 10MB or 1GiB")
    number, unit, binary = found.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** " kmgt".index(unit.lower() or " "))


def as_duration(name: str, given: Duration) -> timedelta:
    """The duration as a `timedelta`. `name` is that of the argument, for errors."""
    if isinstance(given, timedelta):
        return given
    if isinstance(given, str):
        try:
            return parse_duration(given)
        except ValueError as error:
            raise ValueError(f"{name} must be a duration: {error}") from None
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"{name} must be a duration: seconds, a timedelta, or text such as '90s', not {given!r}")
    try:
        return timedelta(seconds=given)
    except (OverflowError, ValueError):  # infinite, not a number, or more than a timedelta can have
        raise ValueError(f"{name} must be a finite duration, not {given!r}") from None


def seconds(name: str, given: Duration) -> float:
    """The duration in seconds, which may be infinite. `name` is that of the argument, for errors."""
    if isinstance(given, int | float) and not isinstance(given, bool):
        if math.isnan(given):
            raise ValueError(f"{name} must be a number of seconds, not nan")
        return given
    return as_duration(name, given).total_seconds()


def timeout_seconds(timeout: Duration | None) -> float | None:
    """The seconds of a `timeout`. None waits without end; zero and less do not wait."""
    return None if timeout is None else seconds("timeout", timeout)


def as_size(name: str, given: Size) -> int:
    """The size in bytes. `name` is that of the argument, for errors."""
    if isinstance(given, str):
        try:
            return parse_size(given)
        except ValueError as error:
            raise ValueError(f"{name} must be a size: {error}") from None
    return given
