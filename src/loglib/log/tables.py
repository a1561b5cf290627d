"""Tables: a log as a table, for programs that work on columns: DuckDB, Polars, pandas, DataFusion, pyarrow.

Invariant: a stream reads the log while it is read, in constant memory. A whole table is in memory.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from .cursor import BLOCK_BYTES
from .log import Log
from .reader import OnGap, Reader, StartLike

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

__all__ = ["Columnar"]


class Part(Protocol):
    """A partition: its log, and the clock by which ages count."""

    log: Log
    clock: Callable[[], int]


class ReadArchive(Protocol):
    """Reads records from an archive up to its end, and after it with `read` from the logs."""

    def __call__(
        self,
        archive: str | os.PathLike[str],
        read: Callable[[StartLike, StartLike], Reader],
        logs: Sequence[Log],
        start: StartLike,
        end: StartLike | None,
        *,
        columns: Sequence[str] | None,
        batch_bytes: int,
        now_us: int,
    ) -> pa.RecordBatchReader: ...


class Columnar(ABC):
    """Something that can be read as a table: a topic, or a partition of it."""

    _read_archive: ReadArchive  # handed in by the topic, since archives are built on logs

    @abstractmethod
    def read(self, start: StartLike = "begin", end: StartLike | None = None, *, on_gap: OnGap = "raise") -> Reader:
        """A reader that ends at `end`, or at the present end."""

    def arrow(
        self,
        start: StartLike = "begin",
        end: StartLike | None = None,
        *,
        columns: Sequence[str] | None = None,
        batch_bytes: int = BLOCK_BYTES,
        on_gap: OnGap = "raise",
        archive: str | os.PathLike[str] | None = None,
    ) -> pa.RecordBatchReader:
        """The records from `start` to `end` as a `pyarrow.RecordBatchReader`, which reads while it is read.

        `start` and `end` are as in `read`: a time is found by bisection, and nothing before it is read. `columns` and
        `batch_bytes` are as in `Reader.arrow`. For a stream that does not end: `follow(...).arrow()`.

        With `archive`, a directory or a URI of `loglib.archive`, the records up to the end of the archive come from its
        files, partition after partition, and all later ones from the log. So the stream has the records that retention
        has dropped. Raises `LogError` if it is another topic's archive, and `OffsetOutOfRangeError` if
        retention has dropped records that are not in the archive.
        """
        if archive is not None:
            return self._with_past(archive, start, end, columns, batch_bytes, on_gap)
        return self.read(start, end, on_gap=on_gap).arrow(columns, batch_bytes=batch_bytes)

    @abstractmethod
    def _parts(self) -> Sequence[Part]:
        """The partitions whose logs are read."""

    def _with_past(
        self, archive: str | os.PathLike[str], start: StartLike, end: StartLike | None,
        columns: Sequence[str] | None, batch_bytes: int, on_gap: OnGap,
    ) -> pa.RecordBatchReader:  # fmt: skip
        parts = self._parts()
        return self._read_archive(
            archive, lambda start, end: self.read(start, end, on_gap=on_gap), [each.log for each in parts],
            start, end, columns=columns, batch_bytes=batch_bytes, now_us=parts[0].clock(),
        )  # fmt: skip

    def to_pandas(
        self,
        start: StartLike = "begin",
        end: StartLike | None = None,
        *,
        columns: Sequence[str] | None = None,
        on_gap: OnGap = "raise",
    ) -> pd.DataFrame:
        """The records as a `pandas.DataFrame`, all in memory. Needs the extra [arrow], and pandas."""
        return self.arrow(start, end, columns=columns, on_gap=on_gap).read_pandas()

    def to_polars(
        self,
        start: StartLike = "begin",
        end: StartLike | None = None,
        *,
        columns: Sequence[str] | None = None,
        on_gap: OnGap = "raise",
    ) -> pl.DataFrame:
        """The records as a `polars.DataFrame`, all in memory. Needs the extra [arrow], and Polars."""
        import polars as pl

        return pl.DataFrame(self.arrow(start, end, columns=columns, on_gap=on_gap))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """All records and all columns, for readers of Arrow streams: `duckdb.sql("select ... from topic")`."""
        return self.arrow().__arrow_c_stream__(requested_schema)
