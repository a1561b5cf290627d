"""Partitions that are added are read, by everything that had the topic open before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from consumers import rebalance

import loglib
from conftest import MANUAL, start_python, values_of, wait_until_waiting
from loglib import CorruptLogError, LogMovedError, Reader, Topic, TopicPartition, transaction
from loglib.groups.group import AnyGroup
from loglib.log import reader as reader_module
from loglib.log import topic_file
from loglib.system import notify

COUNT = 40
EXPECTED = [b"%d" % number for number in range(COUNT)]
ADD = """
    import sys
    from loglib import Topic

    Topic.add_partitions(sys.argv[1], 4)
"""


@pytest.fixture
def grown(path: Path) -> Callable[[], None]:
    """A topic of one partition, and what gives it three more, with ten records in each."""
    Topic.open(path, create=True).close()

    def grow() -> None:
        Topic.add_partitions(path, 4)
        with Topic.open(path, alter=True, flush=MANUAL) as topic:
            for number in range(COUNT):
                topic.append(b"%d" % number, partition=number % 4)

    return grow


def in_records(reader: Reader) -> Iterator[Any]:
    return (each.value for each in reader)


def in_batches(reader: Reader) -> Iterator[Any]:
    return (value for batch in reader.batches() for value in batch.values)


def in_polls(reader: Reader) -> Iterator[Any]:
    while found := reader.poll(timeout=30.0):
        yield from (each.value for each in found)


def in_tables(reader: Reader) -> Iterator[Any]:
    return (value for batch in reader.arrow(["value"]) for value in batch.column("value").to_pylist())


@pytest.mark.parametrize("how", [in_records, in_batches, in_polls, in_tables])
@pytest.mark.parametrize("start", ["begin", "end", {0: 4096}])
def test_follower_that_waits_reads_added_partitions(
    path: Path, grown: Callable[[], None], start: Any, how: Callable[[Reader], Iterator[Any]]
) -> None:
    if start == {0: 4096}:
        with Topic.open(path, mode="r") as topic:
            start = topic.read().tell()
    found: list[Any] = []
    with Topic.open(path, mode="r") as topic:
        reader = topic.follow(start, timeout=30.0)
        thread = threading.Thread(target=lambda: found.extend(islice(how(reader), COUNT)))
        thread.start()
        wait_until_waiting(reader)
        grown()
        thread.join()
    assert sorted(found) == sorted(EXPECTED)


@pytest.mark.parametrize("reports", [True, False], ids=["reported", "unreported"])
def test_follower_reads_partitions_that_another_process_has_added(
    path: Path, grown: Callable[[], None], reports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once if the system reports that the description was replaced, else at the next look."""
    if not reports:
        monkeypatch.setattr(notify, "_inotify", lambda _: None)
    monkeypatch.setattr(reader_module, "_ADDED_S", 3600.0 if reports else 0.0)
    with Topic.open(path, mode="r") as topic:
        reader = topic.follow(timeout=30.0)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(islice(in_records(reader), 1)))
        thread.start()
        wait_until_waiting(reader)
        with start_python(ADD, path) as process:
            assert process.wait(30) == 0
        with Topic.open(path, create=True) as writer:
            writer.append(b"x", partition=3, sync=True)
        thread.join()
    assert found == [b"x"]


def test_follower_that_never_waits_reads_added_partitions(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_ADDED_S", 0.0)
    with Topic.open(path, create=True, flush=MANUAL, batch_records=1) as writer:
        for _ in range(COUNT):
            writer.append(b"old", headers={"of more than one block": bytes(100_000)})
    with Topic.open(path, mode="r") as topic:
        reader = topic.follow("begin")
        values = in_batches(reader)
        assert next(values) == b"old"
        Topic.add_partitions(path, 2)
        with Topic.open(path) as writer:
            writer.append(b"new", partition=1)
        assert b"new" in list(islice(values, COUNT - 1))


def test_place_of_a_follower_has_the_added_partitions_and_a_later_one_takes_it(
    path: Path, grown: Callable[[], None]
) -> None:
    with Topic.open(path, mode="r") as topic, Topic.open(path, mode="r") as other:
        reader, early = topic.follow(), other.follow()
        grown()
        assert sorted(reader.lag_bytes()) == [0, 1, 2, 3]
        assert all(reader.lag_bytes().values())
        assert sorted(islice(in_records(reader), COUNT)) == sorted(EXPECTED)
        assert not any(reader.lag_bytes().values())
        early.seek(reader.tell())
        assert early.tell() == reader.tell()
        assert early.poll() == []


def test_end_is_that_of_added_partitions_too(path: Path, grown: Callable[[], None]) -> None:
    with Topic.open(path, mode="r") as topic:
        reader = topic.follow()
        grown()
        reader.seek("end")
        assert reader.poll() == []


def test_open_topic_has_the_added_partitions_in_every_call(path: Path, grown: Callable[[], None]) -> None:
    with Topic.open(path, mode="r") as topic:
        first = topic.partitions[0]
        with topic.group("g"):
            assert topic.groups() == ["g"]
        grown()
        assert [each.value for each in topic.partition(3).read()] == EXPECTED[3::4]
        assert topic.partitions[0] is first
        assert topic.config.partitions == len(topic.partitions) == 4
        assert sorted(values_of(topic)) == sorted(EXPECTED)
        assert topic.arrow().read_all().num_rows == COUNT
        assert len(topic.stats().partitions) == 4
        assert all(each.bytes for each in topic.stats().lag["g"].values())
        assert sum(each.records or 0 for each in topic.group_info("g", count_records=True).lag.values()) == COUNT
        assert sorted(topic.reset_group("g", "end")) == [0, 1, 2, 3]
        assert "partitions 4" in repr(topic)
        with pytest.raises(ValueError, match="has partitions 0 to 3, not 4"):
            topic.partition(4)


def test_shared_topic_reads_added_partitions_and_refuses_to_write(path: Path, grown: Callable[[], None]) -> None:
    with Topic.open(path, create=True, shared=True) as topic:
        reader = topic.follow(timeout=30.0)
        grown()
        assert sorted(islice(in_records(reader), COUNT)) == sorted(EXPECTED)
        for partition in (None, 0):
            with pytest.raises(LogMovedError, match="has other than the 1 partitions"):
                topic.append(b"x", key=b"k", partition=partition)
        with pytest.raises(LogMovedError, match="has other than the 1 partitions"):
            topic.partition(3).append(b"x")


def test_transaction_whose_keys_chose_among_the_former_partitions_is_not_committed(
    path: Path, grown: Callable[[], None]
) -> None:
    with Topic.open(path, mode="r") as topic:
        with transaction("app") as tx:
            tx.append(topic, b"before", key=b"k")
        grown()
        with pytest.raises(LogMovedError, match="has other than the 1 partitions"), transaction("app") as tx:
            tx.append(topic, b"never", key=b"k")
        with transaction("app") as tx:
            tx.append(topic, b"in a partition that is named", key=b"k", partition=3)
            tx.append(topic, b"without a key")
        assert sorted(set(values_of(topic)) - set(EXPECTED)) == [
            b"before", b"in a partition that is named", b"without a key",
        ]  # fmt: skip


@pytest.mark.parametrize("left", ["a crash", "another topic"])
def test_directory_of_a_partition_that_does_not_count_is_left_alone(path: Path, left: str) -> None:
    Topic.open(path, create=True).close()
    with Topic.open(path, mode="r") as topic:
        reader = topic.follow()
        if left == "a crash":
            (path / "0001").mkdir()
        else:
            Topic.open(path.parent / "other", create=True, partitions=2).close()
            (path.parent / "other" / "0001").rename(path / "0001")
            (path.parent / "other" / topic_file.NAME).replace(path / topic_file.NAME)
        assert reader.lag_bytes() == {0: 0}
        assert len(topic.partitions) == 1


def test_partition_that_the_description_hides_ends_the_follower(path: Path, grown: Callable[[], None]) -> None:
    """As when the description alone comes from a backup: its records would be left out without a word."""
    before = (path / topic_file.NAME).read_bytes()
    with Topic.open(path, mode="r") as topic:
        reader = topic.follow("end", timeout=30.0)
        grown()
        (path / topic_file.NAME).write_bytes(before)
        with pytest.raises(CorruptLogError, match="found 1 partitions"):
            list(reader)
        topic.close()
        assert topic.closed


# --- groups ------------------------------------------------------------------------------------------


@pytest.fixture
def two(path: Path) -> Iterator[list[Topic]]:
    """Two topics; the group's files are in the first, which does not grow."""
    Topic.open(path.parent / "first", create=True).close()
    with Topic.open(path.parent / "first", mode="r") as first, Topic.open(path, mode="r") as second:
        yield [first, second]


def polled(*members: AnyGroup[Any, Any, Any]) -> list[Any]:
    """The values of all that the members get, in turns."""
    found: list[Any] = []
    while len(found) < COUNT:
        for member in members:
            records = member.poll(timeout=30.0 if len(members) == 1 else 0.0)
            found += [(each[1] if isinstance(each[0], str) else each).value for each in records]
    return found


@pytest.mark.parametrize("start", ["begin", "end"])
@pytest.mark.parametrize("reports", [True, False], ids=["reported", "unreported"])
def test_member_of_a_group_of_several_topics_reads_the_partitions_that_one_gets(
    path: Path, grown: Callable[[], None], two: list[Topic], start: Any, reports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reports:
        monkeypatch.setattr(notify, "_inotify", lambda _: None)
    with loglib.group(two, "g", start=start) as group:
        assert group.poll() == []
        grown()
        assert sorted(polled(group)) == sorted(EXPECTED)
        group.commit()
        assert group.assignment == [("first", 0), *(TopicPartition(path.name, number) for number in range(4))]
        assert not any(each.bytes for each in group.lag().values())
    with loglib.group(two, "g", start=start) as group:
        assert group.poll() == []


def test_members_share_what_was_added(grown: Callable[[], None], two: list[Topic]) -> None:
    with loglib.group(two, "g") as one, loglib.group(two, "g") as other:
        rebalance(one, other)
        grown()
        assert sorted(polled(one, other)) == sorted(EXPECTED)
        rebalance(one, other)
        assert sorted([*one.assignment, *other.assignment]) == [("first", 0), *((two[1].name, n) for n in range(4))]
        assert one.assignment and other.assignment


def test_lag_of_a_group_counts_added_partitions(grown: Callable[[], None], two: list[Topic]) -> None:
    with loglib.group(two, "g", start="end") as group:
        assert group.poll() == []
        grown()
        assert sum(each.records or 0 for each in group.lag(count_records=True).values()) == COUNT
        info = loglib.groups.group_info(two, "g", count_records=True)
        assert sum(each.records or 0 for each in info.lag.values()) == COUNT


def test_group_without_members_that_starts_at_the_end_reads_added_partitions_from_their_begin(
    path: Path, grown: Callable[[], None]
) -> None:
    with Topic.open(path, create=True) as topic:
        topic.append(b"before the group")
    with Topic.open(path, mode="r") as topic, topic.group("g", start="end") as group:
        assert group.poll() == []
    grown()
    with Topic.open(path, mode="r") as topic, topic.group("g", start="end") as group:
        assert sorted(polled(group)) == sorted(EXPECTED)
        assert group.poll() == []


def test_members_that_join_a_new_group_at_once_all_start_at_the_end(path: Path) -> None:
    with Topic.open(path, create=True, partitions=2) as topic:
        for number in range(2):
            topic.append(b"before the group", partition=number)
        topic.flush()
        with topic.group("g", start="end") as one, topic.group("g", start="end") as other:
            rebalance(one, other)
            assert (one.assignment, other.assignment) in (([0], [1]), ([1], [0]))
            assert [*one.poll(), *other.poll()] == []
