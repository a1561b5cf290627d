"""Signals: SIGINT (Ctrl-C), SIGTERM and SIGHUP end a command in the same way, also as process 1 of a container.

Invariant: a signal raises `Ended` in the main thread, in the middle of what runs there. Within `Held` the first signal
is only noted, so that nothing which was read is lost; the second one raises. A signal that was ignored when the command
began, as with `nohup`, stays ignored.

Threads: the main thread.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Ended", "Held", "listen"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """A signal has ended the command."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def listen() -> None:
    """Let the signals end this process. The system ignores them in process 1 as long as nobody listens."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    raise Ended(number)


class Held:
    """While it is entered, the first signal is only noted."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the signal that has come
        self._is_loose = False

    def __enter__(self) -> Held:
        self._before = {each: signal.getsignal(each) for each in _SIGNALS}
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # The system writes there when a signal comes: also one that comes just before the wait begins ends it.
        self._waker_before = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number, before in self._before.items():
            if before is not signal.SIG_IGN:
                signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(self._waker_before)
        os.close(self._woken)
        os.close(self._waker)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None or self._is_loose:
            raise Ended(number)
        self.number = number

    @contextmanager
    def loose(self) -> Iterator[None]:
        """Meanwhile a signal raises: nothing can be lost in what waits there."""
        self._is_loose = True
        try:
            self.raise_noted()
            yield
        finally:
            self._is_loose = False

    def wait_readable(self, fd: int) -> bool:
        """Wait until the descriptor can be read, and return True; False if a signal has come."""
        if self.number is None:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.register(self._woken, select.POLLIN)
            poll.poll()
        return self.number is None

    def raise_noted(self) -> None:
        """`Ended` if a signal has come."""
        if self.number is not None:
            raise Ended(self.number)
