"""Directory: a directory that stays open, so that work continues in it even if its path leads elsewhere.

Invariant: every operation happens in the directory that was opened. After `mv topic topic.bak` and a
new topic at the old path, the holder of the old directory continues in `topic.bak` and never touches a
file of the new one. `path` is the path at the time of opening, for messages and for `is_named`.

Files are given by name, without a slash. Errors have the whole path.

Threads: safe for all, except `names` and `sizes`: two simultaneous calls would share one position in the listing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from ..errors import LockedError
from .clock import monotonic
from .failures import refusing_full_disk
from .files import Files
from .not_copyable import NotCopyable
from .process import finish
from .reentry import refuse

_LOCK_TIMEOUT_S = 30.0  # the work under such a lock takes milliseconds
_NAP_S = 0.001
# The process and the thread that hold a directory for a moment, by its device and inode. A call that has interrupted
# that thread is refused, because it would wait for ever.
_held: dict[tuple[int, int], tuple[int, int]] = {}


class Directory(NotCopyable):
    """An open directory. Its opener closes it. The directory of a `Lock` is closed by the lock."""

    def __init__(self, files: Files, path: str, fd: int) -> None:
        self.files = files
        self.path = path
        self.fd = fd
        self._identity = files.identity(fd)
        self._locked = False
        # What `close` has to do if there may be a flock. After an interrupt that kept `close` away, `__del__` does it.
        self._to_do: Iterator[tuple[Callable[[int], object], int]] | None = None

    @classmethod
    def open(cls, files: Files, path: str) -> Directory:
        """Open the directory at the path. `FileNotFoundError` and `NotADirectoryError` as the system raises them."""
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
        """Release its lock and close it. Call it only once."""
        if self._locked:
            _held.pop(self._identity, None)
        if self._to_do is None:
            self.files.close(self.fd)
        else:
            finish(self._to_do)

    def __del__(self) -> None:
        to_do = getattr(self, "_to_do", None)
        if to_do is not None:
            with suppress(OSError):  # no caller can get the error
                finish(to_do)

    def lock_for_a_moment(self, holder: str, *, advice: str, shared: bool = False) -> None:
        """Wait for the directory's flock, which `close` releases. With `shared` others may share it.

        `LockedError` if another process holds it for 30 s. Its message has `holder` (the possible holder) and `advice`.
        """
        files = self.files
        # Unlocked before it is closed: a child that was forked meanwhile has a copy that stays open.
        self._to_do = iter([(files.unlock, self.fd), (files.close, self.fd)])
        deadline = monotonic() + _LOCK_TIMEOUT_S
        me = os.getpid(), threading.get_ident()
        while not files.try_lock(self.fd, self.path, shared=shared):
            if _held.get(self._identity) == me:
                refuse(self.path)
            if monotonic() > deadline:
                raise LockedError(self.path, holder, advice=advice)
            time.sleep(_NAP_S)
        self._locked = True
        _held[self._identity] = me

    def __repr__(self) -> str:
        return f"<Directory {self.path!r} open as {self.fd}>"

    def path_of(self, name: str) -> str:
        """The path that the file had when the directory was opened, for messages."""
        return os.path.join(self.path, name)

    # --- where it is ----------------------------------------------------------------------------------

    def is_named(self) -> bool:
        """True if the path still leads to this directory, which may have been moved, removed or replaced."""
        return self.is_at(self.path)

    def is_same(self, other: Directory) -> bool:
        """True if the other one is this directory, perhaps by another path."""
        return self._identity == other._identity

    def is_at(self, path: str, *, dir_fd: int | None = None) -> bool:
        """True if the path leads to this directory. With `dir_fd`, only its last part is looked up, there."""
        return self.files.leads_to(path, self._identity, dir_fd=dir_fd)

    # --- files ------------------------------------------------------------------------------------------

    def open_read(self, name: str) -> int:
        """Open a regular file for reading; `CorruptLogError` if it is anything else."""
        return self.files.open_read(self.path_of(name), dir_fd=self.fd)

    def open_write(self, name: str) -> int:
        """Open an existing regular file for reading and writing, as `Files.open_write` does."""
        return self.files.open_write(self.path_of(name), dir_fd=self.fd)

    def make_own(self, name: str) -> None:
        """If a file has other names, replace it by a copy, as `Files.make_own` does."""
        self.files.make_own(self.path_of(name), dir_fd=self.fd)

    def create(self, name: str, permissions: int, *, exclusive: bool = True) -> int:
        """Create a file for reading and writing; `FileExistsError` if exclusive and present."""
        return self.files.create(self.path_of(name), permissions, exclusive=exclusive, dir_fd=self.fd)

    def write_new(self, name: str, content: bytes, permissions: int) -> None:
        """Create the file with this content. Synced, except its name: `sync` the directory."""
        try:
            self.files.fill(self.create(name, permissions), content)
        except OSError as error:
            error.filename = error.filename or self.path_of(name)
            raise

    def replace(self, name: str, content: bytes, permissions: int) -> None:
        """Give the file this content in one step: it has the old one or the new one. Synced, also its name.

        `StorageFullError` if there is no room for it.
        """
        temporary = name + ".tmp"
        if self.exists(temporary):  # left by a crash
            self.unlink(temporary)
        with refusing_full_disk(self.path_of(name)):
            self.write_new(temporary, content, permissions)
            self.rename(temporary, name)
            self.sync()

    def read_whole(self, name: str, limit_bytes: int) -> bytes:
        """The whole content of a small file; `CorruptLogError` above the limit."""
        return self.files.drain(self.open_read(name), self.path_of(name), limit_bytes)

    # --- names ------------------------------------------------------------------------------------------

    def exists(self, name: str) -> bool:
        """True if the name exists, even as a dangling link."""
        return self.files.exists(name, dir_fd=self.fd)

    def is_directory(self, name: str) -> bool:
        """True if the name is a directory, and not a link to one; `FileNotFoundError` if it does not exist."""
        return self.files.is_directory(name, dir_fd=self.fd)

    def names(self) -> list[str]:
        """The names of everything in the directory, in no order."""
        return self.files.names_in(self.path, dir_fd=self.fd)

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
        """Rename a file within the directory, and replace a file that has the new name. Handed to the system."""
        try:
            self.files.rename(name, target, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError as error:
            error.filename, error.filename2 = self.path_of(name), self.path_of(target)
            raise

    def link(self, name: str, target: str) -> None:
        """Give a file a second name, as `Files.link_name` does: `FileExistsError` if something has it."""
        self.files.link_name(self.path_of(name), self.path_of(target), dir_fd=self.fd)

    def sync(self) -> None:
        """Make creations, renames, links and removals durable. Synced."""
        self.files.sync_directory(self.path, dir_fd=self.fd)
