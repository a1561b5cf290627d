"""Copy role: the file `copy.json` of a topic, which says whether the directory is a copy, and of what.

Invariant: a directory without the file is a topic of its own, a *leader*. Only a leader is opened for writing. So the
bytes of a copy are those of its source until it is promoted.

    {"format": 1, "role": "snapshot", "log_id": "<32 digits>", "id": "<16 digits>", "of": "<path>", "time": <us>,
     "crc": "<8 digits>"}

(in one line). `id` is drawn when the directory is made. `of` is the source: a path, or behind `stream:` a place on
another host, which is for messages only.

Threads: no state, safe for all.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ..errors import CorruptLogError, NotLeaderError, UnsupportedFormatError
from ..format.checked_json import seal, unseal
from ..system.directory import Directory
from ..system.files import Files

__all__ = [
    "ELSEWHERE", "LEADER", "MIRROR", "NAME", "REPLICA", "SNAPSHOT", "SUPERSEDED", "TIER", "Role", "check_leader",
    "decode", "read",
]  # fmt: skip

NAME = "copy.json"
FORMAT = 1
LEADER, SNAPSHOT, MIRROR = "leader", "snapshot", "mirror"
REPLICA = "replica"  # one of several directories that are written together; more is in copies/member_list.py
SUPERSEDED = "superseded"  # it was a leader; a copy has taken its place
TIER = "tier"  # its sealed segments, as `loglib.tier` uploads them
ELSEWHERE = "stream:"  # so `of` begins if the source is known through a stream only
_MOST_BYTES = 1 << 20
_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


class Role(NamedTuple):
    """What a directory is; the fields are those of the file."""

    role: str
    log_id: bytes
    id: str
    of: str
    time: int  # when it took this role, microseconds UTC

    def write(self, directory: Directory, permissions: int) -> None:
        """Give the directory this role. Synced."""
        directory.replace(NAME, self.encode(), permissions)

    def encode(self) -> bytes:
        """The content of the file."""
        return seal({"format": FORMAT, **self._asdict(), "log_id": self.log_id.hex()})


def read(files: Files, topic_path: str) -> Role | None:
    """The role of the topic in the directory; None if it has always been a topic of its own."""
    path = os.path.join(topic_path, NAME)
    try:
        content = files.read_whole(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    return decode(content, path)


def decode(content: bytes, path: str) -> Role:
    """The role in a file with this content; the path is for messages."""
    try:
        facts = unseal(content)
        if facts["format"] != FORMAT:
            raise UnsupportedFormatError(path, "format of copy.json", facts["format"], FORMAT)
        log_id = bytes.fromhex(facts["log_id"])
        return Role(str(facts["role"]), log_id, str(facts["id"]), str(facts["of"]), int(facts["time"]))
    except _ERRORS as error:
        raise CorruptLogError(path, 0, f"no valid facts ({error!r})", "what the directory is a copy of") from error


def check_leader(files: Files, topic_path: str) -> None:
    """`NotLeaderError` if the directory is a copy."""
    found = read(files, topic_path)
    if found is not None and found.role != LEADER:
        raise NotLeaderError(topic_path, found.role, found.of)
