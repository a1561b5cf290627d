"""Logs of offsets for tests: members that open them, and commits that are put into them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Clock
from loglib import StorageFullError, TopicPartition
from loglib.groups.commit_log import Entry
from loglib.groups.offsets import Offsets, make_offsets
from loglib.system.files import REAL, Files

A, B = TopicPartition("clicks", 0), TopicPartition("a-b", 12)
LOG_ID = bytes(16)
OF_TOPIC = bytes(range(16))
Opener = Callable[..., Offsets]


def anyone() -> None:
    """A fence that lets everybody commit."""


@pytest.fixture
def directory(tmp_path: Path, clock: Clock) -> Path:
    path = tmp_path / "offsets"
    path.mkdir()
    make_offsets(REAL, str(path), LOG_ID, "etl", now=clock(), permissions=0o600)
    return path


@pytest.fixture
def open_log(directory: Path, clock: Clock) -> Iterator[Opener]:
    opened: list[Offsets] = []

    def open_it(at: Path = directory, *, files: Files = REAL, durability: Any = "disk") -> Offsets:
        opened.append(
            Offsets(files, str(at), LOG_ID, "etl", durability=durability, permissions=0o600, clock=clock)
        )
        return opened[-1]

    yield open_it
    for log in opened:
        log.close()


def entry(offset: int | None, generation: int = 1, *, meta: str = "", member: str = "one", timestamp: int = 5) -> Entry:
    return Entry(offset, generation, OF_TOPIC, 77, meta, member, timestamp)


def put(log: Offsets, offset: int, *, of: TopicPartition = A, generation: int = 1, meta: str = "") -> None:
    log.commit({of: entry(offset, generation, meta=meta)}, fence=anyone)


def offset_of(log: Offsets, partition: TopicPartition = A) -> int | None:
    commit = log.commits().get(partition)
    return None if commit is None else commit.offset


def logs(directory: Path) -> list[Path]:
    return sorted(each for each in directory.iterdir() if not each.name.startswith("."))


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("[0-9a-f]*/*.log"))


def full(path: str) -> StorageFullError:
    return StorageFullError(path, OSError(28, "No space left on device"))
