"""Clock: the time of day and the time since the machine was started, read together.

Invariant: of two moments of one boot, the distance of their `boottime_us` is the time that passed
between them, suspends included, whatever was done to the wall clock. Wall times alone prove nothing:
people and machines set them.

The system calls for both clocks stand in this module alone. Everything else takes a clock, or a moment.

Threads: a clock has no state, safe for all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from ..errors import LogError
from .files import REAL, Files

__all__ = ["SYSTEM", "TIME_ITSELF", "Clock", "Moment", "PlainClock", "clock_of"]

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_BOOT_ID_BYTES = 16
# The two clocks are read one after the other. A process that is stopped in between reads them again.
_READ_WITHIN_NS = 50_000_000
_TRIES = 8
TIME_ITSELF = b"a plain function"  # the boot id of those for which wall time is true
assert len(TIME_ITSELF) == _BOOT_ID_BYTES


class Moment(NamedTuple):
    """One instant, by both clocks."""

    wall_us: int  # microseconds UTC, as far as the wall clock is right
    boottime_us: int  # microseconds since the boot
    boot_id: bytes  # 16 bytes; another one after each boot


class Clock:
    """The system's clocks. A program may give `Topic.open` another: a subclass with these two methods.

    Where the system has no boot id, or no clock that runs through suspends (macOS), each process counts as a boot
    of its own.
    """

    def __call__(self) -> int:
        """The wall clock in microseconds UTC."""
        return time.time_ns() // 1000

    def moment(self) -> Moment:
        """Both clocks, read within 50 ms of each other."""
        boot_id, elapsed_ns = _boot()
        nearest = None
        for _ in range(_TRIES):
            before, wall, after = elapsed_ns(), time.time_ns(), elapsed_ns()
            if nearest is None or after - before < nearest[0]:
                nearest = (after - before, wall, before)
            if nearest[0] <= _READ_WITHIN_NS:
                break
        assert nearest is not None
        return Moment(nearest[1] // 1000, nearest[2] // 1000, boot_id)


class PlainClock(Clock):
    """A function that gives microseconds UTC, as simulations and tests have one.

    It stands for time itself: what it says has passed has passed, so that it is believed at once.
    """

    def __init__(self, function: Callable[[], int]) -> None:
        self._function = function

    def __call__(self) -> int:
        return self._function()

    def moment(self) -> Moment:
        now = self._function()
        return Moment(now, now, TIME_ITSELF)


SYSTEM = Clock()


def clock_of(function: Callable[[], int]) -> Clock:
    """The clock itself, or the one that a plain function stands for."""
    return function if isinstance(function, Clock) else PlainClock(function)


@lru_cache(maxsize=1)
def _boot() -> tuple[bytes, Callable[[], int]]:
    """The boot's id, and a function for the nanoseconds since it."""
    number = getattr(time, "CLOCK_BOOTTIME", None)  # Linux has it
    boot_id = _read_boot_id(REAL)
    if number is None or boot_id is None:
        began = time.monotonic_ns()
        return os.urandom(_BOOT_ID_BYTES), lambda: time.monotonic_ns() - began
    return boot_id, lambda: time.clock_gettime_ns(number)


def _read_boot_id(files: Files, path: str = _BOOT_ID) -> bytes | None:
    try:
        fd = files.open_read(path)
        try:
            text = files.read_at(fd, 64, 0)
        finally:
            files.close(fd)
        boot_id = bytes.fromhex(text.decode().strip().replace("-", ""))
    except (OSError, LogError, ValueError):  # not Linux, or a sandbox without it
        return None
    return boot_id if len(boot_id) == _BOOT_ID_BYTES and any(boot_id) else None
