"""Topic source: a topic in a directory of this host, read by a copier: logs, marks, policies and groups.

Invariant: nothing is written at the source, and no lock is taken there. Marks that are read together show each
transaction in all partitions or in none. The list of a group's logs of commits is that of one moment: it was the same
before and after their marks were read.

Threads: `wake` from any thread; the rest from one at a time.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from contextlib import closing

from ..config.policies import TopicConfig
from ..errors import LogMovedError
from ..format.watermark import Mark
from ..groups.directory import GROUPS, stored_groups
from ..groups.offsets import log_names, offsets_identity
from ..log import store_pointer, topic_file
from ..log.log import Log
from ..log.marks_together import marks_together
from ..segment import Identity
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from ..system.notify import Observer
from .log_source import SourceLog
from .sources import FOLDED, GroupSnapshot

__all__ = ["LocalTopicSource"]

_TRIES = 10
_MOST_BYTES = 1 << 20


class LocalTopicSource(NotCopyable):
    """A topic in a directory; see `TopicSource`."""

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._groups = os.path.join(path, GROUPS)
        self._logs: dict[int, SourceLog] = {}
        self._observer: Observer | None = None
        self._observed = 0
        self.place = path
        described = topic_file.read(files, path)
        if described is None:
            raise FileNotFoundError(errno.ENOENT, "no topic here", path)
        self.log_id = described[0]

    def heard_at(self) -> float:
        """Return now: a directory can be asked at any time."""
        return time.monotonic()

    def beat(self) -> None:
        """Do nothing: a directory needs no sign of life."""

    # --- the description -----------------------------------------------------------------------------------

    def described(self) -> tuple[bytes, TopicConfig]:
        content = self._files.read_whole(os.path.join(self.place, topic_file.NAME), _MOST_BYTES)
        described = topic_file.read(self._files, self.place)
        if described is None or described[0] != self.log_id:
            raise LogMovedError(self.place, "was moved or removed, or holds another topic now")
        return content, described[1]

    def store_pointer(self, copy: str, /) -> bytes | None:
        found = store_pointer.read_pointer(self._files, self.place)
        return found and store_pointer.sealed(os.path.relpath(os.path.normpath(found.path), copy), found.id)

    # --- logs ------------------------------------------------------------------------------------------------

    def log(self, number: int) -> SourceLog:
        path = topic_file.partition_directory(self.place, number)
        self._logs[number] = found = SourceLog(self._files, path, Identity.of(self.log_id, number))
        return found

    def log_of_commits(self, group: str, name: str) -> SourceLog:
        path = os.path.join(self._groups, group, "offsets", name)
        return SourceLog(self._files, path, offsets_identity(self.log_id, group, name))

    def marks(self, numbers: Iterable[int]) -> dict[int, Mark]:
        return marks_together([self._logs[number].log for number in numbers], Log.found)

    # --- groups ----------------------------------------------------------------------------------------------

    def groups(self) -> dict[str, GroupSnapshot]:
        names = stored_groups(self._files, self._groups)
        return {name: noted for name in names if (noted := self._note(name)) is not None}

    def has_group(self, name: str) -> bool:
        """True if the group is there, or the directory of all groups is not: then that is not known."""
        return not self._files.exists(self._groups) or self._files.exists(os.path.join(self._groups, name))

    def _note(self, group: str) -> GroupSnapshot | None:
        files, path = self._files, os.path.join(self._groups, group)
        for tries in range(1, _TRIES + 1):
            try:
                if not files.is_directory(path):
                    return GroupSnapshot({}, files.read_whole(path, _MOST_BYTES))
                offsets = os.path.join(path, "offsets")
                names = log_names(files, offsets)
                marks = {name: self._mark(group, name, os.path.join(offsets, name)) for name in names}
                if names == log_names(files, offsets):
                    return GroupSnapshot(marks, None)
            except FOLDED:
                if not files.exists(path):
                    return None
                if tries == _TRIES:
                    raise
        return None  # its members never stop folding: the next pass tries again

    def _mark(self, group: str, name: str, path: str) -> Mark:
        with closing(Log(self._files, path, offsets_identity(self.log_id, group, name))) as log:
            return log.found()

    # --- waiting ---------------------------------------------------------------------------------------------

    def watch(self) -> bool:
        if self._observer is None:
            self._observer = Observer(use_inotify=self._files.real)
        observed, self._observed = self._observed, len(self._logs)
        for number in range(observed, self._observed):
            self._observer.observe_file(number, self._logs[number].log.watermark_path)
        return self._observed > observed

    def descriptors(self) -> list[int]:
        """Descriptors that become readable when a log may have changed, for a caller that waits for others, too."""
        return [] if self._observer is None else self._observer.descriptors()

    @property
    def reports(self) -> bool:
        """True if the system reports all changes. If it does not, the caller must look from time to time."""
        return self._observer is not None and self._observer.reports

    def changed(self) -> list[int]:
        """The watched partitions that may have changed since the last call."""
        observer = self._observer
        return [] if observer is None else sorted(each for each in observer.changed() if isinstance(each, int))

    def wait_for_changes(self, timeout_s: float) -> list[int]:
        found = self.changed()
        if found or self._observer is None:
            return found
        self._observer.wait(timeout_s)
        return self.changed()

    def wake(self) -> None:
        observer = self._observer
        if observer is not None:
            observer.wake()

    def unwatch(self) -> None:
        observer, self._observer, self._observed = self._observer, None, 0
        if observer is not None:
            observer.close()

    def close(self) -> None:
        self.unwatch()
