"""Transactions: all of their records and commits become visible at once, or never, and each version once."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import loglib
from conftest import Clock, crash_copy, sound, start_python, values_of
from loglib import (
    CommitPendingError,
    FencedError,
    LogClosedError,
    LogError,
    StaleGenerationError,
    Topic,
    Transaction,
    transaction,
)
from loglib.append.writer import Writer
from loglib.format.batch import crc32c
from loglib.format.watermark import Mark
from loglib.log import Log
from loglib.transactions import applying, staging
from loglib.transactions.store import Store

Open = Callable[..., Topic]


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def pair(tmp_path: Path, open_topic: Open) -> tuple[Topic, Topic]:
    """Two topics beside each other: one of two partitions, and one of one."""
    return open_topic(tmp_path / "data" / "orders", partitions=2), open_topic(tmp_path / "data" / "bills")


def store_of(topic: Topic) -> Path:
    return Path(topic.path).parent / ".transactions"


def append_to_all(tx: Transaction, topics: tuple[Topic, Topic], value: bytes) -> None:
    orders, bills = topics
    tx.append(orders, value, partition=0)
    tx.append(orders, value, partition=1)
    tx.append(bills, value)


def all_values(topics: tuple[Topic, Topic]) -> list[list[Any]]:
    """The values in each partition."""
    return [[record.value for record in each.read()] for topic in topics for each in topic.partitions]


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, where: object, name: str, *, at_call: int = 1) -> Iterator[None]:
    """The process is killed at this call of this function, before it does anything."""
    calls = 0
    original = getattr(where, name)

    def die(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= at_call:
            raise Killed
        return original(*arguments, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(where, name, die)
        with pytest.raises(Killed):
            yield


# --- all at once -----------------------------------------------------------------------------------------


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


# --- each version once ---------------------------------------------------------------------------------------


def test_version_that_was_committed_is_dropped(pair: tuple[Topic, Topic]) -> None:
    for version in (7, 7, 6, 8):
        with transaction("etl", version=version) as tx:
            append_to_all(tx, pair, b"%d" % version)
        assert tx.repeated == (values_of(pair[1])[-1] != b"%d" % version or (version == 7 and tx.number is None))
    assert all_values(pair) == [[b"7", b"8"]] * 3
    assert loglib.last_version("etl", store=Path(pair[0].path).parent) == 8
    assert loglib.last_version("other", store=store_of(pair[0])) is None


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
    assert loglib.expire_apps(timedelta(days=365_000 // 2), store=parent) == []
    assert loglib.expire_apps(timedelta(), store=parent) == ["etl"]
    assert loglib.last_version("etl", store=parent) is None
    with transaction("other") as tx:
        tx.append(bills, b"2")
    assert values_of(bills) == [b"1", b"2"]


# --- death at every step ---------------------------------------------------------------------------------


def test_death_before_the_commit_leaves_nothing(pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch) -> None:
    with dying(monkeypatch, Store, "commit"), transaction("etl", version=1) as tx:
        append_to_all(tx, pair, b"x")
    assert all_values(pair) == [[], [], []]
    with transaction("etl", version=1) as tx:
        append_to_all(tx, pair, b"again")
    assert all_values(pair) == [[b"again"]] * 3


STEPS: list[tuple[object, str, int]] = [
    (applying.Applier, "run", 1),
    (applying, "apply_section", 1),
    (applying, "apply_section", 2),
    (applying, "apply_section", 3),
    (Writer, "begin_section", 2),
    (Writer, "append_section", 2),
    (Writer, "end_section", 1),
    (Writer, "end_section", 3),
    (applying.Applier, "_apply_offsets", 1),
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
    with dying(monkeypatch, applying.Applier, "_release"), transaction("etl", version=1) as tx:
        append_to_all(tx, pair, b"x")
    assert all_values(pair) == [[b"x"]] * 3
    for topic in pair:
        topic.append(b"native", partition=0, sync=True)
    assert all_values(pair) == [[b"x", b"native"], [b"x"], [b"x", b"native"]]
    with transaction("etl", version=2) as tx:  # and holds up no other
        append_to_all(tx, pair, b"y")
    assert all_values(pair) == [[b"x", b"native", b"y"], [b"x", b"y"], [b"x", b"native", b"y"]]


def test_recover_transactions_goes_on_without_a_writer(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, open_topic: Open
) -> None:
    with dying(monkeypatch, Store, "finish"), transaction("etl") as tx:
        append_to_all(tx, pair, b"x")
    for topic in pair:
        topic.close()
    readers = open_topic(Path(pair[0].path), mode="r"), open_topic(Path(pair[1].path), mode="r")
    assert all_values(readers) == [[], [], []]
    loglib.recover_transactions(Path(pair[0].path).parent)
    assert all_values(readers) == [[b"x"]] * 3
    loglib.recover_transactions(Path(pair[0].path))  # where there is no store, there is nothing to do


def test_store_out_of_reach_hides_what_is_held(pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch) -> None:
    orders, bills = pair
    bills.append(b"before", sync=True)
    with dying(monkeypatch, applying.Applier, "_release"), transaction("etl") as tx:
        append_to_all(tx, pair, b"x")
    store_of(orders).rename(store_of(orders).with_name("elsewhere"))
    assert values_of(bills) == [b"before"]
    store_of(orders).with_name("elsewhere").rename(store_of(orders))
    assert values_of(bills) == [b"before", b"x"]


def test_deleted_topic_stops_no_transaction(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    orders, bills = pair
    with dying(monkeypatch, applying.Applier, "run"), transaction("etl") as tx:
        append_to_all(tx, pair, b"x")
    orders.close()
    Topic.delete(orders.path)
    with pytest.raises(CommitPendingError):  # the writer of the other topic has no thread that looks for bells
        loglib.recover_transactions(Path(bills.path).parent, timeout=0.0)
    with transaction("etl") as tx:
        tx.append(bills, b"y")
    assert values_of(bills) == [b"x", b"y"]
    assert "the topic was deleted or made anew" in caplog.text


# --- holds ---------------------------------------------------------------------------------------------------


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


def test_follower_gets_records_at_the_end_of_the_transaction(pair: tuple[Topic, Topic]) -> None:
    orders, _ = pair
    reader = orders.follow("begin", timeout=5.0)
    with transaction("etl") as tx:
        append_to_all(tx, pair, b"x")
        assert reader.poll() == []
    started = time.monotonic()
    found = [next(iter(reader)).value, next(iter(reader)).value]
    assert found == [b"x", b"x"]
    assert time.monotonic() - started < 5.0
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


# --- staging -------------------------------------------------------------------------------------------------


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


def test_stage_that_rots_stops_its_transaction_and_no_other(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, bills = pair
    with dying(monkeypatch, applying.Applier, "run"), transaction("etl") as tx:
        tx.append(bills, bytes(2 << 20))
    (staged,) = Path(bills.path, "staging").rglob("0000")
    content = staged.read_bytes()
    staged.write_bytes(content[:-1] + b"\xff")
    with transaction("etl") as tx:
        tx.append(orders, b"fine", partition=0)
    assert values_of(orders) == [b"fine"]
    with pytest.raises(CommitPendingError, match="waits for transactions before it"), transaction("etl") as tx:
        tx.append(bills, b"behind it")
    staged.write_bytes(content)
    with transaction("etl") as tx:
        tx.append(bills, b"last")
    assert values_of(bills) == [bytes(2 << 20), b"behind it", b"last"]


@pytest.mark.parametrize("change", ["cut", "cut short", "swapped", "flipped", "other partition", "newer"])
def test_spoilt_section_is_never_applied(pair: tuple[Topic, Topic], change: str) -> None:
    orders, _ = pair
    stage = staging.Stage(orders._files, orders._clock)
    identity = orders._accesses[0].log.identity
    other = orders._accesses[1].log.identity
    one = stage.section(orders.path, identity, orders.config)
    for value in (b"a", b"b"):
        one.add(applying_load(value))
        one.seal()
    content = b"".join(one.portions[0].parts)
    half = len(content) // 2
    changed = {
        "cut": content[:-8],
        "cut short": content[:half] + content[half : half + 128],
        "newer": newer(content, identity.salt),
        "swapped": content[half:] + content[:half],
        "flipped": content[:-200] + bytes([content[-200] ^ 1]) + content[-199:],
        "other partition": content,
    }[change]
    found = staging.read_section(
        lambda at, size: changed[at : at + size], len(changed), other if change == "other partition" else identity,
        "staged", at=0,
    )  # fmt: skip
    with pytest.raises(loglib.CorruptLogError):
        list(found)
    whole = staging.read_section(lambda at, size: content[at : at + size], len(content), identity, "staged", at=0)
    assert len(list(whole)) == 2


def newer(content: bytes, salt: int) -> bytes:
    """The section with a first batch of a later version."""
    changed = bytearray(content)
    changed[40] = 9
    changed[4:8] = crc32c(bytes(changed[8:128]), salt).to_bytes(4, "little")
    return bytes(changed)


def applying_load(value: bytes) -> Any:
    from loglib.append.router import Load
    from loglib.format.columns import Columns

    return Load(Columns([value]), len(value))


# --- arguments -------------------------------------------------------------------------------------------------


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


# --- groups ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("attentive")
def test_commit_of_a_group_is_part_of_the_transaction(pair: tuple[Topic, Topic]) -> None:
    orders, bills = pair
    for number in range(4):
        orders.append(b"%d" % number, partition=0, sync=True)
    with orders.group("etl", commit="manual") as group:
        polled = group.poll(timeout=5.0)
        with pytest.raises(ZeroDivisionError), transaction("etl") as tx:
            tx.append(bills, b"half")
            tx.commit(group)
            raise ZeroDivisionError
        assert group.committed() == {}
        with transaction("etl") as tx:
            for record in polled:
                tx.append(bills, record.value)
            tx.commit(group, meta="done")
        commit = group.committed()[0]
    assert (commit.offset, commit.meta) == (polled[-1].next_offset, "done")
    assert values_of(bills) == [record.value for record in polled]


@pytest.mark.usefixtures("attentive")
def test_member_that_lost_its_partition_commits_nothing(pair: tuple[Topic, Topic]) -> None:
    orders, bills = pair
    orders.append(b"1", partition=0, sync=True)
    with orders.group("etl", commit="manual", member="a") as group:
        assert group.poll(timeout=5.0)
        with pytest.raises(StaleGenerationError), transaction("etl") as tx:
            tx.append(bills, b"never")
            tx.commit(group)
            orders.evict_member("etl", "a")
    assert values_of(bills) == []


@pytest.mark.usefixtures("attentive")
def test_group_that_commits_by_itself_is_refused(pair: tuple[Topic, Topic]) -> None:
    orders, _ = pair
    with orders.group("etl") as group, pytest.raises(ValueError, match="join it with commit='manual'"):
        transaction("etl").commit(group)


@pytest.mark.usefixtures("attentive")
def test_new_owner_begins_after_a_pending_commit(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, bills = pair
    for number in range(3):
        orders.append(b"%d" % number, partition=0, sync=True)
    first = orders.group("etl", commit="manual", member="a")
    assert len(first.poll(timeout=5.0)) > 0
    with dying(monkeypatch, applying.Applier, "run"), transaction("etl") as tx:
        tx.append(bills, b"output")
        tx.commit(first)
    position = orders.partitions[0].high_watermark
    orders.evict_member("etl", "a")
    with orders.group("etl", commit="manual", member="b") as second:
        orders.append(b"next", partition=0, sync=True)
        found = second.poll(timeout=5.0)
        assert found[0].offset <= position
        with transaction("etl") as tx:
            tx.append(bills, b"later")
            tx.commit(second)
    assert values_of(bills) == [b"output", b"later"]
    with pytest.raises(StaleGenerationError), transaction("etl") as tx:
        tx.append(bills, b"never")
        tx.commit(first)
    first.close()


@pytest.mark.usefixtures("attentive")
def test_group_that_was_evicted_begins_no_transaction(pair: tuple[Topic, Topic]) -> None:
    orders, _ = pair
    orders.append(b"1", partition=0, sync=True)
    with orders.group("etl", commit="manual", member="a") as group:
        assert group.poll(timeout=5.0)
        orders.evict_member("etl", "a")
        with pytest.raises(StaleGenerationError):
            group.poll(timeout=0.0)
        with pytest.raises(StaleGenerationError):
            transaction("etl").commit(group)


@pytest.mark.usefixtures("attentive")
def test_commit_without_anything_handled_is_no_part_of_the_transaction(pair: tuple[Topic, Topic]) -> None:
    orders, _ = pair
    with orders.group("etl", commit="manual") as group, transaction("etl") as tx:
        group.poll()
        tx.commit(group)
    assert tx.number is None


@pytest.mark.usefixtures("attentive")
def test_another_process_applies_the_commit_of_a_group(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, open_topic: Open,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    orders, bills = pair
    orders.append(b"1", partition=0, sync=True)
    with orders.group("etl", commit="manual") as group:
        (record,) = group.poll(timeout=5.0)
        with dying(monkeypatch, applying.Applier, "run"), transaction("etl") as tx:
            tx.append(bills, b"x")
            tx.commit(group)
    copy = crash_copy(tmp_path / "data", tmp_path / "copy")
    loglib.recover_transactions(copy)
    info = open_topic(copy / "orders", mode="r").group_info("etl")
    assert info.committed[0].offset == record.next_offset
    other = crash_copy(tmp_path / "data", tmp_path / "other")
    with Topic.open(other / "orders", mode="r") as topic:
        topic.delete_group("etl")
    loglib.recover_transactions(other)
    assert "the group etl was deleted; its commit is dropped" in caplog.text
    assert values_of(open_topic(other / "bills", mode="r")) == [b"x"]


def test_shared_topic_ends_a_hold_that_it_finds(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, open_topic: Open
) -> None:
    with dying(monkeypatch, applying.Applier, "_release"), transaction("etl") as tx:
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


def test_topic_moved_while_its_transaction_is_applied_keeps_it(
    tmp_path: Path, open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic(tmp_path / "data" / "topic")
    append = Writer.append_section

    def move(self: Writer, batches: Any) -> None:
        append(self, batches)
        Path(topic.path).rename(tmp_path / "data" / "moved")

    monkeypatch.setattr(Writer, "append_section", move)
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


def _raise_full(*_: object) -> None:
    raise loglib.StorageFullError("topic", OSError(28, "No space left on device"))


def test_transaction_in_moved_topic_is_refused(pair: tuple[Topic, Topic], tmp_path: Path) -> None:
    _, bills = pair
    Path(bills.path).rename(tmp_path / "elsewhere")
    with pytest.raises((LogError, OSError)) as caught, transaction("etl") as tx:
        tx.append(bills, b"x")
    assert not isinstance(caught.value, CommitPendingError)


def test_hold_in_a_segments_header_may_lie_below_the_log_start(
    tmp_path: Path, open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic(tmp_path / "data" / "topic")
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
    again = open_topic(copy / "topic")
    assert values_of(again) == [b"2"]
    sound(again.partitions[0])


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
    found = applying.Applier(REAL, store, bills._handles.writers)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(applying.Applier, "_lock", lambda *_: held)
        found.run(5.0)
    committing.join()
    store.close()
    assert values_of(bills) == [b"1", b"2", b"3"]


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


def test_owner_waits_with_a_transaction_until_the_one_before_it_is_done(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bills = pair
    for name in ("first", "second"):
        where, step = (Store, "finish") if name == "first" else (applying.Applier, "run")
        with dying(monkeypatch, where, step), transaction("etl") as tx:
            tx.append(bills, name.encode())
    assert bills._serving.serve()  # as when a bell rings
    assert values_of(bills) == []
    with transaction("etl") as tx:
        tx.append(bills, b"third")
    assert values_of(bills) == [b"first", b"second", b"third"]


def test_nothing_is_forgotten_where_there_is_no_store(tmp_path: Path) -> None:
    assert loglib.expire_apps(timedelta(), store=tmp_path) == []


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
        Topic.open(path, partitions=2).close()
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

    from loglib.system.files import REAL
    from loglib.system.lock import try_acquire

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


@pytest.mark.parametrize("name", ["staging/../0000/x", "staging//x", "../bills/0000/x", "staging", ""])
def test_forged_name_of_a_stage_removes_nothing(pair: tuple[Topic, Topic], name: str) -> None:
    from loglib.transactions.manifest import Manifest, Section

    _, bills = pair
    with transaction("etl") as tx:
        tx.append(bills, b"x")
    store = Store(bills._files, str(store_of(bills)))
    applier = applying.Applier(bills._files, store)
    section = Section("bills", bills.log_id, 0, name, 0, 0, 0)
    applier._remove_staging(Manifest(9, "etl", 1, "owner", None, 0, (section,)))
    store.close()
    assert Path(bills.path, "0000", "watermark").exists()
    assert values_of(bills) == [b"x"]


def test_long_hold_is_told_once(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, bills = pair
    with dying(monkeypatch, Store, "finish"), transaction("etl") as tx:
        tx.append(bills, b"x")
    monkeypatch.setattr("loglib.log._LONG_HOLD_S", 0.01)
    values_of(bills)
    time.sleep(0.02)
    for _ in range(3):
        values_of(bills)
    assert caplog.text.count("records from offset 0 on wait for transaction 2, which is not done") == 1


def test_commit_in_doubt_keeps_what_is_staged(pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch) -> None:
    _, bills = pair

    def commit(*_: object, **__: object) -> None:
        raise loglib.StorageIOError("store", OSError(5, "Input/output error"), "syncing a commit")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "commit", commit)
        with pytest.raises(loglib.StorageIOError), transaction("etl") as tx:
            tx.append(bills, bytes(2 << 20))
    assert len(os.listdir(Path(bills.path, "staging"))) == 1


def test_section_of_another_history_is_never_applied(pair: tuple[Topic, Topic]) -> None:
    orders, _ = pair
    identity = orders._accesses[0].log.identity

    def staged(*values: bytes) -> bytes:
        section = staging.Staged(orders.path, identity, orders.config, orders._clock)
        for value in values:
            section.add(applying_load(value))
            section.seal()
        return section.portions[0].take()

    one, other = staged(b"a", b"b"), staged(b"c", b"b")
    half = len(one) // 2
    mixed = other[:half] + one[half:]
    found = staging.read_section(lambda at, size: mixed[at : at + size], len(mixed), identity, "staged", at=0)
    with pytest.raises(loglib.CorruptLogError, match="follows one with CRC"):
        list(found)
    short = one[:-8]
    found = staging.read_section(lambda at, size: short[at : at + size], len(one), identity, "staged", at=0)
    with pytest.raises(loglib.CorruptLogError, match="the end of the file"):
        list(found)


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


def test_inbox_of_a_topic_without_transactions_is_quiet(pair: tuple[Topic, Topic]) -> None:
    assert not pair[1]._serving.serve()


def test_topic_finishes_what_is_held_for_long(pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch) -> None:
    orders, bills = pair
    with dying(monkeypatch, Store, "finish"), transaction("etl") as tx:
        tx.append(bills, b"x")
    with dying(monkeypatch, applying.Applier, "run"), transaction("etl") as tx:
        tx.append(orders, b"y", partition=0)  # of which the other topic has nothing
    assert bills._serving.serve()
    assert bills._serving.serve()  # not for long yet
    monkeypatch.setattr("loglib.transactions.serving._PATIENCE_S", 0.01)
    time.sleep(0.02)
    bills._serving.serve()
    assert values_of(bills) == [b"x"]
    assert not bills._serving.serve()


@pytest.mark.usefixtures("attentive")
def test_pending_commit_of_another_group_is_not_ours(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, bills = pair
    orders.append(b"1", partition=0, sync=True)
    for name in ("one", "other"):
        with orders.group(name, commit="manual") as group:
            assert len(group.poll(timeout=5.0)) == 1
            with dying(monkeypatch, applying.Applier, "run"), transaction("etl") as tx:
                tx.append(bills, name.encode())
                tx.commit(group)
    with orders.group("one", commit="manual") as group:
        assert group.poll(timeout=0.2) == []
    with transaction("etl") as tx:
        tx.append(bills, b"last")
    assert values_of(bills) == [b"one", b"other", b"last"]


@pytest.mark.usefixtures("attentive")
def test_group_whose_first_transaction_got_nowhere_is_joined_as_ever(pair: tuple[Topic, Topic]) -> None:
    orders, _ = pair
    orders.append(b"1", partition=0, sync=True)
    with orders.group("etl") as group:
        assert len(group.poll(timeout=5.0)) == 1
        group.commit()
    Path(orders.path, "groups", "etl", "transacted").touch()
    with orders.group("etl") as group:
        assert group.poll(timeout=0.2) == []


@pytest.mark.parametrize("entry", [[1, 2], [1, 2, 3, 4, "", "", 5, "no digits"], [None] * 8])
def test_commit_that_cannot_be_read_is_damage(entry: list[Any]) -> None:
    from loglib.groups.transacted import parsed
    from loglib.transactions.manifest import Offsets

    with pytest.raises(loglib.CorruptLogError, match="a commit of a group that cannot be read"):
        parsed(Offsets("orders", "etl", "orders-0", entry))


def test_topic_that_is_changed_just_now_is_waited_for(pair: tuple[Topic, Topic], open_topic: Open) -> None:
    from loglib.system.files import REAL
    from loglib.system.lock import try_acquire

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
    loglib.recover_transactions(Path(bills.path).parent)
    assert values_of(reader) == [b"first", b"x"]


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


def test_topic_that_is_closed_meanwhile_serves_nothing(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bills = pair
    with dying(monkeypatch, applying.Applier, "run"), transaction("etl") as tx:
        tx.append(bills, b"x")

    def closed(*_: object) -> None:
        raise LogClosedError("closed")

    monkeypatch.setattr(applying.Applier, "apply_own", closed)
    assert not bills._serving.serve()


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
        "append": lambda: topic.append(b"x", sync=True), "roll": writer.roll, "hold": lambda: writer.begin_section(5),
    }  # fmt: skip
    for step in steps.split():
        actions[step]()
    mark = writer.disk.mark
    copy = crash_copy(tmp_path / "data", tmp_path / "copy")
    (copy / "topic" / "0000" / "watermark").unlink()
    recovered = open_topic(copy / "topic")
    again = recovered._placement.writer_of(0).disk.mark
    anonymous = {"sequence": 0, "writer_epoch": 0, "writer_nonce": 0}
    assert again._replace(**anonymous) == mark._replace(**anonymous)
    assert values_of(recovered) == [b"x"]
