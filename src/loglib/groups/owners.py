"""Owners: which member owns a partition in a group; one file for each partition, held by an flock.

Invariant: a partition has at most one owner, because a lock has at most one holder. Each new owner
raises the partition's generation, which stands in the file and goes into every commit; a member that
has lost its file (`evict` puts another in its place) can neither commit nor read on. No two owners of a
partition have the same generation.

    owners/<topic>-<partition>    {"member": "web-3-4711-9f86d081", "generation": 12, "pid": 4711}

Files stay when the owner goes, with `member` null if it went in order: the generation must not fall.
Whoever puts a file in the place of another holds the flock of the directory meanwhile.

Threads: as members.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ..system.directory import Directory
from ..system.files import Files
from ..unique import Unique
from .assignment import TopicPartition
from .held import MOST_BYTES, HeldFile, look, readable_by_all

__all__ = ["Owner", "Ownership", "evict_owner", "holder_of", "owned_partitions", "read_owner"]


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

    def claimed(self, partition: TopicPartition) -> int | None:
        """The generation in which this member has claimed the partition, evicted or not; None if it has not."""
        return self._held[partition][1] if partition in self._held else None

    def is_free(self, partition: TopicPartition) -> bool:
        """Whether nobody holds the partition just now. Wakes nobody, as a claim that fails would."""
        return look(self._files, os.path.join(self._directory, str(partition))) is None

    def generation(self, partition: TopicPartition) -> int | None:
        """The generation in which this member owns the partition; None if it does not, or does no more."""
        file, generation = self._held.get(partition, (None, 0))
        return generation if file is not None and file.is_named() else None

    def claim(self, partition: TopicPartition, *, at_least: int) -> bool:
        """Become the owner if nobody is, in a generation above all before, `at_least` among them."""
        path = os.path.join(self._directory, str(partition))
        if not self.is_free(partition):
            return False
        try:
            file = HeldFile(self._files, path, self._permissions)
        except PermissionError:  # another user's
            if not replace_owner(self._files, self._directory, str(partition), self._permissions):
                return False
            file = HeldFile(self._files, path, self._permissions)
        if not file.try_lock():
            file.abandon()
            return False
        generation = max(_parse(file.text()).generation, at_least) + 1
        file.replace(_text(Owner(self._member, generation, os.getpid())))
        if not file.is_named():  # evicted as one who hangs: what is here now may be another's
            file.abandon()
            return False
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


def owned_partitions(files: Files, directory: str) -> list[TopicPartition]:
    """All partitions that have ever had an owner, of whichever topic."""
    found = []
    for name in files.listdir(directory):
        topic, _, number = name.rpartition("-")
        if topic and number.isascii() and number.isdigit():
            found.append(TopicPartition(topic, int(number)))
    return sorted(found)


def read_owner(files: Files, directory: str, partition: TopicPartition | str) -> Owner:
    """Who owns the partition, going by its file: the member may have died since it wrote it."""
    try:
        return _parse(files.read_whole(os.path.join(directory, str(partition)), MOST_BYTES).decode(errors="replace"))
    except FileNotFoundError:
        return NOBODY


def holder_of(files: Files, directory: str, partition: TopicPartition | str) -> Owner | None:
    """What the file says of who holds it just now; None if nobody does."""
    text = look(files, os.path.join(directory, str(partition)))
    return None if text is None else _parse(text)


def evict_owner(files: Files, directory: str, partition: TopicPartition | str, permissions: int) -> None:
    """Take the partition from its owner, who may be hung: a new file in the place of the one that it holds."""
    with _replacing(files, directory) as held:
        _put_anew(held, str(partition), permissions)


def replace_owner(files: Files, directory: str, name: str, permissions: int) -> bool:
    """Put a file that this process may write in the place of one that it may not, if nobody holds that one."""
    with _replacing(files, directory) as held:
        if look(files, held.path_of(name), within=held) is not None:
            return False
        _put_anew(held, name, permissions)
        return True


def _put_anew(held: Directory, name: str, permissions: int) -> None:
    before = NOBODY
    with suppress(FileNotFoundError):
        before = _parse(held.read_whole(name, MOST_BYTES).decode(errors="replace"))
    aside = f".{os.urandom(8).hex()}.tmp"
    content = _text(Owner(None, before.generation + 1, os.getpid()))
    held.write_new(aside, content, readable_by_all(permissions))
    held.rename(aside, name)


@contextmanager
def _replacing(files: Files, path: str) -> Iterator[Directory]:
    """One at a time: of two files that took the place of one, both owners would have the same generation."""
    with Directory.open(files, path) as directory:
        directory.lock_for_a_moment("whoever evicts a member", advice="let it go on, or end it, and try again")
        yield directory


def _parse(text: str) -> Owner:
    """What the file says; nobody if it is new, or a crash has torn what was written."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        facts = json.loads(text)
        return Owner(facts["member"], int(facts["generation"]), int(facts["pid"]))
    return NOBODY


def _text(owner: Owner) -> bytes:
    return json.dumps(owner._asdict()).encode()
