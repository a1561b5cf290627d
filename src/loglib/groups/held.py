"""Held: a file whose flock this process holds, to say that it is there.

Invariant: the lock goes with the last reference to the `HeldFile`, if not before: an interrupt between any
two instructions of its user leaves no lock behind that nobody knows of.

Who may come into the directory may read the file, whatever the topic's permissions: reading is all that it
takes to see whether it is held. What keeps others out is the directory's mode.

Threads: as its user says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import length_hint

from ..lifetime import finish
from ..system.directory import Directory
from ..system.files import Files
from ..unique import Unique

__all__ = ["MOST_BYTES", "HeldFile", "look", "readable_by_all"]

MOST_BYTES = 1 << 16  # of text; a member of a thousand topics has some 30 KB


def readable_by_all(permissions: int) -> int:
    """The mode of what other users have to read who may come into its directory."""
    return permissions | 0o444


class HeldFile(Unique):
    """A small file, open and perhaps locked, until `release`."""

    __slots__ = ("_close", "_fd", "_files", "_path")

    def __init__(self, files: Files, path: str, permissions: int) -> None:
        """Open the file, and make it if there is none; `try_lock` is for the caller to call."""
        self._files = files
        self._path = path
        self._close: Iterator[tuple[Callable[[int], object], int]] = iter(())
        self._fd = files.create(path, readable_by_all(permissions), exclusive=False)
        self._close = iter([(files.close, self._fd)])

    def try_lock(self) -> bool:
        """Take the lock if nobody has it, and the file is still the one of its name."""
        return self._files.try_lock(self._fd) and self.is_named()

    def is_named(self) -> bool:
        """Whether the file is open and its name still leads to it: `evict` puts another in its place."""
        return length_hint(self._close) > 0 and self._files.same_file(self._fd, self._path)

    def text(self) -> str:
        """What it says."""
        return self._files.read_at(self._fd, MOST_BYTES, 0).decode(errors="replace").strip()

    def replace(self, text: bytes) -> None:
        """Write what it says, in one line as long as the one before: readers see the old text or the new."""
        size = self._files.size(self._fd)
        self._files.write_all(self._fd, [text.ljust(min(size, MOST_BYTES) - 1) + b"\n"], 0)

    def release(self) -> None:
        """Unlock, for all that share the lock by a fork, and close."""
        if length_hint(self._close):
            self._files.unlock(self._fd)
            self.abandon()

    def abandon(self) -> None:
        """Close and nothing else: in a forked child the lock is the parent's."""
        finish(self._close)

    def __del__(self) -> None:
        with suppress(AttributeError):  # of one whose making an interrupt has ended before its first line
            self.release()


def look(files: Files, path: str, *, remove: bool = False, within: Directory | None = None) -> str | None:
    """What the file says if somebody holds it; None if nobody does. With `remove` it goes then.

    `within` is the open directory in which to look, wherever the path leads by now.

    Takes no right but to read, and leaves no trace that an observer of the directory would see. Raises
    `PermissionError` where not even that is allowed.
    """
    try:
        fd = files.open_read(path, dir_fd=None if within is None else within.fd)
    except FileNotFoundError:
        return None
    try:
        if not files.try_lock(fd, shared=True):
            return files.read_at(fd, MOST_BYTES, 0).decode(errors="replace").strip()
        if remove and files.try_lock(fd) and files.same_file(fd, path):
            with suppress(FileNotFoundError, PermissionError):  # what cannot be removed is in nobody's way
                files.unlink(path)
        return None
    finally:
        files.close(fd)
