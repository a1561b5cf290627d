"""A service that takes uploads, and workers that handle them: one is killed with SIGKILL, one hangs. With FastAPI.

    pip install "loglib-segments" fastapi uvicorn
    python examples/jobs.py                                  a demonstration that ends by itself
    python examples/jobs.py --serve                          the same, and then it goes on

    curl -d 'some bytes' localhost:8000/uploads?name=photo-1
    curl -d crash localhost:8000/uploads?name=photo-2        kills its first worker
    curl -d hang localhost:8000/uploads?name=photo-3         its first worker never comes back
    http://localhost:8000/                                   the counts, in a browser

One command starts the service, the workers, and a new worker for each that dies. POST answers when the upload is on the
disk. Each upload is then a job of the share "handle": it is in the hand of one worker at a time.

A worker that dies is noticed by its lock, which the system releases, within milliseconds. A worker that hangs is
noticed by its lease. In both cases another worker handles the upload, with the next attempt. So in the end

    attempts that began = uploads + attempts whose worker died + attempts that were taken away

The workers write each attempt and each result to the topic "events", from which the last table is made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse

from loglib import Job, Topic, aio

SHARE = "handle"
LEASE_S = 2.0  # far more than the handling of an upload takes
PATIENCE_S = 120.0  # for the demonstration


# --- the service -----------------------------------------------------------------------------------------


def serve(directory: Path, descriptor: int) -> None:
    """Take uploads, and show the counts, on a socket that listens already."""
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with aio.open(directory / "uploads", create=True, partitions=2) as topic:
            async with topic.share(SHARE):  # makes it, so that there are counts before the first worker is there
                pass
            app.state.topic = topic
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/uploads", status_code=202)
    async def upload(request: Request, name: str) -> dict[str, int]:
        at = await request.app.state.topic.append(await request.body(), headers={"name": name.encode()}, sync=True)
        return {"partition": at.partition, "offset": at.offset}

    @app.get("/counts")
    def counts() -> dict[str, Any]:
        return counts_of(app.state.topic.topic)

    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        rows = "".join(f"<tr><td>{key}<td>{value}" for key, value in counts_of(app.state.topic.topic).items())
        return f"<meta http-equiv=refresh content=1><title>Uploads</title><h1>Uploads</h1><table>{rows}</table>"

    listening = socket.socket(fileno=descriptor)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


def counts_of(topic: Topic) -> dict[str, Any]:
    """What the share says, of all partitions together."""
    info = topic.share_info(SHARE)
    parts = info.partitions
    unbegun = [topic.partition(number).lag(each.next_offset, count_records=True) for number, each in parts.items()]
    return {
        "workers": len(info.members),
        "not begun": sum(each.records or 0 for each in unbegun),
        "in hand": sum(len(each.in_hand) for each in parts.values()),
        "to come again": sum(each.free for each in parts.values()),
        "accepted": sum(each.counts.accepted for each in parts.values()),
        "given up": sum(each.counts.exhausted + each.counts.rejected for each in parts.values()),
    }


# --- a worker --------------------------------------------------------------------------------------------


def work(directory: Path, name: str) -> None:
    """Handle uploads until SIGTERM."""
    with Topic.open(directory / "events", create=True, shared=True) as events:

        def tell(job: Job, **facts: object) -> None:
            facts |= {"upload": dict(job.headers)["name"].decode(), "attempt": job.attempt, "worker": name}
            events.append(json.dumps(facts).encode(), sync=True)

        def handle(job: Job) -> None:
            data = job.value or b""
            tell(job, what="begun")
            if job.attempt == 1 and data == b"crash":
                os.kill(os.getpid(), signal.SIGKILL)  # as when memory has run out
            if job.attempt == 1 and data == b"hang":
                threading.Event().wait()
            tell(job, what="done", sha256=hashlib.sha256(data).hexdigest(), size=len(data))

        uploads = Topic.open(directory / "uploads", mode="r")
        with uploads, uploads.share(SHARE, member=name, lease=LEASE_S) as share:
            share.run(handle)


# --- all of them -----------------------------------------------------------------------------------------


class Processes:
    """The service and its workers. A worker that dies gets a successor."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.died: dict[str, int] = {}  # exit codes by worker
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        with socket.create_server(("127.0.0.1", port)) as listening:
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            self.service = self._start("service", listening.fileno(), pass_fds=[listening.fileno()])

    def _start(self, role: str, argument: object, **options: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, "--role", role, str(self.directory), str(argument)]
        return subprocess.Popen(command, **options)

    def start_worker(self) -> None:
        name = f"worker-{len(self.workers) + len(self.died) + 1}"
        self.workers[name] = self._start("worker", name)

    def watch(self) -> None:
        """Start a worker for each that has died."""
        for name, process in list(self.workers.items()):
            if process.poll() is not None:
                self.died[name] = process.returncode
                del self.workers[name]
                self.start_worker()
        if self.service.poll() is not None:
            raise RuntimeError(f"the service has ended with {self.service.returncode}")

    def stop(self) -> list[str]:
        """End all processes; returns the workers that did not end at SIGTERM."""
        processes = {"service": self.service} | self.workers
        for process in processes.values():
            process.terminate()
        deadline = time.monotonic() + 5
        hanging: list[str] = []
        for name, process in processes.items():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()) if not hanging else 0.1)
                continue
            process.kill()
            process.wait()
            hanging.append(name)
        return hanging

    def ask(self, path: str, data: bytes | None = None) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}{path}", data, timeout=PATIENCE_S) as answer:
            answered: dict[str, Any] = json.load(answer)
            return answered


def demonstrate(processes: Processes, uploads: int) -> None:
    """Upload, and wait until each upload is handled."""
    for number in range(uploads):
        data = {uploads // 4: b"crash", uploads // 2: b"hang"}.get(number, b"%d" % number * 1000)
        processes.ask(f"/uploads?name=photo-{number}", data)
    deadline = time.monotonic() + PATIENCE_S
    while (counts := processes.ask("/counts"))["accepted"] < uploads:
        processes.watch()
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {PATIENCE_S:g} s: {counts}")
        time.sleep(0.05)
    print("  ".join(f"{key} {value}" for key, value in counts.items()))


def report(directory: Path, died: dict[str, int], uploads: int) -> bool:
    """Print what became of each attempt; True if it adds up."""
    with Topic.open(directory / "events", mode="r") as topic:
        events = [json.loads(record.value or b"") for record in topic.read()]
    begun = {(each["upload"], each["attempt"]): each["worker"] for each in events if each["what"] == "begun"}
    done = {(each["upload"], each["attempt"]) for each in events if each["what"] == "done"}
    last = dict(sorted(begun))  # the highest attempt of each upload
    dead, taken = 0, 0
    print(f"\n{'upload':10}  attempt  {'worker':10}  end")
    for (upload, attempt), worker in sorted(begun.items()):
        end = "handled"
        if attempt < last[upload]:
            is_dead = worker in died
            dead, taken = dead + is_dead, taken + (not is_dead)
            end = f"its worker was ended by signal {-died[worker]}" if is_dead else "taken away when its lease was over"
        if last[upload] > 1:
            print(f"{upload:10}  {attempt:7}  {worker:10}  {end}")
    handled = sum(each in done for each in last.items())
    print(f"\n{uploads} uploads, {handled} handled")
    print(f"{len(begun)} attempts = {handled} + {dead} (worker died) + {taken} (taken away)")
    return handled == uploads and len(begun) == handled + dead + taken


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--role"]:
        _, role, place, argument = arguments
        if role == "service":
            serve(Path(place), int(argument))
        else:
            work(Path(place), argument)
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--serve", action="store_true", help="go on after the demonstration, until Ctrl-C")
    parser.add_argument("--directory", type=Path, help="where the topics are; by default a temporary directory")
    parser.add_argument("--port", type=int, help="of the service; by default 8000 with --serve, otherwise a free one")
    parser.add_argument("--uploads", type=int, default=40)
    parser.add_argument("--workers", type=int, default=3)
    given = parser.parse_args(arguments)
    with ExitStack() as at_end:
        directory: Path = given.directory or Path(at_end.enter_context(tempfile.TemporaryDirectory()))
        port = given.port if given.port is not None else 8000 if given.serve else 0
        processes = Processes(directory, port)
        at_end.callback(processes.stop)
        processes.ask("/counts")  # answers when the topic and the share are there
        for _ in range(given.workers):
            processes.start_worker()
        demonstrate(processes, given.uploads)
        if given.serve:
            print(f"serving {processes.url}/, until Ctrl-C", flush=True)
            with suppress(KeyboardInterrupt):
                while True:
                    processes.watch()
                    time.sleep(0.2)
            return 0
        for name in processes.stop():
            print(f"{name} hung, and did not end at SIGTERM")
        return 0 if report(directory, processes.died, given.uploads) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
