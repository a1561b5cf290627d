"""Checkpoints of the store of transactions fold what is done, and hide no commit from a process that is late."""

from __future__ import annotations

import pytest
import stored_transactions
from stored_transactions import PATH, SECTION, Between, complete, freed, names, transaction

from loglib import FencedError, LogError
from loglib.log.transaction_numbers import CHECKPOINT, DONE, is_done, name_of
from loglib.system.files import Files
from loglib.testing import RecordingFiles
from loglib.transactions.manifest import Checkpoint, Manifest, encode, encode_checkpoint
from loglib.transactions.store import Committed, Store

files = stored_transactions.files
store = stored_transactions.store
every_four = stored_transactions.every_four


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
def test_unused_apps_expire(store: Store, files: Files) -> None:
    store.commit(transaction("old"), now=1)
    store.finish(1, now=1)
    store.commit(transaction("used"), now=1)
    store.finish(2, now=1)
    complete(store, 1, now=100)
    store.commit(transaction("used"), now=100)
    assert store.expire(50, now=100) == ["old"]
    assert names(files)[:2] == [name_of(3, CHECKPOINT), name_of(4)]
    assert (store.last_version("old"), store.last_version("used"), store.last_version("etl")) == (None, 1, 0)
    with Store(files, PATH) as other:
        assert (other.last_version("old"), other.last_version("used")) == (None, 1)


@pytest.mark.usefixtures("every_four")
def test_app_that_waits_does_not_expire(store: Store) -> None:
    complete(store, 5, now=1)
    store.commit(transaction(), now=1)
    assert store.expire(50, now=100) == [] and store.last_version("etl") == 5


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
