"""Commands run in tests: in this process or in one of their own, on a topic of six clicks."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conftest import NOW, QUIET, SECOND
from loglib import testing
from loglib.cli.program import run
from loglib.system import lock
from loglib.system.files import REAL


class Done(NamedTuple):
    code: int
    output: str
    errors: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.splitlines()]


Cli = Callable[..., Done]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process."""

    def call(*arguments: object) -> Done:
        capfd.readouterr()
        code = run([str(each) for each in arguments])
        return Done(code, *capfd.readouterr())

    return call


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    """Two partitions with three records each."""
    path = tmp_path / "logs" / "clicks"
    with testing.open_topic(path, clock=lambda: NOW, partitions=2, **QUIET) as topic:
        for number in range(6):
            key, time = b"k%d" % number, NOW + number * SECOND
            topic.append(b"value %d" % number, key=key, timestamp=time, partition=number % 2)
    return path


def started(*arguments: object, **keywords: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "loglib", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **keywords)


@contextmanager
def holding(topic: Path, partition: int) -> Iterator[None]:
    """Hold one partition of a topic as a writer does."""
    held = lock.acquire(REAL, str(topic / f"{partition:04d}"), 0o600)
    try:
        yield
    finally:
        held.release()
