"""Dead letters as tests look at them, and files at which a process stops while others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest

from conftest import Clock
from loglib import Record, testing
from loglib.system import directory
from loglib.system.files import REAL, Files
from loglib.testing import Call, WatchedFiles
from loglib.testing.watched import CHANGES
from loglib.transactions import dead_letters, store

_PREFIX = "loglib-"


def letters(path: Path | str, **arguments: Any) -> list[Record]:
    """The records of the topic for dead letters; none if there is no topic."""
    arguments.setdefault("clock", Clock())
    try:
        with testing.open_topic(path, mode="r", **arguments) as topic:
            return list(topic.read())
    except FileNotFoundError:
        return []


def died(path: Path | str, **arguments: Any) -> list[bytes | None]:
    """The values of the dead letters."""
    return [each.value for each in letters(path, **arguments)]


def facts(record: Record) -> Mapping[str, str]:
    """What a dead letter says of the death."""
    return {
        name.removeprefix(_PREFIX): value.decode()
        for name, value in record.headers if name.startswith(_PREFIX) and value is not None
    }  # fmt: skip


class _Forgetful(WeakValueDictionary[Any, Any]):
    """Stores that are open, of which none is used again."""

    def get(self, *_: Any) -> None:
        return None


def forget_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opening of a store is that of another process, and nobody waits long for one that is stopped or dead."""
    monkeypatch.setattr(store, "_open", _Forgetful())
    monkeypatch.setattr(dead_letters, "_TIMEOUT_S", 0.01)
    monkeypatch.setattr(directory, "_LOCK_TIMEOUT_S", 0.01)


class StoppingFiles(WatchedFiles):
    """Before the `at`-th change to the disk (from 1) the process stops, and `meanwhile` is what others do."""

    def __init__(self, at: int, meanwhile: Callable[[], object], inner: Files = REAL) -> None:
        super().__init__(inner)
        self.at = at
        self.changes = 0
        self.armed = False
        self._meanwhile = meanwhile

    def before(self, call: Call) -> None:
        if self.armed and call.name in CHANGES:
            self.changes += 1
            if self.changes == self.at:
                self.armed = False
                self._meanwhile()
                self.armed = True


def until_not_reached(run: Callable[[int], bool]) -> Iterator[int]:
    """Call `run` with 1, 2, ... until it returns False."""
    at = 1
    while run(at):
        yield at
        at += 1
