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
from .assignment import TopicPartition

__all__ = ["Owner", "Ownership", "evict_owner", "read_owner"]

_MOST_BYTES = 4096


class Owner(NamedTuple):
    """What an owner's file says."""

    member: str | None
    generation: int
    pid: int


NOBODY = Owner(None, 0, 0)


class Ownership:
    """The partitions that one member owns."""

    def __init__(self, files: Files, directory: str, member: str, permissions: int) -> None:
        self._files = files
        self._directory = directory
        self._member = member
        self._permissions = permissions
        self._held: dict[TopicPartition, tuple[int, int]] = {}  # file and generation

    def owned(self) -> list[TopicPartition]:
        return sorted(self._held)

    def generation(self, partition: TopicPartition) -> int | None:
        """The generation in which this member owns the partition; None if it does not, or does no more."""
        fd, generation = self._held.get(partition, (-1, 0))
        if fd < 0 or not self._files.same_file(fd, self._path(partition)):
            return None
        return generation

    def claim(self, partition: TopicPartition, *, at_least: int) -> bool:
        """Become the owner if nobody is, in a generation above all before, `at_least` among them."""
        path = self._path(partition)
        fd = self._files.create(path, self._permissions, exclusive=False)
        try:
            if not self._files.try_lock(fd) or not self._files.same_file(fd, path):
                self._files.close(fd)
                return False
            generation = max(_read(self._files, fd).generation, at_least) + 1
            _write(self._files, fd, Owner(self._member, generation, os.getpid()))
        except BaseException:
            self._files.close(fd)
            raise
        self._held[partition] = fd, generation
        return True

    def release(self, partitions: Iterable[TopicPartition]) -> None:
        """Give partitions up, for whoever claims them first."""
        for partition in list(partitions):
            fd, generation = self._held[partition]
            if self._files.same_file(fd, self._path(partition)):
                _write(self._files, fd, Owner(None, generation, os.getpid()))
            del self._held[partition]
            self._files.close(fd)

    def abandon(self) -> None:
        """Close the files and say nothing: after a fork they are the parent's, after an eviction another's."""
        while self._held:
            _, (fd, _) = self._held.popitem()
            self._files.close(fd)

    def _path(self, partition: TopicPartition) -> str:
        return os.path.join(self._directory, str(partition))


def read_owner(files: Files, directory: str, partition: TopicPartition) -> Owner:
    """Who owns the partition, going by its file: the member may have died since it wrote it."""
    try:
        fd = files.open_read(os.path.join(directory, str(partition)))
    except FileNotFoundError:
        return NOBODY
    try:
        return _read(files, fd)
    finally:
        files.close(fd)


def evict_owner(files: Files, directory: str, partition: TopicPartition, permissions: int) -> None:
    """Take the partition from its owner, who may be hung: a new file in the place of the one that it holds."""
    generation = read_owner(files, directory, partition).generation + 1
    path = os.path.join(directory, str(partition))
    aside = f"{path}.{os.urandom(4).hex()}.tmp"
    fd = files.create(aside, permissions)
    try:
        _write(files, fd, Owner(None, generation, os.getpid()))
        files.rename(aside, path)
    finally:
        files.close(fd)


def _read(files: Files, fd: int) -> Owner:
    """What the file says; nobody if it is new, or a crash has torn what was written."""
    with suppress(ValueError, TypeError, KeyError):
        facts = json.loads(files.read_at(fd, _MOST_BYTES, 0))
        return Owner(facts["member"], int(facts["generation"]), int(facts["pid"]))
    return NOBODY


def _write(files: Files, fd: int, owner: Owner) -> None:
    # Of one length with what stood there before, or longer: readers in between see the old text or the new.
    text = json.dumps(owner._asdict()).encode()
    files.write_all(fd, [text.ljust(max(len(text), files.size(fd) - 1)) + b"\n"], 0)
