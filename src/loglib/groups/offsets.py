"""Offsets: the committed offsets of a group, in one small log per member, in the format of a partition.

Invariant: a commit is stored as a whole or not at all, and is durable when `commit` has returned (with
durability "disk"). For each partition the commit with the highest generation counts, and among these the
one with the highest number. A new owner commits in its own generation before it reads, so a late commit
of the previous owner changes nothing. Damage raises `CorruptLogError`; it never means "no commit yet".
Synced commits above the watermark count: a reader goes on above it as far as whole batches follow.
A commit belongs to the log with its log id, whatever the topic's name is now.

    offsets/<log>/     a partition's directory: segment, watermark, lock; see docs/format.md
    a record's value   [{"topic": "<name>", "log_id": "<32 digits>", "partitions": {"<number>":
                       [offset, generation, number, history, meta], ...}}, ...] as JSON
    its key            the member that committed; its timestamp, when

A log has one writer, the member that holds it, so no member waits for another to commit. For its first
commit a member takes a log that no process holds, or makes one. Logs of members that left are folded: a
member writes their commits to its own log, syncs it, and removes the old log. If a log has disappeared, it
was folded into another, so all logs must be read again.

Threads: an `Offsets` belongs to the thread of its group.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

from ..append.record_arguments import record_sizes
from ..append.writer import Writer
from ..config.policies import Durability, FlushPolicy, Retention, TopicConfig
from ..errors import (
    CorruptLogError,
    LockedError,
    LogError,
    OffsetOutOfRangeError,
    RecordTooLargeError,
    StorageFullError,
    StorageIOError,
    WriterFailedError,
)
from ..format.batch import Batch
from ..format.columns import Columns
from ..format.header import crc32c
from ..format.watermark import Mark
from ..log.cursor import Cursor
from ..log.log import Log
from ..log.recovery import list_segments, measure
from ..log.topic_file import make_partition, put_in_place
from ..segment import HEADER_BYTES, Identity, SegmentReader, segment_name
from ..system.directory import Directory
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .assignment import TopicPartition
from .lock_file import readable_by_all

__all__ = [
    "Commit", "Entries", "Entry", "LogPartition", "Offsets", "log_names", "make_offsets", "merged", "offsets_identity",
]  # fmt: skip

logger = logging.getLogger("loglib")

_COMPACT_BYTES = 1 << 20  # about 10,000 commits: a new owner reads them in about 50 ms
_MOST_COMMIT_BYTES = 8 << 20  # 10,000 partitions with half a kilobyte of `meta` each
_OPEN_TRIES = 100  # another member may take or remove a log before this member opens it
_LOG_NAME = re.compile("[0-9a-f]{16}")
_FOLDED = ".folded"  # the rest of a log whose removal was interrupted


class Commit(NamedTuple):
    """How far a group has handled a partition: `offset` is the next offset to read."""

    offset: int
    meta: str = ""
    generation: int = 0
    member: str = ""
    timestamp: int = 0  # microseconds UTC


class Entry(NamedTuple):
    """The entry of one partition in a commit record."""

    offset: int | None  # None: the partition has an owner, but no commit yet
    generation: int
    log_id: bytes  # of the topic
    history: int  # `log.history.history_at` the offset
    meta: str = ""
    member: str = ""
    timestamp: int = 0
    number: int = 0  # grows with each commit of the same owner
    topic: str = ""  # the topic's name when this was committed

    def commit(self) -> Commit | None:
        """The public form; None if nothing is committed yet."""
        if self.offset is None:
            return None
        return Commit(self.offset, self.meta, self.generation, self.member, self.timestamp)


class LogPartition(NamedTuple):
    """A partition, whatever the name of its topic is: as commits and owners are stored."""

    log_id: bytes
    partition: int

    def __str__(self) -> str:
        return f"{self.log_id.hex()}-{self.partition}"


Entries = dict[TopicPartition, Entry]
_Stored = dict[LogPartition, Entry]
_Key = TypeVar("_Key", bound=Hashable)


def offsets_identity(log_id: bytes, group: str, name: str) -> Identity:
    """The identity of one of a group's logs. Its number is a hash of the names, and no partition has it."""
    return Identity.of(log_id, 0x8000_0000 | crc32c(f"{group}/{name}".encode()) & 0x7FFF_FFFF)


def log_names(files: Files, directory: str) -> list[str]:
    """The names of a group's logs in the directory, sorted. What others have put there is passed over."""
    return sorted(filter(_LOG_NAME.fullmatch, files.listdir(directory)))


def make_offsets(files: Files, directory: str, log_id: bytes, group: str, *, now: int, permissions: int) -> str:
    """Make an empty log in the directory and return its name. The log and its name are synced."""
    name = os.urandom(8).hex()
    aside = os.path.join(directory, f".{name}.tmp")
    identity, permissions = offsets_identity(log_id, group, name), readable_by_all(permissions)

    def build() -> None:
        files.make_directory(aside, permissions)
        make_partition(files, aside, identity, now=now, permissions=permissions)

    put_in_place(files, aside, os.path.join(directory, name), build)
    files.sync_directory(directory)
    return name


class Offsets(NotCopyable):
    """The committed offsets of one group."""

    def __init__(
        self,
        files: Files,
        directory: str,
        log_id: bytes,
        group: str,
        *,
        durability: Durability,
        permissions: int,
        clock: Callable[[], int],
        names: Mapping[LogPartition, TopicPartition] | None = None,
        check_moved: Callable[[str, TopicPartition], None] = lambda _before, _now: None,
    ) -> None:
        """`names`: the partitions of the group as they are called now.

        `check_moved` is called with a topic's name in a commit and its present name, if they differ. It raises if the
        commit is not about the directory that has the name now.
        """
        self._names_now = names or {}
        self._check_moved = check_moved
        self._files = files
        self._directory = directory
        self._log_id = log_id
        self._group = group
        self._clock = clock
        self._permissions = permissions
        self._config = TopicConfig(
            flush=FlushPolicy(records=None, interval=None, bytes=None),
            retention=Retention(age=None),
            segment_age=None,
            durability=durability,
            permissions=readable_by_all(permissions),
            max_record_bytes=_MOST_COMMIT_BYTES,
        )
        self._known: dict[str, _MemberLog] = {}
        self._own: _MemberLog | None = None  # this member's log, which has a writer
        self._live_bytes = 0  # size of the own log after its last compaction
        self._settled: set[str] = set()  # folded logs that this member could not remove
        self._count = 0  # number of commits: it tells which is later if a failed log left one member with two logs
        self._names()

    def use_names(self, names: Mapping[LogPartition, TopicPartition]) -> None:
        """Use these names of the group's partitions from now on."""
        self._names_now = names

    def close(self) -> None:
        """Close the files. Another member may then take the own log."""
        own, self._own = self._own, None
        self._known.clear()
        if own is not None:
            own.close()

    def abandon(self) -> None:
        """Close the files and write nothing: after a fork they belong to the parent."""
        own, self._own = self._own, None
        self._known.clear()
        if own is not None:
            own.abandon()

    # --- reading -----------------------------------------------------------------------------------

    def entries(self) -> Entries:
        """The entry that counts for each partition now, under its present name.

        A commit of a log that is not one of the group's stands under the name that it had then.
        """
        return self._named(self._stored())

    def _named(self, stored: _Stored) -> Entries:
        others = [
            {TopicPartition(entry.topic, each.partition): entry}
            for each, entry in stored.items()
            if each not in self._names_now
        ]
        found = merged(others)
        for each, now in self._names_now.items():
            if each in stored:
                if stored[each].topic != now.topic:
                    self._check_moved(stored[each].topic, now)
                found[now] = stored[each]
        return found

    def _stored(self) -> _Stored:
        while True:
            names = self._names()
            try:
                found = [self._read(name) for name in names]
            except _RemovedError:
                continue
            self._known = {name: known for name, known in self._known.items() if name in names}
            return merged(found)

    def commits(self) -> dict[TopicPartition, Commit]:
        """The last commit of each partition that has one."""
        found = {partition: entry.commit() for partition, entry in self.entries().items()}
        return {partition: commit for partition, commit in found.items() if commit is not None}

    def _names(self) -> list[str]:
        """The names of the logs. A group has at least one from its creation on."""
        try:
            names = log_names(self._files, self._directory)
        except FileNotFoundError as error:
            raise CorruptLogError(self._directory, 0, "no directory", "the directory of a group's offsets") from error
        if not names:
            raise CorruptLogError(self._directory, 0, "no log of committed offsets", "at least one")
        return names

    def _read(self, name: str) -> _Stored:
        try:
            known = self._known.get(name)
            if known is None:
                known = self._known[name] = self._log(name)
            return known.entries()
        except (LogError, OSError):
            self._known.pop(name, None)
            if self._files.exists(self._path(name)):
                raise
            raise _RemovedError from None

    def _log(self, name: str) -> _MemberLog:
        return _MemberLog(self._files, self._path(name), offsets_identity(self._log_id, self._group, name))

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    # --- committing --------------------------------------------------------------------------------

    def commit(self, entries: Mapping[TopicPartition, Entry], *, fence: Callable[[], None]) -> None:
        """Append the entries as one batch. Synced with durability "disk".

        `fence` raises if this member may not commit. It is called before the write, so that a refused commit
        writes nothing. It is called again after the write: if this member still owns its partitions then, the
        next owner sees the commit.
        """
        numbered = self.numbered(entries)
        fence()
        own = self.append(numbered)
        fence()
        if own.size_bytes() > max(_COMPACT_BYTES, 2 * self._live_bytes):
            self._compact(own)

    def numbered(self, entries: Mapping[TopicPartition, Entry]) -> Entries:
        """The entries as this owner's next commit. Later commits count more."""
        self._count += 1
        return {each: entry._replace(number=self._count) for each, entry in entries.items()}

    def append(self, entries: Mapping[TopicPartition, Entry]) -> _MemberLog:
        """Append numbered entries as one batch; returns the log. Appending them again changes nothing."""
        columns = _columns({
            LogPartition(entry.log_id, each.partition): entry._replace(topic=each.topic)
            for each, entry in entries.items()
        })  # fmt: skip
        size = _size(columns)
        if size > _MOST_COMMIT_BYTES:
            raise RecordTooLargeError("the commit", size, _MOST_COMMIT_BYTES)
        own = self._own or self._open_own()
        try:
            own.append(columns, size)
        except (WriterFailedError, StorageIOError) as error:
            self._drop(own)
            reason = OSError(getattr(error, "errno", None) or errno.EIO, str(error))
            raise StorageIOError(own.directory, reason, "committing offsets") from error
        return own

    def _open_own(self) -> _MemberLog:
        """Take a log that no process holds, or make one."""
        for _ in range(_OPEN_TRIES):
            for name in self._names():
                log = self._try_open(name)
                if log is not None:
                    self._known[name] = self._own = log
                    self._live_bytes = 0
                    return log
            make_offsets(
                self._files, self._directory, self._log_id, self._group,
                now=self._clock(), permissions=self._permissions,
            )  # fmt: skip
        raise LockedError(self._directory, "other members, which hold all logs of offsets", advice="commit again")

    def _try_open(self, name: str) -> _MemberLog | None:
        try:
            log = self._log(name)
            log.open(self._config, self._clock)
        except (LockedError, PermissionError):  # its member is live, or belongs to another user
            return None
        except (LogError, OSError):
            if self._files.exists(self._path(name)):
                raise
            return None  # another member has just folded it
        return log

    def _drop(self, own: _MemberLog) -> None:
        """After a failure, close the own log. The next commit opens it again, and recovery cleans it."""
        self._own = None
        self._known.pop(os.path.basename(own.directory), None)
        with suppress(LogError, OSError):
            own.close()

    def _compact(self, own: _MemberLog) -> None:
        """Begin a new segment with the entries of the own log that count, and drop the older segments."""
        try:
            counting = self._stored()
            mine = {each: entry for each, entry in own.entries().items() if entry == counting[each]}
            self._live_bytes = own.begin_anew(_columns(mine))
        except (StorageFullError, LockedError) as error:  # the commit itself is safe; the next commit tries again
            logger.warning("%s: the log of committed offsets was not compacted: %s", self._directory, error)

    # --- logs of members that left --------------------------------------------------------------------

    def fold(self) -> bool:
        """Fold one log that no process holds into the own log, and remove it. False if there is none."""
        if self._own is None:
            return False
        for name in self._names():
            if name not in self._settled and self._known.get(name) is not self._own:
                with self._held(name) as held:
                    if held is not None:
                        try:
                            self._fold(held, self._own)
                        except StorageFullError as error:  # the log stays, and its entries are still read
                            logger.warning("%s: not folded into another log: %s", self._path(name), error)
                            self._settled.add(name)
                        return True
        return False

    @contextmanager
    def _held(self, name: str) -> Iterator[Directory | None]:
        """Hold a log's lock; None if the log is gone or another process holds the lock."""
        try:
            directory = Directory.open(self._files, self._path(name))
        except (FileNotFoundError, PermissionError):
            yield None
            return
        with directory:
            yield directory if self._files.try_lock(directory.fd, directory.path) and directory.is_named() else None

    def _fold(self, held: Directory, own: _MemberLog) -> None:
        name = os.path.basename(held.path)
        counting, left = self._stored(), self._read(name)
        if not held.is_named():  # the log of another topic may have taken its name
            return
        mine = own.entries()
        copied = {each: entry for each, entry in left.items() if entry == counting[each] != mine.get(each)}
        if copied:
            columns = _columns(copied)
            own.append(columns, _size(columns))
        own.sync()  # with any durability, because the removed log may have been durable
        self._settled.add(name)
        with suppress(PermissionError):  # another user's log in a sticky directory; it does no harm
            self._remove(held, name)
            self._settled.discard(name)

    def _remove(self, held: Directory, name: str) -> None:
        """Remove a log for all readers by one rename, and then delete its files."""
        aside = f".{name}{_FOLDED}"
        with Directory.open(self._files, self._directory) as logs:
            if not held.is_at(name, dir_fd=logs.fd):
                return
            logs.rename(name, aside)
            logs.sync()
        self._files.remove_tree(self._path(aside))
        for left in self._files.listdir(self._directory):  # also logs that a dead member has renamed
            if left.endswith(_FOLDED):
                self._files.remove_tree(self._path(left))


class _RemovedError(Exception):
    """Another member has folded the log."""


class _MemberLog(NotCopyable):
    """One log of commits. All members read it; the member that holds it writes it."""

    def __init__(self, files: Files, directory: str, identity: Identity) -> None:
        self.directory = directory
        self._files = files
        self._identity = identity
        self._log = Log(files, directory, identity)
        self._position = 0  # this log is read up to here, which is flushed
        self._entries: _Stored = {}
        self._writer: Writer | None = None

    # --- reading -----------------------------------------------------------------------------------

    def entries(self) -> _Stored:
        """The entries of this log that count now."""
        while True:
            mark = self._log.mark()
            try:
                sure = self._read_sure(mark)
                return self._entries | self._above(sure, mark)
            except OffsetOutOfRangeError:  # its member has meanwhile compacted it
                self._position = 0
            finally:
                self._log.release_files()

    def _read_sure(self, mark: Mark) -> int:
        """Read the part that must be whole, and return its end."""
        start = max(self._position, mark.log_start_offset)
        try:
            self._read_on(start, mark.flushed_end)
            return mark.flushed_end
        except CorruptLogError:
            if mark.durable_end == mark.flushed_end:
                raise
        # With durability "os" a power cut may leave less than the flushed part.
        start = max(self._position, mark.log_start_offset)
        self._read_on(start, mark.durable_end)
        return max(start, mark.durable_end)

    def _read_on(self, start: int, end: int) -> None:
        if start >= end:
            return
        with _closing(Cursor(self._log, start)) as cursor:
            while batches := cursor.read(end):
                for batch in batches:
                    self._entries = merged([self._entries, self._parsed(batch)])
                self._position = cursor.position

    def _above(self, sure: int, mark: Mark) -> _Stored:
        """The entries written above the sure part: by a dead member, before a power cut, or just now."""
        segments = list_segments(self._files, self.directory)
        last = max(segments, default=0)
        if sure < last or last + segments.get(last, 0) - HEADER_BYTES <= sure:
            return {}
        path = os.path.join(self.directory, segment_name(last))
        with SegmentReader(self._files, path, self._identity) as segment:
            _, tail = measure(segment, mark if mark.sequence else None)
        with _closing(Cursor(self._log, sure)) as cursor:
            return merged([self._entries, *(self._parsed(batch) for batch in _all_batches(cursor, tail.end))])

    def _parsed(self, batch: Batch) -> _Stored:
        return merged(
            _parse(record.value or b"", record.key or b"", record.timestamp, self.directory, record.offset)
            for record in batch.records()
        )

    # --- writing -----------------------------------------------------------------------------------

    def open(self, config: TopicConfig, clock: Callable[[], int]) -> None:
        """Recover the log and hold it for writing. `LockedError` if another member holds it."""
        writer = Writer(self._files, self.directory, self._identity, config, index=self._log.index, clock=clock)
        self._writer = self._log.writer = writer

    def append(self, columns: Columns, size_bytes: int) -> None:
        """Append records as one batch. It is synced with durability "disk"."""
        assert self._writer is not None
        self._writer.append(columns, size_bytes)
        self._writer.flush()

    def size_bytes(self) -> int:
        assert self._writer is not None
        return self._writer.next_offset - self._writer.mark().log_start_offset

    def sync(self) -> None:
        """Make appended records durable, with any durability."""
        path = self._log.segments()[-1].path
        fd = self._files.open_read(path)  # for writing, a file with more names would be copied
        try:
            self._files.datasync(fd)
        finally:
            self._files.close(fd)

    def begin_anew(self, columns: Columns) -> int:
        """Replace the whole log by these records, and return their size in the log in bytes."""
        assert self._writer is not None
        self._writer.roll()
        if columns.values:
            self._writer.append(columns, _size(columns))
            self._writer.flush()
        self._writer.drop_before(self._log.index.bases()[-1])
        return self.size_bytes()

    def close(self) -> None:
        """Flush and release the log."""
        assert self._writer is not None
        writer, self._log.writer = self._writer, None
        try:
            writer.close()
        except BaseException:  # perhaps an interrupt that the program survives: release the lock
            writer.close()
            raise

    def abandon(self) -> None:
        """Release the log and write nothing."""
        assert self._writer is not None
        with suppress(OSError):  # files of a dead process
            self._writer.abandon_in_child(os.getpid())


@contextmanager
def _closing(cursor: Cursor) -> Iterator[Cursor]:
    try:
        yield cursor
    finally:
        cursor.close()


def _all_batches(cursor: Cursor, end: int) -> Iterator[Batch]:
    while batches := cursor.read(end):
        yield from batches


def merged(many: Iterable[dict[_Key, Entry]]) -> dict[_Key, Entry]:
    """For each partition the entry with the highest generation, and among these with the highest number."""
    merged: dict[_Key, Entry] = {}
    for entries in many:
        for partition, entry in entries.items():
            other = merged.get(partition)
            if other is None or (entry.generation, entry.number) >= (other.generation, other.number):
                merged[partition] = entry
    return merged


def _parse(value: bytes, member: bytes, timestamp: int, directory: str, offset: int) -> _Stored:
    try:
        found: _Stored = {}
        for facts in json.loads(value):
            topic, log_id = str(facts["topic"]), bytes.fromhex(facts["log_id"])
            for partition, (position, generation, number, history, meta, *_) in facts["partitions"].items():
                found[LogPartition(log_id, int(partition))] = Entry(
                    None if position is None else int(position), int(generation), log_id, int(history), str(meta),
                    member.decode(), timestamp, int(number), topic,
                )  # fmt: skip
        return found
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        what = f"a record at offset {offset} that is not a commit ({error})"
        raise CorruptLogError(directory, offset, what, "JSON as in docs/format.md") from error


def _columns(entries: Mapping[LogPartition, Entry]) -> Columns:
    """One record for each member and commit time."""
    alike: dict[tuple[str, int], dict[tuple[str, bytes], dict[int, tuple[object, ...]]]] = defaultdict(dict)
    for (log_id, number), entry in entries.items():
        of_topic = alike[entry.member, entry.timestamp].setdefault((entry.topic, log_id), {})
        of_topic[number] = entry.offset, entry.generation, entry.number, entry.history, entry.meta
    values = [
        json.dumps([
            {"topic": topic, "log_id": log_id.hex(), "partitions": facts} for (topic, log_id), facts in topics.items()
        ])
        for topics in alike.values()
    ]  # fmt: skip
    return Columns(
        [value.encode() for value in values],
        [member.encode() for member, _ in alike],
        [timestamp for _, timestamp in alike],
    )


def _size(columns: Columns) -> int:
    return sum(record_sizes(columns))
