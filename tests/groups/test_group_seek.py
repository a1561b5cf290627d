"""Where a group begins, where it is told to go on, and how far it is behind."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from consumers import committed_number, die, fill, next_offset, numbers, rebalance, rest, take

from conftest import SECOND, Clock
from loglib import Topic

Opener = Callable[..., Topic]

pytestmark = pytest.mark.usefixtures("attentive")


# --- where a group begins ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("begin", list(range(10))), ("end", []), ("-5s", [5, 6, 7, 8, 9]), (timedelta(seconds=2), [8, 9]),
        (datetime.fromtimestamp(1_700_000_003, UTC), list(range(3, 10))),
    ],
)  # fmt: skip
def test_new_group_begins_where_it_is_told(open_topic: Opener, clock: Clock, start: Any, expected: list[int]) -> None:
    topic = open_topic(partitions=2)
    for number in range(10):
        fill(topic, 1, first=number)
        clock.now += SECOND
    with topic.group("etl", start=start) as group:
        assert sorted(rest(group)) == expected
        fill(topic, 1, first=10)
        assert rest(group) == [10]
    with topic.group("etl", start="begin") as group:
        assert rest(group) == []  # it is no new group any more


def test_group_that_began_at_the_end_stays_there_when_its_first_member_dies(topic: Topic) -> None:
    first = topic.group("etl", start="end", commit="manual")
    assert first.poll() == []
    fill(topic, 3, first=10)
    assert numbers(first.poll()) != []
    die(first)
    with topic.group("etl", start="end") as second:
        assert rest(second) == [10, 11, 12]


# --- places --------------------------------------------------------------------------------------


def test_seek_rewinds_and_replays(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert len(rest(group)) == 10
        group.seek("begin")
        assert rest(group) == list(range(10))
        group.seek({0: next_offset(topic, 7)})
        assert rest(group) == [8, 9]
        group.seek("end")
        assert rest(group) == []


def test_seek_right_after_joining_is_heeded(topic: Topic) -> None:
    with topic.group("etl") as group:
        group.seek({0: next_offset(topic, 7)})
        assert rest(group) == [8, 9]


def test_seek_is_committed_like_progress(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert len(rest(group)) == 10
        group.seek({0: next_offset(topic, 2)})
    with topic.group("etl") as group:
        assert rest(group) == [3, 4, 5, 6, 7, 8, 9]


def test_seek_in_the_body_of_a_loop_goes_there_at_once(topic: Topic) -> None:
    with topic.group("etl") as group:
        seen = []
        for record in group.follow(timeout=0.0):
            seen.append(int(record.value or b""))
            if seen == [0, 1, 2]:
                group.seek({0: next_offset(topic, 7)})
        assert seen == [0, 1, 2, 8, 9]


def test_one_offset_for_many_partitions_is_refused(open_topic: Opener) -> None:
    topic = open_topic(partitions=2)
    with topic.group("etl") as group:
        rebalance(group)
        with pytest.raises(ValueError, match="another record in each partition"):
            group.seek(0)
        with pytest.raises(ValueError, match="no partition 9"):
            group.seek({9: 0})


def test_paused_partition_hands_out_nothing_until_it_is_resumed(open_topic: Opener) -> None:
    topic = open_topic(partitions=2)
    fill(topic, 20)
    with topic.group("etl") as group:
        seen = []
        for record in group.follow(timeout=0.0):
            seen.append(int(record.value or b""))
            if seen[-1] == 4:
                group.pause(0)
                group.pause(0)
                assert group.tell()[0] == next_offset(topic, 4)
        assert sorted(seen) == sorted([0, 2, 4, *range(1, 20, 2)])
        assert group.assignment == [0, 1]
        assert committed_number(group, 0) == 4
        group.resume(0, 1)
        assert rest(group) == list(range(6, 20, 2))


def test_seek_moves_a_paused_partition(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert take(group, 2) == [0, 1]
        group.pause(0)
        group.seek({0: next_offset(topic, 7)})
        assert group.tell() == {0: next_offset(topic, 7)} and rest(group) == []
        group.resume(0)
        assert rest(group) == [8, 9]


def test_loop_left_at_a_record_whose_partition_it_paused_gets_it_again(topic: Topic) -> None:
    with topic.group("etl") as group:
        for record in group.follow(timeout=0.0):
            if record.value == b"3":
                group.pause(0)
                break
        assert group.poll() == []
        group.resume(0)
        assert rest(group)[0] == 3


def test_tell_is_the_next_record_to_be_handed_out(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert group.tell() == {}
        for record in group.follow(timeout=0.0):
            assert group.tell() == {0: record.next_offset}


def test_tell_in_the_middle_of_a_batch_is_the_next_record(open_topic: Opener) -> None:
    topic = open_topic(partitions=1)
    topic.append_many([b"%d" % number for number in range(100)])
    topic.flush()
    with topic.group("etl") as group:
        for record in group.follow(timeout=0.0):
            assert group.tell() == {0: record.next_offset}


def test_positions_of_a_group_go_to_json_and_back(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert take(group, 4) == [0, 1, 2, 3]
        told = json.loads(json.dumps(group.tell()))
        assert rest(group) == list(range(3, 10))
        group.seek(told)
        assert rest(group) == list(range(3, 10))
        for unknown in ("x", 1.5, True, None):
            with pytest.raises(TypeError, match="named by its number"):
                group.seek({unknown: 0})


# --- lag -----------------------------------------------------------------------------------------


def test_lag_counts_bytes_seconds_and_records(open_topic: Opener, clock: Clock) -> None:
    topic = open_topic(partitions=2)
    for _ in range(3):
        clock.now += SECOND
        topic.append_many([b"x"] * 4, partition=0)
        topic.flush()
    clock.now += 2 * SECOND
    with topic.group("etl") as group:
        start, end = topic.partition(0).log_start_offset, topic.partition(0).log_end_offset
        assert group.lag() == {0: (end - start, 4.0, None), 1: (0, 0.0, None)}
        assert group.lag(count_records=True) == {0: (end - start, 4.0, 12), 1: (0, 0.0, 0)}
        records = list(topic.partition(0).read())
        for count, seconds in ((1, 4.0), (4, 3.0), (6, 3.0)):
            offset = records[count].offset
            group.seek({0: offset})
            group.commit()
            assert group.lag(count_records=True)[0] == (end - offset, seconds, 12 - count)


def test_lag_of_a_new_group_at_the_end_is_nothing(topic: Topic) -> None:
    with topic.group("etl", start="end") as group:
        assert group.lag(count_records=True) == {0: (0, 0.0, 0)}
