"""Object files: the files of a topic in an object store, for reading.

Invariant: nothing is written, and an object is read only by ranges. A directory is listed once, and the listing is
kept. Directories whose listings are given are not listed at all. Requests run ahead of a reader only while it reads
sequentially, and only up to the offset that it wants. Bytes are kept only while the reader may need them.

A request takes about 30 ms wherever the object is, and a connection carries about 80 MB/s. So

    small reads    (headers of batches)  request whole blocks of 64 KiB; the last 16 blocks are kept
    larger reads   (the log itself)      request windows of 1, 2, 4 and then 8 MiB; four of them are under way

The windows ahead of all readers together take at most 64 MiB, and each reader may have at least 1 MiB.

Threads: safe for all; threads of a pool read the windows. An open file belongs to one thread at a time; two openings of
an object share nothing.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, NamedTuple, NoReturn, Protocol

import pyarrow as pa
from pyarrow import fs

from ..segment import HEADER_BYTES, parse_segment_name
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from ..system.process import PerProcess

_MOST_KEPT = 8  # objects that stay open, because a search opens the same few segments several times
_ROOM_BYTES = 64 << 20
_LEAST_ROOM = 1 << 20
_BLOCK_BYTES = 64 << 10
_MOST_BLOCKS = 16
_FIRST_WINDOW = 1 << 20
_LARGEST_WINDOW = 8 << 20
_UNDER_WAY = 4  # windows of one object
_MOST_AHEAD = (_UNDER_WAY + 1) * _LARGEST_WINDOW
_THREADS = 16
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


# --- one object ------------------------------------------------------------------------------------


class RangedFile(Protocol):
    """An open file of pyarrow."""

    def read_at(self, size_bytes: int, position: int, /) -> bytes: ...
    def size(self) -> int: ...


class _Window(NamedTuple):
    start: int
    stop: int
    content: Future[bytes]


class Ahead:
    """An object that is read by position."""

    def __init__(
        self, file: RangedFile, until: int | None, *, eager: bool = True, room: Callable[[], int] | None = None
    ) -> None:  # fmt: skip
        """With `eager` the first large read requests windows ahead, otherwise the second one.

        `room` returns the number of bytes that may be in windows ahead of the reader; by default 36 MiB.
        """
        self._file = file
        self.size_bytes = file.size()
        # The position up to which the caller is going to read; None: no window is requested ahead.
        self._until = None if until is None else min(until, self.size_bytes)
        self._eager = eager
        self._room = room or (lambda: _MOST_AHEAD)
        self._blocks: dict[int, bytes] = {}
        self._windows: deque[_Window] = deque()
        self._next = -1  # the position where the next window begins
        self._window_bytes = _FIRST_WINDOW

    def read(self, size_bytes: int, position: int) -> bytes:
        """The bytes from `position`; fewer only at the end of the object."""
        end = min(position + size_bytes, self.size_bytes)
        if position >= end:
            return b""
        reads_on = bool(self._windows) and self._windows[0].start <= position <= self._next
        if not reads_on:
            if end - position <= _BLOCK_BYTES:
                return self._of_blocks(position, end)
            self.forget()
            self._next = position
        while self._windows and self._windows[0].stop <= position:
            self._windows.popleft()
        while self._next < end:
            self._request(end - self._next)
        while (reads_on or self._eager) and self._may_request(end):
            self._request(0)
        try:
            return b"".join(
                memoryview(window.content.result())[max(position - window.start, 0) : end - window.start]
                for window in self._windows
                if window.start < end
            )
        except OSError:
            self.forget()  # so that another attempt sends new requests
            raise

    def forget(self) -> None:
        """Drop the windows."""
        for window in self._windows:
            window.content.cancel()
        self._windows.clear()
        self._next, self._window_bytes = -1, _FIRST_WINDOW

    def _may_request(self, end: int) -> bool:
        """True if another window may be requested, after the bytes before `end` that the reader waits for."""
        if self._until is None or len(self._windows) >= _UNDER_WAY or self._next >= self._until:
            return False
        return self._next - end < self._room()

    def _request(self, at_least: int) -> None:
        """Request the next window, of at least this size."""
        wanted = 0 if self._until is None else min(self._window_bytes, self._until - self._next, self._room())
        start, stop = self._next, min(self._next + max(at_least, wanted), self.size_bytes)
        self._windows.append(_Window(start, stop, _pool().submit(self._file.read_at, stop - start, start)))
        self._next, self._window_bytes = stop, min(2 * self._window_bytes, _LARGEST_WINDOW)

    def _of_blocks(self, position: int, end: int) -> bytes:
        first = position - position % _BLOCK_BYTES
        return b"".join(map(self._block, range(first, end, _BLOCK_BYTES)))[position - first : end - first]

    def _block(self, start: int) -> bytes:
        block = self._blocks.pop(start, None)
        if block is None:
            block = self._file.read_at(min(_BLOCK_BYTES, self.size_bytes - start), start)
        self._blocks[start] = block  # in the order of their last use
        if len(self._blocks) > _MOST_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return block


# The threads of this process; a forked child has none of its parent's.
_pool = PerProcess(lambda: ThreadPoolExecutor(_THREADS, "loglib-objects"))
