"""transactions/redriving.py: dead letters are sent back to where they came from, each once, whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from dead_letters import died, facts, letters
from processes import fork, wait
from shared_jobs import only, taken, values

from loglib import LogError, Topic
from loglib.transactions import RedriveReport, redrive, redriving
from loglib.transactions.transaction import Transaction

Open = Callable[..., Topic]


@pytest.fixture
def mail(tmp_path: Path) -> Path:
    """A topic of two partitions with the records 0 to 5, all of which are dead letters."""
    return _all_dead(tmp_path, [b"k"] * 6)


def _all_dead(tmp_path: Path, keys: list[bytes]) -> Path:
    """A topic of two partitions with a record for each key, all of which are dead letters."""
    with Topic.create(tmp_path / "mail", partitions=2) as topic:
        for number, key in enumerate(keys):
            topic.append(b"%d" % number, key, headers={"own": b"h"}, timestamp=number + 1, partition=number % 2)
        topic.flush()
        with topic.share("mail", dead_letter=tmp_path / "dead") as share:
            for job in share.follow(0.0):
                job.reject("bad")
    assert sorted(each or b"" for each in died(tmp_path / "dead")) == [b"%d" % number for number in range(len(keys))]
    return tmp_path / "mail"


def sent(path: Path) -> list[bytes]:
    """The values of the records that were sent back."""
    with Topic.open(path, mode="r") as topic:
        return sorted([record.value or b"" for record in topic.read() if dict(record.headers).get("loglib-redriven")])


def test_dead_letters_go_back_to_their_partitions_with_their_own_headers_once(mail: Path, tmp_path: Path) -> None:
    assert redrive(tmp_path / "dead") == RedriveReport(6, {str(mail): 6}, 0, dry_run=False)
    assert redrive(tmp_path / "dead") == RedriveReport(0, {}, 0, dry_run=False)
    with Topic.open(mail, mode="r") as topic:
        back = [each for each in topic.read() if "loglib-redriven" in dict(each.headers)]
    assert {(each.value, each.partition, each.timestamp, each.key) for each in back} == {
        (b"%d" % number, number % 2, number + 1, b"k") for number in range(6)
    }
    assert {each.headers for each in back} == {(("own", b"h"), ("loglib-redriven", b"1"))}


def test_record_that_dies_again_says_how_often_it_was_sent_back(mail: Path, tmp_path: Path) -> None:
    for times in (b"1", b"2"):
        assert redrive(tmp_path / "dead", where=lambda record: record.value == b"0").redriven == 1
        with Topic.open(mail) as topic, topic.share("mail") as share:
            (job,) = taken(share, 1)
            assert (job.value, dict(job.headers)["loglib-redriven"]) == (b"0", times)
            job.reject()
    assert [facts(each)["redriven"] for each in letters(tmp_path / "dead")][6:] == ["1", "2"]


def _made(path: Path) -> Path:
    Topic.create(path).close()
    return path


def test_filter_and_limit_leave_the_others_for_a_later_call(mail: Path, tmp_path: Path) -> None:
    dead = tmp_path / "dead"
    report = redrive(dead, where=lambda record: record.value in (b"1", b"2", b"5"), limit=2)
    assert report.redriven == len(sent(mail)) == 2
    assert redrive(dead, where=lambda record: record.value in (b"1", b"2", b"5")).redriven == 1
    assert sent(mail) == [b"1", b"2", b"5"]
    assert redrive(dead, to=_made(tmp_path / "other")).to == {str(tmp_path / "other"): 3}
    assert sent(tmp_path / "other") == [b"0", b"3", b"4"]


def test_dry_run_writes_nothing_and_says_what_would_be_sent(mail: Path, tmp_path: Path) -> None:
    dead = tmp_path / "dead"
    assert redrive(dead, dry_run=True) == RedriveReport(6, {str(mail): 6}, 0, dry_run=True)
    with Topic.open(dead, mode="r") as topic:
        assert topic.shares() == []
    redrive(dead, limit=4)
    assert redrive(dead, dry_run=True, limit=1) == RedriveReport(1, {str(mail): 1}, 0, dry_run=True)
    assert len(sent(mail)) == 4


def test_dry_run_counts_what_a_filter_leaves_out(mail: Path, tmp_path: Path) -> None:
    report = redrive(tmp_path / "dead", dry_run=True, where=lambda record: record.value in (b"1", b"4"))
    assert report == RedriveReport(2, {str(mail): 2}, 4, dry_run=True)
    assert sent(mail) == []


def test_record_that_is_no_dead_letter_is_left_out_unless_it_is_told_where_to_go(
    mail: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Topic.open(tmp_path / "dead") as topic:
        topic.append(b"stray", sync=True)
    assert redrive(tmp_path / "dead")[::2] == (6, 1) and "is no dead letter" in caplog.text
    assert redrive(tmp_path / "dead", to=mail).redriven == 1
    assert sent(mail)[-1] == b"stray"


def test_dead_letters_are_not_sent_to_their_own_topic_for_ever(mail: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="to must be another topic"):
        redrive(tmp_path / "dead", to=tmp_path / "dead", limit=20)
    shutil.rmtree(mail)
    os.rename(tmp_path / "dead", mail)
    assert redrive(mail, limit=20) == RedriveReport(0, {}, 6, dry_run=False)


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("most_records", [1, 2, 100])
def test_run_ends_although_what_it_sends_dies_again_immediately(
    most_records: int, partitions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Topic.create(tmp_path / "dead", partitions=partitions).close()
    mail = _all_dead(tmp_path, [b"a", b"b", b"c", b"d", b"e", b"f"])
    monkeypatch.setattr(redriving, "_MOST_RECORDS", most_records)
    send = redriving._Redriving._send

    def and_reject(self: redriving._Redriving, part: list[object]) -> None:
        send(self, part)  # type: ignore[arg-type]
        with Topic.open(mail) as topic, topic.share("mail") as share:
            for job in share.follow(timeout=0):
                job.reject()

    monkeypatch.setattr(redriving._Redriving, "_send", and_reject)
    before = len(died(tmp_path / "dead"))
    assert redrive(tmp_path / "dead", limit=10 * before).redriven == before
    assert redrive(tmp_path / "dead", limit=before - 1).redriven == before - 1, "these are for the next runs"


def test_topic_of_origin_that_is_gone_is_named_and_nothing_is_lost(mail: Path, tmp_path: Path) -> None:
    moved = mail.rename(tmp_path / "elsewhere")
    for is_dry in (True, False):
        with pytest.raises(FileNotFoundError, match="no topic here"):
            redrive(tmp_path / "dead", dry_run=is_dry)
    assert redrive(tmp_path / "dead", to=moved).redriven == 6
    with pytest.raises(ValueError, match="limit"):
        redrive(tmp_path / "dead", limit=0)


def test_topic_that_was_made_again_with_fewer_partitions_gets_the_dead_letters_by_their_keys(
    mail: Path, tmp_path: Path
) -> None:
    shutil.rmtree(mail)
    Topic.create(mail).close()
    for is_dry in (True, False):
        with pytest.raises(LogError, match=r"mail has no partition 1, where .*: it has 1 now\. .*\(--to\)"):
            redrive(tmp_path / "dead", dry_run=is_dry)
    assert redrive(tmp_path / "dead", to=mail).redriven == 6
    assert sent(mail) == [b"%d" % number for number in range(6)]


def test_each_is_sent_once_if_a_run_is_killed_after_any_of_its_transactions(
    mail: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redriving, "_MOST_RECORDS", 2)
    for step in ("before", "committed", "after"):

        def run(step: str = step) -> None:
            name = {"before": "_intent", "committed": "_apply", "after": "_commit"}[step]
            real = getattr(Transaction, name)

            def killed(*given: object) -> object:
                if step == "after":
                    real(*given)
                os.kill(os.getpid(), signal.SIGKILL)
                return None

            setattr(Transaction, name, killed)
            redrive(tmp_path / "dead")

        assert wait(fork(run)) == -signal.SIGKILL
    assert redrive(tmp_path / "dead").redriven == 2
    assert sent(mail) == [b"%d" % number for number in range(6)]
    with Topic.open(tmp_path / "dead", mode="r") as topic:
        assert only(topic, redriving.SHARE).counts == (6, 0, 0, 0)


def test_two_runs_share_the_work(mail: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redriving, "_MOST_RECORDS", 1)
    send, others = redriving._Redriving._send, list[RedriveReport]()

    def send_beside_another(self: redriving._Redriving, part: list[object]) -> None:
        if not others:
            others.append(RedriveReport(0, {}, 0, dry_run=False))
            others[0] = redrive(tmp_path / "dead")
        send(self, part)  # type: ignore[arg-type]

    monkeypatch.setattr(redriving._Redriving, "_send", send_beside_another)
    report = redrive(tmp_path / "dead")
    assert (report.redriven, others[0].redriven) == (1, 5)
    assert sent(mail) == [b"%d" % number for number in range(6)]


def test_what_is_sent_back_is_a_job_again(mail: Path, tmp_path: Path) -> None:
    redrive(tmp_path / "dead")
    with Topic.open(mail) as topic, topic.share("mail") as share:
        assert sorted(values(share)) == [b"%d" % number for number in range(6)]
