"""Open files: a warning about a driver that has more open files than `foreachBatch` can bear.

PySpark's py4j waits with `select` for calls from the JVM, and `select` takes no file whose number is above 1,023. If
the socket for these calls gets such a number, its thread ends in silence, and the query waits for its first batch for
ever. The driver has many open files if it writes topics of many partitions, for example.

Processes: the process that plans a stream. It finds the driver as the process that has started the JVM; Linux only.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from functools import cache

from ..system.files import REAL

_MANY = 1000  # the system gives the lowest number that is free
_STAT_BYTES = 4096


@cache
def warn_of_open_files() -> None:
    """Warn if the driver has many open files, once per process."""
    with suppress(OSError, ValueError, IndexError):  # no /proc, or not our process
        driver = _parent_of_jvm()
        count = len(REAL.listdir(f"/proc/{driver}/fd"))
        if count >= _MANY:
            warnings.warn(
                f"the driver (process {driver}) has {count} open files. If PySpark's socket for foreachBatch gets a "
                "number above 1023, the query waits for ever: start a query with foreachBatch before you open the "
                "files, or have fewer files open",
                RuntimeWarning, stacklevel=3,
            )  # fmt: skip


def _parent_of_jvm() -> int:
    """The parent of the nearest process above this one that is a JVM. `ValueError` if there is none."""
    process = os.getppid()
    while process > 1:
        fd = REAL.open_read(f"/proc/{process}/stat")
        try:
            before, _, after = bytes(REAL.read_at(fd, _STAT_BYTES, 0)).rpartition(b")")
        finally:
            REAL.close(fd)
        parent = int(after.split()[1])
        if before.endswith(b"(java"):
            return parent
        process = parent
    raise ValueError("no JVM")
