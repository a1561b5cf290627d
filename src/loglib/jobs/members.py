"""Members: who takes records of a share. Each member has a file, and holds its flock while its process lives.

Invariant: a member is named in the share's files by a number that no living member shares. It is dead if no process
holds the file of that number: the kernel releases the lock when the process ends in any way. So a slow or stopped
member is never taken for dead, and no clock is asked.

    members/<number>     {"member": "<name>", "pid": 4711, "host": "web-3", "since": "2026-01-31T12:00:00Z",
                         "boot": "<32 digits>"}                        the number has 8 hexadecimal digits

The clocks of leases count only on one machine. So a member on another machine, or after its restart, is refused while
others live there.

Threads: one at a time; the share's lock is held.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from typing import NamedTuple

from ..config.arguments import check_names
from ..errors import CorruptLogError, LockedError
from ..groups.lock_file import LockFile, names_of_files, read_if_held
from ..system.files import Files
from ..system.not_copyable import NotCopyable

_NUMBER = re.compile("[0-9a-f]{8}")
NOBODY = 0xFFFFFFFF  # the number of one who changes a share, and is no member
_NO_MEMBERS = (0, NOBODY)  # the first one only looks
_TRIES = 200  # a look at the members holds a dead member's file for some microseconds
_NAP_S = 0.005


class Member(NamedTuple):
    """A living member of a share."""

    number: int
    name: str = ""  # empty while it is still joining
    pid: int = 0
    host: str = ""
    since: str = ""  # when it joined, by its own clock: ISO 8601, UTC
    boot: str = ""


class MemberFile(NotCopyable):
    """The file by which this process is a member, from construction to `leave`."""

    def __init__(self, files: Files, directory: str, name: str, boot_id: bytes, permissions: int) -> None:
        """Join. `LockedError` if a member has this name, or lives on another machine."""
        check_names(name)
        self._files = files
        self._directory = directory
        self._file, number = _hold(files, directory, permissions)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.facts = Member(number, name, os.getpid(), os.uname().nodename, since, boot_id.hex())
        text = {"member": name, **{each: getattr(self.facts, each) for each in ("pid", "host", "since", "boot")}}
        self._file.replace(json.dumps(text).encode())
        try:
            self._check_others()
        except BaseException:
            self.leave()
            raise

    @property
    def number(self) -> int:
        return self.facts.number

    def _check_others(self) -> None:
        """Of two members that join at the same time, at least one finds the other: each signs before it looks."""
        for other in live_members(self._files, self._directory, remove=True):
            where = f"pid {other.pid} on {other.host}, since {other.since}"
            path = os.path.join(self._directory, file_of(other.number))
            if other.number != self.number and other.name == self.facts.name:
                raise LockedError(path, f"a member of that name: {where}", advice="join under another name")
            if other.boot not in ("", self.facts.boot):
                holder = f"a member on another machine, or in another container: {where}"
                raise LockedError(path, holder, advice="all members of a share need to run on one machine")

    def is_valid(self) -> bool:
        """True if the member was not evicted."""
        return self._file.is_named()

    def leave(self) -> None:
        """Leave the share. The other members notice at their next look."""
        try:
            if self.is_valid():
                self._files.unlink(os.path.join(self._directory, file_of(self.number)))
        finally:
            self._file.release()

    def abandon(self) -> None:
        """Close the file and keep its name: after a fork it belongs to the parent."""
        self._file.abandon()


def file_of(number: int) -> str:
    """The name of a member's file."""
    return f"{number:08x}"


def is_dead(files: Files, directory: str, number: int) -> bool:
    """True if no process is this member, which has signed its file before. A member of another user counts as living.

    The file of a dead member is removed.
    """
    try:
        return read_if_held(files, os.path.join(directory, file_of(number)), remove=True) is None
    except PermissionError:
        return False


def live_members(files: Files, directory: str, *, remove: bool = False) -> list[Member]:
    """The living members, in order of their names. With `remove` the files of dead ones are removed."""
    members: list[Member] = []
    for name in filter(_NUMBER.fullmatch, names_of_files(files, directory)):
        try:
            text = read_if_held(files, os.path.join(directory, name), remove=remove)
        except PermissionError:
            text = ""
        except CorruptLogError:  # a directory, or another file that no member has made
            continue
        if text is not None:
            members.append(_parse(int(name, 16), text))
    return sorted(members, key=lambda member: (member.name, member.number))


def _parse(number: int, text: str) -> Member:
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        facts = json.loads(text)
        host, since, boot = (str(facts[each]) for each in ("host", "since", "boot"))
        return Member(number, str(facts["member"]), int(facts["pid"]), host, since, boot)
    return Member(number)


def _hold(files: Files, directory: str, permissions: int) -> tuple[LockFile, int]:
    """A new member's file, locked, and its number."""
    for _ in range(_TRIES):
        number = int.from_bytes(files.random_bytes(4), "little")
        path = os.path.join(directory, file_of(number))
        if number in _NO_MEMBERS or files.exists(path):
            continue
        file = LockFile(files, path, permissions)
        if file.try_lock():
            return file, number
        file.abandon()  # another member has just looked whether it lives, and removed it
        time.sleep(_NAP_S)
    raise LockedError(directory, "other members, which look at each new file", advice="join again")
