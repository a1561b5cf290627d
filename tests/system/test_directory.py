"""system/directory.py: work goes on in the directory that was opened, and errors name whole paths."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loglib import CorruptLogError
from loglib.system.directory import Directory
from loglib.system.files import REAL, Files
from loglib.testing import FaultyFiles, MemoryFiles, RecordingFiles

KINDS: list[Callable[[], Files]] = [lambda: REAL, MemoryFiles, RecordingFiles, lambda: RecordingFiles(MemoryFiles())]


@pytest.fixture(params=KINDS, ids=["real", "memory", "recorded", "recorded-memory"])
def files(request: pytest.FixtureRequest) -> Files:
    return request.param()  # type: ignore[no-any-return]


@pytest.fixture
def opened(files: Files, tmp_path: Path) -> Directory:
    path = str(tmp_path / "one")
    files.make_directories(path)
    return Directory.open(files, path)


def test_work_goes_on_in_a_directory_that_was_moved(files: Files, tmp_path: Path, opened: Directory) -> None:
    opened.write_new("before", b"1", 0o600)
    files.rename(opened.path, str(tmp_path / "moved"))
    files.make_directories(opened.path)
    files.write_new(opened.path + "/before", b"another", 0o600)
    assert not opened.is_named() and opened.is_at(str(tmp_path / "moved"))
    opened.write_new("tmp", b"2", 0o600)
    opened.link("tmp", "made")
    with pytest.raises(FileExistsError, match="made"):
        opened.link("tmp", "made")
    opened.rename("tmp", "moved")
    opened.unlink("moved")
    opened.unlink("before")
    opened.sync()
    assert opened.sizes() == {"made": 1} and opened.names() == ["made"]
    assert opened.exists("made") and not opened.exists("before") and not opened.is_directory("made")
    for open_file in (opened.open_read, opened.open_write):
        fd = open_file("made")
        assert files.read_at(fd, 10, 0) == b"2"
        files.close(fd)
    assert opened.read_whole("made", 10) == b"2"
    assert files.sizes(opened.path) == {"before": 7}, "the new directory at the old path is not touched"
    assert files.sizes(str(tmp_path / "moved")) == {"made": 1}
    opened.close()


def test_directory_knows_whether_its_path_leads_to_it(files: Files, tmp_path: Path, opened: Directory) -> None:
    with opened:
        assert opened.is_named()
        with Directory.open(files, str(tmp_path)) as above:
            assert opened.is_at("one", dir_fd=above.fd) and not above.is_at("one", dir_fd=above.fd)
        files.rmdir(opened.path)
        assert not opened.is_named()
        files.write_new(opened.path, b"", 0o600)
        assert not opened.is_named()
        assert not opened.is_at(opened.path + "/below")
        assert "one" in repr(opened)


def test_nothing_is_made_in_a_directory_that_was_removed(files: Files, opened: Directory) -> None:
    files.rmdir(opened.path)
    with pytest.raises(FileNotFoundError):
        opened.create("file", 0o600)
    assert opened.names() == []
    opened.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda opened: opened.open_read("name"),
        lambda opened: opened.open_write("name"),
        lambda opened: opened.read_whole("name", 10),
        lambda opened: opened.unlink("name"),
        lambda opened: opened.rename("name", "other"),
        lambda opened: opened.link("name", "other"),
    ],
)
def test_error_names_the_whole_path(opened: Directory, call: Callable[[Directory], Any]) -> None:
    with opened, pytest.raises(FileNotFoundError) as caught:
        call(opened)
    assert caught.value.filename == os.path.join(opened.path, "name")
    assert caught.value.filename2 in (None, os.path.join(opened.path, "other"))


def test_link_in_an_open_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("elsewhere")
    with Directory.open(REAL, str(tmp_path)) as opened:
        for call in (opened.open_read, opened.open_write, lambda name: opened.create(name, 0o600, exclusive=False)):
            with pytest.raises(CorruptLogError, match=str(tmp_path / "link")):
                call("link")


def test_directory_that_fails_to_open_leaves_nothing_open(tmp_path: Path) -> None:
    memory = MemoryFiles()
    memory.make_directories("/one")
    with pytest.raises(OSError, match="Input/output"):
        Directory.open(FaultyFiles("fstat", inner=memory), "/one")
    assert memory.open_paths() == []
    with pytest.raises(FileNotFoundError):
        Directory.open(REAL, str(tmp_path / "none"))


def test_lock_is_let_go_although_a_forked_child_has_a_copy_of_the_directory(tmp_path: Path) -> None:
    with Directory.open(REAL, str(tmp_path)) as opened:
        opened.lock_for_a_moment("nobody", advice="")
        copy = os.dup(opened.fd)
    with Directory.open(REAL, str(tmp_path)) as another:
        assert REAL.try_lock(another.fd)
    os.close(copy)


def test_lock_that_an_interrupt_has_kept_from_its_end_goes_with_its_directory(tmp_path: Path) -> None:
    opened = Directory.open(REAL, str(tmp_path))
    opened.lock_for_a_moment("nobody", advice="")
    copy, number = os.dup(opened.fd), opened.fd  # as a child has it that was forked meanwhile
    del opened
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    with Directory.open(REAL, str(tmp_path)) as another:
        assert REAL.try_lock(another.fd)
    os.close(copy)


def test_calls_in_an_open_directory_are_recorded_with_whole_paths() -> None:
    memory = MemoryFiles()
    files = RecordingFiles(memory)
    files.make_directories("/one")
    with Directory.open(files, "/one") as opened:
        files.calls.clear()
        opened.write_new("a", b"1", 0o600)
        opened.rename("a", "b")
        opened.exists("b")
        opened.link("b", "c")
        opened.unlink("b")
    calls = [(call.name, call.path) for call in files.calls]
    assert calls == [
        ("create", "/one/a"), ("fstat", "/one/a"), ("fchmod", "/one/a"), ("pwritev", "/one/a"), ("datasync", "/one/a"),
        ("close", "/one/a"), ("rename", "/one/a"), ("lstat", "/one/b"), ("link", "/one/b"), ("unlink", "/one/b"),
        ("close", "/one"),
    ]  # fmt: skip
    assert files.calls[6].arguments == ("/one/b",) and files.calls[8].arguments == ("/one/c",)
