"""Directories that are moved, removed, copied and restored under their writers: all stays where it was."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from displaced import abandon, fill

from conftest import QUIET, needs_root, open_files, settled_files, sound, values_of
from loglib import CorruptLogError, LogClosedError, LogMovedError, Retention, StorageIOError, Topic, testing
from loglib.system.files import REAL
from loglib.testing import Call, FaultyFiles, MemoryFiles, UnsyncedFiles, WatchedFiles

Open = Callable[..., Topic]
SMALL: dict[str, Any] = {"segment_bytes": 4096, "retention": Retention(age=None, bytes=0)}


def test_records_of_a_new_topic_at_the_old_path_survive_the_old_writer(open_topic: Open, path: Path) -> None:
    """The old writer's retention removed the new topic's active segment, and left its own file in its place."""
    old = open_topic(**SMALL)
    fill(old, 30, b"old")
    path.rename(path.with_suffix(".bak"))
    with open_topic(segment_bytes=1 << 20) as new:
        expected = fill(new, 60, b"new")
        before = {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}
        for _ in range(3):  # rolls, flushes and drops, or says that it does not
            for call in (lambda: fill(old, 40, b"late"), lambda: old.partition(0).roll(), old.retain, old.flush):
                with pytest.raises(LogMovedError):
                    call()
        assert {each: each.read_bytes() for each in path.rglob("*") if each.is_file()} == before
        abandon(old)
        assert values_of(new) == expected
        sound(new.partition(0))
    with open_topic() as again:
        assert values_of(again) == expected


def test_rolls_and_drops_of_a_moved_writer_stay_in_its_own_directory(open_topic: Open, path: Path) -> None:
    """Appends alone look at no path: they roll in the directory that was moved, until a flush tells."""
    old = open_topic(**SMALL)
    fill(old, 3, b"old")
    moved = path.with_suffix(".bak")
    path.rename(moved)
    with open_topic() as new:
        expected = fill(new, 10, b"new")
        names = sorted(os.listdir(path / "0000"))
        for _ in range(40):
            old.partition(0).append_many([b"late" * 100] * 3)
        with pytest.raises(LogMovedError) as caught:
            old.flush()
        assert caught.value.kept and caught.value.path == str(path / "0000")
        assert sorted(os.listdir(path / "0000")) == names and values_of(new) == expected
    abandon(old)
    with open_topic(moved) as again:
        assert len(values_of(again)) == 123, "what was flushed with the error is in the files that were moved"
        sound(again.partition(0))


def test_topic_that_is_moved_in_the_midst_of_retention_loses_its_own_segments_and_no_others(
    open_topic: Open, path: Path
) -> None:
    """Between the decision and the removal the same names may be another topic's."""
    moved = path.with_suffix(".bak")
    expected: list[bytes] = []

    class Moving(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == "unlink" and call.path.endswith(".log") and not moved.exists():
                path.rename(moved)
                with Topic.open(path, create=True, **QUIET) as new:
                    expected.extend(fill(new, 60, b"new"))

    old = open_topic(files=Moving(), segment_bytes=4096)
    kept = fill(old, 30, b"old")
    last = old.partition(0).segments[-1].base_offset
    old.partition(0)._access.writer().drop_before(last)
    with open_topic() as new:
        assert values_of(new) == expected
        sound(new.partition(0))
    abandon(old)
    assert [int(name.stem) for name in (moved / "0000").glob("*.log")] == [last]
    assert values_of(Topic.open(moved, mode="r")) == kept[-len(values_of(Topic.open(moved, mode="r"))) :]


@pytest.mark.parametrize("which", ["topic", "partition", "segment"])
def test_append_that_is_synced_says_that_its_files_are_removed(open_topic: Open, path: Path, which: str) -> None:
    """After rm -rf, append(sync=True) went on succeeding."""
    topic = open_topic()
    fill(topic, 3, b"kept")
    if which == "segment":
        next((path / "0000").glob("*.log")).unlink()
    else:
        shutil.rmtree(path if which == "topic" else path / "0000")
    for call in (lambda: topic.append(b"x", sync=True), lambda: topic.append(b"x"), topic.flush, topic.retain):
        with pytest.raises(LogMovedError, match="was removed") as caught:
            call()
        assert caught.value.kept is False
    abandon(topic)
    assert topic.closed


def test_flush_with_nothing_to_flush_says_that_its_files_are_removed(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    topic.flush()
    shutil.rmtree(path)
    with pytest.raises(LogMovedError, match="was removed"):
        topic.flush()
    abandon(topic)


def test_batches_are_not_written_into_a_file_that_was_removed(open_topic: Open, path: Path) -> None:
    """Without a flush: each write looks, too."""
    topic = open_topic(batch_records=10)
    shutil.rmtree(path)
    with pytest.raises(LogMovedError, match="was removed"):
        for _ in range(11):
            topic.append(b"x")
    abandon(topic)


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_flush_says_that_its_watermark_is_another(open_topic: Open, path: Path, how: str) -> None:
    topic = open_topic()
    fill(topic, 3, b"kept")
    watermark = path / "0000" / "watermark"
    if how == "removed":
        watermark.unlink()
    else:
        shutil.copy(watermark, path / "copy")
        (path / "copy").rename(watermark)
    with pytest.raises(LogMovedError, match="another file put in its place") as caught:
        topic.append(b"last", sync=True)
    assert caught.value.kept and caught.value.path == str(watermark)
    abandon(topic)
    with open_topic() as again:
        assert len(values_of(again)) == 4, "the segment has it, whatever became of the watermark"


@pytest.mark.parametrize("call", ["retain", "close"])
def test_segment_that_is_moved_out_of_its_directory_is_missed(open_topic: Open, path: Path, call: str) -> None:
    topic = open_topic()
    fill(topic, 3, b"kept")
    segment = next((path / "0000").glob("*.log"))
    segment.rename(path / "elsewhere")
    topic.append(b"last")
    with pytest.raises(LogMovedError, match="moved elsewhere") as caught:
        topic.retain() if call == "retain" else topic.close()
    assert caught.value.kept and caught.value.path == str(segment)
    if call == "retain":
        abandon(topic)
    (path / "elsewhere").rename(segment)
    with open_topic() as again:
        assert len(values_of(again)) == 4


def test_copy_made_of_links_is_another_directory(open_topic: Open, path: Path) -> None:
    """cp -al: the files are the same, and a second writer could lock the copy and write to them too."""
    topic = open_topic()
    fill(topic, 3, b"kept")
    copy = path.with_suffix(".copy")
    shutil.copytree(path, copy, copy_function=os.link)
    fill(topic, 1, b"a backup made of links hinders nobody")
    path.rename(path.with_suffix(".bak"))
    copy.rename(path)
    with pytest.raises(LogMovedError, match="another directory"):
        topic.append(b"x", sync=True)
    abandon(topic)


def test_records_appended_during_the_last_flush_are_kept_in_moved_files(open_topic: Open, path: Path) -> None:
    """What a writer has accepted before it notices is durable where the files are, and named by the error."""
    topic = open_topic()
    path.rename(path.with_suffix(".bak"))
    for number in range(5):
        topic.append(b"%d" % number)
    with pytest.raises(LogMovedError, match="whole in the old files"):
        topic.append(b"last", sync=True)
    abandon(topic)
    with open_topic(path.with_suffix(".bak")) as again:
        assert values_of(again) == [b"0", b"1", b"2", b"3", b"4", b"last"]


def test_close_notices_and_flushes_to_the_moved_files(open_topic: Open, path: Path) -> None:
    topic = open_topic(partitions=2)
    for number in range(10):
        topic.append(b"%d" % number, partition=number % 2)
    path.rename(path.with_suffix(".bak"))
    before = len(settled_files())
    with pytest.raises(LogMovedError):
        topic.close()
    assert len(open_files()) < before and topic.closed
    with open_topic(path.with_suffix(".bak")) as again:
        assert len(values_of(again)) == 10


def test_every_thread_that_waits_for_a_flush_is_told(open_topic: Open, path: Path) -> None:
    topic = open_topic(files=UnsyncedFiles())
    path.rename(path.with_suffix(".bak"))
    told: list[BaseException] = []

    def run() -> None:
        try:
            topic.append(b"x", sync=True)
        except LogMovedError as error:
            told.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(told) == 8
    abandon(topic)


def test_older_state_that_is_copied_back_into_the_files_leaves_no_hole(open_topic: Open, path: Path) -> None:
    """cp -a of a backup over living files: the next batch was written behind the end, with zeros before it."""
    topic = open_topic()
    kept = fill(topic, 3, b"kept")
    backup = path.with_suffix(".backup")
    shutil.copytree(path, backup)
    fill(topic, 20, b"later")
    for each in backup.rglob("*"):
        if each.is_file():
            shutil.copyfile(each, path / each.relative_to(backup))  # into the same file, as cp does
    with pytest.raises(LogMovedError, match="changed by another program") as caught:
        topic.append(b"x", sync=True)
    assert caught.value.kept is False
    abandon(topic)
    with open_topic() as again:
        assert values_of(again) == kept and again.partition(0).recovery is not None
        sound(again.partition(0))


@pytest.mark.parametrize("change", ["cut", "longer"])
@pytest.mark.parametrize("call", ["roll", "close", "append"])
def test_file_that_somebody_else_has_changed_is_left_as_it_is(
    open_topic: Open, path: Path, change: str, call: str
) -> None:
    topic = open_topic()
    fill(topic, 3, b"kept")
    segment = next((path / "0000").glob("*.log"))
    content = segment.read_bytes()
    content = content[:-100] if change == "cut" else content + b"strange"
    segment.write_bytes(content)
    with pytest.raises(LogMovedError, match=f"{len(content)} bytes long"):
        match call:
            case "roll":
                topic.partition(0).roll()
            case "append":
                topic.append(b"x", sync=True)
            case _:
                topic.close()
    with pytest.raises(LogMovedError) if call != "close" else pytest.raises(LogClosedError):
        topic.append(b"y")
    if call != "close":
        abandon(topic)
    assert segment.read_bytes() == content


def test_failed_write_into_a_removed_file_says_that_the_log_moved(open_topic: Open, path: Path) -> None:
    class Removing(FaultyFiles):
        def pwritev(self, fd: int, parts: Any, position: int, flags: int = 0) -> int:
            if self.armed:
                shutil.rmtree(path)
                self.armed = False
                raise OSError(5, "Input/output error")
            return super().pwritev(fd, parts, position)

    files = Removing(armed=False)
    topic = open_topic(files=files)
    files.armed = True
    files.names = ("none",)
    with pytest.raises(LogMovedError, match="was removed"):
        topic.append(b"x", sync=True)
    abandon(topic)


def test_writer_that_may_not_look_goes_on(open_topic: Open, path: Path) -> None:
    """A daemon that has given up its rights can write to what it has open, and cannot follow the path to it."""
    files = FaultyFiles("lstat", error=13, every=True, armed=False)
    topic = open_topic(files=files)
    files.armed = True
    fill(topic, 3, b"kept")
    files.armed = False
    topic.close()
    assert len(values_of(Topic.open(path, mode="r"))) == 3


def test_look_that_fails_is_an_error_and_the_next_flush_makes_it_good(open_topic: Open) -> None:
    files = FaultyFiles("lstat", at=2, armed=False)  # the first one is for changed policies
    topic = open_topic(files=files)
    files.armed = True
    with pytest.raises(StorageIOError, match="looking"):
        topic.append(b"x", sync=True)
    topic.flush()
    assert values_of(topic) == [b"x"]


@needs_root
def test_directory_that_something_is_mounted_on_is_another(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    if os.system(f"mount -t tmpfs none {path} 2>/dev/null") != 0:
        pytest.skip("may not mount here")
    try:
        with pytest.raises(LogMovedError):
            topic.append(b"x", sync=True)
        abandon(topic)
    finally:
        os.system(f"umount {path}")


def test_file_in_place_of_a_partition_that_is_being_opened_is_damage(open_topic: Open, path: Path) -> None:
    open_topic().close()

    class Replacing(UnsyncedFiles):
        def flock(self, fd: int, operation: int) -> None:
            if (path / "0000").is_dir():
                (path / "0000").rename(path / "moved")
                (path / "0000").write_bytes(b"")
            REAL.flock(fd, operation)

    with pytest.raises(CorruptLogError, match="a directory, and no link to one"):
        open_topic(files=Replacing())


def test_moved_writer_refuses_all_that_is_asked_of_it(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    offset = topic.append(b"x").offset
    writer = topic.partition(0)._access.writer()
    path.rename(path.with_suffix(".bak"))
    with pytest.raises(LogMovedError):
        topic.flush()
    for call in (writer.mark, lambda: writer.drop_before(8), topic.flush, lambda: topic.append(b"y")):
        with pytest.raises(LogMovedError):
            call()
    abandon(topic)
    assert offset == 0


def test_flush_by_another_thread_into_moved_files_says_that_the_log_moved(
    open_topic: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is durable when the thread that waited looks, and no reader will find it."""
    topic = open_topic()
    offset = topic.append(b"x").offset
    writer = topic.partition(0)._access.writer()
    path.rename(path.with_suffix(".bak"))
    with pytest.raises(LogMovedError):
        topic.flush()
    monkeypatch.setattr(writer._turn, "take", lambda *_, **__: None)  # as if it had been another's
    with pytest.raises(LogMovedError):
        writer._flush_record(offset)
    monkeypatch.undo()
    abandon(topic)


def test_look_at_the_segment_that_fails_is_an_error_and_nothing_more(open_topic: Open) -> None:
    files = FaultyFiles("fstat", armed=False)
    topic = open_topic(files=files)
    topic.append(b"x", sync=True)
    files.armed = True
    with pytest.raises(StorageIOError, match="looking whether it is still there"):
        topic.flush()
    topic.append(b"y", sync=True)
    assert values_of(topic) == [b"x", b"y"]


def test_policies_are_not_written_into_another_topic(open_topic: Open, path: Path) -> None:
    """Topic.reconfigure locked the partitions of one topic and wrote the description of the one at its path now."""
    open_topic().close()
    moved = path.with_suffix(".bak")

    class Moving(UnsyncedFiles):
        locked = False

        def flock(self, fd: int, operation: int) -> None:
            REAL.flock(fd, operation)
            self.locked = True

        def open_directory(self, at: str) -> int:
            if self.locked and at == str(path) and not moved.exists():
                path.rename(moved)
                Topic.open(path, create=True, **QUIET).close()
            return super().open_directory(at)

    before = (path / "topic.json").read_bytes()
    with pytest.raises(LogMovedError), testing.open_topic(path, files=Moving()) as topic:
        topic.alter(retention=Retention(bytes=1))
    assert (moved / "topic.json").read_bytes() == before
    assert Topic.open(path, mode="r").config.retention == Retention(age=None)


def test_retention_by_the_clock_says_that_the_topic_was_moved(open_topic: Open, path: Path) -> None:
    topic = open_topic(**SMALL)
    path.rename(path.with_suffix(".bak"))
    topic.partition(0)._access.keep_house()
    with pytest.raises(LogMovedError):
        topic.append(b"x")
    abandon(topic)


def test_writer_of_a_topic_moved_in_memory_is_refused_and_leaves_the_new_one_alone() -> None:
    """The file systems for tests do the same."""
    files = MemoryFiles()
    old = testing.open_topic("/topic", files=files, **QUIET)
    old.append(b"old", sync=True)
    files.rename("/topic", "/moved")
    with testing.open_topic("/topic", files=files, **QUIET) as new:
        new.append(b"new", sync=True)
        before = {path: content for path, content in files.tree().items() if path.startswith("/topic/")}
        with pytest.raises(LogMovedError):
            old.append(b"late", sync=True)
        abandon(old)
        assert {path: content for path, content in files.tree().items() if path.startswith("/topic/")} == before
    assert values_of(testing.open_topic("/moved", mode="r", files=files)) == [b"old", b"late"]
