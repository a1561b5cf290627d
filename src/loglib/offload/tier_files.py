"""Tier files: a topic's uploaded segments, read alone, or as the past of the topic in its directory.

Invariant: a segment counts only if a manifest names it. A place that is opened alone does not grow. For a place that is
a topic's past, the newest manifest is read again when the directory no longer has a segment: retention drops only what
a manifest names.

    Tier                the newest manifest, and the files of the place
    TierOverlayFiles    the files of a topic's directory; a segment that is not there is opened in the place
    TierOverlayLog      a log in such files, which begins where the place begins

All other code takes past and tail for files of one directory, so offsets, checks, groups and columns need no change.

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
from ..config.uri import is_remote
from ..errors import CorruptLogError, LogError
from ..format.watermark import Mark
from ..log import topic_file
from ..log.copy_role import MANIFESTS, is_tier
from ..log.gaps import Gap, joined, read_gaps
from ..log.history import AHEAD, TOO_OLD, compare_history, point_at
from ..log.log import FixedMark, Log
from ..segment import Identity, parse_producers_name, parse_segment_name, segment_name
from ..system.files import Files
from ..system.files_wrapper import FilesWrapper
from ..system.not_copyable import NotCopyable
from . import manifest_log
from .manifest_log import FilePlace, check_log
from .storage import place_of, storage_of
from .tier_manifest import TieredPartition, TierManifest, decode

logger = logging.getLogger("loglib")

_ADVICE = "nothing was read: open each of them by itself, or name the place that this topic was uploaded to"


def newest(files: Files, path: str) -> TierManifest | None:
    """The newest manifest of a place; None if there is none."""
    if not is_tier(files, path):
        return None
    return manifest_log.newest(FilePlace(files, path), MANIFESTS, decode)


class Tier(NotCopyable):
    """The segments that the newest manifest of a place names."""

    def __init__(self, files: Files, given: str) -> None:
        """`given` is a path or a URI; `files` are for paths. `FileNotFoundError` if there is no place."""
        self.given = given
        self._storage, self.path = place_of(given)
        self._local = files
        self._lock = threading.RLock()  # for one look at the manifests at a time
        self.tiered = self._load()
        self.files = self._files_of(self.tiered)

    def refresh(self) -> None:
        """Read the newest manifest again."""
        with self._lock:
            tiered = self._load()
            if tiered != self.tiered:
                self.files = self._files_of(tiered)
                self.tiered = tiered

    def _load(self) -> TierManifest:
        manifest = newest(self._storage.files_now(self._local), self.path)
        if manifest is None:
            raise FileNotFoundError(
                errno.ENOENT, "no uploaded segments here; loglib.offload.tier uploads them", self.path
            )
        return manifest

    def _files_of(self, tiered: TierManifest) -> Files:
        listings = {self.directory(each.partition): each.listing for each in tiered.partitions}
        if self._storage.is_local:
            return _Listed(self._local, listings)
        return self._storage.files(listings=listings, until_offset=MAX_OFFSET, eager=False)

    def directory(self, partition: int) -> str:
        return topic_file.partition_directory(self.path, partition)

    def sizes(self, partition: int) -> dict[str, int]:
        """Name and size of a partition's files in the store now, also of those that no manifest names."""
        return self._storage.files_now(self._local).sizes(self.directory(partition))

    def gaps(self, identity: Identity) -> tuple[Gap, ...]:
        """The declared gaps in the segments of a partition; `CorruptLogError` if their file is damaged."""
        end = self.tiered.partition(identity.partition).end
        gaps = read_gaps(self.files, self.directory(identity.partition), identity)
        return tuple(each for each in gaps if each.start < end)

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
        """True if the path is a directory, or that of a partition, which has no directory without a segment."""
        return path in self._listings or super().is_directory(path, dir_fd=dir_fd)

    def sizes(self, directory: str, *, dir_fd: int | None = None) -> dict[str, int]:
        """Name and size in bytes of the segments that count in the directory."""
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
        self._looked: dict[int, int] = {}  # the start of each partition for which the manifest was read again
        advice = "name the place of this topic"
        check_log(place.tiered, f"{place.path} has the segments", log_id, path, advice=advice)

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        try:
            return self.inner.open(path, flags, mode, dir_fd=dir_fd)
        except FileNotFoundError:
            writes = flags & (os.O_RDWR | os.O_CREAT)
            in_place = None if writes or dir_fd is not None else self._in_place(path)
            if in_place is None:
                raise
        files, there = in_place
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
        sizes = self.inner.sizes(directory, dir_fd=dir_fd)
        number = self._partition_of(directory)
        if number is None or dir_fd is not None:
            return sizes
        bases = [base for name in sizes if (base := parse_segment_name(name)) is not None]
        past, last = self.past(number, min(bases, default=0)).listing, max(bases, default=0)
        # A place that is ahead has segments of which the directory has only the beginning, or nothing.
        return {name: size for name, size in past.items() if name < segment_name(last)} | sizes

    def past(self, number: int, start: int) -> TieredPartition:
        """The place's segments of a partition that begins at `start` in the directory.

        There are none if the place ends before `start`, since the records between are in neither.
        """
        past = self.place.tiered.partition(number)
        if past.end < start and self._looked.get(number) != start:  # retention drops only what a newer manifest names
            self.place.refresh()
            self._looked[number] = start
            past = self.place.tiered.partition(number)
        return past if past.end >= start else TieredPartition(number)

    def _in_place(self, path: str) -> tuple[Files, str] | None:
        """The place's files and path for a segment, or for its producers; None if the place does not have it."""
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
        """The number of the partition that has this directory; None if it is none of a partition."""
        parent, name = os.path.split(directory)
        return int(name) if parent == self._path and len(name) == 4 and name.isdecimal() else None


class TierOverlayLog(Log):
    """A log that begins in a place and continues in its directory."""

    def __init__(self, files: TierOverlayFiles, directory: str, identity: Identity) -> None:
        self._joined = files
        super().__init__(files, directory, identity)
        with closing(Log(files.inner, directory, identity)) as tail:
            self._check_history(tail)

    def _check_history(self, tail: Log) -> None:
        """Refuse a directory that does not continue where its place ends, or that has another history."""
        place = self._joined.place
        self._joined.past(self.partition, tail.mark().log_start_offset)  # reads a newer manifest if there is need
        points = place.tiered.partition(self.partition).points(self.identity.log_id)
        if not points:
            return
        comparison, holder = compare_history(points, tail), f"the place {place.path}"
        if comparison.relation == AHEAD:  # such as a mirror that lags: compare with the place's bytes
            with closing(place.make_log(place.files, place.directory(self.partition), self.identity)) as past:
                if past.mark().log_start_offset <= comparison.log_end:
                    comparison = compare_history([point_at(tail, comparison.log_end)], past)
                holder = f"{self.directory}, which ends before its place does,"
        if comparison.relation == TOO_OLD:
            raise LogError(f"{comparison.words(holder, self.directory)}; {_ADVICE}")
        comparison.check(holder, tail, _ADVICE)

    def gaps(self) -> tuple[Gap, ...]:
        """The gaps that the directory declares, and those in segments that only the place has."""
        gaps, start = super().gaps(), super().published().log_start_offset
        try:
            past = [gap for gap in self._joined.place.gaps(self.identity) if gap.start < start]
        except (CorruptLogError, OSError) as error:
            logger.warning("%s", error)
            past = []
        return tuple(joined([*gaps, *past]))

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
