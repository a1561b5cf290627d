"""Commits: the committed offsets of a topic's groups, copied to a mirror.

Invariant: the copy of a group has a log of commits for each one that the group had at one moment. A member may fold
logs into another one and remove them; so the moment is one at which the list of logs was the same before and after
their marks were read, and a log goes from the copy only when the others have been copied.

Threads: one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import NamedTuple

from ..errors import CorruptLogError, LogMovedError, OffsetOutOfRangeError
from ..format.watermark import Mark
from ..groups.held import readable_by_all
from ..groups.offsets import offsets_identity
from ..groups.place import GROUPS, MIRRORED
from ..log import Log
from ..system.files import Files
from .copied import CopiedLog
from .pair import Pair

__all__ = ["CopiedCommits", "Noted", "settle_commits"]

logger = logging.getLogger("loglib")

_TRIES = 10
_MOST_BYTES = 1 << 20
_FOLDED = (FileNotFoundError, LogMovedError, OffsetOutOfRangeError, CorruptLogError)


class Noted(NamedTuple):
    """A group at one moment."""

    marks: Mapping[str, Mark]  # of its logs of commits, by name
    pointer: bytes | None  # the content of the file that stands for a group which another topic keeps


class CopiedCommits:
    """The groups of a topic, and their copies."""

    def __init__(self, files: Files, source: str, to: str, log_id: bytes, permissions: int) -> None:
        self._files = files
        self._source, self._to = os.path.join(source, GROUPS), os.path.join(to, GROUPS)
        self._log_id = log_id
        self._permissions = permissions
        self._copied: dict[str, Noted] = {}  # as they were copied last

    def note(self) -> dict[str, Noted]:
        """Where the commits of each group end now. To be called before the data's ends are noted."""
        return {name: noted for name in self._names(self._source) if (noted := self._note(name)) is not None}

    def _names(self, directory: str) -> list[str]:
        try:
            return sorted(name for name in self._files.listdir(directory) if not name.startswith("."))
        except FileNotFoundError:
            return []

    def _note(self, group: str) -> Noted | None:
        files, path = self._files, os.path.join(self._source, group)
        for tries in range(1, _TRIES + 1):
            try:
                if not files.is_directory(path):
                    return Noted({}, files.read_whole(path, _MOST_BYTES))
                offsets = os.path.join(path, "offsets")
                marks = {name: self._mark(group, name, os.path.join(offsets, name)) for name in self._names(offsets)}
                if list(marks) == self._names(offsets):
                    return Noted(marks, None)
            except _FOLDED:
                if not files.exists(path):
                    return None
                if tries == _TRIES:
                    raise
        return None  # its members never stop folding: the next pass looks again

    def _mark(self, group: str, name: str, path: str) -> Mark:
        with closing(Log(self._files, path, offsets_identity(self._log_id, group, name))) as log:
            return log.mark()

    def copy(self, noted: Mapping[str, Noted]) -> None:
        """Copy the commits up to what was noted. To be called after the data was published."""
        for group, found in noted.items():
            if self._copied.get(group) == found:
                continue
            with suppress(*_FOLDED):  # folded since then: the next pass finds another list
                self._copy(group, found)
                self._copied[group] = found
        for group in self._names(self._to):
            gone = group not in noted and not self._files.exists(os.path.join(self._source, group))
            if gone and self._is_mirrored(group):
                self._remove(group)

    def _is_mirrored(self, group: str) -> bool:
        return self._files.exists(os.path.join(self._to, group, MIRRORED))

    def adopt(self) -> None:
        """From now on all groups of the copy are those of the source: the copy was a topic of its own before."""
        for group in self._names(self._to):
            path = os.path.join(self._to, group)
            if self._files.is_directory(path) and not self._is_mirrored(group):
                self._mark_mirrored(path)

    def _mark_mirrored(self, path: str) -> None:
        self._files.write_new(os.path.join(path, MIRRORED), b"", readable_by_all(self._permissions))
        self._files.sync_directory(path)

    def _copy(self, group: str, noted: Noted) -> None:
        files, to = self._files, os.path.join(self._to, group)
        self._make_directory(self._to)
        if noted.pointer is not None:
            if not files.exists(to):
                files.write_new(to, noted.pointer, readable_by_all(self._permissions))
                files.sync_directory(self._to)
            return
        if files.exists(to):
            if self._is_mirrored(group):
                self._fill(group, to, noted)
            else:
                logger.warning("%s: the copy has a group of its own of this name: its commits are not copied", to)
            return
        aside = os.path.join(self._to, f".{group[:200]}.tmp")
        if files.exists(aside):  # left by a crash
            files.remove_tree(aside)
        files.make_directory(aside, self._permissions)
        for name in ("members", "owners", "offsets"):
            files.make_directory(os.path.join(aside, name), self._permissions)
        self._fill(group, aside, noted)
        self._mark_mirrored(aside)
        files.rename(aside, to)
        files.sync_directory(self._to)

    def _fill(self, group: str, to: str, noted: Noted) -> None:
        """Bring the copy of a group in this directory to what was noted. Synced."""
        files, offsets = self._files, os.path.join(to, "offsets")
        for name, mark in noted.marks.items():
            identity = offsets_identity(self._log_id, group, name)
            source, path = os.path.join(self._source, group, "offsets", name), os.path.join(offsets, name)
            permissions = readable_by_all(self._permissions)
            with closing(Pair(files, source, path, identity, permissions)) as pair:
                pair.advance(mark, lambda _: None, restart=True)
                pair.publish(mark)
                pair.retire(mark)
        for name in self._names(offsets):
            if name not in noted.marks:
                files.remove_tree(os.path.join(offsets, name))
        files.sync_directory(offsets)

    def _make_directory(self, path: str) -> None:
        if not self._files.exists(path):
            self._files.make_directory(path, self._permissions)
            self._files.sync_directory(os.path.dirname(path))

    def _remove(self, group: str) -> None:
        """The group was deleted at the source."""
        files = self._files
        self._copied.pop(group, None)
        aside = os.path.join(self._to, f".{group[:200]}.{files.random_bytes(8).hex()}.tmp")
        files.rename(os.path.join(self._to, group), aside)
        files.sync_directory(self._to)
        files.remove_tree(aside)


def settle_commits(files: Files, to: str, log_id: bytes, permissions: int) -> None:
    """Bring the copied logs of commits to what their marks promise; their mirror may have died."""
    groups = os.path.join(to, GROUPS)
    if not files.exists(groups):
        return
    for group in files.listdir(groups):
        offsets = os.path.join(groups, group, "offsets")
        if not group.startswith(".") and files.is_directory(os.path.join(groups, group)):
            for name in files.listdir(offsets):
                if not name.startswith("."):
                    identity = offsets_identity(log_id, group, name)
                    place = os.path.join(offsets, name)
                    CopiedLog(files, place, identity, readable_by_all(permissions)).close()
