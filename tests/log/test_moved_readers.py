"""Readers of directories that are moved, removed, copied and restored: they go on, or are told."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from displaced import abandon, fill

from conftest import QUIET, values_of
from loglib import CorruptLogError, LogMovedError, OffsetOutOfRangeError, Topic, testing
from loglib.log.log import Log
from loglib.system.files import REAL
from loglib.testing import FaultyFiles, MemoryFiles, UnsyncedFiles

Open = Callable[..., Topic]
BOUND_S = 30.0  # within which a reader must have noticed; it looks once a second, and the machine may be busy


def test_reader_goes_on_to_its_end_in_a_copy_put_in_place(open_topic: Open, path: Path) -> None:
    with open_topic(batch_records=1) as topic:
        values = fill(topic, 5, b"kept")
    with Topic.open(path, mode="r") as reading:
        log = reading.partition(0)._access.log
        reader = reading.read()
        found = [record.value for record in reader.poll(max_records=1)]
        shutil.copytree(path, path.with_suffix(".copy"))
        path.rename(path.with_suffix(".bak"))
        path.with_suffix(".copy").rename(path)
        log.check_moved()
        assert found + [record.value for record in reader] == values


def test_reader_of_an_older_state_put_in_place_ends_where_that_ends(open_topic: Open, path: Path) -> None:
    """The next segment is not there: that is no damage, since the files are others."""
    with open_topic() as topic:
        values = fill(topic, 3, b"kept")
        topic.partition(0).roll()
    shutil.copytree(path, path.with_suffix(".backup"))
    with open_topic() as topic:
        topic.partition(0).roll()
        fill(topic, 3, b"second")
        topic.partition(0).roll()
        fill(topic, 3, b"third")
    with Topic.open(path, mode="r") as reading:
        reader = reading.read()
        found = [record.value for record in reader.poll(max_records=3)]
        path.rename(path.with_suffix(".bak"))
        path.with_suffix(".backup").rename(path)
        try:
            found += [record.value for record in reader]
        except OffsetOutOfRangeError as error:
            assert error.high_watermark == reading.partition(0).high_watermark
        assert found[:3] == values


def test_partition_that_is_moved_while_it_is_opened_is_refused(open_topic: Open, path: Path) -> None:
    open_topic().close()

    class Moving(UnsyncedFiles):
        def flock(self, fd: int, operation: int) -> None:
            if (path / "0000").exists():
                (path / "0000").rename(path / "moved")
            REAL.flock(fd, operation)

    with pytest.raises(LogMovedError, match="while it was being opened"):
        open_topic(files=Moving())
    assert sorted(os.listdir(path / "moved")) == ["00000000000000000000.log", "lock", "watermark"]


class Following:
    """A follower in a thread of its own: what it has read, and what has ended it."""

    def __init__(self, path: Path, **arguments: Any) -> None:
        self.values: list[bytes | None] = []
        self.error: BaseException | None = None
        self.topic = Topic.open(path, mode="r", **arguments)
        self.reader = self.topic.follow("begin")
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            for record in self.reader:
                self.values.append(record.value)
        except BaseException as error:
            self.error = error

    def read_until(self, wanted: list[bytes]) -> None:
        deadline = time.monotonic() + BOUND_S
        while self.values != wanted:
            assert time.monotonic() < deadline, "it waits for ever"
            assert self.error is None, self.error
            time.sleep(0.01)

    def ends(self) -> BaseException | None:
        """What it has ended with, within the bound."""
        self.thread.join(BOUND_S)
        assert not self.thread.is_alive(), "it waits for ever"
        return self.error

    def close(self) -> None:
        self.topic.close()
        self.thread.join()


@pytest.fixture(params=[True, False], ids=["inotify", "looking"])
def follow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Following]]:
    """Followers, with inotify and without."""
    if not request.param:
        monkeypatch.setattr("loglib.system.notify._inotify", lambda _: None)
    followers: list[Following] = []

    def begin(path: Path, **arguments: Any) -> Following:
        followers.append(Following(path, **arguments))
        return followers[-1]

    yield begin
    for each in followers:
        each.close()


@pytest.mark.parametrize("what", ["removed", "recreated", "partition"])
def test_follower_of_a_topic_that_was_removed_or_made_anew_raises(
    open_topic: Open, path: Path, follow: Callable[..., Following], what: str
) -> None:
    """It waited for ever for a file that nobody writes to any more."""
    topic = open_topic()
    values = fill(topic, 3, b"old")
    follower = follow(path)
    follower.read_until(values)
    if what == "partition":
        shutil.rmtree(path / "0000")
    elif what == "removed":
        shutil.rmtree(path)
    else:
        path.rename(path.with_suffix(".bak"))
        with open_topic() as new:
            fill(new, 30, b"new")
    error = follower.ends()
    assert isinstance(error, LogMovedError) and error.kept is None
    assert follower.values == values, "nothing of another log is handed out"
    abandon(topic)


def test_follower_goes_on_after_a_restore_by_rename(
    open_topic: Open, path: Path, follow: Callable[..., Following]
) -> None:
    """It kept the watermark that it had open, and saw nothing of what came into the one in its place."""
    with open_topic() as topic:
        values = fill(topic, 3, b"kept")
    follower = follow(path)
    follower.read_until(values)
    restored = path.with_suffix(".restored")
    shutil.copytree(path, restored)
    path.rename(path.with_suffix(".bak"))
    restored.rename(path)
    for name in (b"then", b"and then"):  # the second is seen by what watches the new file
        with open_topic() as topic:
            values += fill(topic, 3, name)
            follower.read_until(values)


def test_follower_goes_on_with_a_watermark_that_was_lost_and_rebuilt(
    open_topic: Open, path: Path, follow: Callable[..., Following]
) -> None:
    with open_topic() as topic:
        values = fill(topic, 3, b"kept")
    follower = follow(path)
    follower.read_until(values)
    (path / "0000" / "watermark").unlink()
    time.sleep(1.5)  # in which it looks, and finds none
    with open_topic() as topic:
        recovery = topic.partition(0).recovery
        assert recovery is not None and recovery.watermark_lost
        values += fill(topic, 3, b"then")
        follower.read_until(values)


def test_follower_of_an_older_state_is_told_that_its_place_is_gone(
    open_topic: Open, path: Path, follow: Callable[..., Following]
) -> None:
    backup = path.with_suffix(".backup")
    with open_topic() as topic:
        values = fill(topic, 3, b"kept")
    shutil.copytree(path, backup)
    with open_topic() as topic:
        values += fill(topic, 10, b"lost by the restore")
    follower = follow(path)
    follower.read_until(values)
    path.rename(path.with_suffix(".bak"))
    backup.rename(path)
    assert isinstance(follower.ends(), OffsetOutOfRangeError)
    with pytest.raises(OffsetOutOfRangeError):
        follower.reader.poll()
    follower.reader.seek("end")
    assert follower.reader.poll() == []
    with open_topic() as topic:
        topic.append(b"then", sync=True)
        assert [record.value for record in follower.reader.poll(timeout=BOUND_S)] == [b"then"]


def test_follower_of_a_restored_topic_with_another_history_is_told(
    open_topic: Open, path: Path, follow: Callable[..., Following]
) -> None:
    """At its offset there is the middle of another batch, which looked like damage."""
    backup = path.with_suffix(".backup")
    with open_topic() as topic:
        values = fill(topic, 3, b"kept")
    shutil.copytree(path, backup)
    with open_topic() as topic:
        values += fill(topic, 2, b"lost by the restore")
    with open_topic(backup) as topic:
        topic.append(b"larger" * 1000, sync=True)
    follower = follow(path)
    follower.read_until(values)
    path.rename(path.with_suffix(".bak"))
    backup.rename(path)
    assert isinstance(follower.ends(), LogMovedError)
    assert follower.values == values


def test_follower_in_the_writers_process_raises_although_nothing_is_written(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    values = fill(topic, 3, b"old")
    reader = topic.follow("begin", timeout=BOUND_S)
    assert [record.value for record in reader.poll(max_records=3)] == values
    shutil.rmtree(path)
    with pytest.raises(LogMovedError, match="moved or removed"):
        reader.poll(timeout=BOUND_S)
    abandon(topic)


def test_reader_that_polls_without_waiting_raises_as_well(open_topic: Open, path: Path) -> None:
    open_topic().close()
    with Topic.open(path, mode="r") as topic:
        reader = topic.follow("begin")
        assert reader.poll() == []
        shutil.rmtree(path)
        deadline = time.monotonic() + BOUND_S
        with pytest.raises(LogMovedError):
            while time.monotonic() < deadline:
                assert reader.poll() == []
                time.sleep(0.01)


def test_topic_open_for_reading_sees_what_was_put_in_its_place(open_topic: Open, path: Path) -> None:
    """Each look at the log went to a file that had been replaced long ago."""
    with open_topic() as topic:
        fill(topic, 3, b"kept")
    with Topic.open(path, mode="r") as reading:
        before = reading.partition(0).high_watermark
        shutil.copytree(path, path.with_suffix(".restored"))
        shutil.rmtree(path)
        path.with_suffix(".restored").rename(path)
        with open_topic() as topic:
            fill(topic, 3, b"then")
        deadline = time.monotonic() + BOUND_S
        while reading.partition(0).high_watermark == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(values_of(reading)) == 6


@pytest.mark.parametrize("where", ["another partition", "damaged"])
def test_directory_without_a_whole_watermark_is_known_by_its_segments(open_topic: Open, path: Path, where: str) -> None:
    with open_topic(partitions=2) as topic:
        topic.append(b"x", partition=0, sync=True)
    with Topic.open(path, mode="r") as reading:
        log = reading.partition(0)._access.log
        end = log.mark().flushed_end
        (path / "0000").rename(path / "before")
        if where == "damaged":
            shutil.copytree(path / "before", path / "0000")
            (path / "0000" / "watermark").write_bytes(b"nothing")
            next((path / "0000").glob("*.log")).write_bytes(b"nothing")
            for _ in range(3):
                log.check_moved()
                assert log.mark().flushed_end == end, "what is open says more than what is there"
        else:
            shutil.copytree(path / "0001", path / "0000")
            log.check_moved()
            with pytest.raises(LogMovedError, match="holds another log"):
                log.check_moved()


def test_files_that_are_missing_for_a_moment_are_waited_for(open_topic: Open, path: Path) -> None:
    """A restore by two renames: for some microseconds there is nothing."""
    with open_topic() as topic:
        fill(topic, 3, b"kept")
    with Topic.open(path, mode="r") as reading:
        log = reading.partition(0)._access.log
        end = log.mark().flushed_end
        for _ in range(3):
            path.rename(path.with_suffix(".bak"))
            log.check_moved()
            assert log.mark().flushed_end == end
            path.with_suffix(".bak").rename(path)
            log.check_moved()


def test_reader_of_a_watermark_that_fails_to_open_leaves_nothing_open() -> None:
    memory = MemoryFiles()
    with testing.open_topic("/topic", files=memory, **QUIET) as topic:
        topic.append(b"x", sync=True)
    files = FaultyFiles("fstat", armed=False, inner=memory)
    with testing.open_topic("/topic", mode="r", files=files) as reading:
        files.armed, files.at = True, 2  # the first is the look at what kind of file it is
        with pytest.raises(OSError, match="Input/output"):
            _ = reading.partition(0).high_watermark
        files.armed = False
        assert memory.open_paths() == []


def test_last_segment_that_vanishes_while_the_watermark_is_lost_is_damage(open_topic: Open, path: Path) -> None:
    """A raw FileNotFoundError, in the midst of a restore."""
    open_topic().close()
    segment = next((path / "0000").glob("*.log"))

    class Vanishing(UnsyncedFiles):
        def open_read(self, path: str, **within: Any) -> int:
            if path == str(segment):
                segment.unlink()
            return super().open_read(path, **within)

    with Topic.open(path, mode="r") as reading:
        (path / "0000" / "watermark").unlink()
        log = Log(Vanishing(), str(path / "0000"), reading.partition(0)._access.log.identity)
        with pytest.raises(CorruptLogError, match="no file"):
            log.mark()


def test_reader_looks_in_a_signal_handler_although_its_thread_is_flushing(open_topic: Open) -> None:
    """It would wait for the turn that its own thread has."""
    topic = open_topic()
    topic.append(b"x", sync=True)
    log = topic.partition(0)._access.log
    writer = topic.partition(0)._access.writer()
    with writer.lock:
        log.check_moved()
        assert log.mark().flushed_end > 0
