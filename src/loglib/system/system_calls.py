"""System calls: every call that loglib makes to the file system, each as one method.

Invariant: no other module of the package calls `os` for files. Another implementation overrides these methods only.

No descriptor that the library opens keeps the number 0, 1 or 2. A service may have closed these. The system then gives
them to the next file that is opened, and a C library that prints a warning to "standard error" would write it into a
log. SQLite met this ("How to corrupt an SQLite database file", 2.3). So each new descriptor goes through
`above_standard`. Only the command line opens these three (cli/streams.py), because it owns its process.

Threads: no state, safe for all; a poll object belongs to one thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import LogError
from . import statx

Buffer = bytes | bytearray | memoryview

COPY_BYTES = 1 << 20  # a copy passes through this process in blocks of this size
LACKS = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # the errors for a call that a file system does not have
_FD_SETSIZE = 1024  # select() takes no descriptor from this number on
_FIRST = 3  # the first descriptor after standard input, output and error


def _open(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    return above_standard(os.open(path, flags, mode, dir_fd=dir_fd))


def _fstatx(fd: int) -> statx.Facts | os.stat_result:
    look = statx.call()
    if look is not None:
        try:
            return statx.of_open_file(look, fd)
        except OSError:  # a filter of system calls may refuse it from now on; else the next call raises it
            pass
    return os.fstat(fd)


def _lstatx(path: str, *, dir_fd: int | None = None) -> statx.Facts | os.stat_result:
    look = statx.call()
    if look is not None:
        try:
            return statx.of_name(look, path, dir_fd)
        except OSError:
            pass
    return os.lstat(path, dir_fd=dir_fd)


def _poll(file: Any, event: int, timeout_s: float | None = None) -> bool:
    poll = new_poll()
    poll.register(file, event)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _lacking(*_: int) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def _listdir(place: str | int) -> list[str]:
    return os.listdir(place)


if sys.platform == "darwin":  # no pwritev, no fdatasync, and sendfile to sockets only

    def _pwritev(fd: int, parts: Sequence[Buffer], position: int) -> int:
        return os.pwrite(fd, b"".join(parts), position)

    def _datasync(fd: int) -> None:
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # fsync stops at the drive's cache

    def _drop_cached(fd: int, start: int, size_bytes: int) -> None:
        """This system has no such call."""

    def _sendfile(to: int, source: int, start: int, size_bytes: int) -> int:
        return os.write(to, os.pread(source, min(size_bytes, COPY_BYTES), start))

    def _copy_file_range(source: int, to: int, size_bytes: int, start: int, at: int) -> int:
        return _pwritev(to, [os.pread(source, min(size_bytes, COPY_BYTES), start)], at)

else:
    _pwritev = os.pwritev

    def _datasync(fd: int) -> None:
        try:
            os.fdatasync(fd)
        except OSError as error:
            if error.errno not in LACKS:
                raise
            os.fsync(fd)

    def _drop_cached(fd: int, start: int, size_bytes: int) -> None:
        os.posix_fadvise(fd, start, size_bytes, os.POSIX_FADV_DONTNEED)

    _sendfile: Callable[[int, int, int, int], int] = os.sendfile
    # An interpreter that was built for an older system has no such call.
    _copy_file_range: Callable[[int, int, int, int, int], int] = getattr(os, "copy_file_range", _lacking)

# Here files are numbers. The functions of the system also take objects; other implementations need not.
_fsync: Callable[[int], None] = os.fsync
_flock: Callable[[int, int], None] = fcntl.flock
_lockf: Callable[[int, int, int, int], object] = fcntl.lockf

# The C structure of a lock, see fcntl(2): its type, origin, start and size, and the process that has it.
_LOCK = struct.Struct("@qqihh" if sys.platform == "darwin" else "@hhqqi0q")


def _getlk(fd: int, size_bytes: int, start: int) -> tuple[int, int] | None:
    wanted, at = (fcntl.F_WRLCK, os.SEEK_SET), (start, size_bytes)
    if sys.platform == "darwin":
        first, _, pid, kind, _ = _LOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, _LOCK.pack(*at, 0, *wanted)))
    else:
        kind, _, first, _, pid = _LOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, _LOCK.pack(*wanted, *at, 0)))
    return None if kind == fcntl.F_UNLCK else (first, pid)


class SystemCalls:
    """The calls of the real file system.

    Those with a path also take `dir_fd=`, like the functions of `os`: then the path is looked up in that open
    directory, even if it has been moved. `rename` and `link` take `src_dir_fd=` and `dst_dir_fd=`.
    """

    open = staticmethod(_open)  # (path, flags, permissions); a number above those of the standard streams
    close = staticmethod(os.close)
    pread = staticmethod(os.pread)
    pwritev = staticmethod(_pwritev)  # may write fewer bytes than given
    append = staticmethod(os.write)  # (a file of `Files.open_append`, data): at its end, whoever else appends
    ftruncate = staticmethod(os.ftruncate)
    datasync = staticmethod(_datasync)  # the file's bytes and size: synced
    drop_cached = staticmethod(_drop_cached)  # whole clean pages: the next read gets them from the disk
    fsync = staticmethod(_fsync)  # a directory's names: synced
    rename = staticmethod(os.rename)
    link = staticmethod(os.link)  # a second name for a file; FileExistsError if the name is taken, so one caller wins
    unlink = staticmethod(os.unlink)
    mkdir = staticmethod(os.mkdir)  # (path, permissions)
    rmdir = staticmethod(os.rmdir)
    chmod = staticmethod(os.chmod)
    fchmod = staticmethod(os.fchmod)
    fstat = staticmethod(os.fstat)
    stat = staticmethod(os.stat)
    lstat = staticmethod(os.lstat)
    fstatx = staticmethod(_fstatx)  # as `fstat`, without times, so that the next write need not change them
    lstatx = staticmethod(_lstatx)
    listdir = staticmethod(_listdir)  # (a path, or an open directory)
    flock = staticmethod(_flock)
    lockf = staticmethod(_lockf)  # (fd, operation, size_bytes, start): locks of bytes, which belong to the process
    getlk = staticmethod(_getlk)  # (fd, size_bytes, start): the first byte and the process of a lock of another one
    statvfs = staticmethod(os.statvfs)
    sendfile = staticmethod(_sendfile)  # (to, source, start, size_bytes)
    read = staticmethod(os.read)  # from a stream, at its own position; so does `write`
    write = staticmethod(os.write)
    copy_file_range = staticmethod(_copy_file_range)  # (source, to, size_bytes, start, at): shares blocks if it can
    poll = staticmethod(_poll)  # (a stream, event, most seconds to wait); False if they passed without the event


SYSTEM_CALLS = tuple(name for name in vars(SystemCalls) if not name.startswith("_"))


# --- descriptors ------------------------------------------------------------------------------


def above_standard(fd: int) -> int:
    """The descriptor, if it is above 2. Otherwise close it, and return another one for the same open file."""
    if fd >= _FIRST:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(fd)


def nameless_file() -> int:
    """A new temporary file for reading and writing. It is gone when it is closed."""
    from tempfile import TemporaryFile  # imported here: only an archive in an object store needs it

    with TemporaryFile(buffering=0) as file:
        return above_standard(os.dup(file.fileno()))


def new_poll() -> select.poll | _BySelect:
    """The system's poll object, or one over `select.select`.

    eventlet removes `select.poll` when it patches the standard library. Its `select.select` lets other greenlets run.
    """
    return select.poll() if hasattr(select, "poll") else _BySelect()


def await_readable(fd: int, timeout_s: float) -> None:
    """Return when the descriptor is readable, or after this time: in microseconds, where poll() has milliseconds."""
    if fd < _FD_SETSIZE:
        select.select([fd], [], [], timeout_s)
    else:
        _poll(fd, select.POLLIN, timeout_s)


class _BySelect:
    """The methods of `select.poll` that are used. An error of a descriptor is reported as readable or writable."""

    def __init__(self) -> None:
        self._wanted: dict[int, int] = {}

    def register(self, fd: Any, eventmask: int, /) -> None:
        self._wanted[fd if isinstance(fd, int) else fd.fileno()] = eventmask

    def unregister(self, fd: Any, /) -> None:
        del self._wanted[fd if isinstance(fd, int) else fd.fileno()]

    def poll(self, timeout: float | None = None, /) -> list[tuple[int, int]]:
        readers = [fd for fd, wanted in self._wanted.items() if wanted & select.POLLIN]
        writers = [fd for fd, wanted in self._wanted.items() if wanted & select.POLLOUT]
        seconds = None if timeout is None else max(timeout, 0) / 1000
        try:
            readable, writable, _ = select.select(readers, writers, [], seconds)
        except ValueError as error:
            raise LogError(
                f"this process has no select.poll, as under eventlet, and select.select does not take descriptor "
                f"{max(self._wanted)}: close files, or do not remove select.poll"
            ) from error
        found = dict.fromkeys(readable, select.POLLIN)
        for fd in writable:
            found[fd] = found.get(fd, 0) | select.POLLOUT
        return list(found.items())
