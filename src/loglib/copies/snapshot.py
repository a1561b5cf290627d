"""Snapshot: a consistent copy of a topic, also of one that is being written.

Invariant: the copy has of each partition what was flushed at one moment, and nothing behind it; each transaction is
in all partitions or in none; a committed offset of a group is not behind the data. The copy is built under a name
that begins with a dot, synced and renamed. So a copy that was cut is never taken for a whole one.

The order: the logs of the groups, then the marks of all partitions, then the files. The marks are read twice: if both
looks find the same, there was a moment at which all of them were so. With very many partitions under load that may
not happen; then each partition has a moment of its own (`Snapshot.at_once` is False).

A sealed segment never changes, so it gets a second name (a hard link). The last segment is copied up to the flushed
end: a copy of its own, because the writer goes on in the other one. Where links are impossible or not wanted, files
share their blocks (reflink) or are copied by the system.

Threads: no state, safe for all.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from typing import NamedTuple

from ..config.arguments import topic_path
from ..config.policies import TopicConfig
from ..errors import CorruptLogError, LogMovedError, OffsetOutOfRangeError
from ..format.watermark import NAME as WATERMARK
from ..format.watermark import Mark, encode_new
from ..groups.directory import GROUPS, MIRRORED, stored_groups
from ..groups.lock_file import readable_by_all
from ..groups.offsets import log_names, offsets_identity
from ..log import copy_role, gaps, start_header, store_pointer, topic_file
from ..log.log import Log
from ..log.marks_together import marks_together
from ..log.recovery import list_segments
from ..segment import HEADER_BYTES, Identity, producers_name, segment_name
from ..system.clock import SYSTEM
from ..system.directory import Directory
from ..system.files import REAL, Files
from .log_source import own_mark

__all__ = ["Snapshot", "snapshot"]

_LOOKS = 100  # at the marks, for a moment at which all of them were as read
_TRIES = 10  # to copy the logs of a group while its members fold them
_MOST_BYTES = 1 << 20  # of topic.json
_SMALL_BYTES = 16 << 20  # of the other files that are copied as they are
_CLOCK = "clock"


class Snapshot(NamedTuple):
    """What a snapshot has."""

    path: str
    ends: tuple[int, ...]  # of each partition: the flushed end that the copy has
    size_bytes: int  # of batches
    copied_bytes: int  # of these: written to the copy's own files; the others are in files with a second name
    groups: tuple[str, ...]
    at_once: bool  # whether all ends were flushed ends at one moment


def snapshot(topic: str | os.PathLike[str], to: str | os.PathLike[str], *, links: bool = True) -> Snapshot:
    """Copy the topic in the directory `topic` to the new directory `to`, also while it is being written.

    The copy has what was flushed at one moment, the groups with their commits, and the policies. It is durable when
    this returns. It opens with mode="r"; `loglib.promote` makes it a topic that is written.

    With `links`, sealed segments get a second name instead of a copy, if both directories are on one file system. Then
    a damaged block is damaged in both, and so is what a repair overwrites in place. Give links=False for a copy that
    must outlive the disk's errors, or put it on another disk.

    Raises `FileNotFoundError` if there is no topic, `FileExistsError` if there is something at `to`, and
    `CorruptLogError` if the topic's own files contradict each other.
    """
    return take_snapshot(REAL, topic_path(topic), topic_path(to), links=links, now=SYSTEM())


def take_snapshot(files: Files, topic: str, to: str, *, links: bool, now: int) -> Snapshot:
    """The same on other files."""
    described = topic_file.read(files, topic)
    if described is None:
        raise FileNotFoundError(errno.ENOENT, "no topic here", topic)
    if files.exists(to):
        raise FileExistsError(errno.EEXIST, "a snapshot is made in a new directory", to)
    log_id, config = described
    parent = os.path.dirname(to)
    files.make_directories(parent, config.permissions)
    aside = topic_file.new_aside(files, to)
    copy = _Snapshot(files, topic, aside, log_id, config, links=links)
    made: list[Snapshot] = []
    try:
        placed = topic_file.put_in_place(files, aside, to, lambda: made.append(copy.build(to, now)))
    except BaseException:
        if files.exists(aside):
            files.remove_tree(aside)
        raise
    if not placed:
        raise FileExistsError(errno.EEXIST, "something else was put there meanwhile", to)
    files.sync_directory(parent)
    return made[0]


class _Snapshot:
    """One snapshot while it is built."""

    def __init__(
        self, files: Files, source: str, to: str, log_id: bytes, config: TopicConfig, *, links: bool
    ) -> None:
        self._files = files
        self._source = source
        self._to = to
        self._log_id = log_id
        self._config = config
        self._links = links
        self._copied_bytes = 0

    def build(self, final: str, now: int) -> Snapshot:
        files, permissions = self._files, self._config.permissions
        files.make_directory(self._to, permissions)
        groups = self._copy_groups()
        logs = [
            Log(files, topic_file.partition_directory(self._source, number), Identity.of(self._log_id, number))
            for number in range(self._config.partitions)
        ]
        try:
            marks, at_once = self._copy_logs(logs)
        finally:
            for log in logs:
                log.close()
        with Directory.open(files, self._to) as made:
            self._copy_home(made, final)
            content = files.read_whole(os.path.join(self._source, topic_file.NAME), _MOST_BYTES)
            found = copy_role.Role(copy_role.SNAPSHOT, self._log_id, files.random_bytes(8).hex(), self._source, now)
            found.write(made, permissions)
            made.replace(topic_file.NAME, content, permissions)
        ends = tuple(mark.flushed_end for mark in marks)
        size = sum(mark.flushed_end - mark.log_start_offset for mark in marks)
        return Snapshot(final, ends, size, self._copied_bytes, groups, at_once)

    def _copy_logs(self, logs: list[Log]) -> tuple[list[Mark], bool]:
        """Copy the partitions; again, with other marks, while retention drops all that a mark speaks of."""
        tries = 0
        while True:
            tries += 1
            marks, at_once = _marks(logs)
            try:
                for log, mark in zip(logs, marks, strict=True):
                    path = topic_file.partition_directory(self._to, log.partition)
                    self._copy_log(log.directory, path, log.identity, mark, self._config.permissions)
            except OffsetOutOfRangeError:
                if tries == _TRIES:
                    raise
                for log in logs:
                    with suppress(FileNotFoundError):
                        self._files.remove_tree(topic_file.partition_directory(self._to, log.partition))
            else:
                return marks, at_once

    # --- one log -------------------------------------------------------------------------------------

    def _copy_log(self, source: str, to: str, identity: Identity, mark: Mark, permissions: int) -> None:
        """Copy a log up to the mark. Synced, but for the directory's own name."""
        files = self._files
        files.make_directory(to, permissions)
        found = list_segments(files, source)
        bases = [base for base in found if mark.log_start_offset <= base <= mark.flushed_end]
        start = self._first(source, identity, mark, bases)
        with Directory.open(files, to) as made:
            for base in reversed(bases):  # the newest first: retention drops the oldest
                stop = None if base == bases[-1] else next(each for each in found if each > base)
                try:
                    if stop is not None and found[base] - HEADER_BYTES < stop - base:
                        raise FileNotFoundError  # what lies between
                    self._copy_segment(source, made, base, stop, mark, permissions)
                except FileNotFoundError:
                    start = self._dropped(source, identity, base, bases[bases.index(base) + 1 :])
                    break
            for name in (_CLOCK, gaps.NAME, start_header.NAME):
                with suppress(FileNotFoundError):
                    content = files.read_whole(os.path.join(source, name), _SMALL_BYTES)
                    made.write_new(name, content, permissions)
            own = own_mark(mark._replace(log_start_offset=start))
            made.write_new(WATERMARK, encode_new(own, identity.salt), permissions)
            made.sync()

    def _first(self, source: str, identity: Identity, mark: Mark, bases: list[int]) -> int:
        """Where the copy begins: at the first of these segments, if retention has dropped those before it."""
        start = mark.log_start_offset
        return start if bases[:1] == [start] else self._dropped(source, identity, start, bases)

    def _copy_segment(
        self, source: str, made: Directory, base: int, sealed_at: int | None, mark: Mark, permissions: int
    ) -> None:
        """Copy one segment up to the mark; one that is sealed may get a second name. Synced, but for the name."""
        files, name = self._files, segment_name(base)
        path, more = os.path.join(source, name), os.path.join(source, producers_name(base))
        if files.exists(more):  # it was there before the segment
            made.write_new(producers_name(base), files.read_whole(more, _SMALL_BYTES), permissions)
        if sealed_at is not None and self._links:
            with suppress(OSError):  # another file system, or one without links; a missing file is found again
                files.link(path, name, dst_dir_fd=made.fd)
                return
        end = HEADER_BYTES + (mark.flushed_end if sealed_at is None else sealed_at) - base
        fd = files.open_read(path)
        try:
            if (size := files.size(fd)) < end:
                raise CorruptLogError(path, size, "the end of the file", f"{end} bytes, as readers are promised")
            copy = made.create(name, permissions)
            try:
                files.share_range(fd, copy, start=0, end=end, at=0)
                files.datasync(copy)
            finally:
                files.close(copy)
        finally:
            files.close(fd)
        self._copied_bytes += end - HEADER_BYTES

    def _dropped(self, source: str, identity: Identity, base: int, after: list[int]) -> int:
        """The log start of the copy, which has the segments after this one: retention has dropped it meanwhile."""
        log = Log(self._files, source, identity)
        try:
            log_start = log.published().log_start_offset
        finally:
            log.close()
        if log_start <= base or (after and log_start < after[0]):
            found = "no file, or one that ends before the next one begins"
            raise CorruptLogError(os.path.join(source, segment_name(base)), 0, found, "the segment of this name")
        if not after:  # it has dropped all that was flushed when the mark was read
            raise OffsetOutOfRangeError(identity.partition, base, log_start, log_start)
        return after[0]

    # --- what belongs to the topic -------------------------------------------------------------------

    def _copy_home(self, made: Directory, final: str) -> None:
        """Let the copy name the store of the topic's transactions, as seen from where it will stand."""
        found = store_pointer.read_pointer(self._files, self._source)
        if found is not None:
            content = store_pointer.sealed(os.path.relpath(os.path.normpath(found.path), final), found.id)
            made.write_new(store_pointer.NAME, content, self._config.permissions)

    def _copy_groups(self) -> tuple[str, ...]:
        """Copy the commits of all groups. Each log ends where it was flushed before the marks of the data are read."""
        files, source = self._files, os.path.join(self._source, GROUPS)
        names = stored_groups(files, source)
        if not files.exists(source):
            return ()
        to = os.path.join(self._to, GROUPS)
        files.make_directory(to, self._config.permissions)
        copied = [name for name in names if self._copy_group(name, os.path.join(source, name), os.path.join(to, name))]
        files.sync_directory(to)
        return tuple(copied)

    def _copy_group(self, name: str, source: str, to: str) -> bool:
        """Copy one group; False if it is only a word on where the group is, or was deleted meanwhile."""
        files, permissions = self._files, self._config.permissions
        with suppress(FileNotFoundError):
            if not files.is_directory(source):
                content = files.read_whole(source, _MOST_BYTES)
                files.write_new(to, content, readable_by_all(permissions))
                return False
            tries = 0
            while True:
                tries += 1
                files.make_directory(to, permissions)
                for each in ("members", "owners", "offsets"):
                    files.make_directory(os.path.join(to, each), permissions)
                try:
                    self._copy_offsets(name, os.path.join(source, "offsets"), os.path.join(to, "offsets"))
                except (FileNotFoundError, LogMovedError, OffsetOutOfRangeError, CorruptLogError):
                    # A member has folded a log into another one, and the entries of the first may be in neither copy.
                    files.remove_tree(to)
                    if not files.exists(source):
                        return False
                    if tries == _TRIES:
                        raise
                else:
                    files.write_new(os.path.join(to, MIRRORED), b"", readable_by_all(permissions))
                    files.sync_directory(to)
                    return True
        return False  # deleted meanwhile

    def _copy_offsets(self, group: str, source: str, to: str) -> None:
        files = self._files
        names = log_names(files, source)
        for name in names:
            identity = offsets_identity(self._log_id, group, name)
            log = Log(files, os.path.join(source, name), identity)
            try:
                mark = log.found()
            finally:
                log.close()
            at = os.path.join(to, name)
            self._copy_log(log.directory, at, identity, mark, readable_by_all(self._config.permissions))
        if any(not files.exists(os.path.join(source, name)) for name in names):
            raise FileNotFoundError(errno.ENOENT, "a log was folded meanwhile", source)
        files.sync_directory(to)


def _marks(logs: list[Log]) -> tuple[list[Mark], bool]:
    """The marks of all partitions, and whether all of them held at one moment."""
    for _ in range(_LOOKS):
        marks = marks_together(logs, Log.found)
        again = marks_together(logs, Log.found)
        if marks == again:
            return [again[log.partition] for log in logs], True
        time.sleep(0)
    return [again[log.partition] for log in logs], False
