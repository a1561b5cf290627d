"""Local source: a topic in a directory of this host, and its logs, read by a copier.

Invariant: see sources.py. Nothing is written at the source, and no lock is taken there. Blocks are whole stored
batches, checked. Marks that are read together show each transaction in all partitions or in none. The list of a group's
logs of commits is that of one moment: it was the same before and after their marks were read.

Threads: `wake` from any thread; the rest from one at a time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from itertools import takewhile

from ..config.policies import MAX_OFFSET, TopicConfig
from ..errors import CorruptLogError, LogMovedError, OffsetOutOfRangeError
from ..format.chain import End, follow
from ..format.header import BadBatch, NewerBatch
from ..format.watermark import Mark
from ..groups.directory import GROUPS, stored_groups
from ..groups.offsets import log_names, offsets_identity
from ..log import store_pointer, topic_file
from ..log.ages import NAME as CLOCK
from ..log.bundle_reader import Bundle
from ..log.log import Log
from ..log.lookup import marks_together
from ..segment import Identity, SegmentHeader, SegmentReader, producers_name, read_segment_header, segment_name
from ..system.clock import monotonic
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from ..system.notify import Observer
from .sources import FOLDED, Block, GroupSnapshot, SegmentStart

BLOCK_BYTES = 1 << 20
SMALL_BATCH_BYTES = BLOCK_BYTES // 64  # a block of batches up to this size is checked as columns
MOST_BESIDE_BYTES = 16 << 20  # of a small file beside the segments
_MOST_POINTER_BYTES = 1 << 20  # of a file that names the place of a group
_TRIES = 10


class LocalTopicSource(NotCopyable):
    """A topic in a directory; see `TopicSource`."""

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._groups = os.path.join(path, GROUPS)
        self._logs: dict[int, SourceLog] = {}
        self._observer: Observer | None = None
        self._observed = 0
        self.place = path
        described = topic_file.read(files, path)
        if described is None:
            raise FileNotFoundError(errno.ENOENT, "no topic here", path)
        self.log_id = described[0]

    def heard_at(self) -> float:
        """Return now: a directory can be asked at any time."""
        return monotonic()

    def beat(self) -> None:
        """Do nothing: a directory needs no sign of life."""

    # --- the description -----------------------------------------------------------------------------------

    def described(self) -> tuple[bytes, TopicConfig]:
        content = self._files.read_whole(os.path.join(self.place, topic_file.NAME), topic_file.MOST_BYTES)
        described = topic_file.read(self._files, self.place)
        if described is None or described[0] != self.log_id:
            raise LogMovedError(self.place, "was moved or removed, or holds another topic now")
        return content, described[1]

    def store_pointer(self, copy: str, /) -> bytes | None:
        found = store_pointer.read_pointer(self._files, self.place)
        return found and store_pointer.sealed(os.path.relpath(os.path.normpath(found.path), copy), found.id)

    # --- logs ------------------------------------------------------------------------------------------------

    def log(self, number: int) -> SourceLog:
        path = topic_file.partition_directory(self.place, number)
        self._logs[number] = found = SourceLog(self._files, path, Identity.of(self.log_id, number))
        return found

    def log_of_commits(self, group: str, name: str) -> SourceLog:
        path = os.path.join(self._groups, group, "offsets", name)
        return SourceLog(self._files, path, offsets_identity(self.log_id, group, name))

    def marks(self, numbers: Iterable[int]) -> dict[int, Mark]:
        return marks_together([self._logs[number].log for number in numbers], Log.found)

    # --- groups ----------------------------------------------------------------------------------------------

    def groups(self) -> dict[str, GroupSnapshot]:
        names = stored_groups(self._files, self._groups)
        return {name: noted for name in names if (noted := self._note(name)) is not None}

    def has_group(self, name: str) -> bool:
        """True if the group is there, or the directory of all groups is not: then that is not known."""
        return not self._files.exists(self._groups) or self._files.exists(os.path.join(self._groups, name))

    def _note(self, group: str) -> GroupSnapshot | None:
        files, path = self._files, os.path.join(self._groups, group)
        for tries in range(1, _TRIES + 1):
            try:
                if not files.is_directory(path):
                    return GroupSnapshot({}, files.read_whole(path, _MOST_POINTER_BYTES))
                offsets = os.path.join(path, "offsets")
                names = log_names(files, offsets)
                marks = {name: self._mark(group, name, os.path.join(offsets, name)) for name in names}
                if names == log_names(files, offsets):
                    return GroupSnapshot(marks, None)
            except FOLDED:
                if not files.exists(path):
                    return None
                if tries == _TRIES:
                    raise
        return None  # its members never stop folding: the next pass tries again

    def _mark(self, group: str, name: str, path: str) -> Mark:
        with closing(Log(self._files, path, offsets_identity(self.log_id, group, name))) as log:
            return log.found()

    # --- waiting ---------------------------------------------------------------------------------------------

    def watch(self) -> bool:
        if self._observer is None:
            self._observer = Observer(use_inotify=self._files.real)
        observed, self._observed = self._observed, len(self._logs)
        for number in range(observed, self._observed):
            self._observer.observe_file(number, self._logs[number].log.watermark_path)
        return self._observed > observed

    def descriptors(self) -> list[int]:
        """Descriptors that become readable when a log may have changed, for a caller that waits for others, too."""
        return [] if self._observer is None else self._observer.descriptors()

    @property
    def reports(self) -> bool:
        """True if the system reports all changes. If it does not, the caller must look from time to time."""
        return self._observer is not None and self._observer.reports

    def changed(self) -> list[int]:
        """The watched partitions that may have changed since the last call."""
        observer = self._observer
        return [] if observer is None else sorted(each for each in observer.changed() if isinstance(each, int))

    def wait_for_changes(self, timeout_s: float) -> list[int]:
        found = self.changed()
        if found or self._observer is None:
            return found
        self._observer.wait(timeout_s)
        return self.changed()

    def wake(self) -> None:
        observer = self._observer
        if observer is not None:
            observer.wake()

    def unwatch(self) -> None:
        observer, self._observer, self._observed = self._observer, None, 0
        if observer is not None:
            observer.close()

    def close(self) -> None:
        self.unwatch()


class SourceLog(NotCopyable):
    """A log in a directory; see `LogSource`."""

    credit_bytes = 1 << 62  # nobody waits for an acknowledgement

    def __init__(self, files: Files, directory: str, identity: Identity) -> None:
        self._files = files
        self.place = directory
        self.log = Log(files, directory, identity)
        self._segment: SegmentReader | None = None
        self._restored = self.log.restored  # its value when the segment was opened

    def close(self) -> None:
        self.release_files()
        self.log.close()

    def release_files(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self.log.release_files()

    @property
    def published_end(self) -> int:
        return self.log.found().flushed_end

    def acknowledge(self, end: int) -> None:
        """Do nothing: a directory keeps nothing about its copies."""

    def beside(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return self._files.read_whole(os.path.join(self.place, name), MOST_BESIDE_BYTES)
        return None

    # --- segments --------------------------------------------------------------------------------------

    def first(self) -> SegmentStart:
        while True:
            with suppress(OffsetOutOfRangeError):  # retention has dropped it meanwhile
                return self.begun(self.log.published().log_start_offset)

    def begun(self, base: int) -> SegmentStart:
        log, more = self.log, None
        path = os.path.join(log.directory, segment_name(base))
        try:
            header = read_segment_header(self._files, path, log.identity)
            if header.more_producers:
                more = self._files.read_whole(os.path.join(log.directory, producers_name(base)), MOST_BESIDE_BYTES)
        except FileNotFoundError as error:
            log.check_not_dropped(base)
            raise CorruptLogError(path, 0, "no file", "the segment of this name, with its producers") from error
        return SegmentStart(header, more, self.beside(CLOCK))

    def _check_joins(self, end: End, header: SegmentHeader) -> None:
        """`CorruptLogError` if the segment does not follow this end. After a declared gap that is not known."""
        if end.crc in (None, header.previous_crc) or any(gap.end == end.end for gap in self.log.gaps()):
            return
        path = os.path.join(self.log.directory, segment_name(header.base_offset))
        found = f"a segment that follows a batch with CRC {header.previous_crc:08x}"
        raise CorruptLogError(path, 72, found, f"{end.crc:08x}")

    def begins(self, end: int) -> bool:
        return self._files.exists(os.path.join(self.log.directory, segment_name(end)))

    def _open(self, offset: int) -> SegmentReader:
        segment, log = self._segment, self.log
        if segment is not None:
            # The next base that is known may be a later one, if retention has dropped the segments between.
            stop = min(log.index.after(segment.base_offset) or MAX_OFFSET, segment.end_of_file())
            if self._restored == log.restored and segment.base_offset <= offset < stop:
                return segment
            self._segment = None
            segment.close()
        self._restored = log.restored
        self._segment = segment = log.open_segment(offset)
        return segment

    def _end(self, segment: SegmentReader, limit: int) -> int:
        """The end of the segment's batches, at most `limit`."""
        return min(limit, self.log.index.after(segment.base_offset) or limit, segment.end_of_file())

    # --- bytes -----------------------------------------------------------------------------------------

    def piece(self, at: End, base: int, limit: int) -> SegmentStart | Block:
        segment = self._open(at.end)
        if segment.base_offset == at.end != base:
            begun = self.begun(at.end)
            self._check_joins(at, begun.header)
            return begun
        if segment.base_offset != base:
            raise CorruptLogError(
                segment.path, 0, f"a segment from offset {segment.base_offset}", f"one from {base}, as the copy has it"
            )
        try:
            return self._checked(at, limit)
        except CorruptLogError:
            gap = self.log.gap_at(at.end)
            if gap is None:
                raise
            return self._unchecked(at, min(gap.end, limit))

    def _checked(self, at: End, limit: int) -> Block:
        segment = self._open(at.end)
        stop = self._end(segment, limit)
        first = segment.header_at(at.end)
        if first.length <= SMALL_BATCH_BYTES:
            bundle = Bundle.read(segment, at.end, stop, block_bytes=BLOCK_BYTES)
            if bundle is not None and at.crc in (None, bundle.facts.previous_crc):
                return Block(bundle.stored, bundle.chain_end)
        content = segment.read(at.end, max(min(BLOCK_BYTES, stop - at.end), first.length))
        end, fault = whole_batches(content, at, at, segment.salt)
        if fault is not None and end == at:
            segment.refuse(fault, end.end)
        return Block(content[: end.end - at.end], end)

    def _unchecked(self, at: End, limit: int) -> Block:
        """The stored bytes of a declared gap."""
        segment = self._open(at.end)
        content = segment.read(at.end, min(BLOCK_BYTES, self._end(segment, limit) - at.end))
        return Block(content, End(at.end + len(content), at.last_batch, None))

    # --- common history ----------------------------------------------------------------------------------

    def same(self, ends: Sequence[End], mark: Mark) -> int:
        self.log.refresh()
        if any(each.end > mark.flushed_end for each in ends):  # there may be more than an old watermark says
            mark = max(mark, self.log.scanned(mark), key=lambda each: each.flushed_end)
        count = len(list(takewhile(lambda each: self._has(each, mark), ends)))
        if count < len(ends):  # it may differ only because retention was faster
            self.log.check_not_dropped(ends[count].end)
        return count

    def _has(self, end: End, mark: Mark) -> bool:
        """True if this log has the same batch before this end."""
        if not mark.log_start_offset <= end.end <= mark.flushed_end:
            return False
        if self._begins_after(end):
            return True
        if end.end == mark.log_start_offset or end.last_batch < mark.log_start_offset:  # a batch lies across the start
            return False
        try:
            header = self.log.header_around(end.last_batch, mark)
        except OffsetOutOfRangeError:  # retention has dropped it since the mark was read
            self.log.refresh()
            if self._begins_after(end):
                return True
            raise
        if not header.record_count:  # a gap: the batch is lost here
            return True
        return (header.base_offset, header.next_offset, header.header_crc) == (end.last_batch, end.end, end.crc)

    def _begins_after(self, end: End) -> bool:
        """True if a segment begins there, after the same batch."""
        if end.end not in self.log.index.bases():
            return False
        return self.begun(end.end).header.chain_end == end


def whole_batches(content: bytes, at: End, end: End, salt: int) -> tuple[End, BadBatch | NewerBatch | None]:
    """Check the batches in these bytes. Return their end, and the fault of the next batch, if that is all there.

    The bytes begin at `at`; those up to `end` have been checked. Each batch must follow the one before.
    """
    try:
        for header in follow(content, end, start=at.end, salt=salt):
            end = End.after(header)
    except (BadBatch, NewerBatch) as error:
        return end, error
    return end, None


def own_mark(mark: Mark) -> Mark:
    """The mark of a copy that has all below this mark of its source, durable."""
    applied = mark.applied_txn, mark.applied_id
    if mark.held_txn and mark.flushed_end <= mark.held_from:  # the mark ends before that transaction
        applied = min(applied, (mark.held_txn - 1, 0))  # the id of that number is not known
    own = Mark.at_rest(mark.sequence, mark.log_start_offset, mark.flushed_end, mark.flushed_tail)
    return own._replace(
        writer_epoch=mark.writer_epoch, writer_nonce=mark.writer_nonce, applied_txn=applied[0], applied_id=applied[1],
        txn_store=mark.txn_store,
    )  # fmt: skip
