"""Senders and receivers that stop, go away or are interrupted: an error says so, and no stream is read on wrongly."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path

import pytest
import transferred
from builders import IDENTITY, encoded
from transferred import MANUAL, everything, one_frame, send_all

from loglib import CorruptLogError, StorageIOError, Topic, testing
from loglib.append import transfer
from loglib.errors import BrokenStreamError
from loglib.format.columns import Columns
from loglib.log.log import Log
from loglib.system.files import Files
from loglib.testing import FaultyFiles

source = transferred.source
target = transferred.target


# --- time-outs -------------------------------------------------------------------------------------------------


def test_time_out_of_a_socket_that_nobody_reads_is_honoured(target: Topic) -> None:
    """Sending ignored it and waited for ever; a frame sent after it would have been taken for bytes of the last."""
    source = target
    for _ in range(16):
        source.append(bytes(1 << 20), sync=True)
    left, right = socket.socketpair()
    with left, right:
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        left.settimeout(0.02)
        with pytest.raises(TimeoutError):
            source.partition(0).transfer(left, 0)
        with pytest.raises(BrokenStreamError, match="while sending"):
            source.partition(0).transfer(left, 0)
        assert right.recv(10)
        with pytest.raises(BrokenStreamError):
            source.partition(0).transfer(left, 0)


def test_time_out_before_a_frame_costs_the_stream_nothing(source: Topic, target: Topic) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.settimeout(0.02)
        while True:  # fill it up
            try:
                left.send(bytes(4096))
            except TimeoutError:
                break
        with pytest.raises(TimeoutError):
            source.partition(0).transfer(left, 0, 1)
        right.settimeout(0.02)
        with pytest.raises(TimeoutError):
            while right.recv(1 << 20):
                pass
        with pytest.raises(TimeoutError):
            target.partition(0).receive(right)
        assert source.partition(0).transfer(left, 0, 1) > 0
        assert target.partition(0).receive(right) is not None


def test_time_out_between_two_frames_says_what_was_sent(source: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    def wait_writable(self: Files, to: object, timeout_s: float | None = None) -> None:
        waits.append(timeout_s)
        if len(waits) > 1:
            raise TimeoutError

    monkeypatch.setattr(Files, "wait_writable", wait_writable)
    left, right = socket.socketpair()
    with left, right:
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        left.settimeout(5)
        end = source.partition(0).transfer(left, 0, 1 << 30)
    assert end == source.partition(0).segments[0].end_offset and waits == [5, 5]


def test_stream_that_stops_in_mid_frame_is_never_read_on(source: Topic, target: Topic) -> None:
    """After a time-out in mid-frame, bytes of a body were taken for a header; a body may hold a frame that is none."""
    inner = one_frame()
    body = encoded(Columns([b"." * 40 + inner, b"x" * 2000]))
    frame = transfer._frame(IDENTITY, 0, len(body)) + body
    cut = frame.index(inner)
    for size in (10, cut):
        left, right = socket.socketpair()
        with left, right:
            right.settimeout(0.02)
            left.send(frame[:size])
            with pytest.raises(TimeoutError):
                target.partition(0).receive(right)
            left.send(frame[size:])
            for _ in range(2):
                with pytest.raises(BrokenStreamError, match="while receiving .*open a new stream"):
                    target.partition(0).receive(right)
    assert everything(target) == []


def test_interrupt_in_mid_frame_breaks_the_stream(target: Topic) -> None:
    class Pipe:
        """No socket, and nothing to seek in."""

        def __init__(self, pieces: list[bytes | BaseException]) -> None:
            self.pieces = pieces

        def read(self, size: int) -> bytes:
            piece = self.pieces.pop(0)
            if isinstance(piece, BaseException):
                raise piece
            if len(piece) > size:
                self.pieces.insert(0, piece[size:])
            return piece[:size]

    class Forgetful(Pipe):
        __slots__ = ("pieces",)
        __hash__ = None  # type: ignore[assignment]

    frame = one_frame()
    pipe = Pipe([frame[:50], KeyboardInterrupt(), frame[50:]])
    with pytest.raises(KeyboardInterrupt):
        target.partition(0).receive(pipe)
    with pytest.raises(BrokenStreamError):
        target.partition(0).receive(pipe)
    forgetful = Forgetful([frame[:50], KeyboardInterrupt(), frame])
    with pytest.raises(KeyboardInterrupt):
        target.partition(0).receive(forgetful)
    assert target.partition(0).receive(forgetful) is not None, "which its owner has wound back himself"


# --- a sender in trouble --------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [True, False], ids=["last-segment", "sealed-segment"])
def test_cut_segment_is_reported_and_not_sent_for_ever(tmp_path: Path, last: bool) -> None:
    # It sent frames of nothing without end.
    with Topic.open(tmp_path / "source", create=True, segment_bytes=4096, flush=MANUAL) as topic:
        for _ in range(4):
            topic.append(bytes(1500), sync=True)
    segments = sorted((tmp_path / "source" / "0000").glob("*.log"))
    damaged = segments[-1 if last else 0]
    os.truncate(damaged, damaged.stat().st_size - 100)
    with (
        Topic.open(tmp_path / "source", mode="r") as reader,
        (tmp_path / "stream").open("wb") as file,
        pytest.raises(CorruptLogError, match="the end of the file") as caught,
    ):
        send_all(reader, file)
    assert caught.value.path == str(damaged)
    assert caught.value.file_position == damaged.stat().st_size


def test_receiver_that_went_away_is_no_storage_error(source: Topic) -> None:
    left, right = socket.socketpair()
    right.close()
    with left, pytest.raises(ConnectionError):
        send_all(source, left)


def test_receiver_that_goes_away_between_frame_and_batches_is_no_storage_error(source: Topic, tmp_path: Path) -> None:
    files = FaultyFiles("sendfile", error=errno.EPIPE)
    with (
        testing.open_topic(tmp_path / "source", mode="r", files=files) as reader,
        (tmp_path / "to").open("wb") as file,
        pytest.raises(BrokenPipeError),
    ):
        send_all(reader, file)
    assert files.failed == 1


def test_receiver_that_goes_away_in_mid_frame_is_no_storage_error(source: Topic) -> None:
    left, right = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    faults: list[OSError] = []

    def send() -> None:
        try:
            send_all(source, left, max_bytes=1 << 30)
        except OSError as error:
            faults.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    right.recv(4096)
    right.close()
    sender.join()
    left.close()
    assert [type(fault) for fault in faults] in ([BrokenPipeError], [ConnectionResetError])


def test_disk_that_fails_while_sending_is_named(source: Topic, tmp_path: Path) -> None:
    class Broken(Files):
        def send_range(self, *_: object, **__: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

    log = Log(Broken(), source.partition(0).path, source.partition(0)._access.log.identity)
    with (tmp_path / "stream").open("wb") as file, pytest.raises(StorageIOError, match="sending batches") as caught:
        transfer.send(log, file, 0, max_bytes=1)
    assert caught.value.path.endswith(".log")
    log.close()
