"""Poll: wait for descriptors, also where the `select` module has no `poll`.

Invariant: the results are those of the system's `poll`. eventlet removes `select.poll` when it patches the standard
library, and its `select.select` lets other greenlets run, so this module uses `select.select` there.

Threads: a poll object belongs to one thread.
"""

from __future__ import annotations

import select
from typing import Any, Protocol

from ..errors import LogError

__all__ = ["Poll", "new_poll"]


class Poll(Protocol):
    """The methods of `select.poll` that are used."""

    def register(self, fd: Any, eventmask: int, /) -> None:
        """Report these events of a descriptor, or of an object that has one."""

    def unregister(self, fd: Any, /) -> None:
        """Report no more events of it."""

    def poll(self, timeout: float | None = None, /) -> list[tuple[int, int]]:
        """The descriptors with events, and these events; none after `timeout` milliseconds."""


def new_poll() -> Poll:
    """The system's poll object, or one over `select.select`."""
    found: type[Poll] = getattr(select, "poll", _BySelect)
    return found()


class _BySelect:
    """A poll object over `select.select`, which reports an error of a descriptor as readable or writable."""

    def __init__(self) -> None:
        self._wanted: dict[int, int] = {}

    def register(self, fd: Any, eventmask: int, /) -> None:
        self._wanted[fd if isinstance(fd, int) else fd.fileno()] = eventmask

    def unregister(self, fd: Any, /) -> None:
        del self._wanted[fd if isinstance(fd, int) else fd.fileno()]

    def poll(self, timeout: float | None = None, /) -> list[tuple[int, int]]:
        readers = [fd for fd, wanted in self._wanted.items() if wanted & select.POLLIN]
        writers = [fd for fd, wanted in self._wanted.items() if wanted & select.POLLOUT]
        seconds = None if timeout is None else max(timeout, 0) / 1000
        try:
            readable, writable, _ = select.select(readers, writers, [], seconds)
        except ValueError as error:
            raise LogError(
                f"this process has no select.poll, as under eventlet, and select.select does not take descriptor "
                f"{max(self._wanted)}: close files, or do not remove select.poll"
            ) from error
        found = dict.fromkeys(readable, select.POLLIN)
        for fd in writable:
            found[fd] = found.get(fd, 0) | select.POLLOUT
        return list(found.items())
