"""Polars scan: a part of a topic as a `polars.LazyFrame`, which reads what a query needs.

Invariant: the rows are those of a full read and the query after it, up to the ends that were found when the frame was
made. A predicate is always applied to the rows. What it says about partitions, offsets and times besides shortens the
read: other partitions are not read, nor offsets before and after, nor what comes before the first event of a time.
There is no end by time, since event times need not rise.

Only comparisons with constants that are joined by `&` shorten the read, and what depends on the partition alone. Polars
shows a predicate as JSON, in a form of its own that may change: what is not recognized is only applied.

Threads: Polars calls a frame's source from its own threads; each call has a reader of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.times import to_datetime
from ..errors import CorruptLogError, InvalidOffsetError
from .log import Log
from .reader import Reader

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa


_FLIPPED = {"Gt": "Lt", "GtEq": "LtEq", "Lt": "Gt", "LtEq": "GtEq", "Eq": "Eq"}
_MOST = 1 << 63


class Bounds(NamedTuple):
    """The places outside of which no row fits a predicate."""

    partitions: frozenset[int]
    first: int = 0  # offset
    stop: int = _MOST
    since_us: int | None = None  # no row has an earlier event time


class Scan(NamedTuple):
    """The source of a frame: its logs, their ends, and how they are read."""

    logs: Callable[[], Sequence[Log]]
    read: Callable[[dict[int, int]], Reader]  # makes a reader up to offsets by partition
    ends: dict[int, int]  # those of the frame
    stream: Callable[[Reader, Sequence[str]], pa.RecordBatchReader]  # takes columns of the schema from a reader
    schema: pa.Schema

    def frame(self) -> pl.LazyFrame:
        """The lazy frame."""
        import polars as pl
        from polars.io.plugins import register_io_source

        return register_io_source(self.rows, schema=pl.DataFrame(self.schema.empty_table()).schema)

    def rows(
        self, with_columns: list[str] | None, predicate: pl.Expr | None, limit: int | None, _: int | None
    ) -> Iterator[pl.DataFrame]:
        """The rows that Polars asks for: columns, a predicate, and how many rows there are before the predicate."""
        import polars as pl

        columns = self.schema.names if with_columns is None else with_columns
        needed = dict.fromkeys([*columns, *(() if predicate is None else predicate.meta.root_names())])
        bounds = bounds_of(predicate if limit is None else None, self.ends)  # a limit counts rows outside, too
        with self._reader(bounds) as reader:
            for batch in self.stream(reader, list(needed)):
                frame = pl.DataFrame(batch)
                if limit is not None:
                    frame = frame.head(limit)
                    limit -= len(frame)
                yield (frame if predicate is None else frame.filter(predicate)).select(columns)
                if limit == 0:
                    break

    def _reader(self, bounds: Bounds) -> Reader:
        """A reader of the records that may lie in the bounds."""
        logs = [log for log in self.logs() if log.partition in self.ends]  # none that was added since
        ends = {each.partition: min(_place(each, bounds.stop, _MOST), self.ends[each.partition]) for each in logs}
        reader = self.read(ends)
        wanted = [log for log in logs if log.partition in bounds.partitions]
        reader.seek({**dict.fromkeys(reader.tell(), "end"), **ends, **self._starts(reader, bounds, wanted)})
        return reader

    def _starts(self, reader: Reader, bounds: Bounds, logs: Sequence[Log]) -> dict[int, int]:
        begins = reader.tell()
        if bounds.since_us is not None:
            reader.seek({log.partition: to_datetime(bounds.since_us) for log in logs})
        since = reader.tell()
        first = {log.partition: _place(log, bounds.first, 0) for log in logs}
        return {number: max(begins[number], since[number], offset) for number, offset in first.items()}


def _place(log: Log, offset: int, otherwise: int) -> int:
    """The offset of the first record at or after an offset; `otherwise` if damage hides it.

    For an offset outside of the log, its start or its end.
    """
    mark = log.mark()
    offset = min(max(offset, mark.log_start_offset), mark.flushed_end)
    try:
        log.batch_base(offset, mark)
    except InvalidOffsetError as error:
        return error.next_offset
    except CorruptLogError:
        return otherwise
    return offset


def bounds_of(predicate: pl.Expr | None, partitions: Collection[int]) -> Bounds:
    """The bounds of the rows that fit the predicate, in a topic of these partitions."""
    import polars as pl

    bounds = Bounds(frozenset(partitions))
    if predicate is None:
        return bounds
    try:
        for each in _joined_by_and(predicate):
            names = set(each.meta.root_names())
            if names == {"partition"}:
                numbers = pl.DataFrame({"partition": sorted(bounds.partitions)}, {"partition": pl.Int32})
                bounds = bounds._replace(partitions=frozenset(numbers.filter(each)["partition"]))
            for name, op, value in _comparisons(_node(each)):
                bounds = _narrowed(bounds, name, op, value)
    except (pl.exceptions.PolarsError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return bounds
    return bounds


def _node(expression: pl.Expr) -> Any:
    return json.loads(expression.meta.serialize(format="json"))


def _joined_by_and(expression: pl.Expr) -> Iterator[pl.Expr]:
    """The parts of an expression that are joined by `&`."""
    if _node(expression).get("BinaryExpr", {}).get("op") == "And":
        for each in expression.meta.pop():
            yield from _joined_by_and(each)
    else:
        yield expression


def _comparisons(node: Any) -> Iterator[tuple[str, str, Any]]:
    """Column, operator and constant of the comparisons that an expression is; none for any other expression."""
    match node:
        case {"BinaryExpr": {"left": {"Column": name}, "op": op, "right": {"Literal": {"Scalar": value}}}}:
            yield name, op, value
        case {"BinaryExpr": {"left": {"Literal": {"Scalar": value}}, "op": op, "right": {"Column": name}}}:
            yield name, _FLIPPED.get(op, ""), value
        case {
            "Function": {
                "input": [{"Column": name}, {"Literal": {"Scalar": low}}, {"Literal": {"Scalar": high}}],
                "function": {"Boolean": {"IsBetween": {"closed": closed}}},
            }
        }:
            yield name, "GtEq" if closed in ("Both", "Left") else "Gt", low
            yield name, "LtEq" if closed in ("Both", "Right") else "Lt", high


def _narrowed(bounds: Bounds, name: str, op: str, value: Any) -> Bounds:
    """The bounds with those of one comparison."""
    match name, value:
        case "offset", {"Int64": int(offset)}:
            if op in ("Gt", "GtEq", "Eq"):
                bounds = bounds._replace(first=max(bounds.first, offset + (op == "Gt")))
            if op in ("Lt", "LtEq", "Eq"):
                bounds = bounds._replace(stop=min(bounds.stop, offset + (op != "Lt")))
        case "timestamp", {"Datetime": [int(time_us), "Microseconds", *_]} if op in ("Gt", "GtEq", "Eq"):
            to_datetime(time_us)
            bounds = bounds._replace(since_us=max(bounds.since_us or time_us, time_us))
    return bounds
