"""Processes that take turns, and are killed or stopped: what was promised is there, and the others go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from processes import wait
from takers import (
    MIXED,
    PATIENCE_S,
    SYNCED,
    Action,
    Taker,
    Told,
    ending,
    holder_of,
    judge,
    key_of,
    opened,
    stop,
    take_turns,
    told,
    wait_until,
)
from turn_chaos import TurnChaos

from conftest import QUIET, records_of, values_of
from loglib import LockedError, Topic

Start = Callable[[Callable[[], object]], int]


def make(path: Path, *, partitions: int = 3) -> None:
    Topic.open(path, create=True, partitions=partitions, segment_bytes=8192, **QUIET).close()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that does an action. At the end none is left, not even a stopped one."""
    with ending() as start:
        yield start


@pytest.mark.parametrize("actions", [SYNCED, MIXED, (*MIXED, Taker.roll)], ids=["synced", "mixed", "mixed, and rolls"])
@pytest.mark.parametrize("seed", range(2))
def test_killed_processes_lose_nothing_that_was_synced_and_others_go_on(
    seed: int, actions: tuple[Action, ...], path: Path
) -> None:
    with TurnChaos(path, seed, processes=3, partitions=2, actions=actions) as chaos:
        for _ in range(6):
            chaos.kill()
        chaos.end()
    assert chaos.done["kills"] == 6 and chaos.locked == 0


@pytest.mark.parametrize("seed", range(2))
def test_stopped_processes_only_delay_the_others(seed: int, path: Path) -> None:
    with TurnChaos(path, seed, processes=4, partitions=2) as chaos:
        for _ in range(4):
            chaos.stop()
            chaos.kill()
        chaos.end()
    assert chaos.done["stops"] == 4 and chaos.locked == 0


def hold(path: Path, report: Told, *keys: bytes) -> None:
    """Take the partitions of these keys, and keep them as long as nobody asks."""
    with opened(path, wait=PATIENCE_S) as topic:
        for number, key in enumerate(keys):
            at = topic.append(b"-held", key=key)
            report.append(number, at.partition, at.offset)
        report.opened = 1
        wait_until(lambda: report.over, "the end")


def keys_of_two_partitions(path: Path) -> tuple[bytes, bytes]:
    with Topic.open(path, mode="r") as topic:
        keys = {topic.partition_of(key): key for key in map(key_of, range(24))}
    return keys[0], keys[1]


def test_stopped_holder_is_named_after_the_wait_and_only_its_partition_is_refused(path: Path, start: Start) -> None:
    make(path)
    held, free = keys_of_two_partitions(path)
    report = told()
    holder = start(partial(hold, path, report, held))
    wait_until(lambda: report.opened, "the holder")
    stop(holder)
    with opened(path, wait=0.2) as topic:
        for _ in range(2):
            with pytest.raises(LockedError, match=f"pid {holder} ") as raised:
                topic.append(b"refused", key=held, sync=True)
            assert holder_of(raised.value) == holder
        topic.append(b"free", key=free, sync=True)
        with pytest.raises(LockedError, match=f"pid {holder} ") as raised:
            topic.append_many([b"one", b"two", b"three"], keys=[free, held, free])
        appended = [number for number in range(3) if number not in raised.value.not_appended]
        assert 1 not in appended
        topic.append(b"free again", key=free, sync=True)
    os.kill(holder, signal.SIGCONT)
    with opened(path, wait=PATIENCE_S) as topic:
        topic.append(b"after", key=held, sync=True)
        assert values_of(topic.partition(topic.partition_of(held))) == [b"-held", b"after"]
        rest = [b"one"] if 0 in appended else []
        rest += [b"three"] if 2 in appended else []
        assert values_of(topic.partition(topic.partition_of(free))) == [b"free", *rest, b"free again"]
    report.over = 1
    assert wait(holder) == 0


def append_again_when_told(path: Path, report: Told) -> None:
    """Keep a partition, and take it back after another process has had it."""
    with opened(path, wait=PATIENCE_S) as topic:
        for step in (1, 2):
            topic.append(b"%d" % step, partition=0)
            report.opened = step
            wait_until(lambda: report.over >= report.opened, "the next step")


def test_process_that_took_its_partition_back_is_named_to_one_that_does_not_share(path: Path, start: Start) -> None:
    make(path)
    report = told()
    holder = start(partial(append_again_when_told, path, report))
    wait_until(lambda: report.opened == 1, "the holder")
    with opened(path, wait=PATIENCE_S) as topic:
        topic.append(b"between", partition=0, sync=True)
    report.over = 1
    wait_until(lambda: report.opened == 2, "the holder")
    with pytest.raises(LockedError, match=f"pid {holder} "):
        Topic.open(path)
    report.over = 2
    assert wait(holder) == 0


def test_killed_holder_keeps_nobody_waiting(path: Path, start: Start) -> None:
    """The next one takes the partition over, with what the killed one had synced."""
    make(path, partitions=1)
    report = told()

    def be_killed() -> None:
        topic = opened(path, wait=PATIENCE_S)
        topic.append(b"synced", key=b"k", sync=True)
        topic.append(b"buffered", key=b"k")
        report.opened = 1
        signal.pause()

    def wait_for_it() -> None:
        with opened(path, wait=PATIENCE_S) as topic:
            report.calls = 1
            topic.append(b"next", key=b"k", sync=True)

    holder = start(be_killed)
    wait_until(lambda: report.opened, "the holder")
    stop(holder)  # so that it gives nothing up before it is killed
    waiting = start(wait_for_it)
    wait_until(lambda: report.calls, "the next one")
    os.kill(holder, signal.SIGKILL)
    assert wait(holder) == -signal.SIGKILL
    assert wait(waiting) == 0
    assert [record.value for record in records_of(path)] in (
        [b"synced", b"next"], [b"synced", b"buffered", b"next"],
    )  # fmt: skip


def test_waiting_process_that_is_killed_is_forgotten(path: Path, start: Start) -> None:
    """One that asked and died leaves nothing behind that would keep others from their turns."""
    make(path, partitions=1)
    report, asking = told(), told()
    holder = start(partial(hold, path, report, b"k"))
    wait_until(lambda: report.opened, "the holder")
    stop(holder)
    waiters = [start(partial(take_turns, path, told(), number, wait=PATIENCE_S)) for number in range(3)]
    for pid in waiters:
        wait_until(lambda pid=pid: _is_asleep(pid), "the wait")  # type: ignore[misc]
    for pid in (waiters[1], waiters[0], waiters[2]):
        os.kill(pid, signal.SIGKILL)
        assert wait(pid) == -signal.SIGKILL
    os.kill(holder, signal.SIGCONT)
    last = start(partial(take_turns, path, asking, 0, actions=SYNCED, calls=20, wait=PATIENCE_S))
    assert wait(last) == 0
    report.over = 1
    assert wait(holder) == 0
    assert judge(path, [asking], others=1) == asking.begun == 20


def _is_asleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "SD"


def test_waiting_process_that_is_stopped_holds_nobody_up(path: Path, start: Start) -> None:
    """It asked for a turn and was stopped before the turn came: the others take theirs."""
    make(path, partitions=1)
    report, stopped_told, others = told(), told(), [told(), told()]
    holder = start(partial(hold, path, report, b"k"))
    wait_until(lambda: report.opened, "the holder")
    stop(holder)
    sleeper = start(partial(take_turns, path, stopped_told, 0, actions=SYNCED, calls=5, wait=PATIENCE_S))
    wait_until(lambda: stopped_told.begun and _is_asleep(sleeper), "the wait")
    stop(sleeper)
    os.kill(holder, signal.SIGCONT)
    children = [
        start(partial(take_turns, path, each, number, actions=SYNCED, calls=10, wait=PATIENCE_S))
        for number, each in enumerate(others, 1)
    ]
    assert [wait(child) for child in children] == [0, 0]
    os.kill(sleeper, signal.SIGCONT)
    assert wait(sleeper) == 0
    report.over = 1
    assert wait(holder) == 0
    assert judge(path, [stopped_told, *others], others=1) == 25


def test_no_wait_refuses_at_once_while_the_holder_is_stopped(path: Path, start: Start) -> None:
    make(path, partitions=1)
    report = told()
    holder = start(partial(hold, path, report, b"k"))
    wait_until(lambda: report.opened, "the holder")
    stop(holder)
    with opened(path, wait=0) as topic, pytest.raises(LockedError, match=f"pid {holder} "):
        topic.append(b"x", key=b"k")
    os.kill(holder, signal.SIGCONT)
    report.over = 1
    assert wait(holder) == 0
    assert values_of_path(path) == [b"-held"]


def values_of_path(path: Path) -> list[bytes | None]:
    return [record.value for record in records_of(path)]


@pytest.mark.parametrize("wait_s", [float("nan"), "soon", "", None, b"1", [1]], ids=repr)
def test_wait_that_is_no_duration_is_refused(wait_s: object, path: Path) -> None:
    make(path)
    with pytest.raises((ValueError, TypeError)):
        opened(path, wait=wait_s).close()


@pytest.mark.parametrize("wait_s", [0, -1, 0.01, "10ms", timedelta(milliseconds=10)], ids=repr)
def test_wait_is_a_duration_and_may_be_none_at_all(wait_s: object, path: Path) -> None:
    make(path, partitions=1)
    with Topic.open(path) as alone, opened(path, wait=wait_s) as topic:
        with pytest.raises(LockedError):
            topic.append(b"refused")
        alone.close()
        topic.append(b"taken", sync=True)
    assert values_of_path(path) == [b"taken"]


def test_wait_may_be_without_end(path: Path, start: Start) -> None:
    make(path, partitions=1)
    report = told()
    holder = start(partial(hold, path, report, b"k"))
    wait_until(lambda: report.opened, "the holder")
    with opened(path, wait=float("inf")) as topic:
        topic.append(b"x", sync=True)
    report.over = 1
    assert wait(holder) == 0
    assert values_of_path(path) == [b"-held", b"x"]
