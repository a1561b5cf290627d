"""Heal: damage of a topic is repaired from other copies of it: mirrors, snapshots, backups.

Invariant: see heal_log.py, which heals one log. A donor of another topic heals nothing. `topic.json` is healed first: a
donor's is taken if it has the log id that most segments here state.

Threads: no state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..config.arguments import donor_paths, topic_path
from ..config.policies import TopicConfig
from ..errors import CorruptLogError, LogError
from ..log import copy_role, topic_file
from ..log.care import care_for, change_description, read_description
from ..log.repair import stated_log_id
from ..log.verify import Progress, VerifyReport
from ..segment import Identity
from ..system.files import REAL, Files
from .heal_log import HealedRange, LogHealing, UnhealedRange, heal_log

__all__ = ["HealReport", "heal", "heal_topic"]

_MOST_BYTES = 1 << 20


class HealReport(NamedTuple):
    """The result of healing a topic."""

    healed: tuple[HealedRange, ...]  # what was done; of a dry run: what would be done
    unhealed: tuple[UnhealedRange, ...]  # what stays damaged, and why
    verified: VerifyReport  # after the healing; of a dry run: of the unchanged topic


def heal(
    path: str | os.PathLike[str], donors: Iterable[str | os.PathLike[str]],
    *, dry_run: bool = False, progress: Progress | None = None,
) -> HealReport:  # fmt: skip
    """Replace damaged bytes of the topic at `path` by those of other copies of it, in place.

    `donors` are the directories of mirrors, snapshots or restored backups of this topic, or the topic that this one is
    a copy of. Damaged bytes are replaced only by bytes that this log itself names: each batch has the checksum of the
    batch before it. So a donor may be older, of another history, or damaged itself: only its bytes that belong here are
    taken. A whole topic is only read. Overwritten bytes are kept beside the segments, in files `*.damaged-*`. Gaps that
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
    files: Files, path: str, donors: Sequence[str],
    *, dry_run: bool = False, progress: Progress | None = None, only: Collection[int] | None = None,
) -> HealReport:  # fmt: skip
    """Heal a topic on these files; with `only`, only these partitions."""
    if not dry_run:
        copy_role.check(files, path, copy_role.HEAL)
    healed: list[HealedRange] = []
    unhealed: list[UnhealedRange] = []
    log_id, config = _description(files, path, donors, healed, dry_run=dry_run)

    def care(identity: Identity, progress: Callable[[int], None]) -> None:
        number = identity.partition
        place, *others = (topic_file.partition_directory(each, number) for each in (path, *donors))
        try:
            made = heal_log(files, place, others, identity, config.permissions, dry_run=dry_run, progress=progress)
        except CorruptLogError as error:
            why = f"found {error.found}, expected {error.expected}: nothing is left that names the log; mirror it"
            made = LogHealing(unhealed=(UnhealedRange(number, place, why),))
        healed.extend(made.healed)
        unhealed.extend(made.unhealed)

    numbers = [number for number in range(config.partitions) if only is None or number in only]
    verified = care_for(files, path, log_id, numbers, care, progress)
    return HealReport(tuple(healed), tuple(unhealed), verified)


def _description(
    files: Files, path: str, donors: Sequence[str], healed: list[HealedRange], *, dry_run: bool
) -> tuple[bytes, TopicConfig]:
    """The log id and the policies of the topic. If its description is damaged, it is replaced by a donor's."""
    try:
        return read_description(files, path)
    except CorruptLogError as error:
        fault = error
    log_id, name = stated_log_id(files, path), topic_file.NAME
    for donor in donors:
        with suppress(LogError, OSError):
            described = topic_file.read(files, donor)
            if described is None or described[0] != log_id:
                continue
            content, permissions = files.read_whole(os.path.join(donor, name), _MOST_BYTES), described[1].permissions
            kept = None
            if not dry_run:
                kept = _replace(files, path, content, permissions)
            healed.append(HealedRange(None, fault.path, f"rebuilt (found {fault.found})", donor=donor, kept=kept))
            return described
    raise fault


def _replace(files: Files, path: str, content: bytes, permissions: int) -> str | None:
    name = topic_file.NAME
    return change_description(files, path, name, lambda made: made.replace(name, content, permissions))
