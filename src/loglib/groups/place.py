"""Place: where a consumer group keeps what it knows, and the logs that it reads.

Invariant: a directory `groups/<name>` that exists is whole: it is built aside, synced, and renamed.

    groups/<name>/members/     who is in the group: members.py
    groups/<name>/owners/      who owns which partition: owners.py
    groups/<name>/offsets/     how far the group has got: offsets.py
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from ..arguments import Start, check_names, parse_start
from ..config import Durability
from ..description import make_partition, put_in_place
from ..files import Files
from ..log import Log
from .assignment import TopicPartition
from .offsets import OffsetLog, offsets_identity

__all__ = ["GROUPS", "Place"]

GROUPS = "groups"  # the directory in a topic's


class Place(NamedTuple):
    """One group's directory, and what its members have in common."""

    files: Files
    topic_path: str  # of the topic whose directory has the group's in it
    log_id: bytes  # of that topic
    name: str
    logs: Mapping[TopicPartition, Log]
    durability: Durability
    permissions: int
    clock: Callable[[], int]  # microseconds UTC

    @property
    def path(self) -> str:
        return os.path.join(self.topic_path, GROUPS, self.name)

    @property
    def members(self) -> str:
        return os.path.join(self.path, "members")

    @property
    def owners(self) -> str:
        return os.path.join(self.path, "owners")

    @property
    def topics(self) -> list[str]:
        return sorted({partition.topic for partition in self.logs})

    def resolve(
        self, start: Start | Mapping[TopicPartition, Start], partitions: Iterable[TopicPartition] = ()
    ) -> dict[TopicPartition, int]:
        """The offsets that a start stands for in these partitions, or in those that a mapping names."""
        if isinstance(start, int) and len(self.logs) > 1:
            raise ValueError(f"offset {start} means another record in each partition; give {{partition: offset}}")
        starts = start if isinstance(start, Mapping) else dict.fromkeys(partitions, start)
        now = self.clock()
        return {each: self.logs[each].resolve(parse_start(start, now_us=now)) for each, start in starts.items()}

    def exists(self) -> bool:
        check_names(self.name)
        return self.files.exists(self.path)

    def make(self) -> None:
        """Make the group's directory if there is none. Synced, its name included, whoever has made it."""
        files, parent = self.files, os.path.join(self.topic_path, GROUPS)
        if not self.exists():
            if not files.exists(parent):
                with suppress(FileExistsError):  # another member was quicker
                    files.make_directory(parent, self.permissions)
            aside = os.path.join(parent, f".{self.name[:200]}.{os.urandom(8).hex()}.tmp")
            put_in_place(files, aside, self.path, lambda: self._build(aside))
        files.sync_directory(self.topic_path)
        files.sync_directory(parent)

    def _build(self, aside: str) -> None:
        files = self.files
        files.make_directory(aside, self.permissions)
        for name in ("members", "owners", "offsets"):
            files.make_directory(os.path.join(aside, name), self.permissions)
        make_partition(
            files, os.path.join(aside, "offsets"), offsets_identity(self.log_id, self.name),
            now=self.clock(), permissions=self.permissions,
        )  # fmt: skip
        files.sync_directory(aside)

    def offsets(self) -> OffsetLog:
        """The group's committed offsets; to be closed."""
        return OffsetLog(
            self.files, os.path.join(self.path, "offsets"), offsets_identity(self.log_id, self.name),
            durability=self.durability, permissions=self.permissions, clock=self.clock,
        )  # fmt: skip
