"""The line of processes that wait for a turn: first come, first served, whatever happens to those before."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
from processes import fork, wait
from takers import PATIENCE_S

from loglib.append import line as line_of
from loglib.append.line import Line
from loglib.append.turns import TURN_S, Turns
from loglib.system.directory import Directory
from loglib.system.files import REAL


class Waiting:
    """A process with a place in the line. It does what it is told."""

    def __init__(self, path: Path) -> None:
        self._told, said = Pipe()
        self.pid = fork(lambda: _obey(path, said))
        said.close()

    def __call__(self, name: str) -> object:
        self._told.send(name)
        assert self._told.poll(PATIENCE_S)
        return self._told.recv()

    def end(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            wait(self.pid)
        self.pid = 0


def _obey(path: Path, said: Connection) -> None:
    line = Line(REAL, os.open(path, os.O_RDWR))
    while True:
        said.send(getattr(line, said.recv())())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "turns").touch()
    return tmp_path / "turns"


@pytest.fixture
def mine(path: Path) -> Iterator[Line]:
    fd = os.open(path, os.O_RDWR)
    yield Line(REAL, fd)
    os.close(fd)


@pytest.fixture
def waiting(path: Path) -> Iterator[Callable[[], Waiting]]:
    started: list[Waiting] = []

    def start() -> Waiting:
        started.append(Waiting(path))
        return started[-1]

    yield start
    for each in started:
        each.end()


def test_first_to_come_is_first(waiting: Callable[[], Waiting]) -> None:
    line = [waiting() for _ in range(6)]
    assert [each("place") for each in line] == [1, 2, 3, 4, 5, 6]
    line[0]("leave")
    assert [each("place") for each in line] == [7, 1, 2, 3, 4, 5]  # the first one comes again, before the others move
    assert line[0]("place") == 6


def test_place_of_a_process_that_dies_is_free(waiting: Callable[[], Waiting]) -> None:
    line = [waiting() for _ in range(4)]
    assert [each("place") for each in line] == [1, 2, 3, 4]
    for dead in (line.pop(1), line.pop(0)):
        dead.end()
    assert [each("place") for each in line] == [1, 2]


def test_line_has_an_end(waiting: Callable[[], Waiting]) -> None:
    with mock.patch.object(line_of, "_END", 4):
        line = [waiting() for _ in range(5)]
    assert [each("place") for each in line] == [1, 2, 3, 0, 0]
    line[1]("leave")
    assert [each("place") for each in line] == [1, 0, 2, 3, 0]


def test_line_is_empty_when_the_last_one_has_left(mine: Line, waiting: Callable[[], Waiting]) -> None:
    one = waiting()
    assert mine.is_empty()
    one("place")
    assert not mine.is_empty()
    assert one("is_empty"), "a process does not wait for itself"
    one("place")
    one("leave")
    assert mine.is_empty()


def test_file_system_without_locks_of_bytes_has_no_line(mine: Line) -> None:
    with mock.patch.object(REAL, "lockf", side_effect=OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))):
        assert mine.place() == 0
        mine.leave()
        assert not mine.is_empty()


class Holder:
    """The turns of a process, and those of another one; two partitions; and the clock."""

    def __init__(self, directory: Path) -> None:
        self.now = 1000.0
        self.turns, self.others = (Turns(REAL, str(directory), 1.0, 0o600) for _ in range(2))
        self.places = []
        for name in ("0000", "0001"):
            (directory / name).mkdir()
            self.places.append(Directory.open(REAL, str(directory / name)))

    def meet(self) -> None:
        self.turns._met = self.now

    def close(self) -> None:
        self.turns.close()
        self.others.close()
        for each in self.places:
            each.close()


@pytest.fixture
def holder(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Holder]:
    made = Holder(path.parent)
    monkeypatch.setattr("loglib.append.turns.monotonic", lambda: made.now)
    yield made
    made.close()


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_turn_ends_by_the_clock_though_partitions_are_taken_back(
    holder: Holder, waiting: Callable[[], Waiting], is_waited_for: bool
) -> None:
    """It ended with the last partition. A thread took the first one back before that, and the others starved."""
    turns, others, places = holder.turns, holder.others, holder.places
    holder.meet()
    assert all(turns.take(each, wait_s=1.0) for each in places)
    assert not others._take_turn()
    if is_waited_for:
        waiting()("place")
    assert not turns.look(is_idle=False)
    holder.now += 2 * TURN_S
    assert turns.look(is_idle=False) is is_waited_for
    turns.given_up(places[0])
    assert others._take_turn(), "the turn is over, though one partition is not given up yet"
    assert turns.look(is_idle=False)


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_turn_of_a_process_that_is_idle_ends_when_another_one_waits(
    holder: Holder, waiting: Callable[[], Waiting], is_waited_for: bool
) -> None:
    """It lasted 5 ms, also if nothing was appended any more."""
    turns = holder.turns
    assert turns.first_look_s() == TURN_S
    holder.meet()
    assert turns.first_look_s() < TURN_S / 5
    assert turns.take(holder.places[0], wait_s=1.0)
    if is_waited_for:
        waiting()("place")
    assert not turns.look(is_idle=False)
    assert turns.look(is_idle=True) is is_waited_for
    assert holder.others._take_turn() is is_waited_for
