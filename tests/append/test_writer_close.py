"""A close writes everything, can be interrupted and repeated, and leaves nothing open."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import opened_since, records_of, settled_files, values_of
from loglib import LogClosedError, Topic
from loglib import topic as topic_module
from loglib.append import turns as turns_module
from loglib.append import writer as writer_module
from loglib.errors import ForkedHandleError
from loglib.testing import UnsyncedFiles

Open = Callable[..., Topic]


def test_close_is_idempotent_and_refuses_everything_after(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    partition = topic.partition(0)
    topic.append(b"x")
    topic.close()
    topic.close()
    for refused in (
        lambda: topic.append(b"y"), lambda: partition.append(b"y"), topic.flush, partition.flush, partition.roll,
        topic.read, topic.follow, topic.retain, lambda: list(partition.read()), lambda: topic.append(b"y", key=b"k"),
    ):  # fmt: skip
        with pytest.raises(LogClosedError):
            refused()
    assert len(records_of(path)) == 1


def test_interrupted_close_can_be_repeated_and_releases_everything(open_topic: Open, path: Path) -> None:
    class Interrupting(UnsyncedFiles):
        at = 0

        def close(self, fd: int) -> None:
            os.close(fd)
            Interrupting.at -= 1
            if Interrupting.at == 0:
                raise KeyboardInterrupt

    for at in (1, 2, 3):
        before = settled_files()
        topic = open_topic(files=Interrupting(), partitions=2)
        topic.append(b"x", partition=0)
        topic.append(b"x", partition=1)
        Interrupting.at = at
        with pytest.raises(KeyboardInterrupt):
            topic.close()
        topic.close()
        assert not opened_since(before)
    with open_topic() as topic:
        assert len(values_of(topic)) == 6


def test_record_appended_while_closing_is_refused_or_written(open_topic: Open, path: Path) -> None:
    """An append used to slip in between close's flush and the release: accepted, and gone."""
    closing, go = threading.Event(), threading.Event()
    armed = False

    class Held(UnsyncedFiles):
        def datasync(self, fd: int) -> None:
            if armed and not closing.is_set():
                closing.set()
                assert go.wait(60)

    topic = open_topic(files=Held())
    topic.append(b"early")
    armed = True
    accepted: list[bytes] = [b"early"]
    closer = threading.Thread(target=topic.close)
    closer.start()
    assert closing.wait(60)

    def append() -> None:
        try:
            topic.partition(0).append(b"late")
            accepted.append(b"late")
        except LogClosedError:
            return

    appender = threading.Thread(target=append)
    appender.start()
    go.set()
    closer.join()
    appender.join()
    assert [r.value for r in records_of(path)] == accepted


def test_file_left_longer_by_an_interrupted_write_is_trimmed_at_close(open_topic: Open, path: Path) -> None:
    class Interrupted(UnsyncedFiles):
        armed = False

        def write_all(self, fd: int, parts: Any, position: int) -> int:
            count = super().write_all(fd, parts, position)
            if self.armed:
                raise KeyboardInterrupt
            return count

    files = Interrupted()
    for roll in (False, True):
        topic = open_topic(files=files)
        topic.append(b"kept", sync=True)
        files.armed = True
        with pytest.raises(KeyboardInterrupt):
            topic.partition(0).append_many([b"given up"] * 3, producer=("p", 1))
        files.armed = False
        if roll:
            topic.partition(0).roll()
        topic.close()
        with open_topic() as topic:
            recovery = topic.partition(0).recovery
            assert recovery is not None and recovery.clean
    assert [r.value for r in records_of(path)] == [b"kept"] * 2


def test_synced_append_that_meets_a_close_is_flushed_by_it(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    writer = topic.partition(0)._access.writer()
    turn = writer._turn

    class Closing:
        """Lets a close go first."""

        def check_outside(self, what: str) -> None:
            """It is another thread that has the turn."""

        def take_at_once(self, action: Any) -> None:
            """Another thread has the turn."""

        def take(self, *arguments: Any, **keywords: Any) -> Any:
            writer._turn = turn
            closing = threading.Thread(target=topic.close)
            closing.start()
            closing.join()
            return turn.take(*arguments, **keywords)

    writer._turn = Closing()  # type: ignore[assignment]
    assert topic.append(b"x", sync=True).offset == 0
    assert [r.value for r in records_of(path)] == [b"x"]
    with pytest.raises(LogClosedError):
        writer._flush_record(1 << 40)


def test_abandoned_writer_refuses_and_its_files_are_closed(open_topic: Open) -> None:
    """What happens in a forked child, here without one."""
    before = settled_files()
    topic = open_topic(shared=True, partitions=2)
    topic.append(b"x", partition=0)
    for module in (turns_module, writer_module, topic_module):
        module._in_child.call(os.getpid())
        module._in_child.clear()
    for refused in (
        topic.flush, lambda: topic.append(b"x"), lambda: topic.partition(0).append(b"x"),
        lambda: topic.partition(1).append(b"x"), topic.read, topic.partition(0).flush,
    ):  # fmt: skip
        with pytest.raises(ForkedHandleError):
            refused()
    topic.close()
    assert not opened_since(before)
    assert values_of(open_topic(mode="r")) == []
