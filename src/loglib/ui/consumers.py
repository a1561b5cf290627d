"""Consumers: the consumer groups of a topic: members, what they own, lag, since when.

Invariant: a group is looked at from outside, as `Topic.group_info` does: nobody joins it, and nothing is written.

Threads: no state, safe for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import GroupElsewhereError, GroupNotFoundError, LogError
from ..groups import GroupInfo
from ..groups.directory import followed_groups
from ..log.lag import total_lag
from ..system.files import REAL
from ..topic import Topic
from .troubles import command


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A live member."""

    name: str
    pid: int
    host: str
    since: str  # when it joined, by its own clock: ISO 8601, UTC
    strategy: str | None
    owns: list[int]  # partitions of this topic


@dataclass(frozen=True, slots=True)
class OwnedRow:
    """A group in one partition."""

    partition: int
    owner: str | None  # None: nobody owns it; "": its owner is still claiming it
    committed: str | None  # the offset
    committed_by: str
    committed_us: int | None
    log_start_offset: str
    high_watermark: str
    lag_bytes: int
    lag_seconds: float
    has_lost: bool  # the log begins above the commit


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group of a topic."""

    name: str
    stored_with: str | None  # the other topic that has the group; its facts are there
    members: list[MemberRow]
    partitions: list[OwnedRow]
    lag_bytes: int
    lag_seconds: float
    error: str | None
    command: str  # the next one to type: that watches the lag


def groups_of(topic: Topic) -> list[GroupFacts]:
    """The groups that read a topic, sorted by name. One that cannot be read has its error."""
    return [_facts_of(topic, name) for name in followed_groups(REAL, topic.path)]


def _facts_of(topic: Topic, name: str) -> GroupFacts:
    watch = command("lag", topic.path, name, "--watch")
    try:
        return _facts(topic, topic.group_info(name), watch)
    except GroupElsewhereError as error:
        return GroupFacts(name, error.topic, [], [], 0, 0.0, None, watch)
    except GroupNotFoundError:
        return GroupFacts(name, None, [], [], 0, 0.0, "it was deleted just now", watch)
    except (LogError, OSError) as error:
        return GroupFacts(name, None, [], [], 0, 0.0, str(error), watch)


def _facts(topic: Topic, info: GroupInfo, watch: str) -> GroupFacts:
    rows, lag = [_owned(topic, info, number) for number in sorted(info.lag)], total_lag(info.lag.values())
    members = [
        MemberRow(
            each, facts.pid, facts.host, facts.since, facts.strategy,
            sorted(number for number, owner in info.owners.items() if owner == each),
        )
        for each, facts in info.members.items()
    ]  # fmt: skip
    return GroupFacts(
        info.name, None, members, rows, lag.bytes, lag.seconds, None, watch,
    )  # fmt: skip


def _owned(topic: Topic, info: GroupInfo, number: int) -> OwnedRow:
    partition, commit, lag = topic.partition(number), info.committed.get(number), info.lag[number]
    start = partition.log_start_offset
    return OwnedRow(
        number, info.owners.get(number), None if commit is None else str(commit.offset),
        "" if commit is None else commit.member, None if commit is None else commit.timestamp or None,
        str(start), str(partition.high_watermark), lag.bytes, lag.seconds, commit is not None and commit.offset < start,
    )  # fmt: skip
