"""Copying: a mirror of a topic that nobody has read for long, also over a stream, beside `cp` and `sync`; and how far a
mirror is behind.

Invariant: before each measurement the pages of the source are dropped from the cache, and each copy is compared.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import loglib
from floors import copy_and_check
from inputs import values_of
from large_logs import drop_pages
from loglib import Topic
from measure import Measurement, percentile
from ours import open_topic

if TYPE_CHECKING:
    from pathlib import Path

    from job import Options

_PER_CALL = 100  # messages; a thousand calls a second are 100,000 messages a second


def mirror_cold(directory: Path, options: Options) -> Measurement:
    """Copy the log, and make the copy durable."""
    source, to = directory / "log", directory / "copy"
    shutil.rmtree(to, ignore_errors=True)
    segments = sorted(source.rglob("*.log"))
    os.sync()
    drop_pages(segments)
    size = sum(each.stat().st_size for each in segments)
    began, cpu = time.perf_counter(), time.process_time()
    match options.text("system"):
        case "cp":
            subprocess.run(["cp", "-r", source, to], check=True)
            os.sync()
        case "floor":
            copy_and_check(segments, to)
        case "stream":
            _mirror_over_a_stream(source, to)
        case "tls":
            _mirror_over_tls(source, to, directory)
        case _:
            loglib.copies.mirror(source, to)
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    assert sum(each.stat().st_size for each in to.rglob("*.log")) == size
    shutil.rmtree(to)
    return Measurement(messages=size // 200, payload_bytes=size, seconds=seconds, cpu_seconds=used)


def _mirror_over_a_stream(source: Path, to: Path) -> None:
    """Serve the log in a process of its own, and receive it here."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        serve = [sys.executable, "-m", "loglib", "serve", str(source)]
        with subprocess.Popen(serve, stdin=theirs.fileno(), stdout=theirs.fileno()):
            theirs.close()
            loglib.copies.receive_mirror(ours, to)
            ours.shutdown(socket.SHUT_RDWR)


def _mirror_over_tls(source: Path, to: Path, directory: Path) -> None:
    """The same over TCP, encrypted and with a shared key. Both ends are on this host, and share its cores."""
    certificate, key = directory / "certificate.pem", directory / "mirror.key"
    if not certificate.exists():
        private = directory / "private.pem"
        kind = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost"
        names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(private), "-out", str(certificate)]
        subprocess.run(["openssl", *kind.split(), *names], check=True, capture_output=True)
        certificate.write_text(certificate.read_text() + private.read_text())
        key.write_text(os.urandom(32).hex())
        for each in (certificate, key):
            each.chmod(0o600)
    secrets = ["--certificate", str(certificate), "--shared-key", str(key)]
    serve = [sys.executable, "-m", "loglib", "serve", str(source), "--listen", "127.0.0.1:0", *secrets]
    credentials = loglib.copies.CopyCredentials(shared_key=key, authority=certificate)
    with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stderr is not None
            port = int(serving.stderr.readline().split()[-1])
            with socket.create_connection(("127.0.0.1", port)) as connection:
                loglib.copies.receive_mirror(credentials.connect(connection, "localhost"), to)
        finally:
            serving.terminate()


def mirror_behind(directory: Path, options: Options) -> Measurement:
    """How long after its publication at the source a message is seen in the copy, while many are written."""
    messages = options.number("messages")
    values = values_of("200", _PER_CALL)
    lags: list[float] = []
    with open_topic(directory / "log", flush="no fsync") as topic:
        topic.append_many(values)
        topic.flush()
        copier = subprocess.Popen(
            [sys.executable, "-m", "loglib", "mirror", directory / "log", directory / "copy" / "log", "--follow"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert copier.stderr is not None and b"following" in copier.stderr.readline()
            published: list[tuple[int, float]] = []
            done = threading.Event()
            watcher = threading.Thread(target=_watch, args=(directory / "copy" / "log", published, lags, done))
            watcher.start()
            began = time.perf_counter()
            for call in range(messages // _PER_CALL):
                while time.perf_counter() - began < call / 1000:
                    time.sleep(0.0002)
                topic.append_many(values)
                topic.flush()
                published.append((topic.partition(0).high_watermark, time.perf_counter()))
            done.set()
            watcher.join()
            seconds = time.perf_counter() - began
        finally:
            copier.terminate()
            copier.communicate()
    lags.sort()
    return Measurement(messages=messages, seconds=seconds, p50_us=percentile(lags, 50), p99_us=percentile(lags, 99))


def _watch(path: Path, published: list[tuple[int, float]], lags: list[float], done: threading.Event) -> None:
    """For each end that was published, note how long the copy took to show it."""
    seen = 0
    with Topic.open(path, mode="r") as copy:
        partition = copy.partition(0)
        while not done.is_set() or seen < len(published):
            end, now = partition.high_watermark, time.perf_counter()
            while seen < len(published) and published[seen][0] <= end:
                lags.append((now - published[seen][1]) * 1e6)
                seen += 1
            time.sleep(0.0002)
