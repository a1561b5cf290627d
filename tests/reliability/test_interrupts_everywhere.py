"""G7: Ctrl-C, or any other exception from outside, at every line of every call, and at every point of those that write.

An interrupted call has happened or has not. What was acknowledged is there afterwards, positions are those of the
records handed out, nothing stays open or locked, and the next call works.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from counts import count

from conftest import QUIET, open_files, values_of
from interrupts import Interrupter, every_point
from loglib import Retention, Topic
from loglib.testing import UnsyncedFiles
from test_writer import ACTIONS, POLICIES, interrupt_everywhere

pytestmark = [
    pytest.mark.reliability,
    # An interrupt in a finalizer is printed and forgotten, by the interpreter as well.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Cancelled(BaseException):
    """What a framework throws into a thread that it wants to end."""


# --- writing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("action", ACTIONS)
def test_interrupt_at_any_opcode_of_a_write_leaves_the_log_consistent(
    action: Callable[[Topic], None], policies: dict[str, Any], path: Path
) -> None:
    points = interrupt_everywhere(action, path, lines_only=False, **policies)
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

VALUES = [[b"%d:%d" % (partition, number) + bytes(700) for number in range(12)] for partition in range(2)]


class World:
    """A topic of two partitions with some segments each, a reader that has begun, and what the calls need."""

    def __init__(self, template: Path, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(template, path)
        self.path = path
        self.topic = Topic.open(path, files=UnsyncedFiles())
        self.reading = Topic.open(path, mode="r")
        self.reader = self.reading.read()
        self.first = self.reader.poll(max_records=3)
        self.frames = path.parent / "frames"
        self.other = Topic.open(path.parent / "other", files=UnsyncedFiles(), partitions=2, **QUIET)

    def close(self) -> None:
        for each in (self.reader, self.reading, self.topic, self.other):
            each.close()
        shutil.rmtree(self.path.parent / "other")


def make(template: Path) -> None:
    with Topic.open(
        template, files=UnsyncedFiles(), partitions=2, segment_bytes=4096, batch_records=2, batch_bytes=2000, **QUIET
    ) as topic:
        for partition, values in enumerate(VALUES):
            for value in values:
                topic.append(value, partition=partition)


def iterate(world: World) -> None:
    for _ in world.reader:
        pass


def poll(world: World) -> None:
    world.reader.poll(max_records=5)
    world.reader.poll(max_bytes=2000)


def batches(world: World) -> None:
    for _ in world.reader.batches():
        pass


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
        partition.check()


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
    """It goes on where it says that it is, in order and to the end."""
    told = world.reader.tell()
    rest = list(world.reader)
    for partition, values in enumerate(VALUES):
        here = [record for record in rest if record.partition == partition]
        assert [record.value for record in here] == values[len(values) - len(here) :], where
        assert not here or here[0].offset == told[partition], where


def look_at_the_topic(topic: Topic, where: str, *, dropped: bool, more: list[bytes]) -> None:
    for partition, values in enumerate(VALUES):
        expected = values + (more if partition == 0 else [])
        found = values_of(topic.partition(partition))
        assert found == expected[len(expected) - len(found) :], where
        assert dropped or len(found) == len(expected), where
        topic.partition(partition).check()


@pytest.mark.parametrize("call", CALLS)
def test_interrupt_at_any_line_of_a_call_leaves_everything_in_order(call: Callable[[World], None], path: Path) -> None:
    template = path.parent / "template"
    make(template)
    if call is retain:
        Topic.reconfigure(template, retention=Retention(age=None, bytes=6000))

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
        if call not in (close_to_read, retain):
            look_at_the_reader(world, where)
        call(world)
        world.topic.append(b"later", partition=0, sync=True)
        look_at_the_topic(world.topic, where, dropped=call is retain, more=[b"later"])
        world.close()
        world = None  # type: ignore[assignment]
        gc.collect()  # what an interrupted frame has left
        assert open_files() == before, where
        with Topic.open(path, files=UnsyncedFiles()) as topic:
            assert all(each.recovery is not None and each.recovery.clean for each in topic.partitions), where
            look_at_the_topic(topic, where, dropped=call is retain, more=[b"later"])
        return True

    points = len(list(every_point(once, lines_only=True)))
    assert points > 5
    count("G7", lines=points, wrong=0)


def as_it_is(path: Path) -> None:
    """Closed in order."""


def never_made(path: Path) -> None:
    shutil.rmtree(path)


def torn(path: Path) -> None:
    """Killed while it wrote: half a batch at the end, and a segment half made."""
    for partition in path.glob("0*"):
        last = max(partition.glob("*.log"))
        with last.open("ab") as segment:
            segment.write(bytes(range(100)))
        (partition / "99999999999999999999.log.tmp").write_bytes(b"half")


def without_watermark(path: Path) -> None:
    for watermark in path.glob("0*/watermark"):
        watermark.unlink()


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
            interrupter.run(lambda: opened.append(Topic.open(path, files=UnsyncedFiles(), partitions=2)))
        except KeyboardInterrupt:
            where = interrupter.where
        else:
            opened.pop().close()
            return False
        for topic in opened:  # the interrupt came when it was open already
            topic.close()
        opened.clear()
        gc.collect()
        assert open_files() == before, where
        with Topic.open(path, files=UnsyncedFiles(), partitions=2) as topic:
            for partition, values in zip(topic.partitions, expected, strict=False):
                assert values_of(partition) == values, where
            topic.append(b"later", sync=True)
        return True

    points = len(list(every_point(once, lines_only=True)))
    assert points > 50
    count("G7", lines=points, wrong=0)
