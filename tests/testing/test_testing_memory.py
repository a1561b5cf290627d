"""MemoryFiles does what Linux does: the same calls on both, with the same answers and the same errors."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from conftest import sound
from loglib import StorageFullError, testing
from loglib.system.files import REAL, Files
from loglib.testing import MemoryFiles

NAMES = ["a", "b", "d", "d/a", "d/e", "d/e/a", "missing/a", "a/below"]
OPENINGS = [
    os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDONLY | os.O_DIRECTORY,
]  # fmt: skip


class Twins:
    """The same file system twice, and the same calls to both."""

    def __init__(self, directory: Path) -> None:
        self.memory = MemoryFiles()
        self.memory.make_directories(str(directory))
        self.directory = directory
        self.open: list[tuple[int, int]] = []  # descriptors of the same file, here and there

    def call(self, what: Callable[[Files, int], Any], number: int = 0) -> Any:
        """What both answer, which must be the same; None for an error."""
        fds = self.open[number] if self.open else (1 << 20, 1 << 20)
        answers = [_answer(what, files, fd) for files, fd in zip((self.memory, REAL), fds, strict=True)]
        assert answers[0] == answers[1]
        return answers[0]

    def open_both(self, path: str, flags: int) -> None:
        fds = []
        answers = []
        for files in (self.memory, REAL):
            try:
                fds.append(files.open(path, flags, 0o600))
                answers.append(0)
            except OSError as error:
                answers.append(error.errno or -1)
        assert answers[0] == answers[1], (path, flags)
        if len(fds) == 2:
            self.open.append((fds[0], fds[1]))

    def close(self) -> None:
        for ours, theirs in self.open:
            self.memory.close(ours)
            REAL.close(theirs)


def _answer(what: Callable[[Files, int], Any], files: Files, fd: int) -> Any:
    try:
        return what(files, fd)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def kind_and_size(found: os.stat_result) -> tuple[int, int, bool, int]:
    regular = stat.S_ISREG(found.st_mode)
    mode, size = (stat.S_IMODE(found.st_mode), found.st_size) if regular else (0, 0)
    return mode, size, regular, found.st_nlink if regular else found.st_nlink > 0


@pytest.mark.parametrize("seed", range(40))
def test_random_calls_are_answered_as_by_the_kernel(tmp_path: Path, seed: int) -> None:
    choose = Random(seed)
    both = Twins(tmp_path)
    for _ in range(150):
        path, other = (f"{tmp_path}/{choose.choice(NAMES)}" for _ in range(2))
        number = choose.randrange(len(both.open)) if both.open else 0
        size, position = choose.randrange(50), choose.choice((0, 3, 100))
        data = choose.randbytes(choose.randrange(20))
        match choose.randrange(15):
            case 0 | 1:
                both.open_both(path, choose.choice(OPENINGS))
            case 2 | 3:
                both.call(lambda files, fd: files.pwritev(fd, [data, b"", data], position), number)  # noqa: B023
            case 4:
                both.call(lambda files, fd: files.pread(fd, size, position), number)  # noqa: B023
            case 5:
                both.call(lambda files, fd: files.ftruncate(fd, size), number)  # noqa: B023
            case 6:
                both.call(lambda files, _: files.rename(path, other))  # noqa: B023
            case 7:
                both.call(lambda files, _: files.unlink(path))  # noqa: B023
            case 8:
                both.call(lambda files, _: files.mkdir(path))  # noqa: B023
            case 9:
                both.call(lambda files, _: files.rmdir(path))  # noqa: B023
            case 10:
                both.call(lambda files, _: sorted(files.listdir(path)))  # noqa: B023
            case 11:
                both.call(lambda files, _: kind_and_size(files.stat(path)))  # noqa: B023
            case 12:
                both.call(lambda files, fd: kind_and_size(files.fstat(fd)), number)
            case 13:
                both.call(lambda files, _: files.link(path, other))  # noqa: B023
            case _:
                both.call(lambda files, fd: files.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB), number)
    both.close()
    check_same(both, tmp_path)


@pytest.mark.parametrize(
    "path", ["d/../b", "d/e/../../b", "d/e/..", "d/..", "d/e/../b", "missing/../b", "b/../b", "d/../d/b", "d/../d/../b"]
)
def test_path_that_leads_upwards_is_followed_as_by_the_kernel(tmp_path: Path, path: str) -> None:
    """The store of a topic's transactions is named by such a path: without it nothing held was ever shown."""
    both = Twins(tmp_path)
    for name in ("d", "d/e"):
        both.call(lambda files, _: files.mkdir(f"{tmp_path}/{name}"))  # noqa: B023
    both.open_both(f"{tmp_path}/b", os.O_RDWR | os.O_CREAT)
    for _ in range(2):  # the second time from the cache
        both.call(lambda files, _: kind_and_size(files.stat(f"{tmp_path}/{path}"))[2])
        both.call(lambda files, _: sorted(files.listdir(f"{tmp_path}/{path}")))
    both.close()


@pytest.mark.parametrize("seed", range(40))
def test_random_calls_in_open_directories_are_answered_as_by_the_kernel(tmp_path: Path, seed: int) -> None:
    """Directories that are moved, removed, or another in their place, while work goes on in them."""
    choose = Random(f"open directories {seed}")
    both = Twins(tmp_path)
    names = ["a", "b", "d", "e"]
    both.open_both(str(tmp_path), os.O_RDONLY)
    for _ in range(150):
        path, other = (f"{tmp_path}/{choose.choice(NAMES)}" for _ in range(2))
        name, target = choose.choice(names), choose.choice(names)
        number = choose.choice((0, choose.randrange(len(both.open))))
        match choose.randrange(15):
            case 0:
                both.open_both(path, os.O_RDONLY | os.O_DIRECTORY)
            case 1:
                both.call(lambda files, _: files.mkdir(path))  # noqa: B023
            case 2:
                both.call(lambda files, _: files.rename(path, other))  # noqa: B023
            case 3:
                both.call(lambda files, fd: files.mkdir(name, 0o700, dir_fd=fd), number)  # noqa: B023
            case 4:
                both.call(lambda files, fd: files.rmdir(name, dir_fd=fd), number)  # noqa: B023
            case 5:
                both.call(lambda files, fd: files.unlink(name, dir_fd=fd), number)  # noqa: B023
            case 6 | 7:
                flags = choose.choice(OPENINGS)
                both.call(
                    lambda files, fd: files.close(files.open(name, flags, 0o600, dir_fd=fd)),  # noqa: B023
                    number,
                )
            case 8:
                both.call(
                    lambda files, fd: files.rename(name, target, src_dir_fd=fd, dst_dir_fd=fd),  # noqa: B023
                    number,
                )
            case 9:
                both.call(lambda files, fd: files.rename(name, other, src_dir_fd=fd), number)  # noqa: B023
            case 10:
                both.call(lambda files, fd: sorted(files.listdir(fd)), number)
            case 11:
                both.call(lambda files, fd: kind_and_size(files.lstat(name, dir_fd=fd)), number)  # noqa: B023
            case 12:
                both.call(
                    lambda files, fd: files.link(name, target, src_dir_fd=fd, dst_dir_fd=fd),  # noqa: B023
                    number,
                )
            case 13:
                both.call(lambda files, fd: files.link(path, name, dst_dir_fd=fd), number)  # noqa: B023
            case _:
                both.call(lambda files, fd: kind_and_size(files.fstat(fd)), number)
    both.close()
    check_same(both, tmp_path)


def test_only_one_name_is_looked_up_in_an_open_directory() -> None:
    files = MemoryFiles()
    files.make_directories("/a/b")
    fd = files.open_directory("/a")
    assert files.exists("/a/b", dir_fd=fd) and files.lstat("/a/b", dir_fd=fd) == files.lstat("/a/b")
    for path in ("", ".", "b/c"):
        with pytest.raises(OSError, match="Invalid"):
            files.lstat(path, dir_fd=fd)


def check_same(both: Twins, tmp_path: Path) -> None:
    found = {str(each.relative_to(tmp_path)): each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    ours = {str(Path(path).relative_to(tmp_path)): content for path, content in both.memory.tree().items()}
    assert ours == found


def test_removed_file_is_readable_while_it_is_open() -> None:
    files = MemoryFiles()
    fd = files.create("/file", 0o600)
    files.write_all(fd, [b"content"], 0)
    files.unlink("/file")
    assert files.pread(fd, 100, 0) == b"content" and not files.exists("/file")
    files.close(fd)


def test_file_with_two_names_takes_its_space_once() -> None:
    files = MemoryFiles(capacity=10_000)
    files.write_new("/one", b"content", 0o600)
    files.link("/one", "/other")
    with pytest.raises(FileExistsError):
        files.link("/one", "/other")
    assert files.used == 7 and files.facts("/one").st_nlink == 2
    files.unlink("/one")
    assert files.used == 7 and files.read_whole("/other", 10) == b"content" and files.facts("/other").st_nlink == 1
    files.write_new("/new", b"", 0o600)
    files.rename("/new", "/other")
    assert files.used == 0


def test_lock_goes_with_its_holder() -> None:
    files = MemoryFiles()
    one, other = files.create("/lock", 0o600), files.open_write("/lock")
    assert files.try_lock(one) and not files.try_lock(other)
    files.unlock(other)
    assert not files.try_lock(other), "who does not have it cannot let go of it"
    files.unlock(one)
    assert files.try_lock(other)
    files.kill()
    assert files.open_paths() == []
    assert files.try_lock(files.open_write("/lock"))
    files.close(one)  # of the process that is gone


@pytest.mark.parametrize(
    "call",
    [
        lambda files: files.close(1 << 30),
        lambda files: files.pread(5, 1, 0),
        lambda files: files.pwritev(files.open_read("/file"), [b"x"], 0),
        lambda files: files.ftruncate(5, 0),
        lambda files: files.drop_cached(5, 0, 1),
    ],
)
def test_descriptor_that_is_none_is_refused(call: Callable[[MemoryFiles], Any]) -> None:
    files = MemoryFiles()
    files.write_new("/file", b"x", 0o600)
    with pytest.raises(OSError) as raised:
        call(files)
    assert raised.value.errno == errno.EBADF


def test_capacity_makes_writes_short_and_then_fail() -> None:
    files = MemoryFiles(capacity=10_000)
    fd = files.create("/file", 0o600)
    assert files.pwritev(fd, [b"x" * 9_000], 0) == 9_000
    assert files.pwritev(fd, [b"y" * 9_000], 9_000) == 1_000
    for write in (lambda: files.pwritev(fd, [b"z"], 10_000), lambda: files.ftruncate(fd, 10_001)):
        with pytest.raises(OSError) as raised:
            write()
        assert raised.value.errno == errno.ENOSPC
    assert files.pwritev(fd, [b"z" * 10_000], 0) == 10_000, "what is there may be overwritten"
    assert files.free_space("/") == (0, 8192)
    files.write_new("/other", b"", 0o600)
    files.ftruncate(fd, 5_000)
    assert files.free_space("/")[0] == 4096
    files.rename("/other", "/file")
    assert files.free_space("/")[0] == 8192 and files.used == 0


def test_topic_on_a_full_disk_says_so_and_goes_on_when_there_is_room() -> None:
    files = MemoryFiles(capacity=50_000)
    with testing.open_topic("/topic", files=files) as topic:
        with pytest.raises(StorageFullError):
            for _ in range(100):
                topic.append(b"x" * 1000, sync=True)
        kept = len(list(topic.read()))
        files.capacity = 100_000
        topic.append(b"after", sync=True)
        assert [record.value for record in topic.read()] == [*[b"x" * 1000] * kept, b"after"]


def test_streams_are_those_of_the_system_or_files_in_memory(tmp_path: Path) -> None:
    files = MemoryFiles()
    files.write_new("/file", b"0123456789", 0o600)
    source, target = files.open_read("/file"), files.create("/copy", 0o600)
    files.send_range(target, source, 2, 5)
    files.write_stream(target, b"!")
    copy = files.open_read("/copy")
    assert (files.read(copy, 3), files.read(copy, 100), files.read(copy, 1)) == (b"234", b"56!", b"")
    out, into = os.pipe()
    files.send_range(into, source, 0, 3)
    files.wait_readable(out)
    assert files.read(out, 10) == b"012"
    os.close(out)
    os.close(into)


def test_directories_that_moved_are_found_where_they_are() -> None:
    files = MemoryFiles()
    files.make_directories("/a/b")
    files.write_new("/a/b/file", b"x", 0o600)
    fd = files.open_read("/a/b/file")
    files.rename("/a", "/c")
    assert files.read_whole("/c/b/file", 10) == b"x" and not files.exists("/a/b/file")
    files.rename("/c/b/file", "/c/b/renamed")
    assert files.open_paths() == ["/c/b/renamed"]
    files.close(fd)
    files.make_directories("/d")
    with pytest.raises(OSError) as raised:
        files.rename("/d", "/c")
    assert raised.value.errno == errno.ENOTEMPTY
    files.rmdir("/d")
    files.remove_tree("/c")
    assert files.listdir("/") == []
    files.remove_tree("/nothing there")


def test_modes_are_kept() -> None:
    files = MemoryFiles()
    files.make_directory("/d", 0o640)
    files.write_new("/d/file", b"", 0o604)
    assert [stat.S_IMODE(files.stat(path).st_mode) for path in ("/d", "/d/file")] == [0o750, 0o604]


def test_many_threads_write_one_topic() -> None:
    files = MemoryFiles()
    with testing.open_topic("/topic", partitions=2, files=files) as topic:

        def run(name: bytes) -> None:
            for number in range(100):
                topic.append(b"%d" % number, key=name, sync=number % 10 == 0)

        threads = [threading.Thread(target=run, args=(b"%d" % each,)) for each in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        topic.flush()
        assert len(list(topic.read())) == 800
        sound(topic.partition(0))


class Collecting(MemoryFiles):
    """The collector comes by in each call that changes something."""

    def _changed(self, *_: Any, **__: Any) -> None:
        gc.collect()


@pytest.mark.timeout(20)
def test_collector_that_comes_by_in_a_call_waited_for_that_call_for_ever() -> None:
    files = Collecting()

    class Forgotten:
        def __init__(self, path: str) -> None:
            self.fd = files.create(path, 0o644)
            self.itself = self

        def __del__(self) -> None:
            files.close(self.fd)

    Forgotten("/forgotten")
    assert files.open_paths() == ["/forgotten"]
    files.close(files.create("/other", 0o644))
    assert files.open_paths() == []
