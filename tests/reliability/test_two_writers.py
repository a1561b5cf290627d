"""G12: of writers that open a partition at once exactly one gets it, and the others are told that another has it."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from counts import count, scale
from processes import fork, shared, wait

from conftest import QUIET, records_of
from loglib import LockedError, testing
from loglib.testing import UnsyncedFiles

pytestmark = pytest.mark.reliability

MOST = 100  # racers at once


class Shared(ctypes.Structure):
    """What the racers tell each other; each racer has its own place where two could write at once."""

    _fields_ = (
        ("round", ctypes.c_uint64),  # the racers wait for this round to begin
        ("done", ctypes.c_uint64 * MOST),  # the rounds that each racer has done
        ("won", ctypes.c_uint64 * MOST),
        ("refused", ctypes.c_uint64 * MOST),
        ("holder", ctypes.c_uint64),  # pid of the racer that has the topic
        ("over", ctypes.c_uint64),
    )


class Racer:
    """Opens the topic once in every round. The winner keeps it until all others have been refused."""

    def __init__(self, path: Path, told: Shared, number: int, racers: int) -> None:
        self.path = path
        self.told = told
        self.number = number
        self.racers = racers
        self.pause = 0 if racers < 10 else racers / 20_000  # or many that wait leave no time for the others

    def is_in(self, number: int) -> bool:
        return bool(self.told.round == number)

    def run(self, rounds: int) -> None:
        rng = random.Random(self.number)
        for number in range(1, rounds + 1):
            self.wait_until(partial(self.is_in, number))
            time.sleep(rng.choice([0, 0, 0.0002]))
            self.race(number)
            self.told.done[self.number] = number

    def race(self, number: int) -> None:
        told = self.told
        try:
            with testing.open_topic(self.path, files=UnsyncedFiles()) as topic:
                assert told.holder == 0, "two at once"
                told.holder = os.getpid()
                told.won[self.number] += 1
                self.wait_until(lambda: sum(told.refused) == number * (self.racers - 1))
                assert told.holder == os.getpid(), "two at once"
                topic.append(b"%d" % number, sync=True)
                told.holder = 0
        except LockedError as error:
            # The holder may not have written its name yet; the holder before may have left its own.
            assert error.holder.startswith(("pid ", "another process", "a process forked by pid")), error.holder
            told.refused[self.number] += 1

    def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self.told.over:
            time.sleep(self.pause)


def referee(told: Shared, racers: int, rounds: int) -> None:
    """Begin each round when the one before is over, and check who has won."""
    for number in range(1, rounds + 1):
        told.round = number
        while not told.over and any(done < number for done in told.done[:racers]):
            time.sleep(0)
        assert (sum(told.won), sum(told.refused)) == (number, number * (racers - 1))


def begin(path: Path) -> Shared:
    testing.open_topic(path, files=UnsyncedFiles(), **QUIET).close()
    return shared(Shared)


def finish(path: Path, told: Shared, *, racers: int, rounds: int) -> None:
    assert [record.value for record in records_of(path)] == [b"%d" % number for number in range(1, rounds + 1)]
    count("G12", races=rounds, openers=racers * rounds, refused_rightly=sum(told.refused), wrong=0)


races = pytest.mark.parametrize(("racers", "rounds"), [(2, 1000), (5, 300), (MOST, 2)])


@races
def test_of_processes_that_open_a_topic_at_once_one_gets_it(racers: int, rounds: int, path: Path) -> None:
    told = begin(path)
    rounds = scale(rounds)
    children = [fork(partial(Racer(path, told, number, racers).run, rounds)) for number in range(racers)]
    try:
        referee(told, racers, rounds)
    finally:
        told.over = 1
        statuses = [wait(child) for child in children]
    assert statuses == [0] * racers, "a racer failed; its error is above"
    finish(path, told, racers=racers, rounds=rounds)


@races
def test_of_threads_that_open_a_topic_at_once_one_gets_it(racers: int, rounds: int, path: Path) -> None:
    told = begin(path)
    rounds = scale(rounds)
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            Racer(path, told, number, racers).run(rounds)
        except BaseException as error:
            failures.append(error)
            told.over = 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(racers)]
    for thread in threads:
        thread.start()
    try:
        referee(told, racers, rounds)
    finally:
        told.over = 1
        for thread in threads:
            thread.join()
        assert not failures
    finish(path, told, racers=racers, rounds=rounds)


# --- partitions that several processes share --------------------------------------------------------------------


def write_somewhere(path: Path, told: Shared, number: int, rounds: int) -> None:
    """Take any free partition, write there and release it, again and again."""
    for each in range(rounds):
        with testing.open_topic(path, shared=True, files=UnsyncedFiles()) as topic:
            try:
                position = topic.append(b"%d:%d" % (number, each), sync=True)
            except LockedError:
                told.refused[number] += 1
                continue
            told.won[number] += 1
            recovery = topic.partition(position.partition).recovery
            assert recovery is not None and recovery.clean, "another wrote there"


def test_processes_that_share_a_topic_never_share_a_partition(path: Path) -> None:
    racers, rounds = 6, scale(60)
    told = shared(Shared)
    testing.open_topic(path, partitions=4, files=UnsyncedFiles(), **QUIET).close()
    children = [fork(partial(write_somewhere, path, told, number, rounds)) for number in range(racers)]
    assert [wait(child) for child in children] == [0] * racers, "a writer failed; its error is above"
    written = sorted(record.value or b"" for record in records_of(path))
    assert len(written) == len(set(written)) == sum(told.won)
    count("G12", shared_openings=racers * rounds, shared_refused_rightly=sum(told.refused), lost=0)


# --- a lock file that somebody removes ----------------------------------------------------------------------------


def vandalise(path: Path, told: Shared) -> None:
    """Remove the lock file, or replace it, all the time."""
    rng = random.Random(0)
    lock = path / "0000" / "lock"
    while not told.over:
        if rng.random() < 0.5:
            lock.unlink(missing_ok=True)
        else:
            other = lock.with_name("other")
            other.write_bytes(b"1 2026-01-01T00:00:00Z nobody\n")
            other.rename(lock)
        time.sleep(rng.random() * 0.002)


def test_removing_the_lock_file_lets_no_second_writer_in(path: Path) -> None:
    racers, rounds = 4, scale(300)
    told = begin(path)
    vandal = fork(partial(vandalise, path, told))
    children = [fork(partial(Racer(path, told, number, racers).run, rounds)) for number in range(racers)]
    try:
        referee(told, racers, rounds)
    finally:
        told.over = 1
        statuses = [wait(child) for child in [vandal, *children]]
    assert statuses == [0] * (1 + racers), "a child failed; its error is above"
    finish(path, told, racers=racers, rounds=rounds)
