"""Manifest log: manifests in files with rising numbers, of which the one with the largest number counts.

Invariant: a manifest is never changed or replaced. It is committed by making the file with the next number. Exactly one
of several processes can do that: by `link` in a directory, by a conditional put in an object store.

    <directory>/<20 digits>.json     version 1 and up; the newest 64 stay

Older files are removed. The number of a removed file is free again, and a process that was stopped for a long time may
make that file once more. Such a file is void, and nobody takes it for a commit: after a removed number there are always
64 newer ones, so the process lists the files after it has made its own. If there are many newer ones, it starts over.

Threads: no state. Processes: any number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from ..errors import CorruptLogError, LogError
from ..system.files import Files

VERSIONS_KEPT = 64
_MOST_BYTES = 1 << 30
_LISTINGS = 100  # the newest file is removed between two calls only if 64 were committed meanwhile
_VERSION = re.compile(r"(\d{20})\.json")


class Place(Protocol):
    """A directory, or a key of an object store, that is read. Names have slashes between their parts."""

    def path_of(self, name: str) -> str:
        """The whole path, without credentials, for messages."""

    def names_in(self, directory: str) -> list[str]:
        """The names in a directory, in no order; none without the directory. They survive a power cut."""

    def read(self, name: str) -> bytes:
        """The content of a small file; `FileNotFoundError` if there is none."""


class OpenPlace(Place, Protocol):
    """A place that also takes manifests."""

    def put_manifest(self, name: str, content: bytes) -> bool:
        """Make a file. Durable. False if there is one of that name."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""


class Manifest(Protocol):
    """Facts about what a place has of a log."""

    @property
    def version(self) -> int: ...
    @property
    def log_id(self) -> bytes: ...
    @property
    def topic(self) -> str: ...


M = TypeVar("M", bound=Manifest)


def newest(place: Place, directory: str, decode: Callable[[bytes, str], M]) -> M | None:
    """The manifest that counts; None if there is none. It is durable, so the caller may build on it."""
    for _ in range(_LISTINGS):
        versions = _versions(place, directory)
        if not versions:
            return None
        name = name_of(directory, versions[-1])
        path = place.path_of(name)
        with suppress(FileNotFoundError):  # removed, because there are many newer ones
            manifest = decode(place.read(name), path)
            if manifest.version != versions[-1]:
                expected = f"version {versions[-1]}, as its name says"
                raise CorruptLogError(path, 0, f"version {manifest.version}", expected)
            return manifest
    raise CorruptLogError(place.path_of(directory), 0, "manifests that vanish", "manifests that can be read")


def commit(place: OpenPlace, directory: str, version: int, content: bytes) -> bool:
    """Make the version, which builds on the one before it; False if another process was quicker."""
    if not place.put_manifest(name_of(directory, version), content):
        return False
    versions = _versions(place, directory)
    if versions[-1] >= version + VERSIONS_KEPT:
        return False  # this number may have been used before, and removed
    for each in versions:
        if each <= versions[-1] - VERSIONS_KEPT:
            place.remove(name_of(directory, each))  # the newest one has all that it has
    return True


def name_of(directory: str, version: int) -> str:
    return f"{directory}/{version:020d}.json"


def _versions(place: Place, directory: str) -> list[int]:
    return sorted(int(match[1]) for name in place.names_in(directory) if (match := _VERSION.fullmatch(name)))


def check_log(manifest: Manifest, place: str, log_id: bytes, topic_path: str, *, advice: str) -> None:
    """`LogError` unless the manifest is of the log with this id.

    `place` begins the message, such as "x is the archive"; `advice` ends it.
    """
    if manifest.log_id != log_id:
        raise LogError(
            f"{place} of another log (of topic {manifest.topic!r}, with id {manifest.log_id.hex()}) than {topic_path} "
            f"(id {log_id.hex()}); {advice}"
        )


class FilePlace:
    """A place in a file system: a directory, or what `ObjectFiles` has of an object store."""

    def __init__(self, files: Files, path: str) -> None:
        self.path = path
        self._files = files

    def path_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def names_in(self, directory: str) -> list[str]:
        path = self.path_of(directory)
        try:
            names = self._files.names_in(path)
            self._files.sync_directory(path)  # another process may have made a name, and not synced it yet
        except (FileNotFoundError, NotADirectoryError):
            return []
        return names

    def read(self, name: str) -> bytes:
        return self._files.read_whole(self.path_of(name), _MOST_BYTES)
