"""Owners: which member owns a partition in a group. Each partition has a file, and its owner holds the flock.

Invariant: a partition has at most one owner, because a lock has at most one holder. Each new owner
raises the partition's generation, which is stored in the file and in every commit. `evict` replaces the
file of an owner: that member can then neither commit nor read. No two owners of a partition have the
same generation.

    owners/<log id>-<partition>   {"member": "web-3-4711-9f86d081", "generation": 12, "pid": 4711}

A file stays when its owner releases it, because the generation must not fall; `member` is then null.
A process that replaces a file holds the flock of the directory meanwhile.

Threads: as members.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from ..system.directory import Directory
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .assignment import TopicPartition
from .commit_log import LogPartition
from .lock_file import MOST_BYTES, LockFile, names_of_files, read_if_held, readable_by_all


class Owner(NamedTuple):
    """The facts in an owner's file."""

    member: str | None
    generation: int
    pid: int


_Named = TopicPartition | LogPartition | str  # its text is the name of the partition's file
NOBODY = Owner(None, 0, 0)
_OWNED = re.compile(r"([0-9a-f]{32})-([0-9]+)")


class Ownership(NotCopyable):
    """The partitions that one member owns."""

    def __init__(
        self, files: Files, directory: str, member: str, permissions: int,
        name_of: Callable[[TopicPartition], str] = str,
    ) -> None:  # fmt: skip
        """`name_of` gives the name of a partition's file."""
        self._name_of = name_of
        self._files = files
        self._directory = directory
        self._member = member
        self._permissions = permissions
        self._owned: dict[TopicPartition, tuple[LockFile, int]] = {}  # file and generation

    def owned(self) -> list[TopicPartition]:
        return sorted(self._owned)

    def claimed(self, partition: TopicPartition) -> int | None:
        """The generation of this member's claim, even if it was evicted; None without a claim."""
        return self._owned[partition][1] if partition in self._owned else None

    def is_free(self, partition: TopicPartition) -> bool:
        """True if no process holds the partition. Unlike a failed claim, this wakes no other member."""
        return read_if_held(self._files, os.path.join(self._directory, self._name_of(partition))) is None

    def generation(self, partition: TopicPartition) -> int | None:
        """The generation in which this member owns the partition; None if it does not own it."""
        file, generation = self._owned.get(partition, (None, 0))
        return generation if file is not None and file.is_named() else None

    def claim(self, partition: TopicPartition, *, at_least: int) -> int | None:
        """Become the owner if there is none, and return the generation; None if there is an owner.

        The new generation is above all earlier ones and above `at_least`.
        """
        name = self._name_of(partition)
        path = os.path.join(self._directory, name)
        if not self.is_free(partition):
            return None
        file = None
        with suppress(PermissionError):  # another user's file
            file = LockFile(self._files, path, self._permissions)
        if file is None or file.has_other_names():
            if file is not None:
                file.abandon()
            if not evict_owner(self._files, self._directory, name, self._permissions, unless_held=True):
                return None
            file = LockFile(self._files, path, self._permissions)
        if not file.try_lock():
            file.abandon()
            return None
        generation = max(_parse(file.text()).generation, at_least) + 1
        file.replace(_text(Owner(self._member, generation, os.getpid())))
        if not file.is_named():  # `evict` has replaced it; the new file may be another member's
            file.abandon()
            return None
        self._owned[partition] = file, generation
        return generation

    def release(self, partitions: Iterable[TopicPartition]) -> None:
        """Release partitions, so that other members can claim them."""
        for partition in list(partitions):
            file, generation = self._owned[partition]
            try:
                if file.is_named():
                    file.replace(_text(Owner(None, generation, os.getpid())))
            finally:
                file.release()
                del self._owned[partition]

    def abandon(self) -> None:
        """Close the files and write nothing: another process or member owns them after a fork or an eviction."""
        while self._owned:
            _, (file, _) = self._owned.popitem()
            file.abandon()


def owned_partitions(files: Files, directory: str) -> list[LogPartition]:
    """All partitions of all topics that ever had an owner."""
    matches = map(_OWNED.fullmatch, names_of_files(files, directory))
    return sorted(LogPartition(bytes.fromhex(each[1]), int(each[2])) for each in matches if each)


def read_owner(files: Files, directory: str, partition: _Named) -> Owner:
    """The owner in the partition's file. That member may have died since it wrote the file."""
    try:
        return _parse(files.read_whole(os.path.join(directory, str(partition)), MOST_BYTES).decode(errors="replace"))
    except FileNotFoundError:
        return NOBODY


def holder_of(files: Files, directory: str, partition: _Named) -> Owner | None:
    """The owner that holds the file now; None if no process holds it."""
    text = read_if_held(files, os.path.join(directory, str(partition)))
    return None if text is None else _parse(text)


def evict_owner(files: Files, path: str, partition: _Named, permissions: int, *, unless_held: bool = False) -> bool:
    """Take the partition from its owner, which may hang: replace its file by one without an owner, a generation later.

    With `unless_held` nothing changes, and the result is False, if a process holds the old file.
    """
    name = str(partition)
    with Directory.open(files, path) as directory:
        # Two replacements at the same time would give two owners the same generation.
        directory.lock_for_a_moment("a process that evicts a member", advice="let it finish, or end it, and try again")
        if unless_held and read_if_held(files, directory.path_of(name), within=directory) is not None:
            return False
        before = NOBODY
        with suppress(FileNotFoundError):
            before = _parse(directory.read_whole(name, MOST_BYTES).decode(errors="replace"))
        aside = f".{os.urandom(8).hex()}.tmp"
        content = _text(Owner(None, before.generation + 1, os.getpid()))
        directory.write_new(aside, content, readable_by_all(permissions))
        directory.rename(aside, name)
        return True


def _parse(text: str) -> Owner:
    """The facts in the file; no owner if the file is new or a crash has torn it."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        facts = json.loads(text)
        return Owner(facts["member"], int(facts["generation"]), int(facts["pid"]))
    return NOBODY


def _text(owner: Owner) -> bytes:
    return json.dumps(owner._asdict()).encode()
