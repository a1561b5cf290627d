"""Cursor: a place in a log, from which it is read block by block.

Invariant: the position is the base offset of a batch, or an end of the log. Each returned batch names the CRC of the
batch returned before it, or comes after damage that was reported.

If the files are replaced while a cursor reads, it continues in the same log, or raises `LogMovedError`. Damage is an
error, or with `on_damage` a gap: offsets are places, so reading continues at the next place that a batch names as its
own. A gap that a repair has declared is always skipped. If the log has donors, these other copies are asked first for
the batches that are damaged or declared as lost (donors.py).

Threads: a cursor belongs to one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from ..errors import CorruptLogError, InvalidOffsetError, LogError, LogMovedError, OffsetOutOfRangeError
from ..format.batch import Batch, stored_header
from ..format.header import HEADER_BYTES
from ..format.record import Damage
from ..segment import SegmentReader
from ..system.not_copyable import NotCopyable
from .bundle_reader import Bundle
from .gaps import Gap
from .log import Log

if TYPE_CHECKING:  # loaded when a log has donors
    from .donors import Donors

logger = logging.getLogger("loglib")

# The size of one read: a few batches, to spread the cost of the call, but small enough for the L2 cache.
BLOCK_BYTES = 1 << 20
_FEW = 16  # batches of a block; with fewer, a batch that is read in part would be a large part of the block
_MANY = 64  # batches of a block; from here on they are read as a bundle: NumPy's calls cost as much as ten batches
_WORTH_IMPORT = 8192  # batches; reading them one by one takes as long as the import of NumPy

Piece = Batch | Bundle
P = TypeVar("P", bound=Piece)
_NEWS_BYTES = 1 << 16  # reading more takes longer than `read_news` saves


class BorrowedRange(NamedTuple):
    """Damaged or lost offsets whose batches a reader got from another copy of the topic."""

    partition: int
    offsets: range
    path: str  # of the damaged file
    found: str  # the damage, as a text
    donor: str  # the directory of the partition in the other copy

    def __str__(self) -> str:
        offsets = f"offsets [{self.offsets.start}, {self.offsets.stop})"
        return f"{self.path}: {offsets} are read from {self.donor}: found {self.found}"


class Cursor(NotCopyable):
    """A place in a log, from which it is read block by block."""

    def __init__(
        self,
        log: Log,
        position: int,
        *,
        on_damage: Callable[[Damage], object] | None = None,
        on_gap: Callable[[Damage], object] | None = None,
        on_lent: Callable[[BorrowedRange], object] | None = None,
    ) -> None:
        self.log = log
        self.position = position  # base offset of the next batch to read
        self._skip_before = 0  # the first wanted record in that batch
        self._on_damage = on_damage  # gets damage, and reading continues after it; None: damage is an error
        self._on_gap = on_gap or on_damage  # gets the declared gaps
        self._on_lent = on_lent  # gets what was read from a donor; None: donors are not asked
        self._donors: Donors | None = None
        if on_lent is not None and log.donors:
            from .donors import Donors

            self._donors = Donors(log.files, log.donors, log.identity)
        # The end and the CRC of the batch read last. After an interrupt the end may differ from the position.
        self._last_read: tuple[int, int] | None = None
        self._segment: SegmentReader | None = None
        self._block_bytes = BLOCK_BYTES
        self._small: bool | None = None  # True if the next block may have many small batches; None: nothing is read yet
        self._alone = 0  # the number of small batches that were read one by one
        self._restored = log.restored  # its value when the segment was opened

    @classmethod
    def at(
        cls,
        log: Log,
        offset: int,
        *,
        on_damage: Callable[[Damage], object] | None = None,
        on_gap: Callable[[Damage], object] | None = None,
        on_lent: Callable[[BorrowedRange], object] | None = None,
    ) -> Cursor:
        """A cursor at a record's offset, or at the flushed end. With `on_damage` it reads past damage."""
        cursor = cls(log, offset, on_damage=on_damage, on_gap=on_gap, on_lent=on_lent)
        cursor.seek(offset)
        return cursor

    @property
    def offset(self) -> int:
        """The offset of the next record."""
        return max(self.position, self._skip_before)

    def close(self) -> None:
        self.leave()
        if self._donors is not None:
            self._donors.close()

    def leave(self) -> bool:
        """Close the segment until the next block is read; False if none is open."""
        if self._segment is None:
            return False
        self._segment.close()
        self._segment = None
        return True

    def read(self, limit: int) -> list[Batch]:
        """The next batches below `limit` (usually the flushed end): those in one block of the file.

        An empty list means that there are no batches below the limit. Raises `OffsetOutOfRangeError` if
        retention has overtaken the cursor, and `CorruptLogError` for damaged data. If a restore has put an
        older state of the log in place, it raises `OffsetOutOfRangeError`, or `LogMovedError` if that state
        has since continued with other records.
        """
        return self._read_on(self._batches, limit)

    def read_pieces(self, limit: int) -> list[Piece]:
        """The records of `read`. A block of many small batches comes as one bundle, which is ten times cheaper."""
        return self._read_on(self._pieces, limit)

    def _read_on(self, read: Callable[[SegmentReader, int, int], list[P]], limit: int) -> list[P]:
        while True:
            if self._restored != self.log.restored:
                limit = self._check_restored(limit)
            try:
                return self._read(read, limit)
            except CorruptLogError as error:
                self.log.check_moved(patient=False)  # files that were replaced look like damage
                if self._restored != self.log.restored:
                    continue
                if self._donors is not None and (lent := self._borrow(self._donors, error, limit)) is not None:
                    if lent:
                        return cast(list[P], lent)
                    continue
                gap = self.log.gap_at(self.position)
                if gap is not None:
                    self._skip_gap(gap)
                    continue
                if self._on_damage is None:
                    raise
                self._pass_over(error, limit)

    def read_news(self) -> Batch | None:
        """The next batch, if it is small and all that was published since the last read; else None, and `read` looks.

        A follower that waits for each record gets it this way in few steps. Every check of `read` is made. Any unusual
        case gives None.
        """
        segment, last_read, log, position = self._segment, self._last_read, self.log, self.position
        if segment is None or last_read is None or last_read[0] != position or self._restored != log.restored:
            return None
        mark = log.next_mark()
        if mark is None or not 0 < mark.flushed_end - position <= _NEWS_BYTES:
            return None
        batch = segment.only_batch(position, mark.flushed_end, previous_crc=last_read[1])
        if batch is not None:
            self.position = mark.flushed_end
            self._last_read = mark.flushed_end, stored_header(batch).header_crc
        return batch

    def _check_restored(self, limit: int) -> int:
        """Continue at the same batch in the files that replaced those that were read.

        The batch there must follow the batch read last: a restored log may have continued with other records.
        Returns the limit, or the flushed end if no batch of the restored log ends at the limit.
        """
        log, position, restored, mark = self.log, self.position, self.log.restored, self.log.mark()
        self.close()
        try:
            same = log.batch_base(position, mark, past_damage=self._on_damage is not None) == position
        except InvalidOffsetError:
            same = False
        if same and position < mark.flushed_end and self._last_read is not None:
            with log.open_segment(position, past_damage=True) as segment:
                link = self._link_at(position, segment, mark.flushed_end)
                same = self._last_read[0] != position or link in (None, self._last_read[1])
        if not same:
            raise LogMovedError(log.directory, f"was restored; what was read up to {position} is not in it")
        self._restored = restored
        with suppress(OffsetOutOfRangeError, InvalidOffsetError):
            if log.batch_base(limit, mark) == limit:
                return limit
        return mark.flushed_end

    def _read(self, read: Callable[[SegmentReader, int, int], list[P]], limit: int) -> list[P]:
        looked_again = False
        while self.position < limit:
            segment = self._segment
            if segment is None:
                segment = self._segment = self._open()
            end = self.log.index.after(segment.base_offset)
            if end is not None and self.position >= end:
                self.leave()
                continue
            stop = limit if end is None else min(limit, end)
            if pieces := read(segment, stop, limit):
                return pieces
            self.log.check_not_dropped(self.position)  # otherwise the index has lost this segment's end
            if looked_again:
                position = segment.file_position(self.position)
                raise CorruptLogError(segment.path, position, "the end of the file", f"data up to offset {stop}")
            self.log.refresh()  # the writer may have rolled since the last look
            looked_again = True
        # A reader that waits here must not keep what retention has dropped: the disk has no room until it is closed.
        if self._segment is not None and self._segment.base_offset < self.log.published().log_start_offset:
            self.leave()
        return []

    def _pieces(self, segment: SegmentReader, stop: int, limit: int) -> list[Piece]:
        if self._small is None and Bundle.costs_no_import():
            with suppress(CorruptLogError):  # reading meets it again
                self._small = segment.header_at(self.position).length <= BLOCK_BYTES // _MANY
        bundle = self._bundle(segment, stop, limit) if self._small else None
        return [*self._batches(segment, stop, limit)] if bundle is None else [bundle]

    def _bundle(self, segment: SegmentReader, stop: int, limit: int) -> Bundle | None:
        """The small batches of the next block; None if they are few, or in any unusual case."""
        bundle = Bundle.read(segment, self.position, stop, block_bytes=BLOCK_BYTES)
        if bundle is None or len(bundle.facts.positions) < _MANY or not self._is_linked(bundle, segment, limit):
            return None
        begin, self.position = self.position, bundle.next_offset
        self._last_read = self.position, bundle.facts.last_crc
        return bundle.between(self._skip_before, self.position) if self._skip_before > begin else bundle

    def _is_linked(self, bundle: Bundle, segment: SegmentReader, limit: int) -> bool:
        """True if the bundle follows the batch read last, and the next batch follows the bundle."""
        last_read = self._last_read
        if last_read is not None and last_read[0] == self.position and last_read[1] != bundle.facts.previous_crc:
            return False
        return self._link_at(bundle.next_offset, segment, limit) in (None, bundle.facts.last_crc)

    def _batches(self, segment: SegmentReader, stop: int, limit: int) -> list[Batch]:
        """The batches of the next block."""
        batches = segment.batches(self.position, stop, block_bytes=self._block_bytes)
        if not batches:
            return []
        self._check_chain(batches, segment, limit)
        used = stored_header(batches[-1]).next_offset - self.position
        self.position += used
        self._block_bytes = self._next_block(len(batches), used, segment)
        self._small = False
        if len(batches) >= _MANY:
            self._alone += len(batches)
            self._small = self._alone >= _WORTH_IMPORT or Bundle.costs_no_import()
        if self._skip_before > stored_header(batches[0]).base_offset:
            batches[0] = batches[0].between(self._skip_before, self.position)
        return batches

    def _next_block(self, batches: int, used: int, segment: SegmentReader) -> int:
        """The size of the next read, after one of `batches` in `used` bytes. It should end where a batch ends."""
        if batches > _FEW or used <= BLOCK_BYTES // 2:
            return BLOCK_BYTES
        if batches == 1 and used // 2 < (length := segment.length_after(self.position)) <= 2 * used:
            return length + HEADER_BYTES  # the next batch, and the header after it
        return used + used // _FEW  # as many batches, which have similar sizes

    def seek(self, offset: int) -> None:
        """Go to a record's offset or the flushed end. Raises the errors of `Log.batch_base`."""
        past_damage = self._on_damage is not None or self._donors is not None
        position = self.log.batch_base(offset, self.log.mark(), past_damage=past_damage)
        self.place = position, offset
        self._restored = self.log.restored

    @property
    def place(self) -> tuple[int, int]:
        """The place to which the cursor can go back: the batch, and the first wanted record in it."""
        return self.position, self._skip_before

    @place.setter
    def place(self, place: tuple[int, int]) -> None:
        self.close()
        (self.position, self._skip_before), self._last_read = place, None

    def _open(self) -> SegmentReader:
        try:
            return self.log.open_segment(self.position)
        except CorruptLogError as error:
            if self._on_damage is None:
                raise
            segment = self.log.open_segment(self.position, past_damage=True)
            self._report(error, range(0))
            return segment

    def _check_chain(self, batches: list[Batch], segment: SegmentReader, limit: int) -> None:
        """Drop or refuse a whole batch of another history.

        If the disk has lost a write, bytes from before a crash are visible. They may hold a batch that fits its place,
        but the next batch does not follow it.
        """
        last_read, headers = self._last_read, [stored_header(each) for each in batches]
        before = last_read[1] if last_read is not None and last_read[0] == self.position else None
        last = headers[-1]
        ends = [before, *[each.header_crc for each in headers]]
        links = [*[each.previous_crc for each in headers], self._link_at(last.next_offset, segment, limit)]
        if ends[1:-1] == links[1:-1] and ends[0] in (None, links[0]) and links[-1] in (None, ends[-1]):
            self._last_read = last.next_offset, last.header_crc
            return
        wrong = [
            index
            for index, (end, link) in enumerate(zip(ends, links, strict=True))
            if None not in (end, link) and end != link
        ]
        index = wrong[0]
        strange = index if index + 1 in wrong else index - 1  # -1: it was returned before the next batch was flushed
        if strange > 0:
            del batches[strange:]
            self._last_read = batches[-1].next_offset, stored_header(batches[-1]).header_crc
            return
        found = f"a batch that follows one with CRC {links[index]:08x}"
        position = segment.file_position(stored_header(batches[0]).base_offset)
        error = CorruptLogError(segment.path, position, found, f"{ends[index]:08x}, the CRC of the batch before")
        if strange == 0 or self._on_damage is None:
            raise error
        self._report(error, range(0))
        self._last_read = None
        self._check_chain(batches, segment, limit)

    def _link_at(self, offset: int, segment: SegmentReader, limit: int) -> int | None:
        """The CRC of the batch that the batch at `offset` follows; None if that one is missing or bad."""
        if offset >= limit:
            return None
        with suppress(LogError):  # reading meets it again later
            if self.log.index.after(segment.base_offset) != offset:
                return segment.header_after(offset).previous_crc
            with self.log.open_segment(offset, past_damage=True) as following:
                return following.header_at(offset).previous_crc
        return None

    def _pass_over(self, error: CorruptLogError, limit: int) -> None:
        """Continue after the damage."""
        start = self.position
        self.position = self.log.after_damage(start, limit)
        self._last_read = None
        self._report(error, range(start, self.position))

    def _borrow(self, donors: Donors, error: CorruptLogError, limit: int) -> list[Batch] | None:
        """A donor's batches for the first of those that are damaged here; None if the donors do not have all of them.

        The list is empty if all of these batches are before the first wanted record.
        """
        from .donors import named_end

        start, last_read = self.position, self._last_read
        before = last_read[1] if last_read is not None and last_read[0] == start else None
        lent = donors.lend(self.log, range(start, named_end(self.log, start, limit)), before=before)
        if lent is None:
            return None
        batches, donor = lent
        last = stored_header(batches[-1])
        self.position, self._last_read = last.next_offset, (last.next_offset, last.header_crc)
        assert self._on_lent is not None
        self._on_lent(BorrowedRange(self.log.partition, range(start, self.position), error.path, error.found, donor))
        batches = [each for each in batches if each.next_offset > self._skip_before]
        return [each.between(self._skip_before, self.position) for each in batches[:1]] + batches[1:]

    def _skip_gap(self, gap: Gap) -> None:
        """Continue after a declared gap. A repair may have restored its first batches."""
        gap = gap._replace(start=self.position)
        self.position, self._last_read = gap.end, None
        if self._on_gap is not None:
            self._on_gap(gap.as_damage(self.log.partition, self.log.directory))
        else:
            logger.warning("%s: skipped the gap [%d, %d)", self.log.directory, gap.start, gap.end)

    def _report(self, error: CorruptLogError, offsets: range) -> None:
        assert self._on_damage is not None
        self._on_damage(Damage.of(error, self.log.partition, offsets))


def has_records(log: Log, start: int, end: int) -> bool:
    """True if a record of the offsets [start, end) can be read. A batch begins at `start`; it may be damaged."""
    met: list[Damage] = []
    with closing(Cursor(log, start, on_damage=met.append)) as cursor:
        return start < end and bool(cursor.read(end))
