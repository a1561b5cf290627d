"""Watermark: how far a partition has been flushed, published for readers in any process.

Invariant: the published `durable_end` is never above the last offset for which fdatasync has returned.
`flushed_end` (readers see records below it) is never above the bytes that the system has taken. Two
slots are written in turn, so one of them is whole at every instant. The valid slot with the higher sequence
wins. If the file is lost, recovery scans the last segment; no data is lost.

    byte size field             each slot, at bytes 0 and 4096 of the file, little-endian
       0   3  magic             89 4C 57
       3   1  version           3
       4   4  crc               CRC-32C of bytes 0..3 and 8..191, salted with log id and partition
       8   8  sequence          grows by one with each publication
      16   8  log_start_offset  first offset still readable
      24   8  flushed_end       readers see offsets below this
      32   8  durable_end       what fdatasync has returned for; below flushed_end only with durability "os"
      40   4  writer_epoch      of the writer that published
      44   4  writer_nonce      drawn at random by that writer
      48   8  flushed_tail      base offset of the batch that ends at flushed_end; flushed_end if there is none
      56   8  applied_txn       number of the last transaction whose records are all in this log; 0 for none
      64   8  held_txn          number of a transaction that is not known to be done; 0 for none
      72   8  held_from         readers see offsets below this until that transaction is done
      80   4  promised_epoch    0, or in a replica: no writer with a lower epoch may write here
      84   4  zero
      88   8  durable_tail      base offset of the batch that ends at durable_end; durable_end if there is none
      96   8  held_tail         base offset of the batch that ends at held_from; held_from if there is none
     104   8  written_end       what was handed to the system; at or below flushed_end it says nothing
     112   8  written_tail      base offset of the batch that ends at written_end
     120   8  applied_id        id of the transaction applied_txn; 0 if unknown
     128   8  held_id           id of the transaction held_txn; 0 if unknown
     136   8  txn_store         first 8 bytes of the id of the store that gave these numbers; 0 if unknown
     144  48  zero

Every lookup starts from a tail: see log/search.py.

Threads: one writer at a time (append/publication.py); any number of readers, in any process, without a lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from struct import Struct
from typing import NamedTuple

from ..config.policies import MAX_OFFSET
from ..errors import CorruptLogError, LockedError, StorageIOError, UnsupportedFormatError
from ..system.clock import monotonic
from ..system.directory import Directory
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .header import crc32c

NAME = "watermark"
MAGIC = b"\x89LW"
VERSION = 3
SLOT_BYTES = 192
SECOND_SLOT = 4096  # another sector, and another page: one torn write cannot damage both
SEQUENCE_AT = 8
FILE_BYTES = SECOND_SLOT + SLOT_BYTES
_NAP_S = 0.0001  # a publication takes microseconds
_PATIENCE_S = 5.0
MOST_BYTES = 1 << 16  # a larger file is not a watermark

_SLOT = Struct("<3sBIQQQQIIQQQQI4xQQQQQQQ48x")
_START, _FACTS = MAGIC + bytes([VERSION]), Struct("<QQQQIIQQQQI4xQQQQQQQ48x")  # before the CRC, and after it
assert _SLOT.size == SLOT_BYTES == len(_START) + 4 + _FACTS.size


class Mark(NamedTuple):
    """One publication. The table at the top of the module explains the fields."""

    sequence: int
    log_start_offset: int
    flushed_end: int
    durable_end: int
    writer_epoch: int
    writer_nonce: int
    flushed_tail: int
    applied_txn: int
    held_txn: int
    held_from: int
    promised_epoch: int
    durable_tail: int
    held_tail: int = 0
    written_end: int = 0
    written_tail: int = 0
    applied_id: int = 0
    held_id: int = 0
    txn_store: int = 0

    @classmethod
    def at_rest(cls, sequence: int, log_start: int = 0, end: int = 0, tail: int = 0) -> Mark:
        """The mark of a log from `log_start` to `end` that is all durable. Its last batch begins at `tail`."""
        return cls(sequence, log_start, end, end, 0, 0, tail, 0, 0, 0, 0, tail)

    @property
    def held(self) -> tuple[int, int]:
        """The number and the id of the transaction that is held."""
        return self.held_txn, self.held_id

    @property
    def end(self) -> tuple[int, int]:
        """Where the next writer continues, and the base offset of the batch that ends there."""
        return max((self.flushed_end, self.flushed_tail), (self.written_end, self.written_tail))

    @property
    def transactions(self) -> tuple[int, int, int, int]:
        """The facts about transactions that change with each step of one."""
        return self.applied_txn, self.applied_id, self.held_txn, self.held_id

    def durable_to(self, end: int, tail: int) -> Mark:
        """The mark when the log is flushed and durable up to `end`, and its last batch begins at `tail`."""
        return self._replace(flushed_end=end, flushed_tail=tail, durable_end=end, durable_tail=tail)

    def flushed_to(self, end: int, tail: int) -> Mark:
        """The mark when readers see up to `end`, where the batch at `tail` ends. The durable end stays."""
        return self._replace(flushed_end=end, flushed_tail=tail)

    def with_writer(self, epoch: int, nonce: int) -> Mark:
        """The mark as a publication of this writer."""
        return self._replace(writer_epoch=epoch, writer_nonce=nonce)

    def without_hold(self, *, applied: bool) -> Mark:
        """The mark when the transaction that is held is over. `applied`: the log has its records."""
        last = (self.held_txn, self.held_id) if applied else (self.applied_txn, self.applied_id)
        return self._replace(applied_txn=last[0], applied_id=last[1], held_txn=0, held_from=0, held_tail=0, held_id=0)

    def committed(self) -> Mark:
        """The mark without the transaction that is held, and without all that follows it."""
        if not self.held_txn or self.flushed_end <= self.held_from:
            return self
        durable_end, durable_tail = min((self.durable_end, self.durable_tail), (self.held_from, self.held_tail))
        return self._replace(
            flushed_end=self.held_from, flushed_tail=self.held_tail, durable_end=durable_end, durable_tail=durable_tail
        )


class WatermarkWriter(NotCopyable):
    """Publishes marks, alternately into the two slots."""

    def __init__(self, place: Directory, salt: int, last: Mark) -> None:
        self._files = place.files
        self._salt = salt
        self._path = place.path_of(NAME)
        self._fd = place.open_write(NAME)
        try:
            self._identity = place.files.identity(self._fd)
        except BaseException:
            self.close()
            raise
        self.mark = last

    def read(self) -> Mark | None:
        """The newest valid mark in the file, which another process may have written; None if neither slot is whole."""
        raw = self._files.read_at(self._fd, FILE_BYTES, 0)
        at = max((0, SECOND_SLOT), key=lambda slot: raw[slot + SEQUENCE_AT : slot + SEQUENCE_AT + 8][::-1])
        return _decode(raw, at, self._salt, self._path) or newest(raw, self._salt, self._path)

    @contextmanager
    def locked(self) -> Iterator[Mark]:
        """Keep other processes that publish into the file away. Yields the newest mark, which may be theirs.

        `LockedError` if one of them keeps the file, for example because it is stopped.
        """
        deadline = monotonic() + _PATIENCE_S
        try:
            while not self._files.try_lock(self._fd, self._path):
                if monotonic() > deadline:
                    advice = "a publication takes microseconds: is that process stopped?"
                    raise LockedError(self._path, "a process that publishes", advice=advice)
                time.sleep(_NAP_S)
            self.mark = self.read() or self.mark
            yield self.mark
        finally:
            try:
                self._files.unlock(self._fd)
            except BaseException:  # an interrupt, perhaps before it was unlocked: others must not wait for this process
                self._files.unlock(self._fd)
                raise

    def publish(self, mark: Mark) -> None:
        """Make the mark visible to readers. Handed to the system."""
        slot = SECOND_SLOT if mark.sequence & 1 else 0
        self._files.write_all(self._fd, [_encode(mark, self._salt)], slot)
        self.mark = mark

    def sync(self) -> None:
        """Make the last mark durable. Synced."""
        self._files.datasync(self._fd)

    def is_named(self, *, untimed: bool = False) -> bool:
        """True if the path, where readers look, leads to the open file. One lstat; `untimed` as in `Files.leads_to`."""
        return self._files.leads_to(self._path, self._identity, untimed=untimed)

    def fileno(self) -> int:
        """The descriptor of the open file, for a caller that closes it with others."""
        return self._fd

    def close(self) -> None:
        self._files.close(self._fd)


class WatermarkReader(NotCopyable):
    """Reads the current mark with one pread; keeps the file open between polls."""

    _fd = -1  # the default, for an object whose construction was interrupted

    def __init__(self, files: Files, path: str, salt: int) -> None:
        self._files = files
        self._path = path
        self._salt = salt
        self._fd = files.open_read(path)
        try:
            self._identity = files.identity(self._fd)
        except BaseException:
            self.close()
            raise
        self._last: tuple[bytes, Mark | None] = (b"", None)  # one attribute: threads may share the reader

    def read(self) -> Mark | None:
        """The newest valid mark, or None if neither slot is whole."""
        try:
            raw = self._files.read_at(self._fd, FILE_BYTES, 0)
        except OSError as error:
            raise StorageIOError(self._path, error, "reading the watermark") from error
        last = self._last
        if raw != last[0]:
            self._last = last = (raw, newest(raw, self._salt, self._path))
        return last[1]

    def is_whole(self) -> bool:
        """True if both slots were whole when they were read last. A slot that was not may have been the newer one."""
        return not broken_slots(self._last[0], self._salt, self._path)

    def has_next_mark(self) -> bool:
        """True if the slot that is due has the next publication, or cannot be read. One pread of 8 bytes."""
        last = self._last[1]
        if last is None:
            return True
        try:
            number = self._files.pread(self._fd, 8, SEQUENCE_AT + (0 if last.sequence & 1 else SECOND_SLOT))
        except OSError:  # `read` raises it
            return True
        return int.from_bytes(number, "little") > last.sequence

    def next_mark(self) -> Mark | None:
        """The publication after the one that was read last, or None: one pread of the slot that is due for it.

        A newer one may follow it, and a file that was written again may have news in the other slot. So call `read`
        before you wait.
        """
        before, last = self._last
        if last is None:
            return None
        at = 0 if last.sequence & 1 else SECOND_SLOT
        try:
            slot = self._files.pread(self._fd, SLOT_BYTES, at)
        except OSError:  # `read` raises it
            return None
        if int.from_bytes(slot[SEQUENCE_AT : SEQUENCE_AT + 8], "little") <= last.sequence:
            return None
        raw = before[:at] + slot + before[at + SLOT_BYTES :]
        mark = _decode(raw, at, self._salt, self._path)
        if mark is not None:
            self._last = (raw, mark)
        return mark

    def sync(self) -> None:
        """Make the mark that was read durable. Synced."""
        self._files.datasync(self._fd)

    def is_named(self) -> bool:
        """True if the path still leads to the open file. A restore or a new topic replaces the file."""
        return self._files.leads_to(self._path, self._identity)

    def __del__(self) -> None:  # not closed earlier, because another thread may be reading
        with suppress(OSError):  # no caller can get the error, and a reader loses nothing by it
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._files.close(fd)


def newest(raw: bytes, salt: int, path: str = NAME) -> Mark | None:
    """The valid slot with the higher sequence in the bytes of a watermark file.

    Raises `UnsupportedFormatError` if a whole slot has a newer version, and `CorruptLogError` if a whole slot
    contradicts itself.
    """
    marks = [mark for at in (0, SECOND_SLOT) if (mark := _decode(raw, at, salt, path)) is not None]
    return max(marks, default=None)


def broken_slots(raw: bytes, salt: int, path: str = NAME) -> list[int]:
    """The positions of the slots that are not whole in the bytes of a watermark file."""
    return [at for at in (0, SECOND_SLOT) if _decode(raw, at, salt, path) is None]


def encode_new(first: Mark, salt: int) -> bytes:
    """The content of a new watermark file: one mark in both slots, so that either slot may be lost."""
    slot = _encode(first, salt)
    return slot + bytes(SECOND_SLOT - SLOT_BYTES) + slot


def _encode(mark: Mark, salt: int) -> bytes:
    facts = _FACTS.pack(*mark)
    return b"".join((_START, crc32c(facts, crc32c(_START, salt)).to_bytes(4, "little"), facts))


def _decode(raw: bytes, at: int, salt: int, path: str) -> Mark | None:
    slot = raw[at : at + SLOT_BYTES]
    if len(slot) < SLOT_BYTES or slot[:3] != MAGIC:
        return None
    _, version, crc, *numbers = _SLOT.unpack(slot)
    if crc != crc32c(slot[8:], crc32c(slot[:4], salt)):
        return None
    if version > VERSION:
        raise UnsupportedFormatError(path, "watermark version", version, VERSION)
    if version < VERSION:
        raise CorruptLogError(path, at + 3, f"watermark version {version}", f"at least {VERSION}")
    mark: Mark = tuple.__new__(Mark, numbers)  # as `new_tuple` in record.py
    if not mark.log_start_offset <= mark.durable_end <= mark.flushed_end <= MAX_OFFSET:
        found = f"log start {mark.log_start_offset}, durable end {mark.durable_end}, flushed end {mark.flushed_end}"
        raise CorruptLogError(path, at, found, f"numbers in that order, up to {MAX_OFFSET}")
    if mark.flushed_tail > mark.flushed_end or mark.durable_tail > mark.durable_end:
        found = f"last batches at {mark.flushed_tail} and {mark.durable_tail}"
        raise CorruptLogError(path, at + 48, found, f"none above {mark.flushed_end} and {mark.durable_end}")
    if mark.held_txn and not max(mark.log_start_offset, mark.held_tail) <= mark.held_from <= MAX_OFFSET:
        found = f"transaction {mark.held_txn} held from offset {mark.held_from}, after a batch at {mark.held_tail}"
        raise CorruptLogError(path, at + 64, found, f"an offset from {mark.log_start_offset} on, after its last batch")
    if mark.sequence > MAX_OFFSET:  # with a flush per nanosecond it would take centuries to reach this limit
        raise CorruptLogError(path, at + 8, f"sequence {mark.sequence}", f"at most {MAX_OFFSET}")
    return mark
