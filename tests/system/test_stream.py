"""stream.py: bytes both ways, and no wait without an end."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from loglib import LogClosedError
from loglib.errors import BrokenStreamError
from loglib.system.stream import Stream

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for each in (ours, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield ours, theirs


def opened(stream: object, timeout_s: float = 30.0) -> closing[Stream]:
    return closing(Stream(stream, timeout_s=timeout_s, doing="testing"))


def test_both_ends_that_write_at_once_do_not_block_each_other(pair: Pair) -> None:
    with opened(pair[0]) as one, opened(pair[1]) as other:
        thread = threading.Thread(target=other.write, args=(b"o" * (3 << 20),))
        thread.start()
        one.write(b"1" * (900 << 10))
        assert one.wait(0)
        assert one.read(3 << 20) == b"o" * (3 << 20)
        thread.join()
        assert other.wait(0) and other.read(900 << 10) == b"1" * (900 << 10)
        assert not other.wait(0)


def test_what_is_taken_in_meanwhile_has_a_limit(pair: Pair) -> None:
    errors: list[BaseException] = []
    with opened(pair[0], 0.1) as one, opened(pair[1], 0.1) as other:

        def write() -> None:
            try:
                other.write(bytes(8 << 20))
            except BrokenStreamError as error:
                errors.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        with pytest.raises(BrokenStreamError):
            one.write(bytes(8 << 20))
        pair[0].close()
        thread.join()
    assert errors


def test_end_of_one_direction_while_this_end_writes() -> None:
    (read_there, write_here), (read_here, write_there) = os.pipe(), os.pipe()
    os.close(write_there)
    with opened((read_here, write_here), 0.1) as stream:
        with pytest.raises(BrokenStreamError, match="silent for 0.1 seconds"):
            stream.write(bytes(1 << 20))
        assert stream.wait(0) and stream.read(1, may_end=True) == b""
        with pytest.raises(BrokenStreamError, match="it ended, and 5 bytes more"):
            stream.read(5)
    for fd in (read_there, write_here, read_here):
        os.close(fd)


def test_silence_and_errors_are_named(pair: Pair) -> None:
    with opened(pair[0], 0.05) as stream, pytest.raises(BrokenStreamError, match="testing .*silent for 0.05 seconds"):
        stream.read(1)
    read_here, write_here = os.pipe()
    with opened((write_here, read_here)) as stream:  # the wrong way round
        with pytest.raises(BrokenStreamError, match="Bad file descriptor"):
            stream.read(1)
        with pytest.raises(BrokenStreamError, match="Bad file descriptor"):
            stream.write(b"x")
    os.close(read_here)
    os.close(write_here)


def test_wait_is_ended_from_another_thread_and_blocking_is_as_before(pair: Pair) -> None:
    with opened(pair[0]) as stream:
        assert not os.get_blocking(pair[0].fileno())
        stream.wake()
        with pytest.raises(LogClosedError, match="it was closed meanwhile"):
            stream.read(1)
    assert os.get_blocking(pair[0].fileno())
    with opened(pair[1]):
        pair[1].close()  # by its owner, who may


def test_limit_of_a_peer_holds_until_it_is_lifted(pair: Pair) -> None:
    with opened(pair[0]) as stream:
        stream.limit(60.0, 10)
        pair[1].sendall(b"0123456789")
        assert stream.read(10) == b"0123456789"
        pair[1].sendall(b"x")
        with pytest.raises(BrokenStreamError, match="sent more than it may"):
            stream.read(1)
        stream.unlimit()
        pair[1].sendall(bytes(100))
        assert stream.read(101) == b"x" + bytes(100)  # what came behind is not lost
        stream.limit(0.01, 10)
        with pytest.raises(BrokenStreamError, match="not known after 0.01 seconds"):
            stream.read(1)
        with pytest.raises(BrokenStreamError, match="not known after 0.01 seconds"):
            stream.wait(60.0)
