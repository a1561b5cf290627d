"""Doorbell: one process ends the wait of another one, by a datagram to an abstract Unix socket (unix(7)).

Invariant: nothing depends on a ring. It ends a wait early, and every wait ends by its time-out. The socket's name has
the process's id, and nothing is left on the disk. Rings do not arrive in another network namespace, as containers have,
and other systems than Linux have no such names. Any process of the host may ring: who is rung for nothing waits again.

Threads: safe for all. A ring ends the wait of one of the threads of a process.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from .not_copyable import NotCopyable
from .process import importing
from .system_calls import above_standard, await_readable

if TYPE_CHECKING:
    from socket import socket


class Doorbell(NotCopyable):
    """The bell of this process, among those of processes that wait for one thing. Without a socket nobody hears it."""

    def __init__(self, thing: str) -> None:
        self._prefix = f"\0loglib-{thing}-"
        self._socket: socket | None = None
        if sys.platform == "linux":
            with suppress(OSError):  # no descriptor is free
                self._socket = _new_socket()
                self._socket.bind(f"{self._prefix}{os.getpid()}")  # one bell of a process hears; another one only rings

    def wait(self, timeout_s: float) -> bool:
        """Return at a ring, or after `timeout_s` seconds. True at a ring."""
        own = self._socket
        if own is None:
            time.sleep(timeout_s)
            return False
        with suppress(OSError, ValueError):  # no ring, or another thread has closed the bell
            await_readable(own.fileno(), timeout_s)
            own.recv(1)
            return True
        return False

    def ring(self, pid: int) -> None:
        """End the wait of the process with this id, if it waits."""
        own = self._socket
        if own is not None:
            with suppress(OSError):  # it does not wait, or it is in another network namespace
                own.sendto(b"\0", f"{self._prefix}{pid}")

    def close(self) -> None:
        own, self._socket = self._socket, None
        if own is not None:
            own.close()


def _new_socket() -> socket:
    with importing:
        import socket  # imported here: only processes that wait for each other need it

    made = socket.socket(fileno=above_standard(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach()))
    made.setblocking(False)  # else `recv` waits as long as the application's `socket.setdefaulttimeout` says
    return made
