"""Prepared commit: what a member commits when a transaction does it, together with records.

Invariant: preparing writes nothing. The transaction calls `check` before its commit point, and `done` after it.

Threads: as group.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .directory import GroupDirectory
from .offsets import Entries, Offsets

__all__ = ["PreparedCommit"]


class PreparedCommit(NamedTuple):
    """What a member commits in a transaction."""

    place: GroupDirectory
    entries: Entries
    offsets: Offsets  # the member's own
    check: Callable[[], None]  # raises if the member does not own the partitions any more
    done: Callable[[], None]  # the commit is made
