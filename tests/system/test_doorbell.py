"""The doorbell: a ring of another process ends a wait, and nothing else depends on it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from unittest import mock

import pytest
from processes import fork, wait
from takers import PATIENCE_S

from loglib.system.doorbell import Doorbell


@pytest.fixture
def bell(request: pytest.FixtureRequest) -> Iterator[Doorbell]:
    made = Doorbell(f"test-{os.getpid()}-{id(request)}")
    yield made
    made.close()


@pytest.mark.parametrize("largest", [1024, 0])
def test_ring_of_another_process_ends_the_wait(bell: Doorbell, monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    monkeypatch.setattr("loglib.system.system_calls._FD_SETSIZE", largest)
    own, thing = os.getpid(), bell._prefix.removeprefix("\0loglib-").removesuffix("-")
    pid = fork(lambda: Doorbell(thing).ring(own))
    with mock.patch("time.sleep", side_effect=AssertionError("it cannot be woken")):
        assert bell.wait(PATIENCE_S)
    assert wait(pid) == 0


def test_wait_without_a_ring_ends_by_the_clock(bell: Doorbell) -> None:
    assert not bell.wait(0.001)
    bell.ring(1)  # which does not wait


def test_wait_does_not_take_as_long_as_other_sockets_of_the_application() -> None:
    before = socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(PATIENCE_S)
        bell = Doorbell(f"test-default-{os.getpid()}")
        assert bell._socket is not None and bell._socket.gettimeout() == 0
        bell.close()
    finally:
        socket.setdefaulttimeout(before)


def test_bell_that_was_closed_by_another_thread_ends_by_the_clock(bell: Doorbell) -> None:
    bell.close()
    bell.close()
    assert not bell.wait(0.001)
    bell.ring(os.getpid())


def test_process_without_a_free_descriptor_waits_by_the_clock() -> None:
    with mock.patch("socket.socket", side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))):
        bell = Doorbell("test")
    with mock.patch("time.sleep") as slept:
        assert not bell.wait(0.25)
    assert slept.call_args == mock.call(0.25)
    bell.ring(os.getpid())


def test_second_bell_of_a_process_only_rings(bell: Doorbell) -> None:
    second = Doorbell(bell._prefix.removeprefix("\0loglib-").removesuffix("-"))
    assert not second.wait(0.001)
    second.ring(os.getpid())
    assert bell.wait(PATIENCE_S)
    second.close()
