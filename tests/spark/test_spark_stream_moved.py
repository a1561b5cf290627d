"""A streaming query without Spark goes on in a topic that was moved: its checkpoint knows the log."""

import shutil
from pathlib import Path

import pytest
import spark_queried
from spark_logs import random_topic
from spark_queried import append, numbered
from stream_query import Query

from loglib import LogError

path = spark_queried.path


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loglib.spark.positions.LOOK_S", 0)


def test_query_goes_on_in_the_topic_that_was_moved(path: Path) -> None:
    query = Query(path, startingOffsets="earliest", maxOffsetsPerTrigger=60)
    query.trigger()
    moved = path.rename(path.with_name("moved"))
    append(moved, [b"later"], partition=0)
    query.restart(path=moved)
    query.run()
    assert sorted(query.values) == sorted([*numbered(0, 100), b"later"])
    moved.rename(path)
    query.restart(path=path)
    assert query.trigger() is None


def test_batch_that_was_planned_before_the_topic_was_moved_has_the_same_records(path: Path) -> None:
    query = Query(path, startingOffsets="earliest", maxOffsetsPerTrigger=60)
    before = query.trigger() or []
    query.trigger(run=False)
    moved = path.rename(path.with_name("moved"))
    query.restart(path=moved)
    rest = query.rows[len(before) :]
    assert sorted(query.values) == sorted(numbered(0, 100)) and {row["topic"] for row in rest} == {"moved"}


def test_topics_of_a_running_query_are_moved_and_exchanged(path: Path) -> None:
    other = random_topic(path.parent / "other", seed=1)
    query = Query(path.parent, startingOffsets="earliest")
    query.run()
    count = len(query.rows)
    path.rename(path.with_name("aside"))
    assert query.trigger() is None
    other.rename(path)
    path.with_name("aside").rename(other)
    append(other, [b"more"], partition=0)
    assert [(row["topic"], row["value"]) for row in query.trigger() or []] == [("other", b"more")]
    assert len(query.rows) == count + 1


def test_topic_that_is_gone_is_a_loss_also_if_another_one_has_its_name_now(path: Path) -> None:
    other = random_topic(path.parent / "other", seed=1)
    query = Query(path.parent, startingOffsets="earliest")
    query.run()
    shutil.rmtree(path)
    other.rename(path)
    append(path, [b"more"], partition=0)
    with pytest.raises(LogError, match="topic is log .*the topic was made again"):
        query.trigger()
    query.restart(failOnDataLoss=False)
    with pytest.warns(RuntimeWarning, match="the topic was made again"):
        assert [row["value"] for row in query.trigger() or []] == [b"more"]


def test_copy_beside_its_original_is_another_topic(path: Path) -> None:
    query = Query(path.parent, startingOffsets="earliest")
    query.run()
    for name in ("one", "two"):
        shutil.copytree(path, path.with_name(name))
    assert len(query.trigger() or []) == 200 and query.trigger() is None
    shutil.rmtree(path)
    with pytest.raises(LogError, match="topic topic is gone"):
        query.trigger()
