"""Safe offset: how far an archive or a tier holds the records of a log, so that retention may drop them from the log.

Invariant: below the safe offset, every record that can be read is in a file of the archive, or in a segment of the
tier. Each was compared with the log when it was written, the newest manifest has named it for the grace time, and it
is still there with its size. The log is proven to have the history there that was archived or uploaded
(log/history.py). Records that a gap hid then, and that were healed since, are not there: their segment stays. If
something cannot be read, no segment is dropped.

Threads: immutable facts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

from ..config.uri import is_remote
from ..errors import LogError
from ..log import topic_file
from ..log.copy_role import is_tier
from ..log.cursor import has_records
from ..log.gaps import between
from ..log.history import HistoryPoint, compare_history
from ..log.log import Log
from ..retention import ArchiveHold
from ..segment import Identity
from ..system.files import Files
from .archive_manifest import Archived, ArchivedFile, ArchivedPartition
from .archive_store import is_in_a_store, load, located
from .storage import storage_of
from .tier_files import Tier
from .tier_manifest import TieredSegment

__all__ = ["Floors", "TierFloors", "floors_of"]

logger = logging.getLogger("loglib")


class Floors:
    """The floors of a topic's partitions. Reads the manifest once, and raises nothing."""

    def __init__(self, files: Files, topic_path: str, archive: str, log_id: bytes, *, before_us: int) -> None:
        """What came to the archive at `before_us` or later is too young."""
        self._path = storage_of(archive)[1]
        self._logs = _Logs(files, topic_path, log_id)
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
        known = () if self._archived is None else self._archived.partitions[partition : partition + 1]
        floors = [self._logs.floor(partition, self._path, partial(self._floor, each, start)) for each in known]
        return ArchiveHold(self._path, floors[0] if floors else None)

    def _floor(self, archived: ArchivedPartition, start: int, log: Log) -> int | None:
        if start < archived.start:
            return None
        if archived.end <= start:
            return archived.end
        end = _proven_end(archived.points(log.identity.log_id), f"the archive {self._path}", log)
        readable = (gap for gap in archived.gaps if has_records(log, max(start, gap[0]), gap[1]))
        unsafe = (each.start for each in archived.all_files if each.end > start and not self._is_safe(each))
        return min([end, *(first for first, _ in readable), *unsafe])

    def _is_safe(self, file: ArchivedFile) -> bool:
        """Whether the archive has had the file for long enough, and has it still."""
        return file.added < self._before_us and self._is_there(file.name, file.bytes)

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
        self._logs = _Logs(files, topic_path, log_id)
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
        place = self._place
        floor = None
        if place is not None:
            floor = self._logs.floor(partition, self._path, lambda log: self._floor(place, start, log))
        return ArchiveHold(self._path, floor)

    def _floor(self, place: Tier, start: int, log: Log) -> int | None:
        past = place.tiered.partition(log.partition)
        if not past.segments or start < past.start:
            return None
        if past.end <= start:
            return past.end
        end = _proven_end(past.points(log.identity.log_id), f"the place {self._path}", log)
        sizes = place.sizes(log.partition)
        lossy = [each for each in past.segments if each.lost and each.end > start]
        lost = place.gaps(log.identity) if lossy else ()
        healed = [
            each.start for each in lossy
            if any(has_records(log, gap.start, gap.end) for gap in between(lost, max(each.start, start), each.end))
        ]  # fmt: skip
        unsafe = (
            each.start for each in past.segments
            if each.end > start and not self._is_safe(each, sizes.get(each.file_name))
        )  # fmt: skip
        return min([end, *healed, *unsafe])

    def _is_safe(self, segment: TieredSegment, size_bytes: int | None) -> bool:
        """Whether the place has had the segment for long enough, and has it still."""
        return segment.added < self._before_us and size_bytes == segment.bytes


class _Logs:
    """The logs of a topic, as they are in its directory, for asking how far they are safe elsewhere."""

    def __init__(self, files: Files, topic_path: str, log_id: bytes) -> None:
        self._files = files
        self._path = topic_path
        self._log_id = log_id

    def floor(self, partition: int, elsewhere: str, find: Callable[[Log], int | None]) -> int | None:
        """What `find` says of the partition's log. What cannot be read holds nothing."""
        directory = topic_file.partition_directory(self._path, partition)
        try:
            with closing(Log(self._files, directory, Identity.of(self._log_id, partition))) as log:
                return find(log)
        except (LogError, OSError) as error:
            words = "%s: retention drops nothing of partition %d for what %s has: %s"
            logger.warning(words, self._path, partition, elsewhere, error)
            return None


def _proven_end(points: Sequence[HistoryPoint], holder: str, log: Log) -> int:
    """How far it is proven that what is stored elsewhere is of this log's history; raises if it has another end."""
    found = compare_history(points, log)
    found.check(holder, log, "archive or upload this log to another place")
    return found.common


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
