"""The facts of shares on the page: what is in hand, what waits, what is dead, and that looking changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from forked import in_child
from shared_jobs import acks_of, die, taken, values

from conftest import QUIET, needs_root, open_files, tree
from loglib import Share, Topic, testing
from loglib.errors import LogMovedError
from loglib.jobs import Counts
from loglib.ui import shares
from loglib.ui.app import Answers, Asked, _plain
from loglib.ui.topics import Topics

RECORDS = 12
VIEWS = ("row", "topic", "shares", "share")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """The answers of a page that has just been opened, as JSON that was written and read."""
    with ExitStack() as at_end:

        def ask(name: str, at: Path = tmp_path, **arguments: object) -> Any:
            answers = Answers(Topics(at))
            at_end.callback(answers.close)
            given = {"topic": "t", "share": "mail"} | arguments
            facts = answers.by_name[name](Asked({key: str(each) for key, each in given.items()}))
            return json.loads(json.dumps(_plain(facts)))

        yield ask


@pytest.fixture
def topic(tmp_path: Path) -> Iterator[Topic]:
    with testing.open_topic(tmp_path / "t", partitions=2, **QUIET) as opened:
        for number in range(RECORDS):
            opened.append(b"%d" % number, partition=number % 2)
        opened.flush()
        yield opened


def worked(share: Share) -> None:
    """One record in each state: accepted, rejected, exhausted, waiting and free again; three stay in hand."""
    jobs = taken(share, 5)
    jobs[0].accept()
    jobs[1].reject()
    jobs[2].release(delay=0.0)
    while (again := taken(share, 1)[0]).attempt == 1:
        jobs.append(again)
    again.release()  # the second of two attempts
    jobs[3].release(delay=3600.0)
    jobs[4].release(delay=0.0, count=False)
    for each in jobs[5:]:
        each.release(delay=0.0, count=False)


# --- figures -------------------------------------------------------------------------------------------------


def test_share_shows_what_is_in_hand_waits_and_is_dead(topic: Topic, page: Callable[..., Any]) -> None:
    with topic.share("mail", member="alice", max_attempts=2) as share:
        worked(share)
        held = taken(share, 3)
        found = page("share")
        sums = found["sums"]
        counts = (sums["in_hand"], sums["waiting"], sums["accepted"], sums["dead"], sums["lost"], sums["members"])
        assert counts == (3, 1, 1, 2, 0, 1), "a rejected and an exhausted record are dead"
        info = topic.share_info("mail")
        assert sums["free"] + sums["waiting"] == sum(each.free for each in info.partitions.values())
        (member,) = found["members"]
        assert (member["name"], member["pid"], member["in_hand"]) == ("alice", os.getpid(), 3)
        assert member["host"] == os.uname().nodename and member["since"].endswith("Z") and len(member["boot"]) == 32
        assert found["settings"]["max_attempts"] == 2
        hands = {(each["partition"], int(each["offset"])): each for each in found["in_hand"]}
        assert set(hands) == {(job.partition, job.offset) for job in held}
        assert {each["member"] for each in hands.values()} == {"alice"}
        assert [hands[job.partition, job.offset]["attempt"] for job in held] == [job.attempt for job in held]
        assert all(0 <= found["now_us"] - each["since_us"] < 3600e6 for each in hands.values())
        (waits,) = found["waiting"]
        assert 3500 < waits["seconds"] <= 3600
        for number, row in enumerate(found["partitions"]):
            one = info.partitions[number]
            assert (row["settled_to"], row["next_offset"]) == (str(one.settled_to), str(one.next_offset))
            assert (row["oldest_us"], row["blocked_by"]) == (one.oldest, "")
            assert row["log_start_offset"] == "0" and int(row["high_watermark"]) - row["left_bytes"] >= one.next_offset
        for job in held:
            job.release()


def test_row_of_a_topic_has_its_shares_and_what_nobody_has_begun(topic: Topic, page: Callable[..., Any]) -> None:
    assert (page("row")["shares"], page("row")["all_shares"]) == ([], 0)
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        (row,) = page("row")["shares"]
        assert (row["name"], row["members"], row["in_hand"], row["error"]) == ("mail", 1, 1, None)
        begun = topic.share_info("mail").partitions[job.partition].next_offset
        assert row["left_bytes"] == sum(each.high_watermark for each in topic.partitions) - begun
    with topic.share("mail") as share:
        assert len(values(share)) == RECORDS
    (row,) = page("row")["shares"]
    assert (row["members"], row["accepted"], row["left_bytes"]) == (0, RECORDS, 0)
    assert page("topic")["row"]["shares"] == [row]


def test_all_of_a_log_that_ends_before_its_share_is_left(topic: Topic) -> None:
    """An older copy of the log was put in the place of the one of which the share has settled records."""
    topic.share("mail").close()
    info, (partition, *_) = topic.share_info("mail"), topic.partitions
    end = partition.high_watermark
    beyond = info.partitions[0]._replace(next_offset=end + 1)
    assert shares._left(partition, {"mail": info._replace(partitions={0: beyond})}) == {"mail": end}


def test_record_of_a_dead_member_has_no_members_name(topic: Topic, page: Callable[..., Any]) -> None:
    share = topic.share("mail", member="alice")
    taken(share, 1)
    die(share)
    found = page("share")
    assert (found["members"], found["sums"]["in_hand"], found["in_hand"][0]["member"]) == ([], 1, "")


def test_long_lists_come_in_parts(topic: Topic, page: Callable[..., Any]) -> None:
    with topic.share("mail") as share:
        held = taken(share, RECORDS)
        for job in held[:5]:
            job.release(delay=1000.0 + job.offset)
        parts = [page("share", in_hand_from=start, in_hand_count=3) for start in (0, 3, 6, 9)]
        assert [len(each["in_hand"]) for each in parts] == [3, 3, 1, 0] and parts[0]["sums"]["in_hand"] == 7
        shown = [(each["partition"], int(each["offset"])) for part in parts for each in part["in_hand"]]
        assert sorted(shown) == sorted((job.partition, job.offset) for job in held[5:])
        assert len(set(shown)) == 7
        waiting = page("share", waiting_from=1, waiting_count=3)["waiting"]
        assert len(waiting) == 3 and waiting == sorted(waiting, key=lambda each: each["seconds"])
        part = page("share", **{"from": 1, "count": 1})
        assert [each["partition"] for each in part["partitions"]] == [1] and part["all_partitions"] == 2
        for job in held[5:]:
            job.release()
    for number in range(4):
        topic.share(f"other-{number}").close()
    listed = page("shares", **{"from": 1, "count": 2})
    assert [each["name"] for each in listed["shares"]] == ["other-0", "other-1"] and listed["total"] == 5


# --- what is wrong -------------------------------------------------------------------------------------------


def test_full_window_is_a_trouble_that_names_the_first_record(
    tmp_path: Path, topic: Topic, page: Callable[..., Any]
) -> None:
    with topic.share("mail", window=2) as share:
        held = taken(share, 4)
        first = next(job for job in held if job.partition == 1)
        troubles = page("row")["troubles"]
        assert [each["kind"] for each in troubles] == ["share", "share"]
        assert "begins no other record of partition 1: 2 records are begun and not settled" in troubles[1]["text"]
        assert troubles[1]["command"] == f"loglib cat {tmp_path / 't'} -p 1 --from 1:{first.offset} -n 1"
        assert [each["blocked_by"] for each in page("share")["partitions"]] == ["window", "window"]
        for job in held:
            job.accept()
    assert page("row")["troubles"] == []


def test_limit_of_records_in_hand_is_no_trouble(topic: Topic, page: Callable[..., Any]) -> None:
    with topic.share("mail", max_in_hand=1) as share:
        held = taken(share, 2)
        assert [each["blocked_by"] for each in page("share")["partitions"]] == ["max_in_hand", "max_in_hand"]
        assert page("row")["troubles"] == []
        for job in held:
            job.accept()


def test_lost_records_are_counted_and_a_log_that_begins_later_is_shown(topic: Topic, page: Callable[..., Any]) -> None:
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        job.release(delay=0.0)
    at = topic.partition(job.partition)
    at.delete_before(at.high_watermark)
    before = page("share")["partitions"][job.partition]
    assert int(before["log_start_offset"]) == at.high_watermark > int(before["next_offset"])
    with topic.share("mail") as share:
        assert len(values(share)) == RECORDS // 2
    found = page("share")
    assert (found["sums"]["lost"], found["sums"]["left_bytes"], page("row")["troubles"]) == (1, 0, [])


def test_share_that_cannot_be_read_is_told_and_hides_nothing_else(topic: Topic, page: Callable[..., Any]) -> None:
    for name in ("mail", "other"):
        topic.share(name).close()
    damaged = acks_of(topic)
    damaged.write_bytes(damaged.read_bytes()[:100])
    row = page("row")
    assert [(each["name"], each["error"] is None) for each in row["shares"]] == [("mail", False), ("other", True)]
    (trouble,) = row["troubles"]
    assert "share mail cannot be read" in trouble["text"] and str(damaged) in trouble["text"]
    assert trouble["command"] == f"ls -lR {topic.path}/shares/mail" and row["size_bytes"] > 0
    assert page("share")["sums"]["error"] and page("share")["partitions"] == []
    assert page("share", share="other")["sums"]["error"] is None


def test_names_and_texts_of_a_shares_files_are_only_text(topic: Topic, page: Callable[..., Any]) -> None:
    odd = "<b>x</b>\u202e"
    share = topic.share("mail", member="alice")
    text = json.dumps({"member": odd, "pid": 10**30, "host": "<i>", "since": "<u>", "boot": ""})
    share._file._file.replace(text.encode())
    (Path(topic.path) / "shares" / "<script>").mkdir()
    (member,) = page("share")["members"]
    assert (member["name"], member["host"], member["since"], member["pid"]) == (odd, "<i>", "<u>", 10**30)
    assert [each["name"] for each in page("shares")["shares"]] == ["mail"], "a share has another name"
    die(share)


def test_share_that_does_not_exist_is_refused(topic: Topic, page: Callable[..., Any]) -> None:
    with pytest.raises(LookupError, match="none"):
        page("share", share="none")


def test_share_that_is_deleted_while_it_is_looked_at_is_left_out(
    topic: Topic, page: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mail", "other"):
        topic.share(name).close()
    real = Topic.share_info

    def info(of: Topic, name: str) -> Any:
        if name == "mail" and "mail" in topic.shares():
            topic.delete_share("mail")
        return real(of, name)

    monkeypatch.setattr(Topic, "share_info", info)
    assert [each["name"] for each in page("shares")["shares"]] == ["other"]


def test_shares_of_a_topic_that_was_moved_are_looked_for_where_it_is_now(
    tmp_path: Path, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.share("mail").close()
    topics, moved = Topics(tmp_path), list[Topic]()
    real = Topic.share_info

    def info(of: Topic, name: str) -> Any:
        if not moved:
            moved.append(of)
            raise LogMovedError(of.path, "was moved or removed")
        return real(of, name)

    monkeypatch.setattr(Topic, "share_info", info)
    found, _ = shares.Shares(topics).sums("t", shares.Part(0, 9))
    assert [each.error for each in found] == [None] and topics.ask("t", lambda of: of is not moved[0])
    topics.close()


# --- looking -------------------------------------------------------------------------------------------------


def test_looking_at_shares_changes_no_byte_and_leaves_no_file_open(
    tmp_path: Path, topic: Topic, page: Callable[..., Any]
) -> None:
    share = topic.share("mail", member="alice")
    worked(share)
    taken(share, 2)
    dead = topic.share("mail", member="bob")
    taken(dead, 1)
    die(dead)
    before, opened = tree(tmp_path), open_files()
    first = [page(name) for name in VIEWS]
    assert tree(tmp_path) == before
    assert [each for each in open_files() if "/mail/" in each] == [each for each in opened if "/mail/" in each]
    assert first[2]["shares"][0]["members"] == 1
    info = topic.share_info("mail")
    assert any(each.counts != Counts() for each in info.partitions.values()) and set(info.members) == {"alice"}
    share.close()


def test_half_an_entry_at_the_end_of_a_file_is_left_for_a_member(topic: Topic, page: Callable[..., Any]) -> None:
    """A full disk may leave it. A member that looks ends the file with a seal, and the page does not."""
    with topic.share("mail") as share:
        taken(share, 1)[0].accept()
    torn = acks_of(topic)
    with torn.open("ab") as file:
        file.write(b"\1" * 7)
    before = torn.read_bytes()
    assert page("share")["sums"]["accepted"] == 1
    assert torn.read_bytes() == before


@needs_root
def test_shares_are_shown_on_a_read_only_mount(tmp_path: Path, topic: Topic, page: Callable[..., Any]) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    with topic.share("mail", member="alice") as share:
        worked(share)
        (job,) = taken(share, 1)
        if os.system(f"mount --bind {tmp_path / 't'} {mount} && mount -o remount,ro,bind {mount}") != 0:
            pytest.skip("NOT PROVED: this machine mounts nothing")
        try:
            with pytest.raises(OSError, match="Read-only"):
                (mount / "x").write_bytes(b"")
            found = [page(name, mount, topic="mount") for name in VIEWS]
            assert found[0]["troubles"] == [] and found[0]["shares"][0]["in_hand"] == 1
            assert [each["name"] for each in found[3]["members"]] == ["alice"]
        finally:
            os.system(f"umount -l {mount}")
        job.accept()


@needs_root
def test_user_who_may_only_read_sees_the_same(tmp_path: Path) -> None:
    with testing.open_topic(tmp_path / "t", permissions=0o644, **QUIET) as topic:
        topic.append_many([b"x"] * 5)
        topic.flush()
        share = topic.share("mail", member="alice")
        taken(share, 2)
        before = tree(tmp_path)

        def sees() -> None:
            row, facts = look()
            assert (row.shares[0].error, row.shares[0].in_hand, row.shares[0].members) == (None, 2, 1)
            assert [each.member for each in facts.in_hand] == ["alice", "alice"] and row.troubles == []

        def is_told() -> None:
            row, facts = look()
            assert "Permission denied" in row.shares[0].error and row.size_bytes > 0 and facts.partitions == []
            assert [each.kind for each in row.troubles] == ["share"]

        def look() -> Any:
            os.setgid(65534)
            os.setuid(65534)
            answers = Answers(Topics(tmp_path))
            try:
                asked = Asked({"topic": "t", "share": "mail"})
                return [answers.by_name[name](asked) for name in ("row", "share")]
            finally:
                answers.close()

        parents = [each for each in tmp_path.parents if each != Path("/")] + [tmp_path]
        modes = {each: os.stat(each).st_mode for each in parents}
        for each in parents:
            each.chmod(modes[each] | 0o055)
        try:
            assert in_child(sees) == 0
            acks_of(topic).chmod(0o600)
            assert in_child(is_told) == 0
        finally:
            for each, mode in modes.items():
                each.chmod(mode)
        assert tree(tmp_path) == before
        share.close()


def test_look_serves_for_ten_times_as_long_as_it_took(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [100.0], list[float]()
    real = shares._looked

    def slow(of: Topic) -> Any:
        looks.append(now[0])
        now[0] += 3.0
        return real(of)

    monkeypatch.setattr(shares, "monotonic", lambda: now[0])
    monkeypatch.setattr(shares, "_looked", slow)
    topics = Topics(os.path.dirname(topic.path))
    found = shares.Shares(topics)
    for _ in range(66):
        found.sums("t", shares.Part(0, 9))
        found.troubles("t")
        now[0] += 1.0
    assert looks == [100.0, 133.0, 166.0]
    topics.close()
