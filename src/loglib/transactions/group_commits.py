"""Group commits: commits of a group that are part of transactions. A new owner of a partition finds and fences them.

Invariant: a commit of a lower generation never becomes part of a transaction after a new owner has read the
commits. The first transaction of a group leaves the file `transacted` in the group's directory. After that its member
checks that it still owns the partitions. A new owner takes the partition, then looks for the file, then fences its
generation in the store. Only then does it read the commits: those in the group's logs, and those of pending
transactions. The generation is above all that the store knows, because with durability "os" a power cut may set the
group's own files back.

Threads: as groups/group.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from ..errors import CorruptLogError
from ..groups.assignment import TopicPartition
from ..groups.commit_log import Entries, Entry, LogPartition
from ..groups.directory import GroupDirectory
from ..groups.lock_file import readable_by_all
from ..log.store_pointer import read_pointer
from .manifest import Fence, GroupCommit
from .store import Store, open_store

_MARK = "transacted"


def leave_mark(directory: GroupDirectory) -> None:
    """Leave the file that tells new owners that the group's commits may be part of transactions. Synced."""
    path = os.path.join(directory.path, _MARK)
    if not directory.files.exists(path):
        with suppress(FileExistsError):  # another member has made it
            directory.files.write_new(path, b"", readable_by_all(directory.permissions))
        directory.files.sync_directory(directory.path)


class StoreFence:
    """The `GenerationFence` of a group, in the store of its transactions, which it keeps open."""

    def __init__(self) -> None:
        self._store: Store | None = None

    def known_generations(self, directory: GroupDirectory) -> Mapping[str, int]:
        store, topic = self._find_store(directory)
        return {} if store is None else store.generations(topic, directory.name)

    def fence(self, directory: GroupDirectory, generations: Mapping[TopicPartition, int]) -> Entries:
        store, topic = self._find_store(directory)
        if store is None:
            return {}
        fences = [
            Fence(topic, directory.name, directory.owner_file(each), generation)
            for each, generation in generations.items()
        ]
        store.fence_groups(fences, now=directory.clock())
        pending: Entries = {}
        for manifest in store.pending():
            for commit in manifest.offsets:
                if commit.group == directory.name and (commit.topic == topic or _was_moved(store, commit, directory)):
                    pending |= parsed(commit)
        names = directory.names()
        return {names.get(LogPartition(each.log_id, key.partition), key): each for key, each in pending.items()}

    def _find_store(self, directory: GroupDirectory) -> tuple[Store | None, str]:
        """The store that has transactions of the group, and the path by which it names the topic."""
        if not directory.files.exists(os.path.join(directory.path, _MARK)):
            return None, ""
        pointer = read_pointer(directory.files, directory.topic_path)
        if pointer is None:
            return None, ""  # the first transaction of the group checks its ownership later
        self._store = open_store(directory.files, os.path.normpath(pointer.path))
        return self._store, os.path.relpath(directory.topic_path, os.path.dirname(self._store.path))


def _was_moved(store: Store, commit: GroupCommit, directory: GroupDirectory) -> bool:
    """True if the commit is of the group's topic, which had another path then."""
    before = os.path.join(os.path.dirname(store.path), commit.topic)
    return commit.log == directory.log_id.hex() and not directory.files.exists(before)


def stored(
    directory: GroupDirectory, store_path: str, entries: Mapping[TopicPartition, Entry]
) -> tuple[GroupCommit, ...]:
    """The entries in the form of a manifest."""
    topic = os.path.relpath(directory.topic_path, os.path.dirname(store_path))
    return tuple(
        GroupCommit(
            topic, directory.name, directory.owner_file(partition),
            [
                entry.offset, entry.generation, entry.number, entry.history, entry.meta, entry.member,
                entry.timestamp, entry.log_id.hex(), partition.topic,
            ],
            directory.log_id.hex(),
        )
        for partition, entry in entries.items()
    )  # fmt: skip


def parsed(commit: GroupCommit) -> Entries:
    """The entry in a manifest; `CorruptLogError` if it cannot be read."""
    _, _, number = commit.partition.rpartition("-")
    try:
        offset, generation, count, history, meta, member, timestamp, log_id, topic, *_ = commit.entry
        entry = Entry(
            None if offset is None else int(offset), int(generation), bytes.fromhex(log_id), int(history), str(meta),
            str(member), int(timestamp), int(count),
        )  # fmt: skip
        return {TopicPartition(str(topic), int(number)): entry}
    except (ValueError, TypeError) as error:
        found = f"a commit of a group that cannot be read ({error})"
        raise CorruptLogError(commit.group, 0, found, "an entry as in docs/format.md") from error
