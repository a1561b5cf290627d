"""Storage: the file system that holds topics, as a few words that Spark pickles with each split.

Invariant: a storage is plain facts, of which each process that reads makes its own `Files`. The URI may contain
credentials, so no message shows it. Paths in messages begin with `root`.

    local    a path of the system, or `file:`; the same files as in the core
    objects  a URI that `pyarrow.fs.FileSystem.from_uri` accepts, such as s3://bucket/logs/clicks; read only

Processes: made on the driver, used there and in tasks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ..config.extras import named_extras
from ..config.uri import has_credentials, is_remote, local_path, normal
from ..system.files import REAL, Files
from ..system.process import importing


@dataclass(frozen=True, slots=True)
class Storage:
    """A file system, and in an object store the place below which everything is read."""

    uri: str = field(default="", repr=False)  # for pyarrow; "" for the local file system
    root: str = ""  # the same without credentials and parameters

    @property
    def is_local(self) -> bool:
        return not self.uri

    def files(
        self, *, listings: Mapping[str, Mapping[str, int]] | None = None, until_offset: int | None = None,
        eager: bool = True,
    ) -> Files:  # fmt: skip
        """The files, for one process. The arguments are for objects, as `ObjectFiles` takes them."""
        if self.is_local:
            return REAL
        with importing, named_extras():
            from .object_files import ObjectFiles, connect

        filesystem, inner_root = connect(self.uri, self.root)
        return ObjectFiles(filesystem, self.root, inner_root, listings=listings, until_offset=until_offset, eager=eager)

    def files_now(self, local: Files) -> Files:
        """Files for one look: those of an object store keep its listings. `local` are for the local file system."""
        return local if self.is_local else self.files()


LOCAL = Storage()


def storage_of(path: str) -> tuple[Storage, str]:
    """The storage of a path or a URI that a user gave, and the path as messages show it.

    `ValueError` for a URI in which credentials, bucket and key cannot be told apart; the message does not show it.
    """
    if not is_remote(path):
        return LOCAL, path
    path = normal(path)
    parts = urlsplit(path)
    if has_credentials(path) and "@" not in parts.netloc:
        raise ValueError(
            "this s3:// URI has a colon where the name of the bucket is expected; in credentials write / as %2F, "
            "? as %3F and # as %23, and give host and port as endpoint_override=host:port"
        )
    if "#" in path:
        raise ValueError(f"this {parts.scheme}:// URI has a #; write it as %23")
    root = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
    return Storage(path, root), root


def place_of(given: str) -> tuple[Storage, str]:
    """The storage of a path or a URI, and the whole path, as messages show it."""
    storage, path = storage_of(given)
    return storage, os.path.abspath(local_path(path)) if storage.is_local else path
