"""Chain: the way from a copy to the directories of its topic that could be written, through any number of copies.

Invariant: a mirror names its source, and a superseded topic names its successor. From any copy these names lead to the
topic's one leader, or to the members of one topic with replicas. Between two steps of a promotion there is none; then
they lead to the superseded topic that was the last leader: it has every acknowledged record. Directories are compared
by inode, not by name: links and mounts give them several names.

Nothing is changed. Threads: no state, safe for all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from ..errors import LogError
from ..log import copy_role, topic_file
from ..system.directory import Directory
from ..system.files import Files
from .roster import Members, read_members


class Former(NamedTuple):
    """The directories whose place a copy takes: one, or those of a topic with replicas. The first has all records."""

    paths: tuple[str, ...] = ()  # none: the chain ends at a copy of one moment, which is no topic's successor
    are_members: bool = False
    superseded: tuple[str, ...] = ()  # members that a promotion which was cut has superseded


def is_same(files: Files, one: str, other: str) -> bool:
    """True if two paths lead to one directory, which may not be there yet."""
    try:
        (one, missing), (other, missing_there) = _existing(files, one), _existing(files, other)
        with Directory.open(files, one) as first, Directory.open(files, other) as second:
            return missing == missing_there and first.is_same(second)
    except OSError:
        return False


def _existing(files: Files, path: str) -> tuple[str, tuple[str, ...]]:
    """The longest part of the path that exists, and the names after it."""
    if files.exists(path) or path in ("", os.sep):
        return path, ()
    parent, name = os.path.split(path)
    found, names = _existing(files, parent)
    return found, (*names, name)


def former_of(files: Files, path: str, of: str, log_id: bytes) -> Former:
    """The directories whose place the mirror at `path` of the topic at `of` takes.

    `LogError` if a directory on the way cannot be reached: a process may be writing it.
    """
    seen, last, here = [path], "", of
    while not any(is_same(files, here, each) for each in seen):
        found = _reach(files, here, log_id, path)
        if found is None or found.role == copy_role.LEADER:
            return Former((here,))
        if found.role == copy_role.REPLICA:
            return _members(files, here, log_id, path)
        if found.role not in (copy_role.MIRROR, copy_role.SUPERSEDED):
            return Former()
        if found.role == copy_role.SUPERSEDED:
            last = here
        seen.append(here)
        here = found.of
    if not last:
        raise LogError(f"{path} is a mirror in a circle: {' of '.join(seen)} of {here}; promote one with force=True")
    return Former((last,))


def _reach(files: Files, path: str, log_id: bytes, copy: str) -> copy_role.Role | None:
    """The role of a directory that must have this log."""
    why = "it is on another host"
    if not path.startswith(copy_role.ELSEWHERE):
        try:
            described = topic_file.read(files, path)
        except OSError as error:
            why = str(error)
        else:
            if described is not None and described[0] == log_id:
                return copy_role.read(files, path)
            why = "no topic is there" if described is None else "another topic is there"
    raise LogError(
        f"{path}, whose place {copy} would take, cannot be reached, and may be written: {why}; bring it back, or stop "
        "its writers and promote with force=True"
    )


def _members(files: Files, path: str, log_id: bytes, copy: str) -> Former:
    """The members of a topic with replicas, by the newest list that one of them has."""
    newest, lists = _newest_list(files, path)
    paths: list[str] = []
    superseded: list[str] = []
    for where in newest.paths.values():
        found = _reach(files, where, log_id, copy)
        if found is None or found.role == copy_role.LEADER:  # the others were given up
            return Former((where,))
        if found.role == copy_role.SUPERSEDED:
            superseded.append(where)
        elif where in lists and lists[where].id in newest.paths:
            paths.append(where)
        else:
            raise LogError(
                f"{where} is no whole member of the topic with replicas at {path}, whose place {copy} would take; open "
                "the topic for writing once, or stop its writers and promote with force=True"
            )
    paths.sort(key=lambda each: not is_same(files, each, path))
    return Former(tuple(paths), True, tuple(superseded))


def _newest_list(files: Files, path: str) -> tuple[Members, dict[str, Members]]:
    """The newest list of members that can be found from one of them, and the list of each directory in it."""
    newest = read_members(files, path)
    assert newest is not None
    while True:
        lists: dict[str, Members] = {}
        for where in newest.paths.values():
            with suppress(LogError, OSError):
                found = read_members(files, where)
                if found is not None and found.log_id == newest.log_id:
                    lists[where] = found
        best = max([newest, *lists.values()], key=lambda each: each.version)
        if best.version == newest.version:
            return newest, lists
        newest = best


# --- names ---------------------------------------------------------------------------------------------------


def check_no_circle(files: Files, copy: str, source: str) -> None:
    """`LogError` if the names from the source on lead to the copy, unless the copy is a mirror of this source already.

    Such a source may have less than the copy. And the names from the copy would not lead to the topic's leader.
    """
    seen: list[str] = []
    here = source
    while not any(is_same(files, here, each) for each in seen):
        found = copy_role.read(files, here)
        if found is None or found.role not in (copy_role.MIRROR, copy_role.SUPERSEDED):
            return
        if is_same(files, found.of, copy):
            own = copy_role.read(files, copy)
            if own is not None and own.role == copy_role.MIRROR and is_same(files, own.of, source):
                return
            raise LogError(
                f"{source} names {copy} as its own source or successor, perhaps through others, and so cannot be its "
                "source; mirror the topic itself, promote the source first, or mirror to a new directory"
            )
        seen.append(here)
        here = found.of


def check_apart(files: Files, paths: Sequence[str]) -> None:
    """`ValueError` if two paths lead to one directory."""
    for number, path in enumerate(paths):
        for other in paths[:number]:
            if is_same(files, path, other):
                raise ValueError(f"a directory is named twice: {other} and {path} lead to one")
