"""Transaction: records for many partitions of many topics, commits of groups, and jobs, all or nothing, once.

Invariant: no record of a transaction is in a log before the commit point, which is one `link` in the store. After the
commit point this process or another one applies it, whatever happens to this one. For each application (`app`) the
versions rise, and each is committed at most once.

Threads: a transaction belongs to one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Literal

from ..append.access import Access
from ..append.batching import weigh
from ..append.record_arguments import HeadersLike, gather_columns, record_columns
from ..config.quantities import Duration, microseconds, seconds
from ..errors import CommitPendingError, LogClosedError, LogError, LogMovedError, StorageIOError
from ..format.columns import Columns
from ..groups import Group, TopicsGroup
from ..groups.group import PreparedCommit
from ..groups.offsets import Offsets
from ..jobs import Job, JobBatch
from ..jobs.transacting import Keeper, Promise
from ..log import copy_role
from ..log.store_pointer import settle
from ..open_topic import OpenTopic
from ..system.clock import SYSTEM
from ..system.files import REAL, Buffer, Files
from ..system.not_copyable import NotCopyable
from ..system.process import PerProcess
from .apply import Applier, pending_for, sweep_staging
from .fit import Target, check_writers, make_fit
from .group_commits import leave_mark, stored
from .job_commits import commit_of
from .manifest import Section
from .staging import STAGING, Stage, Staged
from .state import Intent
from .store import STORE, Store, find_store, open_store

AnyGroup = Group | TopicsGroup
_TIMEOUT_S = 2.0


class Transaction(NotCopyable):
    """One transaction; make it with `loglib.transaction`, in a `with` statement."""

    def __init__(
        self,
        app: str,
        version: int | None,
        *,
        owner: str,
        source: str | None,
        store: str | None,
        timeout: float,
    ) -> None:
        self.app = app
        self.version = version
        self.number: int | None = None  # in the store, once it is committed
        self.repeated = False  # this version was committed before, and this time it was dropped
        self._owner = owner
        self._source = source
        self._timeout = timeout
        self._files: Files = REAL  # of the first topic or group, as the clock
        self._clock: Callable[[], int] = SYSTEM
        self._store_path = None if store is None else os.path.realpath(store)
        self._store: Store | None = None
        self._stage = Stage(self._files, self._clock)
        self._topics: dict[str, OpenTopic] = {}  # by `_path_of`
        self._paths: dict[tuple[int, int], str] = {}  # by the identity of the directory
        self._groups: list[PreparedCommit] = []
        self._promises: dict[Keeper, list[Promise]] = {}  # of the members that have the records in hand
        self._keyless: dict[OpenTopic, int] = {}
        self._by_key: set[OpenTopic] = set()  # topics of records whose keys have chosen the partition
        self._over = False

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> Literal[False]:
        if kind is not None:
            self._over = True
            self._forget(settled=False)
            self._stage.discard()
        else:
            self._commit()
        return False

    # --- what it holds ---------------------------------------------------------------------------------

    def append(
        self,
        topic: OpenTopic,
        value: bytes | None,
        key: bytes | None = None,
        *,
        timestamp: int | datetime | None = None,
        headers: HeadersLike | None = None,
        partition: int | None = None,
    ) -> None:
        """Add one record for a topic, which may be open in either mode. The arguments are those of `Topic.append`."""
        columns, _ = record_columns(value, key, timestamp, headers, limit_bytes=topic.config.max_record_bytes)
        self._add(topic, columns, partition)

    def append_many(
        self,
        topic: OpenTopic,
        values: Iterable[bytes | None],
        *,
        keys: Iterable[bytes | None] | None = None,
        timestamps: Iterable[int | datetime] | None = None,
        headers: Iterable[HeadersLike | None] | None = None,
        partition: int | None = None,
    ) -> None:
        """Add many records for a topic. The arguments are those of `Topic.append_many`."""
        self._add(topic, gather_columns(values, keys, timestamps, headers), partition)

    def commit(self, group: AnyGroup, what: Any = None, meta: str = "") -> None:
        """Add a commit of a consumer group. The arguments are those of `Group.commit`.

        The group must have been joined with `commit="manual"`. Raises `StaleGenerationError` if the member no longer
        owns a partition. The end of the transaction raises it, too, and then commits nothing.
        """
        self._check_open()
        prepared = group._transact(what, meta)  # noqa: SLF001
        if prepared.entries:
            group_in = prepared.directory
            path = os.path.realpath(group_in.topic_path)
            self._find_store(path, group_in.permissions, group_in.files, group_in.clock)
            self._groups.append(prepared)

    def accept(self, job: Job | JobBatch) -> None:
        """Accept a job of a share, together with what is appended; it stays in hand until the transaction is over.

        If the transaction is discarded or not committed, the job is in hand as before. The end of the transaction
        raises `FencedJobError` if the job was taken away, and then commits nothing. `ValueError` for a transaction with
        a version: a repeated one would settle other jobs than the first time.
        """
        self.settle(job._transact())  # noqa: SLF001

    def settle(self, promise: Promise) -> None:
        """Settle records of a share."""
        self._promises.setdefault(promise.keeper, []).append(promise)
        if self._over or self.version is not None:
            self._forget(settled=False)
            self._check_open()
            raise ValueError("a transaction that settles jobs takes the next version: leave version= out")
        share = promise.keeper.directory
        self._find_store(os.path.realpath(share.topic_path), share.permissions, share.files, share.clock)

    def _add(self, topic: OpenTopic, columns: Columns, partition: int | None) -> None:
        self._check_open()
        if not columns.values:
            return
        path = self._path_of(topic)
        if path not in self._topics:
            self._find_store(path, topic.config.permissions, topic._files, topic._clock)  # noqa: SLF001
            self._topics[path] = topic
            topic._handles.store = self._store  # noqa: SLF001
        if partition is None and columns.keys is None:
            partition = self._keyless_partition(topic)
        if partition is None:
            self._by_key.add(topic)
        spread = topic._placement.spread(  # noqa: SLF001
            columns, partition, cache(lambda: self._keyless_partition(topic))
        )
        loads = {number: weigh(each, topic.config) for number, each in spread.items()}
        for number, load in loads.items():
            identity = topic._accesses[topic.partition(number).id].log.identity  # noqa: SLF001
            self._stage.section(path, identity, topic.config).add(load)
        self._stage.spill()

    def _path_of(self, topic: OpenTopic) -> str:
        """One path for a topic, also if it is opened by several: by links, or by mounts of the same directory."""
        try:
            facts = topic._files.facts(topic.path)  # noqa: SLF001
        except FileNotFoundError as error:
            raise LogMovedError(topic.path, "was moved or deleted") from error
        return self._paths.setdefault((facts.st_dev, facts.st_ino), os.path.realpath(topic.path))

    def _keyless_partition(self, topic: OpenTopic) -> int:
        """One partition for all records without a key of one transaction."""
        if topic not in self._keyless:
            drawn = int.from_bytes(self._files.random_bytes(4), "little")
            self._keyless[topic] = drawn % len(topic.partitions)
        return self._keyless[topic]

    def _check_open(self) -> None:
        self._stage.check_not_forked(f"the transaction of {self.app}")
        if self._over:
            raise LogClosedError(f"the transaction of {self.app} is over; begin another one")

    # --- the store ---------------------------------------------------------------------------------------

    def _find_store(self, topic_path: str, permissions: int, files: Files, clock: Callable[[], int]) -> None:
        """Find the store of the transaction, or make it, and settle the topic in it. `NotLeaderError` for a copy."""
        copy_role.check(files, topic_path, copy_role.TRANSACT)
        if self._store is None:
            self._files, self._clock = files, clock
            self._stage = Stage(files, clock)
            self._store = find_store(self._files, topic_path, permissions, path=self._store_path)
        settle(self._files, topic_path, self._store.path, self._store.id, permissions=permissions)

    # --- commit ------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        self._check_open()
        self._over = True
        committed = False
        try:
            sections = self._stage.sections()
            if self._store is None or not (sections or self._groups or self._promises):
                return
            intent = self._intent(sections)
            for keeper, promises in self._promises.items():
                keeper.pin(promises)
            committed = True  # unless the store refuses it
            number, self.version, self.repeated = self._store.commit(intent, now=self._clock())
        except StorageIOError:  # in doubt
            raise
        except LogError:
            committed = False
            raise
        finally:
            self._stage.close()
            if not committed:
                self._stage.discard()
                self._unpin()
            if self.version is None:  # not committed, or in doubt
                self._forget(settled=False)
        if self.repeated:
            self._stage.discard()
        else:
            self.number = number
            for group in self._groups:
                group.done()
        try:
            self._apply()
        finally:
            self._forget(settled=True)

    def _unpin(self) -> None:
        """Nothing is committed: the records are in hand as before. Where that cannot be written, they are in doubt."""
        for keeper, promises in self._promises.items():
            with suppress(LogError, OSError):
                keeper.unpin(promises)

    def _forget(self, *, settled: bool) -> None:
        while self._promises:
            keeper, promises = self._promises.popitem()
            for each in promises:
                keeper.forget(each, settled=settled)

    def _intent(self, sections: list[Staged]) -> Intent:
        """The transaction for the store, with its staged records synced. Raises the errors that forbid the commit."""
        assert self._store is not None
        in_files = self._stage.spill(last=True)
        self._stage.sync()
        try:
            targets = [Target(each.topic_path, each.identity) for each in sections]
            elsewhere = [each for each in targets if self._access(each).open_writer is None]
            check_writers(self._files, self._store, elsewhere, answer_s=self._timeout, applying_s=self._timeout)
            self._check_topics(targets)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise LogMovedError(str(error.filename), "was moved or deleted: nothing is committed") from error
        for group in self._groups:
            leave_mark(group.directory)
            group.check()
        parent = os.path.dirname(self._store.path)
        frames: list[Buffer] = []
        listed = []
        frames_bytes = 0
        for staged in sections:
            topic = os.path.relpath(staged.topic_path, parent)
            for portion in staged.portions:
                name = os.path.join(STAGING, self._stage.attempt, portion.name) if in_files else ""
                at = portion.at if in_files else frames_bytes
                listed.append(Section(
                    topic, staged.identity.log_id, staged.identity.partition, name, at, portion.size_bytes,
                    portion.batches, portion.is_segment,
                ))  # fmt: skip
                frames += portion.parts
                frames_bytes += portion.size_bytes
        commits = [one for group in self._groups for one in stored(group.directory, self._store.path, group.entries)]
        _claim(self._store, self.app, self._owner, self._source, now=self._clock())
        jobs = [
            commit_of(self._store, keeper.directory, promise.partition, pin)
            for keeper, promises in self._promises.items() for promise in promises for pin in promise.pins
        ]  # fmt: skip
        return Intent(
            app=self.app, version=self.version, owner=self._owner, source=self._source,
            sections=tuple(listed), offsets=tuple(commits), frames=b"".join(frames), jobs=tuple(jobs),
        )  # fmt: skip

    def _check_topics(self, targets: list[Target]) -> None:
        """Raise the errors of topics that were moved, replaced or superseded, or that cannot take the transaction."""
        assert self._store is not None
        for path in {each.topic_path for each in targets}:
            copy_role.check(self._files, path, copy_role.TRANSACT)
        for topic in self._by_key:
            topic._placement.check_still(len(topic.partitions))  # noqa: SLF001
        for each in targets:
            self._access(each).log.check_moved(patient=False)
        make_fit(self._files, self._store, targets, now=self._clock())

    def _access(self, target: Target) -> Access:
        return self._topics[target.topic_path]._accesses[target.partition]  # noqa: SLF001

    def _apply(self) -> None:
        """Make the transaction visible. After the commit point each error is a `CommitPendingError`."""
        assert self._store is not None
        writers = [writer for topic in self._topics.values() for writer in topic._handles.writers]  # noqa: SLF001
        own_offsets: dict[tuple[str, str], Offsets] = {
            (each.directory.topic_path, each.directory.name): each.offsets for each in self._groups
        }
        own_shares = {
            (os.path.realpath(each.directory.topic_path), each.directory.name): each.settle for each in self._promises
        }
        applier = Applier(
            self._files, self._store, writers, own_offsets=own_offsets, own_shares=own_shares, clock=self._clock
        )
        try:
            applier.run(self._timeout, wanted=self.number or 0)
            sweep_staging(self._store, self._topics, now=self._clock())
        except (LogError, OSError) as error:
            if self.number is None:  # repeated: the process that committed it gets the error
                raise
            raise pending_for(self.number, error) from error


# --- owners ----------------------------------------------------------------------------------------------


class _Owner:
    """This process as an owner of applications; a forked child is another one."""

    def __init__(self) -> None:
        self.name = os.urandom(8).hex()
        self.claimed: set[tuple[bytes, str, str]] = set()  # store, app and owner


_owner = PerProcess(_Owner)


def _claim(store: Store, app: str, owner: str, source: str | None, *, now: int) -> None:
    """Become the owner of the application, once: a process that was fenced by another one stays fenced."""
    claimed = _owner().claimed
    if (store.id, app, owner) not in claimed:
        store.fence_owner(app, owner, source, now=now)
        claimed.add((store.id, app, owner))


# --- functions ---------------------------------------------------------------------------------------------


def transaction(
    app: str,
    *,
    version: int | None = None,
    store: str | os.PathLike[str] | None = None,
    owner: str | None = None,
    source: str | None = None,
    timeout: Duration = _TIMEOUT_S,
) -> Transaction:
    """Begin a transaction: appends to any partitions, commits of groups, and jobs, visible together or never.

        with loglib.transaction(app="etl") as tx:
            tx.append(orders, value, key=key)
            tx.append_many(bills, values)
            tx.commit(group)

    At the end of the `with` statement it is committed. An exception discards it. Its topics may be open in either
    mode; they must be on this host, in one file system, and have one store.

    - `app`: text, the name of the application whose transaction it is. One process at a time may be the owner of an
      application: a process that begins with it fences the former one (`FencedError`).
    - `version`: int. A version that was committed before, or a lower one, is not committed again: `repeated` is then
      True. None, the default, is the next version.
    - `store`: the directory in which it is committed; by default the topics' own: `.transactions` beside the first.
    - `owner`: text that names the owner, for owners that are not processes. By default this process.
    - `source`: text that names where the versions come from. A version of another source is refused (`LogError`).
    - `timeout`: seconds to wait for writers in other processes: before the commit for their answer, and after it until
      they have applied it. By default 2.

    The commit raises `LockedError` if a writer in another process does not answer, `FencedError` and
    `StaleGenerationError`: then nothing is committed. It raises `CommitPendingError` if the transaction is committed
    and not visible yet. It becomes visible without further calls, so do not repeat it.
    """
    check_app(app)
    if version is not None and (type(version) is not int or version < 0):
        raise ValueError(f"version must be a number from 0 on, not {version!r}")
    timeout = seconds("timeout", timeout)
    return Transaction(
        app, version, owner=owner or _owner().name, source=source,
        store=None if store is None else os.fsdecode(store), timeout=timeout,
    )  # fmt: skip


def check_app(app: Any) -> None:
    if not isinstance(app, str) or not app:
        raise TypeError(f"app must be a name, not {app!r}")


def last_version(app: str, *, store: str | os.PathLike[str]) -> int | None:
    """The last version that an application has committed in a store; None if there is none.

    `store`: the directory of the store, or the directory of topics that contains it.
    """
    opened = _open_store(store)
    return None if opened is None else opened.last_version(app)


def expire_apps(unused_for: timedelta, *, store: str | os.PathLike[str]) -> list[str]:
    """Forget applications that have committed nothing for this time; returns their names.

    Without this call no application is ever forgotten. A version of a forgotten application is committed again if it
    comes again. `store` is as in `last_version`. Applications with a transaction that is not done stay.
    """
    opened = _open_store(store)
    return [] if opened is None else opened.expire(SYSTEM() - microseconds(unused_for), now=SYSTEM())


def recover_transactions(store: str | os.PathLike[str], *, timeout: float = _TIMEOUT_S) -> None:
    """Apply the transactions that are committed and not visible yet, because their process has died.

    Writers that open a topic do this as well. Raises `CommitPendingError` if a transaction stays pending.
    """
    opened = _open_store(store)
    if opened is not None:
        Applier(REAL, opened).run(timeout)
        for manifest in opened.pending():
            raise CommitPendingError(manifest.number, "a writer that does not answer, or damage: see the log")


def _open_store(path: str | os.PathLike[str]) -> Store | None:
    absolute = os.path.abspath(os.fsdecode(path))
    if os.path.basename(absolute) != STORE:
        absolute = os.path.join(absolute, STORE)
    return open_store(REAL, absolute) if REAL.exists(absolute) else None
