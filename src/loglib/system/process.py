"""Process: open handles when the process forks, when it ends, and when closing fails midway.

Invariant: a forked child has abandoned its parent's handles before its own code runs, so it neither writes the
parent's files nor unlocks them. A process that ends normally has closed its topics. This module keeps no handle alive.

Forks: the fork lock that was made last is acquired first. The kinds of handles are abandoned in the order in which
they were made. A module makes its kind after it has imported the modules that it builds on. So a child closes its
copy of a partition's lock before the writer could unlock it.

Threads: safe for all.
"""

from __future__ import annotations

import atexit
import logging  # noqa: F401  Imported first: handles that close at exit may log, so logging must end after them.
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from itertools import starmap
from operator import call, length_hint
from types import FrameType, ModuleType
from typing import Any, Generic, ParamSpec, TypeVar

from .failures import together

P = ParamSpec("P")
T = TypeVar("T")

_PACKAGE = __name__.partition(".")[0]  # loglib, wherever this module is in it
_POOLS = ("multiprocessing.util", "multiprocess.util")  # the second one: pathos, and others that pickle with dill
_END_OF_BILLIARD = "_do_exit"  # the method that ends a worker of its pool
_LAST = -100  # after the other exit functions of their workers (down to -5), which may still append


class Listeners(Generic[P]):
    """Methods of many objects that are called together. It keeps none of the objects alive."""

    def __init__(self) -> None:
        self._methods: set[weakref.WeakMethod[Callable[P, object]]] = set()

    def add(self, method: Callable[P, object]) -> None:
        self._methods.add(weakref.WeakMethod(method, self._forget))

    def _forget(self, dead: weakref.WeakMethod[Callable[P, object]]) -> None:
        if not sys.is_finalizing():  # then the method's function dies as well, and `WeakMethod` is told once more
            self._methods.discard(dead)

    def discard(self, method: Callable[P, object]) -> None:
        self._methods.discard(weakref.WeakMethod(method))

    def clear(self) -> None:
        self._methods.clear()

    def call(self, *args: P.args, **kwargs: P.kwargs) -> list[Exception]:
        """Call all methods, in no order; returns the errors that they raised."""
        return self._call(list(self._methods), *args, **kwargs)  # a copy made in C: other threads may add methods

    def call_once(self, *args: P.args, **kwargs: P.kwargs) -> list[Exception]:
        """Forget all methods, and call them. One that adds itself again is called the next time, too."""
        references = list(self._methods)
        self._methods.clear()
        return self._call(references, *args, **kwargs)

    def _call(
        self, references: list[weakref.WeakMethod[Callable[P, object]]], *args: P.args, **kwargs: P.kwargs
    ) -> list[Exception]:
        methods = filter(None, (reference() for reference in references))
        return [error for _, error in try_each(methods, lambda method: method(*args, **kwargs))]


# --- closing many things -----------------------------------------------------------------------------


def finish(calls: Iterator[tuple[Callable[[int], object], int]]) -> None:
    """Make the remaining calls, also after one that fails. Each call is made once, even if `finish` is repeated."""
    try:
        deque(starmap(call, calls), maxlen=0)  # in C, where no interrupt comes between taking a call and making it
    finally:
        if length_hint(calls):
            finish(calls)


def try_each(
    items: Iterable[T], action: Callable[[T], object], failed: list[tuple[T, Exception]] | None = None
) -> list[tuple[T, Exception]]:
    """Do the action for each item; returns the items for which it failed, with their errors.

    They are added to the list `failed`, if given. The caller then has them even if an interrupt ends the call.
    """
    failed = [] if failed is None else failed
    for item in items:
        try:
            action(item)
        except Exception as error:  # noqa: BLE001  Raised by the caller, after all items are tried.
            failed.append((item, error))
    return failed


# --- forks -------------------------------------------------------------------------------------------


def fork_lock() -> threading.RLock:
    """A lock that a fork waits for. Otherwise, in the child, it could belong for ever to a thread that is not there."""
    lock = threading.RLock()  # so that a signal handler may fork
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


# Held for an import in a thread of loglib: a child that is forked meanwhile would wait for that thread for ever if it
# imports the module, too.
importing = fork_lock()
forking: list[bool] = []  # not empty while a fork is under way, and in a child that has not left its parent
_kinds: list[Listeners[[int]]] = []  # the kinds of handles; a kind comes before the kinds that build on it
_pid = os.getpid()


def in_child() -> Listeners[[int]]:
    """A new kind of handle: a forked child calls its methods with the parent's process id, and then forgets them."""
    _kinds.append(Listeners())
    return _kinds[-1]


class PerProcess(Generic[T]):
    """A value that a process makes when it first asks for it. A forked child forgets its parent's, and makes its own.

    Process numbers do not distinguish them: the system reuses the number of a process that has ended. Make it at a
    module's level, because it is never freed.
    """

    def __init__(self, make: Callable[[], T], abandon: Callable[[T], object] = lambda _: None) -> None:
        """`abandon` is called with the parent's value in a forked child."""
        self._make = make
        self._abandon = abandon
        self._made: dict[str, T] = {}  # one value at most; two threads that make it together keep the same one
        _per_process.append(self)

    def __call__(self) -> T:
        found = self._made.get("value")
        return self._made.setdefault("value", self._make()) if found is None else found

    def forget(self) -> None:
        """Forget the value: it belongs to the parent."""
        made, self._made = self._made, {}
        for each in made.values():
            self._abandon(each)


_per_process: list[PerProcess[Any]] = []


def leave_parent() -> None:
    """Abandon the parent's handles, if this is a child that has not yet done so.

    Another callback of the fork may come before this module's, and use or free a handle. It calls this function first,
    if `forking` is not empty.
    """
    if os.getpid() != _pid:  # `forking` may have changed since the caller has looked: other threads fork, too
        _abandon()


def _abandon() -> None:
    global _pid
    parent_pid, _pid = _pid, os.getpid()
    forking.clear()
    at_exit.clear()
    failures: list[Exception] = []
    for kind in _kinds:
        failures += kind.call_once(parent_pid)
    failures += [error for _, error in try_each(_per_process, PerProcess.forget)]
    if failures:
        raise together(failures)  # the interpreter prints it


os.register_at_fork(
    before=lambda: forking.append(True), after_in_parent=forking.pop, after_in_child=leave_parent,
)  # fmt: skip


# --- the end of the process --------------------------------------------------------------------------


class _AtExit(Listeners[[]]):
    """Called when the interpreter ends, and when a worker of `multiprocessing`, `multiprocess` or `billiard` ends.

    Such a worker ends by `os._exit`, and calls only the exit functions of its package; a worker of billiard's pool,
    which Celery uses, calls none. This module need not import the package: a worker has imported it, and in any other
    process `atexit` makes the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self._registered: set[str] = set()  # the packages that have the exit function in this process

    def add(self, method: Callable[[], object]) -> None:
        super().add(method)
        for name in _POOLS:
            util = sys.modules.get(name)
            if util is not None and name not in self._registered:
                self._register(util)
                # A worker that is not forked drops exit functions of modules that it imports first: register again.
                util.register_after_fork(self, partial(_AtExit._register, util=util))
        pool = sys.modules.get("billiard.pool")
        if pool is not None:
            self._wrap_end(pool.Worker)

    def _register(self, util: ModuleType) -> None:
        util.Finalize(None, self.end, exitpriority=_LAST)
        self._registered.add(util.__name__)

    def _wrap_end(self, worker: Any) -> None:
        """Let the method that ends workers of billiard's pool call these methods first."""
        ends = getattr(worker, _END_OF_BILLIARD, None)
        if ends is None or hasattr(ends, _PACKAGE):
            return

        @wraps(ends)
        def end_first(*args: Any, **keywords: Any) -> None:
            try:
                self.end()
            finally:
                ends(*args, **keywords)

        setattr(end_first, _PACKAGE, True)
        setattr(worker, _END_OF_BILLIARD, end_first)

    def clear(self) -> None:
        super().clear()
        self._registered.clear()  # a worker forgets its parent's exit functions

    def end(self) -> None:
        """Call all methods, and raise one error for all that they raised."""
        failures = self.call()
        if failures:
            raise together(failures)


at_exit = _AtExit()
atexit.register(at_exit.end)


# --- interrupts --------------------------------------------------------------------------------------


def is_interrupting(objects: Iterable[object]) -> bool:
    """True if this thread is in the middle of a call on one of these objects. Then the caller is a signal handler.

    It looks at the frames' `self`, so that a call need not record its begin and end. Only loglib's own frames count.
    The top frames, up to the first frame outside loglib, belong to the present call.
    """
    interrupted = {id(each) for each in objects}
    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    while frame is not None:
        if _is_ours(frame) and id(frame.f_locals.get("self")) in interrupted:
            return True
        frame = frame.f_back
    return False


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__package__")).partition(".")[0] == _PACKAGE
