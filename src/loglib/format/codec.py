"""Codec: compression of a batch's body. Each batch has one codec; a log may mix codecs.

Invariant: decompression never returns more than the caller's limit, even if the bytes claim more. So a
forged body costs bounded memory.

    id  name  package         level
     0  none  -               -
     1  zlib  standard library 1     the fastest: a log writer waits for it
     2  lz4   lz4 (frame)     default
     3  zstd  zstandard       1
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..config.policies import CODEC_NAMES, MAX_DECOMPRESSED_BYTES
from ..errors import MissingCodecError
from ..system.files import Buffer

NONE, ZLIB, LZ4, ZSTD = range(4)
_PIECE_BYTES = 8 << 20  # memory is allocated piece by piece, because a declared size may be false
_PACKAGES = {LZ4: ("lz4.frame", "lz4"), ZSTD: ("zstandard", "zstd")}


class BadCompression(Exception):
    """The compressed bytes do not decode to the declared size."""


def codec_id(name: str) -> int:
    """The codec's number in a batch header; checks that its package is installed."""
    number = CODEC_NAMES.index(name)
    if number in _PACKAGES:
        _package(number)
    return number


def compress(codec: int, body: bytes) -> bytes:
    if codec == ZLIB:
        return zlib.compress(body, 1)
    package = _package(codec)
    if codec == LZ4:
        return bytes(package.compress(body))
    return bytes(package.ZstdCompressor(level=1).compress(body))


def decompress(codec: int, stored: Buffer, *, body_bytes: int) -> bytes:
    """The body, which must be exactly `body_bytes` long; raises `BadCompression` otherwise."""
    try:
        # A limit of one byte above the declared size is enough to notice a longer body.
        body, finished = _decompress_at_most(codec, stored, body_bytes + 1)
    except (MissingCodecError, MemoryError):  # not caused by the bytes
        raise
    except Exception as error:  # the three packages have different exception classes
        raise BadCompression(f"undecodable {CODEC_NAMES[codec]} data ({error})") from error
    if len(body) != body_bytes or not finished:
        raise BadCompression(f"{CODEC_NAMES[codec]} data of another size than the {body_bytes} bytes declared")
    return body


def _decompress_at_most(codec: int, stored: Buffer, limit: int) -> tuple[bytes, bool]:
    if codec == ZLIB:
        inflater = zlib.decompressobj()
        return inflater.decompress(stored, limit), inflater.eof
    package = _package(codec)
    if codec == LZ4:
        decoder = package.LZ4FrameDecompressor()
        first = decoder.decompress(stored, max_length=min(limit, _PIECE_BYTES))
        rest = _pieces(
            lambda size: b"" if decoder.eof else decoder.decompress(b"", max_length=size), limit - len(first)
        )
        return b"".join([first, *rest]) if rest else first, decoder.eof
    decompressor = package.ZstdDecompressor(max_window_size=MAX_DECOMPRESSED_BYTES)  # it allocates the window first
    with decompressor.stream_reader(bytes(stored)) as reader:
        pieces = _pieces(reader.read, limit)
        return b"".join(pieces), True


def _pieces(read: Callable[[int], bytes], limit: int) -> list[bytes]:
    """All pieces up to the limit. Both packages allocate the requested size first, so the pieces are small."""
    pieces: list[bytes] = []
    while limit and (piece := read(min(limit, _PIECE_BYTES))):
        pieces.append(piece)
        limit -= len(piece)
    return pieces


def _package(codec: int) -> Any:
    module, extra = _PACKAGES[codec]
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingCodecError(CODEC_NAMES[codec], extra) from error
