"""Streaming queries without Spark: what each batch reads, restarts, and repeated batches."""

import json
import shutil
from itertools import count
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest
import spark_queried
from spark_logs import random_topic, rows_of, scan_rows
from spark_queried import append, core_rows, numbered, plain
from stream_query import Query

from conftest import NOW, QUIET, alter
from loglib import GroupBusyError, LogError, Retention, Topic, testing, transaction
from loglib.format.watermark import Mark
from loglib.log.log import Log
from loglib.system.files import Files

path = spark_queried.path


# --- which records -----------------------------------------------------------------------------------


def test_new_query_starts_at_the_end_and_reads_what_comes(path: Path) -> None:
    query = Query(path)
    assert query.run() == [[]]  # the first batch stores where the query starts
    append(path, [b"new", b"newer"], partition=1)
    assert [row["value"] for row in query.trigger() or []] == [b"new", b"newer"]
    assert query.trigger() is None


def test_query_from_the_beginning_reads_everything_once(path: Path) -> None:
    query = Query(path, startingOffsets="earliest")
    assert query.trigger() is not None
    assert query.trigger() is None
    assert plain(query.rows) == core_rows(path)


@pytest.mark.parametrize("limit", [1, 7, 10, 33, 99, 1000])
def test_batch_has_exactly_n_records_while_there_are_as_many(path: Path, limit: int) -> None:
    query = Query(path, startingOffsets="earliest", maxOffsetsPerTrigger=limit)
    sizes = [len(rows) for rows in query.run()]
    assert sizes == [limit] * (100 // limit) + [100 % limit] * (100 % limit > 0)
    assert plain(query.rows) == core_rows(path)


def test_records_of_a_batch_come_from_all_partitions(path: Path) -> None:
    query = Query(path, startingOffsets="earliest", maxOffsetsPerTrigger=50)
    (rows, _) = query.run()
    counts = [sum(row["partition"] == number for row in rows) for number in range(3)]
    assert sorted(counts) == [15, 15, 20] or all(14 <= count <= 21 for count in counts)  # backlogs of 40, 30 and 30


def test_condition_leaves_records_out_and_the_query_goes_past_them(path: Path) -> None:
    """A limit counts what is looked at, and a batch may have no record."""
    with Topic.open(path) as topic:
        for number in range(30):
            key = b"even" if number % 2 == 0 else b"odd"
            topic.append(b"%s %d" % (key, number), key=key, partition=number % 3)
    query = Query(path, startingOffsets="earliest", where="key = 'even'", maxOffsetsPerTrigger=50)
    sizes = [len(rows) for rows in query.run()]
    assert len(sizes) == 3 and sum(sizes) == 15 and max(sizes) <= 50
    assert plain(query.rows) == [row for row in core_rows(path) if row["value"].startswith(b"even")]
    append(path, [b"without a key"], partition=0)
    assert query.trigger() == [] and query.trigger() is None


def test_limit_in_bytes_gives_whole_batches_of_the_log(path: Path) -> None:
    query = Query(path, startingOffsets="earliest", maxBytesPerTrigger=450)
    batches = query.run()
    assert {len(rows) for rows in batches} <= {10, 20}
    assert plain(query.rows) == core_rows(path)
    one = Query(path, startingOffsets="earliest", maxBytesPerTrigger=1)
    assert [len(rows) for rows in one.run()] == [10] * 10


def test_once_reads_everything_whatever_the_limit(path: Path) -> None:
    query = Query(path, startingOffsets="earliest", maxOffsetsPerTrigger=5)
    assert len(query.trigger(once=True) or []) == 100


def test_available_now_ends_at_the_end_that_it_found(path: Path) -> None:
    query = Query(path, startingOffsets="earliest", maxOffsetsPerTrigger=30, available_now=True)
    append(path, [b"later"], partition=0)
    Topic.add_partitions(path, 4)
    append(path, [b"later"], partition=3)
    assert [len(rows) for rows in query.run()] == [30, 30, 30, 10]
    query.restart(available_now=True)
    assert [row["value"] for row in query.run()[0]] == [b"later", b"later"]


def test_available_now_of_a_new_query_from_the_end_ends_at_once(path: Path) -> None:
    query = Query(path, available_now=True)
    append(path, [b"later"], partition=0)
    query.run()
    append(path, [b"last"], partition=0)
    query.run()
    query.restart(available_now=True)
    query.run()
    assert query.values[-1:] == [b"last"]


def test_partitions_and_topics_that_come_later_are_read_from_their_beginning(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.spark.positions.LOOK_S", 0)
    query = Query(path.parent, subscribePattern="t.*")
    query.run()
    Topic.add_partitions(path, 4)
    assert query.trigger() is None  # they are empty
    append(path, [b"a", b"b"], partition=3)
    append(path, [b"c"], partition=0)
    assert sorted(row["value"] for row in query.trigger() or []) == [b"a", b"b", b"c"]
    random_topic(path.parent / "two", seed=1, partitions=1, batches=3)
    rows = query.trigger() or []
    assert plain(rows) == core_rows(path.parent / "two")
    assert query.trigger() is None


def test_starting_options_are_those_of_a_batch(path: Path) -> None:
    offsets = [row["offset"] for row in core_rows(path) if row["partition"] == 1]
    places = json.dumps({"topic": {"0": -1, "1": offsets[25], "2": -2}})
    rows = Query(path, startingOffsets=places).run()[0]
    assert [sum(row["partition"] == number for row in rows) for number in range(3)] == [0, 5, 30]
    assert len(Query(path, startingTimestamp=NOW // 1000).run()[0]) == 100
    late = Query(path, startingTimestamp=NOW // 1000 + 1)
    with pytest.raises(ValueError, match="no record is as late as option startingTimestamp says"):
        late.trigger()
    late.restart(startingOffsetsByTimestampStrategy="latest")
    assert late.run() == [[]]
    with pytest.raises(ValueError, match="offset 7 means another record"):
        Query(path, start=7).trigger()
    with pytest.raises(ValueError, match="must name every partition"):
        Query(path, startingOffsets='{"topic": {"0": 0}}').trigger()


def test_idle_query_looks_less_often_if_a_look_takes_long(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark asks every ten milliseconds, and a look at a thousand partitions takes longer."""
    monkeypatch.setattr("loglib.spark.micro_batch._LONG_LOOK_S", 0)
    monkeypatch.setattr("loglib.spark.micro_batch._REST", 1e9)
    query = Query(path)
    assert query.run() == [[]]
    assert query.trigger() is None
    append(path, [b"new"], partition=1)
    assert query.trigger() is None
    query.reader._follower._idle_until = 0.0  # later
    assert len(query.trigger() or []) == 1


@pytest.mark.parametrize("as_stream", [True, False])
def test_transaction_is_read_from_all_partitions_or_from_none(
    tmp_path: Path, as_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It commits when the mark of the first partition has been read, and that of the second has not."""
    path = tmp_path / "topic"
    query = None
    with testing.open_topic(path, partitions=2, clock=lambda: NOW, **QUIET) as topic:
        if as_stream:
            query = Query(path)
            query.trigger()  # only one: after an idle one there is one more look
        published, commits = Log.published, iter([True])

        def commit_between(log: Log) -> Mark:
            mark = published(log)
            if log.writer is None and log.partition == 0 and next(commits, False):
                with transaction("etl") as tx:
                    tx.append(topic, b"a", partition=0)
                    tx.append(topic, b"b", partition=1)
            return mark

        monkeypatch.setattr(Log, "published", commit_between)
        rows = scan_rows(path) if query is None else query.trigger() or []
        assert next(commits, None) is None
        assert sorted(row["value"] for row in rows) in ([], [b"a", b"b"])


# --- waiting for enough records ----------------------------------------------------------------------


def test_small_batches_wait_for_more_records(path: Path) -> None:
    query = Query(path, minOffsetsPerTrigger=10, maxTriggerDelay="1h")
    assert query.run() == [[]]
    for each in range(3):
        append(path, numbered(0, 3), partition=each)
        assert query.trigger() is None
    append(path, [b"tenth"], partition=0)
    assert len(query.trigger() or []) == 10
    append(path, [b"more"], partition=0)
    assert query.trigger() is None
    assert len(query.trigger(once=True) or []) == 1


def test_records_wait_no_longer_than_the_delay(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("loglib.spark.micro_batch.monotonic", lambda: now)
    query = Query(path, minOffsetsPerTrigger=10, maxTriggerDelay="60s")
    query.run()
    now += 1000
    assert query.trigger() is None
    append(path, [b"alone"], partition=0)
    assert query.trigger() is None
    now += 59
    assert query.trigger() is None
    now += 1
    assert len(query.trigger() or []) == 1


def test_available_now_does_not_wait(path: Path) -> None:
    query = Query(
        path, startingOffsets="earliest", minOffsetsPerTrigger=60, maxOffsetsPerTrigger=60, available_now=True
    )
    assert [len(rows) for rows in query.run()] == [60, 40]


# --- restarts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["latest", "earliest"])
def test_first_batch_that_is_repeated_has_the_same_records(path: Path, start: str) -> None:
    """Spark does not store the start of the first batch. From a new "latest" its records would be lost."""
    query = Query(path, startingOffsets=start)
    query.reader.latestOffset(query.reader.initialOffset(), query.limit)
    append(path, [b"new"], partition=0)  # it comes while the first batch is planned
    first = query.trigger()
    assert first
    append(path, [b"newer"], partition=0)
    query.forget_last_commit()
    query.restart()
    assert query.batches == [first]
    assert [row["value"] for row in query.trigger() or []] == [b"newer"]


def test_batch_that_was_planned_before_a_restart_has_the_same_records(path: Path) -> None:
    query = Query(path, startingOffsets="earliest", maxOffsetsPerTrigger=30)
    query.trigger()
    query.trigger(run=False)
    append(path, [b"later"] * 50, partition=2)
    query.restart(maxOffsetsPerTrigger=1000)
    assert [len(rows) for rows in query.batches] == [30, 30]
    query.run()
    assert plain(query.rows) == core_rows(path)


def test_initial_offset_is_not_read_from_the_log(path: Path) -> None:
    """Spark asks for it again when it repeats the first batch, where the options may have no meaning any more."""
    query = Query(path, start="begin")
    query.trigger()
    query.forget_last_commit()
    query.restart(start=json.dumps({"0": 3}))  # no record is there
    assert plain(query.rows) == core_rows(path)


@pytest.mark.parametrize("seed", range(12))
def test_every_record_comes_once_and_in_order_whatever_happens(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.spark.positions.LOOK_S", 0)
    random = Random(seed)
    path = random_topic(tmp_path / "topic", seed, batches=random.choice((1, 20)))
    partitions = 2
    limits: dict[str, Any] = random.choice(
        ({}, {"maxOffsetsPerTrigger": random.randint(1, 30)}, {"maxBytesPerTrigger": random.randint(1, 2000)})
    )
    query = Query(path, startingOffsets="earliest", **limits)
    for _ in range(60):
        step = random.choice(("append", "append", "trigger", "trigger", "plan", "restart", "repeat", "grow"))
        if step == "append":
            append(path, [random.randbytes(random.randint(0, 60)) for _ in range(random.randint(1, 40))],
                   partition=random.randrange(partitions))  # fmt: skip
        elif step == "trigger":
            query.trigger()
        elif step == "plan":
            query.trigger(run=False)
            query.restart()
        elif step == "restart":
            query.restart(available_now=random.random() < 0.3)
        elif step == "repeat" and query.batches:
            last = query.batches[-1]
            query.forget_last_commit()
            query.restart()
            assert query.batches[-1] == last, f"{seed=}"
        elif step == "grow" and partitions < 5:
            partitions += 1
            Topic.add_partitions(path, partitions)
    query.restart()
    query.run()
    for number in range(partitions):
        expected = [row for row in core_rows(path) if row["partition"] == number]
        assert [row for row in query.rows if row["partition"] == number] == expected, f"{seed=}"


@pytest.mark.slow
@pytest.mark.parametrize("retain_bytes", [None, 60_000])
@pytest.mark.filterwarnings("ignore:.*failOnDataLoss=false:RuntimeWarning")
def test_query_keeps_up_with_a_writer_that_rolls_and_drops(
    tmp_path: Path, retain_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.spark.positions.LOOK_S", 0.05)
    counts = [0, 0]

    def write() -> None:
        random = Random(1)
        retention = Retention(age=None, bytes=retain_bytes)
        for _ in range(20):
            with Topic.open(
                tmp_path / "topic", create=True, partitions=2, segment_bytes=20_000, retention=retention
            ) as topic:
                for _ in range(random.randint(1, 60)):
                    number, more = random.randrange(2), random.randint(1, 30)
                    topic.append_many(numbered(counts[number], counts[number] + more), partition=number)
                    counts[number] += more
                    topic.flush()

    with testing.open_topic(tmp_path / "topic", partitions=2, clock=lambda: NOW, **QUIET):
        pass
    query = Query(
        tmp_path / "topic", startingOffsets="earliest", maxOffsetsPerTrigger=200, failOnDataLoss=retain_bytes is None
    )
    writer = Thread(target=write)
    writer.start()
    for each in count():
        is_over = not writer.is_alive()
        if query.trigger() is None and is_over:
            break
        if each % 50 == 49:
            query.restart()
    writer.join()
    for number in range(2):
        found = [int(row["value"]) for row in query.rows if row["partition"] == number]
        assert found == (list(range(counts[number])) if retain_bytes is None else sorted(set(found)))
        assert found[-1] == counts[number] - 1


# --- losses ------------------------------------------------------------------------------------------


def test_tasks_of_a_stream_list_no_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alter(path, segment_bytes=4096)
    query = Query(path, startingOffsets="earliest")
    query.run()
    append(path, [bytes(3000)] * 5, partition=0)  # it rolls, and the stream's index is from before

    def listed(*arguments: object, **keywords: object) -> None:
        raise AssertionError("a directory was listed")

    start, reader = query.end, query.reader
    partitions = reader.partitions(start, reader.latestOffset(start, query.limit))
    monkeypatch.setattr(Files, "sizes", staticmethod(listed))
    monkeypatch.setattr(Files, "listdir", staticmethod(listed))
    with pytest.raises(AssertionError):
        Files().sizes("x")
    values = [row["value"] for each in partitions for batch in query.tasks.read(each) for row in rows_of(batch)]
    assert values == [bytes(3000)] * 5


def test_checkpoint_of_another_source_is_refused(path: Path) -> None:
    query = Query(path)
    query.offsets = [json.dumps({"clicks": {"0": 17}})]
    query.committed = 1
    with pytest.raises(LogError, match="which is no offset of loglib"):
        query.trigger()


# --- what is known of a query ------------------------------------------------------------------------


def test_report_has_the_end_of_the_log_and_the_lag(path: Path) -> None:
    query = Query(path, startingOffsets="earliest", maxOffsetsPerTrigger=60)
    query.trigger()
    report = query.reader.reportLatestOffset()
    planned = query.end["end"]["topic"]
    assert report["lag"]["bytes"] == sum(report["end"]["topic"].values()) - sum(planned.values()) > 0
    assert report["lag"]["seconds"] > 0
    query.run()
    assert query.reader.reportLatestOffset() == {
        "end": query.end["end"],
        "lag": {"bytes": 0, "seconds": 0},
        "version": 1,
    }


def test_progress_is_published_as_a_group_when_it_is_durable(path: Path) -> None:
    query = Query(path, startingOffsets="earliest", maxOffsetsPerTrigger=60, groupId="etl")

    def committed() -> dict[str, int]:
        with Topic.open(path, mode="r") as topic:
            assert topic.groups() in ([], ["etl"])
            info = topic.group_info("etl") if topic.groups() else None
            return {} if info is None else {str(each): commit.offset for each, commit in info.committed.items()}

    query.trigger()
    assert committed() == {}  # Spark may not have stored yet that the batch is done
    first = query.end["end"]["topic"]
    query.trigger()
    assert committed() == first
    assert query.trigger() is None
    with Topic.open(path, mode="r") as topic:
        assert all(lag.bytes == 0 for lag in topic.group_info("etl").lag.values())


def test_checkpoint_that_was_set_back_is_seen_by_its_group(path: Path) -> None:
    query = Query(path, startingOffsets="earliest", maxOffsetsPerTrigger=30, groupId="etl")
    query.trigger()
    earlier = list(query.offsets)
    query.run()
    query.forget_last_commit()
    query.restart()
    query.run()  # no warning: a batch that is repeated is no step back
    query.offsets, query.committed = earlier, 1
    query.restart()
    with pytest.warns(RuntimeWarning, match="group etl goes back from [0-9]+ to [0-9]+ in partition 0, .*reads these"):
        query.trigger()
    query.run()
    assert plain(query.rows) == core_rows(path)


def test_group_that_has_members_is_not_taken_for_progress(path: Path) -> None:
    query = Query(path, startingOffsets="earliest", maxOffsetsPerTrigger=60, groupId="etl")
    query.trigger()
    with Topic.open(path, mode="r") as topic:
        group = topic.group("etl")
        group.poll()
        with pytest.raises(GroupBusyError):
            query.trigger()
        group.close()
    query.trigger()
    query.run()
    append(path, [b"new"], partition=0)
    query.run()
    append(path, [b"newer"], partition=0)
    shutil.rmtree(path / "groups")
    (path / "groups").write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="the progress of group etl was not published"):
        query.run()
    assert query.values[-1] == b"newer"


def test_stop_closes_the_logs(path: Path) -> None:
    query = Query(path)
    query.run()
    query.reader.stop()
    assert not query.reader._follower._subscription._logs
