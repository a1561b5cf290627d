"""Line times: the times at which lines were written, taken from their text.

Invariant: a text has one meaning, or it raises a `ValueError` that names what is missing. Many logs omit the zone and
the year. These are chosen by a rule, and `assumed` reports that.

    zone      that of --timezone, or UTC. A name such as CEST counts if --timezone has it at that time.
    year      in a file: the last time is the latest before the file was changed, and each leap day is in a leap year.
              In a pipe: the latest year that is not in the future. After each December the year is one higher.
    century   the latest past one, for years of two digits
    unit      of a number: its 9 or 10, 13, 16 or 19 digits mean seconds, milli-, micro- or nanoseconds since 1970
"""

from __future__ import annotations

import re
from calendar import isleap
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from ..config.times import to_datetime

_UNITS = {"s": 6, "ms": 3, "us": 0, "ns": -3}  # as powers of ten, in microseconds
_UNIT_OF_DIGITS = {9: "s", 10: "s", 13: "ms", 16: "us", 19: "ns"}
_NUMBER = re.compile(r"([+-]?\d+)(?:[.,](\d+))?")
_ZONE = re.compile(r"([A-Za-z][A-Za-z_]+(?:/[A-Za-z0-9_+-]+)*)")
_OFFSET = re.compile(r"([+-])([01]\d|2[0-3]):?([0-5]\d)")
_UNIVERSAL = {"UTC", "GMT", "UT", "Z"}
_MIDNIGHT, _LEAP_SECOND = re.compile(r"(?<!\d)24([:.]?)00(?:\1|(?!\d))"), re.compile(r"(?<=[:.])60(?!\d)")
_FRACTION = re.compile(r"(\d{6})\d+(?!\d)")
_LEAP_YEAR = 2000  # has all days, until the year is known
_MARGIN = timedelta(days=1)  # clocks and zones differ: a time that is ahead by less counts as the present
_LATE = timedelta(days=31)  # a line may be this late; a time that falls by more belongs to the next year
_AGAIN = timedelta(minutes=5)  # a time that falls by more, in the hour that comes twice, is in the second one
_YEARS_BACK = 40


def parse_zone(text: str) -> tzinfo:
    """The zone of an IANA name, or of an offset such as +02:00; `ValueError` if there is none."""
    if text.upper() in _UNIVERSAL:
        return UTC
    if found := _OFFSET.fullmatch(text):
        sign, hours, minutes = found.groups()
        offset = timedelta(hours=int(hours), minutes=int(minutes))
        return timezone(-offset if sign == "-" else offset)
    try:
        return ZoneInfo(text)
    except (ZoneInfoNotFoundError, OSError, ValueError) as error:  # also a directory of zones, or a path
        raise ValueError(
            f"{text!r} is no time zone of this system; write an offset such as +02:00, UTC, or a name such as "
            "Europe/Prague (names need the system's tzdata, or pip install tzdata)"
        ) from error


class LineTimes:
    """Parses the times of the lines of files, one file after the other."""

    def __init__(self, form: str | None, zone: tzinfo | None, year: int | None, *, now: Callable[[], datetime]) -> None:
        """`form` is a format of `strptime`, or the unit of a number: s, ms, us or ns since 1970.

        `zone` and `year` are for times that name none, `now` is the clock. `ValueError` if the form names no day.
        """
        self._unit = form if form in _UNITS else None
        self._form = None if self._unit else form
        self._zone, self._given_year, self._now = zone, year, now
        self._directives = set(re.findall(r"%(.)", (self._form or "").replace("%%", "")))
        self.needs_year = self._form is not None and not self._directives & set("YyGcx")
        if self._form is not None:
            self._check(self._form)
        if year is not None and not self.needs_year:
            raise ValueError("--year is for a --timestamp-format without a year")
        self._assumes_zone = False
        self._years: set[int] = set()  # the years that were assumed
        self.begin()

    def _check(self, form: str) -> None:
        has = self._directives
        try:
            self._formed("")  # with a year: from Python 3.13 on `strptime` warns of a day without one
        except (ValueError, re.error) as error:
            if "does not match" not in str(error):
                raise ValueError(f"--timestamp-format {form!r}: {error}") from error
        day = "d" in has and has & set("mbB")
        if not (day or has & set("cx") or ("j" in has and not self.needs_year) or ("V" in has and "G" in has)):
            raise ValueError(f"--timestamp-format {form!r} names no day; a time needs its day, month and year")
        if "I" in has and "p" not in has:
            raise ValueError(f"--timestamp-format {form!r} has 12 hours and no %p; is it %H, with 24 hours?")

    def begin(self, year: int | None = None) -> None:
        """Begin another file; `year` is that of its first time, from `first_year`."""
        self._year = year if self._given_year is None else self._given_year  # of the line before
        self._before: datetime | None = None  # the time of the line before, in the leap year
        self._last: datetime | None = None  # the time of the line before
        self._text: str | None = None  # of the line before: often it is the same
        self._word: str | None = None  # the name of the zone in the text, such as CEST

    def assumed(self) -> list[str]:
        """Messages about what was assumed."""
        messages = []
        if self._assumes_zone:
            messages.append("the times name no zone and were read as UTC; --timezone sets another")
        if self._years:
            first, last = min(self._years), max(self._years)
            years = str(first) if first == last else f"{first} to {last}"
            messages.append(f"the times name no year and were read as of {years}; --year sets another")
        return messages

    def parse(self, text: str) -> datetime:
        """The time of a text, in UTC; `ValueError` if the text is no time, or could mean several."""
        text = text.strip()
        if text != self._text or self._last is None:
            try:
                self._last = self._utc(text)
            except ArithmeticError as error:
                raise ValueError("it is not in the years 1 to 9999") from error
            self._text = text
        return self._last

    def _utc(self, text: str) -> datetime:
        if self._unit is not None:
            return _since_1970(text, self._unit)
        if self._form is None and (number := _NUMBER.fullmatch(text)):
            digits = len(number[1].lstrip("+-"))
            if digits not in _UNIT_OF_DIGITS:
                raise ValueError(f"a number of {digits} digits; give its unit with --timestamp-format s, ms, us or ns")
            return _since_1970(text, _UNIT_OF_DIGITS[digits])
        time, more = self._read_repaired(text)
        if self.needs_year and time.year == _LEAP_YEAR:
            time = self._with_year(time)
        if time.tzinfo is None:
            time = self._with_zone(time) if self._word is None else self._with_zone_name(time, self._word)
        time = time.astimezone(UTC) + more
        if "y" in self._directives and time > self._now() + _MARGIN:
            time = time.replace(year=time.year - 100)
        return time

    def _read_repaired(self, text: str) -> tuple[datetime, timedelta]:
        """The time that the text names, without the hour 24 or the second 60, and the time to add for it."""
        try:
            return self._read(text), timedelta(0)
        except ValueError as error:
            text, more = _repaired(text)
            if not more:
                raise
            try:
                return self._read(text), more
            except ValueError:
                raise error from None

    def _read(self, text: str) -> datetime:
        """The time that the text names. Without a year it is in the leap year, and without an offset in no zone."""
        self._word = None
        if self._form is None:
            return self._with_word(text, datetime.fromisoformat)
        if "f" in self._directives:
            text = _FRACTION.sub(r"\1", text)  # nanoseconds
        if "Z" in self._directives:
            return self._with_word(text, self._formed)
        return self._formed(text)

    def _formed(self, text: str) -> datetime:
        assert self._form is not None
        if self.needs_year:
            return datetime.strptime(f"{_LEAP_YEAR} {text}", f"%Y {self._form}")  # noqa: DTZ007  The zone is added later.
        return datetime.strptime(text, self._form)  # noqa: DTZ007  The zone is added later.

    # --- zones -------------------------------------------------------------------------------------------

    def _with_word(self, text: str, read: Callable[[str], datetime]) -> datetime:
        """Read a time that may contain the name of its zone, and put it in that zone."""
        for found in reversed(list(_ZONE.finditer(text))):
            word = "UTC" if self._form is not None else ""
            try:
                time = read((text[: found.start()] + word + text[found.end() :]).strip())
            except ValueError:
                continue  # the name of a month, or of a day
            return self._in_zone_of(found[0], time) if time.tzinfo is None else time
        return read(text)

    def _in_zone_of(self, word: str, time: datetime) -> datetime:
        if word.upper() in _UNIVERSAL:
            return time.replace(tzinfo=UTC)
        if "/" in word:
            return time.replace(tzinfo=parse_zone(word))
        self._word = word  # its meaning depends on the year: the clocks are put back at another time each year
        return time

    def _with_zone_name(self, time: datetime, word: str) -> datetime:
        """The time in the zone of all lines, at which the zone has this name."""
        for fold in (0, 1) if self._zone is not None else ():
            there = time.replace(tzinfo=self._zone, fold=fold)
            if there.tzname() == word:
                return there
        raise ValueError(f"{word} is the name of several zones, or of none at this time; give the zone with --timezone")

    def _with_zone(self, time: datetime) -> datetime:
        """The time in the zone of all lines."""
        if self._zone is None:
            self._assumes_zone = True
            return time.replace(tzinfo=UTC)
        there = time.replace(tzinfo=self._zone)
        if there.astimezone(UTC).astimezone(self._zone).replace(tzinfo=None) != time:
            raise ValueError(f"there was no such time in {self._zone}: the clocks were put forward")
        again = there.replace(fold=1)
        if again.utcoffset() != there.utcoffset() and self._last is not None:
            return again if there.astimezone(UTC) < self._last - _AGAIN else there
        return there

    # --- years -------------------------------------------------------------------------------------------

    def _with_year(self, time: datetime) -> datetime:
        """Move a time of the leap year to its real year."""
        if self._year is None:
            year = self._latest_year(time, self._now())
        else:
            year = self._year + _years_later(self._before, time)
        try:
            found = time.replace(year=year)
        except ValueError:
            raise ValueError(f"{year} has no such day; --year sets another year") from None
        if self._year is not None and year >= self._year:
            self._year, self._before = year, time
        if self._given_year is None:
            self._years.add(year)
        return found

    def _latest_year(self, time: datetime, end: datetime) -> int:
        """The latest year in which a time of the leap year is before `end`."""
        day = time.replace(day=28) if (time.month, time.day) == (2, 29) else time
        day = day.replace(tzinfo=day.tzinfo or self._zone or UTC)
        years = range(end.year + 1, end.year - 1, -1)
        return next((year for year in years if day.replace(year=year) <= end + _MARGIN), end.year - 1)

    def first_year(self, texts: Iterable[str], changed: datetime) -> int | None:
        """The year of the first time of a file that was last `changed` at that time; None without times."""
        before: datetime | None = None
        years, leaps = 0, set()
        for text in texts:
            try:
                time, _ = self._read_repaired(text.strip())
            except ValueError:
                continue
            later = _years_later(before, time)
            if later >= 0:
                years, before = years + later, time
            if (time.month, time.day) == (2, 29):
                leaps.add(years if later >= 0 else years - 1)
        if before is None:
            return None
        latest = self._latest_year(before, min(changed, self._now())) - years
        years_back = range(latest, latest - _YEARS_BACK, -1)
        return next((year for year in years_back if all(isleap(year + each) for each in leaps)), latest)


def _years_later(before: datetime | None, time: datetime) -> int:
    """The years from the time of the line before to this one, both in the leap year: 1, 0, or -1."""
    if before is None:
        return 0
    there = time.replace(tzinfo=before.tzinfo) - before
    return 1 if there < -_LATE else -1 if there > timedelta(days=366) - _LATE else 0


def _since_1970(text: str, unit: str) -> datetime:
    number = _NUMBER.fullmatch(text)
    if number is None:
        raise ValueError("it is not a number")
    value = Decimal(f"{number[1]}.{number[2] or 0}")
    return to_datetime(int(value.scaleb(_UNITS[unit]) // 1))


def _repaired(text: str) -> tuple[str, timedelta]:
    """The text without the hour 24 or the second 60, and the time to add for it; zero if it has neither."""
    if found := _MIDNIGHT.search(text):
        return text[: found.start()] + "00" + text[found.start() + 2 :], timedelta(days=1)
    if found := _LEAP_SECOND.search(text):
        return text[: found.start()] + "59" + text[found.end() :], timedelta(seconds=1)
    return text, timedelta(0)
