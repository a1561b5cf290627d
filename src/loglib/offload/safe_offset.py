"""Safe offset: how far an archive holds the records of a log safely, so that retention may drop them from the log.

Invariant: below a floor, every readable record is in a file that was compared with the log when it was written, that
the newest manifest has named for the grace time, and that is still there with its size. What cannot be read is no
floor: then nothing is dropped.

Threads: immutable facts.
"""

from __future__ import annotations

import logging
import os

from ..config.uri import is_remote
from ..errors import LogError
from ..retention import ArchiveHold
from ..system.files import Files
from .archive_manifest import Archived
from .archive_store import load, located
from .storage import storage_of

__all__ = ["Floors"]

logger = logging.getLogger("loglib")


class Floors:
    """The floors of a topic's partitions. Reads the manifest once, and raises nothing."""

    def __init__(self, files: Files, topic_path: str, archive: str, log_id: bytes, *, before_us: int) -> None:
        """A path may be relative to the topic's directory. What came to it at `before_us` or later is too young."""
        given = archive if is_remote(archive) else os.path.normpath(os.path.join(topic_path, archive))
        self._path = storage_of(given)[1]
        self._before_us = before_us
        self._archived: Archived | None = None
        try:
            self._files, path = located(files, given)
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
