"""Commits of groups in transactions: they are part of them, and a member without its partition commits nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transacted
from transacted import dying

import loglib
from conftest import crash_copy, values_of
from loglib import Group, StaleGenerationError, Topic, transaction
from loglib.transactions import apply

Open = Callable[..., Topic]

pair = transacted.pair


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
    with dying(monkeypatch, apply.Applier, "run"), transaction("etl") as tx:
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
def test_partition_taken_between_the_last_check_and_the_commit_is_fenced(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former owner has looked that the partition is its own, and is slow. Meanwhile another member reads on."""
    orders, bills = pair
    orders.append(b"1", partition=0, sync=True)
    first = orders.group("etl", commit="manual", member="a")
    polled = first.poll(timeout=5.0)
    seconds: list[Group] = []
    claim = loglib.transactions.transaction._claim

    def claim_late(*arguments: Any, **keywords: Any) -> None:
        if not seconds:
            orders.evict_member("etl", "a")
            seconds.append(orders.group("etl", commit="manual", member="b"))
            assert seconds[0].poll(timeout=5.0) == polled
        claim(*arguments, **keywords)

    monkeypatch.setattr("loglib.transactions.transaction._claim", claim_late)
    with pytest.raises(StaleGenerationError), transaction("etl") as tx:
        tx.append(bills, b"from the first")
        tx.commit(first)
    first.close()
    with seconds[0] as second, transaction("etl") as tx:
        tx.append(bills, b"from the second")
        tx.commit(second)
    assert values_of(bills) == [b"from the second"]


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
        with dying(monkeypatch, apply.Applier, "run"), transaction("etl") as tx:
            tx.append(bills, b"x")
            tx.commit(group)
    copy = crash_copy(tmp_path / "data", tmp_path / "copy")
    loglib.transactions.recover_transactions(copy)
    info = open_topic(copy / "orders", mode="r").group_info("etl")
    assert info.committed[0].offset == record.next_offset
    other = crash_copy(tmp_path / "data", tmp_path / "other")
    with Topic.open(other / "orders", mode="r") as topic:
        topic.delete_group("etl")
    loglib.transactions.recover_transactions(other)
    assert "the group etl was deleted; its commit is dropped" in caplog.text
    assert values_of(open_topic(other / "bills", mode="r")) == [b"x"]


@pytest.mark.usefixtures("attentive")
def test_pending_commit_of_another_group_is_not_ours(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, bills = pair
    orders.append(b"1", partition=0, sync=True)
    for name in ("one", "other"):
        with orders.group(name, commit="manual") as group:
            assert len(group.poll(timeout=5.0)) == 1
            with dying(monkeypatch, apply.Applier, "run"), transaction("etl") as tx:
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
    from loglib.transactions.group_commits import parsed
    from loglib.transactions.manifest import GroupCommit

    with pytest.raises(loglib.CorruptLogError, match="a commit of a group that cannot be read"):
        parsed(GroupCommit("orders", "etl", "orders-0", entry))
