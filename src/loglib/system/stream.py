"""Stream: bytes both ways between two processes, over a socket or a pair of pipes. Every wait has a time-out.

Invariant: a peer that neither sends nor takes a byte for the time-out is given up, with `BrokenStreamError`. While one
end waits to write, it takes in the bytes that the other one sends, so two ends that both write do not block each other.
A peer that has a limit is given up when its time or its bytes are used up, however busy it is.

The descriptors are set to not block until `close`. The caller owns them.

Threads: `wake` from any thread; the rest from one.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..errors import BrokenStreamError, LogClosedError
from .clock import monotonic
from .files import REAL, Buffer
from .not_copyable import NotCopyable
from .notify import Observer
from .system_calls import new_poll

PIECE_BYTES = 1 << 20
_MOST_WAITING_BYTES = 1 << 20  # taken in while this end writes; the peer's requests are far smaller


class Stream(NotCopyable):
    """A stream to a peer: a connected socket, or a pair of files or descriptors, one to read and one to write.

    `doing` completes the sentence "the stream broke while ...".
    """

    def __init__(self, stream: Any, *, timeout_s: float, doing: str) -> None:
        if not timeout_s > 0:
            raise ValueError(f"a time-out is a number of seconds above 0, not {timeout_s!r}")
        reader, writer = stream if isinstance(stream, tuple) else (stream, stream)
        self._ends = reader, writer  # a file that nobody refers to would be closed
        self._in, self._out = _descriptor(reader), _descriptor(writer)
        self.timeout_s = timeout_s
        self.doing = doing
        self._arrived = bytearray()  # taken in while this end wrote
        self._ended = False  # the end was taken in, too
        self._until: float | None = None  # by the monotonic clock: when the peer's time is used up
        self._left_bytes: int | None = None  # how much more the peer may send
        self._waker = Observer(use_inotify=False)
        self._woken = False
        _send_small_pieces_now(writer)
        self._blocking = {fd: os.get_blocking(fd) for fd in (self._in, self._out)}
        for fd in self._blocking:
            os.set_blocking(fd, False)

    def close(self) -> None:
        """Give the descriptors their blocking mode back."""
        self._waker.close()
        blocking, self._blocking = self._blocking, {}
        for fd, before in blocking.items():
            with suppress(OSError):  # its owner has closed it
                os.set_blocking(fd, before)

    def wake(self) -> None:
        """End the present wait and all later ones with `LogClosedError`."""
        self._woken = True
        self._waker.wake()

    def broken(self, why: object) -> BrokenStreamError:
        """The error for a stream that cannot be used any more."""
        return BrokenStreamError(self.doing, str(why))

    def limit(self, seconds: float, most_bytes: int) -> None:
        """Until `unlimit`, give the peer up after this time, or if it sends more than `most_bytes`."""
        self._until, self._left_bytes = monotonic() + seconds, most_bytes
        self._seconds = seconds

    def unlimit(self) -> None:
        """End the limit."""
        self._until = self._left_bytes = None

    # --- bytes -----------------------------------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        """Write all of the data."""
        view = memoryview(data)
        while view:
            try:
                view = view[REAL.write(self._out, view) :]
            except BlockingIOError:
                self._wait_to_write()
            except OSError as error:
                raise self.broken(error) from error

    def read(self, size: int, *, may_end: bool = False) -> bytes:
        """Exactly `size` bytes. With `may_end` none if the stream ends before the first of them."""
        parts: list[bytes] = []
        missing = size
        while missing:
            piece = self._piece(min(missing, PIECE_BYTES))
            if not piece:
                if may_end and missing == size:
                    return b""
                raise self.broken(f"it ended, and {missing} bytes more were expected")
            parts.append(piece)
            missing -= len(piece)
        return b"".join(parts)

    def wait(self, timeout_s: float, others: Sequence[int] = ()) -> bool:
        """Wait until this stream (also its end) or one of the other descriptors can be read. True if this stream can.

        If the time is over, the peer is not given up.
        """
        if self._arrived or self._ended:
            return True
        return self._in in self._poll(timeout_s, {self._in: select.POLLIN}, others)

    def _piece(self, size: int) -> bytes:
        """The next bytes, at most `size`; none at the end."""
        if self._arrived:
            piece = bytes(self._arrived[:size])
            del self._arrived[:size]
            return piece
        while not self._ended:
            try:
                return self._read_now(size)
            except BlockingIOError:
                if not self._poll(self.timeout_s, {self._in: select.POLLIN}):
                    raise self._silence() from None
        return b""

    def _read_now(self, size: int) -> bytes:
        if self._left_bytes is not None:
            if not self._left_bytes:
                raise self.broken("the other end sent more than it may before it is known")
            size = min(size, self._left_bytes)  # later bytes may be read without a limit
        try:
            piece = REAL.read(self._in, size)
        except ConnectionResetError:  # the end, and bytes that this end has sent were not read
            return b""
        except BlockingIOError:
            raise
        except OSError as error:
            raise self.broken(error) from error
        if self._left_bytes is not None:
            self._left_bytes -= len(piece)
        return piece

    def _wait_to_write(self) -> None:
        events = {self._out: select.POLLOUT}
        if not self._ended and len(self._arrived) < _MOST_WAITING_BYTES:
            events[self._in] = events.get(self._in, 0) | select.POLLIN
        ready = self._poll(self.timeout_s, events)
        if not ready:
            raise self._silence()
        if ready.get(self._in, 0) & ~select.POLLOUT:
            with suppress(BlockingIOError):
                piece = self._read_now(PIECE_BYTES)
                self._arrived += piece
                self._ended = not piece

    def _silence(self) -> BrokenStreamError:
        if self._until is not None and monotonic() >= self._until:
            return self.broken(f"the other end was not known after {self._seconds:g} seconds")
        return self.broken(f"the other end was silent for {self.timeout_s:g} seconds")

    def _poll(self, timeout_s: float, events: dict[int, int], others: Sequence[int] = ()) -> dict[int, int]:
        """The events that have happened, by descriptor; none if the time is over."""
        if self._until is not None:
            timeout_s = min(timeout_s, self._until - monotonic())
            if timeout_s <= 0:
                raise self._silence()
        poll = new_poll()
        for fd, wanted in {**dict.fromkeys((*self._waker.descriptors(), *others), select.POLLIN), **events}.items():
            poll.register(fd, wanted)
        ready = dict(poll.poll(max(0.0, timeout_s) * 1000))
        if self._woken:
            raise LogClosedError(f"{self.doing}: it was closed meanwhile; make another one")
        return ready


def _descriptor(end: Any) -> int:
    """The descriptor of one end, after its buffer was flushed."""
    if isinstance(end, int):
        return end
    ssl = sys.modules.get("ssl")
    if ssl is not None and isinstance(end, ssl.SSLSocket):
        raise TypeError(
            "an SSL socket encrypts above its descriptor; give the plain socket to CopyCredentials.connect or "
            "SourceCredentials.accept, or let ssh carry the stream"
        )
    if not hasattr(end, "fileno"):
        raise TypeError(f"a stream is a connected socket, or two files or descriptors, not {end!r}")
    if hasattr(end, "flush"):
        end.flush()
    descriptor: int = end.fileno()
    return descriptor


def _send_small_pieces_now(end: Any) -> None:
    """Without this, TCP keeps the last small piece of an answer until the piece before was confirmed: 40 ms."""
    if hasattr(end, "setsockopt"):
        import socket

        with suppress(OSError):  # no TCP
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
