"""Segment: one append-only file of a partition: batches back to back after a fixed header.

Invariant: `file position = HEADER_BYTES + offset - base_offset`. The next segment's base is this base plus
this segment's bytes, so arithmetic finds a missing, swapped or cut segment. A file whose name ends in
`.log` has a whole header: it is written as `.tmp`, synced and renamed. A sealed segment never changes; the
facts about it are in the header of the next segment.

Threads: a reader belongs to one thread; it shares only the page cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn, Self

from .errors import CorruptLogError, StorageIOError, UnsupportedFormatError
from .format.batch import Batch, Source, stored_header, take
from .format.header import HEADER_BYTES as BATCH_HEADER_BYTES
from .format.header import BadBatch, Header, NewerBatch, crc32c, layout, parse_header, unchecked_header
from .format.segment_header import (
    HEADER_BYTES,
    MAX_PRODUCERS,
    NO_TIMESTAMP,
    PRODUCER_BYTES,
    Identity,
    ProducerState,
    SegmentHeader,
    decode_producers,
    encode_producers,
    first_segment,
    parse_beside_name,
    parse_producers_name,
    parse_segment_name,
    producers_name,
    segment_name,
)
from .system.directory import Directory
from .system.files import Files
from .system.not_copyable import NotCopyable

__all__ = [
    "HEADER_BYTES", "MAX_PRODUCERS", "NO_TIMESTAMP", "START_HEADER", "Identity", "ProducerState", "SegmentHeader",
    "SegmentInfo", "SegmentReader", "attach_segment", "create_segment", "first_segment", "keep_start_header",
    "kept_start_header", "parse_beside_name", "parse_producers_name", "parse_segment_name", "producers_name",
    "read_producers", "read_segment_header", "segment_name", "write_producers",
]  # fmt: skip

START_HEADER = "start.header"
# Headers are read in windows: at first a few headers, then as many as one read can hold.
_FIRST_WINDOW = 4 << 10
_LARGEST_WINDOW = 256 << 10
# Limits the memory for a block whose batches decompress to a thousand times their size.
_MOST_DECOMPRESSED = 4 << 20
_LAST_POSITION = (1 << 63) - 1


class SegmentInfo(NamedTuple):
    """A segment as `Partition.segments` lists it."""

    path: str
    base_offset: int
    end_offset: int
    sealed: bool
    created: int  # microseconds UTC
    last_append_time: int | None  # of its newest batch; None while the segment is open

    @property
    def size_bytes(self) -> int:
        """Bytes of batches, without the file's header."""
        return self.end_offset - self.base_offset


def create_segment(directory: Directory, header: SegmentHeader, permissions: int) -> int:
    """Create the segment and return it open for writing. It and its name are synced.

    A crash at any point leaves a `.tmp` file, which is garbage, or a whole segment.
    """
    files, name = directory.files, segment_name(header.base_offset)
    temporary = name + ".tmp"
    if directory.exists(temporary):
        directory.unlink(temporary)
    fd = directory.create(temporary, permissions)
    try:
        files.write_all(fd, [header.encode()], 0)
        files.datasync(fd)
        directory.rename(temporary, name)
        directory.sync()
    except BaseException:
        files.close(fd)
        raise
    return fd


def attach_segment(directory: Directory, header: SegmentHeader, path: str, fd: int) -> None:
    """Make a segment of the file at `path`, which is open as `fd`: it has room for the header, and batches after that.

    It and its new name are synced, and it keeps the old name. A crash at any point leaves a `.tmp` file, which is
    garbage, or a whole segment.
    """
    files, name = directory.files, segment_name(header.base_offset)
    temporary = name + ".tmp"
    files.write_all(fd, [header.encode()], 0)
    files.datasync(fd)
    if directory.exists(temporary):
        directory.unlink(temporary)
    files.link(path, temporary, dst_dir_fd=directory.fd)
    directory.rename(temporary, name)
    if directory.exists(temporary):  # the segment had its name already: then a rename does nothing
        directory.unlink(temporary)
    directory.sync()


def write_producers(
    directory: Directory, base_offset: int, producers: Sequence[ProducerState], permissions: int
) -> tuple[tuple[ProducerState, ...], int, int]:
    """Write the producers that do not fit the segment's header into a separate file. The file and its name are synced.

    Returns the facts for the header: its table, the number of entries in the file, and the file's CRC. The segment
    is created after this file, so a segment always has its file. A file without its segment is garbage.
    """
    table, more = tuple(producers[-MAX_PRODUCERS:]), producers[:-MAX_PRODUCERS]
    if not more:
        return table, 0, 0
    content, name = encode_producers(more), producers_name(base_offset)
    directory.replace(name, content, permissions)
    return table, len(more), crc32c(content)


def read_producers(
    files: Files, directory: str, header: SegmentHeader, *, within: Directory | None = None
) -> tuple[ProducerState, ...]:
    """All producers of a segment's header; those in the separate file come first."""
    if not header.more_producers:
        return header.producers
    path = os.path.join(directory, producers_name(header.base_offset))
    size = header.more_producers * PRODUCER_BYTES
    try:
        content = files.drain(_open(files, path, within), path, size)
    except FileNotFoundError as error:
        expected = f"the {header.more_producers} producers that the segment names"
        raise CorruptLogError(path, 0, "no file", expected) from error
    if len(content) != size:
        raise CorruptLogError(path, len(content), "the end of the file", f"{header.more_producers} producers")
    actual = crc32c(content)
    if actual != header.more_producers_crc:
        raise CorruptLogError(path, 0, f"CRC {actual:08x}", f"{header.more_producers_crc:08x}, as the segment has it")
    return (*decode_producers(content), *header.producers)


def keep_start_header(directory: Directory, identity: Identity, base: int, permissions: int) -> None:
    """Keep a copy of the header of the segment at which the log begins from now on, in `start.header`. Synced.

    A damaged header is rebuilt from the segment before it. When that segment is dropped, only the copy still has the
    facts that link the log to an archive or a tier: the batch before the segment, the largest event time and the
    producers. A damaged header is not kept. On a full disk nothing is kept either: the pass of retention that frees it
    must go through.
    """
    with suppress(CorruptLogError, OSError):
        path = directory.path_of(segment_name(base))
        header = read_segment_header(directory.files, path, identity, within=directory)
        directory.replace(START_HEADER, header.encode(), permissions)


def kept_start_header(directory: Directory, identity: Identity, base: int) -> SegmentHeader | None:
    """The header that was kept of this segment; None if there is no whole one."""
    with suppress(CorruptLogError, UnsupportedFormatError, OSError):
        header = SegmentHeader.decode(directory.read_whole(START_HEADER, HEADER_BYTES), directory.path_of(START_HEADER))
        if (header.log_id, header.partition, header.base_offset) == (*identity[:2], base):
            return header
    return None


def read_segment_header(
    files: Files, path: str, identity: Identity, *, within: Directory | None = None
) -> SegmentHeader:
    """The checked header of the segment, which must belong to this log, partition and name."""
    fd = _open(files, path, within)
    try:
        return _read_header(files, fd, path, identity)
    finally:
        files.close(fd)


class SegmentReader(NotCopyable):
    """An open segment: batches and headers by offset. log/search.py finds batches whose offset is unknown.

    With `base_offset` (from the file's name) the segment header is not read, and there is no `header`. This is for
    reading around damage: the salt of a batch's CRC proves its log. With `within`, an open directory, the file is
    looked up there by its name, and the path is only for messages. With `fd` the file is open already, and stays so.
    """

    header: SegmentHeader
    _fd = -1  # for __del__, if an interrupt comes before the first line of __init__

    def __init__(
        self,
        files: Files,
        path: str,
        identity: Identity,
        *,
        base_offset: int | None = None,
        within: Directory | None = None,
        fd: int | None = None,
    ) -> None:
        self._files = files
        self.salt = identity.salt
        self.partition = identity.partition
        self.path = path
        self._after = -1, b""  # the offset after the batches that were read last, and the first bytes there
        self._fd, self._is_own = (_open(files, path, within), True) if fd is None else (fd, False)
        if base_offset is not None:
            self.base_offset = base_offset
            return
        try:
            self.header = _read_header(files, self._fd, path, identity)
        except BaseException:
            self.close()  # only once: when __del__ runs, the number may belong to another file
            raise
        self.base_offset = self.header.base_offset

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:  # a reader that is dropped in the middle of an iteration must not leak its file
        with suppress(OSError):  # no caller can get the error, and reading loses nothing
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            if self._is_own:
                self._files.close(fd)

    def end_of_file(self) -> int:
        """The offset at which the file ends now. The bytes below it may be damaged."""
        return self.base_offset + self._files.size(self._fd) - HEADER_BYTES

    def end_of_data(self, offset: int) -> int:
        """The offset after the last byte that is not zero; at least `offset`.

        A file may be longer than its log: zeros after the log are room for batches to come, and mean nothing.
        """
        stop = self.end_of_file()
        while stop > offset:
            start = max(offset, stop - _LARGEST_WINDOW)
            if content := self.read(start, stop - start).rstrip(b"\0"):
                return start + len(content)
            stop = start
        return offset

    def file_position(self, offset: int) -> int:
        return HEADER_BYTES + offset - self.base_offset

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Up to `size_bytes` bytes of the log from `offset`; fewer at the end of the file."""
        position = self.file_position(offset)
        if position > _LAST_POSITION:  # from forged bytes: the system would refuse such a number
            return b""
        try:
            return self._files.read_at(self._fd, max(size_bytes, 0), position)
        except OSError as error:
            raise StorageIOError(self.path, error, f"reading at byte {position}") from error

    def fileno(self) -> int:
        """The descriptor of the open file, to send its bytes without a copy."""
        return self._fd

    def header_at(self, offset: int) -> Header:
        """The header of the batch that begins at `offset`."""
        return self._header(self.read(offset, BATCH_HEADER_BYTES), 0, offset)

    def header_after(self, offset: int) -> Header:
        """The header after the batches that were read last. Their block often has it, and then nothing is read."""
        place, content = self._after
        is_here = place == offset and len(content) == BATCH_HEADER_BYTES
        return self._header(content, 0, offset) if is_here else self.header_at(offset)

    def length_after(self, offset: int) -> int:
        """The length in that header, unchecked: a hint for the next read. 0 if their block does not have it."""
        place, content = self._after
        return unchecked_header(content, 0).length if place == offset and len(content) == BATCH_HEADER_BYTES else 0

    def batches(self, offset: int, limit: int, *, block_bytes: int) -> list[Batch]:
        """The whole checked batches from `offset` in one block, at least one below `limit`.

        `limit` is an offset at which a batch ends (the flushed end, or the segment's end). An empty list means
        that the file ends at `offset`. If the first batch is bad, it raises. A later bad batch ends the list, so
        that the batches before it are returned.
        """
        block = self.read(offset, min(block_bytes, limit - offset))
        batches: list[Batch] = []
        position, room = 0, _MOST_DECOMPRESSED
        path, partition, salt, file_position = self.path, self.partition, self.salt, self.file_position(offset)
        while position < len(block):
            source = Source(path, file_position + position)
            try:
                batch = take(
                    block, position, source, offset=offset + position, partition=partition, salt=salt,
                    room=room if batches else None,
                )  # fmt: skip
                if isinstance(batch, Header):
                    if batches:
                        break
                    block = self._whole_batch(batch, limit)
                    continue
            except (BadBatch, NewerBatch) as error:
                if batches:
                    break
                self.refuse(error, offset)
            batches.append(batch)
            header = stored_header(batch)
            position += header.length
            if header.codec:
                room -= layout(header).end
        self._after = offset + position, block[position : position + BATCH_HEADER_BYTES]
        return batches

    def only_batch(self, offset: int, limit: int, *, previous_crc: int) -> Batch | None:
        """The one checked batch between the offsets, if it follows the batch with this CRC; None for anything else.

        `batches` reads what this call does not, and its error says what is wrong. One pread.
        """
        size, position = limit - offset, HEADER_BYTES + offset - self.base_offset
        try:
            block, source = self._files.pread(self._fd, size, position), Source(self.path, position)
            batch = take(block, 0, source, offset=offset, partition=self.partition, salt=self.salt)
        except (OSError, BadBatch, NewerBatch):
            return None
        if not isinstance(batch, Batch) or stored_header(batch).length != size:
            return None
        return batch if stored_header(batch).previous_crc == previous_crc else None

    def headers(self, offset: int, limit: int) -> Iterator[Header]:
        """The headers of all batches from `offset` to `limit`, without reading bodies."""
        window, begin = b"", offset
        size = _FIRST_WINDOW
        while offset < limit:
            if offset - begin + BATCH_HEADER_BYTES > len(window):
                window, begin = self.read(offset, min(size, max(limit - offset, BATCH_HEADER_BYTES))), offset
            header = self._header(window, offset - begin, offset)
            yield header
            offset = header.next_offset
            # Many headers of small batches come with one read. Of large batches only the header is read.
            size = _LARGEST_WINDOW if header.length < _FIRST_WINDOW else BATCH_HEADER_BYTES

    def _header(self, content: bytes, position: int, offset: int) -> Header:
        try:
            return parse_header(content, position, salt=self.salt, offset=offset)
        except (BadBatch, NewerBatch) as error:
            self.refuse(error, offset)

    def refuse(self, error: BadBatch | NewerBatch, offset: int) -> NoReturn:
        """Raise the public error for a bad batch at `offset`."""
        raise error.in_file(self.path, self.file_position(offset)) from error

    def _whole_batch(self, header: Header, limit: int) -> bytes:
        if header.next_offset > limit:
            raise BadBatch(
                12, f"length {header.length}", f"at most {limit - header.base_offset}, up to the flushed end"
            )
        block = self.read(header.base_offset, header.length)
        if len(block) < header.length:
            raise BadBatch(len(block), "the end of the file", f"a batch of {header.length} bytes")
        return block

    def corrupt(self, offset: int, found: str, expected: str) -> NoReturn:
        """Raise `CorruptLogError` for the bytes at `offset`."""
        raise CorruptLogError(self.path, self.file_position(offset), found, expected)


def _open(files: Files, path: str, within: Directory | None) -> int:
    return files.open_read(path) if within is None else within.open_read(os.path.basename(path))


def _read_header(files: Files, fd: int, path: str, identity: Identity) -> SegmentHeader:
    try:
        content = files.read_at(fd, HEADER_BYTES, 0)
    except OSError as error:
        raise StorageIOError(path, error, "reading the segment header") from error
    header = SegmentHeader.decode(content, path)
    if (header.log_id, header.partition) != identity[:2]:
        found = f"a segment of log {header.log_id.hex()}, partition {header.partition}"
        raise CorruptLogError(path, 16, found, f"log {identity.log_id.hex()}, partition {identity.partition}")
    if header.base_offset != parse_segment_name(os.path.basename(path)):
        raise CorruptLogError(path, 40, f"base offset {header.base_offset}", "the base offset in the file's name")
    return header
