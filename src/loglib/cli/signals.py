"""Signals: SIGINT (Ctrl-C), SIGTERM and SIGHUP end a command in the same way, also as process 1 of a container.

Invariant: a signal raises `Ended` in the main thread, at any point of its code. Within `Held` the first signal is only
recorded, so that no data that was read is lost; the second one raises. A signal that was ignored when the command
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
    """Let the signals end this process. In process 1 the system ignores signals without a handler."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    raise Ended(number)


class Held:
    """A context in which the first signal is only recorded, as `number`."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the first signal
        self._is_loose = False

    def __enter__(self) -> Held:
        self._before = {each: signal.getsignal(each) for each in _SIGNALS}
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
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
        if self.number is not None or self._is_loose:
            raise Ended(number)
        self.number = number

    @contextmanager
    def loose(self) -> Iterator[None]:
        """A context within, in which a signal raises: for a wait in which no data can be lost."""
        self._is_loose = True
        try:
            self.raise_recorded()
            yield
        finally:
            self._is_loose = False

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
