"""Readable: the ways to read a log: records, batches, and tables for DuckDB, Polars, pandas, DataFusion, pyarrow.

Invariant: a stream reads the log while it is read, in constant memory. A whole table is in memory.

Threads: safe for all; each reader belongs to one thread.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..config.extras import named_extras
from ..config.quantities import Duration
from ..format.batch import Batch
from .arrow_stream import Decode, decoder_of
from .cursor import BLOCK_BYTES
from .log import Log
from .lookup import StartLike, ends_together
from .reader import OnDamage, Reader

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa


class Sources(NamedTuple):
    """The logs of a reader, and the clock by which ages count."""

    logs: Sequence[Log]
    clock: Callable[[], int]  # microseconds UTC
    track: Callable[[Callable[[str], object]], object]  # called with what ends the reader when the topic is closed
    logs_now: Callable[[], Sequence[Log]] | None = None  # the logs with those of partitions that were added since


class Readable(ABC):
    """A topic, or one partition of it, as something to read."""

    # `loglib.offload.archive_reader.with_tail`: handed in by the topic, since archives are built on logs.
    _read_archive: Callable[..., pa.RecordBatchReader]

    @abstractmethod
    def _sources(self) -> Sources:
        """The logs to read. `LogClosedError` if the topic is closed."""

    def read(
        self, start: StartLike = "begin", end: StartLike | None = None, *, on_damage: OnDamage = "raise"
    ) -> Reader:
        """A reader that ends at `end`, or at the present end.

        `start` and `end` are "begin", "end", an aware datetime, an age (a timedelta, or "-15m"), an offset if there
        is one partition, or a mapping of partitions to these.

        A reader that comes to damaged bytes raises `CorruptLogError`. With `on_damage="skip"` it continues at the next
        whole batch, and `Reader.gaps` has the skipped offsets.
        """
        logs, clock, track, _ = self._sources()
        return Reader(logs, start, end=end, on_damage=on_damage, clock=clock, track=track)

    def follow(
        self,
        start: StartLike = "end",
        timeout: Duration | None = None,
        *,
        spin: Duration | None = None,
        on_damage: OnDamage = "raise",
    ) -> Reader:
        """A reader that waits for more: until it is closed, or until `timeout` passes without a record.

        With `spin`, a duration, the reader reads the watermarks again and again for that long before it sleeps. A
        record of another process then comes in about half the time. The price: one core while it looks, and other
        Python threads of this process hardly run. Where no core is free, records come later than without. The reader
        never spins on a partition that this process writes.

        Partitions that are added meanwhile are read from their begin, within a second.
        """
        logs, clock, track, logs_now = self._sources()
        return Reader(
            logs, start, follow=True, timeout=timeout, spin=spin, on_damage=on_damage, clock=clock,
            track=track, logs_now=logs_now,
        )  # fmt: skip

    def batches(
        self, start: StartLike = "begin", end: StartLike | None = None, *, on_damage: OnDamage = "raise"
    ) -> Iterator[Batch]:
        """Whole columns, from `start` to `end` or to the present end."""
        return self.read(start, end, on_damage=on_damage).batches()

    def arrow(
        self,
        start: StartLike = "begin",
        end: StartLike | None = None,
        *,
        columns: Sequence[str] | None = None,
        batch_bytes: int = BLOCK_BYTES,
        on_damage: OnDamage = "raise",
        archive: str | os.PathLike[str] | None = None,
        decode: Decode | None = None,
        schema: pa.Schema | pa.DataType | Mapping[str, pa.DataType | str] | None = None,
    ) -> pa.RecordBatchReader:
        """The records from `start` to `end` as a `pyarrow.RecordBatchReader`, which reads while it is read.

        `start` and `end` are as in `read`: a time is found by bisection, and nothing before it is read. `columns`,
        `batch_bytes`, `decode` and `schema` are as in `Reader.arrow`. For a stream that does not end:
        `follow(...).arrow()`.

        With `archive`, a directory or a URI of `loglib.offload.archive`, the records up to the end of the archive come
        from its files, partition after partition, and all later ones from the log. So the stream has the records that
        retention has dropped. Raises `LogError` if it is another topic's archive, and `OffsetOutOfRangeError` if
        retention has dropped records that are not in the archive. JSON then needs a `schema`.
        """
        if archive is not None:
            if decode == "json" and schema is None:
                raise ValueError('decode="json" with an archive needs schema=: the fields of its records')
            sources = self._sources()
            return self._read_archive(
                archive, partial(self.read, on_damage=on_damage), sources.logs, start, end,
                columns=columns, batch_bytes=batch_bytes, decoder=decoder_of(columns, decode, schema),
                now_us=sources.clock(),
            )  # fmt: skip
        reader = self.read(start, end, on_damage=on_damage)
        return reader.arrow(columns, batch_bytes=batch_bytes, decode=decode, schema=schema)

    def to_pandas(
        self,
        start: StartLike = "begin",
        end: StartLike | None = None,
        *,
        columns: Sequence[str] | None = None,
        on_damage: OnDamage = "raise",
        decode: Decode | None = None,
        schema: pa.Schema | pa.DataType | Mapping[str, pa.DataType | str] | None = None,
    ) -> pd.DataFrame:
        """The records as a `pandas.DataFrame`, all in memory. Needs the extra [arrow], and pandas.

        With `decode="json"`, each field of the values is a column, such as `value.page`.
        """
        with named_extras():
            import pandas  # noqa: F401  If it is missing, it is missed before anything is read.

        stream = self.arrow(start, end, columns=columns, on_damage=on_damage, decode=decode, schema=schema)
        return stream.read_all().flatten().to_pandas()

    def to_polars(
        self,
        start: StartLike = "begin",
        end: StartLike | None = None,
        *,
        columns: Sequence[str] | None = None,
        on_damage: OnDamage = "raise",
        decode: Decode | None = None,
        schema: pa.Schema | pa.DataType | Mapping[str, pa.DataType | str] | None = None,
    ) -> pl.DataFrame:
        """The records as a `polars.DataFrame`, all in memory. Needs the extra [arrow], and Polars.

        With `decode="json"`, `value` is a struct; `unnest("value")` makes columns of its fields.
        """
        with named_extras():
            import polars as pl

        return pl.DataFrame(
            self.arrow(start, end, columns=columns, on_damage=on_damage, decode=decode, schema=schema)
        )

    def scan_polars(
        self,
        start: StartLike = "begin",
        end: StartLike | None = None,
        *,
        on_damage: OnDamage = "raise",
        decode: Decode | None = None,
        schema: pa.Schema | pa.DataType | Mapping[str, pa.DataType | str] | None = None,
    ) -> pl.LazyFrame:
        """The records as a `polars.LazyFrame`, which reads what a query needs. Needs the extra [arrow], and Polars.

        Columns that the query does not use are not decoded. `filter` by constants of `partition`, `offset` and
        `timestamp` shortens the read: other partitions are not read, nor offsets outside, nor what comes before the
        first event of a time. A limit ends it. All of this changes what is read, and never the result.

        The end is found now, so each use of the frame has the same records. `decode` and `schema` are as in
        `Reader.arrow`; JSON needs a schema.
        """
        if decode == "json" and schema is None:
            raise ValueError('decode="json" of a scan needs schema=: the fields of its records')
        decoder = decoder_of(None, decode, schema)
        with named_extras():
            import polars  # noqa: F401  Likewise.

            from ..format.arrow import SCHEMA
            from .polars_scan import Scan

        logs, clock, *_ = self._sources()
        ends = ends_together(
            logs, end, now_us=clock(), past_damage=lambda log: on_damage == "skip" or bool(log.donors)
        )  # fmt: skip
        return Scan(
            logs=lambda: self._sources().logs,
            read=lambda ends: self.read(start, ends, on_damage=on_damage),
            ends=ends,
            stream=lambda reader, columns: reader.arrow(columns, decode=decode, schema=schema),
            schema=SCHEMA if decoder is None else decoder.schema,
        ).frame()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """All records and all columns, for readers of Arrow streams: `duckdb.sql("select ... from topic")`."""
        return self.arrow().__arrow_c_stream__(requested_schema)
