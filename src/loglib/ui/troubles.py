"""Troubles: what is wrong with a topic, in a sentence each, and the next command to type.

Invariant: looking changes nothing and waits for nobody. A look that fails is a trouble itself, and hides nothing that
other looks find. The facts are those of `loglib check` and `loglib exporter`: `Topic.verify` and `metrics/health.py`.
An object store is not asked: the page sends no request to another host.

Threads: no state, safe for all.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from ..config.uri import is_remote
from ..errors import CorruptLogError, GroupElsewhereError, GroupNotFoundError, LogError, UnsupportedFormatError
from ..format.display import sized
from ..log import copy_role
from ..log.copy_role import is_tier
from ..log.gaps import read_gaps
from ..log.store_pointer import read_pointer
from ..log.transaction_numbers import DONE, MOST_BYTES, name_of, newest_checkpoint, numbers
from ..metrics.health import copies_of, lost_places_of
from ..retention import SegmentDecision
from ..segment import Identity
from ..system.failures import told
from ..system.files import REAL
from ..topic import Topic
from ..transactions.manifest import Manifest, decode

_COPY_LAG_S = 60.0  # as `loglib check` has it
_MOST_OF_A_KIND = 20  # gaps and damages that are listed each


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is wrong."""

    kind: str  # "damage", "gap", "transaction", "copy", "archive", "group", "share" or "unknown"
    text: str
    command: str | None = None  # the next one to type


def troubles_of(topic: Topic, *, damage_met: tuple[str, ...] = ()) -> list[Trouble]:
    """The troubles of an open topic, the most serious ones first.

    `damage_met`: what readers of this page have met so far, beside what a cheap look at the ends finds.
    """
    looks: list[Callable[[], Iterator[Trouble]]] = [
        lambda: _damage(topic, damage_met), lambda: _gaps(topic), lambda: _transactions(topic),
        lambda: _copies(topic), lambda: _archive(topic), lambda: _groups(topic),
    ]  # fmt: skip
    found: list[Trouble] = []
    for look in looks:
        try:
            found += look()
        except (LogError, OSError, ValueError) as error:
            found.append(trouble_of(topic.path, error))
    return list(dict.fromkeys(found))  # several looks may meet one fault


def trouble_of(path: str, error: Exception) -> Trouble:
    """The trouble that an error is, for a topic that cannot be opened or looked at."""
    if isinstance(error, CorruptLogError):
        return Trouble("damage", str(error), command("repair", path, "--dry-run"))
    if isinstance(error, UnsupportedFormatError):
        return Trouble("unknown", str(error), "pip install --upgrade loglib-segments")
    if isinstance(error, PermissionError):
        return Trouble("unknown", f"{error.filename or path}: {error.strerror}", f"ls -ld {shlex.quote(path)}")
    return Trouble("unknown", told(error), command("check", path))


def command(verb: str, *arguments: str) -> str:
    """A command of loglib, quoted for a shell."""
    return shlex.join(["loglib", verb, *arguments])


# --- the looks ---------------------------------------------------------------------------------------


def _damage(topic: Topic, met: tuple[str, ...]) -> Iterator[Trouble]:
    texts = [*map(str, topic.verify(tail_only=True).damage), *met]
    for text in list(dict.fromkeys(texts))[:_MOST_OF_A_KIND]:
        yield Trouble("damage", text, command("verify", topic.path))


def _gaps(topic: Topic) -> Iterator[Trouble]:
    for each in topic.partitions:
        for gap in read_gaps(REAL, each.path, Identity.of(topic.log_id, each.id))[:_MOST_OF_A_KIND]:
            if not gap.accepted:
                lost = sized(gap.end - gap.start)
                text = f"partition {each.id} has lost {lost} from offset {gap.start} on: {gap.found}"
                yield Trouble("gap", text, command("repair", topic.path, "--accept", "--dry-run"))


def _transactions(topic: Topic) -> Iterator[Trouble]:
    for each in pending_transactions(topic.path):
        text = f"transaction {each.number} is committed and not applied yet: readers wait for it"
        yield Trouble("transaction", text, command("verify", topic.path))


def pending_transactions(path: str) -> list[Manifest]:
    """The transactions of the topic's store that are committed, not done, and concern this topic. Reads only."""
    pointer = read_pointer(REAL, path)
    if pointer is None:
        return []
    names = REAL.names_in(pointer.path)
    done, checkpoint = set(numbers(names, DONE)), newest_checkpoint(lambda: names) or 0
    inside = os.path.relpath(path, os.path.dirname(os.path.normpath(pointer.path)))
    found: list[Manifest] = []
    for number in sorted({*numbers(names)} - done):
        if number <= checkpoint:
            continue
        name = os.path.join(pointer.path, name_of(number))
        with suppress(FileNotFoundError):  # a checkpoint has replaced it
            manifest = decode(REAL.read_whole(name, MOST_BYTES), name)
            concerned = {*(each.topic for each in manifest.sections), *(each.topic for each in manifest.offsets)}
            is_over = number in numbers(REAL.names_in(pointer.path), DONE) or not REAL.exists(name)
            if manifest.applies and inside in concerned and not is_over:
                found.append(manifest)
    return found


def _copies(topic: Topic) -> Iterator[Trouble]:
    role = copy_role.read(REAL, topic.path)
    for each in copies_of(topic):
        if each.lag is None:
            yield Trouble("copy", f"the copy {each.path} is left out: {each.error}", command("check", topic.path))
        elif each.lag.seconds > _COPY_LAG_S:
            is_mirror = role is not None and role.role == copy_role.MIRROR
            next_step = command("mirror", role.of, topic.path) if is_mirror and role else command("check", topic.path)
            text = f"the copy {each.path} lacks {sized(each.lag.bytes)}, the oldest of it for {each.lag.seconds:,.0f} s"
            yield Trouble("copy", text, next_step)


def _archive(topic: Topic) -> Iterator[Trouble]:
    place = archive_of(topic)
    if place is None or is_remote(place):
        return
    held = [each for each in topic.retain(dry_run=True) if is_held_by_archive(each, place)]
    if held:
        verb = "tier" if is_tier(REAL, place) else "archive"
        partitions = len({each.partition for each in held})
        text = (
            f"retention waits for the archive {place}, which does not have the due segments of "
            f"{partitions} partition{'s' * (partitions != 1)}"
        )
        yield Trouble("archive", text, command(verb, topic.path, place))


def _groups(topic: Topic) -> Iterator[Trouble]:
    for name in topic.groups():
        with suppress(GroupElsewhereError, GroupNotFoundError):
            for number, commit in topic.group_info(name).committed.items():
                start = topic.partition(number).log_start_offset
                if commit.offset < start:
                    text = (
                        f"group {name} has lost records of partition {number}: it has read up to offset "
                        f"{commit.offset}, and the log begins at {start}"
                    )
                    yield Trouble("group", text, command("reset", topic.path, name, "--to", "begin", "--dry-run"))
    for each in lost_places_of(topic)[:_MOST_OF_A_KIND]:
        yield Trouble("group", str(each), command("reset", topic.path, each.group, "--to", "end", "--dry-run"))


# --- the archive ---------------------------------------------------------------------------------------


def archive_of(topic: Topic) -> str | None:
    """The archive or the place that the topic's retention waits for: an absolute path or a URI; None without one."""
    archive = topic.config.retention.archive
    if archive is None:
        return None
    given = os.fsdecode(archive)
    return given if is_remote(given) else os.path.normpath(os.path.join(topic.path, given))


def is_held_by_archive(decision: SegmentDecision, place: str) -> bool:
    """True if the segment is due, and stays because the archive does not have it safely."""
    return decision.held_by is not None and os.path.normpath(decision.held_by) == place
