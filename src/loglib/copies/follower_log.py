"""Follower log: the log of a copy, open to be continued with the bytes of its source.

Invariant: the mark of the copy promises only bytes that were checked, written and synced here. When the log is opened,
whole batches after the mark are kept, and the bytes after them are cut, even if a later batch says that they were
durable: that is true of the source. They may not have been synced, and may not have been acknowledged. Promised records
are removed only after they are set aside and the mark is lowered.

    append        bytes of whole checked batches: handed to the system
    pull          the same bytes straight from the file of a writer in this process, which has just written them
    begin         the next segment, with the source's header: synced
    sync          all appended bytes: durable; sync_soon: the same, while more is appended
    publish       the mark: visible to readers of the copy
    set_epoch     the log is that of a writer; set_epoch_floor: no writer with a lower epoch may write here
    cut           records that the source does not have: set aside, then no longer promised, then removed

Threads: one, and a helper that syncs for it; the functions have no state. Processes: the object holds the lock of the
log's directory until `close`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

from ..append.work_ahead import WorkAhead
from ..errors import CorruptLogError
from ..format.batch import stored_header
from ..format.chain import End
from ..format.header import Header
from ..format.watermark import MOST_BYTES, Mark, WatermarkWriter, broken_slots, encode_new
from ..format.watermark import NAME as WATERMARK
from ..log.pending_marks import is_held, settled
from ..log.recovery import (
    Sections,
    Tail,
    copy_aside,
    detach,
    load_headers,
    read_mark,
    remove_others,
    rewrite,
    segment_reader,
    segment_sizes,
    tail_at,
    valid_prefix,
)
from ..segment import (
    HEADER_BYTES,
    Identity,
    SegmentHeader,
    SegmentReader,
    create_segment,
    producers_name,
    segment_name,
)
from ..system import lock
from ..system.directory import Directory
from ..system.files import Files
from ..system.not_copyable import NotCopyable

_BLOCK_BYTES = 1 << 20


class FollowerLog(NotCopyable):
    """A log whose bytes are those of another directory, up to its end.

    Construction makes it whole again after a crash. `LockedError` if another process writes it; `CorruptLogError` if
    it has less than its mark promises, and then nothing is changed. `promised` is the log's pending mark, if there is
    one. `held` is the lock, if the caller has it already; the log releases it. Without `shows`, whole batches after the
    mark are kept and not published: they may not be acknowledged. Without `keeps_held`, records that the mark holds for
    log/pending_marks.py are cut, if they are not in `promised`.
    """

    def __init__(
        self, files: Files, path: str, identity: Identity, permissions: int, *, promised: Mark | None = None,
        held: lock.Lock | None = None, shows: bool = True, keeps_held: bool = False,
    ) -> None:  # fmt: skip
        self._files = files
        self.path = path
        self.identity = identity
        self._permissions = permissions
        self._fd = -1  # of the last segment; -1: it is opened by its next use
        self._watermark: WatermarkWriter | None = None  # opened by its next use, too
        self._syncer: WorkAhead[tuple[int, End], End] | None = None  # at work on one sync, or none
        self._failure: OSError | None = None  # of a sync: after it the page cache cannot be trusted
        self._shows, self._keeps_held = shows, keeps_held
        self.held = held or lock.acquire(files, path, permissions)
        self.place = self.held.directory
        try:
            self._open(promised)
        except BaseException:
            self.close()
            raise

    def _open(self, promised: Mark | None) -> None:
        detach(self.place)
        place, mark = self.place, read_mark(self.place, self.identity)
        if mark is None and promised is not None:
            self._write_mark_file(promised)
            mark = promised
        elif mark is not None:
            mark = self._settle(mark, promised)
        if mark is None:  # it was lost: it is made from the last segment
            sizes = segment_sizes(place)
            if not sizes:
                raise CorruptLogError(self.path, 0, "no segment", "one at 0")
            header = self.header(max(sizes))
            mark = Mark.at_rest(0, min(sizes), max(sizes), header.previous_batch)
            mark = mark._replace(**_applied(header))
            self._write_mark_file(mark)
        unheld = mark._replace(held_txn=0, held_from=0, held_tail=0) if is_held(mark) else mark
        found = find_tail(place, self.identity, unheld)
        self.bases = found.bases
        for part in found.unsynced:
            self._rewrite(*part)
        tail = self._shown(found.tail)
        self.end = self.synced = tail.chain_end
        if remove_others(place, self.bases):  # no mark has promised them, or retention had begun to remove them
            place.sync()
        self.mark = mark  # the last publication
        self._fd = self._cut_file(segment_name(self.bases[-1]), self._position(tail.end))
        broken = broken_slots(place.read_whole(WATERMARK, MOST_BYTES), self.identity.salt)  # a write was torn
        if self._shows and tail.end != mark.flushed_end:
            self._publish_twice(mark.durable_to(tail.end, tail.last_batch))
        elif broken:
            self._publish_twice(mark)

    def _settle(self, mark: Mark, promised: Mark | None) -> Mark:
        """Publish the promised mark, or one without a hold that may not be kept. Readers have the file open. Synced."""
        self.mark = mark
        if promised is not None and promised.sequence > mark.sequence:
            self._publish_twice(promised)
        elif is_held(mark) and not self._keeps_held:
            self._publish_twice(settled(mark))
        self.release_files()
        return self.mark

    def _shown(self, tail: Tail) -> Tail:
        """The tail without a transaction that is not in the mark: the other partitions may lack it."""
        held = tail.sections
        if held.held_txn and held.held_from < tail.end:
            return tail._replace(end=held.held_from, last_batch=held.held_tail, previous_crc=self._crc_before(held))
        return tail

    def _crc_before(self, held: Sections) -> int:
        """The header CRC of the batch before a transaction's records, which are in the last segment."""
        with self._reader(self.bases[-1]) as reader:
            if held.held_from == reader.base_offset:
                return reader.header.previous_crc
            return reader.header_at(held.held_tail).header_crc

    def _rewrite(self, base: int, start: int, end: int) -> None:
        """Make bytes of a segment durable; an earlier sync of them may have failed."""
        with self._files.closing(self.place.open_write(segment_name(base))) as fd:
            rewrite(self._files, fd, HEADER_BYTES + start - base, HEADER_BYTES + end - base)

    def _write_mark_file(self, mark: Mark) -> None:
        self.place.replace(WATERMARK, encode_new(mark, self.identity.salt), self._permissions)

    def _marks(self) -> WatermarkWriter:
        if self._watermark is None:
            self._watermark = WatermarkWriter(self.place, self.identity.salt, self.mark)
        return self._watermark

    def _segment(self) -> int:
        if self._fd < 0:
            self._fd = self.place.open_write(segment_name(self.bases[-1]))
        return self._fd

    def release_files(self) -> None:
        """Close the files until their next use; the lock stays. What was appended must be synced."""
        syncer, self._syncer = self._syncer, None
        if syncer is not None:  # an error has ended the work
            syncer.stop()
        watermark, self._watermark = self._watermark, None
        if watermark is not None:
            watermark.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)

    def _position(self, offset: int) -> int:
        return HEADER_BYTES + offset - self.bases[-1]

    # --- what the copy has -----------------------------------------------------------------------------

    def header(self, base: int) -> SegmentHeader:
        """The header of a segment."""
        with self._reader(base) as reader:
            return reader.header

    def headers(self, base: int) -> Iterator[Header]:
        """The headers of the batches of a segment, up to the end of the copy."""
        following = next((each for each in self.bases if each > base), self.end.end)
        with self._reader(base) as reader:
            yield from reader.headers(base, min(following, self.end.end))

    def is_whole(self, start: int, end: int) -> bool:
        """True if whole batches that follow each other fill these offsets, up to the end of the copy."""
        start, end, headers = max(start, self.bases[0]), min(end, self.end.end), list[Header]()
        try:
            while start < end:
                base = max(each for each in self.bases if each <= start)
                stop = min([end, *(each for each in self.bases if each > base)])
                with self._reader(base) as reader:
                    found = reader.batches(start, stop, block_bytes=_BLOCK_BYTES)
                if not found:  # the file is too short
                    return False
                headers += map(stored_header, found)
                start = headers[-1].next_offset
        except CorruptLogError:
            return False
        return all(after.previous_crc == before.header_crc for before, after in pairwise(headers))

    def _reader(self, base: int) -> SegmentReader:
        return segment_reader(self.place, self.identity, base)

    # --- growth ----------------------------------------------------------------------------------------

    def append(self, content: bytes, end: End) -> None:
        """Write whole checked batches up to `end`, in the last segment. Handed to the system."""
        self._files.write_all(self._segment(), [content], self._position(self.end.end))
        self.end = end

    def pull(self, source: int, end: End) -> None:
        """Copy bytes up to `end`, unchecked, from the open file of the same segment. Handed to the system."""
        start, stop = self._position(self.end.end), self._position(end.end)
        self._files.copy_range(source, self._segment(), start=start, end=stop, at=start)
        self.end = end

    def begin(self, header: SegmentHeader, more_producers: bytes | None) -> None:
        """Begin the segment that follows the end, with the source's header. Synced, also all before it."""
        self.sync()
        self._put_producers(header, more_producers)
        fd = create_segment(self.place, header, self._permissions)
        old, self._fd = self._fd, fd
        self.bases.append(header.base_offset)
        self.end = self.synced = header.chain_end
        if old >= 0:
            self._files.close(old)

    def sync(self) -> None:
        """Make all appended bytes durable. Synced; an `OSError` is final."""
        self._await_sync()
        if self.synced != self.end:
            fd = self._segment()
            self._syncing(lambda: self._files.datasync(fd))
            self.synced = self.end

    def sync_soon(self) -> None:
        """Begin to make the appended bytes durable, in a thread; `synced` is then the end of the sync before."""
        self._await_sync()
        self._syncer = WorkAhead(self._sync_to)
        self._syncer.give((self._segment(), self.end))

    def _sync_to(self, given: tuple[int, End]) -> Iterator[End]:
        self._files.datasync(given[0])
        yield given[1]

    def _await_sync(self) -> None:
        if self._failure is not None:
            raise self._failure
        syncer, self._syncer = self._syncer, None
        if syncer is not None:
            try:
                self._syncing(lambda: setattr(self, "synced", next(syncer.take())))
            finally:
                syncer.stop()

    def _syncing(self, sync: Callable[[], object]) -> None:
        """Sync, or never again: after a failed sync a second one may succeed without having written anything."""
        try:
            sync()
        except OSError as error:
            self._failure = error
            raise

    def publish(self, mark: Mark) -> None:
        """Publish this mark to readers of the copy, unless it has nothing new. Its end must be synced."""
        assert mark.flushed_end <= self.synced.end
        if mark._replace(sequence=0) != self.mark._replace(sequence=0):
            self._publish(mark)

    def _publish(self, mark: Mark) -> None:
        mark = mark._replace(sequence=self.mark.sequence + 1)
        self._marks().publish(mark)
        self.mark = mark

    def set_epoch_floor(self, epoch: int) -> None:
        """Refuse writers with a lower epoch from now on. Synced."""
        self.publish(self.mark._replace(promised_epoch=epoch))
        self.sync_mark()

    def set_epoch(self, epoch: int, nonce: int) -> None:
        """Record that this log is a durable, identical copy of this writer's log. Synced."""
        assert self.synced == self.end
        self.publish(self.mark.with_writer(epoch, nonce)._replace(promised_epoch=epoch))
        self.sync_mark()

    def publish_end(self, end: int, last_batch: int) -> None:
        """Let readers see up to `end`, where the batch at `last_batch` ends, if that is here and new. Synced."""
        mark = self.mark
        if mark.flushed_end < end <= self.synced.end:
            self.publish(mark.durable_to(end, last_batch))
            self.sync_mark()

    def rest_at(self, mark: Mark) -> None:
        """Publish this mark in both slots. Synced."""
        assert mark.flushed_end <= self.synced.end
        self._publish_twice(mark)

    def sync_mark(self) -> None:
        """Make the last publication durable. Synced."""
        self._marks().sync()

    def drop_before(self, base: int, mark: Mark | None = None) -> None:
        """Let the log begin at the segment with this base, and remove those before it. Synced."""
        assert base in self.bases
        self._publish_twice((mark or self.mark)._replace(log_start_offset=base))
        self._drop([each for each in self.bases if each < base])

    def _drop(self, bases: list[int]) -> None:
        """Remove segments that the mark does not promise. Synced."""
        self.bases = [each for each in self.bases if each not in bases]
        for each in bases:
            with suppress(FileNotFoundError):
                self.place.unlink(producers_name(each))
            self.place.unlink(segment_name(each))
        self.place.sync()

    def replace_last(self, header: SegmentHeader, more_producers: bytes | None) -> None:
        """Give the last segment, which has no batches, another header. Synced."""
        if self.header(self.bases[-1]) != header:
            self.release_files()
            self._put_producers(header, more_producers)
            self._fd = create_segment(self.place, header, self._permissions)
            self.end = self.synced = header.chain_end

    def _put_producers(self, header: SegmentHeader, more_producers: bytes | None) -> None:
        if more_producers is not None:
            self.place.replace(producers_name(header.base_offset), more_producers, self._permissions)

    def restart(self, header: SegmentHeader, more_producers: bytes | None) -> None:
        """Let the log consist of this segment alone, which is empty and does not follow the end. Synced.

        The log has no batch from `header.base_offset` on. A crash at any point leaves the old log, or the new one.
        """
        start, old = header.base_offset, [each for each in self.bases if each != header.base_offset]
        self.begin(header, more_producers)
        self.bases = [*old, start]
        mark = Mark.at_rest(self.mark.sequence, start, start, header.previous_batch)
        self._publish_twice(mark._replace(**_applied(header)))
        self._drop(old)

    def _publish_twice(self, mark: Mark) -> None:
        """Write the mark into both slots. Synced."""
        for _ in range(2):
            self._publish(mark)
            self.sync_mark()

    # --- another history -------------------------------------------------------------------------------

    def cut(self, to: End, mark: Mark) -> list[str]:
        """Remove the records after `to`, the end of a batch of this copy; returns the files that keep them.

        A segment that begins there is removed, too, unless it is the only one: its header is of the other history.
        `mark` is published then. After a crash at any point all of it is set aside, or still in the log.
        """
        base = max([each for each in self.bases if each < to.end], default=self.bases[0])
        later = [each for each in self.bases if each > base]
        kept: list[str] = []
        if (start := HEADER_BYTES + to.end - base) < self._size(base):
            kept.append(self._keep_aside(base, start))
        kept += [self._keep_aside(each, 0) for each in later if self._size(each) > HEADER_BYTES]
        self._publish_twice(mark)
        for each in reversed(later):
            self.place.unlink(segment_name(each))
        self.place.sync()
        self.bases = [each for each in self.bases if each <= base]
        self.end = self.synced = to
        self.release_files()
        self._fd = self._cut_file(segment_name(base), start)
        return kept

    def cut_all(self) -> list[str]:
        """Remove all batches, and leave an empty log where it begins; returns the files that keep them. See `cut`."""
        header = self.header(self.bases[0])
        start, last, _ = end = header.chain_end
        mark = Mark.at_rest(self.mark.sequence, start, start, last)._replace(**_applied(header))
        return self.cut(end, mark)

    def _cut_file(self, name: str, size: int) -> int:
        """Cut a file, and return it open for writing. Synced."""
        files = self._files
        fd = self.place.open_write(name)
        try:
            if files.size(fd) > size:
                files.ftruncate(fd, size)
                files.datasync(fd)
        except BaseException:
            files.close(fd)
            raise
        return fd

    def _size(self, base: int) -> int:
        return self._files.facts(self.place.path_of(segment_name(base)), dir_fd=self.place.fd).st_size

    def _keep_aside(self, base: int, start: int) -> str:
        """Copy the bytes of a segment from file position `start` on into a file beside it. Synced."""
        size_bytes = self._size(base) - start
        return copy_aside(self.place, segment_name(base), start, size_bytes, word="diverged", shares=True)

    # --- end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the log. Bytes that were appended and not published may be cut by the next opening."""
        try:
            self.release_files()
        finally:
            self.held.release()


def _applied(header: SegmentHeader) -> dict[str, int]:
    """The fields of a mark for the last transaction before a segment."""
    return {name: getattr(header, name) for name in ("applied_txn", "applied_id", "txn_store")}


def make_follower_log(
    files: Files, path: str, header: SegmentHeader, more_producers: bytes | None, identity: Identity, permissions: int
) -> None:
    """Make an empty copy that begins with this segment, in a new directory. Synced, also its name."""
    start, (parent, name) = header.base_offset, os.path.split(path)
    aside = os.path.join(parent, f".{name}.tmp")
    if files.exists(aside):  # left by a crash
        files.remove_tree(aside)
    files.make_directory(aside, permissions)
    with Directory.open(files, aside) as place:
        mark = Mark.at_rest(0, start, start, header.previous_batch)._replace(**_applied(header))
        place.write_new(WATERMARK, encode_new(mark, identity.salt), permissions)
        if more_producers is not None:
            place.write_new(producers_name(start), more_producers, permissions)
        files.close(create_segment(place, header, permissions))
    files.rename(aside, path)
    files.sync_directory(parent)


# --- the mark of a log, and the whole batches after it ---------------------------------------------------


class UnmarkedTail(NamedTuple):
    """The end of the whole batches after the mark of a log."""

    tail: Tail
    bases: list[int]  # of the log's segments, up to that tail
    unsynced: list[tuple[int, int, int]]  # parts that may not be on the disk: segment, start and end offset


def set_epoch_floor(place: Directory, identity: Identity, mark: Mark, epoch: int) -> Mark:
    """Refuse writers with a lower epoch in this directory, whose newest mark is given, from now on. Synced."""
    writer = WatermarkWriter(place, identity.salt, mark)
    try:
        writer.publish(mark._replace(sequence=mark.sequence + 1, promised_epoch=epoch))
        writer.sync()
        return writer.mark
    finally:
        writer.close()


def find_tail(place: Directory, identity: Identity, mark: Mark) -> UnmarkedTail:
    """Find the whole batches after the mark of the log in an open directory. Nothing is changed.

    `CorruptLogError` if there is less than the mark promises.
    """
    sizes = segment_sizes(place)
    bases = sorted(base for base in sizes if base >= mark.log_start_offset)
    if not bases or bases[0] != mark.log_start_offset:
        found = f"a first segment at {bases[0]}" if bases else "no segment"
        raise CorruptLogError(place.path, 0, found, f"one at {mark.log_start_offset}")
    there = [base for base in bases if base <= mark.flushed_end]
    load_headers(place, {base: sizes[base] for base in there}, identity)
    start, following = mark.flushed_end, iter([base for base in bases if base > mark.flushed_end])
    unsynced: list[tuple[int, int, int]] = []
    with segment_reader(place, identity, there[-1]) as reader:
        if (file_end := reader.end_of_file()) < start:
            position = reader.file_position(file_end)
            raise CorruptLogError(reader.path, position, "the end of the file", f"data up to offset {start}")
        sections = Sections.of(mark, mark.held_tail)
        tail = tail_at(reader, start, mark.flushed_tail)._replace(sections=sections)
        tail, fault = valid_prefix(reader, tail, file_end)
    if start < tail.end:
        unsynced.append((there[-1], start, tail.end))
    while fault is None and next(following, None) == tail.end and not tail.sections.held_txn:
        with segment_reader(place, identity, tail.end) as reader:
            if tail_at(reader, tail.end, tail.end).chain_end != tail.chain_end:
                break
            there.append(tail.end)
            tail, fault = valid_prefix(reader, tail, reader.end_of_file())
        if there[-1] < tail.end:
            unsynced.append((there[-1], there[-1], tail.end))
    return UnmarkedTail(tail, there, unsynced)
