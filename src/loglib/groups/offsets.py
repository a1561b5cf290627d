"""Offsets: the committed offsets of a group, in one log per member (commit_log.py).

Invariant: a commit is durable when `commit` has returned (with durability "disk"). A new owner commits in its own
generation before it reads, so a late commit of the previous owner changes nothing. A commit belongs to the log with
its log id, whatever the topic's name is now.

    offsets/<log>/     a partition's directory: segment, watermark, lock; see docs/format.md

A log has one writer, the member that holds it, so no member waits for another to commit. For its first commit a member
takes a log that no process holds, or makes one. Logs of members that left are folded: a member writes their commits to
its own log, syncs it, and removes the old log. If a log has disappeared, its commits are in another log, so all logs
must be read again.

Threads: an `Offsets` belongs to the thread of its group.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

from ..config.policies import Durability, FlushPolicy, Retention, TopicConfig
from ..errors import (
    CorruptLogError,
    LockedError,
    LogError,
    RecordTooLargeError,
    StorageFullError,
    StorageIOError,
    WriterFailedError,
)
from ..format.header import crc32c
from ..log.topic_file import make_partition, put_in_place
from ..segment import Identity
from ..system.directory import Directory
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .assignment import TopicPartition
from .commit_log import (
    Commit,
    CommitLog,
    Entries,
    Entry,
    LogPartition,
    StoredEntries,
    commits_of,
    encoded,
    merged,
    size_of,
)
from .lock_file import readable_by_all

logger = logging.getLogger("loglib")

_COMPACT_BYTES = 1 << 20  # about 10,000 commits: a new owner reads them in about 50 ms
_MOST_COMMIT_BYTES = 8 << 20  # 10,000 partitions with half a kilobyte of `meta` each
_OPEN_TRIES = 100  # another member may take or remove a log before this member opens it
_LOG_NAME = re.compile("[0-9a-f]{16}")
# Another user's log in a sticky directory cannot be removed, and none in an image below an overlay: it may stay.
_MAY_STAY = (errno.EACCES, errno.EPERM, errno.EXDEV)
_FOLDED = ".folded"  # the name of a log whose removal was interrupted ends so


def offsets_identity(log_id: bytes, group: str, name: str) -> Identity:
    """The identity of one of a group's logs. Its number is a hash of the names, and no partition has it."""
    return Identity.of(log_id, 0x8000_0000 | crc32c(f"{group}/{name}".encode()) & 0x7FFF_FFFF)


def log_names(files: Files, directory: str) -> list[str]:
    """The names of a group's logs in the directory, sorted. Other names are ignored. `CorruptLogError` without it."""
    try:
        return sorted(filter(_LOG_NAME.fullmatch, files.names_in(directory)))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptLogError(directory, 0, "no directory", "the directory of a group's offsets") from error


def make_offsets(files: Files, directory: str, log_id: bytes, group: str, *, now: int, permissions: int) -> str:
    """Make an empty log in the directory and return its name. The log and its name are synced."""
    name = os.urandom(8).hex()
    aside = os.path.join(directory, f".{name}.tmp")
    identity, permissions = offsets_identity(log_id, group, name), readable_by_all(permissions)
    make = partial(make_partition, files, aside, identity, now=now, permissions=permissions)
    put_in_place(files, aside, os.path.join(directory, name), make)
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
        """`check_moved` is called with the name of a topic in a commit and its present name, if they differ.

        It raises if the commit is of another directory than the one with the present name.
        """
        self.names_now = names or {}  # of the group's partitions; the caller sets it when partitions are added
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
        self._known: dict[str, CommitLog] = {}
        self._own: CommitLog | None = None  # this member's log, which has a writer
        self._live_bytes = 0  # size of this member's log after its last compaction
        self._unremoved: set[str] = set()  # folded logs that this member could not remove
        self._count = 0  # number of commits: it orders them if a failed log left one member with two logs
        self._names()

    def close(self) -> None:
        """Close the files. Another member may then take this member's log."""
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
        """The entry that counts for each partition, by its present name.

        A partition that is none of the group's is named as its topic was at the commit.
        """
        return self._named(self._stored())

    def _named(self, stored: StoredEntries) -> Entries:
        entries = merged(
            {TopicPartition(entry.topic, each.partition): entry}
            for each, entry in stored.items()
            if each not in self.names_now
        )
        for each, now in self.names_now.items():
            if each in stored:
                if stored[each].topic != now.topic:
                    self._check_moved(stored[each].topic, now)
                entries[now] = stored[each]
        return entries

    def _stored(self) -> StoredEntries:
        while True:
            names = self._names()
            try:
                of_logs = [self._read(name) for name in names]
            except _RemovedError:
                continue
            self._known = {name: known for name, known in self._known.items() if name in names}
            return merged(of_logs)

    def commits(self) -> dict[TopicPartition, Commit]:
        """The last commit of each partition that has one."""
        return commits_of(self.entries())

    def _names(self) -> list[str]:
        """The names of the logs. A group always has at least one."""
        names = log_names(self._files, self._directory)
        if not names:
            raise CorruptLogError(self._directory, 0, "no log of committed offsets", "at least one")
        return names

    def _read(self, name: str) -> StoredEntries:
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

    def _log(self, name: str) -> CommitLog:
        return CommitLog(self._files, self._path(name), offsets_identity(self._log_id, self._group, name))

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
        """The entries as this owner's next commit: it counts more than the commits before it."""
        self._count += 1
        return {each: entry._replace(number=self._count) for each, entry in entries.items()}

    def append(self, entries: Mapping[TopicPartition, Entry]) -> CommitLog:
        """Append numbered entries as one batch to this member's log, and return the log. Repeating it is harmless."""
        columns = encoded({
            LogPartition(entry.log_id, each.partition): entry._replace(topic=each.topic)
            for each, entry in entries.items()
        })  # fmt: skip
        size = size_of(columns)
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

    def _open_own(self) -> CommitLog:
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

    def _try_open(self, name: str) -> CommitLog | None:
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

    def _drop(self, own: CommitLog) -> None:
        """Close this member's log after a failure. The next commit opens it again, and recovery cleans it."""
        self._own = None
        self._known.pop(os.path.basename(own.directory), None)
        with suppress(LogError, OSError):
            own.close()

    def _compact(self, own: CommitLog) -> None:
        """Begin a new segment with the entries of this member's log that count, and drop the older segments."""
        try:
            counting = self._stored()
            mine = {each: entry for each, entry in own.entries().items() if entry == counting[each]}
            self._live_bytes = own.replace_all(encoded(mine))
        except (StorageFullError, LockedError) as error:  # the commit itself is safe; the next commit tries again
            logger.warning("%s: the log of committed offsets was not compacted: %s", self._directory, error)

    # --- logs of members that left --------------------------------------------------------------------

    def fold(self) -> bool:
        """Fold one log that no process holds into this member's log, and remove it. False if there is none."""
        if self._own is None:
            return False
        for name in self._names():
            if name not in self._unremoved and self._known.get(name) is not self._own:
                with self._held(name) as held:
                    if held is not None:
                        try:
                            self._fold(held, self._own)
                        except StorageFullError as error:  # the log stays, and its entries are still read
                            logger.warning("%s: not folded into another log: %s", self._path(name), error)
                            self._unremoved.add(name)
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

    def _fold(self, held: Directory, own: CommitLog) -> None:
        name = os.path.basename(held.path)
        counting, left = self._stored(), self._read(name)
        if not held.is_named():  # the log of another topic may have taken its name
            return
        mine = own.entries()
        copied = {each: entry for each, entry in left.items() if entry == counting[each] != mine.get(each)}
        if copied:
            columns = encoded(copied)
            own.append(columns, size_of(columns))
        own.sync()  # with any durability, because the removed log may have been durable
        self._unremoved.add(name)
        try:
            self._remove(held, name)
        except OSError as error:
            if error.errno not in _MAY_STAY:
                raise
        else:
            self._unremoved.discard(name)

    def _remove(self, held: Directory, name: str) -> None:
        """Remove a log for all readers by one rename, and then delete its files."""
        aside = f".{name}{_FOLDED}"
        with Directory.open(self._files, self._directory) as logs:
            if not held.is_at(name, dir_fd=logs.fd):
                return
            logs.rename(name, aside)
            logs.sync()
        self._files.remove_tree(self._path(aside))
        for other in self._files.names_in(self._directory):  # also logs that a dead member has renamed
            if other.endswith(_FOLDED):
                self._files.remove_tree(self._path(other))


class _RemovedError(Exception):
    """Another member has folded the log."""
