"""Tier store: where segments are uploaded to: a directory here, an object store in s3.py.

Invariant: an object of a segment appears whole, or not at all, and is never changed: the store refuses a name that is
taken. It is replaced in one step by the same segment, when batches of it were healed that were lost before. Small
facts are replaced as well, each in one step.

    <place>/copy.json, topic.json                what the place is (log/copy_role.py), and the topic's description
    <place>/0000/<base>.log, <base>.producers    segments, byte for byte as in the topic's directory
    <place>/0000/gaps.json                       gaps that a repair has declared, if there are any
    <place>/_tier/<version>.json                 the manifests: which of the segments count

In a directory a file is written as `.<name>-<random>.tmp`, synced, and linked to its name. Each process that uploads
holds a shared flock of the place. A process that gets it exclusively is alone, and so removes what dead ones have left.

Threads: several may upload at once. Processes: any number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

from ..errors import CorruptLogError, LogError
from ..format.header import crc32c
from ..log.copy_role import MANIFESTS
from ..system.directory import Directory
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .manifest_log import DirectorySlots, OpenSlots

__all__ = ["DirectoryStore", "Source", "Store", "compare"]

_BLOCK_BYTES = 1 << 20
_PARTITION = re.compile(r"\d{4}")
_TEMPORARY = re.compile(r"\..+-[0-9a-f]{16}\.tmp")

Source = Callable[[int, int], bytes]  # the bytes of a file: called with a number of bytes, and the position


class Store(Protocol):
    """A place that is open for uploading. Names have slashes between their parts; `close` it."""

    @property
    def path(self) -> str:
        """Where it is, without credentials, for messages."""

    @property
    def manifests(self) -> OpenSlots: ...

    def size(self, name: str) -> int | None:
        """The size of an object; None if there is none."""

    def upload(self, name: str, size_bytes: int, source: Source) -> bool:
        """Make an object with these bytes, durable; False if there is one of that name, or there is one by now."""

    def upload_again(self, name: str, size_bytes: int, source: Source) -> None:
        """Give an object these bytes, durable, whether there is one of that name or not."""

    def blocks(self, name: str) -> Iterator[bytes]:
        """The bytes of an object, as the store has them; `FileNotFoundError` if there is none."""

    def replace(self, name: str, content: bytes) -> None:
        """Give a small object this content, durable."""

    def close(self) -> None: ...


def compare(store: Store, name: str, files: Files, fd: int, size_bytes: int, *, expected: str) -> int:
    """Compare what the store has with an open file of this size; returns its CRC-32C.

    `CorruptLogError` if they differ; `expected` says in words what the object should have had.
    """
    path, position, crc = f"{store.path}/{name}", 0, 0
    for block in store.blocks(name):
        if block != files.read_at(fd, len(block), position):
            raise CorruptLogError(path, position, "other bytes", expected)
        crc = crc32c(block, crc)
        position += len(block)
    if position != size_bytes:
        raise CorruptLogError(path, position, f"{position} bytes", expected)
    return crc


class DirectoryStore(NotCopyable):
    """A place in a directory, on another disk or on a mount."""

    def __init__(self, files: Files, path: str, permissions: int) -> None:
        self.path = path
        self._files = files
        self._permissions = permissions
        if files.exists(path) and (found := files.listdir(path)) and MANIFESTS not in found:
            raise LogError(f"{path} holds other files; a place for segments is made in a new or an empty directory")
        files.make_directories(os.path.join(path, MANIFESTS), permissions)
        files.sync_directory(path)  # a process that died may have made what was found, and not synced it
        files.sync_directory(os.path.dirname(path))
        self._root = Directory.open(files, path)
        try:
            self._manifests = Directory.open(files, os.path.join(path, MANIFESTS))
        except BaseException:
            self._root.close()
            raise
        try:
            self.manifests: OpenSlots = DirectorySlots(self._manifests, permissions)
            self._enter()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._manifests.close()
        self._root.close()

    def _enter(self) -> None:
        """Hold the place beside other processes. Whoever is alone sweeps first."""
        if self._files.try_lock(self._root.fd, self._root.path):
            for name in ("", MANIFESTS, *filter(_PARTITION.fullmatch, self._root.names())):
                for each in filter(_TEMPORARY.fullmatch, self._files.listdir(os.path.join(self.path, name))):
                    self._files.unlink(os.path.join(self.path, name, each))
        self._root.lock_for_a_moment("a process that sweeps it", advice="try again", shared=True)

    def size(self, name: str) -> int | None:
        try:
            return self._files.facts(os.path.join(self.path, name)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def upload(self, name: str, size_bytes: int, source: Source) -> bool:
        return self._put(name, size_bytes, source, Directory.link)

    def upload_again(self, name: str, size_bytes: int, source: Source) -> None:
        self._put(name, size_bytes, source, Directory.rename)

    def _put(self, name: str, size_bytes: int, source: Source, give: Callable[[Directory, str, str], None]) -> bool:
        """Write a file without a name, and give it its name; False if that is taken."""
        parent = os.path.dirname(name)
        self._files.make_directories(os.path.join(self.path, parent), self._permissions)
        with Directory.open(self._files, os.path.join(self.path, parent)) as directory:
            base = os.path.basename(name)
            temporary = f".{base}-{self._files.random_bytes(8).hex()}.tmp"
            fd = directory.create(temporary, self._permissions)
            try:
                try:
                    for start in range(0, size_bytes, _BLOCK_BYTES):
                        block = source(min(_BLOCK_BYTES, size_bytes - start), start)
                        self._files.write_all(fd, [block], start)
                    self._files.datasync(fd)
                finally:
                    self._files.close(fd)
                give(directory, temporary, base)
            except FileExistsError:
                return False
            finally:
                if directory.exists(temporary):
                    directory.unlink(temporary)
                directory.sync()
        return True

    def blocks(self, name: str) -> Iterator[bytes]:
        fd = self._files.open_read(os.path.join(self.path, name))
        try:
            size, position = self._files.size(fd), 0
            self._files.drop_cached(fd, 0, size)  # what was written is not yet what the disk has
            while block := self._files.read_at(fd, _BLOCK_BYTES, position):
                yield block
                position += len(block)
        finally:
            self._files.close(fd)

    def replace(self, name: str, content: bytes) -> None:
        parent = os.path.join(self.path, os.path.dirname(name))
        self._files.make_directories(parent, self._permissions)
        with Directory.open(self._files, parent) as directory:
            base = os.path.basename(name)
            temporary = f".{base}-{self._files.random_bytes(8).hex()}.tmp"
            directory.write_new(temporary, content, self._permissions)
            try:
                directory.rename(temporary, base)
            except BaseException:
                with suppress(OSError):
                    directory.unlink(temporary)
                raise
            directory.sync()
