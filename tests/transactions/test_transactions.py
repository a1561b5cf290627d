"""Transactions: all of their records become visible at once, or never, and each version once."""

import os
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import transacted
from transacted import all_values, append_to_all, store_of

import loglib
from conftest import Clock, crash_copy, sound, values_of
from loglib import CommitPendingError, FencedError, LogClosedError, LogError, LogMovedError, Topic, transaction
from loglib.errors import ForkedHandleError
from loglib.transactions.store import Store

Open = Callable[..., Topic]

pair = transacted.pair


def test_records_are_visible_when_the_transaction_is_over(pair: tuple[Topic, Topic]) -> None:
    with transaction("etl") as tx:
        append_to_all(tx, pair, b"x")
        assert all_values(pair) == [[], [], []]
    assert all_values(pair) == [[b"x"]] * 3
    assert (tx.number, tx.version, tx.repeated) == (2, 0, False)  # number 1 says whose the application is
    for topic in pair:
        assert topic.verify().damage == ()


def test_records_stand_behind_what_was_appended_before(pair: tuple[Topic, Topic]) -> None:
    orders, _ = pair
    with transaction("etl") as tx:
        tx.append(orders, b"in", partition=0)
        orders.append(b"before", partition=0)  # buffered, and its offset is promised
    orders.append(b"after", partition=0, sync=True)
    assert values_of(orders) == [b"before", b"in", b"after"]


def test_exception_discards_everything(pair: tuple[Topic, Topic]) -> None:
    with pytest.raises(ZeroDivisionError), transaction("etl") as tx:
        append_to_all(tx, pair, bytes(2 << 20))  # in files
        assert os.listdir(Path(pair[1].path, "staging"))
        raise ZeroDivisionError
    assert all_values(pair) == [[], [], []]
    assert os.listdir(Path(pair[1].path, "staging")) == []
    with pytest.raises(LogClosedError, match="the transaction of etl is over"):
        tx.append(pair[1], b"late")


def test_transaction_without_records_commits_nothing(pair: tuple[Topic, Topic]) -> None:
    with transaction("etl") as tx:
        tx.append_many(pair[0], [])
    assert tx.number is None
    assert not store_of(pair[0]).exists()


def test_records_keep_their_columns(pair: tuple[Topic, Topic]) -> None:
    orders, bills = pair
    with transaction("etl") as tx:
        tx.append(bills, b"1", b"key", timestamp=7, headers=[("h", b"v")])
        tx.append(bills, None)
        tx.append_many(bills, [b"%d" % number for number in range(5000)], timestamps=range(5000))
        tx.append_many(orders, [b"a", b"b", b"c"], keys=[b"k", None, b"k"])
    first, second, *rest = bills.read()
    assert (first.value, first.key, first.timestamp, first.headers) == (b"1", b"key", 7, (("h", b"v"),))
    assert (second.value, second.key, second.headers) == (None, None, ())
    assert [(each.value, each.timestamp) for each in rest] == [(b"%d" % number, number) for number in range(5000)]
    of_key = orders._placement.of_key(b"k")
    assert [each.value for each in orders.partition(of_key).read()][:1] == [b"a"]
    assert sorted(values_of(orders)) == [b"a", b"b", b"c"]


def test_bad_record_adds_nothing(pair: tuple[Topic, Topic]) -> None:
    orders, _ = pair
    with transaction("etl") as tx:
        with pytest.raises(TypeError):
            tx.append_many(orders, [b"good", "bad"], keys=[b"1", b"2"])  # type: ignore[list-item]
        tx.append(orders, b"fine", partition=0)
    assert values_of(orders) == [b"fine"]


def test_large_batches_and_compressed_ones_arrive(tmp_path: Path, open_topic: Open) -> None:
    topic = open_topic(
        tmp_path / "data" / "big", compression="zlib", batch_bytes=1000, segment_bytes=64 << 10, batch_records=50
    )
    values = [os.urandom(300) for _ in range(2000)] + [bytes(5000), b"last"]
    with transaction("etl") as tx:
        tx.append_many(topic, values[:2000])
        for value in values[2000:]:
            tx.append(topic, value)
    assert values_of(topic) == values
    assert len(topic.partitions[0].segments) > 3
    sound(topic.partitions[0])


def test_topics_may_be_open_for_reading(pair: tuple[Topic, Topic], open_topic: Open) -> None:
    for topic in pair:
        topic.close()
    readers = (open_topic(Path(pair[0].path), mode="r"), open_topic(Path(pair[1].path), mode="r"))
    with transaction("etl") as tx:
        append_to_all(tx, readers, b"x")
    assert all_values(readers) == [[b"x"]] * 3


def test_shared_topic_takes_no_partition_for_itself(tmp_path: Path, open_topic: Open) -> None:
    first = open_topic(tmp_path / "data" / "shared", shared=True, partitions=2)
    second = open_topic(tmp_path / "data" / "shared", shared=True)
    with transaction("etl") as tx:
        tx.append(first, b"x", partition=1)
    second.append(b"y", partition=1, sync=True)
    assert values_of(first) == [b"x", b"y"]


@pytest.mark.parametrize("durability", ["disk", "os"])
def test_committed_records_survive_a_copy_of_the_files(tmp_path: Path, open_topic: Open, durability: str) -> None:
    topic = open_topic(tmp_path / "data" / "topic", durability=durability)
    topic.append(b"plain", sync=True)
    with transaction("etl") as tx:
        tx.append(topic, b"x")
    copy = crash_copy(tmp_path / "data", tmp_path / "copy")
    assert values_of(open_topic(copy / "topic")) == [b"plain", b"x"]
    assert topic.partitions[0].segments


def test_version_that_was_committed_is_dropped(pair: tuple[Topic, Topic]) -> None:
    for version in (7, 7, 6, 8):
        with transaction("etl", version=version) as tx:
            append_to_all(tx, pair, b"%d" % version)
        assert tx.repeated == (values_of(pair[1])[-1] != b"%d" % version or (version == 7 and tx.number is None))
    assert all_values(pair) == [[b"7", b"8"]] * 3
    assert loglib.transactions.last_version("etl", store=Path(pair[0].path).parent) == 8
    assert loglib.transactions.last_version("other", store=store_of(pair[0])) is None


def test_versions_rise_by_themselves(pair: tuple[Topic, Topic]) -> None:
    for expected in range(3):
        with transaction("etl") as tx:
            tx.append(pair[1], b"x")
        assert tx.version == expected
    with transaction("other") as tx:
        tx.append(pair[1], b"x")
    assert tx.version == 0


def test_repeated_version_leaves_nothing_staged(pair: tuple[Topic, Topic]) -> None:
    for _ in range(2):
        with transaction("etl", version=1) as tx:
            tx.append(pair[1], bytes(2 << 20))
    assert tx.repeated
    assert os.listdir(Path(pair[1].path, "staging")) == []


def test_many_other_producers_make_no_version_forgotten(pair: tuple[Topic, Topic]) -> None:
    _, bills = pair
    with transaction("etl", version=1) as tx:
        tx.append(bills, b"once")
    for number in range(500):
        bills.append_many([b"other"], partition=0, producer=(f"producer {number}", 1))
    bills.flush()
    bills._placement.writer_of(0).roll()
    with transaction("etl", version=1) as tx:
        tx.append(bills, b"once")
    assert values_of(bills).count(b"once") == 1


def test_new_owner_fences_the_former_one(pair: tuple[Topic, Topic]) -> None:
    _, bills = pair
    with transaction("etl", owner="first") as tx:
        tx.append(bills, b"1")
    with transaction("etl", owner="second") as tx:
        tx.append(bills, b"2")
    with pytest.raises(FencedError, match="first is not its owner, second is"), transaction(
        "etl", owner="first"
    ) as tx:
        tx.append(bills, b"never")
    with transaction("etl", owner="second") as tx:
        tx.append(bills, b"3")
    assert values_of(bills) == [b"1", b"2", b"3"]


def test_version_of_another_source_is_refused(pair: tuple[Topic, Topic]) -> None:
    _, bills = pair
    with transaction("etl", version=3, source="query 1") as tx:
        tx.append(bills, b"1")
    with pytest.raises(LogError, match="what comes from source query 1, not from query 2"), transaction(
        "etl", version=0, source="query 2"
    ) as tx:
        tx.append(bills, b"2")
    assert values_of(bills) == [b"1"]


def test_unused_application_is_forgotten_only_when_asked(pair: tuple[Topic, Topic], clock: Clock) -> None:
    _, bills = pair
    with transaction("etl", version=3) as tx:
        tx.append(bills, b"1")
    parent = Path(bills.path).parent
    assert loglib.transactions.expire_apps(timedelta(days=365_000 // 2), store=parent) == []
    assert loglib.transactions.expire_apps(timedelta(), store=parent) == ["etl"]
    assert loglib.transactions.last_version("etl", store=parent) is None
    with transaction("other") as tx:
        tx.append(bills, b"2")
    assert values_of(bills) == [b"1", b"2"]


def test_follower_gets_records_at_the_end_of_the_transaction(pair: tuple[Topic, Topic]) -> None:
    orders, _ = pair
    reader = orders.follow("begin", timeout=60.0)
    with transaction("etl") as tx:
        append_to_all(tx, pair, b"x")
        assert reader.poll() == []
    started = time.monotonic()
    found = [next(iter(reader)).value, next(iter(reader)).value]
    assert found == [b"x", b"x"]
    assert time.monotonic() - started < 30  # and did not wait for the timeout
    reader.close()


def test_section_sent_to_another_log_is_no_producer_there(pair: tuple[Topic, Topic], tmp_path: Path) -> None:
    orders, bills = pair
    with transaction("etl") as tx:
        tx.append(bills, b"x")
    with open(tmp_path / "frames", "wb") as out:
        bills.partitions[0].transfer(out, 0)
    for _ in range(2):
        with open(tmp_path / "frames", "rb") as source:
            orders.partitions[0].receive(source)
    orders.flush()
    assert values_of(orders) == [b"x", b"x"]
    assert orders.verify().damage == ()


def test_arguments_are_checked(pair: tuple[Topic, Topic]) -> None:
    with pytest.raises(TypeError, match="app must be a name"):
        transaction("")
    with pytest.raises(ValueError, match="version must be a number from 0 on"):
        transaction("etl", version=-1)
    with pytest.raises(ValueError, match="partitions 0 to 1"), transaction("etl") as tx:
        tx.append(pair[0], b"x", partition=2)


def test_topics_of_two_stores_are_refused(tmp_path: Path, open_topic: Open) -> None:
    first, second = open_topic(tmp_path / "a" / "first"), open_topic(tmp_path / "b" / "second")
    for topic in (first, second):
        with transaction("etl") as tx:
            tx.append(topic, b"x")
    with pytest.raises(LogError, match="topics of one transaction must have one store"), transaction("etl") as tx:
        tx.append(first, b"y")
        tx.append(second, b"y")
    assert values_of(first) == values_of(second) == [b"x"]


def test_store_may_be_elsewhere(tmp_path: Path, open_topic: Open) -> None:
    first, second = open_topic(tmp_path / "a" / "first"), open_topic(tmp_path / "b" / "second")
    (tmp_path / "c").mkdir()
    with transaction("etl", store=tmp_path / "c" / "store") as tx:
        tx.append(first, b"x")
        tx.append(second, b"x")
    with transaction("etl") as tx:  # from now on the topics know
        tx.append(second, b"y")
        tx.append(first, b"y")
    assert values_of(first) == values_of(second) == [b"x", b"y"]


def test_transaction_in_moved_topic_is_refused(pair: tuple[Topic, Topic], tmp_path: Path) -> None:
    _, bills = pair
    Path(bills.path).rename(tmp_path / "elsewhere")
    with pytest.raises((LogError, OSError)) as caught, transaction("etl") as tx:
        tx.append(bills, b"x")
    assert not isinstance(caught.value, CommitPendingError)


def test_large_transaction_is_written_as_it_grows(pair: tuple[Topic, Topic]) -> None:
    orders, bills = pair
    with transaction("etl") as tx:
        for number in range(4):
            tx.append(orders, b"%d" % number + bytes(1 << 20), partition=0)
            if number == 1:
                tx.append(bills, bytes(2 << 20))
        tx.append(orders, b"last", partition=0)
    assert [(value or b"")[:4].strip(b"\0") for value in values_of(orders)] == [b"0", b"1", b"2", b"3", b"last"]
    assert len(values_of(bills)) == 1


def test_transaction_ends_once(pair: tuple[Topic, Topic]) -> None:
    with transaction("etl") as tx:
        tx.append(pair[1], b"x")
    with pytest.raises(LogClosedError), tx:
        pass


def test_nothing_is_forgotten_where_there_is_no_store(tmp_path: Path) -> None:
    assert loglib.transactions.expire_apps(timedelta(), store=tmp_path) == []


def test_commit_in_doubt_keeps_what_is_staged(pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch) -> None:
    _, bills = pair

    def commit(*_: object, **__: object) -> None:
        raise loglib.StorageIOError("store", OSError(5, "Input/output error"), "syncing a commit")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "commit", commit)
        with pytest.raises(loglib.StorageIOError), transaction("etl") as tx:
            tx.append(bills, bytes(2 << 20))
    assert len(os.listdir(Path(bills.path, "staging"))) == 1


def test_many_small_records_become_several_batches(tmp_path: Path, open_topic: Open) -> None:
    topic = open_topic(tmp_path / "data" / "topic", batch_records=10)
    with transaction("etl") as tx:
        for number in range(35):
            tx.append(topic, b"%d" % number)
    assert [len(batch) for batch in topic.batches()] == [10, 10, 10, 5]


def test_transaction_on_files_in_memory() -> None:
    from loglib.testing import MemoryFiles

    files = MemoryFiles()
    with loglib.testing.open_topic("/data/topic", files=files) as topic:
        with transaction("etl") as tx:
            tx.append(topic, b"x")
        assert values_of(topic) == [b"x"]


def test_repeated_version_tells_what_keeps_it_waiting(pair: tuple[Topic, Topic]) -> None:
    from loglib.system.files import REAL
    from loglib.system.lock import try_acquire

    _, bills = pair
    with transaction("etl", version=1) as tx:
        tx.append(bills, b"x")
    held = try_acquire(REAL, str(store_of(bills)))
    assert held is not None
    with pytest.raises(CommitPendingError), transaction("etl", version=1, timeout=0.05) as tx:
        tx.append(bills, b"x")
    held.release()
    assert tx.repeated


@pytest.mark.parametrize("how", ["raises", "returns"])
@pytest.mark.parametrize("records", [10, 3000])
def test_forked_child_that_leaves_the_block_of_a_transaction_harms_nothing(
    tmp_path: Path, how: str, records: int
) -> None:
    """It removed the files of its parent's transaction."""
    parent = os.getpid()

    def commit(topic: Topic) -> None:
        with transaction("app") as tx:
            tx.append_many(topic, [b"y" * 1000] * records)
            child = os.fork()
            if child:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
                tx.append(topic, b"z")
            elif how == "raises":
                raise KeyError("the child's work has failed")

    with Topic.create(tmp_path / "t") as topic:
        try:
            commit(topic)
        except (KeyError, ForkedHandleError):
            if os.getpid() != parent:
                os._exit(3)
            raise
        assert [record.value for record in topic.read()] == [b"y" * 1000] * records + [b"z"]


def test_transaction_whose_staged_file_is_gone_is_not_committed(tmp_path: Path) -> None:
    """Committed, it would stop all later ones."""
    with Topic.create(tmp_path / "t") as topic:
        with pytest.raises(LogMovedError, match="nothing is committed"), transaction("app") as tx:
            tx.append_many(topic, [b"y" * 1000] * 3000)
            shutil.rmtree(tmp_path / "t" / "staging")
        with transaction("app") as tx:
            tx.append(topic, b"next")
        assert [record.value for record in topic.read()] == [b"next"]


def test_transaction_of_the_parent_is_refused_in_a_forked_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Topic.create(tmp_path / "t") as topic, transaction("app") as tx:
        tx.append(topic, b"x")
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            with pytest.raises(ForkedHandleError, match="the transaction of app"):
                tx.append(topic, b"y")
    with Topic.open(tmp_path / "t", mode="r") as topic:
        assert [record.value for record in topic.read()] == [b"x"]
