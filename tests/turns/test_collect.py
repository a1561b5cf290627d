"""examples/collect.py, under gunicorn and uvicorn: kills, reloads and stops, and each answered event is there once."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from conftest import ROOT, SOURCE, records_of, sound
from loglib import Topic

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for the workers in /proc")

PATIENCE_S = 60.0
SERVERS = {
    "gunicorn": ["gunicorn", "collect:app", "-k", "asgi", "--bind", "{address}", "-w", "{workers}",
                 "--graceful-timeout", "20", "--timeout", "30", "--log-level", "warning"],
    "uvicorn": ["uvicorn", "collect:app", "--host", "127.0.0.1", "--port", "{port}", "--workers", "{workers}",
                "--timeout-graceful-shutdown", "20", "--log-level", "warning"],
}  # fmt: skip


class Service:
    """The example, served by several workers."""

    def __init__(self, directory: Path, topic: Path, server: str, workers: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        words = {"address": f"127.0.0.1:{self.port}", "port": self.port, "workers": workers}
        command = [sys.executable, "-m", *(word.format(**words) for word in SERVERS[server])]
        environment = os.environ | {"TOPIC": str(topic), "PYTHONPATH": f"{SOURCE}:{ROOT / 'examples'}"}
        self.log = directory / "server.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=directory, env=environment, stdout=output, stderr=output)

    def workers(self) -> list[int]:
        """The processes that serve: children that listen, and not the resource tracker of `multiprocessing`."""
        found = []
        for pid in self.children():
            with suppress(OSError):
                if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def children(self) -> list[int]:
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        return [int(pid) for pid in Path(path).read_text().split()]

    def stop(self) -> None:
        children = self.children()
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()
        self.process.wait()
        for pid in children:  # those of a server that did not end by itself
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Client(threading.Thread):
    """Sends events with rising numbers, each again until it is answered."""

    def __init__(self, port: int, name: str, done: threading.Event) -> None:
        super().__init__()
        self.name = name
        self.answered: list[tuple[int, int]] = []  # where each event is, by its number
        self.refused: list[tuple[int, str]] = []
        self.repeated = 0
        self.by_worker: set[str] = set()
        self._port = port
        self._done = done
        self._connection: http.client.HTTPConnection | None = None

    def run(self) -> None:
        while not self._done.is_set():
            number = len(self.answered)
            while (place := self._send(number)) is None:
                self.repeated += 1
                if self._connection is not None:
                    self._connection.close()
                self._connection = None
            self.answered.append(place)
        if self._connection is not None:
            self._connection.close()

    def _send(self, number: int) -> tuple[int, int] | None:
        """Where the event is; None if there was no answer."""
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
            self._connection.request(
                "POST", f"/events?key={self.name}-{number % 7}", body=f"{self.name} {number}",
                headers={"X-Client": self.name, "X-Number": str(number)},
            )  # fmt: skip
            answer = self._connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException):
            time.sleep(0.01)
            return None
        if answer.getheader("Connection") == "close" or number % 20 == 19:  # so that another worker gets the next one
            self._connection.close()
            self._connection = None
        if answer.status != 201:
            self.refused.append((answer.status, body.decode(errors="replace")))
            return None if len(self.refused) < 10 else (-1, -1)
        self.by_worker.add(answer.getheader("X-Worker") or "")
        found = json.loads(body)
        return found["partition"], found["offset"]


@contextmanager
def served(directory: Path, topic: Path, server: str, workers: int) -> Iterator[Service]:
    service = Service(directory, topic, server, workers)
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", service.port)) == 0 and len(service.workers()) == workers:
                    break
            assert service.process.poll() is None and time.monotonic() < until, service.log.read_text()
            time.sleep(0.05)
        yield service
    finally:
        service.stop()


class Load:
    """Clients that send until the block ends; then everything is judged."""

    def __init__(self, service: Service, topic: Path, *, clients: int = 6) -> None:
        self._service = service
        self._topic = topic
        self._done = threading.Event()
        self.clients = [Client(service.port, f"client{number}", self._done) for number in range(clients)]

    def __enter__(self) -> Load:
        for client in self.clients:
            client.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        for client in self.clients:
            client.join()

    def wait_for(self, more: int) -> None:
        """Wait until every client has that number of answers more."""
        before = [len(client.answered) for client in self.clients]
        until = time.monotonic() + PATIENCE_S
        while any(len(client.answered) < count + more for client, count in zip(self.clients, before, strict=True)):
            assert time.monotonic() < until, self._service.log.read_text()
            time.sleep(0.01)

    def judge(self) -> None:
        """Each answered event is there once, where the answer said, and no request was refused."""
        assert [client.refused for client in self.clients] == [[]] * len(self.clients)
        expected = {
            f"{client.name} {number}".encode(): place
            for client in self.clients
            for number, place in enumerate(client.answered)
        }
        found = [(record.value or b"", (record.partition, record.offset)) for record in records_of(self._topic)]
        assert len(found) == len(dict(found)), "an event is there twice"
        assert dict(found) == expected
        with Topic.open(self._topic, mode="r") as topic:
            for partition in topic.partitions:
                sound(partition)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "workers"),
    [(server, workers) for server in SERVERS for workers in (1, 2, 4, 8) if (server, workers) != ("uvicorn", 1)],
)  # a single worker of uvicorn is the server itself
def test_each_answered_event_is_there_once_though_workers_are_killed_reloaded_and_stopped(
    server: str, workers: int, tmp_path: Path
) -> None:
    chance = random.Random(workers)
    topic = tmp_path / "data" / "events"
    topic.parent.mkdir()
    with served(tmp_path, topic, server, workers) as service:
        with Load(service, topic) as load:
            load.wait_for(5)
            for _ in range(4):
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(service.workers()), signal.SIGKILL)
                load.wait_for(3)
            for _ in range(2):
                service.process.send_signal(signal.SIGHUP)
                load.wait_for(3)
            for _ in range(3):
                stopped = chance.choice(service.workers())
                os.kill(stopped, signal.SIGSTOP)
                time.sleep(1)  # less than the server's patience with a worker, and than the wait for a turn
                with suppress(ProcessLookupError):
                    os.kill(stopped, signal.SIGCONT)
                load.wait_for(3)
        load.judge()
    with Topic.open(topic):  # all partitions are free again
        pass


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
def test_workers_share_the_requests(server: str, tmp_path: Path) -> None:
    """The events of one key are in one partition, in the order of their answers, whichever worker got them."""
    topic = tmp_path / "events"
    with served(tmp_path, topic, server, 3) as service:
        with Load(service, topic, clients=8) as load:
            load.wait_for(60)
        load.judge()
        assert len(set().union(*(client.by_worker for client in load.clients))) > 1
        for headers, status in [({"X-Client": "a"}, 400), ({"X-Client": "a", "X-Number": "-1"}, 422)]:
            connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_S)
            connection.request("POST", "/events", headers=headers)
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (status, True)
            connection.close()
    of_key: dict[bytes | None, list[int]] = {}
    for record in records_of(topic):
        of_key.setdefault(record.key, []).append(int((record.value or b"").split()[1]))
    assert all(numbers == sorted(numbers) for numbers in of_key.values())
