"""Lock: one writer a partition, by an flock that the kernel drops when its holder dies.

Invariant: while `acquire` has returned and `release` has not been called, no other handle in any
process holds the partition, whoever removed or replaced the lock file. The file itself is never
unlinked; the text in it is for messages only and decides nothing.

A forked child shares its parent's lock, and keeps it alive: it must close its copy of the file and
never unlock it, since unlocking is for all that share it.
"""

from __future__ import annotations

import os
import sys
import time

from .errors import LockedError
from .files import Files

__all__ = ["NAME", "acquire"]

NAME = "lock"


def acquire(files: Files, path: str, permissions: int) -> int:
    """Take the lock at once or raise `LockedError` naming the holder; returns the open file.

    Closing the file releases the lock.
    """
    fd = files.create(path, permissions, exclusive=False)
    try:
        if not files.try_lock(fd):
            raise LockedError(path, _holder(files, fd))
        if not files.same_file(fd, path):  # replaced meanwhile: this lock guards nothing that others see
            raise LockedError(path, "a process that replaced the lock file")
        files.ftruncate(fd, 0)
        files.write_all(fd, [_describe_self()], 0)
    except BaseException:
        files.close(fd)
        raise
    return fd


def _describe_self() -> bytes:
    program = os.path.basename(sys.argv[0] if sys.argv else sys.executable) or "python"
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return f"{os.getpid()} {since} {program}\n".encode(errors="replace")


def _holder(files: Files, fd: int) -> str:
    try:
        pid, since, program = files.pread(fd, 4096, 0).decode(errors="replace").split(maxsplit=2)
        alive = _is_alive(int(pid))
    except ValueError:  # caught between locking and writing its name
        return "another process"
    if alive:
        return f"pid {pid} ({program.strip()}) since {since}"
    return f"a process forked by pid {pid} ({program.strip()}), which is gone itself; since {since}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
