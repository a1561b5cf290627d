"""Files wrapper: other files, of which a subclass sees or changes some calls.

Invariant: each system call reaches the inner files with its arguments, unless a subclass overrides its
method. All calls go through `forward`, so a subclass that overrides this one method sees all of them.

Threads: as safe as the inner files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .files import Buffer, Files

__all__ = ["FilesWrapper"]


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
        fd: int = self.forward("open", path, flags, mode, dir_fd=dir_fd)
        return fd

    def close(self, fd: int) -> None:
        self.forward("close", fd)

    def pread(self, fd: int, size_bytes: int, position: int) -> bytes:
        data: bytes = self.forward("pread", fd, size_bytes, position)
        return data

    def pwritev(self, fd: int, parts: Sequence[Buffer], position: int) -> int:  # type: ignore[override]
        written: int = self.forward("pwritev", fd, parts, position)
        return written

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
        facts: os.stat_result = self.forward("fstat", fd)
        return facts

    def stat(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:  # type: ignore[override]
        facts: os.stat_result = self.forward("stat", path, dir_fd=dir_fd)
        return facts

    def lstat(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        facts: os.stat_result = self.forward("lstat", path, dir_fd=dir_fd)
        return facts

    def listdir(self, place: Any) -> list[str]:
        names: list[str] = self.forward("listdir", place)
        return names

    def flock(self, fd: int, operation: int) -> None:
        self.forward("flock", fd, operation)

    def statvfs(self, path: Any) -> os.statvfs_result:
        facts: os.statvfs_result = self.forward("statvfs", path)
        return facts

    def sendfile(self, to: int, source: int, start: int, size_bytes: int) -> int:
        sent: int = self.forward("sendfile", to, source, start, size_bytes)
        return sent

    def read(self, fd: int, size_bytes: int) -> bytes:
        data: bytes = self.forward("read", fd, size_bytes)
        return data

    def write(self, fd: int, data: Buffer) -> int:  # type: ignore[override]
        written: int = self.forward("write", fd, data)
        return written

    def copy_file_range(self, source: int, to: int, size_bytes: int, start: int, at: int) -> int:
        copied: int = self.forward("copy_file_range", source, to, size_bytes, start, at)
        return copied

    def poll(self, file: Any, event: int, timeout_s: float | None = None) -> bool:
        ready: bool = self.forward("poll", file, event, timeout_s)
        return ready
