"""retention.py: what is dropped is a run of the oldest sealed segments, each for a reason that holds."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import NOW, calm
from loglib import Retention
from loglib.retention import Space, decide
from loglib.segment import SegmentInfo

ROOM = Space(1 << 40, 1 << 40)
HOUR = 3600 * 1_000_000
KEEP_ALL = Retention(age=None)


def segments(*sizes_and_ages: tuple[int, int | None]) -> list[SegmentInfo]:
    """Segments of these bytes, whose newest record is so many hours old; the last is open."""
    infos, base = [], 0
    for number, (size, age) in enumerate(sizes_and_ages):
        is_open = number == len(sizes_and_ages) - 1
        last = None if is_open or age is None else NOW - age * HOUR
        infos.append(SegmentInfo(f"segment {number}", base, base + size, not is_open, NOW - 10**12, last))
        base += size
    return infos


def dropped(infos: list[SegmentInfo], policy: Retention, space: Space = ROOM) -> list[int]:
    """The numbers of the segments given up."""
    decisions = decide(3, infos, policy, now_us=NOW, space=space)
    assert [each.path for each in decisions] == [each.path for each in infos]
    assert {each.partition for each in decisions} <= {3}
    return [number for number, each in enumerate(decisions) if each.drop]


CASES = [
    pytest.param([(10, 9), (10, 8), (10, 0)], KEEP_ALL, [], id="no-limits"),
    pytest.param([], Retention(), [], id="no-segments"),
    pytest.param([(10, 10**6)], Retention(), [], id="the-open-segment-alone"),
    pytest.param([(10, 9), (10, 8), (10, 1), (10, 0)], Retention(age=timedelta(hours=5)), [0, 1], id="age"),
    pytest.param([(10, 5), (10, 0)], Retention(age=timedelta(hours=5)), [], id="age-exactly-at-the-limit"),
    pytest.param([(10, 1), (10, 9), (10, 0)], Retention(age=timedelta(hours=5)), [], id="age-behind-a-younger-one"),
    pytest.param([(10, None), (10, 9), (10, 0)], Retention(age=timedelta(hours=5)), [], id="age-unknown"),
    pytest.param([(10, -5), (10, 9), (10, 0)], Retention(age=timedelta(hours=5)), [], id="append-time-in-the-future"),
    pytest.param([(10, 3), (10, 2), (10, 0)], Retention(age=None, bytes=20), [0], id="bytes"),
    pytest.param([(10, 3), (10, 2), (10, 0)], Retention(age=None, bytes=30), [], id="bytes-exactly-at-the-limit"),
    pytest.param([(10, 3), (10, 2), (10, 0)], Retention(age=None, bytes=0), [0, 1], id="bytes-nothing"),
    pytest.param([(10, None), (10, 2), (10, 0)], Retention(age=None, bytes=0), [], id="bytes-but-age-unknown"),
    pytest.param([(10, 3), (10, 2), (99, 0)], Retention(age=None, bytes=5), [0, 1], id="bytes-of-the-open-one"),
]


@pytest.mark.parametrize(("sizes_and_ages", "policy", "expected"), CASES)
def test_segments_are_dropped(
    sizes_and_ages: list[tuple[int, int | None]], policy: Retention, expected: list[int]
) -> None:
    assert dropped(segments(*sizes_and_ages), policy) == expected


@pytest.mark.parametrize(
    ("free", "expected"), [(100, []), (99, [0]), (90, [0]), (89, [0, 1]), (0, [0, 1])], ids=str
)
def test_segments_are_dropped_until_enough_is_free(free: int, expected: list[int]) -> None:
    infos = segments((10, 1), (10, 1), (10, 0))
    assert dropped(infos, Retention(age=None, keep_free=0.1), Space(free, 1000)) == expected


def test_reasons_are_in_words() -> None:
    policy = Retention(age=timedelta(days=7), bytes=25)
    infos = segments((10, 24 * 8), (10, 3), (10, 2), (10, 1), (10, 0))
    reasons = [each.reason for each in decide(0, infos, policy, now_us=NOW, space=ROOM)]
    assert reasons == [
        "newest record appended 8.0 days ago, the limit is 7 days, 0:00:00",
        "the partition holds 40 bytes, the limit is 25",
        "the partition holds 30 bytes, the limit is 25",
        "within all limits at 1.0 hours",
        "an older segment stays",
    ]
    (alone,) = decide(0, segments((10, 0)), policy, now_us=NOW, space=ROOM)
    assert (alone.reason, alone.age_us) == ("the segment being written", None)
    (unknown, _) = decide(0, segments((10, None), (10, 0)), policy, now_us=NOW, space=ROOM)
    assert unknown.reason == "its age is unknown"
    (full, _) = decide(0, segments((10, 1), (10, 0)), Retention(keep_free=0.5), now_us=NOW, space=Space(4, 10))
    assert full.reason == "4 bytes free, 5 are to stay free"


@pytest.mark.parametrize(
    ("age_us", "words"),
    [(0, "0.0 seconds"), (59_900_000, "59.9 seconds"), (60_000_000, "1.0 minutes"), (HOUR, "1.0 hours"),
     (36 * HOUR, "1.5 days")],
)  # fmt: skip
def test_ages_are_in_a_unit_that_suits(age_us: int, words: str) -> None:
    first, last = segments((10, 0), (10, 0))
    decision, _ = decide(0, [first._replace(last_append_time=NOW - age_us), last], KEEP_ALL, now_us=NOW, space=ROOM)
    assert decision.reason == f"within all limits at {words}"


@st.composite
def policies(draw: st.DrawFn) -> Retention:
    return Retention(
        age=draw(st.none() | st.integers(1, 10).map(lambda hours: timedelta(hours=hours))),
        bytes=draw(st.none() | st.integers(0, 100)),
        keep_free=draw(st.sampled_from([0.0, 0.1, 0.5])),
    )


@calm
@given(
    st.lists(st.tuples(st.integers(0, 30), st.none() | st.integers(-2, 12)), min_size=1, max_size=8),
    policies(), st.integers(0, 200), st.integers(0, 200),
)  # fmt: skip
def test_decisions_agree_with_trying_every_prefix(
    sizes_and_ages: list[tuple[int, int | None]], policy: Retention, free: int, total: int
) -> None:
    infos = segments(*sizes_and_ages)

    def demanded(number: int) -> bool:
        """Whether segment `number` must go once those before it are gone."""
        info = infos[number]
        if not info.sealed or info.last_append_time is None:
            return False
        left = sum(each.size_bytes for each in infos[number:])
        gained = sum(each.size_bytes for each in infos[:number])
        old = policy.age is not None and timedelta(microseconds=NOW - info.last_append_time) > policy.age
        large = policy.bytes is not None and left > policy.bytes
        return old or large or free + gained < policy.keep_free * total

    prefix = 0
    while demanded(prefix):
        prefix += 1
    found = dropped(infos, policy, Space(free, total))
    assert found == list(range(prefix))
    assert len(infos) - 1 not in found, "never the open one"
