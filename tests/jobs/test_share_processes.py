"""Shares of several processes: killed, stopped, forked and poisoned at any moment; handlers note what they do."""

from __future__ import annotations

import collections
import os
import random
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harm import harmed
from processes import fork, wait
from shared_jobs import RECORDS, only, taken, values, with_records

from conftest import run_python, start_python
from loglib import Job, Topic
from loglib.errors import FencedJobError, ForkedHandleError
from loglib.jobs import ack_log
from loglib.system.clock import SYSTEM

Open = Callable[..., Topic]
ALL = [b"%d" % number for number in range(RECORDS)]
_EVENT = struct.Struct("<iqQi")  # a worker, an offset, a token, and an attempt; negative at the end of the handler


class Handled:
    """What handlers have begun and ended, in a file to which all of them append: in the order in which they did it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)

    def note(self, job: Job, *, ends: bool = False) -> None:
        os.write(self._fd, _EVENT.pack(os.getpid(), job.offset, job.token, -job.attempt if ends else job.attempt))

    def events(self) -> list[tuple[int, int, int, int]]:
        return list(_EVENT.iter_unpack(self.path.read_bytes()))

    def check(self, count: int, *, dead: set[int]) -> None:
        """I1, I2 and I4, from outside: `dead` are the workers that were killed, or have killed themselves."""
        attempts: dict[int, list[int]] = collections.defaultdict(list)
        running: dict[int, int] = {}
        ended = collections.Counter[int]()
        for worker, offset, _, attempt in self.events():
            if attempt < 0:
                assert running.get(offset) == worker, "a handler ended whose record another one had begun"
                del running[offset]
                ended[offset] += 1
            else:
                before = running.get(offset)
                assert before is None or before in dead or before == worker, "two handlers of one record"
                running[offset] = worker
                attempts[offset].append(attempt)
        assert len(attempts) == count and len(ended) == count, "a record that nobody has handled"
        for offset, found in attempts.items():
            assert found == sorted(set(found)), f"offset {offset}: an attempt was not counted: {found}"

    def check_order(self, keys: dict[int, bytes | None]) -> None:
        """I5, from outside: a record is begun only after the last handler of each earlier one of its key has ended."""
        left: dict[bytes | None, list[int]] = collections.defaultdict(list)
        for offset, key in sorted(keys.items()):
            left[key].append(offset)
        last = {offset: number for number, (_, offset, _, attempt) in enumerate(self.events()) if attempt < 0}
        for number, (_, offset, _, attempt) in enumerate(self.events()):
            if attempt > 0 and keys[offset] is not None:
                earlier = left[keys[offset]][: left[keys[offset]].index(offset)]
                assert all(last[each] < number for each in earlier), f"{offset} of {keys[offset]!r} was begun too early"


def work(path: Path, handled: Handled, handle: Callable[[Job], bool], **options: Any) -> None:
    with Topic.open(path, mode="r") as topic, topic.share("mail", max_attempts=1000, **options) as share:
        for job in share.follow(timeout=0.0):
            handled.note(job)
            releases = handle(job)
            handled.note(job, ends=True)  # first: from the release on, another one may begin
            if releases:
                job.release()


def until_done(
    path: Path, handled: Handled, handle: Callable[[Job], bool], count: int, **options: Any
) -> None:  # fmt: skip
    """Handle until all records are accepted: a member may end while others have the last ones in hand."""
    with Topic.open(path, mode="r") as topic:
        while not topic.shares() or only(topic).counts.accepted < count:
            work(path, handled, handle, **options)


@pytest.mark.parametrize(("seed", "order"), [(1, "none"), (2, "none"), (3, "key"), (4, "key")])
def test_i1_i2_i4_i5_kills_and_stops_at_random_moments(
    open_topic: Open, path: Path, tmp_path: Path, seed: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ack_log, "_LOG_BYTES", 2048)  # many generations
    count, workers, kills = 300, 3, 25
    topic = open_topic()
    for number in range(count):
        topic.append(b"%d" % number, None if number % 9 == 0 else b"%d" % (number * 7 % 11), partition=0)
        if number % 3 == 2:
            topic.flush()
    topic.flush()
    keys = {record.offset: record.key for record in topic.read()}
    topic.close()
    handled, draw = Handled(tmp_path / "handled"), random.Random(seed)

    def handle(job: Job) -> bool:
        number = int(job.value or b"")
        if number % 40 == 7 and job.attempt < 3:
            os.kill(os.getpid(), signal.SIGKILL)  # a poisoned record, which kills its handler twice
        return number % 40 == 9 and job.attempt < 2

    def start() -> int:
        return fork(lambda: until_done(path, handled, handle, count, order=order))

    dead = harmed(start, draw, workers=workers, kills=kills, deadly=0.7, longest_pause_s=0.02)
    handled.check(count, dead=dead)
    if order == "key":
        handled.check_order(keys)
    with Topic.open(path, mode="r") as topic:
        info = only(topic)
    assert (info.counts, info.in_hand, info.free) == ((count, 0, 0, 0), (), 0), f"seed {seed}"
    assert max(abs(event[3]) for event in handled.events()) >= 3


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
