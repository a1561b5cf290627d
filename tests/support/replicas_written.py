"""Topics with replicas for tests: written, saved and restored, on devices that fail."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from replicated import Devices, open_all, until

from loglib import testing


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """Three directories for one topic."""
    return [tmp_path / device / "topic" for device in "abc"]


@pytest.fixture
def written(places: list[Path]) -> list[Path]:
    """The same; a topic with acks="quorum" and three records is there."""
    with open_all(places, acks="quorum") as topic:
        topic.append_many([b"one", b"two", b"three"])
        topic.flush()
        until(lambda: len({each.durable_ends for each in topic.replicas()}) == 1, "all have it")
    return places


def saved(place: Path) -> Path:
    """A backup of a directory."""
    shutil.copytree(place, kept := place.with_name("saved"))
    return kept


def restored(place: Path) -> None:
    shutil.rmtree(place)
    os.rename(place.with_name("saved"), place)


FIRST = f"{0:020d}.log"


def dying(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, "it dies here")


@pytest.fixture
def devices() -> Devices:
    return Devices(testing.UnsyncedFiles())
