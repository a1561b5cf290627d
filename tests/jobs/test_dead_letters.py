"""jobs/pinning.py, transacting.py: a record that dies has one dead letter, whole, written as it is settled."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from dead_letters import died, facts, letters
from processes import fork, wait
from shared_jobs import RECORDS, acks_of, die, only, taken, values, with_records

from conftest import NOW, Clock, UnsyncedFiles
from loglib import (
    CommitPendingError,
    CorruptLogError,
    Job,
    LogError,
    LogMovedError,
    Reject,
    Share,
    StorageFullError,
    Topic,
    testing,
)
from loglib.errors import (
    FencedJobError,
    ForkedHandleError,
    LockedError,
    ShareMismatchError,
    StaleGenerationError,
)
from loglib.jobs import Settings, ack_log, administration
from loglib.jobs.ack_log import AckLog
from loglib.jobs.directory import ShareDirectory
from loglib.jobs.entries import ENTRY_BYTES
from loglib.log import copy_role
from loglib.system.clock import SYSTEM
from loglib.system.directory import Directory
from loglib.testing import Call, FullDisk, WatchedFiles
from loglib.transactions.apply import Applier

Open = Callable[..., Topic]
ALL = [b"%d" % number for number in range(RECORDS)]


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    return tmp_path / "dead"


@pytest.fixture
def topic(open_topic: Open) -> Topic:
    return with_records(open_topic)


def taken_again(share: Share) -> Job | None:
    """The next job, after another try of what has failed."""
    share._pinning._try_at = 0.0
    return share.take(0.0)


# --- what is written ------------------------------------------------------------------------------------


def test_rejected_record_is_copied_whole_with_the_facts_of_its_death(open_topic: Open, dead: Path) -> None:
    topic = open_topic(partitions=2)
    headers = {"own": b"h", "loglib-reason": b"x"}
    topic.append(b"value", b"key", headers=headers, timestamp=NOW - 5, partition=1, sync=True)
    (record,) = topic.read()
    with topic.share("mail", dead_letter=dead, member="ada") as share:
        (job,) = taken(share, 1)
        job.reject("no such user")
        assert job.settled
    (letter,) = letters(dead)
    assert (letter.value, letter.key, letter.timestamp) == (b"value", b"key", NOW - 5)
    assert letter.headers[0] == ("own", b"h") and len(letter.headers) == 9
    assert facts(letter) == {
        "origin-topic": topic.name, "origin-partition": "1", "origin-offset": str(record.offset), "share": "mail",
        "attempts": "1", "reason": "no such user", "member": "ada", "redriven": "0",
    }  # fmt: skip
    assert topic.share_info("mail").partitions[1].counts == (0, 1, 0, 0)


def test_record_without_a_value_or_a_key_has_a_dead_letter(open_topic: Open, dead: Path) -> None:
    topic = open_topic()
    topic.append(None, sync=True)
    with topic.share("mail", dead_letter=dead) as share:
        taken(share, 1)[0].reject()
    (letter,) = letters(dead)
    assert (letter.value, letter.key, facts(letter)["reason"]) == (None, None, "")


def test_record_is_exhausted_with_one_dead_letter_and_the_last_exception(topic: Topic, dead: Path) -> None:
    with topic.share("mail", dead_letter=dead, max_attempts=2) as share:
        for job in share.follow(0.0):
            with job:
                if job.value in (b"2", b"7"):
                    raise OSError(f"no route for {job.attempt}")
                if job.value == b"5":
                    raise Reject("never")
    assert [(each.value, facts(each)["reason"], facts(each)["attempts"]) for each in letters(dead)] == [
        (b"2", "OSError('no route for 2')", "2"), (b"5", "never", "1"), (b"7", "OSError('no route for 2')", "2"),
    ]  # fmt: skip
    info = only(topic)
    assert (info.counts, info.settled_to) == ((RECORDS - 3, 1, 2, 0), info.next_offset)


def test_attempts_that_are_given_back_are_no_deaths(topic: Topic, dead: Path) -> None:
    with topic.share("mail", dead_letter=dead, max_attempts=1) as share:
        taken(share, 1)[0].release(count=False)
        assert values(share)[-1:] == ALL[-1:]
    assert died(dead) == []


def test_batch_that_is_rejected_has_a_dead_letter_for_each_record_left_in_it(open_topic: Open, dead: Path) -> None:
    topic = open_topic()
    topic.append_many(ALL, partition=0)
    topic.flush()
    with topic.share("mail", dead_letter=dead) as share:
        loop = share.batches(100, timeout=0.0)
        batch = next(loop)
        jobs = batch.jobs()
        jobs[1].accept()
        jobs[4].reject("alone")
        batch.reject("the rest")
    assert died(dead) == [b"4", *(each for each in ALL if each not in (b"1", b"4"))]
    assert only(topic).counts == (1, RECORDS - 1, 0, 0)


@pytest.mark.parametrize("how", ["death", "expiry", "orphan"])
def test_record_that_kills_its_workers_has_one_dead_letter_from_another_one(
    topic: Topic, dead: Path, clock: Clock, how: str
) -> None:
    lease = 10 if how == "expiry" else None
    with ExitStack() as hanging:
        for attempt in (1, 2):
            share = topic.share("mail", dead_letter=dead, max_attempts=2, lease=lease, member=f"m{attempt}")
            jobs = [job for job in taken(share, RECORDS if attempt == 1 else 1) if job.value == b"0"]
            assert [job.attempt for job in jobs] == [attempt]
            if how == "orphan":
                del jobs
                share.close()
            elif how == "death":
                die(share)
            else:
                hanging.enter_context(share)
                clock.advance(timedelta(seconds=11))
        with topic.share("mail") as other:
            got = values(other)
    assert died(dead) == [b"0"] and b"0" not in got and facts(letters(dead)[0])["attempts"] == "2"


def test_dead_letter_waits_in_the_state_over_generations(
    topic: Topic, dead: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else seals the file between the death and its dead letter, and while the record is pinned."""
    with topic.share("mail", dead_letter=dead, max_attempts=1) as share:
        taken(share, 1)
        die(share)
        with topic.share("mail", member="other") as other:
            monkeypatch.setattr(ack_log, "_LOG_BYTES", ENTRY_BYTES)
            before = acks_of(topic)
            values(other)
            assert acks_of(topic) != before
    assert died(dead) == [b"0"]


def test_dead_letters_are_of_all_shares_and_make_no_owner(topic: Topic, dead: Path) -> None:
    for name in ("one", "two"):
        with topic.share(name, dead_letter=dead) as share, topic.share(name) as other:
            taken(share, 1)[0].reject(name)
            taken(other, 1)[0].reject(name)
    assert [(each.value, facts(each)["share"]) for each in letters(dead)] == [
        (b"0", "one"), (b"1", "one"), (b"0", "two"), (b"1", "two"),
    ]  # fmt: skip


# --- the setting ----------------------------------------------------------------------------------------


def test_topic_for_dead_letters_is_stored_with_the_share_and_moves_with_it(
    topic: Topic, dead: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with topic.share("mail", dead_letter="dead"):
        assert topic.share_info("mail").settings.dead_letter == str(dead)
    for given in (dead, "./dead", os.fsencode("dead").decode()):
        with topic.share("mail", dead_letter=given), topic.share("mail"):
            pass
    for other in (None, "other"):
        with pytest.raises(ShareMismatchError, match="dead_letter"):
            topic.share("mail", dead_letter=other)
    topic.close()
    moved = tmp_path / "moved"
    moved.mkdir()
    Path(topic.path).rename(moved / "topic")
    with testing.open_topic(moved / "topic", clock=Clock()) as after:
        assert after.share_info("mail").settings.dead_letter == str(moved / "dead")


@pytest.mark.parametrize("wrong", ["", "s3://bucket/dead", 5, b"dead", "topic"])
def test_topic_for_dead_letters_is_another_one_on_this_machine(
    topic: Topic, tmp_path: Path, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError)):
        topic.share("mail", dead_letter=wrong)
    assert topic.shares() == []


def test_alteration_begins_and_ends_dead_letters_for_present_members(topic: Topic, dead: Path) -> None:
    with topic.share("mail", max_attempts=1) as share:
        taken(share, 1)[0].release()
        assert topic.alter_share("mail", dead_letter=dead).dead_letter == str(dead)
        taken(share, 1)[0].release()
        assert topic.alter_share("mail", window=100).dead_letter == str(dead)
        assert topic.alter_share("mail", dead_letter="").dead_letter is None
        taken(share, 1)[0].release()
        taken(share, 1)[0].reject()
    assert died(dead) == [b"1"] and only(topic).counts == (0, 1, 3, 0)


def test_alteration_settles_those_whose_dead_letters_are_due(topic: Topic, dead: Path) -> None:
    share = topic.share("mail", dead_letter=dead, max_attempts=1)
    taken(share, 2)
    die(share)
    topic.evict_share_member("mail", share.member) if share.member in topic.share_info("mail").members else None
    with topic.share("mail", member="other") as other:
        other._look_at_members()
        assert only(topic).dead_letters_due == 2 and only(topic).settled_to == 0 and only(topic).oldest
        topic.alter_share("mail", dead_letter="")
        assert values(other) == ALL[2:]
    assert died(dead) == [] and only(topic).counts == (RECORDS - 2, 0, 2, 0)


def test_without_a_topic_for_dead_letters_all_is_as_before(topic: Topic, dead: Path) -> None:
    with topic.share("mail", dead_letter=None, max_attempts=1) as share:
        taken(share, 1)[0].release()
        taken(share, 1)[0].reject()
    assert only(topic).counts == (0, 1, 1, 0) and not (Path(topic.path).parent / ".transactions").exists()


# --- a topic that cannot be written -----------------------------------------------------------------------


def test_full_disk_keeps_the_record_in_hand_and_it_comes_again(open_topic: Open, dead: Path) -> None:
    with_records(open_topic).close()
    files = FullDisk(1 << 20)
    topic = open_topic(files=files, mode="r")
    with topic.share("mail", dead_letter=dead) as share:
        (job,) = taken(share, 1)
        files.room = 0
        with pytest.raises((LogError, OSError)):
            job.reject("bad")
        assert not job.settled and died(dead) == []
        files.room = 1 << 20
        job.reject("bad")
        assert values(share) == ALL[1:]
    assert died(dead) == [b"0"] and only(topic).counts == (RECORDS - 1, 1, 0, 0)


def test_copy_or_a_locked_topic_takes_no_dead_letters_and_says_so(
    open_topic: Open, topic: Topic, dead: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_topic(dead) as holder, topic.share("mail", dead_letter=dead, max_attempts=1) as share:
        (job,) = taken(share, 1)  # `holder` has no thread that would answer
        with pytest.raises(LockedError, match="does not answer"):
            job.reject()
        del job
        with caplog.at_level(logging.WARNING, "loglib"):
            assert values(share) == ALL[1:], "the others are not delayed"
        assert "a dead letter, or the end of a transaction, waits" in caplog.text
        assert only(topic).dead_letters_due + len(only(topic).in_hand) == 1
        assert only(topic).counts == (RECORDS - 1, 0, 0, 0) and not taken_again(share)
        holder.close()
        role = copy_role.Role(copy_role.SUPERSEDED, holder.log_id, "0" * 16, "/other", NOW)
        (dead / copy_role.NAME).write_bytes(role.encode())
        assert not taken_again(share)
        assert "/other" in caplog.text
        (dead / copy_role.NAME).unlink()
        assert not taken_again(share)
    assert died(dead) == [b"0"] and only(topic).counts == (RECORDS - 1, 0, 1, 0)


def test_dead_letter_that_cannot_be_written_takes_no_place_in_hand(topic: Topic, dead: Path) -> None:
    dead.write_text("no directory")
    share = topic.share("mail", dead_letter=dead, max_attempts=1, max_in_hand=1)
    taken(share, 1)
    die(share)
    with topic.share("mail", member="other") as other:
        assert values(other) == ALL[1:]
        assert only(topic).dead_letters_due == 1 and not only(topic).in_hand
        dead.unlink()
        assert not taken_again(other)
    assert died(dead) == [b"0"]


def test_dead_letter_that_cannot_be_written_stops_no_other_one(open_topic: Open, dead: Path) -> None:
    topic = open_topic(partitions=2)
    for partition, value in enumerate([b"x" * 5000, b"small"]):
        topic.append_many([value, b"next"], partition=partition)
    topic.flush()
    open_topic(dead, max_record_bytes=1000).close()
    share = topic.share("mail", dead_letter=dead, max_attempts=1)
    taken(share, 4)
    die(share)
    with topic.share("mail", member="other") as other:
        for _ in range(6):
            assert not taken_again(other)
    assert sorted(each or b"" for each in died(dead)) == [b"next", b"next", b"small"]


def test_record_whose_dead_letter_waits_is_lost_when_the_log_drops_it(open_topic: Open, dead: Path) -> None:
    topic = with_records(open_topic, segment_bytes=4096)
    dead.write_text("no directory")
    share = topic.share("mail", dead_letter=dead, max_attempts=1)
    taken(share, 1)
    die(share)
    with topic.share("mail", member="other") as other:
        assert values(other) == ALL[1:]
        dead.unlink()
        topic.append(b"x" * 5000, sync=True)
        topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
        assert values(other) == [b"x" * 5000]
        assert not taken_again(other) and not taken_again(other)
        assert only(topic).counts.lost == 1 and not only(topic).in_hand
    assert not dead.exists()


def test_deleted_topic_for_dead_letters_is_made_again(topic: Topic, dead: Path) -> None:
    import shutil

    with topic.share("mail", dead_letter=dead) as share:
        taken(share, 1)[0].reject()
        shutil.rmtree(dead)
        taken(share, 1)[0].reject()
    assert died(dead) == [b"1"]


def test_record_that_the_log_has_dropped_is_lost_and_has_no_dead_letter(open_topic: Open, dead: Path) -> None:
    topic = with_records(open_topic, segment_bytes=4096)
    share = topic.share("mail", dead_letter=dead, max_attempts=1)
    jobs = taken(share, 2)
    die(share)
    topic.append(b"x" * 5000, sync=True)
    topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
    with topic.share("mail", member="other") as other:
        assert values(other) == [b"x" * 5000]
    assert died(dead) == [] and only(topic).counts.lost == 2 and jobs


@pytest.mark.parametrize("together", [False, True])
def test_record_in_hand_that_retention_has_dropped_is_rejected_with_its_dead_letter(
    open_topic: Open, dead: Path, *, together: bool
) -> None:
    topic = with_records(open_topic, segment_bytes=4096)
    with topic.share("mail", dead_letter=dead) as share:
        held = share.take_batch(2, 0.0) if together else share.take(0.0)
        assert held is not None
        topic.append(b"x" * 5000, sync=True)
        topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
        assert values(share)[-1:] == [b"x" * 5000]
        held.reject("too late")
    assert died(dead) == ALL[: held.count]
    assert only(topic).counts.rejected == held.count and not only(topic).in_hand


def test_fenced_job_has_no_dead_letter(topic: Topic, dead: Path) -> None:
    with topic.share("mail", dead_letter=dead) as share:
        (job,) = taken(share, 1)
        topic.evict_share_member("mail", share.member)
        with pytest.raises(FencedJobError, match="evicted"):
            job.reject()
    assert died(dead) == []


def test_child_that_is_forked_writes_no_dead_letter(open_topic: Open, dead: Path) -> None:
    topic = with_records(open_topic, clock=SYSTEM)
    with topic.share("mail", dead_letter=dead) as share:
        (job,) = taken(share, 1)

        def in_child() -> None:
            with pytest.raises(ForkedHandleError):
                job.reject()

        assert wait(fork(in_child)) == 0 and died(dead) == []
        job.reject()
    assert died(dead) == [b"0"]


def test_record_that_is_rejected_after_dead_letters_were_switched_off_has_none(topic: Topic, dead: Path) -> None:
    with topic.share("mail", dead_letter=dead) as share:
        (job,) = taken(share, 1)
        topic.alter_share("mail", dead_letter="")
        job.reject("too late")
    assert died(dead) == [] and only(topic).counts == (0, 1, 0, 0)


def test_dead_letter_that_is_under_way_ends_with_the_alteration(
    topic: Topic, dead: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt has come before it was written, so its record is in the hand of a member that tries again."""
    share = topic.share("mail", dead_letter=dead, max_attempts=1)
    taken(share, 1)
    die(share)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with topic.share("mail", member="other") as other:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(other._pinning, "_letters", interrupt)
            values(other)
        assert len(only(topic).in_hand) == 1
        topic.alter_share("mail", dead_letter="")
        assert values(other) == ALL[1:]
        assert only(topic).in_hand == ()
    assert only(topic).counts == (RECORDS - 1, 0, 1, 0)


def test_missing_settings_are_named_and_the_record_stays_in_hand(topic: Topic, dead: Path) -> None:
    with topic.share("mail", dead_letter=dead) as share:
        (job,) = taken(share, 1)
        settings = Path(topic.path) / "shares" / "mail" / "share.json"
        content = settings.read_bytes()
        settings.unlink()
        with pytest.raises(CorruptLogError, match="no file"):
            job.reject()
        settings.write_bytes(content)
        assert not job.settled
        job.reject()
    assert died(dead) == [b"0"]


def test_dead_letter_that_is_committed_and_not_visible_is_made_so_later(
    topic: Topic, dead: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with topic.share("mail", dead_letter=dead) as share:
        (job,) = taken(share, 1)
        with monkeypatch.context() as patch:
            patch.setattr(Applier, "run", lambda *_, **__: (_ for _ in ()).throw(CommitPendingError(1, "the test")))
            job.reject("bad")
        assert job.settled and died(dead) == [] and len(only(topic).in_hand) == 1
        assert "a dead letter is committed, and not visible yet" in caplog.text
        assert values(share) == ALL[1:]
    assert died(dead) == [b"0"] and only(topic).counts == (RECORDS - 1, 1, 0, 0)


def test_member_that_is_evicted_while_it_takes_a_dead_record_ends(
    topic: Topic, dead: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = topic.share("mail", dead_letter=dead, max_attempts=1)
    taken(share, 1)
    die(share)
    with topic.share("mail", member="slow") as slow, topic.share("mail", member="other") as other:
        slow._look_at_members()
        acks = slow._takings[0].acks
        append = acks.append

        def late(written: list[bytes]) -> None:
            monkeypatch.undo()
            topic.evict_share_member("mail", "slow")
            append(written)

        monkeypatch.setattr(acks, "append", late)
        with pytest.raises(StaleGenerationError):
            slow.take(0.0)
        assert died(dead) == [] and values(other) == ALL[1:]
    assert died(dead) == [b"0"]


class ClosingFiles(WatchedFiles):
    """Does something, once, when the settings of a share are read."""

    meanwhile: Callable[[], object] | None = None

    def before(self, call: Call) -> None:
        if call.name == "open_read" and call.file == "share.json" and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()


def test_share_that_another_thread_closes_before_a_dead_letter_is_written_leaves_it_to_others(
    open_topic: Open, dead: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = ClosingFiles(UnsyncedFiles())
    topic = with_records(open_topic, files=files)
    share = topic.share("mail", dead_letter=dead, max_attempts=1)
    taken(share, 1)
    die(share)

    def close() -> None:
        thread = threading.Thread(target=share.close)
        thread.start()
        thread.join()

    with topic.share("mail", member="slow") as share:
        share._look_at_members()
        files.meanwhile = close
        assert share.take() is None
    assert only(topic).dead_letters_due == 1 and caplog.text == ""
    with topic.share("mail", member="other") as other:
        assert values(other) == ALL[1:]
    assert died(dead) == [b"0"]


def test_alteration_that_has_stopped_halfway_delays_no_other_record(topic: Topic, dead: Path) -> None:
    """The operator's process has stored the settings, and has died before it told the members."""
    share = topic.share("mail", dead_letter=dead, max_attempts=1)
    taken(share, 1)
    die(share)
    with topic.share("mail", member="other") as other:
        directory = topic._share_directory("mail")
        directory.alter({"dead_letter": None})
        assert values(other) == ALL[1:] and only(topic).dead_letters_due == 1
        topic.alter_share("mail", dead_letter="")
        assert not taken_again(other)
    assert died(dead) == [] and only(topic).counts == (RECORDS - 1, 0, 1, 0)


def test_alteration_whose_process_has_died_is_completed_by_the_next_member(
    open_topic: Open, dead: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a partition that was not told yet would have no dead letters, and nobody would know."""
    topic = open_topic(partitions=2)
    for partition in range(2):
        topic.append(b"%d" % partition, partition=partition, sync=True)
    topic.share("mail").close()
    told = administration._writing

    def die_at_the_second(directory: ShareDirectory, partition: int) -> AckLog:
        if partition:
            raise KeyboardInterrupt
        return told(directory, partition)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(administration, "_writing", die_at_the_second)
        topic.alter_share("mail", dead_letter=dead)
    with topic.share("mail", dead_letter=dead) as share:
        for job in taken(share, 2):
            job.reject()
    assert sorted(each or b"" for each in died(dead)) == ALL[:2]


def test_of_two_alterations_of_different_settings_at_a_time_both_count(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes when the first one has read the settings, and waits until it has stored them."""
    topic.share("mail").close()
    read, others = ShareDirectory.settings, list[threading.Thread]()

    def and_another(directory: ShareDirectory) -> Settings:
        found = read(directory)
        monkeypatch.setattr(ShareDirectory, "settings", read)
        others.append(threading.Thread(target=topic.alter_share, args=("mail",), kwargs={"window": 7}))
        others[0].start()
        others[0].join(0.2)
        return found

    monkeypatch.setattr(ShareDirectory, "settings", and_another)
    topic.alter_share("mail", max_attempts=9)
    others[0].join()
    settings = topic.share_info("mail").settings
    assert (settings.max_attempts, settings.window) == (9, 7)


def test_of_two_alterations_at_a_time_the_last_one_counts_in_all_partitions(
    open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = with_records(open_topic, partitions=2)
    topic.share("mail").close()
    told = administration._writing

    def meanwhile(directory: ShareDirectory, partition: int) -> AckLog:
        monkeypatch.setattr(administration, "_writing", told)
        topic.alter_share("mail", window=7)
        return told(directory, partition)

    monkeypatch.setattr(administration, "_writing", meanwhile)
    topic.alter_share("mail", window=5)
    directory = topic._share_directory("mail")
    for partition in range(2):
        with closing(directory.acks(partition, 0)) as acks:
            assert acks.state.settings.window == directory.settings().window == 7


def test_job_stays_in_hand_if_the_disk_is_full_at_the_commit_of_its_dead_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was pinned for ever, and at last exhausted."""
    write_new = Directory.write_new

    def full(place: Directory, name: str, content: bytes, permissions: int) -> None:
        if place.path.endswith(".transactions"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_new(place, name, content, permissions)

    with Topic.create(tmp_path / "mail") as topic:
        topic.append(b"a", sync=True)
        with topic.share("mail", dead_letter=tmp_path / "dead", max_attempts=1) as share:
            job = share.take(0)
            assert job is not None
            with monkeypatch.context() as patch:
                patch.setattr(Directory, "write_new", full)
                with pytest.raises(StorageFullError):
                    job.reject("no")
            job.reject("no")
    (letter,) = letters(tmp_path / "dead")
    assert (facts(letter)["reason"], facts(letter)["attempts"]) == ("no", "1")


@pytest.mark.parametrize("how", ["moved", "removed"])
def test_topic_that_was_moved_is_not_damaged_when_a_job_is_rejected(tmp_path: Path, how: str) -> None:
    with Topic.create(tmp_path / "mail") as topic:
        topic.append(b"a", sync=True)
    with (
        suppress(LogError), Topic.open(tmp_path / "mail", mode="r") as topic,
        topic.share("mail", dead_letter=tmp_path / "dead") as share,
    ):  # fmt: skip
        job = share.take(0)
        assert job is not None
        if how == "moved":
            (tmp_path / "mail").rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(tmp_path / "mail")
        with pytest.raises(LogMovedError):
            job.reject("no")
