"""Parts: the directories and places that make one topic, as the arguments of `Topic.open` name them.

Invariant: arguments that contradict each other raise `ValueError` before anything is opened or written.

Threads: pure functions, except that a place of uploaded segments is looked at.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.arguments import donor_paths, topic_path
from ..config.quantities import Duration, seconds
from ..config.uri import is_remote
from ..log import copy_role
from ..log.log import Log
from ..segment import Identity
from ..system.files import Files

if TYPE_CHECKING:  # loaded when a topic has copies, or segments elsewhere
    from ..offload.tier_files import Tier
    from .roster import Acks, ReplicaRequest


class Parts(NamedTuple):
    """The parts of one topic."""

    path: str  # absolute; of the directory, or of a place of uploaded segments
    files: Files  # by which the path is read
    place: Tier | None  # the place of uploaded segments that is opened itself
    tier: str | None  # the place that has what retention has dropped from the directory
    donors: tuple[str, ...]  # absolute paths of other copies, from which damaged batches are read
    replicas: ReplicaRequest | None
    is_member: bool  # the directory belongs to a topic with replicas

    @property
    def opened_by(self) -> tuple[str, str | None]:
        """The path or URI, and the tier, by which another process opens the topic for reading."""
        return self.path if self.place is None else self.place.given, self.tier

    def logs(self, log_id: bytes) -> tuple[Files, Callable[[Files, str, Identity], Log]]:
        """The files of the log with this id, and the way to open the log of a partition."""
        if self.place is not None:
            return self.files, self.place.make_log
        if self.tier is None:
            return self.files, Log
        from ..offload.tier_files import Tier, TierOverlayFiles, TierOverlayLog

        make_log: Callable[[Any, str, Identity], Log] = TierOverlayLog
        return TierOverlayFiles(self.files, self.path, log_id, Tier(self.files, self.tier)), make_log


def parts_of(
    files: Files,
    path: str | os.PathLike[str],
    *,
    mode: str,
    shared: bool,
    donors: Iterable[str | os.PathLike[str]],
    tier: str | os.PathLike[str] | None,
    replicas: Sequence[str | os.PathLike[str]] | None,
    acks: Acks | None,
    replica_timeout: Duration,
    forget_replicas: Sequence[str | os.PathLike[str]],
) -> Parts:
    """The parts of the topic at `path`. The arguments are those of `Topic.open`.

    Raises `ValueError` and `TypeError` for arguments that are invalid or contradict each other, and `NotLeaderError`
    if a copy is opened with mode="a".
    """
    text, place = os.fsdecode(path), None
    is_place = is_remote(text) or (mode == "r" and text and copy_role.is_tier(files, os.path.abspath(text)))
    if is_place or tier is not None:
        from ..offload.tier_files import tier_at

        place = tier_at(files, text, mode, tier)
    absolute, place_files = (topic_path(path), files) if place is None else (place.path, place.files)
    others = donor_paths(donors, absolute)
    if others and mode != "r":
        raise ValueError("donors are for mode='r'; loglib.copies.healing makes a damaged topic whole")
    if others and place is not None:
        raise ValueError(f"donors are for a topic's directory; {place.path} is a place of uploaded segments")
    request = None
    if replicas is not None:
        from .chain import check_apart
        from .roster import ReplicaRequest

        timeout_s = seconds("replica_timeout", replica_timeout)
        request = ReplicaRequest.of(absolute, replicas, acks, timeout_s, forget_replicas)
        if shared:
            raise ValueError("a topic with replicas has one writer: shared=True is for topics without")
        if mode == "r":
            raise ValueError("mode='r' reads any directory of a topic; leave replicas=[...] out")
        check_apart(files, [absolute, *request.paths])
    elif acks is not None or forget_replicas:
        raise ValueError("acks and forget_replicas are about the directories in replicas=[...], which is missing")
    role = copy_role.read(place_files, absolute) if mode == "a" else None
    is_member = role is not None and role.role == copy_role.REPLICA
    if mode == "a" and not (is_member and request is not None):
        copy_role.check_leader(place_files, absolute)
    return Parts(absolute, place_files, place, None if tier is None else os.fsdecode(tier), others, request, is_member)


def check_durability(policies: Mapping[str, object]) -> None:
    """Raise `ValueError` if these policies of a topic with replicas have another durability than "disk"."""
    if policies.get("durability", "disk") != "disk":
        raise ValueError("a topic with replicas has durability='disk'")
