"""Active: the segment that a partition's writer appends to.

Invariant: bytes are written at the caller's position, never at the file's own end. So a write that is
repeated after an interrupt puts the same bytes in the same place. After `sync` has returned, everything
below `end` is on the disk. After `sync` has failed, the contents of the file cannot be trusted. If the
file was removed, or does not end where its writer has left it, `LogMovedError` is raised: no record may
be written to a removed file, or after a hole in a restored one. After the log there may be zeros (room.py).

Threads: `write` and `cut_back` under the writer's lock; `sync` from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

from ..errors import LogMovedError, StorageIOError
from ..format.watermark import NAME as WATERMARK
from ..format.watermark import WatermarkWriter
from ..log.recovery import Tail, rewrite
from ..segment import HEADER_BYTES, SegmentReader, segment_name
from ..system.directory import Directory
from ..system.files import Buffer, Files
from ..system.not_copyable import NotCopyable
from .room import Room

_CRC_AT, _CRC_BYTES = 4, 4  # in a batch's header
_SPARE = 64  # room takes at most this part of what is free


@dataclass(eq=False, repr=False)
class ActiveSegment(NotCopyable):
    """An open segment file, and the facts that its writer needs."""

    files: Files
    fd: int
    path: str
    base_offset: int
    limit: Callable[[], int]  # the largest size of the segment now, in bytes
    began: int | None = None  # the time of its first batch: microseconds since the boot, negative before the boot
    in_doubt: bool = False  # whether an interrupt may have lost the result of a sync
    links: int = 1  # the file's number of names at the last check
    reader: SegmentReader | None = None  # of the same open file, once other processes have written it
    reach: int = 0  # the largest position that a batch of this writer has reached, even if the write failed
    room_end: int = 0  # the largest position of the zeros that this writer has put after the log
    has_grown: bool = False  # since the last sync
    room: Room = field(default_factory=Room)

    def file_position(self, offset: int) -> int:
        return HEADER_BYTES + offset - self.base_offset

    def write(self, parts: Sequence[Buffer], tail: Tail) -> None:
        """Write batches after `tail`, where the log must end. Handed to the system."""
        position = HEADER_BYTES + tail.end - self.base_offset
        size, end = self.checked_size(tail), position + sum(map(len, parts))
        self.reach = max(self.reach, end)
        self.files.write_all(self.fd, parts, position)
        if end > size:
            self.has_grown = True
            self._make_room(end)

    def _make_room(self, end: int) -> None:
        """Put zeros after the log, but not beyond the segment. A full disk takes a part of them, or none."""
        wanted = self.room.wanted()
        if wanted and (wanted := min(wanted, HEADER_BYTES + self.limit() - end)) > 0:
            try:
                free_bytes, _ = self.files.free_space(self.path)
                if wanted * _SPARE > free_bytes:  # others need what is left
                    self.room.give_up()
                    return
                self.room_end = max(self.room_end, end + wanted)
                self.files.write_all(self.fd, [bytes(wanted)], end)
            except OSError:
                self.room.give_up()
                with suppress(OSError):
                    self.files.ftruncate(self.fd, end)

    def give_room_back(self, tail: Tail) -> None:
        """Cut room off, if there is any. If that fails, the next write or the next writer does it."""
        if self.room_end > self.file_position(tail.end):
            with suppress(LogMovedError, OSError):
                self.cut_back(tail)

    def ends_at(self, end: int) -> bool:
        """True if there surely is nothing after `end`, or only zeros."""
        position = self.file_position(end)
        try:
            size = self.files.size(self.fd)
        except OSError:
            return False
        return size == position or (self.reach <= position < size <= self.room_end)

    def cut_back(self, tail: Tail) -> bool:
        """Make the file end with the log: remove the bytes that a failed or interrupted write has left there.

        True if there were any. Handed to the system: after a power cut the bytes may be there again.
        """
        position = self.file_position(tail.end)
        if self.checked_size(tail) > position:
            self.files.ftruncate(self.fd, position)
            self.room_end = 0
            return True
        return False

    def checked_size(self, tail: Tail) -> int:
        """The size of the file. It must have a name, and end with the log or where a write of this writer ended.

        A file with room has the same size in each of its states, so the last batch must be there, too.
        """
        facts = self.files.fstatx(self.fd) if self.room_end else self.files.fstat(self.fd)
        position = HEADER_BYTES + tail.end - self.base_offset
        if self.room_end and self.base_offset <= tail.last_batch < tail.end:
            crc = self.files.pread(self.fd, _CRC_BYTES, self.file_position(tail.last_batch) + _CRC_AT)
            if crc != tail.previous_crc.to_bytes(_CRC_BYTES, "little"):
                raise LogMovedError(self.path, "was changed by another program: its last batch is gone", kept=False)
        self.links = facts.st_nlink
        if not facts.st_nlink:
            raise LogMovedError(self.path, "was removed, or another file put in its place", kept=False)
        if facts.st_size != position and not position < facts.st_size <= max(self.reach, self.room_end):
            found = f"was changed by another program: it is {facts.st_size} bytes long instead of {position}"
            raise LogMovedError(self.path, found, kept=False)
        return facts.st_size

    def find_gone(self, tail: Tail) -> LogMovedError | None:
        """An error if the segment has lost its name or was changed by another program, else None. One fstat."""
        try:
            self.checked_size(tail)
        except LogMovedError as error:
            return error
        except OSError as error:
            raise StorageIOError(self.path, error, "looking whether it is still there") from error
        return None

    def find_moved(
        self, place: Directory, watermark: WatermarkWriter, *, thorough: bool = False
    ) -> LogMovedError | None:
        """An error if the path no longer leads to the directory or the watermark, else None. One lstat.

        If `thorough`, it also checks if only the segment was moved. Takes no lock.
        """
        try:
            if thorough and not place.exists(segment_name(self.base_offset)):
                return LogMovedError(self.path, "was moved elsewhere", kept=True)
            if watermark.is_named(untimed=self.room_end > 0):
                # A copy made of hard links has the same files in another directory.
                if self.links == 1 or place.is_named():
                    return None
            elif place.is_named():
                path = place.path_of(WATERMARK)
                return LogMovedError(path, "was removed, or another file put in its place", kept=True)
        except PermissionError:  # this process may have dropped its rights there, as daemons do
            return None
        except OSError as error:
            raise StorageIOError(place.path, error, "looking whether it is still there") from error
        return LogMovedError(place.path, "was moved, or another directory put in its place", kept=True)

    def sync(self, *, durable_end: int, end: int) -> None:
        """Make everything below `end` durable; everything below `durable_end` already is. An `OSError` is final."""
        has_grown, self.has_grown, began = self.has_grown, False, perf_counter()
        try:
            if self.in_doubt:
                start = max(durable_end, self.base_offset)
                rewrite(self.files, self.fd, self.file_position(start), self.file_position(end))
                self.in_doubt = False
            else:
                self.files.datasync(self.fd)
        except OSError:
            raise
        except BaseException:
            # An interrupt may have lost the system's answer. If the answer was an error, the page cache lies.
            # So write the bytes again before the next sync.
            self.in_doubt = True
            raise
        self.room.note(end - durable_end, perf_counter() - began, has_grown=has_grown)
