"""The handler for `logging` in services of several processes: kills, reloads, a full disk, too few partitions.

`LOGLIB_SOAK` multiplies the seconds of each service: 120 makes it an hour in all.
"""

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
from counts import scale
from disks import memory

from conftest import SOURCE
from loglib import Topic

WORKERS = 4
# A request is answered with 200 when its line is in the topic. Lines of other requests may be there, once.
HANDLING = """
    import asyncio, logging, multiprocessing, os, queue, signal, sys, threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from loglib.logging import LogHandler

    handler = LogHandler(os.environ["TOPIC"], partitions=2, capacity=200_000, flush_timeout=20, segment_bytes=1 << 18)
    log = logging.getLogger("app")
    log.setLevel(logging.INFO)
    log.addHandler(handler)

    def is_logged(text):
        dropped = handler.dropped
        log.info(text, extra={"pid": os.getpid()})
        return handler.dropped == dropped and handler.drain(20)
"""
WSGI = """
    def app(environ, start_response):
        status = "200 OK" if is_logged(environ["QUERY_STRING"]) else "503 Busy"
        start_response(status, [("Content-Length", "0")])
        return []
"""
ASGI = """
    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        answer = await asyncio.to_thread(is_logged, scope["query_string"].decode())
        await send({"type": "http.response.start", "status": 200 if answer else 503, "headers": []})
        await send({"type": "http.response.body"})
"""
# As Celery does it: forked workers with a pipe each, which end after some tasks. The master has threads while it forks,
# and logs as well. A task whose worker was killed is not answered.
POOL = """
    lock = threading.Lock()
    signals = {signal.SIGHUP, signal.SIGTERM}

    def work(pipe):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        for _ in range(20):
            text = pipe.recv()
            if text is None:
                return
            pipe.send(is_logged(text))

    class Worker:
        process = None

        def run(self, text):
            if self.process is None:
                with lock:  # so that no other worker inherits the far end
                    self.pipe, far = multiprocessing.Pipe()
                    self.process = multiprocessing.get_context("fork").Process(target=work, args=(far,))
                    self.process.start()
                    far.close()
            try:
                self.pipe.send(text)
                return self.pipe.recv() if text is not None else False
            except (EOFError, OSError):
                self.process.join()
                self.process = None
                return False

    class Requests(BaseHTTPRequestHandler):
        def do_GET(self):
            text = self.path.partition("?")[2]
            worker = idle.get()
            answer = is_logged(text) if text.endswith("7") else worker.run(text)
            idle.put(worker)
            self.send_response(200 if answer else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64
        daemon_threads = True

    idle = queue.Queue()
    workers = [Worker() for _ in range(int(sys.argv[2]))]
    for each in workers:
        idle.put(each)
    listening = Server(("127.0.0.1", int(sys.argv[1])), Requests)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    while signal.sigwait(signals) == signal.SIGHUP:
        for each in [idle.get() for _ in workers]:
            each.run(None)
            idle.put(each)
    listening.shutdown()
    for each in [idle.get() for _ in workers]:
        each.run(None)
"""
PROGRAMS = {"gunicorn": WSGI, "uvicorn": ASGI, "pool": POOL}


class Service:
    """A running service with four workers."""

    def __init__(self, directory: Path, topic: Path, kind: str) -> None:
        name, *options = kind.split()
        (directory / "service.py").write_text(textwrap.dedent(HANDLING) + textwrap.dedent(PROGRAMS[name]))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, *{
            "gunicorn": ["-m", "gunicorn", "service:app", "--bind", f"127.0.0.1:{self.port}", "--workers", str(WORKERS),
                         "--timeout", "60", "--graceful-timeout", "20", "--log-level", "warning", *options],
            "uvicorn": ["-m", "uvicorn", "service:app", "--port", str(self.port), "--workers", str(WORKERS),
                        "--log-level", "warning"],
            "pool": ["service.py", str(self.port), str(WORKERS)],
        }[name]]  # fmt: skip
        environment = os.environ | {"TOPIC": str(topic), "PYTHONPATH": f"{SOURCE}:{directory}"}
        self.log = directory / "service.log"
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
        children = [int(pid) for pid in Path(path).read_text().split()]
        return [pid for pid in children if b"resource_tracker" not in _command(pid)]

    def stop(self) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()
        self.process.wait()


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


@contextmanager
def served(directory: Path, topic: Path, kind: str) -> Iterator[Service]:
    service = Service(directory, topic, kind)
    try:
        deadline = time.monotonic() + 60
        while service.ask("warm-up") != 200:
            assert service.process.poll() is None and time.monotonic() < deadline, service.log.read_text()
            time.sleep(0.05)
        yield service
    finally:
        service.stop()


class Clients:
    """Threads that make requests, each with its own numbers."""

    def __init__(self, service: Service, count: int = 6) -> None:
        self.answered: list[str] = []
        self.asked: list[str] = []
        self._service = service
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
            if self._service.ask(text) == 200:
                self.answered.append(text)
            number += 1

    def wait_for(self, more: int) -> None:
        """Wait until that many more requests are answered: the service goes on."""
        wanted = len(self.answered) + more
        deadline = time.monotonic() + 120
        while len(self.answered) < wanted:
            assert time.monotonic() < deadline, self._service.log.read_text()[-5000:]
            time.sleep(0.05)


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
KINDS = ["gunicorn", "gunicorn --preload", "gunicorn --threads 3", "gunicorn -k gevent", "gunicorn -k gevent --preload",
         "uvicorn", "pool"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_are_killed_and_reloaded_lose_no_answered_line(tmp_path: Path, kind: str) -> None:
    """Four workers share two partitions."""
    chance = random.Random(1)
    topic = tmp_path / "logs" / "app"
    topic.parent.mkdir()
    with served(tmp_path, topic, kind) as service, Clients(service) as clients:
        for step in range(scale(12)):
            time.sleep(0.25)
            if step % 4 == 3:
                service.process.send_signal(signal.SIGHUP)
            elif workers := service.workers():
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(workers), chance.choice([signal.SIGKILL, signal.SIGTERM]))
        clients.wait_for(100)
    assert_each_once(topic, clients)
    with Topic.open(topic, create=True):  # all partitions are free again
        pass


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["gunicorn", "uvicorn", "pool"])
def test_full_disk_loses_no_answered_line(tmp_path: Path, kind: str) -> None:
    with memory(tmp_path / "small", f"size={scale(4)}m") as disk:
        topic = disk / "app"
        with served(tmp_path, topic, kind) as service, Clients(service) as clients:
            for _ in range(scale(1)):
                time.sleep(0.5)
                blocker = disk / "blocker"
                with suppress(OSError), blocker.open("wb") as file:
                    while True:
                        file.write(bytes(4096))
                        file.flush()
                time.sleep(1)
                blocker.unlink()
                clients.wait_for(50)
        assert_each_once(topic, clients)
