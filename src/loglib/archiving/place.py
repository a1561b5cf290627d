"""Place: the directory of an archive: its manifests, one after the other, and the files that these name.

Invariant: no file that a manifest names is changed, replaced or removed, and no name is used twice. A manifest is
committed by one `link` to the next number, so of several processes one gets it. What it names was synced before.

    <archive>/_loglib/<version>.json     the manifests; the one with the largest number counts
    <archive>/0000/<start>-<end>-<random>.parquet      records of partition 0
    <archive>/0000/.<the same>.tmp       a file that is being written, or was when its writer died

Manifests that are far behind go. A deleted number is free again: a process that stood still may link a manifest to
it, which is void. Nobody takes it for a commit: behind a deleted number there are always many newer ones, so the
process looks for these after the link. If there are any, it begins again from the newest.

Each process that archives holds a shared flock of the directory. A process that gets it exclusively is alone, and so
sweeps what dead ones have left: files that no manifest names.

Threads: a `Place` belongs to one thread. Processes: any number.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress

from ..errors import CorruptLogError
from ..system.directory import Directory
from ..system.files import Files
from ..unique import Unique
from .manifest import Archived, decode, encode, is_file_name

__all__ = ["DIRECTORY", "Place", "load", "newest"]

DIRECTORY = "_loglib"  # engines that read all of a directory pass over names that begin so
VERSIONS_KEPT = 64
_MOST_BYTES = 1 << 30
_LISTINGS = 100  # the newest manifest is removed between two calls only if 64 were committed meanwhile
_VERSION = re.compile(r"(\d{20})\.json")
_TEMPORARY = re.compile(r"\.(.+)\.tmp")
_PARTITION = re.compile(r"\d{4}")


def newest(files: Files, path: str) -> Archived | None:
    """The newest manifest of the archive at the path; None if there is none.

    Its name is synced: a power cut does not take away what the caller builds on it.
    """
    try:
        directory = Directory.open(files, os.path.join(path, DIRECTORY))
    except (FileNotFoundError, NotADirectoryError):
        return None
    with directory:
        return _newest(directory)


def load(files: Files, path: str) -> Archived:
    """The newest manifest of the archive at the path; `FileNotFoundError` if there is none."""
    found = newest(files, path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "no archive here; loglib.archive makes one", path)
    return found


def _newest(directory: Directory) -> Archived | None:
    for _ in range(_LISTINGS):
        versions = _versions(directory)
        if not versions:
            return None
        directory.sync()
        name = _name_of(versions[-1])
        with suppress(FileNotFoundError):  # removed, because there are many newer ones
            archived = decode(directory.read_whole(name, _MOST_BYTES), directory.path_of(name))
            if archived.version != versions[-1]:
                found = f"version {archived.version}"
                raise CorruptLogError(directory.path_of(name), 0, found, f"version {versions[-1]}, as its name says")
            return archived
    raise CorruptLogError(directory.path, 0, "manifests that vanish", "manifests that can be read")


def _versions(directory: Directory) -> list[int]:
    """The numbers of the manifests, in order."""
    return sorted(int(found[1]) for name in directory.names() if (found := _VERSION.fullmatch(name)))


def _name_of(version: int) -> str:
    return f"{version:020d}.json"


class Place(Unique):
    """An archive, open for adding to it. `close` it."""

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
            try:
                self._enter()
            except BaseException:
                self._manifests.close()
                raise
        except BaseException:
            self._root.close()
            raise

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock and close the directories."""
        for each in (*self._partitions.values(), self._manifests, self._root):
            each.close()

    def _enter(self) -> None:
        """Hold the archive beside other processes. Whoever is alone sweeps first."""
        if self._files.try_lock(self._root.fd):
            self._sweep()
        self._root.lock_for_a_moment("a process that sweeps it", advice="try again", shared=True)

    # --- manifests -----------------------------------------------------------------------------------

    def newest(self) -> Archived | None:
        """The newest manifest; None in a new archive."""
        return _newest(self._manifests)

    def commit(self, archived: Archived) -> bool:
        """Commit the manifest, which builds on the one before it; False if another process was quicker. Synced."""
        directory, name = self._manifests, _name_of(archived.version)
        temporary = f".{archived.version}-{self._files.random_bytes(8).hex()}.tmp"
        directory.write_new(temporary, encode(archived), self._permissions)
        try:
            directory.link(temporary, name)
        except FileExistsError:
            return False
        finally:
            directory.unlink(temporary)
        directory.sync()
        versions = _versions(directory)
        if versions[-1] >= archived.version + VERSIONS_KEPT:
            return False  # this number may have been used before, and removed
        self._expire(versions)
        return True

    def _expire(self, versions: list[int]) -> None:
        """Remove manifests that are far behind: the newest one names all that these name."""
        for each in versions:
            if each <= versions[-1] - VERSIONS_KEPT:
                with suppress(FileNotFoundError):  # another process does the same
                    self._manifests.unlink(_name_of(each))

    # --- files ---------------------------------------------------------------------------------------

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
        """Remove a file that no manifest names."""
        directory, _, file = name.partition("/")
        with suppress(FileNotFoundError):
            self.partition(int(directory)).unlink(file)

    def _sweep(self) -> None:
        """Remove what dead processes have left. No other process adds to the archive meanwhile."""
        for name in self._manifests.names():
            if _TEMPORARY.fullmatch(name):
                self._manifests.unlink(name)
        archived = self.newest()
        named = set() if archived is None else {file.name for each in archived.partitions for file in each.files}
        for name in set(self._found()) - named:
            directory, _, file = name.partition("/")
            self._files.unlink(os.path.join(self.path, directory, file))

    def _found(self) -> Iterator[str]:
        """The names of all data files, also of unfinished ones."""
        for directory in filter(_PARTITION.fullmatch, self._root.names()):
            if not self._root.is_directory(directory):
                continue
            for name in self._files.listdir(os.path.join(self.path, directory)):
                temporary = _TEMPORARY.fullmatch(name)
                if is_file_name(f"{directory}/{temporary[1] if temporary else name}"):
                    yield f"{directory}/{name}"
