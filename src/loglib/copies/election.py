"""Election: which copy of a log has everything that was acknowledged.

Invariant: of the copies that are examined, the chosen one has the largest accepted epoch, and of those the largest
claim. An acknowledged record is in it if enough copies are examined: one more than those that may lack it. No other
rule holds: the longest log, or that of the newest batch, may lack records that were acknowledged (decision 32).

A damaged copy counts as lost. If too few remain, it counts with the durable end from its watermark or from an intact
batch after the damage; and another copy of the same writer's log that is as long must give the bytes.

Threads: no state, safe for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from ..errors import CorruptLogError, LogError
from ..format.watermark import Mark
from ..log.recovery import segment_reader
from ..log.search import proven_headers
from ..segment import Identity
from ..system.directory import Directory
from .follower_log import find_tail

Name = TypeVar("Name")


class LogClaim(NamedTuple):
    """The claim of one copy of a log."""

    epoch: int  # of the writer that it has accepted
    nonce: int  # of that writer
    claim: int  # its end, or its end before it was damaged
    damage: CorruptLogError | None = None
    is_rotten: bool = False  # the damage is below its mark: the records before it cannot be used either


def claim_of(place: Directory, identity: Identity, mark: Mark) -> LogClaim:
    """The claim of the copy in an open directory, whose mark is given. Nothing is changed.

    Only the batches after the mark and the last one before it are read. Earlier damage is found when the log is copied.
    """
    epoch, nonce = mark.writer_epoch, mark.writer_nonce
    try:
        found = find_tail(place, identity, mark)
        claim = end = found.tail.end
        with segment_reader(place, identity, found.bases[-1]) as reader:
            if reader.base_offset <= mark.flushed_tail < mark.flushed_end:
                size = mark.flushed_end - mark.flushed_tail
                reader.batches(mark.flushed_tail, mark.flushed_end, block_bytes=size)
            for later in proven_headers(reader, end, reader.end_of_file()):
                claim = max(claim, later.durable_up_to)
    except CorruptLogError as error:
        return LogClaim(epoch, nonce, mark.durable_end, error, is_rotten=True)
    if claim == end:
        return LogClaim(epoch, nonce, end)
    damage = CorruptLogError(reader.path, reader.file_position(end), "no whole batch", "one that was durable")
    return LogClaim(epoch, nonce, claim, damage)


def choose(found: Mapping[Name, LogClaim], *, least: int) -> list[Name]:
    """The copies that have all of the right history and no known damage, in the order of `found`.

    Any `least` copies have every acknowledged record among them. `CorruptLogError` if the right copy is damaged and no
    other copy is the same.
    """
    whole = {name: each for name, each in found.items() if each.damage is None}
    if len(whole) >= least:
        found = whole
    best = max(found.values(), key=lambda each: (each.epoch, each.claim))
    if len({each.nonce for each in found.values() if each.epoch == best.epoch}) > 1:
        raise LogError(
            f"the directories have two histories of writer {best.epoch}: a part of them was opened apart from the "
            "others with forget_replicas=; open one part, with the others in forget_replicas="
        )
    donors = [name for name, each in found.items() if each[:3] == best[:3] and each.damage is None]
    if not donors:
        damages = [each.damage for each in found.values() if each[:3] == best[:3] and each.damage is not None]
        raise damages[0]
    return donors
