"""format/codec.py: what decompresses, decompresses to the size declared, and in bounded memory."""

from __future__ import annotations

import os
import random
import sys
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from builders import BODY_AT, NOW, batch_of, calm, encoded, forged, header_of, read_back, write_segment
from hypothesis import given, settings
from hypothesis import strategies as st

from loglib import CorruptLogError, Topic
from loglib.config.policies import CODEC_NAMES, MAX_BATCH_BYTES, MAX_DECOMPRESSED_BYTES
from loglib.errors import MissingCodecError
from loglib.format import codec
from loglib.format.codec import BadCompression
from loglib.format.columns import Columns
from loglib.format.header import BadBatch, encode_body, layout

CODECS = [pytest.param(number, id=CODEC_NAMES[number]) for number in (1, 2, 3)]
PIECE = codec._PIECE_BYTES


@pytest.mark.parametrize("number", CODECS)
@settings(calm, max_examples=50)
@given(body=st.binary(min_size=1, max_size=2000))
def test_what_is_compressed_is_decompressed(number: int, body: bytes) -> None:
    stored = codec.compress(number, body)
    assert codec.decompress(number, stored, body_bytes=len(body)) == body
    assert codec.decompress(number, memoryview(stored), body_bytes=len(body)) == body


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 5])
@pytest.mark.parametrize("number", CODECS)
def test_body_of_several_pieces_comes_back(number: int, size: int) -> None:
    body = bytes(size - 7) + b"the end"
    assert codec.decompress(number, codec.compress(number, body), body_bytes=size) == body


@pytest.mark.parametrize("wrong", [-1, 1, -100, 1000])
@pytest.mark.parametrize("number", CODECS)
def test_body_of_another_size_is_refused(number: int, wrong: int) -> None:
    stored = codec.compress(number, b"x" * 500)
    with pytest.raises(BadCompression, match=f"{CODEC_NAMES[number]} data of another size than the {500 + wrong} "):
        codec.decompress(number, stored, body_bytes=500 + wrong)


@pytest.mark.parametrize("number", CODECS)
def test_no_prefix_is_taken_for_the_whole(number: int) -> None:
    stored = codec.compress(number, random.Random(1).randbytes(40) * 3)
    for size in range(len(stored)):
        try:
            body = codec.decompress(number, stored[:size], body_bytes=120)
        except BadCompression:
            continue
        assert number == 3 and body == random.Random(1).randbytes(40) * 3, "only zstd's own checksum may be missing"


@pytest.mark.parametrize("number", CODECS)
def test_rubbish_is_refused(number: int) -> None:
    for seed in range(50):
        with pytest.raises(BadCompression):
            codec.decompress(number, random.Random(seed).randbytes(seed), body_bytes=100)


def test_names_are_numbers_in_the_format() -> None:
    assert [codec.codec_id(name) for name in ("none", "zlib", "lz4", "zstd")] == [0, 1, 2, 3]


# --- bombs --------------------------------------------------------------------------------------------


def peak_bytes(call: object, *arguments: object, **named: object) -> int:
    """The most memory that a call which must fail has had at once."""
    tracemalloc.start()
    try:
        with pytest.raises((BadCompression, BadBatch, CorruptLogError)):
            call(*arguments, **named)  # type: ignore[operator]
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("number", CODECS)
def test_bomb_of_64_mib_costs_what_its_header_declares(number: int) -> None:
    bomb = codec.compress(number, bytes(64 << 20))
    assert len(bomb) < 300_000
    assert peak_bytes(codec.decompress, number, bomb, body_bytes=1000) < 2 << 20


@pytest.mark.parametrize("number", CODECS)
def test_size_that_is_declared_is_believed_only_as_far_as_bytes_come(number: int) -> None:
    stored = codec.compress(number, bytes(1000))
    assert peak_bytes(codec.decompress, number, stored, body_bytes=MAX_BATCH_BYTES) < 2 * PIECE


@pytest.mark.parametrize("declared", [100, 16 << 20, MAX_BATCH_BYTES], ids="declares-{}".format)
@pytest.mark.parametrize("number", CODECS)
def test_bomb_in_a_batch_is_damage_and_costs_bounded_memory(tmp_path: Path, number: int, declared: int) -> None:
    bomb = codec.compress(number, bytes(64 << 20 if declared == 100 else 100_000))
    stored = forged(encoded(Columns([b"x"])), body=bomb, codec=number, stored_bytes=len(bomb), value_bytes=declared)
    path = write_segment(tmp_path, stored)
    assert peak_bytes(read_back, path) < 20 << 20
    with pytest.raises(CorruptLogError, match="of another size|when decompressed") as caught:
        read_back(path)
    assert caught.value.file_position == 4096 + (48 if declared == MAX_BATCH_BYTES else BODY_AT)


@pytest.mark.parametrize("number", CODECS)
def test_batch_that_would_be_large_when_decompressed_is_not_compressed(number: int) -> None:
    """For the sake of readers, who refuse one: a few bytes could be made to cost them a gigabyte."""
    least = Columns([bytes(MAX_DECOMPRESSED_BYTES - 16)])
    assert encode_body(least, codec=number).codec == number
    more = encode_body(Columns([bytes(MAX_DECOMPRESSED_BYTES)]), codec=number)
    assert more.codec == codec.NONE


def test_zstandard_window_is_no_larger_than_a_body_may_be() -> None:
    """The decompressor sets its window aside before it looks at the data."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # which knows no size
    stored = compressor.compress(b"x" * 1000) + compressor.flush()
    with pytest.raises(BadCompression, match="undecodable zstd"):
        codec.decompress(codec.ZSTD, stored, body_bytes=1000)


@pytest.mark.parametrize("number", CODECS)
def test_block_of_batches_that_compress_well_is_read_in_parts(tmp_path: Path, number: int) -> None:
    # A thousandfold compression would make a block of 1 MiB a gigabyte of columns in memory.
    from builders import IDENTITY, chained

    from loglib.segment import SegmentReader
    from loglib.system.files import REAL

    stored = chained([Columns([bytes(1 << 20)])] * 40, codec=number)
    assert len(stored) < 1 << 20
    with SegmentReader(REAL, str(write_segment(tmp_path, stored)), IDENTITY) as segment:
        tracemalloc.start()
        try:
            found = segment.batches(0, len(stored), block_bytes=1 << 20)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert 1 <= len(found) <= 4
    assert peak < 12 << 20
    assert len(read_back(tmp_path / "00000000000000000000.log")) == 40


def test_bytes_behind_the_compressed_body_are_not_read() -> None:
    stored = encoded(Columns([b"x" * 1000]), codec=1)
    header = header_of(stored)
    body = stored[BODY_AT : BODY_AT + header.stored_bytes]
    assert batch_of(forged(stored, body=body + b"rubbish behind it")).values == [b"x" * 1000]
    assert layout(header).end == 1008


# --- packages that are not there ------------------------------------------------------------------------


@pytest.fixture(params=[("lz4", "lz4.frame"), ("zstd", "zstandard")], ids=["lz4", "zstd"])
def without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a codec whose package cannot be imported."""
    name, module = request.param
    monkeypatch.setitem(sys.modules, module, None)
    return str(name)


def test_missing_package_is_named_with_its_extra(without: str) -> None:
    words = rf"compression '{without}' needs .*loglib-segments\[{without}\]"
    with pytest.raises(MissingCodecError, match=words) as caught:
        codec.codec_id(without)
    assert (caught.value.codec, caught.value.extra) == (without, without)
    assert isinstance(caught.value, ImportError)


def test_missing_package_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_segment(tmp_path, encoded(Columns([b"x" * 1000]), codec=2))
    assert read_back(path)[0].values == [b"x" * 1000]
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    with pytest.raises(MissingCodecError):
        read_back(path)


def test_topic_is_not_made_with_a_codec_that_is_missing(tmp_path: Path, without: str) -> None:
    with pytest.raises(MissingCodecError):
        Topic.open(tmp_path / "topic", create=True, compression=without)
    assert os.listdir(tmp_path) == []


def test_memory_that_runs_out_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> tuple[bytes, bool]:
        raise MemoryError

    monkeypatch.setattr(codec, "_decompress_at_most", exhausted)
    with pytest.raises(MemoryError):
        codec.decompress(1, b"", body_bytes=NOW)
