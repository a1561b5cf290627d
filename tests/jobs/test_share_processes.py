"""Shares of several processes: killed, stopped, forked and poisoned at any moment; handlers note what they do."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_chaos import Handled, workers_harmed
from processes import fork, wait
from shared_jobs import RECORDS, only, taken, values, with_records

from conftest import run_python, start_python
from loglib import Topic
from loglib.errors import FencedJobError, ForkedHandleError
from loglib.system.clock import SYSTEM

Open = Callable[..., Topic]
ALL = [b"%d" % number for number in range(RECORDS)]
@pytest.mark.parametrize(("seed", "order"), [(1, "none"), (2, "none"), (3, "key"), (4, "key")])
def test_i1_i2_i4_i5_kills_and_stops_at_random_moments(path: Path, seed: int, order: str) -> None:
    done = workers_harmed(path, seed, order=order, count=300, kills=25)
    assert done["job_starts"] > done["jobs"]


def test_i6_stopped_member_delays_no_record_that_it_has_not_in_hand(open_topic: Open, path: Path) -> None:
    topic = with_records(open_topic, clock=SYSTEM)
    ready, go = os.pipe()

    def hold() -> None:
        with Topic.open(path, mode="r") as reading, reading.share("mail") as share:
            (job,) = taken(share, 1)
            os.write(go, b"x")
            signal.pause()
            job.accept()

    pid = fork(hold)
    try:
        assert os.read(ready, 1)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        with topic.share("mail") as share:
            assert values(share) == ALL[1:]
            (in_hand,) = only(topic).in_hand
            assert in_hand.attempt == 1, "slow is not dead"
            os.kill(pid, signal.SIGKILL)
            (job,) = (job for job in [share.take(30)] if job)
            assert (job.value, job.attempt) == (b"0", 2)
            job.accept()
    finally:
        os.kill(pid, signal.SIGKILL)
        wait(pid)


def test_member_that_is_stopped_before_its_write_and_continued_later_changes_nothing(
    open_topic: Open, path: Path
) -> None:
    """It has composed an entry, and writes it after its lease was over: the entry is void."""
    topic = with_records(open_topic, clock=SYSTEM)
    ready, go = os.pipe()

    def hold() -> None:
        with Topic.open(path, mode="r") as reading, reading.share("mail", lease=0.05) as share:
            (job,) = taken(share, 1)
            taking = share._takings[0]
            append = taking.acks.append

            def stopped(entries: list[bytes]) -> None:
                os.write(go, b"x")
                os.kill(os.getpid(), signal.SIGSTOP)
                append(entries)

            taking.acks.append = stopped  # type: ignore[method-assign]
            with pytest.raises(FencedJobError, match="its lease was over"):
                job.accept()
            taking.acks.append = append  # type: ignore[method-assign]

    pid = fork(hold)
    try:
        assert os.read(ready, 1)
        os.waitpid(pid, os.WUNTRACED)
        with topic.share("mail") as share:
            got: list[Any] = []
            while len(got) < RECORDS:
                got += [(job.value, job.attempt) for job in share.follow(0.0)]
            assert (b"0", 2) in got
    finally:
        os.kill(pid, signal.SIGCONT)
    assert wait(pid) == 0
    assert only(topic).counts.accepted == RECORDS


def test_poisoned_record_ends_as_exhausted_and_counts_no_attempt_of_others(
    open_topic: Open, path: Path, tmp_path: Path
) -> None:
    topic, handled = with_records(open_topic, clock=SYSTEM), Handled(tmp_path / "handled")

    def handle() -> None:
        with Topic.open(path, mode="r") as reading, reading.share("mail", max_attempts=3) as share:
            for job in share.follow(timeout=0.0):
                handled.note(job)
                if job.value == b"4":
                    os.kill(os.getpid(), signal.SIGKILL)

    ends: list[int] = []
    while not ends or ends[-1]:
        ends.append(wait(fork(handle)))
    assert ends == [-signal.SIGKILL] * 3 + [0]
    assert only(topic).counts == (RECORDS - 1, 0, 1, 0)
    attempts = collections.Counter(attempt for _, _, _, attempt in handled.events())
    # A record whose accept was to be written with the next take died with its member, and came again.
    assert attempts[3] == 1 and max(attempts) == 3


def test_child_that_is_forked_in_a_handler_leaves_the_members_alone(open_topic: Open) -> None:
    topic = with_records(open_topic, clock=SYSTEM)
    with topic.share("mail") as share:
        (job,) = taken(share, 1)

        def in_child() -> None:
            for call in (job.accept, share.flush, lambda: next(share.follow())):
                with pytest.raises(ForkedHandleError):
                    call()
            share.close()

        pid = fork(in_child)
        assert wait(pid) == 0
        assert [each.offset for each in only(topic).in_hand] == [job.offset]
        job.accept()
    assert only(topic).counts.accepted == 1


def test_child_does_not_keep_a_dead_member_alive(open_topic: Open, path: Path) -> None:
    topic = with_records(open_topic, clock=SYSTEM)
    ready, go = os.pipe()

    def hold() -> None:
        with Topic.open(path, mode="r") as reading, reading.share("mail") as share:
            jobs = taken(share, 1)
            if os.fork() == 0:
                os.write(go, b"%d " % os.getpid())
                signal.pause()
            os.write(go, b"0 ")
            signal.pause()
            del jobs

    pid = fork(hold)
    said = b""
    while said.count(b" ") < 2:
        said += os.read(ready, 100)
    child = max(map(int, said.split()))
    try:
        os.kill(pid, signal.SIGKILL)
        wait(pid)
        with topic.share("mail") as share:
            (job,) = (job for job in [share.take(30)] if job)
            assert (job.value, job.attempt) == (b"0", 2)
            job.accept()
    finally:
        os.kill(child, signal.SIGKILL)


def test_program_that_a_handler_starts_keeps_no_dead_member_alive(open_topic: Open) -> None:
    topic = with_records(open_topic, clock=SYSTEM)
    share = topic.share("mail", member="first")
    (job,) = taken(share, 1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as program:
        share._left = True
        share._file.abandon()
        share._observer.close()
        assert topic.share_info("mail").members == {}
        with topic.share("mail") as other:
            assert len(values(other)) == RECORDS
        program.communicate(b"\n")
    assert job.value == b"0"


def test_terminated_run_ends_the_job_in_hand_and_settles_it(open_topic: Open, path: Path) -> None:
    topic = with_records(open_topic, clock=SYSTEM)
    program = """
        import os, signal, sys, loglib

        def handle(job):
            if job.value == b"2":
                os.kill(os.getpid(), signal.SIGTERM)
            print(job.value.decode(), flush=True)

        with loglib.Topic.open(sys.argv[1], mode="r") as topic, topic.share("mail") as share:
            share.run(handle, threads=int(sys.argv[2]))
        print("ended", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    """
    process = start_python(program, path, 1)
    output, errors = process.communicate(timeout=60)
    assert (output.split(), errors) == (["0", "1", "2", "ended", "True"], "")
    assert (only(topic).counts.accepted, only(topic).in_hand, only(topic).free) == (3, (), 0)


def test_waiting_member_takes_over_from_one_that_is_killed(open_topic: Open, path: Path) -> None:
    topic = with_records(open_topic, 1, clock=SYSTEM)
    ready, go = os.pipe()

    def hold() -> None:
        with Topic.open(path, mode="r") as reading, reading.share("mail") as share:
            jobs = taken(share, 1)
            os.write(go, b"x")
            signal.pause()
            del jobs

    pid = fork(hold)
    assert os.read(ready, 1)
    with topic.share("mail") as share:
        assert share.take(0.0) is None
        os.kill(pid, signal.SIGKILL)
        job = share.take(30)
        assert job is not None and job.attempt == 2
    wait(pid)


def test_i10_idle_member_asks_the_system_for_next_to_nothing(open_topic: Open) -> None:
    from loglib.testing import RecordingFiles

    files = RecordingFiles()
    topic = with_records(open_topic, clock=SYSTEM, files=files)
    with topic.share("mail") as share:
        values(share)
        assert share.take(0.3) is None  # its looks after it has joined
        files.calls.clear()
        assert share.take(0.2) is None
        assert len(files.calls) < 40, files.named()


def test_child_that_is_forked_beside_a_share_and_ends_in_order_leaves_it_to_its_parent(
    open_topic: Open, path: Path
) -> None:
    with_records(open_topic, clock=SYSTEM).close()
    program = """
        import os, sys
        from loglib import Topic
        from loglib.errors import ForkedHandleError

        with Topic.open(sys.argv[1], mode="r") as topic, topic.share("mail") as share:
            job = share.take(0)
            child = os.fork()
            if child == 0:
                for call in (job.accept, share.take, share.flush):
                    try:
                        call()
                    except ForkedHandleError:
                        print("refused", flush=True)
                share.close()
                sys.exit()
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            members = topic.share_info("mail").members
            job.accept()
            print(len(members), topic.share_info("mail").partitions[0].counts.accepted)
    """
    assert run_python(program, path).splitlines() == ["refused"] * 3 + ["1 1"]
