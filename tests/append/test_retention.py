"""retention.py: what is dropped is a run of the oldest sealed segments, each for a reason that holds."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
from builders import calm
from hypothesis import given
from hypothesis import strategies as st

from loglib import Retention
from loglib.config.policies import MAX_OFFSET, TopicConfig
from loglib.log.ages import Age
from loglib.retention import Candidate, Hold, Sealed, Space, due, reason_to_keep, segment_limit

ROOM = Space(1 << 40, 1 << 40)
HOUR = 3600 * 1_000_000
KEEP_ALL = Retention(age=None)


def sealed(*sizes_and_ages: tuple[int, int]) -> list[Sealed]:
    """Segments of these bytes, so many hours old."""
    segments, base = [], 0
    for size, age in sizes_and_ages:
        segments.append(Sealed(base, base + size, Age(age * HOUR, True, (1, -age))))
        base += size
    return segments


def candidate(segments: list[Sealed], *, open_bytes: int = 10, partition: int = 3) -> Candidate:
    return Candidate(partition, sum(each.size_bytes for each in segments) + open_bytes, segments)


def dropped(segments: list[Sealed], policy: Retention, space: Space = ROOM, *, open_bytes: int = 10) -> int:
    """How many of the oldest are given up."""
    found = due([candidate(segments, open_bytes=open_bytes)], policy, space)
    assert list(found) == [3]
    return len(found[3].reasons)


CASES = [
    pytest.param([(10, 9), (10, 8)], KEEP_ALL, 0, id="no-limits"),
    pytest.param([], Retention(), 0, id="the-open-segment-alone"),
    pytest.param([(10, 9), (10, 8), (10, 1)], Retention(age=timedelta(hours=5)), 2, id="age"),
    pytest.param([(10, 5)], Retention(age=timedelta(hours=5)), 0, id="age-exactly-at-the-limit"),
    pytest.param([(10, 3), (10, 2)], Retention(age=None, bytes=20), 1, id="bytes"),
    pytest.param([(10, 3), (10, 2)], Retention(age=None, bytes=30), 0, id="bytes-exactly-at-the-limit"),
    pytest.param([(10, 3), (10, 2)], Retention(age=None, bytes=0), 2, id="bytes-nothing"),
    pytest.param([(10, 0), (10, 0)], Retention(age=timedelta(hours=1), bytes=0), 2, id="bytes-whatever-the-age"),
    pytest.param([(10, 9), (10, 3), (10, 2)], Retention(age=timedelta(hours=5), bytes=25), 2, id="age-then-bytes"),
]


@pytest.mark.parametrize(("sizes_and_ages", "policy", "expected"), CASES)
def test_oldest_segments_are_dropped_until_the_policy_is_met(
    sizes_and_ages: list[tuple[int, int]], policy: Retention, expected: int
) -> None:
    assert dropped(sealed(*sizes_and_ages), policy) == expected


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, 1 << 30), (0, 1 << 30), (1, 1 << 16), (2 << 20, 1 << 19), (1 << 40, 1 << 30)],
    ids=["none", "the-open-segment-alone", "tiny", "small", "large"],
)
def test_segments_are_a_quarter_of_the_limit_on_bytes(limit: int | None, expected: int) -> None:
    assert TopicConfig(retention=Retention(bytes=limit)).roll_bytes == expected


@pytest.mark.parametrize(
    ("keep_free", "space", "partitions", "expected"),
    [
        pytest.param(0.0, Space(0, 0), 1, MAX_OFFSET, id="no-limit"),
        pytest.param(0.1, Space(800 << 20, 1 << 30), 4, 50 << 20, id="of-what-is-free"),
        pytest.param(0.75, Space(1 << 30, 1 << 30), 1, 64 << 20, id="of-what-the-policy-leaves"),
        pytest.param(0.1, Space(0, 1 << 30), 4, 1 << 16, id="full"),
    ],
)
def test_open_segments_take_a_quarter_of_the_room(
    keep_free: float, space: Space, partitions: int, expected: int
) -> None:
    assert segment_limit(Retention(keep_free=keep_free), space, partitions) == expected


def test_bytes_of_the_open_segment_count() -> None:
    assert dropped(sealed((10, 3), (10, 2)), Retention(age=None, bytes=5), open_bytes=99) == 2


@pytest.mark.parametrize(("free", "expected"), [(100, 0), (99, 1), (90, 1), (89, 2), (0, 2)], ids=str)
def test_segments_are_dropped_until_enough_is_free(free: int, expected: int) -> None:
    assert dropped(sealed((10, 1), (10, 1)), Retention(age=None, keep_free=0.1), Space(free, 1000)) == expected


def test_space_is_freed_by_the_oldest_of_all_partitions() -> None:
    """And not by those of partition 0, as long as it has any."""
    partitions = [
        candidate(sealed((10, 5), (10, 4)), partition=0),
        candidate(sealed((10, 9), (10, 8), (10, 1)), partition=1),
        candidate(sealed((10, 7)), partition=2),
    ]
    policy = Retention(age=None, keep_free=0.1)
    found = due(partitions, policy, Space(60, 1000))
    assert {number: len(each.reasons) for number, each in found.items()} == {0: 1, 1: 2, 2: 1}
    assert found[1].reasons == ["60 bytes free, 100 must stay free", "70 bytes free, 100 must stay free"]
    everything = due(partitions, policy, Space(0, 10_000))
    assert {number: len(each.reasons) for number, each in everything.items()} == {0: 2, 1: 3, 2: 1}


def test_what_other_limits_free_counts_as_free() -> None:
    partitions = [candidate(sealed((10, 5)), partition=0), candidate(sealed((10, 90), (10, 8)), partition=1)]
    found = due(partitions, Retention(age=timedelta(hours=50), keep_free=0.1), Space(90, 1000))
    assert {number: len(each.reasons) for number, each in found.items()} == {0: 0, 1: 1}


def test_no_more_segments_are_looked_at_than_dropped_and_one() -> None:
    looked_at = 0

    def counted() -> object:
        nonlocal looked_at
        for each in sealed(*[(10, 1)] * 1000):
            looked_at += 1
            yield each

    policy = Retention(age=timedelta(hours=2), bytes=9000, keep_free=0.1)
    found = due([Candidate(0, 9_025, counted())], policy, ROOM)  # type: ignore[arg-type]
    assert (len(found[0].reasons), looked_at) == (3, 4)


def test_reasons_are_in_words() -> None:
    policy = Retention(age=timedelta(days=7), bytes=25)
    found = due([candidate(sealed((10, 24 * 8), (10, 3), (10, 2), (10, 1)))], policy, ROOM)
    assert found[3].reasons == [
        "sealed 8.0 days ago, the limit is 7 days, 0:00:00",
        "the partition holds 40 bytes, the limit is 25",
        "the partition holds 30 bytes, the limit is 25",
    ]
    exact, bound = Age(HOUR, True, (1, 0)), Age(HOUR, False, (0, 0))
    minutes = 12 * 60_000_000
    assert reason_to_keep(None, policy, believed=True, steady_us=0) == "the segment that is being written"
    assert reason_to_keep(exact, policy, believed=False, steady_us=0) == "within all limits at 1.0 hours"
    assert reason_to_keep(bound, KEEP_ALL, believed=False, steady_us=0) == "within all limits at no less than 1.0 hours"
    assert reason_to_keep(bound, policy, believed=False, steady_us=minutes) == (
        "at least 1.0 hours old; the clock has run for 12.0 minutes without a jump, and is believed after 60 minutes"
    )
    assert reason_to_keep(bound, policy, believed=True, steady_us=minutes) == (
        "sealed while the clock could not be believed; at least 1.0 hours ago"
    )


@pytest.mark.parametrize(
    ("age_us", "words"),
    [(0, "0.0 seconds"), (59_900_000, "59.9 seconds"), (60_000_000, "1.0 minutes"), (HOUR, "1.0 hours"),
     (36 * HOUR, "1.5 days")],
)  # fmt: skip
def test_ages_are_in_a_unit_that_suits(age_us: int, words: str) -> None:
    reason = reason_to_keep(Age(age_us, True, (1, 0)), KEEP_ALL, believed=True, steady_us=0)
    assert reason == f"within all limits at {words}"


@st.composite
def policies(draw: st.DrawFn) -> Retention:
    return Retention(
        age=draw(st.none() | st.integers(1, 10).map(lambda hours: timedelta(hours=hours))),
        bytes=draw(st.none() | st.integers(0, 100)),
        keep_free=draw(st.sampled_from([0.0, 0.1, 0.5])),
    )


@st.composite
def holding_policies(draw: st.DrawFn) -> Retention:
    """With groups to wait for, up to a ceiling."""
    policy = draw(policies())
    longer = draw(st.none() | st.integers(0, 5).map(lambda hours: (policy.age or timedelta()) + timedelta(hours=hours)))
    more = draw(st.integers(0, 60) if not longer else st.none() | st.integers(0, 60))
    limit = None if more is None else (policy.bytes or 0) + more
    return replace(policy, hold_for=("etl",), hold_age=longer or None, hold_bytes=limit)


@calm
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=6), min_size=1, max_size=4),
    policies() | holding_policies(), st.integers(0, 200), st.integers(0, 200),
    st.lists(st.none() | st.builds(Hold, st.just("etl"), st.none() | st.integers(0, 120)), min_size=4, max_size=4),
)  # fmt: skip
def test_decisions_agree_with_dropping_one_at_a_time(
    drawn: list[list[tuple[int, int]]], policy: Retention, free: int, total: int, holds: list[Hold | None]
) -> None:
    partitions = [sealed(*sorted(each, key=lambda pair: -pair[1])) for each in drawn]
    candidates = [
        candidate(each, partition=number)._replace(hold=partial(list.__getitem__, holds, number))
        for number, each in enumerate(partitions)
    ]
    found = due(candidates, policy, Space(free, total))
    left = [list(each) for each in partitions]

    def is_beyond(segments: list[Sealed], age: timedelta | None, limit: int | None) -> bool:
        old = age is not None and segments[0].age.at_least_us > age // timedelta(microseconds=1)
        return old or (limit is not None and sum(each.size_bytes for each in segments) + 10 > limit)

    def is_held(segments: list[Sealed]) -> bool:
        (hold,) = (holds[number] for number, each in enumerate(left) if each is segments)
        if not policy.hold_for or hold is None or is_beyond(segments, policy.hold_age, policy.hold_bytes):
            return False
        return hold.offset is None or segments[0].end_offset > hold.offset

    def drop_one() -> bool:
        nonlocal free
        for segments in filter(None, left):
            if is_beyond(segments, policy.age, policy.bytes) and not is_held(segments):
                free += segments.pop(0).size_bytes
                return True
        fronts = [each for each in left if each and not is_held(each)] or [each for each in left if each]
        if free < policy.keep_free * total and fronts:
            oldest = max(fronts, key=lambda segments: segments[0].age.at_least_us)
            free += oldest.pop(0).size_bytes
            return True
        return False

    while drop_one():
        pass
    assert [len(found[number].reasons) for number in range(len(partitions))] == [
        len(each) - len(rest) for each, rest in zip(partitions, left, strict=True)
    ]
    for number, rest in enumerate(left):  # it names the group for which it waits, and names none without need
        waits = bool(rest) and is_beyond(rest, policy.age, policy.bytes)
        assert found[number].blocker == (holds[number] if waits else None)
        assert bool(found[number].held_against) == waits
