"""A damaged store of transactions: what is done stops nothing, `verify` finds it and `repair` puts it right."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import commands
import pytest
import transacted
from commands import Cli
from transacted import dying, store_of

import loglib
from conftest import values_of
from loglib import CommitPendingError, CorruptLogError, LockedError, Topic, transaction
from loglib.log.transaction_numbers import CHECKPOINT, DONE, name_of
from loglib.system.files import REAL
from loglib.system.lock import try_acquire
from loglib.transactions import apply, last_version
from loglib.transactions import store as stores
from loglib.transactions.repair_store import is_store, verify_store
from loglib.transactions.store import Store

pair = transacted.pair
cli = commands.cli

ROT = b"rotten all over"


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    stores._open.clear()
    yield
    stores._open.clear()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with three transactions that are done, of a topic beside it; no process has it open."""
    with Topic.open(tmp_path / "data" / "orders", create=True) as orders:
        for number in range(3):
            with transaction("shop") as tx:
                tx.append(orders, b"%d" % number)
    stores._open.clear()
    return tmp_path / "data" / ".transactions"


def rot(path: Path) -> None:
    """Replace the middle of a file: more than a checksum puts right. A second name of the file has the same bytes."""
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content[:10] + ROT + content[10 + len(ROT) :])


def flip(path: Path) -> None:
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content[:15] + bytes([content[15] ^ 8]) + content[16:])


def append(store: Path, value: bytes) -> None:
    with Topic.open(store.parent / "orders", create=True) as orders:
        with transaction("shop") as tx:
            tx.append(orders, value)
        assert values_of(orders)[-1] == value


@pytest.mark.parametrize("damage", [rot, flip])
def test_damage_of_what_is_done_stops_nothing(damage: Callable[[Path], None], store: Path) -> None:
    damage(store / name_of(3))
    append(store, b"new")
    loglib.transactions.recover_transactions(store)


def test_flipped_bit_forgets_no_version(store: Path) -> None:
    flip(store / name_of(4))
    assert last_version("shop", store=store) == 2
    stores._open.clear()
    rot(store / name_of(4))
    assert last_version("shop", store=store) == 1


@pytest.mark.parametrize(
    ("name", "damage", "what"),
    [
        (name_of(2), rot, "the last version of its app may be lost"),
        (name_of(2), flip, "written again, as its checksum says"),
        (name_of(0, CHECKPOINT), rot, "the versions of its apps are lost"),
        (name_of(0, CHECKPOINT), flip, "written again, as its checksum says"),
        ("store.json", rot, "made again"),
        ("store.json", flip, "written again, as its checksum says"),
        ("store.json", Path.unlink, "made again"),
        (name_of(0, CHECKPOINT), Path.unlink, "the versions of its apps are lost"),
    ],
)
def test_repair_sets_damaged_files_aside(
    name: str, damage: Callable[[Path], None], what: str, store: Path
) -> None:
    damage(store / name)
    before = (store / name).read_bytes() if (store / name).exists() else None
    assert len(verify_store(REAL, str(store)).damage) == 1
    (planned,) = loglib.repair(store, dry_run=True).repairs
    assert what in planned.what and ((store / name).read_bytes() if before is not None else None) == before
    report = loglib.repair(store)
    (done,) = report.repairs
    assert report.verified.damage == () and what in done.what
    assert before is None or Path(done.kept or "").read_bytes() == before
    append(store, b"new")
    assert last_version("shop", store=store) is not None
    assert loglib.repair(store).repairs == ()


def test_waiting_transaction_whose_file_is_damaged_stops_the_store_until_a_repair(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, bills = pair
    with dying(monkeypatch, apply.Applier, "run"), transaction("etl") as tx:
        tx.append(bills, b"lost")
    for topic in pair:
        topic.close()
    stores._open.clear()
    place = store_of(bills)
    rot(place / name_of(2))
    with Topic.open(orders.path, create=True) as again, pytest.raises(CorruptLogError), transaction("etl") as tx:
        tx.append(again, b"x")
    (done,) = loglib.repair(place).repairs
    assert "its records are lost where they are not yet applied" in done.what
    with Topic.open(orders.path) as again:
        with transaction("etl") as tx:
            tx.append(again, b"x", partition=0)
        assert values_of(again) == [b"x"]


def test_damaged_records_of_a_waiting_transaction_stop_it_and_no_other(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, bills = pair
    with dying(monkeypatch, apply.Applier, "run"), transaction("etl") as tx:
        tx.append(bills, b"lost" * 100)
    stores._open.clear()
    place = store_of(bills)
    content = (place / name_of(2)).read_bytes()
    (place / name_of(2)).write_bytes(content[:-50] + bytes(50))
    with transaction("etl") as tx:
        tx.append(orders, b"x", partition=0)
    assert values_of(orders) == [b"x"]
    with pytest.raises(CommitPendingError), transaction("etl") as tx:
        tx.append(bills, b"y")
    bills.close()
    (done,) = loglib.repair(place).repairs
    assert "damaged records after its line" in done.what
    with Topic.open(bills.path, create=True) as again:
        with transaction("etl") as tx:
            tx.append(again, b"new")
        assert values_of(again) == [b"y", b"new"]


def test_damaged_description_of_a_store_does_not_make_it_a_lost_one(store: Path) -> None:
    rot(store / "store.json")
    assert loglib.repair(store.parent / "orders").repairs == ()


def test_damaged_name_of_a_store_is_removed_by_a_repair(store: Path) -> None:
    (store.parent / "orders" / "transactions.json").write_bytes(ROT)
    with pytest.raises(CorruptLogError):
        Topic.open(store.parent / "orders", create=True)
    (done,) = loglib.repair(store.parent / "orders").repairs
    assert done.kept is not None and Path(done.kept).read_bytes() == ROT
    append(store, b"new")


def test_waiting_transaction_is_no_fault(pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch) -> None:
    _, bills = pair
    with dying(monkeypatch, apply.Applier, "run"), transaction("etl") as tx:
        tx.append(bills, b"x")
    assert verify_store(REAL, str(store_of(bills))).damage == ()
    with dying(monkeypatch, Store, "finish"), transaction("etl") as tx:
        tx.append(bills, b"y")
    assert verify_store(REAL, str(store_of(bills))).damage == ()


def test_store_without_a_name_in_any_topic_cannot_be_made_anew(store: Path) -> None:
    (store / "store.json").unlink()
    (store.parent / "orders" / "transactions.json").write_bytes(ROT)
    with pytest.raises(CorruptLogError, match="no topic that names this store"):
        loglib.repair(store)


def test_repair_waits_for_nobody(store: Path) -> None:
    held = try_acquire(REAL, str(store))
    assert held is not None
    with pytest.raises(LockedError, match="applies transactions"):
        loglib.repair(store)
    held.release()


def test_repair_that_was_cut_goes_on(store: Path) -> None:
    rot(store / name_of(2))
    (store / f"{name_of(2)}.damaged").write_bytes(b"an earlier repair's")
    assert len(loglib.repair(store).repairs) == 1
    assert (store / f"{name_of(2)}.damaged").read_bytes() == b"an earlier repair's"


def test_damaged_topic_beside_the_store_is_left_to_its_own_repair(store: Path) -> None:
    shutil.copytree(store.parent / "orders", store.parent / "bills")
    for each in (store.parent / "bills" / "0000").iterdir():
        each.unlink()
    assert verify_store(REAL, str(store)).damage == ()


def test_waiting_transaction_of_a_topic_that_is_gone_is_no_fault(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bills = pair
    with dying(monkeypatch, apply.Applier, "run"), transaction("etl") as tx:
        tx.append(bills, b"x")
    bills.close()
    shutil.rmtree(bills.path)
    assert verify_store(REAL, str(store_of(bills))).damage == ()


def test_what_is_a_store(store: Path, tmp_path: Path) -> None:
    assert is_store(REAL, str(store)) and not is_store(REAL, str(store.parent))
    assert not is_store(REAL, str(tmp_path / "nothing"))
    (store / "store.json").unlink()
    assert is_store(REAL, str(store))


def test_done_entry_is_done_though_its_file_is_damaged(store: Path) -> None:
    rot(store / name_of(2))
    with Store(REAL, str(store)) as opened:
        assert opened.is_done(2) and opened.pending() == []
    assert (store / name_of(2, DONE)).exists()


def test_command_verifies_and_repairs_a_store(store: Path, cli: Cli) -> None:
    whole = cli("verify", store.parent)
    assert whole.code == 0 and ".transactions: a store of transactions: no damage" in whole.output
    rot(store / name_of(2))
    damaged = cli("verify", store)
    assert damaged.code == 1 and "1 damage" in damaged.output and name_of(2) in damaged.output
    (found,) = cli("verify", store, "--json").objects
    assert found["store"] == str(store) and len(found["damage"]) == 1
    done = cli("repair", store, "--yes")
    assert done.code == 0 and "replaced by an empty entry" in done.output
    assert cli("verify", store).code == 0


def test_store_has_no_gaps_to_accept(store: Path) -> None:
    with pytest.raises(ValueError, match="is a store of transactions"):
        loglib.repair(store, accept=True)


def test_transaction_whose_staged_file_is_missing_is_given_up_and_stops_no_later_one(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is in a copy that took the topics before the commit, and the store after it."""
    orders, bills = pair
    with dying(monkeypatch, apply.Applier, "run"), transaction("etl") as tx:
        tx.append_many(orders, [b"x" * 1000] * 3000, partition=0)
        tx.append(bills, b"lost, too")
    for topic in pair:
        topic.close()
    staged = Path(orders.path, "staging")
    aside = staged.rename(staged.with_name("aside"))
    with pytest.raises(CommitPendingError), Topic.open(bills.path, mode="r") as topic, transaction("etl") as tx:
        tx.append(topic, b"waits")
    store = store_of(bills)
    (found,) = verify_store(REAL, str(store)).damage
    assert "cannot be applied: there is no" in found.found
    aside.rename(staged)
    assert verify_store(REAL, str(store)).damage == (), "it can be applied"
    shutil.rmtree(staged)
    (done,) = loglib.repair(store).repairs
    assert "given up: its records that are not yet applied are lost" in done.what and done.kept is not None
    loglib.transactions.recover_transactions(store.parent)
    with Topic.open(bills.path, mode="r") as topic, transaction("etl") as tx:
        tx.append(topic, b"next")
    with Topic.open(bills.path, mode="r") as topic:
        assert [record.value for record in topic.read()][-2:] == [b"waits", b"next"]
    assert verify_store(REAL, str(store)).damage == ()
