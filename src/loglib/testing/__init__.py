"""Testing: file systems that fail on purpose, for the tests of programs that use loglib.

    MemoryFiles     in memory: fast, and the same each time
    CrashFS         in memory, and yields every state that a power cut may leave
    RecordingFiles  keeps the system calls; FaultyFiles fails one; ShortWrites, FullDisk, DyingFiles and
                    UnsyncedFiles do what their names say

Pass one of them to `open_topic(path, files=...)`, which is `Topic.open` for simulations. docs/testing.md has
a program. The module `loglib.testing.strategies` draws records and policies; it needs Hypothesis.
"""

from ..topic import open_topic
from .crash import CrashFS, CrashState, Image, Mode, Operation, crash_states
from .memory import MemoryFiles
from .watched import (
    CHANGES,
    Call,
    DyingFiles,
    FaultyFiles,
    FullDisk,
    Killed,
    RecordingFiles,
    ShortWrites,
    UnsyncedFiles,
    WatchedFiles,
)

__all__ = [
    "CHANGES",
    "Call",
    "CrashFS",
    "CrashState",
    "DyingFiles",
    "FaultyFiles",
    "FullDisk",
    "Image",
    "Killed",
    "MemoryFiles",
    "Mode",
    "Operation",
    "RecordingFiles",
    "ShortWrites",
    "UnsyncedFiles",
    "WatchedFiles",
    "crash_states",
    "open_topic",
]
