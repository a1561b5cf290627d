"""The handler for `logging` under a pre-forking server: kills, reloads, a full disk, more workers than partitions."""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from disks import memory

from conftest import SOURCE
from loglib import Topic

# A request is answered when its line is in the topic. Lines of requests that were not answered may be there, once.
APP = """
    import logging, os
    from loglib.logging import LogHandler

    handler = LogHandler(os.environ["TOPIC"], partitions=2, capacity=200_000, flush_timeout=20, segment_bytes=1 << 18)
    log = logging.getLogger("app")
    log.setLevel(logging.INFO)
    log.addHandler(handler)

    def app(environ, start_response):
        request = environ["QUERY_STRING"]
        dropped = handler.dropped
        log.info(request, extra={"pid": os.getpid()})
        accepted = handler.dropped == dropped and handler.drain(20)
        start_response("200 OK" if accepted else "503 Busy", [("Content-Length", "0")])
        return []
"""


class Server:
    """A running gunicorn with four workers."""

    def __init__(self, directory: Path, topic: Path, *options: str) -> None:
        (directory / "service.py").write_text(textwrap.dedent(APP))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "gunicorn", "service:app", "--bind", f"127.0.0.1:{self.port}",
                   "--workers", "4", "--timeout", "60", "--graceful-timeout", "20", "--log-level", "warning",
                   *options]  # fmt: skip
        environment = os.environ | {"TOPIC": str(topic), "PYTHONPATH": f"{SOURCE}:{directory}"}
        self.log = directory / "gunicorn.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=directory, env=environment, stdout=output, stderr=output)

    def ask(self, text: str) -> int | None:
        """Make a request; the status, or None if there was no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", f"/?{text}")
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def workers(self) -> list[int]:
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        return [int(pid) for pid in Path(path).read_text().split()]

    def stop(self) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()
        self.process.wait()


@contextmanager
def served(directory: Path, topic: Path, *options: str) -> Iterator[Server]:
    server = Server(directory, topic, *options)
    try:
        deadline = time.monotonic() + 60
        while server.ask("warm-up") != 200:
            assert server.process.poll() is None and time.monotonic() < deadline, server.log.read_text()
            time.sleep(0.05)
        yield server
    finally:
        server.stop()


class Clients:
    """Threads that make requests, each with its own numbers."""

    def __init__(self, server: Server, count: int = 6) -> None:
        self.answered: list[str] = []
        self.asked: list[str] = []
        self._server = server
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(name,)) for name in range(count)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _run(self, name: int) -> None:
        number = 0
        while not self._done.is_set():
            text = f"{name}-{number}"
            self.asked.append(text)
            if self._server.ask(text) == 200:
                self.answered.append(text)
            number += 1


def messages(topic: Path) -> Counter[str]:
    with Topic.open(topic, mode="r") as opened:
        found = [json.loads(record.value or b"") for record in opened.read()]
    return Counter(each["message"] for each in found if each["message"] != "warm-up" and "dropped" not in each)


def assert_each_once(topic: Path, clients: Clients) -> None:
    found = messages(topic)
    assert set(found.values()) <= {1}, found.most_common(3)
    assert set(clients.answered) <= set(found)
    assert set(found) <= set(clients.asked)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for the workers in /proc")


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--preload", "--threads 3", "-k gevent", "-k gevent --preload"])
def test_workers_that_are_killed_and_reloaded_lose_no_answered_line(tmp_path: Path, options: str) -> None:
    """Four workers share two partitions."""
    if "gevent" in options:
        pytest.importorskip("gevent")
    chance = random.Random(1)
    topic = tmp_path / "logs" / "app"
    topic.parent.mkdir()
    with served(tmp_path, topic, *options.split()) as server, Clients(server) as clients:
        for step in range(12):
            time.sleep(0.25)
            if step % 4 == 3:
                server.process.send_signal(signal.SIGHUP)
            elif workers := server.workers():
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(workers), signal.SIGKILL)
        while len(clients.answered) < 100:
            time.sleep(0.05)
    assert_each_once(topic, clients)
    with Topic.open(topic, create=True):  # all partitions are free again
        pass


@pytest.mark.slow
def test_full_disk_loses_no_answered_line(tmp_path: Path) -> None:
    with memory(tmp_path / "small", "size=4m") as disk:
        topic = disk / "app"
        with served(tmp_path, topic) as server, Clients(server) as clients:
            time.sleep(0.5)
            blocker = disk / "blocker"
            with suppress(OSError), blocker.open("wb") as file:
                while True:
                    file.write(bytes(4096))
                    file.flush()
            before = len(clients.answered)
            time.sleep(1)
            blocker.unlink()
            while len(clients.answered) < before + 50:
                time.sleep(0.05)
        assert_each_once(topic, clients)


