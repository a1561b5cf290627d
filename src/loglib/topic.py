"""Topic: N partitions in one directory.

Invariant: the directory describes itself. `topic.json` has the format version, the log id that salts every
checksum, and the policies. A topic is built aside and renamed, so a directory with a `topic.json` is whole.
An argument that differs from it is an error, or changes it with a line in the log.

Writers: with mode="a", a topic holds the locks of all its partitions, so a second writer is refused at
once. With shared=True it takes a partition's lock when it first appends there, so the keyless records of
several processes go to different partitions.

Threads: safe for all.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache, partial
from itertools import chain
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack, cast

from .append.access import Access
from .append.batching import Load, append_loads, append_numbered, weigh
from .append.flusher import Flusher
from .append.handles import Handles
from .append.partitioner import BUILT_IN, Partitioner, name_of
from .append.placement import Placement
from .append.record_arguments import HeadersLike, gather_columns, record_columns
from .append.retention_pass import RetentionRunner
from .append.stats import TopicStats, stats_of_partition
from .append.writer import WRITER_DESCRIPTORS, Writer
from .config.arguments import Start, check_names, donor_paths, partition_number, topic_path
from .config.policies import FIXED, Durability, FlushPolicy, Policies, Retention, TopicConfig
from .config.uri import is_remote
from .errors import (
    ConfigConflictError,
    ForkedHandleError,
    GroupNotFoundError,
    LogClosedError,
    LogError,
    LogMovedError,
    TooManyFilesError,
    is_out_of_descriptors,
    report_not_appended,
    together,
)
from .format.batch import Batch
from .format.codec import codec_id
from .format.columns import Columns
from .format.display import Shown, sized
from .format.header import NO_PRODUCER, Producer
from .format.record import OffsetRange, Position, new_tuple
from .groups import Group, GroupInfo, Move, TopicPartition, administration, several_topics
from .groups.directory import GroupDirectory, check_logs_differ, group_names
from .groups.group import GroupOptions
from .groups.several_topics import TopicWithGroups
from .log import catalog, copy_role, topic_file
from .log.lag import Lag
from .log.log import Log
from .log.producers import parse_producer
from .log.reader import OnGap, Reader, StartLike
from .log.tables import Columnar
from .log.verify import Progress, VerifyReport, size_of, verify_description, verify_log
from .open_topic import OpenTopic, opens_paths
from .partition import Partition
from .retention import ArchiveFloors, SegmentDecision
from .segment import Identity
from .system.clock import SYSTEM, clock_of
from .system.directory import Directory
from .system.files import REAL, Files
from .system.mounts import network_file_system
from .system.process import at_exit, forking, in_child, is_interrupting, leave_parent, try_each
from .system.reentry import refuse
from .transactions.participant import Participant

if TYPE_CHECKING:  # loaded when a topic has copies, or segments elsewhere
    import pyarrow as pa

    from .copies.member_list import Acks
    from .copies.replica import ReplicaState
    from .copies.replica_set import ReplicaSet

__all__ = ["Topic", "open_topic", "topics"]

logger = logging.getLogger("loglib")

_HOUSEKEEPING_S = 60.0  # once a minute is often enough, because retention and rolling by age work in hours

_in_child = in_child()


class _Part(NamedTuple):
    """A partition as the topic has it, and as the caller has it."""

    access: Access
    partition: Partition


class Topic(Shown, Columnar, TopicWithGroups):
    """A named, partitioned log. Open one with `Topic.open`."""

    def __init__(
        self,
        path: str,
        log_id: bytes,
        config: TopicConfig,
        *,
        mode: Literal["a", "r"],
        shared: bool,
        partitioner: Partitioner | None,
        files: Files,
        clock: Callable[[], int],
        donors: tuple[str, ...] = (),
        opened_by: tuple[str, str | None] | None = None,
        make_log: Callable[[Files, str, Identity], Log] = Log,
        replicas: ReplicaSet | None = None,
        grows: bool = False,
        background: bool = True,
    ) -> None:
        """`grows`: whether partitions may be added while it is open."""
        self.path = path
        self._background = background  # whether it may have a thread
        self.name = os.path.basename(path)
        self.log_id = log_id
        self.config = config
        self.mode = mode
        self._shared = shared
        self._files = files
        self._clock = clock
        self._opened_by = opened_by or (path, None)  # path or URI, and place: how another process opens it for reading
        self._handles = Handles()
        self._handles.topic = weakref.ref(self)
        self._replicas = replicas
        self._flusher: Flusher | None = None
        self._released = False
        self._oldest: dict[int, tuple[int, int]] = {}  # of each partition: its log start, and the append time there
        self._unended: list[Exception] = []  # errors of readers and groups when the topic was closed
        self._failed: list[tuple[Access, Exception]] = []  # partitions whose closing raised, with the errors
        self._serving = Participant(files, path, self._handles, clock)
        self._retention = RetentionRunner(
            files, path, config, clock_of(clock),
            shared=self.shared, committed=partial(_committed_of, weakref.ref(self)), archives=_floors_of,
        )  # fmt: skip
        self._make_access = partial(
            _access, path, log_id, donors, files=files, config=config,
            writable=mode == "a", clock=clock, handles=self._handles, retention=self._retention,
            check=partial(_check_still, files, path, config.partitions) if shared else None,
            on_hold=self._serving.apply if shared else None,
            make_log=make_log, replicated=replicas,
        )  # fmt: skip
        self._grows = grows
        self._parts_made: dict[int, _Part] = {}  # by number; two threads that add one at once keep the same one
        self._make_parts(config.partitions)
        self._placement = Placement(
            path, self._accesses, self._handles, partitioner, named=config.partitioner, writable=mode == "a"
        )
        self._read_archive = _with_tail
        self._donors = donors
        if mode == "a":
            self._start_writing()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        partitions: int | None = None,
        flush: FlushPolicy | None = None,
        retention: Retention | None = None,
        segment_bytes: int | None = None,
        segment_age: timedelta | EllipsisType | None = ...,
        compression: str | None = None,
        durability: Durability | None = None,
        batch_bytes: int | None = None,
        batch_records: int | None = None,
        max_record_bytes: int | None = None,
        partitioner: Literal["crc32", "murmur2"] | Partitioner | None = None,
        permissions: int | None = None,
        producer_expiry: timedelta | EllipsisType | None = ...,
        shared: bool = False,
        mode: Literal["a", "r"] = "a",
        create: bool = True,
        donors: Iterable[str | os.PathLike[str]] = (),
        tier: str | os.PathLike[str] | None = None,
        replicas: Sequence[str | os.PathLike[str]] | None = None,
        acks: Acks | None = None,
        replica_timeout: float = 1.0,
        lose: Sequence[str | os.PathLike[str]] = (),
    ) -> Topic:
        """Open the topic in the directory `path`. The name of the directory is the name of the topic.

        With mode="a", the default, the topic is open for appending and reading. If there is no topic, it is
        created, unless `create` is False. Opening recovers the log after a crash, and takes the locks of all
        partitions. With `shared`, several processes append to one topic: each takes the lock of a partition
        when it first appends there. With mode="r" nothing is locked, created or written.

        With mode="r", `path` may also be a place that `loglib.tier` has filled: a directory, or a URI such as
        "s3://bucket/logs/clicks". It is read as it is when it is opened, and `follow` ends at its end. With
        `tier=place` the topic in the directory begins where that place begins: what retention has dropped is read from
        the place, and the rest from the directory, as one range of offsets. Object stores need the extra [arrow].

        The policies are stored with the topic, and need not be given again. A policy that differs from the
        stored one replaces it, as `alter` does.

        - `partitions`: int from 1 to 10,000, by default 1. Order, parallel reading and locking are by
          partition. A writer keeps three files open for each. It cannot change.
        - `partitioner`: how a key chooses the partition. "crc32", the default, works as in librdkafka; "murmur2"
          as in Kafka's Java client. Or a function of the key and the number of partitions. The topic stores only
          its `__name__`, so give the function at each open that appends by key. Without it, such an append
          raises `ValueError`. It cannot change.
        - `flush`: a `FlushPolicy`: when records become durable, and visible to readers. By default after 50 ms,
          100,000 records or 64 MiB.
        - `retention`: a `Retention`: when whole segments are dropped. By default 7 days after they are sealed.
        - `segment_bytes`: int, at least 4096, by default 1 GiB. A segment is sealed before it grows larger. It is
          sealed sooner if a limit of bytes or of free space in `retention` needs smaller segments.
        - `segment_age`: timedelta, by default 1 day. A segment is sealed when its first batch is that old. None:
          age seals no segment.
        - `compression`: "none" by default, "zlib", "lz4" or "zstd". The last two need an extra to be installed.
        - `durability`: "disk", the default: a flush returns after fdatasync. "os": a flush returns when the
          operating system has the records. They then survive a killed process, not a power cut.
        - `batch_bytes`, `batch_records`: int, by default 1 MiB and 65,536. The bytes of keys and values, and the
          number of records, that fill a batch. A batch is compressed and checked as a whole.
        - `max_record_bytes`: int, by default 64 MiB, of value, key and headers together. A larger record is
          refused: `RecordTooLargeError`.
        - `permissions`: int, by default 0o600. The mode of the files: read and write bits only, including the
          owner's. Everyone who may read the files may enter the directories.
        - `producer_expiry`: timedelta, by default 7 days. A producer's last number is forgotten when the producer
          has been silent for that long. None: never.

        - `donors`: with mode="r", directories of other copies of the topic. A reader that meets damage, or a declared
          gap, hands out what one of them has, if this log names these bytes; see `Reader.healed`. A donor that cannot
          be read is passed over.

        With `replicas` the topic is written in several directories at once; docs/copies.md has the whole.

        - `replicas`: list of the other directories, all of them each time. New ones must be empty.
        - `acks`: how many directories must have a record on their disk before it is acknowledged and readers see it:
          "all", the default; "quorum", more than half; or "leader", only this one. It is stored.
        - `replica_timeout`: seconds, by default 1. A directory that takes longer for a flush than this one and so many
          seconds is left out, until it has caught up by itself.
        - `lose`: list of directories, by their path or id, that are lost for good: go on without them. What stands in
          `replicas`, too, and is empty, takes their place.

        `loglib.testing.open_topic` opens a topic on simulated files, or by a simulated clock.

        Raises `FileNotFoundError` if there is no topic, for mode="r" or create=False; `LockedError` if another
        writer has it; `CorruptLogError` if promised data is damaged; `UnsupportedFormatError` if a newer loglib
        made it; `NotLeaderError` with mode="a" for a copy, or for a topic with replicas if they are not named;
        `TooFewCopiesError` if too few of them can be reached; `ConfigConflictError` for another number of partitions or
        partitioner, and with mode="r" for any other policy that differs; `ValueError` and `TypeError` for invalid
        arguments.
        """
        given: dict[str, Any] = {
            "flush": flush, "retention": retention, "segment_bytes": segment_bytes, "compression": compression,
            "durability": durability, "batch_bytes": batch_bytes, "batch_records": batch_records,
            "max_record_bytes": max_record_bytes, "permissions": permissions,
        }  # fmt: skip
        if segment_age is not ...:
            given["segment_age"] = segment_age
        if producer_expiry is not ...:
            given["producer_expiry"] = producer_expiry
        return open_topic(
            path, mode=mode, shared=shared, create=create, partitions=partitions, partitioner=partitioner,
            donors=donors, tier=tier, replicas=replicas, acks=acks, replica_timeout=replica_timeout, lose=lose,
            **cast(Policies, given),
        )  # fmt: skip

    @classmethod
    def reconfigure(cls, path: str | os.PathLike[str], **policies: Unpack[Policies]) -> None:
        """Change policies of a topic that no writer has open: open it, call `alter`, and close it."""
        with cls.open(path) as topic:
            topic.alter(**policies)

    @staticmethod
    def delete(path: str | os.PathLike[str]) -> None:
        """Delete a topic with all its records and groups. This cannot be undone.

        A link to a topic is refused (`LogError`), because its target may belong to another user. Raises
        `FileNotFoundError` if there is no topic, `LockedError` if a writer has it, and `GroupBusyError` if a group
        that is stored with it has members. Readers get `LogMovedError`.
        """
        catalog.delete(path, check_unused=administration.check_no_members)

    @staticmethod
    def add_partitions(path: str | os.PathLike[str], partitions: int) -> None:
        """Add empty partitions to a topic, up to a total of `partitions`.

        **Keys move.** From then on a key may belong to another partition. So older and newer records of one key can
        be in two partitions, and no order holds between them. A warning is logged.

        Topics that are open for reading, their readers that follow, and members of groups take the new partitions in
        within a second, and read them from their begin. With `shared=True` only reading goes on: an append raises
        `LogMovedError` until the topic is opened again, because its keys would go to other partitions. So does the end
        of a transaction in which keys chose among the former partitions.

        Raises `ValueError` if the topic has that many or more, `FileNotFoundError` if there is no topic, `LockedError`
        if a writer has it, and `GroupBusyError` if a group that is stored with it has members.
        """
        catalog.add_partitions(path, partitions, check_unused=administration.check_no_members)

    def __enter__(self) -> Topic:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if forking:
            leave_parent()
        if hasattr(self, "_placement") and self.mode == "a" and not self.closed:
            warnings.warn(f"topic {self.path} was not closed", ResourceWarning, stacklevel=2, source=self)
            threads = [each for each in (self._flusher, self._replicas) if each is not None]
            if any(each.is_here() for each in threads):
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
        return _open_for_reading, (*self._opened_by, self._donors)

    @property
    def closed(self) -> bool:
        """Whether the topic is closed, or belongs to the parent process."""
        return self._handles.closed is not None

    @property
    def shared(self) -> bool:
        """Whether it is open for writing with `shared=True`: other processes may append, too."""
        return self._shared and self.mode == "a"

    def alter(self, **policies: Unpack[Policies]) -> None:
        """Change policies, such as `retention=Retention(...)`, now and for later openings of the topic.

        The names are the same as in `Topic.open`. Other processes that have the topic open (with shared=True, or for
        reading) use the old policies until they open it again. The number of partitions and the partitioner cannot
        change, because keys would move: `ValueError`. Each change is logged.
        """
        self._placement.check_writable()
        self._refuse_inside()
        for name in FIXED:
            if name in policies:
                raise ValueError(f"{name} of an existing topic cannot change: keys would move; copy to a new topic")
        if self._replicas is not None and policies.get("durability", "disk") != "disk":
            raise ValueError("a topic with replicas has durability='disk'")
        with Directory.open(self._files, self.path) as directory:
            if not all(writer.is_in(directory) for writer in list(self._handles.writers)):
                raise LogMovedError(self.path, "has other partitions than those that were locked")
            directory.lock_for_a_moment("whoever changes its policies", advice="try again")
            if self._replicas is None:
                copy_role.check_leader(self._files, self.path)
            described = topic_file.read(self._files, self.path)
            before = self.config if described is None else described[1]  # another process may have changed it
            config = replace(before, **policies)
            topic_file.write(directory, self.log_id, config)
        for name, value in policies.items():
            logger.info("%s: %s is %r now, and was %r", self.path, name, value, getattr(before, name))
        self._use(config)

    # --- partitions ------------------------------------------------------------------------------

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The partitions, by number. A topic that is open for reading has those that were added since, too."""
        self._take_in_added()
        return tuple([each.partition for each in list(self._parts_made.values())])

    @property
    def _accesses(self) -> tuple[Access, ...]:
        self._take_in_added()
        return tuple([each.access for each in list(self._parts_made.values())])

    def partition(self, number: int) -> Partition:
        """The partition with this number; `ValueError` if there is none."""
        given = partition_number(number)
        if given not in self._parts_made:
            self._take_in_added()
        if given not in self._parts_made:
            raise ValueError(f"{self.path} has partitions 0 to {len(self._parts_made) - 1}, not {given}")
        return self._parts_made[given].partition

    def _take_in_added(self) -> None:
        """Take in the partitions that were added. Without any this costs a look whether the next directory is there."""
        if not self._grows or self.closed:
            return
        files, path = self._files, self.path
        if not files.exists(topic_file.partition_directory(path, len(self._parts_made))):
            return
        described = topic_file.read(files, path)
        if described is not None and described[0] == self.log_id:  # otherwise the readers say that it was moved
            self._make_parts(described[1].partitions)
            self.config = replace(self.config, partitions=len(self._parts_made))

    def _make_parts(self, count: int) -> None:
        for number in range(len(self._parts_made), count):
            access = self._make_access(number)
            self._parts_made.setdefault(number, _Part(access, Partition(access, _with_tail)))

    def _logs(self) -> list[Log]:
        return [each.log for each in self._accesses]

    # --- append ----------------------------------------------------------------------------------

    def append(
        self,
        value: bytes | None,
        key: bytes | None = None,
        *,
        timestamp: int | datetime | None = None,
        headers: HeadersLike | None = None,
        partition: int | None = None,
        sync: bool = False,
        producer: tuple[str, int] | None = None,
    ) -> Position:
        """Append one record and return its partition and offset.

        The record is buffered. It becomes durable and visible to readers at the next flush; with `sync=True`
        before the call returns. A key chooses the partition. Records without a key go to a partition drawn at
        random until a batch is full. `timestamp` is the event's time, in microseconds UTC or as an aware datetime;
        by default it is the time of appending.

        `producer`, a name and a rising number, makes the call idempotent: a repeated call appends nothing and returns
        the first position. Each such record is a batch of its own, which costs about 140 bytes; `append_many` numbers
        many at once. Without a key and a partition, the name and the number choose the partition.

        Raises `RecordTooLargeError` (nothing is appended), `StorageFullError`, `WriterFailedError` after a failed
        flush, and `LockedError` if another writer has the partition.
        """
        # The common case is written out without a call: half the time of the general way (bench/RESULTS.md).
        writer = self._placement.sticky
        if (
            key is None and partition is None and timestamp is None and headers is None
            and not sync and producer is None and type(value) is bytes and writer is not None
            and not writer.publication.in_progress and not writer.has_lock()  # else `append` may refuse
        ):  # fmt: skip
            with writer.lock:
                batch = writer.batch
                room = batch.plain_room - len(value)
                if room > 0:  # the record that fills the batch may make a flush due
                    try:
                        position = next(batch.positions, None)
                        if position is not None:
                            batch.plain_room = room
                            batch.values.append(value)
                            return position
                    except BaseException:
                        batch.resume()  # an interrupt came between the position and the value
                        raise
        if (
            (sync or self.config.flush.records == 1) and type(value) is bytes and key is None and partition is None
            and timestamp is None and headers is None and producer is None
        ):  # fmt: skip
            if writer is None or len(self._handles.writers) > 1:
                writer = self._placement.choose(1, len(value))
            offset = writer.append_lone(value, sync=sync)
            if offset is not None:
                return new_tuple(Position, (writer.partition, offset))
        columns, size = record_columns(value, key, timestamp, headers, limit_bytes=self.config.max_record_bytes)
        if producer is not None:
            return self._append_numbered(Load(columns, size), parse_producer(producer), partition, sync=sync)
        if partition is not None:
            writer = self._placement.writer_of(partition)
        elif columns.keys is not None and columns.keys[0] is not None:  # converted to bytes by now
            writer = self._placement.writer_of(self._placement.of_key(columns.keys[0]))
        else:
            writer = self._placement.choose(1, size)
        return new_tuple(Position, (writer.partition, writer.append(columns, size, sync=sync).start))

    def _append_numbered(self, load: Load, by: Producer, partition: int | None, *, sync: bool) -> Position:
        """Append one record of a producer. A repeated call must come to the same partition."""
        key = None if load.columns.keys is None else load.columns.keys[0]
        if partition is None:
            partition = self._placement.of_no_key(by) if key is None else self._placement.of_key(key)
        writer = self._placement.writer_of(partition)
        return Position(writer.partition, append_numbered(writer, load, self.config, by, sync=sync))

    def _append_at_once(
        self,
        value: bytes | None,
        key: bytes | None,
        *,
        timestamp: int | datetime | None,
        headers: HeadersLike | None,
        partition: int | None,
    ) -> Position | None:
        """`append`, for event loops: None if the call would wait for a disk or for a lock. Then nothing is appended."""
        columns, size = record_columns(value, key, timestamp, headers, limit_bytes=self.config.max_record_bytes)
        if partition is None and columns.keys is not None and columns.keys[0] is not None:
            partition = self._placement.of_key(columns.keys[0])
        if partition is None:
            writer: Writer | None = self._placement.choose(1, size) if self._handles.writers else None
        else:
            writer = self._parts_made[self.partition(partition).id].access.open_writer
        offset = None if writer is None else writer.append_at_once(columns, size)
        return None if writer is None or offset is None else Position(writer.partition, offset)

    def append_many(
        self,
        values: Iterable[bytes | None],
        *,
        keys: Iterable[bytes | None] | None = None,
        timestamps: Iterable[int | datetime] | None = None,
        headers: Iterable[HeadersLike | None] | None = None,
        partition: int | None = None,
        producer: tuple[str, int] | None = None,
    ) -> list[OffsetRange]:
        """Append many records in one call: the fast path. Returns the ranges of their offsets, by partition.

        With `keys`, records are spread over the partitions, and keep their order within each; otherwise all go
        to one partition. `producer`, a name and a rising number, makes the call idempotent (see
        `Partition.append_many` and `Partition.last_sequence`). Without keys it needs an explicit `partition`. The
        name and the number choose the partition of records with a null key.

        If an error comes midway, its `appended` has the ranges of the appended records. Its `not_appended` has the
        indexes of the other records: without a producer, append these again.
        """
        columns = gather_columns(values, keys, timestamps, headers)
        count = len(columns.values)
        if not count:
            return []
        by = NO_PRODUCER if producer is None else parse_producer(producer)
        groups = {0: columns}  # for an error before the partitions of the records are known
        loads: dict[Writer, Load] = {}
        try:
            if partition is None and columns.keys is None:
                if producer is not None:
                    raise ValueError(
                        "an idempotent append without keys must say partition=, to meet its first try again"
                    )
                load = weigh(columns, self.config)
                size = self.config.batch_bytes if load.size_bytes is None else load.size_bytes
                writer = self._placement.choose(count, size)
                loads[writer] = load
                groups = {writer.partition: columns}
            else:
                keyless = cache(lambda: self._placement.of_no_key(by))
                groups = self._placement.spread(columns, partition, keyless)
                for number, group in groups.items():
                    loads[self._placement.writer_of(number)] = weigh(group, self.config, by)
            return append_loads(loads, self.config, by)
        except BaseException as error:
            indexes: dict[int, Sequence[int]] = {number: range(count) for number in groups}
            if len(groups) > 1:  # the partition of each record is not kept, but can be computed again
                numbered = Columns(range(count), columns.keys)  # type: ignore[arg-type]
                again = self._placement.spread(numbered, None, keyless)
                indexes = {number: group.values for number, group in again.items()}  # type: ignore[misc]
            report_not_appended(error, indexes)
            raise

    def append_arrow(
        self,
        data: Any,
        *,
        value: str | None = None,
        key: str | None = None,
        timestamp: str | None = None,
        headers: str | None = None,
        partition: int | str | None = None,
        producer: tuple[str, int] | None = None,
    ) -> list[OffsetRange]:
        """Append the rows of a table in Arrow's memory, each as a record. Returns the ranges of their offsets.

        `data` is a pyarrow Table, RecordBatch or RecordBatchReader, or any object with `__arrow_c_stream__` or
        `__arrow_c_array__`: a data frame of Polars or pandas, a result of DuckDB. No object is made for a record. A
        stream is taken in pieces of about 16 MiB.

        `value`, `key`, `timestamp` and `headers` name the columns. By default these are the columns of the same
        names; only the value must be there. Values and keys are of any binary or string type. Timestamps have a zone,
        or are int64 microseconds UTC; null is the time of appending. Headers are lists of (key, value) structs or
        maps. `partition` is a number, or the name of a column of numbers; where that is null, the key chooses. Any
        other column is a `ValueError`, except `topic`, `partition`, `offset` and `timestampType` in the output of a
        log, which are left out.

        Everything else is as in `append_many`: the partitions of keys, limits, `producer`, and what an error says. A
        bad record is refused before anything is appended if the data is a Table or a RecordBatch; of other data only
        the first 16 MiB are checked ahead. Then `not_appended` counts the records that were taken. Needs the extra
        [arrow].
        """
        from .append.tables import Names, Route, append_table

        by = NO_PRODUCER if producer is None else parse_producer(producer)
        number = None if partition is None or isinstance(partition, str) else self.partition(partition).id
        names = Names(value, key, timestamp, headers, partition if isinstance(partition, str) else None)
        route = Route(
            self._placement.writer_of, number, len(self.partitions), self.config.partitioner,
            self._placement.partitioner, partial(self._placement.of_no_key, by),
        )  # fmt: skip
        return append_table(data, names, route, self.config, by, self._clock)

    def flush(self) -> None:
        """Make everything appended durable and visible to readers.

        All partitions are flushed before an error is raised. If several fail, the most important error is raised.
        It names the lost records of all partitions, and its `errors` has the other errors.
        """
        self._placement.check_writable()
        failed: list[tuple[Writer, Exception]] = []
        try:
            try_each(list(self._handles.writers), Writer.flush, failed)
        except BaseException:  # an interrupt: no call has raised the collected errors yet
            for writer, each in failed:
                if isinstance(each, LogError):
                    writer.raise_soon(each)
            raise
        if failed:
            raise together([each for _, each in failed])

    # --- read ------------------------------------------------------------------------------------

    def read(self, start: StartLike = "begin", end: StartLike | None = None, *, on_gap: OnGap = "raise") -> Reader:
        """A reader of all partitions that ends at `end`, or at the present end.

        `start` and `end` are "begin", "end", an aware datetime, an age (a timedelta, or "-15m"), an
        offset if there is one partition, or a mapping of partitions to these.

        When the reader comes to damaged bytes, it raises `CorruptLogError`. With `on_gap="skip"` it continues at
        the next whole batch, and `Reader.gaps` has the skipped offsets.
        """
        self._handles.check_open()
        return Reader(self._logs(), start, end=end, on_gap=on_gap, clock=self._clock, track=self._handles.track)

    def _parts(self) -> tuple[Access, ...]:
        return self._accesses

    def follow(
        self,
        start: StartLike = "end",
        timeout: float | None = None,
        *,
        spin: timedelta | None = None,
        on_gap: OnGap = "raise",
    ) -> Reader:
        """A reader that waits for more, for ever or until `timeout` seconds pass without a record.

        With `spin`, a timedelta, the reader looks again and again for so long before it sleeps. A record of another
        process then comes in about half the time. The price: a whole core while it looks, and other Python threads of
        this process hardly run. Where no core is free, records come later than without. A partition that this process
        writes is never waited for so.

        Partitions that are added meanwhile are read from their begin, within a second.
        """
        self._handles.check_open()
        return Reader(
            self._logs(), start, follow=True, timeout=timeout, spin=spin, on_gap=on_gap, clock=self._clock,
            track=self._handles.track, logs_now=self._logs if self._grows else None,
        )  # fmt: skip

    def batches(
        self, start: StartLike = "begin", end: StartLike | None = None, *, on_gap: OnGap = "raise"
    ) -> Iterator[Batch]:
        """Whole columns of all partitions, from `start` to `end` or to the present end."""
        return self.read(start, end, on_gap=on_gap).batches()

    def verify(self, *, progress: Progress | None = None) -> VerifyReport:
        """Read and check everything, and report all damage: file, byte, and lost offsets.

        Changes nothing. `Partition.verify` does the same for one partition. `progress` is called after each block of
        batches with two numbers of bytes: those that are checked, and those of the whole topic.
        """
        self._handles.check_open()
        reports = [verify_description(self._files, self.path, self.log_id)]
        sizes = [] if progress is None else [size_of(each.log) for each in self._accesses]
        for number, access in enumerate(self._accesses):
            done = sum(sizes[:number])
            told = None if progress is None else lambda more, done=done: progress(done + more, sum(sizes))
            reports.append(verify_log(access.log, told))
        return VerifyReport.of_all(reports)

    def stats(self) -> TopicStats:
        """Figures for monitoring: sizes, what this process has appended, times of flushes, lag of the groups.

        It reads no records and takes no lock: a fraction of a millisecond for each partition and each group. Rates are
        those between two moments: `later.rates_since(earlier)`. A group that is kept with another topic is in the
        figures of that topic.
        """
        self._handles.check_open()
        lag: dict[str, dict[int, Lag]] = {}
        for name in self.groups():
            with suppress(GroupNotFoundError):  # it has just been deleted
                found = administration.lag(self._group_directory(name))
                lag[name] = {each.partition: behind for each, behind in found.items()}
        partitions = tuple(stats_of_partition(each, self._oldest) for each in self._accesses)
        return TopicStats(self.name, time.monotonic(), partitions, lag)

    def copies(self) -> list[ReplicaState]:
        """The directories of a topic with replicas: how far each is, and why it is left out. This one is the first.

        The list is empty for a topic without replicas, and for a reader.
        """
        self._handles.check_open()
        return [] if self._replicas is None else self._replicas.states()

    def observe_flushes(self, observer: Callable[[float], object]) -> None:
        """Call `observer` with the duration in seconds after each flush of a partition, in the thread that flushed.

        An error of the observer is logged, and does nothing else.
        """
        self._handles.check_open()
        self._handles.flush_observers.append(observer)

    # --- consumer groups -------------------------------------------------------------------------

    def group(self, name: str, **options: Unpack[GroupOptions]) -> Group:
        """Join a consumer group. Its members share the partitions; each group gets all records.

        The topic may be open in either mode. `start` is where a group without a commit begins: "begin", "end",
        a time or an age. With a `member` name, a member gets its partitions back after a restart. `commit` says
        when handled records are committed: "after" (when the member asks for records, at most once in 0.1 s, and
        within 0.1 s while it waits for more), "manual" (only by `commit()`), or an interval in seconds instead
        of 0.1. `strategy` assigns the partitions: "range" as in the Kafka paper, "sticky" with the fewest moves.
        `on_assign` and `on_revoke` are called with lists of partitions; `on_revoke` before the partitions are
        committed and released. If the committed offset is no longer in the log, `on_out_of_range="start"` begins
        at `start` again instead of raising an error.
        """
        return Group(self._group_directory(name), **options)

    def groups(self) -> list[str]:
        """The sorted names of the consumer groups that are stored with this topic. Joins none of them."""
        self._handles.check_open()
        return group_names(self._files, self.path)

    def group_info(self, name: str, *, count_records: bool = False) -> GroupInfo:
        """A group's members, owners, commits and lag, without joining it: for monitoring.

        It has the partitions of this topic, by number. For all topics of a group use `loglib.group_info`.
        `count_records` also counts the records of the lag, by reading the header of every batch in it. Raises
        `GroupNotFoundError`, and `GroupElsewhereError` if the group is stored with another topic.
        """
        return several_topics.group_info(self, name, count_records=count_records)

    def reset_group(
        self, name: str, start: Start | Mapping[int, Start], *, dry_run: bool = False
    ) -> dict[int, Move]:
        """Move a group's committed offsets to a start, while it has no members; returns the old and new offsets.

        `start` is "begin", "end", a time, an age, or a mapping of partitions to these or to offsets. With
        `dry_run` nothing is committed. Raises `GroupBusyError` if the group has members, and
        `GroupElsewhereError` if it is stored with another topic.
        """
        return several_topics.reset_group(self, name, start, dry_run=dry_run)

    def evict_member(self, name: str, member: str) -> list[int]:
        """Take the partitions away from a hanging member of a group; returns its partitions of this topic.

        Other members claim them at once. The evicted member gets `StaleGenerationError` when it next asks for
        records or commits. Raises `LogError` if the group has no such member.
        """
        return several_topics.evict_member(self, name, member)

    def delete_group(self, name: str) -> None:
        """Delete a group and its commits: the next member that joins it begins at its own `start`.

        Raises `GroupBusyError` if the group has members, and `GroupNotFoundError` if there is no such group.
        """
        several_topics.delete_group(self, name)

    # --- housekeeping ----------------------------------------------------------------------------

    def retain(self, *, dry_run: bool = False) -> list[SegmentDecision]:
        """Drop segments by the retention policy, and explain the decision for every segment.

        With `dry_run` nothing is dropped. Retention also runs automatically when a segment is rolled and once a
        minute. In a shared topic it also drops segments of partitions that no process holds. A dry run explains
        all partitions.
        """
        if dry_run:
            self._handles.check_open()
            return self._retention.explain(range(len(self.partitions)))
        self._placement.check_writable()
        self._refuse_inside()
        return self._retention.retain()

    def close(self) -> None:
        """End the readers, flush, and release the locks. Released also when the flush fails.

        A reader in use that has an end or a timeout raises `LogClosedError`. A reader that follows for ever just
        ends.

        After an interrupt it may be called again, and continues. In a signal handler that interrupted another call
        on this topic, it returns at once and a thread does the rest, because that call holds locks that closing
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
        if self._flusher is not None:
            self._flusher.stop()
        self._unended += self._handles.end_readers()
        try_each([each.access for each in list(self._parts_made.values())], Access.close, self._failed)
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
        """Whether this thread is in the middle of another call on this topic."""
        parts = chain.from_iterable(list(self._parts_made.values()))
        return is_interrupting([self, *parts, *self._handles.writers, self._retention])

    def _refuse_inside(self) -> None:
        """`LogError` in the middle of another call of this thread: what the call holds may be waited for."""
        if self._is_interrupted():
            refuse(self.path)

    def _abandon_in_child(self, parent_pid: int) -> None:
        """After a fork: only the parent may write and close the topic."""
        self._handles.abandon_in_child(ForkedHandleError(self.path, parent_pid))

    def _group_directory(self, name: str, topics: Sequence[OpenTopic] = ()) -> GroupDirectory:
        """The directory of the group with this name, on this topic or on several."""
        check_names(name)
        self._handles.check_open()
        check_logs_differ({each.name: each.log_id for each in topics})
        find_logs = partial(_logs_of, topics or [self])
        durability, permissions = self.config.durability, self.config.permissions
        from .transactions.group_commits import StoreFence

        return GroupDirectory(
            self._files, self.path, self.log_id, name, find_logs(), durability, permissions, self._clock, StoreFence(),
            find_logs=find_logs,
            track=tuple(each._handles.track for each in topics or [self]),  # noqa: SLF001
            other_paths=tuple(each.path for each in topics if each is not self),
        )  # fmt: skip

    # --- inside ----------------------------------------------------------------------------------

    def _start_writing(self) -> None:
        try:
            self._warn_of_other_hosts()
            codec_id(self.config.compression)  # so that a missing package is found now, not at the first flush
            if not self._shared:
                self._own_all()
                if self._replicas is None:
                    _check_still(self._files, self.path, self.config.partitions)  # before the locks were taken
                else:
                    self._replicas.begin([each.writer() for each in self._accesses])
            self._serving.apply()
            self._go_by_the_clock()
            if self._flusher is not None and self._files.real:
                self._serving.listen()
        except BaseException:
            self.close()
            raise
        _in_child.add(self._abandon_in_child)
        at_exit.add(self.close)

    def _use(self, config: TopicConfig) -> None:
        """Use these policies from now on."""
        self.config = config
        self._retention.use(config)
        for access in self._accesses:
            access.use(config)
        self._go_by_the_clock()
        if self._flusher is not None:
            self._flusher.set_interval(config.flush.interval)

    def _go_by_the_clock(self) -> None:
        """Start a background thread if a policy needs one, and let it flush if there is an interval."""
        interval = self.config.flush.interval
        if self._flusher is None and self._wants_thread():
            self._flusher = Flusher(
                self._handles.writers,
                interval=interval,
                housekeeping=_housekeeper(self._accesses, self._retention),
                housekeeping_every=_HOUSEKEEPING_S,
            )
        self._handles.set_timer(None if interval is None else self._flusher)  # None: appending threads flush when due

    def _own_all(self) -> None:
        """Take the locks of all partitions."""
        try:
            for access in self._accesses:
                access.writer()
        except OSError as error:
            if not is_out_of_descriptors(error):
                raise
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            needed = len(self.partitions) * WRITER_DESCRIPTORS + 1  # a roll needs one more for a moment
            raise TooManyFilesError(self.path, error, needed, limit) from error

    def _warn_of_other_hosts(self) -> None:
        for path in [self.path] if self._replicas is None else self._replicas.paths:
            kind = network_file_system(self._files, path)
            if kind is not None:
                logger.warning(
                    "%s is on %s: the locks that keep a second writer out may not reach other hosts; "
                    "write from one only",
                    path, kind,
                )  # fmt: skip

    def _wants_thread(self) -> bool:
        # Python 3.12 and later warn when a process with threads forks, so a thread needs a reason.
        policy = self.config.retention
        if not self._background:
            return False
        clocked = (self.config.flush.interval, self.config.segment_age, policy.age, policy.bytes)
        return any(each is not None for each in clocked) or policy.keep_free > 0


opens_paths(partial(Topic.open, mode="r"))


def topics(directory: str | os.PathLike[str]) -> list[catalog.TopicInfo]:
    """The topics in a directory, sorted by name. The list is empty if there are none.

    A damaged topic is listed with its error. Raises `FileNotFoundError` if there is no such directory, and
    `NotADirectoryError` if it is a file. `ValueError` for a URI: what is in an object store is not listed.
    """
    if is_remote(os.fsdecode(directory)):
        raise ValueError("topics are listed in directories, and this is a URI; open each topic by a URI of its own")
    return catalog.describe_all(REAL, directory, groups_of=group_names)


def open_topic(
    path: str | os.PathLike[str],
    *,
    files: Files = REAL,
    clock: Callable[[], int] = SYSTEM,
    mode: Literal["a", "r"] = "a",
    shared: bool = False,
    create: bool = True,
    partitions: int | None = None,
    partitioner: Literal["crc32", "murmur2"] | Partitioner | None = None,
    donors: Iterable[str | os.PathLike[str]] = (),
    tier: str | os.PathLike[str] | None = None,
    replicas: Sequence[str | os.PathLike[str]] | None = None,
    acks: Acks | None = None,
    replica_timeout: float = 1.0,
    lose: Sequence[str | os.PathLike[str]] = (),
    background: bool = True,
    **policies: Unpack[Policies],
) -> Topic:
    """`Topic.open` on simulated files, or by a simulated clock: for simulations and tests.

    `files` is a file system, such as those of `loglib.testing`. `clock` is a function that returns the time of
    day in microseconds UTC, which is believed, or a `loglib.system.clock.Clock`. Without `background` the topic has no
    thread, and does nothing by the clock. The rest is as in `Topic.open`.
    """
    if mode not in ("a", "r"):
        raise ValueError(f"mode must be 'a' or 'r', not {mode!r}")
    by_default = {name for name, value in policies.items() if value is None} - {"segment_age", "producer_expiry"}
    given: dict[str, Any] = {name: value for name, value in policies.items() if name not in by_default}
    if partitions is not None:
        given["partitions"] = partitions
    if partitioner is not None:
        given["partitioner"] = name_of(partitioner)
    text = os.fsdecode(path)
    place = None
    is_place = is_remote(text) or (mode == "r" and text and copy_role.is_tier(files, os.path.abspath(text)))
    if is_place or tier is not None:
        from .offload.tier_files import Tier, TierOverlayFiles, TierOverlayLog, tier_at

        place = tier_at(files, text, mode, tier)
    absolute, files = (topic_path(path), files) if place is None else (place.path, place.files)
    copies = donor_paths(donors, absolute)
    if copies and mode != "r":
        raise ValueError("donors are for mode='r'; loglib.heal makes a damaged topic whole")
    if copies and place is not None:
        raise ValueError(f"donors are for a topic's directory; {place.path} is a place of uploaded segments")
    wish = None
    if replicas is not None:
        from .copies.assemble import assemble
        from .copies.chain import check_apart
        from .copies.roster import ReplicaRequest, check_new

        wish = ReplicaRequest.of(absolute, replicas, acks, replica_timeout, lose)
    if wish is None and (acks is not None or lose):
        raise ValueError("acks and lose are about the directories in replicas=[...], which is missing")
    if wish is not None and (shared or mode == "r"):
        why = "a topic with replicas has one writer: shared=True is for topics without"
        raise ValueError(why if shared else "mode='r' reads any directory of a topic; leave replicas=[...] out")
    if wish is not None:
        check_apart(files, [absolute, *wish.paths])
    found = copy_role.read(files, absolute) if mode == "a" else None
    is_member = found is not None and found.role == copy_role.REPLICA
    if mode == "a" and not (is_member and wish is not None):
        copy_role.check_leader(files, absolute)
    described = topic_file.read(files, absolute)
    if described is None:
        if wish is not None:
            check_new(files, wish)
        if mode == "r" or not create:
            raise FileNotFoundError(errno.ENOENT, _what_is_here(files, absolute, mode), absolute)
        topic_file.create(files, absolute, TopicConfig(**given), now=clock())
        described = topic_file.read(files, absolute)
    if described is None:
        raise FileNotFoundError(errno.ENOENT, "the topic was removed while it was opened", absolute)
    log_id, config = described
    changed = {name: value for name, value in given.items() if value != getattr(config, name)}
    for name, value in changed.items():
        if name in FIXED or mode == "r":
            raise ConfigConflictError(absolute, name, value, getattr(config, name), fixed=name in FIXED)
    function = partitioner if callable(partitioner) else BUILT_IN.get(config.partitioner)
    make_log: Callable[[Any, str, Identity], Log] = Log
    if place is not None:
        make_log = place.make_log
    elif tier is not None:
        files, make_log = TierOverlayFiles(files, absolute, log_id, Tier(files, os.fsdecode(tier))), TierOverlayLog
    assembled: ReplicaSet | None = None
    if wish is not None and (wish.paths or is_member):
        assembled = assemble(files, absolute, wish, log_id, config, now=clock())
    try:
        topic = Topic(
            absolute, log_id, config,
            mode=mode, shared=shared, partitioner=function, files=files, clock=clock, donors=copies,
            opened_by=(absolute if place is None else place.given, None if tier is None else os.fsdecode(tier)),
            make_log=make_log, replicas=assembled, grows=place is None and (shared or mode == "r"),
            background=background,
        )  # fmt: skip
    except BaseException:
        if assembled is not None:
            assembled.close()
        raise
    if changed:
        try:
            topic.alter(**cast(Policies, changed))
        except BaseException:
            topic.close()
            raise
    return topic


def _with_tail(*given: Any, **named: Any) -> pa.RecordBatchReader:
    from .offload.archive_reader import with_tail

    return with_tail(*given, **named)


def _floors_of(files: Files, topic_path: str, archive: str, log_id: bytes, *, before_us: int) -> ArchiveFloors:
    from .offload.safe_offset import floors_of

    return floors_of(files, topic_path, archive, log_id, before_us=before_us)


def _access(path: str, log_id: bytes, donors: Iterable[str], number: int, **common: Any) -> Access:
    """The access to a partition. It refers to no topic, which would keep itself open."""
    directory, identity = topic_file.partition_directory(path, number), Identity.of(log_id, number)
    access = Access(directory=directory, identity=identity, **common)
    access.log.donors = tuple([topic_file.partition_directory(each, number) for each in donors])
    return access


def _logs_of(topics: Sequence[OpenTopic]) -> dict[TopicPartition, Log]:
    """The logs of these topics as they are now."""
    return {TopicPartition(each.name, access.id): access.log for each in topics for access in each._accesses}  # noqa: SLF001


def _check_still(files: Files, path: str, partitions: int) -> None:
    """Refuse to write if a copy has taken the topic's place since it was opened, or with an old number of partitions.

    Keys would go to other partitions than with other writers.
    """
    copy_role.check_leader(files, path)
    described = topic_file.read(files, path)
    if described is not None and described[1].partitions != partitions:
        raise LogMovedError(path, f"has other than the {partitions} partitions that it was opened with")


def _committed_of(reference: weakref.ref[Topic], group: str) -> dict[int, int]:
    topic = reference()
    if topic is None:
        return {}
    found = administration.committed(topic._group_directory(group))  # noqa: SLF001
    return {each.partition: offset for each, offset in found.items() if each.topic == topic.name}


def _what_is_here(files: Files, path: str, mode: str) -> str:
    """The reason why there is no topic to open, in words."""
    if names := catalog.names(files, path):
        return f"no topic but a directory of topics: open one of {', '.join(names)}"
    return "no topic here; mode='a' makes one" if mode == "r" else "no topic here; create=True makes one"


def _housekeeper(accesses: tuple[Access, ...], retention: RetentionRunner) -> Callable[[], None]:
    def keep_house() -> None:
        for access in accesses:
            access.keep_house()
        retention.run_for_others()

    return keep_house


def _open_for_reading(path: str, tier: str | None, donors: tuple[str, ...]) -> Topic:
    return Topic.open(path, mode="r", donors=donors, tier=tier)
