"""Watched: files with something in front of every system call: a record of it, or a fault.

Invariant: a watched file system does what the one behind it does, but for what its class says. Faults
come from outside the library, so nothing here knows what it writes.

A call goes by the name of its method in `Files`; `open`, by what it is for: `create`, `open_write`,
`open_read` or `open_directory`.

Threads: a record is safe for all; which of two calls at once a fault hits is theirs to settle.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..system.files import REAL, SYSTEM_CALLS, Buffer, Files

__all__ = [
    "CHANGES",
    "Call",
    "DyingFiles",
    "FaultyFiles",
    "FullDisk",
    "Killed",
    "RecordingFiles",
    "ShortWrites",
    "UnsyncedFiles",
    "WatchedFiles",
]

# The calls after which a disk may differ, or is sure to hold what it held.
CHANGES = ("create", "pwritev", "ftruncate", "datasync", "fsync", "rename", "unlink", "mkdir", "rmdir")


class Call(NamedTuple):
    """A system call: its name, the file it is about, and the rest of its arguments."""

    name: str
    path: str  # whole; of a descriptor, the path by which it was opened; "" if elsewhere
    arguments: tuple[Any, ...] = ()

    @property
    def file(self) -> str:
        """The last part of the path."""
        return os.path.basename(self.path)


class WatchedFiles(Files):
    """For subclasses: `before` and `after` see every system call on its way to the files behind."""

    def __init__(self, inner: Files = REAL) -> None:
        self.inner = inner
        self.real = inner.real
        self._paths: dict[int, str] = {}

    def random_bytes(self, count: int) -> bytes:
        return self.inner.random_bytes(count)

    def before(self, call: Call) -> None:
        """Look, or raise in place of the call."""

    def after(self, call: Call, result: Any) -> Any:  # noqa: ARG002
        """Look at what came back, and return it or something else."""
        return result

    def _pass_on(self, name: str, *arguments: Any, **directories: int | None) -> Any:
        place, *rest = arguments
        if isinstance(place, int):
            path = self._paths.get(place, "")
        else:
            path = self._path_in(directories.get("src_dir_fd" if name == "rename" else "dir_fd"), place)
        if name == "rename":
            rest[0] = self._path_in(directories.get("dst_dir_fd"), rest[0])
        call = Call(_purpose(rest[0]) if name == "open" else name, path, tuple(rest))
        self.before(call)
        result = getattr(self.inner, name)(*arguments, **directories)
        if name == "open":
            self._paths[result] = path
        elif name == "rename":
            self._paths |= {fd: rest[0] for fd, each in list(self._paths.items()) if each == path}
        return self.after(call, result)

    def _path_in(self, directory: int | None, path: Any) -> str:
        return str(path) if directory is None else os.path.join(self._paths.get(directory, ""), path)


def _purpose(flags: int) -> str:
    if flags & os.O_CREAT:
        return "create"
    if flags & os.O_DIRECTORY:
        return "open_directory"
    return "open_write" if flags & os.O_RDWR else "open_read"


def _passing_on(name: str) -> Callable[..., Any]:
    def call(self: WatchedFiles, *arguments: Any, **directories: int | None) -> Any:
        return self._pass_on(name, *arguments, **directories)

    call.__name__ = name
    return call


for _name in SYSTEM_CALLS:
    setattr(WatchedFiles, _name, _passing_on(_name))


class RecordingFiles(WatchedFiles):
    """Keeps the calls in order, and how many bytes were read of each file, by its name."""

    def __init__(self, inner: Files = REAL) -> None:
        super().__init__(inner)
        self.calls: list[Call] = []
        self.bytes_read: Counter[str] = Counter()

    def before(self, call: Call) -> None:
        self.calls.append(call)

    def after(self, call: Call, result: Any) -> Any:
        if call.name == "pread":
            self.bytes_read[call.file] += len(result)
        return result

    def count(self, *names: str) -> int:
        """How many calls have had one of these names."""
        return sum(call.name in names for call in self.calls)

    def named(self, *names: str) -> list[tuple[str, str]]:
        """The calls with one of these names, or all, each with its file's name."""
        return [(call.name, call.file) for call in self.calls if not names or call.name in names]


class FaultyFiles(WatchedFiles):
    """Fails the `at`-th call, from 1, of those named (of all, if none is), and with `every` each one after it.

    While not `armed` it neither fails nor counts. `seen` and `failed` are how many calls it has
    counted and failed: with an `at` that is never reached, a run counts what there is to fail.
    """

    def __init__(
        self, *names: str, at: int = 1, error: int = errno.EIO, every: bool = False, armed: bool = True,
        inner: Files = REAL,
    ) -> None:  # fmt: skip
        super().__init__(inner)
        self.names = names
        self.at = at
        self.error = error
        self.every = every
        self.armed = armed
        self.seen = 0
        self.failed = 0

    def before(self, call: Call) -> None:
        if not self.armed or (self.names and call.name not in self.names):
            return
        self.seen += 1
        if self.seen == self.at or (self.every and self.seen > self.at):
            self.failed += 1
            raise OSError(self.error, os.strerror(self.error), call.path)

    def close(self, fd: int) -> None:
        try:
            self.before(Call("close", self._paths.get(fd, "")))
        finally:
            self.inner.close(fd)  # as the kernel: the file is closed, whatever it answers


class ShortWrites(WatchedFiles):
    """Writes at most `size_bytes` with one call, as a system under pressure may."""

    def __init__(self, size_bytes: int = 7, inner: Files = REAL) -> None:
        super().__init__(inner)
        self.size_bytes = size_bytes

    def pwritev(self, fd: int, parts: Sequence[Buffer], position: int) -> int:  # type: ignore[override]
        return self.inner.pwritev(fd, [b"".join(parts)[: self.size_bytes]], position)


class FullDisk(WatchedFiles):
    """Has `room` bytes left for writing, whatever is removed; like a real one, it writes what still fits."""

    def __init__(self, room: int, inner: Files = REAL) -> None:
        super().__init__(inner)
        self.room = room

    def pwritev(self, fd: int, parts: Sequence[Buffer], position: int) -> int:  # type: ignore[override]
        fits = b"".join(parts)[: self.room]
        if not fits:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.inner.pwritev(fd, [fits], position)
        self.room -= written
        return written


class Killed(BaseException):
    """The process died here: nothing may catch it and go on."""


class DyingFiles(WatchedFiles):
    """Dies before the `at`-th change to the disk, from 1; every later call but `close` dies as well."""

    def __init__(self, at: int, inner: Files = REAL) -> None:
        super().__init__(inner)
        self.at = at
        self.changes = 0

    def before(self, call: Call) -> None:
        if call.name in CHANGES:
            self.changes += 1
        if self.changes >= self.at and call.name != "close":
            raise Killed


class UnsyncedFiles(Files):
    """The real files without the waiting for the disk, for tests that ask what is in them and not what survives."""

    def datasync(self, fd: int) -> None:
        self.fstat(fd)

    def fsync(self, fd: int) -> None:
        self.fstat(fd)
