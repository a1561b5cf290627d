"""Archiving on disks that fail: what does not count is thrown away, and the next run goes on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import archived_topics
import pytest
from archived_topics import newest, offsets, parquet_files, sealed

from loglib import CorruptLogError, LogError, Topic, testing
from loglib.offload import archive, read_archive
from loglib.system.files import REAL, Files
from loglib.testing import FaultyFiles, FullDisk, RecordingFiles, ShortWrites

Open = Callable[..., Topic]

to = archived_topics.to


def test_a_committed_file_is_synced_and_so_is_its_name(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    sealed(topic)
    topic.close()
    files = RecordingFiles()
    with testing.open_topic(path, files=files, mode="r") as topic:
        files.calls.clear()
        archive(topic, to)
    changes = files.named("pwritev", "datasync", "drop_cached", "link", "unlink", "fsync")
    names = [call for call, name in changes if name.endswith((".tmp", ".parquet", "0000")) and call != "pwritev"]
    assert names[:5] == ["datasync", "drop_cached", "link", "unlink", "fsync"]
    last = [call for call, _ in changes[-6:]]
    assert last == ["datasync", "link", "unlink", *["fsync"] * 3], "the manifest, then its name; and two looks"


def failing(path: Path, to: Path, files: Files) -> None:
    with testing.open_topic(path, files=files, mode="r") as reader:
        if isinstance(files, FaultyFiles):
            files.armed = True
        try:
            archive(reader, to)
        finally:
            if isinstance(files, FaultyFiles):
                files.armed = False


CALLS = (
    "open_read", "open_directory", "create", "pwritev", "datasync", "fsync", "link", "unlink", "mkdir", "chmod",
    "fchmod", "pread", "fstat", "flock",
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_loses_nothing_and_the_next_run_goes_on(
    open_topic: Open, path: Path, to: Path, call: str
) -> None:
    topic = open_topic()
    sealed(topic, segments=2)
    counting = FaultyFiles(call, at=1 << 60, armed=False)
    failing(path, to.with_name("counting"), counting)
    assert counting.seen
    for at in range(1, counting.seen + 1):
        faulty = FaultyFiles(call, at=at, armed=False)
        with suppress(OSError, LogError):
            failing(path, to, faulty)
            # What reads the log may try again, and policies that cannot be read stay as they were.
            assert call in ("open_read", "pread", "fstat")
        assert faulty.failed == 1
        found = newest(REAL, str(to))
        assert found is None or found.rows == 20
        archive(topic, to)
        assert offsets(read_archive(to).read_all()) == offsets(topic.arrow().read_all())
        os.rename(to, to.with_name(f"{call}{at}"))


def test_a_full_disk_is_an_error_and_leaves_nothing_half(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    sealed(topic)
    for room in (0, 100, 2000):
        with pytest.raises(OSError) as caught:
            failing(path, to, FullDisk(room))
        assert caught.value.errno == errno.ENOSPC
        assert parquet_files(to) == [] and newest(REAL, str(to)) is None
    archive(topic, to)
    assert read_archive(to).read_all().num_rows == 30


def test_short_writes_are_continued(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    sealed(topic)
    failing(path, to, ShortWrites(1000))
    assert offsets(read_archive(to).read_all()) == offsets(topic.arrow().read_all())


class Lying(RecordingFiles):
    """A disk that returns other bytes than were written to the unfinished file."""

    def pread(self, fd: int, size: int, position: int) -> bytes:
        data = self.inner.pread(fd, size, position)
        at = 200 - position
        if self._paths.get(fd, "").endswith(".tmp") and 0 <= at < len(data):
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return data


def test_a_file_is_read_back_before_it_counts(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    sealed(topic)
    with pytest.raises(CorruptLogError, match="differ from those that were written"):
        failing(path, to, Lying())
    assert parquet_files(to) == [] and newest(REAL, str(to)) is None


def test_a_file_that_differs_from_the_log_does_not_count(
    open_topic: Open, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loglib.offload import parquet

    topic = open_topic()
    sealed(topic)
    write = parquet.write

    def later(files: Files, fd: int, name: str, records: Any, **rest: Any) -> Any:
        return write(files, fd, name, (each.slice(first, each.num_rows - first - less) for each in records), **rest)

    monkeypatch.setattr(parquet, "write", later)
    for first, less in ((1, 0), (9, 0), (0, 1)):  # noqa: B007  `later` uses them
        with pytest.raises(CorruptLogError, match="differ from the log's"):
            archive(topic, to)
    assert parquet_files(to) == [] and newest(REAL, str(to)) is None
