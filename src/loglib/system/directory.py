"""Directory: one that stays open, so that work goes on in it wherever its path leads by now.

Invariant: every operation happens in the directory that was opened. After `mv topic topic.bak` and a
new topic at the old path, whoever holds the old directory goes on in `topic.bak` and never touches a
file of the new one. The path is what it was opened by: for messages, and for `is_named`, which
says whether it still leads here.

Files are given by name, without a slash. Errors carry the whole path.

Threads: safe for all, but for `names` and `sizes`: two at once would share one place in the listing.
"""

from __future__ import annotations

import os
import time

from ..errors import LockedError
from ..unique import Unique
from .files import Files

__all__ = ["Directory"]

_LOCK_TIMEOUT_S = 30.0  # what is done under such a lock takes milliseconds
_NAP_S = 0.001


class Directory(Unique):
    """An open directory. Whoever has opened it closes it; it may be a lock's, which closes it itself."""

    def __init__(self, files: Files, path: str, fd: int) -> None:
        self.files = files
        self.path = path
        self.fd = fd
        facts = files.fstat(fd)
        self._identity = facts.st_dev, facts.st_ino  # nobody else's while it is open, even when it is removed
        self._locked = False

    @classmethod
    def open(cls, files: Files, path: str) -> Directory:
        """Open the directory at the path. `FileNotFoundError` and `NotADirectoryError` as the system has them."""
        fd = files.open_directory(path)
        try:
            return cls(files, path, fd)
        except BaseException:
            files.close(fd)
            raise

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it, and let its lock go. Once only."""
        if self._locked:  # unlocked first: a child that was forked meanwhile has a copy that stays open
            self.files.unlock(self.fd)
        self.files.close(self.fd)

    def lock_for_a_moment(self, holder: str, *, advice: str) -> None:
        """Wait for the directory's flock, which is let go when it is closed.

        `LockedError` if another has it for 30 s: `holder` says who that may be, and `advice` what to do then.
        """
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while not self.files.try_lock(self.fd):
            if time.monotonic() > deadline:
                raise LockedError(self.path, holder, advice=advice)
            time.sleep(_NAP_S)
        self._locked = True

    def __repr__(self) -> str:
        return f"<Directory {self.path!r} open as {self.fd}>"

    def path_of(self, name: str) -> str:
        """The path that the file had when the directory was opened, for messages."""
        return os.path.join(self.path, name)

    # --- where it is ----------------------------------------------------------------------------------

    def is_named(self) -> bool:
        """Whether the path still leads to this directory: it may be moved, removed, or another in its place."""
        return self.is_at(self.path)

    def is_at(self, path: str, *, dir_fd: int | None = None) -> bool:
        """Whether the path, or the last part of it in another open directory, leads to this directory."""
        try:
            facts = self.files.facts(path, dir_fd=dir_fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (facts.st_dev, facts.st_ino) == self._identity

    # --- files ------------------------------------------------------------------------------------------

    def open_read(self, name: str) -> int:
        """Open a regular file for reading; `CorruptLogError` if it is anything else."""
        return self.files.open_read(self.path_of(name), dir_fd=self.fd)

    def open_write(self, name: str) -> int:
        """Open an existing regular file for reading and writing."""
        return self.files.open_write(self.path_of(name), dir_fd=self.fd)

    def create(self, name: str, permissions: int, *, exclusive: bool = True) -> int:
        """Create a file for reading and writing; `FileExistsError` if exclusive and present."""
        return self.files.create(self.path_of(name), permissions, exclusive=exclusive, dir_fd=self.fd)

    def write_new(self, name: str, content: bytes, permissions: int) -> None:
        """Create the file with this content. Synced, but for its name: `sync` the directory."""
        self.files.fill(self.create(name, permissions), content)

    def read_whole(self, name: str, limit_bytes: int) -> bytes:
        """The whole content of a small file; `CorruptLogError` above the limit."""
        return self.files.drain(self.open_read(name), self.path_of(name), limit_bytes)

    # --- names ------------------------------------------------------------------------------------------

    def exists(self, name: str) -> bool:
        """Whether there is anything of that name, be it a dangling link."""
        return self.files.exists(name, dir_fd=self.fd)

    def is_directory(self, name: str) -> bool:
        """Whether the name is a directory's, and no link to one; `FileNotFoundError` if there is none."""
        return self.files.is_directory(name, dir_fd=self.fd)

    def names(self) -> list[str]:
        """The names of everything in the directory, in no order."""
        return self.files.listdir(self.fd)

    def sizes(self) -> dict[str, int]:
        """Name and size in bytes of everything in the directory, in no order."""
        return self.files.sizes(self.path, dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        """Remove a file. Handed to the system."""
        try:
            self.files.unlink(name, dir_fd=self.fd)
        except OSError as error:
            error.filename = self.path_of(name)
            raise

    def rename(self, name: str, target: str) -> None:
        """Give a file another name here, in place of what has it. Handed to the system."""
        try:
            self.files.rename(name, target, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError as error:
            error.filename, error.filename2 = self.path_of(name), self.path_of(target)
            raise

    def sync(self) -> None:
        """Make creations, renames and removals durable. Synced."""
        self.files.fsync(self.fd)
