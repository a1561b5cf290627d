"""Progress: positions that are right after whatever has come between, and what counts as handled."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from loglib import Batch, LogMovedError, Record, StorageIOError, Topic, TopicPartition
from loglib.groups import delivery
from loglib.groups.delivery import Delivery, Run
from loglib.log.cursor import Cursor
from loglib.system.notify import Observer
from loglib.testing import Call, FaultyFiles, WatchedFiles

HERE, OTHER = TopicPartition("topic", 0), TopicPartition("topic", 1)


@pytest.fixture
def topic(open_topic: Callable[..., Topic]) -> Topic:
    """Two partitions with five records each, a batch each."""
    topic = open_topic(partitions=2)
    for number in range(10):
        topic.append(b"%d" % number, partition=number % 2)
        topic.flush()
    return topic


@contextmanager
def delivering(topic: Topic) -> Iterator[Delivery]:
    observer = Observer()
    progress = Delivery(topic._group_directory("etl"), observer)
    yield progress
    progress.close()
    observer.close()


@pytest.fixture
def progress(topic: Topic) -> Iterator[Delivery]:
    with delivering(topic) as progress:
        progress.add({HERE: 0})
        yield progress


def one_by_one(run: Run | None) -> list[Record]:
    assert run is not None
    records: list[Record] = []
    while (few := run.next_few()) is not None:
        records += few
    return records


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_records_read_but_not_handed_out_are_read_again(
    progress: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(delivery, "Run", interrupted)
        progress.take("one by one")
    assert [record.value for record in one_by_one(progress.take("one by one"))] == [b"0"]


def test_leaving_that_was_interrupted_is_made_good_by_the_next_call(
    progress: Delivery, monkeypatch: pytest.MonkeyPatch
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


def test_leaving_a_run_again_changes_nothing(progress: Delivery) -> None:
    run = progress.take("one by one")
    assert run is not None
    [record] = one_by_one(run)
    progress.leave(run, came_back=True)
    progress.leave(run, came_back=False)
    assert progress.handled == progress.next_offsets() == {HERE: record.next_offset}


def test_what_was_polled_is_handled_by_the_next_call_and_not_before(progress: Delivery) -> None:
    run = progress.take("polled", 1)
    assert run is not None
    run.all_out = True
    assert progress.handled == {}
    assert progress.so_far() == {HERE: run.batch.next_offset}
    progress.settle()
    assert progress.handled == {HERE: run.batch.next_offset}


def test_paused_partition_goes_on_where_it_was(progress: Delivery) -> None:
    progress.add({OTHER: 0})
    progress.pause(HERE)
    found = [run.partition for _ in range(7) if (run := progress.take("batch")) is not None]
    assert found == [OTHER] * 5
    progress.resume(HERE)
    assert [record.value for record in one_by_one(progress.take("one by one"))] == [b"0"]


def test_partition_read_to_its_end_sleeps_until_it_is_written_to(topic: Topic, progress: Delivery) -> None:
    while progress.take("batch") is not None:
        pass
    topic.append(b"more", partition=0, sync=True)
    assert progress.take("batch") is None
    progress.changed({OTHER: set(), "owners": set()})
    assert progress.take("batch") is None
    progress.changed(progress._observer.changed())
    run = progress.take("batch")
    assert run is not None and run.batch.values == [b"more"]


def test_partition_restored_under_a_sleeping_reader_is_read_on(
    open_topic: Callable[..., Topic], topic: Topic, path: Path
) -> None:
    with delivering(open_topic(mode="r")) as progress:
        progress.add({HERE: 0})
        while progress.take("batch") is not None:
            pass
        (path / "0000/watermark").rename(path / "0000/old")
        shutil.copy(path / "0000/old", path / "0000/new")
        (path / "0000/new").rename(path / "0000/watermark")
        with suppress(LogMovedError):
            topic.close()
        open_topic().append(b"more", partition=0, sync=True)
        progress._observer.wait(30)
        progress.changed(progress._observer.changed())
        run = progress.take("batch")
        assert run is not None and b"more" in run.batch.values


def test_more_that_comes_while_it_is_read_is_not_missed(topic: Topic, progress: Delivery) -> None:
    """The system reports a write in this process before the writer says so: who is that quick hears of it again."""
    while progress.take("batch") is not None:
        pass
    writer = topic.partition(0)._access.writer()
    before = writer.mark()
    topic.append(b"more", partition=0, sync=True)
    progress._observer.changed()
    assert progress.take("batch") is None  # as if the writer's mark were still that of before
    assert before.flushed_end < writer.mark().flushed_end
    progress._observer.wait(30)
    topic.append(b"again", partition=0, sync=True)
    progress.changed(progress._observer.changed())
    run = progress.take("batch")
    assert run is not None and run.batch.values[0] == b"more"


def test_files_of_few_partitions_are_open_at_a_time(
    topic: Topic, progress: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_MOST_OPEN", 1)
    progress.add({OTHER: 0})
    got = []
    while (run := progress.take("batch")) is not None:
        got += run.batch.values
        assert len(progress._cursors) <= 1
    assert sorted(filter(None, got)) == [b"%d" % number for number in range(10)]


class Full(WatchedFiles):
    """No file can be opened until a segment is closed."""

    is_full = False

    def before(self, call: Call) -> None:
        if call.name == "close" and call.file.endswith(".log"):
            self.is_full = False
        elif call.name == "open_read" and self.is_full:
            raise OSError(errno.EMFILE, "Too many open files", call.path)


def test_running_out_of_descriptors_closes_those_of_others_first(
    open_topic: Callable[..., Topic], topic: Topic
) -> None:
    files = Full()
    with delivering(open_topic(mode="r", files=files)) as progress:
        progress.add({HERE: 0})
        run = progress.take("batch")
        assert run is not None and run.partition == HERE
        progress.add({OTHER: 0})
        progress._blocks.clear()
        progress._turns = {OTHER: None}
        files.is_full = True
        run = progress.take("batch")
        assert run is not None and run.partition == OTHER and list(progress._cursors) == [OTHER]


def test_running_out_of_descriptors_with_nothing_to_close_says_what_to_raise(
    open_topic: Callable[..., Topic], topic: Topic
) -> None:
    files = Full()
    with delivering(open_topic(mode="r", files=files)) as progress:
        progress.add({OTHER: 0})
        files.is_full = True
        with pytest.raises(StorageIOError, match="raise the limit"):
            progress.take("batch")
        files.is_full = False
        assert progress.take("batch") is not None


def test_running_out_of_descriptors_again_and_again_is_no_recursion(
    open_topic: Callable[..., Topic], topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(cursor: Cursor, limit: int) -> list[Batch]:
        raise OSError(errno.EMFILE, "Too many open files")

    with delivering(open_topic(mode="r")) as progress:
        progress.add({HERE: 0, OTHER: 0})
        monkeypatch.setattr(Cursor, "read", read)
        with pytest.raises(StorageIOError, match="raise the limit"):
            progress.take("batch")


def test_other_errors_of_the_system_are_not_taken_for_that(open_topic: Callable[..., Topic], topic: Topic) -> None:
    files = FaultyFiles("open_read", armed=False)
    with delivering(open_topic(mode="r", files=files)) as progress:
        progress.add({HERE: 0})
        files.armed = True
        with pytest.raises(OSError, match="Input/output error"):
            progress.take("batch")


def test_partitions_overtaken_by_retention_are_told_apart(topic: Topic, progress: Delivery) -> None:
    progress.add({OTHER: 0})
    partition = topic.partition(0)
    partition.roll()
    partition._access.writer().drop_before(partition.log_end_offset)
    assert progress.overtaken() == [HERE]


def test_history_is_known_of_what_was_just_read(topic: Topic, progress: Delivery) -> None:
    headers = [batch._header for batch in topic.batches() if batch.partition == 0]
    run = progress.take("batch")
    assert run is not None
    assert progress.history(HERE, headers[0].base_offset) == 0
    assert progress.history(HERE, headers[0].next_offset) == headers[0].header_crc
    assert progress.history(HERE, headers[3].next_offset) == headers[3].header_crc  # which is looked up


def test_seek_ends_the_run_of_its_partition_and_counts_as_progress(topic: Topic, progress: Delivery) -> None:
    run = progress.take("one by one")
    assert run is not None
    last = list(topic.partition(0).read())[-1]
    progress.seek(HERE, last.offset)
    assert run.next_few() is None
    assert progress.run is None
    assert progress.handled == {HERE: last.offset}
    assert one_by_one(progress.take("one by one")) == [last]


def test_dropped_partition_is_forgotten_with_what_was_handled(progress: Delivery) -> None:
    progress.seek(HERE, 0)
    progress.drop([HERE])
    assert progress.handled == progress.next_offsets() == {}
    assert progress.take("one by one") is None
