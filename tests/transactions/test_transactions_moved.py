"""Topics that are moved, deleted or made anew in the middle of a transaction, and topics with several names."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transacted
from consumers import die
from transacted import dying, store_of

import loglib
from conftest import values_of
from loglib import LogError, LogMovedError, Topic, transaction
from loglib.transactions import apply

Open = Callable[..., Topic]

pair = transacted.pair


def move(orders: Path) -> None:
    orders.rename(orders.with_name("orders2"))


def delete(orders: Path) -> None:
    shutil.rmtree(orders)


def make_anew(orders: Path) -> None:
    shutil.rmtree(orders)
    Topic.open(orders, create=True, partitions=2).close()


def move_partition(orders: Path) -> None:
    (orders / "0000").rename(orders / "elsewhere")


def swap(orders: Path) -> None:
    """A backup takes the place of the topic, which is still there under another name."""
    shutil.copytree(orders, orders.with_name("backup"))
    orders.rename(orders.with_name("orders2"))
    orders.with_name("backup").rename(orders)


@pytest.mark.parametrize("mode", ["a", "r"])
@pytest.mark.parametrize("change", [move, delete, make_anew, move_partition, swap])
def test_topic_that_is_gone_before_the_commit_commits_nothing(
    mode: str, change: Callable[[Path], None], pair: tuple[Topic, Topic], open_topic: Open
) -> None:
    orders, bills = pair
    for topic in pair:
        topic.append(b"0", partition=0, sync=True)
    if mode == "r":
        if change is swap:
            return  # a reader goes over to what was restored, and so does the transaction
        orders.close()
        orders = open_topic(Path(orders.path), mode="r")
    with transaction("first") as tx:
        tx.append(bills, b"1")
    with pytest.raises(LogMovedError), transaction("etl") as tx:
        tx.append(orders, b"lost", partition=0)
        tx.append(bills, b"lost")
        change(Path(orders.path))
    assert values_of(bills) == [b"0", b"1"]
    assert loglib.transactions.last_version("etl", store=Path(bills.path).parent) is None


@pytest.mark.parametrize("name", ["orders2", "a-name-before"])
def test_topic_that_is_moved_behind_the_commit_gets_its_part(
    name: str, pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, bills = pair
    with dying(monkeypatch, apply.Applier, "run"), transaction("etl") as tx:
        tx.append(orders, bytes(2 << 20), partition=0)
        tx.append(bills, b"x")
    orders.close()
    moved = Path(orders.path).with_name(name)
    Path(orders.path).rename(moved)
    loglib.copies.snapshot(moved, moved.with_name("snapshot"))  # has the same log id, and is not the topic
    (moved.parent / "no-topic").mkdir()
    (moved.parent / "no-topic" / "topic.json").write_bytes(b"rotten")
    with transaction("etl") as tx:
        tx.append(bills, b"y")
    assert values_of(bills) == [b"x", b"y"]
    with Topic.open(moved, create=True) as again:
        assert values_of(again) == [bytes(2 << 20)]
    assert list((moved / "staging").iterdir()) == []


@pytest.mark.usefixtures("attentive")
@pytest.mark.parametrize("applied", ["by another transaction", "not yet"])
def test_commit_of_a_group_whose_topic_is_moved_behind_the_transaction_counts(
    applied: str, pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise what the transaction has copied is handled again."""
    orders, bills = pair
    orders.append(b"1", partition=0, sync=True)
    member = orders.group("etl", commit="manual")
    found = member.poll(timeout=5.0)
    with dying(monkeypatch, apply.Applier, "run"), transaction("copy") as tx:
        tx.append(bills, found[-1].value)
        tx.commit(member, found[-1])
    die(member)
    orders.close()
    moved = Path(orders.path).rename(Path(orders.path).with_name("orders2"))
    if applied != "not yet":
        with transaction("next") as tx:
            tx.append(bills, b"2")
    with Topic.open(moved, mode="r") as again, again.group("etl", commit="manual") as group:
        assert group.poll() == []


def test_topic_under_two_names_is_one_topic(pair: tuple[Topic, Topic], tmp_path: Path, open_topic: Open) -> None:
    orders, bills = pair
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "same"
    link.symlink_to(orders.path)
    other = open_topic(link, mode="r")
    with transaction("etl") as tx:
        tx.append(orders, b"1", partition=0)
        tx.append(other, b"2", partition=0)
        tx.append(bills, b"3")
    assert values_of(orders) == [b"1", b"2"] and values_of(bills) == [b"3"]


def test_store_of_a_topic_that_is_opened_by_a_link_is_beside_the_topic(
    pair: tuple[Topic, Topic], tmp_path: Path, open_topic: Open
) -> None:
    orders, _ = pair
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "same"
    link.symlink_to(orders.path)
    orders.close()
    with open_topic(link) as other, transaction("etl") as tx:
        tx.append(other, b"1", partition=0)
    orders = open_topic(Path(orders.path))
    assert store_of(orders).is_dir() and not (tmp_path / "links" / ".transactions").exists()
    with transaction("etl") as tx:
        tx.append(orders, b"2", partition=0)
    assert values_of(orders) == [b"1", b"2"]


def test_stage_of_a_living_transaction_is_not_swept(pair: tuple[Topic, Topic], clock: object) -> None:
    """It was stopped for a day, or the clock was put right: its lock says that it lives."""
    import os

    orders, bills = pair
    with transaction("slow") as slow:
        slow.append(bills, bytes(2 << 20))
        (attempt,) = (Path(bills.path) / "staging").iterdir()
        os.utime(attempt, (1, 1))
        with transaction("etl") as tx:
            tx.append(bills, b"meanwhile")
        assert attempt.exists()
        with transaction("etl") as tx:
            tx.append(orders, b"x", partition=0)
    assert values_of(bills) == [b"meanwhile", bytes(2 << 20)]


def test_topic_that_was_moved_before_an_append_is_refused_at_once(pair: tuple[Topic, Topic]) -> None:
    orders, _ = pair
    move(Path(orders.path))
    with pytest.raises(LogMovedError), transaction("etl") as tx:
        tx.append(orders, b"x", partition=0)


def test_two_stores_for_one_transaction_are_refused(pair: tuple[Topic, Topic], tmp_path: Path) -> None:
    orders, _ = pair
    with transaction("etl") as tx:
        tx.append(orders, b"x", partition=0)
    with Topic.open(tmp_path / "other" / "topic", create=True) as other, transaction("else") as tx:
        tx.append(other, b"1")
    with (
        Topic.open(tmp_path / "other" / "topic") as other,
        pytest.raises(LogError, match="must have one store"),
        transaction("etl") as tx,
    ):
        tx.append(orders, b"y", partition=0)
        tx.append(other, b"2")
