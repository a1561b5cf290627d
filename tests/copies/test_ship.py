"""The shipper of examples/: an endpoint that fails, refuses and hangs up, and a process that is killed."""

import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import ship
from conftest import QUIET, SOURCE
from loglib import Topic

EXAMPLE = SOURCE.parent / "examples" / "ship.py"


class Collector(ThreadingHTTPServer):
    """Takes lines, with all troubles of a network; some lines it never takes."""

    daemon_threads = True

    def __init__(self, *, troubles: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.chance = random.Random(1)
        self.troubles = troubles
        self.got: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/lines"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed are no trouble."""


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        lines = [json.loads(line) for line in self.rfile.read(int(self.headers["Content-Length"])).splitlines()]
        what = self.server.chance.random()
        if what < self.server.troubles / 3:
            self.send_error(503)
        elif any("poison" in str(line["value"]) for line in lines):
            self.send_error(400, "I do not take poison")
        else:
            self.server.got += lines
            if what < self.server.troubles * 2 / 3:
                self.connection.shutdown(socket.SHUT_RDWR)  # the answer is lost
            elif what < self.server.troubles:
                self.send_error(429)
            else:
                self.send_response(204)
                self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def collector(request: pytest.FixtureRequest) -> Iterator[Collector]:
    server = Collector(troubles=getattr(request, "param", 0.0))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def fill(path: Path, count: int, *, poison: int = 0) -> set[str]:
    """A topic of that many lines in three partitions; returns the values that can be delivered."""
    with Topic.open(path, create=True, partitions=3, **QUIET) as topic:
        for number in range(count):
            value = b"poison %d" if poison and number % poison == 0 else b"line %d"
            topic.append(value % number, key=b"k", partition=number % 3)
            if number % 40 == 0:
                topic.flush()
    return {f"line {number}" for number in range(count) if not (poison and number % poison == 0)}


def started(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(EXAMPLE), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)


@pytest.mark.parametrize("collector", [0.3], indirect=True)
def test_endpoint_gets_every_line_and_the_dead_letters_what_it_refuses(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = fill(tmp_path / "app", 300, poison=50)
    target = ship.Endpoint(collector.url, tmp_path / "app.dead", sleep=lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert ship.ship(tmp_path / "app", target, group="ship", at_once=20, timeout=0.3) == 300
    assert {line["value"] for line in collector.got} == expected
    with Topic.open(tmp_path / "app.dead", mode="r") as dead:
        buried = list(dead.read())
    assert [record.value for record in sorted(buried)] and {record.value for record in buried} == {
        b"poison %d" % number for number in range(0, 300, 50)
    }
    assert dict(buried[0].headers)["dead-letter-reason"] == b"400 I do not take poison"
    assert b":" in dict(buried[0].headers)["dead-letter-place"] and buried[0].key == b"k"
    assert "again in" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("collector", [0.1], indirect=True)
def test_shippers_that_are_killed_deliver_every_line_in_order(collector: Collector, tmp_path: Path) -> None:
    expected = fill(tmp_path / "app", 3000)
    chance = random.Random(2)
    running = [started(tmp_path / "app", collector.url, "--records", 10) for _ in range(2)]
    for _ in range(6):
        time.sleep(chance.uniform(0.2, 0.5))
        victim = running.pop(0)
        victim.kill()
        victim.communicate()
        running.append(started(tmp_path / "app", collector.url, "--records", 10))
    for each in running:
        each.terminate()
        each.communicate(timeout=60)
        assert each.returncode in (0, -signal.SIGTERM)  # the latter if it had just begun
    last = started(tmp_path / "app", collector.url, "--timeout", 3)
    last.communicate(timeout=120)
    assert last.returncode == 0
    places = [(line["partition"], line["offset"]) for line in collector.got]
    assert {line["value"] for line in collector.got} == expected
    first = {place: number for number, place in reversed(list(enumerate(places)))}
    for partition in range(3):
        arrived = [first[partition, offset] for number, offset in sorted(first) if number == partition]
        assert arrived == sorted(arrived)


@pytest.mark.slow
def test_files_have_every_line_once_though_shippers_are_killed(tmp_path: Path) -> None:
    expected = fill(tmp_path / "app", 30_000)
    chance = random.Random(3)
    for _ in range(5):
        shipper = started(tmp_path / "app", tmp_path / "out", "--records", 7)
        time.sleep(chance.uniform(0.2, 0.6))
        shipper.kill()
        shipper.communicate()
    shipper = started(tmp_path / "app", tmp_path / "out", "--timeout", 2)
    shipper.communicate(timeout=120)
    assert shipper.returncode == 0
    found = [json.loads(line) for path in (tmp_path / "out").iterdir() for line in path.read_bytes().splitlines()]
    assert Counter(line["value"] for line in found) == Counter(expected)
    for path in (tmp_path / "out").iterdir():
        offsets = [json.loads(line)["offset"] for line in path.read_bytes().splitlines()]
        assert offsets == sorted(offsets)


def test_file_with_half_a_line_goes_on_behind_the_last_whole_one(tmp_path: Path) -> None:
    fill(tmp_path / "app", 6)
    with Topic.open(tmp_path / "app", mode="r") as topic:
        records = list(topic.partition(0).read())
    target = ship.Files(tmp_path / "out")
    target.deliver(0, records[:1])
    path = tmp_path / "out" / "0000.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"partition": 0, "off')
    target.deliver(0, records)
    assert path.read_bytes() == b"".join(map(ship.line_of, records))
    nothing, one = (-1, 0), (0, len(whole))
    for content, (last, size) in ((b"", nothing), (b"half", nothing), (whole, one), (whole + b"x" * 99, one)):
        for block in (1, 7, 1 << 16):
            file = io.BytesIO(content)
            assert ship.last_offset(file, block) == last
            assert len(file.getvalue()) == size


def test_value_that_is_json_stays_json(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "t", create=True) as topic:
        for value in (b'{"a": 1}', b"\xff", None):
            topic.append(value, sync=True)
        lines = [json.loads(ship.line_of(record))["value"] for record in topic.read()]
    assert lines == [{"a": 1}, "\\xff", None]
