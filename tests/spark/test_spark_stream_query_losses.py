"""Streaming queries without Spark over logs that lose records or are damaged: they fail, or pass over it on request."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import spark_queried
from builders import a_mark, spoil
from spark_logs import random_topic
from spark_queried import append, core_rows, plain
from stream_query import Query

from conftest import NOW, alter, last_segment
from loglib import CorruptLogError, LogError, Retention, Topic, repair, testing
from loglib.format.batch import stored_header
from loglib.format.watermark import encode_new
from loglib.segment import HEADER_BYTES, Identity

path = spark_queried.path


def drop_all_but(path: Path, size_bytes: int) -> None:
    alter(path, retention=Retention(age=None, bytes=size_bytes))
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        topic.retain()


@pytest.fixture
def rolling(tmp_path: Path) -> Path:
    """A topic of one partition with many small segments."""
    return random_topic(tmp_path / "topic", seed=7, partitions=1, retention=Retention(age=None))


@pytest.mark.parametrize("restarted", [False, True])
def test_retention_that_overtakes_a_query_is_an_error(rolling: Path, restarted: bool) -> None:
    query = Query(rolling, startingOffsets="earliest", maxOffsetsPerTrigger=20)
    query.trigger()
    drop_all_but(rolling, 5000)
    if restarted:
        query.restart()
    start = core_rows(rolling)[0]["offset"]
    here = query.end["end"]["topic"]["0"]
    message = rf"topic, partition 0: retention has dropped \[{here}, {start}\), {start - here} bytes that the query"
    with pytest.raises(LogError, match=message):
        query.trigger()
    query.restart(failOnDataLoss=False)
    with pytest.warns(RuntimeWarning, match=message):
        query.run()
    assert query.rows[20:] == core_rows(rolling)
    assert query.trigger() is None


def test_everything_dropped_is_one_empty_batch_and_then_silence(rolling: Path) -> None:
    query = Query(rolling, startingOffsets="earliest", maxOffsetsPerTrigger=20, failOnDataLoss=False)
    query.trigger()
    with testing.open_topic(rolling, clock=lambda: NOW) as topic:
        topic.append_many([bytes(5000)], partition=0)  # a segment of its own
        topic.append_many([b"last"], partition=0)
    drop_all_but(rolling, 1)
    with pytest.warns(RuntimeWarning, match="retention has dropped"):
        query.run()
    assert query.values[20:] == [row["value"] for row in core_rows(rolling)]
    assert query.trigger() is None


def test_retention_that_overtakes_a_planned_batch_is_an_error(rolling: Path) -> None:
    query = Query(rolling, startingOffsets="earliest")
    query.trigger(run=False)
    drop_all_but(rolling, 5000)
    with pytest.raises(LogError, match=r"retention has dropped \[0, \d+\) of a batch that was not finished"):
        query.restart()
    with pytest.warns(RuntimeWarning, match=r"retention has dropped \[0, \d+\) of a batch that was not finished"):
        query.restart(failOnDataLoss=False)
    assert query.rows == core_rows(rolling)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_topic_that_is_deleted_or_made_again_is_an_error(
    path: Path, restarted: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.spark.positions.LOOK_S", 0)
    random_topic(path.parent / "other", seed=1)
    query = Query(path.parent, startingOffsets="earliest", maxOffsetsPerTrigger=60)
    query.trigger()
    log_id = query.end["log"]["topic"]
    shutil.rmtree(path)
    message = f"topic topic is gone \\(log {log_id}\\)"
    if again:
        random_topic(path, seed=4)
        message = f"{path} is log [0-9a-f]{{32}}, and the query has read log {log_id}: the topic was made again"
    if restarted:
        query.restart()
    with pytest.raises(LogError, match=message):
        query.trigger()
    query.restart(failOnDataLoss=False)
    with pytest.warns(RuntimeWarning, match=message):
        query.run()
    of_new_topic = [row for row in query.rows[60:] if row["topic"] == "topic"]
    assert plain(of_new_topic) == (core_rows(path) if again else [])
    assert plain([row for row in query.rows if row["topic"] == "other"]) == core_rows(path.parent / "other")
    assert query.trigger() is None


def test_only_topic_deleted_under_a_running_query(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loglib.spark.positions.LOOK_S", 0)
    strict, lenient = Query(path), Query(path, failOnDataLoss=False)
    strict.run()
    lenient.run()
    shutil.rmtree(path)
    with pytest.raises(LogError, match="topic topic is gone"):
        strict.trigger()
    with pytest.warns(RuntimeWarning, match="topic topic is gone"):
        assert lenient.trigger() is None
    assert lenient.trigger() is None  # and no second warning
    random_topic(path, seed=4)
    with pytest.warns(RuntimeWarning, match="the topic was made again"):
        rows = lenient.trigger() or []
    assert plain(rows) == core_rows(path)


def test_partition_that_is_not_chosen_any_more_is_a_loss(path: Path) -> None:
    query = Query(path, startingOffsets="earliest")
    query.run()
    query.restart(assign='{"topic": [0, 2]}')
    with pytest.raises(LogError, match="topic, partition 1: the query's options do not choose it"):
        query.trigger()


@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
def test_log_restored_from_before_is_an_error(path: Path, grown: bool, restarted: bool) -> None:
    backup = path.parent / "backup"
    shutil.copytree(path, backup)
    append(path, [b"lost"] * 20, partition=1)
    query = Query(path, startingOffsets="earliest")
    query.run()
    path.rename(path.parent / "old")
    backup.rename(path)
    if grown:
        append(path, [b"other"] * 30, partition=1)
    if restarted:
        query.restart()
    message = "has grown again with other records" if grown else "the query has read up to offset .* cut or restored"
    if not restarted:
        os.utime(path)
        for log in query.reader._follower._subscription._logs.values():
            log._look_at = 0.0  # a second later
    with pytest.raises(LogError, match=message):
        query.trigger()
    query.restart(failOnDataLoss=False)
    with pytest.warns(RuntimeWarning, match=message):
        query.run()
    append(path, [b"new"], partition=1)
    query.run()
    assert query.values[-1] == b"new"
    assert query.trigger() is None


def test_planned_batch_of_a_log_that_was_restored_is_an_error(path: Path) -> None:
    backup = path.parent / "backup"
    shutil.copytree(path, backup)
    append(path, [b"lost"] * 20, partition=1)
    query = Query(path, startingOffsets="earliest")
    query.trigger(run=False)
    shutil.rmtree(path)
    shutil.copytree(backup, path)
    with pytest.raises(LogError, match="a batch that was not finished ends at offset .* and the log at"):
        query.restart()
    append(path, [b"other"] * 30, partition=1)
    with pytest.raises(LogError, match="has grown again with other records"):
        query.restart()
    with pytest.warns(RuntimeWarning, match="has grown again with other records"):
        query.restart(failOnDataLoss=False)
    assert len(query.rows) >= 100


def test_damage_is_named(path: Path) -> None:
    query = Query(path, startingOffsets="earliest", maxOffsetsPerTrigger=5)
    segment = last_segment(path)
    damaged = bytearray(segment.read_bytes())
    damaged[4096 + 20] ^= 1
    segment.write_bytes(damaged)
    with pytest.raises(CorruptLogError, match=f"{segment}, byte "):
        query.run()


@pytest.mark.parametrize(
    "limits", [{}, {"maxOffsetsPerTrigger": 7}, {"maxBytesPerTrigger": 300}, {"minOffsetsPerTrigger": 5}], ids=str
)
@pytest.mark.parametrize("in_batch", [20, 150], ids=["header", "body"])
def test_damage_is_left_out_on_request(path: Path, limits: dict[str, Any], in_batch: int) -> None:
    with Topic.open(path, mode="r") as topic:
        bases = {
            number: [stored_header(batch).base_offset for batch in topic.partition(number).batches()]
            for number in range(3)
        }
    for number, index in ((0, 1), (0, 3), (1, 0)):  # the third is the last of its partition, the fourth the first
        segment = last_segment(path, number)
        damaged = bytearray(segment.read_bytes())
        damaged[HEADER_BYTES + bases[number][index] + in_batch] ^= 1
        segment.write_bytes(damaged)
    query = Query(path, startingOffsets="earliest", onGap="skip", **limits)
    while query.trigger() is not None:
        query.restart()
    with Topic.open(path, mode="r") as topic, topic.read(on_damage="skip") as reader:
        expected = [(each.partition, each.offset, each.value) for each in reader]
    assert len(expected) == 70
    assert [(row["partition"], row["offset"], row["value"]) for row in plain(query.rows)] == sorted(expected)


@pytest.mark.parametrize("limits", [{}, {"maxOffsetsPerTrigger": 7}, {"maxBytesPerTrigger": 700}])
def test_stream_passes_over_gaps_that_a_repair_has_declared(path: Path, limits: dict[str, Any]) -> None:
    with Topic.open(path, mode="r") as topic:
        bases = [stored_header(batch).base_offset for batch in topic.partition(0).batches()]
    spoil(last_segment(path, 0), HEADER_BYTES + bases[1] + 40, HEADER_BYTES + bases[-1] + 140)
    repair(path)
    query = Query(path, startingOffsets="earliest", **limits)
    while query.trigger() is not None:
        query.restart()
    with Topic.open(path, mode="r") as topic:
        expected = [(each.partition, each.offset, each.value) for each in topic.read()]
    assert len(expected) < 100
    assert [(row["partition"], row["offset"], row["value"]) for row in plain(query.rows)] == sorted(expected)
    append(path, [b"later"], partition=0)
    query.trigger()
    assert b"later" in [row["value"] for row in query.rows]


def test_watermark_that_lies_is_damage_and_not_tasks_without_end(path: Path) -> None:
    query = Query(path, startingOffsets="earliest")
    with Topic.open(path, mode="r") as topic:
        salt = Identity.of(topic.log_id, 0).salt
    (path / "0000" / "watermark").write_bytes(encode_new(a_mark(9, 0, 1 << 60, 1 << 60, 1), salt))
    with pytest.raises(CorruptLogError, match="found the end of the data"):
        query.trigger()
    query.restart(onGap="skip")
    assert len(query.run()[0]) == 100
