"""What batches may hold, as Hypothesis draws it, and how tests look into them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from conftest import NOW
from loglib import Batch
from loglib.format.columns import Columns

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


@st.composite
def columns(draw: st.DrawFn) -> Columns:
    """Any columns that the library may be given."""
    count = draw(st.integers(1, 20))
    small = st.binary(max_size=draw(st.sampled_from([0, 1, 8, 300])))
    uniform = st.binary(min_size=5, max_size=5)
    item = draw(st.sampled_from([small, uniform, st.none() | small, st.none()]))
    pairs = st.lists(st.tuples(st.text(max_size=8), small), max_size=3).map(tuple)

    def column(items: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | st.lists(items, min_size=count, max_size=count))

    values = draw(st.lists(item, min_size=count, max_size=count))
    headers = column(draw(st.sampled_from([pairs, st.just(draw(pairs))])))  # often all records share theirs
    return Columns(values, column(item), column(draw(st.sampled_from([INT64, st.just(NOW)]))), headers)


def rows(found: Batch) -> list[tuple[object, ...]]:
    """What a batch's records say, as Arrow's Python values: no headers are null."""
    return [
        (
            record.key, record.value, record.partition, record.offset, record.timestamp,
            [{"key": name, "value": value} for name, value in record.headers] or None,
        )
        for record in found.records()
    ]  # fmt: skip


def arrow_rows(table: pa.RecordBatch) -> list[tuple[object, ...]]:
    table.validate(full=True)
    times = table.column("timestamp").cast(pa.int64())
    others = [times if name == "timestamp" else table.column(name) for name in table.schema.names]
    return list(zip(*(column.to_pylist() for column in others), strict=True))


def split(stored: bytes) -> list[bytes]:
    """The bytes of each batch."""
    batches, place = [], 0
    while place < len(stored):
        length = int.from_bytes(stored[place + 12 : place + 16], "little")
        batches.append(stored[place : place + length])
        place += length
    return batches
