"""Write: append the lines of files, or of standard input."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import click

from ..log.topic_file import NAME
from ..system.files import REAL
from ..topic import Topic
from .arguments import DIRECTORY
from .output import note, sized

__all__ = ["append"]

_CHUNK_BYTES = 1 << 20


class _Pattern(click.ParamType[re.Pattern[bytes]]):
    name = "regex"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> re.Pattern[bytes]:
        if isinstance(value, re.Pattern):
            return value
        try:
            return re.compile(os.fsencode(value))
        except re.error as error:
            self.fail(f"{value!r} is not a regular expression: {error}", param, ctx)


@click.command()
@click.argument("topic", type=DIRECTORY)
@click.argument("files", type=click.Path(exists=True, dir_okay=False, allow_dash=True), nargs=-1)
@click.option("--create", is_flag=True, help="Make the topic if there is none.")
@click.option("--key", help="The key of all records.")
@click.option("--key-regex", type=_Pattern(), help="What it finds in a line, or its first group, is the key.")
@click.option("--timestamp-regex", type=_Pattern(), help="What it finds, or its first group, is the time.")
@click.option("--timestamp-format", help="How the time is written, as in %d/%b/%Y:%H:%M:%S %z. By default ISO 8601, or "
              "seconds since 1970.")  # fmt: skip
@click.option("-p", "--partition", type=click.IntRange(0), help="Append to this partition.")
@click.option("-0", "--null", "nul", is_flag=True, help="Values end with a zero byte, not with a line end.")
@click.option("--sync", is_flag=True, help="Flush after each portion that is read.")
def append(topic: str, files: tuple[str, ...], create: bool, partition: int | None, sync: bool, **how: Any) -> None:
    """Append each line of the files, or of standard input, as a record.

    Lines come as they are read: a pipe that is slow is followed. A line in which --timestamp-regex finds no time gets
    the time of the line before, or the present time.
    """
    if not create and not REAL.exists(os.path.join(topic, NAME)):
        raise click.UsageError(f"{topic}: no topic here; --create makes one")
    if how["key"] is not None and how["key_regex"] is not None:
        raise click.UsageError("give --key or --key-regex, not both")
    end = b"\0" if how.pop("nul") else b"\n"
    lines = _Lines(**how)
    with Topic.open(topic, create=create, shared=True) as opened:
        for name in files or ("-",):
            fd = sys.stdin.fileno() if name == "-" else os.open(name, os.O_RDONLY)
            try:
                for portion in _portions(fd, end):
                    opened.append_many(portion, partition=partition, **lines.columns(portion))
                    lines.count(portion)
                    if sync:
                        opened.flush()
            finally:
                if name != "-":
                    os.close(fd)
    note(f"appended {lines.records:,} records, {sized(lines.bytes)}")


def _portions(fd: int, end: bytes) -> Iterator[list[bytes]]:
    """The lines that are there, without their ends, each time that something could be read."""
    rest: list[bytes] = []  # of a line whose end was not yet read
    while data := os.read(fd, _CHUNK_BYTES):
        first, *lines = data.split(end)
        rest.append(first)
        if lines:
            whole = b"".join(rest)
            rest = [lines.pop()]
            yield [whole, *lines]
    last = b"".join(rest)
    if last:
        yield [last]


class _Lines:
    """Finds keys and times in lines."""

    def __init__(
        self, key: str | None, key_regex: re.Pattern[bytes] | None, timestamp_regex: re.Pattern[bytes] | None,
        timestamp_format: str | None,
    ) -> None:  # fmt: skip
        self.records = self.bytes = 0
        self._key = None if key is None else os.fsencode(key)
        self._key_regex, self._time_regex, self._time_format = key_regex, timestamp_regex, timestamp_format
        self._time: datetime | None = None  # of the line before

    def columns(self, lines: list[bytes]) -> dict[str, Any]:
        """The keys and times of these lines."""
        found: dict[str, Any] = {}
        if self._key is not None:
            found["keys"] = [self._key] * len(lines)
        elif self._key_regex is not None:
            found["keys"] = [_found(self._key_regex, line) for line in lines]
        if self._time_regex is not None:
            found["timestamps"] = [self._time_of(self._time_regex, line) for line in lines]
        return found

    def count(self, lines: list[bytes]) -> None:
        self.records += len(lines)
        self.bytes += sum(map(len, lines))

    def _time_of(self, pattern: re.Pattern[bytes], line: bytes) -> datetime:
        text = _found(pattern, line)
        if text is not None:
            self._time = self._parsed(text.decode(errors="replace"))
        return self._time or datetime.now(UTC)

    def _parsed(self, text: str) -> datetime:
        try:
            if self._time_format is not None:
                time = datetime.strptime(text, self._time_format)  # noqa: DTZ007  The zone is looked at below.
            elif re.fullmatch(r"-?\d+(\.\d+)?", text):
                return datetime.fromtimestamp(float(text), UTC)
            else:
                time = datetime.fromisoformat(text)
        except (ValueError, OverflowError) as error:
            raise click.UsageError(f"--timestamp-regex found {text!r}, which is no time: {error}") from error
        return time if time.tzinfo else time.replace(tzinfo=UTC)


def _found(pattern: re.Pattern[bytes], line: bytes) -> bytes | None:
    match = pattern.search(line)
    if match is None:
        return None
    return match[1] if pattern.groups else match[0]
