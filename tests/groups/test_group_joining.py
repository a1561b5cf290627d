"""A group is made once, and joined by members that agree with it; others are refused and leave nothing."""

import errno
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from consumers import rebalance, rest

import loglib
from conftest import needs_proc, run_python
from loglib import StorageIOError, Topic, testing
from loglib.errors import GroupMismatchError
from loglib.testing import Call, FaultyFiles, WatchedFiles

Opener = Callable[..., Topic]

pytestmark = pytest.mark.usefixtures("attentive")


def test_members_file_and_directories_say_who_and_where(topic: Topic, path: Path) -> None:
    with topic.group("etl", member="web-1") as group:
        assert group.poll() != []
        names = sorted(str(each.relative_to(path / "groups" / "etl")) for each in (path / "groups" / "etl").rglob("*"))
        (log,) = (path / "groups" / "etl" / "offsets").iterdir()
        assert names == [
            "members", "members/web-1", "offsets", f"offsets/{log.name}", f"offsets/{log.name}/{'0' * 20}.log",
            f"offsets/{log.name}/lock", f"offsets/{log.name}/watermark", "owners",
            f"owners/{topic.log_id.hex()}-0",
        ]  # fmt: skip
        assert repr(group) == f"<Group etl, member web-1, owning {group.assignment}>"
    assert repr(group) == "<Group etl, member web-1, closed>"


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "x" * 250])
def test_names_that_are_no_file_names_are_refused(topic: Topic, path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        topic.group(name)
    assert not (path / "groups").exists()
    with pytest.raises(ValueError, match="is not a name"):
        topic.group("etl", member=name)


def test_starts_and_strategies_that_make_no_sense_are_refused(topic: Topic, path: Path) -> None:
    for options, message in [
        ({"start": 5}, "cannot start at offset 5"), ({"start": "middle"}, "start must be"),
        ({"strategy": "random"}, "strategy must be one of"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            topic.group("etl", **options)  # type: ignore[arg-type]
    assert not (path / "groups").exists()


# --- making a group ------------------------------------------------------------------------------


def test_group_whose_making_fails_leaves_nothing(topic: Topic, path: Path) -> None:
    place = topic._group_directory("etl", [])
    with pytest.raises(OSError, match="No space"):
        place._replace(files=FaultyFiles("rename", error=errno.ENOSPC)).make()
    assert list((path / "groups").iterdir()) == []


def test_group_that_two_make_at_once_is_made_once(topic: Topic, path: Path) -> None:
    class Racing(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == "mkdir" and call.file == "groups":
                place.make()

    place = topic._group_directory("etl", [])
    place._replace(files=Racing()).make()
    assert [each.name for each in (path / "groups").iterdir()] == ["etl"]
    place.make()


def test_group_whose_making_fails_at_once_says_why(topic: Topic) -> None:
    with pytest.raises(OSError, match="No space"):
        topic._group_directory("etl", [])._replace(files=FaultyFiles("mkdir", at=2, error=errno.ENOSPC)).make()


# --- settings that differ ------------------------------------------------------------------------


def test_member_with_another_strategy_is_refused_by_name(topic: Topic) -> None:
    with topic.group("etl", member="web-1"):
        match = "member web-1 has strategy='range', this member has strategy='sticky'"
        with pytest.raises(GroupMismatchError, match=match):
            topic.group("etl", strategy="sticky")
        with topic.group("etl") as other:
            assert other.members == sorted([other.member, "web-1"])
    with topic.group("etl", strategy="sticky") as group:
        assert rest(group) == list(range(10))


@pytest.mark.parametrize("strategy", ["range", "sticky"])
def test_members_with_other_topics_leave_no_partition_without_an_owner(
    open_topic: Opener, tmp_path: Path, strategy: Any
) -> None:
    clicks, views = (open_topic(tmp_path / name, partitions=4) for name in ("clicks", "views"))
    with ExitStack() as stack:
        old = [stack.enter_context(clicks.group("etl", member=f"b{n}", strategy=strategy)) for n in range(2)]
        rebalance(*old)
        both = [clicks, views]
        new = [stack.enter_context(loglib.group(both, "etl", member=f"a{n}", strategy=strategy)) for n in range(2)]
        rebalance(*old, *new)
        rebalance(*old, *new)
        owned = [("clicks", number) for each in old for number in each.assignment]
        owned += [(each.topic, each.partition) for member in new for each in member.assignment]
        assert sorted(owned) == [(name, number) for name in ("clicks", "views") for number in range(4)]


# --- files and descriptors -----------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE])
def test_running_out_of_descriptors_says_so_and_leaves_nothing_owned(topic: Topic, error: int) -> None:
    files = FaultyFiles("create", error=error, armed=False, every=True)
    with testing.open_topic(topic.path, mode="r", files=files) as reading, reading.group("etl") as group:
        files.armed = True
        with pytest.raises(StorageIOError, match="claiming 1 partitions, each with an open file; raise the limit"):
            group.poll()
        assert group.assignment == [] and files.failed == 2  # once more, after spare files were closed
        files.armed = False
        assert rest(group) == list(range(10))


@needs_proc
def test_descriptors_are_one_for_each_partition_and_some(path: Path) -> None:
    """A thousand partitions would be two or three thousand files otherwise, which is more than a process may open."""
    program = """
        import os, resource, sys
        from loglib import FlushPolicy, StorageIOError, Topic
        with Topic.open(sys.argv[1], create=True, partitions=150, durability="os", shared=True) as topic:
            pass
        for number in range(0, 150, 7):
            with Topic.open(sys.argv[1], shared=True) as topic:
                topic.append(b"%d" % number, partition=number, sync=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (270, 270))
        with Topic.open(sys.argv[1], mode="r") as topic:
            with topic.group("etl") as group:
                print(sorted(int(record.value) for record in group.follow(timeout=0.0)) == list(range(0, 150, 7)))
                print(len(group.assignment), 150 < len(os.listdir("/proc/self/fd")) < 150 + 80)
            resource.setrlimit(resource.RLIMIT_NOFILE, (100, 270))
            with topic.group("etl") as group:
                for _ in range(2):
                    try:
                        group.poll()
                    except StorageIOError as error:
                        print(group.assignment, "raise the limit (ulimit -n)" in str(error))
            resource.setrlimit(resource.RLIMIT_NOFILE, (270, 270))
            with topic.group("etl") as group:
                print(group.poll(), len(group.assignment))
    """
    assert run_python(program, path).splitlines() == ["True", "150 True", "[] True", "[] True", "[] 150"]
