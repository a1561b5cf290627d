"""Job queues: how many jobs several workers take and settle together, from a queue that was filled before.

Invariant: all workers begin together, when each has the queue open, and each works until nothing is left for it. Each
job is taken, and settled, once: the counts of all workers add up to the number of jobs. Nothing is done with a job but
looking at its value.

    loglib           a share: one job in a step, which accepts the one before; or batches of 32
    sqlite3          the obvious table in WAL mode: UPDATE ... RETURNING takes a row, DELETE settles it
    redis            a server with an append-only file that is synced once a second, a stream and a group over a Unix
                     socket: XREADGROUP and XACK; or 32 together
    persist-queue    SQLiteAckQueue, whose items only threads of one process may share
    litequeue        pop and done
    huey             its SQLite storage, which removes a task as it is taken: there is no settling

loglib and sqlite3 make settled jobs durable after 0.1 s and at a checkpoint.
"""

from __future__ import annotations

import socket
import sqlite3
import time
from contextlib import contextmanager
from importlib import import_module
from threading import Barrier, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from inputs import payload_bytes_of
from measure import Measurement, cpu_seconds
from paper_server import started
from turns import redis_command, together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import BufferedReader
    from multiprocessing.connection import Connection
    from pathlib import Path

    from job import Options
    from loglib import Share

_VALUE = b"x" * 200
_WAIT_S = 60.0


class JobQueue(Protocol):
    """A queue, as a worker has it open."""

    def fill(self, count: int) -> None:
        """Put that many jobs."""

    def join(self) -> None:
        """Be a worker."""

    def work(self) -> int:
        """Take and settle jobs until there is none; returns their number."""

    def close(self) -> None: ...


class Report(NamedTuple):
    """What one worker has done; times are of CLOCK_MONOTONIC, which all processes share."""

    jobs: int
    began: float
    ended: float
    cpu_seconds: float


def work(directory: Path, options: Options) -> Measurement:
    """Fill a queue, and let this number of workers empty it."""
    system, jobs, workers = options.text("system"), options.number("jobs"), options.number("workers")
    with _served(directory, system):
        filling = _opened(directory, system)
        filling.fill(jobs)
        if system == "persist-queue":
            reports = _threads(filling, workers)
            filling.close()
        else:
            filling.close()
            reports = _processes(directory, system, workers)
    done = sum(each.jobs for each in reports)
    if done != jobs:
        raise RuntimeError(f"{done} of {jobs} jobs were done")
    seconds = max(each.ended for each in reports) - min(each.began for each in reports)
    return Measurement(
        messages=jobs,
        payload_bytes=payload_bytes_of("200", jobs),
        seconds=seconds,
        best_seconds=seconds,
        cpu_seconds=sum(each.cpu_seconds for each in reports),
        figures={"slowest worker, % of its share": 100 * min(each.jobs for each in reports) * workers / jobs},
    )


# --- workers ----------------------------------------------------------------------------------------------


def _processes(directory: Path, system: str, workers: int) -> list[Report]:
    return together(_be_worker, [(directory, system)] * workers)


def _be_worker(directory: Path, system: str, barrier: Any, said: Connection) -> None:
    queue = _opened(directory, system)
    said.send(_timed(queue, barrier))
    barrier.wait()  # Nobody closes while another one is timed.
    queue.close()


def _threads(queue: JobQueue, workers: int) -> list[Report]:
    barrier, reports = Barrier(workers), list[Report]()
    threads = [Thread(target=lambda: reports.append(_timed(queue, barrier))) for _ in range(workers)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return reports


def _timed(queue: JobQueue, barrier: Any) -> Report:
    queue.join()
    barrier.wait()
    used, began = cpu_seconds(), time.monotonic()
    jobs = queue.work()
    return Report(jobs, began, time.monotonic(), cpu_seconds() - used)


# --- systems ----------------------------------------------------------------------------------------------


@contextmanager
def _served(directory: Path, system: str) -> Iterator[None]:
    """Run the server, if there is one."""
    if not system.startswith("redis"):
        yield
        return
    path = _socket_of(directory)
    settings = {
        "port": "0", "unixsocket": path, "dir": str(directory), "save": "", "appendonly": "yes",
        "appendfsync": "everysec",
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    with started(["redis-server", *words], directory, port=0, ready=lambda: _answers(path)):
        yield


def _opened(directory: Path, system: str) -> JobQueue:
    name, _, together = system.partition(", ")  # such as "redis, 32"
    if name == "redis":
        return Stream(_socket_of(directory), together=int(together or 1))
    if name == "loglib":
        return Shared(directory, together=int(together or 1))
    kinds: dict[str, Callable[[Path], JobQueue]] = {
        "sqlite3": Table, "persist-queue": PersistQueue, "litequeue": LiteQueue, "huey": Huey,
    }  # fmt: skip
    return kinds[name](directory)


class Shared:
    """A share of a topic."""

    def __init__(self, directory: Path, *, together: int) -> None:
        from loglib import Topic

        self._topic = Topic.open(directory / "log", create=True, shared=True)
        self._together = together
        self._share: Share | None = None

    def fill(self, count: int) -> None:
        for first in range(0, count, 10_000):
            self._topic.append_many([_VALUE] * min(10_000, count - first))
        self._topic.flush()

    def join(self) -> None:
        self._share = self._topic.share("work")

    def work(self) -> int:
        share, done = self._share, 0
        assert share is not None
        if self._together > 1:
            for jobs in share.batches(self._together, timeout=0):
                done += sum(map(bool, jobs.batch.values))
        else:
            for job in share.follow(timeout=0):
                done += bool(job.value)
        share.flush()
        return done

    def close(self) -> None:
        if self._share is not None:
            self._share.close()
        self._topic.close()


class Alone:
    """A worker of such a queue needs nothing but what is open."""

    def join(self) -> None:
        """Nothing is to be done."""


class Table(Alone):
    """A table in WAL mode, and a connection that waits for the transaction of another process."""

    def __init__(self, directory: Path) -> None:
        self._db = sqlite3.connect(directory / "jobs.db", isolation_level=None, timeout=_WAIT_S)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")

    def fill(self, count: int) -> None:
        self._db.executescript(
            "CREATE TABLE jobs (id INTEGER PRIMARY KEY, value BLOB, begun REAL, attempts INTEGER NOT NULL DEFAULT 0);"
            "CREATE INDEX unbegun ON jobs (id) WHERE begun IS NULL;"
        )
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO jobs (value) VALUES (?)", [(_VALUE,)] * count)
        self._db.execute("COMMIT")

    def work(self) -> int:
        take = (
            "UPDATE jobs SET begun = ?, attempts = attempts + 1 WHERE id = "
            "(SELECT id FROM jobs WHERE begun IS NULL ORDER BY id LIMIT 1) RETURNING id, value"
        )
        done = 0
        while (row := self._db.execute(take, (time.time(),)).fetchone()) is not None:
            done += bool(row[1])
            self._db.execute("DELETE FROM jobs WHERE id = ?", (row[0],))
        return done

    def close(self) -> None:
        self._db.close()


class Stream(Alone):
    """A connection to a stream of Redis and its group, with as little in between as Python allows."""

    def __init__(self, path: str, *, together: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._answers = self._socket.makefile("rb")
        self._together = str(together).encode()

    def fill(self, count: int) -> None:
        self._ask(b"XGROUP", b"CREATE", b"jobs", b"work", b"0", b"MKSTREAM")
        for first in range(0, count, 1000):
            many = min(1000, count - first)
            self._socket.sendall(redis_command(b"XADD", b"jobs", b"*", b"v", _VALUE) * many)
            for _ in range(many):
                _answer(self._answers)

    def work(self) -> int:
        me, done = b"%d" % id(self), 0
        take = (b"XREADGROUP", b"GROUP", b"work", me, b"COUNT", self._together, b"STREAMS", b"jobs", b">")
        while (found := self._ask(*take)) is not None:
            entries = found[0][1]
            done += sum(bool(fields[1]) for _, fields in entries)
            self._ask(b"XACK", b"jobs", b"work", *(entry for entry, _ in entries))
        return done

    def close(self) -> None:
        self._answers.close()
        self._socket.close()

    def _ask(self, *words: bytes) -> Any:
        self._socket.sendall(redis_command(*words))
        return _answer(self._answers)


def _answer(answers: BufferedReader) -> Any:
    """An answer in that protocol: bytes, a number, a list, or None for nothing."""
    line = answers.readline()
    kind, rest = line[:1], line[1:-2]
    if kind == b"$":
        return None if rest == b"-1" else answers.read(int(rest) + 2)[:-2]
    if kind == b"*":
        return None if rest == b"-1" else [_answer(answers) for _ in range(int(rest))]
    if kind in (b":", b"+"):
        return rest
    raise RuntimeError(f"Redis answers {line!r}")


def _socket_of(directory: Path) -> str:
    return str(directory / "redis.sock")


def _answers(path: str) -> bool:
    """Whether a server is ready."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(redis_command(b"PING"))
        return connection.recv(16).startswith(b"+PONG")


class PersistQueue(Alone):
    """A queue of persist-queue with acknowledgements. A second process would resume what the first has in hand."""

    def __init__(self, directory: Path) -> None:
        persistqueue: Any = import_module("persistqueue")

        self._empty = persistqueue.Empty
        self._queue = persistqueue.SQLiteAckQueue(str(directory / "jobs"), multithreading=True)

    def fill(self, count: int) -> None:
        for _ in range(count):
            self._queue.put(_VALUE)

    def work(self) -> int:
        done = 0
        while True:
            try:
                item = self._queue.get(block=False)
            except self._empty:
                return done
            done += bool(item)
            self._queue.ack(item)

    def close(self) -> None:
        self._queue.close()


class LiteQueue(Alone):
    """A queue of litequeue. A call that finds the database locked is made again."""

    def __init__(self, directory: Path) -> None:
        self._queue: Any = import_module("litequeue").LiteQueue(str(directory / "jobs.db"))

    def fill(self, count: int) -> None:
        for _ in range(count):
            self._queue.put(_VALUE.decode())

    def work(self) -> int:
        done = 0
        while (message := self._again(self._queue.pop)) is not None:
            done += bool(message.data)
            self._again(self._queue.done, message.message_id)
        return done

    @staticmethod
    def _again(call: Any, *arguments: Any) -> Any:
        while True:
            try:
                return call(*arguments)
            except sqlite3.OperationalError:
                continue

    def close(self) -> None:
        self._queue.close()


class Huey(Alone):
    """The storage of huey in SQLite."""

    def __init__(self, directory: Path) -> None:
        kind: Any = import_module("huey.storage").SqliteStorage
        self._storage = kind(name="jobs", filename=str(directory / "jobs.db"), timeout=_WAIT_S)

    def fill(self, count: int) -> None:
        for _ in range(count):
            self._storage.enqueue(_VALUE)

    def work(self) -> int:
        done = 0
        while (value := self._storage.dequeue()) is not None:
            done += bool(value)
        return done

    def close(self) -> None:
        self._storage.close()
