"""transactions/store.py, state.py: a version is committed once, numbers have no gap, and what is done stays done."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import stored_transactions
from stored_transactions import PATH, Between, names, transaction

from conftest import start_python
from loglib import CorruptLogError, FencedError, LogClosedError, LogMovedError, StaleGenerationError
from loglib.errors import ForkedHandleError, SourceMismatchError
from loglib.log.transaction_numbers import CHECKPOINT, is_done, name_of
from loglib.system.files import REAL, Files
from loglib.testing import MemoryFiles, RecordingFiles
from loglib.transactions.manifest import Checkpoint, Fence, GroupCommit, encode_checkpoint
from loglib.transactions.store import Committed, Store, make_store

files = stored_transactions.files
store = stored_transactions.store
every_four = stored_transactions.every_four


def offsets(generation: int, partition: str = "clicks-0") -> GroupCommit:
    return GroupCommit("clicks", "etl", partition, [100, generation])


# --- committing ----------------------------------------------------------------------------------------------


def test_version_is_committed_once(store: Store) -> None:
    assert store.last_version("etl") is None
    assert store.commit(transaction(version=7), now=1) == Committed(1, 7, repeated=False)
    assert store.commit(transaction(version=7), now=2) == Committed(1, 7, repeated=True)
    assert store.commit(transaction(version=3), now=2) == Committed(1, 3, repeated=True)
    assert store.commit(transaction(), now=3) == Committed(2, 8, repeated=False)
    assert store.commit(transaction("other"), now=3) == Committed(3, 0, repeated=False)
    assert (store.last_version("etl"), store.last_version("other")) == (8, 0)
    assert [(each.number, each.app, each.time, each.frames) for each in store.pending()] == [
        (1, "etl", 1, b"x"), (2, "etl", 3, b"x"), (3, "other", 3, b"x"),
    ]  # fmt: skip


def test_commit_is_a_synced_file_under_a_synced_name(store: Store, files: Files) -> None:
    recorded = RecordingFiles(files)
    with Store(recorded, PATH) as other:
        recorded.calls.clear()
        other.commit(transaction(), now=1)
    changes = [name for name, _ in recorded.named("create", "pwritev", "datasync", "link", "fsync", "unlink")]
    assert changes == ["create", "pwritev", "datasync", "link", "fsync", "unlink"]
    assert names(files) == [name_of(0, CHECKPOINT), name_of(1)], "no temporary is left"
    assert files.facts(f"{PATH}/{name_of(1)}").st_mode & 0o777 == 0o640
    recorded.calls.clear()
    assert store.commit(transaction(), now=2).number == 2
    with Store(recorded, PATH) as other:
        assert other.pending()[0].number == 1
    assert recorded.named("fsync"), "what another process linked is synced before it is acted upon"


def test_next_owner_fences_the_former(store: Store, files: Files) -> None:
    assert store.fence_owner("etl", "one", "source", now=1) == 1
    assert store.fence_owner("etl", "one", "source", now=1) == 1, "it is the owner already"
    assert store.last_version("etl") is None
    assert store.commit(transaction(), now=1) == Committed(2, 0, repeated=False)
    with Store(files, PATH) as other:
        with pytest.raises(FencedError, match="app etl: two is not its owner, one is"):
            other.commit(transaction(owner="two"), now=2)
        assert other.fence_owner("etl", "two", None, now=2) == 3
        with pytest.raises(FencedError) as caught:
            store.commit(transaction(), now=3)
        assert (caught.value.owner, caught.value.current) == ("one", "two")
        with pytest.raises(FencedError):
            store.fence_owner("etl", "one", None, now=3)
        assert other.commit(transaction(owner="two"), now=4) == Committed(4, 1, repeated=False)
    assert [each.number for each in store.pending()] == [2, 4], "fences have nothing to apply"
    assert [store.is_done(number) for number in range(1, 6)] == [True, False, True, False, False]


def test_another_source_is_refused(store: Store) -> None:
    store.commit(transaction(source="here"), now=1)
    store.commit(transaction(), now=1)
    for call in (
        lambda: store.commit(transaction(source="there"), now=2),
        lambda: store.fence_owner("etl", "two", "there", now=2),
    ):
        with pytest.raises(SourceMismatchError, match="from source here, not from there"):
            call()
    assert store.commit(transaction(source="here"), now=2).version == 2


def test_lower_generation_is_refused_behind_a_higher_one(store: Store) -> None:
    store.commit(transaction(offsets=(offsets(4),)), now=1)
    store.fence_groups((Fence("clicks", "etl", "clicks-0", 6), Fence("clicks", "etl", "clicks-1", 2)), now=1)
    store.fence_groups((Fence("clicks", "etl", "clicks-0", 5),), now=1)
    for low in (offsets(5), offsets(1, "clicks-1")):
        with pytest.raises(StaleGenerationError, match="no longer owns clicks"):
            store.commit(transaction(offsets=(low,)), now=2)
    assert store.commit(transaction(version=0, offsets=(offsets(4),)), now=2).repeated, "it was committed before"
    assert store.commit(transaction(offsets=(offsets(6), offsets(2, "clicks-1"))), now=2).number == 3


def test_stores_in_turns_have_one_sequence(store: Store, files: Files) -> None:
    with Store(files, PATH) as other:
        for number in range(1, 21):
            each = (store, other)[number % 2]
            assert each.commit(transaction("ab"[number % 3 == 0]), now=number).number == number
        assert [each.number for each in store.pending()] == [each.number for each in other.pending()]
        for number in (2, 1, 4):
            other.finish(number, now=0)
        assert [each.number for each in store.pending()] == [3, *range(5, 21)]
        assert [is_done(files, PATH, number) for number in range(1, 6)] == [True, True, False, True, False]
        store.finish(2, now=0)  # it is done already
        with pytest.raises(ValueError, match="transaction 21 is not committed; the last one is 20"):
            store.finish(21, now=0)


def test_loser_of_a_number_takes_the_next_with_the_same_bytes(files: Files) -> None:
    with Store(files, PATH) as other:
        racing = Between(files, "link", name_of(1), lambda: other.commit(transaction("other"), now=1))
        recorded = RecordingFiles(racing)
        with Store(recorded, PATH) as store:
            assert store.commit(transaction(), now=1) == Committed(2, 0, repeated=False)
        assert recorded.count("datasync") == 1


def test_loser_of_a_version_repeats_it_and_the_next_version_is_the_next(files: Files) -> None:
    with Store(files, PATH) as other:
        racing = Between(files, "link", name_of(1), lambda: other.commit(transaction(version=5), now=1))
        with Store(racing, PATH) as store:
            assert store.commit(transaction(version=5), now=1) == Committed(1, 5, repeated=True)
        racing = Between(files, "link", name_of(2), lambda: other.commit(transaction(), now=1))
        with Store(racing, PATH) as store:
            assert store.commit(transaction(), now=1) == Committed(3, 7, repeated=False)
        racing = Between(files, "link", name_of(4), lambda: other.fence_owner("etl", "two", None, now=1))
        with Store(racing, PATH) as store, pytest.raises(FencedError):
            store.commit(transaction(), now=1)
    assert not [name for name in names(files) if name.endswith(".tmp")]


# --- the store itself ----------------------------------------------------------------------------------------


def test_store_is_made_once(files: Files) -> None:
    with Store(files, PATH) as store:
        first = store.id
    make_store(files, PATH, 0o600)
    with Store(files, PATH) as store:
        assert store.id == first and len(first) == 16


def test_one_of_two_makers_wins() -> None:
    inner = MemoryFiles()
    inner.make_directories("/data")
    racing = Between(inner, "rename", ".transactions", lambda: make_store(inner, PATH, 0o600))
    make_store(racing, PATH, 0o600)
    assert inner.listdir("/data") == [".transactions"]


def test_no_store_is_no_store(files: Files) -> None:
    with pytest.raises(FileNotFoundError):
        Store(files, "/data/none")
    files.make_directories("/data/empty")
    with pytest.raises(FileNotFoundError):
        Store(files, "/data/empty")
    files.unlink(f"{PATH}/{name_of(0, CHECKPOINT)}")
    with pytest.raises(CorruptLogError, match="no checkpoint"):
        Store(files, PATH)
    files.write_new(f"{PATH}/{name_of(3, CHECKPOINT)}", encode_checkpoint(Checkpoint(4, {}, {})), 0o600)
    with pytest.raises(CorruptLogError, match="found number 4, expected number 3"):
        Store(files, PATH)
    assert isinstance(files, MemoryFiles) and files.open_paths() == []


def test_damaged_manifest_stops_everybody(store: Store, files: Files) -> None:
    files.write_new(f"{PATH}/{name_of(1)}", b"damage", 0o600)
    for call in (lambda: store.commit(transaction(), now=0), store.pending, lambda: store.last_version("etl")):
        with pytest.raises(CorruptLogError, match=name_of(1)):
            call()


def test_closed_forked_and_moved_stores_are_refused(store: Store, files: Files, monkeypatch: Any) -> None:
    files.rename(PATH, "/data/moved")
    with pytest.raises(LogMovedError, match="was moved"):
        store.commit(transaction(), now=0)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(ForkedHandleError, match="before a fork"):
        store.pending()
    monkeypatch.undo()
    store.close()
    store.close()
    with pytest.raises(LogClosedError):
        store.pending()
    with pytest.raises(TypeError):
        store.__reduce_ex__(2)


# --- races ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_four")
@pytest.mark.parametrize("own", [True, False], ids=["a store each", "one store"])
def test_threads_commit_each_version_once(tmp_path: Path, *, own: bool) -> None:
    path = str(tmp_path / ".transactions")
    make_store(REAL, path, 0o600)
    shared = Store(REAL, path)
    committed: list[tuple[str, Committed]] = []
    errors: list[BaseException] = []

    def work(app: str) -> None:
        store = Store(REAL, path) if own else shared
        try:
            for _ in range(25):
                committed.append((app, store.commit(transaction(app), now=len(committed))))
                for each in store.pending():
                    store.finish(each.number, now=0)
        except BaseException as error:
            errors.append(error)
        if own:
            store.close()

    threads = [threading.Thread(target=work, args=(app,)) for app in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted((app, found.version) for app, found in committed) == [(a, v) for a in "abcd" for v in range(25)]
    assert sorted(found.number for _, found in committed) == list(range(1, 101)), "no gap"
    assert shared.pending() == [] and [shared.last_version(app) for app in "abcd"] == [24] * 4
    shared.close()


def test_processes_commit_each_version_once(tmp_path: Path) -> None:
    program = """
        import os, sys
        from loglib.system.files import REAL
        from loglib.transactions import store as module
        from loglib.transactions.manifest import Section
        from loglib.transactions.state import Intent
        from loglib.transactions.store import Store, make_store

        module.CHECKPOINT_EVERY = 4
        make_store(REAL, sys.argv[1], 0o600)
        sys.stdin.read(1)
        with Store(REAL, sys.argv[1]) as store:
            for version in range(30):
                intent = Intent("shared", version, "one", sections=(Section("t", bytes(16), 0, "", 0, 0, 0),))
                found = store.commit(intent, now=os.getpid())
                print(found.number, found.version, found.repeated)
                for each in store.pending():
                    store.finish(each.number, now=0)
    """
    path = tmp_path / ".transactions"
    processes = [start_python(program, path) for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    committed: list[tuple[int, int]] = []
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-4000:]
        told = [line.split() for line in output.splitlines()]
        assert [int(version) for _, version, _ in told] == list(range(30))
        committed += [(int(number), int(version)) for number, version, repeated in told if repeated == "False"]
    # A process that stands still behind its link, until others have folded the entry and four more, is told that the
    # version is a repetition: it may have been another process's. So a version may have nobody who calls it its own.
    assert len(set(committed)) == len(committed), "no two processes have the same commit"
    assert all(number == version + 1 for number, version in committed)
    with Store(REAL, str(path)) as store:
        assert store.last_version("shared") == 29
        assert store.commit(transaction("shared"), now=0).number == 31, "thirty entries for thirty versions"
