"""Mirror: a copy of a topic that follows it, byte for byte, so that offsets and committed offsets hold on the copy.

Invariant: everything that the copy shows was flushed at the source, in the same order, at the same offsets. One pass
brings all partitions to one moment of the source. A pass can be cut at any point, and the next one continues there.

The order of a pass: note where the groups' commits end, then where the data ends; copy the data, and sync it; publish
the data's marks; copy and publish the commits. So a commit of the copy is never later than its data. If the pass brings
a transaction to several partitions, it is held in all of them, and the marks are written into one file before they are
published: either that file is there, and readers and the next opening take all of them from it, or none was.

Threads: `close` and `lag` from any thread; the rest from one at a time.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple, TypeVar

from ..config.arguments import topic_path
from ..errors import LogClosedError, LogError, NotLeaderError, OffsetOutOfRangeError
from ..format.watermark import Mark
from ..log import copy_role, gaps, store_pointer, topic_file
from ..log.ages import NAME as CLOCK
from ..log.pending_marks import forget_marks, read_marks, write_marks
from ..segment import Identity
from ..system.clock import SYSTEM, monotonic
from ..system.directory import Directory
from ..system.failures import refusing_full_disk
from ..system.files import REAL, Files
from ..system.not_copyable import NotCopyable
from ..system.reentry import enter
from .chain import check_no_circle, is_same
from .commit_copier import CommitCopier
from .local_source import LocalTopicSource
from .log_copier import LogCopier
from .rate_limit import RateLimit
from .remote_source import TIMEOUT_S, RemoteTopic
from .sources import TopicSource

Result = TypeVar("Result")

logger = logging.getLogger("loglib")

_LOOK_S = 1.0  # how often to look for changes of groups and policies, and for changes that were not reported
_MANY = 64  # partitions: with more, files are closed after each pass


class MirrorLag(NamedTuple):
    """The lag of a mirror."""

    bytes: int  # of the log that readers of the source see and readers of the copy do not
    seconds: float  # since the copy was last known to be up to the source


class MirrorReport(NamedTuple):
    """The result of a mirror."""

    path: str
    ends: tuple[int, ...]  # of each partition: readers of the copy see offsets below it
    copied_bytes: int  # of the log
    set_aside: tuple[str, ...]  # files that keep records which the copy had and the source does not have


def mirror(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    follow: bool = False,
    on_divergence: Literal["raise", "restart"] = "raise",
    bytes_per_second: float | None = None,
    demote: bool = False,
) -> MirrorReport:
    """Copy the topic in the directory `source` to the directory `to`, or bring an earlier copy up to it.

    With `follow` it runs until the program is interrupted (`KeyboardInterrupt`). See `Mirror` for the rest.
    """
    with Mirror(source, to, on_divergence=on_divergence, bytes_per_second=bytes_per_second, demote=demote) as made:
        return _run(made, follow=follow)


def receive_mirror(
    stream: Any,
    to: str | os.PathLike[str],
    *,
    follow: bool = False,
    on_divergence: Literal["raise", "restart"] = "raise",
    bytes_per_second: float | None = None,
    demote: bool = False,
    timeout: float = TIMEOUT_S,
) -> MirrorReport:
    """Copy a topic from another host to the directory `to`, or bring an earlier copy up to it: `mirror` over a stream.

    At the other end of the stream `loglib.copies.serve_mirror` runs. See `Mirror.over` for the rest.
    """
    with Mirror.over(
        stream, to, on_divergence=on_divergence, bytes_per_second=bytes_per_second, demote=demote, timeout=timeout
    ) as made:  # fmt: skip
        return _run(made, follow=follow)


def _run(made: Mirror, *, follow: bool) -> MirrorReport:
    if follow:
        made.follow()
    else:
        made.copy()
    return made.report()


class Mirror(NotCopyable):
    """A copy of a topic that follows it: `copy` brings it up to the topic once, and `follow` keeps it there.

    The copy has the same segments, byte for byte, so offsets are the same, and so are the groups' committed offsets. It
    opens with mode="r". `promote` makes it a topic that is written. Each batch is checked before it is copied:
    damage at the source stops the mirror with `CorruptLogError`, and does not get into the copy. Segments that the
    source drops by its retention are dropped in the copy, too.

    `on_divergence` says what to do if the source has dropped records that the copy does not have yet: "raise" raises
    `OffsetOutOfRangeError`, and "restart" lets the copy begin again where the source begins. `bytes_per_second` limits
    how fast it copies.

    After a forced promotion there are two topics of one history. With `demote`, the one at `to` gives up: it becomes a
    mirror of `source`, and records that it alone has are set aside. No process may have it open for writing.

    If the source has lost records that the copy has (its power failed, or a backup took its place), these records are
    set aside into files `*.diverged-*` of the copy, with a warning, and are in `report().set_aside`.

    Raises `FileNotFoundError` if there is no topic at `source`, `NotLeaderError` if at `to` there is a topic that is
    not a copy of it, `LockedError` if another process has the copy, and `CorruptLogError` if the copy is damaged.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | RemoteTopic,
        to: str | os.PathLike[str],
        *,
        on_divergence: Literal["raise", "restart"] = "raise",
        bytes_per_second: float | None = None,
        demote: bool = False,
        files: Files = REAL,
    ) -> None:
        origin: TopicSource = source if isinstance(source, RemoteTopic) else LocalTopicSource(files, topic_path(source))
        self._files = files
        self._origin = origin
        self._copiers: list[LogCopier] = []
        self._copied_bytes = 0
        self._progress: Callable[[int, int], object] | None = None  # of the present call of `copy`
        self._advanced = (0, 0)  # the bytes that this call has copied, and has to copy
        self._caught_up_at = monotonic()
        self._closing = threading.Event()
        self._in_pass = threading.RLock()
        self._described = b""
        with ExitStack() as opened:
            opened.callback(origin.close)
            self.source, self.path = origin.place, topic_path(to)
            self._store_pointer = store_pointer.content_of(files, self.path)
            if on_divergence not in ("raise", "restart"):
                raise ValueError(f"on_divergence is 'raise' or 'restart', not {on_divergence!r}")
            self._restart = on_divergence == "restart"
            self._limit = RateLimit(bytes_per_second, self._closing)
            self._log_id, (_, self._config) = origin.log_id, origin.described()
            while not files.exists(self.path):
                self._make()
            check_no_circle(files, self.path, self.source)
            self._commits = CommitCopier(files, origin, self.path, self._log_id, self._config.permissions)
            before, role = self._check_copy(demote=demote)
            promised = read_marks(files, self.path, self._log_id)
            for number in range(self._config.partitions):
                opened.callback(self._open(number, promised.get(number)).close)
            forget_marks(files, self.path)
            origin.marks(range(len(self._copiers)))  # from here on `lag` is known
            if before != copy_role.MIRROR:  # it was a topic of its own; its locks are held now
                self._beside_retention(self._give_up)
                self._commits.adopt()
            if role is not None:
                role.take(files, self.path, self._config.permissions)
            opened.pop_all()

    @classmethod
    def over(
        cls,
        stream: Any,
        to: str | os.PathLike[str],
        *,
        on_divergence: Literal["raise", "restart"] = "raise",
        bytes_per_second: float | None = None,
        demote: bool = False,
        timeout: float = TIMEOUT_S,
        files: Files = REAL,
    ) -> Mirror:
        """A mirror of a topic on another host, over a stream at whose other end `loglib.copies.serve_mirror` runs.

        `stream` is a connected socket, or two files or descriptors: one to read and one to write. The caller closes
        it, and must not use it meanwhile. If it breaks, `copy` and `follow` raise `BrokenStreamError`: make another
        mirror over a new stream, and it continues where this one was. A source that neither sends nor takes a byte for
        `timeout` seconds is given up. The source gives up a mirror that is silent for its own timeout, so follow with
        the mirror, or close it when it has copied.
        """
        source = RemoteTopic(stream, timeout_s=timeout)
        how = {"on_divergence": on_divergence, "bytes_per_second": bytes_per_second, "demote": demote}
        return cls(source, to, files=files, **how)  # type: ignore[arg-type]

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Mirror of {self.source!r} in {self.path!r}>"

    # --- the copy as a directory -----------------------------------------------------------------------

    def _make(self) -> None:
        """Make the copy's directory, without partitions. Synced, with its name."""
        files, permissions = self._files, self._config.permissions
        aside = topic_file.new_topic_aside(files, self.path, permissions)

        def build() -> None:
            files.make_directory(aside, permissions)
            with Directory.open(files, aside) as made:
                self._as_mirror().write(made, permissions)

        if topic_file.put_in_place(files, aside, self.path, build):
            files.sync_directory(os.path.dirname(self.path))

    def _check_copy(self, *, demote: bool) -> tuple[str, copy_role.Role | None]:
        """Refuse a directory that is no mirror and no former topic. Returns its role, and the one to take, if any."""
        files, path = self._files, self.path
        role, itself = copy_role.read(files, path), is_same(files, path, self.source)
        if role is not None and role.role != copy_role.LEADER:
            if itself:
                raise LogError(f"{path} and {self.source} are one directory; mirror to a new directory")
            if role.role in copy_role.FOLLOW.roles and role.log_id == self._log_id:
                stays = role.role == copy_role.MIRROR and role.of == self.source
                return role.role, None if stays else self._as_mirror()
            what = f"a {role.role} of {role.of}" + " with another log id" * (role.log_id != self._log_id)
            raise LogError(f"{path} is {what}, and not a mirror of {self.source}; mirror to a new directory")
        described = topic_file.read(files, path)
        if described is None:
            raise LogError(f"{path} holds files but no copy; a mirror is made in a new directory")
        if not demote or described[0] != self._log_id or itself:
            raise NotLeaderError(path, "topic of its own, and no mirror", self.source)
        return copy_role.LEADER, self._as_mirror()

    def _as_mirror(self) -> copy_role.Role:
        return copy_role.Role(copy_role.MIRROR, self._log_id, self._files.random_bytes(8).hex(), self.source, SYSTEM())

    def _open(self, number: int, promised: Mark | None = None) -> LogCopier:
        with refusing_full_disk(self.path):
            copier = LogCopier(
                self._files,
                self._origin.log(number),
                topic_file.partition_directory(self.path, number),
                Identity.of(self._log_id, number),
                self._config.permissions,
                promised=promised,
            )
        self._copiers.append(copier)
        return copier

    def _carry_description(self) -> None:
        """Copy the policies, and make new partitions."""
        content, self._config = self._origin.described()
        if content == self._described:
            return
        own = topic_file.read(self._files, self.path)
        if own is not None and own[1].partitions > self._config.partitions:  # it would hide records of the copy
            raise LogError(
                f"{self.source} says that it has {self._config.partitions} partitions, and its copy {self.path} has "
                f"{own[1].partitions}; put the {topic_file.NAME} of the source back, or mirror to a new directory"
            )
        for number in range(len(self._copiers), self._config.partitions):
            self._open(number)
        with Directory.open(self._files, self.path) as directory:
            directory.sync()  # the names of the partitions
            for copier in self._copiers:
                copier.carry(CLOCK)
                copier.carry(gaps.NAME)
            directory.replace(topic_file.NAME, content, self._config.permissions)
        self._described = content

    def _carry_store_pointer(self) -> None:
        """Write the path of the source's transaction store into the copy: it gave the numbers in the copy's marks."""
        content = self._origin.store_pointer(self.path)
        if content is not None and content != self._store_pointer:
            with Directory.open(self._files, self.path) as directory:
                directory.replace(store_pointer.NAME, content, self._config.permissions)
            self._store_pointer = content

    # --- a pass ------------------------------------------------------------------------------------------

    def copy(self, *, progress: Callable[[int, int], object] | None = None) -> int:
        """Bring the copy up to the present end of the source; returns the bytes of log that were copied.

        `progress` is called after each piece with two numbers of bytes: those that this call has copied, and those that
        it has to copy.

        Raises the errors of `Mirror`, and `LogMovedError` if the source or the copy was moved or removed.
        """
        with enter(self._in_pass, self.path):
            self._check_open()
            self._carry_description()
            self._carry_store_pointer()
            commits = self._origin.groups()
            self._progress, self._advanced = progress, (0, 0)
            try:
                copied = self._copy(self._copiers)
            finally:
                self._progress = None
            self._commits.copy(commits)
            return copied

    def _copy(self, copiers: Iterable[LogCopier]) -> int:
        return self._beside_retention(lambda: self._pass(copiers))

    def _beside_retention(self, work: Callable[[], Result]) -> Result:
        """Do the work; with `on_divergence="restart"` again, if retention at the source was faster."""
        while True:
            try:
                with refusing_full_disk(self.path):
                    return work()
            except OffsetOutOfRangeError:
                if not self._restart:
                    raise

    def _give_up(self) -> None:
        """Set aside the records that only this directory has: all records of a mirror are those of its source."""
        marks = self._origin.marks(range(len(self._copiers)))
        for number, copier in enumerate(self._copiers):
            copier.give_up(marks[number], restart=self._restart)

    def _pass(self, copiers: Iterable[LogCopier]) -> int:
        marks = self._origin.marks([copier.copied.identity.partition for copier in copiers])
        if any(mark.applied_txn > self._copiers[number].copied.mark.applied_txn for number, mark in marks.items()):
            self._carry_store_pointer()
            copiers = self._copiers  # a transaction may be in partitions that were not asked for
            marks = self._origin.marks(range(len(self._copiers)))
        wanted = {copier: marks[copier.copied.identity.partition] for copier in copiers}
        wanted = {copier: mark for copier, mark in wanted.items() if not copier.is_ahead_of(mark)}
        if self._progress is not None:
            lag = sum(max(0, mark.flushed_end - each.copied.mark.flushed_end) for each, mark in wanted.items())
            self._advanced = (self._advanced[0], self._advanced[0] + lag)
        copied = sum([copier.advance(mark, self._pace, restart=self._restart) for copier, mark in wanted.items()])
        self._copied_bytes += copied
        together = self._write_pending_marks(wanted)
        for copier, mark in wanted.items():
            copier.publish(mark, twice=together)
        if together:
            forget_marks(self._files, self.path)
        for copier, mark in wanted.items():
            copier.retire(mark)
        self._caught_up_at = monotonic()
        if len(self._copiers) > _MANY:
            for copier in copiers:
                copier.release_files()
        return copied

    def _pace(self, size: int) -> None:
        """Wait as long as the limit says for this number of bytes."""
        self._limit.wait(size, self._origin.beat)
        self._check_open()
        if self._progress is not None:
            done, total = self._advanced
            self._advanced = (done + size, max(total, done + size))
            self._progress(*self._advanced)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise LogClosedError(f"the mirror {self.path} is closed; make another one")

    def _write_pending_marks(self, wanted: dict[LogCopier, Mark]) -> bool:
        """Write the marks that will be published, if they bring a transaction to more than one partition. Synced.

        Before the file is there readers see the transaction in no partition, and from then on in all of them.
        """
        news = [copier for copier, mark in wanted.items() if mark.applied_txn > copier.copied.mark.applied_txn]
        if len(news) < 2:
            return False
        for copier in news:
            copier.hold(wanted[copier])
        marks = {copier.copied.identity.partition: copier.next_mark(wanted[copier]) for copier in news}
        write_marks(self._files, self.path, self._log_id, marks, self._config.permissions)
        return True

    # --- following ---------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Keep the copy up to the source until `close` is called in another thread, or an interrupt.

        Waits without work while the source is idle. Raises the errors of `copy`.
        """
        try:
            full_at = 0.0
            while not self._closing.is_set():
                if monotonic() >= full_at:
                    self.copy()
                    pause_s = _LOOK_S * max(1, len(self._copiers) // _MANY)  # idle: 50 us a partition
                    full_at = monotonic() + pause_s
                if self._origin.watch():
                    full_at = 0.0  # look again: some logs are watched only from now on
                elif numbers := self._origin.wait_for_changes(full_at - monotonic()):
                    with enter(self._in_pass, self.path):
                        self._check_open()
                        self._copy([self._copiers[number] for number in numbers])
        except LogClosedError:  # by `close`, in mid-pass
            pass
        finally:
            self._origin.unwatch()

    def lag(self) -> MirrorLag:
        """The present lag of the copy."""
        bytes_behind, now = sum(copier.lag_bytes for copier in self._copiers), monotonic()
        known_at = self._caught_up_at if bytes_behind else self._origin.heard_at()
        return MirrorLag(bytes_behind, max(0.0, now - known_at))

    def report(self) -> MirrorReport:
        """The result up to now."""
        ends = tuple(copier.copied.mark.flushed_end for copier in self._copiers)
        aside = [each for copier in self._copiers for each in copier.set_aside]
        return MirrorReport(self.path, ends, self._copied_bytes, tuple(aside))

    def close(self) -> None:
        """End `follow`, and release the copy. Further calls do nothing."""
        self._closing.set()
        self._origin.wake()
        with enter(self._in_pass, self.path):
            copiers, self._copiers = self._copiers, []
            with ExitStack() as closing:
                closing.callback(self._origin.close)
                for copier in copiers:
                    closing.callback(copier.close)
