"""Logging calls: what a call to a logger takes, until it returns, with a handler of ours or a file's.

Invariant: each call formats the same message. The files are those of the page cache; nobody waits for a disk. What a
handler does later, in a thread, is in the CPU seconds.
"""

from __future__ import annotations

import logging
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from loglib.logging import JsonFormatter, LogHandler
from measure import Measurement, cpu_seconds, percentile

if TYPE_CHECKING:
    from job import Options


def log(directory: Path, options: Options) -> Measurement:
    """Log so many lines, and wait until they are written."""
    lines = options.number("messages")
    handler: logging.Handler = LogHandler(directory / "topic", capacity=1 << 30)
    if options.text("handler") == "file":
        handler = logging.FileHandler(directory / "lines")
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonFormatter() if options.flag("json") else plain)
    logger = logging.Logger("bench", logging.INFO)
    logger.addHandler(handler)
    calls, stamps = logger.info, [0] * (lines + 1)
    now = time.perf_counter_ns
    started_cpu, started = cpu_seconds(), time.perf_counter()
    stamps[0] = now()
    for number in range(lines):
        calls("request %d from %s took %d ms", number, "10.0.0.1", 15)
        stamps[number + 1] = now()
    seconds = time.perf_counter() - started
    handler.close()
    used = cpu_seconds() - started_cpu
    waits = sorted((after - before) / 1000 for before, after in pairwise(stamps))
    return Measurement(
        messages=lines,
        seconds=seconds,
        best_seconds=seconds,
        cpu_seconds=used,
        p50_us=percentile(waits, 50),
        p99_us=percentile(waits, 99),
        figures={"longest ms": waits[-1] / 1000},
    )
