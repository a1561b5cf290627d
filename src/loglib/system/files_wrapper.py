"""Files wrapper: other files, of which a subclass sees or changes some calls.

Invariant: each system call reaches the inner files with its arguments, unless a subclass overrides its
method. All calls go through `forward`, so a subclass that overrides this one method sees all of them.

Threads: as safe as the inner files.
"""

from __future__ import annotations

# `forward` returns what the inner call returns, which is what the method says.
# mypy: warn-return-any=False
import os
from collections.abc import Sequence
from typing import Any

from .files import Buffer, Files
from .statx import Facts


class FilesWrapper(Files):
    """A base class; `inner` are the other files."""

    def __init__(self, inner: Files) -> None:
        self.inner = inner
        self.real = inner.real

    def forward(self, name: str, *arguments: Any, **directories: int | None) -> Any:
        """Make the system call `name` on the inner files; `directories` are its `dir_fd=` and the like."""
        return getattr(self.inner, name)(*arguments, **directories)

    def random_bytes(self, count: int) -> bytes:
        return self.inner.random_bytes(count)

    # --- system calls, in the order of `SystemCalls` ------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        return self.forward("open", path, flags, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        self.forward("close", fd)

    def pread(self, fd: int, size_bytes: int, position: int) -> bytes:
        return self.forward("pread", fd, size_bytes, position)

    def pwritev(self, fd: int, parts: Sequence[Buffer], position: int) -> int:  # type: ignore[override]
        return self.forward("pwritev", fd, parts, position)

    def append(self, fd: int, data: Buffer) -> int:  # type: ignore[override]
        return self.forward("append", fd, data)

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        self.forward("ftruncate", fd, size_bytes)

    def datasync(self, fd: int) -> None:
        self.forward("datasync", fd)

    def drop_cached(self, fd: int, start: int, size_bytes: int) -> None:
        self.forward("drop_cached", fd, start, size_bytes)

    def fsync(self, fd: int) -> None:
        self.forward("fsync", fd)

    def rename(self, path: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        self.forward("rename", path, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def link(self, path: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:  # type: ignore[override]
        self.forward("link", path, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self.forward("unlink", path, dir_fd=dir_fd)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self.forward("mkdir", path, mode, dir_fd=dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self.forward("rmdir", path, dir_fd=dir_fd)

    def chmod(self, path: Any, mode: int, *, dir_fd: int | None = None) -> None:  # type: ignore[override]
        self.forward("chmod", path, mode, dir_fd=dir_fd)

    def fchmod(self, fd: int, mode: int) -> None:
        self.forward("fchmod", fd, mode)

    def fstat(self, fd: int) -> os.stat_result:
        return self.forward("fstat", fd)

    def stat(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:  # type: ignore[override]
        return self.forward("stat", path, dir_fd=dir_fd)

    def lstat(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        return self.forward("lstat", path, dir_fd=dir_fd)

    def fstatx(self, fd: int) -> Facts | os.stat_result:
        return self.forward("fstatx", fd)

    def lstatx(self, path: Any, *, dir_fd: int | None = None) -> Facts | os.stat_result:
        return self.forward("lstatx", path, dir_fd=dir_fd)

    def listdir(self, place: Any) -> list[str]:
        return self.forward("listdir", place)

    def flock(self, fd: int, operation: int) -> None:
        self.forward("flock", fd, operation)

    def lockf(self, fd: int, operation: int, size_bytes: int, start: int) -> None:
        self.forward("lockf", fd, operation, size_bytes, start)

    def getlk(self, fd: int, size_bytes: int, start: int) -> tuple[int, int] | None:
        return self.forward("getlk", fd, size_bytes, start)

    def statvfs(self, path: Any) -> os.statvfs_result:
        return self.forward("statvfs", path)

    def sendfile(self, to: int, source: int, start: int, size_bytes: int) -> int:
        return self.forward("sendfile", to, source, start, size_bytes)

    def read(self, fd: int, size_bytes: int) -> bytes:
        return self.forward("read", fd, size_bytes)

    def write(self, fd: int, data: Buffer) -> int:  # type: ignore[override]
        return self.forward("write", fd, data)

    def copy_file_range(self, source: int, to: int, size_bytes: int, start: int, at: int) -> int:
        return self.forward("copy_file_range", source, to, size_bytes, start, at)

    def poll(self, file: Any, event: int, timeout_s: float | None = None) -> bool:
        return self.forward("poll", file, event, timeout_s)
