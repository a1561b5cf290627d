"""File systems that fail or are watched: the real one, with something in front of every call."""

import errno
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from loglib.files import Files

OPERATIONS = (
    "open_read", "open_write", "create", "close", "pread", "ftruncate", "rename", "unlink", "size", "sizes",
    "exists", "write_all", "datasync", "sync_directory", "make_directory", "try_lock", "same_file", "free_space",
)  # fmt: skip
CHANGING = ("create", "ftruncate", "rename", "unlink", "write_all", "make_directory")


class Watched(Files):
    """The real file system; `before` is called with each operation's name and arguments."""

    def before(self, name: str, *args: Any) -> None:
        """For subclasses: look, or raise."""

    def after(self, name: str, result: Any, *args: Any) -> Any:
        """For subclasses: look at what came back, and return it or something else."""
        return result


def _watch(name: str) -> Callable[..., Any]:
    def operation(self: Watched, *args: Any, **keywords: Any) -> Any:
        self.before(name, *args)
        return self.after(name, getattr(super(Watched, self), name)(*args, **keywords), *args)

    return operation


for _name in OPERATIONS:
    setattr(Watched, _name, _watch(_name))


class Recording(Watched):
    """Keeps the calls: (name, name of the file it was about)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.bytes_read: Counter[str] = Counter()

    def before(self, name: str, *args: Any) -> None:
        self.calls.append((name, _file_of(args[0])))

    def after(self, name: str, result: Any, *args: Any) -> Any:
        if name == "pread":
            self.bytes_read[_file_of(args[0])] += len(result)
        return result

    def count(self, *names: str) -> int:
        return sum(name in names for name, _ in self.calls)


class Failing(Watched):
    """Fails the `at`-th call (from 1) of the operations named, and of `every` one after it if told."""

    def __init__(self, *names: str, at: int = 1, error: int = errno.EIO, every: bool = False, armed: bool = True):
        self.names = names or OPERATIONS
        self.at = at
        self.error = error
        self.every = every
        self.armed = armed
        self.seen = 0
        self.failed = 0

    def before(self, name: str, *args: Any) -> None:
        if not self.armed or name not in self.names:
            return
        self.seen += 1
        if self.seen == self.at or (self.every and self.seen > self.at):
            self.failed += 1
            if name == "close":
                os.close(args[0])  # as the kernel: the file is closed, whatever it answers
            raise OSError(self.error, os.strerror(self.error))


class Unsynced(Files):
    """Skips the waiting for the disk, for sweeps that ask what is in the files and not what survives."""

    def datasync(self, fd: int) -> None:
        os.fstat(fd)

    def sync_directory(self, path: str) -> None:
        os.stat(path)


class ShortWrites(Files):
    """Writes a few bytes at a time, as a system under pressure may."""

    def write_all(self, fd: int, parts: Any, position: int) -> int:
        data = b"".join(parts)
        for start in range(0, len(data), 7):
            super().write_all(fd, [data[start : start + 7]], position + start)
        return len(data)


class FullDisk(Files):
    """Has `room` bytes left for writing; like a real one, it writes what still fits."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write_all(self, fd: int, parts: Any, position: int) -> int:
        data = b"".join(parts)
        fits = data[: self.room]
        if fits:
            super().write_all(fd, [fits], position)
            self.room -= len(fits)
        if len(fits) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)


class Killed(BaseException):
    """The process died here: nothing may catch it and go on."""


class Dying(Watched):
    """Dies before the `at`-th (from 1) change to the disk; every later call dies as well."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.changes = 0

    def before(self, name: str, *args: Any) -> None:
        if name in CHANGING or name in ("datasync", "sync_directory"):
            self.changes += 1
        if self.changes >= self.at and name != "close":
            raise Killed


def _file_of(place: str | int) -> str:
    path = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else place
    return os.path.basename(path)
