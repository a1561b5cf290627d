"""A record is handled when its receiver comes back for the next one, and comes again if it was not."""

from collections.abc import Callable
from typing import Any

import pytest
from consumers import committed_number, die, numbers, rest, take

import loglib
from loglib import Group, StaleGenerationError, Topic, TopicPartition
from loglib.groups.delivery import Run

Opener = Callable[..., Topic]

pytestmark = pytest.mark.usefixtures("attentive")


def fails_at(group: Group, number: int) -> None:
    for record in group.follow(timeout=0.0):
        if record.value == b"%d" % number:
            raise RuntimeError("cannot handle it")


def test_record_whose_body_raised_comes_again(topic: Topic) -> None:
    with topic.group("etl") as group:
        with pytest.raises(RuntimeError):
            fails_at(group, 6)
        assert rest(group) == [6, 7, 8, 9]
    with topic.group("etl") as group:
        assert rest(group) == []


def test_record_whose_body_raised_comes_to_another_member(topic: Topic) -> None:
    with pytest.raises(RuntimeError), topic.group("etl") as group:
        fails_at(group, 6)
    with topic.group("etl") as group:
        assert committed_number(group) == 5
        assert rest(group) == [6, 7, 8, 9]


def test_record_at_which_the_loop_was_left_comes_again(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert take(group, 4) == [0, 1, 2, 3]
        assert take(group, 2) == [3, 4]
    with topic.group("etl") as group:
        assert rest(group) == [4, 5, 6, 7, 8, 9]


def test_loop_that_is_held_and_left_behind_gives_its_record_to_the_next(topic: Topic) -> None:
    with topic.group("etl") as group:
        left = iter(group.follow(timeout=0.0))
        assert numbers([next(left), next(left)]) == [0, 1]
        assert numbers([next(iter(group.follow(timeout=0.0)))]) == [1]
        assert sorted(numbers(left)) == list(range(1, 10))


def test_polled_records_are_handled_with_the_next_poll(topic: Topic) -> None:
    group = topic.group("etl")
    assert numbers(group.poll(max_records=1)) == [0]
    assert committed_number(group) == -1
    assert numbers(group.poll()) == [1]
    assert committed_number(group) == 0
    die(group)
    with topic.group("etl") as group:
        assert numbers(group.poll()) == [1]


def test_polled_records_are_handled_when_a_loop_asks_for_more(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert numbers(group.poll()) == [0]
        assert take(group, 1) == [1]
        assert committed_number(group) == 0


def test_closing_does_not_commit_what_was_polled_last(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert numbers(group.poll() + group.poll()) == [0, 1]
    with topic.group("etl") as group:
        assert numbers(group.poll()) == [1]


def test_poll_gives_up_to_so_many(open_topic: Opener) -> None:
    topic = open_topic(partitions=1)
    topic.append_many([b"%d" % number for number in range(100)])
    topic.flush()
    with topic.group("etl") as group:
        assert numbers(group.poll(max_records=30)) == list(range(30))
        assert numbers(group.poll()) == list(range(30, 100))
        assert group.poll(timeout=0.01) == []
        with pytest.raises(ValueError, match="at least 1"):
            group.poll(max_records=0)


def test_batch_whose_body_raised_comes_again(topic: Topic) -> None:
    with topic.group("etl") as group:
        with pytest.raises(RuntimeError):
            for number, batch in enumerate(group.batches(timeout=0.0)):
                assert batch.values == [b"%d" % number]
                if number == 6:
                    raise RuntimeError
        assert [batch.values for batch in group.batches(timeout=0.0)] == [[b"6"], [b"7"], [b"8"], [b"9"]]
    with topic.group("etl") as group:
        assert rest(group) == []


def test_partly_read_batch_yields_its_remaining_records(open_topic: Opener) -> None:
    topic = open_topic(partitions=1)
    topic.append_many([b"%d" % number for number in range(10)])
    topic.flush()
    with topic.group("etl") as group:
        assert take(group, 4) == [0, 1, 2, 3]
        assert [numbers(batch.records()) for batch in group.batches(timeout=0.0)] == [[3, 4, 5, 6, 7, 8, 9]]


def test_group_closed_just_as_its_records_come_hands_out_none(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    group = topic.group("etl")
    next_run = group._next

    def closed_meanwhile(*asked: Any) -> Any:
        run = next_run(*asked)
        group.close()
        return run

    monkeypatch.setattr(group, "_next", closed_meanwhile)
    assert rest(group) == []
    with topic.group("etl") as group:
        assert rest(group) == list(range(10))


# --- runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("took", "expected"), [(0.001, 128), (0.0075, 64), (0.011, 8)])
def test_runs_are_as_long_as_bodies_are_quick(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, took: float, expected: int
) -> None:
    with topic.group("etl") as group:
        progress = group._delivery
        batch = next(iter(topic.batches()))
        run = progress.run = Run(TopicPartition("topic", 0), batch, "one by one")
        progress._run_length = 64
        monkeypatch.setattr(run, "seconds", lambda: took)
        progress.leave(run, came_back=False)
        assert progress._run_length == expected


@pytest.mark.parametrize("ask", [lambda group: group.poll(), lambda group: next(group.follow(timeout=0.0))])
def test_batch_that_a_loop_still_holds_is_not_handled_when_somebody_asks_for_more(
    topic: Topic, ask: Callable[[Group], Any]
) -> None:
    with topic.group("etl") as group:
        loop = group.batches(timeout=0.0)
        held = next(loop)
        asked = ask(group)
        first = asked[0] if isinstance(asked, list) else asked
        assert first.offset == held.offsets.start


def test_batch_of_a_lost_partition_is_left_without_an_error(topic: Topic) -> None:
    group = topic.group("etl", member="hung")
    loop = group.batches(timeout=0.0)
    next(loop)
    loglib.groups.evict_member(topic, "etl", "hung")
    with pytest.raises(StaleGenerationError):
        group.poll()
    loop.close()  # type: ignore[attr-defined]
    group.close()
