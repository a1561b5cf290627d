"""The store of transactions goes on after any failing call, interrupt or power cut: what is done stays done."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Any

import pytest
import stored_transactions
from stored_transactions import PATH, complete, freed, made, names, transaction

from loglib import StorageIOError
from loglib.log.transaction_numbers import CHECKPOINT, DONE, is_done, name_of, numbers
from loglib.system.files import Files
from loglib.testing import CrashFS, FaultyFiles, MemoryFiles
from loglib.transactions import store as module
from loglib.transactions.manifest import Checkpoint, Manifest
from loglib.transactions.state import State
from loglib.transactions.store import Committed, Store, make_store

files = stored_transactions.files
store = stored_transactions.store
every_four = stored_transactions.every_four


# --- failing calls -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_four")
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_store_goes_on_after_any_failing_call(error: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    def work(files: Files, store: Store) -> int:
        failed = 0
        for version in range(10):
            for attempt in range(3):
                try:
                    found = store.commit(transaction(version=version), now=version)
                    store.finish(found.number, now=version)
                    break
                except OSError:
                    failed += 1
                    assert attempt < 2, "one call has failed"
        return failed

    at = total = 0
    while True:
        at += 1
        inner = made(MemoryFiles())
        files = FaultyFiles(at=at, error=error, armed=False, inner=inner)
        store = Store(files, PATH)
        files.armed = True
        total += work(files, store)
        if not files.failed:
            break
        with Store(inner, PATH) as other:
            assert other.last_version("etl") == 9 and other.pending() == []
            assert other.commit(transaction(), now=0).number == 11, "each version once, without a gap"
    assert total > 50


def test_commit_whose_sync_fails_is_in_doubt_until_it_is_repeated(files: Files) -> None:
    faulty = FaultyFiles("fsync", inner=files)
    with Store(faulty, PATH) as store:
        with pytest.raises(StorageIOError, match="syncing a commit, which is now in doubt"):
            store.commit(transaction(version=1), now=0)
        assert store.commit(transaction(version=1), now=0) == Committed(1, 1, repeated=True)
        assert faulty.seen == 2


@pytest.mark.usefixtures("every_four")
def test_checkpoint_that_fails_is_logged_and_made_later(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    faulty = FaultyFiles("pwritev", at=5, error=errno.ENOSPC, inner=files)
    with Store(faulty, PATH) as store:
        complete(store, 4)
        assert "cannot make a checkpoint of the transactions: " in caplog.text
        assert len(names(files)) == 9
        complete(store, 1)
        assert names(files) == [name_of(4, CHECKPOINT), name_of(5), name_of(5, DONE)]


def test_interrupted_call_leaves_a_store_that_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = State.apply

    def interrupted(self: Any, manifest: Manifest) -> None:
        apply(self, manifest)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(State, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.commit(transaction(version=1), now=0)
    assert store.commit(transaction(version=1), now=0) == Committed(1, 1, repeated=True)
    assert [each.number for each in store.pending()] == [1]


@pytest.mark.usefixtures("every_four")
def test_interrupted_reload_is_done_again(store: Store, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    freed(files, 4)()
    begin = State.__init__
    made_states = []

    def interrupted(self: State, checkpoint: Checkpoint) -> None:
        made_states.append(self)
        if len(made_states) == 2:
            raise KeyboardInterrupt
        begin(self, checkpoint)

    monkeypatch.setattr(State, "__init__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.last_version("others")
    monkeypatch.undo()
    monkeypatch.setattr(module, "CHECKPOINT_EVERY", 4)
    complete(store, 8)
    with Store(files, PATH) as other:
        assert (other.last_version("others"), other.last_version("etl")) == (3, 7)


# --- power cuts ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_four")
@pytest.mark.parametrize("mode", ["strict", "linux"])
def test_store_survives_a_cut_at_every_instant(mode: Any) -> None:
    fs = CrashFS()
    promised: list[tuple[int, Callable[[Files, Store], bool]]] = []

    def promise(check: Callable[[Files, Store], bool]) -> None:
        promised.append((len(fs.operations), check))

    fs.make_directories("/data")
    make_store(fs, PATH, 0o600)
    start = len(fs.operations)
    with Store(fs, PATH) as one, Store(fs, PATH) as other:
        for version in range(10):
            store = (one, other)[version % 2]
            found = store.commit(transaction(version=version), now=version)
            assert not found.repeated
            promise(lambda _, again, version=version: again.last_version("etl") >= version)  # type: ignore[misc]
            if version == 3:
                other.fence_owner("app", "new", None, now=0)
                promise(lambda _, again: again.fence_owner("app", "new", None, now=0) == 5)
            if version % 3 == 2:
                for each in one.pending():
                    one.finish(each.number, now=0)
                    promise(lambda files, _, number=each.number: is_done(files, PATH, number))  # type: ignore[misc]
    assert name_of(0, CHECKPOINT) not in names(fs)
    seen = set()
    for state in fs.crash_states(mode=mode, since=start):
        due = sum(at <= state.at for at, _ in promised)
        if (state.key, due) in seen:
            continue
        seen.add((state.key, due))
        files = state.files
        with Store(files, PATH) as again:
            for _, check in promised[:due]:
                assert check(files, again), state
            last, waiting = again.last_version("etl"), again.pending()
            assert all(not is_done(files, PATH, each.number) for each in waiting), state
            found = again.commit(transaction(), now=0)
            assert found.version == (0 if last is None else last + 1), state
            there = set(numbers(names(files)))
            base = max(numbers(names(files), CHECKPOINT))
            assert set(range(base + 1, found.number + 1)) <= there, f"a gap: {state}"
            assert max(there) == found.number, state
            assert [each.number for each in again.pending()] == [*(each.number for each in waiting), found.number]
    assert len(seen) > 150
