"""jobs/common_wait.py: the threads of a member that wait, of which one asks the system."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from loglib.jobs.common_wait import CommonWait
from loglib.system.notify import Observer


@pytest.fixture
def wait(tmp_path: Path) -> Iterator[CommonWait]:
    with closing(Observer()) as observer:
        observer.observe_directory("here", str(tmp_path))
        yield CommonWait(observer)


@contextmanager
def another(action: Callable[[], object]) -> Iterator[None]:
    """Another thread meanwhile, which has returned at the end."""
    thread = threading.Thread(target=action)
    thread.start()
    yield
    thread.join()


def is_asked(wait: CommonWait) -> bool:
    """True if another thread asks the system."""
    if not wait._asking.acquire(blocking=False):
        return True
    wait._asking.release()
    return False


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0)


def test_both_threads_that_wait_are_woken(wait: CommonWait) -> None:
    number = wait.number()
    with another(lambda: wait.wait(1000, number)):
        until(lambda: is_asked(wait))
        with another(lambda: wait.wait(1000, number)):
            until(lambda: wait._told._waiters)  # type: ignore[attr-defined]
            wait.wake()
    assert wait.number() > number


def test_thread_that_was_told_of_something_since_it_looked_does_not_sleep(wait: CommonWait) -> None:
    number = wait.number()
    wait.tell()
    wait.wait(1000, number)
    latest = wait.number()
    with another(lambda: wait.wait(1000, latest)):
        until(lambda: is_asked(wait))
        wait.wait(1000, number)
        assert is_asked(wait), "the other one sleeps"
        wait.wake()


def test_changes_are_left_to_the_thread_that_asks(wait: CommonWait, tmp_path: Path) -> None:
    may_end = threading.Event()

    def ask() -> None:
        with wait._asking:
            assert may_end.wait(60)

    with another(ask):
        until(lambda: is_asked(wait))
        (tmp_path / "new").touch()
        assert wait.changed() == {}
        may_end.set()
    assert list(wait.changed()) == ["here"]
