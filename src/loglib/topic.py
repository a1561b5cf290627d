"""Topic: N partitions in one directory.

Invariant: the directory describes itself. `topic.json` has the format version, the log id that salts each checksum, and
the policies. A topic is built aside and renamed, so a directory with a `topic.json` is whole. What it has counts: an
argument that differs is an error, or is ignored with a line in the log, or changes it (`alter=True`).

Threads: safe for all.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

from .append.access import Access, access_of, check_still, own_all
from .append.appends import Appends
from .append.background import Background
from .append.handles import Handles
from .append.live_policies import LivePolicies, to_change
from .append.partitioner import BUILT_IN, Partitioner, name_of
from .append.placement import Placement
from .append.retention_pass import RetentionRunner
from .append.turns import Turns
from .config.arguments import check_options, partition_number, topic_path
from .config.lazy import called_later
from .config.policies import FIXED, POLICY_NAMES, Policies, TopicConfig
from .config.quantities import Duration, seconds
from .config.uri import is_remote
from .copies.parts import Parts, check_durability, parts_of
from .errors import ForkedHandleError, LogClosedError, LogError
from .format.codec import codec_id
from .format.display import sized
from .jobs.sharing_topic import SharingTopic, holds_of
from .log import catalog, topic_file
from .log.log import Log
from .log.readable import Readable, Sources
from .partition import Partition, Partitions, ShownByPartition
from .retention import SegmentDecision
from .system.clock import SYSTEM, clock_of
from .system.failures import together
from .system.files import REAL, Files
from .system.lock import warn_of_other_hosts
from .system.process import at_exit, forking, in_child, is_interrupting, leave_parent, try_each
from .system.reentry import refuse
from .transactions.notifications import notify
from .transactions.participant import Participant

if TYPE_CHECKING:  # loaded when a topic has copies, is verified, or asked for figures
    from .append.stats import AppendTimes
    from .copies.replica import ReplicaState
    from .copies.replica_set import ReplicaSet
    from .copies.roster import Acks
    from .log.verify import Progress, VerifyReport

logger = logging.getLogger("loglib")

_in_child = in_child()

_with_tail = called_later("loglib.offload.archive_reader", "with_tail")
_floors_of = called_later("loglib.offload.safe_offset", "floors_of")
_assemble = called_later("loglib.copies.assemble", "assemble")
_check_new = called_later("loglib.copies.roster", "check_new")
_check_no_members = called_later("loglib.jobs.administration", "check_no_members")
_new_fence = called_later("loglib.transactions.group_commits", "StoreFence")
_new_transactions = called_later("loglib.transactions.dead_letters", "JobTransactions")


class Topic(ShownByPartition, Appends, Readable, SharingTopic):
    """A named, partitioned log. Open one with `Topic.open`."""

    def __init__(
        self,
        parts: Parts,
        log_id: bytes,
        config: TopicConfig,
        stamp: topic_file.Stamp | None,
        *,
        mode: Literal["a", "r"],
        shared: bool,
        wait: Duration,
        partitioner: Partitioner | None,
        clock: Callable[[], int],
        replicas: ReplicaSet | None,
        background: bool,
    ) -> None:
        files, make_log = parts.logs(log_id)
        self.path = path = parts.path
        self.name = os.path.basename(path)
        self.log_id = log_id
        self.mode = mode
        self._shared = shared
        self._files = files
        self._clock = clock
        self._parts = parts
        self._handles = Handles()
        self._handles.topic = weakref.ref(self)
        self._replicas = replicas
        self._released = False
        self._append_times: AppendTimes = {}  # that `stats` has read
        self._unended: list[Exception] = []  # errors of readers and groups when the topic was closed
        self._failed: list[tuple[Access, Exception]] = []  # partitions whose closing raised, with the errors
        self._serving = Participant(files, path, self._handles, clock)
        self._retention = RetentionRunner(
            files, path, config, clock_of(clock),
            shared=self.shared, holds_of=partial(holds_of, weakref.ref(self)), archives=_floors_of,
        )  # fmt: skip
        if self.shared:
            turns = Turns(files, path, seconds("wait", wait), config.permissions)
            self._handles.turns = self._retention.turns = turns
        make_access = partial(
            access_of, path, log_id, parts.donors, files=files, config=config,
            writable=mode == "a", clock=clock, handles=self._handles, retention=self._retention,
            check=partial(check_still, files, path, log_id, config.partitions) if shared else None,
            on_hold=self._serving.apply if shared else None,
            on_foreign_hold=partial(notify, files, path),
            make_log=make_log, replicated=replicas,
        )  # fmt: skip
        # True if partitions may be added while the topic is open.
        self._grows = parts.place is None and (shared or mode == "r")
        self._partitions = Partitions(make_access, _with_tail)
        self._partitions.grow(config.partitions)
        accesses = self._partitions.accesses()
        self._placement = Placement(
            path, accesses, self._handles, partitioner, named=config.partitioner, writable=mode == "a"
        )
        self._policies = LivePolicies(
            parts.files, path, log_id, config, self._retention, self._partitions.accesses, self._serving.listen,
            stamp, may_change=parts.place is None,
        )  # fmt: skip
        self._serving.look_soon = self._policies.look_soon
        self._policies.background = self._background = Background(
            self._handles, accesses, self._retention, self._policies.look, may_have_thread=background
        )
        self._read_archive, self._new_fence, self._new_transactions = _with_tail, _new_fence, _new_transactions
        if mode == "a":
            self._start_writing()

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        partitions: int = 1,
        partitioner: Literal["crc32", "murmur2"] | Partitioner | None = None,
        **policies: Unpack[Policies],
    ) -> Topic:
        """Create a topic with these policies in the directory `path`, and open it for appending, as `open` does.

        Raises `FileExistsError` if there is a topic.
        """
        check_options(cls.create, policies, POLICY_NAMES)
        if cls.exists(path):
            raise FileExistsError(errno.EEXIST, "there is a topic here; Topic.open opens it", os.fsdecode(path))
        return cls.open(path, create=True, partitions=partitions, partitioner=partitioner, **policies)

    @staticmethod
    def exists(path: str | os.PathLike[str]) -> bool:
        """True if the directory `path` has a topic. `ValueError` for the URI of an object store."""
        if is_remote(os.fsdecode(path)):
            raise ValueError("this is a URI of an object store, and not a directory; open it with mode='r'")
        return topic_file.exists(REAL, topic_path(path))

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        mode: Literal["a", "r"] = "a",
        create: bool = False,
        shared: bool = False,
        wait: Duration = 5.0,
        partitions: int | None = None,
        partitioner: Literal["crc32", "murmur2"] | Partitioner | None = None,
        donors: Iterable[str | os.PathLike[str]] = (),
        tier: str | os.PathLike[str] | None = None,
        replicas: Sequence[str | os.PathLike[str]] | None = None,
        acks: Acks | None = None,
        replica_timeout: Duration = 1.0,
        forget_replicas: Sequence[str | os.PathLike[str]] = (),
        alter: bool = False,
        **policies: Unpack[Policies],
    ) -> Topic:
        """Open the topic in the directory `path`. The name of the directory is the name of the topic.

        With mode="a", the default, the topic is open for appending and reading. With `create`, a topic that does not
        exist is created. Opening recovers the log after a crash, and takes the locks of all partitions. With `shared`,
        several processes append to one topic, and take turns at its partitions; one that is stopped, or that has the
        topic without `shared`, is waited for up to `wait` (a duration) at each of its partitions. With mode="r" nothing
        is locked, created or written.

        With mode="r", `path` may also be a place that `loglib.offload.tier` has filled: a directory, or a URI such as
        "s3://bucket/logs/clicks". Its content at opening is read, and `follow` ends at its end. With `tier=place` the
        topic in the directory begins where that place begins: what retention has dropped is read from the place, and
        the rest from the directory, as one range of offsets. Object stores need the extra [arrow].

        The policies are stored with the topic, and need not be given again. The stored ones count, so that a restart
        undoes no change of an operator: a policy that differs is ignored, with a warning in the log. With `alter=True`
        it replaces the stored one, as the method `alter` does. A duration is a number of seconds, a timedelta, or text
        such as "90s" or "7d"; a size is a number of bytes, or text such as "64MiB".

        - `partitions`: int from 1 to 10,000, by default 1. Order, parallel reading and locking are by partition. A
          writer keeps three files open for each. It cannot change.
        - `partitioner`: how a key chooses the partition. "crc32", the default, works as in librdkafka; "murmur2" as in
          Kafka's Java client. Or a function of the key and the number of partitions. The topic stores only its
          `__name__`, so give the function at each open that appends by key; otherwise such an append raises
          `ValueError`. It cannot change.
        - `flush`: a `FlushPolicy`: when records become durable, and visible to readers. By default after 50 ms, 100,000
          records or 64 MiB.
        - `retention`: a `Retention`: when whole segments are dropped. By default 7 days after they are sealed.
        - `segment_bytes`: size, at least 4096, by default 1 GiB. A segment is sealed before it grows larger. It is
          sealed sooner if a limit of bytes or of free space in `retention` needs smaller segments.
        - `segment_age`: duration, by default 1 day, from the first batch of a segment until it is sealed. Or None.
        - `compression`: "none" by default, "zlib", "lz4" or "zstd". The last two need an extra to be installed.
        - `durability`: "disk", the default: a flush returns after fdatasync. "os": a flush returns when the operating
          system has the records. They then survive a killed process, not a power cut.
        - `batch_bytes`, `batch_records`: size and int, by default 1 MiB and 65,536. The bytes of keys and values, and
          the number of records, that fill a batch. A batch is compressed and checked as a whole.
        - `max_record_bytes`: size, by default 64 MiB, of value, key and headers together. A larger record is refused.
        - `permissions`: int, by default 0o600. The mode of the files: read and write bits only, including the owner's.
          Everyone who may read the files may enter the directories.
        - `producer_expiry`: duration, by default 7 days, after which the last number of a silent producer is
          forgotten. None: never.
        - `donors`: with mode="r", directories of other copies of the topic. A reader that meets damage, or a declared
          gap, hands out the batches of a donor if this log names these bytes; see `Reader.healed`. A donor that cannot
          be read is passed over.
        - `replicas`: list of the other directories to which each record is written, all of them each time
          (docs/copies.md). New ones must be empty.
        - `acks`: how many directories must have a record on their disk before it is acknowledged and readers see it:
          "all", the default; "quorum", more than half; or "leader", only this one. It is stored.
        - `replica_timeout`: duration, by default 1 s. A directory whose flush ends later than that after this one's is
          left out, until it has caught up by itself.
        - `forget_replicas`: list of directories, by path or id, that are lost for good: the topic is opened without
          them. An empty directory in `replicas` replaces each of them.

        Raises `FileNotFoundError` if there is no topic; `LockedError` if another writer has it; `CorruptLogError` if
        promised data is damaged; `UnsupportedFormatError` if a newer loglib made it; `NotLeaderError` with mode="a" for
        a copy, or for a topic with replicas if they are not named; `TooFewCopiesError` if too few of them can be
        reached; `ConfigConflictError` for another number of partitions or partitioner, and with mode="r" for any other
        policy that differs; `ValueError` and `TypeError` for invalid arguments.
        """
        check_options(cls.open, policies, POLICY_NAMES)
        return open_topic(
            path, mode=mode, create=create, shared=shared, wait=wait, partitions=partitions, partitioner=partitioner,
            donors=donors, tier=tier, replicas=replicas, acks=acks, replica_timeout=replica_timeout,
            forget_replicas=forget_replicas, alter=alter, **policies,
        )  # fmt: skip

    @staticmethod
    def delete(path: str | os.PathLike[str]) -> None:
        """Delete a topic with all its records and groups. This cannot be undone.

        A link to a topic is refused (`LogError`), because its target may belong to another user. Raises
        `FileNotFoundError` if there is no topic, `LockedError` if a writer has it, and `GroupBusyError` if a group
        that is stored with it has members. Readers get `LogMovedError`.
        """
        catalog.delete(path, check_unused=_check_no_members)

    @staticmethod
    def add_partitions(path: str | os.PathLike[str], partitions: int) -> None:
        """Add empty partitions to a topic, up to a total of `partitions`.

        **Keys move.** From then on a key may belong to another partition. So older and newer records of one key can
        be in two partitions, and no order holds between them. A warning is logged.

        Topics that are open for reading, their readers that follow, and members of groups take the new partitions in
        within a second, and read them from their begin. With `shared=True` only reading continues: an append raises
        `LogMovedError` until the topic is opened again, because its keys would go to other partitions. So does the end
        of a transaction in which keys chose among the former partitions.

        Raises `ValueError` if the topic has that many or more, and the errors of `delete`.
        """
        catalog.add_partitions(path, partitions, check_unused=_check_no_members)

    def __enter__(self) -> Topic:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if forking:
            leave_parent()
        if hasattr(self, "_placement") and self.mode == "a" and not self.closed:
            warnings.warn(f"topic {self.path} was not closed", ResourceWarning, stacklevel=2, source=self)
            if self._background.is_here() or (self._replicas is not None and self._replicas.is_here()):
                # Garbage collection runs in the middle of a flush, and closing would wait for the flush's locks.
                threading.Thread(target=self.close, name="loglib-close").start()
            else:
                self.close()

    def _facts(self) -> Iterator[tuple[str, object]]:
        yield "at", self.path
        yield "partitions", len(self.partitions)
        yield ("", "closed") if self.closed else ("mode", self.mode)
        if not self.closed:
            yield "holding", sized(sum(each.high_watermark - each.log_start_offset for each in self.partitions))
            yield "groups", ", ".join(self.groups()) or "none"

    def __reduce__(self) -> tuple[Any, ...]:
        if self.mode == "a":
            said = "holds locks and cannot be pickled; pickle its path, or a topic with mode='r'"
            raise TypeError(f"topic {self.path} {said}")
        path, tier = self._parts.opened_by
        return partial(Topic.open, mode="r", tier=tier, donors=self._parts.donors), (path,)

    @property
    def config(self) -> TopicConfig:
        """The policies of the topic now. A change by any process is here, and in use, within a second."""
        return self._policies.read() if self.mode == "r" else self._policies.config

    @property
    def closed(self) -> bool:
        """True if the topic is closed, or belongs to the parent process."""
        return self._handles.closed is not None

    @property
    def shared(self) -> bool:
        """True if it is open for writing with `shared=True`: other processes may append, too."""
        return self._shared and self.mode == "a"

    def alter(self, **policies: Unpack[Policies]) -> None:
        """Change policies, such as `retention=Retention(...)`, now and for later openings of the topic.

        The names are the same as in `Topic.open`. All processes that have the topic open use the new policies within a
        second; a topic without a thread, because no policy goes by the clock, when it flushes. With `shared=True` a
        topic is opened to change it beside its writer. The number of partitions and the partitioner cannot change,
        because keys would move: `ValueError`. Each change is logged. It works on a full disk, where a smaller
        `retention` makes room; `StorageFullError` if nothing could be stored. An error of `append` comes from records
        that waited, and the policies have changed then.
        """
        self._placement.check_writable()
        self._refuse_inside()
        check_options(self.alter, policies, {*POLICY_NAMES, *FIXED})
        for name in FIXED:
            if name in policies:
                raise ValueError(f"{name} of an existing topic cannot change: keys would move; copy to a new topic")
        if self._replicas is not None:
            check_durability(policies)
        codec_id(self.config.changed(policies).compression)  # a topic whose codec is missing could not be opened
        try:
            with self._policies.lock:
                writers, is_member = list(self._handles.writers), self._replicas is not None
                self._policies.use(self._policies.store(policies, writers, is_member=is_member))
        finally:
            self._background.look_soon()  # a look may have been skipped while the lock was held

    # --- partitions ------------------------------------------------------------------------------

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The partitions, by number. A topic that is open for reading has those that were added since, too."""
        self._take_in_added()
        return self._partitions.all()

    @property
    def _accesses(self) -> tuple[Access, ...]:
        self._take_in_added()
        return self._partitions.accesses()

    def partition(self, number: int) -> Partition:
        """The partition with this number; `ValueError` if there is none."""
        given = partition_number(number)
        if given not in range(len(self._partitions)):
            self._take_in_added()
        if given not in range(len(self._partitions)):
            raise ValueError(f"{self.path} has partitions 0 to {len(self._partitions) - 1}, not {given}")
        return self._partitions[given]

    def _take_in_added(self) -> None:
        """Take in the partitions that were added. If there are none, this costs one look for the next directory."""
        if not self._grows or self.closed:
            return
        files, path = self._files, self.path
        if not files.exists(topic_file.partition_directory(path, len(self._partitions))):
            return
        described = topic_file.read(files, path)
        if described is not None and described[0] == self.log_id:  # otherwise the readers say that it was moved
            self._partitions.grow(described[1].partitions)
            self._policies.config = replace(self._policies.config, partitions=len(self._partitions))

    def _logs(self) -> list[Log]:
        return [each.log for each in self._accesses]

    # --- read ------------------------------------------------------------------------------------

    def _sources(self) -> Sources:
        self._handles.check_open()
        return Sources(self._logs(), self._clock, self._handles.track, self._logs if self._grows else None)

    def verify(self, *, progress: Progress | None = None, tail_only: bool = False) -> VerifyReport:
        """Read and check everything, and report all damage: file, byte, and lost offsets.

        Changes nothing. `Partition.verify` does the same for one partition. `progress` is called after each block of
        batches with two numbers of bytes: those that are checked, and those of the whole topic. With `tail_only` it
        checks of each partition only the watermark, the sizes of the segments, the headers of the last two and the last
        batch, which are a few reads.
        """
        from .log.verify import VerifyReport, verify_description, verify_logs

        self._handles.check_open()
        described = verify_description(self._files, self.path, self.log_id)
        return VerifyReport.of_all([described, verify_logs(self._logs(), progress, tail_only=tail_only)])

    def replicas(self) -> list[ReplicaState]:
        """The directories of a topic with replicas: how far each is, and why it is left out. This one is the first.

        The list is empty for a topic without replicas, and for a reader.
        """
        self._handles.check_open()
        return [] if self._replicas is None else self._replicas.states()

    def on_flush(self, observer: Callable[[float], object]) -> None:
        """Call `observer` with the duration in seconds after each flush of a partition, in the thread that flushed.

        An error of the observer is logged, and does nothing else.
        """
        self._handles.check_open()
        self._handles.flush_observers.append(observer)

    # --- housekeeping ----------------------------------------------------------------------------

    def retain(self, *, dry_run: bool = False) -> list[SegmentDecision]:
        """Drop segments by the retention policy, and explain the decision for every segment.

        With `dry_run` nothing is dropped. Retention also runs automatically when a segment is rolled and once a
        minute. In a shared topic it also drops segments of partitions that no process holds. A dry run explains
        all partitions.
        """
        if dry_run:
            self._handles.check_open()
            if self.mode == "r":
                self._policies.read()
            return self._retention.explain(range(len(self.partitions)))
        self._placement.check_writable()
        self._refuse_inside()
        if not self._policies.watched:
            self._policies.look()
        return self._retention.retain()

    def close(self) -> None:
        """End the readers, flush, and release the locks. Released also when the flush fails.

        A reader in use that has an end or a timeout raises `LogClosedError`. A reader that follows for ever just
        ends.

        After an interrupt it may be called again, and continues. In a signal handler that interrupted another call
        on this topic, it returns immediately and a thread does the rest, because that call holds locks that closing
        needs. The interpreter waits for the thread.
        """
        if self._released or isinstance(self._handles.closed, ForkedHandleError):
            return
        if self._is_interrupted():
            threading.Thread(target=self.close, name="loglib-close").start()
            return
        with self._handles.opening:
            self._handles.closed = self._handles.closed or LogClosedError(
                f"{self.path} is closed; open the topic again"
            )
        self._placement.sticky = None
        self._serving.leave()
        self._handles.store = None
        self._background.stop()
        self._unended += self._handles.end_readers()
        try_each(self._partitions.accesses(), Access.close, self._failed)
        if self._handles.turns is not None:
            self._handles.turns.close()
        if self._replicas is not None:
            self._replicas.close()
        unforeseen = [each for each in self._failed if not isinstance(each[1], LogError | OSError)]
        if unforeseen:  # for example no memory: the partition is still open, and may be closed again
            self._failed = [each for each in self._failed if each not in unforeseen]
            raise unforeseen[0][1]
        self._released = True
        _in_child.discard(self._abandon_in_child)
        at_exit.discard(self.close)
        failures = self._unended + [error for _, error in self._failed]
        if failures:
            raise together(failures)

    def _is_interrupted(self) -> bool:
        """True if this thread is in the middle of another call on this topic."""
        parts, others = self._partitions, [self._retention, self._policies, self._background]
        return is_interrupting([self, *parts.all(), *parts.accesses(), *self._handles.writers, *others])

    def _refuse_inside(self) -> None:
        """`LogError` in the middle of another call of this thread: what the call holds may be waited for."""
        if self._is_interrupted():
            refuse(self.path)

    def _abandon_in_child(self, parent_pid: int) -> None:
        """After a fork: only the parent may write and close the topic."""
        self._handles.abandon_in_child(ForkedHandleError(self.path, parent_pid))

    # --- inside ----------------------------------------------------------------------------------

    def _start_writing(self) -> None:
        try:
            warn_of_other_hosts(self._files, [self.path] if self._replicas is None else self._replicas.paths)
            codec_id(self.config.compression)  # so that a missing package is found now, not at the first flush
            if not self._shared:
                own_all(self._accesses, self.path)
                if self._replicas is None:
                    # Before the locks were taken it may have been replaced.
                    check_still(self._files, self.path, self.log_id, self.config.partitions)
                else:
                    self._replicas.begin([each.writer() for each in self._accesses])
            self._serving.apply()
            self._policies.begin()
        except BaseException:
            self.close()
            raise
        _in_child.add(self._abandon_in_child)
        at_exit.add(self.close)


def open_topic(
    path: str | os.PathLike[str],
    *,
    files: Files = REAL,
    clock: Callable[[], int] = SYSTEM,
    mode: Literal["a", "r"] = "a",
    shared: bool = False,
    wait: Duration = 5.0,
    create: bool = True,
    partitions: int | None = None,
    partitioner: Literal["crc32", "murmur2"] | Partitioner | None = None,
    donors: Iterable[str | os.PathLike[str]] = (),
    tier: str | os.PathLike[str] | None = None,
    replicas: Sequence[str | os.PathLike[str]] | None = None,
    acks: Acks | None = None,
    replica_timeout: Duration = 1.0,
    forget_replicas: Sequence[str | os.PathLike[str]] = (),
    alter: bool = False,
    background: bool = True,
    **policies: Unpack[Policies],
) -> Topic:
    """`Topic.open` on simulated files, or by a simulated clock: for simulations and tests.

    `files` is a file system, such as those of `loglib.testing`. `clock` is a function that returns the time of
    day in microseconds UTC, which is believed, or a `loglib.system.clock.Clock`. Without `background` the topic has no
    thread, and does nothing by the clock. A topic that does not exist is created. The rest is as in `Topic.open`.
    """
    if mode not in ("a", "r"):
        raise ValueError(f"mode must be 'a' or 'r', not {mode!r}")
    if alter and mode == "r":
        raise ValueError("alter=True changes the topic's policies, and mode='r' writes nothing")
    by_default = {name for name, value in policies.items() if value is None} - {"segment_age", "producer_expiry"}
    given: dict[str, Any] = {name: value for name, value in policies.items() if name not in by_default}
    if partitions is not None:
        given["partitions"] = partitions
    if partitioner is not None:
        given["partitioner"] = name_of(partitioner)
    parts = parts_of(
        files, path, mode=mode, shared=shared, donors=donors, tier=tier, replicas=replicas, acks=acks,
        replica_timeout=replica_timeout, forget_replicas=forget_replicas,
    )  # fmt: skip
    absolute, files, request = parts.path, parts.files, parts.replicas
    stamp = topic_file.stamp(files, absolute) if mode == "a" else None  # first: what is read then is not older
    described = topic_file.read(files, absolute)
    if described is None:
        if request is not None:
            _check_new(files, request)
        if mode == "r" or not create:
            raise FileNotFoundError(errno.ENOENT, catalog.what_is_here(files, absolute, mode), absolute)
        topic_file.create(files, absolute, TopicConfig(**given), now=clock())
        stamp = topic_file.stamp(files, absolute)
        described = topic_file.read(files, absolute)
    if described is None:
        raise FileNotFoundError(errno.ENOENT, "the topic was removed while it was opened", absolute)
    log_id, config = described
    changed = to_change(absolute, config, given, mode=mode, alter=alter)
    if request is not None:
        check_durability(config.differences(given))
    function = partitioner if callable(partitioner) else BUILT_IN.get(config.partitioner)
    assembled: ReplicaSet | None = None
    if request is not None and (request.paths or parts.is_member):
        assembled = _assemble(files, absolute, request, log_id, config, now=clock())
    with ExitStack() as opened:
        if assembled is not None:
            opened.callback(assembled.close)
        topic = Topic(
            parts, log_id, config, stamp,
            mode=mode, shared=shared, wait=wait, partitioner=function, clock=clock, replicas=assembled,
            background=background,
        )  # fmt: skip
        opened.pop_all()
        opened.callback(topic.close)
        if changed:
            topic.alter(**cast(Policies, changed))
        opened.pop_all()
    return topic
