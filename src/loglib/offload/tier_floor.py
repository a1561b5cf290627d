"""Tier floor: how far a place holds the segments of a log safely, so that retention may drop them from the log.

Invariant: below a floor, every segment was compared with the log when it was uploaded, the newest manifest has named it
for the grace time, and the store has an object of its size. The place ends there with the batch that the log goes on
behind: it has the same history. What cannot be read is no floor: then nothing is dropped.

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
from .archive_store import is_in_a_store
from .safe_offset import Floors
from .storage import storage_of
from .tier_files import Tier, is_tier
from .tier_manifest import TieredSegment

__all__ = ["TierFloors", "floors_of"]

logger = logging.getLogger("loglib")


def floors_of(
    files: Files, topic_path: str, archive: str, log_id: bytes, *, before_us: int
) -> Floors | TierFloors:
    """The floors of the archive or place that a topic's policy names. A path may be relative to the topic's directory.

    What came to it at `before_us` or later is too young. Raises nothing.
    """
    place = _place_of(files, topic_path, archive)
    if place is not None and not is_in_a_store(place):
        return TierFloors(files, topic_path, place, log_id, before_us=before_us)
    return Floors(files, topic_path, archive, log_id, before_us=before_us)


def _place_of(files: Files, topic_path: str, archive: str) -> str | None:
    """The path or URI of a place of segments; None for an archive of another kind in a directory."""
    if is_remote(archive):
        return archive
    path = os.path.normpath(os.path.join(topic_path, archive))
    return path if is_tier(files, path) else None


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
