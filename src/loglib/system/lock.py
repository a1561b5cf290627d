"""Lock: one writer per partition, by an flock of its directory. The kernel releases it when its holder dies.

Invariant: from the return of `acquire` to the call of `release`, no other handle in any process holds the
partition. The lock is on the directory itself: people remove lock files that block them, and then a second
writer would lock a new file. The file `lock` only names the holder, for messages.

A forked child shares its parent's lock. The child must close its copy of the directory, because the copy
would keep the lock after the parent's death. It must never unlock it, because that also releases the
parent's lock. So this module knows all held locks, and a fork waits while a lock is acquired or released.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from ..errors import LockedError, printable
from .directory import Directory
from .files import Files
from .not_copyable import NotCopyable
from .process import finish, fork_lock, in_child

__all__ = ["NAME", "Lock", "acquire", "is_free", "try_acquire"]

NAME = "lock"

_changing = fork_lock()
_in_child = in_child()


class Lock(NotCopyable):
    """A lock that this process holds, until it is released or garbage collected."""

    # The default, for a lock whose construction was interrupted before its first line.
    _to_do: Iterator[tuple[Callable[[int], object], int]] = iter(())

    def __init__(self, directory: Directory) -> None:
        self.directory = directory  # the locked directory; the holder works in it
        # Unlock first: a child that has just been forked may not have closed its copy yet.
        files, fd = directory.files, directory.fd
        self._to_do = iter([(files.unlock, fd), (files.close, fd)])
        _in_child.add(self.abandon)

    def release(self) -> None:
        """Release the lock. Further calls do nothing."""
        with _changing:
            finish(self._to_do)
            _in_child.discard(self.abandon)

    def __del__(self) -> None:  # for a lock that an interrupt kept from its holder
        with suppress(OSError):  # no caller can get the error
            self.release()

    def abandon(self, parent_pid: int) -> None:
        """Close this process's copy of its parent's lock."""
        del parent_pid
        next(self._to_do, None)
        self.release()


def acquire(files: Files, path: str, permissions: int) -> Lock:
    """Lock the directory of the file `path`, which then names the holder; `LockedError` if it is locked."""
    with _changing:
        directory = Directory.open(files, os.path.dirname(path))
        lock = Lock(directory)
        name = os.path.basename(path)
        try:
            if not files.try_lock(directory.fd, directory.path):
                raise LockedError(path, _holder(directory, name))
            _sign(directory, name, permissions)
        except BaseException:
            lock.release()
            raise
        return lock


def try_acquire(files: Files, path: str) -> Lock | None:
    """Lock the directory `path` without naming a holder; None if it is locked."""
    with _changing:
        lock = Lock(Directory.open(files, path))
        if files.try_lock(lock.directory.fd, path):
            return lock
        lock.release()
        return None


def is_free(files: Files, path: str) -> bool:
    """True if the lock of the directory `path` is free. The check itself holds the lock for a moment."""
    found = try_acquire(files, path)
    if found is not None:
        found.release()
    return found is not None


def _sign(directory: Directory, name: str, permissions: int) -> None:
    files = directory.files
    fd = directory.create(name, permissions, exclusive=False)
    try:
        files.ftruncate(fd, files.write_all(fd, [_describe_self()], 0))  # this order needs no space on a full disk
    finally:
        files.close(fd)


def _describe_self() -> bytes:
    program = os.path.basename(sys.argv[0] if sys.argv else sys.executable) or "python"
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return f"{os.getpid()} {since} {program}\n".encode(errors="replace")


def _holder(directory: Directory, name: str) -> str:
    try:
        text = printable(directory.read_whole(name, 4096).decode(errors="replace").strip())
        pid, since, program = text.split(maxsplit=2)
        alive = _is_alive(int(pid))
    except (FileNotFoundError, ValueError):  # the file is not yet written, or was removed
        return "another process"
    if alive:
        return f"pid {pid} ({program}) since {since}"
    return f"a process forked by pid {pid} ({program}), which is gone itself; since {since}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
