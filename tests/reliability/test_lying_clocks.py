"""G15: clocks that lie for up to an hour at a time, in one process or across several and across restarts.

Worlds of random events also know the true time. No pass of retention may drop a segment that a right clock would keep,
no age may be above the true one, and with a right clock every segment that is due goes. Then real processes run, one
after another on one topic. The wall clock of each is set wrong and right while it runs; some of them are killed.
"""

from __future__ import annotations

import random
import time
from datetime import timedelta
from pathlib import Path

import pytest
from clock_worlds import live
from counts import count, scale

from conftest import run_python, start_python
from loglib import FlushPolicy, Retention, Topic
from loglib.log import ages
from loglib.log.ages import Stamp

pytestmark = pytest.mark.reliability

SHARDS = 8
WORLDS = 600
STEPS = 80


@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_lying_clock_costs_data_and_segments_that_are_due_are_dropped(shard: int) -> None:
    worlds = passes = dropped = lies = boots = 0
    for number in range(scale(WORLDS) // SHARDS + 1):
        world = live(random.Random(f"{shard} {number}"), steps=STEPS, lies=number % 3 > 0)
        worlds += 1
        passes += world.passes
        dropped += world.dropped
        lies += world.told
        boots += world.machine.boots
    assert dropped > worlds and lies > worlds
    count("G16", worlds=worlds, boots=boots, lies=lies, passes=passes, segments_dropped=dropped, lost=0)


def without_jumps(boot: ages._Boot, stamp: Stamp) -> bool:
    """As `_Boot.add`, but a jump of the wall clock is not noticed."""
    if boot.proof is None and stamp.boottime_us - boot.anchor.boottime_us > ages.BELIEVED_AFTER_US:
        boot.proof = (boot.anchor, stamp)
        return True
    return False


@pytest.mark.parametrize(
    ("name", "mistake"),
    [("BELIEVED_AFTER_US", 0), ("BELIEVED_AFTER_US", 1_800_000_000), ("_Boot.add", without_jumps)],
    ids=["believed at once", "believed after half an hour", "no jump is seen"],
)
def test_worlds_find_a_rule_that_is_too_trusting(
    name: str, mistake: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof can fail: with a weaker rule it fails."""
    monkeypatch.setattr(f"loglib.log.ages.{name}", mistake)
    for number in range(1000):
        try:
            live(random.Random(f"trusting {number}"), steps=STEPS, lies=True)
        except AssertionError:
            count("G16", mistakes_found_out=1)
            return
    pytest.fail("no world found it")


PROCESS = """
    import random, sys, time
    from datetime import timedelta
    from loglib import FlushPolicy, Topic, testing
    from loglib.system.clock import Clock, Moment

    DAY = 24 * 3600 * 1_000_000

    class Lying(Clock):
        error_us = 0
        def __call__(self):
            return super().__call__() + self.error_us
        def moment(self):
            now = super().moment()
            return now._replace(wall_us=now.wall_us + self.error_us)

    path, seed, boot = sys.argv[1], sys.argv[2], sys.argv[3]
    chance, clock = random.Random(seed), Lying()
    if boot != "this":
        class Restarted(Lying):
            def moment(self):  # of a boot that has just begun
                return super().moment()._replace(boot_id=boot.encode().ljust(16, b"-"))
        clock = Restarted()
    with testing.open_topic(path, clock=clock) as topic:
        for number in range(40):
            clock.error_us = chance.choice([0, -400 * DAY, -DAY, DAY, 30 * DAY, 400 * DAY])
            topic.append(b"%d" % number, sync=True)
            topic.partition(0).roll()
            assert not any(each.drop for each in topic.retain())
            print("rolled", flush=True)
"""


def test_real_processes_with_wrong_clocks_drop_nothing(tmp_path: Path) -> None:
    """Their segments are seconds old, and the limit is an hour: no wall clock may make retention drop one."""
    path = tmp_path / "topic"
    policy = Retention(age=timedelta(hours=1))
    Topic.open(path, create=True, retention=policy, flush=FlushPolicy(interval=None), segment_age=None).close()
    processes = scale(12)
    kills = rolled = 0
    chance = random.Random(14)
    for number in range(processes):
        boot = "this" if number % 3 else f"boot {number}"
        if number % 4 == 1:
            process = start_python(PROCESS, path, number, boot)
            assert process.stdout is not None
            for _ in range(chance.randrange(1, 20)):
                assert process.stdout.readline() == "rolled\n"
            process.kill()
            process.communicate()
            kills += 1
        else:
            rolled += run_python(PROCESS, path, number, boot).count("rolled")
        with Topic.open(path, mode="r") as topic:
            assert topic.partition(0).log_start_offset == 0
    with Topic.open(path, mode="r") as topic:
        times = [record.timestamp for record in topic.read()]
        assert len(times) >= rolled
    with Topic.open(path) as topic:  # with the right clock, event times are right again at once
        before = time.time_ns() // 1000
        offset = topic.append(b"right", sync=True).offset
        (record,) = topic.read(offset)
        assert before <= record.timestamp <= time.time_ns() // 1000
        assert not any(each.drop for each in topic.retain())
    count("G16", processes=processes, processes_killed=kills, lost=0)
