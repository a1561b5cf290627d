"""Owners: one for each partition, in a generation of its own, for as long as it holds the file."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
from committed import LOG_ID

from conftest import needs_proc, opened_since, settled_files
from loglib import LockedError, TopicPartition
from loglib.groups.commit_log import LogPartition
from loglib.groups.owners import Owner, Ownership, evict_owner, holder_of, owned_partitions, read_owner
from loglib.system.files import REAL
from loglib.testing import Call, RecordingFiles, WatchedFiles

FIRST, SECOND = TopicPartition("clicks", 0), TopicPartition("clicks", 1)


def ownership(directory: Path, member: str) -> Ownership:
    return Ownership(REAL, str(directory), member, 0o600)


def owner(directory: Path, partition: TopicPartition = FIRST) -> Owner:
    return read_owner(REAL, str(directory), partition)


def test_partition_has_one_owner(tmp_path: Path) -> None:
    one, two = ownership(tmp_path, "one"), ownership(tmp_path, "two")
    assert one.claim(FIRST, at_least=0)
    assert not two.claim(FIRST, at_least=0)
    assert two.claim(SECOND, at_least=0)
    assert (one.owned(), two.owned()) == ([FIRST], [SECOND])
    one.release([FIRST])
    assert two.claim(FIRST, at_least=0)
    assert two.owned() == [FIRST, SECOND]
    two.release(two.owned())


def test_each_owner_has_a_higher_generation(tmp_path: Path) -> None:
    for expected in (1, 2, 3):
        member = ownership(tmp_path, "one")
        assert member.claim(FIRST, at_least=0) and member.generation(FIRST) == expected
        member.release([FIRST])
        assert member.generation(FIRST) is None
    assert member.claim(FIRST, at_least=40) and member.generation(FIRST) == 41
    member.release([FIRST])


def test_file_can_be_read_by_a_person(tmp_path: Path) -> None:
    member = ownership(tmp_path, "one")
    member.claim(FIRST, at_least=0)
    assert json.loads((tmp_path / "clicks-0").read_text()) == {"member": "one", "generation": 1, "pid": os.getpid()}
    assert owner(tmp_path) == Owner("one", 1, os.getpid())
    member.release([FIRST])
    assert owner(tmp_path) == Owner(None, 1, os.getpid())
    assert owner(tmp_path, SECOND) == Owner(None, 0, 0)


def test_owner_file_never_gets_shorter(tmp_path: Path) -> None:
    long, short = ownership(tmp_path, "a member with a long name"), ownership(tmp_path, "b")
    long.claim(FIRST, at_least=1000)
    size = (tmp_path / "clicks-0").stat().st_size
    long.release([FIRST])
    short.claim(FIRST, at_least=0)
    assert (tmp_path / "clicks-0").stat().st_size == size
    assert owner(tmp_path) == Owner("b", 1002, os.getpid())
    short.release([FIRST])


TORN = {"empty": b"", "half": b'{"member": "one", "gen', "no object": b"[1, 2]", "no number": b'{"member": "a", '
        b'"generation": "x", "pid": 1}', "zeros": bytes(60), "garbage": b"\xff" * 60, "key missing": b"{}"}  # fmt: skip


@pytest.mark.parametrize("text", TORN.values(), ids=TORN)
def test_torn_file_names_nobody_and_can_be_claimed_above_the_commits(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "clicks-0").write_bytes(text)
    assert owner(tmp_path) == Owner(None, 0, 0)
    member = ownership(tmp_path, "one")
    assert member.claim(FIRST, at_least=7)
    assert owner(tmp_path) == Owner("one", 8, os.getpid())
    member.release([FIRST])


def test_evicted_owner_has_lost_the_partition(tmp_path: Path) -> None:
    hung, other = ownership(tmp_path, "hung"), ownership(tmp_path, "other")
    hung.claim(FIRST, at_least=0)
    evict_owner(REAL, str(tmp_path), FIRST, 0o600)
    assert hung.generation(FIRST) is None
    assert other.claim(FIRST, at_least=0) and other.generation(FIRST) == 3
    hung.release([FIRST])  # which leaves the file of the other alone
    assert owner(tmp_path) == Owner("other", 3, os.getpid())
    other.release([FIRST])


def test_topic_of_the_longest_name_can_be_evicted(tmp_path: Path) -> None:
    partition = TopicPartition("t" * 249, 9999)
    hung = ownership(tmp_path, "hung")
    hung.claim(partition, at_least=0)
    evict_owner(REAL, str(tmp_path), partition, 0o600)
    assert hung.generation(partition) is None
    assert os.listdir(tmp_path) == [str(partition)]
    hung.abandon()


def test_partition_evicted_while_it_is_claimed_is_not_owned(tmp_path: Path) -> None:
    class Racing(WatchedFiles):
        def after(self, call: Call, result: Any) -> Any:
            if call.name == "flock" and call.arguments[0] & fcntl.LOCK_EX and not raced:
                raced.append(call.path)
                evict_owner(REAL, str(tmp_path), FIRST, 0o600)
            return result

    raced: list[str] = []
    late = Ownership(Racing(), str(tmp_path), "late", 0o600)
    assert not late.claim(FIRST, at_least=0)
    assert late.owned() == []


def test_member_evicted_before_it_has_said_who_it_is_has_not_claimed(tmp_path: Path) -> None:
    class Racing(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == "pwritev":
                evict_owner(REAL, str(tmp_path), FIRST, 0o600)

    late, other = Ownership(Racing(), str(tmp_path), "late", 0o600), ownership(tmp_path, "other")
    assert not late.claim(FIRST, at_least=0)
    assert late.owned() == [] and other.claim(FIRST, at_least=0)
    other.release([FIRST])


def test_claim_of_what_another_holds_opens_nothing_for_writing(tmp_path: Path) -> None:
    """To close what was open for writing would wake all who wait, who would try, and wake each other for ever."""
    files = RecordingFiles()
    one, waiting = ownership(tmp_path, "one"), Ownership(files, str(tmp_path), "two", 0o600)
    one.claim(FIRST, at_least=0)
    files.calls.clear()
    assert not waiting.claim(FIRST, at_least=0) and not waiting.is_free(FIRST)
    assert files.count("open_write", "create", "pwritev") == 0
    one.release([FIRST])
    assert waiting.is_free(FIRST)


def test_partition_of_another_users_past_can_be_claimed(tmp_path: Path) -> None:
    class Others(WatchedFiles):
        """The file is another user's: it may be read, and not written."""

        def before(self, call: Call) -> None:
            if call.name == "open_write" and (tmp_path / "clicks-0").stat().st_ino == theirs:
                raise PermissionError(13, "Permission denied")

    (tmp_path / "clicks-0").write_text('{"member": "root", "generation": 7, "pid": 1}')
    theirs = (tmp_path / "clicks-0").stat().st_ino
    member = Ownership(Others(), str(tmp_path), "one", 0o600)
    assert member.claim(FIRST, at_least=0) and member.generation(FIRST) == 9
    assert os.listdir(tmp_path) == ["clicks-0"]
    assert not evict_owner(REAL, str(tmp_path), "clicks-0", 0o600, unless_held=True)  # it is held
    member.release([FIRST])


def test_partition_that_another_user_takes_just_then_is_not_claimed(tmp_path: Path) -> None:
    class Racing(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == "open_write":
                other.claim(FIRST, at_least=0)
                raise PermissionError(13, "Permission denied")

    (tmp_path / "clicks-0").write_text("{}")
    other = ownership(tmp_path, "other")
    assert not Ownership(Racing(), str(tmp_path), "one", 0o600).claim(FIRST, at_least=0)
    other.release([FIRST])


def test_two_who_evict_at_once_give_no_generation_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loglib.system.directory._LOCK_TIMEOUT_S", 0.01)
    fd = REAL.open_directory(str(tmp_path))
    assert REAL.try_lock(fd)
    with pytest.raises(LockedError, match="a process that evicts a member"):
        evict_owner(REAL, str(tmp_path), FIRST, 0o600)
    REAL.close(fd)
    evict_owner(REAL, str(tmp_path), FIRST, 0o600)
    assert owner(tmp_path).generation == 1


def test_partitions_that_had_owners_are_known_by_their_files(tmp_path: Path) -> None:
    digits = LOG_ID.hex()
    others = (".x.tmp", "aside", f"{digits}-", "-1", f"{digits}-x", "a-0")
    for name in (f"{digits}-1", f"{digits}-12", f"{digits}-0", *others):
        (tmp_path / name).touch()
    assert owned_partitions(REAL, str(tmp_path)) == [LogPartition(LOG_ID, number) for number in (0, 1, 12)]
    assert holder_of(REAL, str(tmp_path), FIRST) is None
    member = ownership(tmp_path, "one")
    member.claim(FIRST, at_least=0)
    assert holder_of(REAL, str(tmp_path), FIRST) == Owner("one", 1, os.getpid())
    assert (member.claimed(FIRST), member.claimed(SECOND)) == (1, None)
    member.release([FIRST])


def test_abandoned_partitions_keep_their_text(tmp_path: Path) -> None:
    member, other = ownership(tmp_path, "one"), ownership(tmp_path, "other")
    member.claim(FIRST, at_least=0)
    member.abandon()
    assert member.owned() == [] and owner(tmp_path).member == "one"
    assert other.claim(FIRST, at_least=0)
    other.abandon()


@needs_proc
def test_claims_that_fail_leave_no_file_open(tmp_path: Path) -> None:
    class Failing(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == "pwritev":
                raise OSError("no more")

    before = settled_files()
    with pytest.raises(OSError, match="no more"):
        Ownership(Failing(), str(tmp_path), "one", 0o600).claim(FIRST, at_least=0)
    assert not opened_since(before)
    member = ownership(tmp_path, "one")
    assert member.claim(FIRST, at_least=0)
    member.release([FIRST])
