"""Paper server: another system's process, on loopback, with its own files, for as long as a measurement takes.

Invariant: a server ends with the block that started it, and with this process, however that ends. It writes below the
directory that it was given.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import process_tree

_START_SECONDS, _STOP_SECONDS = 90.0, 30.0
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl


class NotStartedError(Exception):
    """A server ended, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    pid: int
    port: int
    directory: Path

    def cpu_seconds(self) -> float:
        """What it has used so far, with everything that it started."""
        return process_tree.cpu_seconds(self.pid)

    def reset_peak(self) -> None:
        process_tree.reset_peak(self.pid)

    def peak_bytes(self) -> int:
        """The highest resident memory since `reset_peak`, summed over its processes."""
        return process_tree.peak_bytes(self.pid)


@contextmanager
def started(
    command: list[str],
    directory: Path,
    *,
    port: int,
    ready: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start a server, wait until it is ready, and stop it at the end of the block."""
    with open(directory / f"{Path(command[0]).name}.out", "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env={"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin", "LANG": "C.UTF-8", "HOME": str(directory)}
            | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt from the keyboard is for this process; the block ends the server
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - this process has one thread
        )
    try:
        _wait_until(ready, process, directory / output.name)
        yield Server(process.pid, port, directory)
    finally:
        _stop(process)


def free_port() -> int:
    """A port of loopback that nothing listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def listens(port: int) -> bool:
    """Whether something on loopback takes connections."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def disk_bytes(directory: Path) -> int:
    """What the files below a directory take on the disk. What is set aside and never written does not count."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_blocks * 512
    return total


def _end_with_parent() -> None:
    """Let the kernel end the server if this process is killed."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)


def _wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with suppress(Exception):  # each client has errors of its own for a server that is not there yet
            if ready():
                return
        time.sleep(0.2)
    last = output.read_text(errors="replace")[-2000:]
    raise NotStartedError(f"{process.args!r} did not start; the end of what it said: {last}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with suppress(ProcessLookupError):  # the session is the server's own: what is left of it goes
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
