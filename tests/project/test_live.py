"""examples/live.py, as a real server with real clients: nothing is missed over a broken connection."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loglib import Topic

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "live.py"


class Server:
    def __init__(self, path: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/events"
        self.process = subprocess.Popen([sys.executable, str(EXAMPLE), str(path), str(port)])
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def publish(self, data: str) -> None:
        assert httpx.post(self.url, content=data.encode()).status_code == 201

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture
def server(path: Path) -> Iterator[Server]:
    running = Server(path)
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait()


def events(url: str, count: int, *, last: str | None = None) -> list[tuple[str, str]]:
    """The ids and the data of the next events, as a browser understands them."""
    found: list[tuple[str, str]] = []
    number, data = "", []
    headers = {} if last is None else {"Last-Event-ID": last}
    with httpx.stream("GET", url, headers=headers, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                number = value
            elif name == "data":
                data.append(value)
            elif not line and data:
                found.append((number, "\n".join(data)))
                data = []
                if len(found) == count:
                    break
    return found


@pytest.mark.slow
def test_followers_get_what_is_published_and_go_on_after_a_break(server: Server, path: Path) -> None:
    followers: list[list[tuple[str, str]]] = []
    threads = [
        threading.Thread(target=lambda: followers.append(events(f"{server.url}?since=begin", 3))) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for number in range(3):
        server.publish(f"line {number}\nof two")
    for thread in threads:
        thread.join(60)
    assert [sorted(data for _, data in each) for each in followers] == [[f"line {n}\nof two" for n in range(3)]] * 5

    last = followers[0][-1][0]
    for number in range(3, 6):
        server.publish(f"line {number}")
    assert sorted(data for _, data in events(server.url, 3, last=last)) == ["line 3", "line 4", "line 5"]
    assert len(events(f"{server.url}?since=-15m", 6)) == 6
    assert httpx.get(f"{server.url}?since=nowhere").status_code == 400
    assert httpx.get(server.url, headers={"Last-Event-ID": json.dumps({"9": 0})}).status_code == 400

    with httpx.stream("GET", server.url, timeout=60):  # a follower that waits does not keep the server from stopping
        assert server.stop() in (0, -signal.SIGTERM)
    with Topic.open(path, create=True) as topic:
        assert len(list(topic.read())) == 6
