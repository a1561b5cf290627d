"""What a thread of the library loses is named by the next call, once; the thread goes on."""

import errno
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from named_records import FullPartitions, named

from loglib import FlushPolicy, LogError, OffsetRange, StorageFullError, StorageIOError, Topic
from loglib.format.header import encode_body

Open = Callable[..., Topic]
SOON = FlushPolicy(records=None, interval=0.001, bytes=None)


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        threading.Event().wait(0.001)


def test_failed_background_flush_is_tried_again_without_another_append(open_topic: Open) -> None:
    """An accepted call stayed invisible for ever: nothing but another append had it tried again."""
    files = FullPartitions()
    topic = open_topic(files=files, flush=FlushPolicy(records=None, interval=0.02, bytes=None))
    reader = topic.follow("begin")
    writer = topic.partition(0)._access.writer()
    with writer.lock:  # before the interval is over
        pass
    topic.partition(0).append_many([b"written"], producer=("p", 1))
    lost = topic.append(b"lost")
    files.full = {0}
    wait_for(lambda: writer.batch.owed is not None)
    files.full = set()
    assert [each.value for each in reader.poll(timeout=60)] == [b"written"]
    with pytest.raises(StorageFullError) as raised:
        topic.flush()
    assert named(raised.value) == [lost]
    topic.append(b"after", sync=True)


def test_thread_survives_what_no_one_foresaw_and_says_so(open_topic: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """One `MemoryError` ended the thread: appends were accepted, nothing was flushed, and no error came."""
    from loglib.append import batch_writer

    failures = [MemoryError(), MemoryError(), SystemExit()]

    def no_memory(columns: Any, **keywords: Any) -> Any:
        if failures:
            raise failures.pop()
        return encode_body(columns, **keywords)

    topic = open_topic(flush=SOON)
    reader = topic.follow("begin")
    monkeypatch.setattr(batch_writer, "encode_body", no_memory)
    topic.append(b"accepted")
    assert [each.value for each in reader.poll(timeout=60)] == [b"accepted"]
    assert not failures
    with pytest.raises(LogError, match="\\(\\) while flushing in the background; it is tried again") as raised:
        topic.append(b"x")
    assert isinstance(raised.value.__cause__, SystemExit | MemoryError)
    topic.append(b"y")
    assert [each.value for each in reader.poll(timeout=60)] == [b"y"]


def test_thread_that_cannot_even_wait_or_tell_goes_on(open_topic: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = open_topic(flush=SOON)
    reader = topic.follow("begin")
    flusher, writer = topic._background._flusher, topic.partition(0)._access.writer()
    assert flusher is not None
    raise_soon, broken = writer.raise_soon, [1, 1]

    def cannot_tell(error: LogError) -> None:
        if broken:
            broken.pop()
            raise MemoryError
        raise_soon(error)

    monkeypatch.setattr(writer, "raise_soon", cannot_tell)
    writer.flush = _failing(writer.flush, 2)  # type: ignore[method-assign]
    topic.append(b"accepted")
    assert [each.value for each in reader.poll(timeout=60)] == [b"accepted"]
    assert not broken


def _failing(flush: Callable[..., None], times: int) -> Callable[..., None]:
    left = [1] * times

    def flush_or_fail(**keywords: Any) -> None:
        if left and keywords:
            left.pop()
            raise MemoryError
        flush(**keywords)

    return flush_or_fail


@pytest.mark.parametrize("last", ["background", "flush", "append", "close"])
def test_losses_of_several_background_flushes_are_all_named_once(last: str, open_topic: Open) -> None:
    """The second error used to take the place of the first."""
    files = FullPartitions()
    topic = open_topic(files=files, flush=FlushPolicy(records=None, interval=3600.0, bytes=None))
    writer = topic.partition(0)._access.writer()
    check = writer.check_usable
    writer.check_usable = lambda: None  # type: ignore[method-assign]  # as if all appends came at once
    lost = []
    files.full = {0}
    for _ in range(3):
        batch = writer.batch
        lost.append(topic.append(b"x"))
        assert writer.timer is not None
        writer.timer.kick()
        wait_for(lambda batch=batch: batch.lost is not None)  # type: ignore[misc]
    if last in ("flush", "close"):
        lost.append(topic.append(b"y"))
    writer.check_usable = check  # type: ignore[method-assign]
    acts = {"flush": topic.flush, "close": topic.close}
    with pytest.raises(StorageFullError) as raised:
        acts.get(last, lambda: topic.append(b"x"))()
    assert named(raised.value) == lost or named(raised.value) == lost[-1:] + lost[:-1]
    files.full = set()
    if last != "close":
        topic.append(b"x", sync=True)


def test_housekeeping_that_raises_reaches_every_writer(open_topic: Open, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr("loglib.append.background._HOUSEKEEPING_S", 0.001)
    topic = open_topic(segment_age=timedelta(days=1))
    flusher = topic._background._flusher
    assert flusher is not None
    ran = threading.Event()

    def fail() -> None:
        if not ran.is_set():
            ran.set()
            raise RuntimeError("odd")

    flusher._housekeeping = fail
    assert ran.wait(60)
    wait_for(lambda: topic.partition(0)._access.writer().batch.owed is not None)
    with pytest.raises(LogError, match="RuntimeError\\('odd'\\) while housekeeping in the background"):
        topic.append(b"x")


def test_same_failure_of_the_background_again_and_again_is_kept_once(open_topic: Open) -> None:
    topic = open_topic()
    writer = topic.partition(0)._access.writer()
    for _ in range(100):
        writer.raise_soon(LogError("again"))
    writer.raise_soon(StorageIOError("a", OSError(errno.EIO, "broken"), "reading"))
    with pytest.raises(StorageIOError) as raised:
        topic.append(b"x")
    assert [str(each) for each in raised.value.errors] == ["again"]
    topic.append(b"x")


def test_what_is_owed_is_named_by_whatever_is_raised_first(open_topic: Open) -> None:
    topic = open_topic()
    writer = topic.partition(0)._access.writer()
    partition = topic.partition(0)
    partition.append_many([b"x"], producer=("p", 5))
    owed = StorageFullError("a.log", OSError(errno.ENOSPC, "full"))
    owed.lost = (OffsetRange(0, range(3)),)
    check = writer.check_usable

    def owe_then() -> None:
        check()
        writer.batch.owe(owed)

    writer.check_usable = owe_then  # type: ignore[method-assign]
    with pytest.raises(LogError, match="comes too late") as raised:
        partition.append_many([b"x"], producer=("p", 4))
    assert raised.value.lost == owed.lost
    assert any("before that" in note for note in raised.value.__notes__)
    writer.check_usable = check  # type: ignore[method-assign]
    topic.append(b"x", sync=True)
