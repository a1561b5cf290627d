"""A store of transactions in memory for tests, and processes that come between two calls of another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loglib.system.files import Files
from loglib.testing import Call, MemoryFiles, WatchedFiles
from loglib.transactions import store as module
from loglib.transactions.manifest import Section
from loglib.transactions.state import Intent
from loglib.transactions.store import Store, make_store

PATH = "/data/.transactions"
LOG_ID = bytes(16)
SECTION = Section("orders", LOG_ID, 0, "", 0, 1, 1)


def made(files: Files) -> Files:
    files.make_directories("/data")
    make_store(files, PATH, 0o640)
    return files


def transaction(app: str = "etl", version: int | None = None, owner: str = "one", **rest: Any) -> Intent:
    return Intent(app, version, owner, **{"sections": (SECTION,), "frames": b"x"} | rest)


@pytest.fixture
def files() -> Files:
    return made(MemoryFiles())


@pytest.fixture
def store(files: Files) -> Iterator[Store]:
    with Store(files, PATH) as opened:
        yield opened


@pytest.fixture
def every_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECKPOINT_EVERY", 4)


def complete(store: Store, count: int, app: str = "etl", *, now: int = 0) -> None:
    """So many transactions, each committed and done."""
    for _ in range(count):
        store.finish(store.commit(transaction(app), now=now).number, now=now)


def names(files: Files) -> list[str]:
    return sorted(name for name in files.listdir(PATH) if name != "store.json")


class Between(WatchedFiles):
    """Does something once, before the first call of this name to a file with this name, or that makes this name."""

    def __init__(self, inner: Files, call: str, file: str, what: Callable[[], object]) -> None:
        super().__init__(inner)
        self.what: tuple[str, str, Callable[[], object]] | None = (call, file, what)

    def before(self, call: Call) -> None:
        path = call.arguments[0] if call.name in ("link", "rename") else call.path
        if self.what and (call.name, os.path.basename(path)) == self.what[:2]:
            what, self.what = self.what[2], None
            what()


def freed(files: Files, count: int) -> Callable[[], None]:
    """Others commit so much meanwhile that the number that comes next here is folded and its name is free."""

    def others() -> None:
        with Store(files, PATH) as other:
            complete(other, count, "others")

    return others
