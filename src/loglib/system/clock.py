"""Clock: the time of day and the time since the machine was started, read together.

Invariant: the difference of the `boottime_us` of two moments in one boot is the time between them. It
includes suspends, and changes to the wall clock do not affect it. Wall times alone prove nothing, because
people and machines set the wall clock.

Only this module makes the system calls for both clocks. All other modules take a clock or a moment.

Threads: a clock has no state, safe for all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from ..errors import LogError
from .files import REAL, Files

__all__ = ["SYSTEM", "TIME_ITSELF", "Clock", "Moment", "PlainClock", "clock_of", "monotonic"]

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_BOOT_ID_BYTES = 16
# The two clocks are read one after the other. A process that is stopped in between reads them again.
_READ_WITHIN_NS = 50_000_000
_TRIES = 8
TIME_ITSELF = b"a plain function"  # the boot id of clocks whose wall time is always true
assert len(TIME_ITSELF) == _BOOT_ID_BYTES


# Seconds, for time limits. Libraries that freeze the time in a program's tests replace `time.monotonic`, also where a
# module has imported it: a limit would never come.
monotonic: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_MONOTONIC)


class Moment(NamedTuple):
    """One instant, by both clocks."""

    wall_us: int  # microseconds UTC, if the wall clock is right
    boottime_us: int  # microseconds since the boot
    boot_id: bytes  # 16 bytes; each boot has a different one


class Clock:
    """The system's clocks. `loglib.testing.open_topic` takes other clocks: subclasses with these two methods.

    If the system has no boot id, or no clock that runs through suspends (macOS), each process counts as a separate
    boot.
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
        return tuple.__new__(Moment, (nearest[1] // 1000, nearest[2] // 1000, boot_id))  # as format/record.py


class PlainClock(Clock):
    """A clock from a function that returns microseconds UTC, for simulations and tests.

    Its time is true by definition, so it is believed at once.
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
    """The clock itself, or a `PlainClock` for a plain function."""
    return function if isinstance(function, Clock) else PlainClock(function)


@lru_cache(maxsize=1)
def _boot() -> tuple[bytes, Callable[[], int]]:
    """The boot's id, and a function that returns the nanoseconds since the boot."""
    number = getattr(time, "CLOCK_BOOTTIME", None)  # Linux has it
    boot_id = _read_boot_id(REAL)
    if number is None or boot_id is None:
        began = time.monotonic_ns()
        return os.urandom(_BOOT_ID_BYTES), lambda: time.monotonic_ns() - began
    return boot_id, partial(time.clock_gettime_ns, number)


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
