"""Topic source: a topic in a directory, as its mirror reads it: the logs, their marks, the description and the groups.

Invariant: nothing is written at the source, and no lock is taken there. Marks that are read together show each
transaction in all partitions or in none. The list of a group's logs of commits is that of one moment: it was the same
before and after their marks were read.

`mirror.Origin` says what a mirror asks for; the other one is `remote_source.RemoteTopic`, where the topic is on another
host.

Threads: `wake` from any thread; the rest from one at a time.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import NamedTuple

from ..config.policies import TopicConfig
from ..errors import CorruptLogError, LogMovedError, OffsetOutOfRangeError
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

__all__ = ["FOLDED", "GroupSnapshot", "LocalTopicSource"]

_TRIES = 10
_MOST_BYTES = 1 << 20
FOLDED = (FileNotFoundError, LogMovedError, OffsetOutOfRangeError, CorruptLogError)  # so a log of commits may be met


class GroupSnapshot(NamedTuple):
    """A group at one moment."""

    marks: Mapping[str, Mark]  # of its logs of commits, by name
    pointer: bytes | None  # the content of the file that stands for a group which another topic keeps


class LocalTopicSource(NotCopyable):
    """The topic in a directory."""

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
        """When the source was last asked, by the monotonic clock: it can be asked at any time."""
        return time.monotonic()

    def beat(self) -> None:
        """Nobody waits for a sign of life."""

    # --- the description -----------------------------------------------------------------------------------

    def described(self) -> tuple[bytes, TopicConfig]:
        """The content of `topic.json`, and the policies in it. `LogMovedError` if there is another topic now."""
        content = self._files.read_whole(os.path.join(self.place, topic_file.NAME), _MOST_BYTES)
        described = topic_file.read(self._files, self.place)
        if described is None or described[0] != self.log_id:
            raise LogMovedError(self.place, "was moved or removed, or holds another topic now")
        return content, described[1]

    def store_pointer(self, copy: str, /) -> bytes | None:
        """What a copy at this path has in `transactions.json`; None if the topic has no transactions."""
        found = store_pointer.read_pointer(self._files, self.place)
        return found and store_pointer.sealed(os.path.relpath(os.path.normpath(found.path), copy), found.id)

    # --- logs ------------------------------------------------------------------------------------------------

    def log(self, number: int) -> SourceLog:
        """The log of a partition. The caller closes it."""
        path = topic_file.partition_directory(self.place, number)
        self._logs[number] = found = SourceLog(self._files, path, Identity.of(self.log_id, number))
        return found

    def log_of_commits(self, group: str, name: str) -> SourceLog:
        """One of a group's logs of commits. The caller closes it."""
        path = os.path.join(self._groups, group, "offsets", name)
        return SourceLog(self._files, path, offsets_identity(self.log_id, group, name))

    def marks(self, numbers: Iterable[int]) -> dict[int, Mark]:
        """The marks of these partitions at one moment."""
        return marks_together([self._logs[number].log for number in numbers], Log.found)

    # --- groups ----------------------------------------------------------------------------------------------

    def groups(self) -> dict[str, GroupSnapshot]:
        """Where the commits of each group end now."""
        names = stored_groups(self._files, self._groups)
        return {name: noted for name in names if (noted := self._note(name)) is not None}

    def has_group(self, name: str) -> bool:
        """Whether there is a group of this name. Without the directory of all groups nobody knows."""
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
        return None  # its members never stop folding: the next pass looks again

    def _mark(self, group: str, name: str, path: str) -> Mark:
        with closing(Log(self._files, path, offsets_identity(self.log_id, group, name))) as log:
            return log.found()

    # --- waiting ---------------------------------------------------------------------------------------------

    def watch(self) -> bool:
        """Watch the logs that `log` has given. True if some were not watched before: their marks may be old."""
        if self._observer is None:
            self._observer = Observer(use_inotify=self._files.real)
        observed, self._observed = self._observed, len(self._logs)
        for number in range(observed, self._observed):
            self._observer.observe_file(number, self._logs[number].log.watermark_path)
        return self._observed > observed

    def descriptors(self) -> list[int]:
        """What becomes readable when there may be news: for a caller that waits for other things, too."""
        return [] if self._observer is None else self._observer.descriptors()

    @property
    def reports(self) -> bool:
        """Whether the system reports all news of what is watched. If it does not, look from time to time."""
        return self._observer is not None and self._observer.reports

    def changed(self) -> list[int]:
        """The partitions that may have news since the last call; see `watch`."""
        observer = self._observer
        return [] if observer is None else sorted(each for each in observer.changed() if isinstance(each, int))

    def wait_for_changes(self, timeout_s: float) -> list[int]:
        """The partitions that may have news since the last call. Waits for some until the time is over, or `wake`."""
        found = self.changed()
        if found or self._observer is None:
            return found
        self._observer.wait(timeout_s)
        return self.changed()

    def wake(self) -> None:
        """End a present wait for news."""
        observer = self._observer
        if observer is not None:
            observer.wake()

    def unwatch(self) -> None:
        """Stop watching."""
        observer, self._observer, self._observed = self._observer, None, 0
        if observer is not None:
            observer.close()

    def close(self) -> None:
        self.unwatch()
