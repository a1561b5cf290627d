"""G15: directories are moved, removed, made anew and restored under living writers and followers.

Each round is a chain of generations. The writer of a generation has its own process. It appends to the
topic at the path until it reports that its files are gone. In the meantime its files were moved away, removed
or replaced, and the writer of the next generation works at the path. These are failures:

    lost      an acknowledged record that is not in the log at the path, and not in the files that were moved
    wrong     a writer that does not report the change within the bound; a follower that waits for ever, or gets
              records out of order or of two histories
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from counts import count, scale
from processes import fork, shared, together, wait

from conftest import QUIET, sound
from loglib import CorruptLogError, LogMovedError, OffsetOutOfRangeError, Retention, Topic, testing
from loglib.testing import UnsyncedFiles

pytestmark = pytest.mark.reliability

GENERATIONS = 4
BOUND_S = 30.0  # far above the second or two that it takes, because the machine may be busy
EVENTS = ("moved", "removed", "partition removed", "restored by rename", "restored in place", "copied back")


class Told(ctypes.Structure):
    """What the processes of a round tell each other."""

    _fields_ = (
        ("acknowledged", ctypes.c_uint64 * (GENERATIONS + 1)),  # records of each generation
        ("appending", ctypes.c_uint64 * (GENERATIONS + 1)),  # the same, plus records that may be in the log
        ("open", ctypes.c_uint64 * (GENERATIONS + 1)),  # whether the writer is at work
        ("found", ctypes.c_uint64 * (GENERATIONS + 1)),  # records of the generation before when this one began, plus 1
        ("said", ctypes.c_uint64 * (GENERATIONS + 1)),  # 1: the writer's files are gone; 2: they are elsewhere
        ("pause", ctypes.c_uint64),  # 1: the writer is asked to wait between two calls; 2: it waits
        ("overwritten", ctypes.c_uint64),  # whether files that somebody may have open were changed
        ("changes", ctypes.c_uint64),  # changes of the directory: how many were begun or ended
        ("followed", ctypes.c_uint64),  # the newest generation of which the follower has seen a record, plus 1
        ("follower_errors", ctypes.c_uint64),
        ("records_followed", ctypes.c_uint64),
        ("over", ctypes.c_uint64),
    )


def value_of(generation: int, number: int) -> bytes:
    return b"%d %d %s" % (generation, number, b"x" * 200)


def parse(value: bytes | None) -> tuple[int, int]:
    assert value is not None
    generation, number, _ = value.split(b" ")
    return int(generation), int(number)


class Round:
    """One chain of generations, in its own directory."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.path = directory / "topic"
        self.told = shared(Told)
        self.rng = Random(f"moved directories {seed}")
        self.events: list[str] = []
        self.aside = 0
        # The first topic drops old segments. So a writer that takes the next topic's files for its own would drop them.
        self.policies: dict[str, Any] = QUIET | {"segment_bytes": 4096}

    # --- the processes -------------------------------------------------------------------------------

    def write(self, generation: int, seed: int) -> None:
        """Append until the files are gone, and report this."""
        told, rng = self.told, Random(seed)
        retention = Retention(age=None, bytes=8000 if generation == 0 else None)
        policies = {} if (self.path / "topic.json").exists() else self.policies | {"retention": retention}
        number = 0
        try:
            with testing.open_topic(self.path, files=UnsyncedFiles(), **policies) as topic:
                last = [parse(record.value) for record in topic.read()][-1:]
                if last and last[0][0] == generation - 1:
                    told.found[generation] = last[0][1] + 2
                else:
                    told.found[generation] = 1
                while not told.over:
                    count = rng.choice((1, 1, 1, 5))
                    told.appending[generation] = number + count
                    for each in range(number, number + count):
                        topic.append(value_of(generation, each), sync=count == 1)
                    topic.flush()
                    number += count
                    told.acknowledged[generation] = number
                    told.open[generation] = 1
                    if rng.random() < 0.1:
                        topic.partition(0).roll()
                    if rng.random() < 0.1:
                        topic.retain()
                    if rng.random() < 0.5:
                        time.sleep(0.002)
                    if told.pause:
                        told.pause = 2
                        while told.pause:
                            time.sleep(0.001)
        except LogMovedError as error:
            told.said[generation] = 2 if error.kept else 1

    def follow(self) -> None:
        """Follow the topic at the path, from its beginning or from the last position, and check the order."""
        told = self.told
        while not told.over:
            changes, begun = told.changes, False
            try:
                with Topic.open(self.path, mode="r") as topic:
                    before: tuple[int, int] | None = None
                    for record in topic.follow("begin", timeout=0.3):
                        begun, changes = True, told.changes
                        before = self.check(before, parse(record.value))
                        if told.over:
                            break
            except (LogMovedError, OffsetOutOfRangeError):
                told.follower_errors += 1
            except FileNotFoundError:  # until the next writer has made a topic
                assert not begun
                time.sleep(0.01)
            except CorruptLogError:
                # During a change, the description may be of one topic and the partition of another, or only some files
                # may be removed. And a copy into open files is damage for everyone who reads them.
                if not told.overwritten and changes == told.changes and not changes % 2:
                    raise
                told.follower_errors += begun
                time.sleep(0.01)

    def check(self, before: tuple[int, int] | None, now: tuple[int, int]) -> tuple[int, int]:
        if before is not None and now[0] == before[0]:
            assert now[1] == before[1] + 1, f"after {before} came {now}"
        elif before is not None:
            assert now == (before[0] + 1, 0) and before[1] + 2 == self.told.found[now[0]], f"after {before} came {now}"
        self.told.records_followed += 1
        self.told.followed = max(self.told.followed, now[0] + 1)
        return now

    # --- what is done to them ----------------------------------------------------------------------

    def change(self, event: str, writer: int) -> Path | None:
        """Change the directory. Returns where the writer's files are now, if they still exist."""
        path, moved, copy = self.path, self.new_name(), self.new_name()
        match event:
            case "moved":
                path.rename(moved)
                return moved
            case "removed":
                remove(path)
            case "partition removed":
                path.rename(moved)  # otherwise the next writer would find a topic without its partition
                remove(moved / "0000")
            case "restored by rename":
                self.copy(copy, writer)
                time.sleep(self.rng.choice((0, 0.01)))
                path.rename(moved)
                copy.rename(path)
                return moved
            case "restored in place":
                self.copy(copy, writer)
                (path / "0000").rename(moved)
                (copy / "0000").rename(path / "0000")
            case _:  # copied back into the open files, between two calls of their writer: only readers notice files
                # that are overwritten in the microseconds between the writer's check and its write
                self.copy(copy, writer)
                for _ in range(2):  # otherwise nothing might change: the first may have been written before the copy
                    before = sum(self.told.acknowledged)
                    self.wait_until(lambda: sum(self.told.acknowledged) > before)  # noqa: B023
                self.told.overwritten = 1
                self.told.pause = 1
                self.wait_until(lambda: self.told.pause == 2)
                self.copy_back(copy)
                self.told.pause = 0
                # The writer may yet publish a mark for records that it has lost: so once more when it has ended.
                self.wait_until(lambda: self.ended(writer))
                self.copy_back(copy)
        return None

    def copy_back(self, copy: Path) -> None:
        partition = self.path / "0000"
        for each in (copy / "0000").iterdir():
            shutil.copyfile(each, partition / each.name)
        for each in partition.iterdir():
            if not (copy / "0000" / each.name).exists():
                each.unlink()

    def ended(self, child: int) -> bool:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def copy(self, target: Path, writer: int) -> None:
        """Copy the topic as it is at one instant."""
        self.stop(writer)
        shutil.copytree(self.path, target)
        os.kill(writer, signal.SIGCONT)

    def stop(self, writer: int) -> None:
        """Stop the process, and wait until it stands still."""
        os.kill(writer, signal.SIGSTOP)
        os.waitid(os.P_PID, writer, os.WSTOPPED)

    def new_name(self) -> Path:
        self.aside += 1
        return self.path.with_name(f"aside{self.aside}")

    # --- the round --------------------------------------------------------------------------------------

    def run(self) -> None:
        follower = fork(self.follow)
        writer = fork(partial(self.write, 0, self.rng.randrange(1 << 30)))
        acknowledged = said = 0
        try:
            for generation in range(GENERATIONS):
                self.wait_until(lambda: self.told.open[generation] and self.told.followed == generation + 1)  # noqa: B023
                time.sleep(self.rng.choice((0, 0.01, 0.1)))
                event = self.rng.choice(EVENTS)
                self.events.append(event)
                self.told.changes += 1
                files = self.change(event, writer)
                self.told.changes += 1
                old, writer = writer, 0
                if generation + 1 < GENERATIONS:
                    writer = fork(partial(self.write, generation + 1, self.rng.randrange(1 << 30)))
                self.wait_until(lambda: self.told.said[generation])  # noqa: B023
                assert wait(old) == 0, f"the writer failed after {self.events}"
                said += 1
                acknowledged += self.check_kept(generation, files)
        finally:
            self.told.over = 1
            for each in filter(None, (writer, follower)):
                status = wait(each)
        assert status == 0, f"the follower failed after {self.events}"
        figures = {"changes": len(self.events), "records_acknowledged": acknowledged, "writers_told": said}
        followed = {"records_followed": self.told.records_followed, "followers_told": self.told.follower_errors}
        count("G15", rounds=1, **figures, **followed, lost=0, wrong=0)

    def check_kept(self, generation: int, files: Path | None) -> int:
        """Check that moved files have every record that the writer acknowledged. Returns how many there are."""
        acknowledged, appending = self.told.acknowledged[generation], self.told.appending[generation]
        if files is not None:
            assert self.told.said[generation] == 2
            with testing.open_topic(files, files=UnsyncedFiles()) as topic:
                found = [number for each, number in map(parse, values(topic)) if each == generation]
                sound(topic.partition(0))
            assert found == list(range(found[0], found[-1] + 1)), self.events
            assert acknowledged - 1 <= found[-1] < appending, self.events
            assert not found[0] or topic.config.retention.bytes is not None, "it drops no records"
        return int(acknowledged)

    def wait_until(self, condition: Any) -> None:
        deadline = time.monotonic() + BOUND_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain after {self.events}: {self.state()}"
            time.sleep(0.002)

    def state(self) -> str:
        told = self.told
        return f"open {list(told.open)}, said {list(told.said)}, followed {told.followed}"


def remove(path: Path) -> None:
    """rm -rf, repeated if a writer makes files in the meantime."""
    while path.exists():
        with suppress(OSError):
            shutil.rmtree(path)


def values(topic: Topic) -> list[bytes | None]:
    return [record.value for record in topic.read()]


def run(directory: Path, seeds: range) -> None:
    for seed in seeds:
        each = directory / f"round{seed}"
        each.mkdir()
        try:
            Round(each, seed).run()
        except BaseException as error:
            error.add_note(f"in the round of seed {seed}")
            raise
        shutil.rmtree(each)


def test_directories_that_change_under_writers_and_followers_cost_no_record(tmp_path: Path) -> None:
    rounds = scale(24)
    together([partial(run, tmp_path, range(first, rounds, 4)) for first in range(min(4, rounds))])
