"""A reader and its topic: who closes what, and what the other one then says."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import QUIET, fill, values_of, wait_until_waiting
from loglib import LogClosedError, Topic, testing
from loglib.testing import UnsyncedFiles

Open = Callable[..., Topic]


# --- a close ends what waits and what reads ------------------------------------------------------


def test_close_from_another_thread_ends_a_waiting_follow(open_topic: Open, path: Path) -> None:
    with open_topic() as topic, Topic.open(path, mode="r") as other:
        for source in (topic, other):
            reader = source.follow()
            ended = threading.Event()

            def run(reader: Any = reader, ended: threading.Event = ended) -> None:
                assert list(reader) == []
                ended.set()

            thread = threading.Thread(target=run)
            thread.start()
            wait_until_waiting(reader)
            reader.close()
            thread.join(60)
            assert ended.is_set() and reader.closed
            with pytest.raises(LogClosedError):
                reader.poll()
            with pytest.raises(LogClosedError):
                reader.seek("begin")
            assert list(reader) == [] == list(reader.batches())


@pytest.mark.parametrize("mode", ["a", "r"])
def test_closing_the_topic_ends_its_readers_in_other_threads(mode: Any, open_topic: Open, path: Path) -> None:
    """They end; they do not find a closed file, another file under its number, or an empty queue."""
    with open_topic() as topic:
        topic.append_many([b"x" * 100] * 20_000)
    for _ in range(15):
        topic = Topic.open(path, create=True, mode=mode)
        failures: list[BaseException] = []
        started = threading.Barrier(5)

        def run(topic: Topic = topic, failures: list[BaseException] = failures, started: Any = started) -> None:
            try:
                reader = topic.follow("begin")
                started.wait()
                for _ in reader:
                    pass
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for each in threads:
            each.start()
        started.wait()
        topic.close()
        for each in threads:
            each.join(60)
        assert failures == []


def test_close_while_another_thread_reads_never_breaks_it(open_topic: Open) -> None:
    """Closing used to take the queue away between a look at it and the next step."""
    topic = open_topic(batch_records=3)
    topic.append_many([b"x"] * 3000)
    topic.flush()
    for _ in range(60):
        reader = topic.read()
        failures: list[BaseException] = []

        def run(reader: Any = reader, failures: list[BaseException] = failures) -> None:
            try:
                for _ in reader:
                    pass
                list(reader.batches())
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        reader.close()
        thread.join(60)
        assert failures == []


def test_closing_reader_in_its_own_loop_ends_the_loop(open_topic: Open) -> None:
    topic = open_topic()
    fill(topic, 10)
    with topic.read() as reader:
        seen = []
        for record in reader:
            seen.append(record)
            reader.close()
        assert len(seen) == 1


def test_reader_is_a_context_manager_and_iterates_on(open_topic: Open) -> None:
    topic = open_topic()
    fill(topic, 4)
    with topic.read() as reader:
        first: Iterator[Any] = iter(reader)
        assert next(first).value == b"0"
        assert [r.value for r in reader] == [b"1", b"2", b"3"]
    assert reader.closed


# --- the reader and its topic --------------------------------------------------------------------


def test_reader_of_a_closed_log_says_so_unless_it_was_closed_itself(open_topic: Open, path: Path) -> None:
    open_topic(partitions=2).close()

    class Closing(UnsyncedFiles):
        """Closes the topic while a reader looks at the first partition; the second is closed by then."""

        armed = False

        def pread(self, fd: int, size: int, position: int) -> bytes:
            if self.armed:
                self.armed = False
                topic.close()
            return os.pread(fd, size, position)

    files = Closing()
    topic = testing.open_topic(path, mode="r", files=files)
    reader = topic.follow("begin")
    files.armed = True
    assert list(reader) == [] and reader.closed
    topic = testing.open_topic(path, mode="r", files=files)
    reader = topic.follow("begin")
    files.armed = True
    with pytest.raises(LogClosedError, match="open the topic again"):
        reader.poll(timeout=60)
    topic = Topic.open(path, mode="r")
    reader = topic.follow("begin")
    for partition in topic.partitions:
        partition._access.log.close()
    with pytest.raises(LogClosedError):
        reader.poll()


@pytest.mark.filterwarnings("ignore:.*was not closed:ResourceWarning")
@pytest.mark.parametrize("mode", ["a", "r"])
def test_reader_keeps_its_topic_open(mode: Any, path: Path) -> None:
    """The topic was collected, and so closed: the reader looked like one of an empty log."""
    with Topic.open(path, create=True, **QUIET) as topic:
        topic.append_many([b"%d" % number for number in range(5000)])

    assert len(list(Topic.open(path, mode=mode).read())) == 5000
    assert sum(map(len, Topic.open(path, mode=mode).batches())) == 5000
    assert sum(map(len, Topic.open(path, mode=mode).read().batches())) == 5000
    assert len(list(Topic.open(path, mode=mode).follow("begin", timeout=0.001))) == 5000
    topic = Topic.open(path, mode=mode)
    reader, batches = topic.partition(0).read(), topic.partition(0).batches()
    del topic
    gc.collect()
    assert (len(list(reader)), sum(map(len, batches))) == (5000, 5000)
    del reader, batches
    Topic.open(path).close()  # nobody refers to it any more: its locks are free


@pytest.mark.filterwarnings("ignore:.*was not closed:ResourceWarning")
def test_partition_of_a_collected_topic_is_closed_and_says_so(path: Path) -> None:
    partition = Topic.open(path, create=True, **QUIET).partition(0)
    for call in (partition.read, partition.follow, partition.batches, lambda: partition.append(b"x")):
        with pytest.raises(LogClosedError, match="open the topic again"):
            call()


def closed_after(topic: Topic, items: Any, count: int) -> list[Any]:
    """What comes of the items, whose topic is closed after the first of them."""
    got = []
    for item in items:
        got.append(item)
        if len(got) == count:
            topic.close()
    return got


@pytest.mark.parametrize("mode", ["a", "r"])
@pytest.mark.parametrize(
    "items",
    [
        lambda topic: topic.read(),
        lambda topic: topic.partition(0).read(),
        lambda topic: topic.read().batches(),
        lambda topic: topic.batches(),
        lambda topic: topic.follow("begin", timeout=60),
        lambda topic: topic.follow("begin", timeout=60).batches(),
    ],
    ids=["read", "partition", "read-batches", "batches", "follow", "follow-batches"],
)
def test_reading_that_is_cut_short_by_a_close_is_no_finished_log(
    items: Callable[[Topic], Any], mode: str, open_topic: Open
) -> None:
    """A loop whose topic was closed elsewhere ended at 100 of 5,000 records, and nothing said so."""
    with open_topic(batch_records=100) as topic:
        for number in range(1000):
            topic.append(b"%d" % number)
    topic = open_topic(mode=mode)
    with pytest.raises(LogClosedError, match="open the topic again, and read on from {0: "):
        closed_after(topic, items(topic), 3)


def test_cut_reader_tells_where_to_read_on(open_topic: Open) -> None:
    """It had forgotten records that were made and not handed out, and told of the place behind them."""
    topic = open_topic(batch_records=300)
    fill(topic, 1000)
    readers = [topic.read(), topic.read()]
    seen = [[next(iter(reader)).value for _ in range(450)] for reader in readers]
    readers[0].close()
    topic.close()
    topic = open_topic(mode="r")
    for reader, values in zip(readers, seen, strict=True):
        assert values + values_of(topic, reader.tell()) == [b"%d" % number for number in range(1000)]
        reader.close()
        assert values + values_of(topic, reader.tell()) == [b"%d" % number for number in range(1000)]


def test_reader_at_its_end_does_not_mind_that_its_topic_is_closed(open_topic: Open) -> None:
    topic = open_topic(batch_records=10)
    positions = fill(topic, 30)
    finished, bounded, fresh = topic.read(), topic.read(end=positions[15]), topic.read()
    assert len(list(finished)) == 30 and len(list(bounded)) == 15
    topic.close()
    for reader in (finished, bounded):
        assert list(reader) == []
        assert list(reader.batches()) == []
    for call in (lambda: list(fresh), lambda: list(fresh.batches()), fresh.poll):
        with pytest.raises(LogClosedError, match="open the topic again"):
            call()


def test_follower_without_a_timeout_just_ends_when_its_topic_is_closed(open_topic: Open) -> None:
    """It has no other end, and so its end says it."""
    topic = open_topic()
    fill(topic, 30)
    assert len(closed_after(topic, topic.follow("begin"), 3)) == 3


def test_reader_that_its_user_closed_just_ends(open_topic: Open) -> None:
    topic = open_topic()
    fill(topic, 30)
    readers = [topic.read(), topic.follow("begin", timeout=60)]
    for reader in readers:
        for _ in reader:
            reader.close()
    topic.close()
    for reader in readers:
        assert list(reader) == []
        assert list(reader.batches()) == []
