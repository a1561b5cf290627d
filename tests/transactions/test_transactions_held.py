"""Transactions that are committed and not done show nothing until somebody goes on with them, and hide what follows."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import transacted
from transacted import all_values, append_to_all, dying, store_of

import loglib
from conftest import Clock, crash_copy, sound, values_of
from loglib import CommitPendingError, LogClosedError, Topic, transaction
from loglib.append import section_writer
from loglib.append.publication import NO_HOLD
from loglib.append.section_writer import SectionWriter
from loglib.append.tail import Txn
from loglib.log.recovery import recover
from loglib.system import reentry
from loglib.system.directory import Directory
from loglib.system.files import REAL
from loglib.transactions import apply
from loglib.transactions.store import Store, open_store

Open = Callable[..., Topic]

pair = transacted.pair


def test_death_before_the_commit_leaves_nothing(pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch) -> None:
    with dying(monkeypatch, Store, "commit"), transaction("etl", version=1) as tx:
        append_to_all(tx, pair, b"x")
    assert all_values(pair) == [[], [], []]
    with transaction("etl", version=1) as tx:
        append_to_all(tx, pair, b"again")
    assert all_values(pair) == [[b"again"]] * 3


STEPS: list[tuple[object, str, int]] = [
    (apply.Applier, "run", 1),
    (apply, "apply_section", 1),
    (apply, "apply_section", 2),
    (apply, "apply_section", 3),
    (SectionWriter, "begin_section", 2),
    (SectionWriter, "append_section", 2),
    (SectionWriter, "end_section", 1),
    (SectionWriter, "end_section", 3),
    (apply.Applier, "_apply_offsets", 1),
    (Store, "finish", 1),
]


@pytest.mark.parametrize(("where", "name", "at_call"), STEPS)
def test_death_after_the_commit_shows_nothing_until_someone_goes_on(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, where: object, name: str, at_call: int
) -> None:
    orders, _ = pair
    with dying(monkeypatch, where, name, at_call=at_call), transaction("etl", version=1) as tx:
        append_to_all(tx, pair, b"x")
    orders.append(b"native", partition=0, sync=True)  # the writer goes on, and what it appends waits
    assert b"x" not in [value for values in all_values(pair) for value in values]
    with transaction("etl", version=1) as tx:  # the caller does not know whether it was committed
        append_to_all(tx, pair, b"x")
    assert tx.repeated
    assert [sorted(values) for values in all_values(pair)] == [[b"native", b"x"], [b"x"], [b"x"]]
    for topic in pair:
        assert topic.verify().damage == ()


@pytest.mark.parametrize(("where", "name", "at_call"), STEPS)
@pytest.mark.parametrize("watermark", [True, False], ids=["watermark", "watermark lost"])
def test_writer_that_opens_the_copy_goes_on(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, open_topic: Open,
    where: object, name: str, at_call: int, watermark: bool,
) -> None:  # fmt: skip
    for topic in pair:
        topic.append_many([b"before"] * 3, partition=0)
        topic.flush()
    with dying(monkeypatch, where, name, at_call=at_call), transaction("etl", version=1) as tx:
        append_to_all(tx, pair, b"x")
    copy = crash_copy(tmp_path / "data", tmp_path / "copy")
    if not watermark:
        for path in copy.rglob("watermark"):
            path.unlink()
    again = open_topic(copy / "orders"), open_topic(copy / "bills")
    assert all_values(again) == [[b"before"] * 3 + [b"x"], [b"x"], [b"before"] * 3 + [b"x"]]
    for topic in again:
        assert topic.verify().damage == ()


def test_death_after_done_hides_nothing(pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch) -> None:
    with dying(monkeypatch, apply.Applier, "_release"), transaction("etl", version=1) as tx:
        append_to_all(tx, pair, b"x")
    assert all_values(pair) == [[b"x"]] * 3
    for topic in pair:
        topic.append(b"native", partition=0, sync=True)
    assert all_values(pair) == [[b"x", b"native"], [b"x"], [b"x", b"native"]]
    with transaction("etl", version=2) as tx:  # and holds up no other
        append_to_all(tx, pair, b"y")
    assert all_values(pair) == [[b"x", b"native", b"y"], [b"x", b"y"], [b"x", b"native", b"y"]]


def test_end_of_a_hold_in_another_thread_takes_no_later_one_with_it(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that serves other processes ends what is done, while this one commits. The log forgot the second."""
    with dying(monkeypatch, apply.Applier, "_release"), transaction("etl", version=1) as tx:
        append_to_all(tx, pair, b"x")
    writer = pair[0]._handles.writers[0]
    real = writer.publication.publish
    ends, begun, ended = threading.Event(), threading.Event(), threading.Event()

    def enter(lock: Any, what: str) -> Any:
        if lock is writer.applying and threading.current_thread() is not thread:
            begun.set()  # it waits for the other thread
        return reentry.enter(lock, what)

    def publish(**given: Any) -> None:
        if threading.current_thread() is thread:
            ends.set()
            assert begun.wait(60), "the commit neither waits nor begins"
        real(**given)
        if threading.current_thread() is thread:
            ended.set()
        elif given.get("hold", NO_HOLD) != NO_HOLD:
            begun.set()
            assert ended.wait(60), "the commit has begun, and the other thread has not ended its part"

    monkeypatch.setattr(writer.publication, "publish", publish)
    monkeypatch.setattr(section_writer, "enter", enter)
    thread = threading.Thread(target=lambda: apply.end_hold(writer, writer.published()))
    thread.start()
    assert ends.wait(60)
    with transaction("etl", version=2) as tx:
        append_to_all(tx, pair, b"y")
    thread.join()
    mark = writer.published()
    assert (mark.applied_txn, mark.held_txn) == (tx.number, 0)
    assert all_values(pair) == [[b"x", b"y"]] * 3


def test_recover_transactions_goes_on_without_a_writer(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, open_topic: Open
) -> None:
    with dying(monkeypatch, Store, "finish"), transaction("etl") as tx:
        append_to_all(tx, pair, b"x")
    for topic in pair:
        topic.close()
    readers = open_topic(Path(pair[0].path), mode="r"), open_topic(Path(pair[1].path), mode="r")
    assert all_values(readers) == [[], [], []]
    loglib.transactions.recover_transactions(Path(pair[0].path).parent)
    assert all_values(readers) == [[b"x"]] * 3
    loglib.transactions.recover_transactions(Path(pair[0].path))  # where there is no store, there is nothing to do


def test_store_that_is_gone_hides_nothing_that_is_whole(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, bills = pair
    bills.append(b"before", sync=True)
    with dying(monkeypatch, apply.Applier, "_release"), transaction("etl") as tx:
        append_to_all(tx, pair, b"x")
    store_of(orders).rename(store_of(orders).with_name("elsewhere"))
    assert values_of(bills) == [b"before", b"x"]
    store_of(orders).with_name("elsewhere").rename(store_of(orders))
    assert values_of(bills) == [b"before", b"x"]


def test_deleted_topic_stops_no_transaction(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    orders, bills = pair
    with dying(monkeypatch, apply.Applier, "run"), transaction("etl") as tx:
        append_to_all(tx, pair, b"x")
    orders.close()
    Topic.delete(orders.path)
    with pytest.raises(CommitPendingError):  # the writer of the other topic has no thread that looks for bells
        loglib.transactions.recover_transactions(Path(bills.path).parent, timeout=0.0)
    with transaction("etl") as tx:
        tx.append(bills, b"y")
    assert values_of(bills) == [b"x", b"y"]
    assert "the topic was deleted or made again" in caplog.text


def test_held_transaction_hides_what_follows_it(pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch) -> None:
    _, bills = pair
    bills.append_many([b"1", b"2"])
    bills.flush()
    with dying(monkeypatch, Store, "finish"), transaction("etl") as tx:
        tx.append(bills, b"x")
    bills.append(b"3", sync=True)
    partition = bills.partitions[0]
    assert values_of(bills) == [b"1", b"2"]
    assert partition.high_watermark == bills.read("end").tell()[0]
    assert [len(batch) for batch in bills.batches()] == [2]
    assert sum(each.size_bytes for each in partition.segments) > 0
    assert values_of(bills, partition.high_watermark) == []
    assert partition.verify().records == 2


def test_retention_drops_nothing_that_is_held(
    tmp_path: Path, open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic(tmp_path / "data" / "topic", segment_bytes=4096, retention=loglib.Retention(bytes=4096))
    topic.append_many([bytes(500)] * 5)
    with dying(monkeypatch, Store, "finish"), transaction("etl") as tx:
        tx.append(topic, b"x")
    for _ in range(30):
        topic.append(bytes(900), sync=True)
    topic.retain()
    with transaction("etl") as tx:
        tx.append(topic, b"y")
    assert [value for value in values_of(topic) if len(value) == 1] == [b"x", b"y"]


def test_what_a_dead_process_staged_is_swept_after_a_day(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    _, bills = pair
    with dying(monkeypatch, Store, "commit"), transaction("etl") as tx:
        tx.append(bills, bytes(2 << 20))
    place = Path(bills.path, "staging")
    (left,) = place.iterdir()
    clock.now = time.time_ns() // 1000
    with transaction("etl") as tx:
        tx.append(bills, b"x")
    assert list(place.iterdir()) == [left]
    clock.advance(timedelta(days=1, seconds=5))
    with transaction("etl") as tx:
        tx.append(bills, b"x")
    assert list(place.iterdir()) == []


def test_stage_of_a_transaction_that_commits_during_a_sweep_is_not_swept(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep had read what is pending; then the transaction was committed, and its lock was released."""
    _, bills = pair
    with transaction("etl") as tx:
        tx.append(bills, b"x")
    slow = transaction("slow")
    slow.__enter__()
    slow.append(bills, bytes(2 << 20))
    (attempt,) = Path(bills.path, "staging").iterdir()
    os.utime(attempt, (1, 1))
    store, pending = open_store(REAL, str(store_of(bills))), Store.pending

    def commit_after_the_first(self: Store) -> object:
        found = pending(self)
        monkeypatch.setattr(Store, "pending", pending)
        with dying(monkeypatch, apply.Applier, "run"):
            slow.__exit__(None, None, None)
        return found

    monkeypatch.setattr(Store, "pending", commit_after_the_first)
    apply.sweep_staging(store, [bills.path], now=time.time_ns() // 1000)
    assert attempt.exists()
    apply.Applier(REAL, store, bills._handles.writers, clock=bills._clock).run(5.0)
    assert values_of(bills) == [b"x", bytes(2 << 20)] and not attempt.exists()


def test_stage_of_a_named_attempt_is_removed_when_its_transaction_is_done_or_unknown(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a job of Spark that repeats a version: it has staged in vain, and knows the names."""
    _, bills = pair
    place = Path(bills.path, "staging")
    with dying(monkeypatch, Store, "commit"), transaction("etl") as tx:
        tx.append(bills, bytes(2 << 20))
    (unknown,) = place.iterdir()
    with dying(monkeypatch, apply.Applier, "run"), transaction("etl") as tx:
        tx.append(bills, bytes(2 << 20))
    (pending,) = set(place.iterdir()) - {unknown}
    store = open_store(REAL, str(store_of(bills)))
    for attempts, left in (((), {unknown, pending}), ((unknown.name, pending.name), {pending})):
        apply.sweep_staging(store, [bills.path], now=time.time_ns() // 1000, attempts=attempts)
        assert set(place.iterdir()) == left
    apply.Applier(REAL, store, bills._handles.writers, clock=bills._clock).run(5.0)
    assert values_of(bills) == [bytes(2 << 20)] and list(place.iterdir()) == []


def test_shared_topic_ends_a_hold_that_it_finds(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, open_topic: Open
) -> None:
    with dying(monkeypatch, apply.Applier, "_release"), transaction("etl") as tx:
        append_to_all(tx, pair, b"x")
    copy = crash_copy(tmp_path / "data", tmp_path / "copy")
    shared = open_topic(copy / "bills", shared=True)
    shared.append(b"y", sync=True)
    assert shared._accesses[0].open_writer.disk.mark.held_txn == 0  # type: ignore[union-attr]
    assert values_of(shared) == [b"x", b"y"]


@pytest.mark.parametrize(("of", "name"), [("writer", "check_usable"), ("writer", "_write"), ("disk", "sync")])
def test_full_disk_stops_a_transaction_until_there_is_room(
    tmp_path: Path, open_topic: Open, monkeypatch: pytest.MonkeyPatch, of: str, name: str
) -> None:
    topic = open_topic(tmp_path / "data" / "topic")
    writer = topic._placement.writer_of(0)
    with monkeypatch.context() as patched:
        patched.setattr(writer if of == "writer" else writer.disk, name, _raise_full)
        with pytest.raises(CommitPendingError, match="No space left on device"), transaction("etl") as tx:
            tx.append(topic, b"x")
    assert values_of(topic) == []
    with transaction("etl") as tx:
        tx.append(topic, b"after")
    assert values_of(topic) == [b"x", b"after"]


def _raise_full(*_: object) -> None:
    raise loglib.StorageFullError("topic", OSError(28, "No space left on device"))


def without_its_mark(tmp_path: Path, topic: Topic, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the topic after a crash, whose last segment's header has a hold below the log start."""
    topic.append(b"1", sync=True)
    with dying(monkeypatch, Store, "finish"), transaction("etl", version=1) as tx:
        tx.append(topic, b"x")
    topic._placement.writer_of(0).roll()
    with transaction("etl", version=1) as tx:
        tx.append(topic, b"x")
    topic.append(b"2", sync=True)
    topic.partitions[0].delete_before(topic.partitions[0].segments[-1].base_offset)
    copy = crash_copy(tmp_path / "data", tmp_path / "copy")
    (copy / "topic" / "0000" / "watermark").unlink()
    return copy / "topic"


def test_hold_in_a_segments_header_may_lie_below_the_log_start(
    tmp_path: Path, open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic(tmp_path / "data" / "topic")
    copy = without_its_mark(tmp_path, topic, monkeypatch)
    before = topic.partitions[0]._access.log.mark()
    again = open_topic(copy)
    assert values_of(again) == [b"2"]
    sound(again.partitions[0])
    mark = again.partitions[0]._access.log.mark()  # a number counts only with the store that gave it
    assert mark.applied_id == before.applied_id != 0 and mark.txn_store == before.txn_store != 0


def test_repair_of_a_lost_mark_takes_a_hold_below_the_log_start_for_done(
    tmp_path: Path, open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = without_its_mark(tmp_path, open_topic(tmp_path / "data" / "topic"), monkeypatch)
    assert not loglib.repair(copy).verified.damage
    with Topic.open(copy, mode="r") as reading:
        assert values_of(reading) == [b"2"]


def test_waiting_transaction_is_applied_by_the_process_that_applies_others(pair: tuple[Topic, Topic]) -> None:
    """While one process applies, others wait, and find their own done."""
    import threading

    from loglib.system.files import REAL
    from loglib.system.lock import try_acquire

    _, bills = pair
    with transaction("etl") as tx:
        tx.append(bills, b"1")
    held = try_acquire(REAL, str(store_of(bills)))
    assert held is not None
    with pytest.raises(CommitPendingError, match="another process, which applies transactions"), transaction(
        "etl", timeout=0.05
    ) as tx:
        tx.append(bills, b"2")
    assert tx.number is not None
    third = transaction("other", timeout=30.0)

    def commit() -> None:
        with third:
            third.append(bills, b"3")

    committing = threading.Thread(target=commit)
    committing.start()
    store = Store(REAL, str(store_of(bills)))
    deadline = time.monotonic() + 30
    while len(store.pending()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    found = apply.Applier(REAL, store, bills._handles.writers)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(apply.Applier, "_lock", lambda *_: held)
        found.run(5.0)
    committing.join()
    store.close()
    assert values_of(bills) == [b"1", b"2", b"3"]


def test_owner_waits_with_a_transaction_until_the_one_before_it_is_done(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bills = pair
    for name in ("first", "second"):
        where, step = (Store, "finish") if name == "first" else (apply.Applier, "run")
        with dying(monkeypatch, where, step), transaction("etl") as tx:
            tx.append(bills, name.encode())
    assert bills._serving.serve()  # as when a bell rings
    assert values_of(bills) == []
    with transaction("etl") as tx:
        tx.append(bills, b"third")
    assert values_of(bills) == [b"first", b"second", b"third"]


def test_long_hold_is_told_once(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, bills = pair
    with dying(monkeypatch, Store, "finish"), transaction("etl") as tx:
        tx.append(bills, b"x")
    monkeypatch.setattr("loglib.log.log._LONG_HOLD_S", 0.01)
    values_of(bills)
    time.sleep(0.02)
    for _ in range(3):
        values_of(bills)
    assert caplog.text.count("records from offset 0 on wait for transaction 2, which is not done") == 1


def test_inbox_of_a_topic_without_transactions_is_quiet(pair: tuple[Topic, Topic]) -> None:
    assert not pair[1]._serving.serve()


def test_topic_finishes_what_is_held_for_long(pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch) -> None:
    orders, bills = pair
    with dying(monkeypatch, Store, "finish"), transaction("etl") as tx:
        tx.append(bills, b"x")
    with dying(monkeypatch, apply.Applier, "run"), transaction("etl") as tx:
        tx.append(orders, b"y", partition=0)  # of which the other topic has nothing
    assert bills._serving.serve()
    assert bills._serving.serve()  # not for long yet
    monkeypatch.setattr("loglib.transactions.participant._PATIENCE_S", 0.01)
    time.sleep(0.02)
    bills._serving.serve()
    assert values_of(bills) == [b"x"]
    assert not bills._serving.serve()


def test_topic_that_is_closed_meanwhile_serves_nothing(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bills = pair
    with dying(monkeypatch, apply.Applier, "run"), transaction("etl") as tx:
        tx.append(bills, b"x")

    def closed(*_: object) -> None:
        raise LogClosedError("closed")

    monkeypatch.setattr(apply.Applier, "apply_own", closed)
    assert not bills._serving.serve()


@pytest.mark.parametrize("shared", [False, True])
def test_hold_that_ends_while_the_writer_is_closed_is_written_into_no_other_file(
    tmp_path: Path, open_topic: Open, shared: bool
) -> None:
    """The thread of transactions had the hold in hand. It wrote the mark into a segment that another writer made."""
    topic = open_topic(tmp_path / "data" / "topic", shared=shared)
    topic.append(b"x", sync=True)
    writer = topic._placement.writer_of(0)
    writer.begin_section(Txn(5, 7, 0))
    fd = writer.publication.watermark.fileno()
    topic.close()
    others = [REAL.create(str(tmp_path / str(number)), 0o600) for number in range(fd + 1)]
    try:
        assert fd in others, "the number belongs to another file now"
        with pytest.raises(LogClosedError):
            writer.end_hold(5)
        assert writer.published() == writer.disk.mark
        assert {REAL.size(each) for each in others} == {0}
    finally:
        for each in others:
            os.close(each)


def test_log_without_transactions_recovers_where_its_first_segment_is_gone(tmp_path: Path, open_topic: Open) -> None:
    """The watermark is lost, and retention has dropped the beginning: nothing was ever held."""
    topic = open_topic(tmp_path / "data" / "topic")
    topic.append(b"1", sync=True)
    topic._placement.writer_of(0).roll()
    topic.append(b"2", sync=True)
    topic.partitions[0].delete_before(topic.partitions[0].segments[-1].base_offset)
    copy = crash_copy(tmp_path / "data", tmp_path / "copy")
    (copy / "topic" / "0000" / "watermark").unlink()
    assert values_of(open_topic(copy / "topic")) == [b"2"]


@pytest.mark.parametrize("steps", ["append roll hold append roll", "append hold append roll", "append hold roll"])
def test_hold_is_found_where_the_watermark_is_lost(steps: str, tmp_path: Path, open_topic: Open) -> None:
    """The last segment has no batch: its header says from where on records are held."""
    topic = open_topic(tmp_path / "data" / "topic")
    writer = topic._placement.writer_of(0)
    actions: dict[str, Callable[[], object]] = {
        "append": lambda: topic.append(b"x", sync=True), "roll": writer.roll,
        "hold": lambda: writer.begin_section(Txn(5, 7, 0)),
    }  # fmt: skip
    for step in steps.split():
        actions[step]()
    mark = writer.disk.mark
    copy = crash_copy(tmp_path / "data", tmp_path / "copy")
    (copy / "topic" / "0000" / "watermark").unlink()
    with Directory.open(REAL, str(copy / "topic" / "0000")) as directory:
        again = recover(directory, topic.partitions[0]._access.log.identity, 0o600).mark
    anonymous = {"sequence": 0, "writer_epoch": 0, "writer_nonce": 0}
    assert again._replace(**anonymous) == mark._replace(**anonymous)
    assert values_of(open_topic(copy / "topic")) == [b"x"] * steps.count("append"), "it has nothing of a transaction"
