"""`loglib serve --listen` outlives peers that are many or idle, and a process without descriptors."""

import errno
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pytest

from loglib import BrokenStreamError, Topic, receive_mirror
from loglib.cli import copies

clicks = commands.clicks


class Listener:
    """A listener whose first calls raise these errors."""

    def __init__(self, real: socket.socket, *errors: int) -> None:
        self._real = real
        self._errors = [OSError(each, "planted") for each in errors]

    def accept(self) -> Any:
        if self._errors:
            raise self._errors.pop(0)
        return self._real.accept()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def serve(listener: Any, topic: Path, *, most: int, timeout_s: float = 60.0) -> threading.Thread:
    options = {"most": most, "timeout_s": timeout_s}
    serving = threading.Thread(target=copies.serve_all, args=(listener, str(topic)), kwargs=options)
    serving.start()
    return serving


def end(listener: socket.socket, serving: threading.Thread) -> None:
    listener.shutdown(socket.SHUT_RDWR)
    serving.join()


def connect(listener: socket.socket) -> socket.socket:
    return socket.create_connection(listener.getsockname())


def mirrored(listener: socket.socket, to: Path) -> int:
    with connect(listener) as stream:
        return sum(receive_mirror(stream, to).ends)


def test_serving_goes_on_when_there_are_no_descriptors_for_a_while(
    listener: socket.socket, clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(copies, "_FULL_S", 0.0)
    serving = serve(Listener(listener, errno.EMFILE, errno.ENFILE, errno.ECONNABORTED), clicks, most=4)
    with Topic.open(clicks, mode="r") as topic:
        expected = sum(each.log_end_offset for each in topic.partitions)
    assert mirrored(listener, tmp_path / "copy") == expected
    end(listener, serving)
    assert capsys.readouterr().err.count("nobody else can be served for now") == 1


def test_peers_above_the_limit_are_turned_away_and_one_that_left_makes_room(
    listener: socket.socket, clicks: Path, tmp_path: Path, capsys: Any
) -> None:
    serving = serve(listener, clicks, most=2)
    idle = [connect(listener) for _ in range(2)]
    for _ in range(3):
        with connect(listener) as refused:
            refused.settimeout(30)
            assert refused.recv(1) == b""
    for each in idle:
        each.close()
    while True:
        with connect(listener) as again:  # it may come before the place of the others is free
            try:
                receive_mirror(again, tmp_path / "copy")
                break
            except (BrokenStreamError, OSError):
                continue
    end(listener, serving)
    assert capsys.readouterr().err.count("are turned away: 2 are being served (see --mirrors)") >= 1


def test_peer_that_says_nothing_is_given_up(
    listener: socket.socket, clicks: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(copies, "_HELLO_S", 0.01)
    serving = serve(listener, clicks, most=1)
    with connect(listener) as idle:
        idle.settimeout(30)
        assert idle.recv(1) == b""
    end(listener, serving)
    assert "127.0.0.1: timed out" in capsys.readouterr().err
