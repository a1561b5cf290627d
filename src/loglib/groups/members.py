"""Members: the live members of a consumer group. Each has a file, and holds its flock while its process lives.

Invariant: a member is in the group exactly as long as it holds the lock of its file. The kernel releases
the lock when the process dies in any way. So no heartbeats are needed, and a slow member is never
removed. The text in the file (JSON) names the member's topics and its strategy.

    members/<member>     {"pid": 4711, "host": "web-3", "since": "2026-01-31T12:00:00Z", "strategy": "range",
                          "topics": ["clicks"]}

A file that no process holds remains from a crash. The next member that looks removes it, if it may. A
file that may not be read counts as a live member without known facts.

Threads: a `MemberFile` belongs to the thread of its group.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from ..config.arguments import check_names
from ..config.policies import NAME
from ..errors import CorruptLogError, GroupMismatchError, LockedError
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .lock_file import LockFile, names_of_files, read_if_held

logger = logging.getLogger("loglib")

# Listing the members locks a dead member's file for some microseconds, so joining tries again.
_JOIN_TRIES = 200
_JOIN_NAP_S = 0.005


class Member(NamedTuple):
    """The facts in a member's file; empty while the member is still joining."""

    topics: tuple[str, ...] = ()  # the topics that it reads
    strategy: str | None = None  # its assignment strategy; None for a reset, which takes no share
    pid: int = 0
    host: str = ""
    since: str = ""  # when it joined, by its own clock: ISO 8601, UTC


def new_member_name() -> str:
    """A unique member name: host, process id, and random digits."""
    host = re.sub(r"[^a-zA-Z0-9.-]", "-", os.uname().nodename)[:100] or "host"
    return f"{host}-{os.getpid()}-{os.urandom(4).hex()}"


class MemberFile(NotCopyable):
    """The file by which this process is a member of a group, from construction to `leave`."""

    def __init__(
        self, files: Files, directory: str, name: str, topics: Sequence[str], permissions: int,
        *, strategy: str | None = None,
    ) -> None:  # fmt: skip
        """Join. `LockedError` if the group has a member of this name."""
        check_names(name)
        self.name = name
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.facts = Member(tuple(topics), strategy, os.getpid(), os.uname().nodename, since)
        self._files = files
        self._directory = directory
        self._path = os.path.join(directory, name)
        self._file = _hold(files, self._path, permissions)
        facts = self.facts._asdict()
        in_order = {name: facts[name] for name in ("pid", "host", "since", "strategy", "topics")}
        self._file.replace(json.dumps(in_order).encode())

    def is_valid(self) -> bool:
        """True if the member still has its name: `evict` removes it."""
        return self._file.is_named()

    def live(self) -> dict[str, Member]:
        """All members by name, including this one."""
        return live_members(self._files, self._directory, known=self.name) | {self.name: self.facts}

    def check_strategy(self, group: str) -> None:
        """`GroupMismatchError` if another member has another assignment strategy.

        If two members join at the same time, at least one finds the other: each writes its strategy before it looks.
        """
        for name, member in self.live().items():
            if member.strategy not in (None, self.facts.strategy):
                raise GroupMismatchError(group, name, str(self.facts.strategy), str(member.strategy))

    def leave(self) -> None:
        """Leave the group. The other members notice at their next look."""
        try:
            if self.is_valid():
                self._files.unlink(self._path)
        finally:
            self._file.release()

    def abandon(self) -> None:
        """Close the file and keep its name: after a fork it belongs to the parent."""
        self._file.abandon()


def live_members(files: Files, directory: str, *, known: str | None = None, remove: bool = True) -> dict[str, Member]:
    """The live members, in order of name. `known` is the caller's own name, whose lock is not tried.

    With `remove` the files of dead members are removed.
    """
    members: dict[str, Member] = {}
    for name in sorted(filter(NAME.fullmatch, names_of_files(files, directory))):
        if name == known:
            members[name] = Member()
            continue
        path = os.path.join(directory, name)
        try:
            text = read_if_held(files, path, remove=remove)
        except PermissionError:
            _warn_once(path)
            text = ""
        except CorruptLogError:  # a directory, or another file that no member has made
            continue
        if text is not None:
            members[name] = _parse(text)
    return members


@cache
def _warn_once(path: str) -> None:
    logger.warning("no permission to read %s: it counts as a live member, although it may be dead", path)


def _parse(text: str) -> Member:
    """The facts in the file; a member without topics if they are not yet written."""
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        facts = json.loads(text)
        topics, strategy = facts["topics"], facts["strategy"]
        return Member(
            tuple(map(str, topics)), None if strategy is None else str(strategy),
            int(facts.get("pid", 0)), str(facts.get("host", "")), str(facts.get("since", "")),
        )  # fmt: skip
    return Member()


def _hold(files: Files, path: str, permissions: int) -> LockFile:
    """The member's file, locked. Another member that lists the files may hold it for a moment."""
    holder: str | None = ""
    for _ in range(_JOIN_TRIES):
        try:
            file = LockFile(files, path, permissions)
        except PermissionError:  # another user's file, which can be removed if no process holds it
            was_there = files.exists(path)
            holder = read_if_held(files, path, remove=True)
            if holder is None and (not was_there or files.exists(path)):
                raise
        else:
            if file.try_lock():
                if not file.has_other_names():
                    return file
                files.unlink(path)  # else the group of the copy would count this member, too
                file.release()
                continue
            holder = file.text()
            file.abandon()
        time.sleep(_JOIN_NAP_S)
    raise LockedError(
        path, f"a member of that name: {holder or 'just joining'}", advice="join under another name, or after it left"
    )
