"""Transfer: stored batches on their way between logs, by zero copy, behind a small frame header.

Invariant: a frame holds whole flushed batches of one partition, exactly as stored, and what is
needed to check them. The sender decodes nothing; the receiver decodes every batch before it is
appended, because a checksum says nothing about who made it, and a batch that cannot be read would
stay in the log. It gives each a new place, so its header is stamped anew; its body is untouched.

    byte size field        frame header, little-endian
       0   4  magic        89 4C 4C 54
       4   2  version      2
       6   2  kind         0 BATCHES; others are reserved for copies
       8   4  partition    number of the sending partition
      12   4  salt         of it, with which its batch headers are checked
      16   8  base_offset  of the first batch, in the sender's log
      24   8  size_bytes   of the batches that follow
      32   4  crc          CRC-32C of bytes 0..31

Threads: no state; a stream must not be shared while a frame passes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from struct import Struct
from typing import Any

from .batch import HEADER_BYTES, BadBatch, Header, NewerBatch, check_body, crc32c, open_body, parse_header
from .errors import CorruptLogError, StorageIOError, UnsupportedFormatError
from .files import REAL
from .log import Log
from .records import Batch, Source
from .segment import Identity

__all__ = ["read_frame", "send"]

MAGIC = b"\x89LLT"
VERSION = 2
BATCHES = 0  # the only kind of frame as yet
_FRAME = Struct("<4sHHIIQQI")
FRAME_BYTES = _FRAME.size
assert FRAME_BYTES == 36

_STREAM = "the stream"
_PIECE_BYTES = 1 << 20  # a claimed length is believed only as far as bytes arrive


def send(log: Log, to: Any, start: int, *, max_bytes: int) -> int:
    """Send the batches from the one that begins at or holds `start`; returns where to go on.

    Sends whole batches up to `max_bytes`, but at least one, in a frame for each segment; nothing
    when `start` is the flushed end. `to` is a socket, an open file or a file descriptor.
    """
    mark = log.mark()
    offset = log.batch_base(start, mark)
    stop = min(offset + max_bytes, mark.flushed_end)
    out = _descriptor(to)
    sent_any = False
    while offset < stop or (not sent_any and offset < mark.flushed_end):
        with log.open_segment(offset) as segment:
            following = log.index.after(segment.base_offset)
            limit = mark.flushed_end if following is None else min(following, mark.flushed_end)
            end_of_file = segment.end_of_file()
            if following is None and end_of_file < limit:  # rolled since the index was made
                log.refresh()
                limit = min(log.index.after(segment.base_offset) or limit, limit)
            if end_of_file < limit:
                log.check_not_dropped(offset)  # or the index knows no more where this segment ended
                position = segment.file_position(end_of_file)
                raise CorruptLogError(segment.path, position, "the end of the file", f"data up to offset {limit}")
            end = limit
            if stop < limit:
                last = log.header_around(max(stop - 1, offset), mark)
                end = last.next_offset if last.next_offset <= stop else last.base_offset
                if end <= offset:
                    if sent_any:
                        break
                    end = segment.header_at(offset).next_offset
            log.files.write_stream(out, _frame(log.identity, offset, end - offset))
            try:
                log.files.send_range(out, segment.fileno(), segment.file_position(offset), end - offset)
            except ConnectionError:  # the receiver's doing, not the disk's
                raise
            except OSError as error:
                raise StorageIOError(segment.path, error, "sending batches") from error
            offset, sent_any = end, True
    return offset


def read_frame(source: Any) -> Iterator[tuple[Header, bytes]]:
    """The checked batches of the next frame, one by one; none at all at the end of the stream.

    `source` is a socket, an open binary file or a file descriptor. Raises `CorruptLogError` when
    the stream ends or differs from what was sent.
    """
    raw = _read(source, FRAME_BYTES, at=0, may_end=True)
    if not raw:
        return
    magic, version, kind, _, salt, offset, size, crc = _FRAME.unpack(raw)
    if magic != MAGIC or crc != crc32c(raw[:-4]):
        raise CorruptLogError(_STREAM, 0, f"bytes {raw.hex()}", "a frame header")
    if version > VERSION:
        raise UnsupportedFormatError(_STREAM, "frame version", version, VERSION)
    if version < VERSION:
        raise CorruptLogError(_STREAM, 4, f"frame version {version}", f"at least {VERSION}")
    if kind != BATCHES:
        raise UnsupportedFormatError(_STREAM, "frame kind", kind, BATCHES)
    if not size:  # it would be taken for the end of the stream
        raise CorruptLogError(_STREAM, 24, "a frame of 0 bytes", "at least one batch")
    position = FRAME_BYTES
    end = offset + size
    while offset < end:
        try:
            stored = _read(source, HEADER_BYTES, at=position)
            header = parse_header(stored, 0, salt=salt, offset=offset)
            if header.next_offset > end:
                raise BadBatch(12, f"length {header.length}", f"at most {end - offset}, what the frame holds")
            body = _read(source, header.length - HEADER_BYTES, at=position + HEADER_BYTES)
            check_body(header, body)
            _check_columns(header, body, position)
        except BadBatch as error:
            raise CorruptLogError(_STREAM, position + error.at, error.found, error.expected) from error
        except NewerBatch as error:
            raise UnsupportedFormatError(_STREAM, error.what, error.found, error.supported) from error
        yield header, body
        position += header.length
        offset = header.next_offset


def _check_columns(header: Header, body: bytes, position: int) -> None:
    """Check what a reader would meet only later: the columns, and what the header says of the event times."""
    columns = open_body(header, body) if header.codec else body
    batch = Batch(0, header, columns, 0, Source(_STREAM, position))
    batch.decode()
    times = (batch.timestamps[0], max(batch.timestamps))
    if times != (header.base_timestamp, header.max_timestamp):
        stated = f"first and largest event time {header.base_timestamp}, {header.max_timestamp}"
        raise BadBatch(72, stated, f"{times[0]}, {times[1]}")


def _descriptor(to: Any) -> int:
    """The file descriptor behind the target, after what is buffered in front of it."""
    if isinstance(to, int):
        return to
    ssl = sys.modules.get("ssl")
    if ssl is not None and isinstance(to, ssl.SSLSocket):
        raise TypeError("an SSL socket encrypts above its descriptor, so the log would go out in plain; send to a pipe")
    if hasattr(to, "flush"):
        to.flush()
    descriptor: int = to.fileno()
    return descriptor


def _frame(identity: Identity, offset: int, size: int) -> bytes:
    unsealed = _FRAME.pack(MAGIC, VERSION, BATCHES, identity.partition, identity.salt, offset, size, 0)[:-4]
    return unsealed + crc32c(unsealed).to_bytes(4, "little")


def _read(source: Any, size: int, *, at: int, may_end: bool = False) -> bytes:
    parts: list[bytes] = []
    missing = size
    while missing:
        piece = _read_some(source, min(missing, _PIECE_BYTES))
        if not piece:
            if may_end and missing == size:
                return b""
            raise CorruptLogError(_STREAM, at + size - missing, "the end of the stream", f"{missing} bytes more")
        parts.append(piece)
        missing -= len(piece)
    return b"".join(parts)


def _read_some(source: Any, size: int) -> bytes:
    """What there is, up to `size` bytes; waits for some where the source would not."""
    if isinstance(source, int):
        read = partial(REAL.read, source)
    else:
        read = source.recv if hasattr(source, "recv") else source.read
    while True:
        with suppress(BlockingIOError):
            piece: bytes | None = read(size)
            if piece is not None:  # as a raw file says that there is nothing just now
                return piece
        REAL.wait_readable(source)
