"""G7: Ctrl-C, or another exception from outside, at every line of every call, and at every opcode of calls that write.

An interrupted call is either done or not done. Afterwards all acknowledged records are there, positions are those of
the records handed out, nothing stays open or locked, and the next call works.
"""

from __future__ import annotations

import ctypes
import gc
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from counts import count, scale
from interrupted_calls import ACTIONS, POLICIES, interrupt_everywhere
from interrupts import Interrupter, every_line
from processes import shared, together
from roomy import with_room

from conftest import QUIET, alter, open_files, records_of, sound, values_of
from loglib import Batch, Record, Retention, Topic, testing
from loglib.testing import UnsyncedFiles

pytestmark = [
    pytest.mark.reliability,
    # The interpreter prints and forgets an interrupt in a finalizer.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def quick_collections() -> Iterator[None]:
    """Freeze existing objects, so that the collector, which runs after each interrupt, skips them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Cancelled(BaseException):
    """An exception that a framework throws into a thread to end it."""


# --- writing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("action", ACTIONS)
def test_interrupt_at_any_opcode_of_a_write_leaves_the_log_consistent(
    action: Callable[[Topic], None], policies: dict[str, Any], path: Path
) -> None:
    points = interrupt_everywhere(action, path, lines_only=False, **policies)
    assert points > 5
    count("G7", opcodes=points, wrong=0)


@pytest.mark.parametrize("action", ACTIONS)
def test_interrupt_at_any_opcode_of_a_write_with_room_leaves_the_log_consistent(
    action: Callable[[Topic], None], path: Path
) -> None:
    with with_room(200):
        points = interrupt_everywhere(action, path, lines_only=False)
    assert points > 5
    count("G7", opcodes=points, wrong=0)


@pytest.mark.parametrize("error", [MemoryError, Cancelled])
@pytest.mark.parametrize("action", ACTIONS)
def test_other_exception_at_any_line_of_a_write_leaves_the_log_consistent(
    action: Callable[[Topic], None], error: type[BaseException], path: Path
) -> None:
    points = interrupt_everywhere(action, path, lines_only=True, error=error, segment_bytes=4096, batch_bytes=100)
    assert points >= 5
    count("G7", lines_with_other_exceptions=points, wrong=0)


# --- everything else -------------------------------------------------------------------------------------

VALUES = [[b"%d:%d" % (partition, number) + b"x" * 700 for number in range(6)] for partition in range(2)]


class World:
    """A topic of two partitions with some segments each, a reader that has begun, and all that the calls need."""

    def __init__(self, template: Path, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(template, path)
        self.path = path
        self.topic = testing.open_topic(path, files=UnsyncedFiles())
        self.reading = Topic.open(path, mode="r")
        self.reader = self.reading.read()
        self.first = self.reader.poll(max_records=3)
        self.got: list[Record | Batch] = []  # got by the call, after the first record
        self.told = self.reader.tell()
        self.frames = path.parent / "frames"
        self.other = testing.open_topic(path.parent / "other", files=UnsyncedFiles(), partitions=2, **QUIET)

    def close(self) -> None:
        for each in (self.reader, self.reading, self.topic, self.other):
            each.close()
        shutil.rmtree(self.path.parent / "other")


def make(template: Path) -> None:
    with testing.open_topic(
        template, files=UnsyncedFiles(), partitions=2, segment_bytes=4096, batch_records=2, batch_bytes=2000, **QUIET
    ) as topic:
        for partition, values in enumerate(VALUES):
            for value in values:
                topic.append(value, partition=partition)


def iterate(world: World) -> None:
    for record in world.reader:
        world.got.append(record)


def poll(world: World) -> None:
    world.got += world.reader.poll(max_records=5)
    world.got += world.reader.poll(max_bytes=2000)


def batches(world: World) -> None:
    for batch in world.reader.batches():
        world.got.append(batch)


def seek(world: World) -> None:
    world.reader.seek({1: "end", 0: world.first[-1].offset})
    world.reader.seek("-1s")


def ask(world: World) -> None:
    world.reader.tell()
    world.reader.lag_bytes()
    for partition in world.reading.partitions:
        partition.segments
        partition.log_end_offset


def follow(world: World) -> None:
    with world.reading.follow("begin", timeout=0.001) as reader:
        for _ in reader:
            pass


def follow_the_writer(world: World) -> None:
    with world.topic.follow("begin", timeout=0.001) as reader:
        for _ in reader:
            pass


def to_arrow(world: World) -> None:
    for batch in world.topic.batches():
        batch.to_arrow()


def check(world: World) -> None:
    for partition in world.topic.partitions:
        sound(partition)


def retain(world: World) -> None:
    world.topic.retain()


def transfer(world: World) -> None:
    with world.frames.open("wb") as frames:
        world.topic.partition(0).transfer(frames, world.topic.partition(0).log_start_offset)


def receive(world: World) -> None:
    transfer(world)
    with world.frames.open("rb") as frames:
        while world.other.partition(0).receive(frames) is not None:
            pass
    world.other.flush()


def open_to_read(world: World) -> None:
    Topic.open(world.path, mode="r").close()


def close_to_read(world: World) -> None:
    world.reader.close()
    world.reading.close()


CALLS = [
    iterate, poll, batches, seek, ask, follow, follow_the_writer, to_arrow, check, retain, transfer, receive,
    open_to_read, close_to_read,
]  # fmt: skip


def look_at_the_reader(world: World, where: str) -> None:
    """The reader continues where it was, can go back, and reads from there in order to the end."""
    got = [*world.first, *world.got, *world.reader]
    world.reader.seek(world.told)
    again = [*world.first, *world.reader]
    for partition, expected in enumerate(VALUES):
        for records in (got, again):
            here = [each for each in records if each.partition == partition]
            values = [[each.value] if isinstance(each, Record) else each.values for each in here]
            assert list(chain(*values)) == expected, where


def look_at_the_topic(topic: Topic, where: str, *, dropped: bool, more: list[bytes]) -> None:
    for partition, values in enumerate(VALUES):
        expected = values + (more if partition == 0 else [])
        found = values_of(topic.partition(partition))
        assert found == expected[len(expected) - len(found) :], where
        assert dropped or len(found) == len(expected), where
        sound(topic.partition(partition))


@pytest.mark.parametrize("call", CALLS)
def test_interrupt_at_any_line_of_a_call_leaves_everything_in_order(call: Callable[[World], None], path: Path) -> None:
    template = path.parent / "template"
    make(template)
    if call is retain:
        alter(template, retention=Retention(age=None, bytes=6000))

    def once(interrupter: Interrupter) -> bool:
        before = open_files()
        world = World(template, path)
        try:
            interrupter.run(lambda: call(world))
        except KeyboardInterrupt:
            where = interrupter.where
        else:
            world.close()
            return False
        if call in (iterate, poll, batches):
            look_at_the_reader(world, where)
        call(world)
        world.topic.append(b"later", partition=0, sync=True)
        look_at_the_topic(world.topic, where, dropped=call is retain, more=[b"later"])
        world.close()
        world = None  # type: ignore[assignment]
        gc.collect()  # objects that an interrupted frame has left
        assert len(open_files()) <= len(before) + 2, where  # those that were being opened or closed
        with testing.open_topic(path, files=UnsyncedFiles()) as topic:
            assert all(each.recovery is not None and each.recovery.clean for each in topic.partitions), where
            look_at_the_topic(topic, where, dropped=call is retain, more=[b"later"])
        return True

    points = len(list(every_line(once)))
    assert points > 5
    count("G7", lines=points, wrong=0)


def as_it_is(path: Path) -> None:
    """A topic that was closed in order."""


def never_made(path: Path) -> None:
    shutil.rmtree(path)


def torn(path: Path) -> None:
    """A topic that was killed while it wrote: half a batch at the end, and a half-made segment."""
    for partition in path.glob("0*"):
        last = max(partition.glob("*.log"))
        with last.open("ab") as segment:
            segment.write(bytes(range(100)))
        (partition / "99999999999999999999.log.tmp").write_bytes(b"half")


def without_watermark(path: Path) -> None:
    for watermark in path.glob("0*/watermark"):
        watermark.unlink()


@pytest.mark.filterwarnings("ignore:.*was not closed:ResourceWarning")  # open, and the caller did not have it yet
@pytest.mark.parametrize("state", [as_it_is, never_made, torn, without_watermark])
def test_interrupt_at_any_line_of_opening_leaves_the_lock_free_and_the_log_whole(
    state: Callable[[Path], None], path: Path
) -> None:
    template = path.parent / "template"
    make(template)
    expected = [] if state is never_made else VALUES

    def once(interrupter: Interrupter) -> bool:
        before = open_files()
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(template, path)
        state(path)
        opened: list[Topic] = []
        try:
            interrupter.run(lambda: opened.append(testing.open_topic(path, files=UnsyncedFiles(), partitions=2)))
        except KeyboardInterrupt:
            where = interrupter.where
        else:
            opened.pop().close()
            return False
        for topic in opened:  # the interrupt came when it was open already
            topic.close()
        opened.clear()
        gc.collect()
        assert len(open_files()) <= len(before) + 2, where  # those that were being opened or closed
        with testing.open_topic(path, files=UnsyncedFiles(), partitions=2) as topic:
            for partition, values in zip(topic.partitions, expected, strict=False):
                assert values_of(partition) == values, where
            topic.append(b"later", sync=True)
        return True

    points = len(list(every_line(once)))
    assert points > 50
    count("G7", lines=points, wrong=0)


# --- signals ---------------------------------------------------------------------------------------------------


class Told(ctypes.Structure):
    """How far the interrupted process has come."""

    _fields_ = (("interrupts", ctypes.c_uint64), ("appended", ctypes.c_uint64))


class Storm:
    """Works on a topic while a timer interrupts it at any moment. The value of each record is a different number."""

    def __init__(self, path: Path, told: Told, seed: int) -> None:
        self.path = path
        self.told = told
        self.rng = random.Random(seed)
        self.number = 0
        self.sure: list[int] = []  # values whose append returned
        self.armed = False
        signal.signal(signal.SIGALRM, self.interrupt)
        sys.unraisablehook = lambda _: None  # there are many interrupts in finalizers

    def interrupt(self, *_: object) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def run(self, interrupts: int) -> None:
        while self.told.interrupts < interrupts:
            topic = testing.open_topic(self.path, files=UnsyncedFiles())
            for _ in range(50):
                self.work_until_interrupted(topic)
            self.close(topic)
            self.check()

    def work_until_interrupted(self, topic: Topic) -> None:
        often = [self.append, self.append_synced, self.append_many, self.flush]
        actions = [*often, *often, *often, self.read, self.roll]
        try:
            self.armed = True
            signal.setitimer(signal.ITIMER_REAL, self.rng.uniform(0.000_001, 0.000_5))
            for _ in range(100):  # with a limit, because an interrupt in a finalizer is printed and forgotten
                self.rng.choice(actions)(topic)
            self.armed = False
        except KeyboardInterrupt:
            self.told.interrupts += 1

    def close(self, topic: Topic) -> None:
        """Close the topic; this is interrupted too, and called again until it is done."""
        while True:
            try:
                self.armed = True
                signal.setitimer(signal.ITIMER_REAL, self.rng.uniform(0.000_001, 0.000_5))
                topic.close()
                self.armed = False
                return
            except KeyboardInterrupt:
                self.told.interrupts += 1

    def next(self) -> int:
        self.number += 1
        return self.number

    def append(self, topic: Topic) -> None:
        for _ in range(20):
            number = self.next()
            topic.append(b"%d" % number)
            self.sure.append(number)

    def append_synced(self, topic: Topic) -> None:
        number = self.next()
        topic.append(b"%d" % number, key=b"k", sync=True)
        self.sure.append(number)

    def append_many(self, topic: Topic) -> None:
        numbers = [self.next() for _ in range(self.rng.choice([3, 40]))]
        topic.append_many([b"%d" % number for number in numbers])
        self.sure += numbers

    def flush(self, topic: Topic) -> None:
        topic.flush()

    def roll(self, topic: Topic) -> None:
        topic.partition(0).roll()

    def read(self, topic: Topic) -> None:
        for _ in zip(topic.read(), range(30), strict=False):
            pass

    def check(self) -> None:
        """All appended records are there, once and in order; of an interrupted append, the first records or none."""
        found = [int(record.value or b"") for record in records_of(self.path)]
        assert found == sorted(set(found))
        assert set(self.sure) <= set(found)
        assert found == [] or found[-1] <= self.number
        self.told.appended = len(found)


@pytest.mark.parametrize("seed", range(4))
def test_signals_at_any_moment_lose_nothing_and_double_nothing(seed: int, path: Path) -> None:
    told = shared(Told)
    testing.open_topic(path, files=UnsyncedFiles(), segment_bytes=16_384, batch_records=30, **QUIET).close()
    together([lambda: Storm(path, told, seed).run(scale(4000))])
    count("G7", signals=told.interrupts, wrong=0)
