"""transfer.py: what arrives is what was stored, or an error; over sockets, pipes and files."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import random
import socket
import ssl
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from builders import IDENTITY, PLAIN, chained, encoded, forged, header_of, resealed_frame
from conftest import sound
from loglib import (
    BrokenStreamError,
    CorruptLogError,
    FlushPolicy,
    InvalidOffsetError,
    LogError,
    OffsetOutOfRangeError,
    Record,
    RecordTooLargeError,
    StorageFullError,
    StorageIOError,
    Topic,
    WriterFailedError,
    testing,
    transfer,
)
from loglib.format.batch import Producer, encode_body
from loglib.format.columns import Columns
from loglib.log import Log
from loglib.system.files import Files
from loglib.testing import FaultyFiles

MANUAL = FlushPolicy(None, None, None)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Topic]:
    """A topic of several segments and batches of all sizes."""
    with Topic.open(tmp_path / "source", segment_bytes=40_000, batch_bytes=4096, flush=MANUAL) as topic:
        choose = random.Random(5)
        for number in range(60):
            values = [choose.randbytes(choose.randrange(3000)) for _ in range(choose.randrange(1, 4))]
            topic.append_many(values, keys=[b"%d" % number] * len(values))
            topic.flush()
        assert len(topic.partition(0).segments) > 2
        yield topic


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Topic]:
    with Topic.open(tmp_path / "target", flush=MANUAL) as topic:
        yield topic


def everything(topic: Topic) -> list[Record]:
    topic.flush()
    return list(topic.read())


def send_all(
    topic: Topic, to: object, then: Callable[[], object] = lambda: None, *, max_bytes: int = 50_000
) -> None:
    partition, offset = topic.partition(0), 0
    while offset < partition.high_watermark:
        offset = partition.transfer(to, offset, max_bytes)
    then()


def receive_all(topic: Topic, stream: object, *, preserve_offsets: bool = True) -> None:
    while topic.partition(0).receive(stream, preserve_offsets=preserve_offsets) is not None:
        pass


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


def frames_of(topic: Topic, start: int, max_bytes: int) -> tuple[bytes, int]:
    path = Path(topic.path).with_name("frames")
    with path.open("wb") as file:
        end = topic.partition(0).transfer(file, start, max_bytes)
    return path.read_bytes(), end


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
    with Topic.open(tmp_path / "source", segment_bytes=4096, flush=MANUAL) as writer:
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


# --- damaged streams ----------------------------------------------------------------------------------------


def one_frame(*, codec: int = 0) -> bytes:
    stored = chained([PLAIN, Columns([b"v" * 40, None])], codec=codec)
    return transfer._frame(IDENTITY, 0, len(stored)) + stored


def test_no_flip_in_a_stream_arrives() -> None:
    content = bytearray(one_frame())
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptLogError) as caught:
            list(transfer.read_frame(io.BytesIO(bytes(content))))
        assert caught.value.path == "the stream"
        assert bit // 8 - 512 < caught.value.file_position <= bit // 8 + 512
        content[bit // 8] ^= 1 << bit % 8


def test_no_prefix_of_a_stream_is_taken_for_the_whole() -> None:
    content = one_frame()
    for size in range(1, len(content)):
        with pytest.raises(CorruptLogError, match="the end of the stream") as caught:
            list(transfer.read_frame(io.BytesIO(content[:size])))
        assert caught.value.file_position == size


def test_nothing_of_a_damaged_frame_is_appended_and_a_retry_doubles_nothing(target: Topic) -> None:
    """Its first batches used to stay, while the error said that nothing was changed."""
    content = bytearray(one_frame())
    content[-9] ^= 1
    stream = io.BytesIO(bytes(content) + one_frame())
    with pytest.raises(CorruptLogError, match="nothing was changed"):
        target.partition(0).receive(stream)
    assert everything(target) == []
    target.partition(0).receive(stream)
    assert [record.value for record in everything(target)] == [*PLAIN.values, b"v" * 40, None]


def test_frame_of_nothing_is_not_the_end_of_the_stream() -> None:
    with pytest.raises(CorruptLogError, match="0 bytes"):
        list(transfer.read_frame(io.BytesIO(transfer._frame(IDENTITY, 0, 0))))


@pytest.mark.parametrize(
    ("at", "replacement", "fault"),
    [
        pytest.param(12, bytes(4), 36 + 4, id="another-salt"),
        pytest.param(16, b"\x08", 36 + 16, id="another-offset"),
        pytest.param(16, b"\xff" * 8, 36 + 16, id="offset-wild"),
        pytest.param(24, b"\x08\0\0\0", 36 + 12, id="frame-shorter-than-its-batch"),
        pytest.param(24, b"\xff" * 8, None, id="frame-size-wild"),
    ],
)
def test_frame_that_does_not_fit_its_batches_is_refused(at: int, replacement: bytes, fault: int | None) -> None:
    content = resealed_frame(one_frame(), at, replacement)
    with pytest.raises(CorruptLogError) as caught:
        list(transfer.read_frame(io.BytesIO(content)))
    assert caught.value.file_position == (len(content) if fault is None else fault)


def test_length_that_is_claimed_costs_no_memory() -> None:
    import tracemalloc

    stored = forged(encoded(PLAIN), length=1 << 30, codec=1)
    content = transfer._frame(IDENTITY, 0, 1 << 30) + stored
    tracemalloc.start()
    with pytest.raises(CorruptLogError, match="the end of the stream"):
        list(transfer.read_frame(io.BytesIO(content)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_version_zero_is_no_version() -> None:
    with pytest.raises(CorruptLogError, match="byte 4: found frame version 0"):
        list(transfer.read_frame(io.BytesIO(resealed_frame(one_frame(), 4, b"\0\0"))))


@pytest.mark.parametrize("codec", [0, 1], ids=["plain", "zlib"])
@pytest.mark.parametrize(
    "fields",
    [{"body": b"\x01"}, {"max_timestamp": (1 << 63) - 1}, {"base_timestamp": 0}],
    ids=["columns", "largest-time", "first-time"],
)
def test_batch_that_no_reader_could_read_is_not_taken_in(
    fields: dict[str, int | bytes], codec: int, target: Topic
) -> None:
    """Its checksums are right; only its columns, or what it says of them, are not. It used to stay in the log."""
    columns = Columns([b"x" * 500] * 3, timestamps=[5, 6, 7])
    body = encode_body(columns, codec=0)
    plain = b"".join(body.parts)
    if "body" in fields:
        plain = b"\x01" + plain[1:]
    stored = zlib.compress(plain) if codec else plain
    facts: dict[str, Any] = {name: value for name, value in fields.items() if isinstance(value, int)}
    bad = forged(encoded(columns), body=stored, codec=codec, stored_bytes=len(stored), **facts)
    good = encoded(PLAIN)
    stream = io.BytesIO(
        transfer._frame(IDENTITY, 0, len(bad)) + bad + transfer._frame(IDENTITY, 0, len(good)) + good
    )
    with pytest.raises(CorruptLogError, match="column offsets|event time") as caught:
        target.partition(0).receive(stream)
    assert caught.value.path == "the stream" and caught.value.file_position >= 36
    target.partition(0).receive(stream)
    assert [record.value for record in everything(target)] == PLAIN.values


def test_producer_whose_numbers_do_not_rise_is_not_believed(target: Topic) -> None:
    """Two partitions of a topic may hold the same numbers; and a peer may send what it likes."""
    partition = target.partition(0)
    partition.append_many([b"mine"], producer=("etl", 5))
    partition.flush()
    name = next(partition.batches())._header.producer_id
    for sequence in (4, 5, 9, 9):
        batch = encoded(PLAIN, producer=Producer(name, sequence))
        partition.receive(io.BytesIO(transfer._frame(IDENTITY, 0, len(batch)) + batch))
    strange = encoded(PLAIN, producer=Producer(0, 77))
    partition.receive(io.BytesIO(transfer._frame(IDENTITY, 0, len(strange)) + strange))
    assert len(everything(target)) == 1 + 5 * 3, "every batch is kept"
    producers = [(batch._header.producer_id, batch._header.producer_sequence) for batch in target.batches()]
    assert producers == [(name, 5), (0, 0), (0, 0), (name, 9), (0, 0), (0, 0)]
    assert partition.append_many([b"again"], producer=("etl", 9))[0].offsets.start > 0
    with pytest.raises(LogError, match="comes too late"):
        partition.append_many([b"late"], producer=("etl", 8))


# --- all of a frame, or nothing ------------------------------------------------------------------------------


def test_frame_that_is_cut_short_appends_nothing_and_can_be_sent_again(source: Topic, target: Topic) -> None:
    """Nine of ten records used to be doubled by trying again."""
    sent, _ = frames_of(source, 0, 20_000)
    for size in (len(sent) - 1, len(sent) // 2, 40):
        with pytest.raises(CorruptLogError, match="the end of the stream"):
            target.partition(0).receive(io.BytesIO(sent[:size]))
    target.partition(0).receive(io.BytesIO(sent), preserve_offsets=True)
    values = [record.value for record in everything(target)]
    assert values == [record.value for record in everything(source)][: len(values)] and len(values) > 5


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_frame_that_cannot_be_written_is_undone_and_can_be_received_again(
    source: Topic, tmp_path: Path, error: int
) -> None:
    sent, _ = frames_of(source, 0, 20_000)
    assert len(list(transfer.read_frame(io.BytesIO(sent)))) > 3  # which are written together
    files = FaultyFiles("pwritev", at=1, error=error, armed=False)
    with testing.open_topic(tmp_path / "target", flush=MANUAL, files=files) as target:
        partition = target.partition(0)
        first = partition.append(b"before")
        partition.flush()
        files.armed = True
        with pytest.raises((StorageFullError, StorageIOError)) as caught:
            partition.receive(io.BytesIO(sent))
        assert (caught.value.appended, caught.value.lost, caught.value.resume_at) == ((), (), 0)
        assert [record.offset for record in everything(target)] == [first.offset]
        partition.receive(io.BytesIO(sent))
        assert len(everything(target)) > 3
        sound(partition)


def test_batches_of_more_parts_than_one_write_takes_are_all_written(
    source: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.append.tail._MOST_PARTS", 5)
    sent, _ = frames_of(source, 0, 1 << 40)
    with testing.open_topic(tmp_path / "target", flush=MANUAL) as target:
        receive_all(target, io.BytesIO(sent))
        assert everything(target) == everything(source)
        sound(target.partition(0))


def test_frame_larger_than_a_segment_says_where_to_go_on(source: Topic, tmp_path: Path) -> None:
    sent, _ = frames_of(source, 0, 1 << 40)
    headers = [header for header, _ in transfer.read_frame(io.BytesIO(sent))]
    files = FaultyFiles("rename", at=2, error=errno.ENOSPC, armed=False)
    with testing.open_topic(tmp_path / "small", flush=MANUAL, segment_bytes=8192, files=files) as target:
        partition = target.partition(0)
        files.armed = True
        with pytest.raises(StorageFullError) as caught:
            partition.receive(io.BytesIO(sent), preserve_offsets=True)
        inside = len(caught.value.appended)
        assert 0 < inside < len(headers)
        assert caught.value.resume_at == headers[inside].base_offset == partition.log_end_offset
        frames, _ = frames_of(source, caught.value.resume_at, 1 << 40)
        receive_all(target, io.BytesIO(frames))
        assert everything(target) == everything(source)
        sound(partition)


def test_flush_that_fails_after_a_frame_says_that_it_is_in(source: Topic, tmp_path: Path) -> None:
    sent, _ = frames_of(source, 0, 20_000)
    headers = [header for header, _ in transfer.read_frame(io.BytesIO(sent))]
    files = FaultyFiles("datasync", armed=False)
    policy = FlushPolicy(records=1, interval=None, bytes=None)
    with testing.open_topic(tmp_path / "failing", flush=policy, files=files) as target:
        files.armed = True
        with pytest.raises(WriterFailedError) as caught:
            target.partition(0).receive(io.BytesIO(sent))
        assert caught.value.resume_at == headers[-1].next_offset
        assert len(caught.value.appended) == len(headers) and len(caught.value.in_doubt) == 1
        with pytest.raises(WriterFailedError):
            target.close()


def test_producers_of_a_frame_that_is_undone_are_not_remembered(target: Topic) -> None:
    """A repeat of what was undone must not be answered with offsets that hold nothing."""
    partition = target.partition(0)
    frames = b"".join(encoded(PLAIN, offset, producer=Producer(9, 5)) for offset in (0,))
    second = encoded(PLAIN, len(frames), producer=Producer(9, 6), previous_crc=header_of(frames).header_crc)
    stream = transfer._frame(IDENTITY, 0, len(frames + second)) + frames + second
    active = partition._access.writer().disk.active
    write = active.write

    def full_in_the_second(parts: Sequence[bytes], offset: int) -> None:
        write(parts[:-1], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    active.write = full_in_the_second  # type: ignore[method-assign, assignment]
    with pytest.raises(StorageFullError):
        partition.receive(io.BytesIO(stream))
    active.write = write  # type: ignore[method-assign]
    assert partition._access.writer().last_sequence(9) is None
    partition.receive(io.BytesIO(stream))
    assert partition._access.writer().last_sequence(9) == 6
    assert len(everything(target)) == 2 * len(PLAIN.values)


@pytest.mark.parametrize("codec", [0, 1], ids=["plain", "zlib"])
@pytest.mark.parametrize("values", [1, 3], ids=["alone", "among-others"])
def test_record_above_the_limit_is_not_received(tmp_path: Path, codec: int, values: int) -> None:
    """100 MiB used to be received where 64 KiB were allowed."""
    large = encoded(Columns([b"x" * 70_000] + [b"y"] * (values - 1), [b"k"] * values), codec=codec)
    fits = encoded(Columns([b"x" * 65_000, b"y" * 65_000]), codec=codec)
    stream = io.BytesIO(b"".join(transfer._frame(IDENTITY, 0, len(each)) + each for each in (large, fits)))
    with Topic.open(tmp_path / "target", flush=MANUAL, max_record_bytes=64 << 10) as target:
        with pytest.raises(RecordTooLargeError, match="the limit is 65536; nothing was appended"):
            target.partition(0).receive(stream)
        assert everything(target) == []
        target.partition(0).receive(stream)
        assert len(everything(target)) == 2, "and the stream is still of use"


def test_record_of_large_headers_is_not_received(tmp_path: Path) -> None:
    large = encoded(Columns([b"x", b"y", b"z"], headers=[(("h", b"x" * 70_000),), (), ()]))
    stream = io.BytesIO(transfer._frame(IDENTITY, 0, len(large)) + large)
    with Topic.open(tmp_path / "target", flush=MANUAL, max_record_bytes=64 << 10) as target:
        with pytest.raises(RecordTooLargeError):
            target.partition(0).receive(stream)
        assert everything(target) == []


def test_record_too_large_is_refused_before_it_has_arrived() -> None:
    large = encoded(Columns([b"x" * 70_000]))
    stream = io.BytesIO(transfer._frame(IDENTITY, 0, len(large)) + large[:200])
    with pytest.raises(RecordTooLargeError):
        transfer.read_frame(stream, max_record_bytes=60_000)


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


def test_frame_that_claims_too_much_to_be_skipped_breaks_the_stream(target: Topic) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.send(transfer._frame(IDENTITY, 0, 1 << 40) + bytes(4096))
        with pytest.raises(CorruptLogError):
            target.partition(0).receive(right)
        with pytest.raises(BrokenStreamError):
            target.partition(0).receive(right)


# --- a sender in trouble --------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [True, False], ids=["last-segment", "sealed-segment"])
def test_cut_segment_is_reported_and_not_sent_for_ever(tmp_path: Path, last: bool) -> None:
    # It sent frames of nothing without end.
    with Topic.open(tmp_path / "source", segment_bytes=4096, flush=MANUAL) as topic:
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
