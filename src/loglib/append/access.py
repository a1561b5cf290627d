"""Access: a topic's access to one partition: the log for reading, and the writer, which the first call for it makes.

Invariant: at most one writer is made for a partition, and none after the topic is closed. The writer's next call
raises an error of the background.

Threads: safe for all; the writer is made under `Handles.opening`.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ..config.policies import TopicConfig
from ..config.quantities import microseconds
from ..errors import LockedError, LogClosedError, LogMovedError, ReadOnlyError, TooManyFilesError, is_out_of_descriptors
from ..log import copy_role, topic_file
from ..log.log import Log
from ..segment import Identity
from ..system import lock
from ..system.directory import Directory
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .flusher import from_background
from .handles import Handles
from .publication import Copies
from .retention_pass import RetentionRunner
from .section_writer import SectionWriter
from .writer import WRITER_DESCRIPTORS

__all__ = ["Access", "Replicated", "access_of", "check_still", "own_all"]


class Replicated(Protocol):
    """A topic's other directories, when all of them are locked and hold the same (copies/assemble.py)."""

    def first_lock(self, number: int) -> lock.Lock:
        """The lock of a partition in the topic's own directory. The caller has it from now on."""

    def copies(self, number: int) -> Copies:
        """The partition in the other directories."""


class Access(NotCopyable):
    """The log of a partition, and its writer if this process has one."""

    def __init__(
        self,
        files: Files,
        directory: str,
        identity: Identity,
        config: TopicConfig,
        *,
        writable: bool,
        clock: Callable[[], int],
        handles: Handles,
        retention: RetentionRunner,
        check: Callable[[], None] | None = None,
        on_hold: Callable[[SectionWriter], None] | None = None,
        make_log: Callable[[Files, str, Identity], Log] = Log,
        replicated: Replicated | None = None,
    ) -> None:
        self.id = identity.partition
        self.directory = directory
        self.config = config
        self.log = make_log(files, directory, identity)
        self.clock = clock
        self.handles = handles
        self.retention = retention
        self._files = files
        self._writable = writable
        self._check = check  # raises if this topic must not be written any more; called before the lock and under it
        self._on_hold = on_hold  # called for a writer that finds a transaction that is not known to be done
        self._replicated = replicated
        self._writer: SectionWriter | None = None
        retention.add(self.log)

    # --- the writer ------------------------------------------------------------------------------

    @property
    def open_writer(self) -> SectionWriter | None:
        """The writer, if this process has one."""
        return self._writer

    def writer(self, *, wait: bool = True) -> SectionWriter:
        """The writer. The first call takes its lock; `LockedError` if another process has the lock.

        Unless `wait` is False, it waits for a process that has the lock only to run retention.
        """
        if self._writer is not None:
            return self._writer
        if not self._writable:
            raise ReadOnlyError(self.directory)
        if self._check is not None:  # else all writers are made when the topic is opened
            self.handles.check_outside()
        with self.handles.opening:
            self.handles.check_open()
            if self._writer is None:  # another thread may have made it before this one had the lock
                if self._check is not None:
                    self._check()  # a topic that must not be written gets no lock file either
                writer = self._make_writer(wait=wait)
                try:
                    if self._check is not None:
                        self._check()
                    if writer.disk.mark.held_txn and self._on_hold is not None:
                        self._on_hold(writer)
                except BaseException:
                    writer.close()
                    raise
                writer.on_roll = lambda: self._in_background(lambda: self.retention.run(self.id, rolled=True))
                self.retention.own(self.id, writer)
                self.handles.add_writer(writer)
                self.log.writer = self._writer = writer
            return self._writer

    def _make_writer(self, *, wait: bool) -> SectionWriter:
        """Make the writer. If another process holds the partition only to run retention, wait for it (decision 21)."""
        arguments = (self._files, self.directory, self.log.identity, self.config)
        if (others := self._replicated) is not None:
            held, copies = others.first_lock(self.id), others.copies(self.id)
            return SectionWriter(*arguments, index=self.log.index, clock=self.clock, held=held, copies=copies)
        try:
            return SectionWriter(*arguments, index=self.log.index, clock=self.clock)
        except LockedError as error:
            if not wait:
                raise
            holder = error.holder
        with Directory.open(self._files, os.path.dirname(self.directory)) as topic:
            topic.lock_for_a_moment(holder, advice="try again; it drops segments of partitions that nobody holds")
            return SectionWriter(*arguments, index=self.log.index, clock=self.clock)

    def use(self, config: TopicConfig) -> None:
        """Use these policies from now on."""
        with self.handles.opening:  # without the lock, a writer that is just being made would miss them
            self.config = config
            if self._writer is not None:
                self._writer.use(config)

    def close(self) -> None:
        """Flush, release the lock and close the files."""
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            self.log.close()

    # --- in the background -----------------------------------------------------------------------

    def keep_house(self) -> None:
        """Do the housekeeping that is due by the clock: roll an old segment, then run retention."""
        if self._writer is not None:
            self._in_background(self._roll_if_old)
            self._in_background(lambda: self.retention.run(self.id))

    def _roll_if_old(self) -> None:
        age = self.config.segment_age
        if age is not None:
            self.writer().roll(older_than_us=microseconds(age))

    def _in_background(self, action: Callable[[], object]) -> None:
        try:
            action()
        except LogClosedError:
            return
        except Exception as error:  # noqa: BLE001  Raised by the writer's next call.
            self.writer().raise_soon(from_background(error, self.directory, "housekeeping"))


def access_of(path: str, log_id: bytes, donors: Iterable[str], number: int, **common: Any) -> Access:
    """The access to a partition of the topic at `path`. It refers to no topic, which would keep itself open."""
    directory, identity = topic_file.partition_directory(path, number), Identity.of(log_id, number)
    access = Access(directory=directory, identity=identity, **common)
    access.log.donors = tuple([topic_file.partition_directory(each, number) for each in donors])
    return access


def check_still(files: Files, path: str, partitions: int) -> None:
    """Refuse to write if a copy has replaced the topic since it was opened, or with an old number of partitions.

    Keys would go to other partitions than with other writers.
    """
    copy_role.check_leader(files, path)
    described = topic_file.read(files, path)
    if described is not None and described[1].partitions != partitions:
        raise LogMovedError(path, f"has other than the {partitions} partitions that it was opened with")


def own_all(accesses: Sequence[Access], path: str) -> None:
    """Take the locks of all partitions of the topic at `path`."""
    try:
        for access in accesses:
            access.writer()
    except OSError as error:
        if not is_out_of_descriptors(error):
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        needed = len(accesses) * WRITER_DESCRIPTORS + 1  # a roll needs one more for a moment
        raise TooManyFilesError(path, error, needed, limit) from error
