"""Publish: the progress of a streaming query as commits of a consumer group, for tools that show lag.

Invariant: only durable progress is published: Spark has committed everything below these offsets. The query itself
never reads them, because its own checkpoint says where it stands. So a failed publication harms no result: the first
one of a run fails the query, because the option is wrong then (the group has members, or the directory cannot be
written), and a later one is a warning and is tried again.

Processes: driver, in the process that plans a query's batches; one thread.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping

from ..errors import LogError
from ..topic import Topic

__all__ = ["Publisher"]

_EVERY_S = 1.0  # a commit of a group takes some 10 ms, because it is synced

Positions = Mapping[str, Mapping[int, int]]  # by path of the topic, and partition: the offset to read next


class Publisher:
    """Commits for one group, at most once a second, or when the query has nothing else to do."""

    def __init__(self, group: str | None) -> None:
        self._group = group
        self._published: Positions | None = None
        self._due = 0.0

    def publish(self, positions: Positions, *, idle: bool) -> None:
        """Commit the positions, if they are new. `LogError` or `OSError` if the first commit fails."""
        now = time.monotonic()
        if self._group is None or positions == self._published or (now < self._due and not idle):
            return
        self._due = now + _EVERY_S
        try:
            for path, offsets in positions.items():
                with Topic.open(path, mode="r") as topic:
                    topic.reset_group(self._group, offsets)
        except (LogError, OSError) as error:
            if self._published is None:
                raise
            warnings.warn(
                f"the progress of group {self._group} was not published: {error}", RuntimeWarning, stacklevel=2
            )
            return
        self._published = positions
