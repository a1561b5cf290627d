"""Administration: what is done to a group from outside, with nobody running or to a member that hangs."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loglib
from conftest import SECOND, Clock, needs_proc, opened_since, settled_files
from loglib import (
    GroupBusyError,
    GroupNotFoundError,
    LogError,
    LogMovedError,
    OffsetOutOfRangeError,
    StaleGenerationError,
    Topic,
    TopicPartition,
    testing,
)
from loglib.errors import GroupElsewhereError
from loglib.groups import OffsetMove, administration, delete_group, evict_member, group_info, reset_group
from loglib.groups.commit_log import LogPartition
from loglib.groups.lock_file import LockFile
from loglib.groups.owners import Ownership, evict_owner
from loglib.metrics import Lag
from loglib.system.files import REAL
from loglib.testing import UnsyncedFiles

Opener = Callable[..., Topic]


@pytest.fixture
def topic(open_topic: Opener, clock: Clock) -> Topic:
    """Two partitions with a record a second in each, one batch at a time."""
    topic = open_topic(partitions=2)
    for number in range(10):
        topic.append(b"%d" % number, partition=number % 2, sync=True)
        clock.now += SECOND
    return topic


def consume(topic: Topic, name: str = "etl") -> list[int]:
    with topic.group(name) as group:
        return sorted(int(record.value or b"") for record in group.follow(timeout=0.0))


def tree(path: Path) -> list[tuple[str, int]]:
    return sorted((str(each), each.stat().st_size) for each in path.rglob("*"))


def test_reset_moves_all_partitions(topic: Topic) -> None:
    assert consume(topic) == list(range(10))
    ends = [topic.partition(number).log_end_offset for number in (0, 1)]
    moves = reset_group(topic, "etl", "-5s")
    assert {number: move.before for number, move in moves.items()} == dict(enumerate(ends))
    assert consume(topic) == [5, 6, 7, 8, 9]
    assert reset_group(topic, "etl", "begin") == {0: OffsetMove(ends[0], 0), 1: OffsetMove(ends[1], 0)}
    assert consume(topic) == list(range(10))
    assert reset_group(topic, "etl", "end") == {number: OffsetMove(ends[number], ends[number]) for number in (0, 1)}
    assert consume(topic) == []


def test_reset_moves_what_a_mapping_names_and_leaves_the_rest(topic: Topic) -> None:
    assert consume(topic) == list(range(10))
    offset = [record.offset for record in topic.partition(1).read()][3]
    assert list(reset_group(topic, "etl", {1: offset})) == [1]
    assert consume(topic) == [7, 9]


def test_dry_run_says_what_would_be_and_changes_nothing(topic: Topic, path: Path) -> None:
    assert reset_group(topic, "etl", "begin", dry_run=True) == {0: OffsetMove(None, 0), 1: OffsetMove(None, 0)}
    assert not (path / "groups").exists()
    assert consume(topic) == list(range(10))
    before = tree(path / "groups")
    with topic.group("etl"):  # members do not matter
        moves = reset_group(topic, "etl", "-1s", dry_run=True)
        assert moves[1].after < (moves[1].before or 0)
    assert tree(path / "groups") == before
    assert consume(topic) == []


def test_reset_makes_a_group_that_was_not(topic: Topic) -> None:
    moves = reset_group(topic, "new", "-2s")
    assert [move.before for move in moves.values()] == [None, None]
    assert consume(topic, "new") == [8, 9]


def test_group_with_members_is_not_reset(topic: Topic) -> None:
    with topic.group("etl", member="b"), topic.group("etl", member="a"):
        with pytest.raises(GroupBusyError, match="in use by a, b") as caught:
            reset_group(topic, "etl", "begin")
        assert (caught.value.group, caught.value.members) == ("etl", ["a", "b"])
    reset_group(topic, "etl", "begin")


def test_member_that_joins_in_the_middle_of_a_reset_starts_before_it_or_behind(
    topic: Topic, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert consume(topic) == list(range(10))
    live: Any = vars(administration)["live_members"]

    def joined_meanwhile(*arguments: Any) -> Any:
        found = live(*arguments)
        joined.append(topic.group("etl", member="quick"))
        assert joined[0].poll() == []
        return found

    joined: list[Any] = []
    monkeypatch.setattr(administration, "live_members", joined_meanwhile)
    with pytest.raises(GroupBusyError, match="in use by quick"):
        reset_group(topic, "etl", "begin")
    joined[0].close()
    assert consume(topic) == []


def test_reset_that_fails_leaves_no_member_behind(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    assert consume(topic) == list(range(10))

    def fail(*_: Any, **__: Any) -> bool:
        raise OSError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(Ownership, "claim", fail)
        with pytest.raises(OSError, match="no more"):
            reset_group(topic, "etl", "begin")
    reset_group(topic, "etl", "begin")
    assert consume(topic) == list(range(10))


@needs_proc
def test_resets_leave_no_file_open(topic: Topic) -> None:
    consume(topic)
    before = settled_files()
    reset_group(topic, "etl", "begin")
    reset_group(topic, "etl", "begin", dry_run=True)
    assert not opened_since(before)


def test_reset_to_an_offset_where_no_record_begins_is_refused(topic: Topic) -> None:
    assert consume(topic) == list(range(10))
    for start, error in [
        (0, ValueError),
        ("middle", ValueError),
        ({5: 0}, ValueError),
        ({0: 1 << 40}, OffsetOutOfRangeError),
        ({0: "x"}, ValueError),
        (1.5, TypeError),
    ]:
        with pytest.raises(error):
            reset_group(topic, "etl", start)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not a name"):
        reset_group(topic, "../etl", "begin")
    assert consume(topic) == []


def test_evicting_gives_the_partitions_to_others(topic: Topic) -> None:
    with topic.group("etl", member="hung") as hung:
        assert hung.poll() != []
        assert evict_member(topic, "etl", "hung") == [0, 1]
        with topic.group("etl", member="other") as other:
            assert sorted(int(record.value or b"") for record in other.follow(timeout=0.0)) == list(range(10))
            assert other.members == ["other"]


def test_evicting_who_is_no_member_is_an_error(topic: Topic) -> None:
    for _ in range(2):
        with pytest.raises(LogError, match="group etl has no member gone"):
            evict_member(topic, "etl", "gone")
        consume(topic)


def test_evicting_a_member_that_leaves_meanwhile_harms_nobody(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    live: Any = vars(administration)["live_members"]
    leaving = topic.group("etl", member="leaving")

    def left_meanwhile(*arguments: Any) -> Any:
        found = live(*arguments)
        leaving.close()
        return found

    monkeypatch.setattr(administration, "live_members", left_meanwhile)
    assert evict_member(topic, "etl", "leaving") == []
    assert consume(topic) == list(range(10))


def test_member_of_a_group_on_several_topics_is_evicted_from_all(
    open_topic: Opener, topic: Topic, tmp_path: Path
) -> None:
    views = open_topic(tmp_path / "views", partitions=2)
    topics = [topic, views]
    for given, expected in (
        (topic, [0, 1]), (topics, [("topic", 0), ("topic", 1), ("views", 0), ("views", 1)]),
    ):  # fmt: skip
        with loglib.group(topics, "etl", member="hung", commit="manual") as hung:
            assert hung.poll() != []
            assert evict_member(given, "etl", "hung") == expected
            with loglib.group(topics, "etl", member="other", commit="manual") as other:
                assert len(list(other.follow(timeout=0.0))) == 10
                assert len(other.assignment) == 4
            with pytest.raises(LogError, match="has no member hung"):
                evict_member(given, "etl", "hung")


def test_member_that_hangs_before_it_has_signed_what_it_took_can_be_evicted(topic: Topic, path: Path) -> None:
    owners = path / "groups/etl/owners"
    texts = ("", '{"member": null, "generation": 3, "pid": 1}', '{"member": "dead", "generation": 3, "pid": 1}')
    for signed_before in texts:
        with topic.group("etl", member="hung") as hung, topic.group("etl", member="healthy") as healthy:
            (owners / f"{topic.log_id.hex()}-0").unlink(missing_ok=True)
            (owners / f"{topic.log_id.hex()}-0").write_text(signed_before)
            unsigned = LockFile(REAL, str(owners / f"{topic.log_id.hex()}-0"), 0o600)
            assert unsigned.try_lock()
            healthy_file = LockFile(REAL, str(owners / f"{topic.log_id.hex()}-1"), 0o600)
            assert healthy_file.try_lock()
            healthy_file.replace(b'{"member": "healthy", "generation": 5, "pid": 1}')
            assert evict_member(topic, "etl", "hung") == [0]
            assert not unsigned.is_named() and healthy_file.is_named()
            unsigned.abandon()
            healthy_file.abandon()
            assert healthy.members == ["healthy"] and hung.assignment == []


def test_member_that_signs_in_time_is_not_taken_for_the_one_that_hangs(
    topic: Topic, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with topic.group("etl", member="hung"), topic.group("etl", member="quick"):
        file = LockFile(REAL, str(path / f"groups/etl/owners/{topic.log_id.hex()}-0"), 0o600)
        assert file.try_lock()
        signed = b'{"member": "quick", "generation": 5, "pid": 1}'
        monkeypatch.setattr(time, "sleep", lambda _: file.replace(signed))
        assert evict_member(topic, "etl", "hung") == []
        assert file.is_named()
        file.abandon()


def test_interrupted_eviction_can_be_repeated(topic: Topic, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with topic.group("etl", member="hung") as hung:
        assert hung.poll() != []

        def cut(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(administration, "evict_owner", cut)
            evict_member(topic, "etl", "hung")
        assert os.listdir(path / "groups/etl/members") == []
        assert evict_member(topic, "etl", "hung") == [0, 1]
        evict_owner(REAL, str(path / "groups/etl/owners"), LogPartition(topic.log_id, 0), 0o600)


# --- looking ---------------------------------------------------------------------------------------


def test_monitor_that_asked_for_lag_took_partitions_from_the_consumer(topic: Topic, path: Path) -> None:
    with topic.group("ship", member="shipper") as group:
        group.poll()
        files = tree(path)
        with Topic.open(path, mode="r") as other:
            info = other.group_info("ship", count_records=True)
        assert tree(path) == files
        group.poll()
        assert group.assignment == [0, 1]
    assert info.name == "ship"
    assert list(info.members) == ["shipper"] and info.members["shipper"].pid == os.getpid()
    assert info.members["shipper"].topics == (topic.name,)
    assert info.owners == {0: "shipper", 1: "shipper"}
    assert info.committed == {}
    assert [lag.records for lag in info.lag.values()] == [5, 5]


def test_info_of_a_group_without_members_has_its_commits_and_its_lag(topic: Topic) -> None:
    consume(topic, "ship")
    ends = [partition.log_end_offset for partition in topic.partitions]
    topic.append(b"more", partition=1, sync=True)
    info = topic.group_info("ship")
    assert (info.members, info.owners) == ({}, {})
    assert {number: commit.offset for number, commit in info.committed.items()} == dict(enumerate(ends))
    assert info.lag[0] == Lag(0, 0.0)
    assert info.lag[1].bytes == topic.partition(1).log_end_offset - ends[1]


def test_dead_member_is_not_in_the_info_and_its_file_is_left_to_the_members(topic: Topic, path: Path) -> None:
    consume(topic, "ship")
    left = path / "groups" / "ship" / "members" / "dead"
    left.write_bytes(b"")
    assert topic.group_info("ship").members == {}
    assert left.exists()


def test_unknown_group_is_an_error_and_asking_leaves_no_files(topic: Topic, path: Path) -> None:
    files = tree(path)
    for ask in (topic.group_info, topic.delete_group):
        with pytest.raises(GroupNotFoundError, match="has no group shup; it has none"):
            ask("shup")
    assert topic.groups() == []
    assert tree(path) == files
    consume(topic, "ship")
    consume(topic, "audit")
    assert topic.groups() == ["audit", "ship"]
    with pytest.raises(GroupNotFoundError, match="it has audit, ship") as caught:
        topic.group_info("shup")
    assert (caught.value.group, caught.value.found) == ("shup", ["audit", "ship"])


def test_info_of_a_group_on_several_topics(topic: Topic, tmp_path: Path) -> None:
    with Topic.open(tmp_path / "views", create=True) as views:
        views.append(b"view", sync=True)
        both = [topic, views]
        with loglib.group(both, "etl", member="one") as group:
            assert len(list(group.follow(timeout=0.0))) == 11
            info = group_info(both, "etl")
            places = [TopicPartition(topic.name, 0), TopicPartition(topic.name, 1), TopicPartition("views", 0)]
            assert sorted(info.owners) == sorted(info.lag) == places
            assert sorted(topic.group_info("etl").owners) == [0, 1]
            assert topic.group_info("etl") == group_info(topic, "etl")
        with pytest.raises(GroupElsewhereError):
            views.group_info("etl")
        assert (topic.groups(), views.groups()) == (["etl"], [])


# --- deleting --------------------------------------------------------------------------------------


def test_deleted_group_starts_again_at_the_beginning(topic: Topic, path: Path) -> None:
    assert consume(topic) == list(range(10))
    with topic.group("etl", member="one"), pytest.raises(GroupBusyError, match="one"):
        delete_group(topic, "etl")
    delete_group(topic, "etl")
    assert topic.groups() == [] and list((path / "groups").iterdir()) == []
    assert consume(topic) == list(range(10))


def test_group_that_is_deleted_is_forgotten_by_all_its_topics(topic: Topic, tmp_path: Path) -> None:
    with Topic.open(tmp_path / "views", create=True) as views:
        loglib.group([topic, views], "etl").close()
        delete_group([topic, views], "etl")
        assert list((tmp_path / "views" / "groups").iterdir()) == []
        consume(views, "etl")
        delete_group(views, "etl")
        assert views.groups() == []


def test_member_that_joins_while_its_group_is_deleted_learns_of_it(topic: Topic) -> None:
    group = topic.group("etl")
    group.poll()
    topic._group_directory("etl").remove()
    with pytest.raises(StaleGenerationError):
        group.commit()
    with pytest.raises(LogMovedError):
        group.close()


@needs_proc
def test_group_whose_close_fails_leaves_no_file_open(topic: Topic) -> None:
    """It kept its watches and its readers, and warned later that it was not closed."""
    topic.group("etl").close()
    before = settled_files()
    group = topic.group("etl")
    group.poll()
    topic._group_directory("etl").remove()
    with pytest.raises(LogMovedError):
        group.close()
    assert not opened_since(before)
    group.close()


def test_group_that_is_deleted_while_groups_are_listed_is_left_out(topic: Topic) -> None:
    """The listing ended in a `FileNotFoundError`."""
    for name in ("billing", "etl"):
        consume(topic, name)

    class Deleting(UnsyncedFiles):
        def listdir(self, path: Any) -> list[str]:
            names = super().listdir(path)
            if str(path).endswith("groups"):
                topic.delete_group("etl")
            return names

    with testing.open_topic(topic.path, mode="r", files=Deleting()) as reading:
        assert reading.groups() == ["billing"]
