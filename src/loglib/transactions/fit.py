"""Fit: whether the partitions of a transaction can take the next number of its store, before it is committed.

Invariant: the numbers of transactions rise in each partition, whichever store gave them. So a number that is committed
is above those that its partitions have, and applying never takes it for one that was applied before.

A partition may have higher numbers than its store has given:

    from another store     the topic came from another host, or from a copy: the store passes over these numbers
    from this store        it was set back: it is a backup that was restored, and does not know what was committed
                           behind it. `LogError`: versions of apps would be committed twice

Threads: no state.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import closing
from typing import NamedTuple

from ..errors import LogError, LogMovedError
from ..format.watermark import NAME as WATERMARK
from ..format.watermark import WatermarkReader
from ..log import topic_file
from ..log.log import Log, unfinishable
from ..log.recovery import Extent, Sections, list_segments, measure
from ..segment import Identity, SegmentReader, segment_name
from ..system.files import Files
from .store import Store

__all__ = ["Place", "make_fit", "numbers_of", "store_number"]


class Place(NamedTuple):
    """A partition that gets records."""

    topic_path: str
    identity: Identity

    @property
    def directory(self) -> str:
        """The path of the partition's directory."""
        return topic_file.partition_directory(self.topic_path, self.identity.partition)


def make_fit(files: Files, store: Store, places: Iterable[Place], *, now: int) -> None:
    """Let the store's next number be above those of these partitions. Synced.

    Raises `LogMovedError` if a topic is not there any more, and `LogError` if the store was set back, or if a partition
    has a part of a transaction that nobody can finish: then nothing must be committed.
    """
    highest = 0
    for place in places:
        described = topic_file.read(files, place.topic_path)
        if described is None or described[0] != place.identity.log_id:
            raise LogMovedError(place.topic_path, "was moved, deleted or made anew: nothing is committed")
        found = numbers_of(files, place)
        if found.held_txn and store.waiting_id(found.held_txn) != found.held_id:
            _check_whole(files, place, found)
        last = max(found.applied_txn, found.held_txn)
        if last > store.last_number():
            if found.txn_store in (0, store_number(store.id)):
                raise LogError(
                    f"{store.path} is older than {place.directory}, which has transaction {last} of it: the store was "
                    "set back, as by restoring a backup, so nothing is committed. Put the newer store back; or run "
                    f"`loglib repair {place.topic_path}`, and the versions of apps that the store has forgotten can be "
                    "committed a second time"
                )
            highest = max(highest, last)
    if highest > store.last_number():
        store.pass_over(highest, now=now)


def numbers_of(files: Files, place: Place) -> Sections:
    """The transactions that a partition has, also where its watermark is lost."""
    try:
        watermark = WatermarkReader(files, os.path.join(place.directory, WATERMARK), place.identity.salt)
        try:
            mark = watermark.read()
        finally:
            watermark.close()
    except FileNotFoundError:
        mark = None
    if mark is not None:
        return Sections.of(mark, mark.held_tail)
    bases = list_segments(files, place.directory)
    if not bases:
        raise FileNotFoundError(errno.ENOENT, "no segment", place.directory)
    path = os.path.join(place.directory, segment_name(max(bases)))
    with SegmentReader(files, path, place.identity) as reader:
        return measure(reader, None)[1].sections


def _check_whole(files: Files, place: Place, found: Sections) -> None:
    if found.applied_txn == found.held_txn:
        return
    with closing(Log(files, place.directory, place.identity)) as log:
        mark = log.published()
        headers = log.headers_from(found.held_from, mark)
        if Extent.among(headers, found.held_txn, found.held_id) == Extent.PART:
            raise unfinishable(place.directory, mark)


def store_number(store_id: bytes) -> int:
    """The number by which a log names a store."""
    return int.from_bytes(store_id[:8], "little")
