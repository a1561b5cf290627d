"""Repair: a damaged topic opens again, and its readers report and pass over what is lost.

Invariant: everything that can be read before a repair is read after it, at the same offsets. No offset is used again.
Bytes that a repair overwrites or cuts are copied aside first, and damaged bytes of batches stay where they are. A
repair may crash at any point and be run again.

    gaps.json       declares the ranges that cannot be read (gaps.py), and no longer those that can be read again
    headers         a damaged segment header is made from the segment before it and its own first batch
    places          a missing segment becomes a file of zeros, and a file that is too short ends with zeros: gaps;
                    surplus bytes of a file are cut
    the end         if the end of the log is damaged, the last segment is sealed, and a new one begins after it
    the watermark   is written again, if one of its slots is not whole
    topic.json      is written again if it is damaged, with the default policies

The last step is that of a writer before it appends (recovery.py): it proves that the partition opens.

Threads: no state. Processes: declaring gaps needs no lock and may be done beside a writer. All else needs the
partition's lock.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from ..config.policies import TopicConfig
from ..errors import CorruptLogError, LogError
from ..segment import HEADER_BYTES, Identity, SegmentHeader
from ..system.clock import SYSTEM
from ..system.directory import Directory
from ..system.files import Files
from . import copy_role, store_pointer, topic_file
from .care import care_for, change_description, read_description
from .repair_partition import Repair, repair_partition
from .verify import Progress, VerifyReport

__all__ = ["Repair", "RepairReport", "repair_topic", "stated_log_id"]


class RepairReport(NamedTuple):
    """The result of repairing a topic."""

    repairs: tuple[Repair, ...]  # what was done; of a dry run: what would be done
    verified: VerifyReport  # after the repair; of a dry run: of the unchanged topic

    @property
    def lost_bytes(self) -> int:
        """Number of bytes of the log that these repairs declare as lost."""
        return sum(len(each.offsets) for each in self.repairs)


def repair_topic(
    files: Files, path: str,
    *, dry_run: bool = False, progress: Progress | None = None, clock: Callable[[], int] = SYSTEM,
) -> RepairReport:  # fmt: skip
    """Repair a topic; see `transactions.repair_store.repair`, which takes a store, too."""
    repairs: list[Repair] = []
    if not dry_run:
        copy_role.check(files, path, copy_role.REPAIR)
    log_id, config = _description(files, path, repairs, dry_run=dry_run)
    _remove_lost_store(files, path, repairs, dry_run=dry_run)

    def care(identity: Identity, progress: Callable[[int], None]) -> None:
        repairs.extend(repair_partition(
            files, path, identity, config.permissions, now_us=clock(), dry_run=dry_run, progress=progress
        ))  # fmt: skip

    verified = care_for(files, path, log_id, range(config.partitions), care, progress)
    return RepairReport(tuple(repairs), verified)


def _remove_lost_store(files: Files, path: str, repairs: list[Repair], *, dry_run: bool) -> None:
    """Forget a store of transactions that is gone. The topic's logs contain what is left of its transactions."""
    name, kept = store_pointer.NAME, None
    try:
        what = "" if not store_pointer.is_lost(files, path) else "its store of transactions is gone"
    except CorruptLogError as error:
        what = f"found {error.found}"
    if not what:
        return

    def remove(directory: Directory) -> None:
        directory.unlink(name)
        directory.sync()

    if not dry_run:
        kept = change_description(files, path, name, remove)
    what = f"removed ({what}): the next transaction names a store, which does not know the versions of apps before"
    repairs.append(Repair(None, os.path.join(path, name), what, kept=kept))


# --- the description ---------------------------------------------------------------------------------


def _description(files: Files, path: str, repairs: list[Repair], *, dry_run: bool) -> tuple[bytes, TopicConfig]:
    """The log id and the policies of the topic. A description that is lost is written again."""
    try:
        return read_description(files, path)
    except CorruptLogError as error:
        fault = error
    log_id, config = stated_log_id(files, path), TopicConfig(partitions=max(_partitions(files, path)) + 1)
    kept = None
    if not dry_run:
        kept = change_description(files, path, topic_file.NAME, lambda made: topic_file.write(made, log_id, config))
    what = f"rebuilt for {config.partitions} partitions; all policies are the default ones: set them again"
    repairs.append(Repair(None, fault.path, f"{what} (found {fault.found})", kept=kept))
    return log_id, config


def _partitions(files: Files, path: str) -> list[int]:
    try:
        names = files.sizes(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise LogError(f"{path} holds no topic: there is no such directory") from error
    return [int(name) for name in names if len(name) == 4 and name.isascii() and name.isdigit()]


def stated_log_id(files: Files, path: str) -> bytes:
    """The log id that most headers of segments state. `LogError` if there is no partition."""
    stated: Counter[bytes] = Counter()
    numbers = _partitions(files, path)
    if not numbers:
        raise LogError(f"{path} holds no topic: it has neither {topic_file.NAME} nor a partition")
    for number in numbers:
        directory = topic_file.partition_directory(path, number)
        for name in files.sizes(directory):
            if name.endswith(".log"):
                fd = files.open_read(os.path.join(directory, name))
                try:
                    with suppress(CorruptLogError):
                        stated[SegmentHeader.decode(files.read_at(fd, HEADER_BYTES, 0), name).log_id] += 1
                finally:
                    files.close(fd)
    if not stated:
        raise CorruptLogError(path, 0, "no whole header of a segment", "at least one, which has the log's id")
    return stated.most_common(1)[0][0]
