"""Topics with transactions for tests: two of them beside each other, and processes that die at a chosen step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loglib import Topic, Transaction

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
