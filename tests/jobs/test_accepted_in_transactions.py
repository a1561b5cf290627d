"""Transaction.accept: results and the acknowledgement of jobs become visible together, or never."""

from __future__ import annotations

import errno
import gc
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from dead_letters import died
from processes import fork, wait
from shared_jobs import RECORDS, die, only, taken, values, with_records

import loglib
from conftest import QUIET, Clock, values_of
from loglib import (
    CommitPendingError,
    FencedError,
    Job,
    LockedError,
    LogClosedError,
    Share,
    Topic,
    testing,
    transaction,
)
from loglib.errors import FencedJobError, ForkedHandleError, StorageIOError
from loglib.jobs.ack_log import AckLog
from loglib.jobs.entries import PIN, PINNED
from loglib.system.clock import SYSTEM
from loglib.system.directory import Directory
from loglib.testing import FaultyFiles
from loglib.transactions import last_version, recover_transactions
from loglib.transactions.apply import Applier
from loglib.transactions.store import Store

Open = Callable[..., Topic]
ALL = [b"%d" % number for number in range(RECORDS)]


@pytest.fixture
def topic(open_topic: Open) -> Topic:
    return with_records(open_topic)


@pytest.fixture
def results(open_topic: Open, tmp_path: Path) -> Topic:
    open_topic(tmp_path / "results").close()
    return open_topic(tmp_path / "results", mode="r")


def test_results_and_acknowledgements_are_committed_together(topic: Topic, results: Topic, tmp_path: Path) -> None:
    with topic.share("mail") as share:
        for job in share.follow(0.0):
            with transaction("app") as tx:
                tx.append(results, job.value)
                tx.accept(job)
                assert not job.settled and job.promised
            assert job.settled
    assert values_of(results) == ALL and only(topic).counts == (RECORDS, 0, 0, 0)
    assert last_version("app", store=tmp_path) == RECORDS - 1


def test_several_jobs_of_several_shares_are_accepted_together(topic: Topic, results: Topic, open_topic: Open) -> None:
    bills = with_records(open_topic, at=Path(topic.path).parent / "bills")
    with topic.share("mail") as share, bills.share("bill") as other, transaction("app") as tx:
        for place, job in enumerate(share.follow(0.0)):  # the loop accepts none of them
            tx.accept(job)
            if place == 3:
                break
        del job
        gc.collect()
        loop = other.batches(100, timeout=0.0)
        batch = next(loop)
        tx.accept(batch.jobs()[1])
        tx.append(results, b"x")
        assert only(topic).counts.accepted == only(bills, "bill").counts.accepted == 0
    assert only(topic).counts.accepted == 4 and only(bills, "bill").counts.accepted == 1
    assert values_of(results) == [b"x"]


def test_batch_is_accepted_without_those_that_were_settled_before(topic: Topic) -> None:
    with topic.share("mail") as share:
        loop = share.batches(100, timeout=0.0)
        batch = next(loop)
        batch.jobs()[1].reject()
        with transaction("app") as tx:
            tx.accept(batch)
        assert batch.settled and list(loop) == []
    assert only(topic).counts[:2] == (RECORDS - 1, 1)


def test_exception_leaves_the_job_in_hand(topic: Topic, results: Topic) -> None:
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        with pytest.raises(RuntimeError), transaction("app") as tx:
            tx.append(results, b"x")
            tx.accept(job)
            raise RuntimeError
        assert not job.settled and not job.promised and len(only(topic).in_hand) == 1
        job.accept()
    assert values_of(results) == [] and only(topic).counts.accepted == 1


def test_transaction_that_is_refused_leaves_the_job_in_hand(topic: Topic, tmp_path: Path) -> None:
    with (
        testing.open_topic(tmp_path / "results", background=False, clock=Clock(), **QUIET) as held,
        testing.open_topic(tmp_path / "results", mode="r", clock=Clock()) as results,
        topic.share("mail") as share,
    ):
        held.append(b"x", sync=True)
        (job,) = taken(share, 1)
        for _ in range(2):
            with pytest.raises(LockedError), transaction("app", timeout=0.01) as tx:
                tx.append(results, b"x")
                tx.accept(job)
            assert not job.settled and not job.promised
        held.close()
        with transaction("app") as tx:
            tx.append(results, b"y")
            tx.accept(job)
    assert only(topic).counts.accepted == 1


def test_app_that_others_own_leaves_the_job_in_hand(topic: Topic) -> None:
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        for owner in ("one", "two"):
            with transaction("app", owner=owner) as tx:
                tx.accept(job if owner == "one" else taken(share, 1)[0])
        (third,) = taken(share, 1)
        with pytest.raises(FencedError), transaction("app", owner="one") as tx:
            tx.accept(third)
        third.accept()
    assert only(topic).counts.accepted == 3


@pytest.mark.parametrize("how", ["evicted", "lease", "released", "reset"])
def test_job_that_was_taken_away_stops_the_transaction_before_anything_is_committed(
    topic: Topic, results: Topic, clock: Clock, how: str
) -> None:
    with topic.share("mail", lease=10 if how == "lease" else None) as share:
        first, second = taken(share, 2)
        with pytest.raises(FencedJobError), transaction("app") as tx:
            tx.append(results, b"x")
            tx.accept(first)
            tx.accept(second)
            if how == "evicted":
                topic.evict_share_member("mail", share.member)
            elif how == "released":
                second.release()
            elif how == "reset":
                die(share)
                topic.reset_share("mail", "begin")
            else:
                clock.advance(timedelta(seconds=11))
                with topic.share("mail", member="other", lease=10) as other:
                    assert other.take(0.0)
        assert values_of(results) == [] and only(topic).counts.accepted == 0
        assert how != "released" or (not first.settled and [each.offset for each in only(topic).in_hand] == [0])


def test_job_of_one_share_is_in_hand_as_before_if_that_of_another_one_was_taken_away(
    topic: Topic, open_topic: Open
) -> None:
    bills = with_records(open_topic, at=Path(topic.path).parent / "bills")
    with topic.share("mail") as share, bills.share("bill") as other:
        (first,), (second,) = taken(share, 1), taken(other, 1)
        with pytest.raises(FencedJobError), transaction("app") as tx:
            tx.accept(first)
            tx.accept(second)
            second.release()
        first.accept()
    assert (only(topic).counts.accepted, only(bills, "bill").counts.accepted) == (1, 0)


def test_job_is_accepted_by_one_transaction_once(topic: Topic) -> None:
    with topic.share("mail") as share:
        first, second = taken(share, 2)
        with transaction("app") as tx:
            tx.accept(first)
            with pytest.raises(ValueError, match="part of a transaction"):
                tx.accept(first)
            with pytest.raises(ValueError, match="part of a transaction"), transaction("other") as other:
                other.accept(first)
        with pytest.raises(ValueError, match="settled already"), transaction("app") as tx:
            tx.accept(first)
        with pytest.raises(ValueError, match="leave version= out"), transaction("app", version=7) as tx:
            tx.accept(second)
        with pytest.raises(LogClosedError, match="is over"):
            tx.accept(second)
        second.accept()
    assert only(topic).counts.accepted == 2


def test_job_that_is_promised_is_settled_otherwise_at_most_by_a_release(topic: Topic) -> None:
    """The `with` of the job ends before that of the transaction."""
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        with transaction("app") as tx, job:
            tx.accept(job)
        assert job.settled
        (job,) = taken(share, 1)
        with pytest.raises(FencedJobError), transaction("app") as tx:
            tx.accept(job)
            with job:
                raise RuntimeError
    assert only(topic).counts.accepted == 1 and only(topic).free == 1


def test_transaction_of_a_closed_share_commits_nothing(topic: Topic, results: Topic) -> None:
    share = topic.share("mail")
    (job,) = taken(share, 1)
    with pytest.raises(LogClosedError), transaction("app") as tx:
        tx.append(results, b"x")
        tx.accept(job)
        share.close()
    assert values_of(results) == [] and only(topic).free == 1


def test_child_commits_nothing_of_its_parent(open_topic: Open, tmp_path: Path) -> None:
    topic, results = with_records(open_topic, clock=SYSTEM), open_topic(tmp_path / "results", clock=SYSTEM)
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        tx = transaction("app")
        tx.append(results, b"x")
        tx.accept(job)

        def in_child() -> None:
            with pytest.raises(ForkedHandleError), tx:
                pass

        assert wait(fork(in_child)) == 0
        with tx:
            pass
    assert values_of(results) == [b"x"] and only(topic).counts.accepted == 1


# --- what nobody has finished ----------------------------------------------------------------------------


def left_pinned(topic: Topic, job: Job, results: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit a transaction that nobody applies."""
    with monkeypatch.context() as patch:
        patch.setattr(Applier, "run", lambda *_, **__: (_ for _ in ()).throw(CommitPendingError(1, "the test")))
        with pytest.raises(CommitPendingError), transaction("app") as tx:
            tx.append(results, job.value)
            tx.accept(job)
    assert job.settled and len(only(topic).in_hand) == 1 and values_of(results) == []


@pytest.mark.parametrize("who", ["itself", "another", "a delete", "a reset"])
def test_committed_transaction_is_finished_by_whoever_finds_its_pin(
    topic: Topic, results: Topic, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = topic.share("mail")
    left_pinned(topic, taken(share, 1)[0], results, monkeypatch)
    if who == "itself":
        assert values(share) == ALL[1:]
    else:
        die(share)
    if who == "a delete":
        topic.delete_share("mail")
    elif who == "a reset":
        topic.reset_share("mail", "begin")
        assert only(topic).counts.accepted == 1
    elif who == "another":
        with topic.share("mail", member="one") as one, topic.share("mail", member="two") as two:
            assert sorted(values(one) + values(two)) == ALL[1:]
    assert values_of(results) == [b"0"]


def test_committed_transaction_of_a_share_whose_files_are_gone_is_finished_without_it(
    topic: Topic, results: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    share = topic.share("mail")
    left_pinned(topic, taken(share, 1)[0], results, monkeypatch)
    die(share)
    shutil.rmtree(Path(topic.path) / "shares" / "mail")
    recover_transactions(tmp_path)
    assert values_of(results) == [b"0"] and topic.shares() == []
    assert "the share mail was deleted; 1 records of it are not settled" in caplog.text
    with topic.share("mail") as again:
        assert values(again) == ALL, "a new share of that name knows nothing of it"


def pinned(topic: Topic, monkeypatch: pytest.MonkeyPatch, **options: object) -> list[object]:
    """A member that has pinned a record, and died before it has committed anything."""
    share = topic.share("mail", **options)  # type: ignore[arg-type]
    (job,) = taken(share, 1)
    with monkeypatch.context() as patch:
        patch.setattr("loglib.transactions.store.Store.commit", lambda *_, **__: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError), transaction("app") as tx:
            tx.accept(job)
    return [share, job]


@pytest.mark.parametrize("who", ["itself", "another", "a reset"])
def test_transaction_that_was_not_committed_gives_its_record_back(
    topic: Topic, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, job = pinned(topic, monkeypatch)
    assert isinstance(share, Share)
    assert isinstance(job, Job) and not job.settled
    with pytest.raises(FencedJobError, match="has not ended yet"):
        job.release()
    if who == "itself":
        share.take(0.0)
        assert only(topic).counts.accepted == 0
        share.close()
    else:
        die(share)
    if who == "a reset":
        topic.reset_share("mail", "begin")
    with topic.share("mail", member="other") as other:
        got = [(each.value, each.attempt) for each in other.follow(0.0)]
    assert (b"0", 1 if who == "a reset" else 3 if who == "itself" else 2) in got


def test_i3_pinned_record_is_neither_begun_nor_reaped_nor_settled_by_others(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    share, _ = pinned(topic, monkeypatch, lease=10)
    monkeypatch.setattr("loglib.jobs.pinning.Pinning.is_due", lambda _: False)  # nobody resolves it
    clock.advance(timedelta(seconds=11))
    with topic.share("mail", member="other", lease=10) as other:
        assert values(other) == ALL[1:]
        assert [each.offset for each in only(topic).in_hand] == [0]
        topic.evict_share_member("mail", share.member)  # type: ignore[attr-defined]
        assert values(other) == [] and [each.offset for each in only(topic).in_hand] == [0]
    share.close()  # type: ignore[attr-defined]


def test_two_members_that_resolve_the_same_pin_give_the_record_back_once(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, _ = pinned(topic, monkeypatch)
    die(share)  # type: ignore[arg-type]
    with topic.share("mail", member="one") as one, topic.share("mail", member="two") as two:
        for each in (one, two):
            each._look_at_members()
        end_pins = AckLog.end_pins

        def after_the_other(acks: AckLog, pins: list[object]) -> None:
            monkeypatch.setattr(AckLog, "end_pins", end_pins)
            two._pinning.run(two._opened, two._clock.moment)
            end_pins(acks, pins)  # type: ignore[arg-type]

        monkeypatch.setattr(AckLog, "end_pins", after_the_other)
        one._pinning.run(one._opened, one._clock.moment)
        got = [(each.value, each.attempt) for each in one.follow(0.0)]
        assert got.count((b"0", 2)) == 1 and len(got) == RECORDS


def test_late_commit_of_a_member_whose_pin_was_resolved_is_refused(
    topic: Topic, results: Topic, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped after its PIN, for longer than its lease."""
    commit = "loglib.transactions.store.Store.commit"
    from loglib.transactions.store import Store

    real = Store.commit

    def late(*given: object, **named: object) -> object:
        monkeypatch.setattr(commit, real)
        clock.advance(timedelta(seconds=11))
        with topic.share("mail", member="other", lease=10) as other:
            loop = other.follow(0.0)
            seen.extend((job.value, job.attempt) for job in loop)
        return real(*given, **named)  # type: ignore[arg-type]

    seen: list[object] = []
    with topic.share("mail", lease=10) as share:
        (job,) = taken(share, 1)
        monkeypatch.setattr(commit, late)
        with pytest.raises(FencedJobError, match="others have taken it back"), transaction("app") as tx:
            tx.append(results, b"late")
            tx.accept(job)
    assert (b"0", 2) in seen and len(seen) == RECORDS and values_of(results) == []


def test_pin_that_lands_after_a_seal_is_written_again(topic: Topic, results: Topic) -> None:
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        acks = share._takings[0].acks
        append, sealed = acks.append, list[int]()

        def append_late(entries: list[bytes]) -> None:
            if not sealed and entries[0][4:6] == bytes((PIN, PINNED)):
                sealed.append(1)
                append([acks._seal_entry()])
            append(entries)

        acks.append = append_late  # type: ignore[method-assign]
        with transaction("app") as tx:
            tx.append(results, b"x")
            tx.accept(job)
        assert sealed and acks.state.generation == 2
        acks.append = append  # type: ignore[method-assign]
    assert only(topic).counts.accepted == 1 and values_of(results) == [b"x"]


def test_pin_is_durable_before_the_commit_and_the_settle_before_it_is_visible(
    open_topic: Open, tmp_path: Path
) -> None:
    from loglib.testing import RecordingFiles

    with_records(open_topic).close()
    files = RecordingFiles()
    topic = open_topic(files=files, mode="r")
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        files.calls.clear()
        with transaction("app") as tx:
            tx.accept(job)
    order = [
        f"{call.name} {'acks' if call.path.endswith('.acks') else Path(str(call.arguments[0])).name[-6:]}"
        for call in files.calls if call.path.endswith(".acks") or call.name == "link"
    ]  # fmt: skip
    kept = [each for each in order if each.split()[0] in ("append", "datasync", "link")]
    assert kept[-6:] == ["append acks", "datasync acks", "link 000002", "append acks", "datasync acks", "link 2.done"]
    assert died(tmp_path / "dead") == []


def test_commit_in_doubt_is_resolved_by_the_store(open_topic: Open, tmp_path: Path) -> None:
    with_records(open_topic).close()
    results = open_topic(tmp_path / "results")
    files = FaultyFiles("link", armed=False)
    topic = open_topic(files=files, mode="r")
    with topic.share("mail") as share:
        for armed in (False, True):
            (job,) = taken(share, 1)
            files.armed = armed
            if not armed:
                with transaction("app") as tx:
                    tx.accept(job)
                continue
            with pytest.raises((StorageIOError, OSError)), transaction("app") as tx:
                tx.accept(job)
                tx.append(results, b"x")
            files.armed = False
        del job
        got = [(each.value, each.attempt) for each in share.follow(0.0)]
        assert (b"1", 2) in got and len(got) == RECORDS - 1
    assert values_of(results) == []


@pytest.mark.parametrize("several", [False, True])
def test_loop_goes_on_after_a_commit_in_doubt(
    open_topic: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """The loop's accept of a record that the transaction has pinned counts for nothing, and was written for ever."""
    topic, other = with_records(open_topic), open_topic(tmp_path / "other")
    results = open_topic(tmp_path / "results")
    sync = Store._sync_commit
    doubts: list[int] = []

    def fail(store: Store, directory: Directory, number: int) -> None:
        if number == 2 and not doubts:
            doubts.append(number)
            raise StorageIOError(store.path, OSError(errno.EIO, "Input/output error"), "syncing a commit")
        sync(store, directory, number)

    monkeypatch.setattr(Store, "_sync_commit", fail)
    with loglib.share([other, topic], "mail") if several else topic.share("mail") as share:
        for job in share.follow(2.0):
            with suppress(OSError), transaction("app") as tx:
                tx.append(results, job.value)
                tx.accept(job)
    assert doubts
    assert sorted(values_of(results)) == sorted(ALL)
    assert only(topic).counts == (RECORDS, 0, 0, 0)
