"""Descriptors: the library's open files have numbers from 3 on, whatever the process has closed.

Invariant: no descriptor that the library opens keeps the number 0, 1 or 2. A service may have closed these. The system
then gives them to the next file that is opened, and a C library that prints a warning to "standard error" would write
it into a log. SQLite met this ("How to corrupt an SQLite database file", 2.3).

Each new descriptor goes through `above_standard`. Only the command line opens the three numbers themselves
(cli/streams.py), because it owns its process.

Threads: no state, safe for all.
"""

from __future__ import annotations

import fcntl
import os

__all__ = ["above_standard", "nameless_file"]

_FIRST = 3  # after standard input, output and error


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
