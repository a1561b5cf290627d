"""Processes: children that the tests fork, and memory that they share."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

Shared = TypeVar("Shared", bound=ctypes.Structure)


def shared(kind: type[Shared]) -> Shared:
    """A structure of zeros that forked children share with their parent; storing a number in it is atomic."""
    return kind.from_buffer(mmap.mmap(-1, ctypes.sizeof(kind)))


def fork(action: Callable[[], object]) -> int:
    """Fork a child that does the action and ends: with status 0, or it prints the error."""
    gc.freeze()  # so that the child goes on sharing memory that it does not change
    pid = os.fork()
    if pid == 0:
        _end_with_parent()
        end_with(action)
    return pid


def end_with(action: Callable[[], object]) -> NoReturn:
    """In a child: do the action and end with status 0, or print the error."""
    status = 1
    try:
        action()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _end_with_parent() -> None:
    """End this child when its parent ends: a test that is ended must not leave children behind."""
    set_signal_on_parents_end = 1
    ctypes.CDLL(None).prctl(set_signal_on_parents_end, signal.SIGKILL)


def wait(pid: int) -> int:
    """The child's exit status, or the signal that ended it, negative."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ended() -> bool:
    """Whether a child that was not waited for yet has ended."""
    return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def together(actions: list[Callable[[], object]]) -> None:
    """Do all actions at once, each in its own child; all must succeed."""
    children = [fork(action) for action in actions]
    assert [wait(child) for child in children] == [0] * len(children), "a child failed; its error is above"


@contextmanager
def killed(action: Callable[[], object]) -> Iterator[int]:
    """A child that does the action until the block ends and kills it. If it ends by itself, this is a failure."""
    pid = fork(action)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        status = wait(pid)
    assert status == -signal.SIGKILL, "the child failed; its error is above"
