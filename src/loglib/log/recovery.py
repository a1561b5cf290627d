"""Recovery: the steps of a writer on a partition before it appends, and what every reader may assume.

Invariant: recovery cuts only bytes that were never promised, and keeps a copy of them. Damage below the
durable end raises `CorruptLogError` and changes nothing. Recovery may crash at any point and be run again:
it overwrites bytes with the same bytes, cuts only bytes that it has copied, and publishes last.

    D = the largest of: the watermark's durable end, the base of the last segment, and the `durable_up_to`
        of any whole batch above
    p = the first offset, from D on, at which no valid batch begins

    p < D, or a segment missing, cut or swapped     corruption: raise, change nothing
    bytes above p                                   torn tail: copy aside, cut, continue
    zeros at the end of the file, above p           room for batches to come: cut, without a copy
    bytes in [D, p)                                 whole but never synced: write them again, then sync,
                                                    because after a failed fsync the page cache lies

It reads only the bytes above the watermark, and a few batch headers below it.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from functools import partial
from itertools import chain, count
from typing import NamedTuple

from ..errors import CorruptLogError, LogMovedError
from ..format.batch import stored_header
from ..format.chain import End, Jumps
from ..format.header import PRODUCERS, SECTION, SECTION_END, BadBatch, Header, Producer
from ..format.watermark import MOST_BYTES, Mark, encode_new, newest
from ..format.watermark import NAME as WATERMARK
from ..segment import (
    HEADER_BYTES,
    NO_TIMESTAMP,
    Identity,
    ProducerState,
    SegmentHeader,
    SegmentReader,
    parse_beside_name,
    parse_segment_name,
    read_producers,
    read_segment_header,
    segment_name,
)
from ..system.directory import Directory
from ..system.failures import is_full
from ..system.files import Files
from .search import jumps_at, likely_headers, proven_headers

logger = logging.getLogger("loglib")

QUARANTINE_BYTES = 64 << 20  # the most bytes of a torn tail that are copied aside; a tail is a few flushes long
_BLOCK_BYTES = 1 << 20
_LAST_EPOCH = (1 << 32) - 1
_PAGE_BYTES = 1 << 16  # the largest page size of any system


class Sections(NamedTuple):
    """The transactions whose records the log has. The fields are those of the watermark (format/watermark.py)."""

    applied_txn: int
    held_txn: int
    held_from: int
    held_tail: int
    applied_id: int = 0
    held_id: int = 0
    txn_store: int = 0

    @classmethod
    def of(cls, facts: Mark | SegmentHeader, held_tail: int) -> Sections:
        """The facts in a mark, or in the header of a segment."""
        return cls(
            facts.applied_txn, facts.held_txn, facts.held_from, held_tail, facts.applied_id, facts.held_id,
            facts.txn_store,
        )  # fmt: skip

    def after(self, header: Header) -> Sections:
        """The state after one more batch. A batch of a new transaction begins its section.

        A transaction begins in a log only after the one before it is done.
        """
        number, found = header.producer_sequence, self
        if not header.flags & SECTION:
            return self
        if number > max(self.applied_txn, self.held_txn):
            found = self.when_done()._replace(
                held_txn=number, held_from=header.base_offset, held_tail=header.previous_offset,
                held_id=header.producer_id,
            )  # fmt: skip
        if header.flags & SECTION_END and number == found.held_txn:
            found = found._replace(applied_txn=number, applied_id=found.held_id)
        return found

    def when_done(self) -> Sections:
        """The state after the transaction that is held, if there is one, is done."""
        number, txn_id = max((self.applied_txn, self.applied_id), (self.held_txn, self.held_id))
        return Sections(number, 0, 0, 0, txn_id, 0, self.txn_store)

    def within(self, first: int, end: int, last_batch: int, before: Callable[[int], int]) -> Sections:
        """The state of a log from `first` to `end`, where the batch at `last_batch` ends.

        `before` returns the base offset of the batch that ends at an offset. It is called if only the header of a
        segment has the hold.
        """
        if not self.held_txn:
            return self._replace(held_tail=0)
        if self.held_from < first:  # retention drops a section only when it is done
            return self.when_done()
        if self.held_from >= end:  # a power cut may have taken the batches before it
            return self._replace(held_from=end, held_tail=last_batch)
        return self._replace(held_tail=before(self.held_from)) if self.held_tail == UNKNOWN else self

    def progress(self) -> tuple[int, int]:
        """A value that grows with each step of each transaction: the older of two states has the smaller one."""
        return max(self.applied_txn, self.held_txn), self.applied_txn


def is_part(header: Header, number: int, txn_id: int) -> bool:
    """True if the batch is part of the transaction."""
    return bool(header.flags & SECTION) and (header.producer_id, header.producer_sequence) == (txn_id, number)


class Extent(Enum):
    """The extent of a transaction in a log."""

    NOTHING, PART, WHOLE = range(3)

    @classmethod
    def among(cls, headers: Iterable[Header], number: int, txn_id: int) -> Extent:
        """The extent of a transaction in these batches of a log."""
        parts = [each for each in headers if is_part(each, number, txn_id)]
        if not parts:
            return cls.NOTHING
        return cls.WHOLE if parts[-1].flags & SECTION_END else cls.PART


NO_SECTIONS = Sections(0, 0, 0, 0)
UNKNOWN = -1  # as `held_tail`: to be looked up


class Tail(NamedTuple):
    """The place where the next batch is written, and the facts about the log before it for its header."""

    end: int  # base offset of the next batch
    last_batch: int  # base offset of the batch before it; `end` if the log has none
    previous_crc: int
    append_time: int
    running_max_timestamp: int  # in the log
    segment_max_timestamp: int  # in the segment of the batch before
    writer_epoch: int  # of the previous writer
    jumps: Jumps | None = None  # of the last batch
    producers_in_segment: bool = False  # True if a batch before this in the segment names a producer
    records: int = 0  # appended by this writer so far
    sections: Sections = NO_SECTIONS  # found by recovery
    produced: tuple[tuple[Producer, range], ...] = ()  # of the last batches, if not yet noted

    @property
    def chain_end(self) -> End:
        """The end of the chain of batches."""
        return End(self.end, self.last_batch, self.previous_crc)


class Recovery(NamedTuple):
    """The findings and actions of a recovery; all zero after a clean close."""

    cut_bytes: int  # bytes of a torn tail, cut off
    rewritten_bytes: int  # bytes of whole but unsynced batches, written again
    quarantine: str | None  # the file that keeps the cut bytes
    watermark_lost: bool  # neither slot was whole: the last segment was scanned instead

    @property
    def clean(self) -> bool:
        """True if there was nothing to repair."""
        return not (self.cut_bytes or self.rewritten_bytes or self.watermark_lost)


class Recovered(NamedTuple):
    """A partition that is ready for appending."""

    headers: dict[int, SegmentHeader]  # by base offset
    tail: Tail
    mark: Mark  # as on disk
    report: Recovery
    producers: tuple[ProducerState, ...]  # before the last segment


def list_segments(files: Files, directory: str) -> dict[int, int]:
    """Base offset and file size in bytes of each segment, in order of offset.

    `LogMovedError` if the directory and its parent are gone.
    """
    try:
        if not files.is_directory(directory):  # through a planted link, the writer would lock and write elsewhere
            raise _no_directory(directory)
        return _segments_of(files.sizes(directory))
    except FileNotFoundError as error:
        if not files.exists(os.path.dirname(directory)):
            raise LogMovedError(os.path.dirname(directory), "was moved or removed") from error
        raise CorruptLogError(directory, 0, "no directory", "that of a partition") from error


def _no_directory(path: str) -> CorruptLogError:
    return CorruptLogError(path, 0, "something else", "a directory, and no link to one")


def _segments_of(found: dict[str, int]) -> dict[int, int]:
    sizes = {parse_segment_name(name): size for name, size in found.items()}
    return {base: sizes[base] for base in sorted(base for base in sizes if base is not None)}


def segment_sizes(directory: Directory) -> dict[int, int]:
    """Base offset and file size in bytes of each segment in an open directory, in order of offset."""
    return _segments_of(directory.sizes())


def segment_reader(directory: Directory, identity: Identity, base: int) -> SegmentReader:
    """Open a segment of an open directory."""
    return SegmentReader(directory.files, directory.path_of(segment_name(base)), identity, within=directory)


def load_headers(directory: Directory, segments: dict[int, int], identity: Identity) -> dict[int, SegmentHeader]:
    """The headers of the segments. Each follows the one before, without a gap."""
    headers: dict[int, SegmentHeader] = {}
    previous: SegmentHeader | None = None
    for base in segments:
        path = directory.path_of(segment_name(base))
        header = read_segment_header(directory.files, path, identity, within=directory)
        if previous is not None:
            check_link(path, header, previous.base_offset, segments[previous.base_offset] - HEADER_BYTES)
        headers[base] = previous = header
    return headers


def check_link(path: str, header: SegmentHeader, previous_base: int, previous_bytes: int) -> None:
    """Check that the segment follows the previous segment in the directory."""
    if header.previous_base_offset != previous_base or header.previous_bytes != previous_bytes:
        raise CorruptLogError(
            path,
            56,
            f"before it, a segment of {previous_bytes} bytes at offset {previous_base}",
            f"one of {header.previous_bytes} bytes at offset {header.previous_base_offset}",
        )
    if header.previous_base_offset + header.previous_bytes != header.base_offset:
        raise CorruptLogError(path, 40, f"base offset {header.base_offset}", "the end of the segment before")


def proven_end(reader: SegmentReader) -> tuple[int, int]:
    """The durable end that the last segment proves without a watermark, and the last batch below that end."""
    end, tail = reader.base_offset, reader.header.previous_batch
    later: deque[tuple[int, int]] = deque()  # (base, end) of the batches that are not known to be durable
    for header in proven_headers(reader, reader.base_offset, reader.end_of_file()):
        later.append((header.base_offset, header.next_offset))
        end = max(end, header.durable_up_to)
        while later and later[0][1] <= end:
            tail = later.popleft()[0]
    return end, tail


def recover(directory: Directory, identity: Identity, permissions: int) -> Recovered:
    """Make appending to the partition safe. The caller holds the writer lock of the directory."""
    _check_place(directory)
    directory.make_own(WATERMARK)
    mark = read_mark(directory, identity)
    found = segment_sizes(directory)
    _detach_last(directory, found)
    log_start = 0 if mark is None else mark.log_start_offset  # segments below it were given up before a crash
    segments = {base: size for base, size in found.items() if base >= log_start}
    if not segments:
        raise CorruptLogError(directory.path, 0, "no segment", "at least one: a partition is made with one")
    headers = load_headers(directory, segments, identity)
    producers = read_producers(directory.files, directory.path, headers[max(segments)], within=directory)
    first, last = min(segments), max(segments)
    if mark is not None and first != mark.log_start_offset:
        raise CorruptLogError(directory.path, 0, f"a first segment at {first}", f"one at {mark.log_start_offset}")
    with segment_reader(directory, identity, last) as reader:
        durable_end, tail = measure(reader, mark)
        valid_end = tail.end
        torn_bytes = reader.end_of_data(valid_end) - valid_end
        behind_bytes = reader.end_of_file() - valid_end
        before = partial(_batch_before, directory, identity, segments)
        sections = tail.sections.within(first, valid_end, tail.last_batch, before)
    if max(tail.writer_epoch, mark.writer_epoch if mark else 0) == _LAST_EPOCH:
        path = directory.path_of(WATERMARK)
        raise CorruptLogError(path, 40, f"writer epoch {_LAST_EPOCH}", "one that the next writer's may follow")
    quarantine = None
    if behind_bytes or valid_end != durable_end:
        quarantine = _mend(directory, reader, durable_end=durable_end, valid_end=valid_end, torn_bytes=torn_bytes)
    remove_others(directory, segments)
    directory.sync()
    # What another process has written, and has yet to flush, is written again, too; nothing went wrong with it.
    is_as_left = mark is not None and not torn_bytes and mark.flushed_end < mark.written_end == valid_end
    report = Recovery(torn_bytes, 0 if is_as_left else valid_end - durable_end, quarantine, mark is None)
    if not report.clean:
        logger.warning(
            "%s: recovered; cut %d bytes of a torn tail%s, wrote %d unsynced bytes again%s",
            directory.path,
            report.cut_bytes,
            f" (kept in {quarantine})" if quarantine else "",
            report.rewritten_bytes,
            ", rebuilt the watermark" if report.watermark_lost else "",
        )
    if mark is not None:
        # With durability "os" readers may have seen more than the disk has kept.
        if mark.flushed_end > valid_end:
            mark = mark.flushed_to(valid_end, tail.last_batch)
        return Recovered(headers, tail, mark._replace(**sections._asdict()), report, producers)
    mark = Mark.at_rest(1, first, valid_end, tail.last_batch)._replace(**sections._asdict())
    rebuild_watermark(directory, identity, permissions, mark)
    return Recovered(headers, tail, mark, report, producers)


def remove_others(directory: Directory, bases: Collection[int]) -> bool:
    """Remove other segments than these, files whose segment is gone, and half-made files. True if there were any."""
    removed, known = False, {None, *bases}
    for name in directory.names():
        base = parse_segment_name(name)
        if base is None:
            base = parse_beside_name(name)
        strange = base not in known or name.endswith(".tmp")
        if strange and not directory.is_directory(name):  # loglib makes no such directory
            directory.unlink(name)
            removed = True
    return removed


def tail_at(reader: SegmentReader, end: int, last_batch: int) -> Tail:
    """The tail of a log that ends at `end`, from the last batch before it."""
    if end == reader.base_offset:
        return _tail_before(reader)
    last = reader.header_at(last_batch)
    if last.next_offset != end:
        reader.corrupt(last.base_offset, f"a batch that ends at offset {last.next_offset}", f"one that ends at {end}")
    return _tail_after(last, reader)


def _tail_before(reader: SegmentReader) -> Tail:
    """The tail of a log whose last segment has no batch."""
    header = reader.header
    sections = Sections.of(header, UNKNOWN)
    return Tail(
        header.base_offset, header.previous_batch, header.previous_crc, header.last_append_time,
        header.running_max_timestamp, NO_TIMESTAMP, header.writer_epoch, sections=sections,
    )  # fmt: skip


def _tail_after(last: Header, reader: SegmentReader) -> Tail:
    running_max = max(reader.header.running_max_timestamp, last.running_max_timestamp)
    return Tail(
        last.next_offset, last.base_offset, last.header_crc, last.append_time, running_max, last.running_max_timestamp,
        last.writer_epoch, producers_in_segment=bool(last.flags & PRODUCERS),
    )  # fmt: skip


def _batch_before(directory: Directory, identity: Identity, segments: dict[int, int], offset: int) -> int:
    """Base offset of the batch that ends at the offset; the offset itself if there is none."""
    base = max(each for each in segments if each <= offset)
    with segment_reader(directory, identity, base) as reader:
        return reader.header.previous_batch if offset == base else reader.header_at(offset).previous_offset


def _check_place(directory: Directory) -> None:
    """Check that the directory is still at its path. Readers would not find records in a moved one."""
    if not directory.is_named():
        if directory.files.exists(directory.path) and not directory.files.is_directory(directory.path):
            raise _no_directory(directory.path)
        raise LogMovedError(directory.path, "was moved or removed while it was being opened")


def detach(directory: Directory) -> None:
    """Make the watermark and the last segment files of this directory alone.

    In a copy made of hard links (`cp -al`) they are files of the original, too, where a writer may be at work. The
    watermark is copied first: then the copy of the segment has all that it promises. Sealed segments stay shared, and
    are copied before something writes into them.
    """
    directory.make_own(WATERMARK)
    _detach_last(directory, segment_sizes(directory))


def _detach_last(directory: Directory, segments: Collection[int]) -> None:
    if segments:
        directory.make_own(segment_name(max(segments)))


def read_mark(directory: Directory, identity: Identity) -> Mark | None:
    """The mark of the log in an open directory; None if it is lost."""
    if not directory.exists(WATERMARK):
        return None
    return newest(directory.read_whole(WATERMARK, MOST_BYTES), identity.salt, directory.path_of(WATERMARK))


def measure(reader: SegmentReader, mark: Mark | None) -> tuple[int, Tail]:
    """D of the last segment and the tail at p, as the module's table defines them; `CorruptLogError` if p < D."""
    end_of_file = reader.end_of_file()
    durable_end, last_batch = proven_end(reader) if mark is None else (mark.durable_end, mark.durable_tail)
    durable_end = max(reader.base_offset, durable_end)
    if end_of_file < durable_end:
        position = reader.file_position(end_of_file)
        raise CorruptLogError(reader.path, position, "the end of the file", f"data up to offset {durable_end}")
    start = _tail_before(reader) if mark is None else tail_at(reader, durable_end, last_batch)
    if mark is not None:
        known = Sections.of(mark, mark.held_tail)
        start = start._replace(sections=max(known, start.sections, key=Sections.progress))
    tail, fault = valid_prefix(reader, start, end_of_file)
    while fault is not None and _were_durable(reader, mark, tail.end, end_of_file):
        # The log may be alive: these were zeros, and two batches were written there before the later one was read.
        before, reason = tail, fault
        tail, fault = valid_prefix(reader, before, end_of_file)
        if tail.end == before.end:
            raise reason
    if tail.end > reader.base_offset:
        tail = tail._replace(jumps=jumps_at(reader, tail.last_batch))
    return durable_end, tail


def _were_durable(reader: SegmentReader, mark: Mark | None, at: int, end: int) -> bool:
    """True if a later batch proves that the bad bytes at offset `at` were durable: corruption, and no torn tail."""
    later = proven_headers(reader, at, end)
    if mark is None:
        later = chain(later, likely_headers(reader, at, end))
    return any(header.durable_up_to > at for header in later)


def valid_prefix(reader: SegmentReader, tail: Tail, end: int) -> tuple[Tail, CorruptLogError | None]:
    """The tail after the last whole batch of the chain that continues at `tail`, and the fault after it, if any."""
    while tail.end < end:
        try:
            for batch in reader.batches(tail.end, end, block_bytes=_BLOCK_BYTES):
                header = stored_header(batch)
                tail.chain_end.check(header)
                tail = _tail_after(header, reader)._replace(sections=tail.sections.after(header))
        except BadBatch as error:
            return tail, error.in_file(reader.path, reader.file_position(tail.end))
        except CorruptLogError as error:
            return tail, error
    return tail, None


def _mend(
    directory: Directory, reader: SegmentReader, *, durable_end: int, valid_end: int, torn_bytes: int
) -> str | None:
    """Copy the torn tail aside, cut it, write the unsynced batches again and sync; returns the path of the copy.

    Zeros after the tail are cut as well, and are not copied.
    """
    quarantine = None
    files, name = directory.files, segment_name(reader.base_offset)
    fd = directory.open_write(name)
    try:
        start = reader.file_position(valid_end)
        if torn_bytes:
            quarantine = _keep_aside(directory, name, start, min(torn_bytes, QUARANTINE_BYTES))
        if files.size(fd) > start:
            files.ftruncate(fd, start)
        rewrite(files, fd, reader.file_position(durable_end), reader.file_position(valid_end))
    finally:
        files.close(fd)
    return quarantine


def rewrite(files: Files, fd: int, start: int, end: int) -> None:
    """Overwrite bytes [start, end) of the file with the same bytes, and sync them.

    A second fsync after a failed one succeeds without writing anything. Only pages that are dirtied again are
    written. They must not be the same pages: ext4 treats pages that it failed to write as written, and never
    records that their blocks hold data. Such blocks read as zeros after a restart. So whole pages are read and
    dropped from the cache before they are written. A crash in between is harmless, and so is a repetition, since
    equal bytes go to the same place.
    """
    while start < end:
        block_end = min(end, _whole_pages(start + _BLOCK_BYTES))
        block = files.read_at(fd, block_end - start, start)
        if len(block) < block_end - start:
            raise OSError(errno.EIO, "the file ended early")
        first_page = start - start % _PAGE_BYTES
        files.drop_cached(fd, first_page, _whole_pages(block_end) - first_page)
        files.write_all(fd, [block], start)
        start = block_end
    files.datasync(fd)


def _whole_pages(position: int) -> int:
    """The position, rounded up to the end of a page."""
    return -(-position // _PAGE_BYTES) * _PAGE_BYTES


def _keep_aside(directory: Directory, name: str, start: int, size_bytes: int) -> str | None:
    """Keep a torn tail, if the disk has room. An earlier crash at the same place may have left a copy."""
    try:
        return copy_aside(directory, name, start, size_bytes, word="torn", replaces=True)
    except OSError as error:
        if not is_full(error):
            raise
        path = directory.path_of(name)
        logger.warning("%s: no room to keep %d bytes of a torn tail aside; they are cut", path, size_bytes)
        return None


def copy_aside(
    directory: Directory,
    name: str,
    start: int,
    size_bytes: int,
    *,
    word: str = "damaged",
    replaces: bool = False,
    shares: bool = False,
) -> str:
    """Copy bytes that are about to be overwritten or cut into `<name>.<word>-<start>`, and return the copy's path.

    The copy and its name are synced; a copy that fails leaves no file. The name of a segment loses its `.log`. A second
    copy gets a number after its name, unless it `replaces` the first. A copy that `shares` the disk's blocks, where the
    file system can do that, takes no time for whole segments.
    """
    files = directory.files
    stem = f"{name.removesuffix('.log')}.{word}-{start}"
    names = chain([stem], (f"{stem}.{number}" for number in count(2)))
    kept = stem if replaces else next(each for each in names if not directory.exists(each))
    source = directory.open_read(name)
    try:
        copy = directory.create(kept, 0o600, exclusive=not replaces)
        try:
            if replaces:
                files.ftruncate(copy, 0)
            copy_range = files.share_range if shares else files.copy_range
            copy_range(source, copy, start=start, end=min(start + size_bytes, files.size(source)), at=0)
            files.datasync(copy)
        except OSError:
            directory.unlink(kept)
            raise
        finally:
            files.close(copy)
    finally:
        files.close(source)
    directory.sync()
    return directory.path_of(kept)


def rebuild_watermark(directory: Directory, identity: Identity, permissions: int, mark: Mark) -> None:
    """Write the mark into both slots, in place, so that readers with the file open see it. Synced."""
    fd = directory.create(WATERMARK, permissions, exclusive=False)
    directory.files.fill(fd, encode_new(mark, identity.salt))
    directory.sync()
