"""G4: writers killed by SIGKILL at any moment, life after life in the same topic.

Each life is a forked child. It opens the topic, recovers what the life before it left, and works until it is killed.
Before and after each call it writes its progress into memory that it shares with the test. The log must then have all
records that were acknowledged or seen by a reader, perhaps some of the following ones without a gap, and nothing else.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from account import Account
from counts import count, scale
from described import Value, decode
from processes import ended, killed, shared
from roomy import with_room

from conftest import MANUAL, QUIET, records_of, sound
from loglib import FlushPolicy, LockedError, LogError, OffsetOutOfRangeError, Record, Retention, Topic, testing
from loglib.append.writer import Writer
from loglib.partition import Partition
from loglib.segment import HEADER_BYTES
from loglib.system.files import REAL, Files
from loglib.testing import UnsyncedFiles

pytestmark = pytest.mark.reliability

SEGMENT_BYTES = 4096  # and batches are no larger
KEPT_BYTES = 20_000
LONGEST_LIFE_S = 0.008  # a few times as long as opening takes; for half of the lives it starts after opening


# --- what a life says ------------------------------------------------------------------------------------


class Told(ctypes.Structure):
    """What a life reports of one partition; storing a number is atomic."""

    _fields_ = (
        ("recovered", ctypes.c_uint64),  # how many records it found
        ("begun", ctypes.c_uint64),  # it has begun to append records below this number,
        ("acknowledged", ctypes.c_uint64),  # and records below this one are durable
    )


class Shared(ctypes.Structure):
    """Memory that a life shares with the test, and that outlives it."""

    _fields_ = (
        ("opened", ctypes.c_uint64),
        ("mended", ctypes.c_uint64),  # whether recovery had something to do
        ("partitions", Told * 2),
    )


# --- a life ----------------------------------------------------------------------------------------------


class Work:
    """What a life does to one partition."""

    def __init__(self, topic: Topic, partition: Partition, told: Told, life: int, rng: random.Random) -> None:
        self.topic = topic
        self.partition = partition
        self.told = told
        self.life = life
        self.rng = rng
        # The last segment may be empty; the one before it is not.
        newest = list(partition.read(partition.segments[-2:][0].base_offset))[-1:]
        told.recovered = told.acknowledged = told.begun = decode(newest[0].value).number + 1 if newest else 0
        self.pending: list[tuple[int, int]] = []  # number and offset of records that are not yet acknowledged

    def append(self) -> None:
        place: dict[str, Any] = {} if len(self.topic.partitions) == 1 else {"partition": self.partition.id}
        for value in self.values(self.rng.choice([1, 5, 20])):
            self.told.begun += 1
            self.appended(self.topic.append(value, **place).offset)

    def append_synced(self) -> None:
        (value,) = self.values(1)
        self.told.begun += 1
        self.partition.append(value, key=b"k", sync=True)
        self.all_is_durable()

    def append_many(self) -> None:
        values = self.values(self.rng.choice([2, 5, 11]))
        producer = self.rng.choice([None, ("kills", self.told.begun)])
        self.told.begun += len(values)
        ranges = self.topic.append_many(values, partition=self.partition.id, producer=producer)
        self.appended(*(offset for each in ranges for offset in each.offsets))

    def flush(self) -> None:
        self.partition.flush()
        self.all_is_durable()

    def roll(self) -> None:
        self.partition.roll()

    def retain(self) -> None:
        self.partition.retain()

    def values(self, number: int) -> list[bytes]:
        """The values of this many next records."""
        start, size_bytes = self.told.begun, self.rng.choice([0, 20, 300])
        return [Value(self.partition.id, each, self.life).encode(size_bytes) for each in range(start, start + number)]

    def appended(self, *offsets: int) -> None:
        self.pending += enumerate(offsets, self.told.begun - len(offsets))

    def all_is_durable(self) -> None:
        self.told.acknowledged = self.told.begun
        self.pending.clear()

    def look(self) -> None:
        """Records that readers may see are durable as well."""
        end = self.partition.high_watermark
        while self.pending and self.pending[0][1] < end:
            self.told.acknowledged = self.pending.pop(0)[0] + 1


ACTIONS = (Work.append, Work.append, Work.append_synced, Work.append_many, Work.flush, Work.roll, Work.retain)


def live(path: Path, shared: Shared, life: int, rng: random.Random, files: Files) -> NoReturn:
    """Open the topic and work on it for ever."""
    topic = testing.open_topic(path, files=files)
    works = [Work(topic, each, shared.partitions[each.id], life, rng) for each in topic.partitions]
    shared.mended = any(each.recovery is not None and not each.recovery.clean for each in topic.partitions)
    shared.opened = 1
    while True:
        work = rng.choice(works)
        rng.choice(ACTIONS)(work)
        work.look()


# --- what must hold ----------------------------------------------------------------------------------------


def believe(account: Account, told: Told, life: int, partition: int) -> None:
    """Note what a life reported before it was killed."""
    account.recovered(told.recovered)
    account.begin((Value(partition, each, life) for each in range(told.recovered, told.begun)), life=life)
    account.promise(told.acknowledged)


def check(account: Account, partition: Partition) -> None:
    """The records are those that were appended, in order, and at least as many as promised and not dropped."""
    records, log_start, end = list(partition.read()), partition.log_start_offset, partition.high_watermark
    account.drop(account.end, done=False)  # the bytes that are left say how many records retention may drop
    account.see(records)
    assert log_start == 0 if account.first == 0 else end - log_start > KEPT_BYTES - 2 * SEGMENT_BYTES


class Lives:
    """One topic, its writers one after another, and what they have promised."""

    def __init__(self, path: Path, seed: int, *, partitions: int, files: Files, **policies: Any) -> None:
        self.path = path
        self.files = files
        self.rng = random.Random(seed)
        self.shared = shared(Shared)
        self.accounts = [Account(known_by=lambda record: decode(record.value)) for _ in range(partitions)]
        self.life = 0
        self.killed_while_opening = 0
        self.recoveries = 0
        policies = QUIET | {"retention": Retention(age=None, bytes=KEPT_BYTES), "batch_bytes": 3500} | policies
        Topic.open(path, create=True, partitions=partitions, segment_bytes=SEGMENT_BYTES, **policies).close()

    def go_on(self) -> None:
        """Run one more life, and check what it leaves."""
        self.life += 1
        self.shared.opened = 0
        rng = random.Random(self.rng.random())
        watched, works = self.rng.random() < 0.2, self.rng.random() < 0.5
        seen: list[list[Record]] = []
        with killed(lambda: live(self.path, self.shared, self.life, rng, self.files)):
            while works and not self.shared.opened and not ended():
                time.sleep(0.0002)
            time.sleep(self.rng.uniform(0, LONGEST_LIFE_S))
            if watched:
                seen = self.watch()
        if self.shared.opened:
            for number, account in enumerate(self.accounts):
                believe(account, self.shared.partitions[number], self.life, number)
            self.recoveries += self.shared.mended
        else:
            self.killed_while_opening += 1
        for account, records in zip(self.accounts, seen, strict=False):
            if records:
                account.promise(decode(records[-1].value).number + 1)
        self.check()

    def watch(self) -> list[list[Record]]:
        """Read while the writer lives."""
        with Topic.open(self.path, mode="r") as topic:
            try:
                return [list(partition.read()) for partition in topic.partitions]
            except OffsetOutOfRangeError:  # retention was faster
                return []

    def check(self) -> None:
        with Topic.open(self.path, mode="r") as topic:
            for partition, account in zip(topic.partitions, self.accounts, strict=True):
                check(account, partition)

    def end(self) -> None:
        """The last life opens the topic in the test itself; every byte must be right."""
        with testing.open_topic(self.path, files=self.files) as topic:
            for partition in topic.partitions:
                sound(partition)
        self.check()


SHARDS: list[dict[str, Any]] = [
    {"partitions": 1, "files": REAL, "flush": MANUAL},
    {"partitions": 2, "files": REAL, "flush": MANUAL},
    {"partitions": 1, "files": UnsyncedFiles(), "flush": MANUAL, "batch_records": 3},
    {"partitions": 1, "files": UnsyncedFiles(), "flush": FlushPolicy(records=7, interval=None, bytes=None)},
    {"partitions": 2, "files": REAL, "flush": FlushPolicy(records=None, interval=0.0005, bytes=None)},
    {"partitions": 2, "files": UnsyncedFiles(), "flush": FlushPolicy(records=50, interval=0.001, bytes=3000)},
    {"partitions": 1, "files": UnsyncedFiles(), "flush": MANUAL, "compression": "zlib", "batch_bytes": 900},
    {"partitions": 2, "files": UnsyncedFiles(), "flush": MANUAL, "durability": "os"},
]  # fmt: skip


@pytest.mark.parametrize("shard", range(len(SHARDS)))
def test_killed_writers_lose_nothing_acknowledged_and_leave_no_phantoms(shard: int, path: Path) -> None:
    lives = Lives(path, shard, **SHARDS[shard])
    kills = scale(630)
    with with_room(200 * (shard % 2)):
        for _ in range(kills):
            lives.go_on()
        lives.end()
    count(
        "G4", kills=kills, killed_while_opening=lives.killed_while_opening, recoveries=lives.recoveries,
        lost=0, phantoms=0, refused=0,
    )  # fmt: skip


# --- can it fail? --------------------------------------------------------------------------------------------


class OneBehind(UnsyncedFiles):
    """Hands each batch to the system only when the next one comes, as a buffer in the process would."""

    def __init__(self) -> None:
        self.held: tuple[Any, ...] | None = None

    def write_all(self, fd: int, parts: Any, position: int) -> int:
        if position < HEADER_BYTES or os.readlink(f"/proc/self/fd/{fd}").endswith("watermark"):
            return super().write_all(fd, parts, position)
        held, self.held = self.held, (fd, [b"".join(parts)], position)
        if held is not None:
            super().write_all(*held)
        return sum(map(len, parts))


def acknowledge_early(monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setattr(Writer, "flush", lambda writer: None)
    return UnsyncedFiles()


def publish_before_writing(monkeypatch: pytest.MonkeyPatch) -> Files:
    return OneBehind()


@pytest.mark.slow  # it finds the mistake by chance
@pytest.mark.parametrize("mistake", [acknowledge_early, publish_before_writing])
def test_kills_find_out_a_writer_that_promises_too_much(
    mistake: Callable[[pytest.MonkeyPatch], Files], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(path, 1, partitions=1, files=mistake(monkeypatch), flush=MANUAL)
    with pytest.raises((AssertionError, LogError)):
        for _ in range(300):
            lives.go_on()
    count("G4", mistakes_found_out=1)


# --- a lock that outlives its writer -----------------------------------------------------------------------------


def hold_through_a_fork_that_python_does_not_see(path: Path, said: int) -> None:
    """Fork a child without Python's `fork`: it keeps all files, and so the lock."""
    topic = Topic.open(path, create=True)
    topic.append(b"before", sync=True)
    fork = ctypes.CDLL(None).fork
    child = fork()
    if child:
        os.write(said, child.to_bytes(4, "little"))
    signal.pause()


def test_lock_that_a_child_of_a_killed_writer_keeps_is_said_to_be_so_and_never_stolen(path: Path) -> None:
    kills = scale(20)
    for number in range(kills):
        listening, said = os.pipe()
        with killed(partial(hold_through_a_fork_that_python_does_not_see, path, said)) as writer:
            child = int.from_bytes(os.read(listening, 4), "little")
        os.close(listening)
        os.close(said)
        try:
            with pytest.raises(LockedError, match=f"a process forked by pid {writer} .* which is gone itself"):
                Topic.open(path, create=True)
            assert len(records_of(path)) == number + 1, "reading needs no lock"
        finally:
            ended = os.pidfd_open(child)  # this process is not its parent, and so cannot use waitpid
            os.kill(child, signal.SIGKILL)
            select.select([ended], [], [], 30)
            os.close(ended)
        Topic.open(path).close()
    count("G4", kills=kills, killed_with_a_living_child=kills, lost=0, refused=0)
