"""Archive store: the manifests of an archive, one after the other, and the files that they name. Here in a directory.

Invariant: no file that a manifest names is changed, replaced or removed, and no name is used twice. A manifest is
committed by one `link` to the next number, so of several processes one gets it. What it names was synced before.

    <archive>/_loglib/<version>.json     the manifests; the one with the largest number counts (manifest_log.py)
    <archive>/0000/<start>-<end>-<random>.parquet      records of partition 0
    <archive>/0000/.<the same>.tmp       a file that is being written, or was when its writer died

Each process that archives holds a shared flock of the directory. A process that gets it exclusively is alone, and so
sweeps what dead ones have left: files that no manifest names.

Threads: a `ArchiveStore` belongs to one thread. Processes: any number.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import NamedTuple, Protocol

from ..config.uri import is_remote, local_path
from ..system.directory import Directory
from ..system.files import REAL, Files
from ..system.not_copyable import NotCopyable
from . import manifest_log
from .archive_manifest import Archived, decode, encode, is_file_name
from .manifest_log import TEMPORARY, DirectorySlots, FileSlots
from .storage import storage_of

__all__ = [
    "DIRECTORY",
    "ArchiveStore",
    "DirectoryArchiveStore",
    "NewFile",
    "is_in_a_store",
    "load",
    "located",
    "newest",
]

DIRECTORY = "_loglib"  # engines that read all of a directory pass over names that begin so
_PARTITION = re.compile(r"\d{4}")


class NewFile(NamedTuple):
    """A file of an archive while it is written: open, empty, and without its name."""

    files: Files
    fd: int
    path: str  # for messages


class ArchiveStore(Protocol):
    """An archive, open for adding to it. `close` it."""

    @property
    def path(self) -> str:
        """Where it is, without credentials, for messages."""

    def newest(self) -> Archived | None:
        """The newest manifest; None in a new archive."""

    def commit(self, archived: Archived) -> bool:
        """Commit the manifest, which builds on the one before it; False if another process was quicker. Durable."""

    def new_file(self, name: str) -> AbstractContextManager[NewFile]:
        """A file to be written. When the block ends without an error, it gets its name: all of it is durable then."""

    def remove(self, name: str) -> None:
        """Remove a file that no manifest names."""

    def close(self) -> None: ...


def newest(files: Files, path: str) -> Archived | None:
    """The newest manifest of the archive at the path; None if there is none.

    Its name is synced: a power cut does not take away what the caller builds on it.
    """
    if is_remote(path):
        manifests = f"{path}/{DIRECTORY}"
        return manifest_log.newest(FileSlots(files, manifests), decode) if files.exists(manifests) else None
    try:
        directory = Directory.open(files, os.path.join(path, DIRECTORY))
    except (FileNotFoundError, NotADirectoryError):
        return None
    with directory:
        return manifest_log.newest(DirectorySlots(directory), decode)


def located(files: Files, given: str) -> tuple[Files, str]:
    """The files in which the archive at a path or a URI is, and its path there. `files` are for paths.

    A listing of a store is kept, so these files are for one look.
    """
    if not is_remote(given):
        return files, os.path.abspath(local_path(given))
    storage, path = storage_of(given)
    return storage.files(), path


def is_in_a_store(given: str) -> bool:
    """Whether the URI is that of an archive in an object store, as far as the store can be reached."""
    if not is_remote(given):
        return False
    try:
        files, path = located(REAL, given)
        return files.exists(f"{path}/{DIRECTORY}")
    except (OSError, ValueError, ImportError):
        return False


def load(files: Files, path: str) -> Archived:
    """The newest manifest of the archive at the path; `FileNotFoundError` if there is none."""
    found = newest(files, path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "no archive here; loglib.archive makes one", path)
    return found


class DirectoryArchiveStore(NotCopyable):
    """An archive in a directory."""

    def __init__(self, files: Files, path: str, permissions: int) -> None:
        self.path = path
        self._files = files
        self._permissions = permissions
        self._partitions: dict[int, Directory] = {}
        files.make_directories(os.path.join(path, DIRECTORY), permissions)
        files.sync_directory(path)  # a process that died may have made what was found, and not synced it
        files.sync_directory(os.path.dirname(path))
        self._root = Directory.open(files, path)
        try:
            self._manifests = Directory.open(files, os.path.join(path, DIRECTORY))
            self._slots = DirectorySlots(self._manifests, permissions)
            try:
                self._enter()
            except BaseException:
                self._manifests.close()
                raise
        except BaseException:
            self._root.close()
            raise

    def close(self) -> None:
        """Release the lock and close the directories."""
        for each in (*self._partitions.values(), self._manifests, self._root):
            each.close()

    def _enter(self) -> None:
        """Hold the archive beside other processes. Whoever is alone sweeps first."""
        if self._files.try_lock(self._root.fd, self._root.path):
            self._sweep()
        self._root.lock_for_a_moment("a process that sweeps it", advice="try again", shared=True)

    # --- manifests -----------------------------------------------------------------------------------

    def newest(self) -> Archived | None:
        return manifest_log.newest(self._slots, decode)

    def commit(self, archived: Archived) -> bool:
        return manifest_log.commit(self._slots, archived.version, encode(archived))

    # --- files ---------------------------------------------------------------------------------------

    @contextmanager
    def new_file(self, name: str) -> Iterator[NewFile]:
        directory, file = self._within(name)
        temporary = f".{file}.tmp"
        fd = directory.create(temporary, self._permissions)
        try:
            try:
                yield NewFile(self._files, fd, directory.path_of(temporary))
            finally:
                self._files.close(fd)
            directory.link(temporary, file)
        finally:
            directory.unlink(temporary)
        directory.sync()

    def _within(self, name: str) -> tuple[Directory, str]:
        """The directory of the file's partition, and the rest of its name."""
        number, _, file = name.partition("/")
        return self.partition(int(number)), file

    def partition(self, number: int) -> Directory:
        """The directory of a partition. Its name is synced."""
        found = self._partitions.get(number)
        if found is None:
            path = os.path.join(self.path, f"{number:04d}")
            self._files.make_directories(path, self._permissions)
            self._root.sync()
            found = self._partitions[number] = Directory.open(self._files, path)
        return found

    def remove(self, name: str) -> None:
        directory, file = self._within(name)
        with suppress(FileNotFoundError):
            directory.unlink(file)

    def _sweep(self) -> None:
        """Remove what dead processes have left. No other process adds to the archive meanwhile."""
        for name in self._manifests.names():
            if TEMPORARY.fullmatch(name):
                self._manifests.unlink(name)
        archived = self.newest()
        named = set() if archived is None else {file.name for each in archived.partitions for file in each.all_files}
        for name in set(self._found()) - named:
            directory, _, file = name.partition("/")
            self._files.unlink(os.path.join(self.path, directory, file))

    def _found(self) -> Iterator[str]:
        """The names of all data files, also of unfinished ones."""
        for directory in filter(_PARTITION.fullmatch, self._root.names()):
            if not self._root.is_directory(directory):
                continue
            for name in self._files.listdir(os.path.join(self.path, directory)):
                temporary = TEMPORARY.fullmatch(name)
                if is_file_name(f"{directory}/{temporary[1] if temporary else name}"):
                    yield f"{directory}/{name}"
