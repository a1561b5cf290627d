"""Runs: what is on its way out, how far it has got, and that it can be ended from anywhere."""

from collections.abc import Callable
from typing import Any

import pytest

from loglib import Batch, Topic, TopicPartition
from loglib.groups.delivery import RUN_S, Run

COUNT = 100


@pytest.fixture
def batch(open_topic: Callable[..., Topic]) -> Batch:
    topic = open_topic()
    topic.append_many([b"%d" % number for number in range(COUNT)], partition=0)
    topic.flush()
    [batch] = topic.batches()
    return batch


def run_of(batch: Batch) -> Run:
    return Run(TopicPartition("topic", 0), batch, "one by one")


def test_run_hands_out_every_record_once_and_knows_the_next(batch: Batch) -> None:
    run = run_of(batch)
    got = []
    while (few := run.next_few()) is not None:
        for record in few:
            got.append(record)
            assert run.offset == record.offset + 1
            assert run.handled_to(came_back=False) == record.offset
    assert got == batch.records()
    assert run.next_after(run.offset) == batch.next_offset > run.offset


def test_run_that_takes_too_long_is_cut_off(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(batch)
    first = list(run.next_few() or ())
    assert 0 < len(first) < COUNT
    monkeypatch.setattr(run, "seconds", lambda: 3 * RUN_S)
    assert run.next_few() is None
    assert run.next_after(run.offset) == first[-1].next_offset


def test_run_that_is_cut_while_records_are_made_hands_out_none(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(batch)
    first = list(run.next_few() or ())
    between = Batch.between

    def cut_meanwhile(self: Batch, *offsets: Any) -> Batch:
        run.cut()  # as another thread that closes the group does
        return between(self, *offsets)

    monkeypatch.setattr(Batch, "between", cut_meanwhile)
    assert run.next_few() is None
    assert run.offset == first[-1].next_offset


def test_cut_ends_a_loop_that_is_in_the_midst_of_it(batch: Batch) -> None:
    run = run_of(batch)
    few = run.next_few()
    assert few is not None
    first = next(few)
    run.cut()
    assert list(few) == []
    assert run.next_few() is None
    assert run.offset == first.next_offset


def test_batch_handed_out_as_a_whole_is_handled_as_a_whole(batch: Batch) -> None:
    run = Run(TopicPartition("topic", 0), batch, "batch")
    assert run.offset == batch.offsets.start
    run.all_out = True
    assert run.handled_to(came_back=True) == batch.offsets.stop
    assert run.handled_to(came_back=False) == batch.offsets.start
    run.cut()
    assert run.offset == batch.offsets.stop
