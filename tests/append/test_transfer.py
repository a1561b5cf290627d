"""append/transfer.py: what arrives is what was stored, or an error; over sockets, pipes and files."""

from __future__ import annotations

import fcntl
import io
import os
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import transferred
from transferred import MANUAL, everything, frames_of, receive_all, send_all

from conftest import sound
from loglib import OffsetOutOfRangeError, Topic
from loglib.append import transfer
from loglib.errors import InvalidOffsetError

source = transferred.source
target = transferred.target


# --- sockets, pipes, files ------------------------------------------------------------------------------


def through_a_socket(source: Topic, target: Topic) -> None:
    left, right = socket.socketpair()
    with left, right:
        sender = threading.Thread(target=send_all, args=(source, left, lambda: left.shutdown(socket.SHUT_WR)))
        sender.start()
        receive_all(target, right)
        sender.join()


def through_sockets_that_do_not_wait(source: Topic, target: Topic) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sender = threading.Thread(target=send_all, args=(source, left, lambda: left.shutdown(socket.SHUT_WR)))
        sender.start()
        receive_all(target, right)
        sender.join()


def through_descriptors(source: Topic, target: Topic) -> None:
    from_here, to_here = os.pipe()
    sender = threading.Thread(target=send_all, args=(source, to_here, lambda: os.close(to_here)))
    sender.start()
    receive_all(target, from_here)
    sender.join()
    os.close(from_here)


def through_a_nearly_full_pipe_that_does_not_wait(source: Topic, target: Topic) -> None:
    from_here, to_here = os.pipe()
    os.set_blocking(to_here, False)
    os.set_blocking(from_here, False)
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        fcntl.fcntl(to_here, fcntl.F_SETPIPE_SZ, 4096)
    filled = os.write(to_here, bytes(4096 - 10))
    sender = threading.Thread(target=send_all, args=(source, to_here, lambda: os.close(to_here)))
    sender.start()
    assert os.read(from_here, filled) == bytes(filled)
    with open(from_here, "rb", buffering=0) as raw:
        receive_all(target, raw)
    sender.join()


def through_a_file(source: Topic, target: Topic) -> None:
    path = Path(target.path).parent / "stream"
    with path.open("wb") as file:
        send_all(source, file)
    with path.open("rb") as file:
        receive_all(target, file)


def through_a_file_open_for_appending(source: Topic, target: Topic) -> None:
    # sendfile refuses these: the bytes go the long way.
    path = Path(target.path).parent / "stream"
    with path.open("ab") as file:
        send_all(source, file)
    with path.open("rb") as file:
        receive_all(target, file)


WAYS = [
    through_a_socket,
    through_sockets_that_do_not_wait,
    through_descriptors,
    through_a_nearly_full_pipe_that_does_not_wait,
    through_a_file,
    through_a_file_open_for_appending,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_log_arrives_as_it_was_sent(source: Topic, target: Topic, way: Callable[[Topic, Topic], None]) -> None:
    way(source, target)
    assert everything(target) == everything(source)
    sound(target.partition(0))


def test_bytes_written_to_a_file_before_stay_before_the_frames(source: Topic, tmp_path: Path) -> None:
    with (tmp_path / "stream").open("wb") as file:
        file.write(b"a heading\n")
        source.partition(0).transfer(file, 0, 1)
        file.write(b"a footing\n")
    content = (tmp_path / "stream").read_bytes()
    assert content.startswith(b"a heading\n" + transfer.MAGIC)
    assert content.endswith(b"a footing\n")


def test_log_never_goes_out_in_plain_through_an_ssl_socket(source: Topic) -> None:
    left, right = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with right, context.wrap_socket(left, do_handshake_on_connect=False, server_hostname="host") as wrapped:
        with pytest.raises(TypeError, match="SSL"):
            source.partition(0).transfer(wrapped, 0)
        right.setblocking(False)
        with pytest.raises(BlockingIOError):
            right.recv(1)


# --- how much is sent -----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [0, 1, 111, 5000, 100_000, 1 << 40])
def test_whole_batches_up_to_the_limit_are_sent_but_at_least_one(source: Topic, max_bytes: int) -> None:
    headers = [batch._header for batch in source.batches()]
    for header in headers[::7]:
        sent, end = frames_of(source, header.base_offset, max_bytes)
        fitting = [each.next_offset for each in headers if each.next_offset <= header.base_offset + max_bytes]
        assert end == max([header.next_offset, *fitting])
        stream, arrived = io.BytesIO(sent), []
        while more := list(transfer.read_frame(stream)):
            arrived += [each.base_offset for each, _ in more]
        assert arrived == [each.base_offset for each in headers if header.base_offset <= each.base_offset < end]


def test_limit_inside_the_first_batch_of_the_next_segment_ends_before_it(source: Topic) -> None:
    rolled = source.partition(0).segments[1].base_offset
    *_, last = (batch._header for batch in source.batches() if batch._header.next_offset <= rolled)
    assert frames_of(source, last.base_offset, last.length + 8)[1] == rolled == last.next_offset


def test_start_inside_a_batch_sends_the_batch(source: Topic) -> None:
    first = next(batch for batch in source.batches() if len(batch) > 1)
    assert frames_of(source, first.offsets[1], 1) == frames_of(source, first.offsets[0], 1)


def test_nothing_is_sent_at_the_end(source: Topic) -> None:
    end = source.partition(0).high_watermark
    assert frames_of(source, end, 1 << 20) == (b"", end)
    assert list(transfer.read_frame(io.BytesIO(b""))) == []


def test_start_outside_of_the_log_is_refused(source: Topic) -> None:
    with pytest.raises(OffsetOutOfRangeError):
        frames_of(source, source.partition(0).high_watermark + 8, 1)


def test_records_that_are_not_flushed_are_not_sent(source: Topic) -> None:
    end = source.partition(0).high_watermark
    source.append(b"not flushed")
    assert frames_of(source, 0, 1 << 40)[1] == end


def test_segments_rolled_after_the_log_was_opened_are_sent(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "source", create=True, segment_bytes=4096, flush=MANUAL) as writer:
        with Topic.open(tmp_path / "source", mode="r") as reader:
            for _ in range(6):
                writer.append(bytes(1500), sync=True)
            sent, end = frames_of(reader, 0, 1 << 40)
        assert end == writer.partition(0).high_watermark
        assert sent.count(transfer.MAGIC) == len(writer.partition(0).segments) > 1


# --- places at the receiver -------------------------------------------------------------------------------


def test_offsets_are_new_unless_they_are_to_be_preserved(source: Topic, target: Topic) -> None:
    target.append(b"already here")
    sent, _ = frames_of(source, 0, 1 << 40)
    received = target.partition(0).receive(io.BytesIO(sent))
    assert received is not None and received.start > 0
    records = everything(target)
    assert [record.value for record in records[1:]][:5] == [record.value for record in everything(source)][:5]
    assert records[1].offset == received.start
    sound(target.partition(0))


def test_offsets_that_cannot_be_preserved_are_refused(source: Topic, target: Topic) -> None:
    target.append(b"already here")
    target.flush()
    end = target.partition(0).high_watermark
    sent, _ = frames_of(source, 0, 1)
    with pytest.raises(InvalidOffsetError) as caught:
        target.partition(0).receive(io.BytesIO(sent), preserve_offsets=True)
    assert (caught.value.offset, caught.value.next_offset) == (0, end)
    assert [record.value for record in everything(target)] == [b"already here"]
