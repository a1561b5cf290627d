"""Access: a topic's access to one partition: the log for reading, and the writer, which the first call for it makes.

Invariant: at most one writer is made for a partition, and none after the topic is closed. The writer's next call
raises an error of the background.

Threads: safe for all; the writer is made under `Handles.opening`.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..config.policies import TopicConfig
from ..config.quantities import microseconds
from ..errors import LockedError, LogClosedError, LogMovedError, ReadOnlyError, TooManyFilesError
from ..log import copy_role, topic_file
from ..log.log import Log
from ..segment import Identity
from ..system import lock
from ..system.directory import Directory
from ..system.failures import is_out_of_descriptors
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from ..system.reentry import enter
from .handles import Handles
from .losses import from_background
from .publication import Copies
from .retention_pass import RetentionRunner
from .section_writer import SectionWriter
from .writer import WRITER_DESCRIPTORS


class Replicated(Protocol):
    """A topic's other directories, when all of them are locked and hold the same (copies/assemble.py)."""

    def first_lock(self, number: int) -> lock.Lock:
        """The lock of a partition in the topic's own directory. The caller has it from now on."""

    def copies(self, number: int) -> Copies:
        """The partition in the other directories."""


@dataclass(eq=False, repr=False)
class Access(NotCopyable):
    """The log of a partition, and its writer if this process has one."""

    files: Files
    directory: str
    identity: Identity
    config: TopicConfig
    writable: bool
    clock: Callable[[], int]
    handles: Handles
    retention: RetentionRunner
    check: Callable[[], None] | None = None  # raises if the topic must not be written; before the lock and under it
    on_hold: Callable[[SectionWriter], None] | None = None  # for a writer with a transaction not known to be done
    make_log: Callable[[Files, str, Identity], Log] = Log
    replicated: Replicated | None = None
    on_foreign_hold: Callable[[], None] | None = None  # another process has left a transaction in a shared partition
    open_writer: SectionWriter | None = field(default=None, init=False)  # the writer, if this process has one

    def __post_init__(self) -> None:
        self.id = self.identity.partition
        self._checked: tuple[topic_file.Stamp | None, ...] = ()  # of the topic's description at the last check
        self._waiting = threading.RLock()  # held by the thread that makes the writer, also while it waits for the lock
        self._is_awaited = False  # whether it does
        self.log = self.make_log(self.files, self.directory, self.identity)
        self.retention.add(self.log)

    # --- the writer ------------------------------------------------------------------------------

    def writer(self, *, wait_s: float | None = None, says_who: bool = True) -> SectionWriter:
        """The writer. The first call takes its lock; `LockedError` if another process has the lock.

        It waits up to `wait_s` seconds for a process that shares the partition; by default as long as appends wait. It
        always waits for one that has the partition only to run retention. `says_who`: as for `TurnWriter.held`.
        """
        if self.open_writer is not None:
            return self.open_writer
        if not self.writable:
            raise ReadOnlyError(self.directory)
        if self.check is not None:  # else all writers are made when the topic is opened
            self.handles.check_outside()
            self.check()  # a topic that must not be written gets no lock file either
        if wait_s == 0 and self._is_awaited:  # whoever does not wait does not wait for that thread either
            with Directory.open(self.files, self.directory) as place:
                raise lock.refusal(place, says_who=says_who)
        with enter(self._waiting, "the topic"):
            held, writer = self._awaited(wait_s, says_who=says_who), None
            try:
                writer = self._opened(held)
            finally:
                if held is not None and (writer is None or not writer.has(held)):
                    held.release()
                    assert self.handles.turns is not None
                    self.handles.turns.given_up(held.directory)
            return writer

    def _awaited(self, wait_s: float | None, *, says_who: bool) -> lock.Lock | None:
        """The lock of a shared partition, taken outside of `opening`: other partitions can be opened meanwhile."""
        self.handles.check_open()
        if (turns := self.handles.turns) is None or self.open_writer is not None:
            return None
        wait_s = turns.wait_s if wait_s is None else wait_s
        places: list[Directory] = []

        def take(place: Directory) -> bool:
            places.append(place)
            return turns.take(place, wait_s=wait_s, is_over=lambda: self.handles.closed is not None)

        try:
            self._is_awaited = wait_s > 0
            return lock.acquire(
                self.files, self.directory, self.config.permissions, take=take, wait_s=wait_s, says_who=says_who
            )
        except LockedError:
            self.handles.check_open()  # closing has ended the wait
            raise
        except BaseException:  # perhaps after it was taken: without this, others would wait for this process's turn
            for place in places:
                turns.given_up(place)
            raise
        finally:
            self._is_awaited = False

    def _check_again(self) -> None:
        """`check`, if the topic's description has changed while this process did not have the partition."""
        topic_path = os.path.dirname(self.directory)
        found = tuple([topic_file.stamp(self.files, topic_path, name) for name in (topic_file.NAME, copy_role.NAME)])
        if found != self._checked and self.check is not None:
            self.check()
            self._checked = found

    def _opened(self, held: lock.Lock | None) -> SectionWriter:
        with self.handles.opening:
            self.handles.check_open()
            if self.open_writer is None:  # another thread may have made it before this one had the lock
                writer = self._make_writer(held)
                try:
                    if self.check is not None:
                        self.check()
                    if writer.disk.mark.held_txn and self.on_hold is not None:
                        self.on_hold(writer)
                except BaseException:
                    writer.close()
                    raise
                writer.on_roll = lambda: self._in_background(lambda: self._retain(rolled=True))
                self.retention.own(self.id, writer)
                self.handles.add_writer(writer)
                if held is None:  # else other processes publish, too, and readers look at the watermark
                    self.log.writer = writer
                self.open_writer = writer
                if held is not None and writer.disk.mark.held_txn and self.on_foreign_hold is not None:
                    self.on_foreign_hold()  # `on_hold` has waited for nobody
            return self.open_writer

    def _make_writer(self, held: lock.Lock | None) -> SectionWriter:
        """Make the writer. If another process holds the partition only to run retention, wait for it (decision 21)."""
        arguments = (self.files, self.directory, self.identity, self.config)
        if held is not None:
            turns = self.handles.turns
            writer = SectionWriter(*arguments, index=self.log.index, clock=self.clock, held=held, turns=turns)
            writer.on_hold, writer.check = self.on_foreign_hold, self._check_again
            return writer
        if (others := self.replicated) is not None:
            held, copies = others.first_lock(self.id), others.copies(self.id)
            return SectionWriter(*arguments, index=self.log.index, clock=self.clock, held=held, copies=copies)
        try:
            return SectionWriter(*arguments, index=self.log.index, clock=self.clock)
        except LockedError as error:
            holder = error.holder
        with Directory.open(self.files, os.path.dirname(self.directory)) as topic:
            topic.lock_for_a_moment(holder, advice="try again; it drops segments of partitions that nobody holds")
            return SectionWriter(*arguments, index=self.log.index, clock=self.clock)

    def use(self, config: TopicConfig) -> None:
        """Use these policies from now on."""
        with self.handles.opening:  # without the lock, a writer that is just being made would miss them
            self.config = config
            if self.open_writer is not None:
                self.open_writer.use(config)

    def close(self) -> None:
        """Flush, release the lock and close the files."""
        try:
            if self.open_writer is not None:
                self.open_writer.close()
        finally:
            self.log.close()

    # --- in the background -----------------------------------------------------------------------

    def keep_house(self) -> None:
        """Do the housekeeping that is due by the clock: roll an old segment, then run retention."""
        if self.open_writer is not None:
            self._in_background(self._roll_if_old)
            self._in_background(lambda: self._retain(rolled=False))

    def _retain(self, *, rolled: bool) -> None:
        with self.writer().held(wait_s=0.0, says_who=False):
            self.retention.run(self.id, rolled=rolled)

    def _roll_if_old(self) -> None:
        age = self.config.segment_age
        if age is not None:
            with self.writer().held(wait_s=0.0, says_who=False):
                self.writer().roll(older_than_us=microseconds(age))

    def _in_background(self, action: Callable[[], object]) -> None:
        try:
            action()
        except LogClosedError:
            return
        except Exception as error:  # noqa: BLE001  Raised by the writer's next call.
            if isinstance(error, LockedError) and self.handles.turns is not None:
                return  # the process that has the partition does it
            self.writer().raise_soon(from_background(error, self.directory, "housekeeping"))


def access_of(path: str, log_id: bytes, donors: Iterable[str], number: int, **common: Any) -> Access:
    """The access to a partition of the topic at `path`. It refers to no topic, which would keep itself open."""
    directory, identity = topic_file.partition_directory(path, number), Identity.of(log_id, number)
    access = Access(directory=directory, identity=identity, **common)
    access.log.donors = tuple([topic_file.partition_directory(each, number) for each in donors])
    return access


def check_still(files: Files, path: str, log_id: bytes, partitions: int) -> None:
    """Refuse to write if a copy or another topic is there since it was opened, or with an old number of partitions.

    Keys would go to other partitions than with other writers.
    """
    copy_role.check_leader(files, path)
    config = topic_file.read_own(files, path, log_id)
    if config is not None and config.partitions != partitions:
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
