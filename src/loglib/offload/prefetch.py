"""Prefetch: the bytes of one object in an object store, read by several range requests together.

Invariant: each request names its range. Requests run ahead of the reader only while it reads sequentially, and only up
to `until`. Bytes are kept only while the reader may need them: at most 36 MiB per object, or less if the reader has
many objects open.

A request takes about 30 ms wherever the object is, and a connection carries about 80 MB/s. So

    small reads    (headers of batches)  request whole blocks of 64 KiB; the last 16 blocks are kept
    larger reads   (the log itself)      request windows of 1, 2, 4 and then 8 MiB; four of them are under way

Threads: one reader at a time; threads of a pool read the windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from ..system.process import PerProcess

__all__ = ["Ahead", "RangedFile"]

_BLOCK_BYTES = 64 << 10
_MOST_BLOCKS = 16
_FIRST_WINDOW = 1 << 20
_LARGEST_WINDOW = 8 << 20
_UNDER_WAY = 4  # windows of one object
_MOST_AHEAD = (_UNDER_WAY + 1) * _LARGEST_WINDOW
_THREADS = 16


class RangedFile(Protocol):
    """An open file of pyarrow."""

    def read_at(self, size_bytes: int, position: int, /) -> bytes: ...
    def size(self) -> int: ...
    def close(self) -> None: ...


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
        reads_on = self._reads_on(position)
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

    def _reads_on(self, position: int) -> bool:
        return bool(self._windows) and self._windows[0].start <= position <= self._next

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
