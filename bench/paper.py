"""Paper: the experiment of the Kafka paper of 2011, section 5, `python bench/paper.py [--messages N] [--write]`.

Invariant: each producer and each consumer is a process of its own, one after another. A server starts for one producer
and its consumers, in a directory of its own, and ends with them. A consumer that does not get every message, with the
contents and in the order in which they were sent, fails the run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import machine
from paper_cases import MESSAGES, SYSTEMS, Case, System
from paper_report import Row, section, tables, with_section
from paper_roles import Measured, Work, expected_checksum
from paper_server import NotStartedError, Server, disk_bytes

if TYPE_CHECKING:
    from types import ModuleType

_ROLES = Path(__file__).with_name("paper_roles.py")
_DOCS = Path(__file__).resolve().parents[1] / "docs"
_TIMEOUT_SECONDS = 900.0  # for one role
_SETTLE_SECONDS = 1.5  # a server that syncs once a second has done so
_CLIENTS = ("pika", "stomp.py", "redis", "hiredis")


class NotAllMessagesError(Exception):
    """A consumer got other messages than the producer sent."""


def main() -> int:
    """Run the experiment, and print its tables. Return 1 if a system failed."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that servers end and the directory is removed.
    started, failures, left_out = time.monotonic(), 0, []
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="loglib-paper-", dir=arguments.dir or machine.disk_directory()) as name:
        facts = _facts(Path(name))
        for system in _chosen(arguments.only):
            if reason := system.missing():
                print(f"\n*** {system.name} is LEFT OUT. {reason}", file=sys.stderr, flush=True)
                left_out.append(f"{system.name}: {reason}")
                continue
            for case in system.cases:
                print(f"\n[{time.monotonic() - started:.0f} s] {system.name}, {case.batch}", end="", flush=True)
                try:
                    rows += run_case(system, case, arguments.messages, Path(name))
                except (NotAllMessagesError, NotStartedError, subprocess.SubprocessError) as error:
                    print(f"\n*** {system.name}, {case.batch}: FAILED. {error}", file=sys.stderr, flush=True)
                    failures += 1
    facts["took"] = f"{time.monotonic() - started:.0f} s"
    print("\n\n" + tables(rows))
    if arguments.write:
        _write(rows, facts, left_out)
    return 1 if failures else 0


def run_case(system: System, case: Case, messages: int, parent: Path) -> list[Row]:
    """Produce in one way, and consume in each of the ways: one row for each."""
    count = case.scaled(messages)
    expected = expected_checksum(count)
    module = importlib.import_module(system.module)
    directory = Path(tempfile.mkdtemp(dir=parent))
    try:
        with _server(module, directory) as server:
            before = disk_bytes(directory)
            work = Work(system.module, "produce", case.batch, count, str(directory), server.port if server else 0)
            produced = _row(system, case, work, server, lambda: _settled(module, server))
            produced.disk_bytes = disk_bytes(directory) - before
            rows = [produced]
            for way in case.consumers:
                row = _row(system, case, Work(system.module, "consume", way, *_rest(work)), server)
                if (row.measured.messages, row.measured.checksum) != (count, expected):
                    raise NotAllMessagesError(
                        f"{count:,} messages were sent, with checksum {expected:#010x}; {way} returned "
                        f"{row.measured.messages:,}, with checksum {row.measured.checksum:#010x}"
                    )
                rows.append(row)
        return rows
    finally:
        shutil.rmtree(directory)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The experiment of the Kafka paper of 2011, repeated.")
    parser.add_argument("--messages", type=int, default=MESSAGES, help="messages of loglib; slower systems get a share")
    parser.add_argument("--only", metavar="NAMES", help="the systems to run, with commas: loglib,redis")
    parser.add_argument("--write", action="store_true", help="write the tables in docs/guarantees.md, and two charts")
    parser.add_argument("--dir", type=Path, help="where to put the files; must be on a disk")
    arguments = parser.parse_args()
    if arguments.messages < 1:
        parser.error("--messages must be at least 1")
    return arguments


def _chosen(only: str | None) -> list[System]:
    if only is None:
        return list(SYSTEMS)
    chosen = [system for system in SYSTEMS if any(system.name.lower().startswith(name) for name in only.split(","))]
    if not chosen:
        raise SystemExit(f"no system is called {only}: there are {', '.join(system.name for system in SYSTEMS)}")
    return chosen


def _server(module: ModuleType, directory: Path) -> AbstractContextManager[Server | None]:
    running: Callable[[Path], AbstractContextManager[Server]] | None = getattr(module, "running", None)
    return nullcontext() if running is None else running(directory)


def _settled(module: ModuleType, server: Server | None) -> None:
    """Wait until a server has nothing left to do for what was sent."""
    if server is not None:
        time.sleep(_SETTLE_SECONDS)
        if hasattr(module, "settle"):
            module.settle(server.port)


def _rest(work: Work) -> tuple[int, str, int]:
    return work.messages, work.directory, work.port


def _row(
    system: System, case: Case, work: Work, server: Server | None, settle: Callable[[], None] = lambda: None
) -> Row:
    """Let a process do its role, and note what the server used for it."""
    used = 0.0
    if server is not None:
        server.reset_peak()
        used = server.cpu_seconds()
    command = [sys.executable, str(_ROLES), work.to_json()]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_SECONDS)
    settle()
    print(".", end="", flush=True)
    measured = Measured(**json.loads(finished.stdout))
    row = Row(system, case.batch, work.role, work.way, measured)
    if server is not None:
        row.server_cpu_seconds, row.server_peak_bytes = server.cpu_seconds() - used, server.peak_bytes()
    return row


def _write(rows: list[Row], facts: dict[str, str], left_out: list[str]) -> None:
    """Write the measured part of the page, and the charts."""
    from paper_charts import draw

    page = _DOCS / "guarantees.md"
    draw(rows, _DOCS / "images")
    page.write_text(with_section(page.read_text(), section(rows, facts, left_out)))


def _facts(directory: Path) -> dict[str, str]:
    now = datetime.datetime.now(datetime.UTC)
    facts = machine.description(directory)
    facts["packages"] = ", ".join(f"{name} {machine.version(name)}" for name in (*_CLIENTS, "pyarrow", "fastcrc"))
    facts["servers"] = _server_versions()
    command = " ".join(["python bench/paper.py", *machine.shown_arguments(sys.argv[1:])])
    return {**facts, "date": f"{now:%Y-%m-%d %H:%M} UTC", "command": f"`{command}`"}


def _server_versions() -> str:
    """The versions of the Debian packages."""
    names = ("redis-server", "rabbitmq-server", "activemq", "erlang-base")
    if shutil.which("dpkg-query") is None:
        return "not from Debian"
    shown = ["dpkg-query", "--show", "--showformat", "${Package} ${Version}, ", *names]
    found = subprocess.run(shown, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return found.removesuffix(", ")


if __name__ == "__main__":
    sys.exit(main())
