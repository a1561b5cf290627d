"""The background thread: keeps the interval, passes on what goes wrong, and keeps no topic alive."""

import errno
import gc
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from conftest import MANUAL, Clock, values_of
from loglib import (
    FlushPolicy,
    LogClosedError,
    LogError,
    Retention,
    StorageFullError,
    StorageIOError,
    Topic,
    WriterFailedError,
    testing,
)
from loglib.append.background import Flusher
from loglib.testing import FaultyFiles, UnsyncedFiles

Open = Callable[..., Topic]
SOON = FlushPolicy(records=None, interval=0.001, bytes=None)


class Writer:
    """Stands where a writer stands, and says when it is flushed."""

    def __init__(self) -> None:
        self.flushed = threading.Semaphore(0)

    def flush(self, *, background: bool) -> None:
        assert background
        self.flushed.release()


@pytest.fixture
def writer() -> Writer:
    return Writer()


def start(writer: Any, **arguments: Any) -> Flusher:
    arguments = {"interval": None, "housekeeping": lambda: None, "housekeeping_every": 3600.0} | arguments
    return Flusher([writer], **arguments)


def test_writers_that_were_closed_meanwhile_are_passed_over(writer: Writer) -> None:
    class Closed(Writer):
        def flush(self, *, background: bool) -> None:
            self.flushed.release()
            raise LogClosedError("closed")

    closed = Closed()
    flusher = Flusher([closed, writer], interval=None, housekeeping=lambda: None, housekeeping_every=3600.0)  # type: ignore[list-item]
    for _ in range(2):
        flusher.kick()
        assert closed.flushed.acquire(timeout=60) and writer.flushed.acquire(timeout=60)
    flusher.stop()


def test_interrupted_touch_does_not_silence_the_next(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time was set and the thread not told: what was appended then waited for the housekeeping, for a minute."""
    flusher = start(writer, interval=0.001)

    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(flusher._changed, "notify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        flusher.touch()
    flusher.touch()
    assert writer.flushed.acquire(timeout=30)
    flusher.stop()


def test_touch_flushes_within_the_interval_and_kick_at_once(writer: Writer) -> None:
    flusher = start(writer, interval=0.001)
    for _ in range(3):
        flusher.touch()
        assert writer.flushed.acquire(timeout=60)
    flusher.stop()
    flusher = start(writer)
    flusher.touch()  # without an interval, nothing is due by itself
    flusher.kick()
    assert writer.flushed.acquire(timeout=60)
    flusher.stop()
    assert not writer.flushed.acquire(blocking=False)


def test_second_touch_does_not_put_the_flush_off(writer: Writer) -> None:
    flusher = start(writer, interval=1000.0)
    flusher.touch()
    due = flusher._flush_at
    flusher.touch()
    assert flusher._flush_at == due
    flusher.stop()


def test_housekeeping_runs_every_so_often(writer: Writer) -> None:
    ran = threading.Semaphore(0)
    flusher = start(writer, housekeeping=ran.release, housekeeping_every=0.001)
    assert all(ran.acquire(timeout=60) for _ in range(3))
    flusher.stop()


def test_stop_from_its_own_thread_does_not_wait_for_itself(writer: Writer) -> None:
    named, stopped = threading.Event(), threading.Event()  # the thread may be quicker than `start` returns

    def stop() -> None:
        named.wait(60)
        flusher.stop()
        stopped.set()

    flusher = start(writer, housekeeping=stop, housekeeping_every=0.001)
    named.set()
    assert stopped.wait(60)
    flusher.stop()
    assert not flusher.is_here()


def test_quiet_topic_has_no_thread_and_a_clocked_one_has(open_topic: Open, path: Path, tmp_path: Path) -> None:
    quiet = open_topic()
    assert "loglib-flusher" not in [each.name for each in threading.enumerate()]
    quiet.close()
    clocked: list[dict[str, Any]] = [
        {"flush": SOON}, {"segment_age": timedelta(days=1)}, {"retention": Retention(age=timedelta(days=1))},
        {"retention": Retention(age=None, bytes=5)}, {"retention": Retention(age=None, keep_free=0.1)},
    ]  # fmt: skip
    for number, policy in enumerate(clocked):
        with open_topic(tmp_path / f"t{number}", **policy):
            assert "loglib-flusher" in [each.name for each in threading.enumerate()]
        assert "loglib-flusher" not in [each.name for each in threading.enumerate()]


def test_interval_makes_records_visible_without_a_flush(open_topic: Open) -> None:
    topic = open_topic(flush=SOON)
    reader = topic.follow("begin")
    for number in range(5):
        topic.append(b"%d" % number)
        assert [r.value for r in reader.poll(timeout=60)] == [b"%d" % number]
    topic.append_many([b"many"] * 3)
    assert len(reader.poll(timeout=60)) == 3
    topic.append_many([b"p"], partition=0, producer=("p", 1))
    assert len(reader.poll(timeout=60)) == 1


def test_policy_that_is_due_is_flushed_by_the_thread(open_topic: Open) -> None:
    topic = open_topic(flush=FlushPolicy(records=5, interval=3600.0, bytes=None))
    reader = topic.follow("begin")
    for number in range(5):
        topic.append(b"%d" % number)
    assert len(reader.poll(timeout=60)) == 5


@pytest.mark.parametrize(
    "policy", [FlushPolicy(records=2, interval=3600.0), FlushPolicy(records=None, bytes=200, interval=3600.0)]
)
def test_appender_flushes_itself_when_the_thread_falls_behind(policy: FlushPolicy, open_topic: Open) -> None:
    """Back-pressure: what a crash can take is bounded, however slow the disk is."""
    stuck, go = threading.Event(), threading.Event()

    class Slow(UnsyncedFiles):
        def datasync(self, fd: int) -> None:
            if threading.current_thread().name == "loglib-flusher":
                stuck.set()
                assert go.wait(60)

    topic = open_topic(flush=policy, files=Slow())
    unflushed = []

    def run() -> None:
        for _ in range(100):
            topic.append(b"x" * 60)
            stuck.wait(0.001)  # let the thread come first, once
            unflushed.append(topic.partition(0).log_end_offset - topic.partition(0).high_watermark)

    thread = threading.Thread(target=run)
    thread.start()
    assert stuck.wait(60)
    before = -1
    while before < len(unflushed) < 100:  # until it waits for the flush that does not end
        before = len(unflushed)
        thread.join(0.05)
    assert len(unflushed) < 100
    go.set()
    thread.join(60)
    topic.flush()
    assert len(values_of(topic)) == 100
    assert max(unflushed) < 4000


def fail_in_background(topic: Topic, files: FaultyFiles) -> None:
    """Append, and wait until the thread has met the failure."""
    files.armed = True
    topic.append(b"lost")
    writer = topic.partition(0)._access.writer()
    while writer.batch.owed is None and writer.disk.failure is None:
        threading.Event().wait(0.001)
    files.armed = False


def test_full_disk_in_the_background_is_raised_by_the_next_call(open_topic: Open) -> None:
    files = FaultyFiles("pwritev", error=errno.ENOSPC, armed=False)
    topic = open_topic(flush=SOON, files=files)
    topic.append(b"first", sync=True)
    fail_in_background(topic, files)
    with pytest.raises(StorageFullError) as raised:
        topic.append(b"not appended")
    assert [len(each.offsets) for each in raised.value.lost] == [1]
    topic.append(b"after", sync=True)
    assert values_of(topic) == [b"first", b"after"]


def test_failed_fsync_in_the_background_is_raised_by_every_call(open_topic: Open) -> None:
    files = FaultyFiles("datasync", armed=False)
    topic = open_topic(flush=SOON, files=files)
    fail_in_background(topic, files)
    for _ in range(3):
        with pytest.raises(WriterFailedError):
            topic.append(b"x")
    with pytest.raises(WriterFailedError):
        topic.close()


def test_interval_is_kept_after_a_background_error(open_topic: Open) -> None:
    """The error used to stop the flush as well: what was buffered then stayed invisible until the next one."""
    topic = open_topic(flush=FlushPolicy(records=None, interval=3600.0, bytes=None))
    reader = topic.follow("begin")
    topic.append(b"buffered")
    topic.partition(0)._access.writer().raise_soon(LogError("something else"))
    assert topic._background._flusher is not None
    topic._background._flusher.kick()
    assert [r.value for r in reader.poll(timeout=60)] == [b"buffered"]
    with pytest.raises(LogError, match="something else"):
        topic.flush()


def test_unexpected_system_error_does_not_end_the_thread(open_topic: Open) -> None:
    class Odd(UnsyncedFiles):
        armed = False

        def close(self, fd: int) -> None:
            super().close(fd)
            if self.armed:
                self.armed = False
                raise OSError(errno.EIO, "odd")

    files = Odd()
    topic = open_topic(flush=SOON, files=files)
    writer = topic.partition(0)._access.writer()
    topic.append(b"x", sync=True)
    with writer.lock:
        writer.disk._retired.append(os.open("/dev/null", os.O_RDONLY))
        files.armed = True
    with pytest.raises(StorageIOError, match="flushing in the background"):
        topic.append(b"y")  # which is told already if the flusher still had the first record to see to
        while writer.batch.owed is None:
            threading.Event().wait(0.001)
        topic.flush()
    reader = topic.follow("begin")
    topic.append(b"z")
    values: list[bytes | None] = []
    while b"z" not in values:
        polled = reader.poll(timeout=60)
        assert polled
        values += [record.value for record in polled]
    assert values[0] == b"x"


# --- housekeeping by the clock -----------------------------------------------------------------------


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loglib.append.background._HOUSEKEEPING_S", 0.001)


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        threading.Event().wait(0.001)


def test_old_segment_is_rolled_and_dropped_by_the_clock(often: None, open_topic: Open, clock: Clock) -> None:
    topic = open_topic(segment_age=timedelta(minutes=10), retention=Retention(age=timedelta(hours=3)), flush=MANUAL)
    topic.append(b"x", sync=True)
    clock.advance(timedelta(minutes=11))
    wait_for(lambda: len(topic.partition(0).segments) == 2)
    clock.advance(timedelta(hours=3, seconds=1))
    wait_for(lambda: topic.partition(0).log_start_offset > 0)
    assert values_of(topic) == []


def test_failing_retention_reaches_the_next_call_and_spares_the_thread(often: None, open_topic: Open) -> None:
    topic = open_topic(retention=Retention(age=None, bytes=0, keep_free=0.001), files=FaultyFiles("statvfs", at=3))
    wait_for(lambda: topic.partition(0)._access.writer().batch.owed is not None)
    with pytest.raises(StorageIOError, match="Input/output error while"):
        topic.append(b"x")
    topic.append(b"y", sync=True)
    topic.partition(0).roll()
    wait_for(lambda: topic.partition(0).log_start_offset > 0)


def test_failed_writer_does_not_end_housekeeping_of_the_others(often: None, open_topic: Open) -> None:
    files = FaultyFiles("datasync", armed=False)
    topic = open_topic(partitions=2, retention=Retention(age=None, bytes=0), files=files, segment_age=timedelta(1))
    files.armed = True
    topic.append(b"x", partition=0)
    with pytest.raises(WriterFailedError):
        topic.partition(0).flush()
    files.armed = False
    topic.append(b"x", partition=1, sync=True)
    topic.partition(1).roll()
    wait_for(lambda: topic.partition(1).log_start_offset > 0)


def test_dropped_topic_closes_itself_and_frees_the_lock(path: Path) -> None:
    topic = Topic.open(path, create=True, flush=SOON)
    topic.append(b"x")
    with pytest.warns(ResourceWarning, match="was not closed"):
        del topic
        gc.collect()
    with Topic.open(path) as topic:
        assert values_of(topic) == [b"x"]


def test_topic_collected_in_its_own_thread_closes_all_the_same(path: Path) -> None:
    """The collector may come by in the middle of a flush, whose locks closing takes as well."""
    closed = threading.Event()

    class Collecting(UnsyncedFiles):
        armed = False

        def datasync(self, fd: int) -> None:
            if self.armed and threading.current_thread().name == "loglib-flusher":
                gc.collect()

        def close(self, fd: int) -> None:
            super().close(fd)
            if self.armed and threading.current_thread().name == "loglib-close":
                closed.set()

    gc.collect()
    gc.disable()
    try:
        files = Collecting()
        topic = testing.open_topic(path, flush=FlushPolicy(interval=0.05), files=files)
        cycle: list[Any] = [topic]
        cycle.append(cycle)
        files.armed = True
        topic.append(b"x")
        with pytest.warns(ResourceWarning, match="was not closed"):
            del topic, cycle
            assert closed.wait(60)
    finally:
        gc.enable()
    wait_for(lambda: "loglib-close" not in [each.name for each in threading.enumerate()])
    with Topic.open(path, create=True) as topic:
        assert values_of(topic) == [b"x"]
