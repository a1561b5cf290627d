"""Failures: what an error of the system means, and what one error says of several, and of the records of a call.

Invariant: nothing is raised here but `StorageFullError`. A caller that raises one of several errors names the lost
records of all.

Threads: pure functions; an error belongs to the thread that raises it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ..errors import LogError, OffsetRange, StorageFullError, StorageIOError, WriterFailedError

# --- an error of the system --------------------------------------------------------------------------


def is_out_of_descriptors(error: BaseException) -> bool:
    """True if a call failed because the process, or the system, may have no more open files."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def is_full(error: BaseException) -> bool:
    """True if the disk, a quota or a file-size limit refused a write."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def refused_write(path: str, error: OSError, doing: str) -> StorageFullError | StorageIOError:
    """The error for a write that the system refused. `doing` says what was written."""
    return StorageFullError(path, error) if is_full(error) else StorageIOError(path, error, doing)


@contextmanager
def refusing_full_disk(path: str) -> Iterator[None]:
    """Raise `StorageFullError` with this path if there is no room for what the block writes.

    The system names no file in the error of a write. The block may have named one that is built aside, and is gone now.
    """
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise StorageFullError(path, OSError(error.errno, os.strerror(error.errno or 0))) from error


def told(error: Exception) -> str:
    """The error in one line, without the number with which Python's own line of an error of the system begins."""
    if not isinstance(error, OSError):
        return str(error)
    if error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error).removeprefix(f"[Errno {error.errno}] ")


def printable(text: str) -> str:
    """Text from a file, made safe for a message: control characters and line breaks are replaced."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


# --- several errors, and the records that an error names ---------------------------------------------


def together(errors: Sequence[Exception]) -> Exception:
    """Return the most important of these errors, which then names the lost records of all.

    Its `errors` are the others. The order of importance: a writer that must be reopened, a failing disk, a
    full disk, other errors of loglib, and then unexpected errors (such as no memory).
    """
    first = max(errors, key=_importance)
    others = [each for each in errors if each is not first]
    for each in others:
        first.add_note(f"also: {each!r}")
        if isinstance(first, LogError):
            first.errors = (*first.errors, each)
            if isinstance(each, LogError):
                first.take_over(each)
    return first


def _importance(error: Exception) -> int:
    order = (OSError, LogError, StorageFullError, StorageIOError, WriterFailedError)  # the last that fits counts
    return max((rank for rank, kind in enumerate(order, 1) if isinstance(error, kind)), default=0)


def report_appended(error: BaseException, ranges: Iterable[OffsetRange]) -> None:
    """Add to the error the records that its call had already appended."""
    known: tuple[OffsetRange, ...] = getattr(error, "appended", ())
    ranges = (*ranges, *known)
    if ranges or isinstance(error, LogError):
        vars(error)["appended"] = ranges


def report_not_appended(error: BaseException, indexes: Mapping[int, Sequence[int]]) -> None:
    """Add to the error the records of its call that are not in the log. `indexes` has the call's, by partition."""
    missing: list[int] = []
    ranges: tuple[OffsetRange, ...] = getattr(error, "appended", ())
    count = sum(map(len, indexes.values()))
    for partition, each in indexes.items():
        missing += each[sum(len(offsets) for number, offsets in ranges if number == partition) :]
    report_missing(error, tuple(sorted(missing)), count)


def report_missing(error: BaseException, missing: Sequence[int], count: int) -> None:
    """Add to the error the indexes of its call's records that are not in the log, of `count` records."""
    appended: tuple[OffsetRange, ...] = getattr(error, "appended", ())
    if not appended and not isinstance(error, LogError):  # a refused call has appended nothing
        return
    vars(error)["not_appended"] = missing
    if appended:
        error.add_note(f"{count - len(missing)} of this call's {count} records are in the log; not_appended: the rest")
