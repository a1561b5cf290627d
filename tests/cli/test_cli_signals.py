"""Signals: Ctrl-C, SIGTERM and SIGHUP end each command in the same way, and lose nothing that was read from a pipe."""

import array
import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
from commands import started

from conftest import needs_root
from loglib import Topic
from loglib.cli.signals import Ended, Held

clicks = commands.clicks
pytestmark = pytest.mark.usefixtures("unmeasured")
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def _signals_are_not_ignored() -> Iterator[None]:
    """The commands inherit what is ignored, for example SIGHUP if the tests were begun by `nohup`."""
    before = {each: signal.signal(each, signal.SIG_DFL) for each in SIGNALS if signal.getsignal(each) is signal.SIG_IGN}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def unread(pipe: Any) -> int:
    """How many bytes are in a pipe."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def lines_of(path: Path) -> list[bytes | None]:
    with Topic.open(path, mode="r") as topic:
        return [each.value for each in topic.read()]


def ended(process: "subprocess.Popen[bytes]") -> bytes:
    """What a command that was told to end says on standard error."""
    try:
        return process.communicate(timeout=30)[1]
    finally:
        process.kill()


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_loses_no_line_that_was_read_from_the_pipe(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "t"
    appending = started("append", path, "--create", stdin=subprocess.PIPE)
    assert appending.stdin is not None
    appending.stdin.write(b"".join(b"%d\n" % each for each in range(1000)) + b"without an end")
    appending.stdin.flush()
    wait_until(lambda: unread(appending.stdin) == 0)
    appending.send_signal(number)
    assert appending.wait(30) == 128 + number  # the pipe is still open
    assert lines_of(path) == [*(b"%d" % each for each in range(1000)), b"without an end"]
    assert ended(appending).startswith(b"appended 1,001 records")


def test_what_is_in_the_pipe_when_the_signal_comes_is_taken(tmp_path: Path) -> None:
    """The command is stopped, so that it reads nothing before the signal is delivered."""
    path = tmp_path / "t"
    appending = started("append", path, "--create", stdin=subprocess.PIPE)
    assert appending.stdin is not None
    appending.stdin.write(b"first\n")
    appending.stdin.flush()
    wait_until(lambda: unread(appending.stdin) == 0)
    appending.send_signal(signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{appending.pid}/stat").read_text().split()[2] == "T")
    appending.stdin.write(b"second\n")
    appending.stdin.flush()
    appending.send_signal(signal.SIGTERM)
    appending.send_signal(signal.SIGCONT)
    assert appending.wait(30) == 143
    assert lines_of(path) == [b"first", b"second"]
    ended(appending)


@needs_root
@pytest.mark.parametrize("verb", ["append", "tail -f"])
def test_process_1_of_a_container_ends_at_sigterm(tmp_path: Path, verb: str) -> None:
    with Topic.open(tmp_path / "t", create=True) as topic:
        topic.append(b"first")
    command = [sys.executable, "-m", "loglib", *verb.split(), str(tmp_path / "t")]
    outside = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", "--propagation", "slave", *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert outside.stdin is not None and outside.stdout is not None
    if verb == "append":
        outside.stdin.write(b"second\n")
        outside.stdin.flush()
        wait_until(lambda: unread(outside.stdin) == 0)
    else:
        assert outside.stdout.readline() == b"first\n"
    (inside,) = map(int, Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text().split())
    os.kill(inside, signal.SIGTERM)
    try:
        assert outside.wait(30) == 143
    finally:
        if outside.poll() is None:
            os.kill(inside, signal.SIGKILL)
        ended(outside)
    assert lines_of(tmp_path / "t") == [b"first", b"second"][: 2 if verb == "append" else 1]


def test_hangup_that_was_ignored_stays_ignored(tmp_path: Path) -> None:
    path = tmp_path / "t"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        appending = started("append", path, "--create", "--sync", stdin=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert appending.stdin is not None
    for line in (b"first\n", b"second\n"):
        appending.stdin.write(line)
        appending.stdin.flush()
        wait_until(lambda: unread(appending.stdin) == 0)
        appending.send_signal(signal.SIGHUP)
    assert ended(appending) == b"appended 2 records, 11 bytes\n" and appending.returncode == 0


def test_command_ends_although_nobody_takes_its_output(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "t", create=True) as topic:
        topic.append_many([b"x" * 100] * 10_000)
    printing = started("cat", tmp_path / "t")
    wait_until(lambda: unread(printing.stdout) >= 1 << 15)  # half of what it takes; nobody reads
    printing.send_signal(signal.SIGTERM)
    assert printing.wait(30) == 143
    assert ended(printing) == b""


@pytest.mark.parametrize("verb", ["tail -f", "lag --watch 60", "mirror --follow", "serve --listen 127.0.0.1:0"])
def test_each_verb_ends_at_sigterm_as_at_ctrl_c(clicks: Path, tmp_path: Path, verb: str) -> None:
    name, *options = verb.split()
    codes = []
    for number in (signal.SIGINT, signal.SIGTERM):
        more = [tmp_path / f"copy{number}"] if name == "mirror" else []
        running = started(name, clicks, *more, *options)
        assert running.stdout is not None and running.stderr is not None
        (running.stdout if name in ("cat", "tail", "lag") else running.stderr).readline()
        running.send_signal(number)
        errors = ended(running)
        assert b"Traceback" not in errors
        codes.append(running.returncode)
    assert codes in ([130, 143], [0, 0])


DROPS_AN_ERROR = """
import signal, sys, time, weakref
from loglib.cli.signals import Ended, listen

class Thing:
    pass

def callback(_):
    signal.raise_signal(signal.SIGTERM)
    for _ in range(1000):
        pass

listen()
thing = Thing()
reference = weakref.ref(thing, callback)
try:
    del thing
    time.sleep(60)
except Ended as ended:
    sys.exit(ended.number)
"""


def test_signal_ends_a_command_also_where_the_interpreter_drops_errors() -> None:
    """In a callback of a weak reference, such as those of the import system, or in a finalizer."""
    dropping = subprocess.run([sys.executable, "-c", DROPS_AN_ERROR], check=False, capture_output=True, timeout=120)
    assert (dropping.returncode, dropping.stderr) == (signal.SIGTERM, b"")


def test_named_pipe_that_nobody_writes_is_waited_for_until_a_signal(clicks: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    appending = started("append", clicks, tmp_path / "pipe")
    wchan = Path(f"/proc/{appending.pid}/wchan")
    wait_until(lambda: wchan.read_text() in ("wait_for_partner", "fifo_open", "0"))
    appending.send_signal(signal.SIGTERM)
    assert b"Traceback" not in ended(appending)
    assert appending.returncode in (143, -signal.SIGTERM)  # without wchan it may come before the command listens


def test_first_signal_is_noted_and_the_second_raises() -> None:
    reader, writer = os.pipe()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with Held() as held:
            os.kill(os.getpid(), signal.SIGTERM)
            assert held.number == signal.SIGTERM and not held.wait_readable(reader)
            with pytest.raises(Ended):
                os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(Ended), held.loose():
                raise AssertionError("the noted signal comes first")
        with pytest.raises(Ended):
            held.raise_recorded()
        with Held() as held:
            os.write(writer, b"x")
            assert held.wait_readable(reader) and held.number is None
            with pytest.raises(Ended), held.loose():
                os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.close(reader)
        os.close(writer)
    assert signal.getsignal(signal.SIGTERM) is before
