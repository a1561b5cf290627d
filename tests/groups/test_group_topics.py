"""A group on several topics says which, wherever it is asked."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from consumers import fill, rest

import loglib
from loglib import Topic, TopicPartition
from loglib.errors import GroupElsewhereError
from loglib.testing import Call, FaultyFiles, WatchedFiles

Opener = Callable[..., Topic]

pytestmark = pytest.mark.usefixtures("attentive")


@pytest.fixture
def two_topics(open_topic: Opener, tmp_path: Path) -> tuple[Topic, Topic]:
    clicks, views = open_topic(tmp_path / "clicks", partitions=2), open_topic(tmp_path / "views", partitions=1)
    fill(clicks, 6)
    fill(views, 3)
    return clicks, views


def test_group_on_several_topics_says_which(two_topics: tuple[Topic, Topic]) -> None:
    clicks, views = two_topics
    with loglib.group([clicks, views], "etl") as group:
        found = [(name, int(record.value or b"")) for name, record in group.follow(timeout=0.0)]
        assert sorted(found) == [*(("clicks", each) for each in range(6)), *(("views", each) for each in range(3))]
        assert group.assignment == [("clicks", 0), ("clicks", 1), ("views", 0)]
        assert set(group.committed()) == set(group.lag()) == set(group.tell()) == set(group.assignment)
        group.seek({("views", 0): "begin"})
        assert [batch.values for name, batch in group.batches(timeout=0.0) if name == "views"] == [
            [b"0"],
            [b"1"],
            [b"2"],
        ]
        group.pause(("views", 0))
        fill(views, 1, first=3)
        assert group.poll() == []
        group.resume(TopicPartition("views", 0))
        ((name, record),) = group.poll()
        assert (name, record.value) == ("views", b"3")
        group.commit((name, record))
        group.commit({("views", 0): record.next_offset})
    with loglib.group([clicks, views], "etl") as group:
        assert group.poll() == []


def test_figures_of_each_topic_have_the_lag_of_a_group_on_several(two_topics: tuple[Topic, Topic]) -> None:
    clicks, views = two_topics
    with loglib.group([clicks, views], "etl") as group:
        lag = group.lag()
        assert views.stats().lag == {"etl": {0: lag[TopicPartition("views", 0)]}}
        assert clicks.stats().lag == {"etl": {each: lag[TopicPartition("clicks", each)] for each in (0, 1)}}
        assert [len(list(group.follow(timeout=0.0)))] == [9]
        group.commit()
        assert [each.bytes for each in views.stats().lag["etl"].values()] == [0]


def test_figures_have_no_group_whose_own_topic_is_gone(two_topics: tuple[Topic, Topic]) -> None:
    clicks, views = two_topics
    loglib.group([clicks, views], "etl").close()
    clicks.close()
    Topic.delete(clicks.path)
    assert views.stats().lag == {}


def test_group_on_several_topics_refuses_what_does_not_say_which(two_topics: tuple[Topic, Topic]) -> None:
    with loglib.group(two_topics, "etl") as group:
        ((_, record),) = group.poll(max_records=1)
        wrong: list[Any] = [record, ("clicks", 5), [("clicks", record)]]
        for what in wrong:
            with pytest.raises(TypeError, match="takes \\(topic, record\\)"):
                group.commit(what)
        for key in (0, ("clicks", 9), "clicks", ("other", 0)):
            with pytest.raises(ValueError, match="no partition"):
                group.pause(key)
    with pytest.raises(ValueError, match="different names"):
        loglib.group([two_topics[0]] * 2, "etl")
    with pytest.raises(ValueError, match="different names"):
        loglib.group([], "etl")


def test_closing_any_of_its_topics_closes_the_group(two_topics: tuple[Topic, Topic]) -> None:
    group = loglib.group(two_topics, "etl")
    two_topics[1].close()
    assert group.closed


def test_group_of_several_topics_is_found_from_any_of_them_or_refused_by_name(
    two_topics: tuple[Topic, Topic], tmp_path: Path
) -> None:
    clicks, views = two_topics
    with loglib.group([clicks, views], "etl") as group:
        assert group.poll() != []
    asked: list[Callable[[], Any]] = [
        lambda: views.group("etl"), lambda: loglib.groups.reset_group(views, "etl", "begin"),
        lambda: loglib.groups.reset_group(views, "etl", "begin", dry_run=True),
        lambda: loglib.groups.evict_member(views, "etl", "web"), lambda: loglib.group([views, clicks], "etl"),
    ]  # fmt: skip
    for call in asked:
        with pytest.raises(GroupElsewhereError, match="group etl is kept with topic clicks") as caught:
            call()
        assert caught.value.topic == "clicks" and caught.value.path == str(tmp_path / "views/groups/etl")
    with views.group("audit") as group:
        assert rest(group) == [0, 1, 2]
    with pytest.raises(GroupElsewhereError, match="group audit is kept with topic views"):
        loglib.group([clicks, views], "audit")
    (tmp_path / "views/groups/etl").write_text("{")
    with pytest.raises(GroupElsewhereError, match="with topic another"):
        views.group("etl")


def test_reset_of_a_group_on_several_topics_moves_all_of_them(two_topics: tuple[Topic, Topic]) -> None:
    with loglib.group(two_topics, "etl") as group:
        assert len(list(group.follow(timeout=0.0))) == 9
    moves = loglib.groups.reset_group(two_topics, "etl", {("views", 0): 0})
    assert list(moves) == [TopicPartition("views", 0)]
    with loglib.group(two_topics, "etl") as group:
        found = [(name, int(record.value or b"")) for name, record in group.follow(timeout=0.0)]
        assert found == [("views", number) for number in range(3)]
    assert len(loglib.groups.reset_group(two_topics, "etl", "begin")) == 3
    with loglib.group(two_topics, "etl") as group:
        assert len(list(group.follow(timeout=0.0))) == 9


def test_place_that_cannot_be_told_in_another_topics_directory_is_reported(
    two_topics: tuple[Topic, Topic], caplog: pytest.LogCaptureFixture
) -> None:
    clicks, views = two_topics
    place = clicks._group_directory("etl", two_topics)
    with pytest.raises(OSError, match="No space"):
        place._replace(files=FaultyFiles("rename", at=4, error=errno.ENOSPC)).make()

    class ReadOnly(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == "create" and str(views.path) in call.path:
                raise OSError(errno.EROFS, "Read-only file system")

    place._replace(files=ReadOnly()).make()
    assert "cannot write that group etl is kept with topic clicks" in caplog.text
