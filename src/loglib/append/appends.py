"""Appends: how records come into a topic: one by one, many together, or as columns.

Invariant: an append that raises says which of its records are in the log (`appended`) and which are not
(`not_appended`). Records of one key go to one partition, in their order.

Threads: safe for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import cache, partial
from typing import Any

from ..config.extras import named_extras
from ..errors import LogError
from ..format.columns import Columns
from ..format.header import NO_PRODUCER, Producer
from ..format.record import OffsetRange, Position, new_tuple
from ..log.producers import parse_producer
from ..system.failures import report_not_appended, together
from ..system.process import try_each
from .batching import Load, append_loads, append_numbered, weigh
from .handles import Handles
from .live_policies import LivePolicies
from .placement import Placement
from .record_arguments import HeadersLike, gather_columns, record_columns
from .writer import Writer


class Appends:
    """A topic as something to append to."""

    _policies: LivePolicies
    _clock: Callable[[], int]  # microseconds UTC
    _handles: Handles
    _placement: Placement

    def partition_of(self, key: bytes) -> int:
        """The number of the partition to which records with this key go.

        Raises `ValueError` if the topic has a partitioner of its own, and it was opened without the function.
        """
        return self._placement.of_key(key)

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
        many with one number. Without a key and a partition, the name and the number choose the partition.

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
        elif (
            type(key) is bytes is type(value) and partition is None and timestamp is None and headers is None
            and not sync and producer is None
        ):  # fmt: skip
            partition = self._placement.of_key(key)
            having = self._placement.open_writer_of(partition)
            if having is not None and not having.publication.in_progress and not having.has_lock():
                with having.lock:
                    position = having.batch.add_keyed(value, key)
                if position is not None:
                    return position
        if sync and not self._policies.watched:
            self._policies.look()
        config = self._policies.config
        if (
            (sync or config.flush.records == 1) and type(value) is bytes and key is None and partition is None
            and timestamp is None and headers is None and producer is None
        ):  # fmt: skip
            if writer is None or len(self._handles.writers) > 1:
                writer = self._placement.choose(1, len(value))
            offset = writer.append_lone(value, sync=sync)
            if offset is not None:
                return new_tuple(Position, (writer.partition, offset))
        columns, size = record_columns(value, key, timestamp, headers, limit_bytes=config.max_record_bytes)
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
        return Position(writer.partition, append_numbered(writer, load, self._policies.config, by, sync=sync))

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
        limit_bytes = self._policies.config.max_record_bytes
        columns, size = record_columns(value, key, timestamp, headers, limit_bytes=limit_bytes)
        if partition is None and columns.keys is not None and columns.keys[0] is not None:
            partition = self._placement.of_key(columns.keys[0])
        if partition is None:
            writer: Writer | None = self._placement.choose_at_once(1, size)
        else:
            writer = self._placement.open_writer_of(partition)
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
                load = weigh(columns, self._policies.config)
                size = self._policies.config.batch_bytes if load.size_bytes is None else load.size_bytes
                writer = self._placement.choose(count, size)
                loads[writer] = load
                groups = {writer.partition: columns}
            else:
                keyless = cache(lambda: self._placement.of_no_key(by))
                groups = self._placement.spread(columns, partition, keyless)
                for number, group in groups.items():
                    loads[self._placement.writer_of(number)] = weigh(group, self._policies.config, by)
            return append_loads(loads, self._policies.config, by)
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
        stream is taken in pieces of about 2 MiB; of the first 16 MiB all records are checked before one is appended.

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
        with named_extras():
            from .tables import Names, Route, append_table

        by = NO_PRODUCER if producer is None else parse_producer(producer)
        number = None if partition is None or isinstance(partition, str) else self._placement.number(partition)
        names = Names(value, key, timestamp, headers, partition if isinstance(partition, str) else None)
        route = Route(
            self._placement.writer_of, number, self._placement.count, self._policies.config.partitioner,
            self._placement.partitioner, partial(self._placement.of_no_key, by),
        )  # fmt: skip
        return append_table(data, names, route, self._policies.config, by, self._clock)

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
        if not self._policies.watched:
            self._policies.look()
