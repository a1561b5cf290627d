"""Apply: appends the records of committed transactions to the logs, in the order of their numbers.

Invariant: only committed manifests are applied, each section once (append/section_writer.py). A transaction is done,
and so visible, when all its sections, commits of groups and records of shares are applied and durable. The process that
applies may die at any instant, and another process continues.

    lock the store          one process applies at a time, for all others that wait
    for each pending number, in order:
        each partition      through a writer of this process, or one made for it; or its owner does it,
                            woken by a notification
        each group          its commits are appended; appending them again changes nothing
        each share          its records are settled; settling them again changes nothing
        done                the instant of visibility
        release             the writers end their holds

A number that must wait for an owner that does not answer holds up only the later numbers of its partitions.

Who waits for a partition that processes share has no other one meanwhile. Otherwise two processes could wait for each
other. So the process's own partitions come first, and the writers that were made for others are closed before it waits,
for such a partition or for an owner.

Threads: an `Applier` belongs to one thread. Any number may exist.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import cache, partial

from ..append.section_writer import Piece, SectionWriter, apply_section
from ..append.tail import Txn
from ..config.policies import TopicConfig
from ..errors import CommitPendingError, CorruptLogError, LockedError, LogClosedError, LogError
from ..format.header import HEADER_BYTES, Header
from ..format.watermark import NAME as WATERMARK
from ..format.watermark import Mark, WatermarkReader
from ..groups.commit_log import Entries
from ..groups.directory import GROUPS
from ..groups.offsets import Offsets
from ..jobs.ack_log import Pin
from ..log import catalog, copy_role, topic_file
from ..log.index import SegmentIndex
from ..log.log import unfinishable
from ..log.recovery import Extent, list_segments
from ..segment import HEADER_BYTES as SEGMENT_HEADER_BYTES
from ..segment import Identity
from ..system.clock import SYSTEM, clock_of, monotonic
from ..system.directory import Directory
from ..system.files import Files
from ..system.lock import Lock, try_acquire
from ..system.not_copyable import NotCopyable
from .fit import Target, store_number
from .group_commits import parsed
from .job_commits import settle_in_file
from .manifest import Manifest, Section
from .notifications import notify
from .staging import HEADERS, STAGING, each_header, read_headers, read_section, remove_attempt, sweep
from .store import Store

logger = logging.getLogger("loglib")

_NAP_S = 0.001
_LONGEST_NAP_S = 0.02
_NOTIFY_S = 0.1  # after this time the notification is repeated, in case it was lost


def topic_of(store: Store, relative: str, log_id: bytes | None = None) -> str:
    """The path of a topic that a manifest names. One that was moved is searched for in its directory, by its log id."""
    path = os.path.normpath(os.path.join(os.path.dirname(store.path), relative))
    if log_id is None or _has_log(store.files, path, log_id):
        return path
    parent = os.path.dirname(path)
    topics = [os.path.join(parent, name) for name in catalog.names(store.files, parent)]
    moved = [each for each in topics if _has_log(store.files, each, log_id) and _is_leader(store.files, each)]
    return moved[0] if len(moved) == 1 else path


def _has_log(files: Files, path: str, log_id: bytes) -> bool:
    try:
        described = topic_file.read(files, path)
    except CorruptLogError:
        return False
    return described is not None and described[0] == log_id


def _is_leader(files: Files, path: str) -> bool:
    role = copy_role.read(files, path)
    return role is None or role.role == copy_role.LEADER


class Applier(NotCopyable):
    """Applies the pending transactions of a store."""

    def __init__(
        self,
        files: Files,
        store: Store,
        own: Sequence[SectionWriter] = (),
        *,
        own_offsets: Mapping[tuple[str, str], Offsets] | None = None,
        own_shares: Mapping[tuple[str, str], Callable[[int, Sequence[Pin]], None]] | None = None,
        clock: Callable[[], int] = SYSTEM,
    ) -> None:
        """`own`: writers of this process. The writers in other processes apply to their partitions themselves.

        `own_offsets`: commits of this process's groups, by the path of the topic and the name of the group.
        `own_shares`: what settles records of a partition for this process's members, by topic and share.
        """
        self._files = files
        self._store = store
        self._own = own
        self._own_offsets = own_offsets or {}
        self._own_shares = own_shares or {}
        self._clock = clock
        self._made: dict[Target, SectionWriter] = {}  # writers of partitions that nobody holds
        self._locked: dict[str, Lock] = {}  # topics of these writers: an opening waits for the lock
        self._notified: dict[str, float] = {}  # when the writers of a topic were last notified
        self._find_own = cache(partial(_find, files, own))
        self._topic_of = cache(partial(topic_of, store))  # of a section, by its path and log id of the topic

    def run(self, timeout_s: float, *, wanted: int = 0) -> None:
        """Apply the pending transactions. `CommitPendingError` if the number `wanted` cannot be done in time.

        Errors of other numbers are logged: the processes that committed them get these errors.
        """
        deadline = monotonic() + timeout_s
        lock = self._lock(deadline, wanted)
        if lock is None:
            return
        try:
            blocked: set[Target] = set()
            for manifest in self._store.pending():
                targets = set(self._sections(manifest))
                try:
                    if blocked & targets:
                        raise CommitPendingError(manifest.number, "transactions before it")
                    self._apply(manifest, deadline)
                except (LogError, OSError) as error:
                    blocked |= targets
                    if manifest.number == wanted:
                        raise pending_for(manifest.number, error) from error
                    logger.warning("%s: transaction %d waits: %s", self._store.path, manifest.number, error)
        finally:
            try:
                self._close()
            finally:  # otherwise whoever keeps the error keeps the lock
                lock.release()

    def _lock(self, deadline: float, wanted: int) -> Lock | None:
        """The lock of the store; None if another process has applied the wanted number."""
        while True:
            lock = try_acquire(self._files, self._store.path)
            if lock is not None:
                return lock
            if wanted and self._store.is_done(wanted):
                return None
            if monotonic() > deadline:
                raise CommitPendingError(wanted, "another process, which applies transactions")
            time.sleep(_NAP_S)

    def _close(self) -> None:
        with ExitStack() as ends:
            while self._locked:
                ends.callback(self._locked.popitem()[1].release)
            while self._made:  # these first
                ends.callback(self._made.popitem()[1].close)

    def _close_for(self, writer: SectionWriter) -> None:
        """Close the writers that were made, if this one may have to wait for its partition."""
        if writer.takes_turns:
            self._close()

    # --- one transaction -----------------------------------------------------------------------------

    def _apply(self, manifest: Manifest, deadline: float) -> None:
        sections = self._sections(manifest)
        waiting = sorted(sections, key=lambda target: self._find_own(target) is None)
        nap = _NAP_S
        while True:
            waiting = [each for each in waiting if not self._apply_section(manifest, each, sections[each], deadline)]
            if not waiting:
                break
            if monotonic() > deadline:
                names = ", ".join(f"{each.topic_path} partition {each.partition}" for each in waiting)
                raise CommitPendingError(manifest.number, f"the writer of {names}")
            self._close()  # so that nobody waits meanwhile for a partition that has its records
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)
        self._apply_offsets(manifest)
        self._settle_jobs(manifest)
        self._store.finish(manifest.number, now=self._clock())
        self._release(manifest)
        self._remove_staging(manifest)

    def _sections(self, manifest: Manifest) -> dict[Target, list[Section]]:
        """The sections of each partition, in order."""
        sections: dict[Target, list[Section]] = {}
        for section in manifest.sections:
            topic = self._topic_of(section.topic, section.log_id)
            target = Target(topic, Identity.of(section.log_id, section.partition))
            sections.setdefault(target, []).append(section)
        return sections

    def _apply_section(
        self, manifest: Manifest, target: Target, sections: list[Section], deadline: float | None = None
    ) -> bool:
        """Apply the sections of one partition. False if its writer, in another process, has not done it yet.

        `LockedError` if other processes keep a shared partition until the deadline; by default as long as appends wait.
        """
        described = topic_file.read(self._files, target.topic_path)
        if described is None or described[0] != target.identity.log_id:
            logger.error(
                "%s: the topic was deleted or made again; %d batches of transaction %d for it are dropped",
                target.topic_path, sum(each.batches for each in sections), manifest.number,
            )  # fmt: skip
            return True
        writer = self._writer(target, described[1])
        if writer is None:
            if self._is_applied(manifest, target):
                return True
            if monotonic() >= self._notified.get(target.topic_path, 0.0) + _NOTIFY_S:
                self._notified[target.topic_path] = monotonic()
                notify(self._files, target.topic_path)
            return False
        pieces = [self._piece(manifest, target, each) for each in sections]
        self._close_for(writer)
        with writer.settling(wait_s=None if deadline is None else max(deadline - monotonic(), 0.0)):
            self._end_hold(writer, manifest)
            apply_section(writer, Txn(manifest.number, manifest.id, store_number(self._store.id)), pieces)
        return True

    def apply_own(self, manifest: Manifest) -> None:
        """Apply the sections of this process's partitions, for another process, which applies the transaction."""
        for target, sections in self._sections(manifest).items():
            if self._find_own(target) is not None:
                self._apply_section(manifest, target, sections)

    def release_own(self, writers: Iterable[SectionWriter] | None = None) -> None:
        """End the holds of this process's writers whose transactions are done, or unknown to the store.

        `writers`: those of them to look at.
        """
        for writer in self._own if writers is None else writers:
            if (mark := writer.published()).held_txn and not self._is_pending(mark):
                end_hold(writer, mark)

    def _end_hold(self, writer: SectionWriter, manifest: Manifest) -> None:
        """End the hold of an earlier transaction, which must not be pending."""
        mark = writer.disk.mark
        if mark.held_txn and (mark.held_txn, mark.held_id) != (manifest.number, manifest.id):
            if self._is_pending(mark):
                raise CommitPendingError(manifest.number, f"transaction {mark.held_txn} in {writer.directory}")
            _end_hold(writer, mark)

    def _is_pending(self, mark: Mark) -> bool:
        """True if the transaction that is held is pending. Its number may name another one in this store."""
        return self._store.pending_id(mark.held_txn) == mark.held_id

    # --- writers -------------------------------------------------------------------------------------

    def _writer(self, target: Target, config: TopicConfig) -> SectionWriter | None:
        """A writer of the partition in this process; None if another process has it."""
        writer = self._find_own(target) or self._made.get(target)
        if writer is None:
            if target.topic_path not in self._locked:
                lock = try_acquire(self._files, target.topic_path)
                if lock is None:  # another process is changing the topic
                    return None
                self._locked[target.topic_path] = lock
            copy_role.check_leader(self._files, target.topic_path)  # before a file is written there, and under the lock
            index = SegmentIndex(list_segments(self._files, target.directory))
            try:
                writer = SectionWriter(
                    self._files, target.directory, target.identity, config, index=index, clock=self._clock
                )
            except LockedError:
                return None
            self._made[target] = writer
            copy_role.check_leader(self._files, target.topic_path)
        return writer

    def _is_applied(self, manifest: Manifest, target: Target) -> bool:
        """True if the partition's writer has applied the transaction, and this is synced."""
        path = os.path.join(target.directory, WATERMARK)
        with closing(WatermarkReader(self._files, path, target.identity.salt)) as watermark:
            mark = watermark.read()
            watermark.sync()  # the writer has published it, and perhaps not yet synced it
            return mark is not None and (mark.applied_txn, mark.applied_id) == (manifest.number, manifest.id)

    def _release(self, manifest: Manifest) -> None:
        """End the holds and wake the readers, which then no longer ask the store."""
        topics = set()
        own: dict[SectionWriter, str] = {}
        for target in self._sections(manifest):
            if (writer := self._find_own(target)) is not None:
                own[writer] = target.topic_path
            elif (made := self._made.get(target)) is not None:
                made.release(manifest.number)
            else:
                topics.add(target.topic_path)
        for writer, path in own.items():
            try:
                self._close_for(writer)
                writer.release(manifest.number)
            except (LockedError, LogClosedError):  # the process that has the partition ends the hold
                topics.add(path)
        for path in topics:
            notify(self._files, path)

    # --- what is staged --------------------------------------------------------------------------------

    def _piece(self, manifest: Manifest, target: Target, section: Section) -> Piece:
        identity = target.identity
        if not section.file:
            path = os.path.join(self._store.path, f"{manifest.number:020d}")
            if manifest.frames is None:
                raise CorruptLogError(path, 0, "damaged records after its line", "those that its line describes")
            frames = memoryview(manifest.frames)[section.at : section.at + section.size_bytes]
            batches = partial(
                read_section, lambda at, size: bytes(frames[at : at + size]), section.size_bytes, identity, path,
                at=section.at,
            )  # fmt: skip
            return Piece(section.batches, batches, path, list)
        path = os.path.join(target.topic_path, section.file)
        headers = partial(self._headers_of_segment, path, section, identity)
        return Piece(section.batches, partial(self._batches, path, section, identity), path, headers)

    def _batches(self, path: str, section: Section, identity: Identity) -> Iterator[tuple[Header, bytes]]:
        headers = self._copied_headers(path, section) if section.is_segment else None
        fd = self._files.open_read(path)
        try:
            yield from read_section(
                lambda at, size: self._files.read_at(fd, size, section.at + at), section.size_bytes, identity, path,
                at=section.at, headers=headers,
            )  # fmt: skip
        finally:
            self._files.close(fd)

    def _headers_of_segment(self, path: str, section: Section, identity: Identity) -> list[Header]:
        """The headers of a file that may become a segment; an empty list for other files."""
        is_whole = section.at == SEGMENT_HEADER_BYTES and _attempt(section) is not None
        if not section.is_segment or not is_whole or self._files.facts(path).st_size != section.at + section.size_bytes:
            return []
        copied = each_header(self._copied_headers(path, section))
        return list(read_headers(lambda _: next(copied, b""), section.size_bytes, identity, path, at=section.at))

    def _copied_headers(self, path: str, section: Section) -> bytes:
        fd = self._files.open_read(path + HEADERS)
        return self._files.drain(fd, path + HEADERS, section.batches * HEADER_BYTES)

    def _remove_staging(self, manifest: Manifest) -> None:
        """Remove the staged files, which are no longer needed. Files that stay are swept later."""
        for section in manifest.sections:
            attempt = _attempt(section)
            if attempt is not None:
                remove_attempt(self._files, self._topic_of(section.topic, section.log_id), attempt)

    # --- commits of groups -----------------------------------------------------------------------------

    def _apply_offsets(self, manifest: Manifest) -> None:
        """Append the commits. Their generations and numbers order them, so a repetition changes nothing."""
        groups: dict[tuple[str, str], Entries] = {}
        for each in manifest.offsets:
            topic_path = topic_of(self._store, each.topic, bytes.fromhex(each.log))
            groups.setdefault((topic_path, each.group), {}).update(parsed(each))
        for (topic_path, group), entries in groups.items():
            if (topic_path, group) in self._own_offsets:
                self._own_offsets[topic_path, group].append(entries).sync()  # with any durability
                continue
            described = topic_file.read(self._files, topic_path)
            directory = os.path.join(topic_path, GROUPS, group, "offsets")
            if described is None or not self._files.exists(directory):
                logger.error("%s: the group %s was deleted; its commit is dropped", topic_path, group)
                continue
            log_id, config = described
            offsets = Offsets(
                self._files, directory, log_id, group, durability="disk", permissions=config.permissions,
                clock=self._clock,
            )  # fmt: skip
            with closing(offsets):
                offsets.append(entries).sync()

    # --- records of shares -----------------------------------------------------------------------------

    def _settle_jobs(self, manifest: Manifest) -> None:
        """Settle the records of shares, which are pinned. What is settled already stays so."""
        shares: dict[tuple[str, str, int], list[Pin]] = {}
        for each in manifest.jobs:
            topic_path = topic_of(self._store, each.topic, bytes.fromhex(each.log))
            pin = Pin(each.member, each.token, each.offset, each.size, each.outcome)
            shares.setdefault((topic_path, each.share, each.partition), []).append(pin)
        for (topic_path, share, partition), pins in shares.items():
            own = self._own_shares.get((topic_path, share))
            if own is not None:
                with suppress(LogClosedError):
                    own(partition, pins)
                    continue
            settle_in_file(self._files, topic_path, share, partition, pins, clock_of(self._clock))


def _find(files: Files, writers: Sequence[SectionWriter], target: Target) -> SectionWriter | None:
    """The writer of the partition among these, if there is one."""
    candidates = [each for each in writers if each.partition == target.partition]
    if candidates:
        with suppress(FileNotFoundError), Directory.open(files, target.topic_path) as topic:
            return next((each for each in candidates if each.is_in(topic)), None)
    return None


def sweep_staging(store: Store, topic_paths: Iterable[str], *, now: int, attempts: Iterable[str] = ()) -> None:
    """Remove the staged files of `attempts`, and those that are a day old, except files of pending transactions."""

    def pending() -> set[str]:
        return {each.file.split("/")[1] for one in store.pending() for each in one.sections if each.file}

    done = set(attempts) - pending()
    for path in topic_paths:
        for attempt in done:
            remove_attempt(store.files, path, attempt)
        sweep(store.files, path, pending, now_s=now / 1_000_000)


def _attempt(section: Section) -> str | None:
    """The directory in which the section is staged; None if a forged name leads elsewhere."""
    first, _, rest = section.file.partition("/")
    attempt, _, name = rest.partition("/")
    return attempt if first == STAGING and attempt.isalnum() and "/" not in name else None


def pending_for(number: int, error: Exception) -> CommitPendingError:
    """The error for a failure after the commit point; the transaction is committed."""
    return error if isinstance(error, CommitPendingError) else CommitPendingError(number, f"an error to go: {error}")


def end_hold(writer: SectionWriter, seen: Mark) -> None:
    """End the hold that this mark has, of a transaction that is done, or that the store does not have.

    Another process may have ended it, and begun the next one, before this one has the partition. `CorruptLogError` if
    the log has a part of the transaction, which no process can finish.
    """
    with writer.settling():
        if writer.disk.mark.held == seen.held:
            _end_hold(writer, writer.disk.mark)


def _end_hold(writer: SectionWriter, mark: Mark) -> None:
    """End the hold that the writer has. The caller is in `settling`."""
    if mark.applied_txn != mark.held_txn:
        extent = Extent.among(writer.section_headers(mark.held_from), mark.held_txn, mark.held_id)
        if extent == Extent.PART:
            raise unfinishable(writer.directory, mark)
        if extent == Extent.WHOLE:
            writer.end_section()
    writer.end_hold(mark.held_txn)
