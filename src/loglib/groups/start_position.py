"""Start position: the offset at which a member continues in a partition that it has just claimed, and its commit.

Invariant: the offset of a commit is used only in the log that the commit names, and only if the log still has the
history of the commit. A start that depends on the time is committed, so that the next owner does not start later. A
partition that was added to a topic of the group is read from its begin, whatever the start, because the group existed
before the first of its records.

Threads: facts that do not change.
"""

from __future__ import annotations

from ..config.arguments import Start, parse_start
from ..errors import LogReplacedError, OffsetOutOfRangeError
from ..log.history import HistoryPoint, history_at, point_at
from ..log.log import Log
from ..log.lookup import resolve
from .assignment import TopicPartition
from .commit_log import Entries, Entry
from .directory import GroupDirectory

_NEVER = 1 << 63


class StartPosition:
    """The policy of one member: where a group without a commit starts, and what retention may skip."""

    def __init__(self, directory: GroupDirectory, start: Start, member: str, *, restart: bool) -> None:
        if isinstance(start, int):
            raise ValueError(f"a group cannot start at offset {start} in every partition; seek() after the start")
        parse_start(start, now_us=directory.clock())
        self.restart = restart  # begin at the start if the log no longer has the committed offset
        self.added: set[TopicPartition] = set()  # since this member joined
        self._directory = directory
        self._start = start
        self._member = member

    def first(self, partition: TopicPartition, entries: Entries) -> int:
        """The first offset of a partition without a commit; `entries` has those of other partitions."""
        log = self._directory.logs[partition]
        if self._start != "begin" and self._came_later(partition, log, entries):
            return log.mark().log_start_offset
        return resolve(log, parse_start(self._start, now_us=self._directory.clock()))

    def _came_later(self, partition: TopicPartition, log: Log, entries: Entries) -> bool:
        """True if the group existed before the partition: this member saw it added, or the group has older commits."""
        log_id = log.identity.log_id
        times = [entry.timestamp for each, entry in entries.items() if entry.log_id == log_id and each != partition]
        return partition in self.added or min(times, default=_NEVER) < log.segments()[0].created

    def after(self, entries: Entries, partition: TopicPartition, *, generation: int) -> tuple[int, Entry]:
        """The offset to read next after the last commit, and the entry to commit in this generation."""
        log, entry = self._directory.logs[partition], entries.get(partition)
        offset = self._offset(entries, partition)
        if entry is not None and entry.offset == offset and entry.log_id == log.identity.log_id:
            return offset, entry._replace(generation=generation)
        history, committed = 0, None
        if self._start != "begin" or (entry is not None and entry.offset is not None):
            committed, history = offset, history_at(log, offset)
        log_id, now = log.identity.log_id, self._directory.clock()
        return offset, Entry(committed, generation, log_id, history, "", self._member, now)

    def _offset(self, entries: Entries, partition: TopicPartition) -> int:
        entry = entries.get(partition)
        if entry is None or entry.offset is None:
            return self.first(partition, entries)
        try:
            self._check(entry, entry.offset, partition)
            return entry.offset
        except (OffsetOutOfRangeError, LogReplacedError):
            if not self.restart:
                raise
            return self.first(partition, entries)

    def _check(self, entry: Entry, offset: int, partition: TopicPartition) -> None:
        """`LogReplacedError` if the commit was made in another log, or in another history of this log."""
        log, differs = self._directory.logs[partition], ""
        if entry.log_id != log.identity.log_id:
            differs = f"the commit names log {entry.log_id.hex()}, this log is {log.identity.log_id.hex()}"
        elif (now := point_at(log, offset)).agrees(HistoryPoint(entry.log_id, offset, entry.history)) is False:
            differs = f"the batch before the offset had CRC {entry.history:08x} and now has {now.chain:08x}"
        if differs:
            raise LogReplacedError(self._directory.name, str(partition), offset, differs)
