"""Clock worlds: machines whose clocks lie, programs that come and go on them, and the true time beside.

A world makes one topic and lives with it through processes, restarts, suspends and wrong clocks. It knows the true
time at which each segment was sealed, and checks each pass of retention against it.
"""

from __future__ import annotations

import random
from datetime import timedelta

from conftest import MANUAL, NOW, SECOND
from loglib import Retention, Topic, testing
from loglib.config.quantities import microseconds
from loglib.log.ages import TOLERANCE_US
from loglib.system.clock import Clock, Moment
from loglib.testing import MemoryFiles

HOUR = 3600 * SECOND
DAY = 24 * HOUR
PATH = "/world/topic"


class Machine(Clock):
    """The clocks of one machine: the true time, what the wall clock makes of it, and the time since the boot."""

    def __init__(self) -> None:
        self.true_us = NOW
        self.error_us = 0
        self.booted_us = NOW
        self.boots = 1

    def __call__(self) -> int:
        return self.true_us + self.error_us

    def moment(self) -> Moment:
        return Moment(self(), self.true_us - self.booted_us, self.boots.to_bytes(16, "big"))

    def restart(self, *, off_us: int = SECOND) -> None:
        self.true_us += off_us
        self.booted_us = self.true_us
        self.boots += 1


class World:
    """One topic on one machine. Each method is something that happens."""

    def __init__(self, *, age: timedelta, lies: bool = True) -> None:
        self.machine = Machine()
        self.files = MemoryFiles()
        self.lies = lies
        self.age_us = microseconds(age)
        self.lie_ends_us: int | None = None
        self.told = 0  # lies
        self.sealed: dict[int, int] = {}  # base offset of each segment: true time of its sealing
        self.sealed_in: dict[int, int] = {}  # the same: in which boot
        self.looked: dict[int, tuple[int, int]] = {}  # each boot: true times of its first and its last pass
        self.passes = self.dropped = 0
        self.topic: Topic | None = None
        self.open(retention=Retention(age=age), flush=MANUAL, segment_age=None)

    # --- what happens ------------------------------------------------------------------------------------

    def open(self, **policies: object) -> Topic:
        if self.topic is None:
            self.topic = testing.open_topic(PATH, files=self.files, clock=self.machine, **policies)  # type: ignore[arg-type]
        return self.topic

    def end_process(self) -> None:
        if self.topic is not None:
            self.topic.close()
            self.topic = None

    def append_and_roll(self) -> None:
        topic = self.open()
        base = topic.append(b"x" * 100, sync=True).offset
        topic.partition(0).roll()
        segments = topic.partition(0).segments
        assert segments[-2].base_offset == base
        self.sealed[base] = self.machine.true_us
        self.sealed_in[base] = self.machine.boots

    def retain(self) -> None:
        topic = self.open()
        explained = topic.retain(dry_run=True)
        decisions = topic.retain()
        assert [each[:5] for each in explained] == [each[:5] for each in decisions]
        for each in decisions:
            assert each.reason
            if each.base_offset in self.sealed:
                true_age = self.machine.true_us - self.sealed[each.base_offset]
                assert each.age_us is not None and each.age_us <= true_age, "an age above the true one"
                assert not each.drop or true_age > self.age_us, "dropped what the right clock would keep"
        self.passes += 1
        self.dropped += sum(each.drop for each in decisions)
        start = topic.partition(0).log_start_offset
        self.sealed = {base: sealed for base, sealed in self.sealed.items() if base >= start}
        first, _ = self.looked.get(self.machine.boots, (self.machine.true_us, 0))
        self.looked[self.machine.boots] = (first, self.machine.true_us)

    def pass_time(self, span_us: int) -> None:
        """So much true time, asleep or awake. A lie that ends meanwhile ends on time."""
        until = self.machine.true_us + span_us
        if self.lie_ends_us is not None and self.lie_ends_us <= until:
            self.lie_ends_us = None
            self.machine.error_us = 0
        self.machine.true_us = until

    def lie(self, error_us: int, *, for_us: int) -> None:
        """The wall clock is set wrong, for an hour at most; a lie that is being told may change."""
        if not self.lies:
            return
        if self.lie_ends_us is None:
            self.lie_ends_us = self.machine.true_us + min(for_us, HOUR)
        self.told += 1
        self.machine.error_us = max(error_us + self.told * 3 * TOLERANCE_US, -self.machine.true_us)  # none comes twice

    def restart(self, *, off_us: int) -> None:
        self.end_process()
        self.pass_time(off_us)
        self.machine.restart(off_us=0)

    def lose_the_file(self) -> None:
        self.end_process()
        if self.files.exists(f"{PATH}/0000/clock"):
            self.files.unlink(f"{PATH}/0000/clock")

    def step(self, random: random.Random) -> None:
        """One of all that."""
        span = random.choice([SECOND, 60 * SECOND, 10 * 60 * SECOND, HOUR // 2, HOUR, 2 * HOUR, DAY, 3 * DAY, 20 * DAY])
        match random.choice("aaarrrrttttteellxf" if self.lies else "aaarrrrttttteex"):
            case "a":
                self.append_and_roll()
            case "r":
                self.retain()
            case "t":
                self.pass_time(span + random.randrange(SECOND))
            case "e":
                self.end_process()
            case "l":
                error = random.choice([-NOW, -30 * DAY, -DAY, -HOUR, -60 * SECOND, 60 * SECOND, HOUR, DAY, 400 * DAY])
                self.lie(error, for_us=random.choice([60 * SECOND, HOUR // 2, HOUR]))
            case "x":
                self.restart(off_us=random.choice([30 * SECOND, HOUR // 2, DAY]))
            case "f":
                self.lose_the_file()

    # --- what must follow --------------------------------------------------------------------------------------

    def settle(self, span_us: int) -> None:
        """The clock is right, and a process runs for so long, with a pass every ten minutes or so."""
        self.pass_time(HOUR)
        every = max(10 * 60 * SECOND, span_us // 40)
        end = self.machine.true_us + span_us
        self.retain()
        while self.machine.true_us < end:
            self.pass_time(every)
            self.retain()

    def assert_all_due_is_dropped(self) -> None:
        """Where no clock ever lied: what was due an hour ago is gone, if its boot was seen for longer than an hour."""
        for base, sealed in self.sealed.items():
            first, last = self.looked.get(self.sealed_in[base], (0, 0))
            if last - first > HOUR:
                assert self.machine.true_us - sealed <= self.age_us + 2 * TOLERANCE_US, f"{base} should be gone"

    def assert_all_is_dropped(self) -> None:
        assert not self.sealed, "what was stamped by a wrong clock stays for ever"


def live(chance: random.Random, *, steps: int, lies: bool) -> World:
    """A world of random steps, from its beginning to its end; its checks have passed."""
    age = chance.choice([timedelta(seconds=10), timedelta(hours=1), timedelta(days=2), timedelta(days=30)])
    world = World(age=age, lies=lies)
    try:
        for _ in range(steps):
            world.step(chance)
        world.settle(HOUR + 10 * 60 * SECOND)
        if not lies:
            world.assert_all_due_is_dropped()
        world.settle(world.age_us + 2 * HOUR)
        world.assert_all_is_dropped()
    finally:
        world.end_process()
    return world
