"""A disk that is full, for real: small file systems of memory, and limits of the process."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import started
from disks import disk, fill, memory

from conftest import QUIET, needs_root, records_of, run_python, sound, start_python, values_of
from loglib import OffsetRange, Retention, StorageFullError, Topic

pytestmark = needs_root


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 1 MiB."""
    with memory(tmp_path / "disk", "size=1m") as disk:
        yield disk


@pytest.fixture
def few_inodes(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for few files."""
    with memory(tmp_path / "disk", "size=8m,nr_inodes=24") as disk:
        yield disk


def test_full_disk_loses_what_was_not_acknowledged_and_nothing_else(small_disk: Path) -> None:
    with Topic.open(small_disk / "topic", create=True, **QUIET) as topic:
        kept = [b"kept %d" % number for number in range(100)]
        topic.append_many(kept)
        topic.flush()
        filler = fill(small_disk)
        first_lost = topic.append(os.urandom(50_000)).offset
        topic.append(b"lost as well")
        with pytest.raises(StorageFullError) as caught:
            topic.flush()
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.lost == (OffsetRange(0, range(first_lost, first_lost + 2)),)
        assert str(small_disk / "topic") in str(caught.value)
        assert values_of(topic) == kept

        filler.unlink()
        again = topic.append(b"room again", sync=True)
        assert again.offset == first_lost  # an offset that nothing was found at
    assert [record.value for record in records_of(small_disk / "topic")] == [*kept, b"room again"]


def test_writing_until_the_disk_is_full_keeps_every_acknowledged_record(small_disk: Path) -> None:
    acknowledged = []
    with Topic.open(small_disk / "topic", create=True, segment_bytes=64 << 10, **QUIET) as topic:
        with pytest.raises(StorageFullError):
            for number in range(10_000):
                value = b"%d " % number + os.urandom(3000)
                topic.append(value, sync=True)
                acknowledged.append(value)
        assert len(acknowledged) > 100
        sound(topic.partition(0))
    assert [record.value for record in records_of(small_disk / "topic")] == acknowledged
    with Topic.open(small_disk / "topic") as topic:
        assert topic.partition(0).recovery is not None
        recovery = topic.partition(0).recovery
        assert recovery is not None and recovery.clean


def test_reading_and_retention_go_on_when_the_disk_is_full(small_disk: Path) -> None:
    with Topic.open(small_disk / "topic", create=True, segment_bytes=64 << 10, **QUIET) as topic:
        for _ in range(200):
            topic.append(os.urandom(2000), sync=True)
        fill(small_disk)
        with pytest.raises(StorageFullError):
            topic.append(os.urandom(200_000), sync=True)
        partition = topic.partition(0)
        segments = partition.segments
        assert len(values_of(topic)) == 200
        dropped = partition._access.writer().drop_before(segments[3].base_offset)  # as retention does
        assert len(dropped) == 3
        topic.append(b"there is room now", sync=True)
        assert values_of(topic)[-1] == b"there is room now"


def test_no_room_for_the_next_segment_is_a_full_disk(few_inodes: Path) -> None:
    fillers: list[Path] = []
    with Topic.open(few_inodes / "topic", create=True, segment_bytes=4096, **QUIET) as topic:
        topic.append(b"x" * 4000, sync=True)
        while True:
            path = few_inodes / f"filler {len(fillers)}"
            try:
                path.touch()
            except OSError:
                break
            fillers.append(path)
        with pytest.raises(StorageFullError):
            topic.append(b"y" * 4000, sync=True)
        assert values_of(topic) == [b"x" * 4000]
        for path in fillers:
            path.unlink()
        topic.append(b"z" * 4000, sync=True)
    assert [record.value for record in records_of(few_inodes / "topic")] == [b"x" * 4000, b"z" * 4000]


def test_making_a_topic_on_a_full_disk_leaves_nothing(small_disk: Path) -> None:
    filler = fill(small_disk)
    with pytest.raises(OSError) as caught:
        Topic.open(small_disk / "topic", create=True, partitions=4)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(small_disk) == ["filler"]
    filler.unlink()
    Topic.open(small_disk / "topic", create=True, partitions=4).close()


def test_recovery_on_a_full_disk_cuts_the_torn_tail_without_keeping_it(small_disk: Path) -> None:
    with Topic.open(small_disk / "topic", create=True, **QUIET) as topic:
        topic.append(b"flushed", sync=True)
    segment = next((small_disk / "topic" / "0000").glob("*.log"))
    with segment.open("ab") as file:
        file.write(b"torn" * 5000)
    fill(small_disk)
    with Topic.open(small_disk / "topic") as topic:
        recovery = topic.partition(0).recovery
        assert recovery is not None
        assert (recovery.cut_bytes, recovery.quarantine) == (20_000, None)
        assert values_of(topic) == [b"flushed"]


@pytest.mark.usefixtures("unmeasured")  # what it measured would not fit either
def test_limit_on_file_size_is_a_full_disk(tmp_path: Path) -> None:
    program = """
        import resource, signal, sys
        from loglib import FlushPolicy, StorageFullError, Topic
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
        quiet = FlushPolicy(records=None, interval=None, bytes=None)
        with Topic.open(sys.argv[1], create=True, flush=quiet) as topic:
            written = 0
            try:
                while True:
                    topic.append(b"x" * 1010, sync=True)
                    written += 1
            except StorageFullError as error:
                print(error.errno)
            topic.append(b"short", sync=True)
            assert len(list(topic.read())) == written + 1
    """
    assert int(run_python(program, tmp_path / "topic")) == errno.EFBIG


SERVICE = """
    import sys, time
    from loglib import FlushPolicy, Retention, StorageFullError, Topic
    never = FlushPolicy(records=None, interval=None, bytes=None)
    topic = Topic.open(sys.argv[1], create=True, segment_bytes=64 << 10, retention=Retention(age=None), flush=never)
    for _ in range(10):
        topic.append(b"x" * 60_000, sync=True)
    print("ready", flush=True)
    sys.stdin.readline()
    topic.append(b"y" * 60_000)  # waits in memory, and the disk has no room for it
    print("waits", flush=True)
    while len(topic.partition(0).segments) > 2:
        time.sleep(0.01)
    try:
        topic.append(b"z", sync=True)
    except StorageFullError as error:
        print([(each.partition, len(each.offsets)) for each in error.lost])
    print(topic.append(b"last", sync=True).partition, flush=True)
    topic.close()
"""


@pytest.mark.usefixtures("unmeasured")  # what it measured would not fit either
def test_operator_makes_room_on_a_full_disk_by_a_smaller_retention(small_disk: Path) -> None:
    """A change of the policies needed a new block itself, and the service did not see it until it was started again."""
    path = small_disk / "topic"
    with start_python(SERVICE, path, stderr=None) as service:
        assert service.stdin is not None and service.stdout is not None
        assert service.stdout.readline() == "ready\n"
        fill(small_disk)
        service.stdin.write("\n")
        service.stdin.flush()
        assert service.stdout.readline() == "waits\n"
        for size_bytes in ("1GiB", "200KiB", "100KiB"):  # again, on the disk that stays full
            command = started("alter", path, "--retention-bytes", size_bytes, "--yes")
            _, errors = command.communicate()
            assert command.returncode == 0, errors.decode()
        assert service.stdout.readline() == "[(0, 1)]\n"
        assert service.stdout.readline() == "0\n"
        assert service.wait(60) == 0
    assert [record.value for record in records_of(path)][-1] == b"last"


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_policies_change_again_and_again_on_a_disk_that_stays_full(tmp_path: Path, kind: str) -> None:
    """A full XFS takes no new file at all, not even in place of one that was removed."""
    with disk(tmp_path, kind) as made:
        path = made.point / "topic"
        Topic.create(path, **QUIET).close()
        fill(made.point)
        for size_bytes in (1 << 40, 1 << 30, 1 << 20):
            with Topic.open(path, shared=True) as topic:
                topic.alter(retention=Retention(age=None, bytes=size_bytes))
        made.remount()
        with Topic.open(path, mode="r") as topic:
            assert topic.config.retention.bytes == 1 << 20
