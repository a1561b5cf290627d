"""Lifetime: what becomes of open handles when the process forks, when it ends, and when closing fails midway."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from operator import length_hint
from types import SimpleNamespace

import pytest
from processes import end_with

from conftest import run_python
from loglib import LogError
from loglib.system import process
from loglib.system.process import Listeners, PerProcess, finish, is_interrupting, try_each

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Handle:
    """Something that is told; it may fail then."""

    def __init__(self, error: Exception | None = None) -> None:
        self.heard: list[int] = []
        self._error = error

    def hear(self, number: int) -> None:
        self.heard.append(number)
        if self._error is not None:
            raise self._error


# --- listeners ---------------------------------------------------------------------------------------


def test_listener_that_dies_with_the_interpreter_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    listeners: Listeners[[int]] = Listeners()
    handle = Handle()
    listeners.add(handle.hear)
    with monkeypatch.context() as ending:
        ending.setattr(process, "sys", SimpleNamespace(is_finalizing=lambda: True))  # what loglib asks, and no other
        del handle
    assert listeners.call(1) == []


def test_every_listener_is_called_whatever_the_others_raise() -> None:
    listeners: Listeners[[int]] = Listeners()
    handles = [Handle(ValueError(f"{number}") if number % 2 else None) for number in range(6)]
    for handle in handles:
        listeners.add(handle.hear)
    listeners.add(handles[0].hear)  # again, which changes nothing
    assert sorted(map(str, listeners.call(7))) == ["1", "3", "5"]
    assert [handle.heard for handle in handles] == [[7]] * 6


def test_listener_that_is_discarded_or_gone_is_not_called() -> None:
    listeners: Listeners[[int]] = Listeners()
    discarded, kept, gone = Handle(), Handle(), Handle(ValueError("called"))
    for handle in (discarded, kept, gone):
        listeners.add(handle.hear)
    listeners.discard(discarded.hear)
    listeners.discard(discarded.hear)
    del gone, handle
    gc.collect()
    assert listeners.call(7) == [] and len(listeners._methods) == 1
    assert (discarded.heard, kept.heard) == ([], [7])
    listeners.clear()
    assert listeners.call(8) == [] and kept.heard == [7]


# --- closing many things -----------------------------------------------------------------------------


def test_calls_after_some_that_fail_are_made_each_once() -> None:
    made: list[int] = []

    def close(fd: int) -> None:
        made.append(fd)
        if fd % 3 == 0:
            raise OSError(fd, "failed")

    calls = iter([(close, fd) for fd in range(8)])
    with pytest.raises(OSError, match="failed"):
        finish(calls)
    finish(calls)
    assert made == list(range(8)) and length_hint(calls) == 0


def test_calls_that_an_interrupt_has_left_are_made_by_who_finishes_them() -> None:
    made: list[int] = []

    def close(fd: int) -> None:
        if fd < 3 and len(made) == fd:
            made.append(fd)
            raise KeyboardInterrupt

    calls = iter([(close, fd) for fd in range(3)])
    with pytest.raises(KeyboardInterrupt):
        finish(calls)
    assert made == [0, 1, 2]


def test_each_is_tried_and_an_interrupt_leaves_what_has_failed() -> None:
    def divide(number: int) -> float:
        if number == 5:
            raise KeyboardInterrupt
        return 1 / (number % 2)

    assert [item for item, _ in try_each(range(5), divide)] == [0, 2, 4]
    failed: list[tuple[int, Exception]] = []
    with pytest.raises(KeyboardInterrupt):
        try_each(range(9), divide, failed)
    assert [item for item, _ in failed] == [0, 2, 4]


# --- forks -------------------------------------------------------------------------------------------


def in_child(action: Callable[[], object]) -> int:
    """Fork, run the action in the child, and return its exit status: 0 if it went well."""
    pid = os.fork()
    if pid == 0:
        end_with(action)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_fork_waits_for_a_lock_which_the_child_finds_free() -> None:
    lock = process.fork_lock()
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait(0.5)
            done.set()

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(60)

    def child() -> None:
        assert done.is_set()
        other = threading.Thread(target=lambda: found.append(lock.acquire(timeout=60)))
        found: list[bool] = []
        other.start()
        other.join()
        assert found == [True]

    assert in_child(child) == 0
    holder.join()
    with lock:  # as a signal handler may, in the middle of what the lock guards
        assert in_child(lambda: None) == 0
    assert lock.acquire(timeout=1)
    lock.release()


def test_child_calls_what_was_made_first_and_tells_whose_child_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_kinds", [])
    monkeypatch.setattr(process, "_per_process", [])  # the thread of this process's inboxes goes on
    monkeypatch.setattr(process, "at_exit", process._AtExit())
    heard: list[tuple[str, int]] = []

    class Named:
        def __init__(self, name: str) -> None:
            self._name = name

        def hear(self, parent_pid: int) -> None:
            heard.append((self._name, parent_pid))
            raise LogError(self._name)

    lower, upper = process.in_child(), process.in_child()
    handles = [Named(name) for name in ("upper", "lower", "lower")]
    for kind, handle in zip((upper, lower, lower), handles, strict=True):
        kind.add(handle.hear)
    parent = os.getpid()

    def child() -> None:
        assert heard == [("lower", parent), ("lower", parent), ("upper", parent)]
        heard.clear()
        assert in_child(lambda: heard == [] or os._exit(1)) == 0  # they are forgotten
        again = Named("again")
        upper.add(again.hear)
        child_pid = os.getpid()
        assert in_child(lambda: heard == [("again", child_pid)] or os._exit(1)) == 0

    assert in_child(child) == 0
    assert heard == []
    with pytest.raises(LogError, match="lower") as raised:  # which the interpreter prints, in a child
        process._abandon()
    assert sorted(map(str, [raised.value, *raised.value.errors])) == ["lower", "lower", "upper"]
    process._abandon()  # nothing, since all are forgotten


# --- the end of the process --------------------------------------------------------------------------


def test_what_adds_itself_again_in_a_child_is_called_in_the_childs_child() -> None:
    program = """
        import os
        from loglib.system.process import in_child

        kind = in_child()

        class Handle:
            def begin(self, parent_pid):
                print("begins", flush=True)
                kind.add(self.begin)

        handle = Handle()
        kind.add(handle.begin)
        for _ in range(3):
            if os.fork():
                os.wait()
                break
    """
    assert run_python(program).split() == ["begins"] * 3


def test_end_of_the_interpreter_calls_what_is_left_and_a_child_does_not() -> None:
    program = """
        import os, sys
        from loglib.system.process import at_exit
        class Handle:
            def close(self):
                print("closed", flush=True)
        left, discarded = Handle(), Handle()
        at_exit.add(left.close)
        at_exit.add(discarded.close)
        at_exit.discard(discarded.close)
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        print("ending", flush=True)
    """
    assert run_python(program).split() == ["ending", "closed"]


# --- interrupts --------------------------------------------------------------------------------------


class Ours:
    """Its methods run in frames that count as loglib's."""

    def work(self, action: Callable[[], bool]) -> bool:
        return bool(eval("action()", {"__package__": "loglib.append"}, {"self": self, "action": action}))


def test_call_in_the_middle_of_another_on_the_same_object_interrupts_it() -> None:
    busy, idle = Ours(), Ours()
    assert not is_interrupting([busy])
    assert busy.work(lambda: is_interrupting([idle, busy]))
    assert not busy.work(lambda: is_interrupting([idle]))
    assert busy.work(lambda: idle.work(lambda: is_interrupting([busy])))


def test_call_that_closes_what_it_is_made_on_interrupts_nothing() -> None:
    """Frames of loglib at the top are those of the present call."""
    closing = Ours()
    code = compile("is_interrupting([self])", "inside", "eval")
    assert eval(code, {"__package__": "loglib", "is_interrupting": is_interrupting}, {"self": closing}) is False


def test_value_of_a_process_is_made_once_and_anew_in_a_forked_child() -> None:
    abandoned: list[object] = []
    value = PerProcess(object, abandoned.append)
    unused = PerProcess(object, abandoned.append)
    made = value()
    assert value() is made

    def look() -> None:
        assert value() is not made
        assert abandoned == [made]

    assert in_child(look) == 0
    assert value() is made
    for each in (value, unused):  # as in the child
        each.forget()
    assert abandoned == [made]
    assert value() is not made
