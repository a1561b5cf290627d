"""A topic of many partitions is described, read and followed with few descriptors, or the error says what to raise."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import QUIET
from loglib import StorageIOError, Topic, testing
from loglib.errors import TooManyFilesError
from loglib.system.files import Files

PARTITIONS = 120
LEFT = 30  # descriptors that the process may open


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    path = tmp_path / "t"
    with Topic.open(path, create=True, partitions=PARTITIONS, **QUIET) as topic:
        for number in range(PARTITIONS):
            topic.append(b"%d" % number, partition=number)
        topic.flush()
        with topic.group("g") as group:
            assert len(list(group.follow(timeout=0))) == PARTITIONS
    return path


@pytest.fixture
def few() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + LEFT, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_topic_of_many_partitions_is_described_with_few_descriptors(wide: Path, few: None) -> None:
    with Topic.open(wide, mode="r") as topic:
        assert sum(each.high_watermark > 0 for each in topic.partitions) == PARTITIONS
        assert sum(len(each.segments) for each in topic.partitions) == PARTITIONS
        assert set(topic.group_info("g").lag) == set(range(PARTITIONS))
        assert not topic.verify().damage and len(topic.stats().partitions) == PARTITIONS


def test_all_partitions_are_read_and_followed_with_few_descriptors(wide: Path, few: None) -> None:
    wanted = {b"%d" % number for number in range(PARTITIONS)}
    with Topic.open(wide, mode="r") as topic:
        assert {each.value for each in topic.read()} == wanted
        with topic.follow("begin", timeout=0) as following:
            assert {each.value for each in following} == wanted
        with topic.follow("begin", timeout=0.1) as following:  # it waits, too
            assert {each.value for each in following} == wanted
        refused = pytest.raises(StorageIOError, match="each with an open file; raise the limit")
        with topic.group("new") as group, refused:
            next(iter(group.follow(timeout=0)))


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.EIO])
def test_process_without_a_descriptor_is_told_what_to_raise(tmp_path: Path, error: int) -> None:
    class Full(Files):
        calls = 0

        def open(self, *arguments: Any, **keywords: Any) -> int:
            if self.calls:
                self.calls += 1
                raise OSError(errno.EMFILE if self.calls == 2 else error, "no", arguments[0])
            return os.open(*arguments, **keywords)

    files = Full()
    with testing.open_topic(tmp_path / "t", files=files):
        pass
    files.calls = 1
    if error == errno.EIO:
        with pytest.raises(OSError, match="no") as raised:
            testing.open_topic(tmp_path / "t", files=files, mode="r")
        assert not isinstance(raised.value, TooManyFilesError)
        return
    with pytest.raises(TooManyFilesError, match="all of them are in use, and `ulimit -n` is") as full:
        testing.open_topic(tmp_path / "t", files=files, mode="r")
    assert full.value.needed is None and full.value.path.endswith(".json")
