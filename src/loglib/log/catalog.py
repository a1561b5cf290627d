"""Catalog: list, describe, grow, rename and delete the topics of a directory.

Invariant: listing opens no topic and changes nothing. A topic is deleted, renamed, or gets more partitions, only while
no process writes it and no group in its directory has members. One rename deletes it for all readers.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

from ..config.arguments import check_count, check_names, topic_path
from ..config.policies import NAME, TopicConfig
from ..errors import LogError, StorageIOError
from ..system import lock
from ..system.clock import SYSTEM
from ..system.directory import Directory
from ..system.failures import refusing_full_disk
from ..system.files import REAL, Files
from . import copy_role, topic_file
from .recovery import list_segments

logger = logging.getLogger("loglib")

GroupsOf = Callable[[Files, str], list[str]]  # the names of the groups in a topic's directory
CheckUnused = Callable[[Files, str], None]  # raises `GroupBusyError` if a group in a topic's directory has members


class TopicInfo(NamedTuple):
    """The facts in a topic's files, read without opening the topic."""

    name: str
    path: str
    config: TopicConfig | None  # None if the description cannot be read: `error` says why
    size_bytes: int  # of all segment files
    groups: list[str]  # the consumer groups in its directory
    error: LogError | None = None


def names(files: Files, directory: str) -> list[str]:
    """The names of the topics in a directory, sorted; none without the directory."""
    try:
        return _names(files, directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _names(files: Files, directory: str) -> list[str]:
    return sorted(
        name for name in files.names_in(directory)
        if NAME.fullmatch(name) and not name.startswith(".")  # a volume has a lost+found, which nobody may enter
        and _may_be_topic(files, os.path.join(directory, name))
    )  # fmt: skip


def _may_be_topic(files: Files, path: str) -> bool:
    """True also for another user's directory, which is closed: who opens it is told so."""
    try:
        return topic_file.exists(files, path)
    except PermissionError:
        return True


def what_is_here(files: Files, path: str, mode: str) -> str:
    """The reason why there is no topic to open at the path, with this mode of `Topic.open`."""
    if found := names(files, path):
        return f"no topic but a directory of topics: open one of {', '.join(found)}"
    return "no topic here; Topic.create(path) makes one" + (", and create=True, too" if mode == "a" else "")


def describe_all(files: Files, directory: str | os.PathLike[str], *, groups_of: GroupsOf) -> list[TopicInfo]:
    """The topics in a directory, sorted by name. `groups_of` lists the groups in a topic's directory.

    `FileNotFoundError` or `NotADirectoryError` if there is no such directory: a mistyped path, or an
    unmounted one, must not look like a directory without topics.
    """
    absolute = os.path.abspath(os.fsdecode(directory))
    return [_describe(files, name, os.path.join(absolute, name), groups_of) for name in _names(files, absolute)]


def _describe(files: Files, name: str, path: str, groups_of: GroupsOf) -> TopicInfo:
    try:
        described = topic_file.read(files, path)
        config = None if described is None else described[1]
        partitions = 0 if config is None else config.partitions
        directories = [topic_file.partition_directory(path, number) for number in range(partitions)]
        size_bytes = sum(sum(list_segments(files, each).values()) for each in directories)
        return TopicInfo(name, path, config, size_bytes, groups_of(files, path))
    except PermissionError as error:
        return TopicInfo(name, path, None, 0, [], StorageIOError(path, error, "reading the topic"))
    except LogError as error:
        return TopicInfo(name, path, None, 0, groups_of(files, path), error)


def delete(path: str | os.PathLike[str], *, check_unused: CheckUnused, files: Files = REAL) -> None:
    """`Topic.delete`. `check_unused` refuses a topic whose groups have members.

    A crash may leave a directory whose name begins with a dot; it is not a topic.
    """
    absolute = _existing_topic(files, path)
    check_unused(files, absolute)
    parent, name = os.path.split(absolute)
    aside = topic_file.new_aside(files, absolute)
    with _locked(files, absolute):
        files.move_directory(absolute, aside, first=topic_file.NAME)
        files.sync_directory(parent)
    files.remove_tree(aside)
    if files.exists(aside):
        logger.warning("%s: this rest of the deleted topic %s could not be removed", aside, name)


def rename(path: str | os.PathLike[str], name: str, *, check_unused: CheckUnused, files: Files = REAL) -> str:
    """Give a topic another name in its directory. Returns its new path. Synced.

    Its records, groups and transactions stay with it: they know it by its log id. Readers get `LogMovedError`.
    `check_unused` refuses a topic that members of groups read. Raises `FileExistsError` if something has the name,
    `FileNotFoundError` if there is no topic, `LockedError` if a writer has it, and `LogError` if an overlay has it in
    the image below, where no directory can be renamed.
    """
    absolute = _existing_topic(files, path)
    check_names(name)
    parent = os.path.dirname(absolute)
    target = os.path.join(parent, name)
    if name.startswith("."):
        raise ValueError(f"{name!r} begins with a dot: a topic of this name would not be listed")
    with _locked(files, absolute):
        check_unused(files, absolute)
        if files.exists(target):
            raise FileExistsError(errno.EEXIST, "something has this name already", target)
        try:
            files.rename(absolute, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            why = "an overlay does not rename a directory of the image below it"
            raise LogError(f"{absolute}: {why}; copy the topic under the other name, and delete it") from error
        files.sync_directory(parent)
    return target


def add_partitions(
    path: str | os.PathLike[str],
    partitions: int,
    *,
    check_unused: CheckUnused,
    files: Files = REAL,
    clock: Callable[[], int] = SYSTEM,
) -> None:
    """`Topic.add_partitions`. `check_unused` refuses a topic whose groups have members."""
    absolute = _existing_topic(files, path)
    copy_role.check_leader(files, absolute)
    check_unused(files, absolute)
    check_count("partitions", partitions)
    with _locked(files, absolute) as topic:
        copy_role.check_leader(files, absolute)
        log_id, config = topic_file.read_existing(files, absolute)
        check_more(absolute, partitions, config)
        grown = replace(config, partitions=partitions)
        # A crash leaves empty logs that `topic.json` does not count. The next call uses them.
        with refusing_full_disk(absolute):
            topic_file.make_missing(topic, log_id, grown, range(config.partitions, partitions), now=clock())
        topic_file.write(topic, log_id, grown)
    logger.warning(
        "%s: has %d partitions now, and had %d: keys may belong to other partitions than before",
        absolute, partitions, config.partitions,
    )  # fmt: skip


def check_more(path: str, partitions: int, config: TopicConfig) -> None:
    """`ValueError` if the topic at the path does not have fewer partitions."""
    if partitions <= config.partitions:
        raise ValueError(f"{path} has {config.partitions} partitions; the number can only rise")


def _existing_topic(files: Files, path: str | os.PathLike[str]) -> str:
    """The absolute path of a topic."""
    absolute = topic_path(path)
    if not topic_file.exists(files, absolute):
        raise FileNotFoundError(errno.ENOENT, "no topic here", absolute)
    if not files.is_directory(absolute):
        raise LogError(f"{absolute} is a link to a topic; name the topic where it is")
    return absolute


@contextmanager
def _locked(files: Files, path: str) -> Iterator[Directory]:
    """The topic's directory, while no other process writes or changes the topic."""
    with ExitStack() as held:
        topic = held.enter_context(Directory.open(files, path))
        topic.lock_for_a_moment("a process that runs retention or changes policies", advice="try again")
        for number in range(_partitions(files, path)):
            directory = topic_file.partition_directory(path, number)
            held.callback(lock.acquire(files, directory, 0o600).release)
        yield topic


def _partitions(files: Files, path: str) -> int:
    """The number of partition directories. The description is not used, because it may be damaged."""
    count = 0
    while files.exists(topic_file.partition_directory(path, count)):
        count += 1
    return count
