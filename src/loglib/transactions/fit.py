"""Fit: checks before a commit that its partitions can take the transaction: writers that answer, and lower numbers.

Invariant: the numbers of transactions rise in each partition, also if they are of several stores. So a number that is
committed is above those that its partitions have, and is never taken for one that was applied before.

A partition may have higher numbers than its store has given:

    from another store     the topic came from another host, or from a copy: the store passes over these numbers
    from this store        the store was set back: it is a restored backup, which does not have the later transactions.
                           `LogError`: versions of apps would be committed twice

Threads: no state.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import NamedTuple

from ..errors import LockedError, LogError, LogMovedError
from ..format.watermark import NAME as WATERMARK
from ..format.watermark import WatermarkReader
from ..log import topic_file
from ..log.log import Log, unfinishable
from ..log.recovery import Extent, Sections, list_segments, measure
from ..segment import Identity, SegmentReader, segment_name
from ..system.clock import monotonic
from ..system.files import Files
from ..system.lock import is_free, try_acquire
from .notifications import request_ack
from .store import Store

_NAP_S = 0.001


class Target(NamedTuple):
    """A partition that gets records of a transaction."""

    topic_path: str
    identity: Identity

    @property
    def partition(self) -> int:
        return self.identity.partition

    @property
    def directory(self) -> str:
        """The path of the partition's directory."""
        return topic_file.partition_directory(self.topic_path, self.partition)


def check_writers(files: Files, store: Store, targets: Iterable[Target], *, answer_s: float, applying_s: float) -> None:
    """`LockedError` if a partition has a writer in another process that does not answer within `answer_s` seconds.

    A process that applies another transaction holds partitions for a moment. It is waited for up to `applying_s`
    seconds. The caller leaves out the partitions that it writes itself.
    """
    held = _held(files, targets)
    if held:
        deadline = monotonic() + applying_s
        while (applying := try_acquire(files, store.path)) is None and monotonic() < deadline:
            time.sleep(_NAP_S)
        try:
            held = _held(files, held)
        finally:
            if applying is not None:
                applying.release()
    for path in {each.topic_path for each in held}:
        directories = {each.partition: each.directory for each in held if each.topic_path == path}
        is_gone = partial(_is_free, files, directories)
        silent = request_ack(files, path, directories, patience_s=answer_s, is_free=is_gone)
        if silent:
            raise LockedError(
                directories[silent[0]], "a writer that does not answer transactions",
                advice="nothing was committed; is that process stopped, or of an older loglib?",
            )  # fmt: skip


def _held(files: Files, targets: Iterable[Target]) -> list[Target]:
    return [each for each in targets if not is_free(files, each.directory)]


def _is_free(files: Files, directories: Mapping[int, str], partition: int) -> bool:
    return is_free(files, directories[partition])


def make_fit(files: Files, store: Store, targets: Iterable[Target], *, now: int) -> None:
    """Raise the store's next number above those of these partitions. Synced.

    Raises `LogMovedError` if a topic was moved or deleted, and `LogError` if the store was set back, or if a partition
    has a part of a transaction that no process can finish: then nothing may be committed.
    """
    highest = 0
    for target in targets:
        described = topic_file.read(files, target.topic_path)
        if described is None or described[0] != target.identity.log_id:
            raise LogMovedError(target.topic_path, "was moved, deleted or made again: nothing is committed")
        has = numbers_of(files, target)
        if has.held_txn and store.pending_id(has.held_txn) != has.held_id:
            _check_whole(files, target, has)
        last = max(has.applied_txn, has.held_txn)
        if last > store.last_number():
            if has.txn_store in (0, store_number(store.id)):
                raise LogError(
                    f"{store.path} is older than {target.directory}, which has transaction {last} of it: the store was "
                    "set back, as by restoring a backup, so nothing is committed. Put the newer store back; or run "
                    f"`loglib repair {target.topic_path}`, and the versions of apps that the store has forgotten can "
                    "be committed a second time"
                )
            highest = max(highest, last)
    if highest > store.last_number():
        store.pass_over(highest, now=now)


def numbers_of(files: Files, target: Target) -> Sections:
    """The transactions that a partition has, also if its watermark is lost."""
    path = os.path.join(target.directory, WATERMARK)
    with suppress(FileNotFoundError), closing(WatermarkReader(files, path, target.identity.salt)) as watermark:
        mark = watermark.read()
        if mark is not None:
            return Sections.of(mark, mark.held_tail)
    bases = list_segments(files, target.directory)
    if not bases:
        raise FileNotFoundError(errno.ENOENT, "no segment", target.directory)
    path = os.path.join(target.directory, segment_name(max(bases)))
    with SegmentReader(files, path, target.identity) as reader:
        return measure(reader, None)[1].sections


def _check_whole(files: Files, target: Target, has: Sections) -> None:
    if has.applied_txn == has.held_txn:
        return
    with closing(Log(files, target.directory, target.identity)) as log:
        mark = log.published()
        headers = log.headers_from(has.held_from, mark)
        if Extent.among(headers, has.held_txn, has.held_id) == Extent.PART:
            raise unfinishable(target.directory, mark)


def store_number(store_id: bytes) -> int:
    """The number that names a store in logs."""
    return int.from_bytes(store_id[:8], "little")
