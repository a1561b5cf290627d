"""Helpers of the tests of mirrors over a stream: a server in a thread, and a wire between two streams that may fail."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from loglib import LogError
from loglib.copies import MirrorServer

__all__ = ["Serving", "Wire", "served"]


class Serving:
    """A server that runs in a thread, and the socket at its other end."""

    def __init__(self, server: MirrorServer, theirs: socket.socket, stream: socket.socket) -> None:
        self.server = server
        self.stream = stream
        self._theirs = theirs
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.server.serve()
        except BaseException as error:
            self.error = error
        with suppress(OSError):  # it is closed
            self._theirs.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextmanager
def served(
    topic: Any, *, kind: Callable[..., MirrorServer] = MirrorServer, through: Wire | None = None, **options: Any
) -> Iterator[Serving]:
    """Serve a topic over a socket pair, or through a wire, until the block ends. A `LogError` of the server is kept."""
    with ExitStack() as opened:
        ours, theirs = map(opened.enter_context, socket.socketpair())
        server = opened.enter_context(kind(topic, theirs, **options))
        if through is None:
            serving = Serving(server, theirs, ours)
        else:
            middle, end = map(opened.enter_context, socket.socketpair())
            relay = threading.Thread(target=through.carry, args=(ours, middle))
            relay.start()
            serving = Serving(server, theirs, end)
        try:
            yield serving
        finally:
            serving.stream.close()
            if through is not None:
                relay.join(60)
            ours.close()
            serving.join()
            theirs.close()
    assert serving.error is None or isinstance(serving.error, LogError), serving.error


class Wire:
    """Carries bytes between the source and the copy, and breaks after so many, or changes one of them."""

    def __init__(
        self, *, from_source: int | None = None, from_copy: int | None = None, flips: bool = False, bit: int = 0
    ) -> None:
        self._left = {True: from_source, False: from_copy}  # until the cut, or the flipped byte
        self._flip = 1 << bit if flips else 0
        self.carried = {True: 0, False: 0}
        self.struck = False

    def carry(self, source: socket.socket, copy: socket.socket) -> None:
        ends = {source.fileno(): (True, source, copy), copy.fileno(): (False, copy, source)}
        poll = select.poll()
        for fd in ends:
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll(60_000):
                from_source, one, other = ends[fd]
                try:
                    data = self._struck(from_source, one.recv(1 << 16))
                    other.sendall(data)
                except OSError:
                    data = b""
                self.carried[from_source] += len(data)
                if not data or (self.struck and not self._flip):
                    for each in (source, copy):
                        each.close()
                    return

    def _struck(self, from_source: bool, data: bytes) -> bytes:
        left = self._left[from_source]
        if left is None:
            return data
        self._left[from_source] = left - len(data)
        if not 0 <= left < len(data):
            return data
        self.struck = True
        if not self._flip:
            return data[:left]
        return data[:left] + bytes([data[left] ^ self._flip]) + data[left + 1 :]
