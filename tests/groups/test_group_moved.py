"""A topic that was moved is the same topic to its groups; one that was copied beside its original is another one."""

import json
import os
import shutil
from pathlib import Path

import pytest
from consumers import fill, rest

import loglib
from loglib import LogError, StaleGenerationError, Topic
from loglib.errors import GroupElsewhereError, LogReplacedError
from loglib.groups import TopicPartition, administration

pytestmark = pytest.mark.usefixtures("attentive")


def make(path: Path, count: int = 5) -> Path:
    with Topic.open(path, create=True) as topic:
        fill(topic, count)
        topic.flush()
    return path


def handle(*paths: Path, start: str = "begin", most: int = 100) -> list[tuple[str, int]]:
    """Join a group on these topics, and handle what it has not handled yet."""
    topics = [Topic.open(path, mode="r") for path in paths]
    try:
        with loglib.group(topics, "etl", start=start) as group:
            return [(name, int(record.value or b"")) for name, record in group.follow(timeout=0.0)][:most]
    finally:
        for topic in topics:
            topic.close()


def lags(*paths: Path) -> dict[object, int]:
    topics = [Topic.open(path, mode="r") for path in paths]
    try:
        found = loglib.groups.group_info(topics, "etl", count_records=True).lag
        return {each.topic: behind.records or 0 for each, behind in found.items()}
    finally:
        for topic in topics:
            topic.close()


def more(path: Path, *values: bytes) -> None:
    with Topic.open(path, create=True) as topic:
        topic.append_many(values)


def test_group_of_a_moved_topic_goes_on_where_it_was(tmp_path: Path) -> None:
    """With `start="end"` nothing is skipped, and with the default nothing comes again."""
    for start in ("begin", "end"):
        path = make(tmp_path / f"orders-{start}")
        with Topic.open(path, mode="r") as topic, topic.group("etl", start=start, commit="manual") as group:
            group.poll()
            group.seek({0: "begin"})
            group.commit(group.poll(max_records=1)[0])
        moved = path.rename(tmp_path / f"moved-{start}")
        with Topic.open(moved, mode="r") as topic:
            info = topic.group_info("etl", count_records=True)
            assert info.lag[0].records == 4 and list(info.committed) == [0]
            with topic.group("etl", start=start) as group:
                assert group.lag(count_records=True)[0].records == 4 and list(group.committed()) == [0]
                assert topic.stats().lag["etl"][0].bytes > 0
                assert rest(group) == [1, 2, 3, 4]


def test_retention_finds_the_commits_of_moved_topics(tmp_path: Path) -> None:
    clicks, views = make(tmp_path / "clicks"), make(tmp_path / "views")
    handle(clicks, views)
    clicks.rename(tmp_path / "clicks2")
    views = views.rename(tmp_path / "views2")
    with Topic.open(views, mode="r") as topic:
        found = administration.committed(topic._group_directory("etl"))
        assert found == {TopicPartition("views2", 0): topic.partition(0).log_end_offset}


def test_group_of_several_topics_goes_on_when_they_were_moved(tmp_path: Path) -> None:
    clicks, views = make(tmp_path / "clicks"), make(tmp_path / "views")
    assert len(handle(clicks, views)) == 10
    views = views.rename(tmp_path / "views2")
    assert lags(clicks, views) == {"clicks": 0, "views2": 0}
    assert handle(clicks, views) == []
    clicks = clicks.rename(tmp_path / "clicks2")
    more(views, b"5")
    assert lags(clicks, views) == {"clicks2": 0, "views2": 1}
    assert handle(clicks, views, start="end") == [("views2", 5)]
    pointer = json.loads((views / "groups/etl").read_bytes())
    assert (pointer["topic"], pointer["of"]) == ("clicks2", "views2")
    with Topic.open(views, mode="r") as topic, pytest.raises(GroupElsewhereError, match="with topic clicks2"):
        topic.group_info("etl")
    views = views.rename(tmp_path / "views")
    assert handle(clicks, views) == []


def test_topics_that_exchange_their_names_keep_their_commits(tmp_path: Path) -> None:
    first, one, two = make(tmp_path / "first", 1), make(tmp_path / "one", 3), make(tmp_path / "two", 5)
    assert len(handle(first, one, two)) == 9
    more(one, b"30")
    more(two, b"50")
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    assert sorted(handle(first, one, two)) == [("one", 50), ("two", 30)]


def test_topic_that_is_kept_elsewhere_names_the_moved_one(tmp_path: Path) -> None:
    clicks, views = make(tmp_path / "clicks"), make(tmp_path / "views")
    handle(clicks, views)
    clicks.rename(tmp_path / "renamed")
    make(tmp_path / "clicks")  # another log by the old name
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/topic.json").write_text("{")
    with Topic.open(views, mode="r") as topic, pytest.raises(GroupElsewhereError, match="with topic renamed"):
        topic.group("etl")


def test_topic_made_anew_at_the_old_name_is_not_the_one_that_was_committed(tmp_path: Path) -> None:
    clicks, views = make(tmp_path / "clicks"), make(tmp_path / "views")
    handle(clicks, views)
    moved = views.rename(tmp_path / "moved")
    make(views, 2)
    with pytest.raises(LogReplacedError, match="views-0"):
        handle(clicks, views)
    assert handle(clicks, moved) == []
    assert sorted(handle(clicks, moved, views)) == [("views", 0), ("views", 1)]
    assert handle(clicks, moved, views) == [] == handle(clicks, views)


def test_copy_beside_its_original_does_not_take_its_commits(tmp_path: Path) -> None:
    clicks, views = make(tmp_path / "clicks"), make(tmp_path / "views")
    handle(clicks, views)
    copy = Path(shutil.copytree(views, tmp_path / "views2"))
    with pytest.raises(LogError, match="views2 is a copy of .*views, whose commits group etl has"):
        handle(clicks, copy)
    with pytest.raises(LogError, match="views and views2 are one log"):
        handle(clicks, views, copy)
    assert handle(clicks, views) == []
    os.remove(views / "groups/etl")  # the way out: the original leaves the group
    assert handle(clicks, copy) == []


def test_topics_that_were_all_copied_have_a_group_of_their_own(tmp_path: Path) -> None:
    clicks, views = make(tmp_path / "clicks"), make(tmp_path / "views")
    handle(clicks, views)
    more(views, b"5")
    copies = [Path(shutil.copytree(each, tmp_path / f"{each.name}2")) for each in (clicks, views)]
    assert handle(*copies) == [("views2", 5)]
    assert handle(clicks, views) == [("views", 5)] and handle(*copies) == []
    with pytest.raises(GroupElsewhereError, match="with topic clicks, "):
        handle(copies[0], views)
    with pytest.raises(GroupElsewhereError, match="with topic clicks2, "):
        handle(clicks, copies[1])


def test_topic_under_a_second_name_is_the_same(tmp_path: Path) -> None:
    clicks, views = make(tmp_path / "clicks"), make(tmp_path / "views")
    handle(clicks, views)
    (tmp_path / "link").symlink_to("views")
    assert handle(clicks, tmp_path / "link") == []
    with pytest.raises(LogError, match="are one log"):
        handle(clicks, views, tmp_path / "link")


def test_member_on_the_old_name_and_one_on_the_new_name_do_not_both_own_a_partition(tmp_path: Path) -> None:
    clicks, views = make(tmp_path / "clicks"), make(tmp_path / "views")
    with (
        Topic.open(clicks, mode="r") as first,
        Topic.open(views, mode="r") as other,
        loglib.group([first, other], "etl", member="old", commit="manual") as old,
    ):
        while old.poll():
            pass
        moved = views.rename(tmp_path / "moved")
        with Topic.open(moved, mode="r") as renamed, loglib.group([first, renamed], "etl", member="new") as new:
            assert new.poll() == [] and TopicPartition("moved", 0) not in new.assignment
            owners = loglib.groups.group_info([first], "etl").owners
            assert owners[TopicPartition("views", 0)] == "old"
            assert TopicPartition("moved", 0) in loglib.groups.evict_member([first, renamed], "etl", "old")
            while TopicPartition("moved", 0) not in new.assignment:
                new.poll()
            with pytest.raises(StaleGenerationError):
                old.poll()


def test_unreadable_file_of_a_group_that_is_kept_elsewhere_is_not_replaced(tmp_path: Path) -> None:
    clicks, views = make(tmp_path / "clicks"), make(tmp_path / "views")
    handle(clicks, views)
    (views / "groups/etl").write_text("nothing")
    with pytest.raises(GroupElsewhereError, match="with topic another"):
        handle(clicks, views)


def test_group_continues_in_a_backup_without_empty_directories(tmp_path: Path) -> None:
    """Tools that copy files to an object store, or into an archive, leave directories out in which no file is."""
    path = make(tmp_path / "orders")
    assert handle(path, most=5) == [("orders", number) for number in range(5)]
    for name in "members", "owners":
        shutil.rmtree(path / "groups" / "etl" / name)
    with Topic.open(path, mode="r") as topic:
        assert topic.group_info("etl").members == {} and topic.stats().lag["etl"][0].bytes == 0
        assert topic.reset_group("etl", {0: 0})[0].after == 0
    shutil.rmtree(path / "groups" / "etl" / "members")
    assert handle(path) == [("orders", number) for number in range(5)]
    more(path, b"5")
    shutil.rmtree(path / "groups" / "etl" / "members")
    with Topic.open(path, mode="r") as topic, topic.group("etl") as group:
        assert list(topic.group_info("etl").members) == [group.member]
        assert [record.value for record in group.follow(timeout=0.0)] == [b"5"]
    shutil.rmtree(path / "groups" / "etl" / "members")
    with Topic.open(path, mode="r") as topic:
        topic.delete_group("etl")
        assert topic.groups() == []
