"""Directory: the directory of a consumer group, and the logs that the group reads.

Invariant: an existing directory `groups/<name>` is complete: it is built aside, synced, and renamed. A group
has one directory, in one of its topics. Each of its other topics has a file that names that topic.

    groups/<name>/members/     the live members: members.py
    groups/<name>/owners/      the owner of each partition: owners.py
    groups/<name>/offsets/     the committed offsets: offsets.py
    groups/<name>/mirrored     an empty file, if the group was copied with its topic
    groups/.mirrored           an empty file, if all groups are copies: in a replica that is not the first

    groups/<name>              in the directories of the other topics: a `_Pointer` as JSON

A topic that was moved is still the same topic: the group knows its topics by their log ids. A copy of one of its topics
beside the original is not a topic of the group while the original is one.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

from ..config.arguments import Start, check_names, parse_start
from ..config.policies import NAME, Durability
from ..errors import CorruptLogError, GroupElsewhereError, GroupNotFoundError, LogError, LogMovedError
from ..log import catalog, copy_role
from ..log.history import HistoryPoint, may_have
from ..log.lag import Lag, measure_lag
from ..log.log import Log
from ..log.lookup import resolve
from ..log.topic_file import NAME as DESCRIPTION
from ..log.topic_file import new_aside, partition_directory, put_in_place, read
from ..system.files import Files
from .assignment import TopicPartition
from .commit_log import Entries, Entry, LogPartition
from .lock_file import readable_by_all
from .offsets import Offsets, make_offsets

logger = logging.getLogger("loglib")

_MOST_BYTES = 4096  # of a file that names a group's topic
GROUPS = "groups"  # the subdirectory in a topic's directory
MIRRORED = "mirrored"  # an empty file in the directory of a group that was copied
_PARTS = ("members", "owners", "offsets")  # the directories in a group's directory
_DIRECTORY, _POINTER = "directory", "pointer"
ALL = ".mirrored"  # an empty file beside the groups, if all of them are copies: in a replica that is not the first


def group_names(files: Files, topic_path: str) -> list[str]:
    """The names of the groups whose directory is in this topic, sorted."""
    parent = os.path.join(topic_path, GROUPS)
    return [name for name in names_in(files, topic_path, GROUPS) if _kind(files, parent, name) == _DIRECTORY]


def names_in(files: Files, topic_path: str, kind: str) -> list[str]:
    """The names in a subdirectory of a topic's directory that a group, or a share, may have, sorted."""
    try:
        names = files.names_in(os.path.join(topic_path, kind))
    except (FileNotFoundError, NotADirectoryError):  # none was ever made
        _check_here(files, topic_path)
        return []
    return sorted(name for name in names if NAME.fullmatch(name) and not name.startswith("."))


def put_whole(
    files: Files, path: str, permissions: int, build: Callable[[str], object], exists: Callable[[], bool]
) -> None:
    """Make the directory of a group, or of a share, which `build` builds aside. Its name is not yet synced.

    Another process may be quicker: then its directory stays. `LogError` if there is something else, and `ValueError`
    for a name that `names_in` would leave out, so that nobody would know of the members.
    """
    if os.path.basename(path).startswith("."):
        raise ValueError(f"{os.path.basename(path)!r} begins with a dot: nothing of this name would be listed")
    make_subdirectory(files, os.path.dirname(path), permissions)
    aside = new_aside(files, path)
    if not put_in_place(files, aside, path, lambda: build(aside)) and not exists():
        raise LogError(f"{path} is a directory of something else; move it away, or choose another name")


def make_subdirectory(files: Files, path: str, permissions: int) -> None:
    """Make a subdirectory of a topic, a group or a share, unless it is there. `LogMovedError` if it has no parent."""
    if not files.exists(path):
        _check_here(files, os.path.dirname(path))
        with suppress(FileExistsError):  # another member has made it
            files.make_directory(path, permissions)


def followed_groups(files: Files, topic_path: str) -> list[str]:
    """The names of all groups that read this topic, sorted: those of `group_names`, and those of other topics."""
    _check_here(files, topic_path)
    return stored_groups(files, os.path.join(topic_path, GROUPS))


def stored_groups(files: Files, parent: str) -> list[str]:
    """The groups that have a directory or a pointer in a topic's directory of groups, sorted.

    Other names are ignored. The list is empty without the directory.
    """
    try:
        return sorted(name for name in files.names_in(parent) if _kind(files, parent, name) is not None)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _kind(files: Files, parent: str, name: str) -> str | None:
    """The kind of a name in a directory of groups: a group's directory or a pointer; None if it is neither."""
    path = os.path.join(parent, name)
    if not NAME.fullmatch(name) or name.startswith("."):
        return None
    with suppress(FileNotFoundError, PermissionError, CorruptLogError):  # just deleted, or not a regular file
        if not files.is_directory(path):
            return _POINTER if _read_pointer(files, path) != _NO_POINTER else None
        return _DIRECTORY if has_one_of(files, path, _PARTS) else None
    return None


def has_one_of(files: Files, path: str, parts: Iterable[str]) -> bool:
    """True if the directory has one of these parts of a group, or of a share, or may not be entered."""
    try:
        return any(files.exists(os.path.join(path, each)) for each in parts)
    except PermissionError:
        return True


def check_logs_differ(logs: Mapping[str, bytes]) -> None:
    """`LogError` if two topics, given with their log ids, are one log."""
    topics: dict[bytes, str] = {}
    for topic, log_id in logs.items():
        other = topics.setdefault(log_id, topic)
        if other != topic:
            raise LogError(
                f"{other} and {topic} are one log, {log_id.hex()}: one is a copy of the other, or a second name of it. "
                "A group reads a log once: give one of them"
            )


def _check_here(files: Files, topic_path: str) -> None:
    if not files.exists(topic_path):
        raise LogMovedError(topic_path, "was moved or removed")


class GenerationFence(Protocol):
    """Commits of a group that are part of transactions, for a new owner of a partition."""

    def known_generations(self, directory: GroupDirectory) -> Mapping[str, int]:
        """The highest generation of each partition in a transaction or a fence, by the name of its owner's file."""

    def fence(self, directory: GroupDirectory, generations: Mapping[TopicPartition, int]) -> Entries:
        """End the transactions of former owners, and return the commits of those that are not applied yet."""


class GroupDirectory(NamedTuple):
    """A group's directory, and the facts that its members share."""

    files: Files
    topic_path: str  # of the topic that contains the group's directory
    log_id: bytes  # of that topic
    name: str
    logs: dict[TopicPartition, Log]  # of all partitions; it grows
    durability: Durability
    permissions: int
    clock: Callable[[], int]  # microseconds UTC
    transactions: GenerationFence
    track: tuple[Callable[[Callable[[str], None]], object], ...]  # ends a member when a topic is closed; returns it
    find_logs: Callable[[], Mapping[TopicPartition, Log]] = dict  # with those of partitions that were added
    other_paths: tuple[str, ...] = ()  # of the other topics

    @property
    def path(self) -> str:
        return os.path.join(self.topic_path, GROUPS, self.name)

    @property
    def members(self) -> str:
        return os.path.join(self.path, "members")

    @property
    def owners(self) -> str:
        return os.path.join(self.path, "owners")

    def owner_file(self, partition: TopicPartition) -> str:
        """The name of the partition in the directory of owners, and in transactions."""
        return str(LogPartition(self.logs[partition].identity.log_id, partition.partition))

    def names(self) -> dict[LogPartition, TopicPartition]:
        """The present names of the group's partitions."""
        return {LogPartition(log.identity.log_id, each.partition): each for each, log in self.logs.items()}

    def take_in_added(self) -> list[TopicPartition]:
        """Take in the partitions that were added to the topics, and return them."""
        added = {each: log for each, log in self.find_logs().items() if each not in self.logs}
        self.logs.update(added)
        return list(added)

    @property
    def descriptions(self) -> list[str]:
        """The files with the numbers of partitions of the topics."""
        return [os.path.join(path, DESCRIPTION) for path in (self.topic_path, *self.other_paths)]

    @property
    def topics(self) -> list[str]:
        return sorted({partition.topic for partition in list(self.logs)})  # exporters ask in threads of their own

    def resolve(
        self, start: Start | Mapping[TopicPartition, Start], partitions: Iterable[TopicPartition] = ()
    ) -> dict[TopicPartition, int]:
        """The offsets of a start in these partitions, or in the partitions that a mapping names."""
        if isinstance(start, int) and len(self.logs) > 1:
            raise ValueError(f"offset {start} means another record in each partition; give {{partition: offset}}")
        starts = start if isinstance(start, Mapping) else dict.fromkeys(partitions, start)
        now = self.clock()
        offsets: dict[TopicPartition, int] = {}
        for each, start_of_it in starts.items():
            offsets[each] = resolve(self.logs[each], parse_start(start_of_it, now_us=now))
            self.logs[each].release_files()  # so that few of a thousand logs have open files
        return offsets

    def place(self, partition: TopicPartition, entry: Entry | None) -> int | None:
        """The offset of a commit; None without one, or if the partition's log is not the one that it was made in."""
        log = self.logs.get(partition)
        if log is None or entry is None or entry.offset is None:
            return None
        return entry.offset if may_have(HistoryPoint(entry.log_id, entry.offset, entry.history), log) else None

    def lag(
        self, entries: Entries, *, first: Callable[[TopicPartition], int] | None = None, count_records: bool
    ) -> dict[TopicPartition, Lag]:
        """The lag of each partition from its commit in `entries`.

        Without a commit in this history of the log it counts from the partition's `first` offset, or from the log's
        start if `first` is None.
        """
        lags: dict[TopicPartition, Lag] = {}
        for partition, log in self.logs.items():
            offset = self.place(partition, entries.get(partition))
            if offset is None:
                offset = log.mark().log_start_offset if first is None else first(partition)
            lags[partition] = measure_lag(log, offset, now_us=self.clock(), count_records=count_records)
            log.release_files()  # so that few of a thousand logs have open files
        return lags

    def exists(self) -> bool:
        """True if the group exists here; `GroupElsewhereError` if another topic has it."""
        check_names(self.name)
        if not self.files.exists(self.path):
            return False
        if self.files.is_directory(self.path):
            return has_one_of(self.files, self.path, _PARTS)
        pointer = _read_pointer(self.files, self.path)
        topic = self._topic_of(pointer)
        raise GroupElsewhereError(self.path, self.name, os.path.basename(topic) if topic else pointer.topic)

    def require(self) -> None:
        """`GroupNotFoundError` if the group does not exist."""
        if not self.exists():
            raise GroupNotFoundError(self.topic_path, self.name, group_names(self.files, self.topic_path))

    def at(self, topic: str) -> GroupDirectory:
        """The group's directory in another topic beside this one; `GroupNotFoundError` if there is no such topic."""
        path = os.path.join(os.path.dirname(self.topic_path), topic)
        described = read(self.files, path) if NAME.fullmatch(topic) else None
        if described is None:
            raise GroupNotFoundError(path, self.name, [])
        return self._replace(topic_path=path, log_id=described[0])

    def check_role(self) -> None:
        """`NotLeaderError` if the group may not change here: it is a copy, or one of its topics no longer leads."""
        for path in (self.topic_path, *self.other_paths):
            role, group = copy_role.read(self.files, path), os.path.join(path, GROUPS, self.name)
            copied = self.files.exists(os.path.join(group, MIRRORED))
            all_copied = self.files.exists(os.path.join(path, GROUPS, ALL))
            if role is None or (role.role == copy_role.REPLICA and not copied and not all_copied):
                continue  # no copy: a topic, or the first directory of a topic with replicas
            action = copy_role.JOIN_COPIED if copied else copy_role.JOIN
            if role.role not in action.roles:
                raise copy_role.refusal(group if copied else path, role, action)

    def make(self) -> None:
        """Make the group's directory if there is none. It and its name are synced, also if another process made it.

        Nothing is made if `check_role` raises `NotLeaderError`.
        """
        files, parent = self.files, os.path.join(self.topic_path, GROUPS)
        self.check_role()
        if not self.exists():
            put_whole(files, self.path, self.permissions, self._build, self.exists)
        for each in (self.members, self.owners):  # a copy of the group may lack them
            make_subdirectory(files, each, self.permissions)
        files.sync_directory(self.topic_path)
        files.sync_directory(parent)
        for path in self.other_paths:
            self._point_here(path)

    def _build(self, aside: str) -> None:
        files = self.files
        files.make_directory(aside, self.permissions)
        for name in _PARTS:
            files.make_directory(os.path.join(aside, name), self.permissions)
        make_offsets(
            files, os.path.join(aside, "offsets"), self.log_id, self.name,
            now=self.clock(), permissions=self.permissions,
        )  # fmt: skip
        files.sync_directory(aside)

    def _point_here(self, topic_path: str) -> None:
        """Write a pointer to this topic in another topic's directory. Synced."""
        files, parent = self.files, os.path.join(topic_path, GROUPS)
        path, first = os.path.join(parent, self.name), os.path.basename(self.topic_path)
        pointer = _Pointer(first, self.log_id.hex(), os.path.basename(topic_path))
        old = _read_pointer(files, path) if files.exists(path) and not files.is_directory(path) else None
        if old is not None and old != pointer and not self._is_outdated(old, topic_path):
            raise GroupElsewhereError(path, self.name, old.topic)
        try:
            if old != pointer and not (files.exists(path) and files.is_directory(path)):
                make_subdirectory(files, parent, self.permissions)
                aside = new_aside(files, path)
                files.write_new(aside, json.dumps(pointer._asdict()).encode(), readable_by_all(self.permissions))
                with suppress(IsADirectoryError):  # another process has made a group of this name there
                    files.rename(aside, path)
                files.sync_directory(topic_path)
                files.sync_directory(parent)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            logger.warning("%s: cannot write that group %s is kept with topic %s: %s", parent, self.name, first, error)
            return
        if files.is_directory(path):
            raise GroupElsewhereError(path, self.name, os.path.basename(topic_path))

    def _is_outdated(self, pointer: _Pointer, topic_path: str) -> bool:
        """True if the pointer in a topic differs only because topics were moved or copied since it was written."""
        if self._is_copy_of(topic_path, pointer.of):
            return True  # the file was copied with its topic
        topic = self._topic_of(pointer)
        return topic is not None and _same_directory(self.files, topic, self.topic_path)

    def _topic_of(self, pointer: _Pointer) -> str | None:
        """The path of the topic to which a pointer leads: by its name, or by its log id if it was moved."""
        files, parent = self.files, os.path.dirname(self.topic_path)
        named = os.path.join(parent, pointer.topic)
        if NAME.fullmatch(pointer.topic) and _log_id_at(files, named) == pointer.log_id:
            return named
        for name in catalog.names(files, parent):
            path = os.path.join(parent, name)
            if _log_id_at(files, path) == pointer.log_id and files.exists(os.path.join(path, GROUPS, self.name)):
                return path
        return None

    def _is_copy_of(self, topic_path: str, name: str) -> bool:
        """True if the topic at the path is a copy of one with this name beside it: both have the same log."""
        original = os.path.join(os.path.dirname(topic_path), name)
        if not NAME.fullmatch(name) or _same_directory(self.files, original, topic_path):
            return False
        log_id = _log_id_at(self.files, original)
        return log_id is not None and log_id == _log_id_at(self.files, topic_path)

    def _check_moved(self, before: str, now: TopicPartition) -> None:
        """`LogError` if the given topic is a copy of the topic with the commits."""
        path = next((each for each in self.other_paths if os.path.basename(each) == now.topic), None)
        if path is None or not self._is_copy_of(path, before):  # the first topic has its own commits
            return
        original = os.path.join(os.path.dirname(path), before)
        pointer = os.path.join(original, GROUPS, self.name)
        if not self.files.exists(pointer) or not self._is_outdated(_read_pointer(self.files, pointer), original):
            return  # the original is not in this group
        raise LogError(
            f"{path} is a copy of {original}, whose commits group {self.name} has: a group reads a log in one "
            f"directory. Give {before}, or choose another group name; if the copy is to replace {before} in the group, "
            f"remove {pointer}"
        )

    def remove(self) -> None:
        """Remove the group's directory by one rename, and the files that point to it. Synced."""
        files, parent = self.files, os.path.join(self.topic_path, GROUPS)
        aside = new_aside(files, self.path)
        files.move_directory(self.path, aside)
        files.sync_directory(parent)
        files.remove_tree(aside)
        for path in self.other_paths:
            pointer = os.path.join(path, GROUPS, self.name)
            with suppress(FileNotFoundError, IsADirectoryError, PermissionError):  # already removed, or not permitted
                files.unlink(pointer)
                files.sync_directory(os.path.dirname(pointer))

    def offsets(self) -> Offsets:
        """The group's committed offsets. The caller must close them."""
        return Offsets(
            self.files, os.path.join(self.path, "offsets"), self.log_id, self.name,
            durability=self.durability, permissions=self.permissions, clock=self.clock, names=self.names(),
            check_moved=self._check_moved,
        )  # fmt: skip


class _Pointer(NamedTuple):
    """A file in a topic that names the topic with the group's directory; the fields are those of the file."""

    topic: str  # the name of the topic that has the group's directory
    log_id: str  # of that topic
    of: str  # the name of the topic with this file


_NO_POINTER = _Pointer("another", "", "")  # of a file that names no topic


def _read_pointer(files: Files, path: str) -> _Pointer:
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        facts = json.loads(files.read_whole(path, _MOST_BYTES))
        return _Pointer(str(facts["topic"]), str(facts["log_id"]), str(facts["of"]))
    return _NO_POINTER


def _log_id_at(files: Files, path: str) -> str | None:
    """The log id of the topic at the path; None if there is none that can be read."""
    with suppress(CorruptLogError, OSError):
        described = read(files, path)
        return None if described is None else described[0].hex()
    return None


def _same_directory(files: Files, one: str, other: str) -> bool:
    """True if two paths lead to the same topic, perhaps through links."""
    try:
        facts, others = (files.facts(partition_directory(path, 0)) for path in (one, other))
    except OSError:
        return False
    return (facts.st_dev, facts.st_ino) == (others.st_dev, others.st_ino)
