"""Safe offset: how far an archive or a tier holds the records of a log, so that retention may drop them from the log.

Invariant: below the safe offset, every readable record is in a file of the archive, or every segment in the tier. Each
was compared with the log when it was written, the newest manifest has named it for the grace time, and it is still
there with its size. A tier ends there with the batch that the log continues after: it has the same history. If
something cannot be read, no segment is dropped.

Threads: immutable facts.
"""

from __future__ import annotations

import logging
import os
from itertools import takewhile

from ..config.uri import is_remote
from ..errors import LogError
from ..log import topic_file
from ..retention import ArchiveHold
from ..segment import Identity, read_segment_header, segment_name
from ..system.files import Files
from .archive_manifest import Archived
from .archive_store import is_in_a_store, load, located
from .storage import storage_of
from .tier_files import Tier, is_tier
from .tier_manifest import TieredSegment

__all__ = ["Floors", "TierFloors", "floors_of"]

logger = logging.getLogger("loglib")


class Floors:
    """The floors of a topic's partitions. Reads the manifest once, and raises nothing."""

    def __init__(self, files: Files, topic_path: str, archive: str, log_id: bytes, *, before_us: int) -> None:
        """What came to the archive at `before_us` or later is too young."""
        self._path = storage_of(archive)[1]
        self._before_us = before_us
        self._archived: Archived | None = None
        try:
            self._files, path = located(files, archive)
            archived = load(self._files, path)
            if archived.log_id != log_id:
                raise LogError(f"it is the archive of another log, with the id {archived.log_id.hex()}")
            self._archived = archived
        except (LogError, OSError, ValueError, ImportError) as error:
            logger.warning("%s: retention drops nothing without its archive %s: %s", topic_path, self._path, error)

    def hold(self, partition: int, start: int) -> ArchiveHold:
        """How far the archive holds the partition without a break from the offset `start` on."""
        return ArchiveHold(self._path, self._floor(partition, start))

    def _floor(self, partition: int, start: int) -> int | None:
        for each in () if self._archived is None else self._archived.partitions[partition : partition + 1]:
            if start < each.start:
                return None
            for file in each.files:
                if file.end > start and (file.added >= self._before_us or not self._is_there(file.name, file.bytes)):
                    return file.start
            return each.end
        return None

    def _is_there(self, name: str, size_bytes: int) -> bool:
        path = os.path.join(self._path, name)
        try:
            fd = self._files.open_read(path)
            try:
                size = self._files.size(fd)
            finally:
                self._files.close(fd)
        except (LogError, OSError) as error:
            logger.warning("%s: retention keeps the records of an archived file that cannot be opened: %s", path, error)
            return False
        if size != size_bytes:
            logger.warning("%s: retention keeps the records of this file: %d bytes, not %d", path, size, size_bytes)
        return size == size_bytes


class TierFloors:
    """The floors of a topic's partitions. Reads the manifest once, and raises nothing."""

    def __init__(self, files: Files, topic_path: str, place: str, log_id: bytes, *, before_us: int) -> None:
        """What came to the place at `before_us` or later is too young."""
        self._files = files
        self._topic_path = topic_path
        self._log_id = log_id
        self._before_us = before_us
        self._path = storage_of(place)[1]
        self._place: Tier | None = None
        try:
            found = Tier(files, place)
            if found.tiered.log_id != log_id:
                raise LogError(f"it has the segments of another log, with the id {found.tiered.log_id.hex()}")
            self._place = found
        except (LogError, OSError, ValueError, ImportError) as error:
            logger.warning("%s: retention drops nothing without its place %s: %s", topic_path, self._path, error)

    def hold(self, partition: int, start: int) -> ArchiveHold:
        """How far the place holds the partition without a break from the offset `start` on."""
        try:
            floor = None if self._place is None else self._floor(self._place, partition, start)
        except (LogError, OSError) as error:
            logger.warning("%s: retention drops nothing of partition %d: %s", self._topic_path, partition, error)
            floor = None
        return ArchiveHold(self._path, floor)

    def _floor(self, place: Tier, partition: int, start: int) -> int | None:
        segments = place.tiered.partition(partition).segments
        if not segments or start < segments[0].start:
            return None
        sizes = place.sizes(partition)
        wanted = (each for each in segments if each.end > start)
        safe = list(takewhile(lambda each: self._is_safe(each, sizes.get(each.file_name)), wanted))
        if not safe:
            return start
        last = safe[-1]
        directory = topic_file.partition_directory(self._topic_path, partition)
        path = os.path.join(directory, segment_name(last.end))
        following = read_segment_header(self._files, path, Identity.of(self._log_id, partition))
        if following.previous_crc != last.last_crc:
            raise LogError(f"the place {self._path} has another history up to offset {last.end}")
        return last.end

    def _is_safe(self, segment: TieredSegment, size_bytes: int | None) -> bool:
        """Whether the place has had the segment for long enough, and has it still."""
        return segment.added < self._before_us and size_bytes == segment.bytes


def floors_of(
    files: Files, topic_path: str, archive: str, log_id: bytes, *, before_us: int
) -> Floors | TierFloors:
    """The floors of the archive or place that a topic's policy names. A path may be relative to the topic's directory.

    What came to it at `before_us` or later is too young. Raises nothing.
    """
    if is_remote(archive):
        kind = Floors if is_in_a_store(archive) else TierFloors
    else:
        archive = os.path.normpath(os.path.join(topic_path, archive))
        kind = TierFloors if is_tier(files, archive) else Floors
    return kind(files, topic_path, archive, log_id, before_us=before_us)
