"""What is committed was handled, and holds; what cannot be committed is refused."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from consumers import committed_number, fill, next_offset, numbers, rebalance, rest, take

import loglib
from conftest import SECOND, Clock
from loglib import OffsetOutOfRangeError, StaleGenerationError, Topic
from loglib.errors import InvalidOffsetError

Opener = Callable[..., Topic]

pytestmark = pytest.mark.usefixtures("attentive")


def test_what_is_handled_is_committed_as_it_goes(topic: Topic) -> None:
    with topic.group("etl") as group:
        seen = [(int(record.value or b""), committed_number(group)) for record in group.follow(timeout=0.0)]
        assert seen[0] == (0, -1)
        assert all(committed < number for number, committed in seen)
        assert committed_number(group) == 9


def test_manual_group_commits_by_hand_alone(topic: Topic) -> None:
    with topic.group("etl", commit="manual") as group:
        assert rest(group) == list(range(10))
        assert group.committed() == {}
    with topic.group("etl", commit="manual") as group:
        assert len(rest(group)) == 10
        group.commit()
    with topic.group("etl", commit="manual") as group:
        assert rest(group) == []


@pytest.mark.parametrize("interval", [3600, 3600.5, timedelta(hours=1)])
def test_interval_group_commits_again_only_after_the_interval(topic: Topic, interval: Any) -> None:
    with topic.group("etl", commit=interval) as group:
        assert len(rest(group)) == 10
        first = committed_number(group)
        assert first < 9
        fill(topic, 1, first=10)
        assert rest(group) == [10]
        assert committed_number(group) == first
    with topic.group("etl") as group:
        assert committed_number(group) == 10  # when it was closed


@pytest.mark.parametrize("commit", ["before", 0, -1, True, timedelta(0)])
def test_other_commit_policies_are_refused(topic: Topic, commit: Any) -> None:
    with pytest.raises(ValueError, match="commit must be"):
        topic.group("etl", commit=commit)


def test_commit_of_a_record_says_it_is_handled(topic: Topic, clock: Clock) -> None:
    with topic.group("etl", commit="manual", member="m") as group:
        for record in group.follow(timeout=0.0):
            if record.value == b"4":
                group.commit(record, meta="page 7")
                break
        commit = group.committed()[0]
        assert commit == loglib.Commit(next_offset(topic, 4), "page 7", 1, "m", clock.now)
        assert rest(group) == [5, 6, 7, 8, 9]


def test_commit_of_a_record_holds_when_its_body_raises_later(topic: Topic) -> None:
    with topic.group("etl") as group:
        for record in group.follow(timeout=0.0):
            if record.value == b"4":
                group.commit(record)
                break
    with topic.group("etl") as group:
        assert rest(group) == [5, 6, 7, 8, 9]


def test_commit_without_argument_commits_all_records_handed_out(topic: Topic) -> None:
    with topic.group("etl", commit="manual") as group:
        for record in group.follow(timeout=0.0):
            group.commit()
            assert b"%d" % committed_number(group) == record.value
        group.commit()  # which changes nothing
        fill(topic, 2, first=10)
        assert numbers(group.poll()) == [10]
        group.commit()
        assert committed_number(group) == 10
        for batch in group.batches(timeout=0.0):
            group.commit()
            assert batch.values == [b"11"] and committed_number(group) == 11


def test_commit_of_a_mapping_says_where_to_go_on(topic: Topic) -> None:
    with topic.group("etl", commit="manual") as group:
        assert take(group, 1) == [0]
        group.commit({0: next_offset(topic, 6)}, meta="by hand")
        assert group.committed()[0].meta == "by hand"
    with topic.group("etl") as group:
        assert rest(group) == [7, 8, 9]


def test_commit_of_an_offset_where_no_record_begins_is_refused(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert take(group, 1) == [0]
        wrong: list[tuple[Any, type[Exception]]] = [
            ({0: 1 << 40}, OffsetOutOfRangeError), ({0: 1}, InvalidOffsetError), ({7: 0}, ValueError),
            ({0: "nowhere"}, ValueError), ({0: 1.5}, TypeError), (b"record", TypeError), (5, TypeError),
        ]  # fmt: skip
        for what, error in wrong:
            with pytest.raises(error):
                group.commit(what)
        assert group.committed() == {}


def test_commit_for_a_partition_of_another_is_refused(open_topic: Opener) -> None:
    topic = open_topic(partitions=2)
    with topic.group("etl", member="a") as a, topic.group("etl", member="b") as b:
        rebalance(a, b)
        with pytest.raises(StaleGenerationError, match="member b no longer owns topic-0") as caught:
            b.commit({0: 0})
        assert (caught.value.group, caught.value.member, caught.value.partition) == ("etl", "b", "topic-0")
        with pytest.raises(StaleGenerationError):
            b.seek({0: "begin"})
        with pytest.raises(StaleGenerationError):
            b.pause(0)


def test_batch_committed_by_hand_does_not_come_again(topic: Topic) -> None:
    with topic.group("etl", commit="manual") as group:
        for batch in group.batches(timeout=0.0):
            if batch.values == [b"3"]:
                group.commit()
                break
        assert rest(group) == [4, 5, 6, 7, 8, 9]


def test_commit_below_what_is_handled_leaves_that_to_be_committed(topic: Topic) -> None:
    with topic.group("etl", commit=3600) as group:
        assert rest(group) == list(range(10))
        group.commit({0: 0})
        assert committed_number(group) == -1
    with topic.group("etl") as group:
        assert rest(group) == []


def test_group_continues_after_a_commit_in_the_middle_of_a_batch(open_topic: Opener) -> None:
    topic = open_topic(partitions=1)
    topic.append_many([b"%d" % number for number in range(10)])
    topic.flush()
    with topic.group("etl") as group:
        assert take(group, 4) == [0, 1, 2, 3]
    with topic.group("etl") as group:
        assert rest(group) == [3, 4, 5, 6, 7, 8, 9]


# --- meta ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("meta", [None, 5, b"x"])
def test_meta_that_is_no_text_is_refused(topic: Topic, meta: Any) -> None:
    with topic.group("etl") as group:
        assert take(group, 1) == [0]
        with pytest.raises(TypeError, match="meta must be text"):
            group.commit(meta=meta)
        assert group.committed() == {}


def test_meta_of_the_last_commit_outlives_its_owner(topic: Topic, clock: Clock) -> None:
    with topic.group("etl", commit="manual", member="m") as group:
        assert take(group, 3) == [0, 1, 2]
        group.commit(meta="page 7")
        before = group.committed()[0]
    clock.now += SECOND
    with topic.group("etl", commit="manual") as group:
        assert group.poll() != []
        assert group.committed()[0] == before._replace(generation=2)
