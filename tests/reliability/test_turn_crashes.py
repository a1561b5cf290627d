"""G1, turns: after any power cut the log has all that any of the processes was promised, at its place.

Several topics are open on one `CrashFS`, as in several processes, and take turns. During a sync of one, others append,
sync, roll and read: a process gives a partition up before its own sync has returned. Some are killed. The power is cut
at every instant. Afterwards each record that a call with sync=True or a flush has promised, or that a reader has seen,
is there, once, and where its append said; and nothing is there that nobody has appended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import counts
import pytest
from crash_engine import _unlogged
from crash_worlds import NOW, PATH
from roomy import room_by_chance

from conftest import QUIET, sound
from loglib import LockedError, LogError, testing
from loglib.append.turn_writer import TurnWriter
from loglib.append.writer import Writer
from loglib.testing import CrashFS, CrashState

pytestmark = pytest.mark.reliability

SHARDS = 4
STATES = 3_000  # per shard
PARTITIONS = 2
PROCESSES = 3
STEPS = 14


class Disk(CrashFS):
    """Something may happen before each sync."""

    meanwhile: Callable[[], object] | None = None

    def datasync(self, fd: int) -> None:
        if self.meanwhile is not None:
            self.meanwhile()
        super().datasync(fd)


class Nobody:
    """Instead of the thread that gives partitions up: the world does it, when it wants to."""

    def watch_turns(self, pause_s: float) -> None:
        """Nothing is watched."""


class Process:
    """One process's topic, and its records that nothing has promised yet."""

    def __init__(self, world: World) -> None:
        self.topic = testing.open_topic(
            PATH, files=world.disk, clock=lambda: NOW, shared=True, wait=0, background=False, create=False
        )
        handles = self.topic._handles
        handles.keeper, turns = Nobody(), handles.turns
        assert turns is not None
        turns.look = lambda *, is_idle: True  # type: ignore[method-assign]
        turns.ends_with_flush = lambda: world.choose.random() < 0.6  # type: ignore[method-assign]
        self.pending: list[tuple[int, int, bytes]] = []
        self.busy = False  # in the middle of a call

    def kill(self) -> None:
        """Close the files, and nothing more, as the system does."""
        for writer in self.topic._handles.writers:
            writer.abandon_in_child(0)
        if self.topic._handles.turns is not None:
            self.topic._handles.turns._abandon(0)
        self.topic._handles.closed = LogError("killed")  # type: ignore[assignment]


class World:
    """A disk, the processes, and what they were promised."""

    def __init__(self, seed: object, *, durability: str) -> None:
        self.choose = Random(f"turns {seed}")
        self.durability = durability
        self.disk = Disk()
        policies = QUIET | {"durability": durability, "segment_bytes": self.choose.choice((4096, 1 << 20))}
        testing.open_topic(PATH, files=self.disk, partitions=PARTITIONS, clock=lambda: NOW, **policies).close()
        self.since = len(self.disk.operations)
        self.appended: set[bytes] = set()
        self.promised: list[tuple[int, int, int, bytes]] = []  # operations, partition, offset, value
        self.recovered: dict[tuple[tuple[str, bytes], ...], dict[tuple[int, int], bytes]] = {}
        self.depth = 0
        self.processes = [Process(self) for _ in range(PROCESSES)]
        self.disk.meanwhile = self.others_go_on

    def step(self) -> None:
        """One call of a process that is not in the middle of another one."""
        free = [each for each in self.processes if not each.busy]
        if not free:
            return
        process = self.choose.choice(free)
        steps = (self.append, self.append, self.append, self.append_synced, self.append_synced, self.append_numbered,
                 self.flush, self.give_up, self.give_up, self.roll, self.read, self.kill)  # fmt: skip
        process.busy = True
        try:
            self.choose.choice(steps)(process)
        except LockedError:  # then the threads of the others give up what they have
            for other in self.processes:
                if not other.busy:
                    self.give_up(other)
        finally:
            process.busy = False

    def others_go_on(self) -> None:
        """During a sync."""
        if self.depth < 2 and self.choose.random() < 0.6:
            self.depth += 1
            try:
                for _ in range(self.choose.randrange(1, 3)):
                    self.step()
            finally:
                self.depth -= 1

    # --- calls --------------------------------------------------------------------------------------

    def append(self, process: Process, *, sync: bool = False, **options: Any) -> None:
        value = b"%d " % len(self.appended) + bytes(self.choose.choice((0, 10, 700, 1500)))
        self.appended.add(value)
        partition = self.choose.randrange(PARTITIONS)
        at = process.topic.append(value, partition=partition, sync=sync, **options)
        process.pending.append((at.partition, at.offset, value))
        if sync:
            self.promise(process, at.partition, at.offset)

    def append_synced(self, process: Process) -> None:
        self.append(process, sync=True)

    def append_numbered(self, process: Process) -> None:
        self.append(process, sync=self.choose.random() < 0.5, producer=("p", len(self.appended)))

    def flush(self, process: Process) -> None:
        before = list(process.pending)
        process.topic.flush()
        for partition, offset, _ in before:
            self.promise(process, partition, offset)

    def give_up(self, process: Process) -> None:
        process.topic._handles.look()

    def roll(self, process: Process) -> None:
        process.topic.partition(self.choose.randrange(PARTITIONS)).roll()

    def read(self, _: Process) -> None:
        """What a reader sees is durable, whoever has appended it."""
        with testing.open_topic(PATH, files=self.disk, mode="r", clock=lambda: NOW) as topic:
            for record in topic.read():
                if self.durability == "disk":
                    self.note(record.partition, record.offset, record.value or b"")

    def kill(self, process: Process) -> None:
        """Kill it, and start another one. What it was not promised may be lost."""
        if self.choose.random() < 0.3:
            process.kill()
            self.processes[self.processes.index(process)] = Process(self)

    def promise(self, process: Process, partition: int, offset: int) -> None:
        """All of the process's records in the partition up to this offset are promised."""
        for each in [each for each in process.pending if each[0] == partition and each[1] <= offset]:
            process.pending.remove(each)
            self.note(*each)

    def note(self, partition: int, offset: int, value: bytes) -> None:
        if all(each[1:] != (partition, offset, value) for each in self.promised):
            self.promised.append((len(self.disk.operations), partition, offset, value))

    # --- the judge ----------------------------------------------------------------------------------

    def states(self) -> Iterator[CrashState]:
        return self.disk.crash_states(seed=self.choose.randrange(1 << 30), random=3, since=self.since)

    def judge(self, state: CrashState) -> None:
        """What is there after recovery must be what was promised. Equal disks are recovered once."""
        disk = tuple(each for each in state.image.tree().items() if not each[0].endswith("/lock"))
        if disk not in self.recovered:
            self.recovered[disk] = self.recover(state)
        found = self.recovered[disk]
        if self.durability == "disk" or state.whole:
            for at, partition, offset, value in self.promised:
                if at <= state.at:
                    assert found.get((partition, offset)) == value, f"{partition, offset} is lost: {value[:20]!r}"

    def recover(self, state: CrashState) -> dict[tuple[int, int], bytes]:
        """Recover, and append once more; returns all records by their places."""
        with testing.open_topic(PATH, files=state.files, clock=lambda: NOW, shared=True, background=False) as topic:
            for number in range(PARTITIONS):
                topic.append(b"later", partition=number, sync=True)
            found = {(record.partition, record.offset): record.value or b"" for record in topic.read()}
            for partition in topic.partitions:
                sound(partition)
        values = [value for value in found.values() if value != b"later"]
        assert len(values) == len(set(values)), "twice"
        assert set(values) <= self.appended, "a phantom"
        return found

    def close(self) -> None:
        self.disk.meanwhile = None
        for process in self.processes:
            process.kill()


@contextmanager
def world_of(seed: object, *, durability: str = "disk") -> Iterator[World]:
    """A world in which the steps were taken."""
    world = World(seed, durability=durability)
    try:
        for _ in range(STEPS):
            world.step()
        yield world
    finally:
        world.close()


def run(seed: object, *, durability: str = "disk") -> int:
    """Take the steps, and judge every state; returns their number."""
    states = 0
    with room_by_chance(seed), world_of(seed, durability=durability) as world:
        for state in world.states():
            try:
                world.judge(state)
            except Exception as error:
                error.add_note(f"seed {seed!r}, durability {durability!r}: {state}")
                raise
            states += 1
    return states


@pytest.mark.parametrize("durability", ["disk", "os"])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_power_cuts_lose_nothing_that_one_of_several_writers_was_promised(shard: int, durability: str) -> None:
    wanted, states, number = counts.scale(STATES if durability == "disk" else STATES // 4), 0, 0
    with _unlogged():
        while states < wanted:
            states += run(f"{shard} {number}", durability=durability)
            number += 1
    counts.count("G1", turn_states=states, turn_worlds=number, lost=0, phantoms=0, refused=0)


# --- can it fail? -----------------------------------------------------------------------------------------


def forget_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One who gets the partition back believes that nobody has written meanwhile."""

    def find_tail(writer: Any) -> None:
        writer.batch = writer.open_batch(writer.batch.tail)

    monkeypatch.setattr(TurnWriter, "_find_tail", find_tail)


def promise_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush returns without a sync, if the partition was given up."""
    whole = Writer._make_visible

    def make_visible(writer: Any, tail: Any, active: Any) -> None:
        if not writer.is_parked:
            whole(writer, tail, active)

    monkeypatch.setattr(Writer, "_make_visible", make_visible)


@pytest.mark.parametrize("mistake", [forget_others, promise_too_early])
def test_power_cuts_find_out_a_writer_that_does_less(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with _unlogged(), pytest.raises((AssertionError, LogError)):
        for number in range(40):
            run(f"mistake {number}")
    counts.count("G1", mistakes_found_out=1)

