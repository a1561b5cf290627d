"""store.py, state.py: a version is committed once, numbers have no gap, and what is done stays done."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import start_python
from loglib import (
    CorruptLogError,
    FencedError,
    ForkedHandleError,
    LogClosedError,
    LogError,
    LogMovedError,
    SourceMismatchError,
    StaleGenerationError,
    StorageIOError,
)
from loglib.system.files import REAL, Files
from loglib.testing import Call, CrashFS, FaultyFiles, MemoryFiles, RecordingFiles, WatchedFiles
from loglib.transactions import store as module
from loglib.transactions.done import CHECKPOINT, DONE, is_done, name_of, numbers
from loglib.transactions.manifest import Checkpoint, Fence, Manifest, Offsets, Section, encode, encode_checkpoint
from loglib.transactions.state import Intent, State
from loglib.transactions.store import Committed, Store, make_store

PATH = "/data/.transactions"
LOG_ID = bytes(16)
SECTION = Section("orders", LOG_ID, 0, "", 0, 1, 1)


def made(files: Files) -> Files:
    files.make_directories("/data")
    make_store(files, PATH, 0o640)
    return files


def transaction(app: str = "etl", version: int | None = None, owner: str = "one", **rest: Any) -> Intent:
    return Intent(app, version, owner, **{"sections": (SECTION,), "frames": b"x"} | rest)


def offsets(generation: int, partition: str = "clicks-0") -> Offsets:
    return Offsets("clicks", "etl", partition, [100, generation])


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


# --- checkpoints ---------------------------------------------------------------------------------------------


def test_checkpoint_replaces_256_numbers(store: Store, files: Files) -> None:
    complete(store, 255)
    assert len(names(files)) == 511
    store.fence_owner("etl", "two", None, now=7)
    assert names(files) == [name_of(256, CHECKPOINT)]
    assert all(is_done(files, PATH, number) and store.is_done(number) for number in (1, 255, 256))
    assert not is_done(files, PATH, 257)
    with Store(files, PATH) as other:
        assert other.last_version("etl") == 254 and other.pending() == []
        with pytest.raises(FencedError):
            other.commit(transaction(), now=8)
        assert other.commit(transaction(owner="two"), now=8) == Committed(257, 255, repeated=False)
    store.finish(3, now=9)  # it is in the checkpoint
    assert store.last_version("etl") == 255


@pytest.mark.usefixtures("every_four")
def test_checkpoint_ends_before_what_is_not_done(store: Store, files: Files) -> None:
    for version in range(12):
        store.commit(transaction(version=version), now=version)
    for number in (1, 2, 3, 4, 5, 7, 8, 9):
        store.finish(number, now=0)
    assert names(files)[:2] == [name_of(4, CHECKPOINT), name_of(5)]
    store.finish(6, now=0)
    assert names(files)[:1] == [name_of(9, CHECKPOINT)]
    with Store(files, PATH) as other:
        assert [each.number for each in other.pending()] == [10, 11, 12]
        assert other.last_version("etl") == 11


@pytest.mark.usefixtures("every_four")
def test_store_goes_on_behind_a_checkpoint_of_another_process(store: Store, files: Files) -> None:
    with Store(files, PATH) as other:
        complete(store, 2)
        assert other.last_version("etl") == 1
        complete(store, 3)  # beyond what the other knows
        assert other.last_version("etl") == 4
        complete(store, 1)
        assert other.last_version("etl") == 5
        store.commit(transaction(), now=0)
        other.pending()
        complete(store, 1)
        store.finish(7, now=0)  # now the checkpoint is below what the other knows
        assert names(files) == [name_of(8, CHECKPOINT)]
        assert other.pending() == [] and other.commit(transaction(), now=0).number == 9


def freed(files: Files, count: int) -> Callable[[], None]:
    """Others commit so much meanwhile that the number that comes next here is folded and its name is free."""

    def others() -> None:
        with Store(files, PATH) as other:
            complete(other, count, "others")

    return others


@pytest.mark.usefixtures("every_four")
def test_number_that_was_folded_meanwhile_is_void(files: Files) -> None:
    racing = Between(files, "link", name_of(1), freed(files, 5))
    with Store(racing, PATH) as store:
        assert store.commit(transaction(version=3), now=1) == Committed(6, 3, repeated=False)
        assert store.last_version("others") == 4
    assert names(files) == [name_of(4, CHECKPOINT), name_of(5), name_of(5, DONE), name_of(6)]


@pytest.mark.usefixtures("every_four")
def test_void_entry_of_another_process_is_not_taken_for_a_commit(store: Store, files: Files) -> None:
    def and_a_void_one() -> None:
        freed(files, 5)()
        content = encode(Manifest(0, "etl", 3, "one", None, 1, (SECTION,), frames=b"x"))
        files.write_new(f"{PATH}/{name_of(1)}", content, 0o600)

    racing = Between(files, "link", name_of(1), and_a_void_one)
    with Store(racing, PATH) as behind:
        assert behind.commit(transaction(version=3), now=1) == Committed(6, 3, repeated=False)
    assert store.last_version("etl") == 3 and is_done(files, PATH, 1)
    complete(store, 2)
    with Store(files, PATH) as other:
        other.finish(6, now=0)
    assert name_of(1) not in names(files), "the next checkpoint sweeps it"


@pytest.mark.usefixtures("every_four")
@pytest.mark.parametrize("version", [None, 0])
def test_commit_that_was_folded_before_it_looked_is_no_repetition(files: Files, version: int | None) -> None:
    def others() -> None:
        with Store(files, PATH) as other:
            assert other.pending()[0].app == "etl"
            other.finish(1, now=0)
            complete(other, 4, "others")

    racing = Between(files, "lstat", name_of(0, CHECKPOINT), lambda: None)
    with Store(racing, PATH) as store:
        racing.what = "link", name_of(1), lambda: setattr(racing, "what", ("lstat", name_of(0, CHECKPOINT), others))
        assert store.commit(transaction(version=version), now=1) == Committed(1, 0, repeated=False)
        assert store.commit(transaction(version=version), now=1).repeated is (version == 0)


@pytest.mark.usefixtures("every_four")
def test_commit_that_may_be_another_process_s_is_in_doubt(files: Files) -> None:
    racing = Between(files, "link", name_of(1), lambda: None)
    with Store(racing, PATH) as store:

        def others() -> None:
            with Store(files, PATH) as other:
                complete(other, 5)  # of the same app and owner

        racing.what = "link", name_of(1), others
        with pytest.raises(LogError, match="version 0 of app etl is committed, but perhaps by another process"):
            store.commit(transaction(), now=1)
        assert store.commit(transaction(), now=1) == Committed(6, 5, repeated=False)


@pytest.mark.usefixtures("every_four")
def test_late_checkpoint_below_a_newer_one_is_not_believed(files: Files) -> None:
    with Store(files, PATH) as other:
        racing = Between(files, "link", name_of(4, CHECKPOINT), lambda: complete(other, 8, "others"))
        with Store(racing, PATH) as store:
            complete(store, 4)
            assert names(files) == [name_of(12, CHECKPOINT)], "the late one is swept"
            assert store.commit(transaction(), now=0).number == 13


@pytest.mark.usefixtures("every_four")
def test_names_go_in_an_order_with_a_sync_after_each_kind(files: Files) -> None:
    recorded = RecordingFiles(files)
    with Store(recorded, PATH) as store:
        complete(store, 4)
    gone = [(name, file) for name, file in recorded.named("link", "unlink", "fsync") if not file.endswith(".tmp")]
    four = range(1, 5)
    sync = ("fsync", ".transactions")
    assert gone[-13:] == [
        sync, ("unlink", name_of(0, CHECKPOINT)), sync, *(("unlink", name_of(number)) for number in four), sync,
        *(("unlink", name_of(number, DONE)) for number in four), sync,
    ]  # fmt: skip


@pytest.mark.usefixtures("every_four")
def test_done_that_is_swept_while_it_is_looked_for_is_done(files: Files) -> None:
    with Store(files, PATH) as other:
        other.commit(transaction(), now=0)
        racing = Between(files, "lstat", name_of(1, DONE), lambda: None)
        with Store(racing, PATH) as store:

            def sweep() -> None:
                other.finish(1, now=0)
                complete(other, 3)

            racing.what = "lstat", name_of(1, DONE), sweep
            assert store.is_done(1) and store.pending() == []


@pytest.mark.usefixtures("every_four")
def test_two_processes_make_the_same_checkpoint(files: Files) -> None:
    with Store(files, PATH) as other:
        racing = Between(files, "link", name_of(4, CHECKPOINT), lambda: other.fence_owner("etl", "one", None, now=0))
        with Store(racing, PATH) as store:
            complete(store, 4)
            assert names(files) == [name_of(4, CHECKPOINT)]
            assert store.commit(transaction(), now=0).number == other.pending()[0].number == 5


@pytest.mark.usefixtures("every_four")
def test_checkpoint_of_the_same_number_that_came_later_is_another(store: Store, files: Files) -> None:
    store.commit(transaction(), now=0)
    with Store(files, PATH) as other:
        store.finish(1, now=0)
        complete(store, 3)
        files.write_new(f"{PATH}/{name_of(0, CHECKPOINT)}", encode_checkpoint(Checkpoint(0, {}, {})), 0o600)
        assert other.last_version("etl") == 3


@pytest.mark.usefixtures("every_four")
def test_transaction_that_others_finish_and_fold_meanwhile_is_finished(files: Files) -> None:
    with Store(files, PATH) as other:
        complete(other, 3)
        other.commit(transaction(), now=0)
        racing = Between(files, "link", name_of(4, DONE), lambda: other.finish(4, now=0))
        with Store(racing, PATH) as store:
            store.finish(4, now=0)
            assert names(files) == [name_of(4, CHECKPOINT)]


def test_manifest_that_somebody_removed_cannot_be_finished(store: Store, files: Files) -> None:
    store.commit(transaction(), now=0)
    files.unlink(f"{PATH}/{name_of(1)}")
    with pytest.raises(FileNotFoundError):
        store.finish(1, now=0)


@pytest.mark.usefixtures("every_four")
def test_unused_apps_expire_at_the_next_checkpoint(store: Store, files: Files) -> None:
    store.commit(transaction("old"), now=1)
    store.finish(1, now=1)
    store.commit(transaction("used"), now=1)
    store.finish(2, now=1)
    complete(store, 1, now=100)
    store.expire(50)
    assert store.last_version("old") == 0, "not yet"
    store.commit(transaction("used"), now=100)
    store.commit(transaction("used"), now=100)
    store.finish(4, now=100)
    assert names(files)[0] == name_of(4, CHECKPOINT)
    assert (store.last_version("old"), store.last_version("used"), store.last_version("etl")) == (None, 2, 0)
    with Store(files, PATH) as other:
        assert (other.last_version("old"), other.last_version("used")) == (None, 2)


@pytest.mark.usefixtures("every_four")
def test_app_that_waits_does_not_expire(store: Store) -> None:
    complete(store, 4, now=1)
    store.expire(50)
    complete(store, 3, now=1)
    store.commit(transaction("other"), now=100)
    store.commit(transaction(), now=1)
    store.finish(8, now=100)
    assert store.last_version("etl") == 7


@pytest.mark.usefixtures("every_four")
def test_orphans_are_swept_after_a_day(store: Store, files: Files) -> None:
    files.write_new(f"{PATH}/.orphan.tmp", b"x", 0o600)
    complete(store, 4, now=3600 * 1_000_000)
    assert ".orphan.tmp" in names(files)
    complete(store, 4, now=25 * 3600 * 1_000_000)
    assert ".orphan.tmp" not in names(files)


def test_temporary_that_was_swept_is_written_again(files: Files) -> None:
    def sweep() -> None:
        for name in names(files):
            if name.endswith(".tmp"):
                files.unlink(f"{PATH}/{name}")

    with Store(Between(files, "link", name_of(1), sweep), PATH) as store:
        assert store.commit(transaction(), now=0).number == 1


@pytest.mark.usefixtures("every_four")
def test_orphan_that_goes_meanwhile_is_gone(files: Files) -> None:
    orphan = f"{PATH}/.orphan.tmp"
    files.write_new(orphan, b"x", 0o600)
    with Store(Between(files, "lstat", ".orphan.tmp", lambda: files.unlink(orphan)), PATH) as store:
        complete(store, 4, now=25 * 3600 * 1_000_000)
    assert names(files) == [name_of(4, CHECKPOINT)]


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


def test_checkpoint_that_is_replaced_while_the_store_is_opened_is_read_anew(files: Files) -> None:
    old, new = (f"{PATH}/{name_of(number, CHECKPOINT)}" for number in (0, 4))

    def replace() -> None:
        files.write_new(new, encode_checkpoint(Checkpoint(4, {}, {})), 0o600)
        files.unlink(old)

    with Store(Between(files, "open_read", name_of(0, CHECKPOINT), replace), PATH) as store:
        assert store.commit(transaction(), now=0).number == 5


@pytest.mark.usefixtures("every_four")
def test_checkpoint_that_is_replaced_while_it_is_looked_at_is_looked_for_again(files: Files) -> None:
    with Store(files, PATH) as other:
        complete(other, 3)
        racing = Between(files, "lstat", name_of(4, CHECKPOINT), lambda: complete(other, 4))
        with Store(racing, PATH) as store:
            assert store.commit(transaction("other"), now=0).number == 4
            other.finish(4, now=0)
            assert store.last_version("etl") == 6


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
