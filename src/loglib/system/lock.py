"""Lock: one writer a partition, by an flock of its directory that the kernel drops when its holder dies.

Invariant: while `acquire` has returned and `release` has not been called, no other handle in any
process holds the partition. The lock is the directory's own, since a file could be removed, and the
file put in its place be locked by a second writer: that is what people do with a lock file that is
in their way. The file `lock` says who the holder is; its text is for messages and decides nothing.

A forked child shares its parent's lock: it must close its copy of the directory, which would keep
the lock when the parent dies, and never unlock it, since unlocking is for all that share it. So the
locks held are known here, and a fork waits while one is being taken or let go.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from ..errors import LockedError, printable
from ..lifetime import finish, fork_lock, in_child
from ..unique import Unique
from .directory import Directory
from .files import Files

__all__ = ["NAME", "Lock", "acquire", "is_free", "try_acquire"]

NAME = "lock"

_changing = fork_lock()
_in_child = in_child()


class Lock(Unique):
    """A lock that this process holds, until it is released or nobody refers to it any more."""

    # Nothing, also of one whose making an interrupt has ended before its first line.
    _to_do: Iterator[tuple[Callable[[int], object], int]] = iter(())

    def __init__(self, directory: Directory) -> None:
        self.directory = directory  # the one that is locked, for whoever has the lock to work in
        # Unlocked first: a child that has just been forked may not have closed its copy yet.
        files, fd = directory.files, directory.fd
        self._to_do = iter([(files.unlock, fd), (files.close, fd)])
        _in_child.add(self.abandon)

    def release(self) -> None:
        """Let it go; once is enough, and more does nothing."""
        with _changing:
            finish(self._to_do)
            _in_child.discard(self.abandon)

    def __del__(self) -> None:  # an interrupt may come before its holder has it
        with suppress(OSError):  # there is nobody to tell
            self.release()

    def abandon(self, parent_pid: int) -> None:
        """Close this process's copy of a lock that is its parent's."""
        del parent_pid
        next(self._to_do, None)
        self.release()


def acquire(files: Files, path: str, permissions: int) -> Lock:
    """Lock the directory in which the file `path` is to name the holder; `LockedError` at once if another has it."""
    with _changing:
        directory = Directory.open(files, os.path.dirname(path))
        lock = Lock(directory)
        name = os.path.basename(path)
        try:
            if not files.try_lock(directory.fd):
                raise LockedError(path, _holder(directory, name))
            _sign(directory, name, permissions)
        except BaseException:
            lock.release()
            raise
        return lock


def try_acquire(files: Files, path: str) -> Lock | None:
    """Lock the directory `path`, and name no holder; None if another has it."""
    with _changing:
        lock = Lock(Directory.open(files, path))
        if files.try_lock(lock.directory.fd):
            return lock
        lock.release()
        return None


def is_free(files: Files, path: str) -> bool:
    """Whether nobody holds the lock of the directory `path`. It is held for that moment."""
    found = try_acquire(files, path)
    if found is not None:
        found.release()
    return found is not None


def _sign(directory: Directory, name: str, permissions: int) -> None:
    files = directory.files
    fd = directory.create(name, permissions, exclusive=False)
    try:
        files.ftruncate(fd, files.write_all(fd, [_describe_self()], 0))  # in this order it needs no room on a full disk
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
    except (FileNotFoundError, ValueError):  # not written yet, or removed
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
