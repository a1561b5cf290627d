"""Store: the topics of a directory, as their files say; deleting one, and what lies before an offset."""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loglib
from conftest import QUIET, Clock, in_parts, tree, values_of
from loglib import (
    CorruptLogError,
    GroupBusyError,
    LockedError,
    LogError,
    LogMovedError,
    OffsetOutOfRangeError,
    Retention,
    StorageIOError,
    Topic,
    UnsupportedFormatError,
    testing,
)
from loglib.groups.administration import check_no_members
from loglib.groups.directory import group_names
from loglib.log import catalog
from loglib.testing import CrashFS, MemoryFiles, UnsyncedFiles


def listing(directory: Path) -> list[str]:
    return sorted(str(each.relative_to(directory)) for each in directory.rglob("*"))


# --- listing ---------------------------------------------------------------------------------------


def test_topics_of_a_directory_are_listed_and_described(tmp_path: Path) -> None:
    for name, partitions in (("views", 1), ("clicks", 3)):
        with Topic.open(tmp_path / name, create=True, partitions=partitions) as topic:
            topic.append_many([b"x" * 100] * 50, partition=0)
    with Topic.open(tmp_path / "views", mode="r") as topic:
        topic.group("etl").close()
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / ".views.tmp").mkdir()
    before = listing(tmp_path)
    clicks, views = loglib.topics(tmp_path)
    assert listing(tmp_path) == before
    assert (clicks.name, clicks.path, clicks.groups, clicks.error) == ("clicks", str(tmp_path / "clicks"), [], None)
    assert clicks.config is not None and clicks.config.partitions == 3
    assert clicks.size_bytes == sum(each.stat().st_size for each in (tmp_path / "clicks").rglob("*.log"))
    assert (views.name, views.groups) == ("views", ["etl"])


def test_topic_whose_description_may_not_be_read_is_named_beside_the_others() -> None:
    class Closed(MemoryFiles):
        def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if str(path).endswith("alices/topic.json") and flags & os.O_ACCMODE == os.O_RDONLY and self.closed:
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return super().open(path, flags, mode, dir_fd=dir_fd)

        closed = False

    files = Closed()
    for name in ("alices", "clicks"):
        testing.open_topic(f"/logs/{name}", files=files).close()
    files.closed = True
    alices, clicks = catalog.describe_all(files, "/logs", groups_of=group_names)
    assert clicks.error is None and clicks.config is not None
    assert isinstance(alices.error, StorageIOError) and "alices" in str(alices.error)


def test_directory_without_topics_is_empty_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    """A path that is mistyped, or not mounted, would look like one without topics."""
    (tmp_path / "file").write_bytes(b"")
    assert loglib.topics(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        loglib.topics(tmp_path / "nothing")
    with pytest.raises(NotADirectoryError):
        loglib.topics(tmp_path / "file")


def test_damaged_topic_is_listed_with_its_error(tmp_path: Path) -> None:
    for name in ("one", "two"):
        Topic.open(tmp_path / name, create=True).close()
    (tmp_path / "one" / "topic.json").write_bytes(b"{")
    os.rename(tmp_path / "two" / "0000", tmp_path / "two" / "away")
    one, two = loglib.topics(tmp_path)
    assert isinstance(one.error, CorruptLogError) and isinstance(two.error, CorruptLogError)
    assert (one.config, one.size_bytes) == (None, 0)


def test_topics_in_an_object_store_are_not_listed() -> None:
    with pytest.raises(ValueError, match="open each topic by a URI of its own"):
        loglib.topics("s3://key:secret@bucket/logs")


def test_directory_of_topics_that_is_opened_as_one_says_which_there_are(tmp_path: Path) -> None:
    for name in ("clicks", "views"):
        Topic.open(tmp_path / name, create=True).close()
    with pytest.raises(FileNotFoundError, match="a directory of topics: open one of clicks, views"):
        Topic.open(tmp_path, mode="r")


def test_mistyped_path_made_a_topic(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="create=True, too"):
        Topic.open(tmp_path / "clikcs", create=False)
    assert listing(tmp_path) == []
    Topic.open(tmp_path / "clicks", create=True).close()
    Topic.open(tmp_path / "clicks", create=False).close()


# --- deleting --------------------------------------------------------------------------------------


def test_topic_that_is_deleted_leaves_nothing(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "clicks", create=True, partitions=2) as topic:
        topic.append(b"x", sync=True)
        topic.group("etl").close()
    reader = Topic.open(tmp_path / "clicks", mode="r")
    assert values_of(reader) == [b"x"]
    Topic.delete(tmp_path / "clicks")
    assert listing(tmp_path) == []
    with pytest.raises(FileNotFoundError, match="no topic here"):
        Topic.delete(tmp_path / "clicks")


USES: dict[str, Callable[[Topic], object]] = {
    "read": lambda topic: list(topic.read()),
    "read from a time": lambda topic: list(topic.read("-1h")),
    "follow": lambda topic: topic.follow("begin", timeout=1.2).poll(),
    "verify": lambda topic: topic.verify(),
    "segments": lambda topic: topic.partition(0).segments,
    "retain": lambda topic: topic.retain(dry_run=True),
    "group": lambda topic: topic.group("etl"),
    "groups": lambda topic: topic.groups(),
    "group_info": lambda topic: topic.group_info("etl"),
}


@pytest.mark.parametrize("read_before", [True, False])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_deleted_topic_showed_up_as_damage(use: Callable[[Topic], object], read_before: bool, tmp_path: Path) -> None:
    with Topic.open(tmp_path / "clicks", create=True) as topic:
        topic.append(b"x")
    with Topic.open(tmp_path / "clicks", mode="r") as topic:
        if read_before:
            assert values_of(topic) == [b"x"]
        Topic.delete(tmp_path / "clicks")
        with pytest.raises(LogMovedError, match="moved or removed"):
            use(topic)


def test_topic_that_is_in_use_is_not_deleted(tmp_path: Path) -> None:
    path = tmp_path / "clicks"
    with Topic.open(path, create=True, partitions=2) as topic, pytest.raises(LockedError):
        Topic.delete(path)
    with Topic.open(path, shared=True) as topic:
        topic.append(b"x", partition=1)
        with pytest.raises(LockedError):
            Topic.delete(path)
    reading = Topic.open(path, mode="r")
    with reading, reading.group("etl", member="one"), pytest.raises(GroupBusyError, match="one"):
        Topic.delete(path)
    with Topic.open(path) as topic:
        assert values_of(topic) == [b"x"]


def test_link_to_a_topic_is_not_deleted(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "clicks", create=True) as topic:
        topic.append(b"x", sync=True)
    (tmp_path / "link").symlink_to(tmp_path / "clicks")
    with pytest.raises(LogError, match="is a link to a topic"):
        Topic.delete(tmp_path / "link")
    with Topic.open(tmp_path / "link", mode="r") as topic:
        assert values_of(topic) == [b"x"]


@pytest.mark.parametrize("content", [b"{", b'{"format": 99}'])
def test_topic_that_nobody_can_open_is_deleted_all_the_same(content: bytes, tmp_path: Path) -> None:
    Topic.open(tmp_path / "clicks", create=True, partitions=2).close()
    (tmp_path / "clicks" / "topic.json").write_bytes(content)
    with pytest.raises((CorruptLogError, UnsupportedFormatError)):
        Topic.open(tmp_path / "clicks")
    Topic.delete(tmp_path / "clicks")
    assert listing(tmp_path) == []


def test_what_cannot_be_removed_of_a_deleted_topic_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Keeping(MemoryFiles):
        def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
            if ".tmp/0000" in path:
                raise PermissionError(path)
            super().unlink(path, dir_fd=dir_fd)

    files = Keeping()
    testing.open_topic("/logs/clicks", files=files).close()
    with caplog.at_level(logging.WARNING, logger="loglib"):
        catalog.delete("/logs/clicks", files=files, check_unused=check_no_members)
    assert "this rest of the deleted topic clicks" in caplog.text
    assert catalog.describe_all(files, "/logs", groups_of=group_names) == []


# --- what lies before an offset --------------------------------------------------------------------


def test_segments_before_an_offset_are_deleted(path: Path) -> None:
    with Topic.open(path, create=True, **QUIET | {"segment_bytes": 4096, "retention": Retention(age=None)}) as topic:
        offsets = [topic.append(b"x" * 3000, sync=True).offset for _ in range(6)]
        partition = topic.partition(0)
        bases = [each.base_offset for each in partition.segments]
        assert partition.delete_before(offsets[3] + 1) == bases[3]
        assert [each.base_offset for each in partition.segments] == bases[3:]
        assert partition.delete_before(bases[3]) == bases[3]
        for wrong in (bases[3] - 1, partition.high_watermark + 1):
            with pytest.raises(OffsetOutOfRangeError):
                partition.delete_before(wrong)
        assert values_of(topic) == [b"x" * 3000] * 3
        end = partition.high_watermark
        assert partition.delete_before(end) == end
        assert values_of(topic) == []
        topic.append(b"more")
        assert partition.delete_before(end) == end, "what is not flushed stays"
        topic.flush()
        assert values_of(topic) == [b"more"]


# --- more partitions -------------------------------------------------------------------------------


def test_topic_with_more_partitions_keeps_its_records_and_uses_all(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Topic.open(path, create=True, partitions=2, **QUIET) as topic:
        topic.append_many([b"%d" % number for number in range(100)], keys=[b"%d" % number for number in range(100)])
        reading = Topic.open(path, mode="r")
    with caplog.at_level("WARNING", "loglib"):
        Topic.add_partitions(path, 5)
    assert "has 5 partitions now, and had 2: keys may belong to other partitions" in caplog.text
    (info,) = loglib.topics(path.parent)
    assert info.config is not None and info.config.partitions == 5
    with Topic.open(path) as topic:
        assert len(values_of(topic)) == 100
        topic.append_many([b"new"] * 100, keys=[b"%d" % number for number in range(100)])
        topic.flush()
        assert all(partition.high_watermark for partition in topic.partitions)
        assert len(values_of(topic)) == 200
    with reading:
        assert len(reading.partitions) == 5 and len(values_of(reading)) == 200


@pytest.mark.parametrize(
    ("partitions", "error"), [(2, ValueError), (1, ValueError), ("3", TypeError), (20_000, ValueError)]
)
def test_number_of_partitions_only_rises(partitions: Any, error: type[Exception], path: Path) -> None:
    Topic.open(path, create=True, partitions=2, **QUIET).close()
    before = tree(path)
    with pytest.raises(error):
        Topic.add_partitions(path, partitions)
    assert tree(path) == before


def test_topic_in_use_gets_no_partitions(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Topic.add_partitions(path, 2)
    with Topic.open(path, create=True, **QUIET), pytest.raises(LockedError):
        Topic.add_partitions(path, 2)
    with Topic.open(path, mode="r") as topic, topic.group("etl") as group:
        group.poll(timeout=0)
        with pytest.raises(GroupBusyError):
            Topic.add_partitions(path, 2)
    Topic.add_partitions(path, 2)


def test_writer_that_knows_fewer_partitions_is_refused(path: Path) -> None:
    """By the old number it would put keys elsewhere than the others."""
    Topic.open(path, create=True, partitions=2, **QUIET).close()
    with Topic.open(path, shared=True) as old:
        Topic.add_partitions(path, 3)
        with pytest.raises(LogMovedError, match="has other than the 2 partitions"):
            old.append(b"x", key=b"k")
        with Topic.open(path) as topic:  # its lock was let go
            assert len(topic.partitions) == 3


def test_partitions_that_are_added_while_a_writer_opens_are_noticed(path: Path) -> None:
    Topic.open(path, create=True, partitions=2, **QUIET).close()

    class Overtaken(UnsyncedFiles):
        armed = True

        def try_lock(self, fd: int, name: str = "", *, shared: bool = False) -> bool:
            if self.armed:
                self.armed = False
                Topic.add_partitions(path, 3)
            return super().try_lock(fd, name, shared=shared)

    with pytest.raises(LogMovedError, match="has other than the 2 partitions"):
        testing.open_topic(path, files=Overtaken())
    Topic.open(path, create=True).close()


@in_parts(3)
def test_no_power_cut_while_partitions_are_added_costs_a_record(part: slice) -> None:
    files = CrashFS()
    with testing.open_topic("/clicks", files=files, clock=Clock(), partitions=2, **QUIET) as topic:
        topic.append_many([b"%d" % number for number in range(9)], keys=[b"%d" % number for number in range(9)])
    begun = len(files.operations)
    catalog.add_partitions("/clicks", 4, files=files, clock=Clock(), check_unused=check_no_members)
    seen = set()
    for state in [*files.crash_states(since=begun, random=0)][part]:
        left = state.files
        with testing.open_topic("/clicks", files=left, clock=Clock()) as topic:
            assert sorted(values_of(topic)) == [b"%d" % number for number in range(9)]
            seen.add(len(topic.partitions))
        if len(topic.partitions) == 2:
            catalog.add_partitions("/clicks", 5, files=left, clock=Clock(), check_unused=check_no_members)
            with testing.open_topic("/clicks", files=left, clock=Clock()) as topic:
                topic.append(b"last", partition=4, sync=True)
                assert len(values_of(topic)) == 10
    assert seen == {2, 4}


def test_partition_that_the_description_does_not_count_and_that_has_records_is_damage(path: Path) -> None:
    Topic.open(path, create=True, partitions=2, **QUIET).close()
    before = (path / "topic.json").read_bytes()
    Topic.add_partitions(path, 3)
    (path / "topic.json").write_bytes(before)
    Topic.open(path).close()  # as after a crash
    Topic.add_partitions(path, 3)
    with Topic.open(path) as topic:
        topic.append(b"x", partition=2, sync=True)
    (path / "topic.json").write_bytes(before)
    with pytest.raises(CorruptLogError, match="2 partitions"):
        Topic.open(path)
    (path / "0002").rename(path / "away")
    (path / "0002").write_bytes(b"")
    with pytest.raises(CorruptLogError, match="2 partitions"):
        Topic.open(path)
