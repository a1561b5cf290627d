"""Promotion: a copy of a topic becomes a topic of its own.

Invariant: one small file is replaced, and synced. So a promotion that is cut has happened or not, and may be repeated.
What the copy has is not changed: the first writer recovers it like any other topic. It takes an epoch and a nonce of
its own, so batches of the source that are put into the copy's files later are refused.

Threads: no state, safe for all.
"""

from __future__ import annotations

import errno
import os

from .. import description, role
from ..arguments import topic_path
from ..system.clock import SYSTEM
from ..system.directory import Directory
from ..system.files import REAL, Files

__all__ = ["promote"]


def promote(copy: str | os.PathLike[str]) -> None:
    """Make a snapshot a topic of its own: after that it opens with mode="a". A topic of its own stays what it is.

    The topic that it was copied from stays a topic, too. Both have the same log id, and from here on different records
    at the same offsets. So stop the writers of the old one first, if this one takes its place; consumers that have read
    more than the snapshot has must go back.

    Raises `FileNotFoundError` if there is no topic, `LockedError` if another process changes it now, and
    `CorruptLogError` if its file `copy.json` is damaged.
    """
    promote_on(REAL, topic_path(copy), now=SYSTEM())


def promote_on(files: Files, path: str, *, now: int) -> None:
    """The same on other files."""
    described = description.read(files, path)
    if described is None:
        raise FileNotFoundError(errno.ENOENT, "no topic here", path)
    with Directory.open(files, path) as directory:
        directory.lock_for_a_moment("a process that changes the topic", advice="try again")
        found = role.read(files, path)
        if found is not None and found.role != role.LEADER:
            found._replace(role=role.LEADER, time=now).write(directory, described[1].permissions)
