"""Lock file: a file whose flock this process holds, to show that it is alive.

Invariant: the lock is released with the last reference to the `LockFile`, or earlier. So an interrupt
between any two instructions leaves no lock that no object owns.

Every user with access to the directory may read the file, whatever the topic's permissions are: a process
needs only to read the file to see if it is held. The directory's mode keeps other users out.

Threads: the caller's rule applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import length_hint

from ..system.directory import Directory
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from ..system.process import finish

MOST_BYTES = 1 << 16  # of text; the text of a member with a thousand topics has about 30 KB


def readable_by_all(permissions: int) -> int:
    """The mode of a file that every user with access to its directory must read."""
    return permissions | 0o444


class LockFile(NotCopyable):
    """A small file that stays open, and perhaps locked, until `release`."""

    __slots__ = ("_close", "_fd", "_files", "_path")

    def __init__(self, files: Files, path: str, permissions: int) -> None:
        """Open the file, or create it. The caller must call `try_lock`."""
        self._files = files
        self._path = path
        self._close: Iterator[tuple[Callable[[int], object], int]] = iter(())
        self._fd = _open(files, path, readable_by_all(permissions))
        self._close = iter([(files.close, self._fd)])

    def try_lock(self) -> bool:
        """Take the lock if it is free. True if this process has it and the file still has its name."""
        return self._files.try_lock(self._fd, self._path) and self.is_named()

    def is_named(self) -> bool:
        """True if the file is open and still has its name: `evict` replaces it with another file."""
        return length_hint(self._close) > 0 and self._files.same_file(self._fd, self._path)

    def has_other_names(self) -> bool:
        """True if it is also a file of another group, in a copy that was made of hard links."""
        return self._files.fstat(self._fd).st_nlink > 1

    def text(self) -> str:
        """The text in the file."""
        return self._files.read_at(self._fd, MOST_BYTES, 0).decode(errors="replace").strip()

    def replace(self, text: bytes) -> None:
        """Write new text, padded to the length of the old line. Readers see the old text or the new one."""
        size = self._files.size(self._fd)
        self._files.write_all(self._fd, [text.ljust(min(size, MOST_BYTES) - 1) + b"\n"], 0)

    def release(self) -> None:
        """Unlock, also for forked processes that share the lock, and close."""
        if length_hint(self._close):
            self._files.unlock(self._fd)
            self.abandon()

    def abandon(self) -> None:
        """Close without unlocking: in a forked child the lock belongs to the parent."""
        finish(self._close)

    def __del__(self) -> None:
        with suppress(AttributeError):  # an interrupt may have come before the first line of __init__
            self.release()


def _open(files: Files, path: str, permissions: int) -> int:
    while True:
        with suppress(FileNotFoundError):
            return files.open_to_lock(path)
        with suppress(FileExistsError):  # another process made it between the two calls
            return files.create(path, permissions)


def names_of_files(files: Files, directory: str) -> list[str]:
    """The names in a directory of lock files; none if it is missing.

    It is empty while no process lives, and tools that copy files to an object store, say, copy no empty directory.
    """
    try:
        return files.names_in(directory)
    except FileNotFoundError:
        return []


def read_if_held(files: Files, path: str, *, remove: bool = False, within: Directory | None = None) -> str | None:
    """The text of the file if a process holds it, else None. With `remove` a file that is not held is removed.

    `within` is the open directory of the file, even if that directory was moved. The call needs only the right to read,
    and is not reported to observers of the directory. Raises `PermissionError` if the file may not be read.
    """
    try:
        fd = files.open_read(path, dir_fd=None if within is None else within.fd)
    except FileNotFoundError:
        return None
    try:
        if not files.try_lock(fd, path, shared=True):
            return files.read_at(fd, MOST_BYTES, 0).decode(errors="replace").strip()
        if remove and files.try_lock(fd, path) and files.same_file(fd, path):
            with suppress(FileNotFoundError, PermissionError):  # the file may stay
                files.unlink(path)
        return None
    finally:
        files.close(fd)
