"""Access: a topic's access to one partition: the log for reading, and the writer, which the first call for it makes.

Invariant: at most one writer is made for a partition, and none after the topic is closed. The writer's next call
raises an error of the background.

Threads: safe for all; the writer is made under `Handles.opening`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from ..config.policies import TopicConfig, microseconds
from ..errors import LockedError, LogClosedError, ReadOnlyError
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

__all__ = ["Access", "Replicated"]


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
