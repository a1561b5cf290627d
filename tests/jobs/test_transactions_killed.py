"""Workers that accept in transactions and write dead letters: killed, stopped and poisoned at any moment."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from dead_letters import facts, letters
from job_chaos import transactions_harmed
from processes import fork, wait
from shared_jobs import only, with_records

from loglib import Topic
from loglib.system.clock import SYSTEM

Open = Callable[..., Topic]


def test_i1_i8_kills_and_stops_leave_one_result_or_one_dead_letter(path: Path) -> None:
    transactions_harmed(path, 1, count=30, kills=10)


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
