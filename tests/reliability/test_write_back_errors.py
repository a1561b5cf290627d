"""G6, the lie of fsync: the disk refuses data that the page cache has, the next fsync succeeds, the bytes are gone.

The disk is an image in a full tmpfs, on a loop device. Blocks that no file uses yet cannot be written, and ext4 and
XFS notice this when they write back. The writer must never trust its file again. Recovery must make sure that all
records that it shows are on the disk. Some tests test the tests: recoveries that do less lose records here.
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from counts import count, need, scale
from disks import Disk, disk

from conftest import QUIET, last_segment, records_of, sound, values_of
from loglib import LogError, StorageFullError, Topic, WriterFailedError
from loglib.log import recovery
from loglib.system.files import Files

pytestmark = pytest.mark.reliability

KINDS = ["ext4", "xfs"]
ROUNDS = 12


@pytest.fixture
def worn(kind: str, tmp_path: Path) -> Iterator[Disk]:
    """A disk that can be made to refuse new data."""
    with disk(tmp_path, kind, size_bytes=512 << 20) as made:  # the log grows in each round, until the disk refuses
        yield made


def some_values(name: object, number: int, size: int = 3000) -> list[bytes]:
    chance = random.Random(f"{name}")
    return [f"{name} {each} ".encode() + chance.randbytes(chance.randrange(size)) for each in range(number)]


def fill_up(worn: Disk, topic: Topic, name: object) -> tuple[list[bytes], list[bytes]]:
    """Append to a disk that refuses new data until a flush fails. Returns the acknowledged records, and those in doubt.

    Some data finds room: file systems reserve blocks for a file that grows. A record that finds no room for a new
    segment is not in doubt: it was never written.
    """
    worn.wear_out()
    kept: list[bytes] = []
    for number in range(1000):
        values = some_values(f"{name}.{number}", 40)
        worn.wear_out_further()
        topic.append_many(values)
        try:
            topic.flush()
        except WriterFailedError:
            return kept, values
        except StorageFullError:
            return kept, []
        kept += values
    raise AssertionError("the disk does not refuse anything")


@pytest.mark.parametrize("kind", KINDS)
def test_writer_whose_flush_failed_never_flushes_again(worn: Disk) -> None:
    path = worn.point / "topic"
    topic = Topic.open(path, create=True, **QUIET)
    kept, refused = fill_up(worn, topic, "record")
    worn.mend()
    fd = os.open(last_segment(path), os.O_RDWR)
    try:
        os.fdatasync(fd)
        lie = os.pread(fd, 1 << 30, 0)
    except OSError as error:
        need(False, f"a kernel that reports write-back errors once ({error})")
    finally:
        os.close(fd)
    need(refused[-1] in lie, "a kernel that goes on showing pages which could not be written")
    for act in (topic.flush, topic.partition(0).roll, lambda: topic.append(b"x"), lambda: topic.append_many([b"x"])):
        with pytest.raises(WriterFailedError):
            act()
    with pytest.raises(WriterFailedError):
        topic.close()
    assert [record.value for record in records_of(path)] == kept
    count("G6", fsync_lies=1)


@pytest.mark.parametrize("kind", KINDS)
def test_disk_that_goes_on_refusing_can_be_read_and_is_recovered_later(worn: Disk) -> None:
    path = worn.point / "topic"
    topic = Topic.open(path, create=True, **QUIET)
    kept, _ = fill_up(worn, topic, "record")
    with pytest.raises(WriterFailedError):
        topic.close()
    for _ in range(3):
        with pytest.raises(OSError, match="No space left|Input/output error"):
            Topic.open(path)
        assert [record.value for record in records_of(path)] == kept
    worn.mend()
    with Topic.open(path) as topic:
        believed = values_of(topic)
    worn.remount()
    assert [record.value for record in records_of(path)] == believed
    count("G6", fsync_lies=4, lost=0, phantoms=0)


def live_through_refusals(worn: Disk, rounds: int) -> None:
    """Repeat a failing flush, recovery and a new start; a record that was seen once must be there from then on."""
    path = worn.point / "topic"
    chance = random.Random(f"{worn.device} {rounds}")
    believed: list[bytes | None] = []
    for number in range(rounds):
        with Topic.open(path, create=True, **QUIET, segment_bytes=1 << 20) as topic:
            assert values_of(topic) == believed, f"round {number}: after a new start, other records than before"
        topic = Topic.open(path)
        topic.append_many(some_values(number, 5))
        topic.flush()
        believed = values_of(topic)
        kept, refused = fill_up(worn, topic, number)
        with suppress(WriterFailedError):
            topic.close()
        worn.mend()

        topic = Topic.open(path)
        seen = values_of(topic)
        promised = [*believed, *kept]
        assert seen == (promised + refused)[: max(len(promised), len(seen))], f"round {number}: lost before a new start"
        topic.append(b"later", sync=True)
        believed = [*seen, b"later"]
        if chance.random() < 0.5:
            topic.close()
        else:
            worn.cut_power()
            with suppress(LogError, OSError):
                topic.close()
        worn.remount()
    with Topic.open(path) as topic:
        assert values_of(topic) == believed, "after the last new start, other records than before"
        sound(topic.partition(0))


@pytest.mark.parametrize("kind", KINDS)
def test_what_recovery_shows_is_on_the_disk(worn: Disk) -> None:
    rounds = scale(ROUNDS)
    live_through_refusals(worn, rounds)
    count("G6", fsync_lies=rounds, lost=0, phantoms=0)


def only_sync(files: Files, fd: int, start: int, end: int) -> None:
    files.datasync(fd)


def rewrite_the_same_pages(files: Files, fd: int, start: int, end: int) -> None:
    files.copy_range(fd, fd, start=start, end=end, at=start)
    files.datasync(fd)


@pytest.mark.slow  # it finds the mistake by chance
@pytest.mark.parametrize(
    ("kind", "mistake"),
    [("ext4", only_sync), ("xfs", only_sync), ("ext4", rewrite_the_same_pages)],
)
def test_recovery_that_does_less_loses_what_it_has_shown(
    worn: Disk, mistake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "rewrite", mistake)
    with pytest.raises((AssertionError, LogError)):
        live_through_refusals(worn, 5)
    count("G6", mistakes_found_out=1)
