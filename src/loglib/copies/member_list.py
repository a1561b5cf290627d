"""Member list: the directories of a replicated topic. Each of them has the list, in its `copy.json`.

Invariant: a member is known by an id that was drawn for it, not by its path: mounts get swapped. The list with the
highest version counts. A list is written when every member of it has the log, and before anything is appended; old
members get it before new ones. A directory with version 0 is not complete: it is brought up, and it has no vote on
what was acknowledged. A new one has the version of the list that it `joins`: while there is such a member, all must be
there.

    {"format": 1, "role": "replica", "log_id": "<32 digits>", "id": "<16 digits>", "of": "<paths>", "time": <us>,
     "members": {"<16 digits>": "<path>", ...}, "acks": "all", "version": 3, "joins": 0,
     "crc": "<8 digits>"}

(in one line). The paths are where the members were last, for messages.

Threads: no state, safe for all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ..format import checked_json
from ..log import copy_role
from ..system.directory import Directory
from ..system.files import Files

__all__ = ["ACKS", "Acks", "Members", "needed", "read_members"]

Acks = Literal["all", "quorum", "leader"]
ACKS: tuple[Acks, ...] = ("all", "quorum", "leader")
_MOST_BYTES = 1 << 20


def needed(acks: Acks, members: int) -> int:
    """Number of directories that must have a record before it is acknowledged."""
    return {"all": members, "quorum": members // 2 + 1, "leader": 1}[acks]


class Members(NamedTuple):
    """The list as one directory has it."""

    log_id: bytes
    id: str  # of this directory
    paths: Mapping[str, str]  # by id: the last path of each member
    acks: Acks
    version: int
    joins: int = 0

    def write(self, files: Files, path: str, permissions: int, *, now: int) -> None:
        """Write this list into the directory at `path`. Synced."""
        others = ", ".join(each for id_, each in self.paths.items() if id_ != self.id)
        facts = {
            "role": copy_role.REPLICA, "log_id": self.log_id.hex(), "id": self.id,
            "of": others, "time": now, "members": dict(self.paths), "acks": self.acks, "version": self.version,
            "joins": self.joins,
        }  # fmt: skip
        with Directory.open(files, path) as directory:
            directory.replace(copy_role.NAME, checked_json.seal(facts), permissions)


def read_members(files: Files, path: str) -> Members | None:
    """The list that the directory has; None if it is no member of a replicated topic."""
    found = copy_role.read(files, path)
    if found is None or found.role != copy_role.REPLICA:
        return None

    def members(facts: dict[str, Any]) -> Members:
        paths = {str(each): str(where) for each, where in facts["members"].items()}
        if facts["acks"] not in ACKS or facts["id"] not in paths:
            raise ValueError(f"acks {facts['acks']}, id {facts['id']}")
        return Members(found.log_id, found.id, paths, facts["acks"], int(facts["version"]), int(facts["joins"]))

    name = os.path.join(path, copy_role.NAME)
    return checked_json.read(files, name, _MOST_BYTES, members, "the members of a replicated topic")
