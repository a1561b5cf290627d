"""Grouped topic: the consumer groups of one topic, and its figures, to which the lag of groups belongs.

Invariant: a group's files are in the directory of its first topic, and a group that is stored with another topic is
refused. The modules of groups are loaded when a group is first used.

Threads: safe for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from ..config.arguments import Start, check_names, check_options
from ..errors import CorruptLogError, GroupNotFoundError
from ..log.log import Log
from ..open_topic import OpenTopic
from ..system.clock import monotonic
from ..system.process import importing

if TYPE_CHECKING:
    from ..append.stats import AppendTimes, TopicStats
    from ..log.lag import Lag
    from .administration import GroupInfo, OffsetMove
    from .assignment import TopicPartition
    from .directory import GenerationFence, GroupDirectory
    from .group import Group, GroupOptions

logger = logging.getLogger("loglib")


class GroupedTopic(OpenTopic):
    """An open topic whose groups can be joined: a base of `Topic`."""

    _new_fence: Callable[[], GenerationFence]  # makes a fence for the generations of members in transactions
    _append_times: AppendTimes  # that `stats` has read

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
        from .group import OPTIONS, Group

        check_options(self.group, options, OPTIONS)
        return Group(self._group_directory(name), **options)

    def groups(self) -> list[str]:
        """The sorted names of the consumer groups that are stored with this topic. Joins none of them."""
        from .directory import group_names

        self._handles.check_open()
        return group_names(self._files, self.path)

    def group_info(self, name: str, *, count_records: bool = False) -> GroupInfo:
        """A group's members, owners, commits and lag, without joining it: for monitoring.

        It has the partitions of this topic, by number. For all topics of a group use `loglib.groups.group_info`.
        `count_records` also counts the records of the lag, by reading the header of every batch in it. Raises
        `GroupNotFoundError`, and `GroupElsewhereError` if the group is stored with another topic.
        """
        from .administration import inspect

        return inspect(self._group_directory(name), count_records=count_records).of_topic(self.name)

    def reset_group(
        self, name: str, start: Start | Mapping[int, Start], *, dry_run: bool = False
    ) -> dict[int, OffsetMove]:
        """Move a group's committed offsets to a start, while it has no members; returns the old and new offsets.

        `start` is "begin", "end", a time, an age, or a mapping of partitions to these or to offsets. With
        `dry_run` nothing is committed. Raises `GroupBusyError` if the group has members, and
        `GroupElsewhereError` if it is stored with another topic.
        """
        from .administration import reset
        from .assignment import TopicPartition

        place = self._group_directory(name)
        start_of: Any = start
        if isinstance(start, Mapping):
            start_of = {TopicPartition(self.name, self.partition(key).id): each for key, each in start.items()}
        moves = reset(place, start_of, dry_run=dry_run)
        return {each.partition: move for each, move in moves.items()}

    def evict_member(self, name: str, member: str) -> list[int]:
        """Take the partitions away from a hanging member of a group; returns its partitions of this topic.

        Other members claim them immediately. The evicted member gets `StaleGenerationError` when it next asks for
        records or commits. Raises `LogError` if the group has no such member.
        """
        from .administration import evict

        taken = evict(self._group_directory(name), member)
        return [each.partition for each in taken if each.topic == self.name]

    def delete_group(self, name: str) -> None:
        """Delete a group and its commits: the next member that joins it begins at its own `start`.

        Raises `GroupBusyError` if the group has members, and `GroupNotFoundError` if there is no such group.
        """
        from .administration import delete

        delete(self._group_directory(name))

    def stats(self) -> TopicStats:
        """Figures for monitoring: sizes, what this process has appended, times of flushes, lag of the groups.

        It reads no records and takes no lock: a fraction of a millisecond for each partition and each group. Rates are
        those between two moments: `later.rates_since(earlier)`. Of a group on several topics, each topic has the lag in
        its own partitions. A damaged group is left out, with a warning in the log.
        """
        from ..append.stats import TopicStats, stats_of_partition
        from .administration import lag as lag_of
        from .directory import followed_groups

        self._handles.check_open()
        lag: dict[str, dict[int, Lag]] = {}
        damaged: list[CorruptLogError] = []
        for name in followed_groups(self._files, self.path):
            with self._left_out_if_damaged("group", name, damaged):
                found = lag_of(self._group_directory(name))
                lag[name] = {each.partition: behind for each, behind in found.items()}
        partitions = tuple(stats_of_partition(each, self._append_times) for each in self._accesses)
        return TopicStats(self.name, monotonic(), partitions, lag, {}, tuple(damaged))

    @contextmanager
    def _left_out_if_damaged(self, kind: str, name: str, damaged: list[CorruptLogError]) -> Iterator[None]:
        """End the block without an error if the group or share is damaged, was just deleted, or is another topic's."""
        try:
            yield
        except GroupNotFoundError:
            pass
        except CorruptLogError as error:
            logger.warning("%s: %s %s is left out of the figures: %s", self.path, kind, name, error)
            damaged.append(error)

    def _group_directory(self, name: str, topics: Sequence[OpenTopic] = ()) -> GroupDirectory:
        """The directory of the group with this name, on this topic or on several."""
        from .directory import GroupDirectory, check_logs_differ

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


def committed_of(topic: GroupedTopic, group: str) -> dict[int, int]:
    """The commits of a group in this topic, by partition."""
    with importing:  # in the background thread
        from .administration import committed

    found = committed(topic._group_directory(group))  # noqa: SLF001
    return {each.partition: offset for each, offset in found.items() if each.topic == topic.name}


def _logs_of(topics: Sequence[OpenTopic]) -> dict[TopicPartition, Log]:
    """The logs of these topics, with those of partitions that were added since."""
    from .assignment import TopicPartition

    return {
        TopicPartition(each.name, access.id): access.log
        for each in topics for access in each._accesses  # noqa: SLF001
    }  # fmt: skip
