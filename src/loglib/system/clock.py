"""Clock: the time of day and the time since the machine was started, read together.

Invariant: the difference of the `boottime_us` of two moments in one boot is the time between them. It
includes suspends, and changes to the wall clock do not affect it. Wall times alone prove nothing, because
people and machines set the wall clock.

A time namespace of Linux adds an offset to the time since the boot (a restored container, `unshare -T --boottime`).
This module subtracts the offset. If a process comes to another namespace, or is restored on another machine, the
difference of the two clocks changes: then this module reads the boot id and the offset again.

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

_BEGAN_NS = time.monotonic_ns()  # a moment in this process, by the clock that every system has
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_BOOT_ID_BYTES = 16
_OFFSETS = "/proc/self/timens_offsets"  # of the namespace of this process's children; see time_namespaces(7)
_NAMESPACE, _NAMESPACE_OF_CHILDREN = "/proc/self/ns/time", "/proc/self/ns/time_for_children"
# A step of the difference between both clocks: the wall clock was set, or it is another namespace or machine.
_STEP_NS = 500_000_000
# The two clocks are read one after the other. A process that is stopped in between reads them again.
_READ_WITHIN_NS = 50_000_000
_TRIES = 8
TIME_ITSELF = b"a plain function"  # the boot id of clocks whose wall time is always true
assert len(TIME_ITSELF) == _BOOT_ID_BYTES


# Seconds, for time limits. Not `time.monotonic`: libraries that freeze the time in a program's tests replace that, also
# where a module has imported it, and a limit would never come.
monotonic: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_MONOTONIC)


class Moment(NamedTuple):
    """One instant, by both clocks."""

    wall_us: int  # microseconds UTC, if the wall clock is right
    boottime_us: int  # microseconds since the boot
    boot_id: bytes  # 16 bytes; each boot has a different one


class Clock:
    """The system's clocks. `loglib.testing.open_topic` takes other clocks: subclasses with these two methods.

    If the system has no boot id, or no clock that includes suspends (macOS), each process counts as a separate boot.
    """

    def __call__(self) -> int:
        """The wall clock in microseconds UTC."""
        return time.time_ns() // 1000

    def moment(self) -> Moment:
        """Both clocks, read within 50 ms of each other."""
        boot = _boot()
        wall, elapsed = _both(boot)
        if abs(wall - elapsed - boot.lead_ns) > _STEP_NS:
            _boot.cache_clear()
            boot = _boot()
            wall, elapsed = _both(boot)
        return tuple.__new__(Moment, (wall // 1000, elapsed // 1000, boot.id))  # as format/record.py


class PlainClock(Clock):
    """A clock from a function that returns microseconds UTC, for simulations and tests.

    Its time is true by definition, so it is believed without a second look.
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


class _Boot(NamedTuple):
    """The boot that this process is in, and its clock."""

    id: bytes
    elapsed_ns: Callable[[], int]  # since the boot, including `added_ns`
    added_ns: int  # by the time namespace
    lead_ns: int  # of the wall clock, when this was found


def _both(boot: _Boot) -> tuple[int, int]:
    """The wall clock and the time since the boot, in nanoseconds."""
    elapsed_ns = boot.elapsed_ns
    nearest = None
    for _ in range(_TRIES):
        before, wall, after = elapsed_ns(), time.time_ns(), elapsed_ns()
        if nearest is None or after - before < nearest[0]:
            nearest = (after - before, wall, before)
        if nearest[0] <= _READ_WITHIN_NS:
            break
    assert nearest is not None
    return nearest[1], nearest[2] - boot.added_ns


@lru_cache(maxsize=1)
def _boot() -> _Boot:
    number = getattr(time, "CLOCK_BOOTTIME", None)  # Linux has it
    boot_id, added_ns = _read_boot_id(REAL), _read_added(REAL)
    if number is None or boot_id is None or added_ns is None:
        boot = _Boot(os.urandom(_BOOT_ID_BYTES), time.monotonic_ns, _BEGAN_NS, 0)
    else:
        boot = _Boot(boot_id, partial(time.clock_gettime_ns, number), added_ns, 0)
    wall, elapsed = _both(boot)
    return boot._replace(lead_ns=wall - elapsed)


def _read_added(
    files: Files, path: str = _OFFSETS, namespaces: tuple[str, str] = (_NAMESPACE, _NAMESPACE_OF_CHILDREN)
) -> int | None:
    """The nanoseconds that the time namespace adds to the time since the boot; None if they are unknown."""
    try:
        if not files.exists(namespaces[0]):  # a system without such namespaces
            return 0
        own, of_children = [files.stat(each) for each in namespaces]
        if not os.path.samestat(own, of_children):  # the offsets are those of the children
            return None
        lines = files.read_proc(path).decode().splitlines()
        seconds, nanoseconds = next(line.split()[1:] for line in lines if line.startswith("boottime"))
        return int(seconds) * 1_000_000_000 + int(nanoseconds)
    except (OSError, LogError, ValueError, StopIteration):
        return None


def _read_boot_id(files: Files, path: str = _BOOT_ID) -> bytes | None:
    try:
        boot_id = bytes.fromhex(files.read_proc(path).decode().strip().replace("-", ""))
    except (OSError, LogError, ValueError):  # not Linux, or a sandbox without it
        return None
    return boot_id if len(boot_id) == _BOOT_ID_BYTES and any(boot_id) else None
