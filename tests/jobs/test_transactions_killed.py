"""Workers that accept in transactions and write dead letters: killed, stopped and poisoned at any moment."""

from __future__ import annotations

import collections
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from dead_letters import facts, letters
from harm import harmed
from processes import fork, wait
from shared_jobs import only, with_records

from conftest import values_of
from loglib import LogError, Reject, Topic, transaction
from loglib.jobs import ack_log
from loglib.system.clock import SYSTEM

Open = Callable[..., Topic]


def work(path: Path) -> None:
    """Handle all records: each third is rejected, and some kill their worker before."""
    dead, settled = path.parent / "dead", 0
    with Topic.open(path, mode="r") as topic, Topic.open(path.parent / "results", mode="r") as results:
        count = int(max(values_of(topic), key=lambda value: int(value or b"0")) or b"0") + 1
        while settled < count:
            with suppress(LogError), topic.share("mail", dead_letter=dead, max_attempts=1000) as share:
                for job in share.follow(timeout=0.0):
                    number = int(job.value or b"0")
                    if number % 7 == 0 and job.attempt < 3:
                        os.kill(os.getpid(), signal.SIGKILL)
                    with job:
                        if number % 3 == 0:
                            raise Reject(f"attempt {job.attempt}")
                        with transaction(f"worker-{os.getpid()}") as tx:
                            tx.append(results, job.value)
                            tx.accept(job)
            counts = only(topic).counts if "mail" in topic.shares() else (0, 0)
            settled = counts[0] + counts[1]


def chaos(open_topic: Open, path: Path, seed: int, *, count: int, kills: int) -> None:
    with_records(open_topic, count, clock=SYSTEM).close()
    open_topic(path.parent / "results", clock=SYSTEM).close()
    harmed(
        lambda: fork(lambda: work(path)), random.Random(seed), workers=3, kills=kills, deadly=0.6, longest_pause_s=0.05
    )  # fmt: skip
    with Topic.open(path, mode="r") as topic, topic.share("mail") as share:
        assert share.take(0.0) is None  # it also finishes what the last ones have left
        info = only(topic)
    with Topic.open(path.parent / "results", mode="r") as results:
        done = collections.Counter(int(value or b"0") for value in values_of(results))
    dead = collections.Counter(int(each.value or b"0") for each in letters(path.parent / "dead", clock=SYSTEM))
    assert done == dict.fromkeys((number for number in range(count) if number % 3), 1), f"seed {seed}"
    assert dead == dict.fromkeys(range(0, count, 3), 1), f"seed {seed}"
    assert (info.counts, info.in_hand, info.free) == ((sum(done.values()), sum(dead.values()), 0, 0), (), 0)


def test_i1_i8_kills_and_stops_leave_one_result_or_one_dead_letter(
    open_topic: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ack_log, "_LOG_BYTES", 1024)  # many generations
    chaos(open_topic, path, 1, count=30, kills=10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_i1_i8_many_kills_and_stops(
    open_topic: Open, path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ack_log, "_LOG_BYTES", 1024)
    chaos(open_topic, path, seed, count=200, kills=100)


def test_poisoned_record_that_always_kills_has_one_dead_letter(open_topic: Open, path: Path) -> None:
    topic = with_records(open_topic, clock=SYSTEM)
    dead = path.parent / "dead"

    def handle() -> None:
        with Topic.open(path, mode="r") as reading, reading.share("mail", max_attempts=3, dead_letter=dead) as share:
            for job in share.follow(timeout=0.0):
                if job.value == b"4":
                    os.kill(os.getpid(), signal.SIGKILL)

    ends: list[int] = []
    while not ends or ends[-1]:
        ends.append(wait(fork(handle)))
    assert ends == [-signal.SIGKILL] * 3 + [0]
    (letter,) = letters(dead, clock=SYSTEM)
    assert (letter.value, facts(letter)["attempts"]) == (b"4", "3") and "died" in facts(letter)["reason"]
    assert only(topic).counts == (9, 0, 1, 0)
