"""Members: who is in a consumer group just now; one file for each, held by an flock while its process lives.

Invariant: a member is in the group exactly as long as it holds the lock of its file. The kernel lets
the lock go when the process dies, however it dies, so that nobody needs heartbeats, and nobody is
thrown out for being slow. The text in the file (JSON) is for people, and to say which topics the
member reads; it decides nothing.

    members/<member>     {"pid": 4711, "host": "web-3", "since": "2026-01-31T12:00:00Z", "topics": ["clicks"]}

A file that nobody holds is what a crash has left; the next member that looks removes it.

Threads: a `Membership` belongs to whoever has its group.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress

from ..arguments import check_names
from ..errors import LockedError
from ..files import Files
from ..unique import Unique
from .held import HeldFile

__all__ = ["Membership", "live_members", "new_member_name"]

# A look at who lives takes the lock of a dead member's file for some microseconds.
_JOIN_TRIES = 200
_JOIN_NAP_S = 0.005


def new_member_name() -> str:
    """A name that no other member has: host, process, and some random digits."""
    host = re.sub(r"[^a-zA-Z0-9.-]", "-", os.uname().nodename)[:100] or "host"
    return f"{host}-{os.getpid()}-{os.urandom(4).hex()}"


class Membership(Unique):
    """This process's place in a group, from construction to `leave`."""

    def __init__(self, files: Files, directory: str, name: str, topics: list[str], permissions: int) -> None:
        """Join. `LockedError` if a member of that name is in the group."""
        check_names(name)
        self.name = name
        self._files = files
        self._path = os.path.join(directory, name)
        self._file = _hold(files, self._path, permissions)
        facts = {"pid": os.getpid(), "host": os.uname().nodename, "since": _now(), "topics": topics}
        self._file.replace(json.dumps(facts).encode())

    def is_valid(self) -> bool:
        """Whether this is still the member of its name: `evict` takes that from it."""
        return self._file.is_named()

    def leave(self) -> None:
        """Leave the group: the others see it at their next look."""
        try:
            if self.is_valid():
                self._files.unlink(self._path)
        finally:
            self._file.release()

    def abandon(self) -> None:
        """Close the file without touching its name: after a fork it is the parent's."""
        self._file.abandon()


def live_members(files: Files, directory: str, *, known: str | None = None) -> list[str]:
    """The names of the members, sorted. `known` is the caller's own, whose lock need not be tried."""
    names = [
        name for name in files.listdir(directory) if name == known or _is_held(files, os.path.join(directory, name))
    ]
    return sorted(names)


def _hold(files: Files, path: str, permissions: int) -> HeldFile:
    for _ in range(_JOIN_TRIES):
        file = HeldFile(files, path, permissions)
        if file.try_lock():
            return file
        holder = file.text()
        file.abandon()
        time.sleep(_JOIN_NAP_S)
    raise LockedError(
        path, f"a member of that name: {holder or 'just joining'}", advice="join under another, or after it has left"
    )


def _is_held(files: Files, path: str) -> bool:
    """Whether a process holds the file; removes it if none does."""
    try:
        fd = files.open_write(path)
    except FileNotFoundError:
        return False
    try:
        if not files.try_lock(fd):
            return True
        if files.same_file(fd, path):
            with suppress(FileNotFoundError):
                files.unlink(path)
        return False
    finally:
        files.close(fd)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
