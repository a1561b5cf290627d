"""What stands after each way in which the disk fails a writer."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import last_segment, offsets_of, records_of, sound, values_of
from loglib import (
    LogClosedError,
    LogError,
    OffsetRange,
    Position,
    StorageFullError,
    StorageIOError,
    Topic,
    WriterFailedError,
    testing,
)
from loglib.segment import HEADER_BYTES
from loglib.testing import FaultyFiles, FullDisk, ShortWrites

Open = Callable[..., Topic]


def refuses_everything(topic: Topic) -> None:
    with pytest.raises(WriterFailedError):
        topic.flush()
    with pytest.raises(WriterFailedError):
        topic.append(b"y")
    with pytest.raises(WriterFailedError):
        topic.close()


def test_failed_fsync_poisons_the_writer_for_ever(open_topic: Open, path: Path) -> None:
    files = FaultyFiles("datasync", armed=False)
    topic = open_topic(files=files)
    topic.append(b"safe", sync=True)
    topic.append(b"doubtful")
    files.armed = True
    with pytest.raises(WriterFailedError, match="a flush failed.*reopen"):
        topic.flush()
    assert files.failed == 1 and isinstance(files.names, tuple)
    partition = topic.partition(0)
    for refused in (
        topic.flush,
        partition.flush,
        partition.roll,
        lambda: topic.append(b"x"),
        lambda: partition.append(b"x", sync=True),
        lambda: topic.append_many([b"x"] * 10),
        lambda: partition.append_many([b"x"], producer=("p", 1)),
        lambda: topic.append(b"x", key=b"k"),
    ):
        with pytest.raises(WriterFailedError) as raised:
            refused()
        assert isinstance(raised.value.error, OSError)
    assert values_of(topic) == [b"safe"], "readers go on"
    with pytest.raises(WriterFailedError):
        topic.close()
    with pytest.raises(LogClosedError):
        topic.append(b"x")
    with open_topic() as topic:
        recovery = topic.partition(0).recovery
        assert recovery is not None and recovery.rewritten_bytes > 0, "the page cache is not believed"
        assert values_of(topic) == [b"safe", b"doubtful"]


def test_failed_publication_poisons_the_writer(open_topic: Open) -> None:
    files = FaultyFiles("pwritev", at=2, armed=False)
    topic = open_topic(files=files)
    topic.append(b"x")
    files.armed = True
    refuses_everything(topic)
    with open_topic() as topic:
        assert values_of(topic) == [b"x"]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disk_costs_the_failing_records_only(error: int, open_topic: Open, path: Path) -> None:
    files = FaultyFiles("pwritev", error=error, armed=False)
    topic = open_topic(files=files)
    topic.append(b"before", sync=True)
    size = last_segment(path).stat().st_size
    lost = [topic.append(b"lost %d" % number).offset for number in range(3)]
    files.armed = True
    with pytest.raises(StorageFullError, match="3 buffered records from offset") as raised:
        topic.flush()
    assert raised.value.lost == (OffsetRange(0, range(lost[0], lost[-1] + 1)),)
    assert raised.value.errno == error and raised.value.path == str(last_segment(path))
    assert last_segment(path).stat().st_size == size
    assert topic.append(b"after", sync=True).offset == lost[0], "the offsets are given out again"
    assert values_of(topic) == [b"before", b"after"]
    sound(topic.partition(0))


def test_io_error_while_writing_costs_the_failing_records_only(open_topic: Open) -> None:
    files = FaultyFiles("pwritev", error=errno.EIO, armed=False)
    topic = open_topic(files=files)
    topic.append(b"lost")
    files.armed = True
    with pytest.raises(StorageIOError, match="writing a batch"):
        topic.flush()
    topic.append(b"after", sync=True)
    assert values_of(topic) == [b"after"]


def test_file_that_cannot_be_cut_back_poisons_the_writer(open_topic: Open) -> None:
    class Stuck(FullDisk):
        def ftruncate(self, fd: int, size: int) -> None:
            if self.room < 500:
                raise OSError(errno.EIO, "stuck")
            os.ftruncate(fd, size)

    files = Stuck(room=1 << 30)
    topic = open_topic(files=files)
    topic.append(b"x" * 1000)
    files.room = 499
    refuses_everything(topic)
    with open_topic() as topic:
        assert values_of(topic) == []


def test_disk_that_fills_at_any_byte_never_shows_a_failed_record(open_topic: Open, path: Path) -> None:
    open_topic().close()
    files = FullDisk(room=1 << 30)
    topic = testing.open_topic(path, files=files)
    topic.append(b"first", sync=True)
    expected: list[bytes | None] = [b"first"]
    for room in range(0, 700, 13):
        files.room = room
        appended = []
        try:
            for number in range(3):
                appended.append(b"%d %d" % (room, number))
                topic.append(appended[-1])
            topic.flush()
            expected += appended
        except StorageFullError as error:
            assert [len(each.offsets) for each in error.lost] == [3]
            assert last_segment(path).stat().st_size == HEADER_BYTES + topic.partition(0).high_watermark
        except WriterFailedError:  # the watermark did not fit: not a byte more, in a file that never grows
            files.room = 1 << 30
            with pytest.raises(WriterFailedError):
                topic.close()
            expected += appended
            topic = testing.open_topic(path, files=files)
        files.room = 1 << 30
        assert values_of(topic) == expected
    assert len(expected) > 10
    topic.close()


def test_disk_that_fills_while_rolling_costs_the_failing_records_only(open_topic: Open, path: Path) -> None:
    open_topic(segment_bytes=4096).close()
    outcomes = set()
    for room in range(0, 8800, 400):
        files = FullDisk(room=1 << 30)
        topic = testing.open_topic(path, files=files)
        expected = [*values_of(topic), b"a" * 3000]
        topic.append(b"a" * 3000, sync=True)
        topic.append(b"b" * 3000)
        files.room = room
        try:
            topic.flush()
            expected.append(b"b" * 3000)
            outcomes.add("fits")
        except StorageFullError as error:
            assert [len(each.offsets) for each in error.lost] == [1]
            outcomes.add("full")
        except WriterFailedError:  # the watermark did not fit
            outcomes.add("failed")
        files.room = 1 << 30
        try:
            topic.append(b"c", sync=True)
            expected.append(b"c")
            topic.close()
        except WriterFailedError:
            with pytest.raises(WriterFailedError):
                topic.close()
        with open_topic() as topic:
            assert values_of(topic)[: len(expected)] == expected
            sound(topic.partition(0))
    assert outcomes == {"fits", "full", "failed"}


def test_bulk_append_that_fails_midway_says_where(open_topic: Open) -> None:
    topic = open_topic(batch_bytes=1000, files=FaultyFiles("pwritev", at=3, error=errno.ENOSPC, armed=False))
    topic._files.armed = True  # type: ignore[attr-defined]
    with pytest.raises(StorageFullError) as raised:
        topic.append_many([b"%03d" % number * 100 for number in range(100)])
    topic.flush()
    values = values_of(topic)
    assert values == [b"%03d" % number * 100 for number in range(len(values))] and values
    assert raised.value.lost == ()  # nobody had been given an offset of these
    assert [offset for each in raised.value.appended for offset in each.offsets] == offsets_of(topic)
    assert raised.value.not_appended == tuple(range(len(values), 100))


def test_waiter_learns_that_another_threads_flush_lost_its_record(open_topic: Open) -> None:
    """The record was buffered, another thread's flush found the disk full, and the offset was given out again."""
    held, go = threading.Event(), threading.Event()

    class Held(FaultyFiles):
        def datasync(self, fd: int) -> None:
            if self.armed and not go.is_set():
                held.set()
                assert go.wait(60)

    files = Held("pwritev", at=3, error=errno.ENOSPC, armed=False)  # the batch, the mark, then the next batch
    topic = open_topic(files=files)
    files.armed = True
    results: dict[str, object] = {}

    def append(name: str) -> None:
        try:
            results[name] = topic.append(name.encode(), sync=True)
        except StorageFullError as error:
            results[name] = error

    first = threading.Thread(target=append, args=("first",))
    first.start()
    assert held.wait(60)
    writer = topic.partition(0)._access.writer()
    others = [threading.Thread(target=append, args=(name,)) for name in ("second", "third")]
    for each in others:
        each.start()
    while writer.next_offset - writer.batch.tail.end < 2:
        assert all(each.is_alive() for each in others)
    go.set()
    for each in [first, *others]:
        each.join()
    assert isinstance(results["first"], Position)
    assert isinstance(results["second"], StorageFullError) and isinstance(results["third"], StorageFullError)
    assert topic.append(b"again", sync=True)
    assert values_of(topic) == [b"first", b"again"]


def test_short_writes_are_carried_on(open_topic: Open, path: Path) -> None:
    with open_topic(files=ShortWrites()) as topic:
        for number in range(20):
            topic.append(b"%d" % number * 30, key=b"k", headers={"h": b"v"})
    assert [r.value for r in records_of(path)] == [b"%d" % number * 30 for number in range(20)]


def test_background_error_is_raised_by_the_next_call_and_only_there(open_topic: Open) -> None:
    topic = open_topic()
    writer = topic.partition(0)._access.writer()
    for call in (
        lambda: topic.append(b"x"),
        topic.flush,
        lambda: topic.append_many([b"x"] * 3),
        lambda: topic.append(b"x", key=b"k"),
        lambda: topic.partition(0).append_many([b"x"], producer=("p", 1)),
        topic.partition(0).roll,
    ):
        topic.append(b"fine")
        writer.raise_soon(LogError("something in the background"))
        with pytest.raises(LogError, match="something in the background"):
            call()
    topic.append(b"fine")
    writer.raise_soon(LogError("at the end"))
    with pytest.raises(LogError, match="at the end"):
        topic.close()
    topic.close()
    with open_topic() as topic:
        assert values_of(topic) == [b"fine"] * 7
