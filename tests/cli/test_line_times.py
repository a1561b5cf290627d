"""Times of lines: each is read in one way or refused, and what it leaves out is taken by a rule that is told."""

from datetime import UTC, datetime, timedelta

import pytest

from loglib.cli.line_times import LineTimes, parse_zone

NOW = datetime(2026, 1, 5, 12, tzinfo=UTC)
SYSLOG = "%b %d %H:%M:%S"


def times(form: str | None = None, zone: str | None = None, year: int | None = None) -> LineTimes:
    return LineTimes(form, None if zone is None else parse_zone(zone), year, now=lambda: NOW)


@pytest.mark.parametrize(
    ("form", "zone", "text", "expected"),
    [
        (None, None, "2024-05-01T12:00:00Z", "2024-05-01T12:00:00"),
        (None, None, " 2024-05-01 14:00:00,5+02:00\r", "2024-05-01T12:00:00.500000"),
        (None, None, "2024-05-01T12:00:00.123456789Z", "2024-05-01T12:00:00.123456"),
        (None, None, "2024-05-01 12:00:00 UTC", "2024-05-01T12:00:00"),
        (None, None, "2024-05-01 12:00:00 America/New_York", "2024-05-01T16:00:00"),
        (None, "Europe/Prague", "2024-05-01 12:00:00", "2024-05-01T10:00:00"),
        (None, "Europe/Prague", "2024-05-01 12:00:00 CEST", "2024-05-01T10:00:00"),
        (None, "-05:30", "2024-05-01 12:00:00", "2024-05-01T17:30:00"),
        (None, None, "2024-05-01T24:00:00Z", "2024-05-02T00:00:00"),
        (None, None, "2016-12-31T23:59:60Z", "2017-01-01T00:00:00"),
        (None, None, "1714564801", "2024-05-01T12:00:01"),
        (None, None, "1714564801.1234567", "2024-05-01T12:00:01.123456"),
        (None, None, "1714564801123", "2024-05-01T12:00:01.123000"),
        (None, None, "1714564801123456", "2024-05-01T12:00:01.123456"),
        (None, None, "1714564801123456789", "2024-05-01T12:00:01.123456"),
        ("s", None, "7", "1970-01-01T00:00:07"),
        ("ms", None, "-1", "1969-12-31T23:59:59.999000"),
        ("%d/%b/%Y:%H:%M:%S %z", None, "17/May/2015:12:05:04 +0200", "2015-05-17T10:05:04"),
        ("%Y-%m-%d %H:%M:%S.%f", None, "2024-05-01 12:00:00.123456789", "2024-05-01T12:00:00.123456"),
        ("%Y-%m-%d %H:%M:%S", None, "2024-05-01 24:00:00", "2024-05-02T00:00:00"),
        ("%Y-%m-%d %H:%M:%S", None, "2016-12-31 23:59:60", "2017-01-01T00:00:00"),
        ("%a %b %d %H:%M:%S %Z %Y", "Europe/Prague", "Wed May  1 12:00:00 CEST 2024", "2024-05-01T10:00:00"),
        ("%a %b %d %H:%M:%S %Z %Y", None, "Wed May  1 12:00:00 GMT 2024", "2024-05-01T12:00:00"),
        ("%d.%m.%y", None, "31.12.68", "1968-12-31T00:00:00"),
        ("%d.%m.%y", None, "31.12.24", "2024-12-31T00:00:00"),
        (SYSLOG, None, "Jan  6 11:00:00", "2026-01-06T11:00:00"),  # a clock, or a zone, that is ahead
        (SYSLOG, None, "Dec 31 23:59:59", "2025-12-31T23:59:59"),
        (SYSLOG, None, "Jan  7 00:00:00", "2025-01-07T00:00:00"),
        (f"{SYSLOG} %Z", "Europe/Prague", "Dec 31 23:59:59 CET", "2025-12-31T22:59:59"),
    ],
)
def test_time_is_read(form: str | None, zone: str | None, text: str, expected: str) -> None:
    assert times(form, zone).parse(text).replace(tzinfo=None).isoformat() == expected


@pytest.mark.parametrize(
    ("form", "zone", "text", "why"),
    [
        (None, None, "20240501", "a number of 8 digits"),
        (None, None, "12345.678", "a number of 5 digits"),
        (None, None, "20240501120000", "a number of 14 digits"),
        (None, None, "2024-05-01 12:00:00 CST", "CST is the name of several zones"),
        (None, "Europe/Prague", "2024-05-01 12:00:00 CET", "or of none at this time"),
        (None, "Europe/Prague", "2024-03-31 02:30:00", "the clocks were put forward"),
        (None, None, "2024-02-30T12:00:00Z", "day"),
        (None, None, "12:00:00", "Invalid isoformat"),
        (None, None, "24:00:00", "Invalid isoformat"),
        ("%Y-%m-%d %Z", None, "2024-05-01 IST", "IST is the name"),
        ("%Y-%m-%d %Z", None, "2024-05-01", "does not match"),
        ("s", None, "now", "not a number"),
        ("s", None, "9" * 30, "not in the years 1 to 9999"),
        (SYSLOG, None, "Feb 29 12:00:00", "2025 has no such day; --year"),
    ],
)
def test_time_that_says_too_little_is_refused(form: str | None, zone: str | None, text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        times(form, zone).parse(text)


@pytest.mark.parametrize(
    ("form", "year", "why"),
    [
        ("%H:%M:%S", None, "names no day"), ("%Y-%m", None, "names no day"), ("%j %H:%M", None, "names no day"),
        ("%Y-%m-%d %I:%M", None, "12 hours and no %p"), ("%D", None, "bad directive"),
        ("%d %d %m", None, "redefinition"),
        ("%Y-%m-%d", 2024, "without a year"), (None, 2024, "without a year"),
    ],
)  # fmt: skip
def test_format_that_leaves_the_time_open_is_refused(form: str | None, year: int | None, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        times(form, year=year)


def test_zone_that_the_system_does_not_know_is_refused_with_the_way_out() -> None:
    for text in ("Europe/Nowhere", "../etc/passwd", "Europe", "CEST?", "+24:00", "-01:60"):
        with pytest.raises(ValueError, match=r"no time zone of this system; write an offset such as \+02:00"):
            parse_zone(text)
    assert parse_zone("utc") is UTC and parse_zone("-0130").utcoffset(None) == timedelta(hours=-1, minutes=-30)


def test_hour_that_comes_twice_is_told_apart_by_the_order_of_lines() -> None:
    reading = times(zone="Europe/Prague")
    lines = ["01:59:00", "02:00:00", "02:59:58", "02:59:57", "02:00:01", "02:30:00", "03:00:00"]
    found = [reading.parse(f"2024-10-27 {each}") for each in lines]
    assert [f"{each:%d %H:%M:%S}" for each in found] == [
        "26 23:59:00", "27 00:00:00", "27 00:59:58", "27 00:59:57", "27 01:00:01", "27 01:30:00", "27 02:00:00",
    ]  # fmt: skip


@pytest.mark.parametrize("step", [10, 20, 30])
def test_lines_that_come_at_even_times_show_that_the_clocks_were_put_back(step: int) -> None:
    reading = times(zone="Europe/Prague")
    lines = [f"02:{minute:02}:00" for _ in range(2) for minute in range(0, 60, step)]
    found = [reading.parse(f"2024-10-27 {each}") for each in ["01:55:00", *lines, "03:00:00"]]
    assert found == sorted(set(found)) and len(found) == 2 + len(lines)


@pytest.mark.parametrize(("text", "zone", "year", "utc"), [
    ("Mar 20 12:00:00 EDT", "America/New_York", 2024, "2024-03-20 16:00"),
    ("Nov 2 12:00:00 EDT", "America/New_York", 2024, "2024-11-02 16:00"),
    ("Oct 27 02:10:00 CET", "Europe/Prague", 2024, "2024-10-27 01:10"),
    ("Oct 27 02:10:00 CEST", "Europe/Prague", 2024, "2024-10-27 00:10"),
    ("Oct 27 12:00:00 CET", "Europe/Prague", 2024, "2024-10-27 11:00"),
])  # fmt: skip
def test_name_of_a_zone_is_looked_up_in_the_year_of_the_time(text: str, zone: str, year: int, utc: str) -> None:
    """The clocks are put forward and back at another day each year."""
    reading = times("%b %d %H:%M:%S %Z", zone=zone, year=year)
    assert f"{reading.parse(text):%Y-%m-%d %H:%M}" == utc
    with pytest.raises(ValueError, match="EST is the name of several zones, or of none at this time"):
        reading.parse("Jul 1 12:00:00 EST")


def years_of(texts: list[str], changed: datetime = NOW, form: str = "%b %d") -> list[int]:
    reading = times(form)
    reading.begin(reading.first_year(texts, changed))
    return [reading.parse(each).year for each in texts]


def test_years_of_a_file_follow_from_its_leap_days_and_its_last_line() -> None:
    assert years_of(["Feb 28", "Feb 29", "Mar  1"]) == [2024, 2024, 2024]
    assert years_of(["Nov 30", "Dec 31", "Jan  1"]) == [2025, 2025, 2026]
    assert years_of(["Dec 31", "Jan  1", "Dec 31", "Jan  1"]) == [2025, 2026, 2025, 2026]  # two that came late
    assert years_of(["Mar  1", "Jan  1", "Jul  2", "Feb  1"]) == [2023, 2024, 2024, 2025]
    assert years_of(["Nov 30", "Feb 29", "Aug  1", "Jan  2"]) == [2023, 2024, 2024, 2025]
    assert years_of(["Feb 29", "Aug  1", "Jan  1", "Aug  1", "Jan  1"]) == [2024, 2024, 2025, 2025, 2026]
    assert years_of(["no time", "Jun  1"][1:], datetime(2020, 6, 2, tzinfo=UTC)) == [2020]
    assert times("%b %d").first_year(["no time"], NOW) is None
    for late in ("23:59:59", "23:59:60", "24:00:00"):
        lines = [f"Dec 31 {late}", "Jan 1 00:00:01"]
        assert years_of(lines, datetime(2024, 1, 1, 0, 0, 2, tzinfo=UTC), "%b %d %H:%M:%S")[1] == 2024


def test_what_was_assumed_is_told() -> None:
    reading = times(SYSLOG)
    assert reading.assumed() == []
    for text in ("Dec 31 23:59:59", "Jan  1 00:00:00"):
        reading.parse(text)
    assert ["no zone" in each for each in reading.assumed()] == [True, False]
    assert "as of 2025 to 2026; --year" in reading.assumed()[1]
    given = times(SYSLOG, "UTC", 2023)
    assert [given.parse(each).year for each in ("Dec 31 23:59:59", "Jan  1 00:00:00")] == [2023, 2024]
    assert given.assumed() == []
