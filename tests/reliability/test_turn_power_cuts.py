"""G5: the power is cut while processes take turns at the partitions of a topic, on real file systems.

Several processes append, and at some moment the file system is shut down as in a power cut. They are killed, and it is
mounted again. What was durable for one of them *before* the cut is in the log, where its append said, however many
turns were between its append and the sync. The next processes continue with what the cut has left.
"""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from counts import count, scale
from disks import DROP_JOURNAL, FLUSH_JOURNAL, Disk, disk
from processes import fork, wait
from takers import MIXED, MOST, PATIENCE_S, SYNCED, Action, Taker, Told, Wrong, judge, take_turns, told, wait_until

from conftest import QUIET
from loglib import FlushPolicy, LogError, Record, Topic
from loglib.testing import UnsyncedFiles

pytestmark = pytest.mark.reliability

CUTS = 48  # for each kind of work on each file system
CUTS_OF_A_TOPIC = 12
LONGEST_LIFE = 120  # in calls
WORKS: dict[str, tuple[Action, ...]] = {"synced": SYNCED, "mixed": MIXED, "rolls": (*MIXED, Taker.roll)}
FLUSHES = (QUIET["flush"], FlushPolicy(records=None, interval=0.001, bytes=None))


class Lives:
    """A topic on a disk, and the processes that take turns until a power cut ends them all."""

    def __init__(self, disk: Disk, actions: tuple[Action, ...], seed: str, files: Any = None) -> None:
        self.disk = disk
        self.actions = actions
        self.files = files
        self.rng = random.Random(seed)
        self.takers: list[Told] = []
        self.power = told()  # it is `over` when the power is cut: from then on errors are expected
        self.path = disk.point / seed.replace(" ", "-")
        partitions = self.rng.choice((1, 1, 2, 4))
        self.processes = self.rng.choice((2, 3, 5))
        policies = QUIET | {"flush": self.rng.choice(FLUSHES)}
        Topic.open(self.path, create=True, partitions=partitions, segment_bytes=16384, **policies).close()
        os.sync()  # the topic itself is there before the first cut

    def live_and_die(self) -> None:
        """Start processes, let them take turns, cut the power, and judge what is there afterwards."""
        now = [told() for _ in range(self.processes)]
        children = [fork(partial(self.be_a_taker, each, len(self.takers) + nth)) for nth, each in enumerate(now)]
        try:
            if self.rng.random() < 0.8:  # else the cut comes while they open and recover
                wait_until(lambda: all(each.opened for each in now), "the opening of the topic")
                calls = self.rng.randrange(LONGEST_LIFE)
                wait_until(lambda: sum(each.calls for each in now) >= calls or full(now), "a number of calls")
            time.sleep(self.rng.uniform(0, 0.01))
            before = [(list(each.durable), each.done) for each in now]  # what is said after the cut may be false
            self.power.over = 1
            self.disk.cut_power(self.rng.choice((DROP_JOURNAL, DROP_JOURNAL, FLUSH_JOURNAL)))
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
            ends = [wait(child) for child in children]
        assert set(ends) <= {0, -signal.SIGKILL}, "a process failed before the cut; its error is above"
        self.disk.remount()
        self.power.over = 0
        for each, (durable, done) in zip(now, before, strict=True):
            each.durable[:], each.done = durable, done
        self.takers += now
        seen = self.read()  # as the mark on the disk says, which a cut may set back
        Topic.open(self.path).close()
        for visible, found in zip(seen, self.read(), strict=True):
            if visible != found[: len(visible)]:
                raise Wrong("a reader saw what recovery has cut")
        judge(self.path, self.takers)

    def read(self) -> list[list[Record]]:
        with Topic.open(self.path, mode="r") as topic:
            return [list(partition.read()) for partition in topic.partitions]

    def be_a_taker(self, mine: Told, number: int) -> None:
        try:
            take_turns(
                self.path, mine, number, actions=self.actions, files=self.files, seed=self.rng.getrandbits(32),
                wait=PATIENCE_S,
            )  # fmt: skip
        except (LogError, OSError):
            if not self.power.over:
                raise


def full(takers: list[Told]) -> bool:
    return any(each.done or each.begun >= MOST - 100 for each in takers)


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_power_cuts_between_turns_lose_nothing_that_was_durable(kind: str, work: str, tmp_path: Path) -> None:
    cuts = topics = records = 0
    with disk(tmp_path, kind) as tested:
        while cuts < scale(CUTS):
            lives = Lives(tested, WORKS[work], f"{work} {topics}")
            for _ in range(min(CUTS_OF_A_TOPIC, scale(CUTS) - cuts)):
                lives.live_and_die()
                cuts += 1
            topics += 1
            records += judge(lives.path, lives.takers)
    count("G5", turn_cuts=cuts, turn_cut_records=records, lost=0)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_processes_that_do_not_sync_are_found_out(kind: str, tmp_path: Path) -> None:
    with disk(tmp_path, kind) as tested, pytest.raises((Wrong, LogError)):
        for number in range(20):
            lives = Lives(tested, SYNCED, f"unsynced {number}", files=UnsyncedFiles())
            for _ in range(4):
                lives.live_and_die()
    count("G5", mistakes_found_out=1)
