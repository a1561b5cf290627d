"""format/arrow.py: a batch as Arrow holds what its columns hold, over the same memory."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from batch_contents import arrow_rows, columns, rows
from builders import EVERYTHING, NOW, PLAIN, batch_of, calm, chained, encoded, header_of, read_back, write_segment
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import run_python
from loglib.format import arrow
from loglib.format.columns import BadColumns, Columns
from loglib.format.header import layout


@pytest.mark.parametrize("codec", [0, 1, 2, 3], ids=["none", "zlib", "lz4", "zstd"])
@settings(calm, max_examples=60)
@given(columns(), st.integers(0, 1 << 40).map(lambda n: 8 * n))
def test_arrow_holds_what_the_columns_hold(codec: int, given_columns: Columns, base_offset: int) -> None:
    found = batch_of(encoded(given_columns, base_offset, codec=codec), base_offset)
    table = found.to_arrow()
    assert table.schema == arrow.SCHEMA
    assert arrow_rows(table) == rows(found)


def test_part_of_a_batch_becomes_the_same_part() -> None:
    found = batch_of(encoded(EVERYTHING))
    for start in range(6):
        for end in range(6):
            part = found.between(start, end)
            assert arrow_rows(part.to_arrow()) == rows(part)


def test_columns_can_be_picked_in_any_order() -> None:
    found = batch_of(encoded(EVERYTHING))
    whole = found.to_arrow()
    for names in (["value"], ["offset", "key"], ["headers", "timestamp", "partition"], list(arrow.SCHEMA.names)):
        table = found.to_arrow(names)
        assert table.schema.names == names
        for name in names:
            assert table.column(name).equals(whole.column(name))
    with pytest.raises((ValueError, KeyError), match="nothing"):
        found.to_arrow(["nothing"])


def test_keys_and_values_are_not_copied(tmp_path: Path) -> None:
    (found,) = read_back(write_segment(tmp_path, chained([Columns([b"v" * 1000] * 50, [b"k" * 100] * 50)])))
    memory = np.frombuffer(found._data, np.uint8)
    first, last = memory.ctypes.data, memory.ctypes.data + memory.size
    table = found.to_arrow()
    for name in ("key", "value"):
        for buffer in table.column(name).buffers():
            assert buffer is None or first <= buffer.address < last


def test_arrow_array_outlives_its_batch(tmp_path: Path) -> None:
    (found,) = read_back(write_segment(tmp_path, chained([EVERYTHING])))
    table = found.to_arrow()
    expected = rows(found)
    del found
    assert arrow_rows(table) == expected


def test_body_that_ends_early_is_refused() -> None:
    stored = encoded(PLAIN)
    with pytest.raises(BadColumns, match="the end of the body"):
        header = header_of(stored)
        arrow.record_batch(0, header, layout(header), stored[:114], 112)


def test_timestamps_are_utc_microseconds() -> None:
    table = batch_of(encoded(PLAIN)).to_arrow()
    assert table.column("timestamp").type == pa.timestamp("us", tz="UTC")
    assert table.column("timestamp")[0].value == NOW


def test_library_without_arrow_does_not_import_it() -> None:
    heavy = {"pyarrow", "numpy", "pyspark", "lz4", "zstandard"}
    assert not heavy & set(run_python("import sys, loglib; print(*sys.modules)").split())


def test_columns_that_batches_share_are_small_together() -> None:
    """They were kept by number: 16 batches of a million records left 200 MB behind."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0], pa.total_allocated_bytes()
        for number, count in enumerate([*range(16_300, 16_384), *range(300_000, 300_016)]):
            found = batch_of(encoded(Columns([b""] * count)))
            found.partition = number
            table = found.to_arrow()
            assert table.column("key").null_count == table.column("headers").null_count == count
            assert table.column("partition")[count - 1].as_py() == number
        del found, table
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before[0] < 10_000_000
        assert pa.total_allocated_bytes() - before[1] < 3_000_000
    finally:
        tracemalloc.stop()
