"""Durations and sizes: one spelling for all of Python, the policies and the command line."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loglib import FlushPolicy, Retention
from loglib.config.quantities import as_duration, as_size, seconds, timeout_seconds

DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("given_as", "duration"),
    [
        (90, timedelta(seconds=90)), (0.5, timedelta(milliseconds=500)), ("90s", timedelta(seconds=90)),
        ("1h30m", timedelta(minutes=90)), ("1.5d", 1.5 * DAY), ("2w", 14 * DAY), ("250us", timedelta(microseconds=250)),
        (DAY, DAY), (-1, -timedelta(seconds=1)),
    ],
)  # fmt: skip
def test_each_form_of_a_duration_is_the_same(given_as: Any, duration: timedelta) -> None:
    assert as_duration("age", given_as) == duration
    assert seconds("age", given_as) == duration.total_seconds()


@pytest.mark.parametrize(
    "wrong",
    ["", "90", "s", "999999999999999999w", "-1h", "1 h", "1h 30m", "1y", float("nan"), float("inf"), 1e300],
)
def test_duration_that_makes_no_sense_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(ValueError, match="age must be"):
        as_duration("age", wrong)


@pytest.mark.parametrize("wrong", [True, None, b"1s", [], object()])
def test_duration_of_another_type_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match="age must be a duration"):
        as_duration("age", wrong)


def test_timeout_may_be_none_or_without_end() -> None:
    assert timeout_seconds(None) is None
    assert timeout_seconds(float("inf")) == float("inf")
    assert timeout_seconds("250ms") == 0.25
    with pytest.raises(ValueError, match="timeout must be"):
        timeout_seconds(float("nan"))


@pytest.mark.parametrize(
    ("given_as", "size"),
    [(4096, 4096), ("4096", 4096), ("10MB", 10**7), ("1GiB", 1 << 30), ("1.5 kib", 1536), ("2tb", 2 * 10**12)],
)
def test_each_form_of_a_size_is_the_same(given_as: Any, size: int) -> None:
    assert as_size("bytes", given_as) == size


@pytest.mark.parametrize("wrong", ["", "-1", "1XB", "MB", "1 000", "0x10"])
def test_size_that_makes_no_sense_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(ValueError, match="bytes must be a size"):
        as_size("bytes", wrong)


@given(st.integers(1, 10**12))
def test_policies_keep_numbers_whatever_form_was_given(count: int) -> None:
    assert Retention(bytes=f"{count}B").bytes == Retention(bytes=count).bytes == count
    in_us = timedelta(microseconds=count)
    assert Retention(age=f"{count}us").age == Retention(age=in_us).age == in_us
    assert FlushPolicy(interval=in_us).interval == in_us.total_seconds()
