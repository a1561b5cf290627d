"""Reading objects: by ranges, several of them under way, and nothing else."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import end_with
from pyarrow import fs

from loglib.config.uri import local_path
from loglib.offload.object_files import _THREADS, Ahead, ObjectFiles, _pool
from loglib.offload.s3 import _client
from loglib.offload.storage import LOCAL, storage_of
from loglib.system.files import REAL


class SlowFile:
    """An object of which each range takes until the others were asked for, too."""

    def __init__(self, content: bytes, parties: int) -> None:
        self.content = content
        self.asked: list[tuple[int, int]] = []
        self.barrier = threading.Barrier(parties, timeout=10)

    def size(self) -> int:
        return len(self.content)

    def close(self) -> None: ...

    def read_at(self, size_bytes: int, position: int) -> bytes:
        self.asked.append((position, size_bytes))
        if len(self.asked) <= self.barrier.parties:
            self.barrier.wait()
        return self.content[position : position + size_bytes]


def test_four_ranges_are_under_way_at_once() -> None:
    file = SlowFile(os.urandom(16 << 20), parties=4)
    ahead = Ahead(file, until=15 << 20)  # windows of 1, 2, 4 and 8 MiB
    assert ahead.read(1 << 20, 0) == file.content[: 1 << 20]
    assert sorted(file.asked) == [(0, 1 << 20), (1 << 20, 2 << 20), (3 << 20, 4 << 20), (7 << 20, 8 << 20)]
    for start in range(1 << 20, 15 << 20, 700_001):
        assert ahead.read(700_001, start)[:9] == file.content[start : start + 9]
    assert len(file.asked) == 5  # the last one is for the bytes beyond `until`


def test_any_order_of_reads_gives_the_bytes() -> None:
    file = SlowFile(os.urandom(3 << 20), parties=1)
    ahead = Ahead(file, until=2 << 20)
    for position, size in ((0, 10), (70_000, 65_536), (5, 300_000), (200_000, 300_000), (1 << 20, 9), (100, 1 << 20)):
        assert ahead.read(size, position) == file.content[position : position + size]
    assert ahead.read(1 << 20, (3 << 20) - 5) == file.content[-5:]
    assert ahead.read(5, 3 << 20) == b""
    for position in range(0, 3 << 20, 100_000):
        assert ahead.read(5, position) == file.content[position : position + 5]
    assert len(ahead._blocks) <= 16


def test_failed_request_is_made_again() -> None:
    class Failing(SlowFile):
        fails = True

        def read_at(self, size_bytes: int, position: int) -> bytes:
            if self.fails:
                raise OSError(errno.EIO, "the connection was closed")
            return super().read_at(size_bytes, position)

    file = Failing(bytes(2 << 20), parties=1)
    ahead = Ahead(file, until=2 << 20)
    with pytest.raises(OSError, match="the connection was closed"):
        ahead.read(1 << 20, 0)
    file.fails = False
    assert ahead.read(1 << 20, 0) == bytes(1 << 20)


class OneByte:
    """An object of which somebody reads one byte after the other, in turn with others."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def size(self) -> int:
        return 64 << 20

    def close(self) -> None: ...

    def read_at(self, size_bytes: int, position: int) -> bytes:
        self.asked.append(size_bytes)
        return bytes(size_bytes)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_reads_in_threads_of_its_own() -> None:
    # The first object that this process reads may be read in a thread of Arrow, where coverage sees nothing: so the
    # threads are made here once more.
    _pool.forget()
    all_threads = threading.Barrier(_THREADS, timeout=10)
    list(_pool().map(lambda _: all_threads.wait(), range(_THREADS)))
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # the parent's threads are not here: to wait for them would never end
        end_with(lambda: Ahead(OneByte(), until=2 << 20).read(1 << 20, 0))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("room", [1 << 20, 4 << 20])
def test_who_reads_many_objects_has_little_of_each(room: int) -> None:
    file = OneByte()
    ahead = Ahead(file, until=64 << 20, eager=False, room=lambda: room)
    ahead.read(1 << 20, 0)
    assert file.asked == [1 << 20], "the first read asks for no more than it wants"
    for position in range(1 << 20, 40 << 20, 1 << 20):
        ahead.read(1 << 20, position)
        assert ahead._next - position - (1 << 20) <= 2 * room
    assert max(file.asked) == room


def test_objects_are_read_and_not_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    files = ObjectFiles(fs.LocalFileSystem(), "x://root", str(tmp_path))
    number = files.open_read("x://root/a")
    assert (files.size(number), files.read_at(number, 99, 3)) == (7, b"tent")
    files.close(number)
    assert files.stat("x://root/a").st_size == files.lstat("x://root/a").st_size == 7
    assert files.listdir("x://root") == ["a"] and files.is_directory("x://root")
    changes: list[Callable[[], object]] = [
        lambda: files.create("x://root/b", 0o600),
        lambda: files.mkdir("x://root/b"),
        lambda: files.unlink("x://root/a"),
        lambda: files.rename("x://root/a", "x://root/b"),
    ]
    for change in changes:
        with pytest.raises(OSError, match="a copy in an object store is only read"):
            change()
    with pytest.raises(FileNotFoundError):
        files.lstat("x://root/b")
    assert os.listdir(tmp_path) == ["a"]


def test_storages_of_paths_and_uris() -> None:
    assert storage_of("/data/x") == (LOCAL, "/data/x") and LOCAL.files() is REAL
    storage, shown = storage_of("s3a://key:secret@bucket/logs/x/?region=us-east-1")
    assert shown == storage.root == "s3://bucket/logs/x" and "secret" not in repr(storage)
    assert storage.uri.startswith("s3://key:secret@") and local_path("file:///a%20b") == "/a b"


@pytest.mark.parametrize("uri", ["s3://key:se/cret@bucket/x", "s3a://key:se?cret@bucket/x", "S3://key:se#cret@bucket/x"])
def test_secret_that_is_not_escaped_is_refused_and_not_shown(uri: str) -> None:
    with pytest.raises(ValueError, match="in credentials write / as %2F") as caught:
        storage_of(uri)
    assert "cret" not in str(caught.value)


def test_uri_with_a_fragment_is_refused() -> None:
    with pytest.raises(ValueError, match="write it as %23"):
        storage_of("s3://bucket/a#b?region=eu-central-1")


def test_schemes_have_no_case() -> None:
    assert storage_of("S3://bucket/x?region=eu-central-1") == storage_of("s3n://bucket/x?region=eu-central-1")


@pytest.mark.parametrize("path", ["bucket/a/../b", "bucket/.", "bucket//a", ""])
def test_key_that_stores_and_clients_write_in_several_ways_is_refused(path: str) -> None:
    storage, _ = storage_of(f"s3://{path}?region=eu-central-1")
    with pytest.raises(ValueError, match="has an empty part, or one called"):
        storage.files()


def test_a_client_of_aws_itself_needs_no_endpoint() -> None:
    client = _client("s3://bucket/x?region=eu-central-1", 1)
    assert "eu-central-1.amazonaws.com" in client.meta.endpoint_url
    client.close()


def test_the_last_small_reads_are_kept_and_older_ones_are_read_again() -> None:
    file = OneByte()
    ahead = Ahead(file, until=None)
    for block in range(20):
        ahead.read(1, block * 65536)
    assert file.asked == [65536] * 20
    ahead.read(1, 19 * 65536)
    assert len(file.asked) == 20
    ahead.read(1, 0)
    assert len(file.asked) == 21
