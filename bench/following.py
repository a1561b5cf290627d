"""Following: how long a message takes from one process to another.

Invariant: the writer stamps a message right before it appends the message. The follower reads the
clock right after it has the message. Both read the same clock (CLOCK_MONOTONIC, one per system).

The follower is a process of its own: `python following.py SYSTEM DIRECTORY MESSAGES`. SYSTEM "loglib, spinning" reads
the watermark again and again while it waits, which takes a whole core; the others sleep. "loglib, general" appends and
follows without the short ways for one record. It
prints "ready" and, when it has all messages, its latencies and CPU seconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from alternatives import RawFile
from measure import Measurement, cpu_seconds, percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from job import Options
    from systems import FlushingWriter

MESSAGE_BYTES = 200
_STAMP = struct.Struct("<Q")  # CLOCK_MONOTONIC in nanoseconds; the rest of the message is padding.
_PADDING = bytes(MESSAGE_BYTES - _STAMP.size)
_WARM_UP = 200  # The first messages wake everything up once and are not counted.
_SPIN = timedelta(milliseconds=20)  # Longer than the pause between two messages.
_IN_MODIFY = 0x2  # From <sys/inotify.h>.


def follow(directory: Path, options: Options) -> Measurement:
    """Send 1,000 messages a second and report what the follower measured."""
    system, messages = options.text("system"), options.number("messages") + _WARM_UP
    append, close = _open_sender(system, directory)
    with _Follower(system, directory, messages) as follower:
        started_cpu, started = cpu_seconds(), time.monotonic()
        _send(append, messages)
        seconds, sender_cpu = time.monotonic() - started, cpu_seconds() - started_cpu
        report = json.loads(_line_of(follower))
    close()
    latencies = sorted(report["latencies_us"][_WARM_UP:])
    return Measurement(
        seconds=seconds,
        cpu_seconds=sender_cpu,
        p50_us=percentile(latencies, 50),
        p99_us=percentile(latencies, 99),
        figures={
            "min us": latencies[0],
            "p99.9 us": percentile(latencies, 99.9),
            "follower CPU s": report["cpu_seconds"],
        },
    )


def follow_idle(directory: Path, options: Options) -> Measurement:
    """Follow a log that nobody writes to, to measure what waiting costs."""
    from loglib import Topic

    seconds = options.number("seconds")
    with Topic.open(directory / "log", create=True) as topic:
        topic.append(bytes(MESSAGE_BYTES))
    with Topic.open(directory / "log", mode="r") as topic:
        started = cpu_seconds()
        if list(topic.follow(start="end", timeout=seconds)):
            raise ValueError("nobody wrote, yet a record came")
        used = cpu_seconds() - started
    return Measurement(seconds=seconds, cpu_seconds=used, figures={"CPU %": 100 * used / seconds})


def _open_sender(system: str, directory: Path) -> tuple[Callable[[bytes], object], Callable[[], None]]:
    if system.startswith("loglib"):
        from ours import general_ways, open_topic

        if system == "loglib, general":
            general_ways()
        topic: FlushingWriter = open_topic(directory / "log", flush="each call, no fsync")
        topic.append(bytes(MESSAGE_BYTES))  # Now there is a log to follow.
        return topic.append, topic.close
    file = RawFile(directory, sync=False)
    return lambda value: file.append_many([value]), file.close


def _send(append: Callable[[bytes], object], messages: int) -> None:
    start = time.monotonic() + 0.5  # The follower is ready; give it time to fall asleep.
    for index in range(messages):
        time.sleep(max(0.0, start + index / 1000 - time.monotonic()))
        append(_STAMP.pack(time.monotonic_ns()) + _PADDING)


class _Follower:
    """Starts the follower, waits until it is ready, and always ends it."""

    def __init__(self, system: str, directory: Path, messages: int) -> None:
        command = [sys.executable, __file__, system, str(directory), str(messages)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> IO[str]:
        stdout = self._process.stdout
        assert stdout is not None
        if _line_of(stdout) != "ready":
            raise RuntimeError("the follower did not start")
        return stdout

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self._process.kill()
        self._process.wait(timeout=60)


def _line_of(stdout: IO[str]) -> str:
    line = stdout.readline()
    if not line:
        raise RuntimeError("the follower ended early")
    return line.strip()


def _follower_main(system: str, directory: Path, messages: int) -> None:
    sources: dict[str, Callable[[Path], Iterator[bytes]]] = {
        "loglib": _loglib_values,
        "loglib, general": _generally,
        "loglib, spinning": partial(_loglib_values, spin=_SPIN),
        "inotify": _inotify_values,
        "poll": _polled_values,
    }
    latencies: list[float] = []
    clock = time.monotonic_ns
    source = sources[system](directory)
    next(source)  # The follower opens the log, and prints that it has.
    print("ready", flush=True)
    started = cpu_seconds()
    for value in source:
        latencies.append((clock() - _STAMP.unpack_from(value)[0]) / 1000)
        if len(latencies) == messages:
            break
    print(json.dumps({"latencies_us": latencies, "cpu_seconds": cpu_seconds() - started}), flush=True)


def _loglib_values(directory: Path, spin: timedelta | None = None) -> Iterator[bytes]:
    from loglib import Topic

    with Topic.open(directory / "log", mode="r") as topic, topic.follow(start="end", spin=spin) as reader:
        yield b""
        for record in reader:
            yield record.value or b""


def _generally(directory: Path) -> Iterator[bytes]:
    from ours import general_ways

    general_ways()
    return _loglib_values(directory)


def _inotify_values(directory: Path) -> Iterator[bytes]:
    """Read a plain file; inotify reports that it has grown."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_CLOEXEC)
    if watch < 0 or libc.inotify_add_watch(watch, os.fsencode(directory / "raw"), _IN_MODIFY) < 0:
        raise OSError(ctypes.get_errno(), "inotify")
    fd = os.open(directory / "raw", os.O_RDONLY)
    yield b""
    while True:
        os.read(watch, 4096)
        yield from _new_values(fd)


def _polled_values(directory: Path) -> Iterator[bytes]:
    """Read a plain file, polled every millisecond."""
    fd = os.open(directory / "raw", os.O_RDONLY)
    yield b""
    while True:
        time.sleep(0.001)
        yield from _new_values(fd)


def _new_values(fd: int) -> Iterator[bytes]:
    """Yield the new messages that are whole: a message that crosses a page can be seen half written."""
    while len(value := os.pread(fd, MESSAGE_BYTES, os.lseek(fd, 0, os.SEEK_CUR))) == MESSAGE_BYTES:
        os.lseek(fd, MESSAGE_BYTES, os.SEEK_CUR)
        yield value


if __name__ == "__main__":
    _follower_main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
