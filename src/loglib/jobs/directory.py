"""Directory: the directory of a share in its topic, and what its members have in common.

Invariant: an existing directory `shares/<share>` is complete: it is built aside, with the first generation of each
partition, synced, and renamed. So all partitions of a share have one start. A partition that is added later is taken
from its begin.

    shares/<share>/share.json                        the settings of the share: checked JSON
    shares/<share>/members/                          the living members: members.py
    shares/<share>/<partition>/<generation>.acks     what they have begun and settled: generation.py

Threads: facts that do not change; the functions are safe for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ..config.arguments import check_count, check_names
from ..errors import CorruptLogError, GroupNotFoundError, LogMovedError, ShareMismatchError, ShareReplacedError
from ..format import checked_json
from ..groups.directory import ALL, GROUPS, has_one_of, make_subdirectory, names_in, put_whole
from ..log import copy_role
from ..log.log import Log
from ..log.lookup import StartLike, resolve, starts_of
from ..log.topic_file import new_aside, partition_directory, put_in_place
from ..system.clock import Clock
from ..system.directory import Directory
from ..system.files import Files
from .ack_log import AckLog, link
from .entries import ALTERED, pair
from .generation import Checkpoint, Place
from .known_places import difference, known_history, next_history
from .state import KEY_ORDER, NO_ORDER, Counts, Settings
from .transacting import Transactions

SHARES = "shares"  # the subdirectory in a topic's directory
_MEMBERS = "members"
_SETTINGS = "share.json"
_PARTS = (_SETTINGS, _MEMBERS, "0000")  # one of them shows that a directory is that of a share, perhaps a damaged one
_MOST_BYTES = 1 << 15  # of the file of settings
_MOST_WINDOW = 1_000_000
_WHAT = "the settings of a share"  # for errors


def share_names(files: Files, topic_path: str) -> list[str]:
    """The names of a topic's shares, sorted. Other names in the directory of shares are left out."""
    parent = os.path.join(topic_path, SHARES)
    return [name for name in names_in(files, topic_path, SHARES) if has_one_of(files, f"{parent}/{name}", _PARTS)]


def check_settings(given: Mapping[str, Any], topic_path: str) -> None:
    """`ValueError` and `TypeError` for settings that no share of this topic can have."""
    for name, value in given.items():
        if name == "dead_letter":
            if value is not None:
                _check_dead_letter(value, topic_path)
            continue
        if name not in Settings._fields:
            raise TypeError(f"a share has no argument {name!r}; its settings are {', '.join(Settings._fields)}")
        if name == "order":
            if value not in (NO_ORDER, KEY_ORDER):
                raise ValueError(f'order must be "{NO_ORDER}" or "{KEY_ORDER}", not {value!r}')
            continue
        if name == "max_in_hand" and value is None:
            continue
        check_count(name, value)
        most = _MOST_WINDOW if name == "window" else (1 << 16) - 1 if name == "max_attempts" else 1 << 32
        if value > most:
            raise ValueError(f"{name} must be at most {most:,}, not {value:,}")


def _check_dead_letter(value: Any, topic_path: str) -> None:
    path = os.fspath(value)
    if not isinstance(path, str) or not path or "://" in path:
        raise ValueError(f"dead_letter must be the path of a topic on this machine, not {value!r}")
    if os.path.realpath(path) == os.path.realpath(topic_path):
        raise ValueError(f"dead_letter must be another topic than that of the share, {topic_path}")


def changes_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that an alteration names. None changes nothing; 0 and "" end a limit and dead letters."""
    may_end = ("max_in_hand", "dead_letter")
    return {
        name: (value or None) if name in may_end else value for name, value in given.items() if value is not None
    }


def settings_of(given: Mapping[str, Any], before: Settings) -> Settings:
    """These settings, and the others as before."""
    return before._replace(**{name: _stored(name, value) for name, value in given.items()})


def _stored(name: str, value: Any) -> Any:
    if name == "dead_letter":
        return None if value is None else os.path.realpath(value)
    return value or 0


class ShareDirectory(NamedTuple):
    """A share's directory, and the facts that its members have in common."""

    files: Files
    topic_path: str
    log_id: bytes
    name: str
    find_logs: Callable[[], Mapping[int, Log]]  # of all partitions, with those that were added
    permissions: int
    clock: Clock
    track: Callable[[Callable[[str], None]], object]  # ends a member when the topic is closed; returns the topic
    transactions: Transactions

    @property
    def path(self) -> str:
        return os.path.join(self.topic_path, SHARES, self.name)

    @property
    def members(self) -> str:
        return os.path.join(self.path, _MEMBERS)

    def of_partition(self, partition: int) -> str:
        """The directory of a partition's file."""
        return partition_directory(self.path, partition)

    def exists(self) -> bool:
        """True if the share exists."""
        return self.files.exists(os.path.join(self.path, _SETTINGS))

    def require(self) -> None:
        """`GroupNotFoundError` if the share does not exist. One that has lost a file, or its settings, does."""
        check_names(self.name)
        if not has_one_of(self.files, self.path, _PARTS):
            raise GroupNotFoundError(self.topic_path, self.name, share_names(self.files, self.topic_path), "share")

    def check_role(self) -> None:
        """`NotLeaderError` if the topic's directory is a copy that has no shares of its own."""
        role = copy_role.read(self.files, self.topic_path)
        if role is None or role.role in copy_role.JOIN.roles:
            return
        is_other_replica = self.files.exists(os.path.join(self.topic_path, GROUPS, ALL))
        if role.role != copy_role.REPLICA or is_other_replica:
            raise copy_role.refusal(self.topic_path, role, copy_role.JOIN)

    # --- settings ------------------------------------------------------------------------------------

    def settings(self) -> Settings:
        """The stored settings. `CorruptLogError` if the file is missing or damaged, or is of another topic.

        `LogMovedError` if the share's directory is gone, with its topic.
        """
        path = os.path.join(self.path, _SETTINGS)
        found = checked_json.read(self.files, path, _MOST_BYTES, self._parse, _WHAT)
        if found is None:
            if not self.files.exists(self.path):
                raise LogMovedError(self.path, "was moved or removed")
            raise CorruptLogError(path, 0, "no file", _WHAT)
        return found

    def _parse(self, facts: dict[str, Any]) -> Settings:
        if facts["log_id"] != self.log_id.hex():
            raise ValueError(f"log {facts['log_id']}, and the topic is log {self.log_id.hex()}")
        max_attempts, window, max_in_hand = (int(facts[name]) for name in Settings._fields[:3])
        dead_letter = facts.get("dead_letter")
        if dead_letter is not None:
            dead_letter = os.path.normpath(os.path.join(os.path.realpath(self.topic_path), str(dead_letter)))
        return Settings(max_attempts, window, max_in_hand, dead_letter, str(facts.get("order", NO_ORDER)))

    def alter(self, given: Mapping[str, Any]) -> Settings:
        """Change the stored settings, and return them. Of two processes that do so at a time, both count. Synced."""
        with Directory.open(self.files, self.path) as directory:
            directory.lock_for_a_moment("whoever changes the settings of the share", advice="try again")
            settings = settings_of(given, self.settings())
            self._check_dead_letters(settings)
            directory.replace(_SETTINGS, self._encode(settings), self.permissions)
        return settings

    def follow_settings(self, acks: AckLog) -> None:
        """Bring the file of a partition to the stored settings. It may differ if who has altered them has died.

        The settings are stored before, and read again after each seal: of several alterations the last one counts.
        """
        while not (settings := self.settings()).is_told_by(acks.state.settings):
            low, has_letters = pair(settings.max_attempts, settings.window), int(settings.dead_letter is not None)
            acks.seal(ALTERED, moment=low, offset=settings.max_in_hand, token=has_letters)
            acks.look()

    def _encode(self, settings: Settings) -> bytes:
        facts: dict[str, Any] = {"log_id": self.log_id.hex(), **settings._asdict()}
        if settings.order == NO_ORDER:
            del facts["order"]
        if settings.dead_letter is None:
            del facts["dead_letter"]
        else:  # relative, so that both topics can be moved together
            facts["dead_letter"] = os.path.relpath(settings.dead_letter, os.path.realpath(self.topic_path))
        return checked_json.seal(facts)

    def check_same(self, given: Mapping[str, Any]) -> None:
        """`ShareMismatchError` if a given setting differs from the stored one."""
        stored = self.settings()
        for name, value in given.items():
            if _stored(name, value) != getattr(stored, name):
                raise ShareMismatchError(self.name, name, value, getattr(stored, name) or None)

    def _check_dead_letters(self, settings: Settings) -> None:
        """`NotLeaderError` if a record could not be settled and its dead letter written in one transaction."""
        if settings.dead_letter is not None:
            copy_role.check(self.files, self.topic_path, copy_role.TRANSACT)
            with suppress(OSError):  # of a place that cannot be looked at now, each dead letter tells
                copy_role.check(self.files, settings.dead_letter, copy_role.TRANSACT)

    # --- making --------------------------------------------------------------------------------------

    def starts(self, start: StartLike, logs: Mapping[int, Log], *, others: str | None = "begin") -> dict[int, int]:
        """The offset of a start in each partition. Partitions missing from a mapping get `others`, or are omitted."""
        starts = starts_of(start, logs, now_us=self.clock(), others=others)
        return {partition: resolve(logs[partition], each) for partition, each in starts.items()}

    def make(self, start: StartLike, given: Mapping[str, Any]) -> None:
        """Make the share if there is none; otherwise its settings need to be the given ones. Synced."""
        self.check_role()
        files, parent = self.files, os.path.join(self.topic_path, SHARES)
        if not self.exists():
            starts, settings = self.starts(start, self.find_logs()), settings_of(given, Settings())
            self._check_dead_letters(settings)
            put_whole(
                files, self.path, self.permissions, lambda aside: self._build(aside, starts, settings), self.exists
            )  # fmt: skip
        make_subdirectory(files, self.members, self.permissions)  # a copy of the share may lack it
        files.sync_directory(self.topic_path)
        files.sync_directory(parent)
        self.check_same(given)
        self._check_dead_letters(self.settings())  # the topic may have got replicas since the share was made

    def _build(self, aside: str, starts: Mapping[int, int], settings: Settings) -> None:
        files = self.files
        files.make_directory(aside, self.permissions)
        files.make_directory(os.path.join(aside, _MEMBERS), self.permissions)
        for partition, offset in starts.items():
            self._make_partition(partition_directory(aside, partition), partition, offset, settings)
        files.write_new(os.path.join(aside, _SETTINGS), self._encode(settings), self.permissions)
        files.sync_directory(aside)

    def make_added(self, partition: int) -> None:
        """Make the file of a partition that was added to the topic, unless another member has done so. Synced."""
        path = self.of_partition(partition)
        if not self.files.exists(path):
            aside = new_aside(self.files, path)
            start = self.find_logs()[partition].mark().log_start_offset
            settings = self.settings()
            put_in_place(self.files, aside, path, lambda: self._make_partition(aside, partition, start, settings))
            self.files.sync_directory(self.path)

    def _make_partition(self, path: str, partition: int, offset: int, settings: Settings) -> None:
        self.files.make_directory(path, self.permissions)
        history, moment = known_history(self.find_logs()[partition], offset), self.clock.moment()
        checkpoint = Checkpoint(1, offset, history, settings, Counts(), moment, ())
        with Directory.open(self.files, path) as directory:
            link(directory, self.place(partition), checkpoint, self.permissions)

    # --- partitions ----------------------------------------------------------------------------------

    def place(self, partition: int) -> Place:
        """The share and the partition, by which the checksums of the file are salted."""
        return Place(self.log_id, partition, self.name)

    def check_history(self, acks: AckLog) -> None:
        """`ShareReplacedError` if the partition's log is not the one of which the share has settled records."""
        partition = acks.place.partition
        log, begun = self.find_logs()[partition], max(acks.checkpoint.fresh, acks.state.fresh)
        if begun > (end := log.mark().flushed_end):
            raise ShareReplacedError(self.name, partition, begun, f"the log ends at offset {end}")
        if (differs := difference(log, acks.known_places())) is not None:
            raise ShareReplacedError(self.name, partition, *differs)

    def acks(self, partition: int, me: int) -> AckLog:
        """The file of a partition, open. With `me` 0 it only looks."""
        return AckLog(
            self.files, self.of_partition(partition), self.place(partition), me, self.clock, self.permissions,
            lambda fresh, places: next_history(self.find_logs()[partition], fresh, places),
        )  # fmt: skip

    def partitions(self) -> list[int]:
        """The partitions for which the share has a file."""
        return [number for number in sorted(self.find_logs()) if self.files.exists(self.of_partition(number))]

    def remove(self) -> None:
        """Remove the share by one rename, and then its files."""
        aside = new_aside(self.files, self.path)
        self.files.move_directory(self.path, aside)
        self.files.sync_directory(os.path.dirname(self.path))
        self.files.remove_tree(aside)
