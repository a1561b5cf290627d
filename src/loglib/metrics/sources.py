"""Sources: the topics and group members whose figures are exported.

Invariant: one export takes the stats of a topic once, for all its instruments. A topic that is closed, moved or damaged
has no figures, and fails no export. The sources keep no topic and no member alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from ..append.stats import PartitionStats, SharePartitionStats, ShareStats, TopicStats
from ..errors import LogError
from ..groups import Group, TopicPartition, TopicsGroup
from ..log.lag import Lag
from ..system.clock import monotonic
from ..system.not_copyable import NotCopyable
from ..topic import Topic

_FRESH_S = 0.1  # one export reads all its instruments within this time


class Sources(NotCopyable):
    """The topics and members of groups that are still in use."""

    def __init__(self, topics: Iterable[Topic], groups: Iterable[Group | TopicsGroup]) -> None:
        self._topics = [weakref.ref(each) for each in topics]
        self._groups: list[weakref.ref[Any]] = [weakref.ref(each) for each in groups]
        self._lock = threading.RLock()  # reentrant: a finalizer may ask for stats meanwhile, and gets the last ones
        self._stats: list[TopicStats] = []
        self._taken_at = -_FRESH_S

    def partitions(self) -> Iterator[tuple[str, PartitionStats]]:
        """The stats of each partition, with the name of its topic."""
        return ((one.topic, each) for one in self._present() for each in one.partitions)

    def lags(self) -> Iterator[tuple[str, TopicPartition, Lag]]:
        """The lag of each group in each partition."""
        for one in self._present():
            for group, partitions in one.lag.items():
                for number, lag in partitions.items():
                    yield group, TopicPartition(one.topic, number), lag

    def shares(self) -> Iterator[tuple[str, str, ShareStats]]:
        """Each share: the name of its topic, its own, and its figures."""
        return ((one.topic, name, each) for one in self._present() for name, each in one.shares.items())

    def jobs(self) -> Iterator[tuple[str, TopicPartition, SharePartitionStats]]:
        """Each share in each partition."""
        for topic, name, share in self.shares():
            for number, each in share.partitions.items():
                yield name, TopicPartition(topic, number), each

    def handed_out(self) -> Iterator[tuple[str, TopicPartition, int]]:
        """For each group and partition, the number of records that members of this process have yielded."""
        for reference in self._groups:
            group = reference()
            if group is None:
                continue
            for key, count in group.handed_out.items():
                partition = key if isinstance(key, TopicPartition) else TopicPartition(group.topics[0], key)
                yield group.name, partition, count

    def _present(self) -> list[TopicStats]:
        """The stats of all topics, not older than a tenth of a second."""
        with self._lock:
            if monotonic() - self._taken_at >= _FRESH_S:
                self._stats = list(self._take())
                self._taken_at = monotonic()
            return self._stats

    def _take(self) -> Iterator[TopicStats]:
        for reference in self._topics:
            if (topic := reference()) is not None:
                with suppress(LogError, OSError):
                    yield topic.stats()


class TakenStats(Sources):
    """The stats of topics that a caller has taken itself, and whose errors it has met."""

    def __init__(self, stats: Iterable[TopicStats]) -> None:
        super().__init__((), ())
        self._stats = list(stats)

    def _present(self) -> list[TopicStats]:
        return self._stats
