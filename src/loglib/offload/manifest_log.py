"""Manifest log: facts in files with rising numbers, of which the one with the largest number counts.

Invariant: a file is never changed or replaced. It is committed by making the next number, which exactly one of several
processes can do: by `link` in a directory, by a conditional put in an object store.

    <20 digits>.json     version 1 and up; the newest 64 stay

Files that are far behind go. A deleted number is free again: a process that stood still may make it anew, and that file
is void. Nobody takes it for a commit: behind a deleted number there are always many newer ones, so the process looks
for these after it has made the file. If there are any, it begins again from the newest.

Threads: no state. Processes: any number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from ..errors import CorruptLogError
from ..system.directory import Directory
from ..system.files import Files

__all__ = ["TEMPORARY", "DirectorySlots", "FileSlots", "OpenSlots", "Slots", "commit", "name_of", "newest"]

VERSIONS_KEPT = 64
TEMPORARY = re.compile(r"\.(.+)\.tmp")
_MOST_BYTES = 1 << 30
_LISTINGS = 100  # the newest file is removed between two calls only if 64 were committed meanwhile
_VERSION = re.compile(r"(\d{20})\.json")


class Slots(Protocol):
    """Where the files are, for reading."""

    def path_of(self, name: str) -> str:
        """The whole path, for messages."""

    def names(self) -> list[str]:
        """The names of all files, in no order. They are there to stay: a power cut takes none of them away."""

    def read(self, name: str) -> bytes:
        """The content of a file; `FileNotFoundError` if there is none."""


class OpenSlots(Slots, Protocol):
    """The same, for making more."""

    def put_new(self, name: str, content: bytes) -> bool:
        """Make a file, durable when `names` returns next; False if there is one of that name."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""


class Versioned(Protocol):
    """Facts that know their number."""

    @property
    def version(self) -> int: ...


V = TypeVar("V", bound=Versioned)


def newest(slots: Slots, decode: Callable[[bytes, str], V]) -> V | None:
    """The facts that count; None if there are none. They are durable: the caller may build on them."""
    for _ in range(_LISTINGS):
        versions = _versions(slots)
        if not versions:
            return None
        name = name_of(versions[-1])
        path = slots.path_of(name)
        with suppress(FileNotFoundError):  # removed, because there are many newer ones
            found = decode(slots.read(name), path)
            if found.version != versions[-1]:
                raise CorruptLogError(path, 0, f"version {found.version}", f"version {versions[-1]}, as its name says")
            return found
    raise CorruptLogError(slots.path_of(""), 0, "manifests that vanish", "manifests that can be read")


def commit(slots: OpenSlots, version: int, content: bytes) -> bool:
    """Make the version, which builds on the one before it; False if another process was quicker."""
    if not slots.put_new(name_of(version), content):
        return False
    versions = _versions(slots)  # it is durable from here on
    if versions[-1] >= version + VERSIONS_KEPT:
        return False  # this number may have been used before, and removed
    for each in versions:
        if each <= versions[-1] - VERSIONS_KEPT:
            slots.remove(name_of(each))  # the newest one has all that it has
    return True


def name_of(version: int) -> str:
    return f"{version:020d}.json"


def _versions(slots: Slots) -> list[int]:
    return sorted(int(found[1]) for name in slots.names() if (found := _VERSION.fullmatch(name)))


class DirectorySlots:
    """Files in an open directory, which stays its opener's."""

    def __init__(self, directory: Directory, permissions: int = 0o600) -> None:
        self._directory = directory
        self._permissions = permissions

    def path_of(self, name: str) -> str:
        return self._directory.path_of(name)

    def names(self) -> list[str]:
        names = self._directory.names()
        self._directory.sync()
        return names

    def read(self, name: str) -> bytes:
        return self._directory.read_whole(name, _MOST_BYTES)

    def put_new(self, name: str, content: bytes) -> bool:
        directory = self._directory
        temporary = f".{name}-{directory.files.random_bytes(8).hex()}.tmp"
        directory.write_new(temporary, content, self._permissions)
        try:
            directory.link(temporary, name)
        except FileExistsError:
            return False
        finally:
            directory.unlink(temporary)
        return True

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):  # another process does the same
            self._directory.unlink(name)


class FileSlots:
    """Objects of a store below a path, for reading. What is there once is durable."""

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path

    def path_of(self, name: str) -> str:
        return f"{self._path}/{name}"

    def names(self) -> list[str]:
        return self._files.listdir(self._path)

    def read(self, name: str) -> bytes:
        return self._files.read_whole(self.path_of(name), _MOST_BYTES)
