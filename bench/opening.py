"""Opening: how long it takes to open a log with many segments or after a kill, and to import loglib.

Invariant: every opening is in a process that has not opened a log before.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from alternatives import COMMIT_MESSAGES
from inputs import values_of
from measure import Measurement, cpu_seconds, peak_bytes, start_peak

if TYPE_CHECKING:
    from collections.abc import Callable

    from job import Options


def fill_segments(directory: Path, options: Options) -> None:
    """Write a log of many small segments."""
    from loglib import Topic
    from ours import NEVER

    with Topic.open(directory / "log", create=True, flush=NEVER, durability="os") as topic:
        for _ in range(options.number("segments") - 1):
            topic.append(b"one to a segment")
            topic.partition(0).roll()
        topic.append(b"one to a segment")


def open_log(directory: Path, options: Options) -> Measurement:
    """Open a log that was closed."""
    from loglib import Topic

    topics: list[Topic] = []
    measurement = _once(lambda: topics.append(Topic.open(
        directory / "log", create=True, mode=cast(Any, options.text("mode"))
    )))
    segments = len(topics[0].partition(0).segments)
    topics[0].close()
    return replace(measurement, figures=measurement.figures | {"segments": segments})


def open_after_kill(directory: Path, options: Options) -> Measurement:
    """Let a process write, kill it, then open the log that it left."""
    from loglib import Topic

    words = [options.text(name) for name in ("megabytes", "tail_megabytes", "durability")]
    killed = subprocess.run([sys.executable, __file__, str(directory / "log"), *words], check=False)
    if killed.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the writer ended with {killed.returncode} before it was killed")
    topics: list[Topic] = []
    measurement = _once(lambda: topics.append(Topic.open(directory / "log", create=True)))
    topics[0].close()
    shutil.rmtree(directory / "log")
    return measurement


def import_time(directory: Path, options: Options) -> Measurement:
    """Compare a bare interpreter with one that imports loglib; the two take turns."""
    differences, bare = [], []
    for index in range(options.number("repeats") + 1):
        bare_ms, import_ms = _interpreter_ms("pass"), _interpreter_ms("import loglib")
        if index:  # The first import writes the compiled files, as an installation does.
            bare.append(bare_ms)
            differences.append(import_ms - bare_ms)
    figures = {
        "ms above bare": statistics.median(differences),
        "min ms above bare": min(differences),
        "bare Python ms": statistics.median(bare),
    }
    return Measurement(figures=figures)


def _once(work: Callable[[], object]) -> Measurement:
    floor_bytes = start_peak()
    cpu_start, start = cpu_seconds(), time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    return Measurement(
        seconds=seconds,
        cpu_seconds=cpu_seconds() - cpu_start,
        peak_bytes=peak_bytes() - floor_bytes,
        figures={"ms": seconds * 1000},
    )


def _interpreter_ms(code: str) -> float:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    return (time.perf_counter() - start) * 1000


def _write_and_die(path: Path, megabytes: int, tail_megabytes: int, durability: Literal["disk", "os"]) -> None:
    """Write this many megabytes, the last of them without a flush (handed to the system), and be killed."""
    from loglib import Topic
    from ours import NEVER

    values = values_of("200", COMMIT_MESSAGES)
    topic = Topic.open(path, create=True, flush=NEVER, durability=durability)
    for _ in range((megabytes - tail_megabytes) // 2):  # 10,000 messages of 200 bytes are 2 MB.
        topic.append_many(values)
    topic.flush()
    for _ in range(tail_megabytes // 2):
        topic.append_many(values)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    kept: Literal["disk", "os"] = "os" if sys.argv[4] == "os" else "disk"
    _write_and_die(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), kept)
