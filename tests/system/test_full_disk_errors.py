"""A disk that is full names the file or the directory for which it has no room, whatever call was made."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import commands
import pytest
from commands import Cli
from disks import fill, memory

from conftest import QUIET, needs_root, values_of
from loglib import StorageFullError, Topic, copies, offload, transaction
from loglib.log import topic_file

pytestmark = needs_root
cli = commands.cli

SEGMENT_BYTES = 64 << 10
ROOMS = (0, 8 << 10, 60 << 10)  # bytes that are left: for no file, for some small ones, and for a segment


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """The path of a topic on a disk that is full."""
    with memory(tmp_path / "disk", "size=1m") as disk:
        with Topic.create(disk / "topic", partitions=2, segment_bytes=SEGMENT_BYTES, **QUIET) as topic:
            for number in range(60):
                topic.append_many([os.urandom(1000)] * 4, keys=[b"%d" % (number + each) for each in range(4)])
                topic.flush()
        fill(disk)
        yield disk / "topic"


def leave(topic: Path, room: int) -> None:
    filler = topic.with_name("filler")
    os.truncate(filler, filler.stat().st_size - room)


def alter(topic: Path) -> None:
    """The spare file would help. It has a second name, as in a copy by hard links, and is not written over."""
    if not (second := topic.with_name("second")).exists():
        second.hardlink_to(topic / topic_file.SPARE)
    with Topic.open(topic) as opened:
        opened.alter(segment_bytes=SEGMENT_BYTES + opened.config.segment_bytes)


def join_group(topic: Path) -> None:
    with Topic.open(topic, mode="r") as opened, opened.group("g") as group:
        group.poll(max_records=1)
        group.commit()


def join_share(topic: Path) -> None:
    with Topic.open(topic, mode="r") as opened, opened.share("s"):
        pass


def commit(topic: Path) -> None:
    with Topic.open(topic) as opened, transaction("app", store=topic.with_name("store")) as made:
        made.append_many(opened, [os.urandom(1000)] * 200)


CALLS: dict[str, tuple[Callable[[Path], object], str]] = {
    "create": (lambda topic: Topic.create(topic.with_name("new")).close(), "new"),
    "add_partitions": (lambda topic: Topic.add_partitions(topic, 40), "topic"),
    "alter": (alter, "topic/topic.json"),
    "group": (join_group, "topic/groups/g"),
    "share": (join_share, "topic/shares/s"),
    "transaction": (commit, ""),
    "snapshot": (lambda topic: copies.snapshot(topic, topic.with_name("copy"), links=False), "copy"),
    "mirror": (lambda topic: copies.mirror(topic, topic.with_name("copy")), "copy"),
    "archive": (lambda topic: offload.archive(topic, topic.with_name("place")), "place"),
    "tier": (lambda topic: offload.tier(topic, topic.with_name("place")), "place"),
}


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("name", CALLS)
def test_call_without_room_names_what_has_none_and_works_when_there_is_room(full: Path, name: str, room: int) -> None:
    call, named = CALLS[name]
    before = values_of_path(full)
    leave(full, room)
    try:
        call(full)
    except StorageFullError as error:
        assert error.errno == errno.ENOSPC
        assert str(error).count(str(full.parent / named)) == 1
        assert ".tmp" not in str(error), "it names what was built aside, and is gone"
    else:
        assert room, "nothing can be written on a full disk"
    assert [each.name for each in full.parent.iterdir() if each.name.endswith(".tmp")] == []
    full.with_name("filler").unlink()
    try:
        call(full)
    except FileExistsError:  # the first call has made it
        assert room
    after = values_of_path(full)[: len(before)]  # partitions may have come
    assert [each[: len(kept)] for each, kept in zip(after, before, strict=True)] == before


@pytest.mark.parametrize("command", ["copy", "snapshot", "mirror", "archive", "tier"])
def test_command_without_room_names_its_target(full: Path, cli: Cli, command: str) -> None:
    leave(full, 60 << 10)
    target = full.with_name("target")
    found = cli(command, full, target)
    assert (found.code, found.errors) == (3, f"loglib: {target}: No space left on device\n")


def values_of_path(path: Path) -> list[list[bytes | None]]:
    """The values of each partition."""
    with Topic.open(path, mode="r") as topic:
        return [values_of(partition) for partition in topic.partitions]
