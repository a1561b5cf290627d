"""Write: append the lines of files, or of standard input."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Any, Literal, NoReturn

import click

from ..errors import LogError
from ..format.columns import Headers, headers_bytes
from ..format.display import counted, sized
from ..log import topic_file
from ..system.files import REAL
from ..topic import Topic
from .arguments import DIRECTORY, REGEX, Parsed
from .line_times import LineTimes, parse_zone
from .lines import BOM, LineSource, LongLines, Portion, RefusedLine
from .output import Progress, bar, note
from .record_import import RecordImport
from .record_lines import FORMS
from .resume import Resume
from .signals import Held

BadTimes = Literal["stop", "keep", "skip"]

_LOOKS_LIKE_RECORD = b'{"partition": '
_SHOWN_LETTERS = 60  # of a time that cannot be read, in a message


def _header(text: str) -> tuple[str, bytes]:
    name, equal, value = text.partition("=")
    if not name or not equal:
        raise ValueError(f"{text!r} is no header; write NAME=VALUE, such as trace=4711")
    return name, os.fsencode(value)


def _separator(text: str) -> bytes:
    if not text:
        raise ValueError("the separator is empty")
    return os.fsencode(text.replace("\\t", "\t"))


@click.command()
@click.argument("topic", type=DIRECTORY)
@click.argument("files", type=click.Path(exists=True, dir_okay=False, allow_dash=True), nargs=-1)
@click.option("--create", is_flag=True, help="Create the topic if it does not exist.")
@click.option("--format", "form", type=click.Choice(FORMS), metavar="FORMAT",
              help="Files of records as `loglib cat --format` prints them: jsonl, csv or parquet. All columns but the "
              "value may be left out.")
@click.option("--keep-partitions", is_flag=True, help="With --format: to the partitions that it names.")
@click.option("--key", help="The key of all records.")
@click.option("--key-regex", type=REGEX, help="The key is this match in each line, or its group.")
@click.option("--key-separator", type=Parsed("text", _separator), help="The key is before this in each line: : or \\t.")
@click.option("--header", "headers", type=Parsed("name=value", _header), multiple=True, help="A header of all records.")
@click.option("--timestamp-regex", type=REGEX, help="The time, in the same way.")
@click.option("--timestamp-format", metavar="TEXT", help="Such as %d/%b/%Y:%H:%M:%S %z; or s, ms, us, ns since 1970.  "
              "[default: ISO 8601, or since 1970]")
@click.option("--timezone", "zone", type=Parsed("zone", parse_zone), help="For times that name none: Europe/Prague, "
              "+02:00.  [default: UTC]")
@click.option("--year", type=click.IntRange(1, 9998), metavar="YEAR",
              help="The year of a file's first time, if times name none.")
@click.option("--bad-times", type=click.Choice(["stop", "keep", "skip"]), default="stop", metavar="HOW",
              help="stop at a time that cannot be read, keep the line with the time of the line before, or skip it.  "
              "[default: stop]")
@click.option("--long-lines", type=click.Choice(["stop", "split", "skip"]), default="stop", metavar="HOW",
              help="stop at a line above --max-record-bytes, split it into records, or skip it.  [default: stop]")
@click.option("--resume", is_flag=True, help="Continue where the last import of the file with --resume ended.")
@click.option("-p", "--partition", type=click.IntRange(0), metavar="P", help="Append to this partition.")
@click.option("-0", "--null", "nul", is_flag=True, help="Values end with a zero byte instead of a line end.")
@click.option("--sync", is_flag=True, help="Flush after each portion that is read.")
def append(
    topic: str, files: tuple[str, ...], create: bool, key: str | None, key_regex: re.Pattern[bytes] | None,
    key_separator: bytes | None, headers: Headers, timestamp_regex: re.Pattern[bytes] | None,
    timestamp_format: str | None, zone: tzinfo | None, year: int | None, bad_times: BadTimes, resume: bool,
    form: str | None, keep_partitions: bool, **how: Any,
) -> None:  # fmt: skip
    """Append each line of the files, or of standard input, as a record.

    Lines are appended when they are read, so a slow pipe is followed, and a signal loses no line that was read. A line
    without a match of --timestamp-regex gets the time of the line before, or the present time.
    """
    if not create and not topic_file.exists(REAL, topic):
        raise click.UsageError(f"{topic}: no topic here; --create creates one")
    if sum(each is not None for each in (key, key_regex, key_separator)) > 1:
        raise click.UsageError("give one of --key, --key-regex and --key-separator, not both")
    if resume and not (files and "-" not in files):
        raise click.UsageError("--resume is for files: a pipe cannot be read again")
    if timestamp_regex is None and any(each is not None for each in (timestamp_format, zone, year)):
        raise click.UsageError("--timestamp-format, --timezone and --year need --timestamp-regex, which finds times")
    if form is not None:
        given = {
            "--key": key, "--key-regex": key_regex, "--key-separator": key_separator, "--header": headers or None,
            "--timestamp-regex": timestamp_regex, "--resume": resume or None, "--null": how["nul"] or None,
            "--long-lines": None if how["long_lines"] == "stop" else 1,
        }  # fmt: skip
        _append_records(topic, files, form, create=create, given=given, keep_partitions=keep_partitions, **how)
        return
    if keep_partitions:
        raise click.UsageError("--keep-partitions is for --format: a line names no partition")
    try:
        times = LineTimes(timestamp_format, zone, year, now=lambda: datetime.now(UTC))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    columns = _Columns(
        key, key_regex, timestamp_regex, times, bad_times=bad_times, separator=key_separator, headers=headers
    )  # fmt: skip
    with Topic.open(topic, create=create, shared=True) as opened, Held() as held:
        importing = _Import(opened, columns, held, resume=resume, **how)
        for name in files or ("-",):
            with bar(name) as progress:
                importing.append(name, progress)
        opened.flush()
        importing.report()
    held.raise_recorded()


def _append_records(
    topic: str, files: tuple[str, ...], form: str, *, create: bool, given: Mapping[str, object], keep_partitions: bool,
    partition: int | None, sync: bool, **_others: Any,
) -> None:  # fmt: skip
    """Append files of records. `given`: the options that are for lines, by name."""
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise click.UsageError(f"{wrong[0]} is for lines; with --format each record has its key, time and end")
    if keep_partitions and partition is not None:
        raise click.UsageError("give --partition or --keep-partitions, not both")
    with Topic.open(topic, create=create, shared=True) as opened, Held() as held:
        importing = RecordImport(
            opened, held, form, partition=partition, keep_partitions=keep_partitions, sync=sync
        )  # fmt: skip
        for name in files or ("-",):
            with bar(name) as progress:
                importing.append(name, progress)
        opened.flush()
        importing.report()
    held.raise_recorded()


class _Columns:
    """Finds the keys and times of lines."""

    def __init__(
        self, key: str | None, key_regex: re.Pattern[bytes] | None, time_regex: re.Pattern[bytes] | None,
        times: LineTimes, *, bad_times: BadTimes, separator: bytes | None, headers: Headers,
    ) -> None:  # fmt: skip
        self.times, self.bad_times = times, bad_times
        self._key = None if key is None else os.fsencode(key)
        self._key_regex, self._time_regex = key_regex, time_regex
        self._separator, self._headers = separator, headers
        self.has_keys = key is not None or key_regex is not None or separator is not None
        self.searches = key_regex is not None or time_regex is not None
        self._record_bytes = 0  # the largest size of a key and a value
        self.without_separator = 0  # lines without a key
        self.without_time = 0  # lines that got the present time, because none was found before
        self.begin()

    def begin(self, year: int | None = None) -> None:
        """Begin another file, whose first time is of this year."""
        self.times.begin(year)
        self._time: datetime | None = None  # of the line before
        # Of the line before, for its further pieces: its key, its time, and whether it is left out.
        self._line: tuple[bytes | None, datetime | None, bool] = (None, None, False)

    def line_limit(self, record_bytes: int) -> int:
        """The largest size of a line, so that it fits into a record together with its key."""
        record_bytes -= headers_bytes(self._headers)
        self._record_bytes = record_bytes
        if self._key_regex is not None:
            return max(1, record_bytes // 2)
        return max(1, record_bytes - len(self._key or b""))

    def find(
        self, portion: Portion, is_in: Callable[[int, bytes | None], bool]
    ) -> tuple[Portion, dict[str, Any], dict[int, str]]:
        """The lines to append, their keys and times, and why some times cannot be read, by the index of the line.

        With "stop" the lines end before the first such time. `is_in` returns True if the line that ends at a place,
        with this key, is in the topic already.
        """
        if portion.goes_on:
            return self._rest_of_a_line(portion)
        lines, bad = portion.lines, dict[int, str]()
        if portion.start == 0 and lines[0].startswith(BOM):
            lines = [lines[0].removeprefix(BOM), *lines[1:]]
        found: dict[str, Any] = {}
        if self._key is not None:
            found["keys"] = [self._key] * len(lines)
        elif self._key_regex is not None:
            found["keys"] = [_found(self._key_regex, line) for line in lines]
        elif self._separator is not None:
            found["keys"], values = self._separated(lines)
            portion = portion._replace(lines=values)
        if self._headers:
            found["headers"] = [self._headers] * len(lines)
        keys = found.get("keys") or [None] * len(lines)
        self._line = (keys[-1], None, False)
        if self._time_regex is None:
            return portion, found, bad
        kept: list[int] = []
        times: list[datetime] = []
        for at, line in enumerate(lines):
            why = self._read(self._time_regex, line)
            is_new = (why is not None or self._time is None) and not is_in(portion.ends[at], keys[at])
            if why is not None and is_new:
                bad[at] = why
                if self.bad_times != "keep":
                    if self.bad_times == "stop":
                        break
                    continue
            kept.append(at)
            times.append(self._time or datetime.now(UTC))
            self.without_time += is_new and self._time is None
        self._line = (keys[-1], times[-1] if times else None, kept[-1:] != [len(lines) - 1])
        if len(kept) < len(lines):
            portion = portion._replace(lines=_at(portion.lines, kept), ends=_at(portion.ends, kept))
            found = {name: _at(column, kept) for name, column in found.items()}
        return portion, found | {"timestamps": times}, bad

    def _rest_of_a_line(self, portion: Portion) -> tuple[Portion, dict[str, Any], dict[int, str]]:
        """The result of `find` for a further piece of a long line: it has the key and the time of the first one."""
        key, time, is_left_out = self._line
        if is_left_out:
            return portion._replace(lines=[], ends=[]), {}, {}
        (line,) = portion.lines
        room = max(1, self._record_bytes - len(key or b""))
        lines = [line[at : at + room] for at in range(0, len(line), room)]
        ends = [*(portion.start + room * number for number in range(1, len(lines))), *portion.ends]
        columns: dict[str, Any] = {"headers": self._headers or None, "timestamps": time}
        found = {name: [each] * len(lines) for name, each in columns.items() if each is not None}
        if self.has_keys:
            found["keys"] = [key] * len(lines)
        return portion._replace(lines=lines, ends=ends), found, {}

    def _separated(self, lines: Sequence[bytes]) -> tuple[list[bytes | None], list[bytes]]:
        """The keys and the values of lines. A line without the separator is a value without a key."""
        assert self._separator is not None
        keys: list[bytes | None] = []
        values: list[bytes] = []
        for line in lines:
            key, separator, value = line.partition(self._separator)
            keys.append(key if separator else None)
            values.append(value if separator else line)
            self.without_separator += not separator
        return keys, values

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

    def append(self, name: str, progress: Progress | None = None) -> None:
        """Append the lines of one file; `-` is standard input."""
        self._progress = progress
        before = self._records
        with LineSource(name, end=self._end, limit_bytes=self._limit_bytes, held=self._held) as source:
            if self._columns.searches:
                source.check_text()
            resume = self._find_place(source) if self._resumes else None
            # Years are counted from the first line on.
            start = 0 if resume is None or self._columns.times.needs_year else resume.start
            self._columns.begin(self._first_year(source))
            is_new, size = True, source.size_bytes if source.is_file else 0
            try:
                for portion in source.portions(
                    start, long_lines=self._long_lines, known_end=0 if resume is None else resume.end,
                    leave_open_end=resume is not None,
                ):  # fmt: skip
                    if is_new and portion.lines[0].startswith(_LOOKS_LIKE_RECORD):
                        note(f"{source.name} looks like records of `loglib cat --json`: with --format jsonl, `append` "
                             "appends the records, and without it their text")  # fmt: skip
                    is_new = False
                    self._append(source, start, portion, resume)
                    if self._progress is not None and size:
                        self._progress(min(portion.ends[-1], size), size)
            except RefusedLine as error:
                self._stop(source, start, error)
            except (LogError, OSError):
                if self._records > before:
                    note(f"{source.name}: {self._records - before:,} of its lines were appended before this error:")
                raise
            self._skipped += source.skipped
            if source.has_open_end:
                note(f"{source.name}: the last line has no end yet; it is left for the next --resume")

    def _find_place(self, source: LineSource) -> Resume:
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
        if not (self._columns.times.needs_year and source.is_file):
            return None
        texts = self._columns.texts(source.portions(long_lines="skip"))
        return self._columns.times.first_year(texts, datetime.fromtimestamp(source.modified, UTC))

    def _append(self, source: LineSource, start: int, portion: Portion, resume: Resume | None) -> None:
        chosen, columns, bad = self._columns.find(portion, resume.is_in if resume else lambda *_: False)
        if chosen.lines:
            if resume is None:
                self._topic.append_many(chosen.lines, partition=self._partition, **columns)
                appended = chosen.lines
            else:
                appended = resume.append(chosen, columns)
            self._records += len(appended)
            self._bytes += sum(map(len, appended))
        if self._sync:
            self._topic.flush()
        if bad:
            at, why = next(iter(bad.items()))
            number = portion.number + at
            if self._columns.bad_times == "stop":
                raise RefusedLine(number, why, "--bad-times keep or skip")
            if not self._bad:
                self._first_bad = f"{source.name}, line {source.line_number(start, number):,}: {why}"
            self._bad += len(bad)

    def _stop(self, source: LineSource, start: int, refused: RefusedLine) -> NoReturn:
        """Raise an error that names the line, the number of appended lines, and the way to continue."""
        number = source.line_number(start, refused.number)
        message = f"{source.name}, line {number:,}: {refused}"
        if not self._records:
            raise click.UsageError(f"{message}. Nothing was appended")
        self._topic.flush()
        message += f". {self._records:,} records were appended"
        if source.is_file and not self._resumes:
            zero = " -z" if self._end == b"\0" else ""
            rest = f"tail{zero} -n +{number} {shlex.quote(source.name)} | loglib append ..."
            message += f"; `{rest}` appends the rest"
        raise LogError(message)

    def report(self) -> None:
        """Print what was done, and what was assumed, skipped or changed."""
        note(f"appended {counted(self._records, 'record')}, {sized(self._bytes)}")
        for assumed in self._columns.times.assumed():
            note(assumed)
        if self._bad:
            done = "skipped" if self._columns.bad_times == "skip" else "kept, with the time of the line before"
            note(f"{self._bad:,} lines with a time that cannot be read were {done}. {self._first_bad}")
        if self._skipped:
            note(f"{self._skipped:,} lines of more than {self._limit_bytes:,} bytes were skipped")
        if self._columns.without_separator:
            note(f"{self._columns.without_separator:,} lines without the separator are values without a key")
        if self._columns.without_time:
            note(f"{self._columns.without_time:,} lines got the present time, since none was found before them")


def _at(column: Sequence[Any], places: list[int]) -> list[Any]:
    return [column[at] for at in places]


def _found(pattern: re.Pattern[bytes], line: bytes) -> bytes | None:
    match = pattern.search(line)
    if match is None:
        return None
    return match[1] if pattern.groups else match[0]
