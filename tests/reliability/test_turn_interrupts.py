"""G7: interrupts at any moment in processes that take turns: no record is lost or there twice, and the turns go on.

A call that was interrupted has appended its record or not. Each other call has appended it where it said.
"""

from __future__ import annotations

import random
import signal
from functools import partial
from pathlib import Path

import pytest
from counts import count, scale
from processes import fork, wait
from takers import PATIENCE_S, Taker, Told, judge, opened, told

from conftest import QUIET
from loglib import Topic

pytestmark = pytest.mark.reliability

PROCESSES = 3
INTERRUPTS = 120  # of each process
ACTIONS = (
    Taker.append, Taker.append, Taker.append, Taker.append_synced, Taker.append_many, Taker.append_anywhere,
    Taker.flush, Taker.roll,
)  # fmt: skip


class Alarm:
    """Raises KeyboardInterrupt in the middle of a block, after a random time."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.is_armed = False
        self.interrupts = 0
        signal.signal(signal.SIGALRM, self.ring)

    def ring(self, *_: object) -> None:
        if self.is_armed:
            self.is_armed = False
            raise KeyboardInterrupt

    def during(self, work: partial[None]) -> None:
        longest_s = self.rng.choice((0.0005, 0.005, 0.05, 0.2))  # a turn, or a writer that is opened, takes some ms
        try:
            self.is_armed = True
            signal.setitimer(signal.ITIMER_REAL, longest_s * self.rng.random() + 1e-6)
            work()
            self.is_armed = False
        except KeyboardInterrupt:
            self.interrupts += 1
        finally:
            self.is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)


def be_interrupted(path: Path, report: Told, number: int, *, interrupts: int, seed: int) -> None:
    rng = random.Random(f"{seed} {number}")
    alarm = Alarm(rng)
    with opened(path, wait=PATIENCE_S) as topic:
        taker = Taker(topic, report, number, rng)

        def work() -> None:
            for _ in range(rng.randrange(1, 30)):
                rng.choice(ACTIONS)(taker)

        for partition in topic.partitions:
            partition.append(b"-first", sync=True)
        while alarm.interrupts < interrupts and report.begun < 3500:
            alarm.during(partial(work))
    report.done = 1
    report.opened = alarm.interrupts


@pytest.mark.parametrize("seed", range(4))
def test_interrupts_in_the_middle_of_a_turn_lose_nothing_and_hold_nobody_up(seed: int, path: Path) -> None:
    partitions = 1 + seed % 3
    Topic.open(path, create=True, partitions=partitions, segment_bytes=8192, **QUIET).close()
    takers = [told() for _ in range(PROCESSES)]
    work = partial(be_interrupted, path, interrupts=scale(INTERRUPTS), seed=seed)
    children = [fork(partial(work, each, number)) for number, each in enumerate(takers)]
    assert [wait(child) for child in children] == [0] * PROCESSES, "a taker failed; its error is above"
    judge(path, takers, others=PROCESSES * partitions)
    assert not any(each.locked for each in takers)
    Topic.open(path).close()  # nobody holds anything any more
    count("G7", interrupts_in_turns=sum(each.opened for each in takers), lost=0, wrong=0)
