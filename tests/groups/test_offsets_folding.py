"""The offsets of members that have gone are folded into the logs of those that stay, and nothing is lost by it."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import committed
import pytest
from committed import B, full, logs, offset_of, put

from loglib import LockedError, LogMovedError, TopicPartition
from loglib.groups import commit_log, offsets
from loglib.groups.offsets import Offsets
from loglib.system.files import Files
from loglib.testing import Call, WatchedFiles

Opener = Callable[..., Offsets]

directory = committed.directory
open_log = committed.open_log


def beside_a_dead_one(open_log: Opener) -> Offsets:
    """The log of a living member, beside one that a dead member has left."""
    living, dead = open_log(), open_log()
    put(living, 1, of=B)
    put(dead, 5)
    dead.close()
    return living


def test_log_that_nobody_holds_is_taken_by_the_next(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 5)
    log.close()
    other = open_log()
    put(other, 8, of=B)
    assert len(logs(directory)) == 1
    assert (offset_of(other), offset_of(other, B)) == (5, 8)
    assert not other.fold()


def test_what_others_have_left_is_folded_into_the_own_log(open_log: Opener, directory: Path) -> None:
    dead, superseded, living = open_log(), open_log(), open_log()
    put(living, 1, of=TopicPartition("other", 0))
    put(dead, 5, meta="kept", generation=3)
    put(superseded, 4)
    before = dead.entries()
    for each in (dead, superseded):
        each.close()
    assert len(logs(directory)) == 3
    assert not open_log().fold()  # who has no log of its own writes nothing
    assert living.fold() and living.fold() and not living.fold()
    assert len(logs(directory)) == 1
    assert living.entries() == open_log().entries() == before


@pytest.mark.parametrize("durability", ["disk", "os"])
def test_log_is_removed_only_when_what_it_has_is_durable_elsewhere(open_log: Opener, durability: str) -> None:
    class Watching(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name in ("datasync", "pwritev", "rename") and call.file != "watermark":
                seen.append(call.name)

    seen: list[str] = []
    living, dead = open_log(files=Watching(), durability=durability), open_log()
    put(living, 1, of=B)
    put(dead, 5)
    dead.close()
    seen.clear()
    assert living.fold()
    assert seen[:1] == ["pwritev"] and "datasync" in seen[: seen.index("rename")]


def test_fold_that_was_cut_is_ended_by_the_next(
    open_log: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living, dead, other = open_log(), open_log(), open_log()
    for number, each in enumerate((living, dead, other)):
        put(each, number, of=TopicPartition("clicks", number))
    before = living.entries()
    dead.close()
    with monkeypatch.context() as patched:
        patched.setattr(Files, "remove_tree", lambda *_: None)
        assert living.fold()
    assert len(list(directory.iterdir())) == 3
    other.close()
    assert living.fold()
    assert len(list(directory.iterdir())) == 1
    assert living.entries() == before


@pytest.mark.parametrize("error", [errno.EPERM, errno.EXDEV], ids=["sticky", "overlay"])
def test_offsets_log_that_may_not_be_removed_blocks_nobody(
    open_log: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    living = beside_a_dead_one(open_log)

    def refuse(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Offsets, "_remove", refuse)
    assert living.fold() and not living.fold()
    assert offset_of(living) == 5 and len(logs(directory)) == 2


def test_offsets_log_whose_removal_fails_is_an_error(
    open_log: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = beside_a_dead_one(open_log)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(Offsets, "_remove", fail)
        with pytest.raises(OSError, match="Input/output"):
            living.fold()
    assert offset_of(living) == 5 and len(logs(directory)) == 2


@pytest.mark.parametrize("moment", ["_read", "_remove"])
def test_log_of_a_topic_that_comes_to_the_place_of_this_one_is_not_folded(
    open_log: Opener, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As with `mv topic topic.bak` and a copy at the old path, where nobody holds what a member of this one holds."""
    living, dead = open_log(), open_log()
    put(living, 1, of=B)
    put(dead, 5)
    dead.close()
    shutil.copytree(directory, tmp_path / "copy")
    method = getattr(Offsets, moment)
    swapped: list[Any] = []

    def swapping(self: Offsets, *arguments: Any) -> Any:
        if not swapped:
            swapped.append(directory.rename(tmp_path / "moved"))
            (tmp_path / "copy").rename(directory)
        return method(self, *arguments)

    monkeypatch.setattr(Offsets, moment, swapping)
    assert living.fold() and swapped
    assert len(logs(directory)) == len(logs(tmp_path / "moved")) == 2
    assert offset_of(open_log()) == 5
    with pytest.raises(LogMovedError):
        living.close()


def test_reader_that_comes_upon_a_log_just_folded_looks_again(open_log: Opener, directory: Path) -> None:
    class Racing(WatchedFiles):
        def after(self, call: Call, result: Any) -> Any:
            if call.name == "listdir" and call.file == "offsets" and racing:
                racing.clear()
                assert living.fold()
            return result

    racing: list[bool] = []
    reading, living, dead = open_log(files=Racing()), open_log(), open_log()
    put(living, 1, of=B)
    put(dead, 5)
    reading.commits()
    dead.close()
    racing.append(True)
    assert (offset_of(reading), offset_of(reading, B)) == (5, 1)
    late = open_log(files=Racing())
    dead = open_log()
    put(dead, 6, generation=2)
    dead.close()
    racing.append(True)
    put(late, 9, of=B, generation=9)  # which took its own log, as the one that it came for is gone
    assert (offset_of(late), offset_of(late, B), len(logs(directory))) == (6, 9, 2)


def test_log_that_is_removed_while_its_lock_is_tried_is_not_folded(open_log: Opener, directory: Path) -> None:
    class Racing(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name in at and call.path in paths:
                paths.remove(call.path)
                assert other.fold()

    paths: list[str] = []
    at: list[str] = []
    living, other = open_log(files=Racing()), open_log()
    put(living, 1, of=B)
    put(other, 2, of=TopicPartition("clicks", 1))
    for name in ("open_directory", "flock"):
        before = logs(directory)
        dead = open_log()
        put(dead, 5)
        dead.close()
        paths[:] = [str(each) for each in logs(directory) if each not in before]
        at[:] = [name]
        assert not living.fold()
        assert not paths and offset_of(living) == 5


def test_members_that_are_always_quicker_are_an_error_in_the_end(
    open_log: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Offsets, "_try_open", lambda *_: None)
    monkeypatch.setattr(offsets, "_OPEN_TRIES", 2)
    with pytest.raises(LockedError, match="all logs of offsets"):
        put(open_log(), 5)


def test_full_disk_leaves_a_log_unfolded(
    open_log: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    living, dead = open_log(), open_log()
    put(living, 1, of=B)
    put(dead, 5)
    dead.close()

    def refuse(log: Any, *_: Any) -> None:
        raise full(log.directory)

    with monkeypatch.context() as patched:
        patched.setattr(commit_log.CommitLog, "append", refuse)
        assert living.fold() and not living.fold()
    assert "not folded into another log" in caplog.text
    assert offset_of(living) == 5 and len(logs(directory)) == 2
