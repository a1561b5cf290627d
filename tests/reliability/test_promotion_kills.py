"""G20: a topic moves to and fro between two directories, and the source, the mirror and the promoter are killed.

In each round a writer appends to one directory and a mirror follows into the other, until both get SIGKILL. Then the
copy is promoted by processes that are killed as well, until one gets through, and the old directory becomes its mirror.
The evidence is outside of the directories: numbers in memory that the writer shares with the test.

Some rounds promote by force while the writer lives. What it acknowledges from then on may be missing, and is set aside.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest
from counts import count, scale
from mirrored import segments
from processes import fork, shared, wait

from conftest import QUIET, sound, values_of
from loglib import LogError, Topic
from loglib.copies import mirror, promote
from loglib.log import copy_role
from loglib.segment import HEADER_BYTES
from loglib.system.files import REAL

pytestmark = pytest.mark.reliability

ROUNDS = 25
LONGEST_LIFE_S = 0.08


class Told(ctypes.Structure):
    """How far the writers have come: the records are numbers from 0."""

    _fields_ = (("begun", ctypes.c_uint64), ("acknowledged", ctypes.c_uint64))


def write(path: Path, told: Told, seed: int) -> None:
    """Append numbers for ever, each to the partition of its parity; now and then begin a segment."""
    chance = random.Random(seed)
    with Topic.open(path, create=True) as topic:
        while True:
            first, many = told.begun, chance.choice([1, 1, 20])
            told.begun = first + many
            for parity in range(2):
                values = [b"%d" % number for number in range(first, first + many) if number % 2 == parity]
                topic.append_many(values, partition=parity)
            topic.flush()
            told.acknowledged = first + many
            time.sleep(0.0005)  # in a file system in memory the log would grow to gigabytes
            if chance.random() < 0.1:
                topic.partition(chance.randrange(2)).roll()


def may_be_written(path: Path) -> bool:
    found = copy_role.read(REAL, str(path))
    return (path / "topic.json").exists() and (found is None or found.role == copy_role.LEADER)


def filled(path: Path) -> dict[str, str]:
    """Digests of the segments that have batches: a new one gets to a mirror with its first batch."""
    return {name: sha256(each).hexdigest() for name, each in segments(path).items() if len(each) > HEADER_BYTES}


class World:
    """Two directories, and what is known of the records."""

    def __init__(self, places: list[Path], seed: int) -> None:
        self.places = places  # the leader first
        self.chance = random.Random(seed)
        self.told = shared(Told)
        self.sure: set[int] = set()  # acknowledged, and not lost by force
        self.kills = self.forced = self.set_aside = 0
        Topic.open(places[0], create=True, partitions=2, **QUIET).close()

    def kill_soon(self, pid: int, longest_s: float) -> int:
        time.sleep(self.chance.uniform(0, longest_s))
        os.kill(pid, signal.SIGKILL)
        self.kills += 1
        return wait(pid)

    def round(self) -> None:
        leader, copy = self.places
        mirror(leader, copy)
        first = self.told.begun
        self.told.acknowledged = first  # what a dead writer has begun may be there or not
        writer = fork(lambda: write(leader, self.told, self.chance.randrange(1 << 30)))
        follower = fork(lambda: mirror(leader, copy, follow=True))
        force = self.chance.random() < 0.25
        if force:
            self.kill_soon(follower, LONGEST_LIFE_S)
            self.promote(force=True)
            self.kill_soon(writer, 0.01)
        else:
            order = [writer, follower]
            self.chance.shuffle(order)
            for pid in order:
                self.kill_soon(pid, LONGEST_LIFE_S)
            self.promote(force=False)
        self.sure.update(range(first, self.told.acknowledged))
        found = self.found_in(copy)
        if force:
            self.forced += 1
            self.sure &= found
        assert self.sure <= found, f"lost: {sorted(self.sure - found)[:5]}"
        self.set_aside += len(mirror(copy, leader, demote=force).set_aside)
        assert filled(leader) == filled(copy), f"{sorted(filled(leader))} and {sorted(filled(copy))}, forced: {force}"
        self.places = [copy, leader]

    def promote(self, *, force: bool) -> None:
        """Promote the copy, by processes that may be killed. There are never two that may be written, but by force."""
        leader, copy = self.places
        while True:
            promoter = fork(lambda: promote(copy, force=force))
            status = self.kill_soon(promoter, 0.04) if self.chance.random() < 0.7 else wait(promoter)
            assert force or not (may_be_written(leader) and may_be_written(copy))
            if status == 0 or (status < 0 and may_be_written(copy)):  # killed when it was done
                return
            assert status == -signal.SIGKILL

    def found_in(self, path: Path) -> set[int]:
        """The numbers in the topic: each once, in order, and none that was not begun."""
        numbers: list[int] = []
        with Topic.open(path, create=True) as topic:
            for partition in topic.partitions:
                sound(partition)
                here = [int(value or b"") for value in values_of(partition)]
                assert here == sorted(set(here)) and all(each % 2 == partition.id for each in here)
                numbers += here
        assert not numbers or max(numbers) < self.told.begun
        return set(numbers)


@pytest.mark.parametrize("seed", range(2))
def test_kills_of_source_mirror_and_promoter(tmp_path: Path, seed: int) -> None:
    world = World([tmp_path / "a" / "topic", tmp_path / "b" / "topic"], seed)
    for _ in range(scale(ROUNDS)):
        world.round()
    assert world.sure
    with suppress(LogError):  # the old one is a mirror
        Topic.open(world.places[1], create=True).close()
        raise AssertionError("a mirror was opened for writing")
    count(
        "G20", promotions=scale(ROUNDS), promotion_kills=world.kills, forced_promotions=world.forced,
        files_set_aside=world.set_aside, records_acknowledged=len(world.sure), lost=0, wrong=0,
    )  # fmt: skip
