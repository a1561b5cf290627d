"""Safe offset: how far an archive or a tier holds the records of a log, so that retention may drop them from the log.

Invariant: below the safe offset, every record that can be read is in a file of the archive, or in a segment of the
tier. Each was compared with the log when it was written, the newest manifest has named it for the grace time, and it
is still there with its size. The log is proven to have the history there that was archived or uploaded
(log/history.py). Records that were in a gap then, and were healed since, are not there: their segment stays. If
something cannot be read, no segment is dropped.

Threads: immutable facts.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing

from ..config.uri import is_remote
from ..errors import LogError
from ..log import topic_file
from ..log.copy_role import is_tier
from ..log.cursor import has_records
from ..log.gaps import between
from ..log.history import HistoryPoint, compare_history
from ..log.log import Log
from ..retention import ArchiveHold, ArchiveHolds
from ..segment import Identity
from ..system.files import Files
from .archive_manifest import ArchivedFile, ArchiveManifest
from .archive_reader import ArchiveReader, is_in_a_store
from .manifest_log import check_log
from .storage import storage_of
from .tier_files import Tier
from .tier_manifest import TierManifest

logger = logging.getLogger("loglib")


def floors_of(files: Files, topic_path: str, archive: str, log_id: bytes, *, before_us: int) -> ArchiveHolds:
    """The floors of the archive or tier that a topic's policy names. A path may be relative to the topic's directory.

    A file that was committed at `before_us` or later does not count yet. Raises nothing.
    """
    kind: type[_Floors]
    if is_remote(archive):
        kind = _ArchiveFloors if is_in_a_store(archive) else _TierFloors
    else:
        archive = os.path.normpath(os.path.join(topic_path, archive))
        kind = _TierFloors if is_tier(files, archive) else _ArchiveFloors
    return kind(files, topic_path, archive, log_id, before_us=before_us).hold


class _Floors(ABC):
    """The safe offsets of a topic's partitions. Reads the manifest once, and raises nothing."""

    _kind: str  # for messages

    def __init__(self, files: Files, topic_path: str, place: str, log_id: bytes, *, before_us: int) -> None:
        self._files = files
        self._topic_path = topic_path
        self._log_id = log_id
        self._before_us = before_us
        self._path = storage_of(place)[1]
        self._is_known = False
        try:
            manifest = self._load(place)
            check_log(manifest, f"the {self._kind}", log_id, topic_path, advice="name the one of this topic")
            self._is_known = True
        except (LogError, OSError, ValueError, ImportError) as error:
            message = "%s: retention drops nothing without its %s %s: %s"
            logger.warning(message, topic_path, self._kind, self._path, error)

    def hold(self, partition: int, start: int) -> ArchiveHold:
        """The offset up to which the place holds the partition from `start` on, without a break."""
        floor = None
        if self._is_known:
            directory = topic_file.partition_directory(self._topic_path, partition)
            try:
                with closing(Log(self._files, directory, Identity.of(self._log_id, partition))) as log:
                    floor = self._floor(log, start)
            except (LogError, OSError) as error:
                message = "%s: retention drops nothing of partition %d for what %s has: %s"
                logger.warning(message, self._topic_path, partition, self._path, error)
        return ArchiveHold(self._path, floor)

    @abstractmethod
    def _load(self, place: str) -> ArchiveManifest | TierManifest:
        """Read the newest manifest of the place."""

    @abstractmethod
    def _floor(self, log: Log, start: int) -> int | None:
        """The offset up to which the place holds this log from `start` on; None if it does not hold `start`."""

    def _proven_end(self, points: Sequence[HistoryPoint], log: Log) -> int:
        """The offset up to which the place is proven to have this log's history. Raises if it has another one."""
        comparison = compare_history(points, log)
        comparison.check(f"the {self._kind} {self._path}", log, "archive or upload this log to another place")
        return comparison.common


class _ArchiveFloors(_Floors):
    _kind = "archive"

    def _load(self, place: str) -> ArchiveManifest:
        self._archive = ArchiveReader.load(self._files, place)
        return self._archive.archived

    def _floor(self, log: Log, start: int) -> int | None:
        partitions = self._archive.archived.partitions
        if log.partition >= len(partitions) or start < partitions[log.partition].start:
            return None
        archived = partitions[log.partition]
        if archived.end <= start:
            return archived.end
        end = self._proven_end(archived.points(log.identity.log_id), log)
        readable = (gap for gap in archived.gaps if has_records(log, max(start, gap[0]), gap[1]))
        unsafe = (each.start for each in archived.all_files if each.end > start and not self._is_safe(each))
        return min([end, *(first for first, _ in readable), *unsafe])

    def _is_safe(self, file: ArchivedFile) -> bool:
        """True if the archive has had the file for long enough, and still has it."""
        if file.added >= self._before_us:
            return False
        path = os.path.join(self._path, file.name)
        try:
            size = self._archive.size_of(file)
        except (LogError, OSError) as error:
            logger.warning("%s: retention keeps the records of an archived file that cannot be opened: %s", path, error)
            return False
        if size != file.bytes:
            logger.warning("%s: retention keeps the records of this file: %d bytes, not %d", path, size, file.bytes)
        return size == file.bytes


class _TierFloors(_Floors):
    _kind = "place"

    def _load(self, place: str) -> TierManifest:
        self._place = Tier(self._files, place)
        return self._place.tiered

    def _floor(self, log: Log, start: int) -> int | None:
        past = self._place.tiered.partition(log.partition)
        if not past.segments or start < past.start:
            return None
        if past.end <= start:
            return past.end
        end = self._proven_end(past.points(log.identity.log_id), log)
        sizes = self._place.sizes(log.partition)
        later = [each for each in past.segments if each.end > start]
        lost = self._place.gaps(log.identity) if any(each.lost for each in later) else ()
        healed = [
            each.start for each in later
            if each.lost
            and any(has_records(log, gap.start, gap.end) for gap in between(lost, max(each.start, start), each.end))
        ]  # fmt: skip
        unsafe = [  # the place has not had them for long enough, or does not have them any more
            each.start for each in later
            if each.added >= self._before_us or sizes.get(each.file_name) != each.bytes
        ]  # fmt: skip
        return min([end, *healed, *unsafe])
