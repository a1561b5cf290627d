"""A store of transactions that nobody uses is closed, however many a process has used."""

import os
from pathlib import Path

import pytest

from conftest import needs_proc
from loglib import Topic, transaction
from loglib.system.files import REAL
from loglib.transactions import last_version
from loglib.transactions.store import open_store


def stores_open(below: Path) -> int:
    links = (os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd"))
    found = [os.readlink(each) for each in links if os.path.lexists(each)]
    return sum(each.startswith(str(below)) and "/.transactions" in each for each in found)


@needs_proc
def test_process_that_has_used_many_stores_has_none_of_them_open(tmp_path: Path) -> None:
    for tenant in range(4):
        with Topic.open(tmp_path / f"tenant{tenant}" / "orders", create=True) as topic, transaction("app") as tx:
            tx.append(topic, b"x")
        with Topic.open(tmp_path / f"tenant{tenant}" / "orders", mode="r") as topic:
            with transaction("app") as tx:
                tx.append(topic, b"x")
            with topic.group("etl", commit="manual") as group, transaction("copy") as tx:
                tx.commit(group, group.poll()[-1])
        assert last_version("app", store=tmp_path / f"tenant{tenant}") == 1
        assert stores_open(tmp_path) <= 1
    del tx, group, topic
    assert stores_open(tmp_path) == 0


@needs_proc
@pytest.mark.parametrize("mode", ["a", "r"])
def test_topic_keeps_the_store_of_its_transactions_open(tmp_path: Path, mode: str) -> None:
    """Otherwise each transaction would read the store again."""
    Topic.open(tmp_path / "orders", create=True).close()
    with Topic.open(tmp_path / "orders", mode=mode) as topic:  # type: ignore[arg-type]
        stores = set()
        for _ in range(3):
            with transaction("app") as tx:
                tx.append(topic, b"x")
            stores.add(id(open_store(REAL, str(tmp_path / ".transactions"))))
            del tx
            assert stores_open(tmp_path) == 1
        assert len(stores) == 1
