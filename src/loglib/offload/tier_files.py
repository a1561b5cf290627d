"""Tier files: a topic's uploaded segments, for reading: by themselves, or as the past of the topic in its directory.

Invariant: a segment counts only if a manifest names it. A place that is opened by itself does not grow. A place that is
a topic's past is looked at again when the directory no longer has a segment: retention drops what a manifest has.

    Tier   the newest manifest, and the files below
    Joined      files of a topic's directory, and behind them those of its place: a segment is opened here or there
    TierOverlayLog   a log in such files: it begins where the place begins

Past and tail are files of one directory to everything above, so offsets, checks, groups and columns work as ever.

Threads: safe for all.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import closing

from ..config.arguments import check_names, topic_path
from ..config.policies import MAX_OFFSET
from ..config.uri import is_remote, local_path
from ..errors import CorruptLogError, LogError
from ..format.watermark import Mark
from ..log import topic_file
from ..log.copy_role import MANIFESTS, is_tier
from ..log.gaps import Gap, joined, read_gaps
from ..log.history import AHEAD, BEHIND, compare_history, point_at
from ..log.log import FixedMark, Log
from ..segment import Identity, parse_producers_name, parse_segment_name, segment_name
from ..system.directory import Directory
from ..system.files import Files
from ..system.files_wrapper import FilesWrapper
from ..system.not_copyable import NotCopyable
from . import manifest_log
from .manifest_log import DirectorySlots, FileSlots
from .storage import storage_of
from .tier_manifest import Tiered, TieredPartition, decode

__all__ = ["Tier", "TierOverlayFiles", "TierOverlayLog", "newest", "tier_at"]

logger = logging.getLogger("loglib")

_ADVICE = "nothing was read: open each of them by itself, or name the place that this topic was uploaded to"


def newest(files: Files, path: str) -> Tiered | None:
    """The newest manifest of a place in an object store; None if there is none."""
    if not is_tier(files, path):
        return None
    return manifest_log.newest(FileSlots(files, os.path.join(path, MANIFESTS)), decode)


class Tier(NotCopyable):
    """A place as its newest manifest describes it."""

    def __init__(self, files: Files, given: str) -> None:
        """`given` is a path or a URI; `files` are for paths. `FileNotFoundError` if there is no place."""
        self.given = given
        self._storage, path = storage_of(given)
        self.path = os.path.abspath(local_path(path)) if self._storage.is_local else path
        self._local = files
        self._lock = threading.RLock()  # for one look at the manifests at a time
        self.tiered = self._load()
        self.files = self._files_of(self.tiered)

    def refresh(self) -> None:
        """Look for a newer manifest."""
        with self._lock:
            tiered = self._load()
            if tiered != self.tiered:
                self.files = self._files_of(tiered)
                self.tiered = tiered

    def _load(self) -> Tiered:
        path, found = os.path.join(self.path, MANIFESTS), None
        if not self._storage.is_local:  # a listing is kept, so these files are for one look
            found = newest(self._storage.files(), self.path)
        elif is_tier(self._local, self.path):
            with Directory.open(self._local, path) as directory:
                found = manifest_log.newest(DirectorySlots(directory), decode)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no uploaded segments here; loglib.tier uploads them", self.path)
        return found

    def _files_of(self, tiered: Tiered) -> Files:
        listings = {self.directory(each.partition): each.listing for each in tiered.partitions}
        if self._storage.is_local:
            return _Listed(self._local, listings)
        return self._storage.files(listings=listings, until_offset=MAX_OFFSET, eager=False)

    def directory(self, partition: int) -> str:
        return topic_file.partition_directory(self.path, partition)

    def sizes(self, partition: int) -> dict[str, int]:
        """Name and size of what is there of a partition, whether a manifest names it or not. Asks the store."""
        files = self._local if self._storage.is_local else self._storage.files()
        return files.sizes(self.directory(partition))

    def gaps(self, identity: Identity) -> tuple[Gap, ...]:
        """The gaps that are declared in what it has of a partition; `CorruptLogError` if their file is damaged."""
        end = self.tiered.partition(identity.partition).end
        found = read_gaps(self.files, self.directory(identity.partition), identity)
        return tuple(each for each in found if each.start < end)

    def make_log(self, files: Files, directory: str, identity: Identity) -> Log:
        """The log of a partition, which does not grow."""
        log = Log(files, directory, identity)
        log.writer = FixedMark(self.tiered.partition(identity.partition).mark)
        return log


class _Listed(FilesWrapper):
    """The files of a place in a directory. A partition has the segments that the manifest names, and no others."""

    def __init__(self, files: Files, listings: Mapping[str, Mapping[str, int]]) -> None:
        super().__init__(files)
        self._listings = listings

    def is_directory(self, path: str, *, dir_fd: int | None = None) -> bool:
        """Whether the path is a directory. Without a segment a partition may have none."""
        return path in self._listings or super().is_directory(path, dir_fd=dir_fd)

    def sizes(self, directory: str, *, dir_fd: int | None = None) -> dict[str, int]:
        """Name and size in bytes of what counts in the directory."""
        listing = self._listings.get(directory)
        return super().sizes(directory, dir_fd=dir_fd) if listing is None else dict(listing)


def tier_at(files: Files, path: str, mode: str, tier: object) -> Tier | None:
    """The place of uploaded segments at the path; None if that is a topic's directory."""
    if tier is not None and mode != "r":
        raise ValueError("tier= is for reading: open the topic with mode='r'")
    if is_remote(path):
        if mode != "r":
            raise ValueError(f"{storage_of(path)[1]}: a topic in an object store is only read; open it with mode='r'")
        place = Tier(files, path)
        check_names(os.path.basename(place.path))
    elif path and mode == "r" and is_tier(files, os.path.abspath(path)):
        place = Tier(files, topic_path(path))
    else:
        return None
    if tier is not None:
        raise ValueError(f"{place.path} has uploaded segments, and no live tail; name the topic's directory instead")
    return place


class TierOverlayFiles(FilesWrapper):
    """The files of a topic's directory. A segment that retention has dropped is opened in the topic's place."""

    def __init__(self, files: Files, path: str, log_id: bytes, place: Tier) -> None:
        super().__init__(files)
        self._elsewhere: dict[int, Files] = {}  # by the number of a file that is open in the place
        self.place = place
        self._path = path
        self._looked: dict[int, int] = {}  # the start of each partition for which a newer manifest was looked for
        if place.tiered.log_id != log_id:
            raise LogError(
                f"{place.path} has the segments of another log (a topic {place.tiered.topic!r} with id "
                f"{place.tiered.log_id.hex()}) than {path} (id {log_id.hex()}); name the place of this topic"
            )

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        try:
            return self.inner.open(path, flags, mode, dir_fd=dir_fd)
        except FileNotFoundError:
            writes = flags & (os.O_RDWR | os.O_CREAT)
            found = None if writes or dir_fd is not None else self._in_place(path)
            if found is None:
                raise
        files, there = found
        fd = files.open(there, flags)
        self._elsewhere[fd] = files
        return fd

    def close(self, fd: int) -> None:
        self._elsewhere.pop(fd, self.inner).close(fd)

    def pread(self, fd: int, size_bytes: int, position: int) -> bytes:
        return self._files_of(fd).pread(fd, size_bytes, position)

    def fstat(self, fd: int) -> os.stat_result:
        return self._files_of(fd).fstat(fd)

    def sendfile(self, to: int, source: int, start: int, size_bytes: int) -> int:
        return self._files_of(source).sendfile(to, source, start, size_bytes)

    def _files_of(self, fd: int) -> Files:
        """The files that have the open file."""
        return self._elsewhere.get(fd, self.inner)

    def sizes(self, directory: str, *, dir_fd: int | None = None) -> dict[str, int]:
        """Name and size in bytes of everything in the directory, and of the partition's segments in the place."""
        found = self.inner.sizes(directory, dir_fd=dir_fd)
        number = self._partition_of(directory)
        if number is None or dir_fd is not None:
            return found
        bases = [base for name in found if (base := parse_segment_name(name)) is not None]
        past, last = self.past(number, min(bases, default=0)).listing, max(bases, default=0)
        # A place that is ahead has segments of which the directory has only the beginning, or nothing.
        return {name: size for name, size in past.items() if name < segment_name(last)} | found

    def past(self, number: int, start: int) -> TieredPartition:
        """What the place has of a partition of which the directory begins at `start`: up to there, if it was dropped.

        Nothing, if the place does not reach the directory.
        """
        past = self.place.tiered.partition(number)
        if past.end < start and self._looked.get(number) != start:  # retention drops what a manifest has by then
            self.place.refresh()
            self._looked[number] = start
            past = self.place.tiered.partition(number)
        return past if past.end >= start else TieredPartition(number)

    def _in_place(self, path: str) -> tuple[Files, str] | None:
        """Where the place has the segment, or its producers."""
        directory, name = os.path.split(path)
        number, base = self._partition_of(directory), parse_segment_name(name)
        if base is None:
            base = parse_producers_name(name)
        if number is None or base is None:
            return None
        for refresh in (False, True):
            if refresh:
                self.place.refresh()
            if any(each.start == base for each in self.place.tiered.partition(number).segments):
                return self.place.files, os.path.join(self.place.directory(number), name)
        return None

    def _partition_of(self, directory: str) -> int | None:
        """The number of the partition whose directory it is."""
        parent, name = os.path.split(directory)
        return int(name) if parent == self._path and len(name) == 4 and name.isdecimal() else None


class TierOverlayLog(Log):
    """A log that begins in a place and goes on in its directory."""

    def __init__(self, files: TierOverlayFiles, directory: str, identity: Identity) -> None:
        self._joined = files
        super().__init__(files, directory, identity)
        with closing(Log(files.inner, directory, identity)) as tail:
            self._check_history(tail)

    def _check_history(self, tail: Log) -> None:
        """Refuse a directory that does not go on where its place ends, or that is of another history."""
        place = self._joined.place
        self._joined.past(self.partition, tail.mark().log_start_offset)  # looks for a newer manifest if need be
        points = place.tiered.partition(self.partition).points(self.identity.log_id)
        if not points:
            return
        found, holder = compare_history(points, tail), f"the place {place.path}"
        if found.relation == AHEAD:  # such as a mirror that lags: the place's bytes tell
            with closing(place.make_log(place.files, place.directory(self.partition), self.identity)) as past:
                if past.mark().log_start_offset <= found.log_end:
                    found = compare_history([point_at(tail, found.log_end)], past)
                holder = f"{self.directory}, which ends before its place does,"
        if found.relation == BEHIND:
            raise LogError(f"{found.words(holder, self.directory)}; {_ADVICE}")
        found.check(holder, tail, _ADVICE)

    def gaps(self) -> tuple[Gap, ...]:
        """The gaps that are declared in the directory, and those of what only the place has."""
        found, start = super().gaps(), super().published().log_start_offset
        try:
            past = [gap for gap in self._joined.place.gaps(self.identity) if gap.start < start]
        except (CorruptLogError, OSError) as error:
            logger.warning("%s", error)
            past = []
        return tuple(joined([*found, *past]))

    def published(self) -> Mark:
        return self._reaching(super().published())

    def next_mark(self) -> Mark | None:
        mark = super().next_mark()
        return None if mark is None else self._reaching(mark)

    def _reaching(self, mark: Mark) -> Mark:
        """The mark of the directory, with the start of the place."""
        past = self._joined.past(self.partition, mark.log_start_offset)
        if not past.segments or past.start >= mark.log_start_offset:
            return mark
        return mark._replace(log_start_offset=past.start)
