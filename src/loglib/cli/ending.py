"""Ending: the exit codes of commands, and what an error means for one.

Invariant: an error of the library or of the system is one line on standard error. The fault of one topic hides nothing
of the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress

from ..errors import CorruptLogError, LogError
from ..system.failures import told
from .streams import named, note

DAMAGED = 1  # damage, gaps and counts that do not add up
WRONG = 2  # a command that is wrong, such as a topic that is not there
FAILED = 3  # what could not be done
GRAVITY = (DAMAGED, WRONG, FAILED, 0)  # the exit code of several things is the first of these that one has


def most_serious(codes: Iterable[int]) -> int:
    """The exit code of a command of several parts, of which each has its own."""
    return min(codes, key=GRAVITY.index, default=0)


def fail(error: object, code: int) -> int:
    """Print why a command, or a part of it, has failed. Returns the exit code."""
    with suppress(OSError):  # what was printed before comes first
        sys.stdout.flush()
    note(f"loglib: {error}")
    return code


def fail_by(error: Exception) -> int:
    """Print an error of the library or of the system. Returns its exit code."""
    if isinstance(error, CorruptLogError):
        return fail(error, DAMAGED)
    if isinstance(error, OSError) and not isinstance(error, LogError):
        error = named(error)
    is_wrong = isinstance(error, ValueError) and not isinstance(error, LogError | OSError)  # an argument of the library
    return fail(told(error), WRONG if is_wrong else FAILED)


def each_of(paths: list[str], look: Callable[[str], int]) -> int:
    """Look at each of several topics. Returns the most serious exit code.

    A topic that cannot be looked at is a message, and the next one comes; the error of a topic that is alone is raised.
    """
    if len(paths) == 1:
        return look(paths[0])
    codes = []
    for path in paths:
        try:
            codes.append(look(path))
        except (LogError, OSError) as error:
            codes.append(fail_by(error))
    return most_serious(codes)
