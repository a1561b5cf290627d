"""Fit: whether the writers of the partitions of a transaction answer, before it is committed."""

from pathlib import Path

from loglib import Topic, transaction
from loglib.system.files import REAL
from loglib.system.lock import try_acquire
from loglib.transactions.apply import _find
from loglib.transactions.fit import Target, check_writers
from loglib.transactions.store import open_store


def target_of(topic: Topic) -> Target:
    return Target(topic.path, topic.partition(0)._access.identity)


def test_writer_is_asked_though_another_process_applies_for_longer_than_it_is_waited_for(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "data" / "topic", create=True) as topic:
        with transaction("app") as tx:
            tx.append(topic, b"x")
        store = open_store(REAL, str(tmp_path / "data" / ".transactions"))
        applying = try_acquire(REAL, store.path)
        assert applying is not None
        try:
            check_writers(REAL, store, [target_of(topic)], answer_s=60.0, applying_s=0.0)
        finally:
            applying.release()


def test_partition_that_this_process_does_not_write_has_no_writer_here(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "topic", create=True) as topic, Topic.open(tmp_path / "other", create=True) as other:
        writer = other.partition(0)._access.writer()
        assert _find(REAL, [], target_of(topic)) is None
        assert _find(REAL, [writer], target_of(topic)) is None
        assert _find(REAL, [writer], target_of(other)) is writer
