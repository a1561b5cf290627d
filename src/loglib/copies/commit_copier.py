"""Commit copier: the committed offsets of a topic's groups, copied to a mirror.

Invariant: the copy of a group contains every log of commits that the group had at one moment (local_source.py). A
member may fold logs into another one and remove them; so a log is removed from the copy only when the others have been
copied.

Threads: one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import closing, suppress

from ..groups.directory import ALL, GROUPS, MIRRORED, stored_groups
from ..groups.lock_file import readable_by_all
from ..groups.offsets import log_names, offsets_identity
from ..log.topic_file import new_aside
from ..system.files import Files
from .follower_log import FollowerLog
from .log_copier import LogCopier
from .sources import FOLDED, GroupSnapshot, TopicSource

logger = logging.getLogger("loglib")


class CommitCopier:
    """The groups of a topic, and their copies in the topic at `to`."""

    def __init__(self, files: Files, source: TopicSource, to: str, log_id: bytes, permissions: int) -> None:
        self._files = files
        self._source, self._to = source, os.path.join(to, GROUPS)
        self._log_id = log_id
        self._permissions = permissions
        self._copied: dict[str, GroupSnapshot] = {}  # when they were copied last

    def copy(self, noted: Mapping[str, GroupSnapshot]) -> None:
        """Copy the commits up to the ends that `TopicSource.groups` has returned.

        They must have been noted before the ends of the data, and the data be published.
        """
        for group, found in noted.items():
            if self._copied.get(group) == found:
                continue
            with suppress(*FOLDED):  # folded since then: the next pass finds another list
                self._copy(group, found)
                self._copied[group] = found
        for group in stored_groups(self._files, self._to):
            if group not in noted and self._is_mirrored(group) and not self._source.has_group(group):
                self._remove(group)

    def _is_mirrored(self, group: str) -> bool:
        return self._files.exists(os.path.join(self._to, group, MIRRORED))

    def adopt(self) -> None:
        """Make all groups of the copy those of the source: the copy was a topic of its own before."""
        for group in stored_groups(self._files, self._to):
            path = os.path.join(self._to, group)
            if self._files.is_directory(path) and not self._is_mirrored(group):
                self._mark_mirrored(path)

    def own_nothing(self) -> None:
        """Make all groups of the copy read-only copies, also those that are made there later. Synced."""
        self._make_directory(self._to)
        if not self._files.exists(os.path.join(self._to, ALL)):
            self._files.write_new(os.path.join(self._to, ALL), b"", readable_by_all(self._permissions))
            self._files.sync_directory(self._to)

    def _mark_mirrored(self, path: str) -> None:
        self._files.write_new(os.path.join(path, MIRRORED), b"", readable_by_all(self._permissions))
        self._files.sync_directory(path)

    def _copy(self, group: str, noted: GroupSnapshot) -> None:
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
        aside = os.path.join(self._to, f".{group[:40]}.tmp")
        if files.exists(aside):  # left by a crash
            files.remove_tree(aside)
        files.make_directory(aside, self._permissions)
        for name in ("members", "owners", "offsets"):
            files.make_directory(os.path.join(aside, name), self._permissions)
        self._fill(group, aside, noted)
        self._mark_mirrored(aside)
        files.rename(aside, to)
        files.sync_directory(self._to)

    def _fill(self, group: str, to: str, noted: GroupSnapshot) -> None:
        """Bring the copy of a group in the directory `to` to the noted ends. Synced."""
        files, offsets = self._files, os.path.join(to, "offsets")
        for name, mark in noted.marks.items():
            identity = offsets_identity(self._log_id, group, name)
            permissions = readable_by_all(self._permissions)
            source = self._source.log_of_commits(group, name)
            with closing(LogCopier(files, source, os.path.join(offsets, name), identity, permissions)) as copier:
                if not copier.is_ahead_of(mark):
                    copier.advance(mark, lambda _: None, restart=True)
                    copier.publish(mark)
                    copier.retire(mark)
        for name in log_names(files, offsets):
            if name not in noted.marks:
                files.remove_tree(os.path.join(offsets, name))
        files.sync_directory(offsets)

    def _make_directory(self, path: str) -> None:
        if not self._files.exists(path):
            self._files.make_directory(path, self._permissions)
            self._files.sync_directory(os.path.dirname(path))

    def _remove(self, group: str) -> None:
        """Remove a group that was deleted at the source."""
        files = self._files
        self._copied.pop(group, None)
        path = os.path.join(self._to, group)
        aside = new_aside(files, path)
        files.move_directory(path, aside)
        files.sync_directory(self._to)
        files.remove_tree(aside)


def settle_commits(files: Files, to: str, log_id: bytes, permissions: int) -> None:
    """Bring the copied logs of commits to the state that their marks promise; their mirror may have died."""
    groups = os.path.join(to, GROUPS)
    if not files.exists(groups):
        return
    for group in stored_groups(files, groups):
        offsets = os.path.join(groups, group, "offsets")
        if files.is_directory(os.path.join(groups, group)):
            for name in log_names(files, offsets):
                identity = offsets_identity(log_id, group, name)
                place = os.path.join(offsets, name)
                FollowerLog(files, place, identity, readable_by_all(permissions)).close()
