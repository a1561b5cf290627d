"""What retention has dropped is closed by readers that wait: as long as it is open, its bytes stay on the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import QUIET, needs_proc, open_files
from loglib import Topic

pytestmark = needs_proc

RECORDS = 20


def removed_but_open(path: Path) -> list[str]:
    """The removed segments of a topic that this process has open."""
    return [each for each in open_files() if each.startswith(str(path)) and each.endswith(".log (deleted)")]


def by_group(topic: Topic) -> Callable[[], int]:
    group = topic.group("g")
    return lambda: len(group.poll(timeout=0))


def by_share(topic: Topic) -> Callable[[], int]:
    share = topic.share("s")

    def take() -> int:
        count = 0
        while (job := share.take(0)) is not None:
            job.accept()
            count += 1
        return count

    return take


def by_follower(topic: Topic) -> Callable[[], int]:
    reader = topic.follow("begin", timeout=0)
    return lambda: sum(1 for _ in reader)


def by_poll(topic: Topic) -> Callable[[], int]:
    reader = topic.follow("begin")
    return lambda: len(reader.poll(timeout=0))


@pytest.mark.parametrize("read_by", [by_group, by_share, by_follower, by_poll])
def test_reader_that_waits_keeps_no_dropped_segment_open(
    read_by: Callable[[Topic], Callable[[], int]], tmp_path: Path
) -> None:
    path = tmp_path / "t"
    with Topic.create(path, **QUIET) as topic, Topic.open(path, mode="r") as other:
        for _ in range(RECORDS):
            topic.append(b"x" * 1000)
        topic.flush()
        read, count = read_by(other), 0
        while count < RECORDS:
            count += read()
        topic.partition(0).roll()
        topic.partition(0).delete_before(topic.partition(0).high_watermark)
        for _ in range(3):
            assert read() == 0
        assert removed_but_open(path) == []
        topic.append(b"next", sync=True)
        while count < RECORDS + 1:
            count += read()
