"""Live policies: the policies by which an open topic works. Any process may change them in `topic.json`.

Invariant: `config` is what `topic.json` had at the last look, with two exceptions: the number of partitions is that of
the opening, and a codec whose package is not installed here is not used. A change reaches all parts of the topic, also
if one of them raises.

    topic with a thread       the thread looks when the system reports a change of the topic's directory
                              (transactions/notifications.py), and once a minute
    topic without a thread    looks when it flushes, and before it drops segments
    topic for reading         looks when it is asked for its policies

A look is one `stat`. `topic.json` is read only if it is another file than at the last look, or if it was young then.

Threads: safe for all. `lock` is held while policies change; a look by another thread is then skipped, and whoever held
the lock asks for another one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..config.policies import FIXED, Policies, TopicConfig
from ..errors import ConfigConflictError, LogClosedError, LogError, LogMovedError, MissingCodecError
from ..format.codec import codec_id
from ..log import copy_role, topic_file
from ..system.clock import monotonic
from ..system.directory import Directory
from ..system.failures import together
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from ..system.process import importing, try_each
from ..system.reentry import is_mine
from .access import Access
from .losses import from_background
from .retention_pass import RetentionRunner
from .writer import Writer

if TYPE_CHECKING:
    from .background import Background

logger = logging.getLogger("loglib")

_YOUNG_S = 2.0  # FAT has the coarsest times
_LOOK_S = 0.2  # between two looks of a reader: a transaction asks for the policies once per record


@dataclass(eq=False, repr=False)
class LivePolicies(NotCopyable):
    """The policies of one open topic."""

    files: Files
    path: str
    log_id: bytes
    config: TopicConfig
    retention: RetentionRunner
    accesses: Callable[[], Sequence[Access]]
    listen: Callable[[], object]  # let `look_soon` be called when the topic's directory has changed
    seen: topic_file.Stamp | None  # the file at the last look, or before it was read at the opening; None: to be read
    may_change: bool  # False for a place of uploaded segments, whose content at opening is read
    background: Background = field(init=False)
    watched: bool = field(default=False, init=False)  # True after `listen`

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._warned = ""
        self._read_at = 0.0  # when a reader looked last

    def begin(self) -> None:
        """Begin the topic's thread, if a policy needs one, and let it look at changes."""
        self.background.begin(self.config)
        if self.background.has_thread and self.files.real and not self.watched:
            self.listen()
            self.watched = True

    def store(self, policies: Policies, writers: Iterable[Writer], *, is_member: bool) -> TopicConfig:
        """Write changed policies to `topic.json`. Returns all policies. `is_member`: of a topic with replicas."""
        with Directory.open(self.files, self.path) as directory:
            if not all(writer.is_in(directory) for writer in writers):
                raise LogMovedError(self.path, "has other partitions than those that were locked")
            directory.lock_for_a_moment("whoever changes its policies", advice="try again")
            if not is_member:
                copy_role.check_leader(self.files, self.path)
            # Another process may have changed it. If another topic is there, perhaps no writer has noticed it.
            before = topic_file.read_own(self.files, self.path, self.log_id) or self.config
            config = before.changed(policies)
            topic_file.write(directory, self.log_id, config)
        for name in policies:
            logger.info("%s: %s is %r now, and was %r", self.path, name, getattr(config, name), getattr(before, name))
        return config

    # --- looks -----------------------------------------------------------------------------------

    def look_soon(self) -> None:
        """Let the topic's thread look, if another file has the name. Waits for nothing."""
        if topic_file.stamp(self.files, self.path) != self.seen:
            self.background.look_soon()

    def look(self) -> bool:
        """Use the policies in `topic.json`. True if they have changed. Errors of writers reach their next callers."""
        if is_mine(self.lock) or not self.lock.acquire(blocking=False):
            return False
        try:
            found = self._found()
            if found is not None:
                found = self._followed(found)
            if found is None or found == self.config:
                return False
            for name, former, value in self.config.differing(found):
                now, before = _shown(value), _shown(former)
                logger.info("%s: another process changed %s to %s; it was %s", self.path, name, now, before)
            for access, error in self._use(found):
                if not isinstance(error, LogClosedError) and access.open_writer is not None:
                    access.open_writer.raise_soon(from_background(error, access.directory, "changing policies"))
            self.begin()
            self.background.keep_house_soon()  # on a full disk, a smaller limit of retention must not wait for a minute
            return True
        finally:
            self.lock.release()

    def read(self) -> TopicConfig:
        """The policies of a topic for reading, which are looked at every 0.2 s. Takes no lock, for forked children."""
        now = monotonic()
        if self.may_change and not self._read_at <= now < self._read_at + _LOOK_S:
            self._read_at = now
            found = self._found()
            if found is not None and found != self.config:
                self.config = found
                self.retention.assign(found)
        return self.config

    def use(self, config: TopicConfig) -> None:
        """Use these policies, which the caller has stored. It has the lock. Raises the errors of all writers."""
        failed = self._use(replace(config, partitions=self.config.partitions))
        self.begin()
        if failed:
            raise together([error for _, error in failed])

    # --- inside ----------------------------------------------------------------------------------

    def _use(self, config: TopicConfig) -> list[tuple[Access, Exception]]:
        """Give the policies to all parts of the topic; returns the partitions that raise."""
        self.config = config
        self.retention.use(config)  # first: on a full disk the writers may raise, and retention makes room
        failed = try_each(self.accesses(), lambda access: access.use(config))
        self.background.use(config)
        return failed

    def _found(self) -> TopicConfig | None:
        """The policies of the file, if it is another one than at the last look, and can be read."""
        stamp = topic_file.stamp(self.files, self.path)
        if stamp is None or stamp == self.seen:
            return None
        is_young = abs(time.time() - stamp.modified_s) < _YOUNG_S
        self.seen = None if is_young else stamp
        try:
            described = topic_file.read(self.files, self.path)
        except (LogError, OSError) as error:
            self._warn(f"{self.path}: changed policies cannot be read, and the former stay in use: {error}")
            return None
        if described is None or described[0] != self.log_id:  # deleted or replaced: the writers find that
            return None
        return replace(described[1], partitions=self.config.partitions)

    def _followed(self, config: TopicConfig) -> TopicConfig:
        """The part of these policies that this process can follow."""
        try:
            with importing:  # in a thread of a process that may fork meanwhile
                codec_id(config.compression)
        except MissingCodecError as error:
            former = self.config.compression
            self._warn(f"{self.path}: the compression of new batches is still {former!r}: {error}")
            return replace(config, compression=former)
        return config

    def _warn(self, text: str) -> None:
        """Log a warning, unless it was also the last one."""
        if text != self._warned:
            self._warned = text
            logger.warning("%s", text)


def to_change(
    path: str, stored: TopicConfig, given: Mapping[str, Any], *, mode: str, alter: bool
) -> dict[str, Any]:  # fmt: skip
    """The policies given at opening that replace stored ones: with `alter`, those that differ.

    Without it none does, and a warning names each one that differs. `ConfigConflictError` for one that cannot change,
    and for any in a topic that is opened for reading.
    """
    changed = stored.differences(given)
    for name, value in changed.items():
        if name in FIXED or mode == "r":
            raise ConfigConflictError(path, name, value, getattr(stored, name), fixed=name in FIXED)
    if alter:
        return changed
    for name, kept, ignored in stored.differing(stored.changed(changed)):
        _warn_once(
            f"{path}: {name} is {_shown(kept)} in the topic; {_shown(ignored)}, given where it is opened, is ignored. "
            "`loglib alter` changes the topic, or open it with alter=True"
        )
    return {}


def _shown(value: object) -> str:
    return str(value) if isinstance(value, timedelta) else repr(value)


@lru_cache(maxsize=1024)
def _warn_once(text: str) -> None:
    """Log a warning, once per process: some programs open a topic for each of their jobs."""
    logger.warning("%s", text)
