"""A store that was restored, lost or replaced: a commit that returns is read back, or it is refused in words."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import transacted
from transacted import append_to_all, dying, store_of

import loglib
from conftest import values_of
from loglib import CommitPendingError, LogError, Topic, transaction
from loglib.append.section_writer import apply_section
from loglib.append.tail import Txn
from loglib.format.watermark import FILE_BYTES
from loglib.log.store_pointer import sealed
from loglib.system.files import REAL
from loglib.transactions import apply, last_version
from loglib.transactions import store as stores
from loglib.transactions.fit import store_number
from loglib.transactions.store import Store, open_store

Open = Callable[..., Topic]

pair = transacted.pair


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    """Nothing that another test's process knows of stores."""
    stores._open.clear()
    yield
    stores._open.clear()


def commit(topic: Topic, value: bytes, app: str = "shop") -> int:
    with transaction(app) as tx:
        tx.append(topic, value, partition=0)
    assert tx.number is not None
    return tx.number


def replace_store(store: Path, by: Path) -> None:
    """Put a copy of a store in the place of another one, as an operator does while nobody writes."""
    stores._open.clear()
    shutil.rmtree(store)
    shutil.copytree(by, store)


@pytest.fixture
def set_back(tmp_path: Path) -> Path:
    """A directory of topics whose store was restored from a backup that is older than they are."""
    data = tmp_path / "data"
    with Topic.open(data / "orders", create=True) as orders:
        commit(orders, b"old 0")
        shutil.copytree(data / ".transactions", tmp_path / "backup")
        for number in range(1, 4):
            commit(orders, b"old %d" % number)
    replace_store(data / ".transactions", tmp_path / "backup")
    return data


def test_commit_in_a_store_that_was_set_back_is_refused(set_back: Path) -> None:
    with Topic.open(set_back / "orders", create=True) as orders:
        with pytest.raises(LogError, match=r"set back.*`loglib repair .*/orders`"):
            commit(orders, b"new")
        assert values_of(orders) == [b"old 0", b"old 1", b"old 2", b"old 3"]


def test_refused_commit_leaves_no_version_behind(set_back: Path) -> None:
    before = last_version("shop", store=set_back)
    with Topic.open(set_back / "orders", create=True) as orders, pytest.raises(LogError, match="set back"):
        commit(orders, b"new")
    assert last_version("shop", store=set_back) == before


def test_repaired_store_goes_on_above_the_numbers_of_its_topics(set_back: Path) -> None:
    (found,) = loglib.repair(set_back / ".transactions", dry_run=True).repairs
    assert "the next transaction has a number above" in str(found)
    report = loglib.repair(set_back / ".transactions")
    assert len(report.repairs) == 1 and report.verified.damage == ()
    with Topic.open(set_back / "orders", create=True) as orders:
        for number in range(3):
            commit(orders, b"new %d" % number)
        assert values_of(orders) == [b"old %d" % n for n in range(4)] + [b"new %d" % n for n in range(3)]


@pytest.mark.parametrize("content", [None, bytes(FILE_BYTES)], ids=["no file", "zeros"])
def test_numbers_of_a_topic_without_its_watermark_are_known(set_back: Path, content: bytes | None) -> None:
    store, watermark = set_back / ".transactions", set_back / "orders" / "0000" / "watermark"
    known = loglib.repair(store, dry_run=True).repairs
    watermark.unlink() if content is None else watermark.write_bytes(content)
    assert known and loglib.repair(store, dry_run=True).repairs == known


@pytest.mark.parametrize("beside", [True, False])
def test_repair_of_a_topic_lets_its_store_go_on_above_its_numbers(beside: bool, set_back: Path, tmp_path: Path) -> None:
    topic = set_back / "orders"
    if not beside:
        (tmp_path / "far").mkdir()
        topic = topic.rename(tmp_path / "far" / "orders")
        content = sealed("../../data/.transactions", Store(REAL, str(set_back / ".transactions")).id)
        (topic / "transactions.json").write_bytes(content)
    (found,) = loglib.repair(topic, dry_run=True).repairs
    assert "the next transaction has a number above" in str(found)
    assert len(loglib.repair(topic).repairs) == 1 and loglib.repair(topic).repairs == ()
    with Topic.open(topic, create=True) as orders:
        commit(orders, b"new")
        assert values_of(orders)[-1] == b"new"


def test_another_topic_may_use_a_store_that_was_set_back(set_back: Path) -> None:
    with Topic.open(set_back / "orders", create=True) as orders, Topic.open(set_back / "bills", create=True) as bills:
        for number in range(9):
            commit(bills, b"%d" % number)
        commit(orders, b"new")
        assert values_of(bills) == [b"%d" % n for n in range(9)]
        assert values_of(orders)[-1] == b"new"


def test_store_that_is_newer_than_its_topic_goes_on(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Topic.open(data / "orders", create=True) as orders:
        commit(orders, b"0")
    shutil.copytree(data / "orders", tmp_path / "backup")
    with Topic.open(data / "orders") as orders:
        commit(orders, b"lost with the restore")
    shutil.rmtree(data / "orders")
    shutil.copytree(tmp_path / "backup", data / "orders")
    with Topic.open(data / "orders") as orders:
        commit(orders, b"1")
        assert values_of(orders) == [b"0", b"1"]


@pytest.mark.parametrize("damage", ["lost", "another one"])
def test_lost_store_is_named_and_a_repair_is_the_way_out(damage: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Topic.open(data / "orders", create=True) as orders:
        for number in range(3):
            commit(orders, b"old %d" % number)
    stores._open.clear()
    shutil.rmtree(data / ".transactions")
    if damage == "another one":
        with Topic.open(data / "bills", create=True) as bills:
            commit(bills, b"makes it anew")
    with Topic.open(data / "orders") as orders, pytest.raises(LogError, match="is gone, or another one is in its"):
        commit(orders, b"new")
    (found,) = loglib.repair(data / "orders", dry_run=True).repairs
    (done,) = loglib.repair(data / "orders").repairs
    assert str(found).partition(" (its bytes")[0] == str(done).partition(" (its bytes")[0]
    assert done.kept is not None and "its store of transactions is gone" in done.what
    with Topic.open(data / "orders") as orders:
        for number in range(5):
            commit(orders, b"new %d" % number)
        assert values_of(orders) == [b"old %d" % n for n in range(3)] + [b"new %d" % n for n in range(5)]


@pytest.mark.parametrize("way", ["snapshot", "mirror", "by hand"])
def test_topic_that_goes_to_another_host_gets_a_store_there(way: str, tmp_path: Path) -> None:
    source, copy = tmp_path / "a" / "orders", tmp_path / "b" / "orders"
    with Topic.open(source, create=True) as orders:
        for number in range(5):
            commit(orders, b"old %d" % number)
        if way == "snapshot":
            loglib.copies.snapshot(source, copy)
        elif way == "mirror":
            loglib.copies.mirror(source, copy)
    if way == "by hand":
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("transactions.json"))
    stores._open.clear()
    shutil.rmtree(tmp_path / "a")
    loglib.copies.promote(copy, force=True)
    with Topic.open(copy, create=True) as orders:
        numbers = [commit(orders, b"new %d" % number) for number in range(7)]
        assert values_of(orders) == [b"old %d" % n for n in range(5)] + [b"new %d" % n for n in range(7)]
    assert len(set(numbers)) == 7
    assert (tmp_path / "b" / ".transactions").is_dir()


def test_failover_and_back_loses_nothing(tmp_path: Path) -> None:
    """Each side has a store. The numbers of each go on above what the other side has given."""
    a, b = tmp_path / "a" / "orders", tmp_path / "b" / "orders"
    wanted: list[bytes] = []

    def work(place: Path) -> None:
        with Topic.open(place, create=True) as topic:
            for _ in range(3):
                value = b"%d" % len(wanted)
                commit(topic, value)
                wanted.append(value)
            assert values_of(topic) == wanted

    work(a)
    loglib.copies.mirror(a, b)
    stores._open.clear()
    (tmp_path / "a" / ".transactions").rename(tmp_path / "a" / "gone")  # host a does not answer
    loglib.copies.promote(b, force=True)
    work(b)
    stores._open.clear()
    (tmp_path / "a" / "gone").rename(tmp_path / "a" / ".transactions")
    loglib.copies.mirror(b, a, demote=True)
    loglib.copies.promote(a)
    work(a)
    with Topic.open(tmp_path / "a" / "bills", create=True) as bills:
        commit(bills, b"x")
    work(a)


def test_copy_names_the_store_though_retention_has_dropped_its_transactions(tmp_path: Path) -> None:
    source, copy = tmp_path / "data" / "orders", tmp_path / "copies" / "orders"
    with Topic.open(source, create=True) as orders:
        commit(orders, b"old")
        orders.partition(0).roll()
        orders.append(b"native", sync=True)
        orders.partition(0).delete_before(orders.partition(0).segments[-1].base_offset)
    loglib.copies.mirror(source, copy)
    loglib.copies.promote(copy)
    with Topic.open(copy, create=True) as orders:
        number = commit(orders, b"new")
        assert values_of(orders) == [b"native", b"new"]
    assert last_version("shop", store=tmp_path / "data") == 1, "the same store goes on"
    assert number > 2


def test_number_of_another_history_is_not_taken_for_applied(pair: tuple[Topic, Topic]) -> None:
    """The log was replaced behind the commit point: it has another transaction of this number."""
    orders, _ = pair
    first = commit(orders, b"x")
    store = open_store(REAL, str(store_of(orders)))
    writer = orders._handles.writers[0]
    number = store_number(store.id)
    with pytest.raises(LogError, match="of another history"):
        apply_section(writer, Txn(first, 12345, number), [])
    commit(orders, b"y")
    id_of_first = next(each for each in writer.section_headers(0) if each.producer_sequence == first).producer_id
    apply_section(writer, Txn(first, id_of_first, number), [])  # it is here, though others came behind it
    assert values_of(orders) == [b"x", b"y"]


def test_transaction_whose_log_was_replaced_waits_until_a_repair_gives_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    with Topic.open(data / "orders", create=True) as orders:
        commit(orders, b"0")
    shutil.copytree(data, tmp_path / "other")
    stores._open.clear()
    with Topic.open(tmp_path / "other" / "orders", create=True) as orders:
        commit(orders, b"of the other history")
    stores._open.clear()
    with Topic.open(data / "orders") as orders, dying(monkeypatch, apply.Applier, "run"):
        commit(orders, b"lost")
    shutil.rmtree(data / "orders")
    shutil.copytree(tmp_path / "other" / "orders", data / "orders")
    with pytest.raises(CommitPendingError):
        loglib.transactions.recover_transactions(data)
    (done,) = loglib.repair(data / ".transactions").repairs
    assert "given up" in done.what and done.kept is not None and Path(done.kept).exists()
    loglib.transactions.recover_transactions(data)
    with Topic.open(data / "orders") as orders:
        commit(orders, b"new")
        assert values_of(orders) == [b"0", b"of the other history", b"new"]


def test_numbers_that_are_passed_over_survive_a_checkpoint(pair: tuple[Topic, Topic]) -> None:
    orders, _ = pair
    commit(orders, b"x")
    with Store(REAL, str(store_of(orders))) as store:
        store.pass_over(1000, now=1)
        store.pass_over(900, now=1)
        assert store.last_number() == 1000
        store.expire(now=2)
    stores._open.clear()
    assert commit(orders, b"y") > 1000
    assert values_of(orders) == [b"x", b"y"]


def test_other_process_goes_on_above_numbers_that_are_passed_over(pair: tuple[Topic, Topic]) -> None:
    orders, _ = pair
    commit(orders, b"x")
    with Store(REAL, str(store_of(orders))) as one, Store(REAL, str(store_of(orders))) as other:
        one.pass_over(50, now=1)
        assert other.last_number() == 50
        other.fence_owner("else", "me", None, now=3)
        assert one.last_number() == 51


def test_lost_mark_does_not_hide_that_the_store_was_set_back(set_back: Path) -> None:
    with Topic.open(set_back / "orders", mode="r") as orders:
        (set_back / "orders" / "0000" / "watermark").unlink()
        with pytest.raises(LogError, match="set back"):
            commit(orders, b"new")


def test_two_transactions_of_all_partitions_after_a_repair(set_back: Path) -> None:
    loglib.repair(set_back / ".transactions")
    with Topic.open(set_back / "orders", create=True) as orders, Topic.open(set_back / "bills", create=True) as bills:
        with transaction("both") as tx:
            tx.append(orders, b"1")
            tx.append(bills, b"1")
        assert values_of(orders)[-1] == values_of(bills)[-1] == b"1"


def test_promoted_topic_keeps_a_store_that_it_can_reach(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, copy = tmp_path / "data" / "orders", tmp_path / "copies" / "orders"
    with Topic.open(source, create=True) as orders, transaction("shop", version=7) as tx:
        tx.append(orders, b"x")
    loglib.copies.mirror(source, copy)
    loglib.copies.promote(copy)
    assert "the store of its transactions is not here" not in caplog.text
    with Topic.open(copy, create=True) as orders, transaction("shop", version=7) as tx:
        tx.append(orders, b"again")
    assert tx.repeated


def test_waiting_transaction_of_a_backup_is_found_where_it_was_applied_since(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    orders, bills = pair
    with dying(monkeypatch, apply.Applier, "run"), transaction("etl") as tx:
        append_to_all(tx, pair, b"x")
    shutil.copytree(store_of(orders), tmp_path / "backup")
    with transaction("etl") as tx:
        tx.append(orders, b"behind it", partition=0)
        tx.append(bills, b"behind it")
    for topic in pair:
        topic.close()
    replace_store(store_of(orders), tmp_path / "backup")
    loglib.transactions.recover_transactions(tmp_path / "data")
    loglib.repair(store_of(orders))
    with Topic.open(orders.path, create=True) as again:
        commit(again, b"new")
        assert sorted(values_of(again)) == [b"behind it", b"new", b"x", b"x"]
