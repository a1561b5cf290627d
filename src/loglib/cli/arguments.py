"""Arguments: the types of the command line's arguments and options: sizes, durations, starts, topics.

Invariant: a wrong argument is a usage error (exit code 2) that says what to write instead.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import click

from ..config.arguments import check_names, parse_start
from ..config.policies import LEAST_SEALED_BYTES, Retention
from ..config.quantities import parse_duration, parse_size
from ..config.uri import is_remote
from ..log import catalog, topic_file
from ..offload.storage import storage_of
from ..system.files import REAL
from ..topic import Topic
from ..transactions.repair_store import is_store
from ..transactions.store import STORE

_LEAST_AGE = timedelta(minutes=1)  # passes of retention run once a minute

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])


class Parsed(click.ParamType[T]):
    """A type whose values `parse` makes of text. Its `ValueError` is a usage error."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        try:
            parsed: T = self._parse(value) if isinstance(value, str) else value  # a default may be parsed already
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return parsed


def _names(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    check_names(*names)
    return names


def _start(text: str) -> Any:
    """A start as the library has it, or the offset of a record as `PARTITION:OFFSET`."""
    partition, colon, offset = text.partition(":")
    if colon and partition.isdigit() and offset.isdigit() and not text.startswith("0000"):
        return {int(partition): int(offset)}
    parse_start(text, now_us=0)
    return text


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address; write HOST:PORT, such as 10.0.0.5:9900 or [::1]:9900")
    return host.strip("[]"), int(port)


def _regex(text: str) -> re.Pattern[bytes]:
    try:
        return re.compile(os.fsencode(text))
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from error


class _Topic(click.Path):
    """The directory of a topic that exists."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = os.fsdecode(super().convert(value, param, ctx))
        _refuse_uri(path)
        if not self._is_here(path):
            names = ", ".join(catalog.names(REAL, path))
            found = f"is a directory of topics, not a topic: {names}" if names else "has no topic"
            self.fail(f"{value} {found}", param, ctx)
        return path

    def _is_here(self, path: str) -> bool:
        return topic_file.exists(REAL, path)


class _Mendable(_Topic):
    """The directory of a topic, which may have lost its description, or of a store of transactions."""

    def _is_here(self, path: str) -> bool:
        return super()._is_here(path) or is_store(REAL, path) or has_partitions(path)


class _Source(_Topic):
    """A topic that is only read: a directory, or the URI of a place in an object store."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if is_remote(os.fsdecode(value)) else super().convert(value, param, ctx)


def _refuse_uri(path: str) -> None:
    """Raise a usage error, which shows no credentials, if the path is the URI of an object store."""
    if not is_remote(path):
        return
    try:
        shown = storage_of(path)[1]
    except ValueError:  # nothing separates the credentials from the rest
        shown = "this URI"
    raise click.UsageError(f"{shown} is in an object store; `loglib cat` and `loglib tail` read it there")


SIZE, DURATION = Parsed("size", parse_size), Parsed("duration", parse_duration)
NAMES, START = Parsed("names|none", _names), Parsed("start", _start)
REGEX = Parsed("regex", _regex)
ADDRESS = Parsed("host:port", _address)
DIRECTORY, TOPIC, MENDABLE, SOURCE = (kind(file_okay=False) for kind in (click.Path, _Topic, _Mendable, _Source))
PARTITION = re.compile(r"[0-9]{4}")  # the name of a partition's directory
EXISTING = click.Path(exists=True, file_okay=False)

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line, for programs.")
dry_run = click.option("--dry-run", is_flag=True, help="Only print what would be done.")
yes = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")


def rate_option(name: str, *, help: str) -> Callable[[Command], Command]:  # noqa: A002
    """An option for a rate in megabytes per second, which the library takes in bytes."""
    return click.option(
        name, "bytes_per_second", type=float, metavar="MB/S", help=help,
        callback=lambda _context, _option, megabytes: None if megabytes is None else megabytes * 1e6,
    )  # fmt: skip


def add_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """A decorator that adds these options to a command, in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def topic_paths(path: str) -> list[str]:
    """Return the topic at a path, or all topics in that directory. Raise a usage error if there is none."""
    _refuse_uri(path)
    if topic_file.exists(REAL, path):
        return [path]
    names = catalog.names(REAL, path)
    if not names:
        raise click.UsageError(f"{path}: no topic, and no directory of topics")
    return [os.path.join(path, name) for name in names]


def has_partitions(path: str) -> bool:
    """True if the directory is that of a topic, perhaps of one that has lost its description."""
    try:
        return any(map(PARTITION.fullmatch, REAL.names_in(path)))
    except (FileNotFoundError, NotADirectoryError):
        return False


def stores_of(path: str) -> list[str]:
    """The store of transactions at a path, or in that directory of topics; an empty list if there is none."""
    return [each for each in (path, os.path.join(path, STORE)) if is_store(REAL, each)][:1]


def partition_start(start: Any, partition: int | None) -> Any:
    """The start for a reader of one partition, or of all if `partition` is None."""
    if partition is None or not isinstance(start, dict):
        return start
    if partition not in start:
        raise click.UsageError(f"the start names partition {min(start)}, and --partition is {partition}")
    return start[partition]


def roll_all(path: str) -> None:
    """Seal the open segments of a topic."""
    with Topic.open(path, shared=True) as topic:
        for each in topic.partitions:
            each.roll()


def confirmed(what: str, *, yes: bool, can_try: bool = True) -> None:
    """Ask whether to do something that cannot be undone. Without a terminal, --yes is required.

    `can_try`: the command has the option --dry-run.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        trial = ", or --dry-run to see what would happen" if can_try else ""
        raise click.UsageError(f"{what} Give --yes to do it{trial}")
    if not click.confirm(what, err=True):
        raise click.ClickException("nothing was changed")


def confirm_limits(policies: Mapping[str, Any], *, yes: bool) -> None:
    """Ask whether to set a retention policy by which no sealed segment would stay."""
    policy: Retention | None = policies.get("retention")
    if policy is None or policy.archive is not None:  # what the archive does not have stays
        return
    if policy.bytes is not None and policy.bytes < LEAST_SEALED_BYTES:
        limit = f"--retention-bytes {policy.bytes} is less than one segment: each is dropped when it is sealed."
    elif policy.age is not None and policy.age < _LEAST_AGE:
        age_s = policy.age.total_seconds()
        limit = f"--retention-age {age_s:g}s is less than a minute: segments are dropped when they are sealed."
    else:
        return
    confirmed(f"{limit} Set this limit?", yes=yes, can_try=False)
