"""Reading writes nothing, needs no more than the right to read, and leaves no file open."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import (
    NOW,
    SECOND,
    fill,
    limit_of_files,
    needs_proc,
    needs_root,
    open_files,
    opened_since,
    run_python,
    settled_files,
    sound,
    tree,
    values_of,
)
from loglib import ReadOnlyError, Topic, testing
from loglib.config.times import to_datetime
from loglib.testing import RecordingFiles, UnsyncedFiles

Open = Callable[..., Topic]


# --- writes nothing ------------------------------------------------------------------------------


def test_reading_writes_nothing(open_topic: Open, path: Path) -> None:
    with open_topic(segment_bytes=4096, partitions=2) as topic:
        topic.append_many([b"x" * 100] * 200, keys=[b"%d" % n for n in range(200)])
    before = tree(path), {each: each.stat().st_mtime_ns for each in path.rglob("*")}
    files = RecordingFiles()
    with testing.open_topic(path, mode="r", files=files) as topic:
        assert len(values_of(topic)) == 200
        list(topic.follow("begin", timeout=0.01))
        sound(topic.partition(0))
        topic.retain(dry_run=True)
        for refused in (
            lambda: topic.append(b"x"), lambda: topic.append_many([b"x"]), topic.flush, topic.retain,
            lambda: topic.append(b"x", key=b"k"), topic.partition(0).roll, lambda: topic.partition(0).append(b"x"),
        ):  # fmt: skip
            with pytest.raises(ReadOnlyError):
                refused()
    assert (
        files.count("create", "open_write", "pwritev", "ftruncate", "rename", "unlink", "datasync", "flock") == 0
    )
    assert before == (tree(path), {each: each.stat().st_mtime_ns for each in path.rglob("*")})


@needs_root
def test_read_only_mount_can_be_read(open_topic: Open, path: Path, tmp_path: Path) -> None:
    with open_topic() as topic:
        fill(topic, 3)
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    import subprocess

    subprocess.run(["mount", "--bind", path, mounted], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", mounted], check=True)
        with Topic.open(mounted, mode="r") as topic:
            assert values_of(topic) == [b"0", b"1", b"2"]
            assert list(topic.follow(timeout=0.01)) == []
        with pytest.raises(OSError, match="Read-only"):
            Topic.open(mounted, create=True)
    finally:
        subprocess.run(["umount", mounted], check=True)


@needs_root
def test_another_user_may_read_what_permissions_allow(tmp_path: Path) -> None:
    path = tmp_path / "topic"
    for each in [tmp_path, *tmp_path.parents]:
        if each.stat().st_uid == 0 and len(each.parts) > 2:
            each.chmod(0o755)
    with Topic.open(path, create=True, permissions=0o644) as topic:
        topic.append(b"x")
    path.chmod(0o755)
    program = """
        import os, sys
        from loglib import Topic
        os.setuid(65534)
        with Topic.open(sys.argv[1], mode="r") as topic:
            print([r.value for r in topic.read()])
        try:
            Topic.open(sys.argv[1], create=True)
        except PermissionError as error:
            print("refused", error.filename is not None)
    """
    assert run_python(program, path) == "[b'x']\nrefused True\n"


# --- bytes ---------------------------------------------------------------------------------------


def test_large_batches_of_different_sizes_are_read_once(open_topic: Open, path: Path) -> None:
    """The header behind a batch, which is read with it, tells how much to read next."""
    sizes = [each << 10 for each in (900, 600, 1000, 700, 1300, 2400, 1500)]
    with open_topic(batch_bytes=4 << 20, files=UnsyncedFiles()) as topic:
        for size in sizes:
            topic.append(bytes(size), sync=True)
    read: list[int] = []

    class Counted(UnsyncedFiles):
        def pread(self, fd: int, size_bytes: int, position: int) -> bytes:
            read.append(size_bytes)
            return super().pread(fd, size_bytes, position)

    with testing.open_topic(path, mode="r", files=Counted()) as topic:
        reader = topic.read()
        read.clear()
        assert [len(value or b"") for batch in reader.batches() for value in batch.values] == sizes
    first_block = 1 << 20
    marks = 8192 * len(sizes)
    assert sum(read) < first_block + sum(sizes[1:]) + marks


# --- files ---------------------------------------------------------------------------------------


@needs_proc
def test_dropped_iterators_leak_no_file(open_topic: Open, path: Path) -> None:
    with open_topic(segment_bytes=4096, batch_records=10) as topic:
        fill(topic, 500)
    topic = open_topic(mode="r")
    assert topic.partition(0).high_watermark > 0  # and from now on its file is open
    before = settled_files()
    assert [each for each in before if each.startswith(str(path))]
    for _ in range(30):
        next(iter(topic.read()))
        next(topic.batches())
        topic.follow("begin", timeout=0).poll()
        topic.follow().poll(timeout=0.0001)
        topic.read(to_datetime(NOW + 100 * SECOND))
    assert not opened_since(before)
    topic.close()
    assert not [each for each in open_files() if each.startswith(str(path))]


@needs_proc
def test_running_out_of_files_is_a_clear_error_and_leaks_nothing(open_topic: Open, path: Path) -> None:
    with open_topic(segment_bytes=4096, partitions=2) as topic:
        topic.append_many([b"x" * 100] * 100, keys=[b"%d" % n for n in range(100)])
    before = settled_files()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        for spare in range(12):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit_of_files(spare), limits[1]))
            for use in (read_all, follow_briefly, open_for_writing):
                try:
                    use(path)
                except OSError as error:
                    assert error.errno == 24 or "Too many open files" in str(error)
                    taken.append(spare)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert not opened_since(before), f"with {spare} files to spare"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert taken, "the limit was never met"
    read_all(path)


def read_all(path: Path) -> None:
    with Topic.open(path, mode="r") as topic:
        assert len(values_of(topic)) == 100


def follow_briefly(path: Path) -> None:
    with Topic.open(path, mode="r") as topic:
        list(topic.follow(timeout=0.001))


def open_for_writing(path: Path) -> None:
    testing.open_topic(path, files=UnsyncedFiles()).close()
