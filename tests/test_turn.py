"""The turn: one thread at a time, the work of others not done twice, and free after whatever ends it."""

import threading
import time

import pytest

from interrupts import Interrupter, every_point
from loglib.turn import Turn

LONG_S = 60.0


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
    while turn._arrived < count:
        time.sleep(0)


@pytest.mark.parametrize(("settled", "result"), [(True, None), (False, 6)])
def test_waiter_leaves_when_its_work_is_done_and_does_it_otherwise(settled: bool, result: int | None) -> None:
    turn = Turn()
    holder = Holder(turn)
    results: list[int | None] = []
    waiter = threading.Thread(target=lambda: results.append(turn.take(lambda: 6, unless=lambda: settled)))
    waiter.start()
    wait_for_arrivals(turn, 2)
    holder.end()
    waiter.join(LONG_S)
    assert results == [result]


def test_lone_thread_waits_for_nobody() -> None:
    turn = Turn()
    turn._last_s = LONG_S * 10
    for _ in range(3):
        assert turn.take(lambda: 1, unless=lambda: False) == 1


def test_turn_begins_when_as_many_have_come_as_for_the_last() -> None:
    """So that one fsync serves them all, and not the first of them alone."""
    turn = Turn()
    turn._expected, turn._last_s = 2, LONG_S * 10
    done: list[int] = []
    first = threading.Thread(target=lambda: turn.take(lambda: done.append(turn._arrived), unless=lambda: bool(done)))
    first.start()
    wait_for_arrivals(turn, 1)
    second = threading.Thread(target=lambda: turn.take(lambda: done.append(0), unless=lambda: bool(done)))
    second.start()
    first.join(LONG_S)
    second.join(LONG_S)
    assert done == [2], "one turn, for which both had come"


def test_interrupt_at_any_point_leaves_the_turn_free() -> None:
    turn = Turn()

    def once(interrupter: Interrupter) -> bool:
        interrupted = False
        try:
            interrupter.run(lambda: turn.take(lambda: 1, unless=lambda: False))
        except KeyboardInterrupt:
            interrupted = True
        assert not turn._lock.locked(), interrupter.where
        assert turn.take(lambda: 2) == 2, interrupter.where
        return interrupted

    assert len(list(every_point(once, lines_only=False))) > 5
