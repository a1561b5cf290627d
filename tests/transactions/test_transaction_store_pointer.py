"""The store of a topic's transactions: it is named once, and damage of its name is told."""

from pathlib import Path

import pytest
from transacted import dying

from conftest import values_of
from loglib import CorruptLogError, LogError, Topic, UnsupportedFormatError, transaction
from loglib.log.store_pointer import is_pending_here, read_pointer, settle
from loglib.system.files import REAL
from loglib.transactions.apply import Applier
from loglib.transactions.store import open_store


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """A topic that has a store."""
    with Topic.open(tmp_path / "data" / "topic", create=True) as topic, transaction("etl") as tx:
        tx.append(topic, b"x")
    return tmp_path / "data" / "topic"


def test_topic_without_transactions_has_no_store(tmp_path: Path) -> None:
    Topic.open(tmp_path / "topic", create=True).close()
    assert read_pointer(REAL, str(tmp_path / "topic")) is None
    assert not is_pending_here(REAL, str(tmp_path / "topic"), 1, 1)


def test_topics_and_store_may_be_moved_together(
    named: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    with Topic.open(tmp_path / "elsewhere" / "topic", create=True) as topic:
        with transaction("etl") as tx:
            tx.append(topic, b"y")
        assert values_of(topic) == [b"x", b"y"]
    assert tx.version == 1
    with Topic.open(tmp_path / "elsewhere" / "topic") as topic:
        with dying(monkeypatch, Applier, "run"), transaction("etl") as tx:
            tx.append(topic, b"z")
        (manifest,) = open_store(REAL, str(tmp_path / "elsewhere" / ".transactions")).pending()
    topic_path = str(tmp_path / "elsewhere" / "topic")
    assert is_pending_here(REAL, topic_path, manifest.number, manifest.id)
    assert not is_pending_here(REAL, topic_path, manifest.number, manifest.id + 2), "another transaction of this number"


def test_damage_of_the_name_is_found(named: Path) -> None:
    file = named / "transactions.json"
    content, whole = file.read_bytes(), read_pointer(REAL, str(named))
    for at in range(0, len(content) - 3, 7):
        file.write_bytes(content[:at] + bytes([content[at] ^ 0x04]) + content[at + 1 :])
        assert read_pointer(REAL, str(named)) == whole, "one flipped bit"
        file.write_bytes(content[:at] + bytes([content[at] ^ 0x14]) + content[at + 1 :])
        with pytest.raises((CorruptLogError, UnsupportedFormatError)):
            read_pointer(REAL, str(named))
        assert not is_pending_here(REAL, str(named), 2, 1)
    file.write_bytes(content[:40])
    with pytest.raises(CorruptLogError):
        Topic.open(named, create=True)


def test_newer_format_is_refused_by_name(named: Path) -> None:
    from loglib.format.header import crc32c

    file = named / "transactions.json"
    before = file.read_bytes().replace(b'"format": 1', b'"format": 9').rpartition(b'"crc"')[0]
    file.write_bytes(before + b'"crc": "%08x"}\n' % crc32c(before))
    with pytest.raises(UnsupportedFormatError):
        read_pointer(REAL, str(named))


def test_store_is_named_once(named: Path, tmp_path: Path) -> None:
    with pytest.raises(LogError, match="topics of one transaction must have one store"):
        settle(REAL, str(named), str(tmp_path / "other"), bytes(16), permissions=0o600)


def test_what_a_crash_left_is_replaced(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "data" / "topic", create=True) as topic:
        Path(topic.path, "transactions.json.tmp").write_bytes(b"torn")
        with transaction("etl") as tx:
            tx.append(topic, b"x")
        assert values_of(topic) == [b"x"]


def test_process_that_was_slower_uses_the_name_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from loglib.log import store_pointer

    with Topic.open(tmp_path / "data" / "topic", create=True) as topic, transaction("etl") as tx:
        tx.append(topic, b"x")
    there = read_pointer(REAL, topic.path)
    assert there is not None
    answers = [None, there]
    monkeypatch.setattr(store_pointer, "read_pointer", lambda *_: answers.pop(0))
    settle(REAL, topic.path, there.path, there.id, permissions=0o600)
    assert answers == []
