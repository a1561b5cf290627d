"""Write: append the lines of files, or of standard input."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Any, Literal, NamedTuple, NoReturn

import click

from ..errors import LogError
from ..format.display import sized
from ..log.topic_file import NAME
from ..system.files import REAL
from ..topic import Topic
from .arguments import DIRECTORY, Parsed
from .line_times import LineTimes, parse_zone
from .lines import BOM, LineSource, LongLines, Portion, TooLongLine
from .output import note
from .resume import Resume
from .signals import Held

__all__ = ["append"]

BadTimes = Literal["stop", "keep", "skip"]

_SHOWN_LETTERS = 60  # of a time that cannot be read, in a message


def _pattern(text: str) -> re.Pattern[bytes]:
    try:
        return re.compile(os.fsencode(text))
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from error


_PATTERN = Parsed("regex", _pattern)


@click.command()
@click.argument("topic", type=DIRECTORY)
@click.argument("files", type=click.Path(exists=True, dir_okay=False, allow_dash=True), nargs=-1)
@click.option("--create", is_flag=True, help="Create the topic if it does not exist.")
@click.option("--key", help="The key of all records.")
@click.option("--key-regex", type=_PATTERN, help="Take the key from each line: the match, or its first group.")
@click.option("--timestamp-regex", type=_PATTERN, help="Take the time from each line in the same way.")
@click.option("--timestamp-format", metavar="FORMAT",
              help="Such as %d/%b/%Y:%H:%M:%S %z; or s, ms, us, ns since 1970.  "
              "[default: ISO 8601, or since 1970]")
@click.option("--timezone", "zone", type=Parsed("zone", parse_zone), help="The zone of times that name none, such as "
              "Europe/Prague or +02:00.  [default: UTC]")
@click.option("--year", type=click.IntRange(1, 9998), metavar="YEAR", help="The year of the first time of each file, "
              "if times name none.")
@click.option("--bad-times", type=click.Choice(["stop", "keep", "skip"]), default="stop", show_default=True,
              help="For times that cannot be read: keep the line, with the time of the line before, or skip it.")
@click.option("--long-lines", type=click.Choice(["stop", "split", "skip"]), default="stop", show_default=True,
              help="For lines above --max-record-bytes of the topic: split them into several records, or skip them.")
@click.option("--resume", is_flag=True, help="Continue where the last import of the file with --resume ended.")
@click.option("-p", "--partition", type=click.IntRange(0), metavar="P", help="Append to this partition.")
@click.option("-0", "--null", "nul", is_flag=True, help="Values end with a zero byte instead of a line end.")
@click.option("--sync", is_flag=True, help="Flush after each portion that is read.")
def append(
    topic: str, files: tuple[str, ...], create: bool, key: str | None, key_regex: re.Pattern[bytes] | None,
    timestamp_regex: re.Pattern[bytes] | None, timestamp_format: str | None, zone: tzinfo | None, year: int | None,
    bad_times: BadTimes, resume: bool, **how: Any,
) -> None:  # fmt: skip
    """Append each line of the files, or of standard input, as a record.

    Lines are appended when they are read, so a slow pipe is followed, and a signal loses no line that was read. A line
    without a match of --timestamp-regex gets the time of the line before, or the present time.
    """
    if not create and not REAL.exists(os.path.join(topic, NAME)):
        raise click.UsageError(f"{topic}: no topic here; --create creates one")
    if key is not None and key_regex is not None:
        raise click.UsageError("give --key or --key-regex, not both")
    if resume and not (files and "-" not in files):
        raise click.UsageError("--resume is for files: a pipe cannot be read again")
    if timestamp_regex is None and any(each is not None for each in (timestamp_format, zone, year)):
        raise click.UsageError("--timestamp-format, --timezone and --year need --timestamp-regex, which finds times")
    try:
        times = LineTimes(timestamp_format, zone, year, now=lambda: datetime.now(UTC))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    columns = _Columns(key, key_regex, timestamp_regex, times, bad_times=bad_times)
    with Topic.open(topic, create=create, shared=True) as opened, Held() as held:
        importing = _Import(opened, columns, held, resume=resume, **how)
        for name in files or ("-",):
            importing.append(name)
        opened.flush()
        importing.report()
    held.raise_recorded()


class _BadTime(NamedTuple):
    """A time that cannot be read."""

    at: int  # the index of its line in the portion
    why: str


class _StoppedError(LogError):
    """A line cannot be appended, and the options say to stop there."""


class _Columns:
    """Finds the keys and times of lines."""

    def __init__(
        self, key: str | None, key_regex: re.Pattern[bytes] | None, time_regex: re.Pattern[bytes] | None,
        times: LineTimes, *, bad_times: BadTimes,
    ) -> None:  # fmt: skip
        self.times, self.bad_times = times, bad_times
        self._key = None if key is None else os.fsencode(key)
        self._key_regex, self._time_regex = key_regex, time_regex
        self.without_time = 0  # lines that got the present time, because none was found before
        self.begin()

    def begin(self, year: int | None = None) -> None:
        """Begin another file, whose first time is of this year."""
        self.times.begin(year)
        self._time: datetime | None = None  # of the line before

    @property
    def has_keys(self) -> bool:
        return self._key is not None or self._key_regex is not None

    @property
    def has_times(self) -> bool:
        return self._time_regex is not None

    @property
    def searches(self) -> bool:
        return self._key_regex is not None or self._time_regex is not None

    def line_limit(self, record_bytes: int) -> int:
        """The largest size of a line, so that it fits into a record together with its key."""
        if self._key_regex is not None:
            return max(1, record_bytes // 2)
        return max(1, record_bytes - len(self._key or b""))

    def of(
        self, portion: Portion, is_in: Callable[[int, bytes | None], bool]
    ) -> tuple[Portion, dict[str, Any], list[_BadTime]]:
        """The lines to append, their keys and times, and the times that cannot be read.

        With "stop" the lines end before the first such time. `is_in` returns True if the line that ends at a place,
        with this key, is in the topic already.
        """
        lines, bad = portion.lines, list[_BadTime]()
        if portion.start == 0 and lines[0].startswith(BOM):
            lines = [lines[0].removeprefix(BOM), *lines[1:]]
        found: dict[str, Any] = {}
        if self._key is not None:
            found["keys"] = [self._key] * len(lines)
        elif self._key_regex is not None:
            found["keys"] = [_found(self._key_regex, line) for line in lines]
        if self._time_regex is None:
            return portion, found, bad
        kept: list[int] = []
        times: list[datetime] = []
        for at, line in enumerate(lines):
            why = self._read(self._time_regex, line)
            is_new = (why is not None or self._time is None) and not is_in(portion.ends[at], _key_at(found, at))
            if why is not None and is_new:
                bad.append(_BadTime(at, why))
                if self.bad_times != "keep":
                    if self.bad_times == "stop":
                        break
                    continue
            kept.append(at)
            times.append(self._time or datetime.now(UTC))
            self.without_time += is_new and self._time is None
        if len(kept) < len(lines):
            portion = portion._replace(lines=_at(portion.lines, kept), ends=_at(portion.ends, kept))
            found = {name: _at(column, kept) for name, column in found.items()}
        return portion, found | {"timestamps": times}, bad

    def _read(self, pattern: re.Pattern[bytes], line: bytes) -> str | None:
        """Read the time of a line, if it has one. Return the reason if it cannot be read."""
        if (found := _found(pattern, line)) is None:
            return None
        text = found.decode(errors="replace")
        try:
            self._time = self.times.parse(text)
        except ValueError as error:
            shown = text if len(text) <= _SHOWN_LETTERS else text[:_SHOWN_LETTERS] + "..."
            return f"--timestamp-regex found {shown!r}, which is not a time: {error}"
        return None

    def texts(self, portions: Iterator[Portion]) -> Iterator[str]:
        """The texts of the times in the lines."""
        assert self._time_regex is not None
        for portion in portions:
            for line in portion.lines:
                if (found := _found(self._time_regex, line)) is not None:
                    yield found.decode(errors="replace")


class _Import:
    """Appends files to a topic, and counts lines."""

    def __init__(
        self, topic: Topic, columns: _Columns, held: Held, *, partition: int | None, nul: bool, sync: bool,
        resume: bool, long_lines: LongLines,
    ) -> None:  # fmt: skip
        self._topic, self._columns, self._held = topic, columns, held
        self._partition, self._sync, self._resumes, self._long_lines = partition, sync, resume, long_lines
        self._end = b"\0" if nul else b"\n"
        self._limit_bytes = columns.line_limit(topic.config.max_record_bytes)
        self._records = self._bytes = self._bad = self._skipped = 0
        self._first_bad = ""  # the place and reason of the first bad time

    def append(self, name: str) -> None:
        """Append the lines of one file; `-` is standard input."""
        before = self._records
        with LineSource(name, end=self._end, limit_bytes=self._limit_bytes, held=self._held) as source:
            if self._columns.searches:
                source.check_text()
            resume = self._place(source) if self._resumes else None
            times = self._columns.times
            # Years are counted from the first line on.
            start = 0 if resume is None or (self._columns.has_times and times.needs_year) else resume.start
            self._columns.begin(self._first_year(source))
            try:
                for portion in source.portions(
                    start, long_lines=self._long_lines, known_end=0 if resume is None else resume.end,
                    leave_open_end=resume is not None,
                ):  # fmt: skip
                    self._append(source, start, portion, resume)
            except _StoppedError:
                raise
            except TooLongLine as error:
                self._stop(source, start, error.number, f"{error}; use --long-lines split or skip to continue")
            except (LogError, OSError):
                if self._records > before:
                    note(f"{source.name}: {self._records - before:,} of its lines were appended before this error:")
                raise
            self._skipped += source.skipped
            if source.has_open_end:
                note(f"{source.name}: the last line has no end yet; it is left for the next --resume")

    def _place(self, source: LineSource) -> Resume:
        """Find the place up to which the file is in the topic, and print it."""
        if not source.is_file:
            raise click.UsageError(f"{source.name} is not a regular file, which --resume needs")
        resume = Resume(self._topic, source, partition=self._partition, has_keys=self._columns.has_keys)
        if resume.is_other_file and not resume.end:
            note(f"{source.name} is not the file that was imported from this path before; was it rotated or rewritten?")
        if resume.has_fewer:
            note(f"{source.name}: its keys choose among the partitions that the topic had when the import began")
        where = f"continues at byte {resume.end:,}" if resume.end else "begins at its first line"
        note(f"{source.name}: {where}")
        return resume

    def _first_year(self, source: LineSource) -> int | None:
        """The year of the first time in a file whose times name no year."""
        if not (self._columns.has_times and self._columns.times.needs_year and source.is_file):
            return None
        texts = self._columns.texts(source.portions(long_lines="skip"))
        return self._columns.times.first_year(texts, datetime.fromtimestamp(source.modified, UTC))

    def _append(self, source: LineSource, start: int, portion: Portion, resume: Resume | None) -> None:
        some, columns, bad = self._columns.of(portion, _not_in if resume is None else resume.is_in)
        if some.lines:
            if resume is None:
                self._topic.append_many(some.lines, partition=self._partition, **columns)
                appended = some.lines
            else:
                appended = resume.append(some, columns)
            self._records += len(appended)
            self._bytes += sum(map(len, appended))
        if self._sync:
            self._topic.flush()
        if bad:
            number = portion.number + bad[0].at
            if self._columns.bad_times == "stop":
                self._stop(source, start, number, f"{bad[0].why}; use --bad-times keep or skip to continue")
            if not self._bad:
                self._first_bad = f"{source.name}, line {source.line_number(start, number):,}: {bad[0].why}"
            self._bad += len(bad)

    def _stop(self, source: LineSource, start: int, number: int, why: str) -> NoReturn:
        """Raise an error that names the line, the number of appended lines, and the way to continue."""
        number = source.line_number(start, number)
        message = f"{source.name}, line {number:,}: {why}"
        if not self._records:
            raise click.UsageError(f"{message}. Nothing was appended")
        self._topic.flush()
        message += f". {self._records:,} records were appended"
        if source.is_file and not self._resumes:
            message += f"; `tail -n +{number} {source.name} | loglib append ...` appends the rest"
        raise _StoppedError(message)

    def report(self) -> None:
        """Print what was done, and what was assumed, skipped or changed."""
        note(f"appended {self._records:,} records, {sized(self._bytes)}")
        for assumed in self._columns.times.assumed():
            note(assumed)
        if self._bad:
            done = "skipped" if self._columns.bad_times == "skip" else "kept, with the time of the line before"
            note(f"{self._bad:,} lines with a time that cannot be read were {done}. {self._first_bad}")
        if self._skipped:
            note(f"{self._skipped:,} lines of more than {self._limit_bytes:,} bytes were skipped")
        if self._columns.without_time:
            note(f"{self._columns.without_time:,} lines got the present time, since none was found before them")


def _not_in(_end: int, _key: bytes | None) -> bool:
    """False: an import without --resume appends each line."""
    return False


def _key_at(columns: dict[str, Any], at: int) -> bytes | None:
    keys = columns.get("keys")
    return None if keys is None else keys[at]


def _at(column: Sequence[Any], places: list[int]) -> list[Any]:
    return [column[at] for at in places]


def _found(pattern: re.Pattern[bytes], line: bytes) -> bytes | None:
    match = pattern.search(line)
    if match is None:
        return None
    return match[1] if pattern.groups else match[0]
