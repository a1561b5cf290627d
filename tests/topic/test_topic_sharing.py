"""Topics that several processes write: their writers take turns at each partition."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import values_of
from loglib import LockedError, Retention, Topic

Open = Callable[..., Topic]


def test_second_writer_is_refused_and_holds_nothing(open_topic: Open, path: Path) -> None:
    topic = open_topic(partitions=3)
    with pytest.raises(LockedError, match=f"pid {os.getpid()}"):
        Topic.open(path, create=True)
    topic.close()
    partly = open_topic(shared=True)
    partly.append(b"x", partition=2)
    with pytest.raises(LockedError, match="0002"):
        Topic.open(path)
    other = open_topic(shared=True)
    assert other.append(b"y", partition=0).partition == 0, "the locks that could be taken were given back"


def test_shared_topics_spread_over_the_partitions_and_wait_if_none_is_free(open_topic: Open) -> None:
    topics = [open_topic(partitions=3, shared=True) for _ in range(4)]
    taken = [topic.append(b"%d" % n).partition for n, topic in enumerate(topics[:3])]
    assert sorted(taken) == [0, 1, 2]
    for topic, partition in zip(topics, taken, strict=False):
        assert {topic.append(b"x").partition for _ in range(10)} == {partition}, "it stays while nobody wants it"
    topics[3].append(b"awaited")
    for topic, partition in zip(topics, taken, strict=False):
        topic.append(b"elsewhere", partition=(partition + 1) % 3)
    for topic in topics:
        topic.flush()
    assert len(values_of(topics[3])) == 37


def test_wait_for_a_partition_that_is_not_shared_ends_with_its_holder(open_topic: Open) -> None:
    holder = open_topic(partitions=2)
    topic = open_topic(at=Path(holder.path), shared=True, wait="10ms")
    with pytest.raises(LockedError, match=rf"0001/lock is held by pid {os.getpid()} .*waited for 0.01 s"):
        topic.append(b"x", partition=1)
    with pytest.raises(LockedError, match="all 2 partitions are taken"):
        topic.append(b"x")
    holder.close()
    assert topic.append(b"x", partition=1).partition == 1


def test_shared_partition_that_was_appended_to_directly_is_the_topics_as_well(open_topic: Open) -> None:
    """Its writer used to be unknown to the topic: not flushed, not in the interval, not closed."""
    topic = open_topic(shared=True, partitions=2)
    topic.partition(1).append(b"x")
    topic.flush()
    assert values_of(topic) == [b"x"]
    with open_topic(shared=True, at=Path(topic.path)) as other:
        other.partition(1).append(b"y")
        assert topic.append(b"z", partition=1).partition == 1
        topic.flush()
    assert values_of(topic) == [b"x", b"y", b"z"]


def test_threads_that_meet_at_a_shared_partition_make_one_writer(open_topic: Open) -> None:
    topic = open_topic(shared=True)
    barrier = threading.Barrier(8)
    failures: list[BaseException] = []

    def run() -> None:
        barrier.wait()
        try:
            topic.append(b"x", partition=0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    topic.flush()
    assert failures == [] and len(values_of(topic)) == 8


def test_retention_of_a_shared_topic_takes_the_partitions_of_others_for_a_moment(open_topic: Open) -> None:
    policies: dict[str, Any] = {"partitions": 2, "retention": Retention(age=None, bytes=0)}
    other, topic = open_topic(shared=True, **policies), open_topic(shared=True, **policies)
    other.append(b"x", partition=0, sync=True)
    topic.append(b"x", partition=1)
    topic.partition(1).roll()
    assert {each.partition for each in topic.retain()} == {0, 1}
    other.append(b"y", partition=0, sync=True)
    assert {each.partition for each in topic.retain(dry_run=True)} == {0, 1}
