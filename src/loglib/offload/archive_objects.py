"""Archive objects: an archive in an object store that speaks the S3 API.

Invariant: as in archive_store.py. A file is written here first, without a name, and compared with the log. Then it is
uploaded under a name that the store must not have yet, and read back: an object that differs is removed, and no
manifest names it. A manifest is committed by a conditional put.

A store has no locks. So what dead processes have left is known by its offsets: a file behind whose end the newest
manifest has come, and which it does not name, can never be committed any more.

Needs the extra [s3]. Threads: an `ObjectArchiveStore` belongs to one thread. Processes: any number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CorruptLogError, LogError
from ..log.topic_file import NAME
from ..system.descriptors import nameless_file
from ..system.files import REAL
from ..system.not_copyable import NotCopyable
from . import manifest_log
from .archive_manifest import Archived, decode, encode, end_of
from .archive_store import DIRECTORY, NewFile
from .s3 import S3Store
from .storage import storage_of
from .tier_store import compare

__all__ = ["ObjectArchiveStore"]


class ObjectArchiveStore(NotCopyable):
    """An archive below a key of a bucket; see `archive_store.ArchiveStore`."""

    def __init__(self, uri: str) -> None:
        storage, self.path = storage_of(uri)
        self._store = S3Store(storage, connections=1, manifests=DIRECTORY)
        try:
            if self._store.size(NAME) is not None:
                raise ValueError(f"{self.path} has the segments of a topic; an archive is a place of its own")
            self._sweep()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._store.close()

    def newest(self) -> Archived | None:
        return manifest_log.newest(self._store.manifests, decode)

    def commit(self, archived: Archived) -> bool:
        return manifest_log.commit(self._store.manifests, archived.version, encode(archived))

    @contextmanager
    def new_file(self, name: str) -> Iterator[NewFile]:
        fd = nameless_file()
        try:
            yield NewFile(REAL, fd, self._store.path_of(name))
            self._upload(name, fd)
        finally:
            REAL.close(fd)

    def _upload(self, name: str, fd: int) -> None:
        size_bytes, path = REAL.size(fd), self._store.path_of(name)
        if not self._store.upload(name, size_bytes, lambda size, position: REAL.read_at(fd, size, position)):
            raise LogError(f"{path} is there already, and nobody but this call knows its name")
        try:
            compare(self._store, name, REAL, fd, size_bytes, expected="the bytes that were uploaded")
        except CorruptLogError as error:
            self._store.remove(name)
            found = "an object that differs from what was uploaded"
            raise CorruptLogError(path, 0, found, "the same bytes") from error

    def remove(self, name: str) -> None:
        self._store.remove(name)

    def _sweep(self) -> None:
        """Remove the files of processes that have died before they committed, or were too late."""
        archived = self.newest()
        for each in () if archived is None else archived.partitions:
            named = {file.name for file in each.all_files}
            directory = f"{each.partition:04d}"
            for name in (f"{directory}/{file}" for file in self._store.names_below(directory)):
                end = end_of(name)
                if end is not None and end <= each.end and name not in named:
                    self._store.remove(name)
