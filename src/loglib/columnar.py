"""Columnar: a log as a table, for what works on columns: DuckDB, Polars, pandas, DataFusion, pyarrow.

Invariant: a stream reads while it is read, in constant memory. A table that is asked for as a whole is in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .cursor import BLOCK_BYTES
from .reader import OnGap, Reader, StartLike

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

__all__ = ["Columnar"]


class Columnar(ABC):
    """What can be read as a table: a topic, or a partition of it."""

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
    ) -> pa.RecordBatchReader:
        """The records from `start` to `end` as a `pyarrow.RecordBatchReader`, which reads while it is read.

        `start` and `end` are as in `read`: a time is found by bisection, and nothing before it is read. `columns` and
        `batch_bytes` are as in `Reader.arrow`. For a stream that does not end: `follow(...).arrow()`.
        """
        return self.read(start, end, on_gap=on_gap).arrow(columns, batch_bytes=batch_bytes)

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
        """All records and all columns, for what takes Arrow streams: `duckdb.sql("select ... from topic")`."""
        return self.arrow().__arrow_c_stream__(requested_schema)
