"""Arguments: the arguments of callers, checked and converted for the rest of the library.

Invariant: a start is one of the forms of `Start`, and a name cannot lead out of a directory. Every other argument
raises a `TypeError` or `ValueError` that says what to pass instead. append/record_arguments.py checks records.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from operator import index
from typing import Any, NamedTuple, SupportsIndex, TypeVar

from .policies import NAME
from .quantities import Duration, microseconds, parse_microseconds, seconds
from .times import from_datetime

Start = str | int | datetime | timedelta  # "begin", "end", an offset, a time, an age, or a time or an age as text

T = TypeVar("T")

_ELSEWHERE = {"earliest": "begin", "beginning": "begin", "latest": "end", "now": "end"}


class Time(NamedTuple):
    """A start given as a time: the first record at or after it."""

    timestamp_us: int


def parse_start(start: Start, *, now_us: int) -> str | int | Time:
    """ "begin", "end", an offset, or the `Time` of a datetime, an age, "-1h30m" or "2024-05-01T12:00Z"."""
    if isinstance(start, str):
        return _parse_text(start, now_us=now_us)
    if isinstance(start, datetime):
        return Time(from_datetime(start))
    if isinstance(start, timedelta):
        return Time(now_us - abs(microseconds(start)))
    if type(start) is not int:  # isinstance would accept a bool, which is not an offset
        raise TypeError(f'start must be "begin", "end", an offset, a datetime, a timedelta or "-15m", not {start!r}')
    return start


def _parse_text(start: str, *, now_us: int) -> str | Time:
    if start in ("begin", "end"):
        return start
    age_us = parse_microseconds(start.removeprefix("-")) if start.startswith("-") else None
    if age_us is not None:
        return Time(now_us - age_us)
    if start[:1].isdigit():
        with suppress(ValueError):  # not a time, or a time without a zone
            return Time(from_datetime(datetime.fromisoformat(start)))
    hint = f'; what is {start} elsewhere is "{_ELSEWHERE[start]}" here' if start in _ELSEWHERE else ""
    raise ValueError(
        'start must be "begin", "end", an age like "-15m" or "-1h30m", or a time with its zone like '
        f'"2024-05-01T12:00Z", not {start!r}{hint}'
    )


def check_names(*names: str) -> None:
    """Refuse names that could lead out of a directory, or that some file systems cannot store."""
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a name must be a str, not {name!r}")
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name of 1 to 249 letters, digits, dots, dashes and underscores")


def check_options(call: Callable[..., object], given: Collection[str], known: Collection[str]) -> None:
    """Refuse keyword arguments that a call does not have: a `TypeError` that names the nearest one that it has.

    `known` are those that the call takes beside its own parameters.
    """
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    from difflib import get_close_matches  # imported here: only an error needs them
    from inspect import signature

    parameters = signature(call).parameters.values()
    names = {*known, *(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)}
    close = get_close_matches(unknown[0], sorted(names), 1)
    hint = f"; is {close[0]!r} meant?" if close else f"; it has {', '.join(sorted(names))}"
    owner = getattr(call, "__self__", None)
    owner_name = "" if owner is None else f"{owner.__name__ if isinstance(owner, type) else type(owner).__name__}."
    raise TypeError(f"{owner_name}{call.__name__}() got an unexpected keyword argument {unknown[0]!r}{hint}")


def topic_path(path: str | os.PathLike[str]) -> str:
    """The absolute path of a topic's directory, whose name must be one that `check_names` accepts."""
    given = os.fsdecode(path)
    if not given:
        raise ValueError("the path of a topic is empty; give its directory")
    absolute = os.path.abspath(given)
    check_names(os.path.basename(absolute))
    return absolute


def donor_paths(donors: Iterable[str | os.PathLike[str]], path: str) -> tuple[str, ...]:
    """The absolute paths of other copies of the topic in the directory `path`."""
    if isinstance(donors, str | bytes | os.PathLike):
        raise TypeError(f"donors is a list of directories, not {donors!r}")
    paths = tuple(map(topic_path, donors))
    if path in paths:
        raise ValueError(f"{path} cannot be a donor of itself; give other copies of it")
    return paths


def check_count(name: str, value: Any) -> None:
    """Refuse a value that is not a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if index(value) < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


def spin_seconds(spin: Duration | None) -> float:
    """The seconds of a `spin`; 0 for None."""
    found = 0.0 if spin is None else seconds("spin", spin)
    if found < 0:
        raise ValueError(f"spin must be at least 0, not {spin!r}")
    return found


def partition_number(given: Any) -> int:
    """The number of a partition, given as an int or as digits (keys in JSON are strings)."""
    if isinstance(given, str) and given.isascii() and given.isdigit():
        return int(given)
    if isinstance(given, bool) or not isinstance(given, SupportsIndex):
        raise TypeError(f"a partition is named by its number, not {given!r}")
    return index(given)


def partition_numbers(given: Mapping[Any, T]) -> dict[int, T]:
    """The mapping with partition numbers as keys."""
    by_number = {partition_number(each): value for each, value in given.items()}
    if len(by_number) < len(given):
        raise ValueError(f"a partition is named twice in {sorted(map(str, given))}")
    return by_number
