"""Arguments: what options of the command line mean: sizes, durations, starts, topics.

Invariant: a wrong argument is a usage error (exit code 2) that says what to write instead.
"""

from __future__ import annotations

import os
import re
import sys
from datetime import timedelta
from typing import Any

import click

from ..config.arguments import check_names, parse_start
from ..config.uri import is_remote
from ..log import catalog
from ..log.topic_file import NAME
from ..offload.storage import storage_of
from ..system.files import REAL
from ..topic import Topic
from ..transactions.repair_store import is_store
from ..transactions.store import STORE

__all__ = [
    "DIRECTORY", "DURATION", "NAMES", "SIZE", "SOURCE", "START", "TOPIC",
    "as_json", "confirmed", "partition_start", "roll_all", "stores_of", "topic_paths",
]  # fmt: skip

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b?", re.IGNORECASE)
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:us|ms|s|m|h|d|w))+")
_PART = re.compile(r"([\d.]+)([a-z]+)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = _SIZE.fullmatch(str(value))
        if found is None:
            self.fail(f"{value!r} is not a number of bytes; write 4096, 10MB or 1GiB", param, ctx)
        number, unit, binary = found.groups()
        base = 1024 if binary else 1000
        return int(float(number) * base ** " kmgt".index(unit.lower() or " "))


class _Duration(click.ParamType[timedelta]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        if not _DURATION.fullmatch(str(value)):
            self.fail(f"{value!r} is not a duration; write 90s, 15m, 12h, 7d or 1h30m", param, ctx)
        return timedelta(seconds=sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(str(value))))


class _Names(click.ParamType[tuple[str, ...]]):
    name = "names|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = () if value == "none" else tuple(str(value).split(","))
        try:
            check_names(*names)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return names


class _Start(click.ParamType[Any]):
    """A start as the library has it, or the offset of a record as `PARTITION:OFFSET`."""

    name = "start"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        partition, colon, offset = value.partition(":")
        if colon and partition.isdigit() and offset.isdigit() and not value.startswith("0000"):
            return {int(partition): int(offset)}
        try:
            parse_start(value, now_us=0)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return value


class _Directory(click.Path):
    """A directory that need not exist."""

    name = "topic"

    def __init__(self) -> None:
        super().__init__(file_okay=False)


class _Topic(_Directory):
    """The directory of a topic that exists."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = os.fsdecode(super().convert(value, param, ctx))
        _refuse_uri(path)
        if not REAL.exists(os.path.join(path, NAME)):
            names = ", ".join(catalog.names(REAL, path))
            found = f"is no topic but a directory of topics: {names}" if names else "has no topic"
            self.fail(f"{value} {found}", param, ctx)
        return path


class _Source(_Topic):
    """A topic that is only read: a directory, or the URI of a place in an object store."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if is_remote(os.fsdecode(value)) else super().convert(value, param, ctx)


def _refuse_uri(path: str) -> None:
    """A usage error that shows no credentials, if the path is no directory but the URI of something in a store."""
    if not is_remote(path):
        return
    try:
        shown = storage_of(path)[1]
    except ValueError:  # there it cannot be told what is credentials
        shown = "this URI"
    raise click.UsageError(f"{shown} is in an object store; `loglib cat` and `loglib tail` read it there")


SIZE, DURATION, NAMES, START = _Size(), _Duration(), _Names(), _Start()
DIRECTORY, TOPIC, SOURCE = _Directory(), _Topic(), _Source()
as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")


def topic_paths(path: str) -> list[str]:
    """The topic at a path, or all topics in that directory. Raises a usage error if there is none."""
    _refuse_uri(path)
    if REAL.exists(os.path.join(path, NAME)):
        return [path]
    names = catalog.names(REAL, path)
    if not names:
        raise click.UsageError(f"{path}: no topic, and no directory of topics")
    return [os.path.join(path, name) for name in names]


def stores_of(path: str) -> list[str]:
    """The store of transactions at a path, or the one in that directory of topics; an empty list if there is none."""
    return [each for each in (path, os.path.join(path, STORE)) if is_store(REAL, each)][:1]


def partition_start(start: Any, partition: int | None) -> Any:
    """A start for the reader of one partition."""
    if partition is None or not isinstance(start, dict):
        return start
    if partition not in start:
        raise click.UsageError(f"the start names partition {min(start)}, and --partition is {partition}")
    return start[partition]


def roll_all(path: str) -> None:
    """What --roll means: seal the open segments of a topic."""
    with Topic.open(path, create=False) as topic:
        for each in topic.partitions:
            each.roll()


def confirmed(what: str, *, yes: bool) -> None:
    """Ask a person for leave to do something that cannot be undone. Without a terminal --yes must be given."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{what}: give --yes, or --dry-run to see what would happen")
    click.confirm(what, abort=True, err=True)
