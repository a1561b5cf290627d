"""Owners: which member owns a partition in a group; one file for each partition, held by an flock.

Invariant: a partition has at most one owner, because a lock has at most one holder. Each new owner
raises the partition's generation, which stands in the file and goes into every commit; a member that
has lost its file (`evict` puts another in its place) can neither commit nor read on.

    owners/<topic>-<partition>    {"member": "web-3-4711-9f86d081", "generation": 12, "pid": 4711}

Files stay when the owner goes, with `member` null if it went in order: the generation must not fall.

Threads: as members.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from ..files import Files
from ..unique import Unique
from .assignment import TopicPartition
from .held import MOST_BYTES, HeldFile

__all__ = ["Owner", "Ownership", "evict_owner", "read_owner"]


class Owner(NamedTuple):
    """What an owner's file says."""

    member: str | None
    generation: int
    pid: int


NOBODY = Owner(None, 0, 0)


class Ownership(Unique):
    """The partitions that one member owns."""

    def __init__(self, files: Files, directory: str, member: str, permissions: int) -> None:
        self._files = files
        self._directory = directory
        self._member = member
        self._permissions = permissions
        self._held: dict[TopicPartition, tuple[HeldFile, int]] = {}  # file and generation

    def owned(self) -> list[TopicPartition]:
        return sorted(self._held)

    def generation(self, partition: TopicPartition) -> int | None:
        """The generation in which this member owns the partition; None if it does not, or does no more."""
        file, generation = self._held.get(partition, (None, 0))
        return generation if file is not None and file.is_named() else None

    def claim(self, partition: TopicPartition, *, at_least: int) -> bool:
        """Become the owner if nobody is, in a generation above all before, `at_least` among them."""
        file = HeldFile(self._files, os.path.join(self._directory, str(partition)), self._permissions)
        if not file.try_lock():
            file.abandon()
            return False
        generation = max(_parse(file.text()).generation, at_least) + 1
        file.replace(_text(Owner(self._member, generation, os.getpid())))
        self._held[partition] = file, generation
        return True

    def release(self, partitions: Iterable[TopicPartition]) -> None:
        """Give partitions up, for whoever claims them first."""
        for partition in list(partitions):
            file, generation = self._held[partition]
            try:
                if file.is_named():
                    file.replace(_text(Owner(None, generation, os.getpid())))
            finally:
                file.release()
                del self._held[partition]

    def abandon(self) -> None:
        """Close the files and say nothing: after a fork they are the parent's, after an eviction another's."""
        while self._held:
            _, (file, _) = self._held.popitem()
            file.abandon()


def read_owner(files: Files, directory: str, partition: TopicPartition) -> Owner:
    """Who owns the partition, going by its file: the member may have died since it wrote it."""
    try:
        return _parse(files.read_whole(os.path.join(directory, str(partition)), MOST_BYTES).decode(errors="replace"))
    except FileNotFoundError:
        return NOBODY


def evict_owner(files: Files, directory: str, partition: TopicPartition, permissions: int) -> None:
    """Take the partition from its owner, who may be hung: a new file in the place of the one that it holds."""
    generation = read_owner(files, directory, partition).generation + 1
    aside = os.path.join(directory, f".{os.urandom(8).hex()}.tmp")
    files.write_new(aside, _text(Owner(None, generation, os.getpid())), permissions)
    files.rename(aside, os.path.join(directory, str(partition)))


def _parse(text: str) -> Owner:
    """What the file says; nobody if it is new, or a crash has torn what was written."""
    with suppress(ValueError, TypeError, KeyError):
        facts = json.loads(text)
        return Owner(facts["member"], int(facts["generation"]), int(facts["pid"]))
    return NOBODY


def _text(owner: Owner) -> bytes:
    return json.dumps(owner._asdict()).encode()
