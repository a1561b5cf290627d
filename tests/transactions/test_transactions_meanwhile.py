"""Transactions beside what else goes on: openings, readers, other processes, topics that are moved or gone."""

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transacted
from transacted import append_to_all, store_of

import loglib
from conftest import start_python, values_of
from loglib import CommitPendingError, LogError, Topic, transaction
from loglib.append.section_writer import SectionWriter
from loglib.format.watermark import Mark
from loglib.log.log import Log
from loglib.system.files import REAL
from loglib.system.lock import try_acquire
from loglib.transactions import apply, staging
from loglib.transactions.store import Store

Open = Callable[..., Topic]

pair = transacted.pair


def test_topic_moved_while_its_transaction_is_applied_keeps_it(
    tmp_path: Path, open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic(tmp_path / "data" / "topic")
    append = SectionWriter.append_section

    def move(self: SectionWriter, batches: Any) -> None:
        append(self, batches)
        Path(topic.path).rename(tmp_path / "data" / "moved")

    monkeypatch.setattr(SectionWriter, "append_section", move)
    with pytest.raises(CommitPendingError, match="moved"), transaction("etl") as tx:
        tx.append(topic, b"x")
    (tmp_path / "data" / "moved").rename(topic.path)
    monkeypatch.undo()
    with pytest.raises(LogError):
        topic.close()
    again = open_topic(Path(topic.path))
    assert values_of(again) == [b"x"]
    writer = again._placement.writer_of(0)
    before = writer.disk.mark
    writer.release(99)  # which it does not hold
    assert writer.disk.mark == before


def test_opening_waits_for_a_process_that_applies(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, open_topic: Open
) -> None:
    """A partition that nobody holds is held for a moment while a transaction is applied: nobody is refused for that."""
    import threading

    orders, bills = pair
    for topic in pair:
        topic.close()
    readers = open_topic(Path(orders.path), mode="r"), open_topic(Path(bills.path), mode="r")
    inside, go_on = threading.Event(), threading.Event()
    finish = Store.finish

    def slow(self: Store, number: int, *, now: int) -> None:
        inside.set()
        assert go_on.wait(60)
        finish(self, number, now=now)

    monkeypatch.setattr(Store, "finish", slow)

    def commit() -> None:
        with transaction("etl", timeout=60.0) as tx:
            append_to_all(tx, readers, b"x")

    committing = threading.Thread(target=commit)
    committing.start()
    assert inside.wait(60)
    threading.Timer(0.2, go_on.set).start()
    again = open_topic(Path(bills.path))  # waits
    assert go_on.is_set()
    again.append(b"y", sync=True)
    committing.join()
    assert values_of(again) == [b"x", b"y"]


def test_reader_that_a_transaction_overtakes_between_two_partitions_sees_it_in_both_or_in_none(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, _ = pair
    with transaction("etl") as tx:
        append_to_all(tx, pair, b"first")
    published = Log.published
    looks = 0

    def overtaken(self: Log) -> Mark:
        nonlocal looks
        mark = published(self)
        looks += 1
        if looks == 1:
            with monkeypatch.context() as patched, transaction("etl") as tx:
                patched.setattr(Log, "published", published)
                append_to_all(tx, pair, b"second")
        return mark

    with Topic.open(orders.path, mode="r") as reading:
        monkeypatch.setattr(Log, "published", overtaken)
        with reading.read() as reader:
            monkeypatch.setattr(Log, "published", published)
            found = Counter((record.partition, record.value) for record in reader)
    assert looks >= 2
    assert found == {(number, value): 1 for number in (0, 1) for value in (b"first", b"second")}


def test_transactions_of_several_processes_on_partitions_that_nobody_holds(tmp_path: Path) -> None:
    program = """
        import sys
        import loglib
        topics = [loglib.Topic.open(path, mode="r") for path in sys.argv[2:]]
        for number in range(15):
            with loglib.transaction(sys.argv[1], timeout=60.0) as tx:
                for topic in topics:
                    for partition in range(len(topic.partitions)):
                        tx.append(topic, b"%s %d" % (sys.argv[1].encode(), number), partition=partition)
    """
    paths = [tmp_path / "data" / "a", tmp_path / "data" / "b"]
    for path in paths:
        Topic.open(path, create=True, partitions=2).close()
    processes = [start_python(program, f"app{number}", *paths, stdin=None, stdout=None) for number in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    for path in paths:
        with Topic.open(path) as topic:
            assert topic.verify().damage == ()
            orders = [[each.value for each in partition.read()] for partition in topic.partitions]
            assert orders[0] == orders[1]  # the same order everywhere
            for app in range(3):
                mine = [value for value in orders[0] if value and value.startswith(b"app%d" % app)]
                assert mine == [b"app%d %d" % (app, number) for number in range(15)]


def test_partition_held_for_a_moment_is_no_writer_that_does_not_answer(
    pair: tuple[Topic, Topic], open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention holds a partition for some milliseconds, and nobody answers for it."""
    import threading

    _, bills = pair
    bills.close()
    reader = open_topic(Path(bills.path), mode="r")
    held = try_acquire(REAL, str(Path(bills.path, "0000")))
    assert held is not None
    threading.Timer(0.1, held.release).start()
    begun = time.monotonic()
    with transaction("etl", timeout=60.0) as tx:
        tx.append(reader, b"x")
    assert time.monotonic() - begun < 30  # it has not waited for an answer all the time
    assert values_of(reader) == [b"x"]
    applying_now = try_acquire(REAL, str(store_of(bills)))
    assert applying_now is not None
    again = try_acquire(REAL, str(Path(bills.path, "0000")))
    assert again is not None
    threading.Timer(0.3, again.release).start()
    threading.Timer(0.6, applying_now.release).start()
    with transaction("etl", timeout=30.0) as tx:
        tx.append(reader, b"y")
    assert values_of(reader) == [b"x", b"y"]


def test_topic_whose_store_is_gone_opens_with_a_warning(
    pair: tuple[Topic, Topic], open_topic: Open, caplog: pytest.LogCaptureFixture
) -> None:
    _, bills = pair
    with transaction("etl") as tx:
        tx.append(bills, b"x")
    bills.close()
    store_of(bills).rename(store_of(bills).with_name("elsewhere"))
    again = open_topic(Path(bills.path))
    assert "transactions were not applied" in caplog.text
    caplog.clear()
    assert not again._serving.serve()
    assert "transactions were not applied" in caplog.text
    again.append(b"y", sync=True)
    assert values_of(again) == [b"x", b"y"]


def test_who_waits_for_an_owner_keeps_no_other_partition(
    pair: tuple[Topic, Topic], open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction("etl") as tx:
        append_to_all(tx, pair, b"first")
    for topic in pair:
        topic.close()
    orders, bills = (open_topic(Path(topic.path), mode="r") for topic in pair)
    held = try_acquire(REAL, bills.path)  # by another process, which changes the topic
    assert held is not None
    seen = []

    def let_go(_: float) -> None:
        with Topic.open(orders.path) as writer:
            seen.append(writer.append(b"meanwhile", sync=True))
        held.release()

    monkeypatch.setattr(apply, "time", SimpleNamespace(sleep=let_go))
    with transaction("etl") as tx:
        append_to_all(tx, (orders, bills), b"x")
    assert len(seen) == 1 and b"meanwhile" in values_of(orders)
    for topic in orders, bills:
        assert values_of(topic).count(b"x") == len(topic.partitions)


def test_topic_that_is_changed_just_now_is_waited_for(pair: tuple[Topic, Topic], open_topic: Open) -> None:
    _, bills = pair
    with transaction("etl") as tx:
        tx.append(bills, b"first")
    bills.close()
    reader = open_topic(Path(bills.path), mode="r")
    held = try_acquire(REAL, bills.path)
    assert held is not None
    with pytest.raises(CommitPendingError, match="waits for the writer of"), transaction("etl", timeout=0.05) as tx:
        tx.append(reader, b"x")
    held.release()
    loglib.transactions.recover_transactions(Path(bills.path).parent)
    assert values_of(reader) == [b"first", b"x"]


def test_old_attempts_are_held_while_they_are_committed(tmp_path: Path) -> None:
    """A sweep removes attempts of a day ago that nobody holds. A new attempt needs no descriptor."""
    now_s = time.time()
    for name, age_s in ("old", 90_000), ("new", 0):
        path = Path(staging.directory_of(str(tmp_path), name))
        path.mkdir(parents=True)
        os.utime(path, (now_s - age_s, now_s - age_s))
    held = {}
    with staging.held_attempts(REAL, str(tmp_path), ["old", "new", "gone"], now_s=now_s):
        for name in "old", "new":
            lock = try_acquire(REAL, staging.directory_of(str(tmp_path), name))
            held[name] = lock is None
            if lock is not None:
                lock.release()
    assert held == {"old": True, "new": False}
    lock = try_acquire(REAL, staging.directory_of(str(tmp_path), "old"))
    assert lock is not None
    with pytest.raises(LogError, match="is just being removed"), staging.held_attempts(
        REAL, str(tmp_path), ["old"], now_s=now_s
    ):
        pytest.fail("it is being swept")
    lock.release()
