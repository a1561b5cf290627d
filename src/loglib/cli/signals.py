"""Signals: SIGINT (Ctrl-C), SIGTERM and SIGHUP end a command in the same way, also as process 1 of a container.

Invariant: a signal raises `Ended` in the main thread, at any point of its code. Within `Held` the first signal is only
recorded, so that no data that was read is lost; the second one raises. A signal that was ignored when the command
began, as with `nohup`, stays ignored. Where the interpreter drops an error, in a finalizer or in a callback of a weak
reference, the signal is sent again a moment later.

Threads: the main thread.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_S = 0.01  # until a signal that the interpreter has dropped is sent again
_STOP_AGAIN_S = 0.05  # until work that is to be stopped is told again


class Ended(KeyboardInterrupt):
    """A signal has ended the command."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def listen() -> None:
    """Let the signals end this process. In process 1 the system ignores signals without a handler."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    sys.unraisablehook = _dropped


def _dropped(dropped: sys.UnraisableHookArgs) -> None:
    """Send a signal again whose `Ended` the interpreter has dropped; another error is told as usual."""
    if isinstance(dropped.exc_value, Ended):
        # In a thread, because here, in the main thread, the signal would be dropped like the first one.
        again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), dropped.exc_value.number))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(dropped)


def _end(number: int, _frame: FrameType | None) -> None:
    raise Ended(number)


class Held:
    """A context in which the first signal is only recorded, as `number`."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the first signal
        self._is_loose = False

    def __enter__(self) -> Held:
        self._before = {each: signal.getsignal(each) for each in _SIGNALS}
        self._woken, self._waker = os.pipe()  # macOS has no pipe2
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        # The system writes to this pipe when a signal comes, so a signal just before a wait ends the wait as well.
        self._waker_before = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number, before in self._before.items():
            if before is not signal.SIG_IGN:
                signal.signal(number, self._record)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(self._waker_before)
        os.close(self._woken)
        os.close(self._waker)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        is_first = self.number is None
        if is_first:
            self.number = number
        if self._is_loose or not is_first:
            raise Ended(number)

    @contextmanager
    def loose(self) -> Iterator[None]:
        """A context within, in which a signal raises: for a wait in which no data can be lost."""
        self._is_loose = True
        try:
            self.raise_recorded()
            yield
        finally:
            self._is_loose = False

    @contextmanager
    def stopping(self, stop: Callable[[], object]) -> Iterator[None]:
        """A context within, in which a signal calls `stop` in a thread: for work in C that looks for no signal.

        It is called again and again, because the work may just begin.
        """
        over = threading.Event()

        def watch() -> None:
            poll = select.poll()
            poll.register(self._woken, select.POLLIN)
            while not over.wait(_STOP_AGAIN_S):
                if poll.poll(0):
                    stop()

        thread = threading.Thread(target=watch, name="loglib-signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def wait_readable(self, fd: int) -> bool:
        """Wait until the descriptor can be read. Return False if a signal has come."""
        if self.number is None:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.register(self._woken, select.POLLIN)
            poll.poll()
        return self.number is None

    def raise_recorded(self) -> None:
        """Raise `Ended` if a signal has come."""
        if self.number is not None:
            raise Ended(self.number)
