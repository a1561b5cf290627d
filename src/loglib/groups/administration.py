"""Administration: what is done to a group from outside: looking, moving its offsets, evicting a hung member.

Invariant: offsets move only while nobody reads; a member that is evicted can commit nothing more.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import NamedTuple

from ..arguments import Start
from ..errors import GroupBusyError, LogError
from .assignment import TopicPartition
from .members import Membership, live_members
from .offsets import Commit, OffsetLog
from .owners import Ownership, evict_owner, read_owner
from .place import Place

__all__ = ["Move", "evict", "reset"]


class Move(NamedTuple):
    """Where a reset puts a partition: from the offset committed (None if there was none) to another."""

    before: int | None
    after: int


def reset(place: Place, start: Start | Mapping[TopicPartition, Start], *, dry_run: bool) -> dict[TopicPartition, Move]:
    """Commit a start for all partitions, or those that a mapping names, while the group has no members.

    Raises `GroupBusyError` if it has; with `dry_run` nothing is committed, and members do not matter.
    """
    after = place.resolve(start, place.logs)
    if dry_run and not place.exists():
        return {each: Move(None, offset) for each, offset in after.items()}
    place.make()
    offsets = place.offsets()
    try:
        before = offsets.commits()
        moves = {each: Move(before[each].offset if each in before else None, after[each]) for each in sorted(after)}
        if not dry_run:
            _commit(place, offsets, moves)
        return moves
    finally:
        offsets.close()


def _commit(place: Place, offsets: OffsetLog, moves: Mapping[TopicPartition, Move]) -> None:
    """As a member that owns what it moves: whoever joins meanwhile waits, and then starts there."""
    if members := live_members(place.files, place.members):
        raise GroupBusyError(place.name, members)
    name = f"reset-{os.getpid()}-{os.urandom(4).hex()}"
    with ExitStack() as held:
        membership = Membership(place.files, place.members, name, place.topics, place.permissions)
        held.callback(membership.leave)
        ownership = Ownership(place.files, place.owners, name, place.permissions)
        held.callback(lambda: ownership.release(ownership.owned()))
        before = offsets.commits()
        for partition in moves:
            if not ownership.claim(partition, at_least=before.get(partition, Commit(0)).generation):
                raise GroupBusyError(place.name, [read_owner(place.files, place.owners, partition).member or "another"])
        commits = {each: Commit(move.after, "reset", ownership.generation(each) or 0) for each, move in moves.items()}
        offsets.commit(commits, member=name, fence=lambda: None)


def evict(place: Place, member: str) -> list[TopicPartition]:
    """Take a member's place and partitions from it, hung as it may be; returns the partitions.

    It learns of it when it next asks for records or commits: `StaleGenerationError`.
    """
    if not place.exists() or member not in live_members(place.files, place.members):
        raise LogError(f"group {place.name} has no member {member}")
    with suppress(FileNotFoundError):
        place.files.unlink(os.path.join(place.members, member))
    owned = [each for each in place.logs if read_owner(place.files, place.owners, each).member == member]
    for partition in owned:
        evict_owner(place.files, place.owners, partition, place.permissions)
    return sorted(owned)
