"""The turn: one thread at a time, the work of others not done twice, and free after whatever ends it."""

import threading
import time

import pytest
from interrupts import Interrupter, every_point

from conftest import run_python
from loglib.system import group_commit
from loglib.system.group_commit import Turn
from loglib.system.reentry import is_mine

LONG_S = 60.0
MANY = 50_000  # turns, which take seconds


def test_turn_returns_what_the_action_returns() -> None:
    assert Turn().take(lambda: 5) == 5


def test_turn_is_free_after_an_error() -> None:
    turn = Turn()
    with pytest.raises(ZeroDivisionError):
        turn.take(lambda: 1 // 0)
    assert turn.take(lambda: 5) == 5


class Holder:
    """A thread that has the turn until it is told to go on."""

    def __init__(self, turn: Turn) -> None:
        self._entered, self._go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: turn.take(self._hold))
        self._thread.start()
        assert self._entered.wait(LONG_S)

    def _hold(self) -> None:
        self._entered.set()
        assert self._go.wait(LONG_S)

    def end(self) -> None:
        self._go.set()
        self._thread.join(LONG_S)


def wait_for_arrivals(turn: Turn, count: int) -> None:
    """Until so many have come since the last action began."""
    while turn._arrived < count:
        time.sleep(0)


@pytest.mark.parametrize(("settled", "result"), [(True, None), (False, 6)])
def test_waiter_leaves_when_its_work_is_done_and_does_it_otherwise(settled: bool, result: int | None) -> None:
    turn = Turn()
    holder = Holder(turn)
    results: list[int | None] = []
    waiter = threading.Thread(target=lambda: results.append(turn.take(lambda: 6, unless=lambda: settled)))
    waiter.start()
    wait_for_arrivals(turn, 1)
    holder.end()
    waiter.join(LONG_S)
    assert results == [result]


def test_work_that_is_done_when_the_turn_comes_is_not_done_again() -> None:
    assert Turn().take(lambda: 6, unless=lambda: True) is None


def test_lone_thread_waits_for_nobody() -> None:
    turn = Turn()
    turn._last_s = LONG_S * 10
    for _ in range(3):
        assert turn.take(lambda: 1, unless=lambda: False) == 1


def test_turn_begins_when_as_many_have_come_as_for_the_last() -> None:
    """So that one fsync serves them all, and not the first of them alone."""
    turn = Turn()
    turn._expected, turn._last_s = 2, LONG_S * 10
    done: list[bool] = []
    both = threading.Event()
    first = threading.Thread(
        target=lambda: turn.take(lambda: done.append(both.is_set()), unless=lambda: bool(done))
    )
    first.start()
    wait_for_arrivals(turn, 1)
    both.set()
    second = threading.Thread(target=lambda: turn.take(lambda: done.append(False), unless=lambda: bool(done)))
    second.start()
    first.join(LONG_S)
    second.join(LONG_S)
    assert done == [True], "one turn, for which both had come"


def test_nobody_waits_for_a_thread_that_has_just_come(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn()
    turn._expected, turn._last_s = 2, LONG_S * 10
    shut_gate = group_commit._shut_gate

    def come_meanwhile() -> threading.Lock:
        turn._arrive()
        return shut_gate()

    monkeypatch.setattr(group_commit, "_shut_gate", come_meanwhile)  # the gate at which the turn would wait for it
    assert turn.take(lambda: 5, unless=lambda: False) == 5


def test_turn_does_not_wait_long_for_who_does_not_come() -> None:
    turn = Turn()
    turn._expected, turn._last_s = 2, 0.001
    assert turn.take(lambda: 5, unless=lambda: False) == 5
    assert turn._expected == 1, "nor at all the next time"


def test_waiting_threads_look_again_when_an_interrupt_has_lost_their_wake_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn = Turn()
    holder = Holder(turn)
    waiters = [threading.Thread(target=lambda: turn.take(lambda: 6, unless=lambda: False)) for _ in range(3)]
    monkeypatch.setattr(turn, "_end", lambda _: None)
    for each in waiters:
        each.start()
    wait_for_arrivals(turn, 3)
    holder.end()
    for each in waiters:
        each.join(LONG_S)
    assert not any(each.is_alive() for each in waiters)


def test_caller_without_an_end_to_wait_for_has_its_turn_among_those_that_come_and_go() -> None:
    """A flush() beside a thread that appended with sync=True all the time waited for half a minute."""
    turn = Turn()
    stop = threading.Event()
    turns = most = 0

    def come_and_go() -> None:
        nonlocal turns
        while not stop.is_set():
            turn.take(lambda: time.sleep(0), unless=lambda: False)
            turns += 1

    busy = threading.Thread(target=come_and_go)
    busy.start()
    for _ in range(1000):
        before = turns
        turn.take(lambda: None)
        most = max(most, turns - before)
    stop.set()
    busy.join(LONG_S)
    assert most < MANY


def test_flush_that_waits_for_the_turn_lets_nobody_else_wait_at_the_lock() -> None:
    """Each flush of the timer left one more thread there. In the end two passed the turn to each other, and fourteen
    that appended with sync=True waited up to 90 ms."""
    turn = Turn()
    first = Holder(turn)
    entered, go = threading.Event(), threading.Event()

    def flush() -> None:
        entered.set()
        assert go.wait(LONG_S)

    flusher = threading.Thread(target=lambda: turn.take(flush))
    flusher.start()
    while len(turn._going) < 2:
        time.sleep(0)
    others = [threading.Thread(target=lambda: turn.take(lambda: None, unless=lambda: False)) for _ in range(3)]
    for each in others:
        each.start()
    wait_for_arrivals(turn, 4)
    first.end()
    assert entered.wait(LONG_S), "it was at the lock before them"
    until = time.monotonic() + LONG_S
    while len(turn._waiting) < len(others) and time.monotonic() < until:
        time.sleep(0.001)
    assert len(turn._waiting) == len(others), "all of them wait at their gates"
    go.set()
    for each in [flusher, *others]:
        each.join(LONG_S)
        assert not each.is_alive()
    assert is_free(turn)


def test_turn_is_taken_at_once_only_if_nobody_else_wants_it() -> None:
    turn = Turn()
    done: list[int] = []
    turn.take_at_once(lambda: done.append(1))
    holder = Holder(turn)
    turn.take_at_once(lambda: done.append(2))
    holder.end()
    assert done == [1], "another had it"
    turn._expected = 2
    turn.take_at_once(lambda: done.append(3))
    assert done == [1], "another is expected, and is to share the action"
    turn.take(lambda: None, unless=lambda: False)
    turn.take_at_once(lambda: done.append(4))
    assert done == [1, 4]


def test_turn_taken_at_once_in_the_middle_of_a_turn_does_nothing() -> None:
    turn = Turn()
    done: list[int] = []
    thread = threading.Thread(target=lambda: turn.take(lambda: turn.take_at_once(lambda: done.append(1))), daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert not thread.is_alive() and not done and is_free(turn)


# --- interrupts --------------------------------------------------------------------------------------


def is_free(turn: Turn) -> bool:
    """Whether no lock has been left taken, and the next who comes need not wait."""
    assert not turn._busy.locked() and not is_mine(turn._turn) and not is_mine(turn._noting)
    return turn.take(lambda: 2) == 2 and turn.take(lambda: 3, unless=lambda: False) == 3


def test_interrupt_at_any_point_leaves_the_turn_free() -> None:
    turn = Turn()

    def once(interrupter: Interrupter) -> bool:
        interrupted = False
        try:
            interrupter.run(lambda: turn.take(lambda: 1, unless=lambda: False))
        except KeyboardInterrupt:
            interrupted = True
        assert is_free(turn), interrupter.where
        return interrupted

    assert len(list(every_point(once, lines_only=False))) > 5


def test_interrupt_at_any_point_of_a_turn_taken_at_once_leaves_it_free() -> None:
    def once(interrupter: Interrupter) -> bool:
        turn = Turn()
        interrupted = False
        try:
            interrupter.run(lambda: turn.take_at_once(lambda: 1))
        except KeyboardInterrupt:
            interrupted = True
        assert is_free(turn), interrupter.where
        return interrupted

    assert len(list(every_point(once, lines_only=False))) > 3


def test_interrupt_at_any_point_of_a_wait_leaves_the_turn_to_who_has_it() -> None:
    """One in the taking again of a condition's lock let go a lock that was another thread's."""

    def once(interrupter: Interrupter) -> bool:
        turn = Turn()
        turn._expected, turn._last_s = 3, 0.001
        running: list[int] = []
        entered, gave_up = threading.Event(), threading.Event()

        def hold() -> None:
            running.append(1)
            entered.set()
            while not turn._waiting and not gave_up.is_set():
                time.sleep(0)
            assert len(running) == 1, "two at once"
            running.pop()

        def act() -> int:
            assert not running, "two at once"
            return 1

        other = threading.Thread(target=lambda: turn.take(hold))
        other.start()
        assert entered.wait(LONG_S)
        interrupted = False
        try:
            interrupter.run(lambda: turn.take(act, unless=lambda: False))
        except KeyboardInterrupt:
            interrupted = True
        gave_up.set()
        other.join(LONG_S)
        assert not other.is_alive() and not running
        assert is_free(turn), interrupter.where
        return interrupted

    assert len(list(every_point(once, lines_only=False))) > 10


@pytest.mark.usefixtures("unmeasured")
def test_signals_at_any_moment_leave_the_turn_in_order() -> None:
    """Threads pass the turn on; the one that gets the signals is interrupted in every kind of wait."""
    program = """
        import random, signal, sys, threading, time
        from loglib.system.group_commit import Turn

        class Interrupted(BaseException):
            pass

        turn, rng, errors = Turn(), random.Random(1), []
        stop, armed = threading.Event(), False
        sys.setswitchinterval(1e-6)

        def other():
            try:
                while not stop.is_set():
                    turn.take(lambda: None, unless=lambda: False)
            except BaseException as error:
                errors.append(repr(error))

        def interrupt(*_):
            if armed:
                raise Interrupted

        signal.signal(signal.SIGALRM, interrupt)
        threads = [threading.Thread(target=other) for _ in range(3)]
        for thread in threads:
            thread.start()
        interrupts, until = 0, time.monotonic() + float(sys.argv[1])
        while time.monotonic() < until and not errors:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.000_01, 0.000_5))
                while True:
                    turn.take(lambda: None, unless=lambda: False)
            except Interrupted:
                armed = False
                interrupts += 1
            except BaseException as error:
                errors.append(repr(error))
        stop.set()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert turn.take(lambda: 5) == 5
        print(interrupts, errors)
    """
    interrupts, errors = run_python(program, 2.0).split(" ", 1)
    assert errors == "[]\n" and int(interrupts) > 20
