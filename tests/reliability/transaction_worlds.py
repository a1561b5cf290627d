"""The world of programs with transactions: two topics on a disk that records, the calls, and the processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from crash_worlds import NOW, Recorder, Workload

from loglib import Group, LogError, Topic, testing, transaction
from loglib.append import section_writer
from loglib.append.section_writer import SectionWriter
from loglib.groups import membership
from loglib.testing import CrashFS, Image, MemoryFiles, Mode
from loglib.transactions import staging, store
from loglib.transactions import transaction as transaction_module

PARTITIONS = {"orders": 2, "bills": 1}
PLACES = [(name, number) for name, count in PARTITIONS.items() for number in range(count)]
STORE = "/data/.transactions"
APP = "etl"

Place = tuple[str, int]  # topic and partition
Rows = dict[Place, list[tuple[int, bytes]]]  # offset and value


class Tx(NamedTuple):
    """One transaction of the program."""

    version: int
    values: Mapping[Place, list[bytes]]
    commits: bool  # the group's positions, too
    begun: int  # the instant


class Native(NamedTuple):
    """One native record of the program."""

    value: bytes
    begun: int
    offset: int  # -1 if its append has not returned


class Fuse(Recorder):
    """A recording disk on which the process may die at an operation, and whose random bytes are new in each process."""

    process = 0
    left: int | None = None  # operations until it dies

    def random_bytes(self, count: int) -> bytes:
        return bytes(each ^ (self.process & 255) for each in super().random_bytes(count))

    def _changed(self, name: str, path: str, *facts: Any, **more: Any) -> None:
        super()._changed(name, path, *facts, **more)
        if self.left is not None:
            self.left -= 1
            if self.left <= 0:
                raise testing.Killed(name, path)


class World:
    """The topics on a recording disk, and what was done to them."""

    def __init__(self, seed: int, *, disk: type[Fuse] = Fuse) -> None:
        self.choose = Random(seed)
        self.durability = self.choose.choice(("disk", "disk", "os"))
        self.mode: Mode = self.choose.choice(("strict", "linux"))
        self.disk = disk
        self.fs = disk(_image(self.durability))
        self.serial = 0
        self.txs: list[Tx] = []
        self.returned: list[int | None] = []  # of each transaction: the instant
        self.natives: dict[Place, list[Native]] = {place: [] for place in PLACES}
        self.promised: dict[Place, list[tuple[int, int]]] = {place: [(0, 0)] for place in PLACES}
        self.gone: dict[bytes, int] = {}  # native records that a kill has taken; the instant
        self.attached = 0  # pieces that became segments
        self.group: Group | None = None
        self.with_group = self.choose.random() < 0.5
        self.open()

    @property
    def now(self) -> int:
        return len(self.fs.operations)

    def open(self) -> None:
        self.fs.process += 1
        new_process()
        self.topics = open_topics(self.fs)
        if self.with_group:
            self.group = join(self.topics["orders"], f"m{self.fs.process}")

    def value(self, kind: str) -> bytes:
        self.serial += 1
        return b"%s%d|" % (kind.encode(), self.serial) + b"." * self.choose.choice((0, 30, 300))

    def native(self, place: Place, *, sync: bool = False) -> None:
        value = self.value("n")
        self.natives[place].append(Native(value, self.now, -1))
        offset = self.topics[place[0]].append(value, partition=place[1], sync=sync).offset
        self.natives[place][-1] = self.natives[place][-1]._replace(offset=offset)
        if sync:
            self.promise(place)

    def promise(self, *places: Place, power: bool = False) -> None:
        """All native records of these partitions are safe from now on."""
        for place in places:
            if power or self.durability == "disk":
                self.promised[place].append((self.now, len(self.natives[place])))

    def transact(self, tx: Tx) -> None:
        """Commit the transaction. A repetition is the same."""
        repeat(self.topics, tx, self.group)
        self.returned[tx.version] = self.now

    def kill(self) -> None:
        """Kill the process, and begin another one."""
        self.fs.left = None
        self.fs.kill()
        close(self.topics, self.group)
        self.group = None
        self.open()
        rows = read(self.topics)
        for place, natives in self.natives.items():
            there = {value for _, value in rows[place]}
            for each in natives:
                if each.value not in there:
                    self.gone.setdefault(each.value, self.now)
            self.promised[place].append((self.now, len(natives)))


def draw(world: World) -> Tx:
    """A transaction, which is noted as begun."""
    places = world.choose.sample(PLACES, world.choose.choice((1, 2, 3, 3)))
    count = world.choose.choice((1, 1, 2, 5))
    version = len(world.txs)
    values = {place: [world.value(f"t{version}-") for _ in range(count)] for place in places}
    tx = Tx(version, values, world.group is not None and world.choose.random() < 0.7, world.now)
    world.txs.append(tx)
    world.returned.append(None)
    return tx


def commit(world: World) -> None:
    world.transact(draw(world))


def commit_staged(world: World) -> None:
    with mock.patch.object(staging, "_SMALL_BYTES", 0):
        world.transact(draw(world))


def die(world: World) -> None:
    """Die in the middle of a transaction, and repeat it."""
    tx = draw(world)
    with mock.patch.object(staging, "_SMALL_BYTES", world.choose.choice((0, 1 << 20))):
        world.fs.left = world.choose.randrange(1, 60)
        with suppress(testing.Killed):
            world.transact(tx)
        world.kill()
        world.transact(tx)


def append(world: World) -> None:
    for _ in range(world.choose.choice((1, 3))):
        world.native(world.choose.choice(PLACES), sync=world.choose.random() < 0.3)


def flush(world: World) -> None:
    for topic in world.topics.values():
        topic.flush()
    world.promise(*PLACES)


def reopen(world: World) -> None:
    if world.group is not None:
        world.group.close()
    for topic in world.topics.values():
        topic.close()
    world.group = None
    world.promise(*PLACES, power=True)
    world.open()


CALLS = {"commit": commit, "staged": commit_staged, "die": die, "append": append, "flush": flush, "reopen": reopen}
WEIGHTS = [4, 2, 1, 3, 1, 1]


def new_process() -> None:
    transaction_module._owner.forget()  # its name as an owner


def open_topics(files: CrashFS, mode: str = "a") -> dict[str, Topic]:
    return {
        name: testing.open_topic(f"/data/{name}", mode=mode, files=files, clock=fixed_clock)  # type: ignore[arg-type]
        for name in PARTITIONS
    }


def join(topic: Topic, member: str) -> Group:
    group = topic.group("etl", member=member, commit="manual")
    group.poll(max_records=1)
    return group


def repeat(topics: dict[str, Topic], tx: Tx, group: Group | None) -> bool:
    """Commit the transaction, perhaps again. Whether it was committed before."""
    with transaction(APP, version=tx.version) as made:
        for (name, number), values in tx.values.items():
            for value in values:
                made.append(topics[name], value, partition=number)
        if tx.commits and group is not None:
            made.commit(group, dict.fromkeys(group.assignment, 0), meta=str(tx.version))
    return made.repeated


def close(topics: dict[str, Topic], group: Group | None = None) -> None:
    """Close what belongs to a process that is gone."""
    if group is not None:
        group._abandon_in_child(os.getpid())
    for topic in topics.values():
        with suppress(LogError, OSError):
            topic.close()


def read(topics: dict[str, Topic]) -> Rows:
    return {
        (name, number): [(record.offset, record.value or b"") for record in topics[name].partition(number).read()]
        for name, number in PLACES
    }


def fixed_clock() -> int:
    return NOW


@contextmanager
def small(world: World) -> Iterator[None]:
    """Sections of several pieces, with native records between them; few entries between two checkpoints."""
    append_section, attach_section = SectionWriter.append_section, SectionWriter.attach_section
    end_section = SectionWriter.end_section

    def place_of(writer: SectionWriter) -> Place | None:
        """The partition whose writer it is, if the program goes on and may append there."""
        of_program = [each for topic in world.topics.values() for each in topic._handles.writers]
        name, number = writer.directory.split("/")[-2:]
        return (name, int(number)) if world.fs.left is None and writer in of_program else None

    def appended(writer: SectionWriter, batches: Any) -> None:
        append_section(writer, batches)
        go_between(writer)

    def attached(writer: SectionWriter, path: str, batches: Any) -> bool:
        done = attach_section(writer, path, batches)
        world.attached += done
        go_between(writer)
        return done

    def go_between(writer: SectionWriter) -> None:
        place = place_of(writer)
        if place is not None and world.choose.random() < 0.3:
            world.native(place, sync=world.choose.random() < 0.5)

    def ended(writer: SectionWriter) -> None:
        end_section(writer)
        place = place_of(writer)
        if place is not None:
            world.promise(place, power=True)
            if world.choose.random() < 0.3:
                world.native(place, sync=world.choose.random() < 0.5)

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(SectionWriter, "append_section", appended))
        patched.enter_context(mock.patch.object(SectionWriter, "attach_section", attached))
        patched.enter_context(mock.patch.object(SectionWriter, "end_section", ended))
        with steady(world.choose):
            yield


@contextmanager
def steady(choose: Random) -> Iterator[None]:
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(section_writer, "_PIECE_BYTES", 700))
        patched.enter_context(mock.patch.object(staging, "_LARGE_BYTES", 400))
        patched.enter_context(mock.patch.object(store, "CHECKPOINT_EVERY", 3))
        patched.enter_context(mock.patch.object(membership, "_LOOK_S", 0.0))
        patched.enter_context(mock.patch.object(membership, "_LOOKS_S", ()))
        patched.enter_context(mock.patch.object(os, "urandom", choose.randbytes))
        yield


def _image(durability: str) -> Image:
    """A disk with both topics; everything is synced."""
    files = MemoryFiles()
    for name, partitions in PARTITIONS.items():
        config = Workload((), durability, partitions=partitions).config()
        policies = {key: getattr(config, key) for key in ("flush", "retention", "segment_age", "durability")}
        testing.open_topic(
            f"/data/{name}", files=files, clock=fixed_clock, partitions=partitions, segment_bytes=4096, batch_bytes=500,
            **policies,
        ).close()  # fmt: skip
    return Image.of(files.tree())
