"""Partitions on disks that are full, and the records that an error names."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loglib import Topic
from loglib.testing import Call, WatchedFiles

Open = Callable[..., Topic]


class FullPartitions(WatchedFiles):
    """While these partitions are named, nothing can be written to their segments."""

    def __init__(self) -> None:
        super().__init__()
        self.full: set[int] = set()
        self.error = errno.ENOSPC

    def before(self, call: Call) -> None:
        if call.name == "pwritev" and call.path.endswith(".log") and int(call.path.split("/")[-2]) in self.full:
            raise OSError(self.error, os.strerror(self.error), call.path)


def named(error: Any) -> list[tuple[int, int]]:
    """The (partition, offset) of each record that the error calls lost."""
    return [(partition, offset) for partition, offsets in error.lost for offset in offsets]


_numbers = iter(range(10_000))


def fresh(open_topic: Open) -> Path:
    probe = open_topic()
    fresh = Path(probe.path).with_name(f"topic-{next(_numbers)}")
    probe.close()
    return fresh
