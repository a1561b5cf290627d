"""A disk that is full, for real: small file systems of memory, and limits of the process."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import fill, memory

from conftest import QUIET, needs_root, records_of, run_python, sound, values_of
from loglib import OffsetRange, StorageFullError, Topic

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
