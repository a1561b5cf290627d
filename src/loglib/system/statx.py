"""Statx: facts about a file without its times.

Since Linux 6.13 a file whose times were asked for gets a new time with its next write, however soon that comes
(Documentation/filesystems/multigrain-ts.rst). Then this write also changes the inode, and the next sync waits for the
file system's journal: on ext4 it takes a third longer. A writer looks at its files at each write, and needs no times.

Invariant: the facts are those of `os.stat`, with its errors.

Threads: safe for all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Any, NamedTuple

from .process import importing

_PATHS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()  # as `os.fsencode`, in one step
_AT_FDCWD, _AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH = -100, 0x100, 0x1000
_WANTED = 0x1 | 0x2 | 0x4 | 0x100 | 0x200  # type, mode, number of names, inode, size
_BUFFER_BYTES = 256
_FACTS = Struct("<16xI8xH2xQQ88xII")  # of struct statx: nlink, mode, ino, size, dev_major, dev_minor


class Facts(NamedTuple):
    """The fields of `os.stat_result` that are not times, for a file that is looked at often."""

    st_nlink: int
    st_mode: int
    st_ino: int
    st_size: int
    st_dev: int


Look = Callable[[int, bytes, int, str | None], Facts]


def of_open_file(look: Look, fd: int) -> Facts:
    """The facts about an open file."""
    return look(fd, b"", _AT_EMPTY_PATH, None)


def of_name(look: Look, path: str, dir_fd: int | None) -> Facts:
    """The facts about the name itself. It is looked up in the open directory `dir_fd`, if there is one."""
    return look(_AT_FDCWD if dir_fd is None else dir_fd, path.encode(*_PATHS), _AT_SYMLINK_NOFOLLOW, path)


@cache
def call() -> Look | None:
    """The call, as Python has none before 3.15. None if the system has no such call."""
    try:
        with importing:
            import ctypes  # imported here: it takes 10 ms, and few programs need it

        statx: Any = ctypes.CDLL(None, use_errno=True).statx
    except Exception:  # noqa: BLE001  # no libffi, memory that must not be executed (SELinux), a hook that refuses
        return None
    statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    spare: list[Any] = []  # buffers and their addresses: to make one takes longer than the call

    def look(at: int, path: bytes, flags: int, name: str | None) -> Facts:
        try:
            buffer, address = spare.pop()
        except IndexError:
            buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
            address = ctypes.addressof(buffer)
        if statx(at, path, flags, _WANTED, address):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), name)
        links, mode, inode, size, major, minor = _FACTS.unpack_from(buffer)
        spare.append((buffer, address))
        return Facts(links, mode, inode, size, os.makedev(major, minor))

    try:
        look(_AT_FDCWD, b"/", 0, None)
    except Exception:  # noqa: BLE001  # an old kernel lacks it, and some containers refuse it
        return None
    return look
