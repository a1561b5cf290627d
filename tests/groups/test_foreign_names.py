"""What others put into the directories of a topic and its groups stops nothing, and none of it counts as a group."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loglib
from conftest import QUIET
from loglib import GroupNotFoundError, LogError, Topic, testing
from loglib.log import catalog
from loglib.system.files import Files

FILES = (
    ".DS_Store", "._x", ".nfs0001", "Thumbs.db", "desktop.ini", "core", "x~", ".x.swp", "0000.log.gz", "watermark.bak",
)  # fmt: skip
DIRECTORIES = ("@eaDir", "lost+found", ".Trash-0", "backup")


@pytest.fixture
def littered(tmp_path: Path) -> Path:
    """A topic with a group, and foreign files and directories in each of its directories."""
    path = tmp_path / "data" / "orders"
    with Topic.open(path, create=True, partitions=2, **QUIET) as topic:
        for number in range(10):
            topic.append(b"%d" % number, key=b"%d" % number)
        topic.flush()
        with topic.group("etl") as group:
            assert len(list(group.follow(timeout=0))) == 10
    for directory in [path.parent, path, *(each for each in path.rglob("*") if each.is_dir())]:
        for name in FILES:
            (directory / name).write_bytes(b"junk" * 5_000)
        for name in DIRECTORIES:
            (directory / name).mkdir(mode=0o700)
            (directory / name / "junk").write_text("junk")
    os.mkfifo(path / "groups" / "pipe")
    (path / "groups" / "link").symlink_to(path / "groups" / "etl")
    return path


def test_foreign_names_stop_no_topic_and_no_group(littered: Path) -> None:
    with Topic.open(littered, create=True) as topic:
        topic.append(b"more", key=b"1", sync=True)
        for each in topic.partitions:
            each.roll()
        topic.retain()
        assert topic.groups() == ["etl"] and list(topic.stats().lag) == ["etl"]
        assert topic.group_info("etl").members == {}
        with topic.group("etl", member="a") as group:
            assert [record.value for record in group.follow(timeout=0)] == [b"more"]
            assert list(topic.group_info("etl").members) == ["a"]
        assert not topic.verify().damage
    assert [each.name for each in loglib.topics(littered.parent)] == ["orders"]
    Topic.add_partitions(littered, 3)
    Topic.delete(littered)


def test_foreign_names_are_not_copied_and_not_removed(littered: Path, tmp_path: Path) -> None:
    snapshot, copy = tmp_path / "snapshots" / "orders", tmp_path / "copies" / "orders"
    loglib.copies.snapshot(littered, snapshot)
    with loglib.copies.Mirror(littered, copy) as mirror:
        mirror.copy()
        foreign = copy / "groups" / "etl" / "offsets" / "@eaDir"
        foreign.mkdir()
        (copy / "groups" / "@eaDir").mkdir()
        with Topic.open(littered, create=True) as topic, topic.group("etl") as group:
            topic.append(b"more", sync=True)
            assert len(list(group.follow(timeout=0))) == 1
        mirror.copy()
    assert foreign.exists()
    assert [each.name for each in (snapshot / "groups").iterdir()] == ["etl"]
    for path in (snapshot, copy):
        assert {each.name for each in (path / "groups").iterdir() if each.name.isalpha()} == {"etl"}
        with Topic.open(path, mode="r") as topic:
            assert topic.groups() == ["etl"] and set(topic.group_info("etl").committed) == {0, 1}
    with loglib.copies.Mirror(littered, copy) as mirror:
        mirror.copy()
    loglib.copies.promote(copy, force=True)
    with Topic.open(copy, create=True) as topic, topic.group("etl") as group:
        assert not list(group.follow(timeout=0))


def test_group_cannot_be_made_where_something_else_is(littered: Path) -> None:
    with Topic.open(littered, mode="r") as topic:
        with pytest.raises(LogError, match="backup is a directory of something else"):
            topic.group("backup")
        with pytest.raises(GroupNotFoundError):
            topic.group_info("backup")
        with pytest.raises(LogError, match="groups.core"):
            topic.group("core")


def test_directory_that_may_not_be_entered_stops_no_other(littered: Path) -> None:
    """The tests run as root, who may enter all."""

    class Refusing(Files):
        def __init__(self) -> None:
            self.lstat = self.refusing(Files.lstat)

        def refusing(self, call: Callable[..., Any]) -> Callable[..., Any]:
            def checked(path: str, **keywords: Any) -> Any:
                if {"lost+found", "backup"} & set(os.path.dirname(path).split("/")):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
                return call(path, **keywords)

            return checked

    (littered.parent / "backup" / "junk").unlink()
    (littered.parent / "backup").rmdir()
    assert catalog.names(Refusing(), str(littered.parent)) == ["orders"]
    with testing.open_topic(littered, files=Refusing(), mode="r") as topic:
        assert topic.groups() == ["backup", "etl"]  # it may be a group of another user
