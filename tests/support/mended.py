"""Topics and their copies for tests of healing: what is written, changed and looked at in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import QUIET, tree
from loglib import Topic, testing
from loglib.copies import Mirror
from loglib.segment import HEADER_BYTES, Identity

SMALL: dict[str, Any] = {"segment_bytes": 4096, "batch_bytes": 512}


@pytest.fixture
def copy(tmp_path: Path, path: Path) -> Path:
    """Where a copy of the topic is made."""
    return tmp_path / "copy" / path.name


@pytest.fixture
def whole(path: Path, copy: Path) -> dict[str, bytes]:
    """A topic of some segments at `path`, and a mirror of it at `copy`: the files of the topic."""
    write(path, 120)
    mirrored(path, copy)
    return tree(path)


def mirrored(path: Path, to: Path) -> None:
    with Mirror(path, to, files=testing.UnsyncedFiles()) as made:
        made.copy()


def write(path: Path, count: int, **policies: Any) -> None:
    with testing.open_topic(path, files=testing.UnsyncedFiles(), **QUIET, **SMALL, **policies) as topic:
        for number in range(count):
            topic.append(b"%03d" % number + b"." * 200, key=b"k", producer=("app", number + 1))
            if number % 3 == 2:
                topic.flush()


def segments(path: Path) -> list[Path]:
    return sorted((path / "0000").glob("*.log"))


def batches(segment: Path) -> list[tuple[int, int]]:
    """Position and length of each batch in a file."""
    content, found, at = segment.read_bytes(), [], HEADER_BYTES
    while at < len(content):
        found.append((at, int.from_bytes(content[at + 12 : at + 16], "little")))
        at += found[-1][1]
    return found


def changed(path: Path, whole: dict[str, bytes]) -> set[str]:
    """The files that differ, but for those that are kept aside."""
    now = {name: each for name, each in tree(path).items() if ".damaged-" not in name}
    return {name for name in now.keys() | whole.keys() if now.get(name) != whole.get(name)}


def identity(path: Path) -> Identity:
    with Topic.open(path, mode="r") as topic:
        return Identity.of(topic.log_id, 0)
