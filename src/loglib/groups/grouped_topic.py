"""Grouped topic: the consumer groups of one topic, and its figures, to which the lag of groups belongs.

Invariant: a group's files are in the directory of its first topic, and a group that is stored with another topic is
refused.

Threads: safe for all.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Unpack

from ..append.stats import TopicStats, stats_of_partition
from ..config.arguments import Start, check_names
from ..errors import GroupNotFoundError
from ..log.lag import Lag
from ..log.log import Log
from ..open_topic import OpenTopic
from . import Group, GroupInfo, OffsetMove, TopicPartition, administration
from .directory import GenerationFence, GroupDirectory, check_logs_differ, group_names
from .group import GroupOptions

__all__ = ["GroupedTopic", "committed_of"]


class GroupedTopic(OpenTopic):
    """An open topic whose groups can be joined: a base of `Topic`."""

    _new_fence: Callable[[], GenerationFence]  # makes a fence for the generations of members in transactions
    _oldest: dict[int, tuple[int, int]]  # of each partition: its log start, and the append time there

    def group(self, name: str, **options: Unpack[GroupOptions]) -> Group:
        """Join a consumer group. Its members share the partitions; each group gets all records.

        The topic may be open in either mode. `start` is where a group without a commit begins: "begin", "end",
        a time or an age. With a `member` name, a member gets its partitions back after a restart. `commit` says
        when handled records are committed: "after" (when the member asks for records, at most once in 0.1 s, and
        within 0.1 s while it waits for more), "manual" (only by `commit()`), or an interval in seconds instead
        of 0.1. `strategy` assigns the partitions: "range" as in the Kafka paper, "sticky" with the fewest moves.
        `on_assign` and `on_revoke` are called with lists of partitions; `on_revoke` before the partitions are
        committed and released. If the committed offset is no longer in the log, `on_out_of_range="start"` begins
        at `start` again instead of raising an error.
        """
        return Group(self._group_directory(name), **options)

    def groups(self) -> list[str]:
        """The sorted names of the consumer groups that are stored with this topic. Joins none of them."""
        self._handles.check_open()
        return group_names(self._files, self.path)

    def group_info(self, name: str, *, count_records: bool = False) -> GroupInfo:
        """A group's members, owners, commits and lag, without joining it: for monitoring.

        It has the partitions of this topic, by number. For all topics of a group use `loglib.groups.group_info`.
        `count_records` also counts the records of the lag, by reading the header of every batch in it. Raises
        `GroupNotFoundError`, and `GroupElsewhereError` if the group is stored with another topic.
        """
        return administration.inspect(self._group_directory(name), count_records=count_records).of_topic(self.name)

    def reset_group(
        self, name: str, start: Start | Mapping[int, Start], *, dry_run: bool = False
    ) -> dict[int, OffsetMove]:
        """Move a group's committed offsets to a start, while it has no members; returns the old and new offsets.

        `start` is "begin", "end", a time, an age, or a mapping of partitions to these or to offsets. With
        `dry_run` nothing is committed. Raises `GroupBusyError` if the group has members, and
        `GroupElsewhereError` if it is stored with another topic.
        """
        place = self._group_directory(name)
        start_of: Any = start
        if isinstance(start, Mapping):
            start_of = {TopicPartition(self.name, self.partition(key).id): each for key, each in start.items()}
        moves = administration.reset(place, start_of, dry_run=dry_run)
        return {each.partition: move for each, move in moves.items()}

    def evict_member(self, name: str, member: str) -> list[int]:
        """Take the partitions away from a hanging member of a group; returns its partitions of this topic.

        Other members claim them immediately. The evicted member gets `StaleGenerationError` when it next asks for
        records or commits. Raises `LogError` if the group has no such member.
        """
        taken = administration.evict(self._group_directory(name), member)
        return [each.partition for each in taken if each.topic == self.name]

    def delete_group(self, name: str) -> None:
        """Delete a group and its commits: the next member that joins it begins at its own `start`.

        Raises `GroupBusyError` if the group has members, and `GroupNotFoundError` if there is no such group.
        """
        administration.delete(self._group_directory(name))

    def stats(self) -> TopicStats:
        """Figures for monitoring: sizes, what this process has appended, times of flushes, lag of the groups.

        It reads no records and takes no lock: a fraction of a millisecond for each partition and each group. Rates are
        those between two moments: `later.rates_since(earlier)`. A group that is kept with another topic is in the
        figures of that topic.
        """
        self._handles.check_open()
        lag: dict[str, dict[int, Lag]] = {}
        for name in self.groups():
            with suppress(GroupNotFoundError):  # it has just been deleted
                found = administration.lag(self._group_directory(name))
                lag[name] = {each.partition: behind for each, behind in found.items()}
        partitions = tuple(stats_of_partition(each, self._oldest) for each in self._accesses)
        return TopicStats(self.name, time.monotonic(), partitions, lag)

    def _group_directory(self, name: str, topics: Sequence[OpenTopic] = ()) -> GroupDirectory:
        """The directory of the group with this name, on this topic or on several."""
        check_names(name)
        self._handles.check_open()
        check_logs_differ({each.name: each.log_id for each in topics})
        find_logs = partial(_logs_of, topics or [self])
        durability, permissions = self.config.durability, self.config.permissions
        return GroupDirectory(
            self._files, self.path, self.log_id, name, find_logs(), durability, permissions, self._clock,
            self._new_fence(), find_logs=find_logs,
            track=tuple(each._handles.track for each in topics or [self]),  # noqa: SLF001
            other_paths=tuple(each.path for each in topics if each is not self),
        )  # fmt: skip


def committed_of(reference: weakref.ref[GroupedTopic], group: str) -> dict[int, int]:
    """The commits of a group in this topic, by partition; none if the topic is gone."""
    topic = reference()
    if topic is None:
        return {}
    found = administration.committed(topic._group_directory(group))  # noqa: SLF001
    return {each.partition: offset for each, offset in found.items() if each.topic == topic.name}


def _logs_of(topics: Sequence[OpenTopic]) -> dict[TopicPartition, Log]:
    """The logs of these topics, with those of partitions that were added since."""
    return {
        TopicPartition(each.name, access.id): access.log
        for each in topics for access in each._accesses  # noqa: SLF001
    }  # fmt: skip
