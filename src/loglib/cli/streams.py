"""Streams: the standard input, output and error of a command, also if they are closed, full or stuck.

Invariant: descriptors 0, 1 and 2 are open after `prepare`, so no file of a log gets one of them. Using a stream that
was closed fails; a command that does not use it does not fail.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

INPUT = "standard input"
# Opened for the opposite of their use, so that each use fails with EBADF.
_UNUSABLE = {0: os.O_WRONLY, 1: os.O_RDONLY, 2: os.O_RDONLY}


def prepare() -> None:
    """Open the standard streams that are closed."""
    for fd, flags in _UNUSABLE.items():
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, flags)  # the lowest free number, which is this one
            os.set_inheritable(fd, True)
    os.set_blocking(1, True)  # another program that shares the pipe may have changed it, and output would be lost
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")  # messages are lost
    before = sys.stdout or sys.stderr
    # A path with bytes that are not UTF-8 is no reason to fail after the work was done.
    errors = "backslashreplace" if before.errors == "strict" else before.errors
    # With a buffer, even if PYTHONUNBUFFERED is set: one write per record is slow, and its errors could not be
    # distinguished from those of a log.
    sys.stdout = os.fdopen(
        1, "w", buffering=1 if os.isatty(1) else -1, encoding=before.encoding, errors=errors, closefd=False
    )  # fmt: skip


def named(error: OSError) -> OSError:
    """The error, with the name of standard output if writing there has failed."""
    if error.filename is None and _output_fails():
        return OSError(error.errno, why(error), "standard output")
    return error


def why(error: OSError) -> str:
    """The reason of an error of a stream, for a message."""
    return "it is closed" if error.errno == errno.EBADF else str(error.strerror)


def _output_fails() -> bool:
    """True if standard output has bytes that it cannot write: its buffer keeps them."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def end_output() -> None:
    """Write the rest of the output that is accepted without waiting, and drop what is not: a command must end."""
    try:
        os.set_blocking(1, False)
        try:
            sys.stdout.flush()
        finally:
            os.set_blocking(1, True)
    except (OSError, ValueError):
        _drop_rest(1)
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        _drop_rest(2)


def _drop_rest(fd: int) -> None:
    """Send what a stream could not write to nowhere: the interpreter would retry at its end, and exit with 120."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def note(text: str) -> None:
    """Print a message for a person on standard error: it is not data. If it cannot be printed, nothing fails."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
