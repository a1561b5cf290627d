"""A part of a transaction that nobody can finish hides nothing for ever: it is told, and a repair shows the rest."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transacted
from transacted import dying, store_of

import loglib
from conftest import crash_copy, sound, values_of
from loglib import CorruptLogError, Topic, transaction
from loglib.append.section_writer import SectionWriter
from loglib.system.files import REAL
from loglib.system.lock import try_acquire
from loglib.transactions import apply
from loglib.transactions.store import Store

Open = Callable[..., Topic]

pair = transacted.pair


@pytest.fixture
def half(tmp_path: Path, open_topic: Open, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a topic whose log ends with a part of a transaction, before the store is copied: it has no store."""
    topic = open_topic(tmp_path / "data" / "topic", segment_bytes=4096)
    topic.append(b"before", sync=True)
    with dying(monkeypatch, SectionWriter, "append_section", at_call=2), transaction("etl") as tx:
        tx.append_many(topic, [bytes(1 << 20)] * 4, partition=0)
    topic.append(b"acknowledged", sync=True)
    return crash_copy(tmp_path / "data" / "topic", tmp_path / "copy")


def test_reader_of_records_behind_a_part_says_what_is_wrong(half: Path) -> None:
    found = "nobody can finish it.*loglib repair"
    with Topic.open(half, mode="r") as topic, pytest.raises(CorruptLogError, match=found):
        values_of(topic)


def test_writer_does_not_append_where_nobody_would_see_it(half: Path) -> None:
    with pytest.raises(CorruptLogError, match="nobody can finish it"):
        Topic.open(half, create=True)
    with Topic.open(half, shared=True) as topic:
        for _ in range(2):
            with pytest.raises(CorruptLogError, match="nobody can finish it"):
                topic.append(b"x", sync=True)


@pytest.mark.parametrize("watermark", ["whole", "lost"])
def test_repair_declares_the_part_as_lost_and_shows_the_rest(half: Path, watermark: str) -> None:
    if watermark == "lost":
        (half / "0000" / "watermark").unlink()
    assert any("part of transaction" in str(each) for each in loglib.repair(half, dry_run=True).repairs)
    report = loglib.repair(half)
    assert report.lost_bytes > 1 << 20 and not report.verified.damage
    with Topic.open(half, create=True) as topic:
        topic.append(b"new", sync=True)
        reader = topic.read(on_damage="skip")
        assert [record.value for record in reader] == [b"before", b"acknowledged", b"new"]
    assert loglib.repair(half).repairs == ()


def test_part_at_the_end_hides_nothing_and_is_not_shown(
    tmp_path: Path, open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic(tmp_path / "data" / "topic")
    topic.append(b"before", sync=True)
    with dying(monkeypatch, SectionWriter, "append_section", at_call=2), transaction("etl") as tx:
        tx.append_many(topic, [bytes(9 << 20)] * 2, partition=0)
    topic.flush()
    copy = crash_copy(tmp_path / "data" / "topic", tmp_path / "copy")
    with Topic.open(copy, mode="r") as reading:
        assert values_of(reading) == [b"before"]
    loglib.repair(copy)
    with Topic.open(copy, create=True) as again:
        again.append(b"new", sync=True)
        assert [record.value for record in again.read(on_damage="skip")] == [b"before", b"new"]


def test_hold_without_a_record_hides_nothing(tmp_path: Path, open_topic: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = open_topic(tmp_path / "data" / "topic")
    with dying(monkeypatch, SectionWriter, "append_section"), transaction("etl") as tx:
        tx.append(topic, b"x")
    topic.append(b"acknowledged", sync=True)
    assert values_of(topic) == [], "the transaction is pending"
    copy = crash_copy(tmp_path / "data" / "topic", tmp_path / "copy")
    with Topic.open(copy, mode="r") as reading:
        assert values_of(reading) == [b"acknowledged"]
    with Topic.open(copy, create=True) as again:
        again.append(b"new", sync=True)
        assert values_of(again) == [b"acknowledged", b"new"]


@pytest.mark.parametrize("watermark", ["whole", "lost"])
@pytest.mark.parametrize("died", ["_release", "finish"])
def test_whole_transaction_is_shown_without_its_store(
    watermark: str, died: str, pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, bills = pair
    where = apply.Applier if died == "_release" else Store
    with dying(monkeypatch, where, died), transaction("etl") as tx:
        tx.append(bills, b"x")
    bills.append(b"behind it", sync=True)
    copy = crash_copy(Path(bills.path), tmp_path / "copy")
    if watermark == "lost":
        (copy / "0000" / "watermark").unlink()
        loglib.repair(copy)
    with Topic.open(copy, mode="r") as reading:
        assert values_of(reading) == [b"x", b"behind it"]
    with Topic.open(copy, create=True) as again:
        again.append(b"new", sync=True)
        assert values_of(again) == [b"x", b"behind it", b"new"]
        sound(again.partitions[0])


def test_end_that_was_written_and_not_published_is_found(
    tmp_path: Path, open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer died between the last batch and the mark that says so, and then the store was lost."""
    topic = open_topic(tmp_path / "data" / "topic")
    with dying(monkeypatch, SectionWriter, "end_section"), transaction("etl") as tx:
        tx.append(topic, b"x")
    topic.append(b"behind it", sync=True)
    copy = crash_copy(tmp_path / "data" / "topic", tmp_path / "copy")
    with Topic.open(copy, mode="r") as reading:
        assert values_of(reading) == [b"x", b"behind it"]
    loglib.copies.mirror(copy, tmp_path / "mirror")
    with Topic.open(tmp_path / "mirror", mode="r") as reading:
        assert values_of(reading) == [b"x", b"behind it"]
    with Topic.open(copy, create=True) as again:
        again.append(b"new", sync=True)
        assert values_of(again) == [b"x", b"behind it", b"new"]


def test_repair_of_a_lost_mark_beside_a_waiting_transaction_shows_no_half(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, bills = pair
    bills.append(b"before", sync=True)
    with dying(monkeypatch, SectionWriter, "append_section", at_call=2), transaction("etl") as tx:
        tx.append_many(bills, [bytes(9 << 20), b"end"])
    bills.append(b"behind it", sync=True)
    data = crash_copy(tmp_path / "data", tmp_path / "copy")
    (data / "bills" / "0000" / "watermark").unlink()
    loglib.repair(data / "bills")
    with Topic.open(data / "bills", mode="r") as reading:
        assert values_of(reading) == [b"before"]
    loglib.transactions.recover_transactions(data)
    with Topic.open(data / "bills", create=True) as again:
        assert values_of(again) == [b"before", bytes(9 << 20), b"behind it", b"end"]


@pytest.mark.parametrize("ends", ["as a whole", "with a part"])
def test_store_that_disappears_under_a_writer_hides_nothing(
    ends: str, pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bills = pair
    step, call = ("end_section", 1) if ends == "as a whole" else ("append_section", 2)
    with dying(monkeypatch, SectionWriter, step, at_call=call), transaction("etl") as tx:
        tx.append_many(bills, [bytes(9 << 20), b"end"])
    store_of(bills).rename(store_of(bills).with_name("elsewhere"))
    bills._serving.serve()
    if ends == "as a whole":
        bills.append(b"new", sync=True)
        assert values_of(bills) == [bytes(9 << 20), b"end", b"new"]
    else:
        with pytest.raises(CorruptLogError, match="nobody can finish it"):
            bills.append(b"new", sync=True)


def test_transaction_for_a_log_with_a_lost_part_is_refused_before_it_is_committed(half: Path) -> None:
    (half / "transactions.json").unlink()
    with Topic.open(half, mode="r") as topic:
        with pytest.raises(CorruptLogError, match="nobody can finish it"), transaction("etl") as tx:
            tx.append(topic, b"x")
        assert loglib.transactions.last_version("etl", store=half.parent) is None


def test_transaction_is_committed_behind_a_hold_without_a_record(
    tmp_path: Path, open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic(tmp_path / "data" / "topic")
    with dying(monkeypatch, SectionWriter, "append_section"), transaction("etl") as tx:
        tx.append(topic, b"lost with its store")
    copy = crash_copy(tmp_path / "data" / "topic", tmp_path / "copy")
    (copy / "transactions.json").unlink()
    with Topic.open(copy, mode="r") as reading:
        with transaction("etl") as tx:
            tx.append(reading, b"x")
        assert values_of(reading) == [b"x"]


def test_marks_of_a_store_that_another_one_replaced_are_not_believed(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A store that was set back gives the number of the waiting transaction to another one, which is done."""
    orders, bills = pair
    with transaction("etl") as tx:
        tx.append(orders, b"0", partition=0)
        tx.append(bills, b"0")
    backup = crash_copy(tmp_path / "data" / ".transactions", tmp_path / "backup")
    with dying(monkeypatch, SectionWriter, "append_section", at_call=2), transaction("etl") as tx:
        tx.append_many(bills, [bytes(9 << 20), b"end"])
    data = crash_copy(tmp_path / "data", tmp_path / "copy")
    shutil.rmtree(data / ".transactions")
    shutil.copytree(backup, data / ".transactions")
    with Topic.open(data / "orders", create=True) as other:
        for value in (b"1", b"2", b"3"):
            with transaction("etl") as tx:
                tx.append(other, value, partition=0)
    with Topic.open(data / "bills", mode="r") as reading:
        assert values_of(reading) == [b"0"], "no half"
    with pytest.raises(CorruptLogError, match="nobody can finish it"):
        Topic.open(data / "bills", create=True)


def test_topic_opens_while_another_process_applies(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, open_topic: Open,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    _, bills = pair
    with dying(monkeypatch, Store, "finish"), transaction("etl") as tx:
        tx.append(bills, b"x")
    data = crash_copy(tmp_path / "data", tmp_path / "copy")
    monkeypatch.setattr("loglib.transactions.participant._APPLY_S", 0.01)
    held = try_acquire(REAL, str(data / ".transactions"))
    assert held is not None
    again = open_topic(data / "bills")
    assert "it waits for another process, which applies transactions" in caplog.text and values_of(again) == []
    held.release()
    again._serving.apply()
    assert values_of(again) == [b"x"]


def test_store_that_cannot_be_read_for_a_moment_gives_nothing_up(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bills = pair
    with dying(monkeypatch, SectionWriter, "end_section"), transaction("etl") as tx:
        tx.append(bills, b"x")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "pending", fail)
        assert bills._serving.serve()
    assert values_of(bills) == []
    bills._serving.apply()
    assert values_of(bills) == [b"x"]


@pytest.mark.parametrize("begins", ["with the segment", "within it", "with a segment whose header is damaged"])
def test_repair_of_a_lost_mark_finds_a_part_that_begins_in_an_earlier_segment(
    begins: str, tmp_path: Path, open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic(tmp_path / "data" / "topic")
    writer = topic._placement.writer_of(0)
    topic.append(b"before", sync=True)
    if begins != "within it":
        writer.roll()
    with dying(monkeypatch, SectionWriter, "append_section", at_call=2), transaction("etl") as tx:
        tx.append_many(topic, [bytes(9 << 20), b"end"])
    writer.roll()
    topic.append(b"behind it", sync=True)
    data = crash_copy(tmp_path / "data", tmp_path / "copy")
    (data / "topic" / "0000" / "watermark").unlink()
    if begins == "with a segment whose header is damaged":
        with sorted((data / "topic" / "0000").glob("*.log"))[1].open("r+b") as file:
            file.write(b"rotten")
    loglib.repair(data / "topic")
    with Topic.open(data / "topic", mode="r") as reading:
        assert values_of(reading) == [b"before"]
    loglib.transactions.recover_transactions(data)
    with Topic.open(data / "topic", create=True) as again:
        assert values_of(again) == [b"before", bytes(9 << 20), b"behind it", b"end"]
