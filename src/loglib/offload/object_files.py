"""Object files: the files of a topic in an object store, for reading.

Invariant: nothing is written, and an object is read only by ranges. A directory is listed once, and the listing is
kept. Directories whose listings are given are not listed at all.

The windows ahead of all readers together take at most 64 MiB, and each reader may have at least 1 MiB.

Threads: safe for all. An open file belongs to one thread at a time; two openings of an object share nothing.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, NoReturn

import pyarrow as pa
from pyarrow import fs

from ..segment import HEADER_BYTES, parse_segment_name
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .prefetch import Ahead

__all__ = ["ObjectFiles", "connect"]

_MOST_KEPT = 8  # objects that stay open, because a search opens the same few segments several times
_ROOM_BYTES = 64 << 20
_LEAST_ROOM = 1 << 20
_NO_NAMES = {"", ".", ".."}  # parts of paths
_numbers = count(1 << 40)  # of open objects; no file of the system has such a number


@cache
def connect(uri: str, root: str) -> tuple[Any, str]:
    """pyarrow's file system for the URI, and the path in it: in S3 the bucket and the key, without escapes.

    `ValueError` if pyarrow has none, or if stores and clients treat a part of the path in different ways.
    """
    try:
        filesystem, inner = fs.FileSystem.from_uri(uri)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        why = str(error).replace(uri, root)  # the URI may contain credentials
        raise ValueError(f"{root} is no path, and no URI that pyarrow.fs.FileSystem.from_uri accepts: {why}") from None
    inner = inner.rstrip("/")
    if not _NO_NAMES.isdisjoint(inner.removeprefix("/").split("/")):
        raise ValueError(f"{root} has an empty part, or one called . or ..; not all clients of stores keep these")
    return filesystem, inner


class ObjectFiles(Files, NotCopyable):
    """Files whose paths below `root` are objects below `inner_root`. Other paths do not exist.

    `listings` are the names and sizes in some directories. With `until_offset` segments are read ahead, up to this
    offset of the log: with `eager` from the first large read on, otherwise from the second.
    """

    real = False

    def __init__(
        self, filesystem: Any, root: str, inner_root: str, *,
        listings: Mapping[str, Mapping[str, int]] | None = None, until_offset: int | None = None, eager: bool = True,
    ) -> None:  # fmt: skip
        self._filesystem = filesystem
        self._root = root
        self._inner_root = inner_root
        self._listings = {path: dict(listing) for path, listing in (listings or {}).items()}
        self._until_offset = until_offset
        self._eager = eager
        self._lock = threading.RLock()  # for the next two; never held during a request
        self._kept: dict[str, Ahead] = {}  # closed objects, in the order of their last use
        self._open: dict[int, tuple[str, Ahead]] = {}

    # --- the system's calls that reading needs -----------------------------------------------------

    def open(self, path: str, flags: int, *_: object, **__: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self._refuse(path)
        with self._lock:
            ahead = self._kept.pop(path, None)
        if ahead is None:
            with _system_errors(path):
                file = self._filesystem.open_input_file(self._inner(path))
                ahead = Ahead(file, self._until(path), eager=self._eager, room=None if self._eager else self._room)
        with self._lock:
            number = next(_numbers)
            self._open[number] = path, ahead
        return number

    def close(self, fd: int) -> None:
        with self._lock:
            path, ahead = self._open.pop(fd)
            ahead.forget()
            self._kept[path] = ahead
            if len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]

    def pread(self, fd: int, size_bytes: int, position: int) -> bytes:
        path, ahead = self._open[fd]
        with _system_errors(path):
            return ahead.read(size_bytes, position)

    def fstat(self, fd: int) -> os.stat_result:
        return _facts(stat.S_IFREG, self._open[fd][1].size_bytes)

    def sendfile(self, to: int, source: int, start: int, size_bytes: int) -> int:
        return self.write(to, self.pread(source, min(size_bytes, _LEAST_ROOM), start))

    def lstat(self, path: str, **_: object) -> os.stat_result:  # type: ignore[override]
        if path in self._listings:
            return _facts(stat.S_IFDIR, 0)
        with _system_errors(path):
            info = self._filesystem.get_file_info(self._inner(path))
        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        return _facts(stat.S_IFREG if info.is_file else stat.S_IFDIR, info.size or 0)

    def _refuse(self, path: object, *_: object, **__: object) -> NoReturn:
        raise OSError(errno.EROFS, "a copy in an object store is only read", path if isinstance(path, str) else None)

    pwritev = ftruncate = rename = link = unlink = mkdir = rmdir = chmod = fchmod = flock = _refuse  # type: ignore[assignment]

    def stat(self, path: str, **_: object) -> os.stat_result:  # type: ignore[override]
        return self.lstat(path)

    def listdir(self, place: str | int) -> list[str]:
        return list(self.sizes(str(place)))

    def sync_directory(self, path: str, **_: object) -> None:
        """An object store lists only names that are durable."""

    # --- directories ---------------------------------------------------------------------------------

    def sizes(self, directory: str, **_: object) -> dict[str, int]:
        """Name and size of everything in the directory: one request per thousand names, and none the next time."""
        listing = self._listings.get(directory)
        if listing is None:
            with _system_errors(directory):
                infos = self._filesystem.get_file_info(fs.FileSelector(self._inner(directory)))
            listing = self._listings[directory] = {each.base_name: each.size or 0 for each in infos}
        return dict(listing)

    def _inner(self, path: str) -> str:
        return self._inner_root + path.removeprefix(self._root)

    def _until(self, path: str) -> int | None:
        base = parse_segment_name(os.path.basename(path))
        if base is None or self._until_offset is None:
            return None
        return max(HEADER_BYTES + self._until_offset - base, 0)

    def _room(self) -> int:
        """The number of bytes that may be ahead of one reader."""
        return max(_LEAST_ROOM, _ROOM_BYTES // max(1, len(self._open)))


@contextmanager
def _system_errors(path: str) -> Iterator[None]:
    """Give errors of pyarrow a number and the path, which errors of the system have."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise OSError(errno.EIO, str(error), path) from error


def _facts(kind: int, size_bytes: int) -> os.stat_result:
    return os.stat_result((kind | 0o444, 0, 0, 1, 0, 0, size_bytes, 0, 0, 0))
