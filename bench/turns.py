"""Turns: what several processes append to one topic, and how long a call waits for its turn.

Invariant: all processes begin together and append for the same time. What is counted is in the log when the clock
stops: each process flushes at its end. The systems get the same records, made before the clock starts.

    loglib         Topic.open(shared=True): a record goes to the partition of its key
    loglib, alone  Topic.open without it, for one process
    sqlite3        one table in WAL mode, a connection for each process, which waits for the lock of another
    redis          a server with an append-only file, a stream for each partition, one round trip for each record or,
                   as "redis, 50", for 50 of them

`sync`: each call is durable when it returns: sync=True, synchronous=FULL, appendfsync=always. Otherwise loglib has its
default flush policy; sqlite3 never syncs, and Redis syncs once a second.
"""

from __future__ import annotations

import socket
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, cycle
from multiprocessing import get_context
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from inputs import keys_of, values_of
from measure import Measurement, cpu_seconds, percentile
from paper_server import free_port, started

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from job import Options

_MESSAGES = 20_000  # Each process appends its own again and again.
_SHAPE = "16+200"
_MESSAGE_BYTES = 216
_AT_ONCE = 64  # Calls between two looks at the clock.
_TIMED_SHARE = 0.3  # Of the time: afterwards each call is timed, which costs 0.1 us.
_WAIT_S = 60.0
_PAUSE_S = 0.01  # Between the calls of one who appends now and then, on average.


class Appender(Protocol):
    """What a process appends with."""

    def append(self, value: bytes, key: bytes) -> object: ...

    def flush(self) -> object: ...

    def close(self) -> object: ...


class Report(NamedTuple):
    """What one process has done; times are of CLOCK_MONOTONIC, which all processes share."""

    messages: int
    began: float
    ended: float
    cpu_seconds: float
    latencies_us: list[float]


# --- measurements -----------------------------------------------------------------------------------------


def append(directory: Path, options: Options) -> Measurement:
    """Append from this number of processes together, for a number of milliseconds."""
    processes = options.number("processes")
    with _made(directory, options) as place:
        reports = _together(_append_for_a_time, processes, place, options)
    seconds = max(each.ended for each in reports) - min(each.began for each in reports)
    shares = [each.messages for each in reports]
    latencies = sorted(latency for each in reports for latency in each.latencies_us)
    return Measurement(
        messages=sum(shares),
        payload_bytes=sum(shares) * _MESSAGE_BYTES,
        seconds=seconds,
        best_seconds=seconds,
        cpu_seconds=sum(each.cpu_seconds for each in reports),
        p50_us=percentile(latencies, 50),
        p99_us=percentile(latencies, 99),
        figures={
            "p99.9 us": percentile(latencies, 99.9),
            "longest ms": latencies[-1] / 1000,
            "slowest process, % of its share": 100 * min(shares) * processes / sum(shares),
        },
    )


def wait_for_busy(directory: Path, options: Options) -> Measurement:
    """Time a call now and then, while other processes append without a pause to the same partition."""
    return _waits(directory, options, _append_now_and_then)


def wait_for_idle(directory: Path, options: Options) -> Measurement:
    """Time the calls of two processes of which each appends when the other one has."""
    return _waits(directory, options, _append_by_turns)


def _waits(directory: Path, options: Options, work: Work) -> Measurement:
    with _made(directory, options) as place:
        reports = _together(work, options.number("processes"), place, options)
    waits = sorted(latency for each in reports for latency in each.latencies_us)
    return Measurement(
        seconds=sum(waits) / 1e6,
        p50_us=percentile(waits, 50),
        p99_us=percentile(waits, 99),
        figures={"longest ms": waits[-1] / 1000, "timed calls": len(waits)},
    )


# --- processes --------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a process finds the log: a directory, and the port of a server."""

    directory: Path
    port: int


Work = Callable[[int, "Appender", "Options", Any, "list[tuple[bytes, bytes]]"], Report]


def _together(work: Work, processes: int, place: Place, options: Options) -> list[Report]:
    """Let a number of processes work together, each with its own records; returns their reports."""
    return together(_be_process, [(work, number, place, options) for number in range(processes)])


def together(be_process: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What processes report that are started together, one for each of the arguments.

    A process gets its arguments, a barrier for all, and a pipe, into which it sends its report.
    """
    spawn = get_context("spawn")
    barrier = spawn.Barrier(len(arguments))
    pipes = [spawn.Pipe(duplex=False) for _ in arguments]
    children = [
        spawn.Process(target=be_process, args=(*each, barrier, said), daemon=True)
        for each, (_, said) in zip(arguments, pipes, strict=True)
    ]
    for child, (_, said) in zip(children, pipes, strict=True):
        child.start()
        said.close()  # so that a process that dies is no silence
    reports = [heard.recv() for heard, _ in pipes]
    for child in children:
        child.join()
        if child.exitcode:
            raise RuntimeError(f"a process ended with {child.exitcode}")
    return reports


def _be_process(work: Work, number: int, place: Place, options: Options, barrier: Any, said: Connection) -> None:
    values, keys = values_of(_SHAPE, _MESSAGES), keys_of(_SHAPE, _MESSAGES) or []
    start = number * 1009  # every process has an order of its own
    records = list(zip(values[start:] + values[:start], keys[start:] + keys[:start], strict=True))
    log = _opened(place, options)
    log.append(*records[0])  # All is open now.
    log.flush()
    report = work(number, log, options, barrier, records)
    log.close()
    said.send(report)


def _append_for_a_time(
    number: int, log: Appender, options: Options, barrier: Any, records: list[tuple[bytes, bytes]]
) -> Report:
    """Append until the time is over, and then for a while with a clock around each call."""
    seconds = options.number("milliseconds") / 1000
    at_once = 1 if options.flag("sync") else _AT_ONCE
    parts = cycle([records[start : start + at_once] for start in range(0, len(records), at_once)])
    append = log.append
    barrier.wait()
    started_cpu, began, messages = cpu_seconds(), time.monotonic(), 0
    until = began + seconds
    for part in parts:
        for value, key in part:
            append(value, key)
        messages += len(part)
        if time.monotonic() >= until:
            break
    log.flush()
    ended, used = time.monotonic(), cpu_seconds() - started_cpu
    barrier.wait()
    latencies: list[float] = []
    until = time.monotonic() + seconds * _TIMED_SHARE
    for value, key in cycle(records):
        latencies.append(_timed(append, value, key))
        if len(latencies) % at_once == 0 and time.monotonic() >= until:
            break
    log.flush()
    barrier.wait()  # Nobody closes while another one is timed.
    return Report(messages, began, ended, used, [*latencies[:: max(1, len(latencies) // 100_000)], max(latencies)])


def _append_now_and_then(
    number: int, log: Appender, options: Options, barrier: Any, records: list[tuple[bytes, bytes]]
) -> Report:
    """The first process appends now and then and times its calls; the others do not pause."""
    barrier.wait()
    began, messages, latencies = time.monotonic(), 0, []
    until, pauses = began + options.number("milliseconds") / 1000, Random(number)
    for value, key in cycle(records):
        if number:
            log.append(value, key)
        else:
            time.sleep(pauses.uniform(0, 2 * _PAUSE_S))  # It meets the turns of the others at any moment.
            latencies.append(_timed(log.append, value, key))
        messages += 1
        if time.monotonic() >= until:
            break
    log.flush()
    barrier.wait()
    return Report(messages, began, time.monotonic(), 0.0, latencies)


def _append_by_turns(
    number: int, log: Appender, options: Options, barrier: Any, records: list[tuple[bytes, bytes]]
) -> Report:
    """Append when all others have, as often as the time allows on average."""
    latencies = []
    began = time.monotonic()
    for turn, (value, key) in zip(count(), records, strict=False):
        barrier.wait()
        if turn % 2 == number:
            time.sleep(_PAUSE_S / 10)  # The other one is idle by now.
            latencies.append(_timed(log.append, value, key))
        if turn == options.number("turns"):
            break
    barrier.wait()
    return Report(len(latencies), began, time.monotonic(), 0.0, latencies)


def _timed(append: Callable[[bytes, bytes], object], value: bytes, key: bytes) -> float:
    """How many microseconds the call takes."""
    start = time.perf_counter_ns()
    append(value, key)
    return (time.perf_counter_ns() - start) / 1000


# --- systems ----------------------------------------------------------------------------------------------


@contextmanager
def _made(directory: Path, options: Options) -> Iterator[Place]:
    """Make the empty log, and run the server if there is one."""
    system, partitions, sync = options.text("system"), options.number("partitions"), options.flag("sync")
    if system.startswith("redis"):
        port = free_port()
        settings = {
            "bind": "127.0.0.1", "port": str(port), "dir": str(directory), "save": "", "appendonly": "yes",
            "appendfsync": "always" if sync else "everysec",
        }  # fmt: skip
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        with started(["redis-server", *words], directory, port=port, ready=lambda: _answers(port)):
            yield Place(directory, port)
        return
    if system == "sqlite3":
        log = Table(directory, sync=sync)
        log.create()
        log.close()
    else:
        from loglib import Topic

        Topic.open(directory / "log", create=True, partitions=partitions).close()
    yield Place(directory, 0)


def _opened(place: Place, options: Options) -> Appender:
    """Open the log in a process that appends."""
    system, sync = options.text("system"), options.flag("sync")
    if system.startswith("redis"):
        return Streams(place.port, options.number("partitions"), at_once=int(system.partition(", ")[2] or 1))
    if system == "sqlite3":
        return Table(place.directory, sync=sync)
    return _topic(place, alone=system != "loglib", sync=sync)


def _topic(place: Place, *, alone: bool, sync: bool) -> Appender:
    from loglib import Topic

    options: dict[str, Any] = {} if alone else {"shared": True, "wait": _WAIT_S}
    topic = Topic.open(place.directory / "log", **options)
    if not sync:
        return topic

    class Synced:
        flush, close = topic.flush, topic.close

        def append(self, value: bytes, key: bytes) -> object:
            return topic.append(value, key, sync=True)

    return Synced()


class Table:
    """A connection to a table in WAL mode. A statement is a transaction, and waits for the one of another process."""

    def __init__(self, directory: Path, *, sync: bool) -> None:
        self._db = sqlite3.connect(directory / "log.db", isolation_level=None, timeout=_WAIT_S)
        self._db.execute(f"PRAGMA page_size = {4096 if sync else 16384}")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {'FULL' if sync else 'OFF'}")
        self._db.execute(f"PRAGMA wal_autocheckpoint = {(40 << 20) // (4096 if sync else 16384)}")

    def create(self) -> None:
        self._db.execute('CREATE TABLE log ("offset" INTEGER PRIMARY KEY, timestamp INTEGER, key BLOB, value BLOB)')

    def append(self, value: bytes, key: bytes) -> None:
        now_us = time.time_ns() // 1000
        self._db.execute("INSERT INTO log (timestamp, key, value) VALUES (?, ?, ?)", (now_us, key, value))

    def flush(self) -> None:
        """Nothing is ever left to flush."""

    def close(self) -> None:
        self._db.close()


class Streams:
    """A connection to streams of Redis, with as little between the call and the socket as Python allows."""

    def __init__(self, port: int, partitions: int, *, at_once: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")
        self._names = [b"log%d" % number for number in range(partitions)]
        self._at_once = at_once
        self._commands: list[bytes] = []

    def append(self, value: bytes, key: bytes) -> None:
        name = self._names[zlib.crc32(key) % len(self._names)]
        self._commands.append(redis_command(b"XADD", name, b"*", b"k", key, b"v", value))
        if len(self._commands) >= self._at_once:
            self.flush()

    def flush(self) -> None:
        """Send what was gathered, and read an answer for each command."""
        self._socket.sendall(b"".join(self._commands))
        for _ in self._commands:
            answer = self._answers.readline()
            if not answer.startswith(b"$"):
                raise RuntimeError(f"Redis answers {answer!r}")
            self._answers.read(int(answer[1:]) + 2)
        self._commands.clear()

    def close(self) -> None:
        self._answers.close()
        self._socket.close()


def redis_command(*words: bytes) -> bytes:
    """A command in the protocol of Redis."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def _answers(port: int) -> bool:
    """Whether a server is ready."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(redis_command(b"PING"))
        return connection.recv(16).startswith(b"+PONG")
