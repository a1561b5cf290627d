"""Files: every call loglib makes to the file system, in one place.

Invariant: no other module of the package calls `os` for files. Each method says what it promises:
*handed to the system* (survives the process) or *synced* (survives a power cut). Positions are the
caller's, always explicit: no append mode and no shared cursor, so that an interrupted write can be
repeated at the same place and readers never disturb one another.

Threads: no state, safe for all.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

__all__ = ["REAL", "Buffer", "Files"]

Buffer = bytes | bytearray | memoryview

# O_NOFOLLOW: a symlink planted in a log directory must not redirect a write. O_NONBLOCK: opening a
# FIFO planted there must not hang. Both are no-ops for regular files, which is all we accept.
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_COPY_BYTES = 1 << 20


class Files:
    """The real file system. Tests put other implementations in its place."""

    def open_read(self, path: str) -> int:
        """Open a regular file for reading; `OSError(EINVAL)` if it is anything else."""
        return self._regular(path, os.open(path, os.O_RDONLY | _SAFE))

    def open_write(self, path: str) -> int:
        """Open an existing regular file for reading and writing."""
        return self._regular(path, os.open(path, os.O_RDWR | _SAFE))

    def create(self, path: str, permissions: int, *, exclusive: bool = True) -> int:
        """Create a file for reading and writing; `FileExistsError` if exclusive and present."""
        flags = os.O_RDWR | os.O_CREAT | _SAFE | (os.O_EXCL if exclusive else 0)
        fd = self._regular(path, os.open(path, flags, permissions))
        if exclusive:
            os.fchmod(fd, permissions)  # the umask would narrow what the owner of the topic asked for
        return fd

    def _regular(self, path: str, fd: int) -> int:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)

    close = staticmethod(os.close)
    pread = staticmethod(os.pread)
    ftruncate = staticmethod(os.ftruncate)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    read_stream = staticmethod(os.read)

    def size(self, fd: int) -> int:
        """Bytes in the open file."""
        return os.fstat(fd).st_size

    def sizes(self, directory: str) -> dict[str, int]:
        """Name and size in bytes of everything in the directory, in no order."""
        with os.scandir(directory) as entries:
            found = {}
            for entry in entries:
                try:
                    found[entry.name] = entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:  # retention removed it between the two calls
                    continue
            return found

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def write_all(self, fd: int, parts: Sequence[Buffer], position: int) -> int:
        """Write the parts back to back at `position`; returns the bytes written. Handed to the system.

        Short writes are carried on. On an error part of the bytes may be in the file: the caller
        owns the position and cuts back or writes again.
        """
        total = sum(map(len, parts))
        written = _pwritev(fd, parts, position)
        while written < total:
            rest = memoryview(b"".join(parts))[written:]
            count = os.pwrite(fd, rest, position + written)
            if count == 0:
                raise OSError(errno.EIO, "the system wrote nothing")
            written += count
        return total

    def datasync(self, fd: int) -> None:
        """Make the file's bytes and size durable. Synced."""
        _datasync(fd)

    def sync_directory(self, path: str) -> None:
        """Make creations, renames and removals in the directory durable. Synced."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def make_directory(self, path: str, permissions: int) -> None:
        """Create one directory whose search bits follow the read bits of `permissions`."""
        os.mkdir(path)
        os.chmod(path, permissions | (permissions & 0o444) >> 2)

    def make_directories(self, path: str) -> None:
        """Create the directory and those above it that are missing. Synced, each name in its parent."""
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for each in reversed(missing):
            with suppress(FileExistsError):
                os.mkdir(each)
            self.sync_directory(os.path.dirname(each))

    def remove_tree(self, path: str) -> None:
        """Remove a directory of ours that nobody else knows, as far as that is possible."""
        import shutil  # here, since it brings in every compression module

        shutil.rmtree(path, ignore_errors=True)

    def write_new(self, path: str, content: bytes, permissions: int) -> None:
        """Create the file with this content. Synced, but for its name: sync the directory."""
        fd = self.create(path, permissions)
        try:
            self.write_all(fd, [content], 0)
            self.datasync(fd)
        finally:
            self.close(fd)

    def read_whole(self, path: str, limit_bytes: int) -> bytes:
        """The whole content of a small file; `OSError(EFBIG)` above the limit."""
        fd = self.open_read(path)
        try:
            if self.size(fd) > limit_bytes:
                raise OSError(errno.EFBIG, f"larger than {limit_bytes} bytes", path)
            return self.pread(fd, limit_bytes, 0)
        finally:
            self.close(fd)

    def copy_range(self, source: int, target: int, *, start: int, end: int, at: int) -> None:
        """Copy bytes [start, end) of one open file to `at` in another (or the same). Handed to the system."""
        while start < end:
            block = self.pread(source, min(_COPY_BYTES, end - start), start)
            if not block:
                raise OSError(errno.EIO, "the file ended early")
            self.write_all(target, [block], at)
            start += len(block)
            at += len(block)

    def write_stream(self, to: int, data: Buffer) -> None:
        """Write to a socket, pipe or file at its own position, waiting where it is not ready."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(to, view) :]
            except BlockingIOError:
                _wait(to, select.POLLOUT)

    def wait_readable(self, source: Any) -> None:
        """Wait until a file descriptor, or what has one, has something to read."""
        _wait(source, select.POLLIN)

    def send_range(self, to: int, source: int, start: int, size_bytes: int) -> None:
        """Hand bytes of an open file to a socket, pipe or file; by zero copy where the system can."""
        end = start + size_bytes
        while start < end:
            try:
                sent = _sendfile(to, source, start, end - start)
            except BlockingIOError:
                _wait(to, select.POLLOUT)
                continue
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                block = self.pread(source, min(_COPY_BYTES, end - start), start)  # a file open for appending, say
                self.write_stream(to, block)
                sent = len(block)
            if sent == 0:
                raise OSError(errno.EIO, "the file ended early")
            start += sent

    def try_lock(self, fd: int) -> bool:
        """Take the exclusive flock of the open file if nobody has it; never waits."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def same_file(self, fd: int, path: str) -> bool:
        """Whether the path still names the file that is open."""
        try:
            named = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(fd), named)

    def free_space(self, path: str) -> tuple[int, int]:
        """(free, total) bytes of the file system, as an unprivileged user sees them."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize


def _wait(file: Any, event: int) -> None:
    poll = select.poll()
    poll.register(file, event)
    poll.poll()


if sys.platform == "darwin":  # no pwritev, no fdatasync, and sendfile to sockets only

    def _pwritev(fd: int, parts: Sequence[Buffer], position: int) -> int:
        return os.pwrite(fd, b"".join(parts), position)

    def _datasync(fd: int) -> None:
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # fsync stops at the drive's cache

    def _sendfile(to: int, source: int, start: int, size_bytes: int) -> int:
        return os.write(to, os.pread(source, min(size_bytes, _COPY_BYTES), start))

else:
    _pwritev = os.pwritev
    _datasync = os.fdatasync
    _sendfile = os.sendfile


REAL = Files()
