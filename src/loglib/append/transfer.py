"""Transfer: sends stored batches to another log by zero copy, after a small frame header.

Invariant: a frame holds whole flushed batches of one partition, exactly as stored, and the facts to check
them. The sender decodes nothing. The receiver decodes every batch before it appends it: a checksum does
not say who made a batch, and an unreadable batch would stay in the log. Each batch gets a new place, so its
header is written again; its body does not change.

    byte size field        frame header, little-endian
       0   4  magic        89 4C 4C 54
       4   2  version      3
       6   2  kind         0 BATCHES; others are those of a mirror's stream: copies/frames.py
       8   4  partition    number of the sending partition
      12   4  salt         of that partition; needed to check its batch headers
      16   8  base_offset  of the first batch, in the sender's log
      24   8  size_bytes   of the batches that follow
      32   4  crc          CRC-32C of bytes 0..31

A frame is appended whole or not at all: the receiver reads and checks the whole frame first. In a stream
that stopped in mid-frame (a time-out, an interrupt) the next frame cannot be found, so both ends refuse the
stream from then on.

Threads: other threads must not use a stream while a frame passes.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..config.policies import MAX_BATCH_BYTES
from ..errors import (
    BrokenStreamError,
    CorruptLogError,
    LogError,
    RecordTooLargeError,
    StorageIOError,
    UnsupportedFormatError,
)
from ..format.batch import Batch, Source, batch_of
from ..format.columns import Columns
from ..format.header import HEADER_BYTES, BadBatch, Header, NewerBatch, crc32c, parse_header
from ..log.log import Log
from ..segment import Identity
from ..system.files import REAL
from .record_arguments import record_sizes

MAGIC = b"\x89LLT"
VERSION = 3
BATCHES = 0  # the only kind of frame between partitions
_FRAME = Struct("<4sHHIIQQI")
FRAME_BYTES = _FRAME.size
assert FRAME_BYTES == 36

_STREAM = "the stream"
_PIECE_BYTES = 1 << 20  # memory for a claimed length is taken only when the bytes arrive
_MOST_SKIPPED_BYTES = 1 << 30  # skipped of a refused frame, to reach the next one; a segment is no larger by default

# Streams that stopped in mid-frame, with the reason. A file is never one of them, because a program can seek in it.
# A bare descriptor cannot be remembered, and has no time-out.
_half_sent: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_half_read: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


class FrameHeader(NamedTuple):
    """The header of a frame; the table at the top of the module explains each field."""

    kind: int
    partition: int
    salt: int
    base_offset: int
    size_bytes: int

    def encode(self) -> bytes:
        unsealed = _FRAME.pack(MAGIC, VERSION, *self, 0)[:-4]
        return unsealed + crc32c(unsealed).to_bytes(4, "little")

    @classmethod
    def decode(cls, raw: bytes) -> FrameHeader:
        """The header in these bytes; `CorruptLogError` or `UnsupportedFormatError` if they are no header."""
        magic, version, *fields, crc = _FRAME.unpack(raw)
        if magic != MAGIC or crc != crc32c(raw[:-4]):
            raise CorruptLogError(_STREAM, 0, f"bytes {raw.hex()}", "a frame header")
        if not version:
            raise CorruptLogError(_STREAM, 4, "frame version 0", f"at least {VERSION}")
        if version != VERSION:
            raise UnsupportedFormatError(_STREAM, "frame version", version, VERSION)
        return cls(*fields)


def send(log: Log, to: Any, start: int, *, max_bytes: int) -> int:
    """Send batches from the batch that begins at or holds `start`; returns the offset where to continue.

    Sends whole batches up to `max_bytes`, but at least one, in one frame per segment. Leaves declared gaps
    out. Sends nothing if `start` is the flushed end. `to` is a socket, an open file or a file descriptor.

    If a socket accepts nothing during its time-out, `TimeoutError` is raised, unless whole frames were sent
    before. After a time-out in mid-frame, each later call for this socket raises `BrokenStreamError`.
    """
    _refuse_broken(_half_sent, to, "sending")
    timeout_s = getattr(to, "gettimeout", lambda: None)() or None
    mark = log.mark()
    offset = log.batch_base(start, mark)
    stop = min(offset + max_bytes, mark.flushed_end)
    gaps = log.gaps()
    out = _descriptor(to)
    sent_any = False
    while offset < stop or (not sent_any and offset < mark.flushed_end):
        gap = next((each for each in gaps if offset < each.end), None)
        if gap is not None and gap.start <= offset:
            offset = min(gap.end, mark.flushed_end)
            continue
        with log.open_segment(offset) as segment:
            following = log.index.after(segment.base_offset)
            limit = mark.flushed_end if following is None else min(following, mark.flushed_end)
            end_of_file = segment.end_of_file()
            if following is None and end_of_file < limit:  # the writer has rolled since the index was made
                log.refresh()
                limit = min(log.index.after(segment.base_offset) or limit, limit)
            if end_of_file < limit:
                log.check_not_dropped(offset)  # if so, the index no longer has the end of this segment
                position = segment.file_position(end_of_file)
                raise CorruptLogError(segment.path, position, "the end of the file", f"data up to offset {limit}")
            if gap is not None:
                limit = min(limit, gap.start)
            end = limit
            if stop < limit:
                last = log.header_around(max(stop - 1, offset), mark)
                end = last.next_offset if last.next_offset <= stop else last.base_offset
                if end <= offset:
                    if sent_any:
                        break
                    end = segment.header_at(offset).next_offset
            if timeout_s is not None:  # before the frame this does no harm
                try:
                    log.files.wait_writable(out, timeout_s)
                except TimeoutError:
                    if sent_any:
                        break
                    raise
            try:
                log.files.write_stream(out, _frame(log.identity, offset, end - offset), timeout_s=timeout_s)
                log.files.send_range(
                    out, segment.fileno(), segment.file_position(offset), end - offset, timeout_s=timeout_s
                )  # fmt: skip
            except BaseException as error:
                _note_broken(_half_sent, to, error)
                if isinstance(error, ConnectionError | TimeoutError) or not isinstance(error, OSError):
                    raise  # an error of the receiver, not of the disk
                raise StorageIOError(segment.path, error, "sending batches") from error
            offset, sent_any = end, True
    return offset


def read_frame(source: Any, *, max_record_bytes: int = MAX_BATCH_BYTES) -> list[tuple[Header, bytes]]:
    """The checked batches of the next frame; an empty list at the end of the stream.

    `source` is a socket, an open binary file or a file descriptor. The whole frame is held in memory; memory
    grows only as bytes arrive. Raises `CorruptLogError` if the stream ends in the frame or differs from what
    was sent, and `RecordTooLargeError` for a record above the limit. If the stream did not end, the next frame
    can still be read. A time-out before a frame does no harm. A time-out in mid-frame breaks the stream, and
    each later call raises `BrokenStreamError`.
    """
    _refuse_broken(_half_read, source, "receiving")
    incoming = _Incoming(source)
    try:
        return _read_frame(incoming, max_record_bytes)
    except BaseException as error:
        if isinstance(error, LogError):
            with suppress(OSError):
                incoming.skip_rest()
        if not incoming.between_frames():
            _note_broken(_half_read, source, error)
        raise


def _read_frame(incoming: _Incoming, max_record_bytes: int) -> list[tuple[Header, bytes]]:
    raw = incoming.read(FRAME_BYTES, may_end=True)
    if not raw:
        return []
    kind, _, salt, offset, size = FrameHeader.decode(raw)
    incoming.end = FRAME_BYTES + size
    if kind != BATCHES:
        raise UnsupportedFormatError(_STREAM, "frame kind", kind, BATCHES)
    if not size:  # it would look like the end of the stream
        raise CorruptLogError(_STREAM, 24, "a frame of 0 bytes", "at least one batch")
    batches: list[tuple[Header, bytes]] = []
    position = FRAME_BYTES
    end = offset + size
    while offset < end:
        try:
            stored = incoming.read(HEADER_BYTES)
            header = parse_header(stored, 0, salt=salt, offset=offset)
            if header.next_offset > end:
                raise BadBatch(12, f"length {header.length}", f"at most {end - offset}, what the frame holds")
            columns_bytes = header.value_bytes + header.key_bytes + header.header_bytes
            average = (columns_bytes - 8) // header.record_count  # 8: the header section of a batch without headers
            if average > max_record_bytes:  # one record is larger; this is known before it arrives
                raise RecordTooLargeError("a record of the frame", average, max_record_bytes)
            body = incoming.read(header.length - HEADER_BYTES)
            batch = batch_of(header, body, Source(_STREAM, position), partition=0)
            _check_columns(header, batch)
            if columns_bytes > max_record_bytes:
                largest = max(record_sizes(Columns(batch.values, batch.keys, None, batch.headers)))
                if largest > max_record_bytes:
                    raise RecordTooLargeError("a record of the frame", largest, max_record_bytes)
        except (BadBatch, NewerBatch) as error:
            raise error.in_file(_STREAM, position) from error
        batches.append((header, body))
        position += header.length
        offset = header.next_offset
    return batches


def _check_columns(header: Header, batch: Batch) -> None:
    """Check the columns, and the header's event times, which a reader would check only later."""
    batch.decode()
    times = (batch.timestamps[0], max(batch.timestamps))
    if times != (header.base_timestamp, header.max_timestamp):
        stated = f"first and largest event time {header.base_timestamp}, {header.max_timestamp}"
        raise BadBatch(72, stated, f"{times[0]}, {times[1]}")


def _refuse_broken(broken: WeakKeyDictionary[Any, str], stream: Any, doing: str) -> None:
    with suppress(TypeError):  # a descriptor, or a caller's stream that cannot be remembered
        if (why := broken.get(stream)) is not None:
            raise BrokenStreamError(doing, why)


def _note_broken(broken: WeakKeyDictionary[Any, str], stream: Any, error: BaseException) -> None:
    if hasattr(stream, "recv") or not getattr(stream, "seekable", lambda: False)():
        with suppress(TypeError):
            broken[stream] = repr(error)  # not the error itself, which refers to the stream


def _descriptor(to: Any) -> int:
    """The target's file descriptor, after flushing its buffer."""
    if isinstance(to, int):
        return to
    ssl = sys.modules.get("ssl")
    if ssl is not None and isinstance(to, ssl.SSLSocket):
        raise TypeError("an SSL socket encrypts above its descriptor, so the log would be sent plain; send to a pipe")
    if hasattr(to, "flush"):
        to.flush()
    descriptor: int = to.fileno()
    return descriptor


def _frame(identity: Identity, offset: int, size: int) -> bytes:
    return FrameHeader(BATCHES, identity.partition, identity.salt, offset, size).encode()


@dataclass(eq=False)
class _Incoming:
    """The arriving bytes of one frame, and how many of them have been read."""

    source: Any
    at: int = 0
    end: int | None = None  # the end of the frame, once it is known
    ended: bool = False  # the stream

    def between_frames(self) -> bool:
        return self.at in (0, self.end)

    def read(self, size: int, *, may_end: bool = False) -> bytes:
        parts: list[bytes] = []
        missing = size
        while missing:
            piece = self._piece(missing)
            if not piece:
                if may_end and missing == size:
                    return b""
                raise CorruptLogError(_STREAM, self.at, "the end of the stream", f"{missing} bytes more")
            parts.append(piece)
            missing -= len(piece)
        return b"".join(parts)

    def skip_rest(self) -> None:
        """Read to the end of the frame, unless that is far away, so that the next frame can be read."""
        if self.end is not None and self.end - self.at <= _MOST_SKIPPED_BYTES:
            while self.at < self.end and self._piece(self.end - self.at):
                pass

    def _piece(self, size: int) -> bytes:
        piece = b"" if self.ended else _read_some(self.source, min(size, _PIECE_BYTES))
        self.at += len(piece)
        self.ended = not piece
        return piece


def _read_some(source: Any, size: int) -> bytes:
    """The available bytes, up to `size`. Waits for bytes, even if the source does not block."""
    if isinstance(source, int):
        read = partial(REAL.read, source)
    else:
        read = source.recv if hasattr(source, "recv") else source.read
    while True:
        with suppress(BlockingIOError):
            piece: bytes | None = read(size)
            if piece is not None:  # a raw file gives None if there is nothing now
                return piece
        REAL.wait_readable(source)
