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

    def __call__(self, call: str) -> object:
        self.begin(call)
        return self.end_of_call()

    def begin(self, call: str) -> None:
        """Let it make this call: a method, and perhaps a number."""
        self._told.send(call)

    def end_of_call(self) -> object:
        assert self._told.poll(PATIENCE_S / 2)
        return self._told.recv()

    def is_waiting(self) -> bool:
        """True if its call has not ended."""
        return not self._told.poll(0)

    def end(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            wait(self.pid)
        self.pid = 0


def _obey(path: Path, said: Connection) -> None:
    line = Line(REAL, os.open(path, os.O_RDWR))
    while True:
        name, *numbers = said.recv().split()
        said.send(getattr(line, name)(*map(float, numbers)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "turns").touch()
    return tmp_path / "turns"


@pytest.fixture
def mine(path: Path) -> Iterator[Line]:
    fd = os.open(path, os.O_RDWR)
    line = Line(REAL, fd)
    yield line
    line.close()
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
    assert [each("ahead") for each in line] == [0, 1, 1, 1, 1, 1]
    line[0]("leave")
    assert line[0]("ahead") == 2, "it comes again, after all others"
    assert [each("ahead") for each in line] == [2, 0, 2, 2, 2, 2]
    line[3]("leave")
    line[1]("leave")
    assert [each("ahead") for each in line[2:]] == [0, 3, 3, 3], "also the one that has left in the middle"


def test_place_of_a_process_that_dies_is_free(waiting: Callable[[], Waiting]) -> None:
    line = [waiting() for _ in range(4)]
    assert [each("ahead") for each in line] == [0, 1, 1, 1]
    for dead in (line.pop(1), line.pop(0)):
        dead.end()
    assert [each("ahead") for each in line] == [0, 3]


def test_line_begins_again_when_it_is_empty(waiting: Callable[[], Waiting]) -> None:
    one, other, third = waiting(), waiting(), waiting()
    assert (one("ahead"), other("ahead"), third("ahead")) == (0, 1, 1)
    third("pass_by 2")
    assert third("ahead") == 0, "it does not wait for a process that is stopped"
    for each in (one, other, third):
        each("leave")
    assert (one("ahead"), third("ahead"), other("ahead")) == (0, 1, 1), "place 1 is another one now"


def test_line_is_empty_when_the_last_one_has_left(mine: Line, waiting: Callable[[], Waiting]) -> None:
    one = waiting()
    assert mine.is_empty()
    one("ahead")
    assert not mine.is_empty()
    assert one("is_empty"), "a process does not wait for itself"
    one("ahead")
    one("leave")
    assert mine.is_empty()


def test_file_system_without_locks_of_bytes_has_no_line(mine: Line) -> None:
    error = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    with mock.patch.object(REAL, "lockf", side_effect=error), mock.patch.object(REAL, "getlk", side_effect=error):
        assert mine.ahead() == 0
        mine.ring()
        mine.leave()
        assert not mine.is_empty()


def test_places_that_others_take_at_the_same_moment_are_not_taken_twice(mine: Line) -> None:
    with mock.patch.object(REAL, "try_lock_bytes", side_effect=[False, False, True]) as tried:
        mine.ahead()
    assert tried.call_count == 3
    mine.leave()
    with mock.patch.object(REAL, "try_lock_bytes", return_value=False):
        assert mine.ahead() == 0, "without a place it asks for the turn, too"
        mine.leave()


def test_only_the_first_one_is_woken(mine: Line, waiting: Callable[[], Waiting]) -> None:
    line = [waiting() for _ in range(3)]
    for each in line:
        each("ahead")
        each.begin(f"wait {PATIENCE_S}")
    for number, each in enumerate(line):
        mine.ring()
        each.end_of_call()
        assert all(other.is_waiting() for other in line[number + 1 :])
        each("leave")
    mine.ring()  # nobody is there


def test_without_a_socket_a_wait_ends_by_the_clock(mine: Line) -> None:
    with mock.patch("socket.socket", side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))):
        mine.ahead()
    mine.wait(0.001)
    assert not mine.is_woken
    mine.ring()


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
        waiting()("ahead")
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
        waiting()("ahead")
    assert not turns.look(is_idle=False)
    assert turns.look(is_idle=True) is is_waited_for
    assert holder.others._take_turn() is is_waited_for


def test_process_that_is_stopped_in_the_line_is_waited_for_once(
    holder: Holder, waiting: Callable[[], Waiting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cost 0.1 s for each append of each other process."""
    slept: list[float] = []

    def sleep(_: Line, timeout_s: float) -> None:
        holder.now += timeout_s
        slept.append(timeout_s)

    monkeypatch.setattr(Line, "wait", sleep)
    stopped = waiting()
    assert stopped("ahead") == 0
    assert holder.turns._open(make=True)
    for is_first in (True, False):
        slept.clear()
        holder.meet()
        assert holder.turns.take(holder.places[0], wait_s=1.0)
        assert (sum(slept) >= 0.1) is is_first
        holder.places[0].files.unlock(holder.places[0].fd)
        holder.turns.given_up(holder.places[0])


def test_process_that_is_stopped_is_not_rung_in_place_of_those_after_it(
    mine: Line, waiting: Callable[[], Waiting]
) -> None:
    stopped, one = waiting(), waiting()
    assert (stopped("ahead"), one("ahead"), mine.ahead()) == (0, 1, 1)
    mine.pass_by(1)
    one.begin(f"wait {PATIENCE_S}")
    mine.ring()
    one.end_of_call()
    one("leave")  # then nobody is left to be rung but the one that is stopped
    stopped.begin(f"wait {PATIENCE_S}")
    mine.ring()
    stopped.end_of_call()


def test_who_gives_the_turn_up_wakes_the_first_of_the_line(holder: Holder, path: Path) -> None:
    holder.meet()
    assert holder.turns.take(holder.places[0], wait_s=1.0)
    takers = [Taker(path.parent), Taker(path.parent)]  # the second one sleeps, since it is not the first
    try:
        holder.places[0].files.unlock(holder.places[0].fd)
        holder.turns.given_up(holder.places[0])
        for each in takers:
            each.take_and_give_up()
    finally:
        for each in takers:
            each.end()


class Taker:
    """A process that waits in the line for the first partition. Nothing but a ring ends its sleep."""

    def __init__(self, directory: Path) -> None:
        self._heard, said = Pipe()
        self.pid = fork(lambda: _take(directory, said))
        said.close()
        self._heard.recv()

    def take_and_give_up(self) -> None:
        assert self._heard.poll(PATIENCE_S / 6) and self._heard.recv()

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        wait(self.pid)


def _take(directory: Path, said: Connection) -> None:
    sleep, first = Line.wait, iter([True])

    def say_and_sleep(line: Line, timeout_s: float) -> None:
        for each in first:
            said.send(each)
        sleep(line, timeout_s)

    naps = mock.patch("loglib.append.turns._NAP_IN_LINE_S", PATIENCE_S)
    with naps, mock.patch.object(Line, "wait", say_and_sleep):
        turns = Turns(REAL, str(directory), PATIENCE_S, 0o600)
        place = Directory.open(REAL, str(directory / "0000"))
        turns._open(make=True)
        turns.take(place, wait_s=PATIENCE_S)
        place.files.unlock(place.fd)
        turns.given_up(place)
        said.send(True)
        signal.pause()
