"""Measure: wall clock, CPU seconds and peak memory of one piece of work, in the process that does it.

Invariant: only the work is measured. Inputs exist before it, `before` and `after` of a round are
not timed, and peak memory is counted above what the inputs already use.
"""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Short work repeats until this much time was measured: a 20 ms round on a shared machine says little.
_TIMED_SECONDS = 0.4
_MOST_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one process measured: the median of its rounds, and the best one. `figures` are a case's own columns."""

    messages: int = 0
    payload_bytes: int = 0
    seconds: float = 0.0
    best_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    p50_us: float | None = None
    p99_us: float | None = None
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Messages per second."""
        return self.messages / self.seconds if self.seconds else 0.0

    @property
    def best_rate(self) -> float:
        """Messages per second in the fastest round, which was disturbed least."""
        return self.messages / self.best_seconds if self.best_seconds else self.rate

    @property
    def byte_rate(self) -> float:
        """Payload bytes per second: keys and values, without what a system adds to them."""
        return self.payload_bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """The measured times of some rounds of work."""

    seconds: float
    best_seconds: float
    cpu_seconds: float
    peak_bytes: int


def nothing() -> None:
    """The default for `before` and `after`."""


def timed_rounds(
    work: Callable[[], object], *, before: Callable[[], object] = nothing, after: Callable[[], object] = nothing
) -> Timing:
    """Run `work` for some rounds; `before` and `after` of a round are not timed."""
    gc.collect()
    gc.freeze()  # The inputs are ours; no system should pay when the collector walks over them.
    wall: list[float] = []
    cpu: list[float] = []
    floor_bytes = start_peak()
    while not wall or (sum(wall) < _TIMED_SECONDS and len(wall) < _MOST_ROUNDS):
        before()
        cpu_start, start = cpu_seconds(), time.perf_counter()
        work()
        wall.append(time.perf_counter() - start)
        cpu.append(cpu_seconds() - cpu_start)
        after()
    return Timing(statistics.median(wall), min(wall), statistics.median(cpu), peak_bytes() - floor_bytes)


def cpu_seconds() -> float:
    """CPU seconds of this process so far, all threads, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def start_peak() -> int:
    """Reset the peak (Linux can do this) and return the memory in use now."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")  # 5 resets VmHWM.
        return _status_bytes("VmRSS")
    return peak_bytes()


def peak_bytes() -> int:
    """The highest resident memory of this process since `start_peak`."""
    if Path("/proc/self/status").exists():
        return _status_bytes("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` per cent of the values are at or below."""
    index = -(-len(sorted_values) * percent // 100) - 1
    return sorted_values[max(0, int(index))]


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {name}")
