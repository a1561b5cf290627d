"""Snapshot: a consistent copy of a topic, also of one that is being written.

Invariant: the copy has each partition up to its flushed end at one moment, and nothing after that; each transaction is
in all partitions or in none; a committed offset of a group is not later than the data. The copy is built under a name
that begins with a dot, synced and renamed. So a copy that was cut is never taken for a whole one.

The order: the logs of the groups, then the marks of all partitions, then the files. The marks are read twice: if both
readings are the same, there was a moment at which all marks were so. With very many partitions under load that may not
happen; then each partition has a moment of its own (`Snapshot.at_once` is False).

A sealed segment never changes, so it gets a second name (a hard link). The last segment is copied up to the flushed
end, because the writer continues in the original. Where links are impossible or not wanted, files share their blocks
(reflink) or are copied by the system.

Threads: no state, safe for all.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import NamedTuple

from ..config.arguments import topic_path
from ..config.policies import TopicConfig
from ..errors import CorruptLogError, OffsetOutOfRangeError
from ..format.watermark import NAME as WATERMARK
from ..format.watermark import Mark, encode_new
from ..groups.directory import GROUPS, MIRRORED
from ..groups.lock_file import readable_by_all
from ..groups.offsets import offsets_identity
from ..log import copy_role, gaps, store_pointer, topic_file
from ..log.log import Log
from ..log.recovery import list_segments
from ..log.verify import Progress
from ..segment import HEADER_BYTES, START_HEADER, Identity, producers_name, segment_name
from ..system.clock import SYSTEM
from ..system.directory import Directory
from ..system.files import REAL, Files
from .local_source import LocalTopicSource, own_mark
from .sources import FOLDED, GroupSnapshot

_LOOKS = 100  # how often to read the marks, until two readings are the same
_TRIES = 10  # to copy the logs of a group while its members fold them
_SMALL_BYTES = 16 << 20  # of the other files that are copied whole
_PIECE_BYTES = 64 << 20  # copied between two reports of progress; whole blocks, which files may share
_CLOCK = "clock"


class Snapshot(NamedTuple):
    """The content of a snapshot."""

    path: str
    ends: tuple[int, ...]  # of each partition: the flushed end of the copy
    size_bytes: int  # of batches
    copied_bytes: int  # of these: written to the copy's own files; the others are in files with a second name
    groups: tuple[str, ...]
    at_once: bool  # True if all ends were flushed ends at one moment


def snapshot(
    topic: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    links: bool = True,
    progress: Progress | None = None,
) -> Snapshot:
    """Copy the topic in the directory `topic` to the new directory `to`, also while it is being written.

    The copy has the records that were flushed at one moment, the groups with their commits, and the policies. It is
    durable when this returns. It opens with mode="r"; `loglib.copies.promote` makes it a topic that is written.

    With `links`, sealed segments get a second name instead of a copy, if both directories are on one file system. Then
    a damaged block is damaged in both topics, and so are bytes that a repair overwrites in place. Give links=False for
    a copy that must outlive the disk's errors, or put it on another disk.

    `progress` is called with two numbers of bytes of log: those that the copy has, and all.

    Raises `FileNotFoundError` if there is no topic, `FileExistsError` if there is something at `to`, and
    `CorruptLogError` if the topic's own files contradict each other.
    """
    return take_snapshot(REAL, topic_path(topic), topic_path(to), links=links, now=SYSTEM(), progress=progress)


def take_snapshot(
    files: Files, topic: str, to: str, *, links: bool, now: int, progress: Progress | None = None
) -> Snapshot:
    """Take a snapshot on these files."""
    source = LocalTopicSource(files, topic)
    if files.exists(to):
        raise FileExistsError(errno.EEXIST, "a snapshot is made in a new directory", to)
    _, config = source.described()
    aside = topic_file.new_topic_aside(files, to, config.permissions)
    copy = _Snapshot(files, source, aside, config, links, progress)
    made: list[Snapshot] = []
    try:
        placed = topic_file.put_in_place(files, aside, to, lambda: made.append(copy.build(to, now)))
    except BaseException:
        if files.exists(aside):
            files.remove_tree(aside)
        raise
    if not placed:
        raise FileExistsError(errno.EEXIST, "something else was put there meanwhile", to)
    files.sync_directory(os.path.dirname(to))
    return made[0]


@dataclass(slots=True)
class _Snapshot:
    """One snapshot while it is built."""

    _files: Files
    _source: LocalTopicSource
    _to: str
    _config: TopicConfig
    _links: bool
    _progress: Progress | None
    _copied_bytes: int = 0
    _done: int = 0  # bytes of the partitions, copied or linked
    _all: int = 0  # of the partitions up to their marks; 0 while groups are copied, whose bytes do not count

    def build(self, final: str, now: int) -> Snapshot:
        files, source, permissions = self._files, self._source, self._config.permissions
        files.make_directory(self._to, permissions)
        groups = self._copy_groups()
        with ExitStack() as opened:
            for number in range(self._config.partitions):
                opened.callback(source.log(number).close)
            marks, at_once = self._copy_partitions()
        with Directory.open(files, self._to) as made:
            pointer = source.store_pointer(final)
            if pointer is not None:
                made.write_new(store_pointer.NAME, pointer, permissions)
            content, _ = source.described()
            role = copy_role.Role(copy_role.SNAPSHOT, source.log_id, files.random_bytes(8).hex(), source.place, now)
            role.write(made, permissions)
            made.replace(topic_file.NAME, content, permissions)
        ends = tuple(mark.flushed_end for mark in marks)
        size = sum(mark.flushed_end - mark.log_start_offset for mark in marks)
        return Snapshot(final, ends, size, self._copied_bytes, groups, at_once)

    def _copy_partitions(self) -> tuple[list[Mark], bool]:
        """Copy the partitions; again, with other marks, while retention drops all that was flushed at a mark.

        Returns their marks, and True if all of them held at one moment.
        """
        source, tries = self._source, 0
        while True:
            tries += 1
            marks, at_once = self._marks()
            self._done, self._all = 0, sum(mark.flushed_end - mark.log_start_offset for mark in marks)
            try:
                for number, mark in enumerate(marks):
                    place, to = (topic_file.partition_directory(each, number) for each in (source.place, self._to))
                    identity = Identity.of(source.log_id, number)
                    self._copy_log(place, to, identity, mark, self._config.permissions)
            except OffsetOutOfRangeError:
                if tries == _TRIES:
                    raise
                for number in range(len(marks)):
                    with suppress(FileNotFoundError):
                        self._files.remove_tree(topic_file.partition_directory(self._to, number))
            else:
                return marks, at_once

    def _marks(self) -> tuple[list[Mark], bool]:
        numbers = range(self._config.partitions)
        for _ in range(_LOOKS):
            marks = self._source.marks(numbers)
            again = self._source.marks(numbers)
            if marks == again:
                return [again[number] for number in numbers], True
            time.sleep(0)
        return [again[number] for number in numbers], False

    # --- one log -------------------------------------------------------------------------------------

    def _copy_log(self, source: str, to: str, identity: Identity, mark: Mark, permissions: int) -> None:
        """Copy a log up to the mark. Synced, except the name of the directory."""
        files = self._files
        files.make_directory(to, permissions)
        found = list_segments(files, source)
        bases = [base for base in found if mark.log_start_offset <= base <= mark.flushed_end]
        start = mark.log_start_offset
        if bases[:1] != [start]:  # retention has dropped the first ones
            start = self._dropped(source, identity, start, bases)
        with Directory.open(files, to) as made:
            for base in reversed(bases):  # the newest first: retention drops the oldest
                stop = None if base == bases[-1] else next(each for each in found if each > base)
                try:
                    if stop is not None and found[base] - HEADER_BYTES < stop - base:
                        raise FileNotFoundError  # of the segments between
                    self._copy_segment(source, made, base, stop, mark, permissions)
                except FileNotFoundError:
                    start = self._dropped(source, identity, base, bases[bases.index(base) + 1 :])
                    break
            for name in (_CLOCK, gaps.NAME, START_HEADER):
                with suppress(FileNotFoundError):
                    content = files.read_whole(os.path.join(source, name), _SMALL_BYTES)
                    made.write_new(name, content, permissions)
            own = own_mark(mark._replace(log_start_offset=start))
            made.write_new(WATERMARK, encode_new(own, identity.salt), permissions)
            made.sync()

    def _copy_segment(
        self, source: str, made: Directory, base: int, sealed_at: int | None, mark: Mark, permissions: int
    ) -> None:
        """Copy one segment up to the mark; a sealed one may get a second name. Synced, except the name."""
        files, name = self._files, segment_name(base)
        path, more = os.path.join(source, name), os.path.join(source, producers_name(base))
        if files.exists(more):  # it was there before the segment
            made.write_new(producers_name(base), files.read_whole(more, _SMALL_BYTES), permissions)
        end = HEADER_BYTES + (mark.flushed_end if sealed_at is None else sealed_at) - base
        if sealed_at is not None and self._links:
            try:
                files.link(path, name, dst_dir_fd=made.fd)
            except OSError:  # another file system, or one without links; a missing file is found again
                pass
            else:
                self._report(end - HEADER_BYTES)
                return
        with files.closing(files.open_read(path)) as fd:
            if (size := files.size(fd)) < end:
                raise CorruptLogError(path, size, "the end of the file", f"{end} bytes, as readers are promised")
            with files.closing(made.create(name, permissions)) as copy:
                for start in range(0, end, _PIECE_BYTES):
                    stop = min(start + _PIECE_BYTES, end)
                    files.share_range(fd, copy, start=start, end=stop, at=start)
                    self._report(stop - max(start, HEADER_BYTES))
                files.datasync(copy)
        self._copied_bytes += end - HEADER_BYTES

    def _report(self, more: int) -> None:
        """Report that the copy has `more` bytes more of the partitions."""
        if self._progress is not None and self._all:
            self._done += more
            self._progress(min(self._done, self._all), self._all)

    def _dropped(self, source: str, identity: Identity, base: int, after: list[int]) -> int:
        """The log start of the copy, which has the segments after this one: retention has dropped it meanwhile."""
        with closing(Log(self._files, source, identity)) as log:
            log_start = log.published().log_start_offset
        if log_start <= base or (after and log_start < after[0]):
            found = "no file, or one that ends before the next one begins"
            raise CorruptLogError(os.path.join(source, segment_name(base)), 0, found, "the segment of this name")
        if not after:  # it has dropped all that was flushed when the mark was read
            raise OffsetOutOfRangeError(identity.partition, base, log_start, log_start)
        return after[0]

    # --- groups --------------------------------------------------------------------------------------

    def _copy_groups(self) -> tuple[str, ...]:
        """Copy the commits of all groups, up to ends that are read before the marks of the data. Returns their names.

        A file that only names the place of a group is copied, too.
        """
        files, to = self._files, os.path.join(self._to, GROUPS)
        if not files.exists(os.path.join(self._source.place, GROUPS)):
            return ()
        tries = 0
        while True:
            tries += 1
            files.make_directory(to, self._config.permissions)
            noted = self._source.groups()
            try:
                for name, group in noted.items():
                    self._copy_group(name, group, os.path.join(to, name))
            except FOLDED:
                # A member has folded a log into another one, and the entries of the first may be in neither copy.
                files.remove_tree(to)
                if tries == _TRIES:
                    raise
            else:
                files.sync_directory(to)
                return tuple(name for name, group in noted.items() if group.pointer is None)

    def _copy_group(self, group: str, noted: GroupSnapshot, to: str) -> None:
        files, permissions = self._files, readable_by_all(self._config.permissions)
        if noted.pointer is not None:
            files.write_new(to, noted.pointer, permissions)
            return
        source, offsets = os.path.join(self._source.place, GROUPS, group, "offsets"), os.path.join(to, "offsets")
        for each in (to, os.path.join(to, "members"), os.path.join(to, "owners"), offsets):
            files.make_directory(each, self._config.permissions)
        for name, mark in noted.marks.items():
            identity = offsets_identity(self._source.log_id, group, name)
            self._copy_log(os.path.join(source, name), os.path.join(offsets, name), identity, mark, permissions)
        if any(not files.exists(os.path.join(source, name)) for name in noted.marks):
            raise FileNotFoundError(errno.ENOENT, "a log was folded meanwhile", source)
        files.sync_directory(offsets)
        files.write_new(os.path.join(to, MIRRORED), b"", permissions)
        files.sync_directory(to)
