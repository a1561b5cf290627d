"""Listeners hear of partitions before they are read and before they are given up."""

from collections.abc import Callable
from typing import Any

import pytest
from consumers import fill, next_offset, rebalance, rest

from loglib import LogError, Topic

Opener = Callable[..., Topic]

pytestmark = pytest.mark.usefixtures("attentive")


def test_listeners_are_told_before_reading_and_before_giving_up(open_topic: Opener) -> None:
    topic = open_topic(partitions=2)
    told: list[Any] = []
    a = topic.group(
        "etl", member="a", on_assign=lambda each: told.append(("+", each)),
        on_revoke=lambda each: told.append(("-", each, a.assignment, [*a.committed()])),
    )  # fmt: skip
    rebalance(a)
    fill(topic, 2)
    assert sorted(rest(a)) == [0, 1]
    with topic.group("etl", member="b") as b:
        rebalance(a, b)
        assert told == [("+", [0, 1]), ("-", [1], [0, 1], [0, 1])]
    rebalance(a)
    assert told[2:] == [("+", [1])]
    a.close()
    assert told[3:] == [("-", [0, 1], [0, 1], [0, 1])]


def test_listener_may_commit_when_the_group_is_closed(topic: Topic) -> None:
    group = topic.group("etl", commit="manual", on_revoke=lambda _: group.commit())
    assert rest(group) == list(range(10))
    group.close()
    with topic.group("etl") as group:
        assert rest(group) == []


def test_listener_may_seek_where_it_begins(topic: Topic) -> None:
    group = topic.group("etl", on_assign=lambda each: group.seek(dict.fromkeys(each, next_offset(topic, 7))))
    with group:
        assert rest(group) == [8, 9]


def test_listener_that_raises_does_not_keep_the_partitions(topic: Topic) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("listener")

    group = topic.group("etl", on_revoke=refuse)
    assert rest(group) == list(range(10))
    with pytest.raises(RuntimeError, match="listener"):
        group.close()
    with topic.group("etl", on_assign=refuse) as group:
        with pytest.raises(RuntimeError, match="listener"):
            group.poll()
        assert group.assignment == [0]


def test_listener_that_asks_for_records_is_refused(topic: Topic) -> None:
    group = topic.group("etl", on_assign=lambda _: group.poll())
    with group, pytest.raises(LogError, match="a listener may not ask for records"):
        group.poll()


def test_listener_that_raised_is_told_again_before_any_record(topic: Topic) -> None:
    told: list[Any] = []

    def seek_after_a_failure(partitions: list[int]) -> None:
        told.append(partitions)
        if len(told) < 3:
            raise RuntimeError("not yet")
        group.seek(dict.fromkeys(partitions, next_offset(topic, 7)))

    with topic.group("etl", on_assign=seek_after_a_failure) as group:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="not yet"):
                group.poll()
        assert rest(group) == [8, 9]
        assert told == [[0]] * 3
