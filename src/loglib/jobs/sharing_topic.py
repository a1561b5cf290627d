"""Sharing topic: the shares of one topic.

Invariant: a share's files are in the directory of its topic. The modules of shares are loaded when one is first used.

Threads: safe for all.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

from ..config.arguments import check_names
from ..groups.grouped_topic import GroupedTopic, committed_of
from ..log.lookup import StartLike
from ..retention import Hold, ShareHold
from ..system.clock import clock_of
from ..system.process import importing

if TYPE_CHECKING:
    from ..append.stats import ShareStats, TopicStats
    from .administration import ShareInfo
    from .directory import ShareDirectory
    from .share import Share, ShareOptions
    from .state import Settings
    from .transacting import Transactions


class SharingTopic(GroupedTopic):
    """An open topic whose shares can be joined: a base of `Topic`."""

    _new_transactions: Callable[[Any], Transactions]  # makes what shares ask of transactions, from the topic's handles

    def share(self, name: str, **options: Unpack[ShareOptions]) -> Share:
        """Join a share: many members take, settle and repeat single records. The topic may be open in either mode.

        `start` is where a new share begins: "begin", "end", a time, an age, or a mapping of partitions. `member` is a
        name for `share_info`. The first member stores the settings, and later ones need not give them: `max_attempts`
        (5) starts of a handler, after which a record is settled as exhausted; `window` (10,000) records of a partition
        that may be begun and not settled; `max_in_hand` (None: any number) records of a partition that may be in hand
        in all processes together; `dead_letter` (None), the path of the topic to which a record is copied that is
        rejected or exhausted, in the transaction that settles it; `order` ("none"), with "key" a record is handed out
        only when all earlier ones of its key are settled. `ShareMismatchError` if another value is stored.

        `backoff` (0) is the time in seconds before a released record comes again; it doubles with each attempt, and
        varies by 20 %. With a `lease`, in seconds, a record that is not settled by then is taken away from a handler
        that hangs; without, only from a member that dies. `settle` is "after", where a loop accepts a job when it asks
        for the next one, or "explicit". What is settled is durable after `commit` (0.1) seconds, when the member is
        next asked for a job, and after `Share.flush` and `Share.close`.
        """
        from .share import Share

        return Share(self._share_directory(name), **options)

    def stats(self) -> TopicStats:
        """Figures for monitoring: sizes, what this process has appended, times of flushes, lag of groups, shares.

        It reads no records and takes no lock: a fraction of a millisecond for each partition, each group and each
        share. Rates are those between two moments: `later.rates_since(earlier)`. Of a group on several topics, each
        topic has the lag in its own partitions. A damaged group or share is left out, with a warning in the log.
        """
        names = self.shares()
        stats = super().stats()
        return self._with_shares(stats, names) if names else stats

    def _with_shares(self, stats: TopicStats, names: list[str]) -> TopicStats:
        from .administration import figures

        found: dict[str, ShareStats] = {}
        damaged = list(stats.damaged)
        for name in names:
            with self._left_out_if_damaged("share", name, damaged):
                found[name] = figures(self._share_directory(name))
        return stats._replace(shares=found, damaged=tuple(damaged))

    def shares(self) -> list[str]:
        """The sorted names of the topic's shares. Joins none of them."""
        from .directory import share_names

        self._handles.check_open()
        return share_names(self._files, self.path)

    def share_info(self, name: str) -> ShareInfo:
        """A share's members, settings, and unsettled records, without joining it. `GroupNotFoundError` without it."""
        from .administration import inspect

        return inspect(self._share_directory(name))

    def alter_share(
        self, name: str, *, max_attempts: int | None = None, window: int | None = None, max_in_hand: int | None = None,
        dead_letter: str | os.PathLike[str] | None = None,
    ) -> Settings:  # fmt: skip
        """Change settings of a share, also for the present members; returns all of them.

        0 as `max_in_hand`: no limit. "" as `dead_letter`: no dead letters. An argument that is None changes nothing.
        `GroupNotFoundError` without such a share.
        """
        from .administration import alter
        from .directory import changes_of

        given = changes_of({
            "max_attempts": max_attempts, "window": window, "max_in_hand": max_in_hand, "dead_letter": dead_letter,
        })  # fmt: skip
        return alter(self._share_directory(name), given)

    def reset_share(self, name: str, start: StartLike) -> dict[int, int]:
        """Let a share begin again at a start, while it has no members; returns the next offset of each partition.

        All its records from there on come again, with their first attempt. A mapping changes only the partitions that
        it names. Raises `GroupBusyError` and `GroupNotFoundError`.
        """
        from .administration import reset

        return reset(self._share_directory(name), start)

    def delete_share(self, name: str) -> None:
        """Delete a share and what it knows of its records. Raises `GroupBusyError` and `GroupNotFoundError`."""
        from .administration import delete

        delete(self._share_directory(name))

    def evict_share_member(self, name: str, member: str) -> dict[int, list[int]]:
        """Take the records away from a member that hangs, and remove it; returns their offsets, by partition.

        Its attempts count. The member gets `FencedJobError` when it settles, and `StaleGenerationError` when it asks
        for a job. `LogError` if the share has no such member.
        """
        from .administration import evict

        return evict(self._share_directory(name), member)

    def _share_directory(self, name: str) -> ShareDirectory:
        from .directory import ShareDirectory

        check_names(name)
        self._handles.check_open()
        return ShareDirectory(
            self._files, self.path, self.log_id, name, lambda: {each.id: each.log for each in self._accesses},
            self.config.permissions, clock_of(self._clock), self._handles.track, self._new_transactions(self._handles),
        )  # fmt: skip


def holds_of(reference: weakref.ref[SharingTopic], name: str) -> dict[int, Hold]:
    """The holds of the group and the share with this name, by partition. A missing partition is held whole.

    There are none if the topic is gone.
    """
    topic = reference()
    if topic is None:
        return {}
    committed = {partition: Hold(name, offset) for partition, offset in committed_of(topic, name).items()}
    if name not in topic.shares():
        return committed
    with importing:  # in the background thread
        from .administration import settled_to

    settled = {number: ShareHold(name, offset) for number, offset in settled_to(topic._share_directory(name)).items()}  # noqa: SLF001
    if name not in topic.groups():
        return {**settled}
    both = committed.keys() & settled.keys()
    return {each: min(committed[each], settled[each], key=lambda hold: hold.offset or 0) for each in both}
