"""Copy role: the file `copy.json` of a topic, which says whether the directory is a copy, and of what.

Invariant: a directory without the file is a topic of its own, a *leader*. Only a leader is opened for writing. So the
bytes of a copy are those of its source until it is promoted. `ACTIONS` has the roles that allow each action. Each
function that writes calls `check` first, so a refused call changes no file. docs/copies.md has the same table.

    {"format": 1, "role": "snapshot", "log_id": "<32 digits>", "id": "<16 digits>", "of": "<path>", "time": <us>,
     "crc": "<8 digits>"}

(in one line). `id` is drawn when the directory is made. `of` is the source: a path, or after `stream:` a place on
another host, which is for messages only.

Threads: no state, safe for all.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from ..errors import NotLeaderError
from ..format import checked_json
from ..system.directory import Directory
from ..system.files import Files

NAME = "copy.json"
LEADER, SNAPSHOT, MIRROR = "leader", "snapshot", "mirror"
REPLICA = "replica"  # one of several directories that are written together; more is in copies/roster.py
SUPERSEDED = "superseded"  # it was a leader; a copy has taken its place
TIER = "tier"  # its sealed segments, as `loglib.offload.tier` uploads them
MANIFESTS = "_tier"  # the directory of a tier's manifests
ROLES = (LEADER, MIRROR, SNAPSHOT, SUPERSEDED, REPLICA, TIER)
ELSEWHERE = "stream:"  # the beginning of `of`, if the source is known through a stream only
_MOST_BYTES = 1 << 20
_WHAT = "what the directory is a copy of"  # for errors


class Action(NamedTuple):
    """Something that may be done to a topic's directory."""

    words: str
    roles: frozenset[str]  # of the directories to which it may be done
    advice: str = ""  # for the others


def _but(*roles: str) -> frozenset[str]:
    return frozenset(ROLES) - {*roles}


_JOIN_THERE = "join, reset and delete groups at the topic itself"
READ = Action("read it", frozenset(ROLES))
APPEND = Action(  # a replica is opened with all the others
    "append, roll, run retention, change policies, add partitions", frozenset({LEADER}),
    "open it with mode='r', or make it a topic of its own with loglib.copies.promote",
)  # fmt: skip
TRANSACT = Action("use it in transactions", frozenset({LEADER}), "use the topic itself, if it has no replicas")
JOIN = Action("join, reset and delete groups of its own", _but(SUPERSEDED, REPLICA, TIER), _JOIN_THERE)
JOIN_COPIED = Action("join, reset and delete groups that were copied", frozenset({LEADER}), _JOIN_THERE)
REPAIR = Action("repair it", _but(REPLICA, TIER), "heal it from another copy, or repair that one")
HEAL = Action("heal it from other copies", _but(TIER), "repair and heal the topic, and upload it to another place")
FOLLOW = Action("mirror another topic into it", frozenset({MIRROR, SUPERSEDED}), "mirror to a new directory")
DEMOTE = Action("mirror another topic into it with `demote`", FOLLOW.roles | {LEADER}, FOLLOW.advice)
PROMOTE = Action(
    "promote it", _but(SUPERSEDED, REPLICA),
    "make it a mirror of its successor and promote that, or give force=True if the successor is lost",
)  # fmt: skip
FORCE = Action("promote it with `force`", _but(REPLICA), "open it with replicas=[...], its other directories")
UPLOAD = Action("upload its segments to a place (`tier`)", _but(SUPERSEDED, TIER), "upload those of the topic itself")
ARCHIVE = Action("archive it", _but(SUPERSEDED), "archive the topic itself")
DELETE = Action("delete it", frozenset(ROLES))
ACTIONS = (
    READ, APPEND, TRANSACT, JOIN, JOIN_COPIED, REPAIR, HEAL, FOLLOW, DEMOTE, PROMOTE, FORCE, UPLOAD, ARCHIVE, DELETE,
)  # fmt: skip


class Role(NamedTuple):
    """The role of a directory. The fields are those of the file."""

    role: str
    log_id: bytes
    id: str
    of: str
    time: int  # when it took this role, microseconds UTC

    def write(self, directory: Directory, permissions: int) -> None:
        """Give the directory this role. Synced."""
        directory.replace(NAME, self.encode(), permissions)

    def take(self, files: Files, path: str, permissions: int) -> None:
        """Give the topic at this path this role, while no other process changes the topic. Synced."""
        with Directory.open(files, path) as directory:
            directory.lock_for_a_moment("a process that changes the topic", advice="try again")
            self.write(directory, permissions)

    def encode(self) -> bytes:
        """The content of the file."""
        return checked_json.seal({**self._asdict(), "log_id": self.log_id.hex()})


def read(files: Files, topic_path: str) -> Role | None:
    """The role of the topic in the directory; None if it has always been a topic of its own."""
    return checked_json.read(files, os.path.join(topic_path, NAME), _MOST_BYTES, _role, _WHAT)


def decode(content: bytes, path: str) -> Role:
    """The role in a file with this content; the path is for messages."""
    return checked_json.decode(content, path, _role, _WHAT)


def _role(facts: dict[str, Any]) -> Role:
    log_id = bytes.fromhex(facts["log_id"])
    return Role(str(facts["role"]), log_id, str(facts["id"]), str(facts["of"]), int(facts["time"]))


def is_tier(files: Files, path: str) -> bool:
    """True if `loglib.offload.tier` has made the directory, and it was not promoted: then it is a topic like others."""
    if not files.exists(os.path.join(path, MANIFESTS)):
        return False
    found = read(files, path)
    return found is not None and found.role == TIER


def check(files: Files, topic_path: str, action: Action) -> None:
    """`NotLeaderError` if the action may not be done to the directory. Changes nothing."""
    found = read(files, topic_path)
    if found is not None and found.role not in action.roles:
        raise refusal(topic_path, found, action)


def refusal(path: str, found: Role, action: Action) -> NotLeaderError:
    """The error for an action that a directory of this role refuses."""
    if action is APPEND:
        return NotLeaderError(path, found.role, found.of)
    return NotLeaderError(path, found.role, found.of, refused=action.words, advice=action.advice)


def check_leader(files: Files, topic_path: str) -> None:
    """`NotLeaderError` if the directory is a copy."""
    check(files, topic_path, APPEND)
