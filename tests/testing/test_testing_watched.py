"""Watched files: every call is seen once, and a fault is the one that was asked for."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest

from loglib import LogError, testing
from loglib.testing import (
    CHANGES,
    Call,
    CrashFS,
    DyingFiles,
    FaultyFiles,
    FullDisk,
    Killed,
    MemoryFiles,
    RecordingFiles,
    ShortWrites,
    UnsyncedFiles,
    WatchedFiles,
)


def work(files: MemoryFiles | WatchedFiles) -> list[bytes | None]:
    with testing.open_topic("/topic", files=files) as topic:
        topic.append(b"x" * 100, sync=True)
        return [record.value for record in topic.read()]


def test_calls_are_recorded_with_the_file_they_are_about() -> None:
    files = RecordingFiles(MemoryFiles())
    fd = files.create("/new", 0o600)
    files.write_all(fd, [b"content"], 5)
    assert files.pread(fd, 4, 7) == b"nten"
    files.rename("/new", "/renamed")
    files.datasync(fd)
    files.close(fd)
    files.sync_directory("/")
    files.link("/renamed", "/linked")
    assert files.named() == [
        ("create", "new"), ("fstat", "new"), ("fchmod", "new"), ("pwritev", "new"), ("pread", "new"), ("rename", "new"),
        ("datasync", "renamed"), ("close", "renamed"), ("open_directory", ""), ("fsync", ""), ("close", ""),
        ("link", "renamed"),
    ]  # fmt: skip
    assert files.calls[3] == Call("pwritev", "/new", ([b"content"], 5))
    assert files.calls[5].arguments == ("/renamed",) and files.calls[-1].arguments == ("/linked",)
    assert files.bytes_read == {"new": 4} and files.count("pread", "rename") == 2
    assert files.named("open_directory", "datasync") == [("datasync", "renamed"), ("open_directory", "")]


def test_recorded_changes_are_those_that_a_crash_file_system_sees() -> None:
    fs = CrashFS()
    files = RecordingFiles(fs)
    work(files)
    changes = [call for call in files.calls if call.name in CHANGES]
    made = [call for call in changes if not (call.name == "create" and call.file == "lock")]
    names = {"write": "pwritev", "truncate": "ftruncate"}
    expected = [
        operation
        for operation in fs.operations
        if not (operation.name == "create" and operation.path.endswith("/lock"))
    ]
    assert [call.path for call in made] == [operation.path for operation in expected]
    for call, operation in zip(made, expected, strict=True):
        assert names.get(operation.name, operation.name) in (call.name, "sync")


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EMFILE])
def test_each_call_can_be_made_to_fail(error: int) -> None:
    counter = FaultyFiles(at=1 << 30, inner=MemoryFiles())
    work(counter)
    assert counter.failed == 0
    for at in range(1, counter.seen + 1):
        inner = MemoryFiles()
        files = FaultyFiles(at=at, error=error, inner=inner)
        with suppress(LogError, OSError):
            assert work(files) == [b"x" * 100]
        assert files.failed == 1
        assert inner.open_paths() == [], f"after call {at}"
        files.armed = False
        assert work(files)[-1] == b"x" * 100


def test_faults_are_of_the_calls_named_and_from_then_on_if_told() -> None:
    files = FaultyFiles("pread", "close", at=2, every=True, inner=MemoryFiles())
    fd = files.create("/file", 0o600)
    assert files.pread(fd, 1, 0) == b""
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output") as raised:
            files.pread(fd, 1, 0)
        assert raised.value.filename == "/file"
    with pytest.raises(OSError, match="Input/output"):
        files.close(fd)
    assert (files.seen, files.failed) == (4, 3)
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.inner.close(fd)  # it is closed, whatever was answered


def test_short_writes_are_whole_in_the_end() -> None:
    inner = MemoryFiles()
    assert work(ShortWrites(3, inner)) == [b"x" * 100]


def test_full_disk_takes_what_fits() -> None:
    files = FullDisk(10, MemoryFiles())
    fd = files.create("/file", 0o600)
    with pytest.raises(OSError) as raised:
        files.write_all(fd, [b"x" * 8, b"y" * 8], 0)
    assert raised.value.errno == errno.ENOSPC
    assert files.pread(fd, 100, 0) == b"xxxxxxxxyy"


def test_dead_process_does_nothing_more() -> None:
    inner = MemoryFiles()
    files = DyingFiles(3, inner)
    fd = files.create("/file", 0o600)
    files.write_all(fd, [b"x"], 0)
    for call in (lambda: files.datasync(fd), lambda: files.unlink("/file"), lambda: files.exists("/file")):
        with pytest.raises(Killed):
            call()
    files.close(fd)
    assert inner.tree() == {"/file": b"x"}


def test_unsynced_files_still_say_what_is_no_file(tmp_path: Path) -> None:
    files = UnsyncedFiles()
    fd = files.create(str(tmp_path / "file"), 0o600)
    files.datasync(fd)
    files.close(fd)
    files.sync_directory(str(tmp_path))
    with pytest.raises(OSError):
        files.datasync(fd)


def test_watched_real_files_are_the_real_ones(tmp_path: Path) -> None:
    files = WatchedFiles()
    assert files.real and not WatchedFiles(MemoryFiles()).real
    with testing.open_topic(tmp_path / "topic", files=files) as topic:
        topic.append(b"x", sync=True)
    assert os.path.exists(tmp_path / "topic" / "topic.json")
