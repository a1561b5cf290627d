"""Recovery that fails or dies itself: it is repeated with the same result, and an error of the disk is no torn tail."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crashed_logs import batch_ends, mark_of, write_crashed

from conftest import crash_copy, last_segment, records_of, tree
from loglib import LogError, StorageIOError, Topic, testing
from loglib.segment import HEADER_BYTES as SEGMENT_HEADER
from loglib.testing import Call, DyingFiles, FaultyFiles, Killed, UnsyncedFiles

Open = Callable[..., Topic]


# --- recovery that fails or dies itself --------------------------------------------------------------


def outcome(path: Path) -> tuple[list[Any], bytes]:
    """What a reader of the topic sees, and the bytes of its last segment."""
    return records_of(path), last_segment(path).read_bytes()


@pytest.mark.parametrize("lost_watermark", [False, True], ids=["watermark", "no watermark"])
def test_recovery_that_dies_anywhere_is_repeated_with_the_same_result(
    lost_watermark: bool, open_topic: Open, path: Path, tmp_path: Path
) -> None:
    crashed = write_crashed(open_topic, path, tmp_path / "crashed")
    with last_segment(crashed).open("ab") as file:
        file.write(b"torn" * 50)
    (crashed / "0000" / "00000000000000009999.log.tmp").write_bytes(b"rubbish")
    if lost_watermark:
        (crashed / "0000" / "watermark").unlink()
    once = crash_copy(crashed, tmp_path / "once")
    Topic.open(once, create=True).close()
    expected = outcome(once)
    at = 0
    while True:
        at += 1
        copy = crash_copy(crashed, tmp_path / "copy")
        files = DyingFiles(at)
        topic = None
        try:
            topic = testing.open_topic(copy, files=files)
            topic.close()
        except Killed:
            image = crash_copy(copy, tmp_path / "image")
        else:
            break
        finally:
            files.at = 1 << 30
            if topic is not None:
                topic.close()
        assert last_segment(image).read_bytes().startswith(expected[1])
        Topic.open(image, create=True).close()
        assert outcome(image) == expected, f"after dying before change {at}"
    assert at > 6


def test_any_failing_call_of_opening_is_an_error_and_leaks_nothing(
    open_topic: Open, path: Path, tmp_path: Path
) -> None:
    crashed = write_crashed(open_topic, path, tmp_path / "crashed")
    with last_segment(crashed).open("ab") as file:
        file.write(b"torn" * 50)
    once = crash_copy(crashed, tmp_path / "once")
    Topic.open(once, create=True).close()
    expected = outcome(once)

    class OfTheTopic(FaultyFiles):
        def before(self, call: Call) -> None:
            # In /proc the file system's kind is looked up. Both looks may fail: without the second one, `topic.json`
            # is read again.
            if not call.path.startswith("/proc") and (call.name, call.file) != ("lstat", "topic.json"):
                super().before(call)

    files = OfTheTopic(at=1)
    while True:
        copy = crash_copy(crashed, tmp_path / "copy")
        open_before = open_files_of(copy)
        try:
            testing.open_topic(copy, files=files).close()
        except (LogError, OSError) as error:
            assert os.strerror(errno.EIO) in str(error)
        else:
            assert not files.failed, f"call {files.at} failed unnoticed"
            break
        assert open_files_of(copy) == open_before, f"after call {files.at} failed"
        Topic.open(copy, create=True).close()
        assert outcome(copy) == expected, f"after call {files.at} failed"
        files = OfTheTopic(at=files.at + 1)
    assert files.at > 30


def open_files_of(path: Path) -> list[str]:
    from conftest import open_files

    return [each for each in open_files() if each.startswith(str(path))]


def test_read_error_during_recovery_is_no_torn_tail(open_topic: Open, path: Path, tmp_path: Path) -> None:
    crashed = write_crashed(open_topic, path, tmp_path / "crashed")
    before = tree(crashed)
    probe = FaultyFiles("pread", at=1 << 30)
    testing.open_topic(crash_copy(crashed, tmp_path / "probe"), files=probe).close()
    for at in range(1, probe.seen + 1):
        copy = crash_copy(crashed, tmp_path / "copy")
        with pytest.raises((StorageIOError, OSError)):
            testing.open_topic(copy, files=FaultyFiles("pread", at=at, every=True)).close()
        kept = tree(copy)
        assert all(kept[name].startswith(before[name]) for name in before if name.endswith(".log"))


# --- what it costs -----------------------------------------------------------------------------------


def test_bad_sector_under_a_stale_watermark_is_no_torn_tail(open_topic: Open, path: Path, tmp_path: Path) -> None:
    class BadSector(UnsyncedFiles):
        def pread(self, fd: int, size: int, position: int) -> bytes:
            if not os.readlink(f"/proc/self/fd/{fd}").endswith(".log"):
                return super().pread(fd, size, position)
            if position >= bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().pread(fd, min(size, bad - position), position)  # the kernel gives what it has

    crashed = write_crashed(open_topic, path, tmp_path / "crashed")
    bad = SEGMENT_HEADER + batch_ends(crashed, 0, mark_of(crashed).flushed_end + 1)[-1] + 40
    before = tree(crashed)
    with pytest.raises(StorageIOError):
        testing.open_topic(crashed, files=BadSector())
    assert tree(crashed) == before
