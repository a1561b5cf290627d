"""Watched: file systems that record each system call of another file system, or make it fail.

Invariant: a watched file system behaves as the inner one, except for the faults that its class documents. Faults come
from outside the library, so this module knows nothing about the written data.

A call has the name of its method in `Files`. An `open` has the name of its purpose: `create`, `open_write`,
`open_read` or `open_directory`.

Threads: a record is safe for all. If two threads make calls, a fault may hit either of them.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..system.files import REAL, Buffer, Files
from ..system.files_wrapper import FilesWrapper

# The calls that change the disk or make changes durable.
CHANGES = (
    "create", "pwritev", "append", "copy_file_range", "ftruncate", "datasync", "fsync", "rename", "link", "unlink",
    "mkdir", "rmdir",
)  # fmt: skip
_TWO_PATHS = ("rename", "link")


class Call(NamedTuple):
    """A system call: its name, its file, and its other arguments."""

    name: str
    path: str  # the whole path; for a descriptor, the path at its opening; "" if it was not opened here
    arguments: tuple[Any, ...] = ()

    @property
    def file(self) -> str:
        """The last part of the path."""
        return os.path.basename(self.path)


class WatchedFiles(FilesWrapper):
    """A base class: its `before` and `after` see every system call to the inner files."""

    def __init__(self, inner: Files = REAL) -> None:
        super().__init__(inner)
        self._paths: dict[int, str] = {}

    def before(self, call: Call) -> None:
        """Called before each system call; it may raise an error instead of the call."""

    def after(self, call: Call, result: Any) -> Any:  # noqa: ARG002
        """Called after each system call; returns its result, or another one."""
        return result

    def forward(self, name: str, *arguments: Any, **directories: int | None) -> Any:
        place, *rest = arguments
        if isinstance(place, int):
            path = self._paths.get(place, "")
        else:
            path = self._path_in(directories.get("src_dir_fd" if name in _TWO_PATHS else "dir_fd"), place)
        if name in _TWO_PATHS:
            rest[0] = self._path_in(directories.get("dst_dir_fd"), rest[0])
        call = Call(_purpose(rest[0]) if name == "open" else name, path, tuple(rest))
        self.before(call)
        result = super().forward(name, *arguments, **directories)
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


class RecordingFiles(WatchedFiles):
    """Keeps the calls in order, and the number of bytes read from each file, by its name."""

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
        """The number of calls with one of these names."""
        return sum(call.name in names for call in self.calls)

    def named(self, *names: str) -> list[tuple[str, str]]:
        """The calls with one of these names, or all calls, each with its file's name."""
        return [(call.name, call.file) for call in self.calls if not names or call.name in names]


class FaultyFiles(WatchedFiles):
    """Fails the `at`-th call (from 1) with one of the given names (any call, if none is given).

    With `every` it also fails each later one. While not `armed` it neither fails nor counts. `seen` and `failed`
    are the numbers of counted and failed calls. With an `at` that is never reached, a run only counts the calls.
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
            self.inner.close(fd)  # like the kernel, which closes the file even if it returns an error


class ShortWrites(WatchedFiles):
    """Writes at most `size_bytes` per call, as a system under load may do."""

    def __init__(self, size_bytes: int = 7, inner: Files = REAL) -> None:
        super().__init__(inner)
        self.size_bytes = size_bytes

    def pwritev(self, fd: int, parts: Sequence[Buffer], position: int) -> int:  # type: ignore[override]
        return self.inner.pwritev(fd, [b"".join(parts)[: self.size_bytes]], position)


class FullDisk(WatchedFiles):
    """Has `room` bytes left for writing, even if files are removed. Like a real disk, it writes the part that fits."""

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

    def append(self, fd: int, data: Buffer) -> int:  # type: ignore[override]
        fits = bytes(data)[: self.room]
        if not fits:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.inner.append(fd, fits)
        self.room -= written
        return written

    def copy_file_range(self, source: int, to: int, size_bytes: int, start: int, at: int) -> int:
        return self.pwritev(to, [self.inner.pread(source, size_bytes, start)], at)


class Killed(BaseException):
    """The process died here. No code may catch this and continue."""


class DyingFiles(WatchedFiles):
    """Dies before the `at`-th change to the disk (from 1). Every later call except `close` also dies."""

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
    """The real files without waiting for the disk, for tests of contents and not of durability."""

    def datasync(self, fd: int) -> None:
        self.fstat(fd)

    def fsync(self, fd: int) -> None:
        self.fstat(fd)
