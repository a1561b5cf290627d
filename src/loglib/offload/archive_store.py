"""Archive store: an archive in a directory or an object store, for reading its newest manifest and for adding to it.

Invariant: no file that a manifest names is changed, replaced or removed, and no name is used twice. What a manifest
names was made before it, durably.

Files of processes that have died are removed by the next call. In a directory this call holds the lock exclusively, so
it removes every file that no manifest names. An object store has no locks. There a file that the newest manifest does
not name, and that ends where that manifest ends or before, can never be committed any more.

Threads: an open archive belongs to one thread. Processes: any number.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from ..config.uri import is_remote
from ..log.topic_file import NAME
from ..system.files import REAL, Files
from . import manifest_log
from .archive_manifest import ArchiveManifest, decode, encode, end_of
from .manifest_log import FilePlace, Place
from .storage import place_of, storage_of
from .store import DirectoryStore, Store

__all__ = ["DIRECTORY", "commit", "is_in_a_store", "load", "located", "named_files", "newest", "open_archive"]

DIRECTORY = "_loglib"  # engines that read all of a directory ignore names that begin with _


def newest(place: Place) -> ArchiveManifest | None:
    """The newest manifest of the archive; None if there is none. It is durable."""
    return manifest_log.newest(place, DIRECTORY, decode)


def commit(store: Store, manifest: ArchiveManifest) -> bool:
    """Commit the manifest, which builds on the one before it; False if another process was quicker. Durable."""
    return manifest_log.commit(store, DIRECTORY, manifest.version, encode(manifest))


def load(files: Files, path: str) -> ArchiveManifest:
    """The newest manifest of the archive at the path; `FileNotFoundError` if there is none."""
    manifest = newest(FilePlace(files, path))
    if manifest is None:
        raise FileNotFoundError(errno.ENOENT, "no archive here; loglib.offload.archive makes one", path)
    return manifest


def located(files: Files, given: str) -> tuple[Files, str]:
    """The files for one look at the archive at a path or a URI, and its path in them. `files` are for paths."""
    storage, path = place_of(given)
    return storage.files_now(files), path


def is_in_a_store(given: str) -> bool:
    """True if the URI is that of an archive in an object store, and the store answers."""
    if not is_remote(given):
        return False
    try:
        files, path = located(REAL, given)
        return files.exists(f"{path}/{DIRECTORY}")
    except (OSError, ValueError, ImportError):
        return False


def named_files(manifest: ArchiveManifest | None) -> set[str]:
    """The names of all files that a manifest names."""
    return {file.name for each in (manifest.partitions if manifest else ()) for file in each.all_files}


def open_archive(files: Files, path: str, permissions: int) -> Store:
    """The archive at a path or a URI, open for adding to it. `ValueError` if a topic is there."""
    if not is_remote(path):
        if files.exists(os.path.join(path, NAME)):
            raise ValueError(f"{path} is a topic; an archive is a directory of its own")
        return DirectoryStore(files, path, DIRECTORY, permissions, _unnamed)
    from .s3 import S3Store

    store = S3Store(storage_of(path)[0], connections=1)
    try:
        if store.size(NAME) is not None:
            raise ValueError(f"{store.path} has the segments of a topic; an archive is a place of its own")
        _remove_late(store)
    except BaseException:
        store.close()
        raise
    return store


def _unnamed(store: DirectoryStore) -> Iterable[str]:
    """The files of the archive that no manifest names. No other process has the archive open."""
    named = named_files(newest(store))
    return [name for name in store.names() if end_of(name) is not None and name not in named]


def _remove_late(store: Store) -> None:
    """Remove the files of processes that died before they committed, or that were too late."""
    manifest = newest(store)
    named = named_files(manifest)
    for each in manifest.partitions if manifest else ():
        directory = f"{each.partition:04d}"
        for name in (f"{directory}/{file}" for file in store.names_in(directory)):
            end = end_of(name)
            if end is not None and end <= each.end and name not in named:
                store.remove(name)
