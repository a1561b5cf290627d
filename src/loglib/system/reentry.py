"""Reentry: a call in the middle of another call of the same thread is refused, and never waits for it.

Invariant: no thread waits for a lock that it holds itself. A signal handler, and a finalizer that the collector runs,
may come between any two steps of a call. Their calls cannot wait for the interrupted call, which continues only after
them. So a public call that takes a lock enters it by `enter`.

The locks are reentrant only because such a lock knows its thread. `with` takes one in C, so an interrupt leaves it
either taken, with its `with`, or free. A lock that is taken inside another one is checked before the outer one is
taken: another thread may hold the outer one and wait for the inner one.

Threads: safe for all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

from ..errors import LogError


def asker(lock: threading.RLock) -> Callable[[], bool]:
    """A function that returns True if the calling thread holds the lock. `threading.Condition` uses it, too."""
    found: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]  # noqa: SLF001
    return found


def is_mine(lock: threading.RLock) -> bool:
    """True if this thread holds the lock."""
    return asker(lock)()


def enter(lock: threading.RLock, what: str) -> threading.RLock:
    """The lock, for a `with`; `LogError` if this thread holds it. `what` names the guarded object."""
    if is_mine(lock):
        refuse(what)
    return lock


def refuse(what: str) -> NoReturn:
    """Raise `LogError` for a call in the middle of another one on the object that `what` names."""
    raise LogError(
        f"{what} is in the middle of another call of this thread, which must return first: a signal handler or a "
        "finalizer has interrupted it. Nothing was done; hand the work to another thread, for example by a queue"
    )
