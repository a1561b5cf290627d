"""Paper, Redis Streams: redis-server with its append-only file, and redis-py with its parser in C.

Invariant: the server has the defaults of Redis but for `appendonly yes`, and no snapshots, which would come on top of
that file. So it syncs once a second (`appendfsync everysec`), and rewrites the file when it has doubled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paper_roles import PREFETCH, WINDOW, Values, Way, Work, in_batches
from paper_server import Server, free_port, started

_STREAM, _GROUP = "paper", "paper"
_SETTINGS = {"bind": "127.0.0.1", "appendonly": "yes", "appendfsync": "everysec", "save": ""}


@contextmanager
def running(directory: Path) -> Iterator[Server]:
    """A server with its files in the directory."""
    port = free_port()
    settings = {**_SETTINGS, "port": str(port), "dir": str(directory)}
    command = ["redis-server", *(word for name, value in settings.items() for word in (f"--{name}", value))]
    with started(command, directory, port=port, ready=lambda: bool(_client(port).ping())) as server:
        yield server


def settle(port: int) -> None:
    """Wait until no rewrite of the append-only file is going on."""
    with _client(port) as client:
        while client.info("persistence")["aof_rewrite_in_progress"]:
            time.sleep(0.1)


def producer(work: Work) -> Way:
    """XADD, one a round trip, or in pipelines."""
    return Single(work.port) if work.way == "1" else Pipelines(work.port, 50 if work.way == "50" else WINDOW)


def consume(work: Work) -> Iterator[Values]:
    """XREAD, or XREADGROUP with an XACK of all messages of a call; the next read goes with it in one pipeline."""
    client = _client(work.port)
    client.ping()  # so that the connection is there before the clock starts
    return _group(client) if work.way == "group" else _log(client)


class Single:
    """A round trip for each message."""

    def __init__(self, port: int) -> None:
        self._client = _client(port)

    def send(self, values: list[bytes]) -> None:
        add = self._client.xadd
        for value in values:
            add(_STREAM, {"v": value})

    def close(self) -> None:
        self._client.close()


class Pipelines:
    """A round trip for so many messages, without MULTI."""

    def __init__(self, port: int, size: int) -> None:
        self._client, self._size = _client(port), size

    def send(self, values: list[bytes]) -> None:
        for batch in in_batches(values, self._size):
            pipeline = self._client.pipeline(transaction=False)
            for value in batch:
                pipeline.xadd(_STREAM, {"v": value})
            pipeline.execute()

    def close(self) -> None:
        self._client.close()


def _log(client: Any) -> Iterator[list[bytes]]:
    last = b"0"
    while found := client.xread({_STREAM: last}, count=PREFETCH):
        [[_, entries]] = found
        last = entries[-1][0]
        yield [fields[b"v"] for _, fields in entries]


def _group(client: Any) -> Iterator[list[bytes]]:
    client.xgroup_create(_STREAM, _GROUP, id="0")
    found = client.xreadgroup(_GROUP, "consumer", {_STREAM: ">"}, count=PREFETCH)
    while found:
        [[_, entries]] = found
        yield [fields[b"v"] for _, fields in entries]
        pipeline = client.pipeline(transaction=False)
        pipeline.xack(_STREAM, _GROUP, *(name for name, _ in entries))
        pipeline.xreadgroup(_GROUP, "consumer", {_STREAM: ">"}, count=PREFETCH)
        _, found = pipeline.execute()


def _client(port: int) -> Any:
    import redis

    return redis.Redis("127.0.0.1", port)
