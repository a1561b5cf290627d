"""Copies of hard links (`cp -al`, rsync --link-dest, snapshots): two names of a file are never both written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import loglib
from conftest import last_segment, records_of
from loglib import Topic
from loglib.copies import Mirror
from loglib.groups.lock_file import LockFile
from loglib.system.files import REAL


def link_all(source: Path, to: Path) -> Path:
    """`cp -al`."""
    shutil.copytree(source, to, copy_function=os.link)
    return to


def values(path: Path) -> list[bytes | None]:
    """The values of all records of a topic, in order."""
    return [each.value for each in records_of(path)]


def shared_files(one: Path, other: Path) -> set[str]:
    """The files below both directories, by name, that are one file."""
    names = {str(each.relative_to(one)) for each in one.rglob("*") if each.is_file()}
    return {each for each in names if (other / each).exists() and (one / each).samefile(other / each)}


def test_two_writers_of_a_copy_of_hard_links_keep_all_that_they_acknowledged(path: Path, tmp_path: Path) -> None:
    with Topic.open(path, create=True, partitions=2) as topic:
        topic.append_many([b"before"] * 10, partition=0)
    copy = link_all(path, tmp_path / "copy")
    with Topic.open(path) as one, Topic.open(copy, create=True) as other:
        for number in range(20):
            one.append(b"one %d" % number, partition=0, sync=True)
            other.append(b"other %d" % number, partition=0, sync=True)
        one.partition(0).roll()
        other.partition(0).roll()
    for directory, name in ((path, b"one"), (copy, b"other")):
        assert values(directory) == [b"before"] * 10 + [b"%b %d" % (name, number) for number in range(20)]
        with Topic.open(directory, mode="r") as topic:
            assert not topic.verify().damage
    assert shared_files(path, copy) == {"topic.json", "topic.json.spare"}


def test_a_copy_of_hard_links_beside_a_living_writer_has_a_prefix_and_goes_on_alone(path: Path, tmp_path: Path) -> None:
    with Topic.open(path, create=True, partitions=1) as topic:
        topic.append(b"first", sync=True)
        copy = link_all(path, tmp_path / "copy")
        topic.append(b"second", sync=True)  # reaches the copy: it is still the same file
        with Topic.open(copy, create=True) as other:
            topic.append(b"third", sync=True)
            other.append(b"its own", sync=True)
        topic.append(b"fourth", sync=True)
    assert values(path) == [b"first", b"second", b"third", b"fourth"]
    assert values(copy) == [b"first", b"second", b"its own"]


def test_readers_and_retention_leave_shared_segments_as_they_are(path: Path, tmp_path: Path) -> None:
    with Topic.open(path, create=True, partitions=1) as topic:
        topic.append(b"first", sync=True)
        topic.partition(0).roll()
        topic.append(b"second", sync=True)
    copy = link_all(path, tmp_path / "copy")
    sealed = "0000/00000000000000000000.log"
    assert len(records_of(copy)) == 2 and sealed in shared_files(path, copy)
    with Topic.open(copy, alter=True, retention=loglib.Retention(age=None, bytes=1)) as topic:
        topic.partition(0).roll()
        topic.retain()
        assert topic.partition(0).log_start_offset > 0
    assert values(path) == [b"first", b"second"]


@pytest.mark.parametrize("way", ["repair", "heal"])
@pytest.mark.parametrize("made_by", ["links", "snapshot"])
def test_mending_one_of_two_names_does_not_write_into_the_other(
    way: str, made_by: str, path: Path, tmp_path: Path
) -> None:
    with Topic.open(path, create=True, partitions=1) as topic:
        topic.append_many([b"x" * 100] * 10)
        topic.partition(0).roll()
        topic.append(b"last", sync=True)
    donor = Path(shutil.copytree(path, tmp_path / "donor"))
    copy = tmp_path / "copy"
    if made_by == "links":
        link_all(path, copy)
    else:
        loglib.copies.snapshot(path, copy)
    segment = "0000/00000000000000000000.log"
    assert segment in shared_files(path, copy)
    with open(path / segment, "r+b") as file:
        file.seek(20)
        file.write(b"\xff")
    damaged = (copy / segment).read_bytes()
    if way == "repair":
        loglib.repair(path)
    else:
        loglib.copies.heal(path, donors=[donor])
    with Topic.open(path, mode="r") as topic:
        assert not topic.verify().damage
    assert (copy / segment).read_bytes() == damaged, "another writer may have it, or it is a proof"
    assert not list((path / "0000").glob("*.tmp"))


def test_a_mirror_in_a_copy_of_hard_links_goes_on_alone(path: Path, tmp_path: Path) -> None:
    to, copy = tmp_path / "mirror", tmp_path / "copy"
    with Topic.open(path, create=True, partitions=1) as topic:
        topic.append(b"first", sync=True)
        with Mirror(path, to) as mirror:
            mirror.copy()
        link_all(to, copy)
        topic.append(b"second", sync=True)
        before = last_segment(copy).read_bytes(), (copy / "0000" / "watermark").read_bytes()
        with Mirror(path, to) as mirror:
            mirror.copy()
    assert values(to) == [b"first", b"second"]
    assert (last_segment(copy).read_bytes(), (copy / "0000" / "watermark").read_bytes()) == before
    assert values(copy) == [b"first"]


def test_groups_of_both_copies_read_and_commit_alone(path: Path, tmp_path: Path) -> None:
    with Topic.open(path, create=True, partitions=2) as topic:
        for number in range(4):
            topic.append(b"%d" % number, partition=number % 2, sync=True)
        with topic.group("g", member="m") as group:
            assert len(list(group.follow(timeout=0.05))) == 4
    copy = link_all(path, tmp_path / "copy")
    with Topic.open(path) as one, Topic.open(copy, create=True) as other:
        one.append(b"one", partition=0, sync=True)
        other.append(b"other", partition=0, sync=True)
        with one.group("g", member="m") as first, other.group("g", member="m") as second:
            assert [each.value for each in first.follow(timeout=0.05)] == [b"one"]
            assert [each.value for each in second.follow(timeout=0.05)] == [b"other"]
    shared = {each for each in shared_files(path, copy) if not each.endswith("group.json")}
    assert shared == {"topic.json", "topic.json.spare"}


def test_a_file_that_a_member_holds_stays_its_own_whatever_names_it_has(path: Path, tmp_path: Path) -> None:
    """Else a second member would own the partition, too."""
    with Topic.open(path, create=True, partitions=1) as topic:
        topic.append(b"one", sync=True)
        with topic.group("g") as group:
            assert group.poll()
            link_all(path, tmp_path / "copy")
            (owner,) = (path / "groups" / "g" / "owners").iterdir()
            file = LockFile(REAL, str(owner), 0o600)
            assert file.has_other_names() and not file.try_lock()
            file.abandon()
            with topic.group("g") as second:
                assert not second.poll(timeout=0.05)
            group.commit()


def test_a_copy_that_finds_no_room_leaves_the_file_as_it_was(path: Path, tmp_path: Path) -> None:
    class Full(type(REAL)):  # type: ignore[misc]
        def copy_file_range(self, *_: int) -> int:
            raise OSError(28, "No space left on device")

        def pwritev(self, *_: object) -> int:
            raise OSError(28, "No space left on device")

    with Topic.open(path, create=True) as topic:
        topic.append_many([b"before"] * 3)
    copy = link_all(path, tmp_path / "copy")
    before, files = sorted(os.listdir(path / "0000")), Full()
    with pytest.raises(OSError, match="No space"):
        files.open_write(str(last_segment(path)))
    assert last_segment(path).samefile(last_segment(copy))
    assert [each for each in sorted(os.listdir(path / "0000")) if not each.endswith(".tmp")] == before
    with Topic.open(path) as topic:
        topic.append(b"more", sync=True)
    assert sorted(os.listdir(path / "0000")) == before
