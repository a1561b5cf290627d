"""Progress: positions that are right after whatever has come between, and what counts as handled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loglib import Record, Topic, TopicPartition
from loglib.groups import progress as progress_module
from loglib.groups.progress import Progress
from loglib.groups.run import Run

HERE, OTHER = TopicPartition("topic", 0), TopicPartition("topic", 1)


@pytest.fixture
def topic(open_topic: Callable[..., Topic]) -> Topic:
    """Two partitions with five records each, a batch each."""
    topic = open_topic(partitions=2)
    for number in range(10):
        topic.append(b"%d" % number, partition=number % 2)
        topic.flush()
    return topic


@pytest.fixture
def progress(topic: Topic) -> Iterator[Progress]:
    progress = Progress(topic.place("etl"))
    progress.add({HERE: 0})
    yield progress
    progress.close()


def one_by_one(run: Run | None) -> list[Record]:
    assert run is not None
    records: list[Record] = []
    while (few := run.next_few()) is not None:
        records += few
    return records


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_what_was_read_and_not_handed_over_is_read_once_more(
    progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(progress_module, "Run", interrupted)
        progress.take("one by one")
    assert [record.value for record in one_by_one(progress.take("one by one"))] == [b"0"]


def test_leaving_that_was_interrupted_is_made_good_by_the_next_call(
    progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = progress.take("batch")
    assert run is not None
    run.all_out = True
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(progress, "_go_to", interrupted)
        progress.leave(run, came_back=False)
    progress.settle()
    assert progress.handled == {}
    assert progress.next_offsets() == {HERE: run.batch.offsets.start}
    assert [record.value for record in one_by_one(progress.take("one by one"))] == [b"0"]


def test_run_is_left_once(progress: Progress) -> None:
    run = progress.take("one by one")
    assert run is not None
    [record] = one_by_one(run)
    progress.leave(run, came_back=True)
    progress.leave(run, came_back=False)
    assert progress.handled == progress.next_offsets() == {HERE: record.next_offset}


def test_what_was_polled_is_handled_by_the_next_call_and_not_before(progress: Progress) -> None:
    run = progress.take("polled", 1)
    assert run is not None
    run.all_out = True
    assert progress.handled == {}
    assert progress.so_far() == {HERE: run.batch.next_offset}
    progress.settle()
    assert progress.handled == {HERE: run.batch.next_offset}


def test_paused_partition_goes_on_where_it_was(progress: Progress) -> None:
    progress.add({OTHER: 0})
    progress.pause(HERE)
    found = [run.partition for _ in range(7) if (run := progress.take("batch")) is not None]
    assert found == [OTHER] * 5
    progress.resume(HERE)
    assert [record.value for record in one_by_one(progress.take("one by one"))] == [b"0"]


def test_seek_ends_the_run_of_its_partition_and_counts_as_progress(topic: Topic, progress: Progress) -> None:
    run = progress.take("one by one")
    assert run is not None
    last = list(topic.partition(0).read())[-1]
    progress.seek(HERE, last.offset)
    assert run.next_few() is None
    assert progress.run is None
    assert progress.handled == {HERE: last.offset}
    assert one_by_one(progress.take("one by one")) == [last]


def test_dropped_partition_is_forgotten_with_what_was_handled(progress: Progress) -> None:
    progress.seek(HERE, 0)
    progress.drop([HERE])
    assert progress.handled == progress.next_offsets() == {}
    assert progress.take("one by one") is None
