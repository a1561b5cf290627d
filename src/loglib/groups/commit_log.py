"""Commit log: the commits of one member, in a small log in the format of a partition.

Invariant: a commit is stored as a whole or not at all. For each partition the commit with the highest generation
counts, and among these the one with the highest number. Damage raises `CorruptLogError`; it never means "no commit
yet". Synced commits above the watermark count: a reader continues above it, up to the end of the whole batches.

    a record's value   [{"topic": "<name>", "log_id": "<32 digits>", "partitions": {"<number>":
                       [offset, generation, number, history, meta], ...}}, ...] as JSON
    its key            the member that committed; its timestamp, when

Threads: as offsets.py.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import closing, suppress
from typing import NamedTuple, TypeVar

from ..append.record_arguments import record_sizes
from ..append.writer import Writer
from ..config.policies import TopicConfig
from ..errors import CorruptLogError, OffsetOutOfRangeError
from ..format.batch import Batch
from ..format.columns import Columns
from ..format.watermark import Mark
from ..log.cursor import Cursor
from ..log.log import Log
from ..log.recovery import list_segments, measure
from ..segment import HEADER_BYTES, Identity, SegmentReader, segment_name
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .assignment import TopicPartition


class Commit(NamedTuple):
    """A commit of a group in a partition: all records before `offset` are handled."""

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


class LogPartition(NamedTuple):
    """A partition by its log id, not by the name of its topic: as commits and owners are stored."""

    log_id: bytes
    partition: int

    def __str__(self) -> str:
        return f"{self.log_id.hex()}-{self.partition}"


Entries = dict[TopicPartition, Entry]
StoredEntries = dict[LogPartition, Entry]
_Key = TypeVar("_Key", bound=Hashable)


def merged(many: Iterable[dict[_Key, Entry]]) -> dict[_Key, Entry]:
    """For each partition the entry with the highest generation, and among these with the highest number."""
    merged: dict[_Key, Entry] = {}
    for entries in many:
        for partition, entry in entries.items():
            other = merged.get(partition)
            if other is None or (entry.generation, entry.number) >= (other.generation, other.number):
                merged[partition] = entry
    return merged


def commits_of(entries: Entries) -> dict[TopicPartition, Commit]:
    """The commit of each partition that has one."""
    return {
        partition: Commit(entry.offset, entry.meta, entry.generation, entry.member, entry.timestamp)
        for partition, entry in entries.items()
        if entry.offset is not None
    }


class CommitLog(NotCopyable):
    """One log of commits. All members read it; the member that holds it writes it."""

    _writer: Writer  # of the member that holds the log; set by `open`

    def __init__(self, files: Files, directory: str, identity: Identity) -> None:
        self.directory = directory
        self._files = files
        self._identity = identity
        self._log = Log(files, directory, identity)
        self._position = 0  # this log is read up to here, which is flushed
        self._entries: StoredEntries = {}

    # --- reading -----------------------------------------------------------------------------------

    def entries(self) -> StoredEntries:
        """The entries of this log that count now."""
        while True:
            mark = self._log.mark()
            try:
                sure = self._read_sure(mark)
                return self._entries | self._above(sure, mark)
            except OffsetOutOfRangeError:  # its member has compacted it
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
        with closing(Cursor(self._log, start)) as cursor:
            while batches := cursor.read(end):
                for batch in batches:
                    self._entries = merged([self._entries, self._parsed(batch)])
                self._position = cursor.position

    def _above(self, sure: int, mark: Mark) -> StoredEntries:
        """The entries written above the sure part: by a dead member, before a power cut, or just now."""
        segments = list_segments(self._files, self.directory)
        last = max(segments, default=0)
        if sure < last or last + segments.get(last, 0) - HEADER_BYTES <= sure:
            return {}
        path = os.path.join(self.directory, segment_name(last))
        with SegmentReader(self._files, path, self._identity) as segment:
            _, tail = measure(segment, mark if mark.sequence else None)
        entries = [self._entries]
        with closing(Cursor(self._log, sure)) as cursor:
            while batches := cursor.read(tail.end):
                entries += map(self._parsed, batches)
        return merged(entries)

    def _parsed(self, batch: Batch) -> StoredEntries:
        return merged(
            parse(record.value or b"", record.key or b"", record.timestamp, self.directory, record.offset)
            for record in batch.records()
        )

    # --- writing -----------------------------------------------------------------------------------

    def open(self, config: TopicConfig, clock: Callable[[], int]) -> None:
        """Recover the log and hold it for writing. `LockedError` if another member holds it."""
        writer = Writer(self._files, self.directory, self._identity, config, index=self._log.index, clock=clock)
        self._writer = self._log.writer = writer

    def append(self, columns: Columns, size_bytes: int) -> None:
        """Append records as one batch. It is synced with durability "disk"."""
        self._writer.append(columns, size_bytes)
        self._writer.flush()

    def size_bytes(self) -> int:
        return self._writer.next_offset - self._writer.mark().log_start_offset

    def sync(self) -> None:
        """Make appended records durable, with any durability."""
        path = self._log.segments()[-1].path
        fd = self._files.open_read(path)  # for writing, a file with more names would be copied
        try:
            self._files.datasync(fd)
        finally:
            self._files.close(fd)

    def replace_all(self, columns: Columns) -> int:
        """Replace the whole log by these records, and return their size in the log in bytes."""
        self._writer.roll()
        if columns.values:
            self._writer.append(columns, size_of(columns))
            self._writer.flush()
        self._writer.drop_before(self._log.index.bases()[-1])
        return self.size_bytes()

    def close(self) -> None:
        """Flush and release the log."""
        writer, self._log.writer = self._writer, None
        try:
            writer.close()
        except BaseException:  # perhaps an interrupt that the program survives: release the lock
            writer.close()
            raise

    def abandon(self) -> None:
        """Release the log and write nothing."""
        with suppress(OSError):  # files of a dead process
            self._writer.abandon_in_child(os.getpid())


def parse(value: bytes, member: bytes, timestamp: int, directory: str, offset: int) -> StoredEntries:
    """The entries in a record at `offset` of a log. `directory` is that of the log, for the error."""
    try:
        entries: StoredEntries = {}
        for of_topic in json.loads(value):
            topic, log_id = str(of_topic["topic"]), bytes.fromhex(of_topic["log_id"])
            for partition, (position, generation, number, history, meta, *_) in of_topic["partitions"].items():
                entries[LogPartition(log_id, int(partition))] = Entry(
                    None if position is None else int(position), int(generation), log_id, int(history), str(meta),
                    member.decode(), timestamp, int(number), topic,
                )  # fmt: skip
        return entries
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        found = f"a record at offset {offset} that is not a commit ({error})"
        raise CorruptLogError(directory, offset, found, "JSON as in docs/format.md") from error


def encoded(entries: Mapping[LogPartition, Entry]) -> Columns:
    """The entries as records: one for each member and commit time."""
    alike: dict[tuple[str, int], dict[tuple[str, bytes], dict[int, tuple[object, ...]]]] = defaultdict(dict)
    for (log_id, number), entry in entries.items():
        of_topic = alike[entry.member, entry.timestamp].setdefault((entry.topic, log_id), {})
        of_topic[number] = entry.offset, entry.generation, entry.number, entry.history, entry.meta
    values = [
        json.dumps([
            {"topic": topic, "log_id": log_id.hex(), "partitions": partitions}
            for (topic, log_id), partitions in topics.items()
        ])
        for topics in alike.values()
    ]  # fmt: skip
    return Columns(
        [value.encode() for value in values],
        [member.encode() for member, _ in alike],
        [timestamp for _, timestamp in alike],
    )


def size_of(columns: Columns) -> int:
    return sum(record_sizes(columns))
