"""G5: the power is cut on real file systems, again and again, and no acknowledged record is ever lost.

A writer works in its own process, on ext4 or XFS on a loop device. At some moment the file system is shut down as in a
power cut, the writer is killed, and the file system is mounted again. Only records acknowledged *before* the cut count.
The next writer continues with what the cuts have left, often before a test has read it, so cuts also come during its
recovery.

Some tests test the tests: they must find a writer that does not sync.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from account import Account, Broken
from counts import count, need, scale
from disks import DROP_JOURNAL, FLUSH_JOURNAL, Disk, disk
from processes import fork, wait
from promises import PARTITIONS, Told, key_of, value_of
from roomy import room_by_chance

from conftest import QUIET, sound, values_of
from loglib import LogError, StorageIOError, Topic, testing
from loglib.system.files import REAL, Files

pytestmark = pytest.mark.reliability

CUTS = 112  # for each kind of work on each file system
PATIENCE = 60.0  # seconds for some steps of a writer; the machine may be busy


class Scribe:
    """The writer: does one step after another on a topic and reports how far it has come."""

    def __init__(self, path: Path, life: int, seed: str, told: Told, files: Files, config: dict[str, Any]) -> None:
        self.path, self.life, self.seed, self.told, self.files, self.config = path, life, seed, told, files, config
        self.chance = random.Random(f"{seed} {life}")
        self.topic = self.open()
        for partition in self.topic.partitions:
            held = values_of(partition)
            told.begun[partition.id] = int((held[-1] or b"").split()[1]) + 1 if held else 0
        told.state[0] = 1

    def open(self) -> Topic:
        return testing.open_topic(self.path, files=self.files, **QUIET | self.config)

    def new_values(self, partition: int, number: int) -> list[bytes]:
        """The next records of the partition. From now on some of them may be found."""
        begin = self.told.begun[partition]
        self.told.begun[partition] = begin + number
        return [value_of(self.seed, partition, serial, self.life) for serial in range(begin, begin + number)]

    def acknowledge(self, partition: int) -> None:
        self.told.acknowledged[partition] = self.told.begun[partition]

    def some_partition(self) -> int:
        return self.chance.randrange(len(self.topic.partitions))

    # --- steps -----------------------------------------------------------------------------------

    def append_synced(self) -> None:
        partition = self.some_partition()
        self.topic.append(*self.new_values(partition, 1), partition=partition, sync=True)
        self.acknowledge(partition)

    def append_many(self) -> None:
        partition = self.some_partition()
        self.topic.append_many(self.new_values(partition, self.chance.randint(1, 30)), partition=partition)

    def append_batch(self) -> None:
        """Append as a producer that numbers its batches and sends each one twice."""
        partition = self.some_partition()
        values = self.new_values(partition, self.chance.randint(1, 10))
        for _ in range(2):
            self.topic.append_many(values, partition=partition, producer=("scribe", self.told.begun[partition]))

    def append_keyed(self) -> None:
        serials = [self.told.begun[partition] for partition in range(PARTITIONS)]
        values = [value for partition in range(PARTITIONS) for value in self.new_values(partition, 3)]
        keys = [key_of(partition, serials[partition] + each) for partition in range(PARTITIONS) for each in range(3)]
        self.topic.append_many(values, keys=keys)

    def flush(self) -> None:
        self.topic.flush()
        for partition in self.topic.partitions:
            self.acknowledge(partition.id)

    def write_out(self) -> None:
        """Flush a topic with durability "os", which promises nothing."""
        self.topic.flush()

    def roll(self) -> None:
        partition = self.some_partition()
        self.topic.partition(partition).roll()
        self.acknowledge(partition)

    def drop(self) -> None:
        """Retain only three segments."""
        partition = self.topic.partition(self.some_partition())
        sealed = [segment for segment in partition.segments if segment.sealed]
        if len(sealed) < 4:
            return
        base = sealed[-2].base_offset
        kept = next(iter(partition.read(base))).value or b""
        self.told.dropping[partition.id] = serial = int(kept.split()[1])
        partition._access.writer().drop_before(base)
        self.told.dropped[partition.id] = serial

    def reopen(self) -> None:
        self.topic.close()
        for partition in self.topic.partitions:
            self.acknowledge(partition.id)
        self.topic = self.open()


class Maker:
    """A writer that makes topics with one record in each, numbered like the records of one partition."""

    def __init__(self, path: Path, life: int, seed: str, told: Told, files: Files, config: dict[str, Any]) -> None:
        self.path, self.life, self.seed, self.told, self.files, self.config = path, life, seed, told, files, config
        self.chance = random.Random(f"{seed} {life}")
        told.begun[0] = len(records_of_topics(path))
        told.state[0] = 1

    def make_topic(self) -> None:
        serial = self.told.begun[0]
        self.told.begun[0] = serial + 1
        partitions = {"partitions": 1 + serial % 3}
        with testing.open_topic(
            self.path / f"{serial:06d}", files=self.files, **QUIET | self.config | partitions
        ) as topic:
            topic.append(value_of(self.seed, 0, serial, self.life), sync=True)
            self.told.acknowledged[0] = serial + 1


def records_of_topics(path: Path) -> list[bytes | None]:
    """Recover each topic in the directory; returns their records up to the first topic that is missing or empty."""
    found: list[bytes | None] = []
    while (topic_path := path / f"{len(found):06d}").exists():
        with Topic.open(topic_path, create=True) as topic:
            values = values_of(topic)
        if not values:
            break
        found += values
    return found


@dataclass(frozen=True)
class Work:
    """A topic's policies, and the steps from which its writer chooses."""

    steps: tuple[Callable[[Any], None], ...]
    config: dict[str, Any] = field(default_factory=dict)
    writer: type[Scribe] | type[Maker] = Scribe
    # A log that has grown to this many bytes is replaced by a new one: reading it takes longer after each cut.
    largest: int = 1 << 20
    longest_life: int = 25  # in steps


WORK = {
    "single-records": Work((Scribe.append_synced,)),
    "batches": Work((Scribe.append_many, Scribe.append_many, Scribe.flush)),
    "rolls": Work(
        (Scribe.append_synced, Scribe.append_many, Scribe.flush, Scribe.roll), {"segment_bytes": 4096},
    ),
    "retention": Work(
        (Scribe.append_many, Scribe.flush, Scribe.roll, Scribe.drop), {"segment_bytes": 4096, "partitions": 2},
    ),
    "keys": Work((Scribe.append_keyed, Scribe.append_keyed, Scribe.flush), {"partitions": PARTITIONS}),
    "producers": Work((Scribe.append_batch, Scribe.append_batch, Scribe.flush), {"segment_bytes": 16384}),
    "reopening": Work((Scribe.append_many, Scribe.append_synced, Scribe.reopen), {"compression": "zlib"}),
    "unsynced": Work(
        (Scribe.append_many, Scribe.write_out, Scribe.write_out, Scribe.roll),
        {"durability": "os", "segment_bytes": 32768},
    ),
    "making-topics": Work((Maker.make_topic,), {"segment_bytes": 4096}, writer=Maker, largest=3_000, longest_life=6),
}  # fmt: skip


class PowerCuts:
    """Writers, one after another, each of which ends in a power cut."""

    def __init__(self, disk: Disk, work: Work, *, seed: str, files: Files = REAL) -> None:
        self.disk, self.work, self.seed, self.files = disk, work, seed, files
        self.chance = random.Random(seed)
        self.told = Told()
        self.cuts = 0
        self.acknowledged = 0
        self.mended = 0  # partitions in which recovery had something to do
        self.topics = 0
        self.begin_topic()

    def begin_topic(self) -> None:
        self.topics += 1
        self.path = self.disk.point / f"topic-{self.topics}"
        self.topic_seed = f"{self.seed} {self.topics}"
        self.accounts = [Account() for _ in range(self.work.config.get("partitions", 1))]

    def run(self, cuts: int) -> None:
        """Let writers live and die; `Broken` if a promise to one of them was broken."""
        for _ in range(cuts):
            try:
                self.one_life()
                if self.chance.random() < 0.7:
                    self.look()
            except Broken as broken:
                where = f"seed {self.seed!r}, cut {self.cuts} on {self.disk.point}"
                raise Broken(broken.kind, f"{broken} ({where})") from broken
        self.look()

    def one_life(self) -> None:
        self.cuts += 1
        self.told.clear()
        errors, to_errors = os.pipe()
        child = fork(lambda: self.be_the_writer(to_errors))
        os.close(to_errors)
        try:
            self.wait_a_while(child)
            self.told.state[2] = 1
            acknowledged = list(self.told.acknowledged)  # before the cut: later acknowledgements may be false
            dropped = list(self.told.dropped)
            self.disk.cut_power(self.chance.choice((DROP_JOURNAL, DROP_JOURNAL, FLUSH_JOURNAL)))
        finally:
            os.kill(child, signal.SIGKILL)
            wait(child)
            with open(errors, encoding="utf-8") as stream:
                complaint = stream.read()
        if complaint:
            raise Broken("refused", complaint)
        self.disk.remount()
        for number, account in enumerate(self.accounts):
            self.acknowledged += max(0, acknowledged[number] - account.promised())
            # It has found what was promised to the lives before it, or more.
            serials = range(account.promised(), self.told.begun[number])
            values = (value_of(self.topic_seed, number, serial, self.cuts) for serial in serials)
            account.begin(values, serial=serials.start, life=self.cuts)
            account.promise(acknowledged[number])
            account.drop(self.told.dropping[number], done=False)
            account.drop(dropped[number])

    def wait_a_while(self, child: int) -> None:
        """Wait until the writer has done some steps, or for a moment in which it opens and recovers."""
        if self.chance.random() < 0.3:
            time.sleep(self.chance.uniform(0, 0.012))
            return
        steps = self.chance.randint(0, self.work.longest_life)
        deadline = time.monotonic() + PATIENCE
        while not self.told.state[0] or self.told.state[1] < steps:
            time.sleep(0.0003)
            assert time.monotonic() < deadline, "the writer hangs"
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return  # the complaint says why
        time.sleep(self.chance.uniform(0, 0.002))

    def be_the_writer(self, to_errors: int) -> None:
        """Live until the end. Complain of an error before the cut, and of an undocumented error after it."""
        try:
            if self.chance.random() < 0.5:
                threading.Thread(target=_write_back, args=(self.disk.point,), daemon=True).start()
            kind = self.work.writer
            writer = kind(self.path, self.cuts, self.topic_seed, self.told, self.files, self.work.config)
            while True:
                writer.chance.choice(self.work.steps)(writer)
                self.told.state[1] += 1
        except BaseException as error:
            if not self.told.state[2] or not isinstance(error, LogError | OSError):
                os.write(to_errors, traceback.format_exc().encode())
        os._exit(0)  # close nothing: the machine is dead

    def look(self) -> None:
        """Read what is there now, before and after recovery, and judge it."""
        try:
            seen, found = self.topics_made() if self.work.writer is Maker else self.topic_written()
        except LogError as error:
            raise Broken("refused", f"{type(error).__name__}: {error}") from error
        for account, values in zip(self.accounts, found, strict=True):
            account.settle(values)
        for before, after in zip(seen, found, strict=True):
            if before != after[: len(before)]:
                raise Broken("phantoms", f"a reader saw what recovery has cut: {before[len(after) - 1 :]}")
        if sum(len(value or b"") for values in found for value in values) > self.work.largest:
            shutil.rmtree(self.path)
            self.begin_topic()

    def topic_written(self) -> tuple[list[list[bytes | None]], list[list[bytes | None]]]:
        """The records that a reader finds in each partition, and those after recovery."""
        nothing: list[list[bytes | None]] = [[] for _ in self.accounts]
        if not (self.path / "topic.json").exists():
            return nothing, nothing
        seen = nothing
        if self.work.config.get("durability") != "os":  # with "os", readers see records that a power cut may take
            with Topic.open(self.path, mode="r") as topic:
                seen = [values_of(partition) for partition in topic.partitions]
        with Topic.open(self.path, create=True) as topic:
            found = [values_of(partition) for partition in topic.partitions]
            for partition in topic.partitions:
                sound(partition)
                self.mended += not (partition.recovery is None or partition.recovery.clean)
        return seen, found

    def topics_made(self) -> tuple[list[list[bytes | None]], list[list[bytes | None]]]:
        found = records_of_topics(self.path)
        beyond = self.path / f"{len(found) + 1:06d}"
        if beyond.exists():
            raise Broken("lost", f"a topic or its record: {beyond} exists, the one before it does not")
        return [[]], [found]


def _write_back(point: Path) -> None:
    """Let the kernel write in between, as it does by itself after seconds: then a cut leaves parts of the new data."""
    libc = ctypes.CDLL(None)
    with suppress(OSError):  # the power may be gone already
        directory = os.open(point, os.O_RDONLY)
        while True:
            libc.syncfs(directory)
            time.sleep(0.001)


def need_power_cuts(tested: Disk) -> None:
    try:
        tested.cut_power()
    except OSError as error:
        need(False, f"the ioctl that shuts a file system down ({error})")
    tested.remount()


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("work", WORK)
def test_nothing_acknowledged_is_lost_in_a_power_cut(tmp_path: Path, kind: str, work: str) -> None:
    with disk(tmp_path, kind) as tested:
        need_power_cuts(tested)
        lives = PowerCuts(tested, WORK[work], seed=f"{kind} {work}")
        with room_by_chance(f"{kind} {work}"):
            lives.run(scale(CUTS))
        assert lives.acknowledged > lives.cuts, "too little was acknowledged for the test to mean anything"
    count(
        "G5", lost=0, phantoms=0, refused=0, recoveries=lives.mended, records_acknowledged=lives.acknowledged,
        **{f"cuts_on_{kind}": lives.cuts},
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_reader_on_a_disk_that_is_gone_says_so(tmp_path: Path, kind: str) -> None:
    with disk(tmp_path, kind) as tested:
        need_power_cuts(tested)
        with Topic.open(tested.point / "topic", create=True, segment_bytes=4096, **QUIET) as topic:
            for _ in range(10):
                topic.append(bytes(3000), sync=True)
        with Topic.open(tested.point / "topic", mode="r") as topic:
            reading = iter(topic.read())
            next(reading)
            tested.cut_power()
            for look in (lambda: list(reading), lambda: list(topic.read()), lambda: next(iter(topic.follow("begin")))):
                with pytest.raises(StorageIOError, match="Input/output error"):  # and not the end of the log
                    look()
    count("G6", refusals=3)


class NeverSynced(Files):
    """A mistake that the tests must find: the writer acknowledges data that the disk may not have."""

    def datasync(self, fd: int) -> None:
        pass


class OftenSynced(Files):
    """The same mistake, made only sometimes."""

    def __init__(self) -> None:
        self.chance = random.Random(0)

    def datasync(self, fd: int) -> None:
        if self.chance.random() < 0.7:
            super().datasync(fd)


@pytest.mark.slow  # it finds the mistake by chance
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("mistake", [NeverSynced, OftenSynced])
def test_writer_that_does_not_sync_is_found_out(tmp_path: Path, kind: str, mistake: type[Files]) -> None:
    with disk(tmp_path, kind) as tested:
        need_power_cuts(tested)
        lives = PowerCuts(tested, WORK["single-records"], seed=f"{kind} {mistake.__name__}", files=mistake())
        with pytest.raises(Broken, match="lost|refused"):
            lives.run(500)
    count("G5", mistakes_found_out=1)
