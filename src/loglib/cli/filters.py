"""Filters: which records `cat` and `tail` print: by key, by what the value contains, by time, by fields of JSON.

Invariant: a record is printed if it passes all filters that are given. A time is compared with each record's own time,
so a record that was appended late is in or out as its time says. What is surely before `--since` is not read.

Threads: a filter belongs to one thread.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Any

import click

from ..config.times import CalendarError, to_datetime
from ..errors import OffsetOutOfRangeError
from ..format.json_condition import parse_condition
from ..format.record import Record
from ..log.reader import OnDamage
from ..partition import Partition
from .arguments import REGEX, Parsed, add_options
from .line_times import parse_zone
from .moments import parse_moment

Test = Callable[[Record], object]

_WIDER = 4  # by which a search from the end goes back further each time

filter_options = add_options(
    click.option("--key", metavar="KEY", help="Only records with this key."),
    click.option("--grep", type=REGEX, help="Only records whose value has a match of this regular expression."),
    click.option("--where", metavar="CONDITION", help="Only records whose value is JSON and fulfils this condition, "
                 "such as '.user.id == 7 and not .level == \"debug\"'."),
    click.option("--since", metavar="TIME", help="Only records of this time or later: 15m, today, yesterday, 12:00, "
                 "2024-05-01, 2024-05-01T12:00."),
    click.option("--until", metavar="TIME", help="Only records before this time."),
    click.option("--timezone", "zone", type=Parsed("zone", parse_zone), help="The zone of --since and --until, such as "
                 "Europe/Prague or +02:00.  [default: UTC]"),
)  # fmt: skip


_NAMES = ("key", "grep", "where", "since", "until", "zone")


def split_options(options: dict[str, Any]) -> tuple[Filter, dict[str, Any]]:
    """The filters of a command, and its other options."""
    given = {name: options[name] for name in _NAMES}
    return Filter(**given), {name: value for name, value in options.items() if name not in _NAMES}


class Filter:
    """The filters of one command."""

    def __init__(
        self, *, key: str | None, grep: re.Pattern[bytes] | None, where: str | None, since: str | None,
        until: str | None, zone: tzinfo | None,
    ) -> None:  # fmt: skip
        """Usage error if a time or a condition cannot be read."""
        if zone is not None and since is None and until is None:
            raise click.UsageError("--timezone is for --since and --until")
        now = datetime.now(UTC)
        tests: list[Test] = []
        self._since_us = since_us = _moment("--since", since, now, zone or UTC)
        until_us = _moment("--until", until, now, zone or UTC)
        if since_us is not None and until_us is not None and since_us > until_us:
            raise click.UsageError("--until is before --since")
        if since_us is not None:
            tests.append(lambda record: record.timestamp >= since_us)
        if until_us is not None:
            tests.append(lambda record: record.timestamp < until_us)
        if key is not None:
            wanted = os.fsencode(key)
            tests.append(lambda record: record.key == wanted)
        if grep is not None:
            tests.append(lambda record: record.value is not None and grep.search(record.value))
        if where is not None:
            try:
                holds = parse_condition(where)
            except ValueError as error:
                raise click.BadParameter(str(error), param_hint="--where") from error
            tests.append(lambda record: holds(record.value))
        self._tests = tests

    def start(self, given: Any) -> Any:
        """Where to begin: as the user says, or at --since. None if neither is given."""
        if given is not None or self._since_us is None:
            return given
        try:
            return to_datetime(self._since_us)
        except CalendarError:
            return "begin"

    def passes(self, record: Record) -> bool:
        """True if the record passes all filters."""
        return all(test(record) for test in self._tests)

    def passing(self, records: Iterable[Record]) -> Iterable[Record]:
        """The records that pass, in their order."""
        return self._passing(records) if self._tests else records

    def _passing(self, records: Iterable[Record]) -> Iterator[Record]:
        return filter(self.passes, records)

    def last_starts(self, partitions: Sequence[Partition], count: int, on_damage: OnDamage) -> dict[int, int]:
        """For each partition the offset of the first of its last `count` records that pass, or of its end.

        It looks back from the end, each time over more records.
        """
        return {each.id: self._last_start(each, count, on_damage) for each in partitions}

    def _last_start(self, partition: Partition, count: int, on_damage: OnDamage) -> int:
        if not self._tests or not count:
            return partition.offset_before_end(count)
        looked_at, before = count, -1
        while True:
            start, end = partition.offset_before_end(looked_at), partition.high_watermark
            if start == before:  # damage is in the way, or it is the begin
                start = partition.log_start_offset
            try:
                with partition.read(start, end, on_damage=on_damage) as reader:
                    last = deque((record.offset for record in self._passing(reader)), maxlen=count)
            except OffsetOutOfRangeError:  # retention has just dropped the segment
                continue
            if len(last) == count or start <= partition.log_start_offset:
                return last[0] if last else end
            looked_at, before = looked_at * _WIDER, start


def _moment(option: str, text: str | None, now: datetime, zone: tzinfo) -> int | None:
    if text is None:
        return None
    try:
        return parse_moment(text, now=now, zone=zone)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from error

