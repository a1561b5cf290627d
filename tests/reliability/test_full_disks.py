"""G6, disks and limits that refuse for real: full, out of files, read-only, another user's, or no disk at all.

The tests use small file systems in memory, ext4 on a loop device, and limits of the process. Each refusal must raise a
clear error and do no harm. Reading must continue wherever it can, and writing once the reason is gone.
"""

import os
import random
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from account import Account, by_value, failed, named, returned, settle, telling
from counts import count, need, scale
from disks import Disk, disk, fill, memory, mount, run, unmount
from processes import fork, wait

from conftest import QUIET, last_segment, open_files, opened_since, records_of, tree, values_of
from loglib import (
    CorruptLogError,
    FlushPolicy,
    LogError,
    OffsetRange,
    Retention,
    StorageFullError,
    StorageIOError,
    Topic,
    WriterFailedError,
)
from loglib.append.partitioner import by_crc32

pytestmark = pytest.mark.reliability

NOBODY = 65534
ROUNDS = 150


@pytest.fixture
def loop_disk(tmp_path: Path) -> Iterator[Disk]:
    with disk(tmp_path, "ext4") as made:
        yield made


@contextmanager
def small(tmp_path: Path, kind: str) -> Iterator[Path]:
    """A small file system, which is soon full."""
    if kind == "ext4":
        with disk(tmp_path, "ext4") as made:
            yield made.point
    else:
        with memory(tmp_path / "disk", "size=4m,nr_inodes=64") as point:
            yield point


def in_a_child(act: Callable[[], object]) -> None:
    """Do the action in a separate process, which may set limits and take another user's rights."""
    assert wait(fork(act)) == 0, "the child's error is above"


# --- no room ---------------------------------------------------------------------------------------


def use_up_files(directory: Path) -> list[Path]:
    """Make files until the file system has room for no more."""
    made: list[Path] = []
    with suppress(OSError):
        while True:
            path = directory / f"filler-{len(made)}"
            path.touch(exist_ok=False)
            made.append(path)
    return made


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_disk_that_is_full_now_and_then_loses_only_what_it_refuses(tmp_path: Path, kind: str) -> None:
    """One writer after another on a disk that fills and empties; each continues the log that the one before left."""
    chance = random.Random(kind)
    expected: list[bytes | None] = []
    refusals = 0
    accounts = [Account(known_by=by_value)]
    with small(tmp_path, kind) as point:
        path = point / "topic"
        topic = Topic.open(path, create=True, segment_bytes=64 << 10, **QUIET)
        for number in range(scale(ROUNDS)):
            fillers = [fill(point)] if chance.random() < 0.7 else use_up_files(point) if kind == "tmpfs" else []
            for _ in range(chance.randint(1, 6)):
                values: list[bytes | None] = [b"%d " % number + chance.randbytes(chance.choice((10, 3000, 40_000)))]
                values *= chance.randint(1, 3)
                try:
                    try:
                        returned(accounts, topic.append_many(values), values)
                    except (StorageFullError, WriterFailedError) as error:
                        failed(accounts, error, values)
                        raise
                    try:
                        topic.flush()
                    except (StorageFullError, WriterFailedError) as error:
                        named(accounts, error)
                        raise
                    expected += values
                except (StorageFullError, WriterFailedError) as error:
                    refusals += 1
                    if isinstance(error, WriterFailedError):  # ext4 may find no room during a sync
                        for filler in fillers:
                            filler.unlink(missing_ok=True)
                        expected += reopened_after_failure(topic, path, expected, values)
                        topic = Topic.open(path)
            assert values_of(topic) == expected, f"round {number}"
            settle(accounts, topic)
            for filler in fillers:
                filler.unlink(missing_ok=True)
            if chance.random() < 0.2:
                topic.close()
                topic = Topic.open(path)
            if len(topic.partition(0).segments) > 15:  # make room, as retention does
                base = topic.partition(0).segments[-8].base_offset
                dropped = len(list(topic.read("begin", base)))
                topic.partition(0)._access.writer().drop_before(base)
                expected = expected[dropped:]
        topic.close()
        assert [record.value for record in records_of(path)] == expected
    assert refusals and accounts[0].named, "the disk was never full"
    count("G6", refusals=refusals, lost=0, phantoms=0)
    count_accounts(accounts)


def test_every_record_is_readable_or_named_whatever_call_meets_the_full_disk(tmp_path: Path) -> None:
    """Single appends, bulk, keys, flush, roll and close over four partitions; a repeated append is in the log once."""
    chance = random.Random("books")
    accounts = [Account(known_by=by_value) for _ in range(4)]
    with memory(tmp_path / "disk", "size=4m") as point:
        path = point / "topic"
        topic = Topic.open(path, create=True, partitions=4, segment_bytes=64 << 10, batch_bytes=8 << 10, **QUIET)
        for number in range(scale(ROUNDS)):
            filler = fill(point) if chance.random() < 0.5 else None
            for step in range(chance.randint(1, 12)):
                size = chance.choice((0, 300, 9000))
                count_of = chance.choice((1, 1, 40))
                values = [b"%d/%d/%d " % (number, step, each) + bytes(size) for each in range(count_of)]
                with suppress(StorageFullError):
                    act_on(topic, chance, accounts, values)
            if filler is not None:
                filler.unlink()
            flush_all(topic, accounts)
            found = values_of(topic)
            assert len(set(found)) == len(found), "a record is in twice"
            settle(accounts, topic)
            for partition in topic.partitions:
                if len(partition.segments) > 5:
                    partition._access.writer().drop_before(partition.segments[-2].base_offset)
            if chance.random() < 0.3:
                filler = fill(point)
                for at in range(4):
                    with suppress(StorageFullError):
                        append_one(topic, accounts, b"at the end %d/%d" % (number, at), at)
                with suppress(StorageFullError), telling(accounts):
                    topic.close()
                filler.unlink()
                topic = Topic.open(path)
                settle(accounts, topic)
        topic.close()
    assert sum(account.named for account in accounts) > 10
    count_accounts(accounts)


def count_accounts(accounts: Sequence[Account]) -> None:
    count(
        "G14", accounted_records=sum(account.accounted for account in accounts),
        named_by_an_error=sum(account.named for account in accounts), untold=0,
    )  # fmt: skip


def flush_all(topic: Topic, accounts: Sequence[Account]) -> None:
    """Flush until no error is left to be raised."""
    told = True
    while told:
        told = False
        try:
            with telling(accounts):
                topic.flush()
        except StorageFullError:
            told = True


def append_one(topic: Topic, accounts: Sequence[Account], value: bytes, partition: int, *, sync: bool = False) -> None:
    try:
        offset = topic.append(value, partition=partition, sync=sync).offset
    except LogError as error:
        failed(accounts, error, [value])
        raise
    returned(accounts, [OffsetRange(partition, range(offset, offset + 1))], [value])


def act_on(topic: Topic, chance: random.Random, accounts: Sequence[Account], values: list[bytes]) -> None:
    """Append the records in some way, and append again those that are not in the log; or flush or roll."""
    way = chance.choice(("single", "single", "many", "keys", "flush", "roll"))
    partition = chance.randrange(4)
    if way == "single":
        append_one(topic, accounts, values[0], partition, sync=chance.random() < 0.2)
        return
    if way in ("flush", "roll"):
        with telling(accounts):
            topic.flush() if way == "flush" else topic.partition(partition).roll()
        return
    keys = [chance.choice((b"a", b"b", b"c")) for _ in values]
    try:
        append_many(topic, accounts, values, keys if way == "keys" else None, partition)
    except StorageFullError as error:
        left = error.not_appended
        again = [keys[index] for index in left] if way == "keys" else None
        append_many(topic, accounts, [values[index] for index in left], again, partition)


def append_many(
    topic: Topic, accounts: Sequence[Account], values: list[bytes], keys: list[bytes] | None, partition: int
) -> None:  # fmt: skip
    error: LogError | None = None
    try:
        ranges = topic.append_many(values, keys=keys, partition=None if keys else partition)
    except LogError as raised:
        error, ranges = raised, list(raised.appended)
    missing = set() if error is None else set(error.not_appended)
    inside = [index for index in range(len(values)) if index not in missing]
    for number in range(4):  # records of one partition stand in their order
        own = [values[index] for index in inside if (by_crc32(keys[index], 4) if keys else partition) == number]
        returned(accounts, [each for each in ranges if each.partition == number], own)
    if error is not None:
        named(accounts, error)
        raise error


def reopened_after_failure(
    topic: Topic, path: Path, expected: list[bytes | None], doubtful: list[bytes | None]
) -> list[bytes | None]:
    """Which of the records in doubt recovery has found."""
    with suppress(WriterFailedError):
        topic.close()
    with Topic.open(path, create=True) as again:
        found = values_of(again)
    assert found == (expected + doubtful)[: max(len(expected), len(found))]
    return found[len(expected) :]


def test_no_file_left_for_a_topic_or_for_what_recovery_keeps_aside(tmp_path: Path) -> None:
    with memory(tmp_path / "disk", "size=4m,nr_inodes=24") as point:
        path = point / "topic"
        with Topic.open(path, create=True, **QUIET) as topic:
            topic.append(b"kept", sync=True)
        with last_segment(path).open("ab") as file:
            file.write(b"torn" * 100)
        fillers = use_up_files(point)
        with pytest.raises(OSError, match="No space left"):
            Topic.open(point / "another", create=True)
        assert sorted(os.listdir(point)) == sorted(["topic", *(filler.name for filler in fillers)])
        assert [record.value for record in records_of(path)] == [b"kept"]
        with Topic.open(path) as topic:
            recovery = topic.partition(0).recovery
            assert recovery is not None and recovery[:3] == (400, 0, None)  # cut, and not kept
            topic.append(b"more", sync=True)
        assert [record.value for record in records_of(path)] == [b"kept", b"more"]
    count("G6", refusals=2, lost=0, phantoms=0)


@pytest.mark.parametrize(
    "policy", [Retention(age=None, bytes=2 << 20), Retention(age=None, keep_free=0.3)], ids=["bytes", "keep_free"]
)
def test_disk_of_eight_mebibytes_never_fills_under_a_limit(tmp_path: Path, policy: Retention) -> None:
    """With segments of 1 GiB by default, nobody asking for retention, and reopened now and then."""
    chance = random.Random(8)
    least_free, appended = 1.0, 0
    with disk(tmp_path, "ext4", size_bytes=8 << 20) as made:
        for _ in range(3):
            with Topic.open(
                made.point / "topic", create=True, retention=policy, flush=FlushPolicy(interval=None)
            ) as topic:
                for _ in range(scale(40)):
                    topic.append_many([chance.randbytes(chance.choice((100, 10_000, 100_000))) for _ in range(10)])
                    appended += 10
                    topic.flush()
                    facts = os.statvfs(made.point)
                    least_free = min(least_free, facts.f_bavail / facts.f_blocks)
                assert 0 < len(values_of(topic)) < appended
                assert not topic.verify().damage
    assert least_free > 0.05
    count("G6", refusals=0, lost=0, phantoms=0)


def test_full_disk_is_read_without_needing_room(loop_disk: Disk) -> None:
    path = loop_disk.point / "topic"
    with Topic.open(path, create=True, **QUIET) as topic:
        topic.append_many([b"%d" % number for number in range(100)])
    with last_segment(path).open("ab") as file:
        file.write(b"torn" * 2000)
    fill(loop_disk.point)
    before = tree(path)
    assert len(records_of(path)) == 100
    assert tree(path) == before
    with Topic.open(path) as topic:  # ext4 decides whether there are two more blocks for the tail
        assert (topic.partition(0).recovery or ())[:2] == (8000, 0)
        assert len(values_of(topic)) == 100
    count("G6", refusals=1, lost=0, phantoms=0)


def test_limit_on_file_size_refuses_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "topic"

    def write_up_to_the_limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
        chance = random.Random(0)
        expected: list[bytes | None] = []
        with Topic.open(path, create=True, **QUIET) as topic:
            for number in range(300):
                value = b"%d " % number + bytes(chance.randint(1, 2000))
                try:
                    topic.append(value, sync=True)
                    expected.append(value)
                except StorageFullError:
                    assert values_of(topic) == expected
        assert [record.value for record in records_of(path)] == expected
        assert 60_000 < last_segment(path).stat().st_size <= 64 << 10

    in_a_child(write_up_to_the_limit)
    with Topic.open(path) as topic:
        topic.append(b"without a limit" * 10_000, sync=True)
    count("G6", refusals=1, lost=0, phantoms=0)


def test_transfer_to_a_full_device_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "topic", create=True, **QUIET) as topic, open("/dev/full", "wb", buffering=0) as full:
        topic.append_many([b"x" * 1000] * 100)
        topic.flush()
        before = tree(tmp_path / "topic")
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                topic.partition(0).transfer(full, 0)
        assert tree(tmp_path / "topic") == before
        topic.append(b"more", sync=True)
    count("G6", refusals=3, lost=0, phantoms=0)


# --- no file descriptors ---------------------------------------------------------------------------


def test_every_shortage_of_descriptors_is_said_and_leaves_none_open(tmp_path: Path) -> None:
    """Each round has one descriptor more, until there are enough for everything."""
    path = tmp_path / "topic"
    with Topic.open(path, create=True, segment_bytes=4096, partitions=3, **QUIET) as topic:
        for partition in range(3):
            topic.append_many([b"x" * 1500] * 6, partition=partition)

    def work(written: list[int]) -> None:
        with Topic.open(path, create=True) as topic:
            for partition in range(3):
                topic.append(b"y" * 3000, partition=partition, sync=True)
                written.append(1)
            assert len(values_of(topic)) == 18 + len(written)
            with topic.follow("begin", timeout=0) as reader:
                assert len(list(reader)) == 18 + len(written)

    def work_with_ever_more() -> None:
        unlimited = resource.getrlimit(resource.RLIMIT_NOFILE)
        before = open_files()
        written: list[int] = []
        shortages = 0
        for limit in range(len(before), len(before) + 100):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, unlimited[1]))
            try:
                work(written)
                break
            except OSError as error:
                assert "Too many open files" in str(error), error
                shortages += 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, unlimited)
            assert not opened_since(before)
        assert shortages > 5
        assert len(records_of(path)) == 18 + len(written)

    in_a_child(work_with_ever_more)
    count("G6", refusals=6, lost=0, phantoms=0)


# --- not allowed -----------------------------------------------------------------------------------


def test_read_only_mount_is_read_and_not_written(tmp_path: Path) -> None:
    with memory(tmp_path / "disk", "size=4m") as point:
        path, read_only = point / "topic", tmp_path / "read-only"
        with Topic.open(path, create=True, **QUIET) as topic:
            topic.append(b"kept", sync=True)
        read_only.mkdir()
        mount("--bind", point, read_only)
        try:
            mount("-o", "remount,bind,ro", read_only)
            assert [record.value for record in records_of(read_only / "topic")] == [b"kept"]
            before = open_files()
            for name in ("topic", "new"):
                with pytest.raises(OSError, match="Read-only file system"):
                    Topic.open(read_only / name, create=True)
            assert not opened_since(before)
            with Topic.open(path) as topic, Topic.open(read_only / "topic", mode="r") as reader:
                following = iter(reader.follow("begin", timeout=30))
                assert next(following).value == b"kept"
                topic.append(b"through the other mount", sync=True)
                assert next(following).value == b"through the other mount"
        finally:
            unmount(read_only)
    count("G6", refusals=2, lost=0, phantoms=0)


def test_file_system_that_turns_read_only_stops_the_writer_and_no_reader(loop_disk: Disk) -> None:
    path = loop_disk.point / "topic"
    topic = Topic.open(path, create=True, **QUIET)
    topic.append(b"kept", sync=True)
    topic.append(b"in doubt")
    mount("-o", "remount,abort", loop_disk.device, loop_disk.point)  # ext4 does this by itself when its journal fails
    for act in (topic.flush, lambda: topic.append(b"x", sync=True), topic.partition(0).roll, topic.close):
        with pytest.raises((WriterFailedError, StorageIOError), match="Read-only file system"):
            act()
    assert [record.value for record in records_of(path)] == [b"kept"]
    with pytest.raises(OSError, match="Read-only file system"):
        Topic.open(path)
    loop_disk.remount()
    with Topic.open(path) as topic:
        assert values_of(topic) in ([b"kept"], [b"kept", b"in doubt"])
        topic.append(b"more", sync=True)
    count("G6", refusals=6, lost=0, phantoms=0)


def test_files_of_another_user_are_read_if_they_may_be_and_never_written() -> None:
    need(os.geteuid() == 0, "root, to become another user")
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        for name, permissions in (("private", 0o600), ("public", 0o644)):
            with Topic.open(Path(directory, name), create=True, permissions=permissions, **QUIET) as topic:
                topic.append(name.encode(), sync=True)

        def be_somebody_else() -> None:
            os.setuid(NOBODY)
            assert [record.value for record in records_of(Path(directory, "public"))] == [b"public"]
            before = open_files()
            for name in ("private", "public", "new"):
                with pytest.raises(PermissionError):
                    Topic.open(Path(directory, name), create=True)
            with pytest.raises(PermissionError):
                Topic.open(Path(directory, "private"), mode="r")
            assert not opened_since(before)

        in_a_child(be_somebody_else)
        assert sorted(os.listdir(directory)) == ["private", "public"]
    count("G6", refusals=4, lost=0, phantoms=0)


@pytest.mark.parametrize("name", ["topic.json", "0000/watermark", "0000/lock", "0000/00000000000000000000.log"])
def test_immutable_file_is_read_and_not_written(loop_disk: Disk, name: str) -> None:
    path = loop_disk.point / "topic"
    with Topic.open(path, create=True, **QUIET) as topic:
        topic.append(b"kept", sync=True)
    run("chattr", "+i", path / name)
    assert [record.value for record in records_of(path)] == [b"kept"]
    before = open_files()
    if name == "topic.json":  # nobody writes to this file
        Topic.open(path).close()
    else:
        with pytest.raises(PermissionError):
            Topic.open(path)
    assert not opened_since(before)
    run("chattr", "-i", path / name)
    with Topic.open(path) as topic:
        topic.append(b"more", sync=True)
        assert values_of(topic) == [b"kept", b"more"]
    count("G6", refusals=1, lost=0, phantoms=0)


# --- no such place ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["a", "r"])
def test_path_that_leads_nowhere_is_refused(tmp_path: Path, mode: Any) -> None:
    (tmp_path / "file").write_text("no directory")
    (tmp_path / "circle").symlink_to("circle")
    before = tree(tmp_path)
    for path in (tmp_path / "file" / "topic", tmp_path / "circle" / "topic", tmp_path / "file", tmp_path / "circle"):
        with pytest.raises((OSError, LogError)) as caught:
            Topic.open(path, create=True, mode=mode)
        assert str(path) in str(caught.value) or str(path.parent) in str(caught.value)
        assert not isinstance(caught.value, CorruptLogError | PermissionError), caught.value
    (tmp_path / "circle").unlink()
    assert tree(tmp_path) == {name: content for name, content in before.items() if name != "circle"}
    count("G6", refusals=4, lost=0, phantoms=0)
