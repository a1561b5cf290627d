"""Heal: a damaged topic is made whole from other copies of it: mirrors, snapshots, backups.

Invariant: see heal_log.py, which heals one log. A donor of another topic heals nothing. `topic.json` is healed first: a
donor's is taken if it has the log id that most segments here state.

Threads: no state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

from ..config.arguments import donor_paths, topic_path
from ..config.policies import TopicConfig
from ..errors import CorruptLogError, LogError
from ..log import copy_role, topic_file
from ..log.log import Log
from ..log.quarantine import copy_aside
from ..log.repair import stated_log_id
from ..log.verify import Progress, VerifyReport, size_of, verify_description, verify_log
from ..segment import Identity
from ..system.directory import Directory
from ..system.files import REAL, Files
from .heal_log import Healed, LogHealing, Unhealed, heal_log

__all__ = ["HealReport", "heal", "heal_topic"]

_MOST_BYTES = 1 << 20


class HealReport(NamedTuple):
    """The result of healing a topic."""

    healed: tuple[Healed, ...]  # what was done; of a dry run: what would be done
    unhealed: tuple[Unhealed, ...]  # what stays damaged, and why
    verified: VerifyReport  # after the healing; of a dry run: as the topic is


def heal(
    path: str | os.PathLike[str],
    donors: Iterable[str | os.PathLike[str]],
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> HealReport:
    """Replace what is damaged in the topic at `path` by what other copies of it have, in place.

    `donors` are the directories of mirrors, snapshots or restored backups of this topic, or the topic that this one is
    a copy of. What is damaged is replaced only by bytes that this log itself names: each batch has the checksum of the
    batch before it. So a donor may be older, of another history, or damaged itself, and gives only what belongs here.
    A whole topic is only read. Overwritten bytes are kept beside the segments, in files `*.damaged-*`. Gaps that
    `repair` has declared are healed as well, and declared no longer. Commits of groups are not healed.

    `dry_run` changes nothing and reports what would be done. `progress` is called now and then with two numbers of
    bytes: those that are read, and all. Reads every partition twice.

    A partition's lock is held while it is healed. Beside a living writer, or a mirror that runs into this copy, only
    sealed segments are healed; the report says what is left. Raises `LogError` if there is no topic, `CorruptLogError`
    if `topic.json` is damaged and no donor has it, and `StorageIOError` if the disk fails.
    """
    absolute = topic_path(path)
    return heal_topic(REAL, absolute, donor_paths(donors, absolute), dry_run=dry_run, progress=progress)


def heal_topic(
    files: Files,
    path: str,
    donors: Sequence[str],
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
    only: Collection[int] | None = None,
) -> HealReport:
    """The same on other files, and for some partitions `only`."""
    if not dry_run:
        copy_role.check(files, path, copy_role.HEAL)
    healed: list[Healed] = []
    log_id, config = _description(files, path, donors, healed, dry_run=dry_run)
    unhealed: list[Unhealed] = []
    numbers = [number for number in range(config.partitions) if only is None or number in only]
    sizes = {number: _size(files, path, log_id, number) for number in numbers}
    done, total = 0, 2 * sum(sizes.values())

    def advance(to: int) -> None:
        if progress is not None:
            progress(min(done + to, total), total)

    for number in numbers:
        made = _heal_partition(files, path, donors, Identity.of(log_id, number), config, dry_run, advance)
        healed += made.healed
        unhealed += made.unhealed
        done += sizes[number]
    reports = [verify_description(files, path, log_id)]
    for number in numbers:
        reports.append(_verified(files, path, log_id, number, advance))
        done += sizes[number]
    return HealReport(tuple(healed), tuple(unhealed), VerifyReport.of_all(reports))


def _heal_partition(
    files: Files,
    path: str,
    donors: Sequence[str],
    identity: Identity,
    config: TopicConfig,
    dry_run: bool,
    advance: Callable[[int], object],
) -> LogHealing:
    number = identity.partition
    place = topic_file.partition_directory(path, number)
    others = [topic_file.partition_directory(each, number) for each in donors]
    try:
        return heal_log(files, place, others, identity, config.permissions, dry_run=dry_run, progress=advance)
    except CorruptLogError as error:
        why = f"found {error.found}, expected {error.expected}: nothing is left that says which log this was; mirror it"
        return LogHealing(unhealed=(Unhealed(number, place, why),))


def _verified(
    files: Files, path: str, log_id: bytes, number: int, advance: Callable[[int], object]
) -> VerifyReport:
    place = topic_file.partition_directory(path, number)
    try:
        with closing(Log(files, place, Identity.of(log_id, number))) as log:
            return verify_log(log, advance)
    except CorruptLogError as error:  # there is no directory
        return VerifyReport.of_error(error, number)


def _size(files: Files, path: str, log_id: bytes, number: int) -> int:
    place = topic_file.partition_directory(path, number)
    with suppress(LogError), closing(Log(files, place, Identity.of(log_id, number))) as log:
        return size_of(log)
    return 0


def _description(
    files: Files, path: str, donors: Sequence[str], healed: list[Healed], *, dry_run: bool
) -> tuple[bytes, TopicConfig]:
    """The log id and the policies of the topic, perhaps those of a donor."""
    name = os.path.join(path, topic_file.NAME)
    try:
        described = topic_file.read(files, path)
        fault = CorruptLogError(name, 0, "no file", "the description of the topic")
    except CorruptLogError as error:
        described, fault = None, error
    if described is not None:
        return described
    log_id = stated_log_id(files, path)
    for donor in donors:
        with suppress(LogError, OSError):
            described = topic_file.read(files, donor)
            if described is None or described[0] != log_id:
                continue
            content = files.read_whole(os.path.join(donor, topic_file.NAME), _MOST_BYTES)
            kept = None if dry_run else _replace_description(files, path, content, described[1].permissions)
            healed.append(Healed(None, name, f"made anew (found {fault.found})", donor=donor, kept=kept))
            return described
    raise fault


def _replace_description(files: Files, path: str, content: bytes, permissions: int) -> str | None:
    with Directory.open(files, path) as directory:
        directory.lock_for_a_moment("a process that changes the topic", advice="try again")
        kept = None
        if directory.exists(topic_file.NAME):
            kept = copy_aside(directory, topic_file.NAME, 0, directory.sizes()[topic_file.NAME])
        directory.replace(topic_file.NAME, content, permissions)
    return kept
