"""Names: what the check accepts can be made, grown, copied and deleted; a system that takes less says so."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loglib
from loglib import LogError, Topic, testing
from loglib.groups.members import live_members
from loglib.system.files import REAL, Files

SHORT = 143  # letters of a name on eCryptfs, where an encrypted home directory is


class ShortNames(Files):
    """A file system that takes names of 143 letters."""

    @staticmethod
    def checked(call: Callable[..., Any], count: int) -> Callable[..., Any]:
        def checked_call(*arguments: Any, **keywords: Any) -> Any:
            if any(len(name) > SHORT for each in arguments[:count] for name in each.split("/")):
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), arguments[0])
            return call(*arguments, **keywords)

        return checked_call

    def __init__(self) -> None:
        for name, count in {"open": 1, "lstat": 1, "mkdir": 1, "rename": 2, "link": 2}.items():
            setattr(self, name, self.checked(getattr(REAL, name), count))


@pytest.mark.parametrize("letters", [217, 218, 230, 249])
def test_longest_names_can_be_made_grown_copied_and_deleted(tmp_path: Path, letters: int) -> None:
    path = tmp_path / ("t" * letters)
    with Topic.open(path, create=True, partitions=2) as topic:
        topic.append(b"x", sync=True)
        with topic.group("g" * 249, member="m" * 249) as group:
            assert [each.value for each in group.follow(timeout=0)] == [b"x"]
        with loglib.transaction("a" * 300) as transaction:
            transaction.append(topic, b"y")
    Topic.add_partitions(path, 3)
    snapshot, copy = (tmp_path / each / path.name for each in ("snapshots", "copies"))
    loglib.copies.snapshot(path, snapshot)
    with loglib.copies.Mirror(path, copy) as mirror:
        mirror.copy()
    for each in (snapshot, copy):
        with Topic.open(each, mode="r") as topic:
            assert {record.value for record in topic.read()} == {b"x", b"y"} and topic.groups() == ["g" * 249]
    with Topic.open(path, mode="r") as topic:
        topic.delete_group("g" * 249)
    Topic.delete(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [".transactions", "copies", "snapshots"]


def test_name_that_the_file_system_takes_can_be_made_there(tmp_path: Path) -> None:
    files = ShortNames()
    with testing.open_topic(tmp_path / ("t" * SHORT), files=files) as topic:
        topic.append(b"x", sync=True)
        with topic.group("g" * SHORT, member="m" * SHORT) as group:
            assert len(list(group.follow(timeout=0))) == 1


def test_name_that_the_file_system_does_not_take_is_refused_in_words(tmp_path: Path) -> None:
    files = ShortNames()
    with pytest.raises(LogError, match="takes no name of 144 letters"):
        testing.open_topic(tmp_path / ("t" * 144), files=files)
    assert not list(tmp_path.iterdir())
    with pytest.raises(LogError, match="or no path of 5"):
        Topic.open(tmp_path / "/".join(["d" * 200] * 25), create=True)
    with testing.open_topic(tmp_path / "t", files=files) as topic:
        with pytest.raises(LogError, match="takes no name of 144 letters"):
            topic.group("g" * 144)
        with pytest.raises(LogError, match="takes no name of 144 letters"):
            topic.group("g", member="m" * 144)
        with topic.group("g"):
            assert len(live_members(files, f"{topic.path}/groups/g/members")) == 1
