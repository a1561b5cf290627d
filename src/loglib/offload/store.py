"""Store: the place to which segments are uploaded, or an archive is written: a directory here, S3 in s3.py.

Invariant: a file appears whole, or not at all. The store refuses a name that is taken, so of several processes one
makes the file. No file that a manifest names is removed, and only two kinds are replaced, each in one step: a segment
by the same segment, after batches of it were healed that were lost before, and small facts such as `topic.json`.

    <place>/copy.json, topic.json                what the place is (log/copy_role.py), and the topic's description
    <place>/0000/<base>.log, <base>.producers    segments, byte for byte as in the topic's directory
    <place>/0000/gaps.json                       gaps that a repair has declared, if there are any
    <place>/_tier/<version>.json                 the manifests: which of the segments count (manifest_log.py)

    <archive>/0000/<start>-<end>-<random>.parquet    records of partition 0
    <archive>/_loglib/<version>.json                 the manifests: which of the files count

In a directory a file is written as `.<name>-<random>.tmp`, synced, and linked to its name. Each process that has the
store open holds a shared flock of the directory. A process that gets it exclusively is alone, and so removes what dead
processes have left.

Threads: several may put files at the same time. Processes: any number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import NamedTuple, Protocol

from ..errors import CorruptLogError
from ..format.header import crc32c
from ..system.directory import Directory
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .manifest_log import FilePlace, OpenPlace

_BLOCK_BYTES = 1 << 20
_PARTITION = re.compile(r"\d{4}")
_TEMPORARY = re.compile(r"\..+-[0-9a-f]{16}\.tmp")

Source = Callable[[int, int], bytes]  # the bytes of a file: called with a number of bytes, and the position


class NewFile(NamedTuple):
    """A file that is written before it gets its name: open, and empty."""

    files: Files
    fd: int
    path: str  # for messages


class Store(OpenPlace, Protocol):
    """A place that is open for putting files. `close` it."""

    path: str  # the place without credentials, for messages

    def size(self, name: str) -> int | None:
        """The size of a file in bytes; None if there is none."""

    def blocks(self, name: str) -> Iterator[bytes]:
        """The bytes of a file, as the store has them, durably; `FileNotFoundError` if there is none."""

    def put(self, name: str, size_bytes: int, source: Source, *, replace: bool = False) -> bool:
        """Make a file with these bytes. Durable. False if there is one of that name, unless it is to be replaced."""

    def new_file(self, name: str) -> AbstractContextManager[NewFile]:
        """A file for the caller to write and sync. When the block ends without an error, it gets its name. Durable."""

    def close(self) -> None: ...


def put_content(store: Store, name: str, content: bytes, *, replace: bool = False) -> bool:
    """Make a small file, as `Store.put` does."""
    return store.put(name, len(content), lambda count, at: content[at : at + count], replace=replace)


def compare(store: Store, name: str, files: Files, fd: int, size_bytes: int, *, expected: str) -> int:
    """Compare what the store has with an open file of this size; returns its CRC-32C.

    `CorruptLogError` if they differ. `expected` describes the right content, for the message.
    """
    path, position, crc = store.path_of(name), 0, 0
    for block in store.blocks(name):
        if block != files.read_at(fd, len(block), position):
            raise CorruptLogError(path, position, "other bytes", expected)
        crc = crc32c(block, crc)
        position += len(block)
    if position != size_bytes:
        raise CorruptLogError(path, position, f"{position} bytes", expected)
    return crc


class DirectoryStore(FilePlace, NotCopyable):
    """A store in a directory, on a disk or on a mount."""

    def __init__(
        self, files: Files, path: str, manifests: str, permissions: int,
        leftovers: Callable[[DirectoryStore], Iterable[str]] = lambda _: (),
    ) -> None:  # fmt: skip
        """Open the store, or make it. `manifests` is the name of their directory.

        `leftovers` returns the names of files, beside unfinished ones, that no process needs. It is called if no other
        process has the store open.
        """
        super().__init__(files, path)
        self._manifests = manifests
        self._permissions = permissions
        self._made: set[str] = set()  # directories that are known to exist, durably
        there = self.path_of(manifests)
        while not files.exists(there):
            there = os.path.dirname(there)
        files.make_directories(self.path_of(manifests), permissions)
        # A process that died may have made the directory `there`, or a file at the top, and not synced its name.
        files.sync_directory(path)
        files.sync_directory(os.path.dirname(path))
        with suppress(PermissionError):  # what this user cannot read is older than the store
            files.sync_directory(os.path.dirname(there))
        self._root = Directory.open(files, path)
        try:
            if files.try_lock(self._root.fd, path):
                for name in self.names():
                    if _TEMPORARY.fullmatch(os.path.basename(name)):
                        self.remove(name)
                for name in leftovers(self):
                    self.remove(name)
            self._root.lock_for_a_moment("a process that sweeps it", advice="try again", shared=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock, and close the directory."""
        self._root.close()

    def names(self) -> Iterator[str]:
        """The names of all files at the top, of the manifests, and in the directories of partitions."""
        at_top = self._root.names()
        partitions = [name for name in at_top if _PARTITION.fullmatch(name) and self._root.is_directory(name)]
        yield from at_top
        for directory in (self._manifests, *partitions):
            for name in self._files.names_in(self.path_of(directory)):
                yield f"{directory}/{name}"

    def size(self, name: str) -> int | None:
        try:
            return self._files.facts(self.path_of(name)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def blocks(self, name: str) -> Iterator[bytes]:
        path = self.path_of(name)
        with self._files.closing(self._files.open_read(path)) as fd:
            self._files.sync_directory(os.path.dirname(path))  # a process that died may not have synced the name
            size, position = self._files.size(fd), 0
            self._files.drop_cached(fd, 0, size)  # what was written is not yet what the disk has
            while block := self._files.read_at(fd, _BLOCK_BYTES, position):
                yield block
                position += len(block)

    def put(self, name: str, size_bytes: int, source: Source, *, replace: bool = False) -> bool:
        try:
            with self._new_file(name, replace=replace) as (files, fd, _):
                for start in range(0, size_bytes, _BLOCK_BYTES):
                    files.write_all(fd, [source(min(_BLOCK_BYTES, size_bytes - start), start)], start)
                files.datasync(fd)
        except FileExistsError:
            return False
        return True

    def put_manifest(self, name: str, content: bytes) -> bool:
        return put_content(self, name, content)

    def new_file(self, name: str) -> AbstractContextManager[NewFile]:
        return self._new_file(name, replace=False)

    @contextmanager
    def _new_file(self, name: str, *, replace: bool) -> Iterator[NewFile]:
        path = self.path_of(name)
        base = os.path.basename(path)
        temporary = f".{base}-{self._files.random_bytes(8).hex()}.tmp"
        with self._directory(os.path.dirname(path)) as directory:
            fd = directory.create(temporary, self._permissions)
            try:
                with self._files.closing(fd):
                    yield NewFile(self._files, fd, directory.path_of(temporary))
                if replace:
                    directory.rename(temporary, base)
                else:
                    directory.link(temporary, base)
            finally:
                with suppress(FileNotFoundError):  # it was renamed
                    directory.unlink(temporary)
                directory.sync()

    def _directory(self, path: str) -> Directory:
        """A directory of the store, which is made if it is not there. Its name is synced."""
        if path not in self._made:
            self._files.make_directories(path, self._permissions)
            self._root.sync()  # another process may have made it, and not synced it yet
            self._made.add(path)
        return Directory.open(self._files, path)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):  # another process does the same
            self._files.unlink(self.path_of(name))
