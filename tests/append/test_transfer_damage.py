"""Streams that are damaged, forged or too large: nothing of a bad frame is appended."""

from __future__ import annotations

import io
import socket
import zlib
from pathlib import Path
from typing import Any

import pytest
import transferred
from builders import IDENTITY, PLAIN, encoded, forged, resealed_frame
from transferred import MANUAL, everything, one_frame

from loglib import CorruptLogError, LogError, RecordTooLargeError, Topic
from loglib.append import transfer
from loglib.errors import BrokenStreamError
from loglib.format.columns import Columns
from loglib.format.header import Producer, encode_body

target = transferred.target


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


@pytest.mark.parametrize("codec", [0, 1], ids=["plain", "zlib"])
@pytest.mark.parametrize("values", [1, 3], ids=["alone", "among-others"])
def test_record_above_the_limit_is_not_received(tmp_path: Path, codec: int, values: int) -> None:
    """100 MiB used to be received where 64 KiB were allowed."""
    large = encoded(Columns([b"x" * 70_000] + [b"y"] * (values - 1), [b"k"] * values), codec=codec)
    fits = encoded(Columns([b"x" * 65_000, b"y" * 65_000]), codec=codec)
    stream = io.BytesIO(b"".join(transfer._frame(IDENTITY, 0, len(each)) + each for each in (large, fits)))
    with Topic.open(tmp_path / "target", create=True, flush=MANUAL, max_record_bytes=64 << 10) as target:
        with pytest.raises(RecordTooLargeError, match="the limit is 65536; nothing was appended"):
            target.partition(0).receive(stream)
        assert everything(target) == []
        target.partition(0).receive(stream)
        assert len(everything(target)) == 2, "and the stream is still of use"


def test_record_of_large_headers_is_not_received(tmp_path: Path) -> None:
    large = encoded(Columns([b"x", b"y", b"z"], headers=[(("h", b"x" * 70_000),), (), ()]))
    stream = io.BytesIO(transfer._frame(IDENTITY, 0, len(large)) + large)
    with Topic.open(tmp_path / "target", create=True, flush=MANUAL, max_record_bytes=64 << 10) as target:
        with pytest.raises(RecordTooLargeError):
            target.partition(0).receive(stream)
        assert everything(target) == []


def test_record_too_large_is_refused_before_it_has_arrived() -> None:
    large = encoded(Columns([b"x" * 70_000]))
    stream = io.BytesIO(transfer._frame(IDENTITY, 0, len(large)) + large[:200])
    with pytest.raises(RecordTooLargeError):
        transfer.read_frame(stream, max_record_bytes=60_000)


def test_frame_that_claims_too_much_to_be_skipped_breaks_the_stream(target: Topic) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.send(transfer._frame(IDENTITY, 0, 1 << 40) + bytes(4096))
        with pytest.raises(CorruptLogError):
            target.partition(0).receive(right)
        with pytest.raises(BrokenStreamError):
            target.partition(0).receive(right)
