"""jobs/members.py: joining beside others that look, die, or may not be read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import fork, wait
from replicated import open_all
from shared_jobs import RECORDS, die, only, taken, values, with_records

from conftest import UnsyncedFiles, needs_root
from loglib import LockedError, LogMovedError, Topic, testing
from loglib.copies import mirror, promote
from loglib.errors import CorruptLogError, GroupNotFoundError, NotLeaderError
from loglib.groups.lock_file import LockFile
from loglib.jobs import members
from loglib.jobs.directory import share_names
from loglib.system.clock import SYSTEM
from loglib.system.files import REAL
from loglib.testing import Call, FaultyFiles, WatchedFiles

Open = Callable[..., Topic]


@pytest.fixture
def topic(open_topic: Open) -> Topic:
    return with_records(open_topic)


def test_file_that_a_look_has_just_removed_is_made_again(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another member may look at the new file before it is locked, and take it for that of a dead one."""
    monkeypatch.setattr(members, "_NAP_S", 0.0)
    real, lost = LockFile.try_lock, [1, 2, 3]

    def try_lock(file: LockFile) -> bool:
        if lost:
            lost.pop()
            return False
        return real(file)

    monkeypatch.setattr(LockFile, "try_lock", try_lock)
    with topic.share("mail") as share:
        assert len(values(share)) == RECORDS
    monkeypatch.setattr(LockFile, "try_lock", lambda _: False)
    with pytest.raises(LockedError, match="look at each new file"):
        topic.share("mail")


def test_number_of_another_member_is_not_used(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    with topic.share("mail") as share:
        used = share._file.number.to_bytes(4, "little")
        drawn = iter([used, bytes(4), b"\xff" * 4, b"1234"])

        def random_bytes(_: object, count: int) -> bytes:
            return next(drawn) if count == 4 else os.urandom(count)

        monkeypatch.setattr(type(REAL), "random_bytes", random_bytes)
        with topic.share("mail", member="other") as other:
            assert other._file.number == int.from_bytes(b"1234", "little")


def test_members_file_that_is_not_whole_is_that_of_one_who_joins(topic: Topic) -> None:
    with topic.share("mail"):
        directory = f"{topic.path}/shares/mail/members"
        joining = LockFile(REAL, f"{directory}/00000007", 0o600)
        assert joining.try_lock()
        for text in (b"", b"{", b"[]", b'{"member": "x"}'):
            joining.replace(text)
            assert members.Member(7) in members.live_members(REAL, directory)
        joining.release()


def test_dead_members_files_are_removed_by_the_next_one_that_joins(topic: Topic) -> None:
    directory = Path(topic.path) / "shares" / "mail" / "members"
    with topic.share("mail"):
        (directory / "0000000a").write_text("{}")
    with topic.share("mail") as share:
        assert [each.name for each in directory.iterdir()] == [members.file_of(share._file.number)]


@needs_root
def test_member_of_another_user_counts_as_living(open_topic: Open, path: Path) -> None:
    topic = with_records(open_topic, clock=SYSTEM)
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        directory = f"{path}/shares/mail/members"
        for each in (path.parent, path, path / "shares", path / "shares" / "mail", Path(directory)):
            each.chmod(0o755)
        os.chmod(f"{directory}/{members.file_of(share._file.number)}", 0o600)

        def as_another() -> None:
            os.setgid(65534)
            os.setuid(65534)
            assert not members.is_dead(REAL, directory, share._file.number)
            assert [each.name for each in members.live_members(REAL, directory)] == [""]

        parents = [each for each in path.parents if each != Path("/") and not os.stat(each).st_mode & 0o005]
        modes = {each: os.stat(each).st_mode for each in parents}
        for each in parents:
            each.chmod(0o755)
        try:
            assert wait(fork(as_another)) == 0
        finally:
            for each, mode in modes.items():
                each.chmod(mode)
        job.accept()


def test_shares_of_a_topic_that_is_gone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LogMovedError):
        share_names(REAL, str(tmp_path / "none"))


def test_two_that_make_a_share_together_make_one(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    from loglib.jobs.directory import ShareDirectory

    real, others = ShareDirectory._build, list[Any]()

    def build(directory: ShareDirectory, *arguments: Any) -> None:
        if not others:
            others.append(None)
            others.append(topic.share("mail", member="quicker"))
        real(directory, *arguments)

    monkeypatch.setattr(ShareDirectory, "_build", build)
    with topic.share("mail", member="slower") as share:
        assert len(taken(share, 2)) == len(taken(others[1], 2)) == 2
        assert sorted(topic.share_info("mail").members) == ["quicker", "slower"]
        others[1].close()


def test_partition_that_two_members_add_together_has_one_file(open_topic: Open, path: Path) -> None:
    with_records(open_topic).close()
    reading = open_topic(mode="r")
    with reading.share("mail"):
        pass
    Topic.add_partitions(path, 2)
    directory = reading._share_directory("mail")
    directory.make_added(1)
    before = os.listdir(directory.of_partition(1))
    directory.make_added(1)
    assert os.listdir(directory.of_partition(1)) == before and len(before) == 1
    with reading.share("mail") as share:
        assert len(values(share)) == RECORDS and list(reading.share_info("mail").partitions) == [0, 1]
    assert only(reading).counts.accepted == RECORDS


class OfAnotherUser(WatchedFiles):
    """Lets nobody read the files of members, once it is told so."""

    unreadable = False

    def before(self, call: Call) -> None:
        if self.unreadable and call.name == "open_read" and os.path.basename(os.path.dirname(call.path)) == "members":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), call.path)


def test_member_whose_file_may_not_be_read_counts_as_living(open_topic: Open) -> None:
    files = OfAnotherUser(UnsyncedFiles())
    topic = with_records(open_topic, files=files)
    with topic.share("mail", member="one") as one, topic.share("mail", member="other") as other:
        (job,) = taken(one, 1)
        files.unreadable = True
        other._look_at_members()
        assert [each.value for each in taken(other, 1)] == [b"1"], "its record stays in its hand"
        assert {each.number for each in members.live_members(files, topic._share_directory("mail").members)} == {
            one._file.number, other._file.number,
        }  # fmt: skip
        job.accept()
    assert only(topic).counts.accepted == 1


def test_dead_member_with_records_of_two_partitions_loses_both(open_topic: Open) -> None:
    topic = open_topic(partitions=2)
    for partition in (0, 1):
        topic.append(b"%d" % partition, partition=partition, sync=True)
    share = topic.share("mail")
    jobs = taken(share, 2)
    die(share)
    with topic.share("mail") as other:
        assert sorted((job.value or b"", job.attempt) for job in other.follow(0.0)) == [(b"0", 2), (b"1", 2)]
    assert len(jobs) == 2


def test_member_whose_leaving_has_failed_leaves_at_the_next_close(open_topic: Open) -> None:
    files = FaultyFiles("unlink", armed=False, inner=UnsyncedFiles())
    topic = with_records(open_topic, files=files)
    share = topic.share("mail")
    jobs = taken(share, 2)
    files.armed = True
    with pytest.raises(OSError, match="Input/output error"):
        share.close()
    share.close()
    assert (topic.share_info("mail").members, only(topic).free, len(jobs)) == ({}, 2, 2)


def test_topic_with_replicas_has_shares_and_its_other_directories_have_none(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    with open_all([own, other]) as topic:
        topic.append_many([b"a", b"b"])
        topic.flush()
        with topic.share("mail") as share:
            assert values(share) == [b"a", b"b"]
    with testing.open_topic(other, mode="r") as topic, pytest.raises(NotLeaderError):
        topic.share("mail")


def test_share_on_replicas_is_refused_dead_letters_when_it_is_made(tmp_path: Path, topic: Topic) -> None:
    """A record that dies could not be settled together with its dead letter: no transaction takes such a topic."""
    with open_all([tmp_path / "own", tmp_path / "other"]) as replicated:
        with pytest.raises(NotLeaderError, match="in transactions"):
            replicated.share("mail", dead_letter=tmp_path / "dead")
        assert replicated.shares() == []
        replicated.share("mail").close()
        with pytest.raises(NotLeaderError, match="in transactions"):
            replicated.alter_share("mail", dead_letter=tmp_path / "dead")
        assert replicated.share_info("mail").settings.dead_letter is None
    with pytest.raises(NotLeaderError, match="in transactions"):
        topic.share("mail", dead_letter=tmp_path / "own")
    assert topic.shares() == []


def test_member_ends_when_a_promotion_has_superseded_its_topic(open_topic: Open, path: Path, tmp_path: Path) -> None:
    """Members of the copy get the records that were not settled before. Both would handle them."""
    with_records(open_topic, clock=SYSTEM).close()
    copy = tmp_path / "copy"
    mirror(path, copy)
    with Topic.open(path, mode="r") as reading, reading.share("mail") as share:
        (job,) = taken(share, 1)
        job.accept()
        promote(copy)
        with pytest.raises(NotLeaderError):
            while share.take(5.0) is not None:
                share._look_at = 0.0  # else for half a second


def test_share_continues_in_a_backup_without_empty_directories(topic: Topic) -> None:
    """Tools that copy files to an object store, or into an archive, leave directories out in which no file is."""
    with topic.share("mail") as share:
        taken(share, 1)[0].accept()
    directory = Path(topic.path, "shares", "mail")
    (directory / "members").rmdir()
    assert topic.share_info("mail").members == {} and not topic.stats().damaged
    with topic.share("mail") as share:
        assert list(topic.share_info("mail").members) == [share.member]
        assert len(values(share)) == RECORDS - 1
    (directory / "members").rmdir()
    topic.delete_share("mail")
    assert topic.shares() == []


def test_share_that_has_lost_its_settings_is_damaged(topic: Topic) -> None:
    topic.share("mail").close()
    settings = Path(topic.path, "shares", "mail", "share.json")
    settings.unlink()
    with pytest.raises(CorruptLogError, match="share.json"):
        topic.share_info("mail")
    assert [each.path for each in topic.stats().damaged] == [str(settings)]
    topic.delete_share("mail")
    assert topic.shares() == []
    with pytest.raises(GroupNotFoundError):
        topic.share_info("mail")


def test_share_that_is_deleted_during_a_look_is_not_damaged(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    topic.share("mail").close()
    look = members.live_members

    def delete(*arguments: Any, **keywords: Any) -> list[members.Member]:
        monkeypatch.undo()
        topic.delete_share("mail")
        return look(*arguments, **keywords)

    monkeypatch.setattr("loglib.jobs.administration.live_members", delete)
    with pytest.raises(GroupNotFoundError):
        topic.share_info("mail")


def test_other_names_beside_shares_are_no_shares(topic: Topic) -> None:
    """File browsers, backups and file systems leave files and directories everywhere."""
    topic.share("mail").close()
    shares = Path(topic.path, "shares")
    for name in "Thumbs.db", "mail.bak", "core.17":
        (shares / name).write_bytes(b"no share")
    for name in "lost+found", "mail-old", "@eaDir":
        (shares / name).mkdir()
    assert topic.shares() == ["mail"] and list(topic.stats().shares) == ["mail"]
    with pytest.raises(GroupNotFoundError):
        topic.share_info("Thumbs.db")
    topic.close()
    Topic.add_partitions(topic.path, 2)  # looks for members of all shares
