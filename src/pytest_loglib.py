"""Fixtures for pytest: a topic, a group, a disk that loses power, a full disk. pytest finds them with loglib.

Invariant: nothing of loglib is imported before a test asks for a fixture. Each test has topics and disks of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from loglib import Group, Topic
    from loglib.testing import CrashFS, FullDisk


@pytest.fixture
def loglib_topic(tmp_path: Path) -> Iterator[Topic]:
    """An empty topic with one partition, open for writing, in a new directory. `Topic.open` its `path` for more."""
    from loglib import Topic

    with Topic.create(tmp_path / "loglib_topic") as topic:
        yield topic


@pytest.fixture
def loglib_group(loglib_topic: Topic) -> Iterator[Group]:
    """A member of a group of `loglib_topic`, which begins at the first record."""
    with loglib_topic.group("loglib_group") as group:
        yield group


@pytest.fixture
def loglib_disk() -> CrashFS:
    """A disk in memory that may lose its power: `open_topic(path, files=loglib_disk)`, then its `crash_states`."""
    from loglib.testing import CrashFS

    return CrashFS()


@pytest.fixture
def loglib_full_disk() -> FullDisk:
    """A disk in memory with room for 1 GiB. It is full after the test sets its `room`, in bytes, to 0."""
    from loglib.testing import FullDisk, MemoryFiles

    return FullDisk(1 << 30, inner=MemoryFiles())
