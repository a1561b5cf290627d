"""Objects: the files of a copied topic in an object store, as far as reading needs them.

Invariant: nothing is written, and an object is read only by ranges. A directory is listed once; the listing then
stands for what is there. With listings from a plan, nothing is listed at all.

Threads: one.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from functools import cache
from itertools import count
from typing import Any

import pyarrow as pa
from pyarrow import fs

from ..segment import HEADER_BYTES, parse_segment_name
from ..system.files import Files
from .ahead import Ahead

__all__ = ["ObjectFiles", "connect"]

_MOST_KEPT = 8  # objects that stay open, because a search opens the same few segments several times


@cache
def connect(uri: str, root: str) -> tuple[Any, str]:
    """pyarrow's file system for the URI, and the path in it. `ValueError` if pyarrow has none."""
    try:
        filesystem, inner = fs.FileSystem.from_uri(uri)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        why = str(error).replace(uri, root)  # the URI may hold credentials
        raise ValueError(f"{root} is no path, and no URI that pyarrow.fs.FileSystem.from_uri accepts: {why}") from None
    return filesystem, inner.rstrip("/")


class ObjectFiles(Files):
    """Paths below `root` are objects below `inner_root`; others do not exist.

    `listings` has name and size of what is in some directories. With `until_offset` segments are read ahead, up to
    this offset of the log.
    """

    real = False

    def __init__(
        self,
        filesystem: Any,
        root: str,
        inner_root: str,
        *,
        listings: Mapping[str, Mapping[str, int]] | None = None,
        until_offset: int | None = None,
    ) -> None:
        self._filesystem = filesystem
        self._root = root
        self._inner_root = inner_root
        self._listings = {path: dict(listing) for path, listing in (listings or {}).items()}
        self._until_offset = until_offset
        self._kept: dict[str, Ahead] = {}  # the one used last stands last
        self._open: dict[int, Ahead] = {}
        self._numbers = count(1)

    # --- the system's calls that reading needs -----------------------------------------------------

    def open(self, path: str, flags: int, *_: object) -> int:  # type: ignore[override]
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "a copy in an object store is only read", path)
        kept = self._kept.pop(path, None)
        if kept is None:
            kept = Ahead(self._filesystem.open_input_file(self._inner(path)), self._until(path))
        self._kept[path] = kept
        if len(self._kept) > _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        number = next(self._numbers)
        self._open[number] = kept
        return number

    def close(self, fd: int) -> None:
        closed = self._open.pop(fd)
        if all(each is not closed for each in self._open.values()):
            closed.forget()

    def pread(self, fd: int, size_bytes: int, position: int) -> bytes:
        return self._open[fd].read(size_bytes, position)

    def fstat(self, fd: int) -> os.stat_result:
        return _facts(stat.S_IFREG, self._open[fd].size_bytes)

    def lstat(self, path: str, **_: object) -> os.stat_result:  # type: ignore[override]
        if path in self._listings:
            return _facts(stat.S_IFDIR, 0)
        found = self._filesystem.get_file_info(self._inner(path))
        if found.type == fs.FileType.NotFound:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        return _facts(stat.S_IFREG if found.is_file else stat.S_IFDIR, found.size or 0)

    # --- directories ---------------------------------------------------------------------------------

    def sizes(self, directory: str, **_: object) -> dict[str, int]:
        """Name and size of everything in the directory: one request per thousand names, and none the next time."""
        listing = self._listings.get(directory)
        if listing is None:
            found = self._filesystem.get_file_info(fs.FileSelector(self._inner(directory)))
            listing = self._listings[directory] = {each.base_name: each.size or 0 for each in found}
        return dict(listing)

    def _inner(self, path: str) -> str:
        return self._inner_root + path.removeprefix(self._root)

    def _until(self, path: str) -> int | None:
        base = parse_segment_name(os.path.basename(path))
        if base is None or self._until_offset is None:
            return None
        return max(HEADER_BYTES + self._until_offset - base, 0)


def _facts(kind: int, size_bytes: int) -> os.stat_result:
    return os.stat_result((kind | 0o444, 0, 0, 1, 0, 0, size_bytes, 0, 0, 0))
