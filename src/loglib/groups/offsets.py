"""Offsets: how far a group has got; one small log for each group, in the format of a partition.

Invariant: a commit is there as a whole or not at all, and durable when `commit` has returned (with
durability "disk"). Of the commits for a partition the one of the highest generation counts, and of
these the last: what a member that has lost the partition writes late changes nothing. Damage is
`CorruptLogError` and never "no commit yet", and what a crash has left is seen to before the first look:
a watermark may be older than the commits that were synced.

    offsets/           a partition's directory: segment, watermark, lock; see docs/format.md
    a record's value   {"<topic>-<partition>": [offset, generation, meta], ...} as JSON
    its key            the member that committed; its timestamp, when

Any member appends, holding the directory's writer lock for just that long: it looks how far the log
reaches, writes one batch there and publishes it. Whatever else there is to do (what a crash has left,
dropping old commits) a real `Writer` does, under the same lock.

Threads: an `OffsetLog` belongs to whoever has its group.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from .. import codec
from .. import lock as writer_lock
from ..arguments import record_sizes
from ..batch import NO_PRODUCER, Columns, crc32c, encode_body, stamp
from ..config import Durability, FlushPolicy, Retention, TopicConfig
from ..errors import (
    CorruptLogError,
    LockedError,
    LogError,
    OffsetOutOfRangeError,
    RecordTooLargeError,
    StorageFullError,
    StorageIOError,
)
from ..files import Files
from ..jumps import added
from ..log import Cursor, Log
from ..recovery import Tail, list_segments, tail_at
from ..search import jumps_at
from ..segment import HEADER_BYTES, Identity, SegmentReader, segment_name
from ..unique import Unique
from ..watermark import NAME as WATERMARK
from ..watermark import Mark, WatermarkWriter
from ..writer import Writer
from .assignment import TopicPartition

__all__ = ["Commit", "OffsetLog", "offsets_identity"]

logger = logging.getLogger("loglib")

_COMPACT_BYTES = 1 << 20  # about 10,000 commits: a new owner reads that in some 50 ms
_MOST_COMMIT_BYTES = 8 << 20  # 10,000 partitions with half a kilobyte of `meta` each
_LOCK_TIMEOUT_S = 30.0  # a commit takes a millisecond: whoever holds the lock for longer is stopped
_FIRST_NAP_S = 0.00002
_LONGEST_NAP_S = 0.002


class Commit(NamedTuple):
    """How far a group has handled a partition: `offset` is the next one to read."""

    offset: int
    meta: str = ""
    generation: int = 0
    member: str = ""
    timestamp: int = 0  # microseconds UTC


def offsets_identity(log_id: bytes, group: str) -> Identity:
    """The identity of a group's offset log: a partition number that no partition has, drawn from the name."""
    return Identity.of(log_id, 0x8000_0000 | crc32c(group.encode()) & 0x7FFF_FFFF)


class OffsetLog(Unique):
    """The committed offsets of one group."""

    def __init__(
        self,
        files: Files,
        directory: str,
        identity: Identity,
        *,
        durability: Durability,
        permissions: int,
        clock: Callable[[], int],
    ) -> None:
        self._files = files
        self._directory = directory
        self._identity = identity
        self._clock = clock
        self._config = TopicConfig(
            flush=FlushPolicy(messages=None, interval=None, bytes=None),
            retention=Retention(age=None),
            segment_age=None,
            durability=durability,
            permissions=permissions,
            max_record_bytes=_MOST_COMMIT_BYTES,
        )
        self._log = Log(files, directory, identity)
        self._cursor: Cursor | None = None
        self._commits: dict[TopicPartition, Commit] = {}
        self._end: _End | None = None
        self._mended = False
        self._lock_fd = files.open_directory(directory)  # whose flock is the writer lock

    def close(self) -> None:
        """Close the files; the lock is held by nobody between two commits."""
        if self._lock_fd >= 0:
            fd, self._lock_fd = self._lock_fd, -1
            self._files.close(fd)
        self._forget_end()
        self._forget_cursor()
        self._log.close()

    # --- reading -----------------------------------------------------------------------------------

    def commits(self) -> dict[TopicPartition, Commit]:
        """The last commit for each partition that has any, as of now."""
        mark = self._log.mark()
        if not self._mended or not mark.sequence:
            self._mend()
            mark = self._log.mark()
        while True:
            try:
                self._read_on(mark)
                return dict(self._commits)
            except OffsetOutOfRangeError:  # another member has compacted the log meanwhile
                mark = self._log.mark()

    def _read_on(self, mark: Mark) -> None:
        cursor = self._cursor
        if cursor is None or cursor.position < mark.log_start_offset:  # what was dropped stands again in what is left
            self._forget_cursor()
            self._log.refresh()
            self._cursor = cursor = self._log.cursor(mark.log_start_offset, mark=mark)
        while batches := cursor.read(mark.flushed_end):
            for batch in batches:
                for record in batch.records():
                    self._take(record.value or b"", record.key or b"", record.timestamp, batch.header.base_offset)

    def _take(self, value: bytes, member: bytes, timestamp: int, offset: int) -> None:
        try:
            for name, (position, generation, meta) in json.loads(value).items():
                topic, _, number = name.rpartition("-")
                partition = TopicPartition(topic, int(number))
                if generation >= self._commits.get(partition, Commit(0)).generation:
                    commit = Commit(int(position), str(meta), int(generation), member.decode(), timestamp)
                    self._commits[partition] = commit
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            found = f"a record at offset {offset} that is no commit ({error})"
            raise CorruptLogError(self._directory, offset, found, "JSON as docs/format.md has it") from error

    # --- committing --------------------------------------------------------------------------------

    def commit(self, commits: Mapping[TopicPartition, Commit], *, member: str, fence: Callable[[], None]) -> None:
        """Append the commits as one record. Synced with durability "disk".

        `fence` is called while no other member can commit, and raises if this one may not.
        """
        columns = _columns({member: commits}, self._clock())
        _, size = _sized(columns)
        if size > _MOST_COMMIT_BYTES:
            raise RecordTooLargeError("the commit", size, _MOST_COMMIT_BYTES)
        with self._locked():
            fence()
            end = self._find_end()
            if end is not None:
                end = self._append(end, columns)
        if end is None:
            self._mend(columns, fence)
        elif end.size_bytes() > _COMPACT_BYTES:
            self._compact()

    def _mend(self, columns: Columns | None = None, fence: Callable[[], None] = lambda: None) -> None:
        """See to what a crash may have left, and append a commit behind it, if there is one."""
        with self._locked():
            mark = self._log.mark()
            # What was published and not synced, which durability "os" allows, may be gone after a power cut.
            clean = columns is None and mark.durable_end == mark.flushed_end and self._find_end() is not None
        if not clean:
            with self._writer() as writer:
                fence()
                if columns is not None:
                    writer.append(*_sized(columns))
                    writer.flush()
            if len(self._log.index.bases()) > 1:  # it was in the middle of compacting
                self._compact()
        self._mended = True

    def _find_end(self) -> _End | None:
        """Where the next batch goes; None if a writer has to see to the log first. The lock is held."""
        mark, end = self._log.mark(), self._end
        if end is None or mark != end.mark:
            self._forget_end()
            bases = list(list_segments(self._files, self._directory))
            if bases != [mark.log_start_offset] or not mark.sequence:
                return None
            self._end = end = self._open_end(mark)
        clean = self._files.size(end.fd) == end.file_position()
        return end if clean else None

    def _open_end(self, mark: Mark) -> _End:
        path = os.path.join(self._directory, segment_name(mark.log_start_offset))
        with SegmentReader(self._files, path, self._identity) as reader:
            tail = tail_at(reader, mark.flushed_end, mark.flushed_tail)
            tail = tail._replace(jumps=jumps_at(reader, tail.last_batch))
        with ExitStack() as opened:
            fd = self._files.open_write(path)
            opened.callback(self._files.close, fd)
            name = os.path.join(self._directory, WATERMARK)
            watermark = WatermarkWriter(self._files, name, self._identity.salt, mark)
            opened.pop_all()
        return _End(fd, path, mark.log_start_offset, tail, mark, watermark)

    def _forget_end(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            self._files.close(end.fd)
            end.watermark.close()

    def _forget_cursor(self) -> None:
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            cursor.close()

    def _append(self, end: _End, columns: Columns) -> _End:
        tail, mark = end.tail, end.mark
        append_time = max(self._clock(), tail.append_time)
        running_max = max(tail.running_max_timestamp, *columns.timestamps or ())
        body = encode_body(columns, codec=codec.NONE)
        jumps = added(tail.jumps, tail.end)
        header, header_crc = stamp(
            body,
            base_offset=tail.end,
            durable_up_to=mark.durable_end,
            writer_epoch=mark.writer_epoch,
            writer_nonce=mark.writer_nonce,
            previous_crc=tail.previous_crc,
            previous_bytes=tail.end - tail.last_batch,
            jump_offset=jumps.jump_offset,
            append_time=append_time,
            running_max_timestamp=running_max,
            producer=NO_PRODUCER,
            producers_in_segment=False,
            salt=self._identity.salt,
        )
        flushed_end, durable_end = tail.end + body.length, mark.durable_end
        try:
            self._files.write_all(end.fd, [header, *body.parts], end.file_position())
            if self._config.durability == "disk":
                self._files.datasync(end.fd)
                durable_end = flushed_end
            durable_tail = tail.end if durable_end == flushed_end else mark.durable_tail
            mark = mark._replace(
                sequence=mark.sequence + 1, flushed_end=flushed_end, flushed_tail=tail.end,
                durable_end=durable_end, durable_tail=durable_tail,
            )  # fmt: skip
            end.watermark.publish(mark)
        except BaseException as error:
            # Bytes above the watermark, if there are any, are for the next commit's writer to judge.
            self._forget_end()
            if isinstance(error, OSError) and not isinstance(error, LogError):
                raise StorageIOError(end.path, error, "committing offsets") from error
            raise
        tail = Tail(flushed_end, tail.end, header_crc, append_time, running_max, mark.writer_epoch, jumps)
        self._end = end = end._replace(tail=tail, mark=mark)
        return end

    def _compact(self) -> None:
        """Begin a new segment with the commits that count, and drop what came before."""
        try:
            with self._writer() as writer:
                by_member: dict[tuple[str, int], dict[TopicPartition, Commit]] = {}
                self._read_on(self._log.mark())
                for partition, commit in self._commits.items():
                    by_member.setdefault((commit.member, commit.timestamp), {})[partition] = commit
                writer.roll()
                for (member, timestamp), commits in by_member.items():
                    writer.append(*_sized(_columns({member: commits}, timestamp)))
                writer.flush()
                writer.drop_before(self._log.index.bases()[-1])
        except (StorageFullError, LockedError) as error:  # the commit itself is safe; the next one tries again
            logger.warning("%s: the committed offsets stay as long as they are: %s", self._directory, error)

    # --- the lock ----------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the offset log's lock for a moment, and have the kernel drop it if this process dies."""
        naps = self._naps()
        try:
            while not self._files.try_lock(self._lock_fd):
                next(naps)
            yield
        finally:
            self._files.unlock(self._lock_fd)  # which does nothing where the lock was not to be had

    @contextmanager
    def _writer(self) -> Iterator[Writer]:
        """A writer of the offset log, which recovers it first."""
        self._forget_end()
        naps = self._naps()
        writer = None
        while writer is None:
            try:
                writer = Writer(
                    self._files, self._directory, self._identity, self._config,
                    index=self._log.index, clock=self._clock,
                )  # fmt: skip
            except LockedError:
                next(naps)
        try:
            yield writer
        finally:
            try:
                writer.close()
            except BaseException:  # an interrupt, perhaps, after which it goes on: no lock must be left
                writer.close()
                raise

    def _naps(self) -> Iterator[None]:
        """Waits for whoever has the lock, each longer than the one before; in the end `LockedError`."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        nap = _FIRST_NAP_S
        while time.monotonic() < deadline:
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)
            yield
        path = os.path.join(self._directory, writer_lock.NAME)
        holder = f"another member, for {_LOCK_TIMEOUT_S:.0f} seconds: it may be stopped"
        raise LockedError(path, holder, advice="let it go on, or end it, and commit again")


class _End(NamedTuple):
    """The end of the log, open for the next batch."""

    fd: int
    path: str
    base_offset: int
    tail: Tail
    mark: Mark
    watermark: WatermarkWriter

    def size_bytes(self) -> int:
        return self.tail.end - self.base_offset

    def file_position(self) -> int:
        return HEADER_BYTES + self.size_bytes()


def _columns(commits: Mapping[str, Mapping[TopicPartition, Commit]], timestamp: int) -> Columns:
    """One record for each member's commits."""
    values = [
        json.dumps({str(partition): (each.offset, each.generation, each.meta) for partition, each in by.items()})
        for by in commits.values()
    ]
    return Columns([value.encode() for value in values], [name.encode() for name in commits], [timestamp] * len(values))


def _sized(columns: Columns) -> tuple[Columns, int]:
    return columns, sum(record_sizes(columns))
