"""Sources: the topics and group members whose figures are exported.

Invariant: one export takes the stats of a topic once, however many instruments ask. A topic that is closed, moved or
damaged gives no figures, and fails no export. The sources keep no topic and no member alive.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from ..append.stats import TopicStats
from ..errors import LogError
from ..groups import Group, TopicPartition, TopicsGroup
from ..system.not_copyable import NotCopyable
from ..topic import Topic

__all__ = ["Sources"]

_FRESH_S = 0.1  # one export asks for all its instruments within that time


class Sources(NotCopyable):
    """Topics and members of groups, as far as they are still used."""

    def __init__(self, topics: Iterable[Topic], groups: Iterable[Group | TopicsGroup]) -> None:
        self._topics = [weakref.ref(each) for each in topics]
        self._groups: list[weakref.ref[Any]] = [weakref.ref(each) for each in groups]
        self._lock = threading.RLock()  # a finalizer may ask for stats in the middle, and gets the ones before
        self._stats: list[TopicStats] = []
        self._taken_at = -_FRESH_S

    def topics(self) -> Iterator[Topic]:
        """The topics that are still there."""
        return (topic for reference in self._topics if (topic := reference()) is not None)

    def stats(self) -> list[TopicStats]:
        """The stats of all topics, not older than a tenth of a second."""
        with self._lock:
            if time.monotonic() - self._taken_at >= _FRESH_S:
                self._stats = list(self._take())
                self._taken_at = time.monotonic()
            return self._stats

    def handed_out(self) -> Iterator[tuple[str, TopicPartition, int]]:
        """For each group and partition the records that members of this process have handed out."""
        for reference in self._groups:
            group = reference()
            if group is None:
                continue
            for key, count in group.handed_out.items():
                partition = key if isinstance(key, TopicPartition) else TopicPartition(group.topics[0], key)
                yield group.name, partition, count

    def _take(self) -> Iterator[TopicStats]:
        for topic in self.topics():
            try:
                yield topic.stats()
            except (LogError, OSError):
                continue
