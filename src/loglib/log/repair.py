"""Repair: makes a damaged topic open again. Its readers skip lost records and report them.

Invariant: what can be read before a repair is read after it, at the same offsets. No offset is used again. Bytes that
a repair overwrites or cuts are copied aside first, and damaged bytes of batches stay where they are. A repair may
crash at any point and be run again.

    gaps.json       declares the ranges that cannot be read (gaps.py); ranges that can be read again are taken out
    headers         a damaged header of a segment is rebuilt from the segment before it and its own first batch
    places          a missing segment becomes a file of zeros, and a file that is too short ends with zeros: gaps;
                    surplus bytes of a file are cut
    the end         if the end of the log is damaged, the last segment is sealed, and a new one begins after it
    the watermark   is written again if one of its slots is not whole
    topic.json      is written again if it is damaged, with the default policies

The last step is the recovery of a writer before it appends (recovery.py). It proves that the partition opens.

Threads: no state. Processes: declaring gaps needs no lock and may be done beside a writer. All else needs the
partition's lock.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from typing import NamedTuple

from ..config.policies import TopicConfig
from ..errors import CorruptLogError, LogError
from ..segment import HEADER_BYTES, Identity, SegmentHeader
from ..system.clock import SYSTEM
from ..system.directory import Directory
from ..system.files import Files
from . import copy_role, store_pointer, topic_file
from .log import Log
from .quarantine import copy_aside
from .repair_partition import PartitionRepair, Repair
from .verify import Progress, VerifyReport, verify_description, verify_log

__all__ = ["Repair", "RepairReport", "repair_topic", "stated_log_id"]


class RepairReport(NamedTuple):
    """The result of repairing a topic."""

    repairs: tuple[Repair, ...]  # the actions; of a dry run: those of a real one
    verified: VerifyReport  # after the repair; of a dry run: as the topic is

    @property
    def lost_bytes(self) -> int:
        """The number of bytes of the log that these repairs declare as lost."""
        return sum(len(each.offsets) for each in self.repairs)


def repair_topic(
    files: Files,
    path: str,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
    clock: Callable[[], int] = SYSTEM,
) -> RepairReport:
    """Repair a topic; see `transactions.repair_store.repair`, which takes a store, too."""
    repairs: list[Repair] = []
    if not dry_run:
        copy_role.check(files, path, copy_role.REPAIR)
    log_id, config = _description(files, path, repairs, dry_run=dry_run)
    _leave_lost_store(files, path, repairs, dry_run=dry_run)
    logs = [Identity.of(log_id, number) for number in range(config.partitions)]
    sizes = [_size(files, path, each) for each in logs]
    done, total = 0, 2 * sum(sizes)

    def advance(to: int) -> None:
        if progress is not None:
            progress(min(done + to, total), total)

    for identity, size in zip(logs, sizes, strict=True):
        partition = PartitionRepair(files, path, identity, config.permissions, clock())
        repairs += partition.run(dry_run=dry_run, progress=advance)
        done += size
    reports = [verify_description(files, path, log_id)]
    for identity, size in zip(logs, sizes, strict=True):
        try:
            with closing(Log(files, topic_file.partition_directory(path, identity.partition), identity)) as log:
                reports.append(verify_log(log, advance))
        except CorruptLogError as error:  # there is no directory
            reports.append(VerifyReport.of_error(error, identity.partition))
        done += size
    return RepairReport(tuple(repairs), VerifyReport.of_all(reports))


def _size(files: Files, path: str, identity: Identity) -> int:
    directory = topic_file.partition_directory(path, identity.partition)
    with suppress(FileNotFoundError, NotADirectoryError):
        return sum(files.sizes(directory).values())
    return 0


def _leave_lost_store(files: Files, path: str, repairs: list[Repair], *, dry_run: bool) -> None:
    """Let the topic forget a store of transactions that is gone."""
    try:
        what = "" if not store_pointer.is_lost(files, path) else "its store of transactions is gone"
    except CorruptLogError as error:
        what = f"found {error.found}"
    if not what:
        return
    name, kept = os.path.join(path, store_pointer.NAME), None
    if not dry_run:
        with Directory.open(files, path) as directory:
            directory.lock_for_a_moment("a process that changes the topic", advice="try again")
            kept = copy_aside(directory, store_pointer.NAME, 0, directory.sizes()[store_pointer.NAME])
            directory.unlink(store_pointer.NAME)
            directory.sync()
    what = f"removed ({what}): the next transaction names a store, which does not know the versions of apps before"
    repairs.append(Repair(None, name, what, kept=kept))


# --- the description ---------------------------------------------------------------------------------


def _description(files: Files, path: str, repairs: list[Repair], *, dry_run: bool) -> tuple[bytes, TopicConfig]:
    """The log id and the policies of the topic. A lost description is written again."""
    name = os.path.join(path, topic_file.NAME)
    try:
        described = topic_file.read(files, path)
        what = "there was no file"
    except CorruptLogError as error:
        described, what = None, f"found {error.found}"
    if described is not None:
        return described
    log_id, config = stated_log_id(files, path), TopicConfig(partitions=max(_partitions(files, path)) + 1)
    kept = None
    if not dry_run:
        with Directory.open(files, path) as directory:
            directory.lock_for_a_moment("a process that changes the topic", advice="try again")
            if directory.exists(topic_file.NAME):
                kept = copy_aside(directory, topic_file.NAME, 0, files.sizes(path)[topic_file.NAME])
            topic_file.write(directory, log_id, config)
    policies = f"rebuilt for {config.partitions} partitions; all policies are the default ones: set them again"
    repairs.append(Repair(None, name, f"{policies} ({what})", kept=kept))
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
