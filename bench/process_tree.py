"""Process tree: CPU seconds and memory of a process and of everything that it started, from /proc.

Invariant: the CPU seconds of a tree only grow. A process that ended counts through its parent, which has waited for it.
Spark's JVM is a child of the driver's Python, and the Python daemons with their workers are children of the JVM. One
gap: a Spark worker that has ended counts no more, because PySpark's daemon ignores SIGCHLD and waits for none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """CPU seconds, user and system, all threads."""

    jvm_seconds: float
    python_seconds: float

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.jvm_seconds - other.jvm_seconds, self.python_seconds - other.python_seconds)


class Process(NamedTuple):
    pid: int
    parent: int
    name: str
    cpu_seconds: float


def usage() -> Usage:
    """What the tree of this process has used so far."""
    tree = _tree(os.getpid())
    jvm = sum(each.cpu_seconds for each in tree if each.name == "java")
    return Usage(jvm, sum(each.cpu_seconds for each in tree) - jvm)


def reset_peaks() -> None:
    """Let the peaks of the Python workers begin at what they use now."""
    for process in _workers():
        (_PROC / str(process.pid) / "clear_refs").write_text("5")  # 5 resets VmHWM


def peak_of_workers() -> int:
    """The highest resident memory of one Python worker since `reset_peaks`, in bytes."""
    return max(_high_water(process.pid) for process in _workers())


def cpu_seconds(root: int) -> float:
    """What a process and everything that it started have used so far."""
    return sum(each.cpu_seconds for each in _tree(root))


def reset_peak(root: int) -> None:
    """Let the peaks of a process and of everything that it started begin at what they use now."""
    for process in _tree(root):
        (_PROC / str(process.pid) / "clear_refs").write_text("5")  # 5 resets VmHWM


def peak_bytes(root: int) -> int:
    """The highest resident memory of each process of a tree since `reset_peak`, summed up."""
    return sum(_high_water(process.pid) for process in _tree(root))


def _workers() -> list[Process]:
    own = os.getpid()
    return [each for each in _tree(own) if each.name != "java" and each.pid != own]


def _tree(root: int) -> list[Process]:
    children: dict[int, list[Process]] = {}
    own = []
    for process in _all():
        children.setdefault(process.parent, []).append(process)
        if process.pid == root:
            own.append(process)
    for process in own:  # grows while it is iterated over
        own += children.get(process.pid, [])
    return own


def _all() -> Iterator[Process]:
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            try:
                text = (_PROC / entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            before, _, behind = text.rpartition(")")  # a name may have spaces and parentheses
            fields = behind.split()
            # User and system time of the process, and of its children that it has waited for.
            ticks = sum(int(field) for field in fields[11:15])
            yield Process(int(entry), int(fields[1]), before.partition("(")[2], ticks / _TICKS)


def _high_water(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
