"""`loglib exporter` as a process: it serves on this host, survives its topics, and ends at a signal."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import commands
import pytest
from commands import Cli, started

from loglib import Topic

cli = commands.cli
clicks = commands.clicks


@contextmanager
def serving(*arguments: object) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The exporter on a free port, and its URL."""
    with started("exporter", *arguments, "--listen", "127.0.0.1:0", stdin=subprocess.DEVNULL) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.match(rb"serving (http://127\.0\.0\.1:\d+/metrics)\n", line):
                    yield process, found[1].decode()
                    break
        finally:
            process.kill()


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return str(answer.read().decode())


@pytest.mark.usefixtures("unmeasured")
def test_exporter_serves_and_survives_its_topics(clicks: Path) -> None:
    with serving(clicks.parent) as (process, url):
        labels = f'{{directory="{clicks.parent}",topic="clicks"}}'
        assert f"loglib_up{labels} 1.0" in scrape(url)
        Topic.delete(clicks)
        assert f"loglib_up{labels}" not in scrape(url)
        Topic.open(clicks, create=True).close()
        assert f"loglib_up{labels} 1.0" in scrape(url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        assert process.stderr is not None and process.stdout is not None
        assert (process.stderr.read(), process.stdout.read()) == (b"", b"")


@pytest.mark.usefixtures("unmeasured")
def test_requests_that_are_cut_or_odd_end_no_exporter(clicks: Path) -> None:
    with serving(clicks, clicks.with_name("gone")) as (process, url):
        port = int(url.split(":")[2].split("/")[0])
        for data in (b"", b"GET", b"\x00\xff\r\n\r\n", b"GET /metrics HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(data)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url, method="DELETE"), timeout=60)
        refused.value.close()
        assert refused.value.code == 405
        assert 'topic="gone"} 0.0' in scrape(url)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_port_that_is_taken_is_one_line(cli: Cli, clicks: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = cli("exporter", clicks, "--listen", f"127.0.0.1:{port}")
    assert (done.code, done.output) == (3, "") and f"127.0.0.1:{port}: Address already in use" in done.errors


@pytest.mark.parametrize("wrong", [["--listen", "9797"], ["--listen", "host:99999"], ["s3://bucket/topics"], []])
def test_wrong_argument_is_a_usage_error(wrong: list[str], cli: Cli, clicks: Path) -> None:
    done = cli("exporter", *([clicks, *wrong] if wrong[:1] == ["--listen"] else wrong))
    assert done.code == 2 and "Usage: " in done.errors


def test_missing_package_is_named(cli: Cli, clicks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    done = cli("exporter", clicks)
    assert done.code == 3 and "pip install 'loglib-segments[prometheus]'" in done.errors


def test_default_address_is_this_host(cli: Cli) -> None:
    assert "[default: 127.0.0.1:9797]" in " ".join(cli("exporter", "--help").output.split())
